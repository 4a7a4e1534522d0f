"""The fully asynchronous trainer: generation continues while the policy is trained and its weights are synced.

| loop | consumes | waits for | is unblocked by | produces |
|---|---|---|---|---|
| admission (``rollout/dispatcher.py``) | prompts | capacity | a weight sync | group tasks |
| group task | one prompt | the generator | engines | a finished group |
| trainer (``train``) | B finished groups | groups that the staleness policy releases | a finished group | a policy version |
| weight sync (with ``overlap_weight_sync``) | a copy of the weights | the engines | their answers | capacity |

Everything that a step does with its groups is inherited from the synchronous trainer.
"""

from __future__ import annotations

from collections.abc import Sequence

from skyrl_train.rollout.buffer import BufferedGroup
from skyrl_train.step_metrics import TrainedStep
from skyrl_train.trainer import PPOTrainer
from skyrl_train.types import RolloutGroup


class FullyAsyncTrainer(PPOTrainer):
    """Trains on groups as they finish, within the limits of ``trainer.fully_async``.

    With ``generate_ahead_steps=0`` it equals the synchronous trainer: the same groups, order and versions.
    """

    def start_generation(self) -> None:
        """Start to admit groups in the background."""
        self.rollout.dispatcher.start()

    async def next_batch(self) -> list[BufferedGroup] | None:
        """Return the groups of the next step as soon as the staleness policy releases them."""
        return await self.wait_for_groups()

    async def train_step(self) -> TrainedStep | None:
        """Run one optimizer step. With ``streaming_min_groups``, accumulate gradients while the last groups are generated; then
        neither ``next_batch`` nor ``update_policy`` is called.
        """
        if self.plan.streaming_min_groups is None:
            return await super().train_step()
        return await self.train_step_in_parts(self.plan.streaming_min_groups)

    async def train_step_in_parts(self, min_groups: int) -> TrainedStep | None:
        """Run one optimizer step on parts of the batch as they finish. None: the run was asked to stop.

        Consumes finished groups; waits for ``min_groups`` of them; unblocked by a group that ends; produces gradients, and
        the update when the batch is complete.
        """
        clock = self.components.clock
        self.phase.enter(f"trains step {self.global_step + 1} on groups as they finish")
        batch: list[RolloutGroup] = []
        waited_s = updating_s = trained_s = 0.0
        # Each part adds gradients as soon as it is there; the optimizer steps once the batch is complete.
        while (missing := self.plan.policy_mini_batch_size - len(batch)) > 0:
            waiting_since = clock()
            with self.components.events.span("wait_for_batch", self.global_step + 1):
                chosen = await self.wait_for_groups(committed=batch, at_least=min(min_groups, missing))
            if chosen is None:  # drop the gradients; the groups are still in the buffer
                await self.training.run(self.components.backend.discard)
                self.samples.discard()
                return None
            part = await self.rollout.buffer.load(chosen)
            started = clock()
            trained_s += await self.training.run(self.accumulate, part)
            # From here on these groups have slots of the step: the next wait asks only for the missing ones.
            batch += part
            waited_s += started - waiting_since
            updating_s += clock() - started
        started = clock()
        # Only this call changes the weights: an error before it leaves the policy as it was.
        metrics = await self.training.update(self.finish_update)
        updating_s += clock() - started
        trained_s += metrics["time/train"]
        times = {
            "time/wait_for_batch": waited_s,
            "time/prepare_update": updating_s - trained_s,
            "time/train": trained_s,
        }
        return self.finish_step(batch, {**metrics, **times})

    def finish_update(self) -> dict[str, float]:
        """Make the optimizer step with everything accumulated and return its metrics. Runs in the training thread."""
        metrics, trained_s = self.timed(self.components.backend.finish, self.global_step + 1)
        self.samples.collect(self.components.backend)
        return {**metrics, "time/train": trained_s}

    def accumulate(self, part: Sequence[RolloutGroup]) -> float:
        """Add the gradients of ``part`` to the current step, and return the backend's seconds. Runs in the training thread."""
        _, trained_s = self.timed(self.components.backend.accumulate, self.minibatch(part))
        return trained_s

"""The fully asynchronous trainer: generation never stops while the policy is trained and published.

| loop | consumes | waits for | is unblocked by | produces |
|---|---|---|---|---|
| admission (``rollout/workers``) | prompts | capacity | a publication | group tasks |
| group task | one prompt | the generator | engines | a finished group |
| trainer (``train``) | B finished groups | groups that the straggler policy lets it take | a finished group | a policy version |
| publication (where it overlaps) | a staged version | the engines | their answers | capacity |

Everything that a step does with its groups is the synchronous trainer's.
"""

from __future__ import annotations

from collections.abc import Sequence

from skyrl_train.rollout.buffer import BufferedGroup
from skyrl_train.rollout.group import RolloutGroup
from skyrl_train.step_reports import TrainedStep
from skyrl_train.trainer import PPOTrainer


class FullyAsyncTrainer(PPOTrainer):
    """Trains on groups as they finish, within ``trainer.fully_async``'s depth and bound.

    With depth 0 it is the synchronous trainer: the same groups in the same order under the same versions.
    """

    def start_generation(self) -> None:
        """Groups are admitted in the background from now on."""
        self.rollout.workers.start()

    async def next_batch(self) -> list[BufferedGroup] | None:
        """The groups of the next step as soon as the straggler policy lets the trainer take them."""
        return await self.wait_for_groups()

    async def train_step(self) -> TrainedStep | None:
        """One optimizer step; with ``streaming_min_groups`` its gradient grows while the last groups are generated."""
        if self.plan.streaming_min_groups is None:
            return await super().train_step()
        return await self._train_step_by_parts(self.plan.streaming_min_groups)

    async def _train_step_by_parts(self, min_groups: int) -> TrainedStep | None:
        self.phase.enter(f"step {self.global_step + 1} trains on groups as they come")
        batch: list[RolloutGroup] = []
        waited_s = trained_s = 0.0
        while (missing := self.plan.policy_mini_batch_size - len(batch)) > 0:
            waiting_since = self.parts.clock()
            chosen = await self.wait_for_groups(committed=batch, at_least=min(min_groups, missing))
            if chosen is None:  # its groups are still in the buffer
                await self.training.run(self.parts.backend.discard)
                return None
            part = await self.rollout.buffer.load(chosen)
            started = self.parts.clock()
            await self.training.run(self._accumulate, part)
            batch += part
            waited_s += started - waiting_since
            trained_s += self.parts.clock() - started
        started = self.parts.clock()
        metrics = await self.training.update(self.parts.backend.finish, self.global_step + 1)
        times = {"time/wait_for_batch": waited_s, "time/train": trained_s + self.parts.clock() - started}
        return self.book(batch, {**metrics, **times})

    def _accumulate(self, part: Sequence[RolloutGroup]) -> None:
        self.parts.backend.accumulate(self.minibatch(part))

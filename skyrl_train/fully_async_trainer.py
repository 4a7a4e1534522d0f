"""The fully asynchronous trainer: generation never stops while the policy is trained and published.

| loop | consumes | waits for | is unblocked by | produces |
|---|---|---|---|---|
| admission (``rollout/workers``) | prompts | capacity | the publication of a step | group tasks |
| group task | one prompt | the generator | engines | a finished group |
| trainer (``train``) | B finished groups | a batch that the straggler policy lets it take | a finished group | a policy version |

Everything that a step does with its groups is the synchronous trainer's.
"""

from __future__ import annotations

from skyrl_train.rollout.group import RolloutGroup
from skyrl_train.trainer import PPOTrainer


class FullyAsyncTrainer(PPOTrainer):
    """Trains on groups as they finish, within ``trainer.fully_async``'s depth and bound.

    With depth 0 it is the synchronous trainer: the same groups in the same order under the same versions.
    """

    def start_generation(self) -> None:
        """Groups are admitted in the background from now on."""
        self.workers.start()

    async def next_batch(self) -> list[RolloutGroup] | None:
        """The groups of the next step in ordinal order; None when the run was asked to stop.

        Consumes finished groups; waits until a batch may be trained; unblocked by a group that finishes or fails; produces
        the batch.
        """
        batch: list[RolloutGroup] | None = None

        def ready() -> bool:
            nonlocal batch
            if self.stop_requested or self.workers.error is not None:
                return True
            batch = self.staleness.select(self.buffer)
            return batch is not None

        await self.changed.wait_until(ready)
        self.workers.raise_if_failed()
        return None if self.stop_requested else batch

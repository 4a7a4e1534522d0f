"""One step off: the next batch is generated with the present weights while the policy trains on the last one.

    step t        | train on batch t          | publish
    engines       | generate batch t + 1      | (nothing is in flight)

No request ever sees two policies, and every group is exactly one step old when it trains (the first batch: none). The
price: each step lasts as long as the slower of the two, and the engines idle behind the longest response of a batch.
"""

from __future__ import annotations

from skyrl_train.rollout.buffer import BufferedGroup
from skyrl_train.trainer import PPOTrainer


class OneStepOffTrainer(PPOTrainer):
    """Depth 1 and bound 1, and weights change only between two batches of requests."""

    def start_generation(self) -> None:
        """Two batches under the first policy, then one after each publication."""
        self.rollout.workers.start()

    async def next_batch(self) -> list[BufferedGroup] | None:
        """The batch that was generated under the policy before this one."""
        return await self.wait_for_groups()

    async def publish(self) -> dict[str, float]:
        """Publishes once the batch that is being generated has ended. When the run is to stop, the checkpoint does: weights
        that changed under the requests in flight would give them two policies."""
        await self.rollout.workers.idle()
        self.raise_if_failed()
        if self.stop_requested:
            return {}
        return await super().publish()

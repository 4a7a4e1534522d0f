"""Partial rollouts for a trainer and engines that share devices: the longest responses are interrupted.

    generate oversubmit_factor * B groups ──B finished──> interrupt ──engines sleep──> train
        ^                                                                               │
        └── the others continue token by token under the new weights <──sync_weights────┘

The idea is APR (asynchronous partial rollouts, verl). An interrupted response keeps its tokens with their versions and
log-probs. It continues first, because engines serve the oldest policy version first and batches are chosen by deadline.
"""

from __future__ import annotations

from skyrl_train.rollout.buffer import BufferedGroup
from skyrl_train.trainer import PPOTrainer


class PartialRolloutTrainer(PPOTrainer):
    """Alternates generation and training. A group may take several generation phases within the staleness bound.

    Engines that can sleep free their memory while the policy trains.
    """

    always_colocated = True

    def start_generation(self) -> None:
        """Keep as many groups in flight as ``oversubmit_factor`` allows."""
        self.rollout.dispatcher.start()

    async def next_batch(self) -> list[BufferedGroup] | None:
        """Return the first groups that finish. The others are interrupted before the step trains."""
        return await self.wait_for_groups()

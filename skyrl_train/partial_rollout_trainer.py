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
from skyrl_train.types import PauseMode


class PartialRolloutTrainer(PPOTrainer):
    """Alternates generation and training. A group may take several generation phases within the staleness bound."""

    def start_generation(self) -> None:
        """Keep as many groups in flight as ``oversubmit_factor`` allows."""
        self.rollout.dispatcher.start()

    async def next_batch(self) -> list[BufferedGroup] | None:
        """Return the first groups that finish and interrupt the others. Engines that can sleep free their memory."""
        chosen = await self.wait_for_groups()
        if chosen is not None:
            await self.interrupt_generation()
        return chosen

    async def interrupt_generation(self) -> None:
        """Pause all requests and put the engines to sleep, where they can."""
        await self.evaluation.hold()  # its requests must not reach the next policy
        client = self.components.client
        # A sleeping engine loses its KV cache, so its requests are aborted and resubmitted with their tokens.
        sleeps = client.capabilities.sleep
        await client.pause_generation(PauseMode.ABORT if sleeps else PauseMode(self.config.generator.pause_mode))
        await client.sleep()

    async def sync_weights(self) -> dict[str, float]:
        """Wake the engines, sync the weights, and let all requests continue."""
        # Sleeping engines have freed their memory, so they cannot receive weights.
        await self.components.client.wake_up()
        return await super().sync_weights()

"""Partial rollouts for trainer and engines that share their devices: the longest responses are not waited for.

    generate: oversubmit_factor * B groups ──B have finished──> interrupt ──engines sleep──> train
        ^                                                                                      │
        └──────────── the rest goes on, token by token, under the new weights <──publish───────┘

The idea is APR's (verl's asynchronous partial rollouts). An interrupted response keeps its tokens with their versions and
log-probs; it is continued first, because engines serve the oldest policy version first and batches are chosen by deadline.
"""

from __future__ import annotations

from skyrl_train.inference.interface import PauseMode
from skyrl_train.rollout.buffer import BufferedGroup
from skyrl_train.trainer import PPOTrainer


class PartialRolloutTrainer(PPOTrainer):
    """Alternates between generation and training; a group may take several generation phases, within the bound S."""

    def start_generation(self) -> None:
        """As many groups are under way as ``oversubmit_factor`` says, from now on."""
        self.rollout.workers.start()

    async def next_batch(self) -> list[BufferedGroup] | None:
        """The first groups that finish; all others are interrupted, and engines that can sleep give their memory back."""
        chosen = await self.wait_for_groups()
        if chosen is not None:
            await self._interrupt()
        return chosen

    async def _interrupt(self) -> None:
        await self.evaluation.hold()  # its requests must not meet the next policy
        client = self.parts.client
        # A sleeping engine has no KV cache: its requests leave it, and come back with their tokens.
        sleeps = client.capabilities.sleep
        await client.pause_generation(PauseMode.ABORT if sleeps else PauseMode(self.config.generator.pause_mode))
        await client.sleep()

    async def publish(self) -> dict[str, float]:
        """Wakes the engines, publishes, and lets everything go on."""
        await self.parts.client.wake_up()
        return await super().publish()

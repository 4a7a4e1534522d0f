"""Publishes a policy version: gather, transfer, load, with their times (SEMANTICS 6).

backend ──gather (in a thread)──> staging copy ──transfer (engines serve)──> receive buffers ──load (paused)──> model
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.interface import PauseMode
from skyrl_train.publication.base import WeightTransport

if TYPE_CHECKING:
    import torch


class WeightPublisher:
    """Carries weights from the trainer to every engine of a client."""

    def __init__(
        self,
        client: InferenceEngineClient,
        transport: WeightTransport,
        pause_mode: PauseMode,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._client = client
        self._transport = transport
        self._pause_mode = pause_mode
        self._clock = clock

    async def publish(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> dict[str, float]:
        """Publishes ``weights`` as ``version``; they must not change until this returns.

        Returns:
            ``time/gather``, ``time/transfer``, ``time/pause`` in seconds.

        Raises:
            PublicationError: no engine took the update; all serve the weights that they had.
        """
        started = self._clock()
        update = await asyncio.to_thread(self._transport.gather, weights, version)
        gathered = self._clock()
        await self._client.receive_weights(update)
        transferred = self._clock()
        paused_s = await self._client.load_weights(update, self._pause_mode)
        return {"time/gather": gathered - started, "time/transfer": transferred - gathered, "time/pause": paused_s}

    def close(self) -> None:
        """Frees the staging areas."""
        self._transport.close()

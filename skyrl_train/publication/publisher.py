"""Publishes a policy version: gather, transfer, load, with their times (SEMANTICS 6).

backend ──stage (in a thread)──> staging copy ──transfer (engines serve)──> receive buffers ──load (paused)──> model
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skyrl_train.errors import PublicationError
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.interface import PauseMode
from skyrl_train.inference.weight_update import WeightUpdate
from skyrl_train.publication.base import WeightTransport

if TYPE_CHECKING:
    import torch


# Copies weights to a staging area of the transport, as a version: ``TrainingBackend.stage``, or ``weights_of``.
WeightSource = Callable[[WeightTransport, int], WeightUpdate]


def weights_of(weights: Iterable[tuple[str, torch.Tensor]]) -> WeightSource:
    """Weights of this process, by name."""
    return lambda transport, version: transport.gather(weights, version)


@dataclass(frozen=True)
class Staged:
    """A policy version on its way: its staging copy, and how long that took."""

    update: WeightUpdate
    gather_s: float


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

    async def publish(self, stage: WeightSource, version: int) -> dict[str, float]:
        """Publishes the weights of ``stage`` as ``version``; they must not change until this returns.

        Returns:
            ``time/gather``, ``time/transfer``, ``time/pause`` in seconds; ``publication/changed_fraction`` where known.

        Raises:
            PublicationError: no engine took the update; all serve the weights that they had.
        """
        return await self.deliver(await self.gather(stage, version))

    async def gather(self, stage: WeightSource, version: int) -> Staged:
        """Has the weights copied to a staging area; they may change when this has returned.

        Raises:
            PublicationError: there is no room for the copy.

        The copy stays valid until the next but one ``gather``: deliver it before that.
        """
        started = self._clock()
        try:
            update = await asyncio.to_thread(stage, self._transport, version)
        except (OSError, RuntimeError) as error:  # no room for the copy: shared memory, or the device's
            raise PublicationError(f"the weights of version {version} cannot be copied: {error}") from error
        return Staged(update, self._clock() - started)

    async def deliver(self, staged: Staged) -> dict[str, float]:
        """Brings a staged version to the engines, which serve it when this has returned; else as ``publish``."""
        started = self._clock()
        await self._client.receive_weights(staged.update)
        transferred = self._clock()
        paused_s = await self._client.load_weights(staged.update, self._pause_mode)
        times = {"time/gather": staged.gather_s, "time/transfer": transferred - started, "time/pause": paused_s}
        changed = staged.update.changed_fraction
        return times if changed is None else {**times, "publication/changed_fraction": changed}

    def close(self) -> None:
        """Frees the staging areas."""
        self._transport.close()

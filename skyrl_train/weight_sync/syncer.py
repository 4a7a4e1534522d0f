"""Sends a policy version to the engines: gather, transfer, load (``docs/design/semantics.md``, section 6).

source ──gather (in a thread)──> staging copy ──transfer (engines serve)──> receive buffers ──load (paused)──> model

``sync`` returns when the engines serve the version. ``begin`` returns when the weights are gathered: transfer and load run
beside the next training step, and ``wait`` returns when they have ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from skyrl_train.errors import EngineDeadError, WeightSyncError
from skyrl_train.events.log import NO_EVENTS, EventLog
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.update import WeightTransport, WeightUpdate

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# Gathers the current weights through a transport, as a version: ``TrainingBackend.stage``, or ``weights_of``. It blocks.
WeightSource = Callable[[WeightTransport, int], WeightUpdate]


def weights_of(named_weights: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> WeightSource:
    """Return the source of weights that lie in this process, such as ``model.named_parameters``."""
    return lambda transport, version: transport.gather(named_weights(), version)


class UpdatableEngines(Protocol):
    """The part of ``InferenceEngineClient`` that a sync calls. The client is above this package and imports it."""

    @property
    def serving(self) -> bool:
        """Whether an engine takes requests."""

    async def wait_for_engine(self) -> None:
        """Return when an engine takes requests."""

    async def receive_weights(self, update: WeightUpdate) -> None:
        """Copy the update to the engines' receive buffers while they serve."""

    async def load_weights(self, update: WeightUpdate, mode: PauseMode) -> float:
        """Load the update while the engines are paused; return the seconds of the pause."""


@dataclass(frozen=True)
class StagedWeights:
    """A gathered policy version, and the seconds that the gathering took."""

    update: WeightUpdate
    gather_s: float


class WeightSyncer:
    """Sends weights from the trainer to every engine of a client, one version at a time.

    Args:
        client: sends to every engine of its pool.
        transport: how the bytes travel. The syncer closes it.
        source: gathers the trainer's current weights. They must not change while it runs.
        pause_mode: what happens to running requests during the load.
        events: the record of the run.
        replica: loads each update into a replica of the policy, beside the engines. None: there is none.

    Attributes:
        transport: the same.
    """

    def __init__(
        self,
        client: UpdatableEngines,
        transport: WeightTransport,
        source: WeightSource,
        pause_mode: PauseMode,
        clock: Callable[[], float] = time.perf_counter,
        events: EventLog = NO_EVENTS,
        replica: Callable[[WeightUpdate], Awaitable[None]] | None = None,
    ) -> None:
        self._client = client
        self.transport = transport
        self._source = source
        self._pause_mode = pause_mode
        self._clock = clock
        self._events = events
        self._replica = replica
        self._replica_loads: asyncio.Future[None] | None = None  # the last update
        self._task: asyncio.Task[dict[str, float]] | None = None  # the sync that ``begin`` started

    async def sync(self, version: int) -> dict[str, float]:
        """Gather the weights as ``version`` and send them; return when the engines serve them.

        Returns:
            ``time/gather``, ``time/transfer``, ``time/pause`` in seconds; ``weight_sync/changed_fraction`` where known.

        Raises:
            NoEngineError, WeightSyncError: see :meth:`send`.
        """
        return await self.send(await self.gather(version))

    async def begin(
        self,
        version: int,
        *,
        before_send: Callable[[], Awaitable[dict[str, float]]],
        on_served: Callable[[int], Awaitable[None]],
        on_end: Callable[[], None],
    ) -> dict[str, float]:
        """Wait for the sync under way, gather the weights as ``version``, and send them in the background.

        Args:
            before_send: awaited before the engines' weights change; returns metrics.
            on_served: awaited with the version once the engines serve it.
            on_end: called when the sync has ended, also after a failure.

        Returns:
            The times of the sync that was under way, as :meth:`wait`. The weights may change now.
        """
        # One sync at a time: two would swap versions in an unknown order.
        metrics = await self.wait()
        staged = await self.gather(version)

        async def send() -> dict[str, float]:
            try:
                times = await before_send()
                times |= await self.send(staged)
                await on_served(version)
                return times
            finally:
                on_end()

        self._task = asyncio.create_task(send(), name=f"weight-sync-{version}")
        return metrics

    async def wait(self) -> dict[str, float]:
        """Wait for the sync that :meth:`begin` started.

        Returns:
            The times of that sync, as :meth:`sync` returns them, with ``time/wait_for_weight_sync``; {} if there was none.

        Raises:
            Exception: the failure of the sync.
        """
        if self._task is None:
            return {}
        started = self._clock()
        # A failure leaves the task in place, so that ``error`` still shows it.
        with self._events.span("wait_for_weight_sync"):
            times = await self._task
        self._task = None
        return {**times, "time/wait_for_weight_sync": self._clock() - started}

    @property
    def error(self) -> BaseException | None:
        """The failure of the sync under way, which :meth:`wait` will raise."""
        task = self._task
        return task.exception() if task is not None and task.done() and not task.cancelled() else None

    async def gather(self, version: int) -> StagedWeights:
        """Copy the weights to a staging copy. They may change when this has returned.

        The copy stays valid until the next but one ``gather``: send it before that.

        Raises:
            WeightSyncError: there is no room for the copy.
        """
        # The replica reads the staging copy of an update, and nothing else waits for it.
        if self._replica_loads is not None:
            await self._replica_loads
        started = self._clock()
        try:
            # In a thread, because copying a large model takes seconds and rollouts run on this loop.
            with self._events.span("gather", version):
                update = await asyncio.to_thread(self._source, self.transport, version)
        except (OSError, RuntimeError) as error:  # out of shared memory, or of the device's memory
            raise WeightSyncError(f"the weights of version {version} cannot be copied: {error}") from error
        return StagedWeights(update, self._clock() - started)

    async def send(self, staged: StagedWeights) -> dict[str, float]:
        """Transfer a staged version and load it. Returns as :meth:`sync`.

        If all engines are being restarted, it waits for the first one that is back. If all die meanwhile, or do not answer, it
        waits likewise and sends the version once more.

        Raises:
            NoEngineError: no engine came back in time, or none can come back.
            WeightSyncError: no engine took the update; those that serve have the weights that they had.
        """
        update = staged.update
        again = False
        if self._replica is not None:
            self._replica_loads = asyncio.ensure_future(self._replica(update))
        times = {"time/gather": staged.gather_s}
        while "time/pause" not in times:
            await self._client.wait_for_engine()
            started = self._clock()
            try:
                with self._events.span("transfer", update.version):
                    await self._client.receive_weights(update)
                times["time/transfer"] = self._clock() - started
                times["time/pause"] = await self._client.load_weights(update, self._pause_mode)
            except WeightSyncError as error:
                # A living engine rejects this version. (A dead one may be back already.)
                rejected = self._client.serving and not isinstance(error.__cause__, EngineDeadError)
                if again or rejected:
                    raise
                again = True
                logger.warning("policy version %d will be sent once more: %s", update.version, error)
        logger.info(
            "policy version %d reached the engines: %.3f s to gather, %.3f s to transfer, %.3f s of pause",
            *(update.version, *times.values()),
        )
        if update.changed_fraction is not None:
            times["weight_sync/changed_fraction"] = update.changed_fraction
        return times

    async def stop(self) -> None:
        """Cancel the sync under way and return when it has ended, however it ends."""
        tasks = [task for task in (self._task, self._replica_loads) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """Free the staging copies."""
        self.transport.close()

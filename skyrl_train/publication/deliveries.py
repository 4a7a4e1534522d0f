"""Policy versions on their way to the engines, one at a time, beside whatever the trainer does next.

begin(version) ──gather──> returns; the weights may move
                      └──deliver──> served ──> delivered() returns its times
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from skyrl_train.concurrency import Signal
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.publication.publisher import Staged, WeightPublisher, WeightSource


class Deliveries:
    """Publishes what ``stage`` copies through ``publisher``.

    Args:
        hold: awaited before the engines' weights change; returns metrics.
        served: awaited, with the version, once the engines serve it.
        changed: notified when a delivery has ended, well or not.
    """

    def __init__(
        self,
        publisher: WeightPublisher,
        client: InferenceEngineClient,
        stage: WeightSource,
        *,
        hold: Callable[[], Awaitable[dict[str, float]]],
        served: Callable[[int], Awaitable[None]],
        changed: Signal,
        clock: Callable[[], float],
    ) -> None:
        self._publisher = publisher
        self._client = client
        self._stage = stage
        self._hold = hold
        self._served = served
        self._changed = changed
        self._clock = clock
        self._task: asyncio.Task[dict[str, float]] | None = None

    @property
    def error(self) -> BaseException | None:
        """What ended the delivery under way."""
        task = self._task
        return task.exception() if task is not None and task.done() and not task.cancelled() else None

    async def publish(self, version: int) -> None:
        """Brings ``version`` to the engines at once, outside of any step."""
        await self._publisher.publish(self._stage, version)

    async def begin(self, version: int) -> dict[str, float]:
        """Waits for the delivery before, copies the weights and sends them on; returns the times of the one before."""
        metrics = await self.delivered()
        staged = await self._publisher.gather(self._stage, version)
        self._task = asyncio.create_task(self._deliver(staged, version), name=f"publication-{version}")
        return metrics

    async def delivered(self) -> dict[str, float]:
        """Returns when no publication is on its way; the times of the last one."""
        if self._task is None:
            return {}
        started = self._clock()
        metrics = await self._task
        self._task = None
        return {**metrics, "time/wait_for_publication": self._clock() - started}

    async def _deliver(self, staged: Staged, version: int) -> dict[str, float]:
        try:
            metrics = await self._hold()
            if not self._client.serving:  # one that is started again takes these weights as well
                await self._client.wait_for_engine()
            metrics |= await self._publisher.deliver(staged)
            await self._served(version)
            return metrics
        finally:
            self._changed.notify()

    def cancel(self) -> None:
        """Stops waiting for the engines; :meth:`ended` returns when that is done."""
        if self._task is not None:
            self._task.cancel()

    async def ended(self) -> None:
        """Returns when nothing is on its way, however it ended."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

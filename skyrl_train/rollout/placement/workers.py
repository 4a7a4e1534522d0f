"""A fixed number of workers, each with its own copy of the work and one call at a time."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from skyrl_train.concurrency import cancel_within, gather_or_cancel
from skyrl_train.errors import SkyRLError
from skyrl_train.rollout.placement.base import CallFailed, Outcome, Place, Returned

CLOSE_LIMIT_S = 5.0


class WorkerGone(Exception):
    """A worker has ended in the middle of a call; the message says how."""


class Worker(ABC):
    """One copy of a work, somewhere."""

    @abstractmethod
    async def start(self) -> None:
        """Builds the work.

        Raises:
            SkyRLError: it cannot be built.
        """

    @abstractmethod
    async def call(self, argument: Any) -> Outcome:
        """Calls the work; one call at a time. A cancelled one leaves the worker unusable until it is stopped and started.

        Raises:
            WorkerGone: nobody is there any more.
        """

    @abstractmethod
    async def stop(self) -> None:
        """Ends the worker, whatever it is doing. Idempotent; it may be started again."""


class WorkerPlace(Place):
    """Workers that take turns.

    A call whose caller is cancelled goes on, and its worker is busy until it ends: a model need not be loaded again because
    a group was dropped. A worker that has ended, or did not end its call in time, is replaced when it is next needed.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = list(workers)
        self._idle: asyncio.LifoQueue[Worker] = asyncio.LifoQueue()
        self._stopped: set[Worker] = set()
        self._calls: set[asyncio.Task[Returned | CallFailed]] = set()

    async def start(self) -> None:
        await gather_or_cancel(worker.start() for worker in self._workers)
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def call(self, argument: Any, timeout_s: float | None = None) -> Any:
        worker = await self._idle.get()
        call = asyncio.create_task(self._take_turn(worker, argument, timeout_s), name="stage-call")
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        outcome = await asyncio.shield(call)
        if isinstance(outcome, CallFailed):
            raise outcome
        return outcome.value

    async def aclose(self) -> None:
        await cancel_within(list(self._calls), CLOSE_LIMIT_S)
        await asyncio.gather(*(worker.stop() for worker in self._workers))

    async def _take_turn(self, worker: Worker, argument: Any, timeout_s: float | None) -> Returned | CallFailed:
        """Raises nothing: the caller may be gone."""
        try:
            if worker in self._stopped:
                await worker.start()
                self._stopped.remove(worker)
            return await self._call(worker, argument, timeout_s)
        except SkyRLError as error:
            return CallFailed(f"its worker could not be started again: {error}")
        finally:
            self._idle.put_nowait(worker)

    async def _call(self, worker: Worker, argument: Any, timeout_s: float | None) -> Returned | CallFailed:
        try:
            async with asyncio.timeout(timeout_s):
                outcome = await worker.call(argument)
        except TimeoutError:
            failed = CallFailed(f"it took longer than {timeout_s} s")
        except WorkerGone as gone:
            failed = CallFailed(str(gone))
        else:
            return outcome if isinstance(outcome, Returned) else outcome.call_failed()
        self._stopped.add(worker)
        await worker.stop()
        return failed

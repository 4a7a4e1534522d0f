"""Stages that compute in this process: on the event loop, or in threads beside it."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol, runtime_checkable

from skyrl_train.concurrency import cancel_within
from skyrl_train.rollout.placement.base import CallFailed, Function, Outcome, Place, Raised, Work, outcome_of
from skyrl_train.rollout.placement.workers import Worker, WorkerGone
from skyrl_train.threads import LeavableThreads

CANCEL_GRACE_S = 5.0  # what a cancelled coroutine may take to clean up behind itself


class LoopPlace(Place):
    """The event loop itself, for an ``async def`` that waits for others most of the time. It sets no limit to calls at once.

    A call whose caller is cancelled is cancelled.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._function: Function | None = None

    async def start(self) -> None:
        self._function = _built(await asyncio.to_thread(outcome_of, self._work.build))

    async def call(self, argument: Any, timeout_s: float | None = None) -> Any:
        task = asyncio.create_task(self._await(argument), name="stage-call")
        try:
            await asyncio.wait([task], timeout=timeout_s)
        finally:
            in_time = task.done()
            await cancel_within([task], CANCEL_GRACE_S)
        if not in_time:
            raise CallFailed(f"it took longer than {timeout_s} s")
        if task.cancelled():
            raise CallFailed("it cancelled itself")
        error = task.exception()
        if isinstance(error, Exception | SystemExit):
            raise Raised.of(error).call_failed() from error
        return task.result()

    async def aclose(self) -> None:
        return

    async def _await(self, argument: Any) -> Any:
        assert self._function is not None, "started first"
        return await self._function(argument)


@runtime_checkable
class Closes(Protocol):
    """A work that holds something beside its memory."""

    def close(self) -> None:
        """Lets go of it, whatever the work is doing. Called once, in another thread than the work."""


class ThreadWorker(Worker):
    """A thread. One that hangs is left behind, and costs no more than itself."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._thread: LeavableThreads | None = None
        self._function: Function | None = None

    async def start(self) -> None:
        self._thread = LeavableThreads(max_threads=1, shutdown_limit_s=1.0)
        built = await asyncio.get_running_loop().run_in_executor(self._thread, outcome_of, self._work.build)
        self._function = _built(built)

    async def call(self, argument: Any) -> Outcome:
        if self._thread is None or self._function is None:
            raise WorkerGone("its thread was stopped")
        return await asyncio.get_running_loop().run_in_executor(self._thread, outcome_of, self._function, argument)

    async def stop(self) -> None:
        thread = self._thread
        held: object = self._function
        self._thread = self._function = None
        if isinstance(held, Closes):
            await asyncio.to_thread(held.close)
        if thread is not None:
            await asyncio.to_thread(thread.shutdown, cancel_futures=True)


def _built(outcome: Outcome) -> Function:
    if isinstance(outcome, Raised):
        raise outcome.start_failed()
    function: Function = outcome.value
    return function

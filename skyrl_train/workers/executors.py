"""Executors of stages: they call a function on the event loop, in threads, in processes, or in Ray actors.

    stage ──call(argument)──> Executor ──> a worker's copy of the Work ──> result, or CallFailed

The function is described as plain data and built where it runs; its errors come back as data too. An executor is a
:class:`LoopExecutor` or a :class:`WorkerPool`. A pool's worker is a :class:`ThreadWorker` or a :class:`RemoteWorker`, which is a
process or a Ray actor.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isawaitable
from typing import Any

from skyrl_train.config.import_path import import_name
from skyrl_train.errors import SkyRLError, StageError
from skyrl_train.runtime.concurrency import cancel_within, gather_or_cancel
from skyrl_train.runtime.process import DaemonThreadPool
from skyrl_train.workers.connection import Channel, WorkerConnection, WorkerLink
from skyrl_train.workers.messages import Call, Failure, Result
from skyrl_train.workers.process import ProcessLink

Function = Callable[[Any], Any]

CANCEL_LIMIT_S = 5.0  # time for a cancelled coroutine to clean up
CLOSE_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Work:
    """A function that a stage calls, as plain data.

    Args:
        factory: import path of what returns a function of one argument; called with ``arguments``, plain data.
    """

    factory: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


class CallFailed(Exception):
    """A call failed: the function raised (``failure``), took too long, or its worker died. ``reason`` completes "..., because".

    ``error``: what the function raised, if its class is one of :mod:`skyrl_train.errors`.
    """

    def __init__(self, reason: str | Failure) -> None:
        self.failure = reason if isinstance(reason, Failure) else None
        self.error = None
        if isinstance(reason, Failure):
            self.error = reason.own_error()
            self.add_note(reason.traceback)
            reason = f"it raised {reason.kind}: {reason.message}"
        self.reason = reason
        super().__init__(reason)


class WorkerGone(Exception):
    """A worker has ended in the middle of a call; the message says how."""


class WorkHost:
    """Builds a work and calls it, blocking: in a thread, or in the main thread of a process or a Ray actor.

    No event loop runs in that thread, so that functions may use ``asyncio.run`` and, in a main thread, ``signal.alarm``.
    """

    function: Function  # set by the call of ``start``

    def answer(self, call: Call) -> Result | Failure:
        """Run a call of the driver: ``start(work)`` builds the function, and ``run(argument)`` calls it.

        ``run_pickled`` takes and returns pickled values, so that a value that cannot be pickled fails its call and not the
        connection.
        """
        try:
            (argument,) = call.arguments
            if call.method == "start":
                self.function = import_name(argument.factory, "factory", "function")(**argument.arguments)
                return Result(call.id)
            value = self.function(pickle.loads(argument) if call.method == "run_pickled" else argument)
            if isawaitable(value):

                async def awaited(value: Awaitable[Any]) -> Any:
                    return await value

                value = asyncio.run(awaited(value))
            value = _read(value)
            return Result(call.id, pickle.dumps(value) if call.method == "run_pickled" else value)
        except (Exception, SystemExit) as error:  # user code may raise anything; only this call fails
            return Failure.of(call.id, error)


def _read(value: Any) -> Any:
    """Return ``value``; of an iterator, its values: a generator's code belongs to the worker, and cannot be pickled."""
    return list(value) if isinstance(value, Iterator) else value


def serve_work(channel: Channel) -> None:
    """Answer the calls of a parent process until it is gone."""
    host = WorkHost()
    while True:
        for message in channel.receive(block=True):
            if isinstance(message, Call):  # a driver that cancels a call kills the process
                channel.send([host.answer(message)])


def _raise_if_not_built(outcome: Result | Failure) -> None:
    """Raise why a work was not built: an error of ours as itself, any other as a StageError."""
    if isinstance(outcome, Failure):
        error = outcome.own_error()
        if error is None:
            error = StageError(f"{outcome.kind} was raised: {outcome.message}")
            error.add_note(outcome.traceback)
        raise error


# Workers --------------------------------------------------------------------------------------------------------------


class ThreadWorker:
    """A thread with one copy of a work. One that hangs is left behind, and costs no more than itself.

    A work that holds more than memory has a method ``close``, which is called once, in another thread than the work.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._thread: DaemonThreadPool | None = None
        self._host = WorkHost()

    async def start(self) -> None:
        """Build the work. See :meth:`RemoteWorker.start`."""
        self._thread, self._host = DaemonThreadPool(max_threads=1, shutdown_limit_s=1.0), WorkHost()
        _raise_if_not_built(await self._answer(Call(0, "start", (self._work,))))

    async def call(self, argument: Any) -> Any:
        """Call the work. See :meth:`RemoteWorker.call`."""
        outcome = await self._answer(Call(0, "run", (argument,)))
        if isinstance(outcome, Failure):
            raise CallFailed(outcome)
        return outcome.value

    async def stop(self) -> None:
        """End the worker. See :meth:`RemoteWorker.stop`."""
        # A hung call holds the thread, so ``close`` runs in another one and may unblock it.
        thread, self._thread = self._thread, None
        close = getattr(getattr(self._host, "function", None), "close", None)
        self._host = WorkHost()
        if close is not None:
            await asyncio.to_thread(close)
        if thread is not None:
            await asyncio.to_thread(thread.shutdown, cancel_futures=True)

    async def _answer(self, call: Call) -> Result | Failure:
        if self._thread is None:
            raise WorkerGone("its thread was stopped")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._host.answer, call)


class RemoteWorker:
    """A process or a Ray actor: no interpreter lock is shared, and what hangs or crashes takes nothing else with it.

    Args:
        new_link: makes the link to a new host, which serves a :class:`WorkHost`.
        start_timeout_s: limit of a start, waiting for resources included; None: no limit.
    """

    def __init__(self, work: Work, new_link: Callable[[], WorkerLink], start_timeout_s: float | None = None) -> None:
        self._work = work
        self._new_link = new_link
        self._start_timeout_s = start_timeout_s
        self._connection: WorkerConnection | None = None

    async def start(self) -> None:
        """Build the work.

        Raises:
            SkyRLError: it cannot be built.
        """
        self._connection = WorkerConnection(self._new_link(), gone_error=WorkerGone, call_error=CallFailed)
        try:
            await self._connection.start(self._work, timeout_s=self._start_timeout_s)
        except WorkerGone as gone:
            raise StageError(str(gone)) from gone
        except CallFailed as failed:
            if failed.failure is not None:
                _raise_if_not_built(failed.failure)
            raise

    async def call(self, argument: Any) -> Any:
        """Call the work; one call at a time. A cancelled call leaves the worker unusable until it is stopped and started.

        Raises:
            CallFailed: the work raised.
            WorkerGone: the worker has ended.
        """
        if self._connection is None:
            raise WorkerGone("it was stopped")
        try:
            pickled = pickle.dumps(argument)
        except Exception as error:  # user objects may raise anything when they are pickled
            raise CallFailed(Failure.of(0, error)) from error
        answer = await self._connection.call("run_pickled", pickled)
        try:
            return pickle.loads(answer)
        except Exception as error:  # likewise
            raise CallFailed(Failure.of(0, error)) from error

    async def stop(self) -> None:
        """End the worker, also in the middle of a call. Idempotent; it may be started again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.stop()


Worker = ThreadWorker | RemoteWorker


def process_worker(work: Work) -> RemoteWorker:
    """Return a worker in a child process."""
    return RemoteWorker(work, lambda: ProcessLink(f"{__name__}:{serve_work.__name__}"))


# Executors ------------------------------------------------------------------------------------------------------------


class LoopExecutor:
    """The event loop itself, for an ``async def`` that waits for others most of the time. Any number of calls run at once.

    A call whose caller is cancelled is cancelled. Methods: see :class:`WorkerPool`.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._host = WorkHost()

    async def start(self) -> None:
        _raise_if_not_built(await asyncio.to_thread(self._host.answer, Call(0, "start", (self._work,))))

    async def call(self, argument: Any, timeout_s: float | None = None) -> Any:
        async def answer() -> Any:
            return _read(await self._host.function(argument))

        # Wait instead of a timeout around the await: the call's own TimeoutError must not count as this limit.
        task = asyncio.create_task(answer(), name="stage-call")
        try:
            await asyncio.wait([task], timeout=timeout_s)
        finally:
            in_time = task.done()
            await cancel_within([task], CANCEL_LIMIT_S)
        if not in_time:
            raise CallFailed(f"it took longer than {timeout_s} s")
        if task.cancelled():
            raise CallFailed("it cancelled itself")
        error = task.exception()
        if isinstance(error, Exception | SystemExit):
            raise CallFailed(Failure.of(0, error)) from error
        return task.result()

    async def aclose(self) -> None:
        return


class WorkerPool:
    """Workers that take turns, each with its own copy of the work and one call at a time.

    A call whose caller is cancelled continues, and its worker is busy until it ends: a model need not be loaded again
    because a group was dropped. A worker that died or exceeded its time limit is replaced when it is next needed.

    All methods belong to the control loop and none blocks it.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = list(workers)
        self._idle: asyncio.LifoQueue[Worker] = asyncio.LifoQueue()
        self._stopped: set[Worker] = set()
        self._calls: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Build the work.

        Raises:
            SkyRLError: it cannot be built.
        """
        await gather_or_cancel(worker.start() for worker in self._workers)
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def call(self, argument: Any, timeout_s: float | None = None) -> Any:
        """Return what the work returns for ``argument``. ``timeout_s`` does not include the wait for a free worker.

        Raises:
            CallFailed: the work raised, took longer than ``timeout_s``, or its worker died.
        """
        worker = await self._idle.get()
        call = asyncio.create_task(self._call(worker, argument, timeout_s), name="stage-call")
        self._calls.add(call)
        call.add_done_callback(self._ended)
        return await asyncio.shield(call)

    async def aclose(self) -> None:
        """End everything. Idempotent, also without :meth:`start`."""
        await cancel_within(list(self._calls), CLOSE_LIMIT_S)
        await asyncio.gather(*(worker.stop() for worker in self._workers))

    def _ended(self, call: asyncio.Task[Any]) -> None:
        self._calls.discard(call)
        # The caller may be gone. Without this, asyncio would print the error of such a call.
        if not call.cancelled():
            call.exception()

    async def _call(self, worker: Worker, argument: Any, timeout_s: float | None) -> Any:
        try:
            # Started by the call that needs it, so that a worker that cannot start fails a call and not the run.
            if worker in self._stopped:
                await worker.start()
                self._stopped.remove(worker)
            try:
                async with asyncio.timeout(timeout_s):
                    return await worker.call(argument)
            except TimeoutError:
                failed = CallFailed(f"it took longer than {timeout_s} s")
            except WorkerGone as gone:
                failed = CallFailed(str(gone))
            # A call that overran may still run in the worker, so the worker is stopped before its next call.
            self._stopped.add(worker)
            await worker.stop()
            raise failed
        except SkyRLError as error:
            raise CallFailed(f"its worker could not be started again: {error}") from error
        finally:
            self._idle.put_nowait(worker)


Executor = LoopExecutor | WorkerPool

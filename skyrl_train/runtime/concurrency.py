"""asyncio helpers: conditions, gates for thousands of waiters, concurrent calls and streams, stubborn tasks."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Signal:
    """Wakes loops that wait for a condition on shared state, without polling or lost wake-ups.

    Call ``notify`` after every change of state that predicates read. All callers run on one event loop, and there is no
    ``await`` between the check of a predicate and the registration of its waiter, so a change is either seen by the check or
    wakes the waiter.
    """

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Let every waiter check its predicate again."""
        # Exchanged first: a waiter whose predicate is still false registers again.
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_until(self, predicate: Callable[[], bool]) -> None:
        """Wait until ``predicate()`` is true."""
        while not predicate():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)


class Gate:
    """Blocks callers while it is closed. Opening it releases them in the order of their arrival, a few per loop iteration.

    Ten thousand waiters released at once would block the event loop for as long as all of them run.
    """

    PER_TURN = 128

    def __init__(self) -> None:
        self.is_open = True  # callers pass
        self._waiters: dict[asyncio.Future[bool], None] = {}  # in the order of their arrival

    @property
    def waiting(self) -> int:
        """Number of waiting callers."""
        return len(self._waiters)

    def close(self) -> None:
        """Block callers, including those that an earlier opening has not released yet."""
        self.is_open = False

    def open(self) -> None:
        """Release callers. Idempotent."""
        if not self.is_open:
            self.is_open = True
            self._let_through()

    def abort_waiters(self) -> None:
        """Make the current waiters return False. The gate keeps its state."""
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(False)

    async def wait_open(self) -> bool:
        """Wait until the gate is open and return True, or return False after :meth:`abort_waiters`."""
        while not self.is_open:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters[waiter] = None
            try:
                if not await waiter:
                    return False
            finally:
                self._waiters.pop(waiter, None)
        return True

    def _let_through(self) -> None:
        if not self.is_open:
            return
        for waiter in list(itertools.islice(self._waiters, self.PER_TURN)):
            del self._waiters[waiter]
            if not waiter.done():
                waiter.set_result(True)
        # The rest in the next iteration of the loop, so that other tasks run in between.
        if self._waiters:
            asyncio.get_running_loop().call_soon(self._let_through)


async def gather_or_cancel(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run calls concurrently and return their results in order.

    The first failure cancels the other calls, waits for their end, and is raised. Unlike with ``asyncio.gather``, no call
    continues in the background; unlike with ``asyncio.TaskGroup``, the exception is not wrapped in a group. A single call runs
    in the caller's task.
    """
    calls = list(calls)
    if len(calls) == 1:
        return [await calls[0]]
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        # In the order of their ends, so that the first failure is seen at once.
        for next_done in asyncio.as_completed(tasks):
            await next_done
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return [task.result() for task in tasks]


async def cancel_within(tasks: Iterable[asyncio.Task[Any]], limit_s: float) -> list[asyncio.Task[Any]]:
    """Cancel tasks and wait for their end, at most ``limit_s`` seconds. Return the tasks that still run.

    These are abandoned: ``asyncio.run`` no longer waits for them, so that the program can end. Results and errors of all the
    tasks are ignored.
    """
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
        # Read, because asyncio logs an exception that was never retrieved.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
    running = [task for task in tasks if not task.done()]
    try:
        if running:
            await asyncio.wait(running, timeout=limit_s)
    finally:  # also if the caller is cancelled, which ends the waiting
        stubborn = [task for task in running if not task.done()]
        # asyncio.run waits for every registered task before it returns.
        for task in stubborn:
            asyncio._unregister_task(task)
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # the caller logs it
    return stubborn


async def close_within(closing: Coroutine[Any, Any, None], name: str, limit_s: float, grace_s: float = 5.0) -> None:
    """Run the closing of user code. After ``limit_s`` it is cancelled, and after ``grace_s`` abandoned.

    Raises:
        Exception: its error, if it ended in time.
    """
    task = asyncio.create_task(closing, name=name)
    await asyncio.wait([task], timeout=limit_s)
    if not task.done():
        logger.error("%s has not ended after %g s; cancelled and abandoned", name, limit_s)
        await cancel_within([task], grace_s)
    elif not task.cancelled():
        task.result()


async def close_all(closings: Iterable[Callable[[], Awaitable[None]]]) -> list[Exception]:
    """Close the parts one after the other, all of them even if some fail. Return their errors."""
    errors: list[Exception] = []
    for close in closings:
        try:
            await close()
        except Exception as error:
            logger.exception("a part of the run cannot be closed")
            errors.append(error)
    return errors


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield the items of all streams as they arrive, each with the index of its stream.

    Reads at most one item per stream ahead. The first failure closes all streams and is raised; closing this iterator closes
    them too.
    """
    waiting: dict[asyncio.Future[T], int] = {}
    try:
        if len(streams) == 1:
            async for item in streams[0]:
                yield 0, item
            return
        for number, stream in enumerate(streams):
            waiting[asyncio.ensure_future(anext(stream))] = number
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for future in [future for future in waiting if future in done]:
                number = waiting.pop(future)
                try:
                    item = future.result()
                except StopAsyncIteration:
                    continue
                yield number, item
                # Only after the item was consumed: this bounds the reading ahead to one item.
                waiting[asyncio.ensure_future(anext(streams[number]))] = number
    finally:
        for future in waiting:
            future.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()

"""What asyncio leaves open: waiting for a condition, a gate that thousands wait at, many calls or streams at once, and
ending tasks that do not want to end."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Signal:
    """Wakes loops that wait for a condition on shared state: no polling, no lost wake-up.

    ``notify`` after every change of the state that predicates look at. All callers run on one event loop and nothing
    awaits between a predicate's check and the registration of its waiter, so a change is either seen by the check or
    wakes the waiter.
    """

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Lets every waiter look at its predicate again."""
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_until(self, predicate: Callable[[], bool]) -> None:
        """Returns as soon as ``predicate()`` is true; at once if it is already."""
        while not predicate():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)


class Gate:
    """Holds callers up while it is closed. Opening it lets them through in the order in which they came, a few per turn
    of the event loop: ten thousand at once would hold up everything else for as long as all of them take.
    """

    PER_TURN = 128

    def __init__(self) -> None:
        self._open = True
        self._waiters: dict[asyncio.Future[bool], None] = {}  # in the order in which they came

    @property
    def is_open(self) -> bool:
        """Whether callers go through."""
        return self._open

    @property
    def waiting(self) -> int:
        """Callers that wait."""
        return len(self._waiters)

    def close(self) -> None:
        """Callers wait from now on, those included that an earlier opening has not let through yet."""
        self._open = False

    def open(self) -> None:
        """Lets callers through. Idempotent."""
        if not self._open:
            self._open = True
            self._let_through()

    def turn_away(self) -> None:
        """Sends those away who wait now; the gate stays as it is."""
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(False)

    async def passed(self) -> bool:
        """Returns True when the gate is open, at once if it is; False when turned away."""
        while not self._open:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters[waiter] = None
            try:
                if not await waiter:
                    return False
            finally:
                self._waiters.pop(waiter, None)
        return True

    def _let_through(self) -> None:
        if not self._open:
            return
        for waiter in list(itertools.islice(self._waiters, self.PER_TURN)):
            del self._waiters[waiter]
            if not waiter.done():
                waiter.set_result(True)
        if self._waiters:
            asyncio.get_running_loop().call_soon(self._let_through)


async def gather_or_cancel(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs calls at once and returns their results in order.

    The first failure cancels the others, waits until they have ended, and is raised itself: unlike ``asyncio.gather``
    nothing runs on behind the caller's back, unlike ``asyncio.TaskGroup`` the caller sees the exception and not a group. A
    single call runs in the caller's task.
    """
    calls = list(calls)
    if len(calls) == 1:
        return [await calls[0]]
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        for next_done in asyncio.as_completed(tasks):
            await next_done
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return [task.result() for task in tasks]


async def cancel_within(tasks: Iterable[asyncio.Task[Any]], limit_s: float) -> list[asyncio.Task[Any]]:
    """Cancels tasks and waits for their end, at most ``limit_s`` seconds; returns those that go on regardless.

    Those are abandoned: they are no longer among the tasks that ``asyncio.run`` waits for, so that the program can end
    without them. What any of the tasks returns or raises now concerns nobody.
    """
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
        task.add_done_callback(_look_at)
    running = [task for task in tasks if not task.done()]
    try:
        if running:
            await asyncio.wait(running, timeout=limit_s)
    finally:  # also where the caller itself is cancelled, who does not want to wait any longer then
        stubborn = [task for task in running if not task.done()]
        for task in stubborn:
            asyncio._unregister_task(task)
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # the caller says it better
    return stubborn


async def close_within(closing: Coroutine[Any, Any, None], name: str, limit_s: float, grace_s: float = 5.0) -> None:
    """Runs the closing of a part that is somebody else's code: after ``limit_s`` it is cancelled, then left behind.

    Raises:
        Exception: what it raised, if it ended in time.
    """
    task = asyncio.create_task(closing, name=name)
    await asyncio.wait([task], timeout=limit_s)
    if not task.done():
        logger.error("%s has not ended after %g s; it is cancelled and left behind", name, limit_s)
        await cancel_within([task], grace_s)
    elif not task.cancelled():
        task.result()


async def close_all(closings: Iterable[Callable[[], Awaitable[None]]]) -> list[Exception]:
    """Closes one part after the other, every one of them whatever the others do; returns what they raised."""
    errors: list[Exception] = []
    for close in closings:
        try:
            await close()
        except Exception as error:
            logger.exception("a part of the run does not close")
            errors.append(error)
    return errors


def _look_at(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # or asyncio would report that nobody did


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yields the items of all streams as they come, each with the number of its stream.

    The reader pulls: of each stream at most one item is ready before the reader asks for more. The first failure is
    raised; it closes all streams, and so does closing this iterator.
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
                waiting[asyncio.ensure_future(anext(streams[number]))] = number
    finally:
        for future in waiting:
            future.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()

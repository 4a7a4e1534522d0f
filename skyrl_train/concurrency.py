"""Two things that asyncio leaves open: waiting for a condition, and many calls of which one may fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


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


async def gather_or_cancel(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs calls at once and returns their results in order.

    The first failure cancels the others, waits until they have ended, and is raised itself: unlike ``asyncio.gather``
    nothing runs on behind the caller's back, unlike ``asyncio.TaskGroup`` the caller sees the exception and not a group.
    """
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

"""A retry of a request joins the one that runs, or gets what it left behind (SEMANTICS 2.9).

    request ──────────> flight ──task──> items 0 1 2 3 ...
                          ^  └─ first waiter: 0 1 2 3
    its retry ──joins─────┘  └─ retry:        0 1 2 3      all from the beginning, then as they come

An SDK that lost its connection sends the same body again and says so in a header. Sampling again would put a second
response into the session that the program never asked for.

- A request that is not marked as a retry is always a new one, also with the same body: that is how programs sample twice.
- A retry joins a running request with the same key; or gets the finished one's items, for a while.
- Of several with the same key it takes the one that fewest retries joined, of these the oldest: two equal requests that
  both lose their connection get two responses.
- A waiter that leaves takes the request with it only when it was the last one.
- What failed is not kept: its retry samples.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

from skyrl_train.concurrency import Signal
from skyrl_train.errors import SessionError

T = TypeVar("T")


def request_key(path: str, body: Mapping[str, Any]) -> bytes:
    """Equal for equal requests: the order of keys in ``body``, a JSON object, does not matter."""
    text = json.dumps([path, body], sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode("ascii"), digest_size=16).digest()


class _Flight(Generic[T]):
    """One request: what it has produced so far, and who waits for more."""

    def __init__(self, start: Callable[[], AsyncIterator[T]]) -> None:
        self.items: list[T] = []
        self.ended = False
        self.error: BaseException | None = None  # why it ended early, or will
        self.waiters = 0
        self.retries = 0
        self._changed = Signal()
        self.task = asyncio.create_task(self._run(start))

    async def _run(self, start: Callable[[], AsyncIterator[T]]) -> None:
        async for item in start():
            self.items.append(item)
            self._changed.notify()

    def cancel(self, error: SessionError) -> None:
        """Ends the task early; one that has ended already keeps its result."""
        if self.error is None and self.task.cancel():
            self.error = error

    def end(self, error: BaseException | None) -> None:
        self.error = self.error or error
        self.ended = True
        self._changed.notify()

    async def wait_beyond(self, position: int) -> bool:
        """Waits for item number ``position``; False when the flight has ended without it."""
        await self._changed.wait_until(lambda: self.ended or len(self.items) > position)
        return len(self.items) > position


class KeptFlights:
    """Finished flights of all sessions that a late retry may still ask for: a bounded number, for a while."""

    def __init__(self, limit: int, window_s: float, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._window_s = window_s
        self._clock = clock
        self._forget: dict[_Flight[Any], tuple[float, Callable[[], None]]] = {}  # oldest first

    def keep(self, flight: _Flight[Any], forget: Callable[[], None]) -> None:
        """Keeps ``flight``; calls ``forget`` when its time is over or others need its place."""
        self._forget[flight] = (self._clock() + self._window_s, forget)
        self.expire()

    def drop(self, flight: _Flight[Any]) -> None:
        """Forgets a flight now, if it is kept at all."""
        if flight in self._forget:
            self._forget.pop(flight)[1]()

    def expire(self) -> None:
        """Forgets what is too old or too much."""
        now = self._clock()
        while self._forget:
            flight, (deadline, _) = next(iter(self._forget.items()))
            if len(self._forget) <= self._limit and now < deadline:
                return
            self.drop(flight)


class SingleFlight:
    """The requests of one session, by key (:func:`request_key`)."""

    def __init__(self, kept: KeptFlights) -> None:
        self._kept = kept
        self._flights: dict[bytes, list[_Flight[Any]]] = {}
        self._running: set[_Flight[Any]] = set()

    @property
    def running(self) -> int:
        """Requests in flight."""
        return len(self._running)

    async def run(self, key: bytes, start: Callable[[], Awaitable[T]], *, is_retry: bool) -> T:
        """Like :meth:`stream` for a request with one result."""

        async def only() -> AsyncIterator[T]:
            yield await start()

        [result] = [item async for item in self.stream(key, only, is_retry=is_retry)]
        return result

    async def stream(self, key: bytes, start: Callable[[], AsyncIterator[T]], *, is_retry: bool) -> AsyncIterator[T]:
        """Yields all items of ``start()``, or of the earlier request that a retry repeats, from its first item on.

        Items are kept while the request runs and for a while after: small ones (bytes as sent) are better.
        Closing the iterator leaves the request. The last one to leave cancels it and waits until it has ended.

        Raises:
            SessionError: the session ended meanwhile. Whatever ``start()`` raises, every waiter gets.
        """
        flight = (self._join(key) if is_retry else None) or self._begin(key, start)
        flight.waiters += 1
        try:
            position = 0
            while await flight.wait_beyond(position):
                yield flight.items[position]
                position += 1
            if flight.error is not None:
                raise flight.error
        finally:
            flight.waiters -= 1
            if not flight.waiters and not flight.ended:
                flight.cancel(SessionError("The request was cancelled: nobody waits for it any more."))
                await asyncio.wait([flight.task])

    def end(self, error: SessionError) -> None:
        """Cancels what runs, so that its waiters get ``error``, and forgets what is kept."""
        for flight in [flight for flights in self._flights.values() for flight in flights]:
            flight.cancel(error)
            self._kept.drop(flight)

    def _begin(self, key: bytes, start: Callable[[], AsyncIterator[T]]) -> _Flight[T]:
        for earlier in list(self._flights.get(key, ())):
            if earlier.ended:  # whoever asks anew has its result, or has given it up
                self._kept.drop(earlier)
        flight = _Flight(start)
        self._flights.setdefault(key, []).append(flight)
        self._running.add(flight)
        flight.task.add_done_callback(partial(self._ended, key, flight))
        return flight

    def _join(self, key: bytes) -> _Flight[Any] | None:
        self._kept.expire()
        flights = [flight for flight in self._flights.get(key, ()) if flight.error is None]
        flight = min(flights, key=lambda flight: flight.retries, default=None)
        if flight is not None:
            flight.retries += 1
        return flight

    def _ended(self, key: bytes, flight: _Flight[Any], task: asyncio.Task[None]) -> None:
        """A done callback and not the task's own last lines: a task cancelled before its first step runs none."""
        error = SessionError("The request was cancelled.") if task.cancelled() else task.exception()
        flight.end(error)
        self._running.discard(flight)
        if flight.error is None:
            self._kept.keep(flight, partial(self._forget, key, flight))
        else:
            self._forget(key, flight)

    def _forget(self, key: bytes, flight: _Flight[Any]) -> None:
        flights = self._flights[key]
        flights.remove(flight)
        if not flights:
            del self._flights[key]

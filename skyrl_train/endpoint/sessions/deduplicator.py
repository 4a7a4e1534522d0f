"""Join a retried request to the one that is running, or replay its finished response.

    request ──────────> in-flight request ──task──> items 0 1 2 3 ...
                          ^  └─ first waiter: 0 1 2 3
    its retry ──joins─────┘  └─ retry:        0 1 2 3      all items from the beginning, then as they arrive

An SDK that lost its connection sends the same body again and counts its attempts in a header: 0 is the request itself, 1 its
first retry. Sampling again would record a second response in the session that the program never asked for.

- Attempt 0 is always a new request, even with an equal body: that is how programs sample twice.
- A retry joins a running request with the same key, or gets the items of a finished one for a limited time. It joins only
  requests whose latest attempt came before it, of these one with the latest attempt, of these the oldest. So two equal
  requests that are both retried stay two samples, whether or not the first attempts still run.
- An attempt that failed, was refused, or whose loss was noticed (its last waiter left) has no response that its retry could
  get. That retry samples again, and never takes the response of another equal request.
- A waiter that leaves cancels the request only if it was the last one.
- A retry can come before the loss of its connection is noticed, and then joins another equal request. When the loss is noticed,
  the request that was lost goes to the retry, if that has not been given an item yet: equal requests can be exchanged.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

from skyrl_train.errors import SessionError
from skyrl_train.runtime.concurrency import Signal

T = TypeVar("T")

MAX_KEPT_BYTES = 256 << 20  # of all kept responses; a streamed one has some hundred bytes per token


def request_key(path: str, body: Mapping[str, Any]) -> bytes:
    """Return a digest that is equal for equal requests; the key order of the JSON object ``body`` does not matter."""
    text = json.dumps([path, body], sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode("ascii"), digest_size=16).digest()


class _JoinableRequest(Generic[T]):
    """One request: the items it has produced so far, and its waiters.

    Args:
        attempt: the latest one of the client that waits for it.
    """

    def __init__(self, start: Callable[[], AsyncIterator[T]], attempt: int) -> None:
        self.attempt = attempt
        self.items: list[T] = []
        self.ended = False
        self.error: BaseException | None = None  # why it ended early or will end early
        self.waiters: list[_Waiter[T]] = []
        self.changed = Signal()  # an item arrived, the request ended, or a waiter has moved
        self.task = asyncio.create_task(self._run(start))

    async def _run(self, start: Callable[[], AsyncIterator[T]]) -> None:
        async for item in start():
            self.items.append(item)
            self.changed.notify()

    def num_bytes(self) -> int:
        """Return the size of the items that are bytes."""
        return sum(len(item) for item in self.items if isinstance(item, bytes))

    def cancel(self, error: SessionError) -> bool:
        """Cancel the task; waiters get ``error``. Return False if it has already ended, and keeps its result, or is ending."""
        if self.error is None and self.task.cancel():
            self.error = error
            return True
        return False


class _Waiter(Generic[T]):
    """A client that waits for a request. ``items`` of it have been given to the client."""

    def __init__(self, request: _JoinableRequest[T], attempt: int) -> None:
        self.request = request
        self.attempt = attempt
        self.items = 0
        request.waiters.append(self)

    async def wait_for_item(self) -> bool:
        """Wait until the next item has arrived; return False if the request has ended without it."""
        while True:
            request = self.request
            await request.changed.wait_until(partial(self._is_ready, request))
            if self.request is request:
                return len(request.items) > self.items

    def _is_ready(self, request: _JoinableRequest[T]) -> bool:
        return request.ended or len(request.items) > self.items or self.request is not request

    def move(self, to: _JoinableRequest[T]) -> None:
        """Wait for another request from now on."""
        request, self.request = self.request, to
        request.waiters.remove(self)
        request.attempt = max(waiter.attempt for waiter in request.waiters)
        request.changed.notify()
        to.waiters.append(self)
        to.attempt = max(to.attempt, self.attempt)


class CompletedRequests:
    """Finished requests of all sessions, kept for late retries: at most ``limit`` of them, for ``window_s`` seconds.

    Together their items have at most ``max_bytes``.
    """

    def __init__(
        self, limit: int, window_s: float, clock: Callable[[], float], max_bytes: int = MAX_KEPT_BYTES
    ) -> None:
        self._limit = limit
        self._window_s = window_s
        self._clock = clock
        self._max_bytes = max_bytes
        self._bytes = 0
        self._forget: dict[_JoinableRequest[Any], tuple[float, Callable[[], None]]] = {}  # oldest first

    def keep(self, request: _JoinableRequest[Any], forget: Callable[[], None]) -> None:
        """Keep ``request``. Calls ``forget`` when its time is over or newer requests need its place."""
        self._forget[request] = (self._clock() + self._window_s, forget)
        self._bytes += request.num_bytes()
        self.expire()

    def drop(self, request: _JoinableRequest[Any]) -> None:
        """Forget a request now, if it is kept."""
        if request in self._forget:
            self._bytes -= request.num_bytes()
            self._forget.pop(request)[1]()

    def expire(self) -> None:
        """Forget requests that are too old, and the oldest ones beyond the limits."""
        now = self._clock()
        while self._forget:
            request, (deadline, _) = next(iter(self._forget.items()))
            if len(self._forget) <= self._limit and self._bytes <= self._max_bytes and now < deadline:
                return
            self.drop(request)


class RequestDeduplicator:
    """The requests of one session by key (:func:`request_key`)."""

    def __init__(self, completed: CompletedRequests) -> None:
        self._completed = completed
        self._requests: dict[bytes, list[_JoinableRequest[Any]]] = {}  # running and kept ones, oldest first
        # Attempts that got no response, by key (None: refused before it was known), whose retries are still to come.
        self._unanswered: Counter[tuple[bytes | None, int]] = Counter()
        self.running = 0  # requests in flight

    def refuse(self, attempt: int) -> None:
        """Note that an attempt was answered with an error before its body was read."""
        self._unanswered[None, attempt] += 1

    async def run(self, key: bytes, start: Callable[[], Awaitable[T]], *, attempt: int = 0) -> T:
        """Return the result of ``start()``; like :meth:`stream` for a request with one result."""

        async def only() -> AsyncIterator[T]:
            yield await start()

        [result] = [item async for item in self.stream(key, only, attempt=attempt)]
        return result

    async def stream(
        self, key: bytes, start: Callable[[], AsyncIterator[T]], *, attempt: int = 0
    ) -> AsyncGenerator[T, None]:
        """Yield all items of ``start()``, or of the earlier request that this attempt repeats, from its first item on.

        The items stay in memory while the request runs and for a while after, so they should be small.
        Closing the iterator leaves the request. The last waiter to leave cancels it and waits until it has ended.

        Raises:
            SessionError: the session ended meanwhile. Every exception of ``start()`` is raised in every waiter.
        """
        request = (self._join(key, attempt) if attempt else None) or self._begin(key, start, attempt)
        waiter = _Waiter(request, attempt)
        try:
            while await waiter.wait_for_item():
                waiter.items += 1
                yield waiter.request.items[waiter.items - 1]
            if waiter.request.error is not None:
                raise waiter.request.error
        finally:
            await self._leave(key, waiter)

    def end(self, error: SessionError) -> None:
        """Cancel running requests, whose waiters get ``error``, and forget the finished ones."""
        for request in [request for requests in self._requests.values() for request in requests]:
            request.cancel(error)
            self._completed.drop(request)

    def _begin(self, key: bytes, start: Callable[[], AsyncIterator[T]], attempt: int) -> _JoinableRequest[T]:
        # A new request with this key shows that the client has the earlier response or no longer wants it.
        for earlier in list(self._requests.get(key, ())):
            if earlier.ended and not attempt:
                self._completed.drop(earlier)
        request = _JoinableRequest(start, attempt)
        self._requests.setdefault(key, []).append(request)
        self.running += 1
        # A done callback, not the task's own last lines: a task cancelled before its first step runs no lines.
        request.task.add_done_callback(partial(self._on_done, key, request))
        return request

    def _join(self, key: bytes, attempt: int) -> _JoinableRequest[Any] | None:
        for unanswered in ((key, attempt - 1), (None, attempt - 1)):
            if unanswered in self._unanswered:
                self._unanswered -= Counter([unanswered])
                return None
        # A finished request whose time is over must not answer a retry.
        self._completed.expire()
        requests = [
            request for request in self._requests.get(key, ()) if request.error is None and request.attempt < attempt
        ]
        request = max(requests, key=lambda request: request.attempt, default=None)  # the first of equal ones
        if request is not None:
            request.attempt = attempt
        return request

    async def _leave(self, key: bytes, waiter: _Waiter[Any]) -> None:
        request = waiter.request
        request.waiters.remove(waiter)
        if request.waiters:  # a retry still waits for it
            return
        runs = not request.ended and request.error is None
        if runs and (retry := self._retry_elsewhere(key, request)) is not None:
            retry.move(request)
            return
        # After its end, this changes nothing.
        if request.cancel(SessionError("The request was cancelled: its last client has disconnected.")):
            self._unanswered[key, request.attempt] += 1
        await asyncio.wait([request.task])  # the engine has released the request when this returns

    def _retry_elsewhere(self, key: bytes, request: _JoinableRequest[Any]) -> _Waiter[Any] | None:
        """Return a retry that waits for a request equal to ``request`` beside another client, and has got nothing of it."""
        return next(
            (
                waiter
                for other in self._requests.get(key, ())
                if other is not request and len(other.waiters) > 1
                for waiter in other.waiters
                if waiter.attempt > request.attempt and not waiter.items
            ),
            None,
        )

    def _on_done(self, key: bytes, request: _JoinableRequest[Any], task: asyncio.Task[None]) -> None:
        error = SessionError("The request was cancelled.") if task.cancelled() else task.exception()
        if request.error is None and error is not None:
            request.error = error
            self._unanswered[key, request.attempt] += 1
        request.ended = True
        request.changed.notify()
        self.running -= 1
        if request.error is None:
            self._completed.keep(request, partial(self._forget, key, request))
        else:
            self._forget(key, request)

    def _forget(self, key: bytes, request: _JoinableRequest[Any]) -> None:
        requests = self._requests[key]
        requests.remove(request)
        if not requests:
            del self._requests[key]

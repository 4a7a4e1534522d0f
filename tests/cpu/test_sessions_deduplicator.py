"""Retries join the request in flight; equal requests that are no retries do not."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest
from session_worlds import ReadableRenderer, ask, choice, new_session, user

from skyrl_train.endpoint.sessions import Session, SessionLimits, request_key
from skyrl_train.endpoint.sessions.deduplicator import CompletedRequests, RequestDeduplicator
from skyrl_train.errors import RequestError, SessionError

KEY, OTHER = b"key", b"other"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Source:
    """A request that yields items when the test feeds them; each start is a new run."""

    def __init__(self) -> None:
        self.runs: list[asyncio.Queue[int | Exception | None]] = []
        self.cancelled: list[int] = []

    async def stream(self) -> AsyncIterator[int]:
        number = len(self.runs)
        self.runs.append(asyncio.Queue())
        try:
            while (item := await self.runs[number].get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise

    async def result(self) -> int:
        return [item async for item in self.stream()][-1]

    def feed(self, *items: int | Exception | None, run: int = 0) -> None:
        for item in items:
            self.runs[run].put_nowait(item)


class World:
    def __init__(self, limit: int = 10) -> None:
        self.clock = Clock()
        self.completed = CompletedRequests(limit, 60.0, self.clock)
        self.requests = RequestDeduplicator(self.completed)
        self.source = Source()

    async def request(self, *, attempt: int = 0, key: bytes = KEY) -> asyncio.Task[list[int]]:
        """Starts a streaming request; returns when it waits for its first new item."""

        async def read() -> list[int]:
            return [item async for item in self.requests.stream(key, self.source.stream, attempt=attempt)]

        task = asyncio.create_task(read())
        await settle()
        return task


async def settle() -> None:
    """Lets everything that can run do so: nothing here waits for anything but the test."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
def world() -> World:
    return World()


async def test_a_retry_joins_the_request_in_flight_and_gets_all_of_it(world: World) -> None:
    first = await world.request()
    world.source.feed(1, 2)
    await settle()
    retry = await world.request(attempt=1)
    world.source.feed(3, None)
    assert await first == await retry == [1, 2, 3]
    assert len(world.source.runs) == 1
    assert world.requests.running == 0


async def test_an_equal_request_that_is_no_retry_is_a_new_sample(world: World) -> None:
    first, second = await world.request(), await world.request()
    world.source.feed(1, None, run=0)
    world.source.feed(2, None, run=1)
    assert (await first, await second) == ([1], [2])


async def test_a_retry_of_another_request_does_not_join(world: World) -> None:
    await world.request()
    await world.request(attempt=1, key=OTHER)
    assert len(world.source.runs) == 2
    world.requests.end(SessionError("over"))
    await settle()


async def test_a_result_is_shared_as_well(world: World) -> None:
    calls = [asyncio.create_task(world.requests.run(KEY, world.source.result, attempt=attempt)) for attempt in range(3)]
    await settle()
    world.source.feed(5, None)
    assert await asyncio.gather(*calls) == [5, 5, 5]
    assert len(world.source.runs) == 1


async def test_a_retry_after_the_end_gets_the_lost_response(world: World) -> None:
    first = await world.request()
    world.source.feed(1, 2, None)
    await first
    world.clock.now = 59.0
    for attempt in (1, 2):
        assert await (await world.request(attempt=attempt)) == [1, 2]
    assert len(world.source.runs) == 1


async def test_a_retry_that_comes_too_late_samples_again(world: World) -> None:
    first = await world.request()
    world.source.feed(1, None)
    await first
    world.clock.now = 60.0
    await world.request(attempt=1)
    assert len(world.source.runs) == 2
    world.requests.end(SessionError("over"))
    await settle()


async def test_by_default_a_finished_response_is_kept_for_a_minute() -> None:
    clock = Clock()
    requests = Session("s", ReadableRenderer(), clock=clock).deduplicator
    responses = iter("ab")

    async def respond() -> str:
        return next(responses)

    found = []
    for attempt, clock.now in enumerate((0.0, 59.9, 60.0)):
        found.append(await requests.run(KEY, respond, attempt=attempt))
    assert found == ["a", "a", "b"]


async def test_with_no_place_for_kept_responses_a_late_retry_samples_again() -> None:
    requests = Session("s", ReadableRenderer(), SessionLimits(max_kept_responses=0)).deduplicator
    responses = iter("ab")

    async def respond() -> str:
        return next(responses)

    assert [await requests.run(KEY, respond, attempt=attempt) for attempt in (0, 1)] == ["a", "b"]


async def test_the_number_of_kept_responses_is_limited() -> None:
    world = World(limit=2)
    for number in range(3):
        request = await world.request(key=bytes([number]))
        world.source.feed(number, None, run=number)
        await request
    assert await (await world.request(key=bytes([2]), attempt=1)) == [2]
    assert await (await world.request(key=bytes([1]), attempt=1)) == [1]
    await world.request(key=bytes([0]), attempt=1)
    assert len(world.source.runs) == 4
    world.requests.end(SessionError("over"))
    await settle()


async def test_the_bytes_of_kept_responses_are_limited() -> None:
    requests = RequestDeduplicator(CompletedRequests(10, 60.0, Clock(), max_bytes=100))
    sampled: list[int] = []

    async def respond(size: int) -> AsyncIterator[bytes]:
        sampled.append(size)
        yield b"x" * size
        yield b""

    async def ask(size: int, attempt: int = 0) -> None:
        items = requests.stream(bytes([size]), partial(respond, size), attempt=attempt)
        assert b"".join([item async for item in items]) == b"x" * size

    for size in (50, 40, 20):
        await ask(size)
    for size in (20, 40, 50, 200, 40):
        await ask(size, attempt=1 + sampled.count(size))
    assert sampled == [50, 40, 20, 50, 200, 40], "the newest are kept, up to 100 bytes together"
    assert requests._completed._bytes == 40


async def test_a_new_request_replaces_the_finished_one(world: World) -> None:
    """Else the retry of a failed second sample would get the first one's response once more."""
    first = await world.request()
    world.source.feed(1, None)
    await first
    second = await world.request()
    world.source.feed(RequestError("no"), run=1)
    with pytest.raises(RequestError):
        await second
    await world.request(attempt=1)
    assert len(world.source.runs) == 3
    world.requests.end(SessionError("over"))
    await settle()


async def test_two_equal_requests_that_are_both_retried_stay_two_samples(world: World) -> None:
    requests = [await world.request(attempt=attempt) for attempt in (0, 0, 1, 1)]
    world.source.feed(1, None, run=0)
    world.source.feed(2, None, run=1)
    assert [await request for request in requests] == [[1], [2], [1], [2]]


async def test_equal_requests_whose_first_attempts_were_cancelled_stay_two_samples(world: World) -> None:
    """Two parallel samples of one prompt reach the time limit of their client together."""
    for lost in [await world.request(), await world.request()]:
        lost.cancel()
    await settle()
    retries = [await world.request(attempt=1), await world.request(attempt=1)]
    world.source.feed(1, None, run=2)
    world.source.feed(2, None, run=3)
    assert [await retry for retry in retries] == [[1], [2]]


@pytest.mark.parametrize("how", ["cancelled", "failed", "refused"])
@pytest.mark.parametrize("other_ended", [False, True])
async def test_the_retry_of_an_attempt_without_a_response_takes_no_other_ones(
    world: World, how: str, other_ended: bool
) -> None:
    other = await world.request()
    if how == "refused":
        world.requests.refuse(0)
    else:
        lost = await world.request()
        if how == "cancelled":
            lost.cancel()
        else:
            world.source.feed(RequestError("no"), run=1)
        await asyncio.wait([lost])
    if other_ended:
        world.source.feed(1, None)
        await other
    begun = len(world.source.runs)
    retry = await world.request(attempt=1)
    assert len(world.source.runs) == begun + 1
    world.source.feed(2, None, run=begun)
    world.source.feed(1, None)
    assert (await retry, await other) == ([2], [1])


@pytest.mark.parametrize("lost", [0, 1])
async def test_a_retry_before_the_loss_of_its_connection_is_noticed_gets_the_lost_request(
    world: World, lost: int
) -> None:
    first = [await world.request(), await world.request()]
    retry = await world.request(attempt=1)
    first[lost].cancel()
    await settle()
    world.source.feed(1, None, run=0)
    world.source.feed(2, None, run=1)
    assert (await retry, await first[1 - lost]) == ([1 + lost], [2 - lost])
    assert len(world.source.runs) == 2 and not world.source.cancelled


async def test_a_retry_that_has_got_an_item_stays_where_it_is(world: World) -> None:
    first, second = await world.request(), await world.request()
    world.source.feed(1, run=0)
    retry = await world.request(attempt=1)
    second.cancel()
    await settle()
    assert world.source.cancelled == [1]
    world.source.feed(None, run=0)
    assert await retry == await first == [1]


async def test_a_retry_of_the_request_that_gave_one_away_still_joins_it(world: World) -> None:
    first, second = await world.request(), await world.request()
    retries = [await world.request(attempt=1)]
    second.cancel()
    await settle()
    retries.append(await world.request(attempt=1))
    assert len(world.source.runs) == 2
    world.source.feed(1, None, run=0)
    world.source.feed(2, None, run=1)
    assert [await retry for retry in retries] == [[2], [1]] and await first == [1]


async def test_a_waiter_that_leaves_does_not_take_the_request_from_the_others(world: World) -> None:
    first, retry = await world.request(), await world.request(attempt=1)
    first.cancel()
    await settle()
    assert not world.source.cancelled
    world.source.feed(1, None)
    assert await retry == [1]


async def test_the_last_waiter_that_leaves_cancels_the_request(world: World) -> None:
    for waiter in [await world.request(), await world.request(attempt=1)]:
        waiter.cancel()
        await settle()
    assert world.source.cancelled == [0]
    assert world.requests.running == 0
    await world.request(attempt=1)
    assert len(world.source.runs) == 2  # a cancelled request is not joined
    world.requests.end(SessionError("over"))
    await settle()


async def test_leaving_returns_only_when_the_request_has_ended(world: World) -> None:
    may_end = asyncio.Event()

    async def slow_to_end() -> AsyncIterator[int]:
        yield 1
        try:
            await asyncio.Event().wait()
        finally:
            await may_end.wait()

    stream = world.requests.stream(KEY, slow_to_end)
    assert await anext(stream) == 1
    leaving = asyncio.create_task(stream.aclose())
    await settle()
    assert not leaving.done()
    retry = await world.request(attempt=1)  # too late to join a request that is ending
    assert len(world.source.runs) == 1
    world.source.feed(2, None)
    assert await retry == [2]
    may_end.set()
    await leaving
    assert world.requests.running == 0


async def test_a_request_that_is_ending_is_not_cancelled_again(world: World) -> None:
    may_end, cleaned_up = asyncio.Event(), asyncio.Event()

    async def slow_to_end() -> AsyncIterator[int]:
        yield 1
        try:
            await asyncio.Event().wait()
        finally:
            await may_end.wait()
            cleaned_up.set()

    stream = world.requests.stream(KEY, slow_to_end)
    assert await anext(stream) == 1
    leaving = asyncio.create_task(stream.aclose())
    await settle()
    world.requests.end(SessionError("over"))
    await settle()
    may_end.set()
    await leaving
    assert cleaned_up.is_set()


async def test_a_waiter_that_closes_its_stream_early_leaves(world: World) -> None:
    stream = world.requests.stream(KEY, world.source.stream)
    reading = asyncio.ensure_future(anext(stream))
    await settle()
    world.source.feed(1)
    assert await reading == 1
    await stream.aclose()
    assert world.source.cancelled == [0]


async def test_a_failure_reaches_every_waiter_and_is_not_kept(world: World) -> None:
    waiters = [await world.request(), await world.request(attempt=1)]
    world.source.feed(1, RequestError("does not fit"))
    for waiter in waiters:
        with pytest.raises(RequestError, match="does not fit"):
            await waiter
    await world.request(attempt=1)
    assert len(world.source.runs) == 2
    world.requests.end(SessionError("over"))
    await settle()


async def test_a_slow_reader_does_not_delay_others(world: World) -> None:
    slow = world.requests.stream(KEY, world.source.stream)
    reading = asyncio.ensure_future(anext(slow))
    await settle()
    retry = await world.request(attempt=1)
    world.source.feed(1, 2, 3, None)
    assert await retry == [1, 2, 3]
    assert [await reading, *[item async for item in slow]] == [1, 2, 3]


@pytest.mark.parametrize("steps_before", [0, 1, 20])
async def test_the_end_of_the_session_ends_its_requests(world: World, steps_before: int) -> None:
    waiting = asyncio.create_task(world.requests.run(KEY, world.source.result))
    for _ in range(steps_before):
        await asyncio.sleep(0)
    if steps_before == 0:
        waiting.cancel()  # it has not begun: there is nothing to end
        world.requests.end(SessionError("over"))
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return
    world.requests.end(SessionError("over"))
    with pytest.raises(SessionError, match="over"):
        await waiting
    assert world.requests.running == 0


async def test_nothing_is_kept_after_the_end(world: World) -> None:
    first = await world.request()
    world.source.feed(1, None)
    await first
    world.requests.end(SessionError("over"))
    assert not world.completed._forget
    assert not world.requests._requests


async def test_a_shared_request_is_recorded_once() -> None:
    session = new_session()
    go = asyncio.Event()

    async def chat() -> str:
        plan = session.plan([user("hi")])
        await go.wait()
        session.record(plan, choice(plan, "yo"))
        return "yo"

    calls = [asyncio.create_task(session.deduplicator.run(KEY, chat, attempt=attempt)) for attempt in (0, 1)]
    await settle()
    go.set()
    assert await asyncio.gather(*calls) == ["yo", "yo"]
    assert session.statistics().turns == 1


@pytest.mark.parametrize("end", ["finish", "close"])
async def test_a_session_that_ends_cancels_its_requests_and_they_are_not_trained(end: str) -> None:
    session = new_session()
    ask(session, [user("hi")], "yo")

    async def chat() -> None:
        plan = session.plan([user("more")])
        await asyncio.Event().wait()
        session.record(plan, choice(plan, "never"))

    waiting = asyncio.create_task(session.deduplicator.run(KEY, chat))
    await settle()
    getattr(session, end)()
    with pytest.raises(SessionError, match="while the request was running"):
        await waiting
    if end == "finish":
        assert [sequence.turns for sequence in session.sequences()] == [[0]]


async def test_a_request_that_fails_keeps_none_of_its_items() -> None:
    class Item:
        pass

    items: list[weakref.ref[Item]] = []

    async def failing() -> AsyncIterator[Item]:
        item = Item()
        items.append(weakref.ref(item))
        yield item
        raise RequestError("no more")

    deduplicator = RequestDeduplicator(CompletedRequests(4, 60.0, Clock()))
    with pytest.raises(RequestError, match="no more"):
        async for _ in deduplicator.stream(KEY, failing):
            pass
    await asyncio.sleep(0)  # the task's last callbacks
    del _
    gc.collect()
    assert [item() for item in items] == [None]


@pytest.mark.parametrize(
    ("other", "equal"),
    [
        (lambda: request_key("/a", {"y": [1, {"b": 2, "a": None}], "x": "ü"}), True),
        (lambda: request_key("/b", {"x": "ü", "y": [1, {"a": None, "b": 2}]}), False),
        (lambda: request_key("/a", {"x": "u", "y": [1, {"a": None, "b": 2}]}), False),
        (lambda: request_key("/a", {"x": "ü", "y": [{"a": None, "b": 2}, 1]}), False),
    ],
)
def test_a_key_names_path_and_body_but_no_order_of_keys(other: Callable[[], bytes], equal: bool) -> None:
    assert (request_key("/a", {"x": "ü", "y": [1, {"a": None, "b": 2}]}) == other()) == equal

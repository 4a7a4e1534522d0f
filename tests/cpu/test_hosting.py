"""The contract of hosted objects: answers, streams, cancellation, errors, calls back to the driver, start and death."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from scripted import settle

from skyrl_train.errors import EngineDeadError, EngineError, RequestError, SkyRLError
from skyrl_train.workers import thread as thread_module
from skyrl_train.workers.connection import OnGone, OnMessages, Peer, StartError, WorkerConnection, WorkerLink
from skyrl_train.workers.host import Hosted, host_peer
from skyrl_train.workers.messages import LastWords, Message
from skyrl_train.workers.thread import ThreadLink


class Obedient(Hosted):
    """Does as it is told, and remembers what it cleaned up."""

    def __init__(self) -> None:
        self.cleaned_up: list[str] = []
        self.driver_state: Any = None
        self.stopped = False

    async def start(self, order: str = "") -> str:
        if order == "fail":
            raise RequestError("no such model")
        if order == "hang":
            await asyncio.Event().wait()
        return "started"

    async def echo(self, value: Any) -> Any:
        return value

    async def fail(self, error: Exception) -> None:
        raise error

    async def hang(self, name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.cleaned_up.append(name)

    async def count(self, until: int) -> AsyncGenerator[int, None]:
        try:
            for number in range(until):
                yield number
                await asyncio.sleep(0)
        finally:
            self.cleaned_up.append("count")

    async def ask(self, number: int) -> Any:
        return await self.driver.call("answer", number)

    async def ask_stream(self) -> list[Any]:
        return [item async for item in self.driver.stream("answers")]

    def state(self) -> str:
        return "from the host"

    def take_state(self, state: Any) -> None:
        self.driver_state = state

    async def stop(self) -> None:
        self.stopped = True


class Answering:
    """The object that the driver serves."""

    def __init__(self) -> None:
        self.cancelled = 0

    async def answer(self, number: int) -> int:
        if number < 0:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled += 1
        return -number

    async def answers(self) -> AsyncGenerator[int, None]:
        for number in range(3):
            yield number


class LocalLink(WorkerLink):
    """A host in this process; batches are pickled on their way."""

    def __init__(self, refuse: str = "") -> None:
        self.object = Obedient()
        self.peer = host_peer(self.object, self._transmit)
        self.refuse = refuse
        self.stops: list[bool] = []

    async def start(self, on_messages: OnMessages, on_gone: OnGone) -> None:
        if self.refuse:
            raise StartError(self.refuse)
        self.on_messages, self.die = on_messages, on_gone

    def send(self, messages: list[Message]) -> None:
        asyncio.get_running_loop().call_soon(self.peer.deliver, pickle.loads(pickle.dumps(messages)))

    async def stop(self, graceful: bool) -> None:
        self.stops.append(graceful)
        if graceful:
            await self.peer.end("its driver stops it")
            await self.object.stop()

    async def diagnosis(self) -> str:
        return "It asks for the moon."

    def _transmit(self, messages: list[Message]) -> None:
        asyncio.get_running_loop().call_soon(self.on_messages, pickle.loads(pickle.dumps(messages)))


def connect(link: LocalLink, **options: Any) -> WorkerConnection:
    return WorkerConnection(
        link,
        gone_error=lambda reason: EngineDeadError(f"gone: {reason}"),
        call_error=lambda failure: failure.error(EngineError, "the object"),
        **options,
    )


@asynccontextmanager
async def started(**options: Any) -> AsyncIterator[tuple[WorkerConnection, LocalLink, Obedient]]:
    link = LocalLink()
    connection = connect(link, **options)
    assert await connection.start() == "started"
    assert isinstance(link.object, Obedient)
    yield connection, link, link.object
    await connection.stop()


async def test_calls_are_answered_and_errors_keep_their_class() -> None:
    async with started() as (connection, _, _):
        assert await asyncio.gather(*(connection.call("echo", i) for i in range(5))) == list(range(5))
        with pytest.raises(RequestError, match="too long") as caught:
            await connection.call("fail", RequestError("too long"))
        assert "Traceback" in caught.value.__notes__[0]
        with pytest.raises(EngineError, match="the object raised KeyError: 'x'"):
            await connection.call("fail", KeyError("x"))
        with pytest.raises(EngineError, match="AttributeError"):
            await connection.call("no_such_method")
        assert len(connection.pending) == 0


async def test_streams_yield_items_in_order_and_are_closed_at_both_ends() -> None:
    async with started() as (connection, _, hosted):
        assert [item async for item in connection.stream("count", 20)] == list(range(20))
        left = connection.stream("count", 10**9)
        assert await anext(left) == 0
        await left.aclose()
        await settle()
        assert hosted.cleaned_up == ["count", "count"]
        with pytest.raises(RequestError):
            await anext(connection.stream("fail", RequestError("no")))


async def test_a_message_that_cannot_be_pickled_fails_its_own_call_and_the_others_go_on() -> None:
    class Served:
        async def echo(self, value: Any) -> Any:
            return value

        async def make(self) -> Any:
            return lambda: 0

        async def items(self) -> AsyncGenerator[Any, None]:
            yield 1
            yield lambda: 0
            await asyncio.Event().wait()  # never set

    ends: dict[str, Peer] = {}

    def to(end: str) -> Callable[[list[Message]], None]:
        return lambda messages: ends[end].deliver(pickle.loads(pickle.dumps(messages)))

    driver = ends["driver"] = Peer(to("host"))
    host = ends["host"] = Peer(to("driver"), Served())
    calls = [driver.call("echo", 1), driver.call("echo", lambda: 0), driver.call("make"), driver.call("echo", 2)]
    first, not_sent, not_returned, last = await asyncio.gather(*calls, return_exceptions=True)
    assert (first, last) == (1, 2)
    assert isinstance(not_sent, AttributeError | pickle.PicklingError)
    assert isinstance(not_returned, SkyRLError) and "pickle" in str(not_returned)
    stream = driver.stream("items")
    assert await anext(stream) == 1
    with pytest.raises(SkyRLError, match="pickle"):
        await anext(stream)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        await anext(driver.stream("items", lambda: 0))
    await settle()
    assert not driver.pending and not host.running


async def test_a_cancelled_call_is_cancelled_in_the_object() -> None:
    async with started() as (connection, _, hosted):
        quick = connection.call("hang", "quick")
        patient = asyncio.create_task(connection.call_to_end("hang", "patient"))
        await settle()
        for task in (quick, patient):
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await patient
        assert "patient" in hosted.cleaned_up, "it waited for the clean-up"
        with pytest.raises(asyncio.CancelledError):
            await quick
        await settle()
        assert sorted(hosted.cleaned_up) == ["patient", "quick"]
        assert len(connection.pending) == 0


async def test_the_object_calls_the_driver_and_both_learn_the_others_state() -> None:
    learned: list[Any] = []
    async with started(served=Answering(), own_state=lambda: "from the driver", on_state=learned.append) as (
        connection,
        _,
        hosted,
    ):
        assert await connection.call("ask", 3) == -3
        assert await connection.call("ask_stream") == [0, 1, 2]
        assert hosted.driver_state == "from the driver"
        assert set(learned) == {"from the host"}


async def test_an_object_whose_state_cannot_be_read_fails_its_calls() -> None:
    async with started() as (connection, _, hosted):

        def broken() -> str:
            raise ValueError("no version yet")

        hosted.driver._own_state = broken
        with pytest.raises(EngineDeadError, match=r"its state cannot be read: ValueError\('no version yet'\)"):
            await connection.call("echo", 1)


@pytest.mark.parametrize("how", ["the host dies", "last words"])
async def test_a_death_cancels_the_objects_requests_then_fails_all_calls(how: str) -> None:
    answering, lost = Answering(), []
    async with started(served=answering, on_lost=lambda: lost.append(1)) as (connection, link, _):
        calls: list[asyncio.Future[Any]] = [connection.call("ask", -1) for _ in range(3)]
        calls.append(asyncio.create_task(anext(connection.stream("hang", "stream"))))  # type: ignore[arg-type]
        await settle()
        assert len(connection.running) == 3
        if how == "last words":
            link.on_messages([LastWords("out of memory")])
        else:
            link.die("out of memory")
        for call in calls:
            with pytest.raises(EngineDeadError, match="gone: out of memory"):
                await call
            assert answering.cancelled == 3
        with pytest.raises(EngineDeadError, match="out of memory"):
            await connection.call("echo", 1)
        link.die("again")
        await settle()
        assert (lost, link.stops) == ([1], [False])


async def test_stopping_is_graceful_once_and_fails_pending_calls() -> None:
    async with started() as (connection, link, hosted):
        call = connection.call("hang", "call")
        await settle()
        await connection.stop("it was torn down")
        with pytest.raises(EngineDeadError, match="torn down"):
            await call
        await connection.stop()
        assert (hosted.stopped, link.stops, connection.gone) == (True, [True, False], "it was torn down")


async def test_a_start_that_fails_says_why_and_leaves_nothing() -> None:
    with pytest.raises(EngineDeadError, match="it did not start: no room"):
        await connect(link := LocalLink("no room")).start()
    assert link.stops == [False]
    with pytest.raises(RequestError, match="no such model"):
        await connect(link := LocalLink()).start("fail")
    assert link.stops == [False]
    with pytest.raises(EngineDeadError, match=r"did not start within 0.01 s. It asks for the moon."):
        await connect(link := LocalLink()).start("hang", timeout_s=0.01)
    assert link.stops == [False]
    starting = asyncio.create_task(connect(link := LocalLink()).start("hang"))
    await settle()
    link.die("killed")
    with pytest.raises(EngineDeadError, match="gone: killed"):
        await starting


def receive_for_ever(channel: Any) -> None:
    with suppress(EOFError):
        while True:
            channel.receive(block=True)


def test_a_thread_whose_driver_forgot_to_stop_it_ends_with_the_drivers_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_module, "LOOK_S", 0.01)
    link = ThreadLink("test_hosting:receive_for_ever", name="forgotten")
    asyncio.run(link.start(lambda messages: None, lambda reason: None))
    assert link._thread is not None
    link._thread.join(300)
    assert not link._thread.is_alive()

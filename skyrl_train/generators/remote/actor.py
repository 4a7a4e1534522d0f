"""An actor, as the process that trains sees it: calls that begin and end there, and the requests that it has.

| loop | consumes | waits for | is unblocked by | produces |
|---|---|---|---|---|
| a call | a generator's input | its end in the actor | the reader | a generator's output |
| the reader | events of the actor | the next ones | the actor | ends of calls, a task per request |
| a request | what the actor asks | the client | engines | an answer, sent to the actor |
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
from collections.abc import Callable
from contextlib import aclosing
from typing import Protocol

from skyrl_train.errors import GeneratorOutputError, RolloutActorError, RolloutError
from skyrl_train.generators.base import GeneratorInput, GeneratorOutput
from skyrl_train.generators.remote.messages import (
    Answer,
    Ask,
    Begin,
    Cancel,
    CentralState,
    Command,
    Event,
    Failed,
    Message,
    Part,
    Played,
    Setup,
    Withdraw,
)
from skyrl_train.inference.requests import GenerationService

logger = logging.getLogger(__name__)


class LinkLost(Exception):
    """Nobody is at the other end, or nobody came; the message says why."""


class Link(Protocol):
    """The way to a :class:`~skyrl_train.generators.remote.host.GeneratorHost` that it brings up itself."""

    async def start(self, setup: Setup, state: CentralState) -> Failed | None:
        """Brings the host up; raises LinkLost where that is not possible."""

    def send(self, sequence: int, message: Message) -> None:
        """Sends a message; never blocks."""

    async def next_events(self) -> list[Event]:
        """The next events; raises LinkLost once the host is gone."""

    async def stop(self) -> None:
        """Ends the host, whatever it is doing. Idempotent; fine without ``start``."""


class RolloutActor:
    """One actor. After it has died, :meth:`start` makes a new one.

    Args:
        name: what errors and logs call it.
        new_link: makes the way to a new host.
        client: answers the actor's requests.
        state: how things stand now.
        on_lost: called when the actor has died, after its calls have failed.
    """

    def __init__(
        self,
        name: str,
        new_link: Callable[[], Link],
        setup: Setup,
        client: GenerationService,
        state: Callable[[], CentralState],
        on_lost: Callable[[RolloutActor], None],
    ) -> None:
        self.name = name
        self._new_link = new_link
        self._setup = setup
        self._client = client
        self._state = state
        self._on_lost = on_lost
        self._numbers = itertools.count(1)  # never used twice: what a dead actor had is no other one's
        self._link: Link | None = None
        self._sequence = itertools.count()
        self._outbox: list[Command] = []
        self._reading: asyncio.Task[None] | None = None
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._asks: dict[int, asyncio.Task[None]] = {}

    @property
    def alive(self) -> bool:
        """Whether it takes calls."""
        return self._link is not None

    @property
    def outstanding(self) -> int:
        """Calls that have not ended."""
        return len(self._calls)

    @property
    def requests(self) -> int:
        """Requests of the actor that are being answered."""
        return len(self._asks)

    async def start(self) -> None:
        """Brings the actor up; returns when its generator takes calls.

        Raises:
            RolloutActorError: there is no room for it, or it ended while it started.
            SkyRLError: its generator could not be built or started.
        """
        link = self._new_link()
        try:
            failed = await link.start(self._setup, self._state())
        except LinkLost as lost:
            await link.stop()
            raise RolloutActorError(f"{self.name} did not start: {lost}") from lost
        except BaseException:
            await link.stop()
            raise
        if failed is not None:
            await link.stop()
            raise failed.error()
        self._sequence, self._outbox = itertools.count(), []
        self._link = link
        self._reading = asyncio.create_task(self._read(link), name=f"{self.name}-reader")

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Has the actor play ``input_batch``. Cancelled, it waits until the actor has cleaned up.

        Raises:
            RolloutActorError: the actor died meanwhile.
            SkyRLError: what the generator raised, by class and message.
        """
        begin = Begin(next(self._numbers), _pickled(input_batch))
        ended = self._calls[begin.call] = asyncio.get_running_loop().create_future()
        self._send(begin)
        try:
            await asyncio.wait([ended])
        except asyncio.CancelledError:
            self._send(Cancel(begin.call))
            await asyncio.wait([ended])
            ended.exception()  # it concerns nobody any more
            raise
        finally:
            del self._calls[begin.call]
        return _unpickled(ended.result())

    async def stop(self) -> None:
        """Closes the generator and ends the actor; calls that run fail. Idempotent."""
        link, reading = self._link, self._reading
        self._link = self._reading = None
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await self._end_all("it was stopped")
        if link is not None:
            await link.stop()

    # What the actor says ------------------------------------------------------------------------------------------

    async def _read(self, link: Link) -> None:
        reason = await self._until_lost(link)
        logger.error("%s is gone with %d rollouts: %s", self.name, len(self._calls), reason)
        self._link = None
        await self._end_all(reason)
        await link.stop()
        self._on_lost(self)

    async def _until_lost(self, link: Link) -> str:
        """Takes events until there can be no more of them; returns why."""
        try:
            while True:
                for event in await link.next_events():
                    self._take(event)
        except LinkLost as lost:
            return str(lost)
        except (
            Exception
        ) as error:  # a bug of ours: nobody listens to the actor any more, which is the same for its calls
            return repr(error)

    def _take(self, event: Event) -> None:
        match event:
            case Ask():
                task = asyncio.create_task(self._answer(event), name=f"{self.name}-{event.ask}")
                self._asks[event.ask] = task
                task.add_done_callback(lambda task: self._answered(event.ask, task))
            case Withdraw():
                if (asked := self._asks.get(event.ask)) is not None:
                    asked.cancel()
            case Played():
                if (call := self._calls.get(event.call)) is not None and not call.done():
                    call.set_result(event.pickled)
            case Failed():
                if (call := self._calls.get(event.number)) is not None and not call.done():
                    call.set_exception(event.error())

    async def _answer(self, ask: Ask) -> None:
        try:
            if ask.streamed:
                async with aclosing(self._client.stream(ask.request)) as chunks:
                    async for chunk in chunks:
                        self._send(Part(ask.ask, chunk))
            else:
                self._send(Answer(ask.ask, await self._client.complete(ask.request)))
        except Exception as error:  # crosses the border as data, whatever it is
            self._send(Failed.of(ask.ask, error))

    def _answered(self, number: int, task: asyncio.Task[None]) -> None:
        if self._asks.get(number) is task:
            del self._asks[number]

    async def _end_all(self, reason: str) -> None:
        """Cancels its requests in the engines; then its calls fail, so that another attempt finds nothing of this one."""
        asks = list(self._asks.values())
        for task in asks:
            task.cancel()
        await asyncio.gather(*asks, return_exceptions=True)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(RolloutActorError(f"{self.name} is gone: {reason}"))

    # What it is told ----------------------------------------------------------------------------------------------

    def _send(self, command: Command) -> None:
        """Commands of one turn of the loop travel together."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(command)

    def _flush(self) -> None:
        commands, self._outbox = self._outbox, []
        if commands and self._link is not None:
            self._link.send(next(self._sequence), Message(self._state(), tuple(commands)))


def _pickled(input_batch: GeneratorInput) -> bytes:
    try:
        return pickle.dumps(input_batch)
    except Exception as error:  # whatever somebody's object does when it is pickled
        raise RolloutError(
            f"the prompts cannot travel to an actor: {error}. Their fields must be plain data, or set rollout.num_actors=0."
        ) from error


def _unpickled(pickled: bytes) -> GeneratorOutput:
    try:
        output: GeneratorOutput = pickle.loads(pickled)
    except Exception as error:  # whatever somebody's object does when it is unpickled
        raise GeneratorOutputError(
            f"the generator's output cannot be read outside of its actor: {error}. It must be plain data; see GeneratorOutput."
        ) from error
    return output

"""What runs inside the Ray actor: any engine behind three calls. Knows nothing of Ray, so that it can run anywhere.

proxy ──send([commands])──> EngineHost ──task per command──> engine
      <──next_events()───── outbox (what became ready since the last call, in one message)

A remote call costs about a millisecond whatever it carries, so that none is made per token: while one message travels,
the next one gathers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from skyrl_train import errors
from skyrl_train.config.import_path import import_name
from skyrl_train.errors import EngineError, SkyRLError
from skyrl_train.inference.interface import EngineCapabilities, InferenceEngineInterface, TokenChunk
from skyrl_train.inference.shared_area import SharedArea
from skyrl_train.inference.weight_update import WeightUpdate


@dataclass(frozen=True, slots=True)
class Run:
    """Call ``method`` of the engine; its outcome comes back as a ``Done`` or ``Failed`` under the same ``id``."""

    id: int
    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for these any more; no event about them needs to come."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tokens:
    """A part of the stream ``id``."""

    id: int
    chunk: TokenChunk


@dataclass(frozen=True, slots=True)
class Done:
    """The command ``id`` has ended with ``value`` (None for a stream)."""

    id: int
    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """The command ``id`` has raised ``kind``, a class of :mod:`skyrl_train.errors`."""

    id: int
    kind: str
    message: str

    def error(self) -> SkyRLError:
        """The same error on this side of the border."""
        cls: type[SkyRLError] = getattr(errors, self.kind)
        return cls(self.message)


Command = Run | Cancel
Event = Tokens | Done | Failed


@dataclass(frozen=True, slots=True)
class Started:
    """What the proxy needs to know of a running engine."""

    capabilities: EngineCapabilities
    policy_version: int
    pid: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Events in the order in which they happened, and the version that the engine held when they were collected."""

    events: list[Event]
    policy_version: int


class EngineHost:
    """Builds ``factory(**arguments)`` on :meth:`start` and serves it. All methods run on one event loop.

    Args:
        factory: import path of what returns an engine.
    """

    def __init__(self, factory: str, arguments: Mapping[str, Any]) -> None:
        self._factory = factory
        self._arguments = arguments
        self._engine: InferenceEngineInterface | None = None
        self._outbox: list[Event] = []
        self._arrival = asyncio.Event()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._inbox = InOrder()
        self._relay = WeightRelay()

    async def start(self) -> Started | Failed:
        """Builds the engine and brings it up."""
        try:
            self._engine = engine = import_name(self._factory, "factory")(**self._arguments)
            await engine.start()
        except Exception as error:  # crosses the border as data, whatever it is
            return failure(0, error)
        return Started(engine.capabilities, engine.policy_version, os.getpid())

    async def send(self, sequence: int, commands: Sequence[Command]) -> None:
        """Takes the ``sequence``-th message of the proxy; returns at once."""
        for message in self._inbox.put(sequence, commands):
            for command in message:
                self._obey(command)

    async def next_events(self) -> Batch:
        """Waits until there is something to tell, and returns all of it. One call at a time."""
        await self._arrival.wait()
        self._arrival.clear()
        events, self._outbox = self._outbox, []
        return Batch(merged(events), self._started().policy_version)

    async def write_weights(self, num_bytes: int, offset: int, part: npt.NDArray[np.uint8]) -> None:
        """Takes a part of a staging copy of ``num_bytes`` that lies on the proxy's machine."""
        self._relay.write(num_bytes, offset, part)

    async def stop(self) -> None:
        """Tears the engine down."""
        for task in self._tasks.values():
            task.cancel()
        if self._engine is not None:
            await self._engine.teardown()
        self._relay.close()

    def _obey(self, command: Command) -> None:
        if isinstance(command, Run):
            self._tasks[command.id] = asyncio.create_task(self._run(command), name=f"engine-host-{command.method}")
            return
        for command_id in command.ids:
            if (abandoned := self._tasks.pop(command_id, None)) is not None:
                abandoned.cancel()

    def _started(self) -> InferenceEngineInterface:
        assert self._engine is not None, "the proxy calls start() first"
        return self._engine

    async def _run(self, command: Run) -> None:
        engine = self._started()
        try:
            match command.method:
                case "stream":
                    await self._stream(command)
                    outcome: Event = Done(command.id, None)
                case "receive_relayed":
                    await engine.receive_weights(self._relay.take(*command.arguments))
                    outcome = Done(command.id, None)
                case "load_weights":
                    await engine.load_weights(self._relay.here(*command.arguments))
                    outcome = Done(command.id, None)
                case method:
                    outcome = Done(command.id, await getattr(engine, method)(*command.arguments))
        except Exception as error:  # crosses the border as data, whatever it is
            outcome = failure(command.id, error)
        if self._tasks.pop(command.id, None) is not None:
            self._tell(outcome)

    async def _stream(self, command: Run) -> None:
        stream = self._started().stream(*command.arguments)
        try:
            async for chunk in stream:
                self._tell(Tokens(command.id, chunk))
        finally:
            await stream.aclose()  # type: ignore[attr-defined]  # leaving early aborts the request in the engine

    def _tell(self, event: Event) -> None:
        self._outbox.append(event)
        self._arrival.set()


def failure(command_id: int, error: Exception) -> Failed:
    """An error as data: ours under its own class, anybody else's as an :class:`EngineError` that names it."""
    if isinstance(error, SkyRLError) and getattr(errors, type(error).__name__, None) is type(error):
        return Failed(command_id, type(error).__name__, str(error))
    return Failed(command_id, EngineError.__name__, f"the hosted engine raised {type(error).__name__}: {error}")


def merged(events: Iterable[Event]) -> list[Event]:
    """The same events with what became ready of one stream in one chunk; the order within each command stays."""
    result: list[Event] = []
    open_chunks: dict[int, int] = {}  # stream -> where in the result its chunk stands
    for event in events:
        if isinstance(event, Tokens) and event.id in open_chunks:
            place = open_chunks[event.id]
            before = result[place]
            assert isinstance(before, Tokens)
            result[place] = Tokens(event.id, _joined(before.chunk, event.chunk))
        else:
            if isinstance(event, Tokens):
                open_chunks[event.id] = len(result)
            result.append(event)
    return result


def _joined(first: TokenChunk, second: TokenChunk) -> TokenChunk:
    top = None
    if first.top_logprobs is not None or second.top_logprobs is not None:
        top = [*(first.top_logprobs or ()), *(second.top_logprobs or ())]
    return TokenChunk(
        first.token_ids + second.token_ids,
        first.logprobs + second.logprobs,
        first.versions + second.versions,
        second.stop_reason,
        top,
    )


class InOrder:
    """Messages in the order of their numbers (0, 1, ...): a large one can be overtaken on its way."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, Sequence[Command]] = {}

    def put(self, sequence: int, message: Sequence[Command]) -> list[Sequence[Command]]:
        """Takes a message; returns those whose turn it is now."""
        self._early[sequence] = message
        due = []
        while self._next in self._early:
            due.append(self._early.pop(self._next))
            self._next += 1
        return due


class WeightRelay:
    """Staging copies that arrived over the network, where a receiver of shared memory on this machine finds them.

    Two areas take turns, as at the trainer: what was received last must stay as it is until it has been loaded.
    """

    def __init__(self) -> None:
        self._areas: list[SharedArea] = []
        self._filling = 0
        self._taken: tuple[WeightUpdate, WeightUpdate] | None = None  # as it was sent, as it lies here

    def write(self, num_bytes: int, offset: int, part: npt.NDArray[np.uint8]) -> None:
        """Copies ``part`` (uint8 ``[n]``) to its place in the area being filled."""
        while len(self._areas) <= self._filling:
            self._areas.append(SharedArea(num_bytes))
        if len(self._areas[self._filling].memory) != num_bytes:
            self._areas[self._filling].close()
            self._areas[self._filling] = SharedArea(num_bytes)
        memory = np.frombuffer(self._areas[self._filling].memory, dtype=np.uint8)
        memory[offset : offset + len(part)] = part

    def take(self, update: WeightUpdate) -> WeightUpdate:
        """The update whose bytes have all been written, with its location on this machine."""
        here = dataclasses.replace(update, location=self._areas[self._filling].location)
        self._filling = 1 - self._filling
        self._taken = update, here
        return here

    def here(self, update: WeightUpdate) -> WeightUpdate:
        """The update with its location on this machine if it was relayed, else as it is."""
        return self._taken[1] if self._taken is not None and self._taken[0] == update else update

    def close(self) -> None:
        """Frees the areas."""
        for area in self._areas:
            area.close()
        self._areas.clear()

"""What runs inside an actor: the generator, behind three calls. Knows nothing of Ray, so that it can run anywhere.

    centre ──send(Begin, Answer, ...)──> GeneratorHost ──task per call──> generator
           <──next_events(Ask, Played, ...)── outbox <── ForwardingClient <──┘

Nobody can call the centre: it asks for events, with one waiting call at a time, and sends answers.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
from contextlib import suppress

from skyrl_train.concurrency import cancel_within
from skyrl_train.errors import GeneratorOutputError, RolloutError
from skyrl_train.generators.base import GeneratorInterface, play
from skyrl_train.generators.remote.client import ForwardingClient
from skyrl_train.generators.remote.messages import (
    Answer,
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
)
from skyrl_train.inference.chat.renderer import ChatRenderer

CANCEL_LIMIT_S = 5.0  # what calls may take to end when the actor is stopped


class GeneratorHost:
    """Builds a generator on :meth:`start` and serves it. All methods run on one event loop."""

    def __init__(self) -> None:
        self._client: ForwardingClient | None = None
        self._generator: GeneratorInterface | None = None
        self._calls: dict[int, asyncio.Task[bytes]] = {}
        self._outbox: list[Event] = []
        self._arrival = asyncio.Event()
        self._early: dict[int, Message] = {}
        self._next_message = 0

    async def start(self, setup: Setup, state: CentralState) -> Failed | None:
        """Builds the generator and starts it; returns what that raised, if anything."""
        try:
            _import_from_where_the_centre_does(setup)
            renderer = ChatRenderer(
                setup.tokenizer,
                setup.spec.model_path,
                tool_parser=setup.tool_parser,
                reasoning_parser=setup.reasoning_parser,
            )
            self._client = client = ForwardingClient(setup.tokenizer, renderer, state, self._tell)
            self._generator = setup.spec.build(client, setup.tokenizer)
            self._generator.pace(lambda: client.state.may_begin)
            await self._generator.start()
        except Exception as error:  # crosses the border as data, whatever it is
            return Failed.of(0, error)
        return None

    async def send(self, sequence: int, message: Message) -> None:
        """Takes the ``sequence``-th message (0, 1, ...): a large one can be overtaken on its way. Returns at once."""
        self._early[sequence] = message
        while (due := self._early.pop(self._next_message, None)) is not None:
            self._next_message += 1
            self._started().state = due.state
            for command in due.commands:
                self._obey(command)

    async def next_events(self) -> list[Event]:
        """Waits until there is something to tell, and returns all of it. One call at a time."""
        await self._arrival.wait()
        self._arrival.clear()
        events, self._outbox = self._outbox, []
        return events

    async def stop(self) -> None:
        """Cancels what runs and closes the generator."""
        await cancel_within(list(self._calls.values()), CANCEL_LIMIT_S)
        if self._generator is not None:
            await self._generator.aclose()

    def _started(self) -> ForwardingClient:
        assert self._client is not None, "the centre calls start() first"
        return self._client

    def _obey(self, command: Command) -> None:
        match command:
            case Begin():
                task = asyncio.create_task(self._play(command.pickled), name=f"call-{command.call}")
                self._calls[command.call] = task
                task.add_done_callback(lambda task: self._ended(command.call, task))
            case Cancel():
                if (running := self._calls.get(command.call)) is not None:
                    running.cancel()
            case Answer() | Part():
                self._started().take(command, command.ask)
            case Failed():
                self._started().take(command, command.number)

    async def _play(self, pickled: bytes) -> bytes:
        assert self._generator is not None, "started first"
        output = await play(self._generator, pickle.loads(pickled))
        try:
            return pickle.dumps(output)
        except Exception as error:  # whatever somebody's object does when it is pickled
            raise GeneratorOutputError(
                f"the generator's output cannot leave its actor: {error}. It must be plain data; see GeneratorOutput."
            ) from error

    def _ended(self, call: int, task: asyncio.Task[bytes]) -> None:
        del self._calls[call]
        if task.cancelled():
            self._tell(Failed.of(call, RolloutError("it cancelled itself")))
        elif (error := task.exception()) is not None:
            self._tell(Failed.of(call, error))
        else:
            self._tell(Played(call, task.result()))

    def _tell(self, event: Event) -> None:
        self._outbox.append(event)
        self._arrival.set()


def _import_from_where_the_centre_does(setup: Setup) -> None:
    """What settings name by module or by file is found here too, where this node has it."""
    with suppress(OSError):
        os.chdir(setup.folder)
    sys.path += [path for path in setup.search_path if path not in sys.path]

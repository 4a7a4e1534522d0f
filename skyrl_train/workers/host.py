"""The host of an object in an actor that its driver polls. Knows nothing of Ray, so that it can run anywhere.

    driver ──deliver(number, messages)──> ActorHost: Peer ──task per call──> Hosted
           <──next_messages()──────────── outbox (all that became ready since the last call, in one batch)

An actor cannot call its driver, so the driver keeps one call of ``next_messages`` waiting. A remote call costs about a
millisecond even with little data; while one batch travels, the next one gathers.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

from skyrl_train.runtime.process import write_output_to
from skyrl_train.workers.connection import Peer
from skyrl_train.workers.messages import Item, Message


class Hosted:
    """Base of objects that are served on an event loop: in an actor, in a process. A subclass adds ``start``, called first, and
    what the driver may call."""

    driver: Peer  # calls the object that the driver serves, if any; set before ``start``

    def state(self) -> Any:
        """Return what the driver learns with every batch; None: nothing."""
        return None

    def take_state(self, state: Any) -> None:
        """Take the driver's state, which comes before each batch of its messages."""

    def joined(self, first: Any, second: Any) -> Any:
        """Return two consecutive items of a stream as one; called for items that wait for the same batch."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Clean up; the process is ended afterwards."""


class ActorHost:
    """Serves ``hosted()``. All methods run on one event loop.

    Args:
        log_file: for all output of this process, if this machine has its folder.
    """

    def __init__(self, hosted: type[Hosted], log_file: str | None = None) -> None:
        if log_file is not None:
            with suppress(OSError):
                write_output_to(Path(log_file))
        self._hosted = served = hosted()
        self._outbox: asyncio.Queue[list[Message]] = asyncio.Queue()
        self._peer = served.driver = Peer(
            self._outbox.put_nowait, served, own_state=served.state, on_state=served.take_state
        )
        self._early: dict[int, list[Message]] = {}
        self._next_batch = 0

    async def deliver(self, number: int, messages: list[Message]) -> None:
        """Take the driver's batch with this number (0, 1, ...); a large batch can be overtaken on its way."""
        # Batches are delivered in the order of their numbers: a Cancel must not overtake its Call.
        self._early[number] = messages
        while (due := self._early.pop(self._next_batch, None)) is not None:
            self._next_batch += 1
            self._peer.deliver(due)

    async def next_messages(self) -> list[Message]:
        """Wait until there is something to tell, and return all of it. One call at a time."""
        messages = await self._outbox.get()
        while not self._outbox.empty():
            messages += self._outbox.get_nowait()
        return join_items(messages, self._hosted)

    async def stop(self) -> None:
        """Cancel what runs and clean up."""
        await self._peer.end("its driver stops it")
        await self._hosted.stop()


def join_items(messages: list[Message], hosted: Hosted) -> list[Message]:
    """Return the same messages with the items of each stream in one, if ``hosted`` joins items; the order of each call's messages
    stays."""
    if type(hosted).joined is Hosted.joined:
        return messages
    result: list[Message] = []
    position: dict[int, int] = {}  # of a stream's item in the result
    for message in messages:
        if isinstance(message, Item) and message.id in position:
            before = result[position[message.id]]
            assert isinstance(before, Item)
            result[position[message.id]] = Item(message.id, hosted.joined(before.value, message.value))
        else:
            if isinstance(message, Item):
                position[message.id] = len(result)
            result.append(message)
    return result

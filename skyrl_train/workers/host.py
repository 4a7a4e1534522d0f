"""The host's end of a connection: the object that is served, and the loop that serves it.

driver ──frames──> socket ──> serve: Peer ──task per call──> Hosted
       <──frames── socket <── (all that became ready in one turn of the loop, in one batch)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from skyrl_train.workers.connection import Peer
from skyrl_train.workers.messages import Item, Message, encode, frames


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


def host_peer(hosted: Hosted, transmit: Callable[[list[Message]], None]) -> Peer:
    """Return the host's end of a connection, which serves ``hosted``.

    Args:
        transmit: sends a batch of messages to the driver; it must not block.
    """
    hosted.driver = Peer(
        lambda messages: transmit(join_items(messages, hosted)),
        hosted,
        own_state=hosted.state,
        on_state=hosted.take_state,
    )
    return hosted.driver


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hosted: Hosted) -> None:
    """Consumes frames / waits for the socket / unblocked by the driver or its end / produces messages.

    Returns when the driver has closed its end; ``hosted`` has cleaned up.
    """
    peer = host_peer(hosted, lambda messages: writer.write(encode(messages)))
    async for messages in frames(reader):
        peer.deliver(messages)
    await peer.end("its driver stops it")
    await hosted.stop()


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

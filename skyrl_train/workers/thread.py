"""Hosting in a thread of this process: starts at once, but shares the interpreter lock. It ends with its driver's event loop."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

from skyrl_train.config.import_path import import_name
from skyrl_train.workers.connection import OnGone, OnMessages, WorkerLink
from skyrl_train.workers.messages import Message

# Seconds between two looks at the driver's loop: its end is not told, and an idle thread would keep the process alive.
LOOK_S = 1.0


class ThreadLink(WorkerLink):
    """A thread that calls ``target`` with a ``Channel``.

    Args:
        target: import path ("module:function") of what serves the connection until the channel ends.
        name: of the thread.
    """

    def __init__(self, target: str, name: str) -> None:
        self._target = target
        self._name = name
        self._channel = _ThreadChannel()
        self._thread: threading.Thread | None = None

    async def start(self, on_messages: OnMessages, on_gone: OnGone) -> None:
        # Imported here and not in the thread: transformers' lazy imports break when two threads make them at once.
        target = import_name(self._target, "target", "function")
        loop = self._channel.loop = asyncio.get_running_loop()
        self._channel.on_messages = on_messages

        def run() -> None:
            try:
                target(self._channel)
            finally:
                with suppress(RuntimeError):  # the loop is closed: the driver has ended
                    loop.call_soon_threadsafe(on_gone, "its thread ended; look above for its last words")

        self._thread = threading.Thread(target=run, name=self._name)
        self._thread.start()

    def send(self, messages: list[Message]) -> None:
        with self._channel.changed:
            self._channel.inbox += messages
            self._channel.changed.notify()

    async def stop(self, graceful: bool) -> None:
        with self._channel.changed:
            self._channel.closed = True
            self._channel.changed.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)


class _ThreadChannel:
    """The thread's end. ``changed`` guards ``inbox`` and ``closed``."""

    loop: asyncio.AbstractEventLoop  # the driver's; set by the link, as the next one
    on_messages: OnMessages

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.inbox: list[Message] = []
        self.closed = False

    def receive(self, block: bool) -> list[Message]:
        with self.changed:
            while block and not self.changed.wait_for(lambda: self.inbox or self.closed, LOOK_S):
                self.closed = self.loop.is_closed()
            # Closed wins over messages that still wait: the driver does not read answers any more.
            if self.closed:
                raise EOFError
            messages, self.inbox = self.inbox, []
            return messages

    def send(self, messages: list[Message]) -> None:
        try:
            self.loop.call_soon_threadsafe(self.on_messages, messages)
        except RuntimeError as error:  # the loop is closed: the driver has ended
            raise EOFError from error

"""Hosting in a thread of this process: starts at once, but shares the interpreter lock."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from skyrl_train.config.import_path import import_name
from skyrl_train.workers.connection import OnGone, OnMessages, WorkerLink
from skyrl_train.workers.messages import Message
from skyrl_train.workers.process import Channel


class ThreadLink(WorkerLink):
    """A thread that calls ``target`` with a :class:`Channel`.

    Args:
        target: import path ("module:function") of what serves the connection until the channel ends.
        name: of the thread.
    """

    def __init__(self, target: str, name: str) -> None:
        self._target = target
        self._name = name
        self._inbox: deque[Message] = deque()
        self._arrival = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    async def start(self, on_messages: OnMessages, on_gone: OnGone) -> None:
        # Imported here and not in the thread: transformers' lazy imports break when two threads make them at once.
        target = import_name(self._target, "target", "function")
        self._loop, self._on_messages, self._on_gone = asyncio.get_running_loop(), on_messages, on_gone
        self._thread = threading.Thread(target=self._run, args=(target,), name=self._name)
        self._thread.start()

    def send(self, messages: list[Message]) -> None:
        with self._arrival:
            self._inbox += messages
            self._arrival.notify()

    async def stop(self, graceful: bool) -> None:
        with self._arrival:
            self._closed = True
            self._arrival.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _run(self, target: Callable[[Channel], None]) -> None:
        try:
            target(_ThreadChannel(self))
        finally:
            self._tell(lambda: self._on_gone("its thread ended; look above for its last words"))

    def _tell(self, function: Callable[[], None]) -> bool:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed: the driver has ended
            return False
        return True


class _ThreadChannel:
    def __init__(self, link: ThreadLink) -> None:
        self._link = link

    def receive(self, block: bool) -> list[Message]:
        link = self._link
        with link._arrival:
            if block:
                link._arrival.wait_for(lambda: link._inbox or link._closed)
            # Closed wins over messages that still wait: the driver does not read answers any more.
            if link._closed:
                raise EOFError
            messages = list(link._inbox)
            link._inbox.clear()
            return messages

    def send(self, messages: list[Message]) -> None:
        if not self._link._tell(lambda: self._link._on_messages(messages)):
            raise EOFError

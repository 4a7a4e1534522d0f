"""Where the engine's worker runs, seen from the control loop: a thread of this process, or a process of its own.

A host carries commands one way and batches of events the other, in order, and says once when the worker is gone.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from skyrl_train.child_process import ChildProcess, encode, read_frame
from skyrl_train.inference.engines.embedded.messages import Close, Command, EngineSettings, Event

OnEvents = Callable[[list[Event]], None]
OnGone = Callable[[], None]


class Host(ABC):
    """All methods belong to the control loop, and so do the calls of ``on_events`` and ``on_gone``."""

    @abstractmethod
    async def start(self, on_events: OnEvents, on_gone: OnGone) -> None:
        """Starts the worker and returns without waiting for its model."""

    @abstractmethod
    def send(self, command: Command) -> None:
        """Queues a command; never blocks. Lost if the worker is gone."""

    @abstractmethod
    async def stop(self) -> None:
        """Ends the worker and waits for it. Idempotent."""


class ThreadHost(Host):
    """A thread of this process: starts at once, but shares the interpreter lock with whatever else runs here."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._inbox = _Inbox()
        self._thread: threading.Thread | None = None

    async def start(self, on_events: OnEvents, on_gone: OnGone) -> None:
        # Here and not in the thread: transformers' lazy imports break when two threads make them at once.
        from skyrl_train.inference.engines.embedded.core import build_core
        from skyrl_train.inference.engines.embedded.worker import Worker

        self._loop, self._on_gone = asyncio.get_running_loop(), on_gone
        channel = _ThreadChannel(self._inbox, lambda events: self._deliver(on_events, events))
        self._worker = Worker(lambda: build_core(self._settings), channel)
        self._thread = threading.Thread(target=self._run, name="embedded-engine")
        self._thread.start()

    def send(self, command: Command) -> None:
        self._inbox.put(command)

    async def stop(self) -> None:
        self._inbox.put(Close())
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            self._worker.run()
        finally:
            self._call(self._on_gone)

    def _deliver(self, on_events: OnEvents, events: list[Event]) -> None:
        if not self._call(on_events, events):
            raise EOFError

    def _call(self, function: Callable[..., None], *arguments: object) -> bool:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: nobody is there to hear it
            return False
        return True


class _Inbox:
    """Commands on their way to a thread."""

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._arrival = threading.Condition()

    def put(self, command: Command) -> None:
        with self._arrival:
            self._commands.append(command)
            self._arrival.notify()

    def take(self, block: bool) -> list[Command]:
        with self._arrival:
            if block:
                self._arrival.wait_for(lambda: self._commands)
            commands = list(self._commands)
            self._commands.clear()
            return commands


class _ThreadChannel:
    def __init__(self, inbox: _Inbox, deliver: OnEvents) -> None:
        self.receive = inbox.take
        self.send = deliver


class WorkerProcess(ChildProcess):
    """A process with its own interpreter that imports what an engine needs, and then waits for an engine's settings.

    Most of an engine's start-up is these imports. Whoever creates the process before the caller's own imports has them
    side by side.

    Args:
        num_threads: compute threads.
    """

    def __init__(self, num_threads: int = 1) -> None:
        super().__init__("skyrl_train.inference.engines.embedded.child", num_threads)


class ProcessHost(Host):
    """A worker process: ``worker``, or one that ``start`` creates with ``num_threads`` compute threads."""

    def __init__(self, settings: EngineSettings, num_threads: int, worker: WorkerProcess | None = None) -> None:
        self._settings = settings
        self._num_threads = num_threads
        self._worker = worker
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self, on_events: OnEvents, on_gone: OnGone) -> None:
        if self._worker is None:
            self._worker = await asyncio.to_thread(WorkerProcess, self._num_threads)
        reader, self._writer = await asyncio.open_connection(sock=self._worker.connection)
        self._writer.write(encode(self._settings))
        self._reading = asyncio.create_task(self._read(reader, on_events, on_gone), name="embedded-engine-reader")

    @property
    def pid(self) -> int | None:
        """The worker's process id, once started."""
        return None if self._worker is None else self._worker.pid

    def send(self, command: Command) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode([command]))

    async def stop(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._worker is not None:
            await asyncio.to_thread(self._worker.stop)

    async def _read(self, reader: asyncio.StreamReader, on_events: OnEvents, on_gone: OnGone) -> None:
        """Consumes frames / waits for the socket / unblocked by the worker or its end / produces events."""
        try:
            while True:
                on_events(await read_frame(reader))
        except (asyncio.IncompleteReadError, OSError):
            return
        finally:
            on_gone()

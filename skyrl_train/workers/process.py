"""Hosting in a child process: started by module name, connected by a socket, ended when its parent ends.

    driver: ProcessLink ──frames──> socket ──frames──> child: ``python -m skyrl_train.workers FD TARGET``, target(SocketChannel)

A child is a new interpreter, or where that is allowed and safe a fork, which has its imports from its parent. It is not
``multiprocessing``'s spawned one, which would import the caller's main module again and would outlive a parent that is killed.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import ClassVar

from skyrl_train.config.import_path import import_name
from skyrl_train.runtime.process import gc_paused
from skyrl_train.workers.connection import OnGone, OnMessages, WorkerLink
from skyrl_train.workers.host import Hosted, serve
from skyrl_train.workers.messages import HEADER_BYTES, Message, encode, frames

logger = logging.getLogger(__name__)

EXIT_LIMIT_S = 1.0  # time between a process closing its socket and its end


def single_threaded() -> bool:
    """Return whether this process can be forked: on Linux, with no thread of Python or of a library but this one.

    A fork has none of the other threads, but the locks that they hold.
    """
    threads = Path("/proc/self/task")
    return threads.is_dir() and len(list(threads.iterdir())) == 1


class ChildProcess:
    """A process that calls ``target`` with a :class:`SocketChannel`.

    Args:
        target: import path ("module:function") of what serves the connection.
        num_threads: compute threads; None: as the environment says.
        fork: import ``target`` here and fork, if this process has a single thread; what exists then is exempt from garbage
            collection until ``gc.unfreeze()``. Not for a child that uses CUDA, which works in one process of a family only.
    """

    # This process' ends of the connections to all children.
    _ends: ClassVar[weakref.WeakSet[socket.socket]] = weakref.WeakSet()

    def __init__(self, target: str, num_threads: int | None = 1, *, fork: bool = False) -> None:
        # The child holds the only other end: the parent sees the end of the socket when the child ends.
        self.connection, theirs = socket.socketpair()
        self._ends.add(self.connection)
        with theirs:
            start = self._fork if fork and single_threaded() else self._spawn
            self._process: BaseProcess | subprocess.Popen[bytes] = start(theirs, target, num_threads)
        assert self._process.pid is not None, "it is started"
        self.pid = self._process.pid
        self._waiting = threading.Lock()

    def _fork(self, theirs: socket.socket, target: str, num_threads: int | None) -> BaseProcess:
        import_name(target, "target", "function")
        # A collection writes to all objects that it looks at, and would copy their pages in each process.
        gc.freeze()

        def serve() -> None:
            os.setsid()  # like a new interpreter's
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.environ.update(_threads(num_threads))
            for end in list(self._ends):  # with a copy here, no child would see the end of its parent
                end.close()
            serve_parent(theirs, target)

        process = multiprocessing.get_context("fork").Process(target=serve, daemon=True)
        process.start()
        return process

    def _spawn(self, theirs: socket.socket, target: str, num_threads: int | None) -> subprocess.Popen[bytes]:
        environment = os.environ | _threads(num_threads)
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)  # the same packages as here
        return subprocess.Popen(
            [sys.executable, "-m", "skyrl_train.workers", str(theirs.fileno()), target],
            env=environment,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches the parent only, even before the child ignores it
        )

    def wait(self, limit_s: float | None = None) -> int | None:
        """Wait for the end of the process. Return its exit code (negative: a signal), or None if it still runs.

        Threads may call it together: the code of a process can be collected only once.
        """
        with self._waiting:
            if isinstance(self._process, BaseProcess):
                self._process.join(limit_s)
                return self._process.exitcode
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(limit_s)
            return self._process.returncode

    def stop(self) -> None:
        """End the process, with those that it has started, and wait for it. Idempotent."""
        self.connection.close()
        with self._waiting:
            # It has nothing to save, and may be in the middle of something long. Its id is not used again before wait().
            process = self._process
            runs = process.is_alive() if isinstance(process, BaseProcess) else process.poll() is None
            if runs:
                try:
                    os.killpg(self.pid, signal.SIGKILL)
                except ProcessLookupError:  # a fork that does not lead its session yet
                    process.kill()
        self.wait()


def _threads(number: int | None) -> dict[str, str]:
    return {} if number is None else {"OMP_NUM_THREADS": str(number), "MKL_NUM_THREADS": str(number)}


def serve_parent(connection: socket.socket, target: str) -> None:
    """In the child: call ``target`` with the channel to the parent. The process ends at once, with those that it has started, if
    the parent ends or closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and closes the socket in its own time

    def end_with_parent() -> None:
        # The kernel also closes the parent's end when the parent is killed, unless the parent has forks that hold it open.
        end = select.poll()
        end.register(connection, 0)  # no event but the hang-up, which is always reported
        if hasattr(os, "pidfd_open"):  # Linux
            with suppress(OSError):  # an old kernel; the hang-up is enough for all but such forks
                end.register(os.pidfd_open(os.getppid()), select.POLLIN)
        end.poll()
        os.killpg(0, signal.SIGKILL)  # its own group: it leads a session

    threading.Thread(target=end_with_parent, name="parent-watch", daemon=True).start()
    with suppress(EOFError):
        # Imported late: the end of the parent must be noticed, and Ctrl-C ignored, during imports that take seconds.
        with gc_paused():
            function = import_name(target, "target", "function")
        function(SocketChannel(connection))


def serve_hosted(channel: SocketChannel, hosted: type[Hosted]) -> None:
    """In the child: serve ``hosted()`` on an event loop, until the parent lets it clean up and end."""

    async def served() -> None:
        reader, writer = await asyncio.open_connection(sock=channel.connection)
        await serve(reader, writer, hosted())

    asyncio.run(served())


class ProcessLink(WorkerLink):
    """A child process: ``child`` if it was started earlier, else one that :meth:`start` creates.

    Args:
        stop_timeout_s: how long a graceful :meth:`stop` waits for the child to clean up and end; 0: it has nothing to clean up.
    """

    def __init__(
        self,
        target: str,
        num_threads: int | None = 1,
        child: ChildProcess | None = None,
        *,
        stop_timeout_s: float = 0.0,
    ) -> None:
        self.child = child
        self._target = target
        self._num_threads = num_threads
        self._stop_timeout_s = stop_timeout_s
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._stopping = asyncio.Lock()  # a second stop waits for the first

    async def start(self, on_messages: OnMessages, on_gone: OnGone) -> None:
        if self.child is None:
            self.child = await asyncio.to_thread(ChildProcess, self._target, self._num_threads)
        child = self.child
        reader, self._writer = await asyncio.open_connection(sock=self.child.connection)

        async def read() -> None:
            """Consumes frames / waits for the socket / unblocked by the child or its end / produces messages."""
            try:
                async for messages in frames(reader):
                    on_messages(messages)
            except Exception as error:  # nobody listens to it any more, as if it were dead
                logger.exception("messages of a process cannot be read")
                on_gone(f"its messages cannot be read: {error!r}")
                return
            code = await asyncio.to_thread(child.wait, EXIT_LIMIT_S)
            on_gone(f"its process ended with exit code {code}")  # negative: a signal; None: it runs

        self._reading = asyncio.create_task(read(), name="worker-reader")

    def send(self, messages: list[Message]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(messages))

    async def stop(self, graceful: bool) -> None:
        async with self._stopping:
            try:
                if graceful and self._stop_timeout_s and self.child is not None and self._writer is not None:
                    with suppress(OSError):  # it has just ended
                        self._writer.write_eof()
                    if await asyncio.to_thread(self.child.wait, self._stop_timeout_s) is None:
                        limit_s = self._stop_timeout_s
                        logger.warning("process %d has not ended within %g s and is killed", self.child.pid, limit_s)
            finally:
                if self._writer is not None:
                    self._writer.close()
                if self._reading is not None:
                    self._reading.cancel()
                    await asyncio.gather(self._reading, return_exceptions=True)
                if self.child is not None:
                    await asyncio.to_thread(self.child.stop)


class SocketChannel:
    """A blocking end of a socket: the child's ``Channel`` to its parent."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def receive(self, block: bool) -> list[Message]:
        messages: list[Message] = []
        while self._poll.poll(None if block and not messages else 0):
            size = int.from_bytes(self._exactly(HEADER_BYTES), "big")
            messages += pickle.loads(self._exactly(size))
        return messages

    def send(self, messages: list[Message]) -> None:
        frame = encode(messages)
        try:
            self.connection.sendall(frame)
        except OSError as error:
            raise EOFError from error

    def _exactly(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            try:
                part = self.connection.recv(size - len(received))
            except OSError as error:
                raise EOFError from error
            if not part:
                raise EOFError
            received += part
        return bytes(received)

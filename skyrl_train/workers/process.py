"""Hosting in a child process: started by module name, connected by a socket, ended when its parent ends.

    driver: ProcessLink ──frames──> socket ──frames──> child: ``python -m skyrl_train.workers FD TARGET``, target(ParentChannel)

A child is a new interpreter and not a ``multiprocessing`` one, which would import the caller's main module again and would
outlive a parent that is killed. A frame is an 8-byte big-endian length and a pickled batch of messages. A pickle can run
code: both ends of the socket are this program.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import select
import socket
import subprocess
import sys
from contextlib import suppress

from skyrl_train.workers.connection import OnGone, OnMessages, WorkerLink
from skyrl_train.workers.messages import Message

HEADER_BYTES = 8
EXIT_LIMIT_S = 1.0  # time between a process closing its socket and its end


def encode(messages: list[Message]) -> bytes:
    """Return one frame."""
    payload = pickle.dumps(messages, protocol=pickle.HIGHEST_PROTOCOL)
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


class ChildProcess:
    """A process with its own interpreter that calls ``target`` with a :class:`ParentChannel`.

    Args:
        target: import path ("module:function") of what serves the connection.
        num_threads: compute threads.
    """

    def __init__(self, target: str, num_threads: int = 1) -> None:
        # The child holds the only other end: the parent sees the end of the socket when the child ends.
        self.connection, theirs = socket.socketpair()
        environment = dict(os.environ)
        environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = str(num_threads)
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)  # the same packages as here
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "skyrl_train.workers", str(theirs.fileno()), target],
                env=environment,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches the parent only, even before the child ignores it
            )
        self.pid = self.process.pid

    def stop(self) -> None:
        """End the process and wait for it. Idempotent."""
        self.connection.close()
        self.process.kill()  # it has nothing to save, and may be in the middle of something long
        self.process.wait()


class ProcessLink(WorkerLink):
    """A child process: ``child`` if it was started earlier, else one that :meth:`start` creates."""

    def __init__(self, target: str, num_threads: int = 1, child: ChildProcess | None = None) -> None:
        self.child = child
        self._target = target
        self._num_threads = num_threads
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self, on_messages: OnMessages, on_gone: OnGone) -> None:
        if self.child is None:
            self.child = await asyncio.to_thread(ChildProcess, self._target, self._num_threads)
        process = self.child.process
        reader, self._writer = await asyncio.open_connection(sock=self.child.connection)

        async def read() -> None:
            """Consumes frames / waits for the socket / unblocked by the child or its end / produces messages."""
            try:
                while True:
                    size = int.from_bytes(await reader.readexactly(HEADER_BYTES), "big")
                    on_messages(pickle.loads(await reader.readexactly(size)))
            except (asyncio.IncompleteReadError, OSError):
                with suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(process.wait, EXIT_LIMIT_S)
                on_gone(f"its process ended with exit code {process.returncode}")  # negative: a signal; None: it runs

        self._reading = asyncio.create_task(read(), name="worker-reader")

    def send(self, messages: list[Message]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(messages))

    async def stop(self, graceful: bool) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self.child is not None:
            await asyncio.to_thread(self.child.stop)


class ParentChannel:
    """The child's ``Channel`` to its parent."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
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
            self._connection.sendall(frame)
        except OSError as error:
            raise EOFError from error

    def _exactly(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            try:
                part = self._connection.recv(size - len(received))
            except OSError as error:
                raise EOFError from error
            if not part:
                raise EOFError
            received += part
        return bytes(received)

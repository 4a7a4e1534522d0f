"""Processes of this program beside it: started by a module's name, connected by a socket, gone when their parent is.

    parent: ChildProcess(module) ──frames──> socket ──frames──> child: ``python -m module FD``, connected_to_parent(FD)

By name rather than by ``multiprocessing``, which would import the caller's main module again, and would leave children
behind when the parent is killed. A frame is an 8-byte big-endian length and a pickle.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

HEADER_BYTES = 8
ENDING_S = 1.0  # what a process may take from closing its socket to its end


def encode(message: Any) -> bytes:
    """One frame."""
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


def _payload_bytes(header: bytes) -> int:
    return int.from_bytes(header, "big")


def _decode(payload: bytes) -> Any:
    """Only for sockets whose other end is this program: a pickle can run code."""
    return pickle.loads(payload)


# The parent's side --------------------------------------------------------------------------------------------------


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """The child's next message.

    Raises:
        asyncio.IncompleteReadError, OSError: the child is gone.
    """
    size = _payload_bytes(await reader.readexactly(HEADER_BYTES))
    return _decode(await reader.readexactly(size))


class ChildProcess:
    """A process with its own interpreter that runs ``module`` and is told over ``connection`` what to do.

    Args:
        num_threads: compute threads.
    """

    def __init__(self, module: str, num_threads: int = 1) -> None:
        self.connection, theirs = socket.socketpair()
        environment = dict(os.environ)
        environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = str(num_threads)
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)  # the same packages as here
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                env=environment,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches the parent only, even before the child ignores it
            )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def stop(self) -> None:
        """Ends the process and waits for it. Idempotent."""
        self.connection.close()
        self._process.kill()  # it has nothing to save, and may be in the middle of something long
        self._process.wait()

    def exit_code(self) -> int | None:
        """That of a process which has closed its end of the socket; negative: the signal that ended it. Blocks a little.

        None: it still runs.
        """
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_S)
        return self._process.returncode


# The child's side ---------------------------------------------------------------------------------------------------


@contextmanager
def connected_to_parent(descriptor: int) -> Iterator[socket.socket]:
    """The socket to the parent. The process ends at once when the parent's end of it is closed, which the kernel also
    does for a parent that is killed."""
    # Ctrl-C is the parent's business; it closes the socket in its own time.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as connection:
        threading.Thread(target=_end_with_parent, args=(connection,), name="parent-watch", daemon=True).start()
        yield connection


def _end_with_parent(connection: socket.socket) -> None:
    """Sleeps until the other end hangs up; then nobody wants this process, whatever it is in the middle of."""
    hang_up = select.poll()
    hang_up.register(connection, 0)  # no event but the hang-up, which is always reported
    hang_up.poll()
    os.kill(os.getpid(), signal.SIGKILL)


class ParentChannel:
    """Messages to and from the parent. Blocking: between two of them the child has nothing better to do."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def write(self, message: Any) -> None:
        """
        Raises:
            EOFError: the parent is gone.
        """
        frame = encode(message)
        try:
            self._connection.sendall(frame)
        except OSError as error:
            raise EOFError from error

    def read(self) -> Any:
        """The next message.

        Raises:
            EOFError: the parent is gone.
        """
        return _decode(self._exactly(_payload_bytes(self._exactly(HEADER_BYTES))))

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self._connection.recv(size - len(parts))
            except OSError as error:
                raise EOFError from error
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

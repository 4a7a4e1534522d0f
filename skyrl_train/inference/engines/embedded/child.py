"""The engine's own process: ``python -m skyrl_train.inference.engines.embedded.child FD``.

``FD`` is a socket to the parent; the first frame has the settings. The process ends at once when the parent's end of
the socket is closed, which the kernel also does for a parent that is killed.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import threading
from typing import Any

from skyrl_train.inference.engines.embedded.framing import HEADER_BYTES, decode, encode, payload_bytes
from skyrl_train.inference.engines.embedded.messages import Command, EngineSettings, Event


class SocketChannel:
    """The worker's end of the socket: blocking, because between two steps the worker has nothing better to do."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def receive(self, block: bool) -> list[Command]:
        """See :class:`worker.Channel`."""
        commands: list[Command] = []
        while self._poll.poll(None if block and not commands else 0):
            commands += self.read()
        return commands

    def send(self, events: list[Event]) -> None:
        """See :class:`worker.Channel`."""
        try:
            self._connection.sendall(encode(events))
        except OSError as error:
            raise EOFError from error

    def read(self) -> Any:
        """The next frame."""
        return decode(self._exactly(payload_bytes(self._exactly(HEADER_BYTES))))

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


def main(descriptor: int) -> None:
    """Serves the engine that the parent describes."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is the parent's business; it closes the socket in its own time
    with socket.socket(fileno=descriptor) as connection:
        threading.Thread(target=_end_with_parent, args=(connection,), name="parent-watch", daemon=True).start()
        channel = SocketChannel(connection)
        _serve(channel)


def _end_with_parent(connection: socket.socket) -> None:
    """Sleeps until the other end hangs up; then nobody wants this process, whatever it is in the middle of."""
    hang_up = select.poll()
    hang_up.register(connection, 0)  # no event but the hang-up, which is always reported
    hang_up.poll()
    os.kill(os.getpid(), signal.SIGKILL)


def _serve(channel: SocketChannel) -> None:
    # Late: the parent's end must be noticed, and Ctrl-C ignored, also during the seconds that these imports take. But
    # before the settings come, because the parent has imports of its own to make meanwhile.
    import transformers

    from skyrl_train.inference.engines.embedded.core import EmbeddedEngineCore, build_core
    from skyrl_train.inference.engines.embedded.worker import Worker

    _ = transformers.AutoModelForCausalLM, transformers.AutoTokenizer  # transformers imports by use
    try:
        settings: EngineSettings = channel.read()
    except EOFError:  # the parent found that it needs no engine
        return

    def build() -> EmbeddedEngineCore:
        core = build_core(settings)
        # What is imported and built stays; a full collection that walks it would hold up every request for 100 ms.
        gc.collect()
        gc.freeze()
        return core

    Worker(build, channel).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))

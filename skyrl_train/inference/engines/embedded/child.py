"""The engine's own process: ``python -m skyrl_train.inference.engines.embedded.child FD``.

``FD`` is a socket to the parent; the first message has the settings. The process ends with its parent.
"""

from __future__ import annotations

import gc
import select
import socket
import sys

from skyrl_train.child_process import ParentChannel, connected_to_parent
from skyrl_train.inference.engines.embedded.messages import Command, EngineSettings, Event


class SocketChannel(ParentChannel):
    """The worker's end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
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
        self.write(events)


def main(descriptor: int) -> None:
    """Serves the engine that the parent describes."""
    with connected_to_parent(descriptor) as connection:
        _serve(SocketChannel(connection))


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

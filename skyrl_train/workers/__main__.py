"""A hosted object's child process: ``python -m skyrl_train.workers FD module:function``; ``FD`` is a socket to the parent."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from contextlib import suppress

from skyrl_train.config.import_path import import_name
from skyrl_train.workers.process import ParentChannel


def main(descriptor: int, target: str) -> None:
    """Call ``target`` with the channel to the parent. This process ends at once when the parent's end of it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and closes the socket in its own time
    with socket.socket(fileno=descriptor) as connection:

        def end_with_parent() -> None:
            # The kernel also closes the parent's end when the parent is killed.
            hang_up = select.poll()
            hang_up.register(connection, 0)  # no event but the hang-up, which is always reported
            hang_up.poll()
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=end_with_parent, name="parent-watch", daemon=True).start()
        with suppress(EOFError):
            # Imported late: the end of the parent must be noticed, and Ctrl-C ignored, during imports that take seconds.
            import_name(target, "target", "function")(ParentChannel(connection))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

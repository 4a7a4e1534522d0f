"""A hosted object's child process: ``python -m skyrl_train.workers FD module:function``; ``FD`` is a socket to the parent."""

from __future__ import annotations

import sys
from contextlib import suppress

from skyrl_train.config.import_path import import_name
from skyrl_train.workers.process import ParentChannel, connected_to_parent


def main(descriptor: int, target: str) -> None:
    """Call ``target`` with the channel to the parent."""
    with connected_to_parent(descriptor) as connection, suppress(EOFError):
        # Imported late: the end of the parent must be noticed, and Ctrl-C ignored, during imports that take seconds.
        import_name(target, "target", "function")(ParentChannel(connection))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

"""A hosted object's child process: ``python -m skyrl_train.workers FD module:function``; ``FD`` is a socket to the parent."""

from __future__ import annotations

import socket
import sys

from skyrl_train.workers.process import serve_parent

if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        serve_parent(connection, sys.argv[2])

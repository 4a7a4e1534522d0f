"""The target of a child process: it imports little, says where its modules are from, and waits for its parent."""

from __future__ import annotations

import os
import sys

from skyrl_train.workers.messages import Result
from skyrl_train.workers.process import SocketChannel


def serve(channel: SocketChannel) -> None:
    channel.send([Result(0, (os.environ["OMP_NUM_THREADS"], "parents_own" in sys.modules))])
    channel.receive(block=True)

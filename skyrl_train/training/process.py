"""The child process that trains. Imports no torch: a program starts the process before its own imports."""

from __future__ import annotations

import os

from skyrl_train.workers.process import ChildProcess


class TrainingProcess(ChildProcess):
    """A child process that imports what training needs, and then waits for the settings of a model.

    It computes with ``OMP_NUM_THREADS`` threads, one by default, like a thread of this process would.
    """

    def __init__(self, *, fork: bool = False) -> None:
        threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
        super().__init__("skyrl_train.training.process_backend:serve", threads, fork=fork)

"""What the collector of a control process is told, and what it gives back."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, gc
from skyrl_train.garbage import settle_collector
atexit.register(lambda: print(gc.get_freeze_count()))  # runs after what is registered later
settle_collector()
print(gc.get_freeze_count())
"""


def test_nothing_is_frozen_any_more_when_the_interpreter_ends() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    while_running, at_the_end = map(int, done.stdout.split())
    assert while_running > 0
    assert at_the_end == 0

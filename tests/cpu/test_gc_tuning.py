"""Garbage-collector tuning lasts as long as its block."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from skyrl_train.runtime.process import gc_tuned

PROGRAM = """
import atexit, gc, sys
from skyrl_train.runtime.process import gc_tuned
atexit.register(lambda: print(gc.get_freeze_count()))
with gc_tuned():
    print(gc.get_freeze_count())
    sys.exit()
"""


@pytest.mark.usefixtures("freezing")
def test_the_block_freezes_objects_and_restores_the_collector() -> None:
    before = gc.get_threshold()
    with gc_tuned():
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold() != before
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == before


def test_nothing_is_frozen_when_the_interpreter_ends_inside_the_block() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    in_the_block, at_exit = map(int, done.stdout.split())
    assert in_the_block > 0
    assert at_exit == 0

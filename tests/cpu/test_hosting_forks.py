"""A child process that is forked from its parent: only where that is safe, and otherwise like any other child."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from typing import IO

import pytest

# Each program starts children and prints what they say and how they were started; then it waits for its standard input.
PROGRAM = """
import os, pickle, sys, threading, types
from pathlib import Path
from skyrl_train.workers.process import ChildProcess, HEADER_BYTES

sys.modules["parents_own"] = types.ModuleType("parents_own")

def child(fork):
    started = ChildProcess("waiting_child:serve", 3, fork=fork)
    with started.connection.dup().makefile("rb") as said:
        (result,) = pickle.loads(said.read(int.from_bytes(said.read(HEADER_BYTES), "big")))
    return started, result.value

{body}
sys.stdin.read()
"""


def program(body: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body=body)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def line_of(pipe: IO[str] | None) -> str:
    assert pipe is not None
    return pipe.readline()


def has_ended(pids: list[int]) -> None:
    """Returns when the processes have ended."""
    for pid in pids:
        try:
            watch = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        poll = select.poll()
        poll.register(watch, select.POLLIN)
        poll.poll()
        os.close(watch)


@pytest.mark.parametrize(
    ("before", "fork", "inherits"),
    [
        ("", True, True),
        ("", False, False),  # not asked for
        (
            "threading.Thread(target=threading.Event().wait, daemon=True).start()",
            True,
            False,
        ),  # locks would stay locked
    ],
    ids=["one thread", "not asked for", "two threads"],
)
def test_a_child_has_its_parents_modules_where_a_fork_is_safe(before: str, fork: bool, inherits: bool) -> None:
    with program(f"{before}\nstarted, value = child({fork})\nprint(value, flush=True)\nstarted.stop()\n") as parent:
        assert line_of(parent.stdout) == f"{('3', inherits)}\n"
        parent.communicate("")
    assert parent.returncode == 0


def test_a_forked_child_leads_a_session_and_ignores_ctrl_c_and_says_how_it_ended() -> None:
    body = """
import signal
started, _ = child(True)
assert os.getsid(started.pid) == started.pid != os.getsid(0)
os.kill(started.pid, signal.SIGINT)
print(started.wait(0), flush=True)
os.kill(started.pid, signal.SIGTERM)
print(started.wait(), flush=True)
started.stop()
"""
    with program(body) as parent:
        assert [line_of(parent.stdout) for _ in range(2)] == ["None\n", f"{-signal.SIGTERM}\n"]
        parent.communicate("")
    assert parent.returncode == 0


def test_forked_children_end_one_by_one_and_with_their_parent() -> None:
    """None holds a copy of the parent's end of another's connection: the other would not see it closed."""
    body = """
first, second, third = (child(True)[0] for _ in range(3))
first.connection.close()
first.wait()
print(second.pid, third.pid, flush=True)
"""
    with program(body) as parent:
        others = [int(pid) for pid in line_of(parent.stdout).split()]
        assert len(others) == 2
        parent.kill()
    has_ended(others)


@pytest.mark.parametrize("fork", [True, False])
def test_a_child_ends_with_its_parent_though_a_fork_of_it_holds_the_connection_open(fork: bool) -> None:
    body = f"""
import multiprocessing, signal
started, _ = child({fork})
holder = multiprocessing.get_context("fork").Process(target=signal.pause)
holder.start()
print(started.pid, holder.pid, flush=True)
"""
    with program(body) as parent:
        child, holder = map(int, line_of(parent.stdout).split())
        parent.kill()
        has_ended([child])
        os.kill(holder, signal.SIGKILL)

"""Runs the real command again and again, cheaply: each run is forked from a process that has imported everything.

``python -m forked_runs RUN`` is such a process; RUN is a JSON object (``arguments``, ``fault``, ``script``).
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import composition
import pytest
from faults import Fault
from forks import Forks

LIMIT_S = 540.0  # below the limit of a test; no run here takes as long on the busiest machine, and one that does hangs
STACKS_END = "end of the stacks\n"
RAISED = 99  # the exit code of a run that ended with an exception


def prepare() -> None:
    """Do what each run does first, in the process from which they are forked."""
    from skyrl_train.config.compose import compose
    from skyrl_train.environments.registry import registered_environments

    registered_environments()
    with pytest.MonkeyPatch.context() as patch:  # undone: not every program composes like this
        composition.install(patch)
        compose("quickstart", [])


def live(arguments: Sequence[str], fault: dict[str, object] | None, script: str | None) -> int:
    """One run. Returns its exit code."""
    patch = pytest.MonkeyPatch()
    composition.install(patch)
    Forks().install(patch)
    signal.signal(signal.SIGUSR1, print_tasks)
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)
    if fault is not None:
        Fault(**fault).install()  # type: ignore[arg-type]
    try:
        return train(arguments) if script is None else run_script(script, arguments)
    except Exception:
        traceback.print_exc()
        return RAISED


def train(arguments: Sequence[str]) -> int:
    from skyrl_train.entrypoints.command_line import main

    return main(["train", *arguments])


def run_script(script: str, arguments: Sequence[str]) -> int:
    """``python script arguments``; its exit code."""
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def print_tasks(*_: object) -> None:
    """Where each task of the loop waits; the threads' stacks are the fault handler's."""
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:  # no loop runs
        tasks = set()
    for task in tasks:
        sys.stderr.write(f"task {task.get_name()} waits in\n")
        waiting = task.get_coro()
        while (frame := getattr(waiting, "cr_frame", None)) is not None:
            sys.stderr.write(f"  {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}\n")
            waiting = getattr(waiting, "cr_await", None)
    sys.stderr.write(STACKS_END)


class ForkedRuns:
    """Starts runs and kills them."""

    def __init__(self, forks: Forks) -> None:
        self.forks = forks

    def run(
        self,
        output: Path,
        arguments: Sequence[str],
        kill_after_s: float | None = None,
        *,
        once_printed: str = "",
        fault: Fault | None = None,
        limit_s: float = LIMIT_S,
        script: Path | None = None,
    ) -> int | None:
        """Runs the command, or a ``script`` in the folder of ``output``, and returns its exit code, ``RAISED``, or None if it
        died of a signal.

        With ``kill_after_s`` it is killed that many seconds after it has printed ``once_printed``.

        Raises:
            AssertionError: after ``limit_s`` it still runs; the message has the stacks of its threads and tasks.
        """
        asked = {"arguments": [*arguments], "fault": fault and asdict(fault), "script": script and str(script)}
        with output.open("ab") as written:
            seen = written.tell()
            command = [sys.executable, "-m", "forked_runs", json.dumps(asked)]
            folder = Path.cwd() if script is None else output.parent
            process = self.forks.Popen(command, cwd=folder, stdout=written, stderr=written)
        while once_printed not in output.read_text()[seen:] and process.ended(0.01) is None:
            pass  # the look is the pause; a run that ends first ends the wait
        if kill_after_s is not None and process.ended(kill_after_s) is None:
            process.kill()
        code = process.ended(limit_s)
        if code is None:
            process.send_signal(signal.SIGUSR1)
            for _ in range(3000):  # half a minute: a main thread that never returns from C does not write its tasks
                if STACKS_END in output.read_text()[seen:] or process.ended(0.01) is not None:
                    break
            process.kill()
            raise AssertionError(f"the run hangs, {fault or 'without a fault'}:\n{output.read_text()[seen:]}")
        return None if code < 0 else code


if __name__ == "__main__":
    sys.exit(live(**json.loads(sys.argv[1])))

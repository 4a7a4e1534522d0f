"""Runs the real command again and again, cheaply: a server that has imported everything forks a child per run.

``python forked_runs.py ADDRESS`` reads one JSON object per line (``output``, ``arguments``, ``fault``, ``script``) and answers
with the child's pid; the child's output goes to the file ``output``. Programs that a run or a test starts are forked from it too:
:class:`Forks` asks at the socket ADDRESS.
"""

from __future__ import annotations

import asyncio
import atexit
import faulthandler
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
import python_forks
from faults import Fault
from python_forks import Forks

LIMIT_S = 300.0  # no run here takes as long, on the busiest machine; one that does hangs
STACKS_END = "end of the stacks\n"
RAISED = -1  # the "exit code" of a run that ended with an exception
# What the quickstart's run imports on its way. A module that is missing here is imported again by each child: torch and
# transformers take 15 s without bytecode.
IMPORTED_FIRST = (
    "skyrl_train.entrypoints.command_line",
    "skyrl_train.entrypoints.train",
    "skyrl_train.build.trainer",
    "skyrl_train.fully_async_trainer",
    "skyrl_train.generators.gym",
    "skyrl_train.inference.engines.embedded.engine_loop",
    "transformers.models.qwen3.modeling_qwen3",
)


def serve(address: str) -> None:
    import composition

    from skyrl_train.config.compose import compose
    from skyrl_train.environments.registry import registered_environments

    for module in IMPORTED_FIRST:
        importlib.import_module(module)
    registered_environments()
    composition.install(pytest.MonkeyPatch())
    compose("quickstart", [])
    assert threading.active_count() == 1, "a thread does not survive the fork, and the locks that it holds stay locked"
    gc.collect()
    gc.freeze()  # the children's own collections have little to walk
    fork = multiprocessing.get_context("fork")
    forks = python_forks.Server(address)
    Forks(address, lambda: None).install(pytest.MonkeyPatch())
    for line in forks.between(sys.stdin):
        asked = json.loads(line)
        fault = asked["fault"] and Fault(**asked["fault"])
        child = fork.Process(target=live, args=(asked["output"], asked["arguments"], fault, asked["script"]))
        child.start()
        sys.stdout.write(f"{child.pid}\n")
        sys.stdout.flush()


def live(output: str, arguments: Sequence[str], fault: Fault | None, script: str | None) -> None:
    """The child: one run. Its exit code is the last thing that it leaves, if it is not killed."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    signal.signal(signal.SIGUSR1, print_tasks)
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)
    if fault is not None:
        fault.install()
    try:
        code = train(arguments) if script is None else run_script(script, arguments, Path(output).parent)
    except Exception:
        traceback.print_exc()
        code = RAISED
    Path(output + ".code").write_text(str(code))
    # The interpreter's own end, which multiprocessing leaves out: threads first, then what is registered.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def train(arguments: Sequence[str]) -> int:
    from skyrl_train.entrypoints.command_line import main

    return main(["train", *arguments])


def run_script(script: str, arguments: Sequence[str], folder: Path) -> int:
    """``python script arguments``, with ``folder`` as the working directory; its exit code."""
    os.chdir(folder)
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


class ForkServer:
    """Starts runs and kills them. Use as a context manager. The server starts with the first process that is asked for."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None
        self._starting = threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="forks-")
        self._address = f"{self._folder.name}/socket"
        self.forks = Forks(self._address, self._start)

    def _start(self) -> subprocess.Popen[str]:
        with self._starting:
            if self._server is None:
                self._server = subprocess.Popen(
                    [sys.executable, __file__, self._address],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            return self._server

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            assert self._server.stdin is not None
            self._server.stdin.close()
            self._server.wait()
        self._folder.cleanup()

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
        asked = {
            "output": str(output),
            "arguments": [*arguments],
            "fault": fault and asdict(fault),
            "script": script and str(script),
        }
        output.touch()
        seen = output.stat().st_size
        server = self._start()
        assert server.stdin is not None and server.stdout is not None
        code = Path(f"{output}.code")
        code.unlink(missing_ok=True)
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        pid = int(server.stdout.readline())
        try:
            watch = os.pidfd_open(pid)
        except ProcessLookupError:  # ended already
            return int(code.read_text()) if code.exists() else None
        poll = select.poll()
        poll.register(watch, select.POLLIN)
        try:
            while once_printed not in output.read_text()[seen:] and not poll.poll(10):
                pass  # the poll is the pause; a run that ends first ends the wait
            if kill_after_s is not None and not poll.poll(kill_after_s * 1000):
                os.kill(pid, signal.SIGKILL)
            if not poll.poll(limit_s * 1000):
                os.kill(pid, signal.SIGUSR1)
                for _ in range(3000):  # half a minute: a main thread that never returns from C does not write its tasks
                    if STACKS_END in output.read_text()[seen:] or poll.poll(10):
                        break
                os.kill(pid, signal.SIGKILL)
                raise AssertionError(f"the run hangs, {fault or 'without a fault'}:\n{output.read_text()[seen:]}")
        finally:
            os.close(watch)
        return int(code.read_text()) if code.exists() else None


if __name__ == "__main__":
    serve(sys.argv[1])

"""Runs the real command again and again, cheaply: a server that has imported everything forks a child per run.

``python forked_runs.py`` reads one JSON list of arguments per line and answers with the child's pid; the child's output
goes to the file named first in the list.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def serve() -> None:
    import skyrl_train.assembly
    import skyrl_train.generators.gym
    import skyrl_train.inference.engines.embedded.core
    import skyrl_train.publication.shared_memory
    import skyrl_train.trainer
    import skyrl_train.training.local_backend  # noqa: F401
    from skyrl_train.entrypoints.train import main

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # killed children are reaped by the kernel
    for line in sys.stdin:
        output, *arguments = json.loads(line)
        pid = os.fork()
        if pid:
            sys.stdout.write(f"{pid}\n")
            sys.stdout.flush()
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        code = main(arguments)
        Path(output + ".code").write_text(str(code))
        sys.exit(code)


class ForkServer:
    """Starts runs and kills them. Use as a context manager."""

    def __enter__(self) -> ForkServer:
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=60)

    def run(
        self,
        output: Path,
        arguments: Sequence[str],
        kill_after_s: float | None = None,
        number: int = signal.SIGKILL,
        *,
        once_printed: str = "",
    ) -> int | None:
        """Runs the command and returns its exit code, None if it died.

        With ``kill_after_s`` it gets the signal ``number`` that many seconds after it has printed ``once_printed``.
        """
        output.touch()
        seen = output.stat().st_size
        assert self._server.stdin is not None and self._server.stdout is not None
        code = Path(f"{output}.code")
        code.unlink(missing_ok=True)
        self._server.stdin.write(json.dumps([str(output), *arguments]) + "\n")
        self._server.stdin.flush()
        pid = int(self._server.stdout.readline())
        try:
            watch = os.pidfd_open(pid)
        except ProcessLookupError:  # ended already
            return int(code.read_text()) if code.exists() else None
        poll = select.poll()
        poll.register(watch, select.POLLIN)
        while once_printed not in output.read_text()[seen:] and not poll.poll(10):
            pass  # the poll is the pause; a run that ends first ends the wait
        if not poll.poll(None if kill_after_s is None else kill_after_s * 1000):
            os.kill(pid, number)
            assert poll.poll(60_000), "the run outlived its signal by a minute"
        os.close(watch)
        return int(code.read_text()) if code.exists() else None


if __name__ == "__main__":
    serve()

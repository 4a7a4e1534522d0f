"""Python programs, forked from a process that has imported what they need. A new Python imports torch and transformers for 8 s.

    Forks.Popen ──command, environment, folder, descriptors──> socket ──> Server ──fork──> the program
                <──process id, and the exit code at its end──

Everything else is as ``subprocess.Popen`` does it: arguments, environment, working directory, descriptors, exit codes.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import multiprocessing.process
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TextIO

import pytest

NUMBER_BYTES = 8
FREE_FROM = 200  # no descriptor of a program has this number


class Forks:
    """Stands for the module ``subprocess``, for commands of Python.

    Args:
        address: the socket of a :class:`Server`; requests wait until it is there.
        start: starts the server's process, or does nothing.
    """

    DEVNULL, PIPE, TimeoutExpired = subprocess.DEVNULL, subprocess.PIPE, subprocess.TimeoutExpired

    def __init__(self, address: str, start: Callable[[], object]) -> None:
        self._address, self._start = address, start

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Hosted objects get such processes from now on."""
        patch.setattr("skyrl_train.workers.process.subprocess", self)

    def Popen(self, command: Sequence[str], **how: Any) -> ForkedProcess:
        self._start()
        return ForkedProcess(self._address, command, **how)

    def run(self, command: Sequence[str], check: bool) -> None:
        code = self.Popen(command).wait()
        assert check and code == 0, f"{command} ended with {code}"


class ForkedProcess:
    """As ``subprocess.Popen`` of a command that begins with this Python."""

    def __init__(
        self,
        address: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: int | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = False,
        text: bool = False,
    ) -> None:
        assert command[0] == sys.executable
        self.returncode: int | None = None
        self.stdout: IO[Any] | None = None
        descriptors, ours = {number: number for number in (0, 1, 2, *pass_fds)}, []
        if stdin == subprocess.DEVNULL:
            descriptors[0] = os.open(os.devnull, os.O_RDONLY)
            ours.append(descriptors[0])
        for number, output in ((1, stdout), (2, stderr)):
            if output == subprocess.PIPE:
                read, descriptors[number] = os.pipe()
                ours.append(descriptors[number])
                self.stdout = open(read, "r" if text else "rb")  # noqa: SIM115, PTH123
            elif output is not None and not isinstance(output, int):
                descriptors[number] = output.fileno()
        asked = {
            "words": command[1:],
            "environment": dict(os.environ if env is None else env),
            "folder": cwd or os.getcwd(),  # noqa: PTH109
            "new_session": start_new_session,
            "descriptors": [*descriptors],
        }
        message = json.dumps(asked).encode()
        self._server = socket.socket(socket.AF_UNIX)
        while True:
            try:
                self._server.connect(address)
                break
            except (FileNotFoundError, ConnectionRefusedError):
                time.sleep(0.01)  # the server imports still
        size = len(message).to_bytes(NUMBER_BYTES, "big")
        socket.send_fds(self._server, [size], [*descriptors.values()])
        self._server.sendall(message)
        for descriptor in ours:
            os.close(descriptor)
        self.pid = int.from_bytes(self._server.recv(NUMBER_BYTES), "big")

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        if (code := self._ended(timeout)) is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return code

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _ended(self, within_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._server], [], [], within_s)[0]:
            self.returncode = int.from_bytes(self._server.recv(NUMBER_BYTES), "big", signed=True)
            self._server.close()
        return self.returncode


class Server:
    """Forks the programs that are asked for at ``address``."""

    def __init__(self, address: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(64)
        self._running: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor that tells its end

    def between(self, stream: TextIO) -> Iterator[str]:
        """The lines of ``stream``; programs are forked and reaped while the next one is awaited."""
        while True:
            for ready in select.select([stream, self._listener, *self._running], [], [])[0]:
                if ready is stream:
                    if not (line := stream.readline()):
                        return
                    yield line
                elif ready is self._listener:
                    self._fork()
                else:
                    pid, asker = self._running.pop(ready)
                    os.close(ready)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with asker, suppress(OSError):  # who asked may have ended
                        asker.send(code.to_bytes(NUMBER_BYTES, "big", signed=True))

    def _fork(self) -> None:
        asker, _ = self._listener.accept()
        size, descriptors, _, _ = socket.recv_fds(asker, NUMBER_BYTES, 16)
        with asker.makefile("rb") as stream:
            asked = json.loads(stream.read(int.from_bytes(size, "big")))
        if (pid := os.fork()) == 0:
            self._listener.close()
            asker.close()
            for watch, (_, other) in self._running.items():
                os.close(watch)
                other.close()
            # The runs of the server, for which it would wait at its end.
            multiprocessing.process._children.clear()  # type: ignore[attr-defined]
            become(asked, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        asker.send(pid.to_bytes(NUMBER_BYTES, "big"))
        self._running[os.pidfd_open(pid)] = (pid, asker)


def become(asked: dict[str, Any], descriptors: list[int]) -> None:
    """What ``python words`` does. Does not return."""
    code = 1
    try:
        if asked["new_session"]:
            os.setsid()
        # Out of the way first: one of them may have the number that another gets.
        moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, FREE_FROM) for descriptor in descriptors]
        for descriptor in descriptors:
            os.close(descriptor)
        for number, descriptor in zip(asked["descriptors"], moved, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(asked["environment"])
        os.chdir(asked["folder"])
        # What torch reads while it is imported.
        sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        run(asked["words"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    # The interpreter's own end: threads first, then what is registered.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")

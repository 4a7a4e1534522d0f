"""Python programs, forked from a process that has imported what they need. A new Python imports torch and transformers for 8 s.

    whoever asks ──words, environment, folder, descriptors──> socket ──> serve ──fork──> the program
                 <──process id, and the exit code at its end──

Everything else is as a new Python does it: arguments, environment, working directory, descriptors, exit code. One server serves a
whole run of the tests. There are two ways to ask it:

- :class:`Forks` stands for the module ``subprocess``.
- pytest-xdist and Ray start their workers by commands of their own. Their Python is :func:`asking_python`: it starts in a moment,
  asks the server for a process with its own words, and ends when that has started.
"""

from __future__ import annotations

import json
import os
import socket
import sys

# A program that only asks imports no more than this.
NUMBER_BYTES = 8


def ask(
    address: str, words: list[str], environment: dict[str, str], descriptors: dict[int, int], **how: object
) -> socket.socket:
    """Ask for ``python words``, and return the connection that tells its process id and then its exit code.

    Args:
        descriptors: those of this process by the numbers that they have in the other.
        how: ``folder``, ``new_session``.
    """
    asked = {"words": words, "environment": environment, "descriptors": [*descriptors], **how}
    message = json.dumps(asked).encode()
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    socket.send_fds(server, [len(message).to_bytes(NUMBER_BYTES, "big")], [*descriptors.values()])
    server.sendall(message)
    return server


if __name__ == "__main__" and sys.argv[1] != "--serve":
    here = os.getcwd()  # noqa: PTH109  pathlib takes as long to import as all the rest
    with ask(sys.argv[1], sys.argv[2:], dict(os.environ), {0: 0, 1: 1, 2: 2}, folder=here, new_session=False) as server:
        begun = server.recv(NUMBER_BYTES)  # it has the descriptors
    sys.exit(not begun)

import atexit  # noqa: E402
import fcntl  # noqa: E402
import gc  # noqa: E402
import importlib  # noqa: E402
import runpy  # noqa: E402
import select  # noqa: E402
import shlex  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
import threading  # noqa: E402
import traceback  # noqa: E402
import types  # noqa: E402
from collections.abc import Mapping, Sequence  # noqa: E402
from contextlib import suppress  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import IO, Any  # noqa: E402

import pytest  # noqa: E402

ADDRESS = "SKYRL_TRAIN_TESTS_FORKS"  # the variable with the address of the server that this run of the tests has
FREE_FROM = 200  # no descriptor of a program has this number

# A module that is missing here is imported again by each process. Not Ray and not vLLM: they read variables of the environment
# while they are imported, and their processes have different ones.
IMPORTED_FIRST = (
    "skyrl_train.entrypoints.command_line",
    "skyrl_train.entrypoints.train",
    "skyrl_train.build.trainer",
    "skyrl_train.fully_async_trainer",
    "skyrl_train.generators.gym",
    "skyrl_train.inference.engines.embedded.engine_loop",
    "skyrl_train.training.distributed.worker",
    "transformers.models.qwen3.modeling_qwen3",
    # What Ray imports: half of the time that it takes.
    "google.protobuf.internal.builder",
    "jsonschema",
    "requests",
    "uvloop",
    "wcwidth",
    # What runs import when they need it: trackers, adapters, a server.
    "peft",
    "skyrl_train.build.checks",
    "skyrl_train.endpoint.server.app",
    "skyrl_train.one_step_off_trainer",
    "skyrl_train.partial_rollout_trainer",
    "skyrl_train.runtime.listening",
    "torch.profiler._cupti_monitor",
    "torch.utils.tensorboard",
    # What writing samples imports.
    "pandas",
    "pyarrow.parquet",
    # What tests import, and skip where it is not installed.
    "agents",
    "anthropic",
    "datasets",
    "hypothesis",
    "openai",
    "reasoning_gym",
    "renderers",
    "schemathesis",
    "schemathesis.pytest.plugin",
    "skyrl_gym",
    "textual.app",
    "textual.widgets",
)


# Asking --------------------------------------------------------------------------------------------------------------


class Forks:
    """Stands for the module ``subprocess``, for commands of Python. Starts a server unless this run of the tests has one.

    Attributes:
        address: the server's socket.
    """

    DEVNULL, PIPE, TimeoutExpired = subprocess.DEVNULL, subprocess.PIPE, subprocess.TimeoutExpired

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._server: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        with self._starting:
            if ADDRESS not in os.environ:
                folder = tempfile.mkdtemp(prefix="forks-")
                self._server = subprocess.Popen(
                    [sys.executable, __file__, "--serve", f"{folder}/socket"],
                    stdin=subprocess.PIPE,  # its end is the server's end
                    stdout=subprocess.PIPE,
                    text=True,
                    env={
                        **os.environ,
                        "OMP_NUM_THREADS": "1",
                        "JE_ARROW_MALLOC_CONF": "background_thread:false",  # a thread does not survive the fork
                        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    },
                )
                assert self._server.stdout is not None and self._server.stdout.readline()  # it listens
                os.environ[ADDRESS] = f"{folder}/socket"
            return os.environ[ADDRESS]

    def close(self) -> None:
        """End the server, if this object has started it. Its programs go on."""
        if self._server is not None:
            assert self._server.stdin is not None
            self._server.stdin.close()
            self._server.wait()
            shutil.rmtree(Path(os.environ.pop(ADDRESS)).parent)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Hosted objects get forked processes from now on."""
        patch.setattr("skyrl_train.workers.process.subprocess", self)

    def Popen(self, command: Sequence[str], **how: Any) -> ForkedProcess:
        return ForkedProcess(self.address, command, **how)

    def run(self, command: Sequence[str], check: bool) -> None:
        code = self.Popen(command).wait()
        assert check and code == 0, f"{command} ended with {code}"


FORKS = pytest.StashKey[Forks]()  # this run's


def asking_python(address: str) -> str:
    """The command, for a shell, that stands for Python where a program is to be forked by the server at ``address``."""
    return shlex.join([sys.executable, "-S", "-E", "-s", __file__, address])


class ForkedProcess:
    """As ``subprocess.Popen`` of a command that begins with this Python."""

    def __init__(
        self,
        address: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
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
        environment = dict(os.environ if env is None else env)
        how = {"folder": str(cwd or Path.cwd()), "new_session": start_new_session}
        self._server = ask(address, [*command[1:]], environment, descriptors, **how)
        for descriptor in ours:
            os.close(descriptor)
        self.pid = self._number()

    def poll(self) -> int | None:
        return self.ended(0)

    def wait(self, timeout: float | None = None) -> int:
        if (code := self.ended(timeout)) is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return code

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # the server has waited for its end, and has not told it yet
                os.kill(self.pid, number)

    def ended(self, within_s: float | None) -> int | None:
        """The exit code, or None where it still runs after ``within_s``."""
        if self.returncode is None and select.select([self._server], [], [], within_s)[0]:
            self.returncode = self._number()
            self._server.close()
        return self.returncode

    def _number(self) -> int:
        said = self._server.recv(NUMBER_BYTES)
        assert len(said) == NUMBER_BYTES, "the server that forks programs has ended; its output says why"
        return int.from_bytes(said, "big", signed=True)


# The server ----------------------------------------------------------------------------------------------------------


def serve(address: str) -> None:
    """Fork the programs that are asked for at ``address``, until standard input ends."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    sys.stdout.write("listens\n")
    sys.stdout.flush()  # requests wait until everything is imported
    gc.disable()
    for module in IMPORTED_FIRST:
        with suppress(ImportError):
            importlib.import_module(module)
    sys.path.insert(0, str(Path(__file__).parent / "cpu"))
    importlib.import_module("forked_runs").prepare()
    assert "ray" not in sys.modules and "vllm" not in sys.modules
    threads = [*Path("/proc/self/task").iterdir()]
    assert len(threads) == 1, "a thread does not survive the fork, and the locks that it holds stay locked"
    gc.enable()
    gc.collect()
    gc.freeze()  # the programs' own collections have little to walk
    running: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor that tells a program's end
    while True:
        for ready in select.select([sys.stdin, listener, *running], [], [])[0]:
            if ready is sys.stdin:
                gc.unfreeze()  # libraries complain about objects that are left at the end
                return
            if ready is not listener:
                pid, asker = running.pop(ready)
                os.close(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with asker, suppress(OSError):  # who asked may have ended
                    asker.send(code.to_bytes(NUMBER_BYTES, "big", signed=True))
                continue
            asker, _ = listener.accept()
            size, descriptors, _, _ = socket.recv_fds(asker, NUMBER_BYTES, 16)
            with asker.makefile("rb") as stream:
                asked = json.loads(stream.read(int.from_bytes(size, "big")))
            if (pid := os.fork()) == 0:
                listener.close()
                asker.close()
                for watch, (_, other) in running.items():
                    os.close(watch)
                    other.close()
                become(asked, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            with suppress(OSError):
                asker.send(pid.to_bytes(NUMBER_BYTES, "big", signed=True))
            running[os.pidfd_open(pid)] = (pid, asker)


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
        run([word for word in asked["words"] if word not in ("-u", "-B")])
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
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(words[1], main.__dict__)
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[2])

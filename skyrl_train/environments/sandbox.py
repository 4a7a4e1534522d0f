"""Runs a Python program that nobody has read: in a process of its own, with limits, and apart from this machine.

    run_program ──spec.json──> sandbox_launcher.py ──limits, namespaces, another user──> python -I program.py
        │  wall clock                                                                          │
        └────────────── kills the whole group <────────── stdout, stderr: files of bounded size ┘

Isolation ``namespaces`` (Linux; as an ordinary user where unprivileged user namespaces are allowed, or as root): the
program sees its own empty ``/work``, the interpreter and the system's libraries, all else is not there; no network,
no other processes, no ``/proc``. Whatever it started is gone when it ends. Isolation ``limits``: only the resource
limits, an empty environment and a temporary folder; the program may read and write what its user may (started by
root: a user without rights), reach the network, and leave processes behind that leave its session, within their CPU
time.

Neither protects from a flaw of the kernel, from loading the machine up to the limits, or from what programs learn by
timing. For programs of somebody who attacks on purpose, put the trainer's machine, or the sandbox, into a virtual
machine.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from skyrl_train.errors import ConfigError

ISOLATIONS = ("namespaces", "limits")
_LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")
_MIB = 2**20
_REMEDIES = {
    "namespaces": (
        "Allow unprivileged user namespaces (sysctl user.max_user_namespaces, "
        "kernel.apparmor_restrict_unprivileged_userns), or, in a container or virtual machine that holds nothing worth "
        "protecting, set environment.kwargs.isolation=limits."
    ),
    "limits": (
        "Started by root, the program becomes a user without rights, who has to be able to read the Python "
        "interpreter: train as an ordinary user, or with a Python outside of root's home."
    ),
}
_places = threading.BoundedSemaphore(os.cpu_count() or 1)  # programs that run at once, so that their clocks are fair


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What one program may use."""

    cpu_s: int = 4  # per process
    wall_s: float = 10.0  # of the whole program, from the start of its launcher
    memory_mib: int = 512  # address space per process
    processes: int = 4  # with their threads
    file_mib: int = 4  # per file, stdout and stderr included; under namespaces also for all files together


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """How a program ended."""

    stdout: str
    stderr: str
    exit_code: int  # 128 + n after signal n
    timed_out: bool

    @property
    def succeeded(self) -> bool:
        return self.exit_code == 0 and not self.timed_out


class SandboxError(ConfigError):
    """The program was not run, because this machine does not allow the isolation that was asked for."""


def run_program(
    program: str, stdin: str = "", limits: SandboxLimits | None = None, isolation: str = "namespaces"
) -> SandboxResult:
    """Runs ``program`` with the interpreter's standard library and returns when all that can be killed of it is gone.

    Blocks; at most as many programs as cores run at once, the others wait for a place.

    Raises:
        SandboxError: this machine does not allow ``isolation``.
        ConfigError: ``isolation`` is unknown.
    """
    if isolation not in ISOLATIONS:
        raise ConfigError(f"Sandbox isolation {isolation!r} is unknown. Known: {', '.join(ISOLATIONS)}.")
    limits = limits or SandboxLimits()
    with _places, tempfile.TemporaryDirectory(prefix="sandbox-") as name:
        return _run(Path(name), program, stdin, limits, isolation)


@functools.cache
def why_unavailable(isolation: str) -> str | None:
    """Why ``isolation`` does not work on this machine; None where it does. Runs an empty program, once per process."""
    try:
        result = run_program("", isolation=isolation)
    except SandboxError as error:
        return str(error)
    return None if result.succeeded else f"Sandbox isolation {isolation!r} failed: {result.stderr[-300:] or result}"


def _run(folder: Path, program: str, stdin: str, limits: SandboxLimits, isolation: str) -> SandboxResult:
    failure, spec = folder / "failure", folder / "spec.json"
    (folder / "stdin").write_text(stdin, encoding="utf-8")
    spec.write_text(
        json.dumps(
            {
                "program": program,
                "isolation": isolation,
                "folder": str(folder),
                "failure": str(failure),
                "cpu_s": limits.cpu_s,
                "memory_bytes": limits.memory_mib * _MIB,
                "processes": limits.processes,
                "file_bytes": limits.file_mib * _MIB,
            }
        ),
        encoding="utf-8",
    )
    library_path = {key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ}
    with (folder / "stdin").open("rb") as given, (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_LAUNCHER), str(spec)],
            stdin=given,
            stdout=out,
            stderr=err,
            env=library_path,
            cwd=folder,
            start_new_session=True,
        )
        timed_out = _wait(process, limits.wall_s)
    if failure.exists() and failure.read_text():
        raise SandboxError(
            f"Sandbox isolation {isolation!r} does not work here: {failure.read_text()}. {_REMEDIES[isolation]}"
        )
    code = process.returncode
    return SandboxResult(
        stdout=(folder / "out").read_text(encoding="utf-8", errors="replace"),
        stderr=(folder / "err").read_text(encoding="utf-8", errors="replace"),
        exit_code=128 - code if code < 0 else code,
        timed_out=timed_out,
    )


def _wait(process: subprocess.Popen[bytes], wall_s: float) -> bool:
    """Waits for the launcher, kills its group in any case, and returns whether it had to be ended."""
    try:
        process.wait(wall_s)
        timed_out = False
    except subprocess.TimeoutExpired:
        timed_out = True
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return timed_out  # nobody is left
    process.wait()
    return timed_out

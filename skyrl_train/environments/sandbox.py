"""Runs an untrusted Python program, or a command, in a process with limits, isolated from this machine.

    run_program ──> bubblewrap (namespaces) ──> prlimit (limits) ──> python -I program.py
        │  wall clock                                                     │
        └────────── kills the process group <──── stdout, stderr: files of bounded size

Isolation ``namespaces`` (Linux, with bubblewrap): the program sees an empty ``/work``, the Python interpreter and the
system's libraries, the latter two read-only. There is no network, no other process, no ``/proc``, and no user namespace
to be had. All its processes end with it.

Isolation ``limits`` (Linux): resource limits, an empty environment and a temporary folder only. The program can read and
write what its user can, and reach the network. Processes that leave its session outlive it, within their CPU time.

Started by root, the program runs as a user without rights in both.

Neither protects against kernel flaws, against load up to the limits, or against timing side channels. Against a
deliberate attacker, put the trainer's machine or the sandbox into a virtual machine.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from skyrl_train.errors import ConfigError

ISOLATIONS = ("namespaces", "limits")
SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/bin")  # libraries, and prlimit
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives")  # the second one: links to programs, such as awk
MIB = 2**20
DISK_CHECK_S = 1.0
UNUSED_USERS = range(61184, 65520)  # systemd's range for users that exist while a service runs
REMEDIES = {
    "namespaces": (
        "Install bubblewrap 0.8 or newer (apt install bubblewrap) and util-linux, and allow unprivileged user namespaces "
        "(sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns). In a container or virtual machine "
        "that holds nothing worth protecting, you can set environment.kwargs.isolation=limits instead."
    ),
    "limits": (
        "It needs util-linux (prlimit, setpriv). Started by root, the program becomes a user without rights, who must be "
        "able to read the Python interpreter. One in root's home needs unshare and mount, too, and a container in which root "
        "may mount: else train as an ordinary user, or with a Python outside of root's home."
    ),
}

_slots = threading.BoundedSemaphore(os.cpu_count() or 1)  # programs that run at once, so that wall clocks are fair
_available: set[str] = set()  # the isolations that have worked in this process
_next_user = itertools.count(os.getpid())  # each program a different one, because the kernel counts processes per user


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """The resources of one program."""

    cpu_s: int = 4  # per process
    wall_s: float = 10.0  # of the whole program, with the start of the sandbox
    memory_mib: int = 512  # address space per process
    processes: int = 4  # with their threads
    file_mib: int = 4  # per file, stdout and stderr included; for a program in namespaces also of all files together
    # Of all files together, for a command. Measured once a second, and less often where they are many.
    disk_mib: int = 2048


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """How a program ended."""

    stdout: str
    stderr: str
    exit_code: int  # 128 + n after signal n
    timed_out: bool
    seconds: float = 0.0  # from its start, without the wait for a core
    is_full: bool = False  # the command's files exceed ``disk_mib``; it was ended if it still ran

    @property
    def succeeded(self) -> bool:
        """Whether the program ended with code 0, in time."""
        return self.exit_code == 0 and not self.timed_out


class SandboxError(ConfigError):
    """This machine does not allow the requested isolation, so the program was not run."""


def run_program(
    program: str, stdin: str = "", limits: SandboxLimits | None = None, isolation: str = "namespaces"
) -> SandboxResult:
    """Run ``program`` with the interpreter's standard library; return when it and its processes have ended.

    Blocks. At most one program per core runs at once; further calls wait.

    Raises:
        SandboxError: this machine does not allow ``isolation``.
        ConfigError: ``isolation`` is unknown.
    """
    if isolation not in ISOLATIONS:
        raise ConfigError(f"Sandbox isolation {isolation!r} is unknown. Known: {', '.join(ISOLATIONS)}.")
    # Raise before any program runs: a silent fallback would run untrusted code without isolation.
    problem = why_unavailable(isolation)
    if problem is not None:
        raise SandboxError(problem)
    return _run(program, stdin, limits or SandboxLimits(), isolation)


def why_unavailable(isolation: str) -> str | None:
    """Return why ``isolation`` does not work on this machine, or None where it does.

    Runs an empty program until it has succeeded once in this process. A failure is not kept: the temporary folder may be full
    for a minute.
    """
    if isolation in _available:
        return None
    try:
        # With time for a busy machine.
        result = _run("", "", SandboxLimits(cpu_s=60, wall_s=300.0), isolation)
    except (SandboxError, OSError) as error:
        reason = str(error)
    else:
        if result.succeeded:
            _available.add(isolation)
            return None
        reason = result.stderr[-300:].strip() or str(result)
    return f"Sandbox isolation {isolation!r} does not work here: {reason}. {REMEDIES[isolation]}"


def run_command(
    command: Sequence[str],
    files: Path,
    folder: str,
    environment: Mapping[str, str],
    limits: SandboxLimits,
    user: int,
) -> SandboxResult:
    """Run ``command`` in new namespaces; return when it and its processes have ended. Blocks like :func:`run_program`.

    Args:
        files: a folder of this machine. Its entries are at the root of the command's file system, and what the command changes
            there stays. They belong to ``user``.
        folder: the command's current one, which no command may remove.
        user: from :func:`sandbox_user`.

    Raises:
        SandboxError: this machine does not allow it.
    """
    problem = why_unavailable("namespaces")
    if problem is not None:
        raise SandboxError(problem)
    mounts = [word for place in sorted(files.iterdir()) for word in ("--bind", str(place), f"/{place.name}")]
    mounts += ["--chdir", folder]
    # One process more: bubblewrap's own, which reaps the others.
    argv = [*_with_limits(limits, processes=limits.processes + 1), *command]
    with _slots, tempfile.TemporaryDirectory(prefix="sandbox-") as name:
        own = Path(name)
        own.chmod(0o711)
        path = f"/usr/bin:/bin:{Path(sys.base_prefix).resolve() / 'bin'}"
        variables = {"HOME": folder, "PATH": path, "LANG": "C.UTF-8", **environment}
        return _execute(
            own,
            own,
            lambda status: _in_namespaces(own, user, status, mounts, argv),
            "",
            variables,
            limits.wall_s,
            apart=True,
            is_full=lambda: used_bytes(files) > limits.disk_mib * MIB,
        )


def used_bytes(folder: Path) -> int:
    """Return the space that the files in ``folder`` take. What this process may not list does not count."""
    used, waiting = 0, [str(folder)]
    while waiting:
        # Files come and go meanwhile.
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    used += entry.stat(follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
    return used


def sandbox_user() -> int:
    """Return the user who runs programs: this process's own; under root, the next one without rights."""
    return os.getuid() or UNUSED_USERS[next(_next_user) % len(UNUSED_USERS)]


def _run(program: str, stdin: str, limits: SandboxLimits, isolation: str) -> SandboxResult:
    with _slots, tempfile.TemporaryDirectory(prefix="sandbox-") as name:
        folder = Path(name)
        work = folder / "work"
        work.mkdir()
        (work / "program.py").write_text(program, encoding="utf-8")
        user = sandbox_user()
        if os.getuid() == 0:
            # The program's user must reach its files, but not list or change the folder around them.
            folder.chmod(0o711)
            work.chmod(0o777)
            (work / "program.py").chmod(0o644)
        # Of this process's environment only LD_LIBRARY_PATH reaches the program: other variables may hold keys.
        apart = isolation == "namespaces"
        environment = {
            "HOME": "/work" if apart else str(work),
            "PATH": "/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            **{key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ},
        }
        python = [os.path.realpath(sys.executable), "-I", "program.py"]
        mounts = [
            *("--size", str(limits.file_mib * MIB), "--tmpfs", "/work", "--chdir", "/work"),
            *("--ro-bind", str(work / "program.py"), "/work/program.py"),
        ]

        def command(status: int) -> list[str]:
            if apart:  # one process more: bubblewrap's own, which reaps the others
                argv = [*_with_limits(limits, processes=limits.processes + 1), *python]
                return _in_namespaces(folder, user, status, mounts, argv)
            return _in_limits(folder, limits, user, python)

        return _execute(folder, work, command, stdin, environment, limits.wall_s, apart=apart)


def _execute(
    folder: Path,
    work: Path,
    command: Callable[[int], list[str]],
    stdin: str,
    environment: Mapping[str, str],
    wall_s: float,
    *,
    apart: bool,
    is_full: Callable[[], bool] | None = None,
) -> SandboxResult:
    """Start the command in ``work``, wait for its end or its time limit, end all its processes, and return what it wrote.

    Args:
        folder: for the streams.
        command: returns it, given the descriptor on which bubblewrap reports.
        apart: bubblewrap runs it.
        is_full: whether its files take too much space, which ends it.
    """
    (folder / "stdin").write_text(stdin, encoding="utf-8")
    with (
        (folder / "stdin").open("rb") as given,
        (folder / "out").open("wb") as out,
        (folder / "err").open("wb") as err,
        (folder / "status").open("wb") as status,
    ):
        # Files and not pipes: their size is limited, and a program that writes much does not block.
        began = time.monotonic()
        process = subprocess.Popen(
            command(status.fileno()),
            stdin=given,
            stdout=out,
            stderr=err,
            env=dict(environment),
            cwd=work,
            start_new_session=True,
            pass_fds=[status.fileno()] if apart else [],
        )
        timed_out = full = False
        left_s, check_s = wall_s, DISK_CHECK_S
        while not (timed_out or full):
            try:
                process.wait(left_s if is_full is None else min(left_s, check_s))
                break
            except subprocess.TimeoutExpired:
                now = time.monotonic()
                left_s = wall_s - (now - began)
                timed_out = left_s <= 0
                full = is_full is not None and is_full()
                # 50,000 files take a second or two, which should be a small part of the time.
                check_s = max(DISK_CHECK_S, 10 * (time.monotonic() - now))
        with contextlib.suppress(ProcessLookupError):  # nothing is left of the group
            os.killpg(process.pid, signal.SIGKILL)  # also after a normal end: the program may have left children
        process.wait()
        seconds = time.monotonic() - began
    full = full or (is_full is not None and is_full())
    lines = (folder / "status").read_text().splitlines(keepends=True)
    # The last line is torn if bubblewrap was killed while it wrote it.
    reports = [json.loads(line) for line in lines if line.endswith("}\n")]
    for report in reports:
        if "child-pid" in report:
            wait_for_exit(report["child-pid"])
    stdout, stderr = ((folder / file).read_text(encoding="utf-8", errors="replace") for file in ("out", "err"))
    # bubblewrap reports an exit code only if it has started the program. Else stderr holds its own message, and the
    # result must not pass for the program's.
    if apart and not timed_out and not full and not any("exit-code" in report for report in reports):
        raise SandboxError(stderr[-300:].strip() or "bubblewrap ended without a message")
    code = process.returncode
    return SandboxResult(stdout, stderr, 128 - code if code < 0 else code, timed_out, seconds, full)


def wait_for_exit(pid: int) -> None:
    """Wait until process ``pid``, the first one of the program's namespace, has ended, and so all others of the namespace.

    bubblewrap ends without waiting for it. The kernel then kills it, and it ends after all others.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ended = select.poll()  # select.select takes no descriptor above 1023, which a busy run has
        ended.register(process, select.POLLIN)
        ended.poll()
    finally:
        os.close(process)


def _in_namespaces(folder: Path, user: int, status: int, mounts: Sequence[str], argv: Sequence[str]) -> list[str]:
    """Return the command that runs ``argv`` in new namespaces, with nothing but ``mounts``, Python and the system's libraries."""
    bwrap, python = _tool("bwrap"), Path(sys.base_prefix).resolve()
    outer: list[str] = []
    source = python
    if os.getuid() == 0:
        # The program's user may be unable to reach the interpreter (in root's home, for example). So root first mounts it at
        # a place that any user can reach, in a mount namespace that nothing else sees, and only then drops its rights.
        source = folder / "python"
        source.mkdir()
        outer = [bwrap, "--dev-bind", "/", "/", "--ro-bind", str(python), str(source), "--", *_as_user(user)]
    binds = [argument for place in (*SYSTEM_FOLDERS, *SYSTEM_FILES) for argument in ("--ro-bind-try", place, place)]
    if not python.is_relative_to("/usr"):
        binds += ["--ro-bind", str(source), str(python)]
    return [
        *outer,
        *(bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"),
        *binds,
        *("--dev-bind", "/dev/null", "/dev/null", "--dev-bind", "/dev/urandom", "/dev/urandom"),
        *mounts,
        *("--remount-ro", "/", "--json-status-fd", str(status)),
        *argv,
    ]


def _in_limits(folder: Path, limits: SandboxLimits, user: int, argv: Sequence[str]) -> list[str]:
    """Return the command that runs ``argv`` in the working folder with limits alone."""
    outer: list[str] = []
    python = Path(sys.base_prefix).resolve()
    if os.getuid() == 0:
        # The user without rights cannot pass a folder that is closed to others, such as root's home. In a mount namespace that
        # nothing else sees, root lays an empty file system over that folder, with only the interpreter in it.
        closed = next((place for place in reversed(python.parents) if not place.stat().st_mode & stat.S_IXOTH), None)
        if closed is not None:
            script = (
                'mkdir "$2" && mount --bind "$1" "$2" && mount -t tmpfs -o mode=755 sandbox "$3" && mkdir -p "$1" && '
                'mount --move "$2" "$1" && mount -o remount,bind,ro "$1" && shift 3 && exec "$@"'
            )
            arguments = [str(python), str(folder / "python"), str(closed)]
            outer = [_tool("unshare"), "--mount", "--propagation", "private", "sh", "-c", script, "sandbox", *arguments]
    # The kernel compares the limit with all processes of the user, so those that run already are added.
    return [
        *outer,
        *_as_user(user if os.getuid() == 0 else None),
        *_with_limits(limits, processes=limits.processes + _count_processes(user)),
        *argv,
    ]


def _as_user(user: int | None) -> list[str]:
    """Return the start of a command that drops rights: to ``user`` if given, and dies with this process."""
    drop = [] if user is None else [f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    return [_tool("setpriv"), *drop, "--no-new-privs", "--pdeathsig=SIGKILL"]


def _with_limits(limits: SandboxLimits, processes: int) -> list[str]:
    """Return the words that set the resource limits of the command behind them."""
    wanted = {
        "cpu": (resource.RLIMIT_CPU, limits.cpu_s),
        "fsize": (resource.RLIMIT_FSIZE, limits.file_mib * MIB),
        "core": (resource.RLIMIT_CORE, 0),
        "nofile": (resource.RLIMIT_NOFILE, 64),
        "as": (resource.RLIMIT_AS, limits.memory_mib * MIB),
        "nproc": (resource.RLIMIT_NPROC, processes),
    }
    arguments = []
    for name, (number, value) in wanted.items():
        hard = resource.getrlimit(number)[1]  # an ordinary user cannot raise it
        arguments.append(f"--{name}={value if hard == resource.RLIM_INFINITY else min(value, hard)}")
    return [_tool("prlimit"), *arguments]


def _tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise SandboxError(f"{name} is not installed")
    return path


def _count_processes(user: int) -> int:
    """Count the user's processes with their threads, as the kernel does."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.stat().st_uid == user:
                count += sum(1 for _ in (process / "task").iterdir())
        except OSError:
            continue  # it ended meanwhile
    return count

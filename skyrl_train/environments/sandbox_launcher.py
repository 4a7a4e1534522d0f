"""The inside of :mod:`skyrl_train.environments.sandbox`: takes rights away from itself, then becomes the program.

Started as a script with ``python -I -S``; imports the standard library alone. Order matters: whatever needs rights
comes before they are given up, and limits come after the user has changed, because they count per user.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 1 << 1, 1 << 2, 1 << 12, 1 << 14, 1 << 18
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, ATTR_READ_ONLY, ATTR_NOSUID = 442, -100, 0x8000, 1, 2
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
FIRST_UNUSED_USER, UNUSED_USERS = 61184, 4336  # systemd's range for users that exist while a service runs

libc = ctypes.CDLL(None, use_errno=True)


class MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: Path, kind: str, flags: int, options: str = "") -> None:
    done = libc.mount(source.encode(), str(target).encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    check(done, f"mount of {target}")


def enter_namespaces(is_root: bool) -> None:
    """Leaves the machine's network, processes and mounts; an ordinary user needs a user namespace for that."""
    user, group = os.getuid(), os.getgid()
    flags = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET | (0 if is_root else CLONE_NEWUSER)
    check(libc.unshare(flags), "unshare")
    if not is_root:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    check(libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None), "private mounts")


def change_root(root: Path, interpreter: Path, file_bytes: int) -> None:
    """Makes a file system of the interpreter, the libraries and an empty ``/work``, all but the last read-only."""
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    places = ["/usr", "/lib", "/lib64", "/bin", str(interpreter), "/etc/ld.so.cache", "/dev/null", "/dev/urandom"]
    for place in map(Path, places):
        inside = root / place.relative_to("/")
        if not place.exists() or inside.exists():
            continue
        inside.parent.mkdir(parents=True, exist_ok=True)
        if place.is_symlink():
            inside.symlink_to(place.readlink())
            continue
        inside.mkdir() if place.is_dir() else inside.touch()
        mount(str(place), inside, "none", MS_BIND | MS_REC)
    work = root / "work"
    work.mkdir()
    read_only = MountAttributes(attr_set=ATTR_READ_ONLY | ATTR_NOSUID)
    arguments = (AT_FDCWD, str(root).encode(), AT_RECURSIVE, ctypes.byref(read_only), ctypes.sizeof(read_only))
    check(libc.syscall(SYS_MOUNT_SETATTR, *arguments), "read-only mounts")
    mount("tmpfs", work, "tmpfs", MS_NOSUID | MS_NODEV, f"size={file_bytes},mode=777")
    os.chroot(root)


def drop_root() -> None:
    """Becomes a user that owns nothing, another one for each program as far as they go."""
    user = FIRST_UNUSED_USER + os.getpid() % UNUSED_USERS
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def processes_of_user() -> int:
    """With their threads, as the kernel counts them against its limit."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.stat().st_uid == os.getuid():
                count += sum(1 for _ in (process / "task").iterdir())
        except OSError:
            continue  # it ended meanwhile
    return count


def set_limits(spec: dict[str, Any], others: int) -> None:
    """``others``: processes that count against the user's number and are none of the program's."""
    resource.setrlimit(resource.RLIMIT_CPU, (spec["cpu_s"], spec["cpu_s"]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (spec["file_bytes"], spec["file_bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    resource.setrlimit(resource.RLIMIT_AS, (spec["memory_bytes"], spec["memory_bytes"]))
    wanted, (_, hard) = spec["processes"] + others, resource.getrlimit(resource.RLIMIT_NPROC)
    number = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NPROC, (number, number))
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")


def become_program(spec: dict[str, Any], python: str, is_root: bool, apart: bool, keeper: int) -> None:
    work = Path("/work") if apart else Path(spec["folder"]) / "work"
    work.mkdir(exist_ok=True)
    os.chdir(work)
    (work / "program.py").write_text(spec["program"], encoding="utf-8")
    if is_root:
        (work / "program.py").chmod(0o644)
        work.chmod(0o777)
        drop_root()
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "parent death signal")
    if not apart and os.getppid() != keeper:
        raise OSError("the launcher has ended")
    set_limits(spec, 0 if apart else processes_of_user())
    environment = {"HOME": str(work), "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
    library_path = {key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ}
    os.execve(python, [python, "-I", "program.py"], {**environment, **library_path})


def launch(spec: dict[str, Any]) -> int:
    is_root, apart = os.getuid() == 0, spec["isolation"] == "namespaces"
    python = os.path.realpath(sys.executable)
    with Path(spec["failure"]).open("w", encoding="utf-8") as failure:
        try:
            if apart:
                enter_namespaces(is_root)
                root = Path(spec["folder"]) / "root"
                root.mkdir()
                change_root(root, Path(sys.base_prefix).resolve(), spec["file_bytes"])
            elif is_root:
                Path(spec["folder"]).chmod(0o711)
            keeper = os.getpid()
            child = os.fork()
            if child == 0:
                become_program(spec, python, is_root, apart, keeper)
        except OSError as error:
            failure.write(str(error))
            return 1
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    code = launch(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    sys.exit(128 - code if code < 0 else code)

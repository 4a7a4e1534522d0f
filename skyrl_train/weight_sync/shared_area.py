"""Memory that can grow and that other processes on this machine open by path. Imports no torch.

On Linux the memory is anonymous (``memfd``): it has no name to collide with, and the kernel frees it when the last
process that maps it has ended, however that process died. Elsewhere a temporary file takes its place.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import uuid
from pathlib import Path


class SharedArea:
    """Growable shared memory.

    Attributes:
        location: a path that any process of this user on this machine can open.
        memory: the bytes, writable. Replaced by a new object when :meth:`reserve` makes the area larger.

    Raises:
        OSError: there is not enough shared memory.
    """

    def __init__(self, num_bytes: int) -> None:
        self._path: str | None = None
        if sys.platform == "linux":
            self._descriptor = os.memfd_create("skyrl-weights", os.MFD_CLOEXEC)
            self.location = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        else:
            self._descriptor, self._path = tempfile.mkstemp(prefix="skyrl-weights-")
            self.location = self._path
        try:
            self.reserve(num_bytes)
        except BaseException:
            self.close()
            raise

    def reserve(self, num_bytes: int) -> None:
        """Make the area ``num_bytes`` large and keep its contents. Pages that are never written take no memory."""
        os.ftruncate(self._descriptor, num_bytes)
        self.memory = mmap.mmap(self._descriptor, num_bytes)

    def close(self) -> None:
        """Release the memory. Processes that mapped it keep their mapping."""
        os.close(self._descriptor)
        if self._path is not None:
            Path(self._path).unlink()


def machine() -> str:
    """Identify machine, process space and user: where equal, ``/proc/<pid>/fd`` means the same to both sides."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()} {os.getuid()}"
    except OSError:  # no Linux: nothing is shared that way
        return uuid.uuid4().hex

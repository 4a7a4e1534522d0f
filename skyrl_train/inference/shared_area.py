"""Memory that other processes of this machine find by a path, and that can grow. Imports no torch.

On Linux the memory is anonymous (``memfd``): it has no name to collide with, and the kernel frees it when the last
process that maps it is gone, however that one died. Elsewhere a temporary file takes its place.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from pathlib import Path


class SharedArea:
    """Attributes:
    location: a path that any process of this user on this machine can open.
    memory: the bytes, writable; another object after :meth:`reserve` has made the area larger.

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
        """Makes the area ``num_bytes`` large; its contents stay. What is never written takes no memory."""
        os.ftruncate(self._descriptor, num_bytes)
        self.memory = mmap.mmap(self._descriptor, num_bytes)

    def close(self) -> None:
        """Lets go of the memory; who has mapped it keeps it."""
        os.close(self._descriptor)
        if self._path is not None:
            Path(self._path).unlink()

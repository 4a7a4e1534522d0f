"""Whose files are whose in a folder that trainers share, and which of them belong to nobody any more.

A trainer that is killed cannot remove the weights that it has staged. Each one holds a record lock on a file of its own,
which ends with its process; whoever comes next and gets the lock removes what the dead one has left. Many shared folders
keep locks within one machine, so that those of another machine say nothing: what it has left stays.
"""

from __future__ import annotations

import fcntl
import logging
import os
import platform
import uuid
from io import FileIO
from pathlib import Path

PREFIX = "skyrl-weights-"
_SUFFIX = ".owner"

logger = logging.getLogger(__name__)
_held_here: set[str] = set()  # labels of this process, whose locks do not keep itself out


class FolderClaim:
    """The right to files ``skyrl-weights-LABEL-*`` of a folder. Make it in the process that writes them."""

    def __init__(self, folder: Path) -> None:
        """Removes what dead owners have left there.

        Raises:
            OSError: the folder cannot be written.
        """
        self.label = uuid.uuid4().hex[:12]
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        _held_here.add(self.label)
        new = folder / f".{PREFIX}{self.label}.new"
        self._lock = FileIO(new, "w")
        self._lock.write(_machine())
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.replace(new, _owner_file(folder, self.label))  # found by others only now that it is locked
            for owner in folder.glob(f".{PREFIX}*{_SUFFIX}"):
                _remove_if_dead(folder, owner)
        except OSError as error:  # a file system without locks: nobody can be told dead
            new.unlink(missing_ok=True)
            logger.warning("Weights that killed runs have left in %s are not removed: %s", folder, error)

    def path(self, name: str) -> Path:
        """A file of this owner's."""
        return self._folder / f"{PREFIX}{self.label}-{name}.safetensors"

    def release(self) -> None:
        """Gives up the right; the files are removed by whoever made them."""
        _owner_file(self._folder, self.label).unlink(missing_ok=True)
        self._lock.close()
        _held_here.discard(self.label)


def _owner_file(folder: Path, label: str) -> Path:
    return folder / f".{PREFIX}{label}{_SUFFIX}"


def _machine() -> bytes:
    """Of this kernel, which all containers of a machine share."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return platform.node().encode()


def _remove_if_dead(folder: Path, owner: Path) -> None:
    label = owner.name.removeprefix(f".{PREFIX}").removesuffix(_SUFFIX)
    if label in _held_here:  # opening and closing it would end its lock
        return
    try:
        with FileIO(owner, "r+") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock.readall() != _machine():
                return
            left = [*folder.glob(f"{PREFIX}{label}-*"), *folder.glob(f".{PREFIX}{label}-*")]
            for path in left:
                path.unlink(missing_ok=True)
            owner.unlink(missing_ok=True)
            logger.info("removed %d files of weights that a killed run had left in %s", len(left), folder)
    except (BlockingIOError, PermissionError, FileNotFoundError):
        return  # alive, or removed by another one that starts

"""Groups on the disk: one file each, as long as somebody holds the group."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import weakref
from pathlib import Path

from skyrl_train.rollout.group import RolloutGroup
from skyrl_train.rollout.group_json import decode_group, encode_group


class SpilledGroup:
    """A group on the disk. The file is removed with this object, so a snapshot can be read after its groups are trained."""

    def __init__(self, group: RolloutGroup, path: Path) -> None:
        """Writes the file. Blocking."""
        self.ordinal = group.ordinal
        self.oldest_version = group.oldest_version
        self._path = path
        weakref.finalize(self, _remove, path)  # first: half a file on a full disk goes as well
        path.write_bytes(encode_group(group))

    def encoded(self) -> bytes:
        """The group as :func:`encode_group` encodes it. Blocking."""
        return self._path.read_bytes()

    def read(self) -> RolloutGroup:
        """The group. Blocking."""
        return decode_group(self.encoded())


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # the folder may have gone first
        path.unlink()


class SpillFolder:
    """Where groups are written to. Used by one buffer at a time, and by one thread at a time. Blocking.

    What a killed process has left there is removed before the first group is written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._numbers = itertools.count()
        self._mark = secrets.token_hex(4)  # an earlier folder object's groups may still be held, and unlink theirs

    def write(self, group: RolloutGroup) -> SpilledGroup:
        """Puts a group on the disk.

        Raises:
            OSError: the disk is full, or the folder cannot be written.
        """
        number = next(self._numbers)
        if number == 0:
            self._path.mkdir(parents=True, exist_ok=True)
            for left_behind in self._path.glob("group-*.json"):
                left_behind.unlink(missing_ok=True)
        return SpilledGroup(group, self._path / f"group-{group.ordinal}-{self._mark}-{number}.json")

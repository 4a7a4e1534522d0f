"""Contents of checkpoints, and the crash of a process while it writes one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from skyrl_train.training.checkpoint import FileSystem, is_complete


class Crash(BaseException):
    """The process is gone: no handler of ``Exception`` runs, nothing is cleaned up."""


class QuickFileSystem(FileSystem):
    """Does not wait for the disk: these crashes end the process, not the machine."""

    def sync(self, path: Path) -> None:
        assert path.exists()


def writing(text: str) -> Callable[[Path], None]:
    """A writer of a checkpoint with a file and a folder."""

    def writer(folder: Path) -> None:
        (folder / "weights").write_text(text)
        (folder / "policy").mkdir()
        (folder / "policy" / "state").write_text(text * 2)

    return writer


def content(folder: Path | None) -> str | None:
    """Returns the content of a complete checkpoint; fails on an incomplete one."""
    if folder is None:
        return None
    assert is_complete(folder)
    text = (folder / "weights").read_text()
    assert (folder / "policy" / "state").read_text() == text * 2
    return text

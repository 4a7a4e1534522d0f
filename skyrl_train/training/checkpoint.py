"""Checkpoint folders that become visible complete or not at all (docs/design/semantics.md, section 5.3).

    writer ──> .tmp-global_step_N/ ──fsync──> global_step_N/ (one rename) ──> latest (one rename) ──> old ones removed

After a crash at any instant, :meth:`CheckpointStore.latest` returns a complete checkpoint: the previous or the new one.
``latest`` is a text file with a folder's name. A folder is complete when the files that its manifest lists have the sizes
listed there.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from skyrl_train.errors import CheckpointError

MANIFEST = "manifest.json"
POINTER = "latest"
_UNFINISHED = ".tmp-"  # being written: never a checkpoint
_REPLACED = ".replaced"  # the checkpoint of a step while a new one of the same step takes its place
_FOLDER = re.compile(r"global_step_(\d+)(\.replaced)?")
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)

logger = logging.getLogger(__name__)


class Checkpoints(Protocol):
    """The checkpoints of one run, on a local disk or behind a URL. Methods block; one writer at a time."""

    def latest(self) -> Path | None:
        """Return the folder of the checkpoint to resume from, or None if no checkpoint is complete."""
        ...

    def write(self, step: int, writer: Callable[[Path], None]) -> Path:
        """Make the checkpoint of ``step`` and return its folder; ``writer`` fills the folder that it is given.

        Raises:
            CheckpointError: the checkpoint could not be written. The previous one is unchanged.
        """
        ...


class FileSystem:
    """The operations that change the disk, one method each, so that a test can make each of them fail."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def write_text(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")

    def sync(self, path: Path) -> None:
        """Flush a file's bytes, or a folder's entries, to the disk."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path)

    def remove_file(self, path: Path) -> None:
        path.unlink()


class CheckpointStore:
    """Stores the checkpoints of one run in a local folder; see :class:`Checkpoints`."""

    def __init__(self, root: Path, max_to_keep: int, file_system: FileSystem | None = None) -> None:
        """
        Args:
            root: the folder of all checkpoints; the first ``write`` creates it.
            max_to_keep: number of newest checkpoints that a ``write`` keeps, at least 1.
        """
        self._root = root
        self._max_to_keep = max_to_keep
        self._files = file_system or FileSystem()

    def latest(self) -> Path | None:
        """Return the checkpoint to resume from, or None if no checkpoint is complete.

        It is the one that the pointer names. If that one is missing or incomplete, it is the complete one of the newest step.
        """
        try:
            name = (self._root / POINTER).read_text(encoding="utf-8").strip()
        except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
            name = ""
        if _FOLDER.fullmatch(name) and is_complete(self._root / name):
            return self._root / name
        complete = [folder for folder in self._folders() if is_complete(folder)]
        return max(complete, key=_age_key, default=None)

    def write(self, step: int, writer: Callable[[Path], None]) -> Path:
        """Make the checkpoint of ``step`` and return its folder; ``writer`` fills the empty temporary folder that it is given.

        A checkpoint of the same step is replaced. Checkpoints of later steps belong to a history whose weights are gone
        (the run was resumed from an earlier one) and are removed.

        Raises:
            CheckpointError: the disk is full or the folder cannot be written. Earlier checkpoints and the pointer are
                unchanged.
        """
        name = f"global_step_{step}"
        unfinished, pointer = self._root / f"{_UNFINISHED}{name}", self._root / f"{_UNFINISHED}{POINTER}"
        try:
            self._files.make_folder(self._root)
            # A crash may have left unfinished files and folders.
            for path in sorted(self._root.glob(_UNFINISHED + "*")):
                remove = self._files.remove_tree if path.is_dir() else self._files.remove_file
                remove(path)
            self._files.make_folder(unfinished)
            try:
                writer(unfinished)
                self._seal(unfinished, step)
                # The pointer's bytes are on disk before anything is renamed: from here on nothing needs space.
                self._files.write_text(pointer, name + "\n")
                self._files.sync(pointer)
            except Exception as error:
                written = _size(unfinished)
                shutil.rmtree(unfinished, ignore_errors=True)
                pointer.unlink(missing_ok=True)
                if _is_full_disk(error):
                    raise self._full_disk(step, written) from error
                raise
            self._make_visible(unfinished, self._root / name, pointer)
        except OSError as error:
            raise CheckpointError(
                f"The checkpoint of step {step} cannot be written to {self._root}: {error}. Earlier checkpoints are "
                "untouched; make the folder writable and run the same command again."
            ) from error
        self._remove_old(step)
        return self._root / name

    def _seal(self, folder: Path, step: int) -> None:
        """Flush the writer's files and list them in the manifest, which is written last."""
        paths = sorted(folder.rglob("*"))
        sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths if path.is_file()}
        for path in paths:
            self._files.sync(path)
        self._files.write_text(folder / MANIFEST, json.dumps({"step": step, "files": sizes}, indent=1))
        self._files.sync(folder / MANIFEST)
        self._files.sync(folder)

    def _make_visible(self, unfinished: Path, target: Path, pointer: Path) -> None:
        """Rename the finished folder, then the pointer. A crash between two operations leaves a complete checkpoint."""
        if target.exists():
            # ``latest`` finds the old checkpoint under its other name until the new one has taken its place.
            aside = target.with_name(target.name + _REPLACED)
            if is_complete(target):
                self._discard(aside)
                self._files.rename(target, aside)
            else:
                self._discard(target)
        self._files.rename(unfinished, target)
        # The folder's entry is on disk before the pointer names it.
        self._files.sync(self._root)
        self._files.rename(pointer, self._root / POINTER)
        self._files.sync(self._root)

    def _remove_old(self, step: int) -> None:
        """Keep the newest ``max_to_keep`` checkpoints up to ``step``, which was just written; remove all others."""
        # Replaced folders and later steps are not kept, even if they are complete.
        alive = [f for f in self._folders() if _age_key(f) <= (step, True) and not f.name.endswith(_REPLACED)]
        kept = sorted((f for f in alive if is_complete(f)), key=_age_key)[-self._max_to_keep :]
        try:
            for folder in self._folders():
                if folder not in kept:
                    self._discard(folder)
        except OSError as error:  # the new one is safe: an old one that stays only costs space
            logger.warning("An old checkpoint in %s could not be removed: %s", self._root, error)

    def _discard(self, folder: Path) -> None:
        """Remove a folder. A crash in between leaves an incomplete one, which is never resumed from."""
        if folder.exists():
            self._files.remove_tree(folder)

    def _full_disk(self, step: int, needed: int) -> CheckpointError:
        latest = self.latest()
        needed = max(needed, _size(latest) if latest is not None else 0)
        free = shutil.disk_usage(self._root).free
        return CheckpointError(
            f"The disk is full: the checkpoint of step {step} needs at least {needed} bytes in {self._root}, {free} "
            "are free. Earlier checkpoints are untouched; free space or lower trainer.max_ckpts_to_keep, then run the "
            "same command again."
        )

    def _folders(self) -> Iterator[Path]:
        if self._root.is_dir():
            yield from sorted(path for path in self._root.iterdir() if path.is_dir() and _FOLDER.fullmatch(path.name))


def is_complete(folder: Path) -> bool:
    """Return whether every file that the folder's manifest lists exists with the listed size."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def checkpoint_step(folder: Path) -> int:
    """Return the step of a folder that ``latest`` returned."""
    step = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["step"]
    return int(step)


def _age_key(folder: Path) -> tuple[int, bool]:
    """Return a sort key, oldest first; a replaced checkpoint comes before its replacement."""
    match = _FOLDER.fullmatch(folder.name)
    assert match is not None
    return int(match[1]), match[2] is None


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _is_full_disk(error: BaseException | None) -> bool:
    """Return whether the error or one of its causes is a full disk; torch hides it behind a RuntimeError."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL_DISK:
            return True
        error = error.__cause__ or error.__context__
    return False

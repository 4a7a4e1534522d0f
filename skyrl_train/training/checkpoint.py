"""Checkpoint folders that become visible complete or not at all (docs/design/semantics.md, section 5.3).

    writer ──> .tmp-global_step_N/ ──fsync──> global_step_N/ (one rename) ──> latest (one rename) ──> old ones removed

After a crash at any instant, :meth:`CheckpointStore.latest` returns a complete checkpoint: the previous or the new one.
``latest`` is a text file with a folder's name. A folder is complete when the files that its manifest lists have the sizes
listed there, and intact when they also have the checksums. Removing old checkpoints only checks completeness, which is cheap.
Resuming checks that the checkpoint is intact.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from skyrl_train.errors import CheckpointError
from skyrl_train.runtime.checksums import checksum_text, file_checksum

MANIFEST = "manifest.json"
POINTER = "latest"
_UNFINISHED = ".tmp-"  # being written: never a checkpoint
_REPLACED = ".replaced"  # the checkpoint of a step while a new one of the same step takes its place
_FOLDER = re.compile(r"global_step_(\d+)(\.replaced)?")
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
# Errors of reading that say that a file is damaged. All others (no permission, no connection) may pass.
_DAMAGE = {
    errno.ENOENT: "is missing",
    errno.ENOTDIR: "is missing",
    errno.EISDIR: "is no file",
    errno.EIO: "cannot be read from the disk",
}
START_AFRESH = "start a new run with trainer.resume=never"
_SMALL_BYTES = 16 << 20

logger = logging.getLogger(__name__)
T = TypeVar("T")
Report = Callable[[str], object]  # takes a line for the user
Writer = Callable[[Path], Mapping[str, str]]


def best_step(steps: Iterable[int], scores: Mapping[int, float]) -> int | None:
    """Return the step with the highest score, of equal ones the latest; None: no step has a score."""
    return max((step for step in steps if step in scores), key=lambda step: (scores[step], step), default=None)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The evaluations that decide which checkpoints stay beside the newest ones.

    Attributes:
        scores: of evaluated steps; higher is better.
        unfinished: steps whose evaluation or export has not ended.
    """

    scores: Mapping[int, float] = field(default_factory=dict)
    unfinished: Collection[int] = ()

    def kept(self, steps: Collection[int]) -> set[int]:
        """Return which of the ``steps``, which have checkpoints, keep them: the best, and the unfinished."""
        return set(steps) & {best_step(steps, self.scores), *self.unfinished}


NOT_EVALUATED = Evaluated()


class Checkpoints(Protocol):
    """The checkpoints of one run, on a local disk or behind a URL. Methods block; one writer at a time."""

    def latest(self, report: Report = logger.warning) -> Path | None:
        """Return the folder of the newest intact checkpoint, or None if the run has written none yet. Reads every file.

        Args:
            report: is told in one line which newer checkpoints are damaged, if any are.

        Raises:
            CheckpointError: there are checkpoints, but none is intact, or they cannot be read.
        """
        ...

    def write(self, step: int, writer: Writer, evaluated: Evaluated = NOT_EVALUATED) -> Path:
        """Make the checkpoint of ``step`` and return its folder.

        Args:
            evaluated: decides which older checkpoints stay.
            writer: fills the folder that it is given. Returns checksums (:mod:`skyrl_train.runtime.checksums`) of files, by
                their paths below the folder; files without one are read once more.

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
        self._newest: Path | None = None  # the checkpoint that the run has reached: resumed from, or written last

    def latest(self, report: Report = logger.warning) -> Path | None:
        """See :meth:`Checkpoints.latest`.

        It is the checkpoint that the pointer names. If that one is damaged, it is the newest intact one before it; without a
        usable pointer, the newest intact one.
        """
        try:
            self._newest = newest_intact(
                self._candidates(), find_damage, lambda path: path.name, self._root, report, START_AFRESH
            )
        except OSError as error:
            raise CheckpointError(
                f"The checkpoints in {self._root} cannot be read: {error}. Nothing has changed; make them readable and run "
                "the same command again."
            ) from error
        return self._newest

    def newest_complete(self) -> Path | None:
        """Return what :meth:`latest` would return if no file has other content. Reads manifests and sizes only."""
        return next(filter(is_complete, self._candidates()), None)

    def _candidates(self) -> list[Path]:
        """Return what ``latest`` may return, best first; the first one need not exist."""
        folders = sorted(self._folders(), key=_age_key, reverse=True)
        try:
            name = (self._root / POINTER).read_text(encoding="utf-8", errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return folders
        if not _FOLDER.fullmatch(name):
            if not folders:
                raise none_intact(self._root, [f"{POINTER} (is broken)"], START_AFRESH)
            return folders
        pointed = self._root / name
        # Not the newer ones: a crash came before the pointer named them, and the run may have gone another way since.
        before = [folder for folder in folders if _age_key(folder) < _age_key(pointed)]
        if not pointed.exists() and before and before[0].name == name + _REPLACED:
            return before  # a crash came between the two renames that replace a checkpoint
        return [pointed, *before]

    def folder(self, step: int) -> Path:
        """Return the place of the checkpoint of ``step``."""
        return self._root / f"global_step_{step}"

    def write(self, step: int, writer: Writer, evaluated: Evaluated = NOT_EVALUATED) -> Path:
        """See :meth:`Checkpoints.write`; the folder is empty and temporary while ``writer`` fills it.

        A checkpoint of the same step is replaced. Checkpoints of later steps belong to a history whose weights are gone
        (the run was resumed from an earlier one) and are removed.

        Raises:
            CheckpointError: the disk is full or the folder cannot be written. Earlier checkpoints and the pointer are
                unchanged.
        """
        target, pointer = self.folder(step), self._root / f"{_UNFINISHED}{POINTER}"
        unfinished = target.with_name(f"{_UNFINISHED}{target.name}")
        try:
            self._files.make_folder(self._root)
            # A crash may have left unfinished files and folders.
            for path in sorted(self._root.glob(_UNFINISHED + "*")):
                remove = self._files.remove_tree if path.is_dir() else self._files.remove_file
                remove(path)
            # These are newer than the checkpoint that the run resumed from. Remove them first: otherwise they count as the
            # newest, and intact older ones are removed.
            for folder in self._folders():
                if self._newest is not None and _age_key(folder) > _age_key(self._newest):
                    self._files.remove_tree(folder)
            self._files.make_folder(unfinished)
            try:
                self._seal(unfinished, step, writer(unfinished))
                # The pointer's bytes are on disk before anything is renamed: from here on nothing needs space.
                self._files.write_text(pointer, target.name + "\n")
                self._files.sync(pointer)
            except Exception as error:
                written = folder_bytes(unfinished)
                shutil.rmtree(unfinished, ignore_errors=True)
                pointer.unlink(missing_ok=True)
                if (full := _full_disk_errno(error)) is not None:
                    raise self._full_disk(step, written, full) from error
                raise
            self._make_visible(unfinished, target, pointer)
        except OSError as error:
            raise CheckpointError(
                f"The checkpoint of step {step} cannot be written to {self._root}: {error}. Earlier checkpoints are "
                "untouched; make the folder writable and run the same command again."
            ) from error
        self._newest = target
        self._remove_old(step, evaluated)
        return target

    def _seal(self, folder: Path, step: int, checksums: Mapping[str, str]) -> None:
        """Flush the writer's files and list them in the manifest, which is written last.

        Raises:
            CheckpointError: a file that the writer has written is not here.
        """
        # Each rank makes its folders where it is, and would not notice that they are on another disk.
        if elsewhere := [name for name in checksums if not (folder / name).is_file()]:
            raise CheckpointError(
                f"The checkpoint of step {step} is not complete in {self._root}: {len(elsewhere)} of its files, such as "
                f"{elsewhere[0]}, are on disks of other nodes. Name a folder on a disk that all nodes share in "
                "trainer.runs_dir or trainer.run_dir."
            )
        # A network file system may list a folder without what another node has just written there.
        paths = sorted({*folder.rglob("*"), *(folder / name for name in checksums)})
        files = {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}
        manifest = Manifest(
            step,
            {name: path.stat().st_size for name, path in files.items()},
            {name: checksums.get(name) or file_checksum(path) for name, path in files.items()},
        )
        for path in paths:
            self._files.sync(path)
        self._files.write_text(folder / MANIFEST, manifest.to_json())
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

    def _remove_old(self, step: int, evaluated: Evaluated) -> None:
        """Keep the newest ``max_to_keep`` checkpoints up to ``step``, the one just written, and all that ``evaluated`` keeps."""
        try:
            # Replaced folders and later steps are not kept, even if they are complete.
            alive = [f for f in self._folders() if _age_key(f) <= (step, True) and not f.name.endswith(_REPLACED)]
            complete = {_age_key(f)[0]: f for f in sorted(alive, key=_age_key) if is_complete(f)}
            newest = [self.folder(step), *list(complete.values())[-self._max_to_keep :]]
            kept = [*newest, *(complete[each] for each in evaluated.kept(complete))]
            for folder in self._folders():
                if folder not in kept:
                    self._discard(folder)
        except OSError as error:  # the new one is safe: an old one that stays only costs space
            logger.warning("An old checkpoint in %s could not be removed: %s", self._root, error)

    def _discard(self, folder: Path) -> None:
        """Remove a folder. A crash in between leaves an incomplete one, which is never resumed from."""
        if folder.exists():
            self._files.remove_tree(folder)

    def _full_disk(self, step: int, needed: int, number: int) -> CheckpointError:
        needed = max([needed, *map(folder_bytes, self._folders())])
        what, room = "The disk is full", f", {shutil.disk_usage(self._root).free} are free"
        if number == errno.EDQUOT:  # what is free on the disk is for others
            what, room = "Your quota of the disk is used up", ""
        return CheckpointError(
            f"{what}: the checkpoint of step {step} needs at least {needed} bytes in {self._root}{room}. Earlier "
            "checkpoints are untouched; free space or lower trainer.max_ckpts_to_keep, then run the same command again."
        )

    def _folders(self) -> Iterator[Path]:
        if self._root.is_dir():
            yield from sorted(path for path in self._root.iterdir() if path.is_dir() and _FOLDER.fullmatch(path.name))


@dataclass(frozen=True, slots=True)
class Manifest:
    """The list of a checkpoint's files. It ends with its own checksum.

    Attributes:
        sizes: in bytes, by the files' paths below the folder.
        checksums: likewise; empty in a checkpoint of an earlier version.
    """

    step: int
    sizes: dict[str, int]
    checksums: dict[str, str]

    def to_json(self) -> str:
        files = {name: {"bytes": size, "checksum": self.checksums[name]} for name, size in self.sizes.items()}
        content = {"step": self.step, "files": files}
        own = checksum_text(zlib.crc32(json.dumps(content).encode()))
        return json.dumps({**content, "checksum": own}, indent=1)

    @classmethod
    def of_json(cls, data: bytes) -> Manifest:
        """Read a manifest.

        Raises:
            ValueError: it is broken, or differs from its own checksum.
        """
        try:
            text = data.decode()
            content = json.loads(text)
            step, files = content["step"], content["files"]
            if content.keys() == {"step", "files"} and all(isinstance(entry, int) for entry in files.values()):
                return cls(step, files, {})  # an earlier version
            manifest = cls(
                step,
                {name: entry["bytes"] for name, entry in files.items()},
                {name: entry["checksum"] for name, entry in files.items()},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a manifest: {error!r}") from error
        if manifest.to_json() != text:  # the text has the checksum of its content
            raise ValueError("the manifest differs from its checksum")
        return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        OSError, ValueError: it is missing or broken.
    """
    return Manifest.of_json((folder / MANIFEST).read_bytes())


def is_complete(folder: Path) -> bool:
    """Return whether every file that the folder's manifest lists exists with the listed size.

    Raises:
        OSError: a file cannot be looked at for a reason that is no damage.
    """
    try:
        return all((folder / name).stat().st_size == size for name, size in read_manifest(folder).sizes.items())
    except ValueError:
        return False
    except OSError as error:
        if error.errno not in _DAMAGE:
            raise
        return False


def find_damage(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint, such as "policy/optimizer.pt is missing"; None: it is intact. Reads every file.

    Raises:
        OSError: a file cannot be read for a reason that is no damage.
    """
    try:
        manifest = read_manifest(folder)
    except ValueError:
        return f"{MANIFEST} is broken"
    except OSError as error:
        return _damage_of(MANIFEST, error)

    def damage(name: str) -> str | None:
        try:
            size, expected = (folder / name).stat().st_size, manifest.sizes[name]
            if size != expected:
                return f"{name} has {size} bytes instead of {expected}"
            if manifest.checksums and file_checksum(folder / name) != manifest.checksums[name]:
                return f"{name} differs from its checksum"
        except OSError as error:
            return _damage_of(name, error)
        return None

    if sum(manifest.sizes.values()) < _SMALL_BYTES:  # reading these takes less time than starting threads
        return next(filter(None, map(damage, manifest.sizes)), None)
    with ThreadPoolExecutor() as pool:  # one thread cannot keep a fast disk busy
        return next(filter(None, pool.map(damage, manifest.sizes)), None)


def _damage_of(name: str, error: OSError) -> str:
    if error.errno not in _DAMAGE:
        raise error
    return f"{name} {_DAMAGE[error.errno]}"


def newest_intact(
    candidates: Iterable[T],
    find_damage: Callable[[T], str | None],
    name_of: Callable[[T], str],
    place: object,
    report: Report,
    start_afresh: str,
) -> T | None:
    """Return the first candidate without damage, and report the damaged ones before it in one line. None: no candidates.

    Args:
        start_afresh: see :func:`none_intact`.

    Raises:
        CheckpointError: all are damaged.
    """
    damaged: list[str] = []
    for candidate in candidates:
        damage = find_damage(candidate)
        if damage is None:
            if damaged:
                report(f"Damage in {place}: {', '.join(damaged)}. The run resumes from {name_of(candidate)} instead.")
            return candidate
        damaged.append(f"{name_of(candidate)} ({damage})")
    if damaged:
        raise none_intact(place, damaged, start_afresh)
    return None


def none_intact(place: object, damaged: Iterable[str], start_afresh: str) -> CheckpointError:
    """Return the error for a run that has checkpoints, all of them ``damaged``. Starting again at step 0 would remove them.

    Args:
        start_afresh: what the user can do instead of restoring a checkpoint; see ``START_AFRESH``.
    """
    return CheckpointError(
        f"No checkpoint in {place} is intact: {', '.join(damaged)}. Restore one of them from a copy, or {start_afresh}."
    )


def checkpoint_step(folder: Path) -> int:
    """Return the step of a folder that ``latest`` returned."""
    return read_manifest(folder).step


def _age_key(folder: Path) -> tuple[int, bool]:
    """Return a sort key, oldest first; a replaced checkpoint comes before its replacement."""
    match = _FOLDER.fullmatch(folder.name)
    assert match is not None
    return int(match[1]), match[2] is None


def folder_bytes(folder: Path) -> int:
    """Return the size of all files below ``folder``."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _full_disk_errno(error: BaseException | None) -> int | None:
    """Return the number of the error, or of one of its causes, that is a full disk; torch hides it behind a RuntimeError."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL_DISK:
            return error.errno
        error = error.__cause__ or error.__context__
    return None

"""Checkpoints behind a URL that fsspec opens (``s3://``, ``gs://``, ...). A run resumes only from a complete one.

    write:   writer ──> <run>/checkpoints/ ──upload──> global_step_N/* ──> its manifest ──> latest ──> old ones removed
    resume:  latest ──> complete? ──download──> <run>/checkpoints/ ──> intact? (else the one before)

An object store has no rename, so the manifest makes a folder a checkpoint: it is uploaded last and removed first. No folder is
written twice. The state behind the URL decides; the copy on the local disk only saves the download if it is the same checkpoint.
Only while there is none behind the URL does the local disk decide: the run got its ``trainer.ckpt_path`` after it had begun. A
newest local checkpoint that a command with another URL, or with none, has written is an error: the run has continued there.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from skyrl_train.config.compare import differences, explain
from skyrl_train.config.compose import from_yaml, to_yaml
from skyrl_train.config.schema import ResumeMode, RunConfig
from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.runtime.checksums import file_checksum
from skyrl_train.training.checkpoint import (
    MANIFEST,
    NOT_EVALUATED,
    POINTER,
    CheckpointStore,
    Evaluated,
    Manifest,
    Report,
    Writer,
    find_damage,
    newest_intact,
    none_intact,
)

CONFIG = "config.yaml"  # of the run that the checkpoints belong to
# A file with a random number, so that no two checkpoints have the same manifest, and the URL that the checkpoint was written for.
IDENTITY = "id"
START_AFRESH = "start a new run with another trainer.ckpt_path"
_FOLDER = re.compile(r"global_step_(\d+)(?:\.(\d+))?")

logger = logging.getLogger(__name__)


class _RemoteFolder(NamedTuple):
    """The folder of a checkpoint; ordered by age."""

    step: int
    attempt: int  # of this step; a second checkpoint of the same step gets a new folder

    @property
    def name(self) -> str:
        return f"global_step_{self.step}" + (f".{self.attempt}" if self.attempt else "")


class _DamagedError(CheckpointError):
    """What was downloaded differs from its checksum."""


class RemoteCheckpointStore:
    """Stores the checkpoints of one run behind a URL; see :class:`skyrl_train.training.checkpoint.Checkpoints`."""

    def __init__(self, url: str, config: RunConfig, local: CheckpointStore, origin: Path | None = None) -> None:
        """
        Args:
            config: of the run; checkpoints of another run are rejected.
            local: stores each checkpoint before its upload, and after a download.
            origin: file with the ``step`` of the policy that the run started from, if it exists; see :meth:`origin_step`.

        Raises:
            ConfigError: fsspec cannot open such a URL.
        """
        self._url = url.rstrip("/")
        self._config = config
        self._local = local
        self._origin = origin
        # The manifests that the newest checkpoint may have while no other run writes there; None: not read yet.
        self._known: set[bytes] | None = None
        self._resumed: _RemoteFolder | None = None  # the checkpoint resumed from, or written last
        self._files: AbstractFileSystem
        self._root: str
        try:
            self._files, self._root = url_to_fs(self._url)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"trainer.ckpt_path={url} cannot be opened: {error}") from error

    def check(self) -> None:
        """Check that the checkpoints behind the URL belong to this run.

        Raises:
            ConfigError: they have a configuration that makes another run, or ``trainer.resume=never`` is set and there are any.
            CheckpointError: the URL cannot be reached.
        """
        with self._reached("read"):
            candidates = self._candidates()
            remote = next(filter(self._is_complete, candidates), None)
            theirs = None if remote is None else from_yaml(self._text(CONFIG), where=f"{self._url}/{CONFIG}")
            own = remote is not None and self._is_local(remote)
        if theirs is not None and (differing := differences(theirs, self._config)):
            remedy = f"Set these as in {self._url}/{CONFIG}, or give another trainer.ckpt_path."
            raise ConfigError(explain(differing, f"trainer.ckpt_path={self._url}", remedy))
        if self._config.trainer.resume is ResumeMode.never and candidates and not own:
            raise ConfigError(
                f"trainer.ckpt_path={self._url} holds checkpoints and trainer.resume=never. Give another "
                "trainer.ckpt_path, or drop resume=never."
            )

    def origin_step(self) -> int | None:
        """Return the step of the policy that the run started from, on the machine where it did. None: it is not there.

        Raises:
            CheckpointError: the URL cannot be reached.
        """
        if self._origin is None:
            return None
        with self._reached("read"):
            try:
                step = int(json.loads(self._text(self._origin.name))["step"])
            except FileNotFoundError:
                return None
            # Without a checkpoint it is left from a run that has ended before its first one.
            return None if self._newest() is None else step

    def latest(self, report: Report = logger.warning) -> Path | None:
        """See :meth:`Checkpoints.latest`; the folder is on the local disk.

        It is the checkpoint that the pointer names. If that one is damaged, it is the newest intact one before it. While there
        is none behind the URL, it is the newest intact one on the local disk.

        Raises:
            CheckpointError: the newest one on the local disk was not written for this URL, which has another one.
        """
        with self._reached("read"):
            candidates = self._candidates()
            newest = next(filter(self._is_complete, candidates), None)
            if newest is not None:
                self._check_local(candidates, newest)
            self._known = set() if newest is None else {self._manifest_bytes(newest)}
            self._resumed = newest_intact(
                candidates, self._fetch, lambda remote: remote.name, self._url, report, START_AFRESH
            )
            if self._resumed is not None:
                # It becomes the newest one when write() removes the damaged ones after it.
                self._known.add(self._manifest_bytes(self._resumed))
                return self._local.folder(self._resumed.step)
        # To begin again at step 0 would remove the steps that the run has trained.
        local = self._local.latest(report)
        if local is not None:
            report(f"{self._url} has no checkpoint yet. The run resumes from {local}.")
        return local

    def _check_local(self, candidates: Sequence[_RemoteFolder], newest: _RemoteFolder) -> None:
        """Check that the run has not continued without the URL: its steps since then would be lost, and nobody would notice."""
        here = self._local.newest_complete()
        if here is None or any(self._local.folder(each.step) == here and self._is_local(each) for each in candidates):
            return
        identity = here / IDENTITY
        if identity.is_file():
            _, *url = identity.read_text(encoding="utf-8", errors="replace").splitlines()
            if url in ([], [self._url]):  # an earlier version wrote no URL
                return
        raise CheckpointError(
            f"{here} was not written for trainer.ckpt_path={self._url}, which has {newest.name}: the run has continued with "
            f"another trainer.ckpt_path, or with none. To continue from {here.name}, give that one, or an empty folder; "
            f"to continue from {newest.name}, remove {here.parent}."
        )

    def write(self, step: int, writer: Writer, evaluated: Evaluated = NOT_EVALUATED) -> Path:
        """Make the checkpoint of ``step``; return its copy on the local disk, which the next one replaces unless it is the best.

        Raises:
            CheckpointError: see :meth:`CheckpointStore.write`; or the upload failed (the previous checkpoint is unchanged); or
                another run writes there too.
        """

        def identified(folder: Path) -> Mapping[str, str]:
            checksums = writer(folder)
            (folder / IDENTITY).write_text(f"{secrets.token_hex(16)}\n{self._url}\n", encoding="utf-8")
            return checksums

        folder = self._local.write(step, identified, evaluated)
        with self._reached(f"take the checkpoint of step {step}"):
            newest = self._newest()
            # Another run has written since: each of the two would remove the later steps of the other.
            if self._known is not None and newest is not None and self._manifest_bytes(newest) not in self._known:
                raise CheckpointError(
                    f"trainer.ckpt_path={self._url} has {newest.name} of another run, which is untouched. Stop one of the two, "
                    "or give it another trainer.ckpt_path."
                )
            folders = self._remote_folders()
            remote = _RemoteFolder(step, 1 + max((p.attempt for p in folders if p.step == step), default=-1))
            # These are newer than the checkpoint that the run resumed from. Remove them first: otherwise they count as the
            # newest, and intact older ones are removed.
            for later in folders:
                if self._resumed is not None and later > self._resumed:
                    self._remove(later)
            manifest = (folder / MANIFEST).read_bytes()
            if self._known is not None:
                self._known.add(manifest)  # an upload that fails may have come this far
            self._upload(folder, remote, first=newest is None)
            self._known, self._resumed = {manifest}, remote
        try:
            self._remove_old(remote, evaluated)
        except Exception as error:  # the new one is safe: an old one that stays only costs space
            logger.warning("An old checkpoint in %s could not be removed: %s", self._url, error)
        return folder

    def _upload(self, folder: Path, remote: _RemoteFolder, *, first: bool) -> None:
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / MANIFEST]
        there = [self._path(remote.name, path.relative_to(folder).as_posix()) for path in paths]
        for parent in sorted({path.rpartition("/")[0] for path in there}):
            self._files.makedirs(parent, exist_ok=True)
        # Written once: a crash while it is overwritten would make the existing checkpoints unreadable.
        if first:
            self._files.pipe_file(self._path(CONFIG), to_yaml(self._config).encode())
            if self._origin is not None and self._origin.is_file():
                self._files.pipe_file(self._path(self._origin.name), self._origin.read_bytes())
        self._files.put([str(path) for path in paths], there)
        # The manifest comes after all files that it lists, the pointer after a check of their sizes.
        self._files.pipe_file(self._path(remote.name, MANIFEST), (folder / MANIFEST).read_bytes())
        if not self._is_complete(remote):
            raise OSError(f"{remote.name} is incomplete after its upload")
        self._files.pipe_file(self._path(POINTER), f"{remote.name}\n".encode())

    def _fetch(self, remote: _RemoteFolder) -> str | None:
        """Bring a checkpoint to the local disk, unless it is there; return what is wrong with it, or None if it is intact."""
        if self._is_local(remote):
            damage = find_damage(self._local.folder(remote.step))
            if damage is None:
                return None
            logger.warning("%s is damaged (%s) and downloaded again", self._local.folder(remote.step), damage)
        damage = self._find_damage(remote)
        if damage is not None:
            return damage
        try:
            self._local.write(remote.step, lambda folder: self._download(remote, folder))
        except _DamagedError as error:
            return str(error)
        return None

    def _download(self, remote: _RemoteFolder, folder: Path) -> Mapping[str, str]:
        with self._reached("read"):  # otherwise a failed download would be reported as an error of the local disk
            manifest = self._manifest(remote)
            for name in manifest.sizes:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
            there = [self._path(remote.name, name) for name in manifest.sizes]
            self._files.get(there, [str(folder / name) for name in manifest.sizes])
            if torn := [name for name, size in manifest.sizes.items() if (folder / name).stat().st_size != size]:
                raise OSError(f"{', '.join(torn)} of {remote.name} did not arrive complete")
            checksums = {name: file_checksum(folder / name) for name in manifest.sizes}
            for name, checksum in manifest.checksums.items():
                if checksums[name] != checksum:
                    raise _DamagedError(f"{name} differs from its checksum")
            return checksums

    def _remove_old(self, newest: _RemoteFolder, evaluated: Evaluated) -> None:
        """Keep the newest ``max_ckpts_to_keep`` checkpoints up to ``newest`` and all that ``evaluated`` keeps; remove the others.

        Later steps are removed because the run was resumed from an earlier one, so their weights are gone.
        """
        folders = self._remote_folders()
        complete = [remote for remote in folders if remote <= newest and self._is_complete(remote)]
        by_step = {remote.step: remote for remote in complete}  # of several attempts at a step, the last one
        kept = complete[-self._config.trainer.max_ckpts_to_keep :]
        kept += [by_step[step] for step in evaluated.kept(by_step)]
        for remote in folders:
            if remote not in kept:
                self._remove(remote)

    def _remove(self, remote: _RemoteFolder) -> None:
        # Without its manifest the folder is no checkpoint, so a crash during the removal is harmless.
        manifest = self._path(remote.name, MANIFEST)
        if self._files.exists(manifest):
            self._files.rm_file(manifest)
        self._files.rm(self._path(remote.name), recursive=True)

    def _newest(self) -> _RemoteFolder | None:
        """Return the first complete candidate. Whether it is intact is unknown until it is downloaded."""
        return next((remote for remote in self._candidates() if self._is_complete(remote)), None)

    def _candidates(self) -> list[_RemoteFolder]:
        """Return what ``latest`` may return, best first; see :meth:`CheckpointStore._candidates`."""
        folders = self._remote_folders()[::-1]
        # Without a whole manifest, and not named by the pointer: a crash has left it half uploaded or half removed.
        checkpoints = [remote for remote in folders if self._has_manifest(remote)]
        try:
            pointed = _parse_folder(self._files.cat_file(self._path(POINTER)).decode(errors="replace").strip())
        except FileNotFoundError:
            return checkpoints
        if pointed is None:
            if not checkpoints:
                raise none_intact(self._url, [f"{POINTER} (is broken)"], START_AFRESH)
            return checkpoints
        return [pointed, *(remote for remote in checkpoints if remote < pointed)]

    def _remote_folders(self) -> list[_RemoteFolder]:
        """Return all folders of checkpoints, complete or not, oldest first."""
        self._files.invalidate_cache()
        try:
            entries = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        folders = (_parse_folder(str(entry).rstrip("/").rpartition("/")[2]) for entry in entries)
        return sorted(remote for remote in folders if remote is not None)

    def _find_damage(self, remote: _RemoteFolder) -> str | None:
        """Return what is wrong with the files behind the URL, as far as their sizes show it."""
        try:
            sizes = self._manifest(remote).sizes
        except FileNotFoundError:
            return f"{MANIFEST} is missing"
        except ValueError:
            return f"{MANIFEST} is broken"
        found = self._files.find(self._path(remote.name), detail=True)
        for name, size in sizes.items():
            entry = found.get(self._path(remote.name, name))
            if entry is None:
                return f"{name} is missing"
            if entry["size"] != size:
                return f"{name} has {entry['size']} bytes instead of {size}"
        return None

    def _is_complete(self, remote: _RemoteFolder) -> bool:
        return self._find_damage(remote) is None

    def _is_local(self, remote: _RemoteFolder) -> bool:
        """Return whether the local disk has a copy of this checkpoint, intact or not."""
        try:
            there = self._manifest_bytes(remote)
            # A manifest of an earlier version has sizes only, which may equal the sizes of another checkpoint.
            same = (self._local.folder(remote.step) / MANIFEST).read_bytes() == there
            return same and bool(Manifest.of_json(there).checksums)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return False

    def _has_manifest(self, remote: _RemoteFolder) -> bool:
        try:
            self._manifest(remote)
        except (FileNotFoundError, ValueError):
            return False
        return True

    def _manifest(self, remote: _RemoteFolder) -> Manifest:
        """Raises FileNotFoundError or ValueError if it is missing or broken."""
        return Manifest.of_json(self._manifest_bytes(remote))

    def _manifest_bytes(self, remote: _RemoteFolder) -> bytes:
        return bytes(self._files.cat_file(self._path(remote.name, MANIFEST)))

    def _text(self, *names: str) -> str:
        return str(self._files.cat_file(self._path(*names)), encoding="utf-8")

    def _path(self, *names: str) -> str:
        return "/".join([self._root.rstrip("/"), *names])

    @contextmanager
    def _reached(self, what: str) -> Iterator[None]:
        """Turn the errors of fsspec's file systems into CheckpointError."""
        try:
            yield
        except (CheckpointError, ConfigError):
            raise
        except Exception as error:  # the file systems have no error class in common
            raise CheckpointError(
                f"trainer.ckpt_path={self._url} does not {what}: {error!r}. Complete checkpoints there are unchanged. "
                "Check that the URL can be reached and written to, then run the same command again."
            ) from error


def _parse_folder(name: str) -> _RemoteFolder | None:
    match = _FOLDER.fullmatch(name)
    return None if match is None else _RemoteFolder(int(match[1]), int(match[2] or 0))

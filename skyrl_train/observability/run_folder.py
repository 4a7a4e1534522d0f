"""The folder of a run, and the choice of the folder that a command continues.

<run>/config.yaml  metrics.jsonl  samples/  eval.jsonl  events/  checkpoints/  logs/  model/  finished.json  run.lock
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

from skyrl_train.config.compare import LENGTH, changes, differences, explain
from skyrl_train.config.compose import from_yaml, to_yaml
from skyrl_train.config.schema import ResumeMode, RunConfig
from skyrl_train.errors import ConfigError, SkyRLError
from skyrl_train.events.log import EVENTS, EventLog
from skyrl_train.observability.samples import SampleWriter

CONFIG, METRICS, SAMPLES, EVALUATIONS = "config.yaml", "metrics.jsonl", "samples", "eval.jsonl"
FINISHED, LOCK = "finished.json", "run.lock"
ORIGIN = "init_from.json"  # the run and step of the policy that the run started from
REPORT_HTML, REPORT_MD = "report.html", "report.md"
LOGS = "logs"
TRAINER_LOG = "trainer.log"  # in the folder of logs

# The parts of a run folder that a failed start leaves. Its logs stay: they say why it failed.
_OF_A_START = ("model", ORIGIN, EVENTS, EVALUATIONS, SAMPLES)

_PIECE_BYTES = 1 << 16

_locked_here: set[Path] = set()


class RunChoice(NamedTuple):
    """The folder in which a command trains. ``finished`` implies ``resuming``: nothing is left to train."""

    path: Path
    resuming: bool
    finished: bool


def choose_run_folder(config: RunConfig, total_steps: int = 0) -> RunChoice:
    """Find the unfinished run that ``config`` continues, or create the folder of a new run.

    ``trainer.run_dir`` names the folder. Without it, runs are numbered below ``trainer.runs_dir``: the newest unfinished run
    whose configuration allows it is continued. If there is none, or with ``resume=never``, the next number is used. A given
    folder in which a run with other settings failed to start is used for a new run.

    Args:
        total_steps: of ``config``. A finished run in the given folder continues if its length was changed to more steps.

    Raises:
        ConfigError: the given folder contains another run or other files, or with ``resume=never`` any file; or the
            configuration of an unfinished run cannot be read now.
    """
    trainer = config.trainer
    if trainer.run_dir is not None:
        return _given_folder(config, Path(trainer.run_dir), total_steps)
    numbered = _numbered_folders(Path(trainer.runs_dir), trainer.run_name)
    if trainer.resume is not ResumeMode.never:
        # Newest first; a run with other settings is left as it is.
        for folder in _unfinished(numbered):
            try:
                differing = differences(read_config(folder), config)
            except (ConfigError, FileNotFoundError, PermissionError):
                continue  # no configuration yet, one of a version with other settings, or the run of another user
            except OSError as error:
                raise ConfigError(
                    f"{folder} may be the run to continue, but {CONFIG} in it cannot be read: {error.strerror or error}. Give "
                    "the same command again when it can, or start a new run with trainer.resume=never."
                ) from error
            if not differing:
                return RunChoice(folder, resuming=True, finished=False)
    folder = _create_next(Path(trainer.runs_dir), trainer.run_name, max(numbered, default=0))
    return RunChoice(folder, resuming=False, finished=False)


class RunFolder:
    """An open run folder, locked against other processes until :meth:`close`.

    Attributes:
        path: the folder itself.
        checkpoints: folder of ``global_step_N`` and ``latest``.
        logs: folder of the trackers' files and the logs of the processes.
        model: folder of the initial model, if the run builds one.
        metrics, evaluations: open files; a line per step, per evaluated policy.
        samples: writes a file per step and per evaluated policy.
        events: the record of groups, requests, engines and activities, in ``events/``.
    """

    def __init__(self, path: Path, config: RunConfig) -> None:
        """Create the folders and write the configuration. The parts of a failed start with other settings are removed.

        Raises:
            ConfigError: another process trains in this folder.
            SkyRLError: the disk is full.
        """
        self.path = path
        self.checkpoints, self.logs, self.model = path / "checkpoints", path / LOGS, path / "model"
        try:
            for folder in (path, self.checkpoints, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_create(path, error) from error
        # Before the first write: another process may train in this folder.
        self._lock = _lock(path)
        with ExitStack() as undo:
            undo.callback(self._unlock)
            if (path / CONFIG).is_file() and not has_begun(path) and differences(read_config(path), config):
                for part in (path / name for name in _OF_A_START):
                    if part.is_dir():
                        shutil.rmtree(part)
                    else:
                        part.unlink(missing_ok=True)
            (path / FINISHED).unlink(missing_ok=True)  # of a run that continues because it has more steps now
            replace_file(path / CONFIG, to_yaml(config))
            self.metrics = JsonlFile(path / METRICS)
            self.samples = SampleWriter(path / SAMPLES)
            self.evaluations = JsonlFile(path / EVALUATIONS)
            self.events = EventLog(path / EVENTS, config.trainer.max_events_per_s)
            undo.pop_all()

    def close(self) -> None:
        """Close the files and release the lock. Idempotent."""
        # The files before the lock: another process may open them as soon as it is released.
        for file in (self.metrics, self.evaluations, self.events, self.samples):
            file.close()
        self._unlock()

    def _unlock(self) -> None:
        self._lock.close()
        _locked_here.discard(self.path.resolve())


def _given_folder(config: RunConfig, folder: Path, total_steps: int) -> RunChoice:
    name = f"trainer.run_dir={folder}"
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{name} is a file. Name a folder.")
    # A run that died before it wrote its configuration left at most a lock, a torn file and empty folders.
    files = [path.name for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    if not set(files) - {LOCK, f"{CONFIG}.tmp"}:
        return RunChoice(folder, resuming=False, finished=False)
    if config.trainer.resume is ResumeMode.never:
        raise ConfigError(f"{name} is not empty and trainer.resume=never. Name another folder, or drop resume=never.")
    if not (folder / CONFIG).is_file():
        run, step = folder.absolute().parent.parent, re.fullmatch(r"global_step_(\d+)", folder.name)
        if step is not None and (run / CONFIG).is_file():
            raise ConfigError(
                f"{name} is a checkpoint. To resume its run from there: trainer.run_dir={run} trainer.resume_step={step[1]}."
            )
        raise ConfigError(f"{name} is not empty and contains no run (no {CONFIG}). Name another folder.")
    before = read_config(folder)
    changed = changes(before, config)
    if differing := [change for change in changed if change.another_run]:
        if not has_begun(folder):
            return RunChoice(folder, resuming=False, finished=False)
        remedy = (
            f"Set these as in {folder / CONFIG} to resume that run. To train on with these values, start a new run from its "
            f"policy: trainer.init_from={folder} and another trainer.run_dir."
        )
        raise ConfigError(explain(differing, name, remedy))
    finished = (folder / FINISHED).is_file()
    if finished and any(change.key in LENGTH for change in changed):
        steps = max((row["step"] for row in read_jsonl(folder / METRICS)), default=0)
        finished = total_steps <= steps
    finished = finished and config.trainer.resume_step in (None, before.trainer.resume_step)
    return RunChoice(folder, resuming=True, finished=finished)


def has_begun(folder: Path) -> bool:
    """Return whether the run in ``folder`` has trained a step, written a checkpoint or finished.

    Otherwise its start has failed, for example with a wrong model, and its settings do not bind the next command.
    """
    if (folder / FINISHED).is_file() or any((folder / "checkpoints").glob("global_step_*")):
        return True
    return any(read_jsonl(folder / METRICS))


def left_behind(config: RunConfig) -> str:
    """Return why ``config`` starts a new run instead of continuing the newest unfinished one; empty if there is none.

    Runs that ended before their first step are ignored: they contain nothing to continue.
    """
    for folder in _unfinished(_numbered_folders(Path(config.trainer.runs_dir), config.trainer.run_name)):
        try:
            if not (folder / METRICS).stat().st_size:
                continue
            differing = differences(read_config(folder), config)
        except (ConfigError, OSError):
            continue
        other = "; ".join(map(str, differing))
        why = f"has other settings ({other})" if differing else "is not resumed (trainer.resume=never)"
        return f"{folder} is unfinished, but {why}: this is a new run. Resume the old one with its own settings."
    return ""


def _unfinished(numbered: Mapping[int, Path]) -> list[Path]:
    """Return the folders of unfinished runs, newest first."""
    newest_first = (numbered[number] for number in sorted(numbered, reverse=True))
    return [folder for folder in newest_first if not (folder / FINISHED).is_file()]


def read_config(folder: Path) -> RunConfig:
    """Read the settings of the run in ``folder``.

    Raises:
        ConfigError: the file is not readable, or was written by a version with other settings.
        OSError: there is no such file.
    """
    path = folder / CONFIG
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is damaged: {error}.") from error
    return from_yaml(text, where=str(path))


def _numbered_folders(runs_dir: Path, run_name: str) -> dict[int, Path]:
    group, _, name = run_name.rpartition("/")  # a name such as sums/seed-0 puts runs into a folder of their own
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    if not (runs_dir / group).is_dir():
        return {}
    matches = ((pattern.fullmatch(folder.name), folder) for folder in (runs_dir / group).iterdir() if folder.is_dir())
    return {int(match.group(1)): folder for match, folder in matches if match}


def _create_next(runs_dir: Path, run_name: str, newest: int) -> Path:
    while True:
        newest += 1
        folder = runs_dir / f"{run_name}-{newest}"
        try:
            # Without exist_ok: creating the folder is how a process takes the number.
            folder.mkdir(parents=True)
        except FileExistsError:
            continue  # another process has just taken the number
        except OSError as error:
            raise _cannot_create(folder, error) from error
        return folder


def _cannot_create(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"Cannot create the run folder {folder}: {error.strerror or error}. Set trainer.runs_dir or trainer.run_dir to "
        "a writable place."
    )


def _lock(folder: Path) -> FileIO:
    """Take the folder's lock.

    A record lock, because it ends with this process: a lock on the open file would survive in a forked child and prevent a
    killed run from being resumed. Record locks do not exclude the same process, hence the set of folders.
    """
    resolved = folder.resolve()
    if resolved in _locked_here:
        raise ConfigError(f"This process trains in {folder} already. Give the second run another trainer.run_dir.")
    place = "Set trainer.runs_dir or trainer.run_dir to"
    try:
        file = FileIO(folder / LOCK, "a+")
    except OSError as error:
        raise ConfigError(f"{folder / LOCK} cannot be opened: {error.strerror}. {place} a writable place.") from error
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise ConfigError(
                f"The file system of {folder} has no locks ({error.strerror}), which keep a second process out of the run. "
                f"{place} a folder on another one, or have it mounted with locks (Lustre: -o flock)."
            ) from error
        raise ConfigError(
            f"Another process trains in {folder}. Wait for it, or give this run another trainer.run_dir or run_name."
        ) from error
    _locked_here.add(resolved)
    return file


def trains_now(folder: Path) -> bool:
    """Return whether a process of this machine, or of another one whose file system tells, trains in ``folder``."""
    if folder.resolve() in _locked_here:  # closing the file would release this process's own lock
        return True
    try:
        file = FileIO(folder / LOCK)
    except OSError:  # there is none, or it is not readable
        return False
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks
            return False
    return False


# Files -------------------------------------------------------------------------------------------------------------


class JsonlFile:
    """Appends JSON objects with a ``step``, one per line; each is passed to the operating system before ``append`` returns.

    The file survives a kill at any byte: opening it removes a torn last line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.is_file():  # remove a torn last line
            with path.open("r+b") as file:
                file.truncate(_end_of_lines(file))
        self._file = path.open("ab", buffering=0)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one line. NaN and infinities, which JSON cannot express, become ``null``.

        Raises:
            SkyRLError: the disk is full or gone.
        """
        content = _line(row).encode()
        try:
            while content:  # the file is unbuffered, and a write may be partial
                content = content[os.write(self._file.fileno(), content) :]
        except OSError as error:
            raise _write_error(self.path, error) from error

    def sync(self) -> None:
        """Put the lines on the disk, where they survive a power failure. Blocks.

        Raises:
            SkyRLError: the disk is full or gone.
        """
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _write_error(self.path, error) from error

    def truncate_after(self, step: int) -> None:
        """Remove the lines of later steps: their weights are lost, and the steps run again.

        The file is replaced atomically; lines that cannot be read are removed too.
        """
        # The repeated steps write these lines again. One at a time: those of a long run would fill the memory.
        kept = (line for line, row in _read_lines(self.path) if row["step"] <= step)
        self._file.close()
        _replace(self.path, kept)
        self._file = self.path.open("ab", buffering=0)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a ``JsonlFile`` in order. A missing file has none; torn lines are skipped."""
    return (row for _, row in _read_lines(path))


def _read_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each line of a ``JsonlFile`` with its object."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            row = parse_row(line)
            if row is not None:
                yield line, row


def _end_of_lines(file: BinaryIO) -> int:
    """Return the position behind the last whole line; the file may have gigabytes."""
    end = file.seek(0, os.SEEK_END)
    while end:
        begin = max(0, end - _PIECE_BYTES)
        file.seek(begin)
        place = file.read(end - begin).rfind(b"\n")
        if place >= 0:
            return begin + place + 1
        end = begin
    return 0


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line; None if the line is torn or has no step. NaN and Infinity are accepted."""
    try:
        row = orjson.loads(line)
    except ValueError:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return None
    step = row.get("step") if isinstance(row, dict) else None
    return row if isinstance(step, int) and not isinstance(step, bool) else None


def read_scores(evaluations: Path, metric: str) -> dict[int, float]:
    """Return the value of ``metric`` of each evaluated step that has one, from ``eval.jsonl``."""
    rows = ((row["step"], row.get(metric)) for row in read_jsonl(evaluations))
    return {step: value for step, value in rows if isinstance(value, int | float)}


def replace_file(path: Path, text: str) -> None:
    """Write a whole file atomically: readers see the old content or the new, also after a crash.

    Raises:
        SkyRLError: the disk is full or gone; the old content stays.
    """
    _replace(path, [text.encode()])


def _replace(path: Path, pieces: Iterable[bytes]) -> None:
    unfinished = path.with_name(path.name + ".tmp")
    try:
        with unfinished.open("wb") as file:
            file.writelines(pieces)
            file.flush()
            # On the disk before the rename: after a power failure the new name must not have an empty file.
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise _write_error(path, error) from error


def _line(row: Mapping[str, Any]) -> str:
    text = json.dumps(_jsonable(row), ensure_ascii=False, allow_nan=False)
    # Half a surrogate pair (in the uid of a prompt, for example) cannot be encoded; JSON has an escape for it.
    return text.encode("utf-8", "backslashreplace").decode() + "\n"


def _jsonable(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _jsonable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(inner) for inner in value]
    return value


def _write_error(path: Path, error: OSError) -> SkyRLError:
    return SkyRLError(
        f"Cannot write {path}: {error.strerror or error}. Make room and run the same command again; it resumes from "
        "the last checkpoint."
    )

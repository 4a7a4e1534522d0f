"""The folder that a run leaves, and which folder a command continues.

<run>/config.yaml  metrics.jsonl  samples.jsonl  eval.jsonl  checkpoints/  logs/  model/  finished.json (when it is)  run.lock
"""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from skyrl_train.config.compare import differences, same_run
from skyrl_train.config.compose import from_yaml, to_yaml
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.config.schema.trainer import ResumeMode
from skyrl_train.errors import ConfigError
from skyrl_train.observability.jsonl import JsonlFile, read_jsonl, replace_file

CONFIG, METRICS, SAMPLES, EVALUATIONS = "config.yaml", "metrics.jsonl", "samples.jsonl", "eval.jsonl"
FINISHED, LOCK = "finished.json", "run.lock"

_locked_here: set[Path] = set()


class RunChoice(NamedTuple):
    """Where a command trains. ``finished`` implies ``resuming``: there is nothing left to train."""

    path: Path
    resuming: bool
    finished: bool


def choose_run_folder(config: RunConfig) -> RunChoice:
    """Finds the unfinished run that ``config`` continues, or creates the folder of a new one.

    With ``trainer.run_dir`` it is that folder. Without, runs are numbered below ``trainer.runs_dir``: the newest
    unfinished one of the same configuration is continued, otherwise (and with ``resume=never``) the next number is
    taken.

    Raises:
        ConfigError: the given folder holds another run, something else, or with ``resume=never`` anything at all.
    """
    trainer = config.trainer
    if trainer.run_dir is not None:
        return _given_folder(config, Path(trainer.run_dir))
    numbered = _numbered_folders(Path(trainer.runs_dir), trainer.run_name)
    if trainer.resume is not ResumeMode.never:
        for folder in _unfinished(numbered):
            if _holds(folder, config):
                return RunChoice(folder, resuming=True, finished=False)
    folder = _create_next(Path(trainer.runs_dir), trainer.run_name, max(numbered, default=0))
    return RunChoice(folder, resuming=False, finished=False)


def is_finished(folder: Path) -> bool:
    """Whether the run in ``folder`` has nothing left to train."""
    return (folder / FINISHED).is_file()


class RunFolder:
    """An open run folder: locked against other processes until :meth:`close`."""

    def __init__(self, path: Path, config: RunConfig) -> None:
        """Creates what is missing and writes the configuration.

        Raises:
            ConfigError: another process trains in this folder.
            SkyRLError: the disk is full.
        """
        self.path = path
        try:
            for folder in (path, self.checkpoints, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_create(path, error) from error
        self._lock = _lock(path)
        replace_file(path / CONFIG, to_yaml(config))
        self._metrics = JsonlFile(path / METRICS)
        self._samples = JsonlFile(path / SAMPLES)
        self._evaluations = JsonlFile(path / EVALUATIONS)

    @property
    def checkpoints(self) -> Path:
        """Where ``global_step_N`` and ``latest`` are."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Trackers' files and the log of each process."""
        return self.path / "logs"

    @property
    def model(self) -> Path:
        """The start model, where the run made one itself."""
        return self.path / "model"

    def append_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes one step's line."""
        self._metrics.append({"step": step, **metrics})

    def append_samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Writes one line per sample."""
        for sample in samples:
            self._samples.append({"step": step, **sample})

    def append_evaluation(self, step: int, row: Mapping[str, Any]) -> None:
        """Writes the line of the evaluation of the policy after ``step``."""
        self._evaluations.append({"step": step, **row})

    def truncate_after(self, step: int) -> None:
        """Forgets what was written after the checkpoint that the run resumes from."""
        for file in (self._metrics, self._samples, self._evaluations):
            file.truncate_after(step)

    def read_metrics(self) -> list[dict[str, Any]]:
        """All lines of ``metrics.jsonl``."""
        return list(read_jsonl(self.path / METRICS))

    def read_evaluations(self) -> list[dict[str, Any]]:
        """All lines of ``eval.jsonl``."""
        return list(read_jsonl(self.path / EVALUATIONS))

    def mark_finished(self, summary: Mapping[str, Any]) -> None:
        """Says that nothing is left to train; the same command then starts a new run."""
        replace_file(self.path / FINISHED, json.dumps(summary, indent=2) + "\n")

    def close(self) -> None:
        """Releases the lock. Idempotent."""
        for file in (self._metrics, self._samples, self._evaluations):
            file.close()
        self._lock.close()
        _locked_here.discard(self.path.resolve())

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _given_folder(config: RunConfig, folder: Path) -> RunChoice:
    name = f"trainer.run_dir={folder}"
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{name} is a file. Name a folder.")
    # A run that died before it had written its configuration left no more than a lock, a torn file and empty folders.
    files = [path.name for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    if not set(files) - {LOCK, f"{CONFIG}.tmp"}:
        return RunChoice(folder, resuming=False, finished=False)
    if config.trainer.resume is ResumeMode.never:
        raise ConfigError(f"{name} is not empty and trainer.resume=never. Name another folder, or drop resume=never.")
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{name} is not empty and holds no run (no {CONFIG}). Name another folder.")
    differing = differences(_read_config(folder), config)
    if differing:
        raise ConfigError(
            f"{name} holds a run of another configuration; it differs in {', '.join(differing)}. Set these as in "
            f"{folder / CONFIG}, or name another folder.{_about_length(differing, folder)}"
        )
    return RunChoice(folder, resuming=True, finished=is_finished(folder))


def _about_length(differing: Sequence[str], folder: Path) -> str:
    """What to do for a run of another length, where the length is what differs."""
    length = [name for name in ("trainer.max_steps", "trainer.epochs") if name in differing]
    if not length:
        return ""
    return (
        f" A run cannot be made longer or shorter: its schedules reckon with its last step. Resume it with its own "
        f"{' and '.join(length)}; once it is finished, train on in a new run that starts from its policy: "
        f"trainer.policy.model.path={folder / 'policy'} with another trainer.run_dir."
    )


def left_behind(config: RunConfig) -> str:
    """Before a new run: why the newest unfinished one is not continued by ``config``; empty where there is none.

    One that ended before its first step has nothing to go on with, and is not spoken of.
    """
    for folder in _unfinished(_numbered_folders(Path(config.trainer.runs_dir), config.trainer.run_name)):
        try:
            if not (folder / METRICS).stat().st_size:
                continue
            differing = differences(_read_config(folder), config)
        except (ConfigError, OSError):
            continue
        why = f"has other settings ({', '.join(differing)})" if differing else "is left as it is (trainer.resume=never)"
        return f"{folder} is unfinished, but {why}: this is a new run. The old one goes on with its own settings."
    return ""


def _unfinished(numbered: Mapping[int, Path]) -> list[Path]:
    """Newest first."""
    return [numbered[number] for number in sorted(numbered, reverse=True) if not is_finished(numbered[number])]


def _holds(folder: Path, config: RunConfig) -> bool:
    try:
        return same_run(_read_config(folder), config)
    except (ConfigError, OSError):
        return False  # died before it wrote one, or written by a version with other settings: not ours to continue


def _read_config(folder: Path) -> RunConfig:
    path = folder / CONFIG
    return from_yaml(path.read_text(encoding="utf-8"), where=str(path))


def _numbered_folders(runs_dir: Path, run_name: str) -> dict[int, Path]:
    pattern = re.compile(re.escape(run_name) + r"-(\d+)")
    if not runs_dir.is_dir():
        return {}
    matches = ((pattern.fullmatch(folder.name), folder) for folder in runs_dir.iterdir() if folder.is_dir())
    return {int(match.group(1)): folder for match, folder in matches if match}


def _create_next(runs_dir: Path, run_name: str, newest: int) -> Path:
    while True:
        newest += 1
        folder = runs_dir / f"{run_name}-{newest}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue  # another process took the number a moment ago
        except OSError as error:
            raise _cannot_create(folder, error) from error
        return folder


def _cannot_create(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"Cannot create the run folder {folder}: {error.strerror or error}. Set trainer.runs_dir or trainer.run_dir to "
        "a place that you may write to."
    )


def _lock(folder: Path) -> FileIO:
    """Takes the folder's lock.

    A record lock, because it ends with this process: a lock on the open file would live on in a forked child and keep a
    killed run from being resumed. Record locks do not exclude the own process, hence the set beside it.
    """
    resolved = folder.resolve()
    if resolved in _locked_here:
        raise ConfigError(f"This process trains in {folder} already. Give the second run another trainer.run_dir.")
    file = FileIO(folder / LOCK, "a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ConfigError(
            f"Another process trains in {folder}. Wait for it, or give this run another trainer.run_dir or run_name."
        ) from error
    _locked_here.add(resolved)
    return file

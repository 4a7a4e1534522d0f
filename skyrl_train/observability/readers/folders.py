"""The runs below a folder: their names, their states, and the paths of their files.

A name is a path relative to the folder. Links that lead out of the folder are missing files, so nothing outside of it is read.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson
import yaml

from skyrl_train.errors import NoSuchRunError
from skyrl_train.events.log import EVENTS, segment_paths
from skyrl_train.events.reader import segment_content
from skyrl_train.observability.readers.settings import setting_of
from skyrl_train.observability.run_folder import (
    CONFIG,
    EVALUATIONS,
    FINISHED,
    LOCK,
    METRICS,
    SAMPLES,
    parse_row,
)

# A folder with one of these is a run: one that has just begun has only its lock.
_MARKS = (CONFIG, METRICS, LOCK)
_LEVELS = 2  # runs/NAME and runs/GROUP/NAME
_NEWEST = 500  # runs in the list
LIVE_S = 60.0  # a run that trains writes at least one line per second to events/
MAX_AHEAD_S = 3600.0  # of the clock of a file server
_CONFIG_BYTES = 1 << 20
_START_BYTES = 1 << 18  # of a segment, with the beginning of training
_BEGUN = re.compile(rb'^\{"kind":"(?:run|resume)",.*"total_steps":(\d{1,15})', re.MULTILINE)
_TAIL_BYTES, _ROW_BYTES = 1 << 16, 1 << 20  # a row has the indices of all its groups


class RunsFolder:
    """Finds the runs below a folder.

    Args:
        root: a folder of runs, or one run folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def path(self, name: str) -> Path:
        """Return the folder of a run.

        Raises:
            NoSuchRunError: there is none, or it is not below the root.
        """
        try:
            path = (self.root / name).resolve()
            if path.is_relative_to(self.root) and is_run(path):
                return path
        except (OSError, ValueError):  # too long, a loop of links, a NUL
            pass
        raise NoSuchRunError(f"There is no run {name!r} in {self.root}.")

    def file(self, name: str, *parts: str) -> Path:
        """Return the path of a file or folder in a run, which may be missing. A link that leads out is a missing file."""
        path = self.path(name).joinpath(*parts)
        # A file that nobody can create, nor anything below its parent.
        return path if path.resolve().is_relative_to(self.root) else Path(os.devnull, *parts)

    def names(self) -> list[str]:
        """Return the names of all runs, the one that was written last first."""
        if is_run(self.root):
            return ["."]
        found = {}
        for path in _below(self.root, _LEVELS):
            resolved = path.resolve()
            if resolved.is_relative_to(self.root):
                found[resolved.relative_to(self.root).as_posix()] = last_write(resolved)
        return sorted(found, key=lambda name: (-found[name], name))[:_NEWEST]

    def newest(self) -> str:
        """Return the name of the run that was written last.

        Raises:
            NoSuchRunError: there is no run.
        """
        if names := self.names():
            return names[0]
        raise no_such_run(self.root)

    def rows(self) -> list[dict[str, Any]]:
        """Return the row of each run in the list of runs."""
        return [self.row(name) for name in self.names()]

    def row(self, name: str) -> dict[str, Any]:
        """Return what the list of runs and the header of a run show, from a few reads of small parts of its files."""
        path = self.path(name)
        config = read_settings(self.file(name, CONFIG))
        written = last_write(path)
        # Files from the future were written before a clock was set back.
        state = "live" if -MAX_AHEAD_S < time.time() - written < LIVE_S else "silent"
        if self.file(name, FINISHED).is_file():
            state = "finished"
        elif segments := _last_segments(self.file(name, EVENTS)):
            with contextlib.suppress(OSError):  # compressed meanwhile
                state = _end_reason(segments[0], segments[0].stat().st_size) or state
        return {
            "name": name,
            "title": self.root.name if name == "." else name,
            "state": state,
            "written": written,
            "mode": str(setting_of(config, "trainer.mode") or ""),
            "total_steps": setting_of(config, "trainer.max_steps") or _recorded_steps(self.file(name, EVENTS)),
            **_course(self.file(name, METRICS)),
        }


def _course(metrics: Path) -> dict[str, Any]:
    """Return the last figures of a run and the curve of its reward."""
    try:
        stat = metrics.stat()
    except OSError:
        return _course_of(metrics, 0, 0, 0)
    return _course_of(metrics, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@lru_cache(1000)
def _course_of(metrics: Path, inode: int, size: int, mtime_ns: int) -> dict[str, Any]:
    # A list of hundreds of runs, most of which have ended, is asked for every few seconds.
    rows = spread_rows(metrics, 40)
    last = rows[-1] if rows else {}
    return {
        "step": last.get("step", 0),
        "began": rows[0].get("time") if rows else None,
        "elapsed_s": last.get("elapsed_s"),
        "reward": last.get("reward/mean"),
        "tokens": last.get("inference/generated_tokens_total"),
        "curve": [[row["step"], row.get("reward/mean")] for row in rows],
    }


def _recorded_steps(events: Path) -> int | None:
    """Return the steps of the whole run, as the newest command that began to train recorded them; None: none did.

    The settings lack them if they follow from the epochs and the data.
    """
    for path in reversed(segment_paths(events).values()):
        with contextlib.suppress(OSError):  # compressed meanwhile
            if path.is_symlink() or (steps := _steps_of(path, min(path.stat().st_size, _START_BYTES))) is None:
                continue
            return steps
    return None


@lru_cache(10_000)
def _steps_of(segment: Path, size: int) -> int | None:
    content = segment_content(segment, _START_BYTES)
    if not content.startswith(b'{"kind":"process"'):  # a command begins with a segment of its own
        return None
    begun = _BEGUN.search(content)
    return None if begun is None else int(begun[1])


def no_such_run(*paths: Path) -> NoSuchRunError:
    """Return the error for a command whose arguments ``paths`` have no runs."""
    missing = [f"{path} does not exist" for path in paths if not path.exists()]
    why = f" ({', '.join(missing)})" if missing else ""
    return NoSuchRunError(f"There is no run in {', '.join(map(str, paths))}{why}. Name a run, or a folder of runs.")


def is_run(path: Path) -> bool:
    """Return whether ``path`` is the folder of a run."""
    try:
        return any((path / mark).exists() for mark in _MARKS)
    except OSError:  # of another user, who lets nobody look into it
        return False


def _below(folder: Path, levels: int) -> Iterator[Path]:
    """Yield the run folders below ``folder``, which may vanish meanwhile."""
    try:
        inner = [entry for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith(".")]
    except OSError:
        return
    for entry in inner:
        path = Path(entry.path)
        if is_run(path):
            yield path
        elif levels > 1:
            yield from _below(path, levels - 1)


def last_write(run: Path) -> float:
    """Return the Unix time at which the run last wrote metrics or events, or its configuration; 0 if it has none of them."""
    newest = 0.0
    for path in (run / CONFIG, run / METRICS, run / FINISHED, *_last_segments(run / EVENTS)):
        try:
            newest = max(newest, path.stat().st_mtime)
        except OSError:
            continue
    return newest


def _last_segments(folder: Path) -> list[Path]:
    try:
        return [max(folder.iterdir())]
    except (OSError, ValueError):
        return []


@lru_cache(1000)
def _end_reason(segment: Path, size: int) -> str:
    """Return how the run ended, "stopped" or "failed", by the newest segment of its record; empty if it has not ended."""
    if segment.suffix != ".zst" or segment.is_symlink():
        return ""  # a run that ends closes its segment, which is compressed then
    content = segment_content(segment)
    # Warnings may follow the end. After it, another command may have opened the folder.
    begin = content.rfind(b'"kind":"end"')
    if begin < max(0, content.rfind(b'"kind":"process"')):
        return ""
    line = content[content.rfind(b"\n", 0, begin) + 1 :].partition(b"\n")[0]
    try:
        return {"stopped": "stopped", "failed": "failed"}.get(orjson.loads(line)["reason"], "")
    except (ValueError, TypeError, KeyError):
        return ""


def fingerprint(run: Path) -> dict[str, str]:
    """Return a text per part of the run that changes whenever the part does. It costs a few calls of ``stat``."""
    parts = {
        "metrics": [run / METRICS],
        "samples": [run / SAMPLES],
        "events": _last_segments(run / EVENTS),
        "evaluations": [run / EVALUATIONS],
        "state": [run / FINISHED, run / CONFIG],
    }
    found = {}
    for part, paths in parts.items():
        stats = []
        for path in paths:
            try:
                stat = path.stat()
            except OSError:
                continue
            stats.append(f"{path.name}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}")
        found[part] = " ".join(stats)
    return found


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings of any version of the library as plain data; empty if the file is missing or not readable.

    Nothing is interpolated: a foreign file would otherwise show environment variables of this machine.
    """
    try:
        stat = path.stat()
    except OSError:
        return {}
    return _settings_of(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(1000)
def _settings_of(path: Path, mtime_ns: int, size: int) -> dict[str, Any]:
    try:
        if size > _CONFIG_BYTES:
            return {}
        text = path.read_text(encoding="utf-8", errors="replace")
        # Aliases could make a small file enormous; this library writes none.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.CSafeLoader)):
            return {}
        settings = yaml.load(text, Loader=yaml.CSafeLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return settings if isinstance(settings, dict) else {}


def spread_rows(path: Path, count: int) -> list[dict[str, Any]]:
    """Return at most ``count`` rows, evenly spread over the file, the last one included. Its size does not matter."""
    rows: dict[int, dict[str, Any]] = {}
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            for index in range(count):
                offset = size * index // count
                file.seek(offset)
                if offset:
                    file.readline(_ROW_BYTES)  # the rest of a line
                _keep(rows, file.readline(_ROW_BYTES))
            for tail in (_TAIL_BYTES, _ROW_BYTES):  # most rows are short
                file.seek(max(0, size - tail))
                if any(_keep(rows, line) for line in reversed(file.read(tail).split(b"\n"))):
                    break
    except OSError:
        pass
    return [rows[step] for step in sorted(rows)]


def last_rows(path: Path, count: int) -> list[dict[str, Any]]:
    """Return the last ``count`` rows, or as many of them as there are in the last megabyte of the file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _ROW_BYTES))
            lines = file.read(_ROW_BYTES).split(b"\n")
    except OSError:
        return []
    rows: dict[int, dict[str, Any]] = {}
    for line in reversed(lines):
        row = parse_row(line) if len(rows) < count else None
        if row is not None:
            rows.setdefault(row["step"], row)
    return [rows[step] for step in sorted(rows)]


def _keep(rows: dict[int, dict[str, Any]], line: bytes) -> bool:
    row = parse_row(line)
    if row is not None:
        rows[row["step"]] = row
    return row is not None

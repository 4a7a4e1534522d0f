"""A file with one JSON object per line that survives a kill at any byte."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from skyrl_train.errors import SkyRLError


class JsonlFile:
    """Appends objects that carry a ``step``; the operating system has each of them when ``append`` returns.

    A process that dies in the middle of a line leaves a torn one; opening the file cuts it off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _cut_torn_line(path)
        self._file = path.open("ab", buffering=0)

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes one line. Numbers that JSON cannot express (NaN, infinities) become ``null``.

        Raises:
            SkyRLError: the disk is full or gone.
        """
        line = json.dumps(_jsonable(row), ensure_ascii=False, allow_nan=False) + "\n"
        try:
            _write_all(self._file.fileno(), line.encode())
        except OSError as error:
            raise _write_error(self.path, error) from error

    def truncate_after(self, step: int) -> None:
        """Removes what steps later than ``step`` wrote: their weights are gone, and they come again.

        The file is replaced atomically; lines that cannot be read go too.
        """
        kept = "".join(
            json.dumps(row, ensure_ascii=False) + "\n" for row in read_jsonl(self.path) if row["step"] <= step
        )
        self._file.close()
        replace_file(self.path, kept)
        self._file = self.path.open("ab", buffering=0)

    def close(self) -> None:
        """Idempotent."""
        self._file.close()


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file that ``JsonlFile`` wrote, in order; a missing file has none, torn lines are skipped."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                yield row


def replace_file(path: Path, text: str) -> None:
    """Writes a whole file so that readers, and whoever comes after a crash, see the old content or the new.

    Raises:
        SkyRLError: the disk is full or gone; the old content stays.
    """
    unfinished = path.with_name(path.name + ".tmp")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise _write_error(path, error) from error


def _cut_torn_line(path: Path) -> None:
    if not path.is_file():
        return
    with path.open("r+b") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


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

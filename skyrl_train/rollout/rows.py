"""Rows of files, from any place on: .jsonl, .parquet, and folders of ``datasets.save_to_disk``.

A reader holds one row (a batch of rows, for .parquet) in memory. The *place* of a row is where a later reader begins to
get the same rows from there on.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_train.errors import DataError

Place = tuple[int, int]  # of a .jsonl: byte offset and lines before it; else: row number, twice
START: Place = (0, 0)

_PARQUET_BATCH_ROWS = 256
_SAMPLED_BLOCKS, _BLOCK_BYTES = 256, 4096


@dataclass(frozen=True, slots=True)
class Row:
    """One row. ``where`` names it in messages; ``next`` is the place after it."""

    where: str
    value: Any
    next: Place


class RowFile(ABC):
    """One file or folder of rows."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def rows(self, start: Place = START) -> Iterator[Row]:
        """The rows from ``start`` on, in the file's order. Blocking.

        Raises:
            DataError: the file cannot be read, or a row is broken (named by its line).
        """

    def digest(self) -> bytes:
        """SHA-256 of size and content. Of a file beyond a MiB only evenly spaced blocks are read, so a change of a few
        bytes that keeps the size may go unseen."""
        return hashlib.sha256(b"".join(_digest_of_blocks(path) for path in self._files())).digest()

    def _files(self) -> Sequence[Path]:
        """The files that the rows are in, in their order."""
        return [self.path]


def open_rows(path: Path) -> RowFile:
    """The reader for what is at ``path``.

    Raises:
        DataError: nothing is there, or it is of no kind that is read.
    """
    if not path.exists():
        raise DataError(
            f"{path} does not exist. Correct data.train_data (relative paths start at the working directory), or write it: "
            "docs/tutorials/recipes.md says which prepare_data.py makes the data of which recipe."
        )
    if path.is_dir():
        return SavedFolder(path)
    if path.suffix == ".jsonl":
        return JsonLines(path)
    if path.suffix == ".parquet":
        return Parquet(path)
    raise DataError(
        f"{path}: {path.suffix or 'no suffix'!r} is not read. Give .jsonl, .parquet or a save_to_disk folder."
    )


class JsonLines(RowFile):
    """One object per line, in UTF-8; blank lines do not count."""

    def rows(self, start: Place = START) -> Iterator[Row]:
        try:
            yield from self._lines(*start)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error}") from error

    def _lines(self, offset: int, number: int) -> Iterator[Row]:
        with self.path.open("rb") as lines:
            lines.seek(offset)
            for line in lines:
                offset, number = offset + len(line), number + 1
                if not line.strip():
                    continue
                try:
                    value = json.loads(line)
                except (json.JSONDecodeError, UnicodeDecodeError) as error:
                    raise DataError(
                        f"{self.path}:{number} is not JSON: {error}. Write one object per line, in UTF-8."
                    ) from error
                yield Row(f"{self.path}:{number}", value, (offset, number))


class Parquet(RowFile):
    """A table; its columns are the keys of a row."""

    def rows(self, start: Place = START) -> Iterator[Row]:
        try:
            yield from self._numbered(start[0])
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path} is not a readable parquet file: {error}") from error

    def _numbered(self, start: int) -> Iterator[Row]:
        from pyarrow import parquet

        with parquet.ParquetFile(self.path) as file:
            index, groups = 0, list(range(file.metadata.num_row_groups))
            while groups and index + file.metadata.row_group(groups[0]).num_rows <= start:
                index += file.metadata.row_group(groups.pop(0)).num_rows
            if not groups:
                return
            for batch in file.iter_batches(_PARQUET_BATCH_ROWS, row_groups=groups):
                before = max(0, start - index)
                for number, value in enumerate(batch.slice(before).to_pylist(), start=index + before):
                    yield _numbered_row(self.path, number, value)
                index += batch.num_rows


class SavedFolder(RowFile):
    """What ``datasets.Dataset.save_to_disk`` wrote."""

    def rows(self, start: Place = START) -> Iterator[Row]:
        import datasets

        try:
            dataset = datasets.load_from_disk(str(self.path))
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path} is not a folder of datasets.save_to_disk: {error}") from error
        if isinstance(dataset, datasets.DatasetDict):
            splits = ", ".join(str(self.path / split) for split in dataset)
            raise DataError(f"{self.path} holds several splits. Name one in data.train_data: {splits}.")
        if start[0] >= len(dataset):
            return  # which select() takes for an error
        rest = dataset.select(range(start[0], len(dataset)))
        for number, value in enumerate(rest, start=start[0]):
            yield _numbered_row(self.path, number, value)

    def _files(self) -> Sequence[Path]:
        return sorted(self.path.glob("data-*.arrow"))  # others there are caches


def _numbered_row(path: Path, number: int, value: Any) -> Row:
    return Row(f"{path}, row {number} (counted from 0)", value, (number + 1, number + 1))


def _digest_of_blocks(path: Path) -> bytes:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode() + b"\n")
    with path.open("rb") as file:
        if size <= _SAMPLED_BLOCKS * _BLOCK_BYTES:
            digest.update(file.read())
        else:
            for block in range(_SAMPLED_BLOCKS):
                file.seek((size - _BLOCK_BYTES) * block // (_SAMPLED_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.digest()

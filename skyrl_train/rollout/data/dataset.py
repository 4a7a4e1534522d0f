"""Prompts from .jsonl and .parquet files and ``datasets.save_to_disk`` folders, or made by the environment.

    file ──open_rows──> RowFile.rows ──Row──> RecordMaker.make ──PromptRecord──> PromptDataset (all), or streaming.py (as needed)

A reader holds one row (one batch of rows for .parquet) in memory. A *place* is a position from which a later reader gets the
same rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from skyrl_train.config.schema import DataConfig, EnvironmentConfig
from skyrl_train.environments.base import PromptRecord
from skyrl_train.environments.registry import resolve_environment
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.types import ConversationType

if TYPE_CHECKING:
    from skyrl_train.rollout.data.streaming import StreamingPrompts

Place = tuple[int, int]  # .jsonl: byte offset and number of lines before it; other formats: row number, twice
START: Place = (0, 0)

_PARQUET_BATCH_ROWS = 256
_SAMPLED_BLOCKS, _BLOCK_BYTES = 256, 4096

# Files -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One row. ``where`` names it in messages; ``next`` is the place after it."""

    where: str
    value: Any
    next: Place


@dataclass(frozen=True, slots=True)
class RowFile:
    """A file or folder of rows.

    ``rows(start=START)`` yields the rows from a place on, in the file's order. It blocks, and raises DataError if the file
    cannot be read or a row is broken (the message names its line).
    """

    path: Path
    rows: Callable[..., Iterator[Row]]

    def digest(self) -> bytes:
        """Return the SHA-256 of size and content.

        Of a file above 1 MiB only evenly spaced blocks are read, so a change of a few bytes with the same size may be missed.
        """
        # Other files in a folder of save_to_disk are caches.
        files = sorted(self.path.glob("data-*.arrow")) if self.path.is_dir() else [self.path]
        return hashlib.sha256(b"".join(_digest_of_blocks(path) for path in files)).digest()


def open_rows(path: Path) -> RowFile:
    """Return the reader for the format at ``path``.

    Raises:
        DataError: the path does not exist or has an unknown format.
    """
    if not path.exists():
        raise DataError(
            f"{path} does not exist. Correct data.train_data (relative paths start at the working directory), or create it: "
            "docs/tutorials/recipes.md lists the prepare_data.py of each recipe."
        )
    if path.is_dir():
        return RowFile(path, partial(_folder_rows, path))
    if path.suffix == ".jsonl":
        return RowFile(path, partial(_json_rows, path))
    if path.suffix == ".parquet":
        return RowFile(path, partial(_parquet_rows, path))
    raise DataError(
        f"{path}: the format {path.suffix or '(no suffix)'!r} is not supported. Give .jsonl, .parquet or a save_to_disk folder."
    )


def _json_rows(path: Path, start: Place = START) -> Iterator[Row]:
    """Read one JSON object per line, in UTF-8. Blank lines do not count."""
    offset, number = start
    try:
        with path.open("rb") as lines:
            lines.seek(offset)
            for line in lines:
                offset, number = offset + len(line), number + 1
                if not line.strip():
                    continue
                try:
                    value = json.loads(line)
                except (json.JSONDecodeError, UnicodeDecodeError) as error:
                    raise DataError(
                        f"{path}:{number} is not JSON: {error}. Write one object per line, in UTF-8."
                    ) from error
                yield Row(f"{path}:{number}", value, (offset, number))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _parquet_rows(path: Path, start: Place = START) -> Iterator[Row]:
    """Read a table; its columns are the keys of a row."""
    from pyarrow import parquet

    first = start[0]
    try:
        with parquet.ParquetFile(path) as file:
            # Skip whole row groups before the first row.
            index, groups = 0, list(range(file.metadata.num_row_groups))
            while groups and index + file.metadata.row_group(groups[0]).num_rows <= first:
                index += file.metadata.row_group(groups.pop(0)).num_rows
            if not groups:
                return
            for batch in file.iter_batches(_PARQUET_BATCH_ROWS, row_groups=groups):
                before = max(0, first - index)
                for number, value in enumerate(batch.slice(before).to_pylist(), start=index + before):
                    yield _numbered_row(path, number, value)
                index += batch.num_rows
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from error


def _folder_rows(path: Path, start: Place = START) -> Iterator[Row]:
    """Read a folder written by ``datasets.Dataset.save_to_disk``."""
    import datasets

    try:
        dataset = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a folder of datasets.save_to_disk: {error}") from error
    if isinstance(dataset, datasets.DatasetDict):
        splits = ", ".join(str(path / split) for split in dataset)
        raise DataError(f"{path} contains several splits. Name one in data.train_data: {splits}.")
    if start[0] >= len(dataset):  # select() would raise an error
        return
    rest = dataset.select(range(start[0], len(dataset)))
    for number, value in enumerate(rest, start=start[0]):
        yield _numbered_row(path, number, value)


def _numbered_row(path: Path, number: int, value: Any) -> Row:
    return Row(f"{path}, row {number} (counted from 0)", value, (number + 1, number + 1))


def _digest_of_blocks(path: Path) -> bytes:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode() + b"\n")
    with path.open("rb") as file:
        if size <= _SAMPLED_BLOCKS * _BLOCK_BYTES:
            digest.update(file.read())
        else:
            # The first block begins the file and the last one ends it.
            for block in range(_SAMPLED_BLOCKS):
                file.seek((size - _BLOCK_BYTES) * block // (_SAMPLED_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.digest()


# Rows to prompts ---------------------------------------------------------------------------------------------------


class RecordMaker:
    """Converts rows to prompts.

    The column ``prompt_key`` is the prompt (a string or a list of messages), ``uid`` its name, ``env_class`` its environment
    and ``data_source`` its source. All columns except the first three reach the environment as extras.

    Args:
        env_class: for rows that name none.
    """

    def __init__(self, prompt_key: str, env_class: str) -> None:
        self._prompt_key = prompt_key
        self._environments: set[str | None] = {None, env_class}  # known to be usable

    def make(self, row: Row, index: int, stem: str) -> PromptRecord:
        """Return the prompt in ``row``.

        Args:
            index: number of the row among all rows of all files, counted from 0.
            stem: data source of rows that name none.

        Raises:
            DataError: the row is broken, or names an environment that cannot be used.
        """
        value, where, key = row.value, row.where, self._prompt_key
        if not isinstance(value, Mapping):
            raise DataError(f"{where} is a {type(value).__name__}, not an object with the key {key!r}.")
        if value.get(key) is None:
            raise DataError(
                f"{where} lacks the key {key!r}; it has {sorted(value)}. Set data.prompt_key to the key of the prompt."
            )
        prompt = _to_conversation(value[key], where, key)
        env_class = value.get("env_class")
        if env_class is not None and not isinstance(env_class, str):
            raise DataError(f"{where}: env_class must be a string, got {env_class!r}.")
        # A generated uid contains the content, so that it names the same prompt only in the same data.
        uid = value.get("uid")
        content = hashlib.sha256(canonical_json(value).encode()).hexdigest()[:8]
        uid = f"{index}-{content}" if uid is None else str(uid)
        if env_class not in self._environments:
            # Resolve the name now, so that a wrong one is an error of the data and not of a rollout.
            try:
                resolve_environment(EnvironmentConfig(env_class=str(env_class)))
            except ConfigError as error:
                raise DataError(f"The env_class of prompt {uid!r} cannot be used: {error}") from error
            self._environments.add(env_class)
        return PromptRecord(
            uid=uid,
            prompt=prompt,
            env_class=env_class,
            env_extras={name: column for name, column in value.items() if name not in (key, "uid", "env_class")},
            data_source=str(value.get("data_source") or stem),
        )


def _to_conversation(prompt: Any, where: str, prompt_key: str) -> ConversationType:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence) or not prompt:
        raise DataError(f"{where}: {prompt_key!r} must be a string or a list of messages, got {prompt!r:.80}.")
    for message in prompt:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(f"{where}: each message of {prompt_key!r} needs 'role' and 'content', got {message!r:.80}.")
    # A column of structs has every key in every row; keys that a message lacks are None.
    return [{key: value for key, value in message.items() if value is not None} for message in prompt]


def record_json(record: PromptRecord) -> str:
    """Encode a whole prompt; equal prompts, and only those, have equal results."""
    return canonical_json([record.uid, record.prompt, record.env_class, record.env_extras, record.data_source])


def canonical_json(value: Any) -> str:
    """Encode a value as JSON that is the same for equal values in every process, also for types that JSON lacks."""
    return json.dumps(value, sort_keys=True, ensure_ascii=True, default=_stable)


def _stable(value: Any) -> Any:
    # Columns of parquet files and data sets may hold dates, bytes and arrays.
    if isinstance(value, set | frozenset):
        return sorted(canonical_json(item) for item in value)
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.hex()
    if hasattr(value, "tolist"):
        return value.tolist()
    return type(value).__qualname__


# Data sets in memory -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PromptDataset(Sequence[PromptRecord]):
    """Prompts in file order, with unique uids.

    Raises:
        DataError: there are no records, or two have the same uid.
    """

    records: tuple[PromptRecord, ...]

    def __post_init__(self) -> None:
        if not self.records:
            raise DataError("The data set has no prompts.")
        seen: dict[str, int] = {}
        for index, record in enumerate(self.records):
            if record.uid in seen:
                raise DataError(
                    f"Prompts {seen[record.uid]} and {index} (counted from 0) have the same uid {record.uid!r}; uids "
                    "must be unique over all files. Leave out the column 'uid' to have uids generated."
                )
            seen[record.uid] = index

    def __len__(self) -> int:
        return len(self.records)

    @overload
    def __getitem__(self, index: int) -> PromptRecord: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[PromptRecord, ...]: ...

    def __getitem__(self, index: int | slice) -> PromptRecord | tuple[PromptRecord, ...]:
        return self.records[index]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all prompts in order. A checkpoint's group indices are valid only for an equal data set."""
        digest = hashlib.sha256()
        for record in self.records:
            digest.update(record_json(record).encode() + b"\n")
        return digest.hexdigest()


def load_dataset(data: DataConfig, environment: EnvironmentConfig) -> PromptDataset:
    """Read ``data.train_data`` in the given order. Without any, ask the environment for ``data.generate`` prompts.

    :class:`RecordMaker` describes the columns.

    Raises:
        DataError: a file is missing, empty, of an unknown format, or has a broken row (the message names its line).
        ConfigError: ``environment`` is unknown, or there are no files and it makes no prompts.
    """
    factory = resolve_environment(environment)
    if not data.train_data:
        if data.generate < 1:
            raise ConfigError(f"data.generate must be at least 1 if data.train_data is empty, got {data.generate}.")
        generated = factory.generate_prompts(data.generate, data.seed)
        if generated is None:
            raise ConfigError(
                f"{factory.name!r} generates no prompts. Name a .jsonl or .parquet file in data.train_data."
            )
        return PromptDataset(tuple(generated))
    maker = RecordMaker(data.prompt_key, environment.env_class)
    records: list[PromptRecord] = []
    for name in data.train_data:
        before = len(records)
        for row in open_rows(Path(name)).rows():
            records.append(maker.make(row, index=len(records), stem=Path(name).stem))
        if len(records) == before:
            raise DataError(f"{name} has no rows. Remove it from data.train_data or fill it.")
    return PromptDataset(tuple(records))


def check_alphabet(dataset: PromptDataset | StreamingPrompts, alphabet: str) -> None:
    """Check that a character tokenizer over ``alphabet`` knows every character of the prompts. A stream checks as it reads.

    Raises:
        ConfigError: some characters are unknown; the message has a setting that includes them.
    """
    if isinstance(dataset, PromptDataset):
        _check_characters(dataset.records, alphabet)
    else:
        dataset.checks.append(lambda record: _check_characters([record], alphabet))


def _check_characters(records: Iterable[PromptRecord], alphabet: str) -> None:
    used = {
        character for record in records for message in record.prompt for character in str(message.get("content", ""))
    }
    unknown = used - set(alphabet)
    if unknown:
        remedy = "".join(sorted(used | set(alphabet)))
        raise ConfigError(
            f"The prompts contain {''.join(sorted(unknown))!r}, which trainer.policy.model.build.alphabet={alphabet!r} "
            f"lacks. Set it to the characters of prompts and answers, here at least {remedy!r}."
        )

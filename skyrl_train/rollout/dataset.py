"""Prompts: from .jsonl and .parquet files, from folders of ``datasets.save_to_disk``, or made by the environment."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, overload

from skyrl_train.config.schema import DataConfig, EnvironmentConfig
from skyrl_train.environments.base import PromptRecord
from skyrl_train.environments.registry import EnvironmentFactory, resolve_environment
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.generators.base import ConversationType

__all__ = ["PromptDataset", "PromptRecord", "check_alphabet", "load_dataset"]


@dataclass(frozen=True)
class PromptDataset(Sequence[PromptRecord]):
    """Prompts in file order; uids are unique.

    Raises:
        DataError: no records, or two with the same uid.
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
                    "must be unique over all files. Leave the column 'uid' out to have them made."
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
        """SHA-256 of everything in it, in order: equal data sets, and only those, may share a checkpoint's ordinals."""
        digest = hashlib.sha256()
        for record in self.records:
            row = [record.uid, record.prompt, record.env_class, record.env_extras, record.data_source]
            digest.update(_canonical(row).encode() + b"\n")
        return digest.hexdigest()


def load_dataset(data: DataConfig, environment: EnvironmentConfig) -> PromptDataset:
    """Reads ``data.train_data`` in the order given; without any, asks the environment for ``data.generate`` prompts.

    Of a row's columns, ``data.prompt_key`` is the prompt (a string or a list of messages), ``uid`` its name,
    ``env_class`` its environment and ``data_source`` its source; all but
    the first three reach the environment as extras.

    Raises:
        DataError: a file is missing, empty, of an unknown kind, or has a broken row (named by its line).
        ConfigError: ``environment`` names none, or no files are given and it makes no prompts.
    """
    factory = resolve_environment(environment)
    if not data.train_data:
        return _generated(data, factory)
    rows: list[PromptRecord] = []
    for name in data.train_data:
        before = len(rows)
        for where, row in _read_rows(Path(name)):
            rows.append(_to_record(row, where, data.prompt_key, index=len(rows), stem=Path(name).stem))
        if len(rows) == before:
            raise DataError(f"{name} has no rows. Remove it from data.train_data or fill it.")
    _check_environments(rows, environment.env_class)
    return PromptDataset(tuple(rows))


def check_alphabet(dataset: PromptDataset, alphabet: str) -> None:
    """Checks that a character tokenizer over ``alphabet`` knows every character of the prompts.

    Raises:
        ConfigError: it would read some of them as its unknown token; the message has the setting that knows them all.
    """
    used = {character for record in dataset for message in record.prompt for character in str(message["content"])}
    unknown = used - set(alphabet)
    if unknown:
        remedy = "".join(sorted(used | set(alphabet)))
        raise ConfigError(
            f"The prompts contain {''.join(sorted(unknown))!r}, which trainer.policy.model.build.alphabet={alphabet!r} "
            f"lacks. Set it to the characters of prompts and answers, here at least {remedy!r}."
        )


def _generated(data: DataConfig, factory: EnvironmentFactory) -> PromptDataset:
    if data.generate < 1:
        raise ConfigError(f"data.generate must be at least 1 where data.train_data is empty, got {data.generate}.")
    records = factory.generate_prompts(data.generate, data.seed)
    if records is None:
        raise ConfigError(
            f"{factory.name!r} makes no prompts by itself. Name a .jsonl or .parquet file in data.train_data."
        )
    return PromptDataset(tuple(records))


def _check_environments(records: Iterable[PromptRecord], configured: str) -> None:
    """Resolves the environments that rows name, so that a wrong name stops the run before it begins."""
    known = {None, configured}
    for record in records:
        if record.env_class in known:
            continue
        try:
            resolve_environment(EnvironmentConfig(env_class=str(record.env_class)))
        except ConfigError as error:
            raise DataError(f"The env_class of prompt {record.uid!r} cannot be used: {error}") from error
        known.add(record.env_class)


def _read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields (where the row stands, row)."""
    if not path.exists():
        raise DataError(
            f"{path} does not exist. Correct data.train_data (relative paths start at the working directory)."
        )
    if path.is_dir():
        return _read_saved_folder(path)
    if path.suffix == ".jsonl":
        return _read_jsonl(path)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    raise DataError(
        f"{path}: {path.suffix or 'no suffix'!r} is not read. Give .jsonl, .parquet or a save_to_disk folder."
    )


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield f"{path}:{number}", json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise DataError(
                    f"{path}:{number} is not JSON: {error}. Write one object per line, in UTF-8."
                ) from error


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    from pyarrow import parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from error
    return _numbered(path, rows)


def _read_saved_folder(path: Path) -> Iterator[tuple[str, Any]]:
    import datasets

    try:
        dataset = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a folder of datasets.save_to_disk: {error}") from error
    if isinstance(dataset, datasets.DatasetDict):
        splits = ", ".join(str(path / split) for split in dataset)
        raise DataError(f"{path} holds several splits. Name one in data.train_data: {splits}.")
    return _numbered(path, dataset)


def _numbered(path: Path, rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{path}, row {index} (counted from 0)", row) for index, row in enumerate(rows))


def _to_record(row: Any, where: str, prompt_key: str, index: int, stem: str) -> PromptRecord:
    if not isinstance(row, Mapping):
        raise DataError(f"{where} is a {type(row).__name__}, not an object with the key {prompt_key!r}.")
    if row.get(prompt_key) is None:
        raise DataError(
            f"{where} lacks the key {prompt_key!r}; it has {sorted(row)}. Set data.prompt_key to the prompt's."
        )
    prompt = _to_conversation(row[prompt_key], where, prompt_key)
    env_class = row.get("env_class")
    if env_class is not None and not isinstance(env_class, str):
        raise DataError(f"{where}: env_class must be a string, got {env_class!r}.")
    uid = row.get("uid")
    content = hashlib.sha256(_canonical(row).encode()).hexdigest()[:8]
    return PromptRecord(
        uid=f"{index}-{content}" if uid is None else str(uid),
        prompt=prompt,
        env_class=env_class,
        env_extras={key: value for key, value in row.items() if key not in (prompt_key, "uid", "env_class")},
        data_source=str(row.get("data_source") or stem),
    )


def _to_conversation(prompt: Any, where: str, prompt_key: str) -> ConversationType:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence) or not prompt:
        raise DataError(f"{where}: {prompt_key!r} must be a string or a list of messages, got {prompt!r:.80}.")
    for message in prompt:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(f"{where}: each message of {prompt_key!r} needs 'role' and 'content', got {message!r:.80}.")
    # A column of structs has every key in every row; those that a message lacks are None.
    return [{key: value for key, value in message.items() if value is not None} for message in prompt]


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=True, default=_stable)


def _stable(value: Any) -> Any:
    """What JSON lacks, as something that is the same in every process."""
    if isinstance(value, set | frozenset):
        return sorted(_canonical(item) for item in value)
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.hex()
    if hasattr(value, "tolist"):
        return value.tolist()
    return type(value).__qualname__

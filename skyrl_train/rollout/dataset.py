"""Prompts: from .jsonl and .parquet files, from folders of ``datasets.save_to_disk``, or made by the environment."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, overload

from skyrl_train.config.schema.data import DataConfig, EnvironmentConfig
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.environments.base import PromptRecord
from skyrl_train.environments.registry import EnvironmentFactory, resolve_environment
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.rollout.records import RecordMaker, record_json
from skyrl_train.rollout.rows import open_rows

if TYPE_CHECKING:
    from skyrl_train.rollout.streaming import StreamingPrompts

__all__ = ["PromptDataset", "PromptRecord", "check_alphabet", "load_dataset", "open_prompts"]


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

    @property
    def num_prompts(self) -> int:
        """Of an epoch."""
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
            digest.update(record_json(record).encode() + b"\n")
        return digest.hexdigest()


def load_dataset(data: DataConfig, environment: EnvironmentConfig) -> PromptDataset:
    """Reads ``data.train_data`` in the order given; without any, asks the environment for ``data.generate`` prompts.

    Which columns mean what says :class:`skyrl_train.rollout.records.RecordMaker`.

    Raises:
        DataError: a file is missing, empty, of an unknown kind, or has a broken row (named by its line).
        ConfigError: ``environment`` names none, or no files are given and it makes no prompts.
    """
    factory = resolve_environment(environment)
    if not data.train_data:
        return _generated(data, factory)
    maker = RecordMaker(data.prompt_key, environment.env_class)
    records: list[PromptRecord] = []
    for name in data.train_data:
        before = len(records)
        for row in open_rows(Path(name)).rows():
            records.append(maker.make(row, index=len(records), stem=Path(name).stem))
        if len(records) == before:
            raise DataError(f"{name} has no rows. Remove it from data.train_data or fill it.")
    return PromptDataset(tuple(records))


def open_prompts(config: RunConfig) -> PromptDataset | StreamingPrompts:
    """The prompts of a run: all of them, or with ``data.streaming`` a reader that has them when they are needed.

    Raises:
        DataError, ConfigError: see :func:`load_dataset`; a stream raises for a broken row only once it gets there.
    """
    if not config.data.streaming:
        return load_dataset(config.data, config.environment)
    from skyrl_train.rollout.streaming import StreamingPrompts  # it imports torch

    resolve_environment(config.environment)
    maker = RecordMaker(config.data.prompt_key, config.environment.env_class)
    return StreamingPrompts([Path(name) for name in config.data.train_data], maker, config.trainer.epochs)


def check_alphabet(dataset: PromptDataset | StreamingPrompts, alphabet: str) -> None:
    """Checks that a character tokenizer over ``alphabet`` knows every character of the prompts: now, or as they are read.

    Raises:
        ConfigError: it would read some of them as its unknown token; the message has the setting that knows them all.
    """
    if isinstance(dataset, PromptDataset):
        _check_characters(dataset, alphabet)
    else:
        dataset.check_each(lambda record: _check_characters([record], alphabet))


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


def _generated(data: DataConfig, factory: EnvironmentFactory) -> PromptDataset:
    if data.generate < 1:
        raise ConfigError(f"data.generate must be at least 1 where data.train_data is empty, got {data.generate}.")
    records = factory.generate_prompts(data.generate, data.seed)
    if records is None:
        raise ConfigError(
            f"{factory.name!r} makes no prompts by itself. Name a .jsonl or .parquet file in data.train_data."
        )
    return PromptDataset(tuple(records))

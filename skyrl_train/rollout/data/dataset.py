"""Prompts from files, folders and the hub, or made by the environment.

    file ──open_rows──> RowFile.rows ──Row──> RecordMaker.make ──PromptRecord──> PromptDataset (all), or streaming.py (as needed)

| ``data.train_data`` | rows |
|---|---|
| ``.jsonl``, ``.csv``, ``.parquet`` | of the file |
| a folder of ``datasets.save_to_disk`` | of the data set in it |
| a folder of task folders (:mod:`~skyrl_train.environments.task_folders`) | one for each |
| another folder, or a name on the hub such as ``openai/gsm8k`` | of the data set that ``datasets.load_dataset`` reads |

The last two take ``:SPLIT`` or ``:CONFIG:SPLIT`` behind the name; the split is ``train`` if none is named.

A reader holds one row (one batch of rows for .parquet) in memory. A *place* is a position from which a later reader gets the
same rows.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from skyrl_train.config.compose import text_override
from skyrl_train.config.schema import DataConfig, EnvironmentConfig, RunConfig
from skyrl_train.environments.base import PromptRecord
from skyrl_train.environments.registry import resolve_environment
from skyrl_train.environments.task_folders import TASK_FILE, read_task
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.models.place import why_not_on_hub
from skyrl_train.types import ConversationType

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from skyrl_train.rollout.data.streaming import StreamingPrompts

PROMPT_COLUMNS = ("prompt", "question", "problem", "instruction", "input", "messages")  # usual names
Place = tuple[int, int]  # .jsonl: byte offset and number of lines before it; other formats: row number, twice
SHOWN_FILES = 5  # in the message about a missing one
START: Place = (0, 0)

_TOY_PROMPT = re.compile(r"\d\d\D=")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
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
    """A source of rows.

    ``rows(start=START)`` yields the rows from a place on, in their order. It blocks, and raises DataError if the source
    cannot be read or a row is broken (the message names its line).

    Attributes:
        name: as in ``data.train_data``.
        source: the data source of rows that name none.
        contents: returns the files with the rows.
    """

    name: str
    source: str
    rows: Callable[..., Iterator[Row]]
    contents: Callable[[], Sequence[Path]]

    def digest(self) -> bytes:
        """Return the SHA-256 of size and content.

        Of a file above 1 MiB only evenly spaced blocks are read, so a change of a few bytes with the same size may be missed.
        """
        return hashlib.sha256(b"".join(_digest_of_blocks(path) for path in self.contents())).digest()


def open_rows(name: str) -> RowFile:
    """Return the reader for a file, a folder, or a data set on the hub. The table at the top has the forms of ``name``.

    Raises:
        DataError: there is no such file or data set, or it has an unknown format.
    """
    if "://" in str(name):
        raise DataError(
            f"{name} is a URL, and data are read from a disk or from the hub. Name a data set on the hub as org/name:SPLIT, or "
            "download the file and name that."
        )
    path = Path(name)
    readers = {".jsonl": _json_rows, ".csv": _csv_rows, ".parquet": _parquet_rows}
    reader = readers.get(path.suffix)
    if path.is_file():
        if reader is None:
            raise DataError(
                f"{name}: the format {path.suffix or '(no suffix)'!r} is not supported. Give .jsonl, .csv, .parquet, a "
                "save_to_disk folder, or the name of a data set on the hub."
            )
        return RowFile(name, path.stem, partial(reader, path), lambda: [path])
    tasks = sorted(file.parent for file in path.glob(f"*/{TASK_FILE}"))
    if tasks:
        contents = [file for task in tasks for file in sorted(task.rglob("*")) if file.is_file()]
        return RowFile(name, path.stem, partial(_task_rows, tasks), lambda: contents)
    place, *chosen = [name] if path.is_dir() else name.split(":")
    on_hub = _HUB_NAME.fullmatch(place) and reader is None and not Path(place).parent.is_dir()
    if len(chosen) > 2 or not (Path(place).is_dir() or on_hub):
        # By their stems: equal suffixes would make any two files alike.
        beside = {file.stem: file for file in sorted(path.parent.iterdir())} if path.parent.is_dir() else {}
        close = difflib.get_close_matches(path.stem, beside, n=1)
        guess = f" Did you mean {path.with_name(beside[close[0]].name)}?" if close else ""
        there = [str(file) for file in beside.values() if file.suffix in readers]
        if there and not close:
            guess = f" There is {', '.join(there[:SHOWN_FILES])}{' and more' if len(there) > SHOWN_FILES else ''}."
        made = (
            " The prepare_data.py beside its recipe makes it: docs/tutorials/recipes.md."
            if path.parts[0] == "data"
            else ""
        )
        raise DataError(f"{name} does not exist (from {Path.cwd()}). Correct data.train_data.{guess}{made}")
    load = cache(partial(_load_data_set, place, chosen))
    source = place if on_hub else Path(place).stem
    return RowFile(
        name,
        source,
        partial(_data_set_rows, name, load),
        lambda: [Path(file["filename"]) for file in load().cache_files],
    )


def _load_data_set(place: str, chosen: Sequence[str]) -> Any:
    """Return the ``datasets.Dataset`` of a folder or hub name.

    Args:
        chosen: nothing, a split, or a configuration and a split.
    """
    import datasets

    split = chosen[-1] if chosen else None
    folder = Path(place)
    saved = next((name for name in ("dataset_dict.json", "state.json") if (folder / name).is_file()), None)
    if saved == "dataset_dict.json" and split is not None:
        folder = folder / split
    try:
        if saved is not None:
            loaded = datasets.load_from_disk(str(folder))
            if isinstance(loaded, datasets.DatasetDict):
                splits = ", ".join(f"{place}:{split}" for split in loaded)
                raise DataError(f"{place} contains several splits. Name one in data.train_data: {splits}.")
            return loaded
        # The cache writes names in its own way: MATH-500 becomes math-500.
        cached = {_letters(path.name) for path in Path(datasets.config.HF_DATASETS_CACHE).glob("*___*")}
        if not folder.is_dir() and _letters(place) not in cached:
            reason = why_not_on_hub(place, "dataset")
            if reason is not None:
                raise DataError(
                    f"{place} is no file or folder here, and the hub did not give it either ({reason}). Correct "
                    "data.train_data, or download it where there is a network: "
                    f'datasets.load_dataset("{place}", split="train").to_parquet("train.parquet").'
                )
        return datasets.load_dataset(place, chosen[0] if len(chosen) == 2 else None, split=split or "train")
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:  # RuntimeError: of a script
        detail = " ".join(str(error).split())
        raise DataError(
            f"{place} is not a folder of datasets.save_to_disk, and datasets.load_dataset cannot read it: {detail:.500} Name "
            f"a split as {place}:SPLIT, and a configuration as {place}:CONFIG:SPLIT."
        ) from error


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


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
                except (ValueError, RecursionError) as error:  # ValueError: also of a number with too many digits
                    reason = str(error)
                    if isinstance(error, json.JSONDecodeError):  # its own line counts within the row
                        reason = f"{error.msg}, character {error.pos}"
                    elif isinstance(error, UnicodeDecodeError):
                        reason = error.reason
                    raise DataError(
                        f"{path}:{number} is not JSON: {reason}. Write one object per line, in UTF-8."
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
                    yield _numbered_row(str(path), number, value)
                index += batch.num_rows
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from error


def _csv_rows(path: Path, start: Place = START) -> Iterator[Row]:
    """Read a table in UTF-8 whose first line names the columns. Every value is text."""
    csv.field_size_limit(sys.maxsize)  # of this process; the default, 131,072 characters, is less than some prompts
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines)
            for number, value in enumerate(reader):
                if number < start[0]:
                    continue
                if None in value or None in value.values():
                    raise DataError(
                        f"{path}:{reader.line_num} has another number of fields than the first line. Quote commas."
                    )
                yield Row(f"{path}:{reader.line_num}", value, (number + 1, number + 1))
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not a readable .csv file in UTF-8: {error}") from error


def _data_set_rows(name: str, load: Callable[[], Any], start: Place = START) -> Iterator[Row]:
    """Read a ``datasets.Dataset``."""
    data_set = load()
    if start[0] >= len(data_set):  # select() would raise an error
        return
    rest = data_set.select(range(start[0], len(data_set)))
    for number, value in enumerate(rest, start=start[0]):
        yield _numbered_row(name, number, value)


def _task_rows(tasks: Sequence[Path], start: Place = START) -> Iterator[Row]:
    """Read task folders: the prompt is the instruction, ``task`` the folder."""
    for number, folder in enumerate(tasks[start[0] :], start=start[0]):
        value = {"prompt": read_task(folder).instruction, "task": str(folder)}
        yield Row(str(folder), value, (number + 1, number + 1))


def _numbered_row(name: str, number: int, value: Any) -> Row:
    return Row(f"{name}, row {number} (counted from 0)", value, (number + 1, number + 1))


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
            usual = next((name for name in PROMPT_COLUMNS if name in value), "COLUMN")
            remedy = (
                f"The rows before it have {key!r}: give it to this row too, or remove the row."
                if index
                else f"Set data.prompt_key={usual}, the key of the prompt."
            )
            raise DataError(f"{where} lacks the key {key!r}; it has {sorted(value)}. {remedy}")
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
            is_text=isinstance(value[key], str),
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
                f"{factory.name!r} generates no prompts. Name some: data.train_data=[prompts.jsonl], or another data set."
            )
        return PromptDataset(tuple(generated))
    maker = RecordMaker(data.prompt_key, environment.env_class)
    records: list[PromptRecord] = []
    for name in data.train_data:
        before, file = len(records), open_rows(name)
        for row in file.rows():
            records.append(maker.make(row, index=len(records), stem=file.source))
        if len(records) == before:
            raise DataError(f"{name} has no rows. Remove it from data.train_data or fill it.")
    return PromptDataset(tuple(records))


def check_template(prompts: Sequence[PromptRecord] | StreamingPrompts, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that conversations of several messages have a chat template, without which their texts would run together.

    Raises:
        ConfigError: the tokenizer has none. A stream checks as it reads.
    """
    if tokenizer.chat_template:
        return

    def check(record: PromptRecord) -> None:
        if len(record.prompt) > 1 or record.prompt[0].get("role") != "user":
            raise ConfigError(
                f"Prompt {record.uid!r} is a conversation of {[message.get('role') for message in record.prompt]}, and the "
                "tokenizer has no chat template, so their texts would run together. Name a file with a Jinja template in "
                "generator.chat_template, take the instruct model, or give prompts as text."
            )

    for_each(prompts, check)


def check_environment(dataset: PromptDataset | StreamingPrompts, config: RunConfig) -> None:
    """Check that a user's data have an environment which can use them: neither the toy task that is the default, nor one of
    skyrl-gym that lacks columns.

    Raises:
        ConfigError: a row is no prompt of the toy task. A stream checks as it reads.
        DataError: the environment of skyrl-gym does not take the first row.
    """
    default = EnvironmentConfig().env_class
    if not config.data.train_data or config.generator.name != "gym":
        return

    def check(record: PromptRecord) -> None:
        if record.env_class is None and not _TOY_PROMPT.fullmatch(str(record.prompt[-1].get("content"))):
            to_set = (
                "Set environment.env_class=single_turn: your reward function judges the answers."
                if config.rollout.stages.reward.function is not None
                else "Set environment.env_class to the class that rewards answers (file.py:Class), or give rows a column "
                "env_class. `skyrl-train init NAME --data FILE` writes one; docs/tutorials/your_own_task.md shows it. "
                "In Python, train(reward_fn=...) or train(environment=...) judges them."
            )
            raise ConfigError(
                f"data.train_data has your prompts, and environment.env_class={default}, the default, is a toy task with prompts "
                f"like 07c=. Prompt {record.uid!r} is none. {to_set}"
            )

    if config.environment.env_class == default:
        for_each(dataset, check)
    if not isinstance(dataset, PromptDataset):
        return
    record = dataset.records[0].own_copy()
    env_class = record.env_class or config.environment.env_class
    factory = resolve_environment(config.environment)
    if env_class != config.environment.env_class:
        of_row = resolve_environment(EnvironmentConfig(env_class=env_class))
        factory = factory if of_row.name == factory.name else of_row  # they may be names of one environment
    if factory.name.startswith("skyrl_gym:"):
        try:
            factory.make({**record.env_extras, "max_turns": config.generator.max_turns}).close()
        except Exception as error:  # its code may raise anything
            full_name = "" if env_class == factory.name else f" is {factory.name}, and"
            raise DataError(
                f"The environment {env_class!r}{full_name} does not take prompt {record.uid!r}: "
                f"{type(error).__name__}: {error}. It needs the columns of SkyRL's data sets, such as "
                f'reward_spec={{"ground_truth": ...}}; the row has {sorted(record.env_extras)}.'
            ) from error


def for_each(prompts: Sequence[PromptRecord] | StreamingPrompts, check: Callable[[PromptRecord], None]) -> None:
    """Call ``check`` with each prompt: at once for prompts in memory, and for a stream when it reads them."""
    if isinstance(prompts, Sequence):
        for record in prompts:
            check(record)
    else:
        prompts.checks.append(check)


def check_alphabet(dataset: PromptDataset | StreamingPrompts, alphabet: str, words: Sequence[str] = ()) -> None:
    """Check that a tokenizer with one token per character of ``alphabet`` and per word of ``words`` knows all of the prompts.

    A stream checks as it reads.

    Raises:
        ConfigError: some characters are unknown; the message has a setting that includes them.
    """
    if isinstance(dataset, PromptDataset):
        _check_characters(dataset.records, alphabet, words)
    else:
        dataset.checks.append(lambda record: _check_characters([record], alphabet, words))


def _check_characters(records: Iterable[PromptRecord], alphabet: str, words: Sequence[str]) -> None:
    used: set[str] = set()
    for record in records:
        for message in record.prompt:
            content = str(message.get("content", ""))
            for word in words:
                content = content.replace(word, "")
            used.update(content)
    unknown = used - set(alphabet)
    if unknown:
        # The last one is $: before { it would interpolate.
        remedy = "".join(sorted(used | set(alphabet), key=lambda character: (character == "$", character)))
        setting = text_override("trainer.policy.model.build.alphabet", remedy)
        # For a shell, in double quotes where these change nothing: single ones may be in the setting.
        given = shlex.quote(setting) if set(setting) & set('"$!\\`') else f'"{setting}"'
        raise ConfigError(
            f"The prompts contain {''.join(sorted(unknown))!r}, which trainer.policy.model.build.alphabet={alphabet!r} "
            f"lacks. Set it to the characters of prompts and answers, here at least {remedy!r}: {given}."
        )

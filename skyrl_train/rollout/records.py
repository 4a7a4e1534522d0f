"""From a row of a file to a prompt: which columns mean what, and what is wrong with a broken row."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_train.config.schema.data import EnvironmentConfig
from skyrl_train.environments.base import PromptRecord
from skyrl_train.environments.registry import resolve_environment
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.generators.base import ConversationType
from skyrl_train.rollout.rows import Row


class RecordMaker:
    """Makes prompts of rows.

    Of a row's columns, ``prompt_key`` is the prompt (a string or a list of messages), ``uid`` its name, ``env_class`` its
    environment and ``data_source`` its source; all but the first three reach the environment as extras.

    Args:
        env_class: of rows that name none.
    """

    def __init__(self, prompt_key: str, env_class: str) -> None:
        self._prompt_key = prompt_key
        self._environments: set[str | None] = {None, env_class}  # known to be usable

    def make(self, row: Row, index: int, stem: str) -> PromptRecord:
        """The prompt in ``row``.

        Args:
            index: of the row among all rows of all files, counted from 0.
            stem: names the source of rows that name none.

        Raises:
            DataError: the row is broken, or names an environment that cannot be used.
        """
        value, where, key = row.value, row.where, self._prompt_key
        if not isinstance(value, Mapping):
            raise DataError(f"{where} is a {type(value).__name__}, not an object with the key {key!r}.")
        if value.get(key) is None:
            raise DataError(
                f"{where} lacks the key {key!r}; it has {sorted(value)}. Set data.prompt_key to the prompt's."
            )
        prompt = _to_conversation(value[key], where, key)
        env_class = value.get("env_class")
        if env_class is not None and not isinstance(env_class, str):
            raise DataError(f"{where}: env_class must be a string, got {env_class!r}.")
        uid = value.get("uid")
        content = hashlib.sha256(canonical_json(value).encode()).hexdigest()[:8]
        record = PromptRecord(
            uid=f"{index}-{content}" if uid is None else str(uid),
            prompt=prompt,
            env_class=env_class,
            env_extras={name: column for name, column in value.items() if name not in (key, "uid", "env_class")},
            data_source=str(value.get("data_source") or stem),
        )
        self._check_environment(record)
        return record

    def _check_environment(self, record: PromptRecord) -> None:
        """Resolves the environment that a row names, so that a wrong name is an error of the data, not of a rollout."""
        if record.env_class in self._environments:
            return
        try:
            resolve_environment(EnvironmentConfig(env_class=str(record.env_class)))
        except ConfigError as error:
            raise DataError(f"The env_class of prompt {record.uid!r} cannot be used: {error}") from error
        self._environments.add(record.env_class)


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


def record_json(record: PromptRecord) -> str:
    """Everything in a prompt: the same for equal ones, and only for those."""
    return canonical_json([record.uid, record.prompt, record.env_class, record.env_extras, record.data_source])


def canonical_json(value: Any) -> str:
    """JSON that is the same for equal values, in every process; also of values that JSON lacks."""
    return json.dumps(value, sort_keys=True, ensure_ascii=True, default=_stable)


def _stable(value: Any) -> Any:
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

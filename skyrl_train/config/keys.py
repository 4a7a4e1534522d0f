"""Settings by their dotted names: their types, their limits, and the nearest known name to a misspelt one."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable
from enum import Enum
from functools import cache
from typing import Any

from skyrl_train.config.import_path import is_import_path
from skyrl_train.config.schema import OneOf, RunConfig
from skyrl_train.config.synonyms import SYNONYMS

OR_IMPORT_PATH = " An import path works too: package.module:Name or file.py:Name."

_PLAIN = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


@cache
def known_keys() -> dict[str, str]:
    """Map every dotted name, including sections, to a description of its type; in the schema's order."""
    return {key: _describe(kind) for key, kind in _types().items()}


def in_free_section(key: str) -> bool:
    """Return whether ``key`` is, or lies in, a dictionary of a user's constructor: any key is allowed below it."""
    mappings = (known for known, holds in known_keys().items() if holds == "a mapping")
    return any(key == section or key.startswith(section + ".") for section in mappings)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that ``name`` was probably meant to be, or None if nothing is close.

    Dotted names are also compared by their last part, so that a setting typed without its section is found, and by the words
    in it.
    """
    candidates = [key for key in known if not name.startswith(key + ".")]
    last_parts: dict[str, str] = {}
    for candidate in candidates:
        last_parts.setdefault(candidate.rpartition(".")[2], candidate)
    # The exact last part is better evidence than the similarity of long names with common sections.
    last = name.rpartition(".")[2]
    if last in last_parts:
        return last_parts[last]
    words = set(last.split("_"))
    longer = min((part for part in last_parts if words < set(part.split("_"))), key=len, default=None)
    # Of a name without a section, a whole word says more than similar letters: async is meant to be fully_async, not sync.
    if longer is not None and last == name:
        return last_parts[longer]
    whole = difflib.get_close_matches(name, candidates, n=1, cutoff=0.75)
    if whole:
        return whole[0]
    if longer is not None:
        return last_parts[longer]
    close = difflib.get_close_matches(last, last_parts, n=1, cutoff=0.75)
    return last_parts[close[0]] if close else None


def meant_setting(name: str) -> str | None:
    """Return the setting that an unknown dotted name was probably meant to be, or None."""
    section, _, last = name.rpartition(".")
    synonym = SYNONYMS.get(last.lower().replace("-", "_"))
    if synonym is None:
        return nearest(name, known_keys())
    # Of another model, for example: trainer.critic.optimizer_config.learning_rate.
    beside = f"{section}.{synonym.rpartition('.')[2]}"
    return beside if beside in known_keys() else synonym


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the nearest name, or with all known names if they are few, or an empty string."""
    candidates = list(known)
    close = nearest(name, candidates)
    if close is not None:
        return f" Did you mean {close}?"
    return f" Known: {', '.join(candidates)}." if 0 < len(candidates) <= 12 else ""


def setting(config: RunConfig, key: str) -> Any:
    """Return the value of a dotted key; for a key inside a list of sections, the list of their values."""
    value: Any = config
    for part in key.split("."):
        value = [getattr(each, part) for each in value] if isinstance(value, list) else getattr(value, part)
    return value


def changed(section: Any) -> list[str]:
    """Return the names of the settings of a section that differ from their defaults."""
    default = type(section)()
    return [name for name in vars(default) if getattr(section, name) != getattr(default, name)]


def limit_errors(config: RunConfig) -> list[tuple[str, str]]:
    """Check every value against the limits in its type; None is always allowed.

    Returns:
        The key and the error message of each setting that breaks its limits.
    """
    errors = []
    for key, kind in _types().items():
        limits = _limits(kind)
        value = setting(config, key) if limits else None
        # A limit in the values of a dictionary applies to each of them.
        values = {f"{key}[{name!r}]": each for name, each in value.items()} if isinstance(value, dict) else {key: value}
        for name, each in values.items():
            if each is not None:
                errors += [(key, error) for limit in limits if (error := _limit_error(name, each, limit)) is not None]
    return errors


def _limits(kind: Any) -> list[Any]:
    """Return the limits in a type, also in a part of a union or in the values of a dictionary."""
    if typing.get_origin(kind) is typing.Annotated:
        return list(kind.__metadata__)
    return [limit for part in typing.get_args(kind) for limit in _limits(part)]


def _limit_error(name: str, value: Any, limit: Any) -> str | None:
    if isinstance(limit, OneOf):
        if value in limit.names or (limit.import_path and is_import_path(value)):
            return None
        return (
            f"{name}={value} is unknown.{did_you_mean(value, limit.names)}{OR_IMPORT_PATH if limit.import_path else ''}"
        )
    # Ge, Gt and Interval each have some of these; comparing in this direction, NaN is outside of every range.
    ge, gt, le, lt = (getattr(limit, bound, None) for bound in ("ge", "gt", "le", "lt"))
    low = (ge is None or value >= ge) and (gt is None or value > gt)
    if low and (le is None or value <= le) and (lt is None or value < lt):
        return None
    if ge is not None and le is not None:
        return f"{name}={value}: must be between {ge} and {le}."
    words = [f"at least {ge}"] if ge is not None else []
    words += [f"more than {gt}"] if gt not in (None, -math.inf) else []
    words += [f"at most {le}"] if le is not None else []
    words += ["finite" if lt == math.inf else f"less than {lt}"] if lt is not None else []
    return f"{name}={value}: must be {' and '.join(words)}."


@cache
def _types(section: type = RunConfig, prefix: str = "") -> dict[str, Any]:
    """Map the dotted names in a section, at any depth, to their types."""
    found = {}
    for name, kind in typing.get_type_hints(section, include_extras=True).items():
        found[prefix + name] = kind
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            found |= _types(kind, f"{prefix}{name}.")
    return found


def _describe(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _describe(arguments[0])
    if origin in (types.UnionType, typing.Union):
        inner = [_describe(argument) for argument in arguments if argument is not type(None)]
        return " or ".join([*inner, "null"])
    if origin is list:
        return f"a list, each entry {_describe(arguments[0])}"
    if origin is dict:
        return "a mapping"
    if dataclasses.is_dataclass(kind):
        return "a section of settings"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(member.name for member in kind)}"
    return _PLAIN[kind]

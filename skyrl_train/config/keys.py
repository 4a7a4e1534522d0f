"""The dotted names of all settings, what each may hold, and the nearest known name to a misspelt one."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import cache

from skyrl_train.config.schema.run import RunConfig

_PLAIN = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


@cache
def known_keys() -> dict[str, str]:
    """Maps every dotted name, sections included, to the words for what it holds; in the schema's order."""
    return dict(_walk(RunConfig, ""))


@cache
def free_sections() -> tuple[str, ...]:
    """The dictionaries whose keys belong to someone else's constructor: any key is fine below them."""
    return tuple(key for key, holds in known_keys().items() if holds == "a mapping")


def in_free_section(key: str) -> bool:
    """Whether ``key`` is a free dictionary or lies in one."""
    return any(key == section or key.startswith(section + ".") for section in free_sections())


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that ``name`` was probably meant to be, or None where nothing is close.

    Dotted names are compared by their last part as well, so that a setting typed without its section is found.
    """
    candidates = [key for key in known if not name.startswith(key + ".")]
    last_parts: dict[str, str] = {}
    for candidate in candidates:
        last_parts.setdefault(candidate.rpartition(".")[2], candidate)
    last = name.rpartition(".")[2]
    if last in last_parts:
        return last_parts[last]
    whole = difflib.get_close_matches(name, candidates, n=1, cutoff=0.75)
    if whole:
        return whole[0]
    close = difflib.get_close_matches(last, last_parts, n=1, cutoff=0.6)
    return last_parts[close[0]] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence with the nearest name, or the list of known names where there are few, or nothing."""
    candidates = list(known)
    close = nearest(name, candidates)
    if close is not None:
        return f" Did you mean {close}?"
    return f" Known: {', '.join(candidates)}." if 0 < len(candidates) <= 12 else ""


def _walk(section: type, prefix: str) -> Iterator[tuple[str, str]]:
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        kind = hints[field.name]
        key = prefix + field.name
        yield key, _describe(kind)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from _walk(kind, key + ".")


def _describe(kind: typing.Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
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

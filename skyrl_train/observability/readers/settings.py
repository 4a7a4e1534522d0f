"""The settings of a run, and how they differ from the defaults and from another run's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

from skyrl_train.config.schema import RunConfig

_ADMIN_KEY = ".admin_key"  # of an endpoint: reports and trackers show settings to others, who must not have it
_GIVEN_KEY = re.compile(r"""(\badmin_key["']?\s*[=:]\s*)("[^"]*"|'[^']*'|[^,}]+)""")


def setting_of(settings: Mapping[str, Any], key: str) -> Any:
    """Return a setting by its dotted name; None if ``settings``, perhaps of another version, lack it."""
    value: Any = settings
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def settings_table(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one row per setting: ``key``, ``value``, ``default`` (None if this version has no such setting) and ``differs``."""
    defaults = _defaults()
    return [
        {
            "key": key,
            "value": value,
            "default": defaults.get(key),
            "known": key in defaults,
            "differs": key not in defaults or defaults[key] != value,
        }
        for key, value in _leaves(settings, "")
    ]


def differing_settings(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per setting that is not the same in all runs: ``key``, and ``values``, one per run (null: not set)."""
    tables = [dict(_leaves(run, "")) for run in runs]
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = ({"key": key, "values": [table.get(key) for table in tables]} for key in keys)
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]


def without_key(argument: str) -> str:
    """Return an argument of a command without the endpoint's key, which reports and the page would show."""
    return _GIVEN_KEY.sub(r"\1(hidden)", argument)


@cache
def _defaults() -> dict[str, Any]:
    return dict(_leaves(asdict(RunConfig()), ""))


def _leaves(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name of each setting, with its value as plain data."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, "(hidden)" if prefix.endswith(_ADMIN_KEY) and value is not None else _plain(value)


def _plain(value: Any) -> Any:
    """Return data that JSON has. ``to_yaml`` escapes interpolations in texts; here they are shown as they were."""
    match value:
        case str():
            return re.sub(r"(\\*)\\\$\{", lambda found: found[1][: len(found[1]) // 2] + "${", str(value))
        case Mapping():
            return {str(key): _plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
        case bool() | int() | float() | None:
            return value
        case _:  # a date of YAML, an enum
            return str(value)

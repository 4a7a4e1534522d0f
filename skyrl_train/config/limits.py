"""What rules of refusal have in common: a setting by its name, and its limits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from skyrl_train.config.schema.generator import SamplingConfig
from skyrl_train.config.schema.run import RunConfig

Problems = Iterator[str]  # one sentence per problem


def setting(config: RunConfig, key: str) -> Any:
    """The value of a dotted key of the schema; behind a list of settings, the list of their values."""
    value: Any = config
    for part in key.split("."):
        value = [getattr(each, part) for each in value] if isinstance(value, list) else getattr(value, part)
    return value


def changed(section: Any) -> list[str]:
    """The names of the settings of a section of the schema that are not as by default."""
    default = type(section)()
    return [name for name in vars(default) if getattr(section, name) != getattr(default, name)]


def at_least(config: RunConfig, minimum: float, *keys: str) -> Problems:
    """A problem for each of ``keys`` that is below ``minimum``; None is not."""
    for key in keys:
        value = setting(config, key)
        if value is not None and not value >= minimum:
            yield f"{key}={value}: must be at least {minimum}."


def finite(config: RunConfig, *keys: str) -> Problems:
    """A problem for each of ``keys`` that is infinite; NaN is one of :func:`at_least`."""
    for key in keys:
        if setting(config, key) == math.inf:
            yield f"{key}=inf: must be a finite number."


def more_than_zero(config: RunConfig, *keys: str) -> Problems:
    """A problem for each of ``keys`` that is not above 0; None is."""
    for key in keys:
        value = setting(config, key)
        if value is not None and not value > 0:
            yield f"{key}={value}: must be more than 0."


def impossible_sampling(sampling: SamplingConfig, key: str) -> Problems:
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        yield f"{key}.min_tokens={sampling.min_tokens}: must be between 0 and max_tokens={sampling.max_tokens}."
    if not 0 < sampling.top_p <= 1:
        yield f"{key}.top_p={sampling.top_p}: must be above 0 and at most 1 (1 is off)."
    if not 0 <= sampling.min_p <= 1:
        yield f"{key}.min_p={sampling.min_p}: must be between 0 (off) and 1."

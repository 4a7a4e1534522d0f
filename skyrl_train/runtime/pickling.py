"""Short pickles of the dataclasses that travel between processes for every request."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T")


def by_position(cls: type[T]) -> type[T]:
    """Let a dataclass pickle as its class and the values of its fields, with which the class is called again.

    Without it, Python code collects and sets each field of a frozen dataclass with slots, which takes about three times as long
    in both processes that a request passes. For two fields or more, all of them in ``__init__``.
    """
    values = attrgetter(*cls.__dataclass_fields__)  # type: ignore[attr-defined]

    def reduce(self: T) -> tuple[type[T], tuple[Any, ...]]:
        return cls, values(self)

    cls.__reduce__ = reduce  # type: ignore[method-assign, assignment]
    return cls

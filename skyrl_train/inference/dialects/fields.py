"""Request fields as a table: what each one may hold, whether it is supported, and why not.

The same table reads bodies, writes the OpenAPI schema that the endpoint is fuzzed from, and is checked against the docs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from skyrl_train.inference.dialects.errors import DialectError

MAX_DEPTH = 64  # of nested JSON; templates and JSON writers recurse
INT64 = 2**63 - 1


class Support(StrEnum):
    """What becomes of a field."""

    SUPPORTED = "supported"
    IGNORED = "ignored"  # accepted whatever it is, without any effect
    NEUTRAL = "default only"  # accepted with the value that changes nothing, refused with any other
    REFUSED = "refused"


class Kind(Protocol):
    """What a value may be."""

    @property
    def schema(self) -> dict[str, Any]:
        """As JSON schema."""

    def read(self, value: Any, param: str) -> Any:
        """Returns the value in Python's terms.

        Raises:
            DialectError: it is something else.
        """


@dataclass(frozen=True, slots=True)
class Field:
    """One request field. ``note`` says how, or why not. An absent field and null are the same.

    ``kind`` of a NEUTRAL field reads the values that change nothing, and no others.
    """

    name: str
    support: Support
    kind: Kind
    note: str = ""
    required: bool = False

    def read(self, value: Any, param: str) -> Any:
        """Returns the value; None where it has no effect.

        Raises:
            DialectError: it is of the wrong kind, or asks for what is not supported.
        """
        if self.support is Support.SUPPORTED:
            return self.kind.read(value, param)
        if self.support is Support.NEUTRAL:
            try:
                self.kind.read(value, param)
            except DialectError:
                raise self._unsupported(param) from None
        elif self.support is Support.REFUSED:
            raise self._unsupported(param)
        return None

    def _unsupported(self, param: str) -> DialectError:
        return DialectError(f"{param} is not supported here: {self.note}.", param, "unsupported_parameter")


def read_fields(fields: Sequence[Field], body: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the supported fields of ``body`` that hold something. ``prefix`` comes before their names in errors.

    Raises:
        DialectError: a field is unknown, missing, of the wrong kind or refused.
    """
    known = {entry.name for entry in fields}
    for name in body:
        if name not in known:
            param = prefix + name[:100]
            raise DialectError(f"{param!r} is no field of this request.", param, "unknown_parameter")
    values = {}
    for entry in fields:
        value = body.get(entry.name)
        param = prefix + entry.name
        if value is None:
            if entry.required:
                raise DialectError(f"{param} is required.", param, "missing_required_parameter")
        elif (read := entry.read(value, param)) is not None:
            values[entry.name] = read
    return values


def object_schema(fields: Iterable[Field]) -> dict[str, Any]:
    """The JSON schema of a body: what it may hold without being refused."""
    fields = [entry for entry in fields if entry.support is not Support.REFUSED]
    return {
        "type": "object",
        "properties": {entry.name: _property_schema(entry) for entry in fields},
        "required": [entry.name for entry in fields if entry.required],
        "additionalProperties": False,
    }


def _property_schema(entry: Field) -> dict[str, Any]:
    schema = entry.kind.schema
    nullable = schema if entry.required else {"anyOf": [schema, {"type": "null"}]}
    return {**nullable, "description": f"{entry.support}: {entry.note}" if entry.note else str(entry.support)}


def _wrong(param: str, expected: str, value: Any) -> DialectError:
    got = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return DialectError(f"{param} must be {expected}, got {got.get(type(value), 'a number')}.", param, "invalid_type")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Boolean:
    """True or false."""

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}

    def read(self, value: Any, param: str) -> bool:
        if not isinstance(value, bool):
            raise _wrong(param, "a boolean", value)
        return value


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number between two bounds, both included."""

    minimum: int = -INT64
    maximum: int = INT64

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.minimum, "maximum": self.maximum}

    def takes_all(self, values: list[Any]) -> bool:
        """Whether all of ``values`` are plain integers within the bounds; looks through a million in some 50 ms."""
        return set(map(type, values)) == {int} and self.minimum <= min(values) and max(values) <= self.maximum

    def read(self, value: Any, param: str) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # JSON does not tell 1.0 from 1
        if not isinstance(value, int) or isinstance(value, bool):
            raise _wrong(param, "an integer", value)
        if not self.minimum <= value <= self.maximum:
            upper = "" if self.maximum == INT64 else f" and at most {self.maximum}"
            raise DialectError(f"{param} must be at least {self.minimum}{upper}, got {value}.", param, "invalid_value")
        return value


@dataclass(frozen=True, slots=True)
class Number:
    """A number between two bounds; ``above`` instead of ``minimum`` leaves the bound itself out."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None

    @property
    def schema(self) -> dict[str, Any]:
        bounds = {"minimum": self.minimum, "maximum": self.maximum, "exclusiveMinimum": self.above}
        return {"type": "number", **{name: bound for name, bound in bounds.items() if bound is not None}}

    def read(self, value: Any, param: str) -> float:
        if not _is_number(value):
            raise _wrong(param, "a number", value)
        fits = (
            math.isfinite(value)
            and (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.above is None or value > self.above)
        )
        if not fits:
            low = f"above {self.above:g}" if self.above is not None else f"at least {self.minimum:g}"
            high = "" if self.maximum is None else f" and at most {self.maximum:g}"
            raise DialectError(f"{param} must be {low}{high}, got {value:g}.", param, "invalid_value")
        return float(value)


@dataclass(frozen=True, slots=True)
class Text:
    """A string; with ``choices`` one of them."""

    choices: tuple[str, ...] = ()
    min_length: int = 0

    @property
    def schema(self) -> dict[str, Any]:
        if self.choices:
            return {"type": "string", "enum": list(self.choices)}
        return {"type": "string", "minLength": self.min_length}

    def read(self, value: Any, param: str) -> str:
        if not isinstance(value, str):
            raise _wrong(param, "a string", value)
        if self.choices and value not in self.choices:
            raise DialectError(
                f"{param} must be one of {', '.join(self.choices)}; got {value!r:.100}.", param, "invalid_value"
            )
        if len(value) < self.min_length:
            raise DialectError(f"{param} must not be empty.", param, "invalid_value")
        return value


@dataclass(frozen=True, slots=True)
class ListOf:
    """An array of one kind."""

    item: Kind
    min_items: int = 0
    max_items: int | None = None

    @property
    def schema(self) -> dict[str, Any]:
        bounds = {} if self.max_items is None else {"maxItems": self.max_items}
        return {"type": "array", "items": self.item.schema, "minItems": self.min_items, **bounds}

    def read(self, value: Any, param: str) -> list[Any]:
        if not isinstance(value, list):
            raise _wrong(param, "an array", value)
        if len(value) < self.min_items:
            raise DialectError(f"{param} must have at least {self.min_items} entries.", param, "invalid_value")
        if self.max_items is not None and len(value) > self.max_items:
            raise DialectError(
                f"{param} may have at most {self.max_items} entries, got {len(value)}.", param, "array_above_max_length"
            )
        if isinstance(self.item, Integer) and self.item.takes_all(value):
            return list(value)
        return [self.item.read(entry, f"{param}[{place}]") for place, entry in enumerate(value)]


@dataclass(frozen=True, slots=True)
class OneOrMany:
    """One value or an array of them; read as a list."""

    many: ListOf

    @property
    def schema(self) -> dict[str, Any]:
        return {"anyOf": [self.many.item.schema, self.many.schema]}

    def read(self, value: Any, param: str) -> list[Any]:
        if isinstance(value, list):
            return self.many.read(value, param)
        return [self.many.item.read(value, param)]


@dataclass(frozen=True, slots=True)
class Anything:
    """Any JSON; for fields whose value is not looked at."""

    @property
    def schema(self) -> dict[str, Any]:
        return {}

    def read(self, value: Any, param: str) -> Any:
        return value


@dataclass(frozen=True, slots=True)
class Mappings:
    """An object of any content, nested at most ``MAX_DEPTH`` deep."""

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "object"}

    def read(self, value: Any, param: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _wrong(param, "an object", value)
        level: list[Any] = [value]
        for _ in range(MAX_DEPTH):
            level = [child for entry in level for child in _children(entry)]
            if not level:
                return value
        raise DialectError(f"{param} is nested more than {MAX_DEPTH} levels deep.", param, "invalid_value")


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


@dataclass(frozen=True, slots=True)
class Shape:
    """An object with fields of its own."""

    fields: tuple[Field, ...]

    @property
    def schema(self) -> dict[str, Any]:
        return object_schema(self.fields)

    def read(self, value: Any, param: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _wrong(param, "an object", value)
        return read_fields(self.fields, value, f"{param}.")


@dataclass(frozen=True, slots=True)
class Exactly:
    """One of a few JSON values."""

    values: tuple[Any, ...]

    @property
    def schema(self) -> dict[str, Any]:
        return {"enum": list(self.values)}

    def read(self, value: Any, param: str) -> Any:
        for allowed in self.values:
            if value == allowed and isinstance(value, bool) == isinstance(allowed, bool):
                return value
        raise DialectError(f"{param} must be {' or '.join(map(repr, self.values))}.", param, "invalid_value")


@dataclass(frozen=True, slots=True)
class Zeros:
    """An object whose values are all 0."""

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": {"enum": [0]}}

    def read(self, value: Any, param: str) -> dict[str, Any]:
        if not isinstance(value, dict) or not all(_is_number(entry) and entry == 0 for entry in value.values()):
            raise DialectError(f"{param} must be empty or all zeros.", param, "invalid_value")
        return value

"""Kinds for objects whose ``type`` says which fields they have, and for what may be a string instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_train.inference.dialects.errors import DialectError
from skyrl_train.inference.dialects.fields import Anything, Field, Kind, Shape, Support


def variant(*fields: Field) -> Shape:
    """The fields of one variant; ``type`` has told already which one it is."""
    return Shape((Field("type", Support.IGNORED, Anything()), *fields))


@dataclass(frozen=True, slots=True)
class Variants:
    """An object of one of several types; read with its ``type``.

    Args:
        shapes: by type.
        otherwise: why there are no other types; ends the error message.
        default: the type of an object that names none; None: it must name one.
    """

    shapes: Mapping[str, Shape]
    otherwise: str
    default: str | None = None

    @property
    def schema(self) -> dict[str, Any]:
        return {"anyOf": [self._schema(name, shape) for name, shape in self.shapes.items()]}

    def _schema(self, name: str, shape: Shape) -> dict[str, Any]:
        schema = shape.schema
        if name == self.default:
            return {**schema, "properties": {**schema["properties"], "type": {"enum": [name, None]}}}
        properties = {**schema["properties"], "type": {"const": name}}
        return {**schema, "properties": properties, "required": [*schema["required"], "type"]}

    def read(self, value: Any, param: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise DialectError(f"{param} must be an object.", param, "invalid_type")
        name = value.get("type")
        if name is None:
            name = self.default
        shape = self.shapes.get(name) if isinstance(name, str) else None
        if shape is None:
            known = " or ".join(self.shapes)
            raise DialectError(
                f"{param}.type must be {known}, got {name!r:.100}: {self.otherwise}.", f"{param}.type", "invalid_value"
            )
        return {**shape.read(value, param), "type": name}


@dataclass(frozen=True, slots=True)
class StringOr:
    """A string, or another kind."""

    other: Kind

    @property
    def schema(self) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, self.other.schema]}

    def read(self, value: Any, param: str) -> Any:
        return value if isinstance(value, str) else self.other.read(value, param)

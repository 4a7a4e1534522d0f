"""OpenAI's ``response_format`` as a grammar for the engines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from skyrl_train.inference.dialects.errors import DialectError
from skyrl_train.inference.dialects.fields import Anything, Field, Mappings, Shape, Support, Text
from skyrl_train.inference.interface import StructuredOutput

_SCHEMA = Shape(
    (
        Field("name", Support.SUPPORTED, Text(min_length=1), required=True),
        Field("schema", Support.SUPPORTED, Mappings(), required=True),
        Field("description", Support.IGNORED, Anything(), "the model sees the messages only"),
        Field("strict", Support.IGNORED, Anything(), "the schema is always kept"),
    )
)
_FORMAT = Shape(
    (
        Field("type", Support.SUPPORTED, Text(("text", "json_object", "json_schema")), required=True),
        Field("json_schema", Support.SUPPORTED, _SCHEMA),
    )
)


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """Read as a :class:`StructuredOutput`, or None for text."""

    @property
    def schema(self) -> dict[str, Any]:
        return _FORMAT.schema

    def read(self, value: Any, param: str) -> StructuredOutput | None:
        values = _FORMAT.read(value, param)
        match values["type"]:
            case "json_object":
                return StructuredOutput("json_object")
            case "json_schema":
                if "json_schema" not in values:
                    where = f"{param}.json_schema"
                    raise DialectError(
                        f"{where} is required with type json_schema.", where, "missing_required_parameter"
                    )
                return StructuredOutput("json_schema", json.dumps(values["json_schema"]["schema"]))
        return None

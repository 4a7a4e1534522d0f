"""OpenAI chat messages and tools, checked and brought into one shape.

A content of parts becomes a string, ``developer`` becomes ``system``; everything else stays as it came, so that a message
that was sent back is recognised as the one that was sampled.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from skyrl_train.inference.dialects.errors import DialectError
from skyrl_train.inference.dialects.fields import (
    Anything,
    Boolean,
    Field,
    ListOf,
    Mappings,
    Shape,
    Support,
    Text,
)

ROLES = ("system", "developer", "user", "assistant", "tool")
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_PART = {"text": "text", "refusal": "refusal"}  # type -> where its text is

_TOOL_CALL = Shape(
    (
        Field("id", Support.SUPPORTED, Text(min_length=1), required=True),
        Field("type", Support.SUPPORTED, Text(("function",)), required=True),
        Field(
            "function",
            Support.SUPPORTED,
            Shape(
                (
                    Field("name", Support.SUPPORTED, Text(min_length=1), required=True),
                    Field("arguments", Support.SUPPORTED, Text(), required=True),
                )
            ),
            required=True,
        ),
        Field("index", Support.IGNORED, Anything(), "as streams have it"),
    )
)


@dataclass(frozen=True, slots=True)
class Content:
    """A string, or an array of text parts; read as one string."""

    @property
    def schema(self) -> dict[str, Any]:
        part = {
            "type": "object",
            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            "required": ["type", "text"],
        }
        return {"anyOf": [{"type": "string"}, {"type": "array", "items": part}]}

    def read(self, value: Any, param: str) -> str:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise DialectError(f"{param} must be a string or an array of text parts.", param, "invalid_type")
        return "".join(_part_text(part, f"{param}[{place}]") for place, part in enumerate(value))


def _part_text(part: Any, param: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    where = _PART.get(kind) if isinstance(kind, str) else None
    if where is None:
        raise DialectError(
            f"{param} must be a text part: this endpoint takes text only.", f"{param}.type", "invalid_value"
        )
    text = part.get(where)
    if not isinstance(text, str):
        raise DialectError(f"{param}.{where} must be a string.", f"{param}.{where}", "invalid_type")
    return text


_ROLE = Field("role", Support.SUPPORTED, Text(ROLES), required=True)
_CONTENT = Field("content", Support.SUPPORTED, Content(), required=True)
_NAME = Field("name", Support.SUPPORTED, Text())
_SAID = Shape((_ROLE, _CONTENT, _NAME))
_ANSWERED = Shape(
    (
        _ROLE,
        Field("content", Support.SUPPORTED, Content()),
        _NAME,
        Field("tool_calls", Support.SUPPORTED, ListOf(_TOOL_CALL)),
        Field("reasoning_content", Support.SUPPORTED, Text()),
        Field("reasoning", Support.IGNORED, Anything(), "reasoning_content is read"),
        Field("refusal", Support.IGNORED, Anything(), "a model here says it in its content"),
        Field("annotations", Support.IGNORED, Anything()),
        Field("audio", Support.REFUSED, Anything(), "this endpoint takes text only"),
        Field("function_call", Support.REFUSED, Anything(), "tool_calls has taken its place"),
    )
)
_RETURNED = Shape((_ROLE, _CONTENT, _NAME, Field("tool_call_id", Support.SUPPORTED, Text(), required=True)))
_SHAPES = {"system": _SAID, "developer": _SAID, "user": _SAID, "assistant": _ANSWERED, "tool": _RETURNED}


@dataclass(frozen=True, slots=True)
class Message:
    """One message; read as a mapping in the shape that the renderer takes."""

    @property
    def schema(self) -> dict[str, Any]:
        return {"anyOf": [self._schema(role) for role in ROLES]}

    def _schema(self, role: str) -> dict[str, Any]:
        schema = _SHAPES[role].schema
        return {**schema, "properties": {**schema["properties"], "role": {"const": role}}}

    def read(self, value: Any, param: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise DialectError(f"{param} must be an object.", param, "invalid_type")
        role = _ROLE.kind.read(value.get("role"), f"{param}.role")
        message = _SHAPES[role].read(value, param)
        if role == "developer":
            message["role"] = "system"
        if not message.get("tool_calls", True):
            del message["tool_calls"]
        if "content" not in message:
            message["content"] = None if "tool_calls" in message else ""
        return message


MESSAGES = ListOf(Message(), min_items=1)

_FUNCTION = Shape(
    (
        Field("name", Support.SUPPORTED, Text(min_length=1), required=True),
        Field("description", Support.SUPPORTED, Text()),
        Field("parameters", Support.SUPPORTED, Mappings()),
        Field("strict", Support.SUPPORTED, Boolean()),
    )
)
_TOOL = Shape(
    (
        Field("type", Support.SUPPORTED, Text(("function",)), required=True),
        Field("function", Support.SUPPORTED, _FUNCTION, required=True),
    )
)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    @property
    def schema(self) -> dict[str, Any]:
        return _TOOL.schema

    def read(self, value: Any, param: str) -> dict[str, Any]:
        tool = _TOOL.read(value, param)
        if _TOOL_NAME.fullmatch(tool["function"]["name"]) is None:
            where = f"{param}.function.name"
            raise DialectError(f"{where} must be 1 to 64 letters, digits, '_', '-' or '.'.", where, "invalid_value")
        return tool


TOOLS = ListOf(Tool(), max_items=128)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether tools are shown to the model. Forcing a call would take a grammar over the tools."""

    @property
    def schema(self) -> dict[str, Any]:
        return {"enum": ["auto", "none"]}

    def read(self, value: Any, param: str) -> str:
        if value in ("auto", "none"):
            return str(value)
        if value == "required" or isinstance(value, dict):
            raise DialectError(
                f"{param} is supported with auto and none only: nothing here can force a call. Ask for it in a message.",
                param,
                "unsupported_parameter",
            )
        raise DialectError(f"{param} must be auto or none.", param, "invalid_value")

"""Normalizes request messages into the shape that every chat template understands.

Contents become text and tool-call arguments become objects, because templates iterate over them. Content that cannot be
rendered raises an error with the index of the message and the name of the field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_train.errors import ConfigError

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def normalize_messages(
    messages: Sequence[Mapping[str, Any]], *, knows_developer: bool = True, strict_roles: bool = False
) -> list[dict[str, Any]]:
    """Return ``messages`` with text contents and parsed tool-call arguments, without keys whose value is None.

    Args:
        knows_developer: without it, the role "developer" becomes "system".
        strict_roles: only the roles of OpenAI's chat; otherwise the chat template decides.

    Raises:
        ConfigError: a message is malformed; the error names ``messages[i]`` and the field.
    """
    return [
        _message(message, f"messages[{index}]", knows_developer, strict_roles) for index, message in enumerate(messages)
    ]


def _message(message: Any, where: str, knows_developer: bool, strict_roles: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ConfigError(f"{where} must be an object with a role and a content, got {type(message).__name__}.")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ConfigError(f"{where}.role is missing or not a string; use one of {', '.join(ROLES)}.")
    if strict_roles and role not in ROLES:
        raise ConfigError(f"{where}.role {role!r} is unknown; use one of {', '.join(ROLES)}.")
    # Templates ask whether a key is there, so null must be the same as absence.
    plain = {key: value for key, value in message.items() if value is not None}
    plain["role"] = "system" if role == "developer" and not knows_developer else role
    plain["content"] = _content(message.get("content"), f"{where}.content", may_be_none=role == "assistant")
    for key in ("reasoning_content", "name", "tool_call_id"):
        if key in plain:
            plain[key] = _text(plain[key], f"{where}.{key}")
    calls = plain.pop("tool_calls", None)
    if calls:
        if role != "assistant":
            raise ConfigError(f"{where}.tool_calls belongs to assistant messages; this one's role is {role!r}.")
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise ConfigError(f"{where}.tool_calls must be a list, got {type(calls).__name__}.")
        plain["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return plain


def _content(content: Any, where: str, *, may_be_none: bool) -> str:
    if content is None:
        if not may_be_none:
            raise ConfigError(f"{where} is missing; only an assistant message may be without one.")
        return ""
    if isinstance(content, str):
        return _text(content, where)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ConfigError(f"{where} must be a string or a list of text parts, got {type(content).__name__}.")
    return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, Mapping):
        raise ConfigError(f"{where} must be an object with a type, got {type(part).__name__}.")
    kind = part.get("type")
    key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise ConfigError(f"{where}: parts of type {kind!r} are not supported; send text parts only.")
    return _text(part.get(key), f"{where}.{key}")


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{where} must be a string, got {type(value).__name__}.")
    if not value.isascii():
        # JSON can express half of a surrogate pair, which no tokenizer can encode.
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{where} is not valid Unicode: it has half of a surrogate pair.") from error
    return value


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ConfigError(f"{where}.function is missing or not an object.")
    name = _text(function.get("name"), f"{where}.function.name")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    return {**call, "type": "function", "function": {**function, "name": name, "arguments": arguments}}


def _arguments(arguments: Any, where: str) -> dict[str, Any]:
    """Parse arguments given as JSON text or as an object; missing arguments are an empty object."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        text = _text(arguments, where)
        try:
            arguments = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where} is not JSON: {error}.") from error
        # A model may write half of a surrogate pair as an escape. No tokenizer can encode it, and its agent is not to blame.
        if "\\ud" in text.lower():
            plain = json.dumps(arguments, ensure_ascii=False)
            arguments = json.loads(plain.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))
    if not isinstance(arguments, Mapping):
        raise ConfigError(f"{where} must be a JSON object, got {type(arguments).__name__}.")
    return dict(arguments)

"""When two messages are the same: the one that was sampled, and the one that a client sends back.

| part | compared |
|---|---|
| role, name (not an assistant's) | exactly |
| content | as text: none, absent and "" are equal, a list of text parts is its joined text |
| an assistant's content and reasoning | without white space at both ends (SDKs trim) |
| reasoning_content | only where both sides have it |
| tool calls | names and arguments in order; arguments as JSON values |
| ids of tool calls | only which call a tool's answer belongs to |
| any other key | not at all |

A message is kept as a digest, so that comparing costs nothing and a long history is hashed once per request.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=str).encode


@dataclass(frozen=True, slots=True)
class CanonicalMessage:
    """What a message is compared by. ``reasoning`` is None where the message has none."""

    digest: bytes  # 16 bytes, of everything but the reasoning
    reasoning: bytes | None
    is_assistant: bool


def canonical_messages(messages: Sequence[Mapping[str, Any]]) -> list[CanonicalMessage]:
    """The messages of one conversation; their order tells which call a tool's answer belongs to."""
    places: dict[str, int] = {}  # id of a tool call -> how many calls came before it; ids used again: the latest
    calls_before = 0
    canonical = []
    for message in messages:
        calls = message.get("tool_calls") or ()
        canonical.append(_canonical(message, calls, places))
        for call in calls:
            if isinstance(call, Mapping) and call.get("id") is not None:
                places[str(call["id"])] = calls_before
            calls_before += 1
    return canonical


def setting_digest(tools: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any]) -> bytes:
    """Names what a prompt depends on besides its messages."""
    return _digest([list(tools), dict(template_kwargs)])


def _canonical(message: Mapping[str, Any], calls: Sequence[Any], places: Mapping[str, int]) -> CanonicalMessage:
    role = str(message.get("role"))
    is_assistant = role == "assistant"
    content = _text(message.get("content"))
    if is_assistant and isinstance(content, str):
        content = content.strip()
    parts: list[Any] = [role, content]
    if calls:
        parts.append([_call(call) for call in calls])
    if not is_assistant:
        answers = message.get("tool_call_id")
        parts += [message.get("name"), places.get(str(answers), answers)]
    reasoning = _text(message.get("reasoning_content")) if is_assistant else ""
    if isinstance(reasoning, str):
        reasoning = reasoning.strip()
    return CanonicalMessage(_digest(parts), _digest(reasoning) if reasoning else None, is_assistant)


def _text(content: Any) -> Any:
    """The text of a content; one with parts that are no text comes back as it is."""
    if content is None:
        return ""
    if not isinstance(content, list | tuple):
        return content
    texts = [part.get("text") if _is_text(part) else part for part in content]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else content


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text"


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    return [function.get("name"), _json_value(function.get("arguments"))]


def _json_value(arguments: Any) -> Any:
    """The value that JSON text stands for; text that is no JSON stands for itself. No arguments are an empty object."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, default=str)
    if arguments is None or not text.strip():
        return {}
    try:
        return json.loads(text, parse_float=_number)
    except (ValueError, RecursionError):
        return ["no JSON", text.strip()]


def _number(text: str) -> float | int:
    """JSON does not tell 1.0 from 1, and programs write either."""
    value = float(text)
    return int(value) if value.is_integer() else value


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(_encode(value).encode("ascii"), digest_size=16).digest()

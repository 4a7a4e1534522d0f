"""Parsed responses as messages, common to all dialects (OpenAI chat and responses, Anthropic messages).

Request messages are plain mappings in OpenAI's chat shape (``role``, ``content``, ``tool_calls``, ``tool_call_id``,
``reasoning_content``); the dialects translate theirs into it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the model. ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str

    def to_openai(self) -> dict[str, Any]:
        """Return the call in OpenAI's chat shape."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """A parsed response. ``content`` is empty if the model only reasoned or called tools."""

    content: str
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    def to_openai(self) -> dict[str, Any]:
        """Return the message in OpenAI's chat shape; ``content`` is None if there are only tool calls."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.tool_calls else "")}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.to_openai() for call in self.tool_calls]
        return message


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of tool call number ``index``. Only the first piece has ``id`` and ``name``."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """A piece of a message that is still being sampled. The joined pieces are the parsed message."""

    content: str = ""
    reasoning_content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning_content or self.tool_calls)

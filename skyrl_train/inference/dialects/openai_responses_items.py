"""The items of OpenAI's responses: those that come in become chat messages, a sampled message becomes items.

The two are inverse to each other: items that come back are the message that was sampled, so that its tokens are reused.
One message of the chat is several items here (reasoning, message, function calls). The ids that this endpoint gives tell
which items belong together; where a client drops them, their order does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_train.inference.chat.messages import AssistantMessage, ToolCall
from skyrl_train.inference.dialects.fields import Anything, Exactly, Field, ListOf, Support, Text
from skyrl_train.inference.dialects.variants import StringOr, Variants, variant

_OURS = re.compile(r"(?:rs|msg|fc)_([0-9a-f]+)_\d+")
_TEXT_ONLY = "this endpoint takes text only"
_MEMBERS = "items are messages, function calls with their outputs, and reasoning; a stored item is sent again in full"

_ID = Field("id", Support.SUPPORTED, Text())
_STATUS = Field("status", Support.IGNORED, Anything())
_CALLER = Field("caller", Support.IGNORED, Anything())
_NAMESPACE = Field("namespace", Support.IGNORED, Anything())
_TEXT = Field("text", Support.SUPPORTED, Text(), required=True)
_CACHE = Field("prompt_cache_breakpoint", Support.IGNORED, Anything())
_INPUT_TEXT = variant(_TEXT, _CACHE)
_OUTPUT_TEXT = variant(
    _TEXT,
    Field("annotations", Support.IGNORED, Anything()),
    Field("logprobs", Support.IGNORED, Anything()),
)
_REFUSAL = variant(Field("refusal", Support.SUPPORTED, Text(), required=True))
_CONTENT = StringOr(
    ListOf(Variants({"input_text": _INPUT_TEXT, "output_text": _OUTPUT_TEXT, "refusal": _REFUSAL}, _TEXT_ONLY))
)
_REASONING_PART = Variants({"reasoning_text": variant(_TEXT)}, "reasoning is text")
_SUMMARY_PART = Variants({"summary_text": variant(_TEXT)}, "a summary is text")

_ITEM = Variants(
    {
        "message": variant(
            Field("role", Support.SUPPORTED, Text(("user", "assistant", "system", "developer")), required=True),
            Field("content", Support.SUPPORTED, _CONTENT, required=True),
            Field("phase", Support.IGNORED, Anything()),
            _ID,
            _STATUS,
        ),
        "function_call": variant(
            Field("call_id", Support.SUPPORTED, Text(min_length=1), required=True),
            Field("name", Support.SUPPORTED, Text(), required=True),
            Field("arguments", Support.SUPPORTED, Text(), required=True),
            Field("async", Support.NEUTRAL, Exactly((False,)), "calls are answered in their turn"),
            _ID,
            _STATUS,
            _CALLER,
            _NAMESPACE,
        ),
        "function_call_output": variant(
            Field("call_id", Support.SUPPORTED, Text(min_length=1), required=True),
            Field("output", Support.SUPPORTED, _CONTENT, required=True),
            Field("name", Support.IGNORED, Anything()),
            _ID,
            _STATUS,
            _CALLER,
            _NAMESPACE,
        ),
        "reasoning": variant(
            Field("content", Support.SUPPORTED, ListOf(_REASONING_PART)),
            Field("summary", Support.SUPPORTED, ListOf(_SUMMARY_PART)),
            Field("encrypted_content", Support.NEUTRAL, Exactly(("",)), "reasoning goes back and forth as text"),
            _ID,
            _STATUS,
        ),
    },
    _MEMBERS,
    default="message",
)
INPUT = StringOr(ListOf(_ITEM, min_items=1))


def chat_messages(instructions: str | None, items: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Chat messages of what ``INPUT`` has read."""
    if isinstance(items, str):
        items = [{"type": "message", "role": "user", "content": items}]
    chat = _Chat(instructions)
    for item in items:
        chat.add(item)
    return chat.finished()


class _Chat:
    """Puts messages together; the assistant's from items that follow each other."""

    def __init__(self, instructions: str | None) -> None:
        self._messages: list[dict[str, Any]] = []
        if instructions:
            self._messages.append({"role": "system", "content": instructions})
        self._turn: list[Mapping[str, Any]] = []  # items of the assistant's message that is being put together

    def add(self, item: Mapping[str, Any]) -> None:
        """Takes the next item."""
        if item["type"] in ("function_call", "reasoning") or item.get("role") == "assistant":
            if self._turn and not _same_turn(self._turn, item):
                self._finish_turn()
            self._turn.append(item)
            return
        self._finish_turn()
        if item["type"] == "function_call_output":
            answer = {"role": "tool", "tool_call_id": item["call_id"], "content": _joined(item["output"])}
            self._messages.append(answer)
            return
        role = "user" if item["role"] == "user" else "system"
        self._messages.append({"role": role, "content": _joined(item["content"])})

    def finished(self) -> list[dict[str, Any]]:
        """All messages."""
        self._finish_turn()
        return self._messages

    def _finish_turn(self) -> None:
        if self._turn:
            self._messages.append(_assistant(self._turn).to_openai())
            self._turn = []


def _same_turn(turn: Sequence[Mapping[str, Any]], item: Mapping[str, Any]) -> bool:
    """Whether ``item`` belongs to the message that ``turn`` began.

    Without ids: calls come after what was said, and nothing is said behind an unanswered call but in the same message.
    """
    ours, its = _response_of(turn[-1]), _response_of(item)
    if ours is not None and its is not None:
        return ours == its
    last = turn[-1]["type"]
    if item["type"] == "reasoning":
        return bool(last == "reasoning")
    return bool(item["type"] == "function_call" or last != "message")


def _response_of(item: Mapping[str, Any]) -> str | None:
    match = _OURS.fullmatch(item.get("id", ""))
    return None if match is None else match[1]


def _assistant(turn: Sequence[Mapping[str, Any]]) -> AssistantMessage:
    of_type: dict[str, list[Mapping[str, Any]]] = {"message": [], "function_call": [], "reasoning": []}
    for item in turn:
        of_type[item["type"]].append(item)
    return AssistantMessage(
        content="".join(_joined(item["content"]) for item in of_type["message"]),
        reasoning_content="".join(_reasoning(item) for item in of_type["reasoning"]) or None,
        tool_calls=tuple(
            ToolCall(item["call_id"], item["name"], item["arguments"]) for item in of_type["function_call"]
        ),
    )


def _reasoning(item: Mapping[str, Any]) -> str:
    """The reasoning itself; its summary where only that is known."""
    return _joined(item.get("content") or item.get("summary", ()))


def _joined(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in content)

"""Anthropic's content blocks: those that come in become chat messages, a sampled message becomes blocks.

The two are inverse to each other: blocks that come back are the message that was sampled, so that its tokens are reused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from skyrl_train.inference.chat.messages import AssistantMessage, ToolCall
from skyrl_train.inference.dialects.errors import DialectError
from skyrl_train.inference.dialects.fields import Anything, Boolean, Field, ListOf, Mappings, Shape, Support, Text
from skyrl_train.inference.dialects.variants import StringOr, Variants, variant

# Clients hand a thinking block back only with a signature. Nothing is signed here: what comes back is compared with
# what was sampled.
SIGNATURE = "unsigned"

# Anthropic's own way to put arguments that are no JSON object where an object is expected.
_NO_OBJECT = "INVALID_JSON"

_TEXT_ONLY = "this endpoint takes text only"
_CACHE = Field("cache_control", Support.IGNORED, Anything(), "prefixes are cached anyhow")
_CITATIONS = Field("citations", Support.IGNORED, Anything(), "text alone reaches the model")
_CALLER = Field("caller", Support.IGNORED, Anything())
_TOOLSET = Field("toolset_name", Support.IGNORED, Anything())
_TEXT_FIELD = Field("text", Support.SUPPORTED, Text(), required=True)
_TEXT = variant(_TEXT_FIELD, _CITATIONS, _CACHE)
_THINKING = variant(
    Field("thinking", Support.SUPPORTED, Text(), required=True),
    Field("signature", Support.IGNORED, Anything(), "not checked"),
)
_TOOL_USE = variant(
    Field("id", Support.SUPPORTED, Text(min_length=1), required=True),
    Field("name", Support.SUPPORTED, Text(), required=True),
    Field("input", Support.SUPPORTED, Mappings(), required=True),
    _CALLER,
    _TOOLSET,
    _CACHE,
)
TEXT_OR_BLOCKS = StringOr(ListOf(Variants({"text": _TEXT}, _TEXT_ONLY)))
_TOOL_RESULT = variant(
    Field("tool_use_id", Support.SUPPORTED, Text(min_length=1), required=True),
    Field("content", Support.SUPPORTED, TEXT_OR_BLOCKS),
    Field("is_error", Support.IGNORED, Boolean(), "the model reads what the content says"),
    _TOOLSET,
    _CACHE,
)
_BLOCKS = {"text": _TEXT, "thinking": _THINKING, "tool_use": _TOOL_USE, "tool_result": _TOOL_RESULT}
_BLOCKS_OF = {
    "system": frozenset({"text"}),
    "user": frozenset({"text", "tool_result"}),
    "assistant": frozenset({"text", "thinking", "tool_use"}),
}
MESSAGE = Shape(
    (
        Field("role", Support.SUPPORTED, Text(tuple(_BLOCKS_OF)), required=True),
        Field("content", Support.SUPPORTED, StringOr(ListOf(Variants(_BLOCKS, _TEXT_ONLY))), required=True),
    )
)


def chat_messages(system: str | Sequence[Mapping[str, Any]] | None, messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Chat messages of what ``MESSAGE`` and ``TEXT_OR_BLOCKS`` have read.

    Raises:
        DialectError: a block that its role cannot have, or a last message of the assistant.
    """
    chat: list[dict[str, Any]] = [] if not system else [{"role": "system", "content": _joined(system)}]
    for place, message in enumerate(messages):
        param, role, content = f"messages[{place}]", message["role"], message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        _check_blocks(role, blocks, param)
        if role == "assistant":
            chat.append(_assistant(blocks).to_openai())
        elif role == "system":
            chat.append({"role": "system", "content": _joined(blocks)})
        else:
            chat += _user(blocks)
    if messages[-1]["role"] == "assistant":
        raise DialectError(
            "The last message must not be the assistant's: a response always begins anew here, never behind a prefill.",
            f"messages[{len(messages) - 1}].role",
            "unsupported_parameter",
        )
    return chat


def _check_blocks(role: str, blocks: Sequence[Mapping[str, Any]], param: str) -> None:
    for index, block in enumerate(blocks):
        if block["type"] not in _BLOCKS_OF[role]:
            where = f"{param}.content[{index}].type"
            raise DialectError(
                f"{where}: a message of the {role} has no {block['type']} blocks.", where, "invalid_value"
            )


def _joined(content: str | Sequence[Mapping[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(block["text"] for block in content)


def _user(blocks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A message of the user for every run of text, one of the tool for every result, in their order."""
    chat: list[dict[str, Any]] = []
    text: list[Mapping[str, Any]] = []
    for block in blocks:
        if block["type"] == "text":
            text.append(block)
            continue
        if text:
            chat.append({"role": "user", "content": _joined(text)})
            text = []
        content = _joined(block.get("content", ""))
        chat.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": content})
    if text or not chat:
        chat.append({"role": "user", "content": _joined(text)})
    return chat


def _assistant(blocks: Sequence[Mapping[str, Any]]) -> AssistantMessage:
    of_type: dict[str, list[Mapping[str, Any]]] = {"text": [], "thinking": [], "tool_use": []}
    for block in blocks:
        of_type[block["type"]].append(block)
    return AssistantMessage(
        content=_joined(of_type["text"]),
        reasoning_content="".join(block["thinking"] for block in of_type["thinking"]) or None,
        tool_calls=tuple(ToolCall(use["id"], use["name"], _arguments(use["input"])) for use in of_type["tool_use"]),
    )


def _arguments(tool_input: Mapping[str, Any]) -> str:
    unparsed = tool_input.get(_NO_OBJECT)
    if isinstance(unparsed, str) and len(tool_input) == 1:
        return unparsed
    return json.dumps(tool_input, ensure_ascii=False)


def tool_input(arguments: str) -> dict[str, Any]:
    """The arguments of a call as the object that Anthropic's clients expect; inverse to what comes back."""
    try:
        return Mappings().read(orjson.loads(arguments.strip() or "{}"), "arguments")
    except (orjson.JSONDecodeError, DialectError):
        return {_NO_OBJECT: arguments}


def thinking_block(thinking: str) -> dict[str, Any]:
    """What the model thought."""
    return {"type": "thinking", "thinking": thinking, "signature": SIGNATURE if thinking else ""}


def text_block(text: str) -> dict[str, Any]:
    """What the model said."""
    return {"type": "text", "text": text, "citations": None}


def tool_use_block(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call that the model made."""
    return {"type": "tool_use", "id": call_id, "name": name, "input": dict(arguments)}


def content_blocks(message: AssistantMessage) -> list[dict[str, Any]]:
    """A sampled message as blocks; none where nothing can be seen of it."""
    return [
        *([thinking_block(message.reasoning_content)] if message.reasoning_content else []),
        *([text_block(message.content)] if message.content else []),
        *(tool_use_block(call.id, call.name, tool_input(call.arguments)) for call in message.tool_calls),
    ]

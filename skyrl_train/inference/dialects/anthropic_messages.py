"""Anthropic's messages: ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_train.inference.chat.requests import ChatRequest, ChatResult
from skyrl_train.inference.dialects.anthropic_messages_blocks import MESSAGE, TEXT_OR_BLOCKS, chat_messages
from skyrl_train.inference.dialects.anthropic_messages_output import MessagesStream, anthropic_error, message_body
from skyrl_train.inference.dialects.dialect import ResponseContext
from skyrl_train.inference.dialects.errors import DialectError
from skyrl_train.inference.dialects.fields import (
    Anything,
    Boolean,
    Exactly,
    Field,
    Integer,
    ListOf,
    Mappings,
    Number,
    Shape,
    Support,
    Text,
    read_fields,
)
from skyrl_train.inference.dialects.openai_fields import EXTENSION_FIELDS, MAX_TOKENS, MODEL, sampling_params
from skyrl_train.inference.dialects.variants import Variants, variant
from skyrl_train.inference.interface import SamplingParams, StructuredOutput

_CACHED = "prefixes are cached anyhow"
_NO_CHOICE = "nothing here can force a call, so that auto and none are all; ask for the call in a message"
_ONE_CALL = "nothing here can keep a model to one call per answer"
_DISPLAY = Field("display", Support.NEUTRAL, Exactly(("summarized",)), "reasoning is always shown, and shown whole")

_THINKING = Variants(
    {
        "enabled": variant(Field("budget_tokens", Support.IGNORED, Integer(), "max_tokens bounds it all"), _DISPLAY),
        "disabled": variant(),
        "adaptive": variant(_DISPLAY),
    },
    "a chat template knows no other switch",
)
_ENABLE_THINKING = {"enabled": {"enable_thinking": True}, "disabled": {"enable_thinking": False}, "adaptive": {}}

_TOOL_CHOICE = Variants(
    {
        "auto": variant(Field("disable_parallel_tool_use", Support.NEUTRAL, Exactly((False,)), _ONE_CALL)),
        "none": variant(),
    },
    _NO_CHOICE,
)
_TOOL = Variants(
    {
        "custom": variant(
            Field("name", Support.SUPPORTED, Text(min_length=1), required=True),
            Field("description", Support.SUPPORTED, Text()),
            Field("input_schema", Support.SUPPORTED, Mappings(), required=True),
            Field("strict", Support.IGNORED, Anything(), "nothing is enforced"),
            Field("cache_control", Support.IGNORED, Anything(), _CACHED),
            Field("eager_input_streaming", Support.IGNORED, Anything(), "the input comes in one piece"),
            Field("allowed_callers", Support.NEUTRAL, Exactly((["direct"],)), "no code is run here"),
            Field("defer_loading", Support.NEUTRAL, Exactly((False,)), "there is no tool search"),
            Field("input_examples", Support.NEUTRAL, Exactly(([],)), "chat templates do not show them"),
        )
    },
    "only tools with an input_schema that the caller runs are served",
    default="custom",
)
_FORMAT = Variants(
    {"json_schema": variant(Field("schema", Support.SUPPORTED, Mappings(), required=True))},
    "text needs no format",
)
_OUTPUT_CONFIG = Shape(
    (
        Field("effort", Support.SUPPORTED, Text(("low", "medium", "high", "xhigh", "max"))),
        Field("format", Support.SUPPORTED, _FORMAT),
    )
)

_KEEP_ALL: tuple[dict[str, Any], ...] = (
    {},
    {"edits": []},
    {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
)

# What counting tokens takes, and messages too.
_PROMPT_FIELDS = (
    MODEL,
    Field(
        "messages",
        Support.SUPPORTED,
        ListOf(MESSAGE, min_items=1),
        "text, tool_use, tool_result and thinking blocks; the last message is not the assistant's",
        required=True,
    ),
    Field("system", Support.SUPPORTED, TEXT_OR_BLOCKS, "text blocks are joined"),
    Field("tools", Support.SUPPORTED, ListOf(_TOOL, max_items=128), "those with an input_schema"),
    Field("tool_choice", Support.SUPPORTED, _TOOL_CHOICE, "auto and none"),
    Field(
        "thinking",
        Support.SUPPORTED,
        _THINKING,
        "enabled and disabled set enable_thinking of the chat template; budget_tokens has no effect",
    ),
    Field(
        "output_config",
        Support.SUPPORTED,
        _OUTPUT_CONFIG,
        "effort is an argument of the chat template; format where the engines can be guided",
    ),
    Field("cache_control", Support.IGNORED, Anything(), _CACHED),
    Field("speed", Support.NEUTRAL, Exactly(("standard",)), "there is one speed"),
    Field(
        "chat_template_kwargs",
        Support.SUPPORTED,
        Mappings(),
        "further arguments of the chat template, such as enable_thinking",
    ),
)

FIELDS = (
    *_PROMPT_FIELDS,
    Field("max_tokens", Support.SUPPORTED, Integer(1, MAX_TOKENS), "reasoning included", required=True),
    Field(
        "stop_sequences",
        Support.SUPPORTED,
        ListOf(Text(min_length=1), max_items=16),
        "the text ends before the sequence; its tokens stay in the training data",
    ),
    Field("temperature", Support.SUPPORTED, Number(minimum=0, maximum=2), "0 is greedy; default 1"),
    Field("top_p", Support.SUPPORTED, Number(above=0, maximum=1), "default 1"),
    Field("stream", Support.SUPPORTED, Boolean(), "server-sent events"),
    Field("metadata", Support.IGNORED, Anything(), "sessions are named by the key"),
    Field("service_tier", Support.IGNORED, Anything(), "there is one"),
    Field("container", Support.REFUSED, Anything(), "no code is run here"),
    Field("context_management", Support.NEUTRAL, Exactly(_KEEP_ALL), "history is never rewritten here"),
    Field("diagnostics", Support.REFUSED, Anything(), "there is nothing to diagnose"),
    Field("inference_geo", Support.REFUSED, Anything(), "the engines are where they are"),
    Field("mcp_servers", Support.REFUSED, Anything(), "tools are the caller's"),
    Field("user_profile_id", Support.IGNORED, Anything(), "as metadata"),
    Field("workspace_id", Support.IGNORED, Anything(), "as metadata"),
    Field("seed", Support.SUPPORTED, Integer(), "the same seed samples the same tokens from the same policy version"),
    *EXTENSION_FIELDS,
)

COUNT_FIELDS = _PROMPT_FIELDS


def parse(body: Mapping[str, Any]) -> MessagesCall:
    """Reads a body.

    Raises:
        DialectError: the body is wrong, or asks for what is not supported.
    """
    values = read_fields(FIELDS, body)
    sampled = {**values, "stop": values.get("stop_sequences", ())}
    params = sampling_params(sampled, values["max_tokens"], structured=_structured(values))
    return MessagesCall(
        model=values["model"],
        request=_request(values, params, values["max_tokens"]),
        streamed=values.get("stream", False),
        token_ids=values.get("return_token_ids", False),
    )


def parse_count(body: Mapping[str, Any]) -> MessagesCall:
    """Reads the body of a request to count tokens; the prompt of its request is what counts.

    Raises:
        DialectError: the body is wrong, or asks for what is not supported.
    """
    values = read_fields(COUNT_FIELDS, body)
    return MessagesCall(model=values["model"], request=_request(values, SamplingParams(), None))


def count_response(prompt_tokens: int) -> dict[str, Any]:
    """The body that answers a request to count tokens."""
    return {"input_tokens": prompt_tokens}


def error(error: DialectError) -> dict[str, Any]:
    """The body of an error response, and of an error event inside a stream."""
    return anthropic_error(error)


def _request(values: Mapping[str, Any], params: SamplingParams, max_tokens: int | None) -> ChatRequest:
    return ChatRequest(
        messages=tuple(chat_messages(values.get("system"), values["messages"])),
        params=params,
        max_tokens=max_tokens,
        tools=tuple(_openai_tool(tool) for tool in values.get("tools", ())),
        tool_choice=values.get("tool_choice", {"type": "auto"})["type"],
        template_kwargs=_template_kwargs(values),
    )


def _structured(values: Mapping[str, Any]) -> StructuredOutput | None:
    output_format = values.get("output_config", {}).get("format")
    return None if output_format is None else StructuredOutput("json_schema", json.dumps(output_format["schema"]))


def _template_kwargs(values: Mapping[str, Any]) -> dict[str, Any]:
    effort = values.get("output_config", {}).get("effort")
    return {
        **({} if effort is None else {"reasoning_effort": effort}),
        **_ENABLE_THINKING[values.get("thinking", {"type": "adaptive"})["type"]],
        **values.get("chat_template_kwargs", {}),
    }


def _openai_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    described = {"description": tool["description"]} if "description" in tool else {}
    return {"type": "function", "function": {"name": tool["name"], **described, "parameters": tool["input_schema"]}}


@dataclass(frozen=True, slots=True)
class MessagesCall:
    """A parsed body. ``token_ids``: the caller wants the ``skyrl`` object."""

    model: str
    request: ChatRequest
    streamed: bool = False
    token_ids: bool = False

    def response(self, result: ChatResult, context: ResponseContext) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        return message_body(self.model, result, context, self.token_ids)

    def stream(self, context: ResponseContext) -> MessagesStream:
        """The translator of one streamed response."""
        return MessagesStream(self.model, context, self.token_ids)

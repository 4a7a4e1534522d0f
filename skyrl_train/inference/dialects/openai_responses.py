"""OpenAI's responses: ``POST /v1/responses``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_train.inference.chat.messages import AssistantMessage
from skyrl_train.inference.chat.requests import ChatRequest, ChatResult
from skyrl_train.inference.dialects.dialect import ResponseContext
from skyrl_train.inference.dialects.errors import DialectError, openai_error
from skyrl_train.inference.dialects.fields import (
    Anything,
    Boolean,
    Exactly,
    Field,
    Integer,
    ListOf,
    Mappings,
    Number,
    OneOrMany,
    Shape,
    Support,
    Text,
    read_fields,
)
from skyrl_train.inference.dialects.openai_fields import (
    EXTENSION_FIELDS,
    MAX_STOPS,
    MAX_TOKENS,
    MAX_TOP_LOGPROBS,
    MODEL,
    sampling_params,
)
from skyrl_train.inference.dialects.openai_messages import ToolChoice
from skyrl_train.inference.dialects.openai_responses_items import INPUT, chat_messages
from skyrl_train.inference.dialects.openai_responses_output import ResponseBody, SampledTokens, output_items
from skyrl_train.inference.dialects.openai_responses_stream import ResponsesStream
from skyrl_train.inference.dialects.variants import Variants, variant
from skyrl_train.inference.interface import StructuredOutput

_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (
    _LOGPROBS,
    "reasoning.encrypted_content",  # reasoning comes in the clear
    # The others are about tools that never run here.
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
_TOOL = Variants(
    {
        "function": variant(
            Field("name", Support.SUPPORTED, Text(min_length=1), required=True),
            Field("description", Support.SUPPORTED, Text()),
            Field("parameters", Support.SUPPORTED, Mappings()),
            Field("strict", Support.SUPPORTED, Boolean(), "repeated in the response; nothing is enforced"),
            Field("async", Support.NEUTRAL, Exactly((False,)), "calls are answered in their turn"),
            Field("allowed_callers", Support.NEUTRAL, Exactly((["direct"],)), "no code is run here"),
            Field("defer_loading", Support.NEUTRAL, Exactly((False,)), "there is no tool search"),
            Field("output_schema", Support.IGNORED, Anything(), "outputs are text to the model"),
        )
    },
    "only functions that the caller runs are served",
)
_FORMAT = Variants(
    {
        "text": variant(),
        "json_object": variant(),
        "json_schema": variant(
            Field("name", Support.SUPPORTED, Text(min_length=1), required=True),
            Field("schema", Support.SUPPORTED, Mappings(), required=True),
            Field("description", Support.SUPPORTED, Text(), "the model sees the messages only"),
            Field("strict", Support.SUPPORTED, Boolean(), "the schema is always kept"),
        ),
    },
    "there are no other formats",
)
_TEXT = Shape(
    (
        Field("format", Support.SUPPORTED, _FORMAT),
        Field("verbosity", Support.NEUTRAL, Exactly(("medium",)), "ask for it in a message"),
    )
)
_REASONING = Shape(
    (
        Field("effort", Support.SUPPORTED, Text(("none", "minimal", "low", "medium", "high", "xhigh", "max"))),
        Field("summary", Support.IGNORED, Anything(), "reasoning is given whole"),
        Field("generate_summary", Support.IGNORED, Anything(), "reasoning is given whole"),
        Field("context", Support.NEUTRAL, Exactly(("auto", "all_turns")), "earlier turns stay as they were sampled"),
        Field("mode", Support.NEUTRAL, Exactly(("standard",)), "there is one"),
    )
)
_STREAM_OPTIONS = Shape((Field("include_obfuscation", Support.IGNORED, Anything(), "nothing is padded"),))


@dataclass(frozen=True, slots=True)
class Metadata:
    """An object of strings."""

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": {"type": "string"}}

    def read(self, value: Any, param: str) -> dict[str, str]:
        if not isinstance(value, dict) or not all(isinstance(entry, str) for entry in value.values()):
            raise DialectError(f"{param} must be an object of strings.", param, "invalid_type")
        return value


FIELDS = (
    MODEL,
    Field(
        "input",
        Support.SUPPORTED,
        INPUT,
        "a string, or messages (text only), function calls with their outputs, and reasoning",
        required=True,
    ),
    Field("instructions", Support.SUPPORTED, Text(), "the system message of this response alone"),
    Field(
        "previous_response_id",
        Support.SUPPORTED,
        Text(min_length=1),
        "a stored response of the same session; it takes a session",
    ),
    Field("store", Support.SUPPORTED, Boolean(), "for previous_response_id, within a session; default true"),
    Field("max_output_tokens", Support.SUPPORTED, Integer(1, MAX_TOKENS), "default: what the context leaves"),
    Field("temperature", Support.SUPPORTED, Number(minimum=0, maximum=2), "0 is greedy; default 1"),
    Field("top_p", Support.SUPPORTED, Number(above=0, maximum=1), "default 1"),
    Field("stream", Support.SUPPORTED, Boolean(), "server-sent events"),
    Field("stream_options", Support.SUPPORTED, _STREAM_OPTIONS, "only with stream"),
    Field("tools", Support.SUPPORTED, ListOf(_TOOL, max_items=128), "functions only"),
    Field("tool_choice", Support.SUPPORTED, ToolChoice(), "auto and none"),
    Field(
        "parallel_tool_calls", Support.NEUTRAL, Exactly((True,)), "nothing here can keep a model to one call per answer"
    ),
    Field(
        "text",
        Support.SUPPORTED,
        _TEXT,
        "format: text; json_object and json_schema where the engines can be guided",
    ),
    Field(
        "reasoning",
        Support.SUPPORTED,
        _REASONING,
        "effort is an argument of the chat template; none also sets enable_thinking to false",
    ),
    Field("include", Support.SUPPORTED, ListOf(Text(_INCLUDABLE)), f"{_LOGPROBS}; the others have nothing to add"),
    Field(
        "top_logprobs",
        Support.SUPPORTED,
        Integer(0, MAX_TOP_LOGPROBS),
        f"needs {_LOGPROBS} in include, and engines that have them",
    ),
    Field("metadata", Support.SUPPORTED, Metadata(), "repeated in the response"),
    Field("truncation", Support.NEUTRAL, Exactly(("disabled",)), "history is never rewritten here"),
    Field("background", Support.NEUTRAL, Exactly((False,)), "a response is awaited or streamed"),
    Field("max_tool_calls", Support.IGNORED, Anything(), "it counts calls of built-in tools"),
    Field("service_tier", Support.IGNORED, Anything(), "there is one"),
    Field("safety_identifier", Support.IGNORED, Anything(), "sessions are named by the key"),
    Field("user", Support.IGNORED, Anything(), "as safety_identifier"),
    Field("prompt_cache_key", Support.IGNORED, Anything(), "requests of a session share an engine's cache"),
    Field("prompt_cache_options", Support.IGNORED, Anything(), "as prompt_cache_key"),
    Field("prompt_cache_retention", Support.IGNORED, Anything(), "as prompt_cache_key"),
    Field("access_programs", Support.REFUSED, Anything(), "there are none"),
    Field("background_options", Support.REFUSED, Anything(), "as background"),
    Field("context_management", Support.REFUSED, Anything(), "history is never rewritten here"),
    Field("conversation", Support.REFUSED, Anything(), "use previous_response_id"),
    Field("image", Support.REFUSED, Anything(), "this endpoint takes text only"),
    Field("moderation", Support.REFUSED, Anything(), "nothing is moderated"),
    Field("prompt", Support.REFUSED, Anything(), "no templates are stored"),
    Field("stop", Support.SUPPORTED, OneOrMany(ListOf(Text(min_length=1), max_items=MAX_STOPS)), "as chat has it"),
    Field("seed", Support.SUPPORTED, Integer(), "the same seed samples the same tokens from the same policy version"),
    *EXTENSION_FIELDS,
    Field(
        "chat_template_kwargs",
        Support.SUPPORTED,
        Mappings(),
        "further arguments of the chat template, such as enable_thinking",
    ),
)


def parse(body: Mapping[str, Any]) -> ResponsesCall:
    """Reads a body.

    Raises:
        DialectError: the body is wrong, or asks for what is not supported.
    """
    values = read_fields(FIELDS, body)
    logprobs = _LOGPROBS in values.get("include", ())
    if values.get("top_logprobs") and not logprobs:
        raise DialectError(f"top_logprobs needs {_LOGPROBS!r} in include.", "top_logprobs", "invalid_value")
    if "stream_options" in values and not values.get("stream"):
        raise DialectError("stream_options is only allowed with stream: true.", "stream_options", "invalid_value")
    max_tokens = values.get("max_output_tokens")
    params = sampling_params(
        values, max_tokens, top_logprobs=values.get("top_logprobs", 0), structured=_structured(values)
    )
    request = ChatRequest(
        messages=tuple(chat_messages(values.get("instructions"), values["input"])),
        params=params,
        max_tokens=max_tokens,
        tools=tuple(_openai_tool(tool) for tool in values.get("tools", ())),
        tool_choice=values.get("tool_choice", "auto"),
        template_kwargs=_template_kwargs(values),
        logprobs=logprobs,
    )
    return ResponsesCall(
        model=values["model"],
        request=request,
        streamed=values.get("stream", False),
        token_ids=values.get("return_token_ids", False),
        previous_response_id=values.get("previous_response_id"),
        store=values.get("store", True),
        instructions=values.get("instructions"),
        echo=_echo(values),
    )


def error(error: DialectError) -> dict[str, Any]:
    """The body of an error response."""
    return openai_error(error)


def _structured(values: Mapping[str, Any]) -> StructuredOutput | None:
    text_format = values.get("text", {}).get("format", {"type": "text"})
    if text_format["type"] == "json_schema":
        return StructuredOutput("json_schema", json.dumps(text_format["schema"]))
    return StructuredOutput("json_object") if text_format["type"] == "json_object" else None


def _template_kwargs(values: Mapping[str, Any]) -> dict[str, Any]:
    effort = values.get("reasoning", {}).get("effort")
    return {
        **({} if effort is None else {"reasoning_effort": effort}),
        **({"enable_thinking": False} if effort == "none" else {}),
        **values.get("chat_template_kwargs", {}),
    }


def _openai_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Chat's shape. ``strict`` stays away: no template knows it."""
    described = {"description": tool["description"]} if "description" in tool else {}
    parameters = tool.get("parameters", {"type": "object", "properties": {}})
    return {"type": "function", "function": {"name": tool["name"], **described, "parameters": parameters}}


def _echo(values: Mapping[str, Any]) -> dict[str, Any]:
    tools = [{"description": None, "parameters": None, "strict": None, **tool} for tool in values.get("tools", ())]
    return {
        "background": False,
        "max_output_tokens": values.get("max_output_tokens"),
        "metadata": values.get("metadata", {}),
        "parallel_tool_calls": True,
        "reasoning": {"effort": values.get("reasoning", {}).get("effort"), "summary": None},
        "temperature": values.get("temperature", 1.0),
        "text": {"format": values.get("text", {}).get("format", {"type": "text"})},
        "tool_choice": values.get("tool_choice", "auto"),
        "tools": tools,
        "top_logprobs": values.get("top_logprobs", 0),
        "top_p": values.get("top_p", 1.0),
        "truncation": "disabled",
    }


@dataclass(frozen=True, slots=True)
class ResponsesCall:
    """A parsed body.

    Args:
        token_ids: the caller wants the ``skyrl`` object.
        previous_response_id: the response that ``request`` goes on from, once ``behind`` has put its messages in.
        store: whether a later request may go on from this one.
        instructions: a system message that such a request does not see.
        echo: fields of the response that repeat the request.
    """

    model: str
    request: ChatRequest
    streamed: bool = False
    token_ids: bool = False
    previous_response_id: str | None = None
    store: bool = True
    instructions: str | None = None
    echo: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def behind(self, history: Sequence[Mapping[str, Any]]) -> ResponsesCall:
        """The same call with earlier messages (without their instructions) before its own."""
        instructions, own = self._parted()
        request = dataclasses.replace(self.request, messages=(*instructions, *history, *own))
        return dataclasses.replace(self, request=request)

    def conversation(self, answer: AssistantMessage) -> tuple[Mapping[str, Any], ...]:
        """What a later request that names this response begins with."""
        return (*self._parted()[1], answer.to_openai())

    def response(self, result: ChatResult, context: ResponseContext) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        choice, sampled = result.choices[0], self._sampled(context)
        if sampled is not None:
            generation = choice.generation
            sampled.add(generation.token_ids, generation.logprobs, generation.top_logprobs)
        output = output_items(choice, context.unique, sampled)
        return self._body(context).ended(choice, output, result.reused_tokens)

    def stream(self, context: ResponseContext) -> ResponsesStream:
        """The translator of one streamed response."""
        return ResponsesStream(self._body(context), self._sampled(context))

    def _parted(self) -> tuple[tuple[Mapping[str, Any], ...], tuple[Mapping[str, Any], ...]]:
        """The message of the instructions, if there is one, and the others."""
        count = 1 if self.instructions else 0
        return self.request.messages[:count], self.request.messages[count:]

    def _body(self, context: ResponseContext) -> ResponseBody:
        echo = {
            **self.echo,
            "instructions": self.instructions,
            "previous_response_id": self.previous_response_id,
            "store": self.store,
        }
        return ResponseBody(self.model, echo, self.token_ids, context)

    def _sampled(self, context: ResponseContext) -> SampledTokens | None:
        return SampledTokens(context.tokens) if self.request.logprobs else None

"""Anthropic's messages: ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``.

Request blocks become chat messages, and a sampled message becomes blocks. The two conversions are inverse to each other:
blocks that a client sends back give the message that was sampled, so that its tokens are reused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, Tag

from skyrl_train.inference.chat.requests import (
    AssistantMessage,
    ChatChoice,
    ChatEvent,
    ChatRequest,
    ChatResult,
    ToolCall,
)
from skyrl_train.inference.grammar import schema_text
from skyrl_train.inference.interface import SamplingParams, StructuredOutput
from skyrl_train.inference.openai.body import (
    SEED_NOTE,
    TEXT_OR_LIST,
    GenerationBody,
    JsonObject,
    NonEmpty,
    RequestBody,
    TokenCount,
    Unsupported,
    Whole,
    check_depth,
    ignored,
    only,
    template_arguments,
    variants,
)
from skyrl_train.inference.openai.dialect import Frame, ResponseContext, training_data
from skyrl_train.inference.openai.errors import DialectError
from skyrl_train.inference.openai.messages import check_prefill, function_tool
from skyrl_train.inference.requests import Generation

# SDKs send a thinking block back only with a signature. Nothing is signed here: the block is compared with the sampled one.
SIGNATURE = "unsigned"

_UNPARSED = "INVALID_JSON"  # Anthropic's key for arguments that are not a JSON object
_CACHED = "prefixes are always cached"
_TEXT_ONLY = "this endpoint takes text only"
_SHOWN = "reasoning is always shown, and shown whole"

# Request bodies ---------------------------------------------------------------------------------------------------


class TextBlock(RequestBody):
    """Text of any role."""

    type: Annotated[Literal["text"], only("text", _TEXT_ONLY)]
    text: str
    citations: Any = ignored("text alone reaches the model")
    cache_control: Any = ignored(_CACHED)


class ThinkingBlock(RequestBody):
    """Reasoning of the assistant."""

    type: Literal["thinking"]
    thinking: str
    signature: Any = ignored("not checked")


class ToolUseBlock(RequestBody):
    """A tool call of the assistant."""

    type: Literal["tool_use"]
    id: NonEmpty
    name: str
    input: JsonObject
    caller: Any = ignored()
    toolset_name: Any = ignored()
    cache_control: Any = ignored(_CACHED)


TextOrBlocks = Annotated[Annotated[str, Tag("=text")] | Annotated[list[TextBlock], Tag("=list")], TEXT_OR_LIST]


class ToolResultBlock(RequestBody):
    """The result of a tool call, in a message of the user."""

    type: Literal["tool_result"]
    tool_use_id: NonEmpty
    content: TextOrBlocks | None = None
    is_error: Any = ignored("the model reads what the content says")
    toolset_name: Any = ignored()
    cache_control: Any = ignored(_CACHED)


Block = Annotated[
    Annotated[TextBlock, Tag("=text")]
    | Annotated[ThinkingBlock, Tag("=thinking")]
    | Annotated[ToolUseBlock, Tag("=tool_use")]
    | Annotated[ToolResultBlock, Tag("=tool_result")],
    variants("type", f"text, thinking, tool_use or tool_result: {_TEXT_ONLY}"),
]
# Checked after validation: one union of blocks for all roles keeps the schema small and the error specific.
_BLOCKS_OF = {
    "system": frozenset({"text"}),
    "user": frozenset({"text", "tool_result"}),
    "assistant": frozenset({"text", "thinking", "tool_use"}),
}


class Message(RequestBody):
    """One message of the conversation."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[Annotated[str, Tag("=text")] | Annotated[list[Block], Tag("=list")], TEXT_OR_LIST]


class MessagesTool(RequestBody):
    """A tool that the caller runs."""

    type: Annotated[
        Literal["custom"] | None, only("custom", "only tools with an input_schema that the caller runs are served")
    ] = None
    name: NonEmpty
    description: str | None = None
    input_schema: JsonObject
    strict: Any = ignored("forced calls follow the schema in any case")
    cache_control: Any = ignored(_CACHED)
    eager_input_streaming: Any = ignored("the input comes in one piece")
    allowed_callers: Annotated[Any, Unsupported("no code is run here", ["direct"])] = None
    defer_loading: Annotated[Any, Unsupported("there is no tool search", False)] = None
    input_examples: Annotated[Any, Unsupported("chat templates do not show them", [])] = None


class ToolChoiceAuto(RequestBody):
    """The model decides whether to call tools."""

    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = None


class ToolChoiceAny(RequestBody):
    """The model has to call a tool."""

    type: Literal["any"]
    disable_parallel_tool_use: Any = ignored("a forced call is the only one")


class ToolChoiceTool(RequestBody):
    """The model has to call this tool."""

    type: Literal["tool"]
    name: NonEmpty
    disable_parallel_tool_use: Any = ignored("a forced call is the only one")


class ToolChoiceNone(RequestBody):
    """The model does not see the tools."""

    type: Literal["none"]


class ThinkingEnabled(RequestBody):
    """The model thinks first."""

    type: Literal["enabled"]
    budget_tokens: Any = ignored("max_tokens bounds it all")
    display: Annotated[Any, Unsupported(_SHOWN, "summarized")] = None


class ThinkingDisabled(RequestBody):
    """The model does not think first."""

    type: Literal["disabled"]


class ThinkingAdaptive(RequestBody):
    """The chat template decides."""

    type: Literal["adaptive"]
    display: Annotated[Any, Unsupported(_SHOWN, "summarized")] = None


class OutputFormat(RequestBody):
    """A JSON schema that the response follows."""

    type: Literal["json_schema"]
    json_schema: JsonObject = Field(alias="schema")


class OutputConfig(RequestBody):
    """Effort and format of the response."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


_TOOL_CHOICES: dict[str, Literal["auto", "none", "required"]] = {
    "auto": "auto",
    "none": "none",
    "any": "required",
    "tool": "required",
}


class CountTokensBody(RequestBody):
    """The body of ``POST /v1/messages/count_tokens``: the fields that determine the prompt."""

    model: NonEmpty = Field(description="a name that GET /v1/models lists")
    messages: Annotated[list[Message], Field(min_length=1)] = Field(
        description="text, tool_use, tool_result and thinking blocks; a last message of the assistant is continued"
    )
    system: TextOrBlocks | None = Field(None, description="text blocks are joined")
    tools: Annotated[list[MessagesTool], Field(max_length=128)] | None = Field(
        None, description="those with an input_schema"
    )
    tool_choice: (
        Annotated[
            Annotated[ToolChoiceAuto, Tag("=auto")]
            | Annotated[ToolChoiceAny, Tag("=any")]
            | Annotated[ToolChoiceTool, Tag("=tool")]
            | Annotated[ToolChoiceNone, Tag("=none")],
            variants("type", "auto, any, tool or none"),
        ]
        | None
    ) = Field(
        None, description="auto, none, any (one call) or a tool by name; forced calls where the engines can be guided"
    )
    thinking: (
        Annotated[
            Annotated[ThinkingEnabled, Tag("=enabled")]
            | Annotated[ThinkingDisabled, Tag("=disabled")]
            | Annotated[ThinkingAdaptive, Tag("=adaptive")],
            variants("type", "enabled, disabled or adaptive: chat templates have no other switch"),
        ]
        | None
    ) = Field(
        None,
        description="enabled and disabled set enable_thinking of the chat template; budget_tokens has no effect",
    )
    output_config: OutputConfig | None = Field(
        None, description="effort is an argument of the chat template; format where the engines can be guided"
    )
    cache_control: Any = ignored(_CACHED)
    speed: Annotated[Any, Unsupported("there is one speed", "standard")] = None
    chat_template_kwargs: JsonObject | None = Field(
        None, description="further arguments of the chat template, such as enable_thinking"
    )

    def chat_request(self, params: SamplingParams, max_tokens: int | None) -> ChatRequest:
        """Return the request in the form that the chat service takes.

        Raises:
            DialectError: a block that its role cannot have, or a last message that cannot be continued.
        """
        messages = chat_messages(self.system, self.messages)
        continue_final = self.messages[-1].role == "assistant"
        if continue_final:
            check_prefill(messages[-1], f"messages[{len(self.messages) - 1}]")
        # Chat templates take effort and thinking as arguments; the client's own arguments come last and win.
        effort = None if self.output_config is None else self.output_config.effort
        thinking = {}
        if self.thinking is not None and self.thinking.type != "adaptive":
            thinking = {"enable_thinking": self.thinking.type == "enabled"}
        return ChatRequest(
            messages=tuple(messages),
            params=params,
            max_tokens=max_tokens,
            tools=tuple(function_tool(tool.name, tool.description, tool.input_schema) for tool in self.tools or ()),
            tool_choice=_TOOL_CHOICES["auto" if self.tool_choice is None else self.tool_choice.type],
            allowed_tools=(self.tool_choice.name,) if isinstance(self.tool_choice, ToolChoiceTool) else None,
            single_call=isinstance(self.tool_choice, ToolChoiceAuto)
            and bool(self.tool_choice.disable_parallel_tool_use),
            template_kwargs=template_arguments(effort, {**thinking, **(self.chat_template_kwargs or {})}),
            continue_final=continue_final,
        )


# Values of context_management that leave the conversation as it is.
_KEEP_ALL: tuple[dict[str, Any], ...] = (
    {},
    {"edits": []},
    {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
)


class MessagesBody(GenerationBody, CountTokensBody):
    """The body of ``POST /v1/messages``."""

    FORMAT_FIELD = "output_config.format"

    max_tokens: TokenCount = Field(description="reasoning included")
    stop_sequences: Annotated[list[NonEmpty], Field(max_length=16)] | None = Field(
        None, description="the text ends before the sequence; its tokens stay in the training data"
    )
    stream: bool | None = Field(None, description="server-sent events")
    seed: Annotated[int, Whole()] | None = Field(None, description=SEED_NOTE)
    metadata: Any = ignored("sessions are named by the key")
    service_tier: Any = ignored("there is one")
    user_profile_id: Any = ignored("as metadata")
    workspace_id: Any = ignored("as metadata")
    context_management: Annotated[Any, Unsupported("history is never rewritten here", *_KEEP_ALL)] = None
    container: Annotated[Any, Unsupported("no code is run here")] = None
    diagnostics: Annotated[Any, Unsupported("there is nothing to diagnose")] = None
    betas: Any = ignored("every field is always there")
    billing_policy: Any = ignored("nothing is billed")
    fallbacks: Any = ignored("a response is never declined")
    fallback_credit_token: Any = ignored("nothing is billed")
    compaction: Annotated[Any, Unsupported("history is never rewritten here")] = None
    thread: Annotated[Any, Unsupported("send all messages")] = None
    inference_geo: Annotated[Any, Unsupported("the engines are where they are")] = None
    mcp_servers: Annotated[Any, Unsupported("tools are the caller's")] = None


def parse(body: Mapping[str, Any]) -> MessagesCall:
    """Validate the body of a request for a message.

    Raises:
        DialectError: the body is invalid or asks for something unsupported; ``param`` names the field.
    """
    read = MessagesBody.parse(body)
    structured = None
    if read.output_config is not None and read.output_config.format is not None:
        text = schema_text(read.output_config.format.json_schema, strict=True)
        structured = StructuredOutput("json_schema", text)
    params = read.sampling_params(
        read.max_tokens,
        seed=read.seed,
        stop=tuple(read.stop_sequences or ()),
        structured=read.structured(structured),
    )
    return MessagesCall(
        model=read.model,
        request=replace(read.chat_request(params, read.max_tokens), grammar_field=read.grammar_field),
        streamed=bool(read.stream),
        token_ids=bool(read.return_token_ids),
    )


def parse_count(body: Mapping[str, Any]) -> MessagesCall:
    """Validate the body of a request to count tokens; the prompt of the returned call is to be counted.

    Raises:
        DialectError: as for :func:`parse`.
    """
    read = CountTokensBody.parse(body)
    return MessagesCall(model=read.model, request=read.chat_request(SamplingParams(), None))


# Blocks and chat messages -----------------------------------------------------------------------------------------


def chat_messages(system: str | list[TextBlock] | None, messages: list[Message]) -> list[dict[str, Any]]:
    """Convert a validated conversation into OpenAI's chat messages.

    Raises:
        DialectError: a block that its role cannot have.
    """
    chat: list[dict[str, Any]] = [] if not system else [{"role": "system", "content": _joined(system)}]
    for index, message in enumerate(messages):
        role, content = message.role, message.content
        blocks: list[Any] = [TextBlock(type="text", text=content)] if isinstance(content, str) else content
        for place, block in enumerate(blocks):
            if block.type not in _BLOCKS_OF[role]:
                param = f"messages[{index}].content[{place}].type"
                raise DialectError(
                    f"{param}: a message of the {role} has no {block.type} blocks.", param, "invalid_value"
                )
        if role == "assistant":
            chat.append(_assistant(blocks).to_openai())
        elif role == "system":
            chat.append({"role": "system", "content": _joined(blocks)})
        else:
            chat += _user(blocks)
    return chat


def _joined(content: str | list[Any]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _user(blocks: list[Any]) -> list[dict[str, Any]]:
    """Return one user message per run of text blocks and one tool message per result, in their order."""
    chat: list[dict[str, Any]] = []
    text: list[TextBlock] = []  # text blocks since the last tool result
    for block in blocks:
        if block.type == "text":
            text.append(block)
            continue
        if text:
            chat.append({"role": "user", "content": _joined(text)})
            text = []
        chat.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _joined(block.content or "")})
    if text or not chat:
        chat.append({"role": "user", "content": _joined(text)})
    return chat


def _assistant(blocks: list[Any]) -> AssistantMessage:
    calls = []
    for block in blocks:
        if block.type == "tool_use":
            # The inverse of tool_input: arguments that were no object come back unchanged.
            unparsed = block.input.get(_UNPARSED)
            is_text = isinstance(unparsed, str) and len(block.input) == 1
            arguments = unparsed if is_text else json.dumps(block.input, ensure_ascii=False)
            calls.append(ToolCall(block.id, block.name, str(arguments)))
    return AssistantMessage(
        content=_joined([block for block in blocks if block.type == "text"]),
        reasoning_content="".join(block.thinking for block in blocks if block.type == "thinking") or None,
        tool_calls=tuple(calls),
    )


def tool_input(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as the object that Anthropic's clients expect."""
    try:
        text = arguments.strip() or "{}"
        orjson.loads(text)  # refuses NaN and half surrogate pairs, and rounds long integers
        parsed = json.loads(text)
        return check_depth(parsed) if isinstance(parsed, dict) else {_UNPARSED: arguments}
    except (ValueError, RecursionError):  # not JSON, or nested too deep
        return {_UNPARSED: arguments}


def content_blocks(message: AssistantMessage) -> list[dict[str, Any]]:
    """Convert a sampled message into blocks."""
    blocks: list[dict[str, Any]] = []
    if message.reasoning_content:
        blocks.append(_thinking_block(message.reasoning_content))
    if message.content:
        blocks.append(_text_block(message.content))
    blocks += (
        {"type": "tool_use", "id": call.id, "name": call.name, "input": tool_input(call.arguments)}
        for call in message.tool_calls
    )
    return blocks


def _thinking_block(thinking: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": thinking, "signature": SIGNATURE if thinking else ""}


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": None}


# Responses --------------------------------------------------------------------------------------------------------

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_NO_USAGE = {
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 0,
    "input_tokens": 0,
    "output_tokens": 0,
}


def error_body(error: DialectError) -> dict[str, Any]:
    """Return an error in Anthropic's format, for a response or an event of a stream."""
    kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    shown: dict[str, Any] = {"type": kind, "message": error.message}
    if error.param is not None and error.param.partition(".")[0] == "thread":
        # The SDK's tool runner sends its request again without the field.
        shown["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": shown}


@dataclass(frozen=True, slots=True)
class MessagesCall:
    """A parsed request. ``token_ids``: the client wants the ``skyrl`` object."""

    model: str
    request: ChatRequest
    streamed: bool = False
    token_ids: bool = False

    def response(self, result: ChatResult, context: ResponseContext) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        choice = result.choices[0]
        body = {
            **_head(self.model, context),
            "content": content_blocks(choice.message),
            **_ending(choice),
            "usage": _usage(choice.generation),
        }
        if self.token_ids:
            body["skyrl"] = {
                "prompt_token_ids": result.prompt_token_ids,
                **training_data(choice.generation),
                "reused_tokens": result.reused_tokens,
            }
        return body

    def stream(self, context: ResponseContext) -> MessagesStream:
        """Return the formatter of one streamed response."""
        return MessagesStream(self.model, context, self.token_ids)


class MessagesStream:
    """Formats a response as events: message_start; start, deltas and stop of each block; message_delta; message_stop.

    One block is open at a time. Text that a parser returns after a call gets a new block. The input of a call is sent in
    one delta at its end, because only then it is known to be a JSON object.
    """

    def __init__(self, model: str, context: ResponseContext, token_ids: bool) -> None:
        self._head = _head(model, context)
        self._token_ids = token_ids
        self._blocks = 0  # started so far; the open one is the last
        self._open: str | int | None = None  # "thinking", "text", or the index of a call
        self._arguments = ""

    def opened(self, prompt_token_ids: list[int]) -> list[Frame]:
        """Return message_start. It counts the whole prompt; message_delta tells which tokens were cached."""
        usage = {**_NO_USAGE, "input_tokens": len(prompt_token_ids)}
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [_frame("message_start", message=message)]

    def event(self, event: ChatEvent) -> list[Frame]:
        """Return the deltas of an event, and the end of the message if it is the last event."""
        delta, frames = event.delta, []
        if delta.reasoning_content:
            frames += self._switch("thinking", _thinking_block(""))
            frames.append(self._delta(type="thinking_delta", thinking=delta.reasoning_content))
        if delta.content:
            frames += self._switch("text", _text_block(""))
            frames.append(self._delta(type="text_delta", text=delta.content))
        for call in delta.tool_calls:
            block = {"type": "tool_use", "id": call.id or "", "name": call.name or "", "input": {}}
            frames += self._switch(call.index, block)
            self._arguments += call.arguments
        if event.choice is not None:
            # Usage and token ids are known only now, so message_delta carries them.
            done = event.choice.generation
            extension = {}
            if self._token_ids:
                extension = {"skyrl": {"prompt_token_ids": done.prompt_token_ids, **training_data(done)}}
            ending, usage = _ending(event.choice), _usage(done)
            frames += [*self._stop(), _frame("message_delta", delta=ending, usage=usage, **extension)]
        return frames

    def closed(self) -> list[Frame]:
        """Return message_stop."""
        return [_frame("message_stop")]

    def failed(self, error: DialectError) -> list[Frame]:
        """Return the error event that ends a stream."""
        return [Frame(error_body(error), "error")]

    def _switch(self, to: str | int, block: dict[str, Any]) -> list[Frame]:
        """Stop the open block and start ``block``, unless ``to`` is open already."""
        if self._open == to:
            return []  # the delta continues the open block
        frames = self._stop()
        self._open = to
        self._blocks += 1
        return [*frames, _frame("content_block_start", index=self._blocks - 1, content_block=block)]

    def _stop(self) -> list[Frame]:
        if self._open is None:
            return []
        frames = []
        if self._open == "thinking":
            frames.append(self._delta(type="signature_delta", signature=SIGNATURE))
        elif self._open != "text":  # a call: its input is complete only now
            partial = json.dumps(tool_input(self._arguments), ensure_ascii=False)
            frames.append(self._delta(type="input_json_delta", partial_json=partial))
            self._arguments = ""
        self._open = None
        return [*frames, _frame("content_block_stop", index=self._blocks - 1)]

    def _delta(self, **delta: str) -> Frame:
        return _frame("content_block_delta", index=self._blocks - 1, delta=delta)


def _frame(name: str, **fields: Any) -> Frame:
    return Frame({"type": name, **fields}, name)


def _head(model: str, context: ResponseContext) -> dict[str, Any]:
    return {"id": f"msg_{context.unique}", "type": "message", "role": "assistant", "model": model}


def _ending(choice: ChatChoice) -> dict[str, Any]:
    reason = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}[choice.finish_reason]
    # A tool call ends the message as "tool_use" even if a stop string ended the sampling.
    sequence = choice.generation.stop_string if choice.finish_reason == "stop" else None
    return {"stop_reason": reason if sequence is None else "stop_sequence", "stop_sequence": sequence}


def _usage(generation: Generation) -> dict[str, int]:
    cached = generation.cached_tokens
    return {
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "input_tokens": len(generation.prompt_token_ids) - cached,  # Anthropic counts cached tokens apart
        "output_tokens": len(generation.token_ids),
    }

"""OpenAI's responses: ``POST /v1/responses``.

Request items become chat messages, and a sampled message becomes items. The two conversions are inverse to each other: items
that a client sends back give the message that was sampled, so that its tokens are reused. One chat message is several items
(reasoning, message, function calls). The ids that this endpoint assigns tell which items belong together. If a client
drops the ids, the order of the items decides.
"""

from __future__ import annotations

import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, Field, Tag
from pydantic_core import PydanticCustomError

from skyrl_train.endpoint.dialects.responses_output import ResponseBody, ResponsesStream, output_items
from skyrl_train.inference.chat.requests import AssistantMessage, ChatRequest, ChatResult, ToolCall
from skyrl_train.inference.grammar import schema_text
from skyrl_train.inference.interface import StructuredOutput
from skyrl_train.inference.openai.body import (
    MAX_TOP_LOGPROBS,
    SEED_NOTE,
    STRICT_SCHEMA_NOTE,
    TEXT_OR_LIST,
    GenerationBody,
    JsonObject,
    NonEmpty,
    RequestBody,
    StopStrings,
    TokenCount,
    Unsupported,
    Whole,
    ignored,
    only,
    template_arguments,
    variants,
)
from skyrl_train.inference.openai.dialect import ResponseContext
from skyrl_train.inference.openai.errors import DialectError
from skyrl_train.inference.openai.messages import (
    FORCED_NOTE,
    FUNCTIONS_ONLY,
    KINDS_OF_CHOICE,
    PARALLEL_NOTE,
    TEXT_OR_OBJECT,
    Chosen,
    function_tool,
)

MAX_RESPONSES = 256  # stored per session; the oldest is dropped first
MAX_CHARACTERS = 64 << 20  # of all that one history stores
# Of the history that requests without a session share.
MAX_SHARED_RESPONSES = 4096
SHARED_LIFETIME_S = 3600.0

_TEXT_ONLY = "this endpoint takes text only"
_LOGPROBS = "message.output_text.logprobs"
_IN_TURN = "calls are answered in their turn"

# Request bodies ---------------------------------------------------------------------------------------------------


class InputText(RequestBody):
    """Text of a message of the user, the developer or the system."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: Any = ignored()


class OutputText(RequestBody):
    """Text of a message of the assistant."""

    type: Literal["output_text"]
    text: str
    annotations: Any = ignored()
    logprobs: Any = ignored()
    parsed: Any = ignored("openai's SDK sends back what it read from the content")


class Refusal(RequestBody):
    """A refusal of the assistant."""

    type: Literal["refusal"]
    refusal: str


Part = Annotated[
    Annotated[InputText, Tag("=input_text")]
    | Annotated[OutputText, Tag("=output_text")]
    | Annotated[Refusal, Tag("=refusal")],
    variants("type", f"input_text, output_text or refusal: {_TEXT_ONLY}"),
]
Content = Annotated[Annotated[str, Tag("=text")] | Annotated[list[Part], Tag("=list")], TEXT_OR_LIST]


class ReasoningText(RequestBody):
    """A part of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


class SummaryText(RequestBody):
    """A part of a summary of the reasoning."""

    type: Literal["summary_text"]
    text: str


class MessageItem(RequestBody):
    """A message of any role."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: Any = ignored()
    id: str | None = None
    status: Any = ignored()


class FunctionCallItem(RequestBody):
    """A function call of the assistant."""

    type: Literal["function_call"]
    call_id: NonEmpty
    name: str
    arguments: str
    run_async: Annotated[Any, Unsupported(_IN_TURN, False)] = Field(None, alias="async")
    id: str | None = None
    status: Any = ignored()
    parsed_arguments: Any = ignored("openai's SDK sends back what it read from the arguments")
    caller: Any = ignored()
    namespace: Any = ignored()


class FunctionOutputItem(RequestBody):
    """The output of a function call."""

    type: Literal["function_call_output"]
    call_id: NonEmpty
    output: Content
    name: Any = ignored()
    id: str | None = None
    status: Any = ignored()
    caller: Any = ignored()
    namespace: Any = ignored()


class ReasoningItem(RequestBody):
    """Reasoning of the assistant. The summary counts only if there is no content."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    summary: list[SummaryText] | None = None
    encrypted_content: Annotated[Any, Unsupported("reasoning is sent and returned as text", "")] = None
    id: str | None = None
    status: Any = ignored()


Item = Annotated[
    Annotated[MessageItem, Tag("=message")]
    | Annotated[FunctionCallItem, Tag("=function_call")]
    | Annotated[FunctionOutputItem, Tag("=function_call_output")]
    | Annotated[ReasoningItem, Tag("=reasoning")],
    variants(
        "type",
        "message, function_call, function_call_output or reasoning: items are messages, function calls with their "
        "outputs, and reasoning; a stored item is sent again in full",
        default="message",
    ),
]


class FunctionTool(RequestBody):
    """A function that the caller runs."""

    type: Annotated[Literal["function"], only("function", FUNCTIONS_ONLY)]
    name: NonEmpty
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = Field(None, description="repeated in the response, without effect on calls")
    run_async: Annotated[Any, Unsupported(_IN_TURN, False)] = Field(None, alias="async")
    allowed_callers: Annotated[Any, Unsupported("no code is run here", ["direct"])] = None
    defer_loading: Annotated[Any, Unsupported("there is no tool search", False)] = None
    output_schema: Any = ignored("outputs are text to the model")


class PlainFormat(RequestBody):
    """Text, or any JSON object."""

    type: Literal["text", "json_object"]


class JsonSchemaFormat(RequestBody):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    name: NonEmpty
    json_schema: JsonObject = Field(alias="schema")
    description: str | None = Field(None, description="the model sees the messages only")
    strict: bool | None = Field(None, description=STRICT_SCHEMA_NOTE)


class TextSettings(RequestBody):
    """Format of the response."""

    format: (
        Annotated[
            Annotated[PlainFormat, Tag("=text")]
            | Annotated[PlainFormat, Tag("=json_object")]
            | Annotated[JsonSchemaFormat, Tag("=json_schema")],
            variants("type", "text, json_object or json_schema"),
        ]
        | None
    ) = None
    verbosity: Annotated[Any, Unsupported("ask for it in a message", "medium")] = None


class Reasoning(RequestBody):
    """Settings of the reasoning."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Any = ignored("reasoning is given whole")
    generate_summary: Any = ignored("reasoning is given whole")
    context: Annotated[Any, Unsupported("earlier turns stay as they were sampled", "auto", "all_turns")] = None
    mode: Annotated[Any, Unsupported("there is one", "standard")] = None


class StreamSettings(RequestBody):
    """Options of a stream."""

    include_obfuscation: Any = ignored("nothing is padded")


def _strings(values: dict[str, Any]) -> dict[str, Any]:
    if not all(isinstance(value, str) for value in values.values()):
        raise PydanticCustomError("invalid_type", "must be an object of strings.")
    return values


class NamedFunctionTool(RequestBody):
    """The one tool that the model has to call."""

    type: Literal["function"]
    name: NonEmpty


class AllowedFunctionTools(RequestBody):
    """The tools that the model may call, or has to call one of."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunctionTool], Field(min_length=1, max_length=128)]


ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("=text")]
    | Annotated[
        Annotated[NamedFunctionTool, Tag("=function")] | Annotated[AllowedFunctionTools, Tag("=allowed_tools")],
        KINDS_OF_CHOICE,
        Tag("=object"),
    ],
    TEXT_OR_OBJECT,
]


def _chosen_tools(choice: ToolChoice | None) -> Chosen:
    if isinstance(choice, NamedFunctionTool):
        return "required", (choice.name,)
    if isinstance(choice, AllowedFunctionTools):
        return choice.mode, tuple(tool.name for tool in choice.tools)
    return choice or "auto", None


class ResponsesBody(GenerationBody):
    """The body of ``POST /v1/responses``."""

    FORMAT_FIELD = "text.format"

    input: Annotated[
        Annotated[str, Tag("=text")] | Annotated[list[Item], Field(min_length=1), Tag("=list")], TEXT_OR_LIST
    ] = Field(description="a string, or messages (text only), function calls with their outputs, and reasoning")
    instructions: str | None = Field(None, description="the system message of this response alone")
    previous_response_id: NonEmpty | None = Field(
        None,
        description="a stored response of the same session; without a session, of any request without one, in the last hour",
    )
    store: bool | None = Field(None, description="for previous_response_id and GET; default true")
    max_output_tokens: TokenCount | None = Field(None, description="default: what the context leaves")
    stream: bool | None = Field(None, description="server-sent events")
    stream_options: StreamSettings | None = Field(None, description="only with stream")
    tools: Annotated[list[FunctionTool], Field(max_length=128)] | None = Field(None, description="functions only")
    tool_choice: ToolChoice | None = Field(None, description=FORCED_NOTE)
    text: TextSettings | None = Field(
        None, description="format: text; json_object and json_schema where the engines can be guided"
    )
    reasoning: Reasoning | None = Field(
        None, description="effort is an argument of the chat template; none also sets enable_thinking to false"
    )
    # All but the first are about tools that never run here, or about reasoning that is returned as text anyway.
    include: (
        list[
            Literal[
                "message.output_text.logprobs",
                "reasoning.encrypted_content",
                "file_search_call.results",
                "web_search_call.results",
                "web_search_call.action.sources",
                "message.input_image.image_url",
                "computer_call_output.output.image_url",
                "code_interpreter_call.outputs",
            ]
        ]
        | None
    ) = Field(None, description=f"{_LOGPROBS}; the others have nothing to add")
    top_logprobs: Annotated[int, Whole(0, MAX_TOP_LOGPROBS)] | None = Field(
        None, description=f"needs {_LOGPROBS} in include, and engines that have them"
    )
    metadata: Annotated[dict[str, Any], AfterValidator(_strings)] | None = Field(
        None, description="an object of strings; repeated in the response"
    )
    stop: StopStrings | None = Field(None, description="as chat has it")
    seed: Annotated[int, Whole()] | None = Field(None, description=SEED_NOTE)
    chat_template_kwargs: JsonObject | None = Field(
        None, description="further arguments of the chat template, such as enable_thinking"
    )
    parallel_tool_calls: bool | None = Field(None, description=PARALLEL_NOTE)
    enable_response_messages: Annotated[Any, Unsupported("use return_token_ids", False)] = None
    previous_input_messages: Annotated[Any, Unsupported("use input")] = None
    truncation: Annotated[Any, Unsupported("history is never rewritten here", "disabled")] = None
    background: Annotated[Any, Unsupported("a response is awaited or streamed", False)] = None
    max_tool_calls: Any = ignored("it counts calls of built-in tools")
    service_tier: Any = ignored("there is one")
    safety_identifier: Any = ignored("sessions are named by the key")
    user: Any = ignored("as safety_identifier")
    prompt_cache_key: Any = ignored("requests of a session share an engine's cache")
    prompt_cache_options: Any = ignored("as prompt_cache_key")
    prompt_cache_retention: Any = ignored("as prompt_cache_key")
    access_programs: Annotated[Any, Unsupported("there are none")] = None
    background_options: Annotated[Any, Unsupported("as background")] = None
    context_management: Annotated[Any, Unsupported("history is never rewritten here")] = None
    conversation: Annotated[Any, Unsupported("use previous_response_id")] = None
    image: Annotated[Any, Unsupported(_TEXT_ONLY)] = None
    moderation: Annotated[Any, Unsupported("nothing is moderated")] = None
    prompt: Annotated[Any, Unsupported("no templates are stored")] = None


def parse(body: Mapping[str, Any]) -> ResponsesCall:
    """Validate a body.

    Raises:
        DialectError: the body is invalid or asks for something unsupported; ``param`` names the field.
    """
    read = ResponsesBody.parse(body)
    logprobs = _LOGPROBS in (read.include or ())
    if read.top_logprobs and not logprobs:
        raise DialectError(f"top_logprobs needs {_LOGPROBS!r} in include.", "top_logprobs", "invalid_value")
    if read.stream_options is not None and not read.stream:
        raise DialectError("stream_options is only allowed with stream: true.", "stream_options", "invalid_value")
    text_format = None if read.text is None else read.text.format
    structured = None
    if isinstance(text_format, JsonSchemaFormat):
        text = schema_text(text_format.json_schema, strict=bool(text_format.strict))
        structured = StructuredOutput("json_schema", text)
    elif text_format is not None and text_format.type == "json_object":
        structured = StructuredOutput("json_object")
    effort = None if read.reasoning is None else read.reasoning.effort
    # strict is left out: no chat template knows it, and clients set it without being asked.
    no_parameters: dict[str, Any] = {"type": "object", "properties": {}}
    tools = [
        function_tool(tool.name, tool.description, no_parameters if tool.parameters is None else tool.parameters)
        for tool in read.tools or ()
    ]
    # Responses have one choice per request, so n is never set.
    params = read.sampling_params(
        read.max_output_tokens,
        seed=read.seed,
        stop=tuple(read.stop or ()),
        top_logprobs=read.top_logprobs or 0,
        structured=read.structured(structured),
    )
    tool_choice, allowed_tools = _chosen_tools(read.tool_choice)
    request = ChatRequest(
        messages=tuple(chat_messages(read.instructions, read.input)),
        params=params,
        max_tokens=read.max_output_tokens,
        tools=tuple(tools),
        tool_choice=tool_choice,
        allowed_tools=allowed_tools,
        single_call=read.parallel_tool_calls is False,
        template_kwargs=template_arguments(effort, read.chat_template_kwargs),
        grammar_field=read.grammar_field,
        logprobs=logprobs,
    )
    # The response repeats these fields of the request, with their defaults.
    shown_format = {"type": "text"}
    if text_format is not None:
        shown_format = text_format.model_dump(by_alias=True, exclude_none=True)
    repeated_tools = ("type", "name", "description", "parameters", "strict")
    return ResponsesCall(
        model=read.model,
        request=request,
        streamed=bool(read.stream),
        token_ids=bool(read.return_token_ids),
        previous_response_id=read.previous_response_id,
        store=read.store is not False,
        instructions=read.instructions,
        echo={
            "background": False,
            "max_output_tokens": read.max_output_tokens,
            "metadata": read.metadata or {},
            "parallel_tool_calls": read.parallel_tool_calls is not False,
            "reasoning": {"effort": effort, "summary": None},
            "temperature": params.temperature,
            "text": {"format": shown_format},
            "tool_choice": tool_choice if allowed_tools is None else read.tool_choice.model_dump(),  # type: ignore[union-attr]
            "tools": [{name: getattr(tool, name) for name in repeated_tools} for tool in read.tools or ()],
            "top_logprobs": read.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
        },
    )


def parse_with_history(body: Mapping[str, Any], history: ResponseHistory) -> ResponsesCall:
    """Validate a body, and insert the conversation of the previous response before its input.

    Args:
        history: of the session, or of the requests without one.

    Raises:
        DialectError: as for :func:`parse`, or the previous response is unknown.
    """
    call = parse(body)
    if call.previous_response_id is not None:
        # chat_messages() puts the instructions first, as one system message; the earlier messages follow them.
        count = 1 if call.instructions else 0
        messages = call.request.messages
        earlier = history.conversation(call.previous_response_id)
        request = replace(call.request, messages=(*messages[:count], *earlier, *messages[count:]))
        call = replace(call, request=request)
    return replace(call, history=history) if call.store else call


# Items and chat messages ------------------------------------------------------------------------------------------

_ITEM_ID = re.compile(r"(?:rs|msg|fc)_([0-9a-f]+)_\d+")  # the group names the response


def chat_messages(instructions: str | None, items: str | list[Any]) -> list[dict[str, Any]]:
    """Convert validated items into OpenAI's chat messages. Adjacent items of the assistant become one message."""
    chat: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(items, str):
        return [*chat, {"role": "user", "content": items}]
    # The assistant's items are collected until another item or another message of the assistant follows.
    turn: list[Any] = []  # items of the assistant's current message
    for item in items:
        is_message = isinstance(item, MessageItem)
        if isinstance(item, FunctionCallItem | ReasoningItem) or (is_message and item.role == "assistant"):
            if turn and not _same_turn(turn[-1], item):
                chat.append(_assistant(turn).to_openai())
                turn = []
            turn.append(item)
            continue
        if turn:
            chat.append(_assistant(turn).to_openai())
            turn = []
        if is_message:
            # Chat templates know no developer role.
            role = "user" if item.role == "user" else "system"
            chat.append({"role": role, "content": _joined(item.content)})
        else:
            chat.append({"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)})
    if turn:
        chat.append(_assistant(turn).to_openai())
    return chat


def _same_turn(last: Any, item: Any) -> bool:
    """Return whether ``item`` belongs to the same message of the assistant as ``last``, the item before it."""
    ours, its = _ITEM_ID.fullmatch(last.id or ""), _ITEM_ID.fullmatch(item.id or "")
    if ours is not None and its is not None:
        return ours[1] == its[1]
    # Without ids: reasoning starts a message, calls follow its text, and text after a call without an output between
    # them can only belong to the same message.
    if isinstance(item, ReasoningItem):
        return isinstance(last, ReasoningItem)
    return isinstance(item, FunctionCallItem) or not isinstance(last, MessageItem)


def _assistant(turn: list[Any]) -> AssistantMessage:
    reasoning = [_joined(item.content or item.summary or []) for item in turn if isinstance(item, ReasoningItem)]
    return AssistantMessage(
        content="".join(_joined(item.content) for item in turn if isinstance(item, MessageItem)),
        reasoning_content="".join(reasoning) or None,
        tool_calls=tuple(
            ToolCall(item.call_id, item.name, item.arguments) for item in turn if isinstance(item, FunctionCallItem)
        ),
    )


def _joined(content: str | list[Any]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, Refusal) else part.text for part in content)


# Calls and their history ------------------------------------------------------------------------------------------

Conversation = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class ResponsesCall:
    """A parsed request.

    Args:
        token_ids: the client wants the ``skyrl`` object.
        previous_response_id: the response that ``request`` continues; :func:`parse_with_history` inserts its messages.
        store: a later request may continue this response.
        instructions: a system message that such a request does not see.
        echo: fields of the response that repeat the request.
        history: receives the conversation when the response has ended.
    """

    model: str
    request: ChatRequest
    streamed: bool = False
    token_ids: bool = False
    previous_response_id: str | None = None
    store: bool = True
    instructions: str | None = None
    echo: Mapping[str, Any] = field(default_factory=dict)
    history: ResponseHistory | None = field(default=None, compare=False, repr=False)

    def response(self, result: ChatResult, context: ResponseContext) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        [choice] = result.choices
        generation, entries = choice.generation, []
        if self.request.logprobs:
            entries = context.tokens.entries(generation.token_ids, generation.logprobs, generation.top_logprobs)
        output = output_items(choice, context.unique, entries)
        body = self._body(context).ended(choice, output, result.reused_tokens)
        self._keep(body, choice.message)
        return body

    def stream(self, context: ResponseContext) -> ResponsesStream:
        """Return the formatter of one streamed response."""
        return ResponsesStream(self._body(context), self.request.logprobs, self._keep)

    def _keep(self, body: Mapping[str, Any], answer: AssistantMessage) -> None:
        """Store the response, and its conversation without the instructions, which ``previous_response_id`` does not repeat."""
        if self.history is not None:
            count = 1 if self.instructions else 0
            self.history.keep(body, (*self.request.messages[count:], answer.to_openai()))

    def _body(self, context: ResponseContext) -> ResponseBody:
        echo = {
            **self.echo,
            "instructions": self.instructions,
            "previous_response_id": self.previous_response_id,
            "store": self.store,
        }
        return ResponseBody(self.model, echo, self.token_ids, context)


@dataclass(frozen=True, slots=True)
class _Stored:
    body: Mapping[str, Any]
    conversation: Conversation
    characters: int
    since: float


class ResponseHistory:
    """The latest responses of one session, or of the requests without one: response objects, and conversations to their ends.

    Args:
        max_responses, max_characters: the oldest are dropped first; the latest stays.
        lifetime_s: how long a response is stored.
        clock: seconds.
    """

    def __init__(
        self,
        max_responses: int = MAX_RESPONSES,
        max_characters: int = MAX_CHARACTERS,
        lifetime_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_responses = max_responses
        self._max_characters = max_characters
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._stored: OrderedDict[str, _Stored] = OrderedDict()
        self._characters = 0

    def __len__(self) -> int:
        return len(self._stored)

    def keep(self, body: Mapping[str, Any], conversation: Conversation) -> None:
        """Store a response object and the conversation up to its end."""
        characters = len(orjson.dumps(body))  # it repeats tools and instructions
        characters += sum(len(str(value)) for message in conversation for value in message.values())
        self._stored[body["id"]] = _Stored(body, conversation, characters, self._clock())
        self._characters += characters
        while len(self._stored) > 1:
            oldest_id, oldest = next(iter(self._stored.items()))
            full = len(self._stored) > self._max_responses or self._characters > self._max_characters
            if not full and not self._expired(oldest):
                break
            self._forget(oldest_id)

    def conversation(self, response_id: str) -> Conversation:
        """Return the messages up to the end of a response.

        Raises:
            DialectError: the response is unknown or no longer stored.
        """
        known = self._get(response_id)
        if known is None:
            raise DialectError(
                f"The previous response {response_id!r:.100} {self._not_stored} Send the conversation as input instead.",
                "previous_response_id",
                "previous_response_not_found",
            )
        return known.conversation

    def response(self, response_id: str) -> Mapping[str, Any]:
        """Return a response object.

        Raises:
            DialectError: 404: the response is unknown or no longer stored.
        """
        known = self._get(response_id)
        if known is None:
            raise DialectError(
                f"The response {response_id!r:.100} {self._not_stored}", code="response_not_found", status=404
            )
        return known.body

    def delete(self, response_id: str) -> None:
        """Forget a response.

        Raises:
            DialectError: 404: the response is unknown or no longer stored.
        """
        self.response(response_id)
        self._forget(response_id)

    def _get(self, response_id: str) -> _Stored | None:
        # Changes nothing: large bodies are parsed in threads.
        known = self._stored.get(response_id)
        return None if known is None or self._expired(known) else known

    def _expired(self, stored: _Stored) -> bool:
        return self._clock() - stored.since >= self._lifetime_s

    def _forget(self, response_id: str) -> None:
        self._characters -= self._stored.pop(response_id).characters

    @property
    def _not_stored(self) -> str:
        limits = f"the last {self._max_responses}"
        if self._lifetime_s < math.inf:
            limits += f" or than {self._lifetime_s:g} s"
        return (
            "is not stored here: it was sent in another session or with store: false, has failed, was deleted, or is older than "
            f"{limits}."
        )

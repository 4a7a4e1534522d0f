"""OpenAI's chat messages and tools: models that validate them, and the plain messages that the renderer takes.

A content of parts becomes a string and ``developer`` becomes ``system``. Everything else stays as it came, so that a
message that was sent back is recognised as the one that was sampled.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from skyrl_train.inference.openai.body import (
    TEXT_OR_LIST,
    JsonObject,
    NonEmpty,
    RequestBody,
    Unsupported,
    ignored,
    only,
    variants,
)
from skyrl_train.inference.openai.errors import DialectError

_TEXT_ONLY = "this endpoint takes text only"
_CACHED = "prefixes are always cached"
FUNCTIONS_ONLY = "only functions that the caller runs are served"


class TextPart(RequestBody):
    """A part of a content."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Any = ignored(_CACHED)
    cache_control: Any = ignored(_CACHED)


class RefusalPart(RequestBody):
    """A part of an assistant's content."""

    type: Literal["refusal"]
    refusal: str


Content = Annotated[
    Annotated[str, Tag("=text")]
    | Annotated[
        list[
            Annotated[
                Annotated[TextPart, Tag("=text")] | Annotated[RefusalPart, Tag("=refusal")],
                variants("type", f"text or refusal: {_TEXT_ONLY}"),
            ]
        ],
        Tag("=list"),
    ],
    TEXT_OR_LIST,
]


class CalledFunction(RequestBody):
    """The function of a call. ``arguments`` is JSON text."""

    name: NonEmpty
    arguments: str
    parsed_arguments: Any = ignored("openai's SDK sends back what it read from the arguments")


class ToolCallBody(RequestBody):
    """A call that an assistant's message holds."""

    id: NonEmpty
    type: Literal["function"]
    function: CalledFunction
    index: Any = ignored("as streams have it")


class PromptMessage(RequestBody):
    """A message of the system, the developer or the user."""

    role: Literal["system", "developer", "user"]
    content: Content
    name: str | None = None


class AssistantBody(RequestBody):
    """A message of the assistant."""

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCallBody] | None = None
    reasoning_content: str | None = None
    reasoning: Any = ignored("reasoning_content is read")
    refusal: Any = ignored("a model here says it in its content")
    provider_specific_fields: Any = ignored("litellm sends its own notes back")
    annotations: Any = ignored()
    parsed: Any = ignored("openai's SDK sends back what it read from the content")
    audio: Annotated[Any, Unsupported(_TEXT_ONLY)] = None
    function_call: Annotated[Any, Unsupported("tool_calls has taken its place")] = None


class ToolMessage(RequestBody):
    """The result of a call."""

    role: Literal["tool"]
    content: Content
    name: str | None = None
    tool_call_id: str


Message = Annotated[
    Annotated[PromptMessage, Tag("=system")]
    | Annotated[PromptMessage, Tag("=developer")]
    | Annotated[PromptMessage, Tag("=user")]
    | Annotated[AssistantBody, Tag("=assistant")]
    | Annotated[ToolMessage, Tag("=tool")],
    variants("role", "one of system, developer, user, assistant, tool"),
]
Messages = Annotated[list[Message], Field(min_length=1)]


def plain_messages(messages: list[Any]) -> tuple[dict[str, Any], ...]:
    """Return validated messages in the shape that the renderer takes."""
    plain = []
    for message in messages:
        # For optional fields, null and absence mean the same.
        values = message.model_dump(exclude_none=True)
        # Few chat templates know the developer role.
        if values["role"] == "developer":
            values["role"] = "system"
        if not values.get("tool_calls", True):  # templates treat an empty list as calls
            del values["tool_calls"]
        if isinstance(content := values.get("content"), list):
            values["content"] = "".join(part[part["type"]] for part in content)
        elif content is None:
            values["content"] = None if "tool_calls" in values else ""
        plain.append(values)
    return tuple(plain)


def check_prefill(message: dict[str, Any], param: str) -> None:
    """Raise DialectError if no response can continue ``message``, the last one of a conversation."""
    problem = ""
    if message["role"] != "assistant":
        problem = f"{param}: only a message of the assistant can be continued, this one is the {message['role']}'s."
    elif message.get("tool_calls"):
        problem = f"{param}: a message with tool calls cannot be continued; send the results of the calls after it."
    elif not str(message.get("content") or "").strip():
        problem = f"{param}: the message has no text to continue; leave it out."
    if problem:
        raise DialectError(problem, param, "invalid_value")


def _function_name(name: Any) -> Any:
    if isinstance(name, str) and not (0 < len(name) <= 64 and set(name) <= _NAME_CHARACTERS):
        raise PydanticCustomError("invalid_value", "must be 1 to 64 letters, digits, '_', '-' or '.'.")
    return name


_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")


class ToolFunction(RequestBody):
    """A function that the model may call."""

    name: Annotated[str, BeforeValidator(_function_name)]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ChatTool(RequestBody):
    """A tool; functions are the only type."""

    type: Annotated[Literal["function"], only("function", FUNCTIONS_ONLY)]
    function: ToolFunction


Tools = Annotated[list[ChatTool], Field(max_length=128)]


def plain_tools(tools: list[ChatTool] | None) -> tuple[dict[str, Any], ...]:
    """Return validated tools as the renderer takes them."""
    return tuple(tool.model_dump(exclude_none=True) for tool in tools or ())


def function_tool(name: str, description: str | None, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return a tool of another dialect as the renderer takes it."""
    described = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


class NamedFunction(RequestBody):
    """A function by its name."""

    name: NonEmpty


class NamedTool(RequestBody):
    """The one tool that the model has to call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(RequestBody):
    """The tools that the model may call, or has to call one of."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=128)]


class AllowedToolsChoice(RequestBody):
    """A choice of tools by their names."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


TEXT_OR_OBJECT = Discriminator(lambda choice: "=text" if isinstance(choice, str) else "=object")
KINDS_OF_CHOICE = variants("type", f"function or allowed_tools: {FUNCTIONS_ONLY}")
ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("=text")]
    | Annotated[
        Annotated[NamedTool, Tag("=function")] | Annotated[AllowedToolsChoice, Tag("=allowed_tools")],
        KINDS_OF_CHOICE,
        Tag("=object"),
    ],
    TEXT_OR_OBJECT,
]
# tool_choice and allowed_tools of a ChatRequest
Chosen = tuple[Literal["auto", "none", "required"], tuple[str, ...] | None]


def chosen_tools(choice: ToolChoice | None) -> Chosen:
    """Return which tools the model may or has to call."""
    if isinstance(choice, NamedTool):
        return "required", (choice.function.name,)
    if isinstance(choice, AllowedToolsChoice):
        return choice.allowed_tools.mode, tuple(tool.function.name for tool in choice.allowed_tools.tools)
    return choice or "auto", None


FORCED_NOTE = (
    "auto, none, required (one call), a named function or allowed_tools; forced calls where the engines can be guided"
)
PARALLEL_NOTE = "false: the response ends after its first call"

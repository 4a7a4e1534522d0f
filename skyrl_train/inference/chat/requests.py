"""A chat request and its result, common to all dialects (OpenAI chat and responses, Anthropic messages).

dialect ──ChatRequest──> ChatService ──ChatEvent ...──> dialect (streaming)
                                     ──ChatResult─────> dialect

Request messages are plain mappings in OpenAI's chat shape (``role``, ``content``, ``tool_calls``, ``tool_call_id``,
``reasoning_content``); the dialects translate theirs into it. Sampled messages are :class:`AssistantMessage`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from skyrl_train.inference.interface import SamplingParams
from skyrl_train.inference.requests import Generation, GenerationChunk

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the model. ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str


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
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
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


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation to be answered ``params.n`` times.

    Args:
        messages: in OpenAI's chat shape.
        params: sampling parameters; ``max_tokens`` is ignored.
        max_tokens: of one response; None: the rest of the context.
        tools: OpenAI tool specifications (``{"type": "function", "function": {...}}``).
        tool_choice: "none" hides the tools from the model; "required" forces one call.
        allowed_tools: the names of the tools that may be called; None: all. "auto" hides the others.
        single_call: the response ends after its first tool call. "required" is one call in any case.
        adapter: a LoRA adapter by name; None: the policy.
        template_kwargs: further arguments of the chat template (``enable_thinking``).
        continue_final: the response continues the last message, which is the assistant's and has text, instead of beginning one.
        grammar_field: the field of the body that asks for the grammar in ``params``, for errors.
        logprobs: whether the dialect shows log-probs (they are recorded in any case).
        session_id: keeps requests on one engine if there is no recording session.
    """

    messages: tuple[Mapping[str, Any], ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: Literal["auto", "none", "required"] = "auto"
    allowed_tools: tuple[str, ...] | None = None
    single_call: bool = False
    adapter: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continue_final: bool = False
    grammar_field: str = ""
    logprobs: bool = False
    session_id: str | None = None

    @property
    def callable_tools(self) -> tuple[Mapping[str, Any], ...]:
        """The tools that the model may call."""
        if self.tool_choice == "none":
            return ()
        allowed = self.allowed_tools
        return tuple(tool for tool in self.tools if allowed is None or tool["function"]["name"] in allowed)

    @property
    def prefill(self) -> str:
        """The text that the response continues; empty for a new message."""
        return str(self.messages[-1]["content"]) if self.continue_final else ""


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The prompt of a turn. Its first ``reused_tokens`` are tokens of earlier turns, as sampled."""

    prompt_token_ids: list[int]
    reused_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """One of the ``n`` choices. ``generation`` has its tokens, log-probs and versions."""

    index: int
    message: AssistantMessage
    finish_reason: FinishReason
    generation: Generation


@dataclass(frozen=True, slots=True)
class ChatResult:
    """All choices. ``reused_tokens`` of the prompt were taken from earlier turns as sampled; the others were rendered."""

    prompt_token_ids: list[int]
    choices: tuple[ChatChoice, ...]
    reused_tokens: int = 0

    @property
    def completion_tokens(self) -> int:
        """The number of sampled tokens of all choices."""
        return sum(len(choice.generation.token_ids) for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """The prompt tokens that the engines had cached; what one choice cached for another does not count."""
        return min(choice.generation.cached_tokens for choice in self.choices)


@dataclass(frozen=True, slots=True)
class ChatEvent:
    """A piece of choice number ``index``: the addition to the message, and the tokens sampled since the last event.

    The last event of a choice has ``choice``. ``delta`` may be empty while tokens arrive, and the reverse.
    """

    index: int
    delta: MessageDelta
    chunk: GenerationChunk
    choice: ChatChoice | None = None

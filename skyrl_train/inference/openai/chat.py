"""OpenAI's chat completions: ``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from skyrl_train.inference.chat.requests import (
    ChatEvent,
    ChatRequest,
    ChatResult,
    MessageDelta,
)
from skyrl_train.inference.openai.body import (
    MAX_TOP_LOGPROBS,
    JsonObject,
    OpenAIBody,
    TokenCount,
    Unsupported,
    Whole,
    ignored,
    template_arguments,
)
from skyrl_train.inference.openai.dialect import Frame, ResponseContext, TokenTexts, training_data, usage
from skyrl_train.inference.openai.errors import DialectError, openai_error
from skyrl_train.inference.openai.messages import (
    FORCED_NOTE,
    PARALLEL_NOTE,
    Messages,
    ToolChoice,
    Tools,
    check_prefill,
    chosen_tools,
    plain_messages,
    plain_tools,
)
from skyrl_train.inference.requests import Generation, GenerationChunk

_TEXT_ONLY = "this endpoint takes and gives text only"
_OLD = "tools has taken its place"
DONE = Frame("[DONE]")


class ChatCompletionBody(OpenAIBody):
    """The body of ``POST /v1/chat/completions``."""

    messages: Messages = Field(description="text parts are joined; developer is read as system")
    max_completion_tokens: TokenCount | None = Field(None, description="default: what the context leaves")
    max_tokens: TokenCount | None = Field(None, description="the older name of max_completion_tokens")
    logprobs: bool | None = Field(None, description="of the distribution that was sampled from")
    top_logprobs: Annotated[int, Whole(0, MAX_TOP_LOGPROBS)] | None = Field(
        None, description="needs logprobs, and engines that have them"
    )
    tools: Tools | None = Field(
        None, description="functions only; strict is shown to the model, and enforced in forced calls"
    )
    tool_choice: ToolChoice | None = Field(None, description=FORCED_NOTE)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="an argument of the chat template; none also sets enable_thinking to false"
    )
    chat_template_kwargs: JsonObject | None = Field(
        None, description="further arguments of the chat template, such as enable_thinking"
    )
    parallel_tool_calls: bool | None = Field(None, description=PARALLEL_NOTE)
    continue_final_message: bool | None = Field(
        None, description="the response continues the last message, which is the assistant's"
    )
    add_generation_prompt: bool | None = Field(None, description="false with continue_final_message, and only with it")
    echo: Annotated[Any, Unsupported("the messages already have it", False)] = None
    add_special_tokens: Annotated[Any, Unsupported("the chat template writes them", False)] = None
    documents: Annotated[Any, Unsupported("use chat_template_kwargs", [])] = None
    chat_template: Annotated[Any, Unsupported("the model's own is used")] = None
    modalities: Annotated[Any, Unsupported(_TEXT_ONLY, ["text"])] = None
    verbosity: Annotated[Any, Unsupported("ask for it in a message", "medium")] = None
    audio: Annotated[Any, Unsupported(_TEXT_ONLY)] = None
    functions: Annotated[Any, Unsupported(_OLD)] = None
    function_call: Annotated[Any, Unsupported(_OLD)] = None
    moderation: Annotated[Any, Unsupported("nothing is moderated")] = None
    web_search_options: Annotated[Any, Unsupported("nothing is looked up")] = None
    metadata: Any = ignored("sessions carry what belongs to a sample")
    prediction: Any = ignored("it would only save time")
    prompt_cache_key: Any = ignored("requests of a session share an engine's cache")
    prompt_cache_options: Any = ignored("as prompt_cache_key")
    prompt_cache_retention: Any = ignored("as prompt_cache_key")
    safety_identifier: Any = ignored("as user")
    service_tier: Any = ignored("there is one")
    store: Any = ignored("sessions store what was sampled")


def parse(body: Mapping[str, Any]) -> ChatCompletionCall:
    """Validate a body.

    Raises:
        DialectError: the body is wrong, or asks for what is not supported.
    """
    read = ChatCompletionBody.parse(body)
    max_tokens = read.max_completion_tokens or read.max_tokens
    # Both names may be given if they agree.
    if read.max_tokens not in (None, max_tokens):
        raise DialectError("max_tokens and max_completion_tokens contradict each other.", "max_tokens", "invalid_value")
    if read.top_logprobs and not read.logprobs:
        raise DialectError("top_logprobs is only allowed with logprobs: true.", "top_logprobs", "invalid_value")
    continue_final = bool(read.continue_final_message)
    if read.add_generation_prompt is not None and read.add_generation_prompt == continue_final:
        raise DialectError(
            "add_generation_prompt must be false with continue_final_message: true, and true without it.",
            "add_generation_prompt",
            "invalid_value",
        )
    messages = plain_messages(read.messages)
    if continue_final:
        check_prefill(messages[-1], f"messages[{len(messages) - 1}]")
    params = read.sampling_params(
        max_tokens,
        n=read.n or 1,
        seed=read.seed,
        stop=tuple(read.stop or ()),
        top_logprobs=read.top_logprobs or 0,
        structured=read.grammar,
    )
    tool_choice, allowed_tools = chosen_tools(read.tool_choice)
    request = ChatRequest(
        messages=messages,
        params=params,
        max_tokens=max_tokens,
        tools=plain_tools(read.tools),
        tool_choice=tool_choice,
        allowed_tools=allowed_tools,
        single_call=read.parallel_tool_calls is False,
        template_kwargs=template_arguments(read.reasoning_effort, read.chat_template_kwargs),
        continue_final=continue_final,
        grammar_field=read.grammar_field,
        logprobs=bool(read.logprobs),
    )
    return ChatCompletionCall(
        model=read.model,
        request=request,
        streamed=bool(read.stream),
        include_usage=read.include_usage,
        token_ids=bool(read.return_token_ids),
    )


@dataclass(frozen=True, slots=True)
class ChatCompletionCall:
    """A parsed body. ``token_ids``: the response includes the ``skyrl`` objects."""

    model: str
    request: ChatRequest
    streamed: bool = False
    include_usage: bool = False
    token_ids: bool = False

    def response(self, result: ChatResult, context: ResponseContext) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        choices = []
        for choice in result.choices:
            done = choice.generation
            shown: dict[str, Any] = {
                "index": choice.index,
                "message": choice.message.to_openai(),
                "logprobs": self.logprobs(done, context.tokens),
                "finish_reason": choice.finish_reason,
            }
            if self.token_ids:
                shown["token_ids"] = done.token_ids
                shown["skyrl"] = training_data(done)
            choices.append(shown)
        body = {
            **_head(self.model, context, "chat.completion"),
            "choices": choices,
            "usage": usage(len(result.prompt_token_ids), result.completion_tokens, result.cached_tokens),
        }
        if self.token_ids:
            body["prompt_token_ids"] = result.prompt_token_ids
            body["skyrl"] = {"prompt_token_ids": result.prompt_token_ids, "reused_tokens": result.reused_tokens}
        return body

    def stream(self, context: ResponseContext) -> ChatCompletionStream:
        """Return the formatter of one streamed response."""
        return ChatCompletionStream(self, context)

    def logprobs(self, sampled: Generation | GenerationChunk, tokens: TokenTexts) -> dict[str, Any] | None:
        """Return OpenAI's log-probs of the sampled tokens; None if not requested."""
        if not self.request.logprobs:
            return None
        return {"content": tokens.entries(sampled.token_ids, sampled.logprobs, sampled.top_logprobs), "refusal": None}


class ChatCompletionStream:
    """Formats chunks: the role of each choice, its pieces, its finish reason; then the usage if requested, and [DONE]."""

    def __init__(self, call: ChatCompletionCall, context: ResponseContext) -> None:
        self._call = call
        self._tokens = context.tokens
        self._head = _head(call.model, context, "chat.completion.chunk")
        if call.include_usage:
            self._head["usage"] = None
        self._done: list[Generation] = []  # the choices that have ended
        # Pieces without text, log-probs or ids are not sent.
        self._shows_tokens = call.request.logprobs or call.token_ids

    def opened(self, prompt_token_ids: list[int]) -> list[Frame]:
        """Return the role of each choice; before the first one the prompt, where vLLM's server has it."""
        opening = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        choices = [{"index": index, **opening} for index in range(self._call.request.params.n)]
        first, *others = [Frame({**self._head, "choices": [choice]}) for choice in choices]
        if self._call.token_ids:
            first = Frame({**self._head, "choices": choices[:1], "prompt_token_ids": prompt_token_ids})
        return [first, *others]

    def event(self, event: ChatEvent) -> list[Frame]:
        """Return one chunk, or two at the end of a choice."""
        chunk, choice, frames = event.chunk, event.choice, []
        delta = _delta(event.delta)
        if delta or (self._shows_tokens and chunk.token_ids):
            shown: dict[str, Any] = {
                "index": event.index,
                "delta": delta,
                "logprobs": self._call.logprobs(chunk, self._tokens),
                "finish_reason": None,
            }
            if self._call.token_ids:
                shown["token_ids"] = chunk.token_ids
                shown["skyrl"] = {
                    "token_ids": chunk.token_ids,
                    "logprobs": chunk.logprobs,
                    "versions": chunk.versions,
                }
            frames.append(Frame({**self._head, "choices": [shown]}))
        if choice is not None:
            # The finish reason comes in a separate chunk after the last piece.
            done = choice.generation
            self._done.append(done)
            shown = {"index": choice.index, "delta": {}, "logprobs": None, "finish_reason": choice.finish_reason}
            prompt: dict[str, Any] = {}
            if self._call.token_ids:
                shown["skyrl"] = {"segments": done.segments, "restarts": done.restarts}
                prompt = {"skyrl": {"prompt_token_ids": done.prompt_token_ids}}
            frames.append(Frame({**self._head, "choices": [shown], **prompt}))
        return frames

    def closed(self) -> list[Frame]:
        """Return the usage if requested, and [DONE]."""
        if not self._call.include_usage:
            return [DONE]
        sampled = sum(len(done.token_ids) for done in self._done)
        cached = min(done.cached_tokens for done in self._done)
        total = usage(len(self._done[0].prompt_token_ids), sampled, cached)
        return [Frame({**self._head, "choices": [], "usage": total}), DONE]

    def failed(self, error: DialectError) -> list[Frame]:
        """Return the error, after which no frame follows."""
        return [Frame(openai_error(error))]


def _head(model: str, context: ResponseContext, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{context.unique}", "object": kind, "created": context.created, "model": model}


def _delta(delta: MessageDelta) -> dict[str, Any]:
    """Return a piece of a message in OpenAI's shape; empty if nothing is new."""
    shown: dict[str, Any] = {}
    if delta.content:
        shown["content"] = delta.content
    if delta.reasoning_content:
        shown["reasoning_content"] = delta.reasoning_content
    for call in delta.tool_calls:
        # Clients take name and id from the first piece of a call, and append the arguments of each.
        name = {} if call.name is None else {"name": call.name}
        identity = {} if call.id is None else {"id": call.id, "type": "function"}
        piece = {"index": call.index, **identity, "function": {**name, "arguments": call.arguments}}
        shown.setdefault("tool_calls", []).append(piece)
    return shown

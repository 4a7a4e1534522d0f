"""OpenAI's chat completions: ``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_train.inference.chat.messages import MessageDelta, ToolCallDelta
from skyrl_train.inference.chat.requests import ChatChoice, ChatEvent, ChatRequest, ChatResult
from skyrl_train.inference.dialects.dialect import Frame, ResponseContext
from skyrl_train.inference.dialects.errors import DialectError, openai_error
from skyrl_train.inference.dialects.fields import (
    Anything,
    Boolean,
    Exactly,
    Field,
    Integer,
    Mappings,
    Support,
    Text,
    read_fields,
)
from skyrl_train.inference.dialects.openai_fields import (
    EXTENSION_FIELDS,
    MAX_TOKENS,
    MAX_TOP_LOGPROBS,
    MODEL,
    SAMPLING_FIELDS,
    include_usage,
    sampling_params,
    usage,
)
from skyrl_train.inference.dialects.openai_messages import MESSAGES, TOOLS, ToolChoice
from skyrl_train.inference.dialects.openai_structured import ResponseFormat
from skyrl_train.inference.dialects.tokens import TokenTexts
from skyrl_train.inference.interface import TopLogprobs

_TEXT_ONLY = "this endpoint takes and gives text only"
_OLD = "tools has taken its place"
DONE = Frame("[DONE]")

FIELDS = (
    Field("messages", Support.SUPPORTED, MESSAGES, "text parts are joined; developer is read as system", required=True),
    MODEL,
    Field("max_completion_tokens", Support.SUPPORTED, Integer(1, MAX_TOKENS), "default: what the context leaves"),
    Field("max_tokens", Support.SUPPORTED, Integer(1, MAX_TOKENS), "the older name of max_completion_tokens"),
    *SAMPLING_FIELDS,
    Field("logprobs", Support.SUPPORTED, Boolean(), "of the distribution that was sampled from"),
    Field(
        "top_logprobs", Support.SUPPORTED, Integer(0, MAX_TOP_LOGPROBS), "needs logprobs, and engines that have them"
    ),
    Field(
        "response_format",
        Support.SUPPORTED,
        ResponseFormat(),
        "text; json_object and json_schema where the engines can be guided",
    ),
    Field("tools", Support.SUPPORTED, TOOLS, "functions only; strict is shown to the model, not enforced"),
    Field("tool_choice", Support.SUPPORTED, ToolChoice(), "auto and none"),
    Field(
        "parallel_tool_calls", Support.NEUTRAL, Exactly((True,)), "nothing here can keep a model to one call per answer"
    ),
    Field(
        "reasoning_effort",
        Support.SUPPORTED,
        Text(("none", "minimal", "low", "medium", "high", "xhigh", "max")),
        "an argument of the chat template; none also sets enable_thinking to false",
    ),
    Field("modalities", Support.NEUTRAL, Exactly((["text"],)), _TEXT_ONLY),
    Field("verbosity", Support.NEUTRAL, Exactly(("medium",)), "ask for it in a message"),
    Field("audio", Support.REFUSED, Anything(), _TEXT_ONLY),
    Field("functions", Support.REFUSED, Anything(), _OLD),
    Field("function_call", Support.REFUSED, Anything(), _OLD),
    Field("moderation", Support.REFUSED, Anything(), "nothing is moderated"),
    Field("web_search_options", Support.REFUSED, Anything(), "nothing is looked up"),
    Field("metadata", Support.IGNORED, Anything(), "sessions carry what belongs to a sample"),
    Field("prediction", Support.IGNORED, Anything(), "it would only save time"),
    Field("prompt_cache_key", Support.IGNORED, Anything(), "requests of a session share an engine's cache"),
    Field("prompt_cache_options", Support.IGNORED, Anything(), "as prompt_cache_key"),
    Field("prompt_cache_retention", Support.IGNORED, Anything(), "as prompt_cache_key"),
    Field("safety_identifier", Support.IGNORED, Anything(), "as user"),
    Field("service_tier", Support.IGNORED, Anything(), "there is one"),
    Field("store", Support.IGNORED, Anything(), "sessions store what was sampled"),
    *EXTENSION_FIELDS,
    Field(
        "chat_template_kwargs",
        Support.SUPPORTED,
        Mappings(),
        "further arguments of the chat template, such as enable_thinking",
    ),
)


def parse(body: Mapping[str, Any]) -> ChatCompletionCall:
    """Reads a body.

    Raises:
        DialectError: the body is wrong, or asks for what is not supported.
    """
    values = read_fields(FIELDS, body)
    max_tokens = _max_tokens(values)
    if values.get("top_logprobs") and not values.get("logprobs"):
        raise DialectError("top_logprobs is only allowed with logprobs: true.", "top_logprobs", "invalid_value")
    request = ChatRequest(
        messages=tuple(values["messages"]),
        params=sampling_params(
            values, max_tokens, top_logprobs=values.get("top_logprobs", 0), structured=values.get("response_format")
        ),
        max_tokens=max_tokens,
        tools=tuple(values.get("tools", ())),
        tool_choice=values.get("tool_choice", "auto"),
        template_kwargs=_template_kwargs(values),
        logprobs=values.get("logprobs", False),
    )
    return ChatCompletionCall(
        model=values["model"],
        request=request,
        streamed=values.get("stream", False),
        include_usage=include_usage(values),
        token_ids=values.get("return_token_ids", False),
    )


def error(error: DialectError) -> dict[str, Any]:
    """The body of an error response."""
    return openai_error(error)


def _max_tokens(values: Mapping[str, Any]) -> int | None:
    old, new = values.get("max_tokens"), values.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise DialectError("max_tokens and max_completion_tokens contradict each other.", "max_tokens", "invalid_value")
    return old if new is None else new


def _template_kwargs(values: Mapping[str, Any]) -> dict[str, Any]:
    effort = values.get("reasoning_effort")
    thinking = {"enable_thinking": False} if effort == "none" else {}
    asked = {} if effort is None else {"reasoning_effort": effort, **thinking}
    return {**asked, **values.get("chat_template_kwargs", {})}


@dataclass(frozen=True, slots=True)
class ChatCompletionCall:
    """A parsed body. ``token_ids``: the caller wants the ``skyrl`` objects."""

    model: str
    request: ChatRequest
    streamed: bool = False
    include_usage: bool = False
    token_ids: bool = False

    def response(self, result: ChatResult, context: ResponseContext) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        body = {
            **_head(self.model, context, "chat.completion"),
            "choices": [self._choice(choice, context.tokens) for choice in result.choices],
            "usage": usage(len(result.prompt_token_ids), result.completion_tokens),
        }
        if self.token_ids:
            body["skyrl"] = {"prompt_token_ids": result.prompt_token_ids, "reused_tokens": result.reused_tokens}
        return body

    def stream(self, context: ResponseContext) -> ChatCompletionStream:
        """The translator of one streamed response."""
        return ChatCompletionStream(self, context)

    def _choice(self, choice: ChatChoice, tokens: TokenTexts) -> dict[str, Any]:
        done = choice.generation
        shown: dict[str, Any] = {
            "index": choice.index,
            "message": choice.message.to_openai(),
            "logprobs": self.logprobs(done.token_ids, done.logprobs, done.top_logprobs, tokens),
            "finish_reason": choice.finish_reason,
        }
        if self.token_ids:
            shown["skyrl"] = {
                "token_ids": done.token_ids,
                "logprobs": done.logprobs,
                "versions": done.versions,
                "segments": done.segments,
                "restarts": done.restarts,
            }
        return shown

    def logprobs(
        self, token_ids: list[int], logprobs: list[float], top: TopLogprobs | None, tokens: TokenTexts
    ) -> dict[str, Any] | None:
        """OpenAI's log-probs of some tokens; None where the caller did not ask."""
        if not self.request.logprobs:
            return None
        alternatives = top or [[]] * len(token_ids)
        content = []
        for token_id, logprob, others in zip(token_ids, logprobs, alternatives, strict=True):
            entry = tokens.entry(token_id, logprob)
            entry["top_logprobs"] = [tokens.entry(other, value) for other, value in others]
            content.append(entry)
        return {"content": content, "refusal": None}


class ChatCompletionStream:
    """Chunks: the role of each answer, its pieces, its finish reason; then the usage where asked for, and [DONE]."""

    def __init__(self, call: ChatCompletionCall, context: ResponseContext) -> None:
        self._call = call
        self._tokens = context.tokens
        self._head = _head(call.model, context, "chat.completion.chunk")
        if call.include_usage:
            self._head["usage"] = None
        self._prompt_tokens = 0
        self._completion_tokens = 0
        # Pieces without text, log-probs or ids to show are not sent.
        self._shows_tokens = call.request.logprobs or call.token_ids

    def opened(self) -> list[Frame]:
        """The role of every answer."""
        opening = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        choices = [{"index": index, **opening} for index in range(self._call.request.params.n)]
        return [Frame({**self._head, "choices": [choice]}) for choice in choices]

    def event(self, event: ChatEvent) -> list[Frame]:
        """One chunk, two where the answer ends."""
        chunk = event.chunk
        frames = []
        if event.delta or (self._shows_tokens and chunk.token_ids):
            logprobs = self._call.logprobs(chunk.token_ids, chunk.logprobs, chunk.top_logprobs, self._tokens)
            shown: dict[str, Any] = {
                "index": event.index,
                "delta": _delta(event.delta),
                "logprobs": logprobs,
                "finish_reason": None,
            }
            if self._call.token_ids:
                shown["skyrl"] = {
                    "token_ids": chunk.token_ids,
                    "logprobs": chunk.logprobs,
                    "versions": chunk.versions,
                }
            frames.append(Frame({**self._head, "choices": [shown]}))
        if event.choice is not None:
            frames.append(self._finish(event.choice))
        return frames

    def closed(self) -> list[Frame]:
        """The usage where asked for, and [DONE]."""
        if not self._call.include_usage:
            return [DONE]
        total = usage(self._prompt_tokens, self._completion_tokens)
        return [Frame({**self._head, "choices": [], "usage": total}), DONE]

    def failed(self, error: DialectError) -> list[Frame]:
        """The error; nothing follows it."""
        return [Frame(openai_error(error))]

    def _finish(self, choice: ChatChoice) -> Frame:
        done = choice.generation
        self._prompt_tokens = len(done.prompt_token_ids)
        self._completion_tokens += len(done.token_ids)
        shown: dict[str, Any] = {
            "index": choice.index,
            "delta": {},
            "logprobs": None,
            "finish_reason": choice.finish_reason,
        }
        if not self._call.token_ids:
            return Frame({**self._head, "choices": [shown]})
        shown["skyrl"] = {"segments": done.segments, "restarts": done.restarts}
        return Frame({**self._head, "choices": [shown], "skyrl": {"prompt_token_ids": done.prompt_token_ids}})


def _head(model: str, context: ResponseContext, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{context.unique}", "object": kind, "created": context.created, "model": model}


def _delta(delta: MessageDelta) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    if delta.content:
        shown["content"] = delta.content
    if delta.reasoning_content:
        shown["reasoning_content"] = delta.reasoning_content
    if delta.tool_calls:
        shown["tool_calls"] = [_tool_call(call) for call in delta.tool_calls]
    return shown


def _tool_call(call: ToolCallDelta) -> dict[str, Any]:
    function = {"arguments": call.arguments} if call.name is None else {"name": call.name, "arguments": call.arguments}
    if call.id is None:
        return {"index": call.index, "function": function}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}

"""OpenAI's completions, the older endpoint: ``POST /v1/completions``. Prompts are text or tokens; there are no messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_train.inference.dialects.dialect import Frame, ResponseContext
from skyrl_train.inference.dialects.errors import DialectError, openai_error
from skyrl_train.inference.dialects.fields import Anything, Exactly, Field, Integer, ListOf, Support, Text, read_fields
from skyrl_train.inference.dialects.openai_chat import DONE
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
from skyrl_train.inference.dialects.tokens import TokenTexts
from skyrl_train.inference.interface import SamplingParams, TopLogprobs
from skyrl_train.inference.requests import Generation, GenerationChunk

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_PROMPTS = 128
Prompt = str | list[int]

_TOKENS = ListOf(Integer(0, 2**31 - 1), min_items=1)


@dataclass(frozen=True, slots=True)
class Prompts:
    """A text, tokens, or a list of either; read as a list of prompts."""

    @property
    def schema(self) -> dict[str, Any]:
        one = [Text(min_length=1).schema, _TOKENS.schema]
        return {"anyOf": [*one, *({"type": "array", "items": kind, "minItems": 1} for kind in one)]}

    def read(self, value: Any, param: str) -> list[Prompt]:
        if isinstance(value, str):
            return [Text(min_length=1).read(value, param)]
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(first, str):
            return ListOf(Text(min_length=1), max_items=MAX_PROMPTS).read(value, param)
        if isinstance(first, list):
            return ListOf(_TOKENS, max_items=MAX_PROMPTS).read(value, param)
        return [_TOKENS.read(value, param)]


FIELDS = (
    Field("prompt", Support.SUPPORTED, Prompts(), "a text, tokens, or a list of either", required=True),
    MODEL,
    Field("max_tokens", Support.SUPPORTED, Integer(1, MAX_TOKENS), f"default {DEFAULT_MAX_TOKENS}"),
    *SAMPLING_FIELDS,
    Field(
        "logprobs", Support.SUPPORTED, Integer(0, MAX_TOP_LOGPROBS), "alternatives per token; 0: of the sampled ones"
    ),
    Field("echo", Support.NEUTRAL, Exactly((False,)), "the prompt's tokens have no behaviour log-probs"),
    Field("best_of", Support.NEUTRAL, Exactly((1,)), "it would hide samples that were drawn; use n"),
    Field("suffix", Support.REFUSED, Anything(), "the models here write to the right only"),
    *EXTENSION_FIELDS,
)


def parse(body: Mapping[str, Any]) -> CompletionCall:
    """Reads a body.

    Raises:
        DialectError: the body is wrong, or asks for what is not supported.
    """
    values = read_fields(FIELDS, body)
    prompts = values["prompt"]
    params = sampling_params(
        values, values.get("max_tokens", DEFAULT_MAX_TOKENS), top_logprobs=values.get("logprobs", 0)
    )
    if len(prompts) * params.n > MAX_PROMPTS:
        raise DialectError(
            f"{len(prompts)} prompts with n={params.n} make more than {MAX_PROMPTS} responses.", "n", "invalid_value"
        )
    return CompletionCall(
        model=values["model"],
        prompts=prompts,
        params=params,
        streamed=values.get("stream", False),
        include_usage=include_usage(values),
        logprobs="logprobs" in values,
        token_ids=values.get("return_token_ids", False),
    )


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """A parsed body. Response number ``i`` is choice ``i % n`` of prompt ``i // n``."""

    model: str
    prompts: list[Prompt]
    params: SamplingParams
    streamed: bool = False
    include_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False

    def response(self, done: Sequence[Generation], context: ResponseContext) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        return {
            **_head(self.model, context),
            "choices": [self._choice(index, generation, context.tokens) for index, generation in enumerate(done)],
            "usage": _usage(done, self.params.n),
        }

    def stream(self, context: ResponseContext) -> CompletionStream:
        """The translator of one streamed response."""
        return CompletionStream(self, context)

    def _choice(self, index: int, done: Generation, tokens: TokenTexts) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "index": index,
            "text": done.text,
            "logprobs": self.shown_logprobs(done.token_ids, done.logprobs, done.top_logprobs, tokens, 0),
            "finish_reason": str(done.stop_reason),
        }
        if self.token_ids:
            shown["skyrl"] = {
                "prompt_token_ids": done.prompt_token_ids,
                "token_ids": done.token_ids,
                "logprobs": done.logprobs,
                "versions": done.versions,
                "segments": done.segments,
                "restarts": done.restarts,
            }
        return shown

    def shown_logprobs(
        self, token_ids: list[int], logprobs: list[float], top: TopLogprobs | None, tokens: TokenTexts, offset: int
    ) -> dict[str, Any] | None:
        """The older shape of log-probs; None where the caller did not ask. ``offset``: characters before these tokens."""
        if not self.logprobs:
            return None
        texts = [tokens[token_id].text for token_id in token_ids]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        alternatives: list[dict[str, float]] = []
        for place, (text, logprob) in enumerate(zip(texts, logprobs, strict=True)):
            others = top[place] if top is not None else []
            # The sampled token last: of two tokens that are spelt alike it is the one that counts.
            alternatives.append({**{tokens[other].text: value for other, value in others}, text: logprob})
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": alternatives, "text_offset": offsets}


class CompletionStream:
    """Chunks in the shape of whole responses; then the usage where asked for, and [DONE]."""

    def __init__(self, call: CompletionCall, context: ResponseContext) -> None:
        self._call = call
        self._tokens = context.tokens
        self._head = _head(call.model, context)
        if call.include_usage:
            self._head["usage"] = None
        self._offsets = [0] * (len(call.prompts) * call.params.n)
        self._done: dict[int, Generation] = {}
        self._shows_tokens = call.logprobs or call.token_ids

    def chunk(self, index: int, chunk: GenerationChunk) -> list[Frame]:
        """At most one frame."""
        done = chunk.generation
        if done is not None:
            self._done[index] = done
        elif not chunk.text and not (self._shows_tokens and chunk.token_ids):
            return []
        logprobs = self._call.shown_logprobs(
            chunk.token_ids, chunk.logprobs, chunk.top_logprobs, self._tokens, self._offsets[index]
        )
        if logprobs is not None:
            self._offsets[index] += sum(map(len, logprobs["tokens"]))
        shown: dict[str, Any] = {
            "index": index,
            "text": chunk.text,
            "logprobs": logprobs,
            "finish_reason": None if done is None else str(done.stop_reason),
        }
        if self._call.token_ids:
            ids = {"token_ids": chunk.token_ids, "logprobs": chunk.logprobs, "versions": chunk.versions}
            last = {} if done is None else _last(done)
            shown["skyrl"] = {**ids, **last}
        return [Frame({**self._head, "choices": [shown]})]

    def closed(self) -> list[Frame]:
        """The usage where asked for, and [DONE]."""
        if not self._call.include_usage:
            return [DONE]
        done = [self._done[index] for index in sorted(self._done)]
        return [Frame({**self._head, "choices": [], "usage": _usage(done, self._call.params.n)}), DONE]

    def failed(self, error: DialectError) -> list[Frame]:
        """The error; nothing follows it."""
        return [Frame(openai_error(error))]


def _last(done: Generation) -> dict[str, Any]:
    return {"prompt_token_ids": done.prompt_token_ids, "segments": done.segments, "restarts": done.restarts}


def _usage(done: Sequence[Generation], n: int) -> dict[str, int]:
    prompts = sum(len(generation.prompt_token_ids) for generation in done[::n])
    return usage(prompts, sum(len(generation.token_ids) for generation in done))


def _head(model: str, context: ResponseContext) -> dict[str, Any]:
    return {"id": f"cmpl-{context.unique}", "object": "text_completion", "created": context.created, "model": model}

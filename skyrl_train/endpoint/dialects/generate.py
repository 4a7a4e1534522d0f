"""vLLM's tokens in, tokens out: ``POST /inference/v1/generate``, for clients that render and parse messages themselves.

Bodies and responses are those of vLLM 0.32. Beside ``token_id``, log-probs have ``token`` (``token_id:5``), where clients of
earlier releases look for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any

from pydantic import Field

from skyrl_train.inference.interface import SamplingParams
from skyrl_train.inference.openai.body import (
    MAX_CHOICES,
    MAX_TOP_LOGPROBS,
    SEED_NOTE,
    NonEmpty,
    RequestBody,
    SamplingFields,
    StopStrings,
    StreamOptions,
    TokenCount,
    TokenId,
    Unsupported,
    Whole,
    ignored,
    stream_usage,
)
from skyrl_train.inference.openai.chat import DONE
from skyrl_train.inference.openai.completions import completions_usage
from skyrl_train.inference.openai.dialect import Frame, ResponseContext
from skyrl_train.inference.openai.errors import DialectError, openai_error
from skyrl_train.inference.requests import Generation, GenerationChunk

_LOCAL = "the engines here are not disaggregated"
_TEXT_ONLY = "this endpoint takes text only"
_TOKENS = "tokens are returned, not text"


class GenerateSampling(SamplingFields):
    """vLLM's ``SamplingParams``."""

    FORMAT_FIELD = "sampling_params.structured_outputs"

    n: Annotated[int, Whole(1, MAX_CHOICES)] | None = Field(None, description="independent responses; default 1")
    max_tokens: TokenCount | None = Field(None, description="default: what the context leaves")
    stop: StopStrings | None = Field(None, description="the tokens of the stop string stay in the response")
    seed: Annotated[int, Whole()] | None = Field(None, description=SEED_NOTE)
    logprobs: Annotated[int, Whole(0, MAX_TOP_LOGPROBS)] | None = Field(
        None, description="of each sampled token; above 1, also of alternatives"
    )
    watermarking: Annotated[Any, Unsupported("it would change what is sampled", False)] = None
    prompt_logprobs: Annotated[Any, Unsupported("the prompt's tokens have no behaviour log-probs")] = None
    prompt_logprob_start: Annotated[Any, Unsupported("as prompt_logprobs")] = None
    prompt_logprob_token_ids: Annotated[Any, Unsupported("as prompt_logprobs")] = None
    logprob_token_ids: Annotated[Any, Unsupported("use logprobs")] = None
    allowed_token_ids: Annotated[Any, Unsupported("use structured_outputs")] = None
    bad_words: Annotated[Any, Unsupported("use stop, or structured_outputs", [])] = None
    thinking_token_budget: Annotated[Any, Unsupported("max_tokens bounds it all", -1)] = None
    repetition_detection: Annotated[Any, Unsupported("use stop, or max_tokens")] = None
    trace_decode_token_ids: Annotated[Any, Unsupported("tokens are sampled")] = None
    extra_args: Annotated[Any, Unsupported("the engines have no extensions", {})] = None
    detokenize: Any = ignored(_TOKENS)
    skip_special_tokens: Any = ignored(_TOKENS)
    spaces_between_special_tokens: Any = ignored(_TOKENS)
    include_stop_str_in_output: Any = ignored(_TOKENS)
    flat_logprobs: Any = ignored("vLLM's server does not show it, either")
    output_kind: Any = ignored("stream decides")
    stream_interval: Any = ignored("a slow reader gets larger chunks")
    output_text_buffer_length: Any = ignored(_TOKENS)
    skip_clone: Any = ignored()
    skip_reading_prefix_cache: Any = ignored("no prompt log-probs are computed")
    routed_experts_prompt_start: Any = ignored("experts are not returned")


class GenerateBody(RequestBody):
    """The body of ``POST /inference/v1/generate``."""

    token_ids: Annotated[list[TokenId], Field(min_length=1)] = Field(description="the prompt")
    sampling_params: GenerateSampling = Field(description="as vLLM has them")
    model: NonEmpty | None = Field(None, description="a name that GET /v1/models lists; default: the policy")
    request_id: NonEmpty | None = Field(None, max_length=200, description="repeated in the response")
    return_token_ids: bool | None = Field(None, description="the response has the prompt's tokens")
    stream: bool | None = Field(None, description="server-sent events, [DONE] at the end")
    stream_options: StreamOptions | None = Field(None, description="include_usage; only with stream")
    output_mode: Annotated[Any, Unsupported("use /v1/completions for text", "tokens")] = None
    reasoning_ended: Annotated[Any, Unsupported("a grammar holds from the first token", True)] = None
    features: Annotated[Any, Unsupported(_TEXT_ONLY)] = None
    content_parts: Annotated[Any, Unsupported(_TEXT_ONLY, [])] = None
    kv_transfer_params: Annotated[Any, Unsupported(_LOCAL)] = None
    ec_transfer_params: Annotated[Any, Unsupported(_LOCAL)] = None
    token_offsets: Any = ignored("tokens alone reach the model")
    reasoning_parser_kwargs: Any = ignored("it belongs to reasoning_ended")
    cache_salt: Any = ignored("prefixes cached under other weights are never used")
    priority: Any = ignored("samples that become stale first are served first")


# The field of the body by the name that all routes have for it in errors.
_PARAMS = {"prompt": "token_ids", **{name: f"sampling_params.{name}" for name in GenerateSampling.model_fields}}


def error_body(error: DialectError) -> dict[str, Any]:
    """Return an error in OpenAI's shape, with the field as this body names it."""
    body = openai_error(error)
    body["error"]["param"] = _PARAMS.get(error.param or "", error.param)
    return body


def parse(body: Mapping[str, Any]) -> GenerateCall:
    """Validate a body.

    Raises:
        DialectError: the body is wrong, or asks for what is not supported.
    """
    read = GenerateBody.parse(body)
    asked = read.sampling_params
    # As in vLLM's server, ``logprobs`` counts the sampled token, which comes first.
    return GenerateCall(
        model=read.model,
        prompts=[read.token_ids],
        params=asked.sampling_params(
            asked.max_tokens,
            n=asked.n or 1,
            seed=asked.seed,
            stop=tuple(asked.stop or ()),
            top_logprobs=asked.logprobs if (asked.logprobs or 0) > 1 else 0,
            structured=asked.structured(None),
        ),
        fill_context=asked.max_tokens is None,
        streamed=bool(read.stream),
        include_usage=stream_usage(read.stream, read.stream_options),
        num_logprobs=asked.logprobs,
        request_id=read.request_id,
        token_ids=bool(read.return_token_ids),
        grammar_field=asked.FORMAT_FIELD,
    )


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A parsed body.

    Args:
        prompts: the one prompt.
        fill_context: ``params.max_tokens`` is not the caller's; a response may take what the context leaves.
        num_logprobs: log-probs per token, the sampled one's included; None: none are shown.
        token_ids: the response shows the prompt.
    """

    model: str | None
    prompts: list[list[int]]
    params: SamplingParams
    fill_context: bool = False
    streamed: bool = False
    include_usage: bool = False
    num_logprobs: int | None = None
    request_id: str | None = None
    token_ids: bool = False
    grammar_field: str = ""

    def response(self, done: Sequence[Generation], context: ResponseContext) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        return {
            "request_id": self.request_id or context.unique,
            "model": self.model,
            "created": context.created,
            "output_mode": "tokens",
            "choices": [
                {"token_ids": each.token_ids, "logprobs": self.shown_logprobs(each), **self.ending(index, each)}
                for index, each in enumerate(done)
            ],
            "usage": completions_usage(done, self.params.n),
            "prompt_token_ids": self.prompts[0] if self.token_ids else None,
        }

    def stream(self, context: ResponseContext) -> GenerateStream:
        """Return the formatter of one streamed response."""
        return GenerateStream(self, context)

    def ending(self, index: int, done: Generation) -> dict[str, Any]:
        """Return the fields of a choice that are known at its end."""
        stop_reason: int | str | None = done.stop_string
        if stop_reason is None and done.token_ids[-1:] and done.token_ids[-1] in self.params.stop_token_ids:
            stop_reason = done.token_ids[-1]
        spans, start = [], 0
        for version, run in groupby(done.versions):
            end = start + len(list(run))
            spans.append({"version": str(version), "start": start, "end": end})
            start = end
        return {
            "index": index,
            "finish_reason": str(done.stop_reason),
            "stop_reason": stop_reason,
            "weight_versions": spans,
        }

    def shown_logprobs(self, sampled: Generation | GenerationChunk) -> dict[str, Any] | None:
        """Return the log-probs of sampled tokens; None if not requested."""
        if self.num_logprobs is None:
            return None
        alternatives = sampled.top_logprobs or [[]] * len(sampled.token_ids)
        content = []
        for token, logprob, others in zip(sampled.token_ids, sampled.logprobs, alternatives, strict=True):
            top = [(token, logprob), *((other, value) for other, value in others if other != token)]
            shown = [_logprob(*entry) for entry in top[: max(self.num_logprobs, 1)]]
            content.append({**_logprob(token, logprob), "top_logprobs": shown})
        return {"content": content}


def _logprob(token: int, logprob: float) -> dict[str, Any]:
    return {"token_id": token, "token": f"token_id:{token}", "logprob": logprob, "rank": None}


class GenerateStream:
    """Formats chunks; then the usage if requested, and [DONE]."""

    def __init__(self, call: GenerateCall, context: ResponseContext) -> None:
        self._call = call
        self._request_id = call.request_id or context.unique
        self._done: dict[int, Generation] = {}
        self._shows_prompt = call.token_ids  # in the first chunk

    def chunk(self, index: int, chunk: GenerationChunk) -> list[Frame]:
        """Return at most one frame."""
        done = chunk.generation
        if done is None and not chunk.token_ids:
            return []
        choice: dict[str, Any] = {"index": index, "finish_reason": None, "stop_reason": None, "weight_versions": None}
        if done is not None:
            self._done[index] = done
            choice = self._call.ending(index, done)
        choice |= {"token_ids": chunk.token_ids, "logprobs": self._call.shown_logprobs(chunk)}
        prompt = {"prompt_token_ids": self._call.prompts[0]} if self._shows_prompt else {}
        self._shows_prompt = False
        return [self._frame(choices=[choice], **prompt)]

    def closed(self) -> list[Frame]:
        """Return the usage if requested, and [DONE]."""
        if not self._call.include_usage:
            return [DONE]
        done = [self._done[index] for index in sorted(self._done)]
        return [self._frame(choices=[], usage=completions_usage(done, self._call.params.n)), DONE]

    def failed(self, error: DialectError) -> list[Frame]:
        """Return the error, after which no frame follows."""
        return [Frame(error_body(error))]

    def _frame(self, **fields: Any) -> Frame:
        return Frame({"request_id": self._request_id, "output_mode": "tokens", **fields})

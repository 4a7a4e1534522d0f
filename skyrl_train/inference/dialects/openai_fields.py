"""The request fields that OpenAI's chat completions and completions share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_train.inference.dialects.errors import DialectError
from skyrl_train.inference.dialects.fields import (
    Anything,
    Boolean,
    Exactly,
    Field,
    Integer,
    ListOf,
    Number,
    OneOrMany,
    Shape,
    Support,
    Text,
    Zeros,
)
from skyrl_train.inference.interface import SamplingParams

MAX_STOPS = 4
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_TOKENS = 2**31 - 1  # of any response; the context is far below it
_PENALTY = "a penalty depends on the whole response, so that it could not be continued exactly after a weight update"

_STREAM_OPTIONS = Shape(
    (
        Field("include_usage", Support.SUPPORTED, Boolean(), "a last chunk with the usage"),
        Field("include_obfuscation", Support.IGNORED, Anything(), "nothing is padded"),
    )
)

MODEL = Field("model", Support.SUPPORTED, Text(min_length=1), "a name that GET /v1/models lists", required=True)

SAMPLING_FIELDS = (
    Field("temperature", Support.SUPPORTED, Number(minimum=0, maximum=2), "0 is greedy; default 1"),
    Field("top_p", Support.SUPPORTED, Number(above=0, maximum=1), "default 1"),
    Field("n", Support.SUPPORTED, Integer(1, MAX_CHOICES), "independent responses; default 1"),
    Field(
        "stop",
        Support.SUPPORTED,
        OneOrMany(ListOf(Text(min_length=1), max_items=MAX_STOPS)),
        "the text ends before the stop string; its tokens stay in the training data",
    ),
    Field("seed", Support.SUPPORTED, Integer(), "the same seed samples the same tokens from the same policy version"),
    Field("stream", Support.SUPPORTED, Boolean(), "server-sent events, [DONE] at the end"),
    Field("stream_options", Support.SUPPORTED, _STREAM_OPTIONS, "include_usage; only with stream"),
    Field("presence_penalty", Support.NEUTRAL, Exactly((0,)), _PENALTY),
    Field("frequency_penalty", Support.NEUTRAL, Exactly((0,)), _PENALTY),
    Field("logit_bias", Support.NEUTRAL, Zeros(), "the behaviour log-probs would not be the policy's"),
    Field("user", Support.IGNORED, Anything(), "sessions are named by the key"),
)

EXTENSION_FIELDS = (
    Field("top_k", Support.SUPPORTED, Integer(-1, 2**31 - 1), "0 and -1 switch it off"),
    Field("min_p", Support.SUPPORTED, Number(minimum=0, maximum=1), "0 switches it off"),
    Field("min_tokens", Support.SUPPORTED, Integer(0, MAX_TOKENS), "nothing ends the response before"),
    Field(
        "stop_token_ids",
        Support.SUPPORTED,
        ListOf(Integer(0, 2**31 - 1), max_items=64),
        "end the response, and stay in it",
    ),
    Field("ignore_eos", Support.SUPPORTED, Boolean(), "sample on behind the end of sequence"),
    Field("return_token_ids", Support.SUPPORTED, Boolean(), "adds the skyrl objects to the response"),
)


def sampling_params(values: Mapping[str, Any], max_tokens: int | None, **further: Any) -> SamplingParams:
    """The sampling parameters among ``values`` (as ``read_fields`` returns them).

    Raises:
        DialectError: two of them contradict each other.
    """
    limit = MAX_TOKENS if max_tokens is None else max_tokens
    min_tokens = values.get("min_tokens", 0)
    if min_tokens > limit:
        raise DialectError(f"min_tokens ({min_tokens}) is above max_tokens ({limit}).", "min_tokens", "invalid_value")
    return SamplingParams(
        max_tokens=limit,
        min_tokens=min_tokens,
        temperature=values.get("temperature", 1.0),
        top_p=values.get("top_p", 1.0),
        top_k=values.get("top_k") or -1,
        min_p=values.get("min_p", 0.0),
        n=values.get("n", 1),
        seed=values.get("seed"),
        stop=tuple(values.get("stop", ())),
        stop_token_ids=tuple(values.get("stop_token_ids", ())),
        ignore_eos=values.get("ignore_eos", False),
        **further,
    )


def include_usage(values: Mapping[str, Any]) -> bool:
    """Whether a stream ends with the usage.

    Raises:
        DialectError: stream options without a stream.
    """
    if "stream_options" not in values:
        return False
    if not values.get("stream"):
        raise DialectError("stream_options is only allowed with stream: true.", "stream_options", "invalid_value")
    return bool(values["stream_options"].get("include_usage"))


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """OpenAI's usage object; each token counts once."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }

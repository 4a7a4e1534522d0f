"""Request fields that dialects share: those of all dialects, and the additions of OpenAI's two completions bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, Tag

from skyrl_train.inference.interface import SamplingParams
from skyrl_train.inference.openai.body import TEXT_OR_LIST, NonEmpty, RequestBody, Unsupported, Whole, ignored
from skyrl_train.inference.openai.errors import DialectError

MAX_STOPS = 4
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_TOKENS = 2**31 - 1  # of any response; the context is far below it
SEED_NOTE = "the same seed samples the same tokens from the same policy version"
StopStrings = Annotated[
    Annotated[NonEmpty, Tag("=text")] | Annotated[list[NonEmpty], Field(max_length=MAX_STOPS), Tag("=list")],
    TEXT_OR_LIST,
    AfterValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenCount = Annotated[int, Whole(1, MAX_TOKENS)]
_PENALTY = "a penalty depends on the whole response, so that it could not be continued exactly after a weight update"


class GenerationBody(RequestBody):
    """The fields that every dialect has; those from ``top_k`` on are extensions to each of them."""

    model: NonEmpty = Field(description="a name that GET /v1/models lists")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; default 1")
    top_p: float | None = Field(None, gt=0, le=1, description="default 1")
    stream: bool | None = Field(None, description="server-sent events, [DONE] at the end")
    top_k: Annotated[int, Whole(-1, 2**31 - 1)] | None = Field(None, description="0 and -1 switch it off")
    min_p: float | None = Field(None, ge=0, le=1, description="0 switches it off")
    min_tokens: Annotated[int, Whole(0, MAX_TOKENS)] | None = Field(
        None, description="nothing ends the response before"
    )
    stop_token_ids: list[TokenId] | None = Field(None, max_length=64, description="end the response, and stay in it")
    ignore_eos: bool | None = Field(None, description="continue behind the end of sequence")
    return_token_ids: bool | None = Field(None, description="adds the skyrl objects to the response")

    def sampling_params(self, max_tokens: int | None, **further: Any) -> SamplingParams:
        """Return the sampling parameters; ``further`` are those that only some dialects have.

        Raises:
            DialectError: ``min_tokens`` is above ``max_tokens``.
        """
        limit = MAX_TOKENS if max_tokens is None else max_tokens
        min_tokens = self.min_tokens or 0
        if min_tokens > limit:
            raise DialectError(
                f"min_tokens ({min_tokens}) is above max_tokens ({limit}).", "min_tokens", "invalid_value"
            )
        return SamplingParams(
            max_tokens=limit,
            min_tokens=min_tokens,
            temperature=1.0 if self.temperature is None else float(self.temperature),
            top_p=1.0 if self.top_p is None else float(self.top_p),
            top_k=self.top_k or -1,
            min_p=float(self.min_p or 0.0),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            **further,
        )


class StreamOptions(RequestBody):
    """What OpenAI's streams end with."""

    include_usage: bool | None = Field(None, description="a last chunk with the usage")
    include_obfuscation: Any = ignored("nothing is padded")


def _without_zeros(biases: Any) -> Any:
    if not isinstance(biases, dict):
        return biases
    return {token: bias for token, bias in biases.items() if bias != 0 or isinstance(bias, bool)}


class OpenAIBody(GenerationBody):
    """The fields that OpenAI's chat completions and completions share."""

    n: Annotated[int, Whole(1, MAX_CHOICES)] | None = Field(None, description="independent responses; default 1")
    stop: StopStrings | None = Field(
        None, description="the text ends before the stop string; its tokens stay in the training data"
    )
    seed: Annotated[int, Whole()] | None = Field(None, description=SEED_NOTE)
    stream_options: StreamOptions | None = Field(None, description="include_usage; only with stream")
    presence_penalty: Annotated[Any, Unsupported(_PENALTY, 0)] = None
    frequency_penalty: Annotated[Any, Unsupported(_PENALTY, 0)] = None
    logit_bias: Annotated[
        Any,
        Unsupported("the behaviour log-probs would not be the policy's", {}),
        BeforeValidator(_without_zeros),
    ] = None
    user: Any = ignored("sessions are named by the key")

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage.

        Raises:
            DialectError: stream options without a stream.
        """
        if self.stream_options is None:
            return False
        if not self.stream:
            raise DialectError("stream_options is only allowed with stream: true.", "stream_options", "invalid_value")
        return bool(self.stream_options.include_usage)


def template_arguments(effort: str | None, further: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of the chat template: the effort of reasoning, and the caller's own, which win."""
    arguments: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        arguments["enable_thinking"] = False  # the switch that most templates have
    return {**arguments, **(further or {})}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return OpenAI's usage object; each token counts once."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }

"""The contract between the client and an inference engine.

    InferenceEngineClient ──generate / stream──> InferenceEngineInterface <──receive_weights / load_weights── weight sync

An engine samples tokens. It knows nothing about groups, rewards, staleness or other engines. For each sampled token it
returns exactly three values: the id, the behaviour log-prob (of the distribution that the token was sampled from), and
the policy version that the engine held at that moment.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, NotRequired, TypedDict

from skyrl_train.errors import ConfigError, EngineError
from skyrl_train.runtime.pickling import by_position
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.update import WeightUpdate


class StopReason(StrEnum):
    """Why a response ended. The client never returns ``ABORT``."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # ``max_tokens`` or the engine's context length was reached
    ABORT = "abort"  # interrupted; to be continued


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A grammar that the response must follow. ``value`` is a JSON schema, a regular expression or a grammar as text.

    Behaviour log-probs belong to the masked distribution. The grammar alone decides where the response may end: ``min_tokens``
    and ``ignore_eos`` have no effect with it.

    Attributes:
        continued_tokens: of a request that continues a response: the last tokens of its prompt that follow the grammar already.
    """

    kind: Literal["json_object", "json_schema", "regex", "grammar"]
    value: str = ""  # empty for json_object
    continued_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LogitAdjustment:
    """Changes of the logits before the temperature: biases, then penalties of tokens that have been used, as vLLM has them.

    With ``c`` the number of times that a token is in the response so far, its logit ``z`` becomes

        z = z + logit_bias
        z = z / repetition_penalty if z > 0 else z * repetition_penalty    if it is in the prompt or the response
        z = z - frequency_penalty * c - presence_penalty                   if c > 0

    Behaviour log-probs belong to the changed distribution.

    Attributes:
        logit_bias: pairs of a token and what is added to its logit.
        continued_tokens: of a request that continues a response: the last tokens of its prompt that belong to the response.
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    continued_tokens: int = 0

    def __post_init__(self) -> None:
        # Beyond these bounds, logits could become infinite.
        bounded = {
            "presence_penalty": (self.presence_penalty, -2, 2),
            "frequency_penalty": (self.frequency_penalty, -2, 2),
            "repetition_penalty": (self.repetition_penalty, 0.01, 100),
            **{f"logit_bias of token {token}": (bias, -100, 100) for token, bias in self.logit_bias},
        }
        for name, (value, least, most) in bounded.items():
            if not least <= value <= most:
                raise ConfigError(f"sampling_params.{name} must be between {least} and {most}, got {value}")
        if any(token < 0 for token, _ in self.logit_bias):
            raise ConfigError("sampling_params.logit_bias has a negative token")

    @property
    def counts(self) -> bool:
        """Whether it depends on how often tokens are in the response, apart from the prompt."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0


@by_position
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of one response.

    ``temperature`` 0 is greedy; log-probs then belong to temperature 1. ``top_k`` <= 0, ``top_p`` 1 and ``min_p`` 0 disable
    the filters. ``seed`` None uses the engine's own random stream. ``stop`` strings end a response at the token that
    completes one of them; the client matches them, also where engines end requests at them. ``top_logprobs`` is the number of
    alternatives per token. The client samples ``n`` responses; engines take one.

    Raises:
        ConfigError: (constructor) a value is impossible.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int = 0
    structured: StructuredOutput | None = None
    adjustment: LogitAdjustment | None = None

    def __post_init__(self) -> None:
        problem = ""
        if not self.max_tokens >= 1:
            problem = f"max_tokens must be at least 1, got {self.max_tokens}"
        elif not 0 <= self.min_tokens <= self.max_tokens:
            problem = f"min_tokens must be between 0 and max_tokens ({self.max_tokens}), got {self.min_tokens}"
        elif not (math.isfinite(self.temperature) and self.temperature >= 0):
            problem = f"temperature must be finite and >= 0, got {self.temperature}"
        elif not 0 < self.top_p <= 1:
            problem = f"top_p must be in (0, 1], got {self.top_p}"
        elif not 0 <= self.min_p <= 1:
            problem = f"min_p must be in [0, 1], got {self.min_p}"
        elif not self.n >= 1:
            problem = f"n must be at least 1, got {self.n}"
        elif not all(self.stop):
            problem = "stop must not contain an empty string"
        elif not self.top_logprobs >= 0:
            problem = f"top_logprobs must be at least 0, got {self.top_logprobs}"
        if problem:
            raise ConfigError(f"sampling_params.{problem}")

    @classmethod
    def parse(cls, params: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
        """Build the parameters from a mapping (configuration, HTTP body). ``SamplingParams`` are returned unchanged.

        Raises:
            ConfigError: an unknown key or an impossible value; the message names it.
        """
        if isinstance(params, SamplingParams):
            return params
        values = {key: value for key, value in (params or {}).items() if value is not None}
        known = cls.__dataclass_fields__
        unknown = sorted(values.keys() - known.keys())
        if unknown:
            raise ConfigError(f"sampling_params.{unknown[0]} is unknown; known: {', '.join(sorted(known))}")
        for key in ("stop", "stop_token_ids"):
            if key in values:
                values[key] = (values[key],) if isinstance(values[key], str) else tuple(values[key])
        return cls(**values)


class InferenceEngineInput(TypedDict, total=False):
    """A batch of requests. Exactly one of ``prompts`` (conversations) and ``prompt_token_ids`` is given.

    ``sampling_params`` are those of every request; None: the defaults of :class:`SamplingParams`. ``session_ids`` has one per
    prompt: requests of a session stay on one engine.
    ``priority``: a lower one is scheduled first by engines with ``capabilities.priorities``; others ignore it.
    ``adapter``: the name of a loaded LoRA adapter (``load_adapter``). ``chunk_tokens``: tokens per streamed chunk (default 1),
    where ``capabilities.chunked_streaming``. ``detokenize=False``: the client leaves ``responses`` empty; engines ignore it.
    Stop strings of the sampling parameters are the client's: engines with ``capabilities.stop_strings`` end a request at one with
    the stop reason "abort", so that the client continues it if it has found none. Others sample on.
    """

    prompts: Sequence[Sequence[Mapping[str, Any]]] | None
    prompt_token_ids: Sequence[Sequence[int]] | None
    sampling_params: SamplingParams | Mapping[str, Any] | None
    session_ids: Sequence[str] | None
    priority: int
    adapter: str | None
    chunk_tokens: int
    detokenize: bool


# Per sampled token the most likely alternatives, (token id, log-prob), most likely first.
TopLogprobs = list[list[tuple[int, float]]]


class InferenceEngineOutput(TypedDict):
    """One entry per request, in order; the inner lists have one entry per sampled token.

    ``response_logprobs`` are natural logarithms. ``stop_reasons`` are :class:`StopReason` values. Only engines return
    ``"abort"``, together with the tokens sampled so far (possibly none).
    """

    responses: list[str]
    response_ids: list[list[int]]
    stop_reasons: list[str]
    response_logprobs: list[list[float]]
    response_versions: list[list[int]]
    response_top_logprobs: NotRequired[list[TopLogprobs]]  # only if ``top_logprobs`` > 0
    cached_tokens: NotRequired[list[int]]  # see :class:`TokenChunk`; only from engines that cache prefixes


@by_position
@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Tokens of one response in sampling order. ``stop_reason`` is None before the last chunk, which may be empty.

    A token that ends the response (end of sequence, a stop token) must come in the chunk that has the stop reason: only
    the engine knows all such tokens, and if it dies after an earlier chunk, the client would continue a finished response.
    ``top_logprobs`` is aligned with the tokens if ``top_logprobs`` > 0, else None; an empty chunk may have None.
    ``cached_tokens`` is the number of prompt tokens that were not computed, because the engine had cached them. At least one
    chunk of a response has it; 0: none, or the engine does not know.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    stop_reason: StopReason | None = None
    top_logprobs: TopLogprobs | None = None
    cached_tokens: int = 0


def output_of(chunks: Sequence[TokenChunk], texts: Sequence[str] | None = None) -> InferenceEngineOutput:
    """Return whole responses as an output. Without ``texts``, ``responses`` are empty strings, as engines return them."""
    output = InferenceEngineOutput(
        responses=list(texts) if texts is not None else [""] * len(chunks),
        response_ids=[chunk.token_ids for chunk in chunks],
        stop_reasons=[str(chunk.stop_reason) for chunk in chunks],
        response_logprobs=[chunk.logprobs for chunk in chunks],
        response_versions=[chunk.versions for chunk in chunks],
    )
    if any(chunk.top_logprobs is not None for chunk in chunks):
        output["response_top_logprobs"] = [chunk.top_logprobs or [] for chunk in chunks]
    if any(chunk.cached_tokens for chunk in chunks):
        output["cached_tokens"] = [chunk.cached_tokens for chunk in chunks]
    return output


def only_chunk(output: InferenceEngineOutput) -> TokenChunk:
    """Return the only response of an output; the inverse of :func:`output_of`."""
    top_logprobs = output.get("response_top_logprobs")
    return TokenChunk(
        output["response_ids"][0],
        output["response_logprobs"][0],
        output["response_versions"][0],
        StopReason(output["stop_reasons"][0]),
        None if top_logprobs is None else top_logprobs[0],
        output.get("cached_tokens", [0])[0],
    )


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """The features of an engine. The client and the trainers read this instead of probing.

    ``chunked_streaming``: streams with larger chunks cost less, so that the client can keep the tokens of a long response
    without a cost per token. ``stop_strings``: the engine ends a request at a stop string (see :class:`InferenceEngineInput`), so
    that those chunks can be large, too. ``structured_output``: the engine follows grammars. ``grammar_continuation``: with
    :mod:`skyrl_train.inference.grammar`, as the embedded engine and vLLM do. Without it, an interrupted response with a grammar
    starts over, its masks are not repeated in training, and tool calls cannot be forced. ``logit_adjustment``: the engine applies
    penalties and biases. ``min_p``, ``logit_bias``: these two are not excluded, as they are in vLLM with speculative decoding.
    ``count_continuation``: with ``LogitAdjustment.continued_tokens``, so that counts continue with a
    continued response. Without it, an interrupted response whose penalties count starts over. ``weight_receivers``: the processes
    that receive weights which are broadcast. ``machine``: whose shared memory the engine maps instead
    (``weight_sync.shared_area.machine``); "": it maps none.
    """

    pause_modes: frozenset[PauseMode]
    transports: frozenset[str]
    max_model_len: int
    streaming: bool = True
    batch_invariant: bool = False
    sleep: bool = False
    max_top_logprobs: int = 0
    structured_output: bool = False
    grammar_continuation: bool = False
    logit_adjustment: bool = False
    min_p: bool = True
    logit_bias: bool = True
    count_continuation: bool = False
    priorities: bool = False
    adapters: bool = False
    chunked_streaming: bool = False
    stop_strings: bool = False
    weight_receivers: int = 1
    machine: str = ""


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """A snapshot of an engine.

    Attributes:
        running: requests that it samples now, or has begun and frozen.
        waiting: requests that wait for a place; those that arrived while it is paused count, too.
        generated_tokens: since the start, as ``prefill_tokens``.
        busy_s: seconds since the start with requests, neither paused nor asleep.
        kv_cache_usage: share of the KV cache's blocks that requests hold, 0 to 1. None: the cache has no fixed size, or the
            engine does not say.
    """

    alive: bool
    policy_version: int
    running: int = 0
    waiting: int = 0
    paused: bool = False
    generated_tokens: int = 0
    prefill_tokens: int = 0
    busy_s: float = 0.0
    kv_cache_usage: float | None = None


class InferenceEngineInterface(ABC):
    """One engine. All methods run on the control loop and never block it.

    Cancelling the task that awaits ``generate`` (or closing the iterator of ``stream``) aborts the request in the engine.
    Any method raises :class:`~skyrl_train.errors.EngineDeadError` once the engine is gone, pending calls included.
    """

    @property
    @abstractmethod
    def capabilities(self) -> EngineCapabilities:
        """The features that this engine supports."""

    @property
    @abstractmethod
    def policy_version(self) -> int:
        """The version that ``load_weights`` loaded last; -1 before the first weight sync."""

    @abstractmethod
    async def start(self) -> None:
        """Start the engine. Returns when it can take requests."""

    @abstractmethod
    async def generate(self, engine_input: InferenceEngineInput) -> InferenceEngineOutput:
        """Sample one response per prompt in ``prompt_token_ids`` (``n`` must be 1). Returns when all have ended.

        ``responses`` are empty strings: engines handle tokens only, the client decodes.

        Raises:
            RequestError: a prompt is empty or does not fit the context.
        """

    @abstractmethod
    def stream(self, engine_input: InferenceEngineInput) -> AsyncIterator[TokenChunk]:
        """Like ``generate`` for one prompt; yields tokens as they are sampled."""

    @abstractmethod
    async def abort_generation(self) -> None:
        """Abort every request. Returns when none runs or waits; their calls return with ``"abort"``."""

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling. Returns when no further token will be sampled (under ``wait``: when all requests have ended).

        Requests that arrive while paused wait, in every mode.
        """

    @abstractmethod
    async def resume(self) -> None:
        """Resume sampling. After ``pause("recompute")`` the KV caches of frozen requests are rebuilt first."""

    @abstractmethod
    async def sleep(self, level: int = 1) -> None:
        """Free device memory while paused. Only where ``capabilities.sleep``. An engine that sleeps already stays as it is.

        Args:
            level: 1: the weights stay in main memory; 2: they may be lost, and an update must be loaded before ``resume``.
        """

    @abstractmethod
    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the freed memory back; the engine stays paused.

        Args:
            tags: ``["weights"]``: enough to load an update; ``["kv_cache"]``: the rest; None: all of it. Memory that is there
                already is left alone.
        """

    @abstractmethod
    async def reset_prefix_cache(self) -> None:
        """Drop cached prefixes; a no-op for engines without a prefix cache."""

    @abstractmethod
    async def receive_weights(self, update: WeightUpdate) -> None:
        """*Transfer*: bring the update's bytes to where ``load_weights`` needs them, while the engine serves."""

    @abstractmethod
    async def load_weights(self, update: WeightUpdate) -> None:
        """*Load*: swap the received update into the model. The engine must be paused.

        Every token sampled after this carries ``update.version``.

        Raises:
            EngineError: a name, shape or dtype does not fit, or the checksum differs. The old weights stay.
        """

    async def served_checksum(self) -> str:
        """Return the checksum of the served weights in the layout of the update loaded last; it equals the update's own.

        Raises:
            EngineError: this engine cannot read its weights back.
        """
        raise EngineError(f"{type(self).__name__} cannot read its weights back.")

    async def load_tokenizer(self, grammars: bool) -> None:
        """Load what requests with stop strings need, while the engine serves; a no-op where that is always loaded.

        Args:
            grammars: and what requests with a grammar need.

        Raises:
            GrammarError: what grammars need cannot be loaded.
        """
        return

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter (peft's folder format) that requests may name. Only where ``capabilities.adapters``."""
        raise EngineError(f"{type(self).__name__} has no adapters; ask capabilities.adapters first.")

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter. Only where ``capabilities.adapters``."""
        raise EngineError(f"{type(self).__name__} has no adapters; ask capabilities.adapters first.")

    @abstractmethod
    async def health(self) -> EngineHealth:
        """Return a snapshot. For a dead engine it has ``alive=False``; this is the only method that does not raise then."""

    @abstractmethod
    async def teardown(self) -> None:
        """Stop the engine and free its resources. Idempotent; pending requests raise ``EngineDeadError``."""

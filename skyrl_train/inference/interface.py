"""What an inference engine is: the contract that the client speaks and every engine implements.

    InferenceEngineClient ──generate / stream──> InferenceEngineInterface <──receive_weights / load_weights── publisher

An engine samples tokens. It knows nothing about groups, rewards, staleness or other engines. It tells the truth about
three things for each sampled token: the id, the behaviour log-prob of the distribution it was really drawn from, and the
policy version that it held at that moment.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, NotRequired, TypedDict

from skyrl_train.errors import ConfigError, EngineError
from skyrl_train.inference.weight_update import WeightUpdate


class PauseMode(StrEnum):
    """What happens to the requests that run while weights are swapped (SEMANTICS 2.5)."""

    KEEP = "keep"  # they freeze; their KV cache stays, computed by the old weights
    RECOMPUTE = "recompute"  # they freeze; their KV cache is computed again under the new weights
    ABORT = "abort"  # they return what they have with stop reason "abort"; the client resubmits them
    WAIT = "wait"  # they run to their end first; new ones wait


class StopReason(StrEnum):
    """Why a response ended. ``ABORT`` never leaves the client."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # ``max_tokens`` or the engine's context length was reached
    ABORT = "abort"  # interrupted; to be continued


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A grammar that the response must follow. ``value`` is a JSON schema, a regular expression or a grammar in text form.

    Behaviour log-probs are then those of the masked distribution. A grammar's state cannot be handed to another segment,
    so that such a request starts over where others continue (SEMANTICS 2.4).
    """

    kind: Literal["json_object", "json_schema", "regex", "grammar"]
    value: str = ""  # empty for json_object


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one response is sampled.

    ``temperature`` 0 is greedy (log-probs are then those of temperature 1). ``top_k`` <= 0, ``top_p`` 1 and ``min_p`` 0
    switch the filters off. ``seed`` None draws from the engine's own stream. ``stop`` strings end a response at the token
    that completes one of them; engines need not know them, the client matches them. ``top_logprobs`` asks for that many
    alternatives per token.
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

    def __post_init__(self) -> None:
        def check(ok: bool, what: str) -> None:
            if not ok:
                raise ConfigError(f"sampling_params.{what}")

        check(self.max_tokens >= 1, f"max_tokens must be at least 1, got {self.max_tokens}")
        check(
            0 <= self.min_tokens <= self.max_tokens,
            f"min_tokens must be between 0 and max_tokens ({self.max_tokens}), got {self.min_tokens}",
        )
        check(
            math.isfinite(self.temperature) and self.temperature >= 0,
            f"temperature must be finite and >= 0, got {self.temperature}",
        )
        check(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}")
        check(0 <= self.min_p <= 1, f"min_p must be in [0, 1], got {self.min_p}")
        check(self.n >= 1, f"n must be at least 1, got {self.n}")
        check(all(self.stop), "stop must not contain an empty string")
        check(self.top_logprobs >= 0, f"top_logprobs must be at least 0, got {self.top_logprobs}")

    @classmethod
    def parse(cls, params: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
        """Builds the parameters from a plain mapping (config, HTTP body); returns what is parsed already as it is.

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

    ``priority``: a lower one is scheduled first by engines with ``capabilities.priorities``; others ignore it.
    ``adapter``: the name of a LoRA adapter that the engines have loaded (``load_adapter``). ``chunk_tokens``: how many
    tokens a streamed chunk should have (1), where ``capabilities.chunked_streaming``. ``detokenize`` False: the caller reads
    no text, so that the client leaves ``responses`` empty; engines never look at it.
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

    ``response_logprobs`` are natural logarithms. ``stop_reasons`` are :class:`StopReason` values. An aborted request has
    the tokens sampled so far (possibly none) and stop reason ``"abort"``; only engines return it, never the client.
    """

    responses: list[str]
    response_ids: list[list[int]]
    stop_reasons: list[str]
    response_logprobs: list[list[float]]
    response_versions: list[list[int]]
    response_top_logprobs: NotRequired[list[TopLogprobs]]  # only where ``top_logprobs`` was asked for


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Tokens of one response in the order sampled. ``stop_reason`` is None until the last chunk (which may be empty).

    A token that ends the response (the model's end-of-sequence token, a stop token) comes in a chunk with its stop
    reason, never before it: only the engine knows all of them, and when it dies after such a chunk, the response has
    ended and is not continued elsewhere. ``top_logprobs`` is aligned with the tokens where they were asked for, else
    None; an empty chunk may have None in either case.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    stop_reason: StopReason | None = None
    top_logprobs: TopLogprobs | None = None


def output_of(chunks: Sequence[TokenChunk], texts: Sequence[str] | None = None) -> InferenceEngineOutput:
    """Whole responses as an output; without ``texts`` they are empty, as engines return them."""
    output = InferenceEngineOutput(
        responses=list(texts) if texts is not None else [""] * len(chunks),
        response_ids=[chunk.token_ids for chunk in chunks],
        stop_reasons=[str(chunk.stop_reason) for chunk in chunks],
        response_logprobs=[chunk.logprobs for chunk in chunks],
        response_versions=[chunk.versions for chunk in chunks],
    )
    if any(chunk.top_logprobs is not None for chunk in chunks):
        output["response_top_logprobs"] = [chunk.top_logprobs or [] for chunk in chunks]
    return output


def only_chunk(output: InferenceEngineOutput) -> TokenChunk:
    """The response of an output that has one; what :func:`output_of` made an output of."""
    top_logprobs = output.get("response_top_logprobs")
    return TokenChunk(
        output["response_ids"][0],
        output["response_logprobs"][0],
        output["response_versions"][0],
        StopReason(output["stop_reasons"][0]),
        None if top_logprobs is None else top_logprobs[0],
    )


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """What an engine can do; the client and the trainers ask here instead of probing.

    ``chunked_streaming``: a stream of larger chunks costs less, so that the client can keep what a long response has so
    far without paying for each token.
    """

    pause_modes: frozenset[PauseMode]
    transports: frozenset[str]
    max_model_len: int
    streaming: bool = True
    batch_invariant: bool = False
    sleep: bool = False
    max_top_logprobs: int = 0
    structured_output: bool = False
    priorities: bool = False
    adapters: bool = False
    chunked_streaming: bool = False


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """A snapshot. ``running`` and ``waiting`` count requests; token counters are totals since the start, and so is ``busy_s``:
    seconds with something to do, during which the engine was neither paused nor asleep."""

    alive: bool
    policy_version: int
    running: int = 0
    waiting: int = 0
    paused: bool = False
    generated_tokens: int = 0
    prefill_tokens: int = 0
    busy_s: float = 0.0


class InferenceEngineInterface(ABC):
    """One engine. All methods run on the control loop and never block it.

    Cancelling the task that awaits ``generate`` (or closing the iterator of ``stream``) aborts the request in the engine.
    Any method raises :class:`~skyrl_train.errors.EngineDeadError` once the engine is gone, pending calls included.
    """

    @property
    @abstractmethod
    def capabilities(self) -> EngineCapabilities:
        """What this engine can do."""

    @property
    @abstractmethod
    def policy_version(self) -> int:
        """The version that ``load_weights`` loaded last; -1 before the first publication."""

    @abstractmethod
    async def start(self) -> None:
        """Brings the engine up; returns when it can take requests."""

    @abstractmethod
    async def generate(self, engine_input: InferenceEngineInput) -> InferenceEngineOutput:
        """Samples one response per prompt in ``prompt_token_ids`` (``n`` must be 1) and returns when all have ended.

        ``responses`` are empty strings: engines deal in tokens, the client decodes.

        Raises:
            RequestError: a prompt is empty or does not fit the context.
        """

    @abstractmethod
    def stream(self, engine_input: InferenceEngineInput) -> AsyncIterator[TokenChunk]:
        """Like ``generate`` for exactly one prompt; yields tokens as they are sampled."""

    @abstractmethod
    async def abort_generation(self) -> None:
        """Aborts every request; returns when none runs or waits any more. Their calls return with ``"abort"``."""

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None:
        """Stops sampling; returns when no token will be sampled any more (under ``wait``: when all requests ended).

        Requests that arrive while paused wait, whatever the mode.
        """

    @abstractmethod
    async def resume(self) -> None:
        """Samples again. After ``pause("recompute")`` the frozen requests' KV caches are rebuilt first."""

    @abstractmethod
    async def sleep(self, level: int = 1) -> None:
        """Frees device memory (1: KV cache and weights offloaded). Only where ``capabilities.sleep``."""

    @abstractmethod
    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Takes the memory back."""

    @abstractmethod
    async def reset_prefix_cache(self) -> None:
        """Forgets cached prefixes; a no-op for engines that keep none."""

    @abstractmethod
    async def receive_weights(self, update: WeightUpdate) -> None:
        """*Transfer*: brings the update's bytes to where ``load_weights`` needs them. The engine goes on serving."""

    @abstractmethod
    async def load_weights(self, update: WeightUpdate) -> None:
        """*Load*: swaps the received update into the model. The engine must be paused.

        Every token sampled after this carries ``update.version``.

        Raises:
            EngineError: a name, shape or dtype does not fit, or the checksum differs. The old weights stay.
        """

    async def served_checksum(self) -> str:
        """The checksum of the weights being served, laid out like the update loaded last: equal to that update's own.

        Raises:
            EngineError: this engine cannot read its weights back.
        """
        raise EngineError(f"{type(self).__name__} cannot read its weights back.")

    async def load_adapter(self, name: str, path: str) -> None:
        """Loads a LoRA adapter (peft's folder format) that requests may name. Only where ``capabilities.adapters``."""
        raise EngineError(f"{type(self).__name__} has no adapters; ask capabilities.adapters first.")

    async def unload_adapter(self, name: str) -> None:
        """Forgets an adapter. Only where ``capabilities.adapters``."""
        raise EngineError(f"{type(self).__name__} has no adapters; ask capabilities.adapters first.")

    @abstractmethod
    async def health(self) -> EngineHealth:
        """Returns a snapshot; of a dead engine one that says so (the one method that does not raise then)."""

    @abstractmethod
    async def teardown(self) -> None:
        """Stops the engine and frees what it holds. Idempotent; pending requests raise ``EngineDeadError``."""

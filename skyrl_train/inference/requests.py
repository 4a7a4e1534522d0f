"""The request for one response and its result, as chat, completions and sessions use them.

GenerationRequest ──client.complete──> Generation
                  ──client.stream────> GenerationChunk ... GenerationChunk(generation=...)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from skyrl_train.inference.interface import EngineCapabilities, SamplingParams, StopReason, TopLogprobs
from skyrl_train.types import GrammarSpan


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt and the sampling parameters of one response (``params.n`` is ignored: ``choice`` numbers the responses).

    Args:
        session_id: requests of one session stay on one engine while it serves, and are recorded and replayed together.
        choice: number of the response; each derives its own seed.
        adapter: a LoRA adapter by name.
        oldest_version: the oldest policy version that the response will be trained with (a session's earlier turns);
            engines with priorities schedule the oldest first. None: the current one.
        detokenize: False leaves ``Generation.text`` empty, unless stop strings require decoding.
    """

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    session_id: str | None = None
    choice: int = 0
    adapter: str | None = None
    oldest_version: int | None = None
    detokenize: bool = True


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished response. Each list has one entry per sampled token.

    ``text`` has no special tokens and ends before the stop string; ``token_ids`` keeps the tokens of the stop string.
    ``cached_tokens`` of the prompt were not computed, because the engine had cached them; 0 also where it does not know.
    ``segments`` counts the engine requests, ``restarts`` those that started over. ``grammar`` covers the whole response; None
    without one, or where the trainer cannot mask the same tokens (``EngineCapabilities.grammar_continuation``).
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    stop_reason: StopReason
    text: str
    top_logprobs: TopLogprobs | None = None
    stop_string: str | None = None
    segments: int = 1
    restarts: int = 0
    grammar: GrammarSpan | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """The tokens sampled since the last chunk.

    ``text`` may lag behind the tokens: unfinished characters, and those that could belong to a stop string, come with a
    later chunk. The last chunk has ``generation``; the joined texts are its text. The chat service and runs of completions add
    ``prompt_token_ids`` to the first chunk of a response.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    text: str = ""
    top_logprobs: TopLogprobs | None = None
    generation: Generation | None = None
    prompt_token_ids: list[int] | None = None


class GenerationService(Protocol):
    """Samples single responses. The client, its forwarder in rollout actors and the agent harness implement it."""

    @property
    @abstractmethod
    def capabilities(self) -> EngineCapabilities:
        """The features that every routed engine has."""

    @property
    @abstractmethod
    def policy_version(self) -> int:
        """The version that every routed engine holds; -1 before the first weight sync."""

    def max_tokens_of(self, session_id: str | None) -> int | None:
        """Return the run's limit on the tokens of a response in this session, whatever is asked for; None: there is none."""
        return None

    @abstractmethod
    async def complete(self, request: GenerationRequest) -> Generation:
        """Sample one response to its end, across updates and engine failures. Cancelling the caller cancels it.

        Raises:
            ConfigError: the engines do not support a sampling parameter.
            RequestError: the prompt is empty or does not fit the context.
            NoEngineError: no engine is left, and none came back in time.
        """

    @abstractmethod
    def stream(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        """Like ``complete``, in pieces. Closing the iterator cancels the request."""

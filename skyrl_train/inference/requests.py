"""One response, as the layers above the client ask for it and get it: chat, completions, sessions.

GenerationRequest ──client.complete──> Generation
                  ──client.stream────> GenerationChunk ... GenerationChunk(generation=...)
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from skyrl_train.inference.interface import EngineCapabilities, SamplingParams, StopReason, TopLogprobs


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt and how one response to it is sampled (``params.n`` is ignored: ``choice`` counts the responses).

    Args:
        session_id: requests of one session stay on one engine while it lives, and are recorded and replayed under it.
        choice: tells the responses of one request apart in their seeds.
        adapter: a LoRA adapter by name.
        oldest_version: the oldest policy version that the response will be trained with (a session's earlier turns);
            engines that know priorities take the oldest first. None: the current one.
        detokenize: False: nobody reads ``Generation.text``, which is empty unless stop strings had it decoded anyway.
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
    """A response that has ended: one entry per sampled token in each list.

    ``text`` is decoded without special tokens and ends before the stop string, whose tokens ``token_ids`` keeps.
    ``segments`` counts the engine requests it took, ``restarts`` those that began again from nothing.
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


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """What was sampled since the last chunk.

    ``text`` may lag behind the tokens: characters that could still become part of a stop string, or that are not whole
    yet, come with a later chunk. The last chunk has ``generation``; all texts joined are its text.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    text: str = ""
    top_logprobs: TopLogprobs | None = None
    generation: Generation | None = None


class GenerationService(Protocol):
    """The part of the client that chat and completions stand on."""

    @property
    def capabilities(self) -> EngineCapabilities:
        """What every engine in the routing can do."""

    @property
    def policy_version(self) -> int:
        """The version that every routed engine holds."""

    async def complete(self, request: GenerationRequest) -> Generation:
        """Samples one response to its end, whatever happens underneath. Cancelling the caller cancels it.

        Raises:
            ConfigError: a sampling parameter is not supported by the engines.
            RequestError: the prompt is empty or does not fit the context.
            NoEngineError: no engine is left, and none came back in time.
        """

    def stream(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        """Like ``complete``, in pieces. Closing the iterator cancels the request."""

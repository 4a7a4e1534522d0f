"""One request across any number of segments: the arithmetic of SEMANTICS 2.4, pure.

    caller's request ──> Continuation ──next_segment──> engine ──add(chunk)──┐
                              ^                                              │ "abort": what is left is the next segment
                              └──────────────────────────────────────────────┘

What goes to an engine again is the prompt's tokens plus the tokens sampled so far; nothing is decoded and encoded again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_train.errors import EngineError
from skyrl_train.inference.interface import InferenceEngineInput, SamplingParams, StopReason, TokenChunk
from skyrl_train.inference.randomness import mix, segment_seed
from skyrl_train.inference.stop_strings import StopStringMatcher


@dataclass(frozen=True, slots=True)
class Segment:
    """What one engine is asked for."""

    prompt_token_ids: list[int]
    sampling_params: SamplingParams

    def to_engine_input(self, session_id: str | None) -> InferenceEngineInput:
        """The segment in the shape that engines take."""
        return InferenceEngineInput(
            prompt_token_ids=[self.prompt_token_ids],
            sampling_params=self.sampling_params,
            session_ids=None if session_id is None else [session_id],
        )


class Continuation:
    """Accumulates one response. ``choice`` tells the ``n`` responses of one request apart in the seed.

    Invariant: ``token_ids``, ``logprobs`` and ``versions`` have the same length, never above ``max_tokens``, and never
    grow after ``stop_reason`` is set.
    """

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        choice: int = 0,
        matcher: StopStringMatcher | None = None,
    ) -> None:
        if params.stop and matcher is None:
            raise ValueError("stop strings need a matcher")
        self._prompt = list(prompt_token_ids)
        self._params = params
        # Mixed once, so that a caller's neighbouring seeds never share a stretch of the stream.
        self._seed = None if params.seed is None else mix(params.seed, choice)
        self._matcher = matcher
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.stop_reason: StopReason | None = None

    @property
    def needs_stream(self) -> bool:
        """Stop strings are looked for as tokens arrive, so that a match ends the sampling."""
        return self._matcher is not None

    @property
    def text_end(self) -> int | None:
        """Characters of the decoded response before the matched stop string; None without a match."""
        return None if self._matcher is None else self._matcher.text_end

    def next_segment(self) -> Segment | None:
        """What is still to be sampled; None when the response has ended."""
        sampled = len(self.token_ids)
        if self.stop_reason is None and sampled >= self._params.max_tokens:
            self.stop_reason = StopReason.LENGTH  # a spent budget sends nothing
        if self.stop_reason is not None:
            return None
        params = dataclasses.replace(
            self._params,
            max_tokens=self._params.max_tokens - sampled,
            min_tokens=max(0, self._params.min_tokens - sampled),
            seed=None if self._seed is None else segment_seed(self._seed, sampled),
            stop=(),
            n=1,
        )
        return Segment(self._prompt + self.token_ids, params)

    def add(self, chunk: TokenChunk) -> None:
        """Takes what an engine sampled. After a stop-string match, the tokens behind it are dropped.

        Raises:
            EngineError: the engine broke the contract (ragged lists, more tokens than asked for).
        """
        if self.stop_reason is not None:
            raise EngineError("an engine returned tokens for a response that has ended")
        if not len(chunk.token_ids) == len(chunk.logprobs) == len(chunk.versions):
            raise EngineError(
                f"an engine returned {len(chunk.token_ids)} tokens, {len(chunk.logprobs)} log-probs and "
                f"{len(chunk.versions)} versions for the same segment"
            )
        if len(self.token_ids) + len(chunk.token_ids) > self._params.max_tokens:
            raise EngineError("an engine returned more tokens than max_tokens")
        for token_id, logprob, version in zip(chunk.token_ids, chunk.logprobs, chunk.versions, strict=True):
            self.token_ids.append(token_id)
            self.logprobs.append(logprob)
            self.versions.append(version)
            may_stop = len(self.token_ids) > self._params.min_tokens
            if self._matcher is not None and self._matcher.feed(token_id, may_stop=may_stop):
                self.stop_reason = StopReason.STOP
                return
        if chunk.stop_reason not in (None, StopReason.ABORT):
            self.stop_reason = chunk.stop_reason

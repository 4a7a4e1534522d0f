"""One request across any number of segments: the arithmetic of SEMANTICS 2.4, pure.

    caller's request ──> Continuation ──next_segment──> engine ──add(chunk)──┐
                              ^                                              │ "abort": what is left is the next segment
                              └──────────────────────────────────────────────┘

What goes to an engine again is the prompt's tokens plus the tokens sampled so far; nothing is decoded and encoded again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skyrl_train.errors import EngineError
from skyrl_train.inference.interface import (
    InferenceEngineInput,
    SamplingParams,
    StopReason,
    TokenChunk,
    TopLogprobs,
)
from skyrl_train.inference.randomness import mix, segment_seed
from skyrl_train.inference.response_text import ResponseText


@dataclass(frozen=True, slots=True)
class Segment:
    """What one engine is asked for. ``number`` counts the segments of a response."""

    number: int
    prompt_token_ids: list[int]
    sampling_params: SamplingParams

    def to_engine_input(self, session_id: str | None, priority: int, adapter: str | None) -> InferenceEngineInput:
        """The segment in the shape that engines take."""
        return InferenceEngineInput(
            prompt_token_ids=[self.prompt_token_ids],
            sampling_params=self.sampling_params,
            session_ids=None if session_id is None else [session_id],
            priority=priority,
            adapter=adapter,
        )


class Continuation:
    """Accumulates one response. ``choice`` tells the ``n`` responses of one request apart in the seed.

    ``make_text`` begins the decoding of a response; without it there is no text and there are no stop strings. What has
    a grammar cannot be continued, because the engine's position in the grammar is lost: it starts over.

    Invariant: ``token_ids``, ``logprobs`` and ``versions`` have the same length, never above ``max_tokens``, and never
    grow after ``stop_reason`` is set.
    """

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        choice: int = 0,
        make_text: Callable[[], ResponseText] | None = None,
    ) -> None:
        if params.stop and make_text is None:
            raise ValueError("stop strings need text to be looked for in")
        self._prompt = list(prompt_token_ids)
        self._params = params
        # Mixed once, so that a caller's neighbouring seeds never share a stretch of the stream.
        self._seed = None if params.seed is None else mix(params.seed, choice)
        self._make_text = make_text
        self._number = 0
        self.segments = 0
        self.restarts = 0
        self.stop_reason: StopReason | None = None
        self._begin()

    def _begin(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.top_logprobs: TopLogprobs | None = [] if self._params.top_logprobs else None
        self.text = self._make_text() if self._make_text is not None else None

    @property
    def prompt_token_ids(self) -> list[int]:
        """The caller's prompt."""
        return self._prompt

    @property
    def params(self) -> SamplingParams:
        """The caller's parameters."""
        return self._params

    @property
    def needs_stream(self) -> bool:
        """Stop strings are looked for as tokens arrive, so that a match ends the sampling."""
        return bool(self._params.stop)

    @property
    def may_restart(self) -> bool:
        """Whether an interruption would throw away what was sampled; nobody may see tokens before the end then."""
        return self._params.structured is not None

    def next_segment(self) -> Segment | None:
        """What is still to be sampled; None when the response has ended."""
        sampled = len(self.token_ids)
        if self.stop_reason is None and self._ends_with_stop_token():
            self.stop_reason = StopReason.STOP  # the engine was lost before it could say so
        if self.stop_reason is None and sampled >= self._params.max_tokens:
            self.stop_reason = StopReason.LENGTH  # a spent budget sends nothing
        if self.stop_reason is not None:
            return None
        if sampled and self.may_restart:
            self._begin()
            self.restarts += 1
            sampled = 0
        self._number += 1
        self.segments += 1
        params = dataclasses.replace(
            self._params,
            max_tokens=self._params.max_tokens - sampled,
            min_tokens=max(0, self._params.min_tokens - sampled),
            seed=None if self._seed is None else segment_seed(self._seed, sampled),
            stop=(),
            n=1,
        )
        return Segment(self._number, self._prompt + self.token_ids, params)

    def _ends_with_stop_token(self) -> bool:
        """Whether the last token is one with which the caller ends a response; an engine's own are its to report."""
        past_minimum = len(self.token_ids) > self._params.min_tokens
        return past_minimum and self.token_ids[-1] in self._params.stop_token_ids

    def recall(self, chunk: TokenChunk) -> None:
        """Takes what was sampled for this request in an earlier run, before any engine is asked; the rest goes on from it."""
        if self._number:
            raise ValueError("a response that is being sampled already cannot take recorded tokens")
        if self.stop_reason is None:
            self.add(chunk, self._number)

    def unsent(self) -> None:
        """The last segment did not go to any engine."""
        self.segments -= 1

    def add(self, chunk: TokenChunk, segment: int) -> None:
        """Takes what an engine sampled in segment number ``segment``.

        What still comes from an earlier segment is ignored: its engine was given up, and the response goes on elsewhere.
        After a stop-string match, the tokens behind it are dropped.

        Raises:
            EngineError: the engine broke the contract (ragged lists, more tokens than asked for).
        """
        if segment != self._number:
            return
        if self.stop_reason is not None:
            raise EngineError("an engine returned tokens for a response that has ended")
        if not len(chunk.token_ids) == len(chunk.logprobs) == len(chunk.versions):
            raise EngineError(
                f"an engine returned {len(chunk.token_ids)} tokens, {len(chunk.logprobs)} log-probs and "
                f"{len(chunk.versions)} versions for the same segment"
            )
        if len(self.token_ids) + len(chunk.token_ids) > self._params.max_tokens:
            raise EngineError("an engine returned more tokens than max_tokens")
        if self.top_logprobs is not None and len(chunk.top_logprobs or ()) != len(chunk.token_ids):
            raise EngineError("an engine did not return the top_logprobs that it was asked for")
        kept = len(chunk.token_ids) if self.text is None else self._feed(self.text, chunk.token_ids)
        self.token_ids += chunk.token_ids[:kept]
        self.logprobs += chunk.logprobs[:kept]
        self.versions += chunk.versions[:kept]
        if self.top_logprobs is not None and chunk.top_logprobs is not None:
            self.top_logprobs += chunk.top_logprobs[:kept]
        if self.text is not None and self.text.text_end is not None:
            self.stop_reason = StopReason.STOP
        elif chunk.stop_reason not in (None, StopReason.ABORT):
            self.stop_reason = chunk.stop_reason

    def _feed(self, text: ResponseText, token_ids: Sequence[int]) -> int:
        """Decodes tokens up to a stop string; returns how many are kept."""
        for count, token_id in enumerate(token_ids, start=1):
            if text.feed(token_id, may_stop=len(self.token_ids) + count > self._params.min_tokens):
                return count
        return len(token_ids)

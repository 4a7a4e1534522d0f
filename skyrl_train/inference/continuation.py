"""One request across any number of engine requests (segments). Pure; ``docs/design/semantics.md`` section 2.4 has the rules.

    caller's request ──> Continuation ──next_segment──> engine ──add(chunk)──┐
                              ^                                              │ "abort": the rest is the next segment
                              └──────────────────────────────────────────────┘

A continued request is the prompt's tokens plus the tokens sampled so far; nothing is decoded and encoded again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skyrl_train.errors import EngineError
from skyrl_train.inference.interface import (
    SamplingParams,
    StopReason,
    TokenChunk,
    TopLogprobs,
)
from skyrl_train.inference.response_text import ResponseText
from skyrl_train.runtime.seeds import derive_seed, segment_seed


@dataclass(frozen=True, slots=True)
class Segment:
    """A request to one engine. ``number`` counts the segments of a response."""

    number: int
    prompt_token_ids: list[int]
    sampling_params: SamplingParams


class Continuation:
    """Accumulates one response. ``choice`` gives each of the ``n`` responses of one request its own seed.

    ``make_text`` creates the incremental decoder of a response; without it there are no text and no stop strings. Without
    ``grammar_continuation``, the engines lose the position in a grammar, so that a response with one starts over; without
    ``count_continuation``, the counts of its penalties.

    Invariant: ``token_ids``, ``logprobs`` and ``versions`` have the same length, never above ``max_tokens``, and never
    grow after ``stop_reason`` is set.

    Attributes:
        loses_grammar: whether the engines follow the grammar of the response without telling where it is in it.
        segments: requests that were sent to engines.
        cached_tokens: prompt tokens that the engine had cached when the response began; later segments do not count.
        may_restart: whether an interruption discards the tokens so far; then no token may be shown before the end.
    """

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        choice: int = 0,
        make_text: Callable[[], ResponseText] | None = None,
        grammar_continuation: bool = False,
        count_continuation: bool = False,
    ) -> None:
        if params.stop and make_text is None:
            raise ValueError("stop strings need make_text")
        self.prompt_token_ids = list(prompt_token_ids)
        self.params = params
        # Derived once, so that neighbouring seeds of a caller never share a part of the random stream.
        self._seed = None if params.seed is None else derive_seed(params.seed, choice)
        self._make_text = make_text
        self._number = 0
        self.segments = 0
        self.restarts = 0
        self.stop_reason: StopReason | None = None
        self.loses_grammar = params.structured is not None and not grammar_continuation
        loses_counts = params.adjustment is not None and params.adjustment.counts and not count_continuation
        self.may_restart = self.loses_grammar or loses_counts
        self._begin()

    def _begin(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.top_logprobs: TopLogprobs | None = [] if self.params.top_logprobs else None
        self.cached_tokens = 0
        self._first_segment = 0
        self.text = self._make_text() if self._make_text is not None else None

    def next_segment(self) -> Segment | None:
        """Return the request for the rest of the response; None when the response has ended."""
        sampled = len(self.token_ids)
        # An engine that dies before its last chunk cannot report a stop token of the caller, so it is looked for here. As in
        # the engines, it counts only after min_tokens other tokens.
        past_minimum = sampled > self.params.min_tokens
        if self.stop_reason is None and past_minimum and self.token_ids[-1] in self.params.stop_token_ids:
            self.stop_reason = StopReason.STOP
        if self.stop_reason is None and sampled >= self.params.max_tokens:
            self.stop_reason = StopReason.LENGTH  # a spent budget sends nothing
        if self.stop_reason is not None:
            return None
        if sampled and self.may_restart:  # the engine lost its position in the grammar, or the counts
            self._begin()
            self.restarts += 1
            sampled = 0
        self._number += 1
        self.segments += 1
        if not sampled:
            self._first_segment = self._number
        # Budgets shrink by the sampled tokens. The seed depends on the position, so that no part of the random stream is
        # used twice. The client matches stop strings itself, across segments.
        structured, adjustment = self.params.structured, self.params.adjustment
        if structured is not None and sampled:
            structured = dataclasses.replace(structured, continued_tokens=sampled)
        if adjustment is not None and sampled:
            adjustment = dataclasses.replace(adjustment, continued_tokens=sampled)
        params = dataclasses.replace(
            self.params,
            structured=structured,
            adjustment=adjustment,
            max_tokens=self.params.max_tokens - sampled,
            min_tokens=max(0, self.params.min_tokens - sampled),
            seed=None if self._seed is None else segment_seed(self._seed, sampled),
            stop=(),
            n=1,
        )
        return Segment(self._number, self.prompt_token_ids + self.token_ids, params)

    def resume_from(self, chunk: TokenChunk) -> None:
        """Take tokens that an earlier run sampled for this request. Must precede the first segment, which continues them."""
        if self._number:
            raise ValueError("a response that is being sampled already cannot take recorded tokens")
        if self.stop_reason is None:
            self.add(chunk, self._number)

    def add(self, chunk: TokenChunk, segment: int) -> None:
        """Append tokens that an engine sampled in segment number ``segment``.

        A chunk of an earlier segment is ignored: its engine was abandoned, and the response continues elsewhere. Tokens
        behind a stop string are dropped.

        Raises:
            EngineError: the engine broke the contract (ragged lists, more tokens than asked for).
        """
        if segment != self._number:  # from an abandoned engine
            return
        if self.stop_reason is not None:
            raise EngineError("an engine returned tokens for a response that has ended")
        # Ragged lists would shift log-probs or versions against their tokens, and training would not notice.
        if not len(chunk.token_ids) == len(chunk.logprobs) == len(chunk.versions):
            raise EngineError(
                f"an engine returned {len(chunk.token_ids)} tokens, {len(chunk.logprobs)} log-probs and "
                f"{len(chunk.versions)} versions for the same segment"
            )
        if len(self.token_ids) + len(chunk.token_ids) > self.params.max_tokens:
            raise EngineError("an engine returned more tokens than max_tokens")
        if self.top_logprobs is not None and len(chunk.top_logprobs or ()) != len(chunk.token_ids):
            raise EngineError("an engine did not return the top_logprobs that it was asked for")
        if segment == self._first_segment:
            self.cached_tokens = max(self.cached_tokens, chunk.cached_tokens)
        kept = len(chunk.token_ids)
        if self.text is not None:
            # The engine does not know stop strings, so a chunk may reach beyond one: decode up to it.
            for count, token_id in enumerate(chunk.token_ids, start=len(self.token_ids) + 1):
                if self.text.feed(token_id, may_stop=count > self.params.min_tokens):
                    kept = count - len(self.token_ids)
                    break
        self.token_ids += chunk.token_ids[:kept]
        self.logprobs += chunk.logprobs[:kept]
        self.versions += chunk.versions[:kept]
        if self.top_logprobs is not None and chunk.top_logprobs is not None:
            self.top_logprobs += chunk.top_logprobs[:kept]
        if self.text is not None and self.text.text_end is not None:
            self.stop_reason = StopReason.STOP
        # An abort is an interruption and not an end: the next segment continues.
        elif chunk.stop_reason not in (None, StopReason.ABORT):
            self.stop_reason = chunk.stop_reason

"""The state of running requests: one row of arrays per slot, so that a decode step needs no Python loop over requests.

Running requests are always slots ``0 .. count-1``: when one leaves, the last one moves into its place.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from skyrl_train.inference.engines.embedded.sampling import SEED_MASK, AdjustedRow, SamplingRows, uniforms
from skyrl_train.inference.grammar import GrammarMatcher, Mask
from skyrl_train.inference.interface import SamplingParams, StopReason, TokenChunk, TopLogprobs
from skyrl_train.inference.response_text import ResponseText

NO_TOKEN = -1


@dataclass(slots=True)
class Sequence:
    """A request. While it holds a slot, its tokens are in the table; outside, they are here and it has no KV cache."""

    request_id: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    matcher: GrammarMatcher | None = None  # after all tokens sampled so far
    text: ResponseText | None = None  # of all tokens sampled so far, where there are stop strings
    stream_every: int = 0  # tokens per streamed chunk; 0: everything at the end
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_logprobs: TopLogprobs = field(default_factory=list)  # aligned with the tokens; empty unless asked for
    sent: int = 0  # tokens that left in streamed chunks
    begun: bool = False  # it has held a slot

    def __len__(self) -> int:
        return len(self.prompt) + len(self.tokens)

    def rest(self, reason: StopReason) -> TokenChunk:
        """Return the last chunk: all tokens that have not been sent."""
        at = slice(self.sent, None)
        return TokenChunk(self.tokens[at], self.logprobs[at], self.versions[at], reason, self.top_of(at))

    def top_of(self, tokens: slice) -> TopLogprobs | None:
        """Return the alternatives of some of its tokens; None if the request does not ask for them."""
        return self.top_logprobs[tokens] if self.params.top_logprobs else None


@dataclass(frozen=True, slots=True)
class GuidedRows:
    """Rows that have a grammar, counted from the first row of a batch; all three are in their order."""

    rows: npt.NDArray[np.int64]
    matchers: list[GrammarMatcher]
    masks: list[Mask]


class SlotTable:
    """``num_slots`` rows. Token-wise arrays are ``[num_slots, capacity]``, indexed by position in the sequence (prompt
    included); all others are ``[num_slots]``, and ``stop_ids`` is as wide as the longest list of stop tokens."""

    def __init__(self, num_slots: int, capacity: int) -> None:
        self.count = 0
        self.capacity = capacity
        self.sequences: list[Sequence] = []
        self._guided_rows: dict[tuple[int, int], GuidedRows] = {}  # until a request gets or leaves a slot
        self.tokens = np.zeros((num_slots, capacity), np.int64)
        self.logprobs = np.zeros((num_slots, capacity), np.float32)
        self.versions = np.zeros((num_slots, capacity), np.int64)
        self.lengths = np.zeros(num_slots, np.int64)
        self.prompt_lengths = np.zeros(num_slots, np.int64)
        self.limits = np.zeros(num_slots, np.int64)  # length at which max_tokens or the context is spent
        self.min_lengths = np.zeros(num_slots, np.int64)  # length below which stop tokens are not sampled
        self.sent = np.zeros(num_slots, np.int64)  # length up to which tokens left in streamed chunks
        self.stream_every = np.zeros(num_slots, np.int64)
        self.top_logprobs = np.zeros(num_slots, np.int64)
        self.seeds = np.zeros(num_slots, np.uint64)
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int64)
        self.top_p = np.zeros(num_slots, np.float32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.guided = np.zeros(num_slots, np.bool_)  # has a grammar
        self.adjusted = np.zeros(num_slots, np.bool_)  # has penalties or biases
        self.has_text = np.zeros(num_slots, np.bool_)  # has stop strings
        self.stop_ids = np.full((num_slots, 1), NO_TOKEN, np.int64)

    def place(self, sequence: Sequence) -> int:
        """Put a sequence into the next free slot; returns the slot."""
        slot, params = self.count, sequence.params
        prompt, length = len(sequence.prompt), len(sequence)
        self.tokens[slot, :prompt] = sequence.prompt
        self.tokens[slot, prompt:length] = sequence.tokens
        self.logprobs[slot, prompt:length] = sequence.logprobs
        self.versions[slot, prompt:length] = sequence.versions
        self.lengths[slot], self.prompt_lengths[slot] = length, prompt
        self.limits[slot] = min(prompt + params.max_tokens, self.capacity)
        self.min_lengths[slot] = prompt + params.min_tokens
        self.sent[slot], self.stream_every[slot] = prompt + sequence.sent, sequence.stream_every
        self.top_logprobs[slot] = params.top_logprobs
        self.seeds[slot] = sequence.seed & SEED_MASK
        self.temperature[slot], self.top_k[slot] = params.temperature, params.top_k
        self.top_p[slot], self.min_p[slot] = params.top_p, params.min_p
        self.guided[slot] = sequence.matcher is not None
        self.adjusted[slot] = params.adjustment is not None
        self.has_text[slot] = sequence.text is not None
        # The array is as wide as the longest list so far; NO_TOKEN fills the rest and equals no sampled token.
        missing = len(sequence.stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        self.stop_ids[slot] = NO_TOKEN
        self.stop_ids[slot, : len(sequence.stop_ids)] = sequence.stop_ids
        sequence.begun = True
        self._guided_rows.clear()
        self.sequences.append(sequence)
        self.count += 1
        return slot

    def read(self, slot: int) -> Sequence:
        """Copy a slot's tokens back into its sequence, and return that."""
        sequence = self.sequences[slot]
        prompt = int(self.prompt_lengths[slot])
        sampled = slice(prompt, int(self.lengths[slot]))
        sequence.tokens = self.tokens[slot, sampled].tolist()
        sequence.logprobs = self.logprobs[slot, sampled].tolist()
        sequence.versions = self.versions[slot, sampled].tolist()
        sequence.sent = int(self.sent[slot]) - prompt
        return sequence

    def remove(self, slot: int) -> int:
        """Free a slot and move the last row into its place; returns the slot that row came from."""
        last = self.count - 1
        if slot != last:
            length = self.lengths[last]
            for token_wise in (self.tokens, self.logprobs, self.versions):
                token_wise[slot, :length] = token_wise[last, :length]
            for per_slot in (
                self.lengths,
                self.prompt_lengths,
                self.limits,
                self.min_lengths,
                self.sent,
                self.stream_every,
                self.top_logprobs,
                self.seeds,
                self.temperature,
                self.top_k,
                self.top_p,
                self.min_p,
                self.guided,
                self.adjusted,
                self.has_text,
                self.stop_ids,
            ):
                per_slot[slot] = per_slot[last]
            self.sequences[slot] = self.sequences[last]
        self._guided_rows.clear()
        self.sequences.pop()
        self.count = last
        return last

    def sampling_rows(self, rows: slice) -> SamplingRows:
        """Return the sampling parameters of ``rows``, and their next uniform random numbers."""
        lengths, stop_ids = self.lengths[rows], self.stop_ids[rows]
        banned = None  # stop tokens before min_tokens
        early = lengths < self.min_lengths[rows]
        if early.any():
            row, column = np.nonzero(early[:, None] & (stop_ids != NO_TOKEN))
            banned = (row, stop_ids[row, column])
        guided = self.guided_rows(rows)
        return SamplingRows(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            uniforms=uniforms(self.seeds[rows], lengths - self.prompt_lengths[rows]),
            allowed=(guided.rows, np.concatenate(guided.masks).reshape(len(guided.masks), -1))
            if guided.masks
            else None,
            banned=banned,
            adjusted=[self._adjusted_row(rows.start, int(row)) for row in self.adjusted[rows].nonzero()[0]],
            top_logprobs=self.top_logprobs[rows] if self.top_logprobs[rows].any() else None,
        )

    def guided_rows(self, rows: slice) -> GuidedRows:
        """Return those of ``rows`` that have a grammar. They are looked for once, not in every step."""
        key = (rows.start, rows.stop)
        if key not in self._guided_rows:
            found = self.guided[rows].nonzero()[0]
            matchers = [self.sequences[rows.start + row].matcher for row in found.tolist()]
            guided = [matcher for matcher in matchers if matcher is not None]
            self._guided_rows[key] = GuidedRows(found, guided, [matcher.mask for matcher in guided])
        return self._guided_rows[key]

    def _adjusted_row(self, first: int, row: int) -> AdjustedRow:
        slot = first + row
        adjustment = self.sequences[slot].params.adjustment
        assert adjustment is not None, "the slot has penalties or biases"
        tokens = self.tokens[slot, : self.lengths[slot]]
        # A continued response begins in the prompt.
        return AdjustedRow(row, adjustment, tokens, tokens[self.prompt_lengths[slot] - adjustment.continued_tokens :])

    def append(self, rows: slice, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        """Add one sampled token to each of ``rows``."""
        # Each row writes at its own length: rows have different lengths.
        index, at = np.arange(rows.start, rows.stop), self.lengths[rows]
        self.tokens[index, at] = tokens
        self.logprobs[index, at] = logprobs
        self.versions[index, at] = version
        self.lengths[rows] += 1

    def reaches_stop_string(self, slot: int) -> bool:
        """Return whether the last token of a slot with stop strings completes one. Call it once for each token."""
        text, length = self.sequences[slot].text, self.lengths[slot]
        assert text is not None, "the slot has stop strings"
        return text.feed(int(self.tokens[slot, length - 1]), may_stop=bool(length > self.min_lengths[slot]))

    def take_chunk(self, slot: int) -> TokenChunk:
        """Return the tokens that have not been sent, and count them as sent."""
        at = slice(int(self.sent[slot]), int(self.lengths[slot]))
        self.sent[slot] = self.lengths[slot]
        prompt = int(self.prompt_lengths[slot])
        return TokenChunk(
            self.tokens[slot, at].tolist(),
            self.logprobs[slot, at].tolist(),
            self.versions[slot, at].tolist(),
            top_logprobs=self.sequences[slot].top_of(slice(at.start - prompt, at.stop - prompt)),
        )

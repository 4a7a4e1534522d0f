"""What the engine knows about its running requests: one row of arrays per slot, so that a step needs no loop over them.

Running requests are always slots ``0 .. count-1``: when one leaves, the last one moves into its place.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from skyrl_train.inference.engines.embedded.sampling import SamplingRows, seed_bits, uniforms
from skyrl_train.inference.interface import SamplingParams, StopReason, TokenChunk, TopLogprobs

NO_TOKEN = -1


@dataclass(slots=True)
class Sequence:
    """A request outside the slots: not begun, or frozen without its KV cache (then with the tokens sampled so far)."""

    request_id: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    stream_every: int = 0  # tokens of a stream's chunk; 0: everything at the end
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_logprobs: TopLogprobs = field(default_factory=list)  # aligned with the tokens where they are asked for
    sent: int = 0  # tokens that a stream has handed out
    begun: bool = False

    def __len__(self) -> int:
        return len(self.prompt) + len(self.tokens)

    def rest(self, reason: StopReason) -> TokenChunk:
        """The last chunk: everything not handed out yet."""
        at = slice(self.sent, None)
        return TokenChunk(self.tokens[at], self.logprobs[at], self.versions[at], reason, self.top_of(at))

    def top_of(self, tokens: slice) -> TopLogprobs | None:
        """The alternatives of some of its tokens; None where they are not asked for."""
        return self.top_logprobs[tokens] if self.params.top_logprobs else None


class SlotTable:
    """``num_slots`` rows; token-wise arrays are ``[num_slots, capacity]``, by position in the sequence."""

    def __init__(self, num_slots: int, capacity: int) -> None:
        self.count = 0
        self.capacity = capacity
        self.sequences: list[Sequence] = []
        self.tokens = np.zeros((num_slots, capacity), np.int64)
        self.logprobs = np.zeros((num_slots, capacity), np.float32)
        self.versions = np.zeros((num_slots, capacity), np.int64)
        self.lengths = np.zeros(num_slots, np.int64)
        self.prompt_lengths = np.zeros(num_slots, np.int64)
        self.limits = np.zeros(num_slots, np.int64)  # length at which the request has spent its budget
        self.unstoppable = np.zeros(num_slots, np.int64)  # length below which stop tokens are not sampled
        self.sent = np.zeros(num_slots, np.int64)  # length that a stream has handed out
        self.stream_every = np.zeros(num_slots, np.int64)
        self.top_logprobs = np.zeros(num_slots, np.int64)
        self.seeds = np.zeros(num_slots, np.uint64)
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int64)
        self.top_p = np.zeros(num_slots, np.float32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.stop_ids = np.full((num_slots, 1), NO_TOKEN, np.int64)

    def place(self, sequence: Sequence) -> int:
        """Puts a sequence into the next slot; returns the slot."""
        slot, params = self.count, sequence.params
        prompt, length = len(sequence.prompt), len(sequence)
        self.tokens[slot, :prompt] = sequence.prompt
        for array, values in self._sampled(slot, prompt, length):
            array[:] = getattr(sequence, values)
        self.lengths[slot], self.prompt_lengths[slot] = length, prompt
        self.limits[slot] = min(prompt + params.max_tokens, self.capacity)
        self.unstoppable[slot] = prompt + params.min_tokens
        self.sent[slot], self.stream_every[slot] = prompt + sequence.sent, sequence.stream_every
        self.top_logprobs[slot] = params.top_logprobs
        self.seeds[slot] = seed_bits(sequence.seed)
        self.temperature[slot], self.top_k[slot] = params.temperature, params.top_k
        self.top_p[slot], self.min_p[slot] = params.top_p, params.min_p
        self._widen_stop_ids(len(sequence.stop_ids))
        self.stop_ids[slot] = NO_TOKEN
        self.stop_ids[slot, : len(sequence.stop_ids)] = sequence.stop_ids
        sequence.begun = True
        self.sequences.append(sequence)
        self.count += 1
        return slot

    def read(self, slot: int) -> Sequence:
        """The slot's sequence, brought up to date."""
        sequence = self.sequences[slot]
        prompt = int(self.prompt_lengths[slot])
        for array, values in self._sampled(slot, prompt, int(self.lengths[slot])):
            setattr(sequence, values, array.tolist())
        sequence.sent = int(self.sent[slot]) - prompt
        return sequence

    def remove(self, slot: int) -> int:
        """Frees the slot; returns the slot whose row took its place (itself if it was the last)."""
        last = self.count - 1
        if slot != last:
            length = self.lengths[last]
            for token_wise in (self.tokens, self.logprobs, self.versions):
                token_wise[slot, :length] = token_wise[last, :length]
            for per_slot in self._per_slot():
                per_slot[slot] = per_slot[last]
            self.sequences[slot] = self.sequences[last]
        self.sequences.pop()
        self.count = last
        return last

    def sampling_rows(self, rows: slice) -> SamplingRows:
        """The sampler's view of ``rows``."""
        lengths, stop_ids = self.lengths[rows], self.stop_ids[rows]
        banned = None
        early = lengths < self.unstoppable[rows]
        if early.any():
            row, column = np.nonzero(early[:, None] & (stop_ids != NO_TOKEN))
            banned = (row, stop_ids[row, column])
        return SamplingRows(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            uniforms=uniforms(self.seeds[rows], lengths - self.prompt_lengths[rows]),
            banned=banned,
            top_logprobs=self.top_logprobs[rows] if self.top_logprobs[rows].any() else None,
        )

    def append(self, rows: slice, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        """Adds one sampled token to each of ``rows``."""
        index, at = np.arange(rows.start, rows.stop), self.lengths[rows]
        self.tokens[index, at] = tokens
        self.logprobs[index, at] = logprobs
        self.versions[index, at] = version
        self.lengths[rows] += 1

    def unsent(self, slot: int) -> TokenChunk:
        """What a stream has not handed out yet; from now on it counts as handed out."""
        at = slice(int(self.sent[slot]), int(self.lengths[slot]))
        self.sent[slot] = self.lengths[slot]
        prompt = int(self.prompt_lengths[slot])
        return TokenChunk(
            self.tokens[slot, at].tolist(),
            self.logprobs[slot, at].tolist(),
            self.versions[slot, at].tolist(),
            top_logprobs=self.sequences[slot].top_of(slice(at.start - prompt, at.stop - prompt)),
        )

    def chunk_is_full(self, rows: slice) -> np.ndarray:
        """Bool per row: whether a stream's next chunk can go out."""
        every = self.stream_every[rows]
        return (every > 0) & (self.lengths[rows] - self.sent[rows] >= every)

    def _sampled(self, slot: int, start: int, stop: int) -> list[tuple[np.ndarray, str]]:
        at = (slot, slice(start, stop))
        return [(self.tokens[at], "tokens"), (self.logprobs[at], "logprobs"), (self.versions[at], "versions")]

    def _per_slot(self) -> list[np.ndarray]:
        return [
            self.lengths,
            self.prompt_lengths,
            self.limits,
            self.unstoppable,
            self.sent,
            self.stream_every,
            self.top_logprobs,
            self.seeds,
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.stop_ids,
        ]

    def _widen_stop_ids(self, width: int) -> None:
        missing = width - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN)

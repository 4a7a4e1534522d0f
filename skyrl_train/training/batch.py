"""From ragged sequences to micro-batches within a token budget. Pure functions.

sequences ──pack_rows──────> indices per micro-batch ──collate_packed──> MicroBatch: all sequences in one row, no padding
            pad_rows ──────>                         ──collate_padded──> MicroBatch: a row per sequence, for models that
                                                                         cannot tell the sequences of a row apart
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from skyrl_train.config.model_shape import num_positions
from skyrl_train.errors import ConfigError, GeneratorOutputError, GrammarError
from skyrl_train.inference.grammar import Grammars
from skyrl_train.inference.interface import StructuredOutput
from skyrl_train.training.attention import Segments, cheapest_cuts
from skyrl_train.training.backend import TrainingSequence
from skyrl_train.training.head import AllowedTokens

# The cost of one more forward and backward pass, beside its tokens, in padded tokens. Measured on the small CPU models; on a GPU
# it is the launch latency of a mid-sized one.
MICRO_BATCH_COST_TOKENS = 128


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """R sequences, and the N scored tokens among them.

    A token is scored from the output one position to its left, so the last token of a sequence is never an input.
    Packed, one row holds all sequences, one after the other; padded, there are R rows as long as the longest sequence,
    filled on the right. Scored tokens are in the order of ``indices``, then in token order.
    """

    indices: tuple[int, ...]  # of the R sequences in the caller's list
    input_ids: torch.Tensor  # int64 [rows, L]
    position_ids: torch.Tensor  # int64 [rows, L], from 0 in each sequence
    attention_mask: torch.Tensor | None  # int64 [rows, L], 0 on padding; None: packed
    segments: Segments | None  # of the packed row; None: padded
    outputs: torch.Tensor  # int64 [N], places in the flattened rows whose output predicts a scored token
    scored: torch.Tensor  # bool [sum of (T - 1)]: which tokens after the first of each sequence are scored
    counts: torch.Tensor  # int64 [R], scored tokens of each sequence
    targets: torch.Tensor  # int64 [N], the scored tokens
    allowed: AllowedTokens | None = None  # at the N scored tokens, on the CPU; None: every token of the vocabulary

    @property
    def inputs(self) -> int:
        """Number of inputs, without padding."""
        return self.input_ids.numel() if self.attention_mask is None else int(self.attention_mask.sum())


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Splits sequences into micro-batches for one model: packed or padded, within its token budget and positions."""

    packed: bool  # several sequences in a row instead of padding
    micro_batch_tokens: int  # per forward pass, padding included
    positions: int | None  # of the model; None: unlimited
    grammars: Callable[[], Grammars] | None = None  # of the model, for log-probs; None: micro-batches have no masks

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        *,
        packed: bool,
        micro_batch_tokens: int,
        grammars: Callable[[], Grammars] | None = None,
    ) -> RowLayout:
        """Read the number of positions from the model's configuration."""
        positions = num_positions(model.config.get_text_config())
        return cls(packed, micro_batch_tokens, positions, grammars)

    def room(self, micro_batch: MicroBatch) -> int:
        """Return how many inputs the pass over a micro-batch has room for: those that it computes, padding included, or, packed,
        those that the token budget allows."""
        # The last token of each sequence counts in the budget, and is no input.
        return self.micro_batch_tokens - len(micro_batch.indices) if self.packed else micro_batch.input_ids.numel()

    def micro_batches(
        self, sequences: Sequence[TrainingSequence], indices: Sequence[int], scored: Sequence[torch.Tensor]
    ) -> list[MicroBatch]:
        """Split the sequences at ``indices``; ``scored[i]`` (bool ``[T]``) marks the scored tokens of sequence ``i``.

        Raises:
            ConfigError: a sequence does not fit the token budget.
            GeneratorOutputError: a sequence is longer than the model has positions, or a response does not follow its grammar.
        """
        lengths = [len(sequences[index]) for index in indices]
        longest = max(lengths, default=0)
        if self.positions is not None and longest > self.positions:
            raise GeneratorOutputError(
                f"a sequence has {longest} tokens, but the model only {self.positions} positions. Lower "
                "generator.max_input_length or generator.sampling_params.max_tokens."
            )
        split, collate = (pack_rows, collate_packed) if self.packed else (pad_rows, collate_padded)
        micro_batches = [
            collate(sequences, [indices[position] for position in chosen], scored)
            for chosen in split(lengths, self.micro_batch_tokens)
        ]
        if self.grammars is None or not any(sequences[index].grammars for index in indices):
            return micro_batches
        # Once for all passes over these micro-batches, and before the first of them: a rank that fails in a pass would leave the
        # other ranks of a sharded model waiting.
        try:
            masks, rows = masks_of(sequences, indices, self.grammars())
        except GrammarError as error:
            raise GeneratorOutputError(f"the masks of a response cannot be repeated: {error}") from error
        of_batches = [flat_tokens(rows, batch).unique(return_inverse=True) for batch in micro_batches]
        return [
            replace(batch, allowed=AllowedTokens(masks[used], places)) if bool(used.any()) else batch
            for batch, (used, places) in zip(micro_batches, of_batches, strict=True)
        ]


def pack_rows(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Split sequences into micro-batches of at most ``budget`` tokens: each, longest first, goes to the first one with room.

    First-fit decreasing needs at most 11/9 of the fewest possible micro-batches (Johnson 1973).

    Returns:
        Indices into ``lengths``, each exactly once, longest first within a list (ties in the given order).

    Raises:
        ConfigError: a single sequence is longer than the budget.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in _longest_first(lengths, budget):
        # First fit: the first row with enough room, or a new one.
        length = lengths[index]
        place = next((place for place, left in enumerate(room) if left >= length), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(budget)
        rows[place].append(index)
        room[place] -= length
    return rows


def pad_rows(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Split sequences into micro-batches of at most ``budget`` padded tokens, with as little work as possible.

    Sequences are sorted, longest first (ties in the given order), so that rows of similar length share their padding and the
    largest micro-batch reaches the memory limit first. :func:`cheapest_cuts` cuts this order.

    Returns:
        Indices into ``lengths``, each exactly once; ``max(length) * count <= budget`` in every list.

    Raises:
        ConfigError: a single sequence is longer than the budget.
    """
    order = _longest_first(lengths, budget)
    cuts = cheapest_cuts([lengths[index] for index in order], cost_tokens=MICRO_BATCH_COST_TOKENS, budget=budget)
    return [order[start:end] for start, end in pairwise(cuts)]


def collate_packed(
    sequences: Sequence[TrainingSequence], indices: Sequence[int], scored: Sequence[torch.Tensor]
) -> MicroBatch:
    """Lay the sequences at ``indices`` out in one row, longest first; ``scored[i]`` (bool ``[T]``) marks the scored tokens of
    sequence ``i``.

    Tokens at position 0 are never scored: nothing precedes them.
    """
    # The last token of a sequence predicts nothing that is scored, so it is no input.
    lengths = [len(sequences[i]) - 1 for i in indices]
    targets, flags, counts = _scored_tokens(sequences, indices, scored)
    return MicroBatch(
        indices=tuple(indices),
        input_ids=torch.cat([sequences[i].token_ids[:-1] for i in indices])[None],
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        attention_mask=None,
        segments=Segments.of([length for length in lengths if length]),
        outputs=flags.nonzero().squeeze(1),
        scored=flags,
        counts=counts,
        targets=targets,
    )


def collate_padded(
    sequences: Sequence[TrainingSequence], indices: Sequence[int], scored: Sequence[torch.Tensor]
) -> MicroBatch:
    """Lay each of the sequences at ``indices`` out in a row; ``scored`` as for :func:`collate_packed`."""
    token_ids = pad_sequence([sequences[i].token_ids for i in indices], batch_first=True)
    # Shifted by one: the output at position t scores token t + 1.
    marked = pad_sequence([scored[i] for i in indices], batch_first=True)[:, 1:]
    lengths = torch.tensor([len(sequences[i]) for i in indices])
    rows, width = marked.shape
    positions = torch.arange(width).expand(rows, width)
    targets, flags, counts = _scored_tokens(sequences, indices, scored)
    return MicroBatch(
        indices=tuple(indices),
        input_ids=token_ids[:, :-1],
        position_ids=positions,
        attention_mask=(positions < lengths[:, None]).long(),
        segments=None,
        outputs=marked.flatten().nonzero().squeeze(1),
        scored=flags,
        counts=counts,
        targets=targets,
    )


def masks_of(
    sequences: Sequence[TrainingSequence], indices: Sequence[int], grammars: Grammars
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Repeat the masks under which the tokens of the sequences at ``indices`` were sampled: a grammar's mask is a function of
    the tokens before.

    Returns:
        The distinct masks, as in :class:`AllowedTokens`, of which the first allows every token; and for each of ``sequences``
        the number of each token's mask, int64 ``[T]``.

    Raises:
        GrammarError: a response does not follow its grammar.
    """
    numbers: dict[bytes, int] = {}
    rows = [torch.zeros(len(sequence), dtype=torch.int64) for sequence in sequences]
    for index in indices:
        sequence = sequences[index]
        for span in sequence.grammars:
            structured = StructuredOutput(span.kind, span.value)  # type: ignore[arg-type]
            token_ids = sequence.token_ids[span.start : span.stop].tolist()
            masks = grammars.replay(structured, token_ids, span.stop_token_ids)
            of_span = [numbers.setdefault(mask.tobytes(), len(numbers) + 1) for mask in masks]
            rows[index][span.start : span.stop] = torch.tensor(of_span)
    every_token = b"\xff" * len(next(iter(numbers), b""))
    packed = bytearray().join([every_token, *numbers])
    return torch.frombuffer(packed, dtype=torch.uint8).reshape(len(numbers) + 1, -1), rows


def flat_tokens(fields: Sequence[torch.Tensor], micro_batch: MicroBatch) -> torch.Tensor:
    """Return the values of a per-token field (one ``[T]`` tensor per sequence) at the micro-batch's scored tokens, ``[N]``."""
    return torch.cat([fields[i][1:] for i in micro_batch.indices])[micro_batch.scored]


def two_short_sequences(vocab_size: int) -> list[TrainingSequence]:
    """Return sequences of 4 and 3 tokens, to test how a model can be used; for any vocabulary."""
    ids = torch.arange(7) % vocab_size
    sequences = []
    for token_ids in (ids[:4], ids[4:]):
        nothing = torch.zeros(len(token_ids))
        versions = torch.full_like(token_ids, -1)
        sequences.append(TrainingSequence(token_ids, nothing > 0, nothing, nothing, versions, 0))
    return sequences


def _scored_tokens(
    sequences: Sequence[TrainingSequence], indices: Sequence[int], scored: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    flags = torch.cat([scored[i][1:] for i in indices])
    targets = torch.cat([sequences[i].token_ids[1:] for i in indices])[flags]
    counts = torch.stack([scored[i][1:].sum() for i in indices])
    return targets, flags, counts


def _longest_first(lengths: Sequence[int], budget: int) -> list[int]:
    too_long = sorted((length for length in lengths if length > budget), reverse=True)
    if too_long:
        raise ConfigError(
            f"{len(too_long)} sequences do not fit trainer.micro_batch_tokens={budget}; the longest has {too_long[0]} "
            f"tokens. Set trainer.micro_batch_tokens to {too_long[0]} or more, or lower "
            "generator.sampling_params.max_tokens / generator.max_input_length."
        )
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])

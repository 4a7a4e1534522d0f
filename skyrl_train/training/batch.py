"""From ragged sequences to micro-batches within a token budget, and to ranks. Pure functions.

sequences ──pack_rows──────> indices per micro-batch ──collate_packed──> MicroBatch: all sequences in one row, no padding
            pad_rows ──────>                         ──collate_padded──> MicroBatch: a row per sequence, where the model
                                                                         cannot tell the sequences of a row apart
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn.utils.rnn import pad_sequence

from skyrl_train.errors import ConfigError
from skyrl_train.training.backend import TrainingSequence
from skyrl_train.training.segments import Segments, cheapest_cuts

# What a further forward and backward pass costs beside its tokens, in padded tokens. Measured on the small CPU models;
# on a GPU it is the launch latency of a mid-sized one.
MICRO_BATCH_COST_TOKENS = 128
# Attention reads this many tokens in the time that the rest of a token's forward pass takes (6 * hidden size in a
# transformer of the usual proportions, at a hidden size of 2,048).
_ATTENDED_PER_TOKEN = 12_288


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """R sequences, and the N tokens among them that are scored.

    A token is scored from the output one position to its left, so the last token of a sequence is never an input.
    Packed, the rows are one row of all sequences, one after the other; padded, they are R rows of the longest's length,
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


def pack_rows(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Splits sequences into micro-batches of at most ``budget`` tokens: each, longest first, goes to the first with room.

    First-fit decreasing needs at most 11/9 of the fewest possible micro-batches (Johnson 1973).

    Returns:
        Indices into ``lengths``, each exactly once, longest first within a list (ties in the given order).

    Raises:
        ConfigError: a sequence alone is longer than the budget.
    """
    _refuse_too_long(lengths, budget)
    rows: list[list[int]] = []
    room: list[int] = []
    for index in _longest_first(lengths):
        length = lengths[index]
        place = next((place for place, left in enumerate(room) if left >= length), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(budget)
        rows[place].append(index)
        room[place] -= length
    return rows


def pad_rows(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Splits sequences into micro-batches of at most ``budget`` padded tokens, with as little work as possible.

    Sequences are sorted, longest first (ties in the given order), so that rows of like length share their padding and
    the largest micro-batch meets the memory limit first; that order is cut where :func:`cheapest_cuts` says.

    Returns:
        Indices into ``lengths``, each exactly once; ``max(length) * count <= budget`` in every list.

    Raises:
        ConfigError: a sequence alone is longer than the budget.
    """
    _refuse_too_long(lengths, budget)
    order = _longest_first(lengths)
    cuts = cheapest_cuts([lengths[index] for index in order], cost_tokens=MICRO_BATCH_COST_TOKENS, budget=budget)
    return [order[start:end] for start, end in pairwise(cuts)]


def balance(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Deals sequences to ranks so that all have about the same to compute.

    Each sequence, costliest first, goes to the rank with the least so far (ties to the lowest rank): no rank exceeds 4/3
    of the best possible maximum (Graham 1969). A token costs 1, and the share of attention that its place in the
    sequence brings.

    Returns:
        Per rank its indices into ``lengths``, ascending; empty for ranks beyond the number of sequences.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [(0.0, rank) for rank in range(ranks)]
    for index in _longest_first(lengths):
        cost, rank = heapq.heappop(load)
        shares[rank].append(index)
        heapq.heappush(load, (cost + sequence_cost(lengths[index]), rank))
    return [sorted(share) for share in shares]


def sequence_cost(length: int) -> float:
    """What a sequence costs to compute, in tokens of a short one: each token attends to half of the sequence on average."""
    return length * (1 + length / 2 / _ATTENDED_PER_TOKEN)


def collate_packed(
    sequences: Sequence[TrainingSequence], indices: Sequence[int], scored: Sequence[torch.Tensor]
) -> MicroBatch:
    """One row of the sequences at ``indices``, longest first; ``scored[i]`` (bool ``[T]``) marks the scored tokens of
    sequence ``i``.

    Tokens at position 0 are never scored: nothing precedes them.
    """
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
    """A row for each of the sequences at ``indices``; ``scored`` as for :func:`collate_packed`."""
    token_ids = pad_sequence([sequences[i].token_ids for i in indices], batch_first=True)
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


def flat_tokens(fields: Sequence[torch.Tensor], micro_batch: MicroBatch) -> torch.Tensor:
    """The values of a per-token field (one ``[T]`` tensor per sequence) at the micro-batch's scored tokens, ``[N]``."""
    return torch.cat([fields[i][1:] for i in micro_batch.indices])[micro_batch.scored]


def _scored_tokens(
    sequences: Sequence[TrainingSequence], indices: Sequence[int], scored: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    flags = torch.cat([scored[i][1:] for i in indices])
    targets = torch.cat([sequences[i].token_ids[1:] for i in indices])[flags]
    counts = torch.stack([scored[i][1:].sum() for i in indices])
    return targets, flags, counts


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])


def _refuse_too_long(lengths: Sequence[int], budget: int) -> None:
    too_long = sorted((length for length in lengths if length > budget), reverse=True)
    if too_long:
        raise ConfigError(
            f"{len(too_long)} sequences do not fit trainer.micro_batch_tokens={budget}; the longest has {too_long[0]} "
            f"tokens. Set trainer.micro_batch_tokens to {too_long[0]} or more, or lower "
            "generator.sampling_params.max_tokens / generator.max_input_length."
        )

"""From ragged sequences to padded micro-batches within a token budget. Pure functions.

sequences ──pack_by_tokens──> indices per micro-batch ──collate──> MicroBatch (padded ids, flat trained tokens)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn.utils.rnn import pad_sequence

from skyrl_train.errors import ConfigError
from skyrl_train.training.backend import TrainingSequence

# What a further forward and backward pass costs beside its tokens, in padded tokens. Measured on the small CPU models;
# on a GPU it is the launch latency of a mid-sized one.
MICRO_BATCH_COST_TOKENS = 128


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """R sequences, padded on the right to their longest, and the N tokens among them that are scored.

    A token is scored from the output one position to its left, so the last token of a row is never an input and
    ``L = longest - 1``. Scored tokens are in row order, then in token order.
    """

    indices: tuple[int, ...]  # of the R sequences in the caller's list
    input_ids: torch.Tensor  # int64 [R, L]
    attention_mask: torch.Tensor  # int64 [R, L], 0 on padding
    position_ids: torch.Tensor  # int64 [R, L]
    scored: torch.Tensor  # bool [R, L]: the output here predicts a scored token
    targets: torch.Tensor  # int64 [N], the scored tokens


def pack_by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Splits sequences into micro-batches of at most ``budget`` padded tokens, with as little work as possible.

    Sequences are sorted, longest first (ties in the given order), so that rows of like length share their padding and
    the largest micro-batch meets the memory limit first. Of all ways to cut that order, the one with the least padded
    tokens plus ``MICRO_BATCH_COST_TOKENS`` per micro-batch is taken (dynamic programming; exact where the budget forces
    no cut).

    Returns:
        Indices into ``lengths``, each exactly once; ``max(length) * count <= budget`` in every list.

    Raises:
        ConfigError: a sequence alone is longer than the budget.
    """
    too_long = sorted((length for length in lengths if length > budget), reverse=True)
    if too_long:
        raise ConfigError(
            f"{len(too_long)} sequences do not fit trainer.micro_batch_tokens={budget}; the longest has {too_long[0]} "
            f"tokens. Set trainer.micro_batch_tokens to {too_long[0]} or more, or lower "
            "generator.sampling_params.max_tokens / generator.max_input_length."
        )
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    # Only ends before a shorter sequence, or forced by the budget: elsewhere the neighbours have the same length.
    boundaries = [i for i in range(1, len(order)) if lengths[order[i]] < lengths[order[i - 1]]]
    best_cost, best_end = [0] * (len(order) + 1), [0] * (len(order) + 1)
    for start in range(len(order) - 1, -1, -1):
        width = max(lengths[order[start]], 1)
        furthest = min(start + budget // width, len(order))
        ends = boundaries[bisect_right(boundaries, start) : bisect_left(boundaries, furthest)]
        best_cost[start], best_end[start] = min(
            (width * (end - start) + MICRO_BATCH_COST_TOKENS + best_cost[end], end) for end in [*ends, furthest]
        )
    cuts = [0]
    while cuts[-1] < len(order):
        cuts.append(best_end[cuts[-1]])
    return [order[start:end] for start, end in pairwise(cuts)]


def collate(
    sequences: Sequence[TrainingSequence], indices: Sequence[int], scored: Sequence[torch.Tensor]
) -> MicroBatch:
    """Pads the sequences at ``indices``; ``scored[i]`` (bool ``[T]``) marks the scored tokens of sequence ``i``.

    Tokens at position 0 are never scored: nothing precedes them.
    """
    token_ids = pad_sequence([sequences[i].token_ids for i in indices], batch_first=True)
    marked = pad_sequence([scored[i] for i in indices], batch_first=True)[:, 1:]
    lengths = torch.tensor([len(sequences[i]) for i in indices])
    rows, width = marked.shape
    positions = torch.arange(width).expand(rows, width)
    return MicroBatch(
        indices=tuple(indices),
        input_ids=token_ids[:, :-1],
        attention_mask=(positions < lengths[:, None]).long(),
        position_ids=positions,
        scored=marked,
        targets=token_ids[:, 1:][marked],
    )


def flat_tokens(fields: Sequence[torch.Tensor], micro_batch: MicroBatch) -> torch.Tensor:
    """The values of a per-token field (one ``[T]`` tensor per sequence) at the micro-batch's scored tokens, ``[N]``."""
    return pad_sequence([fields[i] for i in micro_batch.indices], batch_first=True)[:, 1:][micro_batch.scored]

"""Where the sequences of a packed row begin and end, laid out for attention.

row of tokens  [aaaaaaa bbbbbb ccc ddd]          segments, longest first
buckets        [aaaaaaa bbbbbb·] [ccc ddd]       runs of like length, each padded to its longest for attention alone
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from skyrl_train.training.sequence_parallel import SequenceRanks

# What one more attention call costs, in padded tokens of a layer's attention; from benchmarks/token_budget.py.
BUCKET_COST_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Bucket:
    """Neighbouring segments of a packed row that attention treats as one batch ``[rows, width]``, padded on the right."""

    start: int  # of its tokens in the packed row
    end: int
    rows: int
    width: int
    places: torch.Tensor | None  # int64 [end - start], of its tokens in the flattened batch; None: nothing is padded


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of a packed row, which see nothing of each other."""

    buckets: tuple[Bucket, ...]
    ranks: SequenceRanks | None = None  # that have a slice of the row each; None: this rank has all of it

    @property
    def num_tokens(self) -> int:
        """Of all segments; what the row has beyond them only fills it up."""
        return self.buckets[-1].end if self.buckets else 0

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Segments:
        """Of segments with so many tokens each, in the row's order: longest first."""
        buckets, start = [], 0
        for first, last in pairwise(cheapest_cuts(lengths, cost_tokens=BUCKET_COST_TOKENS)):
            of_bucket = lengths[first:last]
            end, width = start + sum(of_bucket), of_bucket[0]
            places = None
            if of_bucket[-1] < width:
                inside = torch.arange(width) < torch.tensor(of_bucket)[:, None]
                places = inside.flatten().nonzero().squeeze(1)
            buckets.append(Bucket(start, end, len(of_bucket), width, places))
            start = end
        return cls(tuple(buckets))

    def to(self, device: torch.device) -> Segments:
        """The same for tokens on ``device``."""
        buckets = (
            bucket if bucket.places is None else replace(bucket, places=bucket.places.to(device))
            for bucket in self.buckets
        )
        return replace(self, buckets=tuple(buckets))


def cheapest_cuts(descending: Sequence[int], *, cost_tokens: int, budget: int | None = None) -> list[int]:
    """Where to cut lengths (longest first) into runs, each padded to its longest.

    Of all ways to cut, the one with the least padded tokens plus ``cost_tokens`` per run is taken (dynamic programming;
    exact where the budget forces no cut).

    Args:
        budget: padded tokens that a run may have; None: any number.

    Returns:
        Ascending, from 0 to ``len(descending)``.
    """
    total = len(descending)
    # Only ends before a shorter sequence, or forced by the budget: elsewhere the neighbours have the same length.
    boundaries = [i for i in range(1, total) if descending[i] < descending[i - 1]]
    best_cost, best_end = [0] * (total + 1), [0] * (total + 1)
    starts = range(total - 1, -1, -1) if budget is not None else [*reversed(boundaries), *([0] if total else [])]
    for start in starts:
        width = max(descending[start], 1)
        furthest = total if budget is None else min(start + budget // width, total)
        ends = boundaries[bisect_right(boundaries, start) : bisect_left(boundaries, furthest)]
        best_cost[start], best_end[start] = min(
            (width * (end - start) + cost_tokens + best_cost[end], end) for end in [*ends, furthest]
        )
    cuts = [0]
    while cuts[-1] < total:
        cuts.append(best_end[cuts[-1]])
    return cuts

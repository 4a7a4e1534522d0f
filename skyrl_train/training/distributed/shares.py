"""Which rank trains which sequence, and how sequences travel to it: a few flat arrays, whatever their number."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from skyrl_train.training.backend import TrainingSequence

_FIELDS = (
    "token_ids",
    "loss_mask",
    "advantages",
    "behaviour_logprobs",
    "versions",
    "proximal_logprobs",
    "reference_logprobs",
    "values",
    "returns",
)
_NUMBERS = ("group_index", "counted_tokens", "group_tokens", "group_sequences")


def share_out(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Gives each sequence to one rank, so that all have about as many tokens: the longest first, to whom has least.

    Returns:
        Per rank the indices into ``lengths``, ascending; empty where there are fewer sequences than ranks. No rank has more
        tokens than another by more than the longest sequence.
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        tokens, rank = heapq.heappop(loads)
        shares[rank].append(index)
        heapq.heappush(loads, (tokens + lengths[index], rank))
    return [sorted(share) for share in shares]


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Training sequences on their way to another process: the values of each field end to end.

    A field has a length per sequence of its own (-1: the sequence is without it), so that ragged ones arrive as they are
    and are refused where all are checked.
    """

    numbers: dict[str, list[int | None]]
    lengths: dict[str, list[int]]
    values: dict[str, npt.NDArray[np.generic]]

    @classmethod
    def of(cls, sequences: Sequence[TrainingSequence]) -> PackedSequences:
        """Packs them."""
        columns = {name: [getattr(s, name) for s in sequences] for name in _FIELDS}
        return cls(
            numbers={name: [getattr(s, name) for s in sequences] for name in _NUMBERS},
            lengths={name: [-1 if c is None else len(c) for c in column] for name, column in columns.items()},
            values={name: _end_to_end([c for c in column if c is not None]) for name, column in columns.items()},
        )

    def unpack(self) -> list[TrainingSequence]:
        """The same sequences again."""
        columns = {name: _apart(self.values[name], self.lengths[name]) for name in _FIELDS}
        return [
            TrainingSequence(**{name: column[index] for name, column in (columns | self.numbers).items()})  # type: ignore[arg-type]
            for index in range(len(self.numbers[_NUMBERS[0]]))
        ]


def _end_to_end(tensors: Sequence[torch.Tensor]) -> npt.NDArray[np.generic]:
    return torch.cat(list(tensors)).numpy() if tensors else np.zeros(0)


def _apart(values: npt.NDArray[np.generic], lengths: Sequence[int]) -> list[torch.Tensor | None]:
    together = torch.from_numpy(values.copy())  # what Ray hands over is read-only
    parts = iter(together.split([length for length in lengths if length >= 0]))
    return [next(parts) if length >= 0 else None for length in lengths]

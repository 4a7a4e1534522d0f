"""Agreement between the ranks that train one model.

rank 0: its share of the sequences ─┐
rank 1: its share                  ─┼─ all_succeed ─ all_reduce_* ─ all_gather ─> the same decisions and numbers on every rank
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from skyrl_train.algorithms.tokens import TokenStatistics
from skyrl_train.training.sequence_parallel import SequenceRanks

T = TypeVar("T")


@dataclass(eq=False)
class Collectives:
    """Every method is called by all ranks, in the same order; each returns the same decision on all of them.

    This class is for a rank that trains alone, :class:`ProcessGroupCollectives` for several. A share is the set of sequences that
    one rank was given, or several ranks that each have a slice of their tokens.

    Attributes:
        sequence_ranks: the ranks that have this rank's share too; None: no other rank has it.
    """

    sequence_ranks: SequenceRanks | None = None

    def all_succeed(self, prepare: Callable[[], T]) -> T:
        """Return the result of this rank's ``prepare`` if it raised on no rank; otherwise raise on all ranks.

        For checks before anything moves: a rank that stopped alone would leave the others waiting for it.
        """
        return prepare()

    def all_reduce_max(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        return number

    def all_gather(self, value: T) -> list[T]:
        """Return one value per share, in the order of the shares."""
        return [value]

    def all_reduce_statistics(
        self, statistics: TokenStatistics, denominators: Sequence[float]
    ) -> tuple[TokenStatistics, list[float]]:
        """Return the statistics of the tokens of all shares, and the denominators of all their sequences."""
        return statistics, list(denominators)


class AgreedError(Exception):
    """Raised on every rank because ``error`` was raised on one of them (maybe another) before anything had moved."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class ProcessGroupCollectives(Collectives):
    """The ranks of the default process group. They agree over its CPU backend (gloo), also where parameters are on GPUs."""

    def all_succeed(self, prepare: Callable[[], T]) -> T:
        """See :meth:`Collectives.all_succeed`.

        Raises:
            AgreedError: ``prepare`` raised on some rank; holds the error of the first such rank.
        """
        result: T | None = None
        error: Exception | None = None
        try:
            result = prepare()
        except Exception as raised:  # of any class: the other ranks must not wait for this one
            error = raised
            error.add_note("".join(traceback.format_exception(error)))  # neither frames nor causes travel
        errors: list[Exception | None] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        if (first := next((each for each in errors if each is not None), None)) is not None:
            raise AgreedError(first)
        return result  # type: ignore[return-value]  # nothing was raised here

    def all_reduce_max(self, number: int) -> int:
        shared = torch.tensor(number)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return int(shared)

    def all_gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        # Ranks of one share are neighbours and have the same value: one of them speaks for the share.
        return values[:: 1 if self.sequence_ranks is None else self.sequence_ranks.size]

    def all_reduce_statistics(
        self, statistics: TokenStatistics, denominators: Sequence[float]
    ) -> tuple[TokenStatistics, list[float]]:
        # Added up in the order of the shares, so that all ranks get the same bits.
        values = statistics.values()
        mine = (statistics.tokens, list(statistics.sums), list(statistics.maxima), values, list(denominators))
        combined, all_denominators = TokenStatistics(), []
        for tokens, sums, maxima, numbers, of_share in self.all_gather(mine):
            named = {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}
            combined.add(TokenStatistics(tokens, {n: named[n] for n in sums}, {n: named[n] for n in maxima}))
            all_denominators += of_share
        return combined, all_denominators

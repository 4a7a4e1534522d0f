"""Ranks in processes of their own, which agree through a group of the CPU's (gloo), whatever the parameters lie on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from skyrl_train.algorithms.statistics import TokenStatistics
from skyrl_train.training.ranks import Ranks
from skyrl_train.training.sequence_parallel import SequenceRanks

T = TypeVar("T")


class AgreedError(Exception):
    """Raised on every rank because one of them (maybe another) raised ``error`` before anything had moved."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class ProcessRanks(Ranks):
    """The ranks of the default process group.

    Args:
        sequence_ranks: those that share sequences with this one, which are neighbours; None: none does.
    """

    def __init__(self, sequence_ranks: SequenceRanks | None = None) -> None:
        self._sequence_ranks = sequence_ranks

    @property
    def sequence_ranks(self) -> SequenceRanks | None:
        return self._sequence_ranks

    def together(self, prepare: Callable[[], T]) -> T:
        """See :meth:`Ranks.together`.

        Raises:
            AgreedError: ``prepare`` raised on some rank; the error of the first one.
        """
        result: T | None = None
        error: Exception | None = None
        try:
            result = prepare()
        except Exception as raised:  # whatever it is, the other ranks must not wait for this one
            error = raised
        errors = [each for each in _of_every_rank(error) if each is not None]
        if errors:
            raise AgreedError(errors[0])
        return result  # type: ignore[return-value]  # nothing was raised here

    def largest(self, number: int) -> int:
        shared = torch.tensor(number)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return int(shared)

    def of_all(self, value: T) -> list[T]:
        return _of_every_rank(value)[:: self._sequence_ranks.size if self._sequence_ranks is not None else 1]

    def combine(
        self, statistics: TokenStatistics, denominators: Sequence[float]
    ) -> tuple[TokenStatistics, list[float]]:
        """See :meth:`Ranks.combine`; added up in the order of the shares, so that all get the same bits."""
        values = statistics.values()
        mine = (statistics.tokens, list(statistics.sums), list(statistics.maxima), values, list(denominators))
        combined, all_denominators = TokenStatistics(), []
        for tokens, sums, maxima, numbers, of_share in self.of_all(mine):
            named = {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}
            part = TokenStatistics(tokens, {n: named[n] for n in sums}, {n: named[n] for n in maxima})
            combined.add(part)
            all_denominators += of_share
        return combined, all_denominators


def _of_every_rank(value: T) -> list[T]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values

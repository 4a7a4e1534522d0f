"""Where the ranks that train one policy have to agree; one rank alone agrees with itself.

rank 0: its share of the sequences ─┐
rank 1: its share                  ─┼─ together ─ largest ─ combine ─> the same decisions and numbers on every rank
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from skyrl_train.algorithms.statistics import TokenStatistics
from skyrl_train.training.sequence_parallel import SequenceRanks

T = TypeVar("T")


class Ranks(ABC):
    """Every method is called by all ranks, in the same order; each returns the same decision on all of them.

    A share is what sequences one rank was given, or several that each have a slice of their tokens.
    """

    @property
    @abstractmethod
    def sequence_ranks(self) -> SequenceRanks | None:
        """Those that have this rank's share too; None: it is its own."""

    @abstractmethod
    def together(self, prepare: Callable[[], T]) -> T:
        """What this rank's ``prepare`` returned, if that of no rank raised; else all ranks raise.

        For what is checked before anything moves: a rank that stopped alone would leave the others waiting for it.
        """

    @abstractmethod
    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers."""

    @abstractmethod
    def of_all(self, value: T) -> list[T]:
        """One value per share, in their order."""

    @abstractmethod
    def combine(
        self, statistics: TokenStatistics, denominators: Sequence[float]
    ) -> tuple[TokenStatistics, list[float]]:
        """The statistics of the tokens of all shares, and the denominators of all their sequences."""


class OneRank(Ranks):
    """A rank that trains alone."""

    @property
    def sequence_ranks(self) -> None:
        return None

    def together(self, prepare: Callable[[], T]) -> T:
        return prepare()

    def largest(self, number: int) -> int:
        return number

    def of_all(self, value: T) -> list[T]:
        return [value]

    def combine(
        self, statistics: TokenStatistics, denominators: Sequence[float]
    ) -> tuple[TokenStatistics, list[float]]:
        return statistics, list(denominators)

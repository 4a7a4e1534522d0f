"""The ledger of group indices: which were issued and with what outcome, so that none is lost or trained twice. Pure.

A prompt's *group index* is its position in the training stream over all epochs. The source (``samplers.py``, ``streaming.py``)
maps it to a prompt; the ledger sees only numbers.

    reissue (after a resume) ─┐
    next group index ─────────┴─issue──> in flight ──settle──> trained | failed | filtered | dropped
                                                               all below the frontier are settled
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import Any

LISTED = ("failed", "filtered", "dropped")  # outcomes whose group indices are listed
OUTCOMES = ("trained", *LISTED)


class GroupLedger:
    """Issues group indices in ascending order and records their outcomes.

    Attributes:
        frontier: the first group index without an outcome.
        issued: number of group indices that were ever issued; all of them are smaller.
        failed, filtered, dropped: group indices with that outcome, in the order of their settling; never cleared.
    """

    def __init__(self) -> None:
        self.frontier = 0
        self.issued = 0
        self._settled: dict[int, str] = {}  # outcomes at or beyond the frontier
        self._reissue: list[int] = []  # a heap: issued before the last resume and still without an outcome
        self.failed: list[int] = []
        self.filtered: list[int] = []
        self.dropped: list[int] = []
        self._lists = {"failed": self.failed, "filtered": self.filtered, "dropped": self.dropped}

    @property
    def next(self) -> int:
        """The group index that :meth:`issue` would return. Those in flight at the last checkpoint come first."""
        return self._reissue[0] if self._reissue else self.issued

    def issue(self) -> int:
        """Issue :attr:`next`."""
        if self._reissue:
            return heapq.heappop(self._reissue)
        self.issued += 1
        return self.issued - 1

    def is_open(self, group_index: int) -> bool:
        """Return whether the group index has no outcome yet (or was never issued)."""
        return group_index >= self.frontier and group_index not in self._settled

    def settle(self, group_indices: Iterable[int], outcome: str) -> None:
        """Record the outcome of issued group indices. Each group index gets one outcome, once.

        Raises:
            ValueError: one of them was never issued or has an outcome.
        """
        if outcome not in OUTCOMES:
            raise ValueError(f"unknown outcome {outcome!r}")
        for group_index in group_indices:
            if not self.is_open(group_index) or group_index >= self.issued:
                raise ValueError(f"group index {group_index} is not in flight, so it cannot become {outcome}")
            self._settled[group_index] = outcome
            if outcome != "trained":
                self._lists[outcome].append(group_index)
        # Forget outcomes below the frontier: the ledger stays as small as the outstanding groups.
        while self.frontier in self._settled:
            del self._settled[self.frontier]
            self.frontier += 1

    def state_dict(self) -> dict[str, Any]:
        """Return JSON-able state. Group indices in flight are those that are neither settled nor buffered."""
        return {
            "next": self.issued,
            "frontier": self.frontier,
            "settled": sorted(self._settled.items()),
            **{outcome: list(listed) for outcome, listed in self._lists.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], buffered: Iterable[int]) -> None:
        """Restore the state. Every issued group index without an outcome or a buffered group is issued again."""
        self.issued = int(state["next"])
        self.frontier = int(state["frontier"])
        self._settled = {int(group_index): outcome for group_index, outcome in state["settled"]}
        for outcome, listed in self._lists.items():
            listed[:] = state[outcome]
        kept = set(buffered)
        # Ascending, so it is a heap.
        self._reissue = [o for o in range(self.frontier, self.issued) if self.is_open(o) and o not in kept]

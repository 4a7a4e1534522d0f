"""Which prompts were issued and what became of them: nothing lost, nothing twice (SEMANTICS 5). Pure.

A prompt's *ordinal* is its position in the training stream, all epochs one after the other. Which prompt that is knows the
source (``rollout/samplers``, ``rollout/streaming``); here are only numbers.

    reissue (after a resume) ─┐
    next ordinal ─────────────┴─issue──> in flight ──settle──> trained | failed | filtered | dropped
                                                               all below the frontier are settled
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import Any

LISTED = ("failed", "filtered", "dropped")  # outcomes whose ordinals are listed; the others were trained
OUTCOMES = ("trained", *LISTED)


class OrdinalLedger:
    """Issues ordinals in ascending order and records their outcome; see the module's picture.

    Attributes:
        failed, filtered, dropped: ordinals with that outcome, in the order in which they got it.
    """

    def __init__(self) -> None:
        self._next = 0  # the first ordinal that was never issued
        self._frontier = 0  # every ordinal below it is settled
        self._settled: dict[int, str] = {}  # outcomes at or beyond the frontier
        self._reissue: list[int] = []  # a heap: issued before the last resume, and still without an outcome
        self.failed: list[int] = []
        self.filtered: list[int] = []
        self.dropped: list[int] = []

    @property
    def frontier(self) -> int:
        """The first ordinal without an outcome."""
        return self._frontier

    @property
    def next(self) -> int:
        """The ordinal that :meth:`issue` would return: those in flight at the last checkpoint first, in their order."""
        return self._reissue[0] if self._reissue else self._next

    @property
    def issued(self) -> int:
        """How many ordinals were ever issued; all of them are below this number."""
        return self._next

    def issue(self) -> int:
        """Issues :attr:`next`."""
        if self._reissue:
            return heapq.heappop(self._reissue)
        self._next += 1
        return self._next - 1

    def is_open(self, ordinal: int) -> bool:
        """Whether the ordinal has no outcome yet (or was never issued)."""
        return ordinal >= self._frontier and ordinal not in self._settled

    def settle(self, ordinals: Iterable[int], outcome: str) -> None:
        """Records what became of issued ordinals; an ordinal gets one outcome, once.

        Raises:
            ValueError: one of them was never issued or has an outcome.
        """
        if outcome not in OUTCOMES:
            raise ValueError(f"unknown outcome {outcome!r}")
        for ordinal in ordinals:
            if not self.is_open(ordinal) or ordinal >= self._next:
                raise ValueError(f"ordinal {ordinal} is not in flight, so it cannot become {outcome}")
            self._settled[ordinal] = outcome
            if outcome != "trained":
                self._listed(outcome).append(ordinal)
        while self._frontier in self._settled:
            del self._settled[self._frontier]
            self._frontier += 1

    def _listed(self, outcome: str) -> list[int]:
        return {"failed": self.failed, "filtered": self.filtered, "dropped": self.dropped}[outcome]

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state; in-flight ordinals are what is neither settled nor buffered."""
        return {
            "next": self._next,
            "frontier": self._frontier,
            "settled": sorted(self._settled.items()),
            **{outcome: list(self._listed(outcome)) for outcome in LISTED},
        }

    def load_state_dict(self, state: Mapping[str, Any], buffered: Iterable[int]) -> None:
        """Restores the state; every issued ordinal without an outcome or a finished group is issued again."""
        self._next = int(state["next"])
        self._frontier = int(state["frontier"])
        self._settled = {int(ordinal): outcome for ordinal, outcome in state["settled"]}
        for outcome in LISTED:
            self._listed(outcome)[:] = state[outcome]
        kept = set(buffered)
        # Ascending, so it is a heap.
        self._reissue = [o for o in range(self._frontier, self._next) if self.is_open(o) and o not in kept]

"""Which prompts were issued and what became of them: nothing lost, nothing twice (SEMANTICS 5). Pure.

A prompt's *ordinal* is its position in the endless training stream. Epoch ``e`` is a permutation that depends on
``(seed, e)`` alone, so an ordinal names a prompt in any run, on any machine, at any time.

    reissue (after a resume) ─┐
    next ordinal ─────────────┴─issue──> in flight ──> trained | failed
                                                        all below the frontier are settled
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from skyrl_train.errors import CheckpointError

OUTCOMES = ("trained", "failed")


class PromptLedger:
    """Issues ordinals in order and records their outcome.

    Args:
        dataset_len: prompts per epoch.
        seed: of the permutations.
        fingerprint: of the data set; a checkpoint of another one is refused.
    """

    def __init__(self, dataset_len: int, seed: int, fingerprint: str) -> None:
        if dataset_len < 1:
            raise ValueError("the data set is empty")
        self._dataset_len = dataset_len
        self._seed = seed
        self._fingerprint = fingerprint
        self._permutations: dict[int, np.ndarray] = {}
        self._next = 0
        self._frontier = 0  # every ordinal below it is settled
        self._settled: dict[int, str] = {}  # outcomes at or beyond the frontier
        self.failed: list[int] = []  # in the order in which they failed
        self._reissue: list[int] = []  # a heap: issued before the last resume, and still without an outcome

    @property
    def frontier(self) -> int:
        """The first ordinal without an outcome."""
        return self._frontier

    def issue(self) -> int:
        """The next ordinal to generate: those in flight at the last checkpoint first, in their order."""
        if self._reissue:
            return heapq.heappop(self._reissue)
        ordinal = self._next
        self._next += 1
        return ordinal

    def row(self, ordinal: int) -> int:
        """The data set's row behind an ordinal."""
        epoch, position = divmod(ordinal, self._dataset_len)
        if epoch not in self._permutations:
            if len(self._permutations) >= 4:  # in-flight ordinals span few epochs
                self._permutations.pop(min(self._permutations))
            self._permutations[epoch] = np.random.default_rng((self._seed, epoch)).permutation(self._dataset_len)
        return int(self._permutations[epoch][position])

    def settle(self, ordinals: Iterable[int], outcome: str) -> None:
        """Records what became of issued ordinals."""
        if outcome not in OUTCOMES:
            raise ValueError(f"unknown outcome {outcome!r}")
        for ordinal in ordinals:
            if ordinal < self._frontier or ordinal in self._settled or ordinal >= self._next:
                raise ValueError(f"ordinal {ordinal} is not in flight, so it cannot become {outcome}")
            self._settled[ordinal] = outcome
            if outcome == "failed":
                self.failed.append(ordinal)
        while self._frontier in self._settled:
            del self._settled[self._frontier]
            self._frontier += 1

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state; in-flight ordinals are what is neither settled nor buffered."""
        return {
            "dataset_len": self._dataset_len,
            "seed": self._seed,
            "fingerprint": self._fingerprint,
            "next": self._next,
            "frontier": self._frontier,
            "settled": sorted(self._settled.items()),
            "failed": list(self.failed),
        }

    def load_state_dict(self, state: Mapping[str, Any], buffered: Iterable[int]) -> None:
        """Restores the state; every issued ordinal without an outcome or a finished group is issued again.

        Raises:
            CheckpointError: the checkpoint is of another data set or seed.
        """
        mine = {"dataset_len": self._dataset_len, "seed": self._seed, "fingerprint": self._fingerprint}
        for key, value in mine.items():
            if state[key] != value:
                raise CheckpointError(
                    f"the checkpoint's data has {key} {state[key]!r}, this run's has {value!r}; resume with the data set and "
                    "trainer.seed of the original run, or start a new one with another trainer.run_dir"
                )
        self._next = state["next"]
        self._frontier = state["frontier"]
        self._settled = {int(ordinal): outcome for ordinal, outcome in state["settled"]}
        self.failed = list(state["failed"])
        kept = set(buffered)
        self._reissue = [
            ordinal
            for ordinal in range(self._frontier, self._next)
            if ordinal not in self._settled and ordinal not in kept
        ]
        heapq.heapify(self._reissue)

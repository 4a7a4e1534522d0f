"""How many groups there are: in each state of their life, and of each policy version."""

from __future__ import annotations

from collections import Counter
from collections.abc import ItemsView
from dataclasses import dataclass

from skyrl_train.errors import StalenessError


@dataclass(slots=True)
class RolloutCounts:
    """Totals since the beginning of training, resumes included. ``submitted`` is the sum of all the others, always."""

    submitted: int = 0
    running: int = 0
    buffered: int = 0
    trained: int = 0
    failed: int = 0
    filtered: int = 0
    dropped: int = 0

    @property
    def accepted(self) -> int:
        """Groups that hold or held a seat in a minibatch."""
        return self.trained + self.buffered

    def move(self, source: str, target: str) -> None:
        """Moves one group between two states; each slot is released exactly once."""
        left = getattr(self, source) - 1
        if left < 0:
            raise StalenessError(f"a group moved from {source} to {target}, but none was {source}")
        setattr(self, source, left)
        setattr(self, target, getattr(self, target) + 1)


class GroupsByVersion:
    """Groups, each with a policy version, and how many there are of each version."""

    def __init__(self) -> None:
        self._versions: dict[int, int] = {}  # ordinal -> version
        self.counts: Counter[int] = Counter()  # version -> groups; none that are 0

    def __len__(self) -> int:
        return len(self._versions)

    def __contains__(self, ordinal: int) -> bool:
        return ordinal in self._versions

    def items(self) -> ItemsView[int, int]:
        """Ordinals and versions."""
        return self._versions.items()

    def add(self, ordinal: int, version: int) -> None:
        """Adds a group that is not there."""
        self._versions[ordinal] = version
        self.counts[version] += 1

    def pop(self, ordinal: int) -> int:
        """Takes a group out and returns its version.

        Raises:
            KeyError: it is not there.
        """
        version = self._versions.pop(ordinal)
        self.counts[version] -= 1
        if not self.counts[version]:
            del self.counts[version]
        return version

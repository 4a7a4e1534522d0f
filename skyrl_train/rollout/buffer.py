"""Finished groups that wait to be trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from skyrl_train.errors import StalenessError
from skyrl_train.rollout.group import RolloutGroup


class RolloutBuffer:
    """Holds groups by ordinal; which of them train next is the staleness manager's choice."""

    def __init__(self) -> None:
        self._groups: dict[int, RolloutGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[RolloutGroup]:
        return iter(self._groups.values())

    def put(self, group: RolloutGroup) -> None:
        """Adds a finished group."""
        if group.ordinal in self._groups:
            raise StalenessError(f"group {group.ordinal} finished twice")
        self._groups[group.ordinal] = group

    def take(self, groups: Sequence[RolloutGroup]) -> None:
        """Removes groups that are about to be trained."""
        for group in groups:
            del self._groups[group.ordinal]

    def snapshot(self) -> tuple[RolloutGroup, ...]:
        """The groups as they are now (they never change)."""
        return tuple(self)

    def restore(self, groups: Iterable[RolloutGroup]) -> None:
        """Replaces the contents."""
        self._groups = {}
        for group in groups:
            self.put(group)

"""Finished groups that wait to be trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from skyrl_train.errors import StalenessError
from skyrl_train.rollout.group import RolloutGroup, Sample


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

    def state_dict(self) -> list[dict[str, Any]]:
        """JSON-able groups (floats survive JSON exactly)."""
        return [asdict(group) for group in self]

    def load_state_dict(self, state: Iterable[dict[str, Any]]) -> None:
        """Replaces the contents by what :meth:`state_dict` returned."""
        self._groups = {}
        for group in state:
            self.put(RolloutGroup(**{**group, "samples": tuple(Sample(**sample) for sample in group["samples"])}))

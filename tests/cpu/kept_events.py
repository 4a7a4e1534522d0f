"""An event log that keeps its events in memory, on a clock of the test, and the check of an event against its declaration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl_train.events.kinds import COMMON, KINDS
from skyrl_train.events.log import EventLog

TYPES: dict[str, type | tuple[type, ...]] = {
    "int": int,
    "float": (int, float),
    "str": str,
    "bool": bool,
    "list": list,
    "dict": dict,
    "null": type(None),
}


class KeptEvents(EventLog):
    """Each reading of the clock is a second later."""

    def __init__(self, max_per_s: int = 10**6) -> None:
        super().__init__(Path(), max_per_s, clock=self._tick)
        self.kept: list[dict[str, Any]] = []
        self.seconds = 0.0

    def _tick(self) -> float:
        self.seconds += 1.0
        return self.seconds

    def put(self, kind: str, fields: dict[str, Any]) -> None:
        self.kept.append({"kind": kind, "t": 1.0, "m": self.now(), **fields})

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.kept if event["kind"] == kind]


def assert_declared(event: Mapping[str, Any]) -> None:
    """The event has the fields of its kind, each of its type."""
    declared = {field.name: field for field in (*COMMON, *KINDS[event["kind"]].fields)}
    assert event.keys() == declared.keys(), event
    for name, value in event.items():
        types = [TYPES[each] for each in declared[name].type.split(" | ")]
        assert any(isinstance(value, each) for each in types), (event["kind"], name, value)
        assert isinstance(value, bool) == (declared[name].type.startswith("bool") and value is not None)

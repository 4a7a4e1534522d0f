"""Reads the record of a run, of one that trains now too.

EventReader(folder).poll() ──> events since the last call          Events(events).frame("request") ──> DataFrame
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from skyrl_train.events.kinds import COMMON, KINDS
from skyrl_train.events.log import group_name, segment_paths

if TYPE_CHECKING:
    import pandas

Event = dict[str, Any]

_FIRST_BYTES = 1 << 16


class EventReader:
    """Reads the segments of ``folder`` from where the last :meth:`poll` ended. A missing folder has no events.

    A torn last line, which a killed or a writing process leaves, is not an event. Lines that cannot be read are skipped.

    Args:
        since: Unix time; segments that were full by then are left out. None: the first call reads all of them.
    """

    def __init__(self, folder: Path, since: float | None = None) -> None:
        self._folder = folder
        self._segment = 0
        if since is not None:
            newest_first = reversed(segment_paths(folder).items())
            begins = ((number, first_event(path).get("t", math.inf)) for number, path in newest_first)
            self._segment = next((number for number, begin in begins if begin <= since), 0)
        self._offset = 0  # bytes of its uncompressed content that were read

    def poll(self, kinds: Collection[str] | None = None) -> list[Event]:
        """Return the events since the last call, in the order in which they were recorded.

        Args:
            kinds: others are left out; None: all.
        """
        events: list[Event] = []
        beginnings = None if kinds is None else tuple(b'{"kind":"%b"' % kind.encode() for kind in kinds)
        for number, path in segment_paths(self._folder).items():
            if number < self._segment:
                continue
            offset = self._offset if number == self._segment else 0
            # Up to the last whole line: if this is the open segment, the rest of the line comes later.
            content = segment_content(path)[offset:]
            content = content[: content.rfind(b"\n") + 1]
            self._segment, self._offset = number, offset + len(content)
            for line in content.split(b"\n"):
                if beginnings is not None and not line.startswith(beginnings):
                    continue
                try:
                    event = orjson.loads(line)
                except ValueError:
                    continue
                if isinstance(event, dict) and "kind" in event:
                    events.append(event)
        return events


def segment_content(path: Path, limit: int | None = None) -> bytes:
    """Return the content of a segment, uncompressed; of a damaged one, the part that can be read.

    Args:
        limit: bytes from the beginning that are enough; None: all.
    """
    if path.suffix != ".zst":
        try:
            with path.open("rb") as file:
                return file.read(limit)
        except FileNotFoundError:  # it was compressed meanwhile
            path = path.with_name(f"{path.name}.zst")
    import pyarrow  # 0.1 s

    content = bytearray()
    try:
        with pyarrow.input_stream(str(path), compression="zstd") as stream:
            while (limit is None or len(content) < limit) and (piece := stream.read(1 << 16)):
                content += piece
    except OSError:
        pass
    return bytes(content)


def first_event(path: Path) -> Event:
    """Return the first event of a segment; empty if it has none yet, or is damaged."""
    content = segment_content(path, _FIRST_BYTES)
    if b"\n" not in content:  # a step of thousands of groups is a longer line
        content = segment_content(path)
    try:
        event = orjson.loads(content.partition(b"\n")[0])
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


class Events(Sequence[Event]):
    """The events of a run in their order, each a dict with ``kind``, ``t``, ``m`` and its fields."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events

    def __len__(self) -> int:
        return len(self._events)

    def __getitem__(self, index: Any) -> Any:
        return self._events[index]

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    @cached_property
    def counts(self) -> dict[str, int]:
        """Number of events of each kind."""
        return dict(Counter(event["kind"] for event in self._events))

    @cached_property
    def incomplete(self) -> set[int | str]:
        """Groups (by group index, or name of the session) of which events are missing; frames leave their details out."""
        return {group for event in self._events if event["kind"] == "lost" for group in event["groups"]}

    def frame(self, kind: str) -> pandas.DataFrame:
        """Return one row per event of ``kind``, or per group of an event about several groups.

        All times are Unix times in seconds. ``attempt`` counts how often training had begun or continued until then. Requests
        have ``turn``, their number within the sample, from 0. A table without rows has all columns, too.

        Raises:
            KeyError: there is no such kind.
        """
        import pandas  # 0.5 s

        spec = KINDS[kind]
        times = [field.name for field in spec.fields if field.unit == "s" and field.name != "busy_s"]
        lists = [
            field.name for field in spec.fields if field.type == "list" and field.name not in ("segments", "seams")
        ]
        of_groups = "groups" in lists and kind != "lost"
        rows: list[Event] = []
        attempt, retries = 0, Counter[int]()
        for event in self._events:
            if event["kind"] in ("run", "resume"):
                attempt += 1
            if event["kind"] == "retried":
                retries[event["group"]] += 1
            if event["kind"] != kind or (spec.sampled and self._is_incomplete(event)):
                continue
            row = {**event, "attempt": attempt}
            for name in times:
                if row.get(name) is not None:
                    row[name] += event["t"] - event["m"]
            if of_groups:
                for index, group in enumerate(event["groups"]):
                    own = {name.removesuffix("s"): event[name][index] for name in lists if name != "groups"}
                    rows.append({**{k: v for k, v in row.items() if k not in lists}, "group": group, **own})
            else:
                if kind == "request":
                    row["turn"] = (attempt, event["session"], retries[event["group"]])
                rows.append(row)
        if kind == "request":
            turns: Counter[Any] = Counter()
            for row in sorted(rows, key=lambda row: row["t_submit"]):
                sample = row["turn"]
                row["turn"] = turns[sample]
                turns[sample] += 1
        declared = [field.name for field in (*COMMON, *spec.fields) if field.name != "kind"]
        if of_groups:
            declared = [name.removesuffix("s") if name in lists else name for name in declared]
        declared += ["attempt", *(["turn"] if kind == "request" else [])]
        columns = dict.fromkeys([*declared, *(key for row in rows for key in row)])
        return pandas.DataFrame(rows, columns=list(columns)).drop(columns="kind", errors="ignore")

    def segments(self) -> pandas.DataFrame:
        """Return one row per segment of a response: the tokens that one engine sampled by one policy version without a break.

        Columns: ``attempt``, ``session``, ``group``, ``sample``, ``turn``, ``version``, ``tokens``, ``t0``, ``t1`` (Unix times),
        ``engine``, and ``seam``, the reason of the break before it (None for the first one).
        """
        import pandas

        requests = self.frame("request")
        rows = []
        for request in requests.to_dict("records"):
            of = {name: request[name] for name in ("attempt", "session", "group", "sample", "turn")}
            unix = request["t"] - request["m"]
            seams = [None, *request["seams"]]
            for seam, (version, tokens, t0, t1, engine) in zip(seams, request["segments"], strict=False):
                times = {"t0": t0 + unix, "t1": t1 + unix}
                rows.append({**of, "version": version, "tokens": tokens, **times, "engine": engine, "seam": seam})
        columns = ["attempt", "session", "group", "sample", "turn", "version", "tokens", "t0", "t1", "engine", "seam"]
        return pandas.DataFrame(rows, columns=columns)

    def _is_incomplete(self, event: Event) -> bool:
        return event["group"] in self.incomplete or group_name(event["session"]) in self.incomplete

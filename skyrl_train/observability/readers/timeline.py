"""The timeline: what ran when, and which policy version sampled it, for a window of time.

    events/000007.jsonl.zst ──> EventSegment (parsed once) ──> EventStore.window(t0, t1) ──> groups, activities, engines

Only the segments around a window are read, and where groups last longer, some before it, so that the record of a long run
costs no more than the record of a short one.
"""

from __future__ import annotations

import math
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from skyrl_train.events.kinds import COMMON, KINDS
from skyrl_train.events.log import segment_paths
from skyrl_train.events.reader import first_event, segment_content

Group = dict[str, Any]

TRAINING = ("update_policy", "accumulate", "finish_update")  # activities of a step that trains
MAX_SEGMENTS = 10  # of 4 MB each, in one window
# Segments around a window: an event is recorded when it ends, and its group's beginning lies before it.
BEFORE, AFTER = 1, 2
MAX_EARLIER = 25  # segments before these, in which groups that have not ended are looked for
# Drawn one by one; above, their number by version over time, and the longest groups.
MAX_GROUPS, MAX_REQUESTS = 400, 6000
LONGEST = 40
BINS = 300
MAX_SPANS = 4000
MAX_ENGINE_POINTS = 400
_KEPT_SEGMENTS = 16  # in memory
MAX_SCANNED = 100  # segments in which failures are looked for
_RARE = re.compile(rb'"kind":"(failed|retried|warning|alarm|process|start_up|run|resume|end|checkpoint|lost)"')
_ENGINE = re.compile(rb'"kind": ?"engine"')
_ENDS = ("trained", "failed", "filtered", "dropped")  # of a group
_LIVES = ("admitted", "restored", "replayed", "retried", "finished", "stage", "buffered")  # of a group before its end
_OF_GROUPS = re.compile(rf'"kind":"({"|".join((*_LIVES, *_ENDS))})"'.encode())
# Of the life of a sample, what a group has of each kind.
_PARTS = {
    "request": ("sample", "t_submit", "t_first", "t_end", "stop", "prompt_tokens", "segments", "seams"),
    "environment": ("sample", "t0", "t1", "call", "ok"),
    "tool": ("sample", "t0", "t1", "names"),
    "agent": ("sample", "t0", "t1", "turns", "ok"),
}
_TYPES = {"int": int, "float": (int, float), "str": str, "bool": bool, "list": list, "dict": dict}


def _accepted(type_: str) -> tuple[type, ...]:
    name, _, null = type_.partition(" | ")
    types = _TYPES[name]
    return (*(types if isinstance(types, tuple) else (types,)), *((type(None),) if null else ()))


# Of each kind: fields with their types, and those that are times.
_FIELDS = {
    name: (
        [(field.name, _accepted(field.type)) for field in (*COMMON[1:], *kind.fields)],
        [field.name for field in kind.fields if field.unit == "s" and field.name != "busy_s"],
    )
    for name, kind in KINDS.items()
}

# Fields that an event may lack.
_EMPTY = {name: {field.name: None for field in kind.fields if "null" in field.type} for name, kind in KINDS.items()}


@dataclass
class EventSegment:
    """A part of the record. All times are Unix times in seconds, by the clock of the process that never jumps.

    Attributes:
        process: number of the process that recorded it, from 0.
        offset: Unix time minus the process's clock, as the process began.
        begins: time of its first event.
        events: by kind, in order.
        read: bytes of its content that are parsed.
        complete: whether all of it is parsed, and nothing will follow.
    """

    process: int
    offset: float
    begins: float
    events: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    read: int = 0
    last: float = 0.0
    complete: bool = False

    def parse(self, content: bytes) -> None:
        """Parse the whole lines of ``content``, which follows what was parsed before; others stay for the next call."""
        whole = content[: content.rfind(b"\n") + 1]
        self.read += len(whole)
        for line in whole.splitlines():
            try:
                event = orjson.loads(line)
                fields, times = _FIELDS[event["kind"]]
                event = {**_EMPTY[event["kind"]], **event}
                if not all(isinstance(event[name], types) for name, types in fields):
                    continue
                event["at"], event["process"] = event["m"] + self.offset, self.process
                for name in times:
                    if event[name] is not None:
                        event[name] += self.offset
                if "groups" in event:
                    event["groups"] = [int(group) for group in event["groups"] if event["kind"] != "lost"]
                if event["kind"] == "request":
                    event["segments"] = [
                        [int(version), int(tokens), t0 + self.offset, t1 + self.offset, engine]
                        for version, tokens, t0, t1, engine in event["segments"]
                    ]
            except (ValueError, KeyError, TypeError):
                continue  # torn, or of another version
            self.events.setdefault(event["kind"], []).append(event)
            self.last = max(self.last, event["at"])


def events_of(segments: Iterable[EventSegment], kind: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a kind in their order."""
    return (event for segment in segments for event in segment.events.get(kind, ()))


class EventStore:
    """The record of one run, which may still grow. Thread-safe.

    Args:
        folder: ``<run>/events``; a missing one has no events.
    """

    def __init__(self, folder: Path) -> None:
        self.run = folder.parent
        self._folder = folder
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._first: tuple[int, ...] = ()  # what stat tells of the first segment
        self._began: float | None = None  # Unix time of its first event
        self._index: dict[int, EventSegment] = {}  # without events: begin, clock and process of each
        self._parsed: OrderedDict[int, EventSegment] = OrderedDict()
        self._rare: dict[int, EventSegment] = {}
        self._of_engines: dict[int, EventSegment] = {}
        self._lasting: dict[int, tuple[dict[int, list[dict[str, Any]]], set[int]]] = {}

    def window(self, t0: float | None, t1: float | None, steps: int = 6) -> dict[str, Any] | None:
        """Return what happened between two Unix times; without them, during the last ``steps`` steps.

        None: nothing is recorded.
        """
        with self._lock:
            paths = self._indexed()
            if not paths:
                return None
            numbers = list(paths)
            if t0 is None or t1 is None:
                parsed = self._read(paths, numbers[-1 - AFTER :])
                t0, t1 = _last_steps(parsed, steps)
            wanted = self._around(numbers, t0, t1)
            whole = len(wanted) <= MAX_SEGMENTS + BEFORE + AFTER
            # Of a window that is too long, the end.
            parsed = self._read(paths, wanted if whole else wanted[-MAX_SEGMENTS:])
            # Nothing but groups is known from before the first segment that was read.
            from_ = t0 if whole else max(t0, parsed[0].begins)
            # At the end of the record, a group that is stuck has no event at all.
            before = wanted[-1] == numbers[-1]
            groups = [] if before else group_lives(parsed, from_, t1)
            if before or any("version" not in group for group in groups):
                parsed = [self._lasting_groups(paths, wanted[-len(parsed)]), *parsed]
                groups = group_lives(parsed, from_, t1)
            last = self._read(paths, numbers[-1:])[0].last
            begin = self._index[numbers[0]].begins
        return {
            "t0": t0,
            "t1": t1,
            "first": begin,
            "last": last,
            "known_from": from_,
            **_drawn(parsed, groups, from_, t1),
        }

    def segments(self, t0: float, t1: float) -> list[EventSegment]:
        """Return all segments with events about the time between two Unix times, in their order."""
        with self._lock:
            paths = self._indexed()
            numbers = self._around(list(paths), t0, t1)
            return [self._lasting_groups(paths, numbers[0]), *self._read(paths, numbers)] if numbers else []

    def rare(self, segments: int = MAX_SCANNED) -> list[dict[str, Any]] | None:
        """Return the events about failures, warnings, alarms and processes of the newest ``segments``, in their order.

        The first segment of each of the newest processes is read too: it says how the process was started. None: nothing is
        recorded.
        """
        with self._lock:
            paths = self._indexed()
            first_of = {self._index[number].process: number for number in reversed(paths)}
            numbers = sorted({*list(paths)[-segments:], *sorted(first_of.values())[-segments:]})
            for number in numbers:
                known = self._index[number]
                segment = self._rare.setdefault(number, EventSegment(known.process, known.offset, known.begins))
                _read_lines_with(_RARE, segment, paths, number)
            asked = [self._rare[number] for number in numbers]
            found = [event for segment in asked for events in segment.events.values() for event in events]
        return sorted(found, key=lambda event: (event["process"], event["at"])) if paths else None

    def turns(self, group: int, sample: int, took_s: float, before: float) -> list[dict[str, Any]]:
        """Return the requests, calls of environments and tools of a sample in their order; none if they are not recorded.

        Args:
            took_s: duration of the group's successful attempt; earlier attempts are left out.
            before: a Unix time after the end of the attempt. A resumed run may have generated the group again later. If the
                group was not generated by then, the machine's clock was set back, and its last generation is meant.
        """
        pattern = re.compile(rb'"kind":"(finished|retried|request|environment|tool)".*"group":%d[,}]' % group)
        found: dict[str, list[dict[str, Any]]] = {}
        begin, process = math.inf, -1
        with self._lock:
            paths = self._indexed()
            numbers = [number for number in paths if self._index[number].begins <= before]
            for number in reversed(numbers[-MAX_SEGMENTS:]):
                known = self._index[number]
                segment = EventSegment(known.process, known.offset, known.begins)
                segment.parse(_lines_with(pattern, segment_content(paths[number])))
                ends = [event for event in segment.events.get("finished", ()) if event["at"] <= before]
                if process < 0 and ends:
                    begin, process = ends[-1]["at"] - took_s - 1.0, known.process  # a second more than it took
                if known.process == process:
                    for kind, events in segment.events.items():
                        found[kind] = [event for event in events if event["at"] <= before] + found.get(kind, [])
                if known.begins < begin < math.inf:
                    break
        if process < 0 and before < math.inf:
            return self.turns(group, sample, took_s, math.inf)
        failed_at = max((event["at"] for event in found.get("retried", ())), default=-math.inf)
        turns: list[dict[str, Any]] = []
        for kind in ("request", "environment", "tool"):
            t0, t1 = ("t_submit", "t_end") if kind == "request" else ("t0", "t1")
            for event in found.get(kind, ()):
                if event["sample"] != sample or event["at"] <= failed_at:
                    continue
                turn = {"kind": kind, "begin": event[t0], "took_s": event[t1] - event[t0]}
                match kind:
                    case "request":
                        turn |= {name: event[name] for name in ("prompt_tokens", "stop", "seams")}
                        turn["first_s"] = None if event["t_first"] is None else event["t_first"] - event[t0]
                        turn["tokens"] = [part[:2] for part in event["segments"]]  # of each version
                    case "environment":
                        turn |= {name: event[name] for name in ("call", "ok")}
                    case "tool":
                        turn["names"] = event["names"]
                turns.append(turn)
        return sorted(turns, key=lambda turn: turn["begin"])

    def engines(self) -> dict[int, list[list[Any]]] | None:
        """Return the samples of each engine of the newest command in the newest segments (see :func:`_engines`). None: nothing is
        recorded."""
        with self._lock:
            paths, before = self._indexed(), self._of_engines
            # Of the many events of a segment, a second has one for each engine: Prometheus asks for those of many runs.
            self._of_engines = {}
            for number in list(paths)[-1 - AFTER :]:
                known = self._index[number]
                if known.process != self._index[max(paths)].process:
                    continue  # its engines are gone
                segment = before.get(number, EventSegment(known.process, known.offset, known.begins))
                _read_lines_with(_ENGINE, segment, paths, number)
                self._of_engines[number] = segment
            segments = [*self._of_engines.values()]
        return _engines(events_of(segments, "engine"), -math.inf, math.inf) if segments else None

    def _around(self, numbers: Sequence[int], t0: float, t1: float) -> Sequence[int]:
        """Return the numbers of the segments with events about the time between two Unix times."""
        begins = [self._index[number].begins for number in numbers]
        first = max(0, int(np.searchsorted(begins, t0, side="right")) - 1 - BEFORE)
        return numbers[first : int(np.searchsorted(begins, t1, side="right")) + AFTER]

    def _lasting_groups(self, paths: dict[int, Path], first: int) -> EventSegment:
        """Return the events of the groups that began before segment ``first`` and had not ended by then."""
        known = self._index[first]
        lives: dict[int, list[dict[str, Any]]] = {}
        earlier = [number for number in paths if number < first and self._index[number].process == known.process]
        for number in earlier[-MAX_EARLIER:]:
            if number not in self._lasting:
                segment = EventSegment(known.process, known.offset, self._index[number].begins)
                segment.parse(_lines_with(_OF_GROUPS, segment_content(paths[number])))
                begun: dict[int, list[dict[str, Any]]] = {}
                for event in (event for kind in _LIVES for event in segment.events.get(kind, ())):
                    if "groups" in event:
                        for group, version in zip(event["groups"], event["versions"], strict=False):
                            begun.setdefault(group, []).append({**event, "groups": [group], "versions": [version]})
                    else:
                        begun.setdefault(event["group"], []).append(event)
                ended = {
                    group
                    for event in (event for kind in _ENDS for event in segment.events.get(kind, ()))
                    for group in event.get("groups", [event.get("group")])
                }
                self._lasting[number] = {group: begun[group] for group in begun.keys() - ended}, ended
            begun, ended = self._lasting[number]
            for group, events in begun.items():
                lives.setdefault(group, []).extend(events)
            for group in ended:
                lives.pop(group, None)
        lasting = EventSegment(known.process, known.offset, known.begins)
        for event in (event for events in lives.values() for event in events):
            lasting.events.setdefault(event["kind"], []).append(event)
        return lasting

    def _indexed(self) -> dict[int, Path]:
        """Read the first line of new segments."""
        # A link could lead out of the folder of runs.
        paths = {number: path for number, path in segment_paths(self._folder).items() if not path.is_symlink()}
        self._forget_another_record(next(iter(paths.values()), None))
        for number, path in paths.items():
            if number in self._index:
                continue
            try:
                event = first_event(path)
                t, m = float(event["t"]), float(event["m"])
                begun = event["kind"] == "process"
            except (OSError, ValueError, KeyError, TypeError):
                continue  # empty yet, or damaged
            before = max((other for other in self._index if other < number), default=None)
            if before is None or begun:
                process = 0 if before is None else self._index[before].process + 1
                self._index[number] = EventSegment(process, t - m, t)
            else:
                same = self._index[before]
                self._index[number] = EventSegment(same.process, same.offset, m + same.offset)
        return {number: path for number, path in paths.items() if number in self._index}

    def _forget_another_record(self, first: Path | None) -> None:
        """Forget what was read if the folder has another record now, as after a start that failed, or of a new run in its place.

        Args:
            first: the first segment; None: there is none.
        """
        if first is None:
            self._forget()
            return
        try:
            stat = first.stat()
        except OSError:  # compressed meanwhile
            return
        known = stat.st_ino, stat.st_size, stat.st_mtime_ns
        if known != self._first:  # it has grown, was compressed, or is another one
            began = first_event(first).get("t")
            if began != self._began:
                self._forget()
            self._first, self._began = known, began

    def _read(self, paths: dict[int, Path], numbers: Sequence[int]) -> list[EventSegment]:
        for number in numbers:
            known = self._index[number]
            segment = self._parsed.setdefault(
                number, EventSegment(known.process, known.offset, known.begins, last=known.begins)
            )
            self._parsed.move_to_end(number)
            if not segment.complete:
                segment.parse(segment_content(paths[number])[segment.read :])
                # Nothing is written to a segment once there is a later one.
                segment.complete = number != max(paths)
        found = [self._parsed[number] for number in numbers]
        while len(self._parsed) > max(_KEPT_SEGMENTS, len(numbers)):
            self._parsed.popitem(last=False)
        return found


def _read_lines_with(pattern: re.Pattern[bytes], segment: EventSegment, paths: dict[int, Path], number: int) -> None:
    """Parse the lines with ``pattern`` of segment ``number`` that nobody has looked at."""
    if not segment.complete:
        content = segment_content(paths[number])[segment.read :]
        content = content[: content.rfind(b"\n") + 1]
        read = segment.read + len(content)
        segment.parse(_lines_with(pattern, content))
        # Nothing is written to a segment once there is a later one.
        segment.read, segment.complete = read, number != max(paths)


def _lines_with(pattern: re.Pattern[bytes], content: bytes) -> bytes:
    return b"".join(line for line in content.splitlines(keepends=True) if pattern.search(line))


def _last_steps(segments: Sequence[EventSegment], steps: int) -> tuple[float, float]:
    """Return the times between which the last steps were trained."""
    end = max(segment.last for segment in segments)
    ends = [event["at"] for event in events_of(segments, "trained")]
    if not ends:
        return max(segments[0].begins, end - 60.0), end + 0.5
    # The step before the first one ended where the first one began.
    begin = ends[-steps - 1] if len(ends) > steps else segments[0].begins
    return begin, max(end, begin) + 0.02 * (end - begin)


def _drawn(segments: Sequence[EventSegment], groups: list[Group], t0: float, t1: float) -> dict[str, Any]:
    spans = [event for event in events_of(segments, "span") if event["t1"] >= t0 and event["t0"] <= t1]
    trained = list(events_of(segments, "trained"))
    requests = sum(len(group["requests"]) for group in groups)
    answer: dict[str, Any] = {
        "spans": [[e["name"], step_of(e, trained), e["t0"], e["t1"]] for e in _longest(spans, MAX_SPANS)],
        "steps": [[e["step"], e["at"], e["groups"]] for e in trained if t0 <= e["at"] <= t1],
        "engines": _engines(events_of(segments, "engine"), t0, t1),
        "evaluations": [
            [e["version"], e["t0"], e["t1"]]
            for e in events_of(segments, "evaluation")
            if e["t1"] >= t0 and e["t0"] <= t1
        ],
        "checkpoints": [
            [e["step"], e["t0"], e["t1"], e["ok"]]
            for e in events_of(segments, "checkpoint")
            if e["t1"] >= t0 and e["t0"] <= t1
        ],
        "processes": [e["at"] for e in events_of(segments, "process") if t0 <= e["at"] <= t1],
        "all_groups": len(groups),
        "density": None,
    }
    if len(groups) > MAX_GROUPS or requests > MAX_REQUESTS:
        answer["density"] = _density(groups, t0, t1)
        longest = sorted(groups, key=lambda group: group["begin"] - group["end"])[:LONGEST]
        groups = sorted(longest, key=lambda group: (group["begin"], group["group"]))
    answer["groups"] = groups
    return answer


def step_of(span: dict[str, Any], trained: Sequence[dict[str, Any]]) -> Any:
    """Return the step of an activity, or None. Passes of the trainer, which have none, belong to the step that ends next."""
    if span["step"] is None and span["name"] in TRAINING:
        return next((event["step"] for event in trained if event["at"] >= span["t1"]), None)
    return span["step"]


def _longest(spans: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    if len(spans) <= count:
        return spans
    return sorted(sorted(spans, key=lambda span: span["t0"] - span["t1"])[:count], key=lambda span: span["t0"])


def group_lives(segments: Sequence[EventSegment], t0: float, t1: float) -> list[Group]:
    """Return the lives of the groups between two Unix times, each from its admission to its end as far as the events tell.

    Unfinished groups live until the last event of their process.
    """
    last = {segment.process: segment.last for segment in segments}
    groups: dict[tuple[int, int], Group] = {}

    def group_of(event: dict[str, Any], index: int) -> Group:
        group = groups.get((event["process"], index))
        if group is None:
            group = groups[event["process"], index] = {
                "group": index,
                "process": event["process"],
                "begin": event["at"],
                "end": event["at"],
                "state": "running",
                "requests": [],
                "environments": [],
                "tools": [],
                "agents": [],
                "stages": [],
                "retries": [],
            }
        group["end"] = max(group["end"], event["at"])
        return group

    for kind in ("admitted", "restored"):
        for event in events_of(segments, kind):
            for index, version in zip(event["groups"], event["versions"], strict=False):
                group_of(event, index).update(
                    begin=event["at"], version=version, **({kind: True} if kind == "restored" else {})
                )
    for event in events_of(segments, "replayed"):
        group_of(event, event["group"])["replayed"] = True
    for event in events_of(segments, "retried"):
        group_of(event, event["group"])["retries"].append([event["at"], event["attempt"], event["reason"]])
    for event in events_of(segments, "finished"):
        keep = {name: event[name] for name in ("uid", "oldest", "newest", "tokens")}
        group = group_of(event, event["group"])
        group.update(finished=event["at"], state="generated", **keep)
        if event["stages"] == 0:
            group.update(buffered=event["at"], state="buffered", reward=event["reward"])
    for event in events_of(segments, "stage"):
        group_of(event, event["group"])["stages"].append([event["name"], event["t0"], event["t1"], event["ok"]])
    for event in events_of(segments, "buffered"):
        group_of(event, event["group"]).update(buffered=event["at"], state="buffered", reward=event["reward"])
    for kind in ("filtered", "failed"):
        for event in events_of(segments, kind):
            group = group_of(event, event["group"])
            group.update(ended=event["at"], state=kind, reason=event.get("reason"))
            group.pop("buffered", None)  # it never waited to be trained
    for event in events_of(segments, "dropped"):
        for index in event["groups"]:
            group_of(event, index).update(ended=event["at"], state="dropped")
    for event in events_of(segments, "trained"):
        for index, lag, masked in zip(event["groups"], event["lags"], event["masked"], strict=False):
            trained = {"state": "trained", "ended": event["at"], "step": event["step"], "lag": lag, "masked": masked}
            group_of(event, index).update(trained)
    for group in groups.values():
        if group["state"] in ("running", "generated", "buffered"):
            group["end"] = last[group["process"]]
    # Most events belong to responses. They are skipped if their group is outside of the window.
    outside = {
        key for key, group in groups.items() if group["end"] < t0 or ("version" in group and group["begin"] > t1)
    }
    for kind, parts in _PARTS.items():
        for event in events_of(segments, kind):
            if event["group"] is not None and (event["process"], event["group"]) not in outside:
                group_of(event, event["group"])[f"{kind}s"].append([event[name] for name in parts])
    for group in groups.values():
        if group["requests"]:
            group["begin"] = min(group["begin"], min(request[1] for request in group["requests"]))
    alive = (group for group in groups.values() if group["end"] >= t0 and group["begin"] <= t1)
    return sorted(alive, key=lambda group: (group["begin"], group["group"]))


def _engines(events: Iterable[dict[str, Any]], t0: float, t1: float) -> dict[int, list[list[Any]]]:
    """Return the samples of each engine: time, state, version, running, waiting, paused, tokens/s, KV share."""
    points: dict[int, list[list[Any]]] = {}
    before: dict[int, dict[str, Any]] = {}
    for event in events:
        number, previous = event["engine"], before.get(event["engine"])
        before[number] = event
        if not t0 - 2.0 <= event["at"] <= t1 + 2.0:
            continue
        speed = None
        if previous is not None and None not in (event["generated_tokens"], previous["generated_tokens"]):
            passed = event["at"] - previous["at"]
            tokens = event["generated_tokens"] - previous["generated_tokens"]
            speed = tokens / passed if passed > 0 and tokens >= 0 else None  # an engine that restarted begins at 0
        facts = [event[name] for name in ("state", "version", "running", "waiting", "paused")]
        points.setdefault(number, []).append([event["at"], *facts, speed, event["kv_cache_usage"]])
    every = {number: -(-len(rows) // MAX_ENGINE_POINTS) for number, rows in points.items()}
    # The newest one is among them: it is the present state.
    return {number: rows[(len(rows) - 1) % every[number] :: every[number]] for number, rows in sorted(points.items())}


def _density(groups: Sequence[Group], t0: float, t1: float) -> dict[str, Any]:
    """Return the mean number of responses that are sampled, by policy version, in each of ``BINS`` parts of the window."""
    by_version: dict[int, array[float]] = {}
    for group in groups:
        for request in group["requests"]:
            for version, _, begin, end, _ in request[6]:
                by_version.setdefault(version, array("d")).extend((begin, end))
    edges = np.linspace(t0, t1, BINS + 1)
    width = edges[1] - edges[0]
    running = {}
    for version, times in sorted(by_version.items()):
        begins, ends = np.sort(np.array(times).reshape(-1, 2), axis=0).T
        # The integral up to x of the number of runs: the sum of min(x, end) - min(x, begin). From t0: Unix times lose digits.
        busy = _sum_of_minima(edges - t0, ends - t0) - _sum_of_minima(edges - t0, begins - t0)
        running[version] = np.maximum(0.0, np.diff(busy) / width)
    return {"t0": t0, "t1": t1, "running": running}


def _sum_of_minima(at: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum over ``times`` (sorted) of ``min(x, time)`` for each x in ``at``."""
    sums = np.concatenate([[0.0], np.cumsum(times)])
    below = np.searchsorted(times, at)
    return np.asarray(sums[below] + (len(times) - below) * at)

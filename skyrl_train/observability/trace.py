"""The record of a run as a trace for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

    trainer   training ▓▓ step 41 ▓▓╲      ╱▓▓ step 42 ▓▓       counters: lag
              weight sync            ╲v41─╱╲                      arrows: group -> step -> weight sync -> requests
    groups    slot 1   [ group 660 ]─╱      ╲
    engine 0  lane 1   [ v40 ]               [ v41 ]             counters: requests, tokens/s, KV cache
    actors    lane 1   [ environment ]  [ tool search ]

The format is the JSON of "Trace Event Format" (Google, 2016): times in microseconds, here since the first event that is read.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Any

from skyrl_train.observability.readers.timeline import TRAINING, EventSegment, Group, events_of, group_lives, step_of

TRAINER, GROUPS, ACTORS, ENGINES = 1, 2, 3, 10  # process ids; engine e is ENGINES + e
SYNC = ("gather", "transfer", "pause", "load_weights")
LANES = 1000  # thread ids of one kind of activity within a process

TraceEvent = dict[str, Any]


def trace_events(segments: Sequence[EventSegment], t0: float, t1: float) -> list[TraceEvent]:
    """Return the trace of what happened between two Unix times.

    A slice (``ph`` X) is a group, a stretch of tokens of one response and policy version, an activity of the trainer, or a call
    of an environment, the tools of an agent, or the agent. Slices of one thread never overlap, unless one lies within the other.
    """
    trace = _Trace(min((segment.begins for segment in segments), default=0.0))
    trained = list(events_of(segments, "trained"))
    spans = [span for span in events_of(segments, "span") if span["t1"] >= t0 and span["t0"] <= t1]
    steps: dict[int, TraceEvent] = {}  # the slice that ends each step
    syncs: dict[int, list[TraceEvent]] = {}  # slices of the weight sync of each version
    for base, title, chosen in (
        (0, "training", [span for span in spans if span["name"] not in SYNC]),
        (LANES, "weight sync", [span for span in spans if span["name"] in SYNC]),
    ):
        for span, lane in _lanes(chosen):
            step = step_of(span, trained)
            number = "" if step is None else f" {step}"
            slice_ = trace.slice(
                TRAINER, (base, title, lane), f"{span['name']}{number}", span["t0"], span["t1"], step=step
            )
            if span["name"] in TRAINING and step is not None:
                steps[step] = slice_
            elif span["name"] in SYNC and step is not None:
                syncs.setdefault(step, []).append(slice_)
    for event, lane in _lanes(
        [event for event in events_of(segments, "evaluation") if event["t1"] >= t0 and event["t0"] <= t1]
    ):
        name = f"evaluation of version {event['version']}"
        trace.slice(TRAINER, (2 * LANES, "evaluation", lane), name, event["t0"], event["t1"], **event["metrics"])

    for group, lane in _lanes(group_lives(segments, t0, t1), "begin", "end"):
        waits = _group(trace, group, lane)
        if group.get("step") in steps:
            trace.arrow("trained", waits, steps[group["step"]])
    for version, slices in syncs.items():
        if version in steps:
            trace.arrow("weight sync", steps[version], min(slices, key=lambda one: one["ts"]))

    _responses(trace, events_of(segments, "request"), t0, t1, syncs)
    calls = [event for kind in ("environment", "tool", "agent") for event in events_of(segments, kind)]
    for event, lane in _lanes([event for event in calls if event["t1"] >= t0 and event["t0"] <= t1]):
        name = {
            "environment": f"{event.get('name')} {event.get('call')}",
            "tool": f"tool {', '.join(map(str, event.get('names', ())))}",
        }.get(event["kind"], "agent")
        facts = {fact: event[fact] for fact in ("session", "turns", "ok") if fact in event}
        trace.slice(ACTORS, (0, "lane", lane), name, event["t0"], event["t1"], **facts)

    for event in trained:
        if t0 <= event["at"] <= t1 and event["lags"]:
            lags = {"mean": sum(event["lags"]) / len(event["lags"]), "max": max(event["lags"])}
            trace.counter(TRAINER, "lag", event["at"], lags)
    before: dict[int, dict[str, Any]] = {}
    for event in events_of(segments, "engine"):
        last, before[event["engine"]] = before.get(event["engine"]), event
        if not t0 <= event["at"] <= t1:
            continue
        pid, requests = ENGINES + event["engine"], {"running": event["running"] or 0, "waiting": event["waiting"] or 0}
        trace.counter(pid, "requests", event["at"], requests)
        if event["kv_cache_usage"] is not None:
            trace.counter(pid, "KV cache", event["at"], {"in use": event["kv_cache_usage"]})
        if last is not None and event["at"] > last["at"]:
            tokens = (event["generated_tokens"] or 0) - (last["generated_tokens"] or 0)
            trace.counter(pid, "tokens/s", event["at"], {"sampled": max(0.0, tokens / (event["at"] - last["at"]))})
    for kind in ("warning", "failed", "retried"):
        for event in events_of(segments, kind):
            if t0 <= event["at"] <= t1:
                trace.instant(f"{kind}: {event.get('text') or event.get('reason')}", event["at"])
    return trace.events()


def _group(trace: _Trace, group: Group, lane: int) -> TraceEvent:
    """Add a group with its stages; return the slice in which it waits to be trained, or else the whole."""
    facts = {name: group.get(name) for name in ("uid", "state", "step", "lag", "reward", "tokens", "oldest", "newest")}
    thread = (0, "slot", lane)
    begin: float = group["begin"]
    end: float = group["end"]
    whole = trace.slice(GROUPS, thread, f"group {group['group']}", begin, end, **facts)
    if "finished" not in group:
        return whole
    # Each part begins where the one before has ended, so that the slices nest.
    at, buffered = group["finished"], group.get("buffered", end)
    trace.slice(GROUPS, thread, "generate", begin, at)
    for name, t0, t1, ok in sorted(group["stages"], key=lambda stage: stage[1]):
        t0, t1 = max(at, t0), min(t1, buffered)
        if t0 < t1:
            trace.slice(GROUPS, thread, f"stage {name}", t0, t1, ok=ok)
            at = t1
    return trace.slice(GROUPS, thread, "wait to be trained", buffered, end) if "buffered" in group else whole


def _responses(
    trace: _Trace, requests: Iterable[dict[str, Any]], t0: float, t1: float, syncs: dict[int, list[TraceEvent]]
) -> None:
    """Add the stretches of tokens in the engines, and an arrow from each weight sync to the first one after it."""
    engines: dict[int, list[dict[str, Any]]] = {}
    for request in requests:
        facts = {name: request[name] for name in ("session", "stop", "prompt_tokens", "replayed")}
        for version, tokens, begin, end, engine in request["segments"]:
            if end >= t0 and begin <= t1:
                stretch = {"t0": begin, "t1": end, "facts": {**facts, "version": version, "tokens": tokens}}
                engines.setdefault(engine, []).append(stretch)
    for engine, stretches in sorted(engines.items()):
        met: set[int] = set()
        for stretch, lane in _lanes(stretches):
            facts = stretch["facts"]
            version = facts["version"]
            name = f"v{version} {facts['session']}"
            slice_ = trace.slice(ENGINES + engine, (0, "lane", lane), name, stretch["t0"], stretch["t1"], **facts)
            if version in syncs and version not in met:
                met.add(version)
                trace.arrow("first tokens", max(syncs[version], key=lambda one: one["ts"]), slice_)


def _lanes(events: Iterable[dict[str, Any]], t0: str = "t0", t1: str = "t1") -> list[tuple[dict[str, Any], int]]:
    """Return the events in the order of their beginning, each with the lowest lane that is free from then to its end."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    found = []
    for event in sorted(events, key=lambda event: (event[t0], event[t1])):
        while busy and busy[0][0] <= event[t0]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (event[t1], lane))
        found.append((event, lane))
    return found


class _Trace:
    """Collects events of the format, and names the processes and threads that occur."""

    def __init__(self, origin: float) -> None:
        self._origin = origin
        self._events: list[TraceEvent] = []
        self._threads: dict[tuple[int, int], str] = {}
        self._arrows = 0

    def slice(self, pid: int, thread: tuple[int, str, int], name: str, t0: float, t1: float, **args: Any) -> TraceEvent:
        base, title, lane = thread
        tid = 1 + base + lane
        self._threads.setdefault((pid, tid), f"{title} {lane + 1}")
        begin = self._us(t0)
        event = {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": begin, "dur": max(0, self._us(t1) - begin)}
        self._events.append({**event, "args": args} if args else event)
        return event

    def arrow(self, name: str, source: TraceEvent, target: TraceEvent) -> None:
        """Add an arrow between two slices, from the end of the first one; none if the second one has ended before."""
        if target["ts"] + target["dur"] < source["ts"]:
            return
        self._arrows += 1
        # A slice contains its beginning, but not its end; and an arrow does not point back in time.
        at = source["ts"] + max(0, source["dur"] - 1)
        until = target["ts"] + max(0, target["dur"] - 1)
        at = min(at, max(source["ts"], until))
        common = {"cat": "flow", "name": name, "id": self._arrows}
        self._events.append({"ph": "s", **common, "pid": source["pid"], "tid": source["tid"], "ts": at})
        there = {"pid": target["pid"], "tid": target["tid"], "ts": max(at, target["ts"])}
        self._events.append({"ph": "f", "bp": "e", **common, **there})

    def counter(self, pid: int, name: str, at: float, values: dict[str, float]) -> None:
        self._events.append({"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": self._us(at), "args": values})

    def instant(self, name: str, at: float) -> None:
        self._events.append({"ph": "i", "s": "p", "name": name, "pid": TRAINER, "tid": 1, "ts": self._us(at)})

    def events(self) -> list[TraceEvent]:
        """Return the names of processes and threads, and all events in the order of their times."""
        names = {TRAINER: "trainer", GROUPS: "groups", ACTORS: "actors"}
        meta: list[TraceEvent] = []
        for pid in sorted({event["pid"] for event in self._events}):
            name = names.get(pid, f"engine {pid - ENGINES}")
            for key, value in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": pid})):
                meta.append({"ph": "M", "name": key, "pid": pid, "tid": 0, "ts": 0, "args": value})
        for (pid, tid), name in sorted(self._threads.items()):
            for key, value in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": tid})):
                meta.append({"ph": "M", "name": key, "pid": pid, "tid": tid, "ts": 0, "args": value})
        # What began before the first event that was read ended later; Perfetto drops negative times.
        before = min((event["ts"] for event in self._events), default=0)
        if before < 0:
            self._events = [{**event, "ts": event["ts"] - before} for event in self._events]
        # Of slices that begin together, the outer one comes first.
        return meta + sorted(self._events, key=lambda event: (event["ts"], -event.get("dur", 0)))

    def _us(self, at: float) -> int:
        return round((at - self._origin) * 1e6)

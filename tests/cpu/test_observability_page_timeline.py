"""The timeline: which events of a record it reads, and what it makes of them."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_runs import BEGAN, RecordedRun
from starlette.testclient import TestClient

from skyrl_train.events.log import EVENTS, compress_closed, segment_paths
from skyrl_train.observability.page.app import create_page
from skyrl_train.observability.readers import timeline
from skyrl_train.observability.readers.timeline import EventStore


def window_of(events: list[dict[str, Any]], tmp_path: Path, t0: float = 0.0, t1: float = 100.0) -> dict[str, Any]:
    folder = tmp_path / EVENTS
    folder.mkdir(exist_ok=True)
    begun = {
        "kind": "process",
        "t": 0.0,
        "m": 0.0,
        "host": "",
        "pid": 1,
        "version": "",
        "python": "",
        "config": "",
        "git": None,
    }
    lines = [orjson.dumps(event) for event in [{**begun, "command": []}, *events]]
    (folder / "000001.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    window = EventStore(folder).window(t0, t1)
    assert window is not None
    return window


def event(kind: str, at: float, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "t": at, "m": at, **fields}


def admitted(at: float, *groups: int) -> dict[str, Any]:
    return event("admitted", at, groups=list(groups), versions=[0] * len(groups))


def request(at: float, group: int, segments: list[list[Any]], **more: Any) -> dict[str, Any]:
    fields = {
        "session": "",
        "group": group,
        "sample": 0,
        "prompt_tokens": 1,
        "t_submit": segments[0][2],
        "t_first": None,
        "t_end": at,
    }
    return event(
        "request",
        at,
        **fields,
        stop="stop",
        replayed=0,
        segments=segments,
        seams=["update"] * (len(segments) - 1),
        **more,
    )


# Windows ----------------------------------------------------------------------------------------------------------


def test_a_window_has_the_groups_whose_lives_touch_it(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run", steps=20, groups=2, samples=2)
    store = EventStore(run.path / EVENTS)
    window = store.window(BEGAN + 10.0, BEGAN + 11.0)
    assert window is not None
    lives: dict[int, list[float]] = {}
    for entry in run.events:
        for group in [*entry.get("groups", ()), *([entry["group"]] if entry.get("group") is not None else [])]:
            lives.setdefault(group, []).append(entry["t"])
    expected = {group for group, times in lives.items() if max(times) >= BEGAN + 10 and min(times) <= BEGAN + 11}
    assert {group["group"] for group in window["groups"]} == expected
    assert [step for step, *_ in window["steps"]] == [11]
    assert all(span[3] >= BEGAN + 10 and span[2] <= BEGAN + 11 for span in window["spans"])


def test_without_times_the_window_has_the_last_steps(tmp_path: Path) -> None:
    window = EventStore(RecordedRun(tmp_path / "run", steps=20).path / EVENTS).window(None, None, steps=3)
    assert window is not None
    assert [step for step, *_ in window["steps"]] == [17, 18, 19, 20]
    assert window["last"] <= window["t1"]


def test_only_the_segments_around_a_window_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A segment has the events of four steps or so, and no group lives longer than three.
    run = RecordedRun(tmp_path / "run", steps=80, groups=2, samples=2, segment_bytes=8000)
    segments = segment_paths(run.path / EVENTS)
    assert len(segments) > 10
    read: list[int] = []
    content_of = timeline.segment_content

    def content(path: Path, limit: int | None = None) -> bytes:
        if limit is None:
            read.append(int(path.name.partition(".")[0]))
        return content_of(path, limit)

    monkeypatch.setattr(timeline, "segment_content", content)
    store = EventStore(run.path / EVENTS)
    first = store.window(BEGAN + 20.0, BEGAN + 20.5)
    assert 0 < len(set(read)) <= 7
    before = len(read)
    assert store.window(BEGAN + 20.0, BEGAN + 20.5) == first
    assert len(read) <= before + 2, "what is parsed stays; only the open segment is looked at again"
    whole = EventStore(RecordedRun(tmp_path / "whole", steps=80, groups=2, samples=2).path / EVENTS)
    same = whole.window(BEGAN + 20.0, BEGAN + 20.5)
    assert first is not None and same is not None
    assert all(first[part] == same[part] for part in ("spans", "steps", "groups"))


def test_a_window_that_is_too_long_has_its_end(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run", steps=60, groups=2, samples=2, segment_bytes=4000)
    window = EventStore(run.path / EVENTS).window(BEGAN, BEGAN + 60)
    assert window is not None
    assert window["known_from"] > BEGAN
    assert min(at for _, at, _ in window["steps"]) >= window["known_from"]
    assert window["steps"][-1][0] == 60


def test_a_store_follows_a_segment_that_grows_is_compressed_or_torn(tmp_path: Path) -> None:
    folder = tmp_path / EVENTS
    store = EventStore(folder)
    assert store.window(None, None) is None
    window_of([admitted(1.0, 0)], tmp_path)
    path = folder / "000001.jsonl"

    def states() -> dict[int, str]:
        window = store.window(0.0, 100.0)
        assert window is not None
        return {group["group"]: group["state"] for group in window["groups"]}

    assert states() == {0: "running"}
    line = orjson.dumps(event("buffered", 2.0, group=0, reward=None)) + b"\n"
    with path.open("ab") as file:
        file.write(line[:20])
    assert states() == {0: "running"}
    with path.open("ab") as file:
        file.write(line[20:])
    assert states() == {0: "buffered"}
    (folder / "000002.jsonl").write_bytes(orjson.dumps(admitted(3.0, 1)) + b"\n")
    compress_closed(folder, 1)
    assert not path.exists()
    assert states() == {0: "buffered", 1: "running"}
    assert EventStore(folder).window(0.0, 100.0) == store.window(0.0, 100.0)


def test_a_record_that_takes_the_place_of_another_is_the_only_one_shown(tmp_path: Path) -> None:
    """A start that failed leaves its folder to the corrected command."""
    store, folder = EventStore(tmp_path / EVENTS), tmp_path / EVENTS

    def record(began: float, *events: dict[str, Any]) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        process = event("process", began, host="", pid=1, version="", python="", config="", git=None, command=[])
        (folder / "000001.jsonl").write_bytes(b"".join(orjson.dumps(each) + b"\n" for each in (process, *events)))

    def shown() -> tuple[list[int], list[str]]:
        window = store.window(0.0, 100.0)
        assert window is not None
        return [group["group"] for group in window["groups"]], [each["kind"] for each in store.rare() or ()]

    failed = event("retried", 2.0, group=0, attempt=1, reason="", place="")
    record(1.0, failed, *(admitted(3.0, group) for group in range(9)))
    assert shown() == ([*range(9)], ["process", "retried"])
    record(50.0, admitted(51.0, 20))
    assert shown() == ([20], ["process"])
    compress_closed(folder, 1)
    (folder / "000002.jsonl").write_bytes(orjson.dumps(admitted(60.0, 21)) + b"\n")
    assert shown() == ([20, 21], ["process"])
    shutil.rmtree(folder)
    assert store.window(0.0, 100.0) is None and store.rare() is None
    record(70.0)
    assert shown() == ([], ["process"])


def test_a_segment_may_begin_with_a_step_of_thousands_of_groups(tmp_path: Path) -> None:
    window_of([admitted(1.0, 0)], tmp_path)
    groups = list(range(20_000))
    step = event("trained", 2.0, step=1, groups=groups, lags=[0] * len(groups), masked=[0] * len(groups))
    (tmp_path / EVENTS / "000002.jsonl").write_bytes(orjson.dumps(step) + b"\n")
    window = EventStore(tmp_path / EVENTS).window(0.0, 100.0)
    assert window is not None and [number for number, *_ in window["steps"]] == [1]


def test_the_end_of_a_segment_is_read_also_if_the_next_one_has_begun_meanwhile(tmp_path: Path) -> None:
    store, folder = EventStore(tmp_path / EVENTS), tmp_path / EVENTS
    window_of([admitted(1.0, 0)], tmp_path)
    store.window(0.0, 100.0)
    assert [one["kind"] for one in store.rare() or ()] == ["process"]
    last = [
        event("failed", 2.0, group=0, reason="it", masked=False),
        event("warning", 2.0, level="ERROR", source="", text="it"),
    ]
    with (folder / "000001.jsonl").open("ab") as file:
        file.writelines(orjson.dumps(one) + b"\n" for one in last)
    (folder / "000002.jsonl").write_bytes(orjson.dumps(admitted(3.0, 1)) + b"\n")
    window = store.window(0.0, 100.0)
    assert window is not None
    assert {group["group"]: group["state"] for group in window["groups"]} == {0: "failed", 1: "running"}
    assert [one["kind"] for one in store.rare() or ()] == ["process", "failed", "warning"]


def test_failures_are_those_of_the_segments_that_are_asked_for(tmp_path: Path) -> None:
    window_of([event("failed", 1.0, group=0, reason="first", masked=False)], tmp_path)
    for number in (2, 3):
        line = orjson.dumps(event("failed", float(number), group=number, reason=str(number), masked=False)) + b"\n"
        (tmp_path / EVENTS / f"{number:06}.jsonl").write_bytes(line)
    store = EventStore(tmp_path / EVENTS)
    for segments, groups in ((100, [0, 2, 3]), (1, [0, 3]), (2, [0, 2, 3])):  # the first one begins the process
        failed = [one["group"] for one in store.rare(segments) or () if one["kind"] == "failed"]
        assert failed == groups


def test_a_group_that_runs_for_many_segments_is_in_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    window_of([admitted(1.0, 0, 1, 2), event("retried", 1.5, group=2, attempt=1, reason="it")], tmp_path)
    ended = event("trained", 20.0, step=1, groups=[1], lags=[0], masked=[0])
    for number in range(2, 9):
        lines = [ended] if number == 2 else []
        lines.append(admitted(10.0 * number, 10 + number))
        content = b"".join(orjson.dumps(one) + b"\n" for one in lines)
        (tmp_path / EVENTS / f"{number:06}.jsonl").write_bytes(content)

    def begun() -> dict[int, tuple[float, int]]:
        window = EventStore(tmp_path / EVENTS).window(78.0, 100.0)
        assert window is not None
        return {group["group"]: (group["begin"], len(group["retries"])) for group in window["groups"]}

    others = {10 + number: (10.0 * number, 0) for number in range(3, 9)}
    assert begun() == {0: (1.0, 0), 2: (1.0, 1), 12: (20.0, 0), **others}
    monkeypatch.setattr(timeline, "MAX_EARLIER", 3)
    assert begun() == others


def test_a_segment_that_leads_out_of_the_folder_is_not_read(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run", steps=2)
    folder = tmp_path / "linked"
    folder.mkdir()
    (folder / "000001.jsonl").symlink_to(run.path / EVENTS / "000001.jsonl")
    assert EventStore(folder).window(None, None) is None


# Groups -----------------------------------------------------------------------------------------------------------


def test_the_life_of_a_group(tmp_path: Path) -> None:
    sample = {"session": "", "group": 7, "sample": 0}
    window = window_of([
        admitted(1.0, 7),
        event("retried", 2.0, group=7, attempt=1, reason="why"),
        request(4.0, 7, [[0, 3, 2.5, 3.0, 0], [1, 2, 3.2, 4.0, 0]]),
        event("environment", 4.5, **sample, name="game", call="step", t0=4.0, t1=4.5, ok=True),
        event("tool", 4.5, **sample, names=["search"], t0=4.0, t1=4.5),
        event("agent", 4.8, **sample, turns=2, t0=2.5, t1=4.8, ok=False),
        event("finished", 5.0, group=7, uid="u", attempt=2, oldest=0, newest=1, tokens=5),
        event("stage", 6.0, group=7, name="reward", t_queue=5.0, t0=5.5, t1=6.0, ok=True),
        event("buffered", 6.0, group=7, reward=0.5),
        event("trained", 9.0, step=2, groups=[7], lags=[1], masked=[3]),
    ], tmp_path)  # fmt: skip
    (group,) = window["groups"]
    assert (group["begin"], group["finished"], group["end"]) == (1.0, 5.0, 9.0)
    assert (group["state"], group["step"], group["lag"], group["masked"], group["reward"]) == ("trained", 2, 1, 3, 0.5)
    assert group["retries"] == [[2.0, 1, "why"]]
    ((number, submitted, first, end, stop, _, segments, seams),) = group["requests"]
    assert (number, submitted, first, end, stop, seams) == (0, 2.5, None, 4.0, "stop", ["update"])
    assert segments == [[0, 3, 2.5, 3.0, 0], [1, 2, 3.2, 4.0, 0]]
    assert group["environments"] == [[0, 4.0, 4.5, "step", True]]
    assert group["tools"] == [[0, 4.0, 4.5, ["search"]]]
    assert group["agents"] == [[0, 2.5, 4.8, 2, False]]
    assert group["stages"] == [["reward", 5.5, 6.0, True]]


@pytest.mark.parametrize(("last", "state"), [
    (event("failed", 3.0, group=7, reason="why", masked=False), "failed"),
    (event("filtered", 3.0, group=7), "filtered"),
    (event("dropped", 3.0, groups=[7]), "dropped"),
])  # fmt: skip
def test_a_group_that_is_not_trained_tells_why(tmp_path: Path, last: dict[str, Any], state: str) -> None:
    (group,) = window_of([admitted(1.0, 7), last], tmp_path)["groups"]
    assert (group["state"], group["end"]) == (state, 3.0)


def test_a_group_of_a_killed_process_ends_with_it_and_begins_again_in_the_next_one(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run", steps=2, groups=1, samples=1)
    folder = run.path / EVENTS
    # Its clock begins at 0, and a day later by the clock of the wall.
    later = BEGAN + 86400
    second = [
        {**run.events[0], "t": later, "m": 0.0},
        {"kind": "admitted", "t": later + 1, "m": 1.0, "groups": [0], "versions": [0]},
        {"kind": "note", "t": later - 500, "m": 2.0, "text": "the clock of the wall was set back"},
    ]
    (folder / "000002.jsonl").write_bytes(b"\n".join(orjson.dumps(entry) for entry in second) + b"\n")
    window = EventStore(folder).window(BEGAN, later + 10)
    assert window is not None
    first, again = [group for group in window["groups"] if group["group"] == 0]
    assert (first["process"], first["state"], again["process"], again["state"]) == (0, "trained", 1, "running")
    assert (again["begin"], again["end"]) == (later + 1.0, later + 2.0)


def test_of_many_looks_at_an_engine_the_newest_one_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MAX_ENGINE_POINTS", 4)
    facts = {"version": 1, "running": 1, "waiting": 0, "paused": False, "prefill_tokens": 0, "busy_s": 0.0}
    facts |= {"kv_cache_usage": None, "generated_tokens": 0}
    events = [
        event("engine", float(at), engine=0, state="dead" if at == 11 else "healthy", **facts) for at in range(1, 12)
    ]
    points = window_of(events, tmp_path)["engines"][0]
    assert [point[0] for point in points] == [2.0, 5.0, 8.0, 11.0] and points[-1][1] == "dead"


def test_passes_belong_to_the_step_that_ends_next_and_fields_that_may_lack_are_null(tmp_path: Path) -> None:
    window = window_of([
        event("span", 1.0, name="update_policy", t0=0.5, t1=1.0),
        event("span", 1.0, name="wait_for_weight_sync", step=None, t0=0.5, t1=1.0),
        event("trained", 1.1, step=7, groups=[], lags=[], masked=[]),
        event("engine", 2.0, engine=0, state="dead"),
    ], tmp_path)  # fmt: skip
    assert window["spans"] == [["update_policy", 7, 0.5, 1.0], ["wait_for_weight_sync", None, 0.5, 1.0]]
    assert window["engines"] == {0: [[2.0, "dead", None, None, None, None, None, None]]}


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 90), st.floats(0.01, 30)), min_size=1, max_size=20))
def test_the_number_of_responses_by_version_is_their_time_in_each_bin(runs: list[tuple[int, float, float]]) -> None:
    groups = [
        {"requests": [[0, 0, 0, 0, "", 0, [[version, 1, begin, begin + length, 0]], []]]}
        for version, begin, length in runs
    ]
    density = timeline._density(groups, 10.0, 70.0)
    edges = np.linspace(10.0, 70.0, timeline.BINS + 1)
    for version, running in density["running"].items():
        for index in (0, 1, 77, timeline.BINS - 1):
            low, high = edges[index], edges[index + 1]
            busy = sum(max(0.0, min(high, b + n) - max(low, b)) for v, b, n in runs if v == version)
            # Sums of up to 40 times below 120 are exact to 1e-12; the width of a bin is 0.2.
            assert running[index] == pytest.approx(busy / (high - low), abs=1e-9)


def test_many_groups_become_their_number_and_the_longest_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MAX_GROUPS", 10)
    monkeypatch.setattr(timeline, "LONGEST", 3)
    lengths = list(range(1, 21))
    random.Random(0).shuffle(lengths)
    events = [admitted(1.0, *range(20))]
    events += [event("filtered", 1.0 + length, group=group) for group, length in enumerate(lengths)]
    window = window_of(events, tmp_path)
    assert window["all_groups"] == 20
    assert sorted(lengths[group["group"]] for group in window["groups"]) == [18, 19, 20]
    assert window["density"] is not None


@pytest.mark.parametrize("bad", [
    {"kind": "trained", "t": 1.0, "m": 1.0, "step": 1, "groups": 5, "lags": [], "masked": []},
    {"kind": "trained", "t": 1.0, "m": 1.0, "step": 1, "groups": [[1]], "lags": [1], "masked": [0]},
    {"kind": "request", "t": 1.0, "m": 1.0, "group": 7, "segments": [[1, 2]]},
    {"kind": "finished", "t": "x", "m": None}, {"kind": ["span"], "t": 1.0, "m": 1.0}, {"t": 1.0, "m": 1.0}, [], None,
    {"kind": "of the future", "t": 1.0, "m": 1.0, "groups": [1]},
    {"kind": "admitted", "t": 1.0, "m": 1.0, "groups": [9, 10], "versions": []},
])  # fmt: skip
def test_events_of_another_form_are_left_out(tmp_path: Path, bad: Any) -> None:
    window = window_of([bad, admitted(1.0, 7), bad], tmp_path)
    assert [group["group"] for group in window["groups"]] == [7]


# HTTP -------------------------------------------------------------------------------------------------------------


def test_the_timeline_around_a_step(tmp_path: Path) -> None:
    RecordedRun(tmp_path / "run", steps=20)
    client = TestClient(create_page(tmp_path), base_url="http://localhost")
    answer = client.get("/api/timeline", params={"run": "run", "step": 10}).json()
    assert 10 in [step for step, *_ in answer["steps"]] and answer["t1"] < BEGAN + 12
    assert client.get("/api/timeline", params={"run": "run", "t0": "nan"}).status_code == 400
    (tmp_path / "run" / EVENTS).rename(tmp_path / "run" / "gone")
    client = TestClient(create_page(tmp_path), base_url="http://localhost")
    assert client.get("/api/timeline", params={"run": "run"}).json() is None


def test_the_turns_of_a_sample_are_those_of_its_successful_attempt_and_of_its_own_process(tmp_path: Path) -> None:
    def called(at: float, sample: int = 0) -> dict[str, Any]:
        fields = {"session": "", "group": 7, "sample": sample, "name": "game", "call": "step", "ok": True}
        return event("environment", at, t0=at - 0.5, t1=at, **fields)

    def finished(at: float) -> dict[str, Any]:
        return event("finished", at, group=7, uid="u", attempt=1, oldest=0, newest=0, tokens=1)

    process = {"host": "", "pid": 1, "version": "", "python": "", "config": "", "git": None, "command": []}
    begun = event("process", 0.0, **process)
    first = [begun, called(2.0), finished(3.0)]  # its process was killed before the group was trained
    second = [
        [begun, event("retried", 12.0, group=7, attempt=1, reason="no"), request(14.0, 7, [[0, 5, 13.0, 14.0, 0]])],
        [called(15.0), called(15.0, sample=1), request(15.5, 71, [[0, 5, 15.0, 15.5, 0]])],
        [request(17.0, 7, [[0, 3, 15.0, 16.0, 0], [1, 2, 16.5, 17.0, 0]]), finished(18.0)],
    ]
    second[0].insert(1, called(11.5))  # of the attempt that failed
    later = [event("process", 30.0, **process), called(31.0), finished(32.0)]  # a resume, from an earlier checkpoint
    (tmp_path / EVENTS).mkdir()
    for number, events in enumerate([first, *second, later], 1):
        lines = b"".join(orjson.dumps(one) + b"\n" for one in events)
        (tmp_path / EVENTS / f"{number:06}.jsonl").write_bytes(lines)
    store = EventStore(tmp_path / EVENTS)
    turns = store.turns(7, 0, took_s=5.0, before=20.0)
    assert [(turn["kind"], turn["begin"], turn["took_s"]) for turn in turns] == [
        ("request", 13.0, 1.0),
        ("environment", 14.5, 0.5),
        ("request", 15.0, 2.0),
    ]
    assert turns[2]["tokens"] == [[0, 3], [1, 2]] and turns[2]["seams"] == ["update"]
    assert [turn["begin"] for turn in store.turns(7, 0, took_s=2.0, before=40.0)] == [30.5]
    assert [turn["begin"] for turn in store.turns(7, 0, took_s=2.0, before=1.0)] == [30.5], "the clock was set back"
    assert store.turns(8, 0, took_s=1.0, before=40.0) == []

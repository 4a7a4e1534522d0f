"""The trace of a run: each event has the fields of the format, slices nest, and arrows join what caused each other."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_runs import RecordedRun

from skyrl_train.entrypoints.command_line import main
from skyrl_train.events.log import EVENTS
from skyrl_train.observability.run_folder import METRICS
from skyrl_train.observability.trace import ENGINES, GROUPS, TRAINER, _lanes

# Of each phase: the fields beside "ph", "name", "pid", "tid" and "ts", with their types.
FIELDS: dict[str, dict[str, type]] = {
    "X": {"dur": int},
    "s": {"cat": str, "id": int},
    "f": {"cat": str, "id": int, "bp": str},
    "C": {"args": dict},
    "i": {"s": str},
    "M": {"args": dict},
}

Event = dict[str, Any]


def read(path: Path) -> list[Event]:
    content = json.loads(gzip.decompress(path.read_bytes()))
    assert content["displayTimeUnit"] == "ms"
    return list(content["traceEvents"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "first-1"
    RecordedRun(path, steps=12)
    return path


@pytest.fixture(scope="module")
def events(run: Path) -> list[Event]:
    output = run.parent / "trace.json.gz"
    assert main(["trace", str(run), "--steps", "3:9", "--output", str(output)]) == 0
    return read(output)


def test_each_event_has_the_fields_of_its_phase(events: list[Event]) -> None:
    assert {event["ph"] for event in events} == FIELDS.keys() - {"i"}
    for event in events:
        fields = {"name": str, "pid": int, "tid": int, "ts": int} | FIELDS[event["ph"]]
        for name, type_ in fields.items():
            assert type(event[name]) is type_, (name, event)
        assert event["ts"] >= 0 and event.get("dur", 0) >= 0
        assert event.keys() <= fields.keys() | {"ph", "args"}
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())


def test_each_process_and_thread_with_slices_has_a_name(events: list[Event]) -> None:
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names.keys() == {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(processes.values()) == ["trainer", "groups", "actors", "engine 0"]
    assert names[TRAINER, 1] == "training 1" and names[GROUPS, 1] == "slot 1" and names[ENGINES, 1] == "lane 1"


def test_slices_of_a_thread_nest(events: list[Event]) -> None:
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for thread, slices in threads.items():
        open_: list[int] = []  # the ends of the slices in which we are
        for begin, end in slices:  # in the order of the file: the outer one first
            while open_ and open_[-1] <= begin:
                open_.pop()
            assert not open_ or end <= open_[-1], (thread, begin, end)
            open_.append(end)


def test_arrows_join_groups_steps_weight_syncs_and_requests(events: list[Event]) -> None:
    slices = [event for event in events if event["ph"] == "X"]

    def at(event: Event) -> Event:
        """The innermost slice that contains the end of an arrow."""
        found = [
            one
            for one in slices
            if (one["pid"], one["tid"]) == (event["pid"], event["tid"])
            and one["ts"] <= event["ts"] < one["ts"] + max(1, one["dur"])
        ]
        return min(found, key=lambda one: one["dur"])

    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begins.keys() == ends.keys() and len(begins) + len(ends) == sum(event["ph"] in "sf" for event in events)
    joined = Counter()
    for number, begin in begins.items():
        end = ends[number]
        assert begin["name"] == end["name"] and begin["cat"] == end["cat"] and begin["ts"] <= end["ts"]
        source, target = at(begin), at(end)
        joined[begin["name"]] += 1
        if begin["name"] == "trained":
            assert source["name"] == "wait to be trained" and target["name"].startswith("update_policy ")
        elif begin["name"] == "weight sync":
            assert source["name"] == target["name"].replace("gather", "update_policy")
        else:
            assert source["name"].startswith("pause ") and target["args"]["version"] == int(source["name"].split()[1])
    # Four groups in each of seven steps; the last version has sampled nothing before the end.
    assert joined["trained"] == 28 and joined["weight sync"] == 7 and joined["first tokens"] >= 6


def test_counters_follow_engines_and_lag(events: list[Event]) -> None:
    counters = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            counters[event["pid"], event["name"]].append(event["args"])
    of_engine = {(ENGINES, name) for name in ("requests", "tokens/s", "KV cache")}
    assert counters.keys() == {(TRAINER, "lag"), *of_engine}
    assert counters[ENGINES, "KV cache"][0] == {"in use": 0.25}
    assert len(counters[TRAINER, "lag"]) == 7 and counters[TRAINER, "lag"][3] == {"mean": 2.0, "max": 2}
    assert counters[ENGINES, "requests"][0] == {"running": 4, "waiting": 0}
    assert counters[ENGINES, "tokens/s"][0] == {"sampled": pytest.approx(100.0, abs=1e-3)}  # times have 0.2 us


def test_no_time_is_negative_although_groups_and_responses_began_before_what_was_read(tmp_path: Path) -> None:
    path = RecordedRun(tmp_path / "run", steps=12, segment_bytes=1000).path
    assert main(["trace", str(path), "--steps", "10:10", "--output", str(tmp_path / "trace.json.gz")]) == 0
    assert min(event["ts"] for event in read(tmp_path / "trace.json.gz") if event["ph"] != "M") == 0


def test_by_default_the_last_steps_are_traced(run: Path, tmp_path: Path) -> None:
    assert main(["trace", str(run), "--output", str(tmp_path / "t.json.gz")]) == 0
    steps = {event["name"] for event in read(tmp_path / "t.json.gz") if event["name"].startswith("update_policy")}
    assert steps == {f"update_policy {step}" for step in range(3, 13)}


def test_a_run_that_was_killed_in_its_first_step_is_traced_as_a_whole(run: Path, tmp_path: Path) -> None:
    killed = tmp_path / "killed-1"
    (killed / EVENTS).mkdir(parents=True)
    (killed / METRICS).touch()
    (segment,) = (run / EVENTS).iterdir()
    (killed / EVENTS / segment.name).write_bytes(segment.read_bytes()[:20000] + b'{"kind":"span","t":1,"m":null')
    assert main(["trace", str(killed), "--output", str(tmp_path / "t.json.gz")]) == 0
    assert {"group 0", "update_policy 1"} <= {event["name"] for event in read(tmp_path / "t.json.gz")}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--steps", "5"], "no range"),
        (["--steps", "50:60"], "steps 1 to 12"),
        (["--output", "."], "--output"),
    ],
)
def test_what_cannot_be_traced_is_said(
    run: Path, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(run), *arguments]) == 2
    assert told in capsys.readouterr().err


def test_a_run_without_events_or_times_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(tmp_path)]) == 2
    assert "There is no run in" in capsys.readouterr().err
    (tmp_path / METRICS).write_text('{"step": 1}\n')
    assert main(["trace", str(tmp_path)]) == 2
    assert "have no times" in capsys.readouterr().err
    (tmp_path / METRICS).write_text('{"step": 1, "time": 5.0, "time/step": 1.0}\n')
    assert main(["trace", str(tmp_path)]) == 2
    assert "has no events of these steps" in capsys.readouterr().err


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=40))
def test_lanes_are_as_many_as_run_at_once_and_nothing_overlaps_in_one(pairs: list[tuple[int, int]]) -> None:
    spans = [{"t0": float(begin), "t1": float(begin + length)} for begin, length in pairs]
    random.Random(0).shuffle(spans)
    placed = _lanes(spans)
    assert Counter(map(id, spans)) == Counter(id(span) for span, _ in placed)
    ends: dict[int, float] = {}
    for span, lane in placed:
        assert ends.get(lane, 0.0) <= span["t0"]
        ends[lane] = span["t1"]
    most = max((sum(s["t0"] <= t["t0"] < max(s["t1"], s["t0"] + 0.5) for s in spans) for t in spans), default=0)
    assert len(ends) <= most

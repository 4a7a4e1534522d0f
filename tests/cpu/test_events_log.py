"""The record of a run: whatever is killed, full or torn, its reader gets whole events in their order, and whole groups."""

from __future__ import annotations

import errno
import math
import os
import sys
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_train.events import log as log_module
from skyrl_train.events.kinds import COMMON, KINDS
from skyrl_train.events.log import NO_EVENTS, EventLog, group_name, sample_of, segment_paths
from skyrl_train.events.reader import EventReader, Events, segment_content
from skyrl_train.events.sampling import BURST_S, GroupSampler

TEXTS = st.text(max_size=30)


def notes(folder: Path, texts: list[str], **sizes: int) -> None:
    """What one process records."""
    with closing(EventLog(folder, **sizes)) as log:
        for text in texts:
            log.record("note", text=text)


def texts_in(folder: Path) -> list[str]:
    return [event["text"] for event in EventReader(folder).poll()]


# Writing and reading ----------------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(st.lists(st.lists(TEXTS, max_size=20), max_size=3), st.integers(100, 600))
def test_all_processes_of_a_run_are_read_in_their_order(processes: list[list[str]], segment_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        for texts in processes:
            notes(Path(name), texts, segment_bytes=segment_bytes)
        assert texts_in(Path(name)) == [text for texts in processes for text in texts]
        assert all(path.suffix == ".zst" for path in segment_paths(Path(name)).values())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_run_killed_at_any_byte_keeps_its_whole_lines_and_goes_on_in_the_next_segment(data: st.DataObject) -> None:
    texts = data.draw(st.lists(TEXTS, min_size=1, max_size=8))
    lines = [log_module.encode({"kind": "note", "t": 1.0, "m": 1.0, "text": text}) for text in texts]
    content = b"".join(lines)
    cut = data.draw(st.integers(0, len(content)))
    whole = content[:cut].count(b"\n")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "000001.jsonl").write_bytes(content[:cut])
        assert texts_in(folder) == texts[:whole]
        notes(folder, ["resumed"])
        assert texts_in(folder) == [*texts[:whole], "resumed"]
        assert list(segment_paths(folder)) == [1, 2]


def test_a_torn_compressed_segment_is_read_up_to_the_tear(tmp_path: Path) -> None:
    texts = [os.urandom(500).hex() for _ in range(2000)]
    notes(tmp_path, texts)
    (path,) = segment_paths(tmp_path).values()
    path.write_bytes(path.read_bytes()[:-1000])
    notes(tmp_path, ["later"])
    read = texts_in(tmp_path)
    assert read[-1] == "later"
    assert 0 < len(read) - 1 < len(texts) and read[:-1] == texts[: len(read) - 1]


def test_lines_that_cannot_be_read_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "000001.jsonl").write_bytes(
        b'{"kind": "note", "text": "a"}\n\xff\xfe\n[1]\n{"kind": "note", "text": "b"}\n'
    )
    assert texts_in(tmp_path) == ["a", "b"]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(TEXTS, max_size=5), max_size=6), st.integers(1, 300))
def test_what_a_follower_reads_piece_by_piece_is_the_whole(batches: list[list[str]], segment_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        log, reader, read = EventLog(Path(name), segment_bytes=segment_bytes), EventReader(Path(name)), []
        for batch in batches:
            log._write([event_of(text) for text in batch])
            read += [event["text"] for event in reader.poll()]
        assert read == [text for batch in batches for text in batch] == texts_in(Path(name))


def event_of(text: str, group: int = 0) -> Any:
    return ("note", 1.0, 2.0, {"text": text, "group": group})


def test_a_follower_waits_for_the_rest_of_a_line(tmp_path: Path) -> None:
    reader, path = EventReader(tmp_path), tmp_path / "000001.jsonl"
    path.write_bytes(b'{"kind": "note", "te')
    assert reader.poll() == []
    path.write_bytes(b'{"kind": "note", "text": "a"}\n')
    assert [event["text"] for event in reader.poll()] == ["a"]
    assert reader.poll() == []


def test_a_reader_may_begin_with_the_segments_of_a_time_and_leave_out_kinds(tmp_path: Path) -> None:
    for number in range(1, 5):
        first = b'{"kind":"note","t":%d,"text":"%d","long":"%b"}' % (10 * number, number, b"x" * (number % 2 * 100_000))
        lines = [first, b'{"kind":"notes"}', b'{"kind":"warning","text":"note"}']
        (tmp_path / f"{number:06}.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    (tmp_path / "000005.jsonl").write_bytes(b'{"kind":"no')  # it has just been opened
    for since, found in ((30.0, "34"), (39.0, "34"), (29.0, "234"), (1.0, "1234"), (99.0, "4")):
        assert "".join(event["text"] for event in EventReader(tmp_path, since).poll(["note"])) == found
    assert EventReader(tmp_path / "none", since=2.0).poll() == []


def test_an_event_that_cannot_be_encoded_is_lost_and_no_other(tmp_path: Path) -> None:
    class Unspeakable:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    nested: dict[str, Any] = {}
    for _ in range(5000):
        nested = {"x": nested}
    log = EventLog(tmp_path)
    log._write([event_of(text, group) for group, text in enumerate(("a", nested, "b", Unspeakable(), "c"))])  # type: ignore[arg-type]
    log._write([event_of("d")])
    events = Events(EventReader(tmp_path).poll())
    assert [event["text"] for event in events if event["kind"] == "note"] == ["a", "b", "c", "d"]
    assert sum(event["events"] for event in events if event["kind"] == "lost") == 2
    assert events.incomplete == {1, 3}


def test_values_that_json_lacks_are_written(tmp_path: Path) -> None:
    with closing(EventLog(tmp_path)) as log:
        log.record("note", text="half \ud83d", number=math.nan, large=1 << 70, path=Path("x"))
    (event,) = EventReader(tmp_path).poll()
    shown = {name: event[name] for name in ("text", "number", "large", "path")}
    assert shown == {"text": "half ?", "number": None, "large": str(1 << 70), "path": "x"}


def test_a_line_begins_with_its_kind(tmp_path: Path) -> None:
    with closing(EventLog(tmp_path, segment_bytes=1 << 20)) as log:
        log.record("note", text="a")
        log.record("note", text="b")
    lines = segment_content(next(iter(segment_paths(tmp_path).values()))).splitlines()
    assert [line.partition(b",")[0] for line in lines] == [b'{"kind":"note"'] * 2


def test_a_log_without_a_folder_and_a_closed_one_record_nothing(tmp_path: Path) -> None:
    NO_EVENTS.record("note", text="a")
    assert not NO_EVENTS.wants("p@1_0")
    log = EventLog(tmp_path)
    log.close()
    log.record("note", text="a")
    log.close()
    assert list(tmp_path.iterdir()) == []


# What does not fit ------------------------------------------------------------------------------------------------


def test_a_full_queue_loses_events_and_counts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(tmp_path, queue_events=8)
    monkeypatch.setattr(log, "_start", lambda: None)  # a disk that does not answer
    for group in range(20):
        log.record("filtered", group=group)
    monkeypatch.undo()
    log._start()
    log.close()
    events = Events(EventReader(tmp_path).poll())
    assert [event["group"] for event in events if event["kind"] == "filtered"] == list(range(8))
    (lost,) = [event for event in events if event["kind"] == "lost"]
    assert lost["events"] == 12 and events.incomplete == set(range(8, 20))


def test_details_leave_room_in_the_queue_for_the_life_of_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(tmp_path, 1000, queue_events=8)
    monkeypatch.setattr(log, "_start", lambda: None)
    for turn in range(10):
        assert log.wants("p@3_0") == (turn <= 4)  # the fifth detail does not fit: the group has no more
        log.detail("agent", "p@3_0", {"turns": turn})
    for group in range(4):
        log.record("filtered", group=group)
    monkeypatch.undo()
    log._start()
    log.close()
    events = Events(EventReader(tmp_path).poll())
    assert events.counts == {"agent": 4, "filtered": 4, "lost": 1}
    assert events.incomplete == {3} and events.frame("agent").empty


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["fits", "full", "partly"])), max_size=12))
def test_a_full_disk_loses_whole_batches_and_counts_them(batches: list[tuple[int, str]]) -> None:
    def write(file: int, content: Any) -> int:
        if disk == "full" or (disk == "partly" and len(content) <= 10):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, bytes(content)[:-10] if disk == "partly" else content)

    real, written, lost, number = os.write, [], set(), 0
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_module.os, "write", write)
        log = EventLog(Path(name), segment_bytes=200)
        for size, disk in [*batches, (1, "fits")]:
            groups = range(number, number + size)
            log._write([event_of("x", group) for group in groups])
            number += size
            if disk == "fits":
                written += groups
            else:
                lost.update(groups)
        events = Events(EventReader(Path(name)).poll())
        assert [event["group"] for event in events if event["kind"] == "note"] == written
        assert sum(event["events"] for event in events if event["kind"] == "lost") == len(lost)
        assert events.incomplete == lost


# Sampling ---------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 20),
    st.lists(st.tuples(st.integers(0, 12), st.sampled_from([0.0, 0.0, 0.01, 0.3, 2.0])), max_size=300),
)
def test_a_group_has_all_of_its_details_or_none_and_the_limit_holds(
    limit: int, offered: list[tuple[int, float]]
) -> None:
    sampler, now = GroupSampler(limit), 100.0
    seen, kept = Counter[str](), Counter[str]()
    for group, pause_s in offered:
        now += pause_s
        seen[f"p@{group}"] += 1
        kept[f"p@{group}"] += sampler.wants(f"p@{group}", now)
    assert all(kept[group] in (0, seen[group]) for group in seen.keys() - set(sampler.given_up))
    assert kept.total() <= limit * (BURST_S + now - 100.0)
    assert kept.total() + sampler.left_out == len(offered)


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_without_rows_has_the_columns_of_one_with_rows(kind: str) -> None:
    value = {"int": 1, "float": 1.0, "str": "a", "bool": True, "list": [1], "dict": {}}
    event = {field.name: value[field.type.partition(" ")[0]] for field in (*COMMON, *KINDS[kind].fields)}
    table = Events([{**event, "kind": kind}]).frame(kind)
    assert len(table) == 1
    assert list(Events([]).frame(kind).columns) == list(table.columns)


def test_below_the_limit_nothing_is_left_out() -> None:
    sampler = GroupSampler(10)
    assert all(sampler.wants(f"p@{event}", event / 7) for event in range(200))


def test_under_a_steady_load_the_share_of_groups_follows_and_few_are_given_up() -> None:
    sampler, kept = GroupSampler(100), 0
    for event in range(100_000):  # 1,000 per second; a group has 20 within a second
        kept += sampler.wants(f"p@{event // 1000 * 50 + event % 50}", event / 1000)
    assert 100 * 50 <= kept <= 100 * (100 + BURST_S)
    assert len(sampler.given_up) <= 100  # of 5,000


def test_a_given_up_group_is_not_shown(tmp_path: Path) -> None:
    now = 0.0
    with closing(EventLog(tmp_path, 1, clock=lambda: now)) as log:
        for turn in range(10):
            if log.wants("p@7_0"):
                log.detail("agent", "p@7_0", {"turns": turn})
    events = Events(EventReader(tmp_path).poll())
    assert events.counts["agent"] == BURST_S and events.incomplete == {7}
    assert events.frame("agent").empty
    assert sum(event["sampled_out"] for event in events if event["kind"] == "lost") == 10 - BURST_S


@pytest.mark.parametrize(
    ("session", "name", "sample"),
    [
        ("p@12_3", "p@12", (12, 3)),
        ("a_b@c@12_3", "a_b@c@12", (12, 3)),
        ("p@eval-4.1_0", "p@eval-4.1", (None, None)),
        ("some_session", "some_session", (None, None)),
        ("", "", (None, None)),
        (None, "", (None, None)),
    ],
)
def test_a_session_names_its_group(session: str | None, name: str, sample: tuple[int | None, int | None]) -> None:
    assert (group_name(session), sample_of(session)) == (name, sample)


def test_a_segment_stays_uncompressed_where_the_library_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # its import fails, as it does with too little memory
    notes(tmp_path, ["first"], segment_bytes=1)
    notes(tmp_path, ["second"], segment_bytes=1)
    assert texts_in(tmp_path) == ["first", "second"]
    assert all(path.suffix == ".jsonl" for path in segment_paths(tmp_path).values())

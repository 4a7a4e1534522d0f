"""The screens of ``skyrl-train watch``: each shows its part of the run, and hostile text steers nothing."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import RecordedRun
from rich.console import Console
from rich.text import Text
from textual.widgets import DataTable, Static, TabbedContent

from skyrl_train.config.compose import compose, to_yaml
from skyrl_train.entrypoints.watch import watch
from skyrl_train.events.log import EVENTS, EventLog
from skyrl_train.observability.readers.panel import WatchedRun
from skyrl_train.observability.readers.timeline import EventStore
from skyrl_train.observability.run_folder import CONFIG
from skyrl_train.observability.screens import SCREENS, RunScreens, timeline_text

SHOTS = os.environ.get("SKYRL_PAGE_SHOTS")  # a folder for screenshots


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = RecordedRun(tmp_path_factory.mktemp("runs") / "watched", steps=8).path
    (path / CONFIG).write_text(to_yaml(compose("quickstart", ["trainer.max_steps=8"])))
    log = EventLog(path / EVENTS)
    log.record("retried", group=3, attempt=1, reason="ValueError: \x1b[31mno")
    log.close()
    (path / "logs").mkdir()
    (path / "logs" / "trainer.log").write_text("the first line\n\x1b]0;title\x07the last line\n")
    return path


def text_of(app: RunScreens, widget: str) -> str:
    return rendered(app.query_one(f"#{widget}", Static).content)


def rendered(content: Any) -> str:
    console = Console(width=110, height=60, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    console.print(content)
    return console.export_text()


async def test_each_key_shows_its_screen(run: Path) -> None:
    app = RunScreens(WatchedRun(run), poll_s=600.0)
    seen = {}
    async with app.run_test(size=(120, 40)) as pilot:
        for number, name in enumerate(SCREENS, 1):
            await pilot.press(str(number))
            await app.workers.wait_for_complete()
            await pilot.pause()
            await app.workers.wait_for_complete()  # the sample under the cursor
            await pilot.pause()
            assert app.query_one(TabbedContent).active == name
            if SHOTS:
                (Path(SHOTS) / f"watch_{name}.svg").write_text(app.export_screenshot())
            widget = {"run": "panel", "samples": "sample"}.get(name, f"{name}-text")
            seen[name] = text_of(app, widget)
            if name == "samples":
                table = app.query_one(DataTable)
                assert table.row_count == 8 and [str(cell) for cell in table.get_row_at(0)][:3] == ["8", "28", "0"]
                await pilot.press("down")  # the reader has chosen a sample, and stays in its step
                await pilot.press("comma")
                await app.workers.wait_for_complete()
                await pilot.pause()
                assert str(table.get_row_at(0)[0]) == "7"
    assert "step 8/8" in seen["run"] and "reward" in seen["run"]
    # At later looks, which find no further step, too
    for panel in (seen["run"], rendered(app._panel.draw())):
        assert "4 in flight (oldest: 1.5 s, lag 2)" in panel
    assert "trainer" in seen["timeline"] and "#" in seen["timeline"] and "▼" in seen["timeline"]
    assert "lag 1" in seen["samples"] and "07c=" in seen["samples"]
    assert "\\x1b[31mno" in seen["failures"] and f"again: skyrl-train try {run} --prompt 3" in seen["failures"]
    assert "trainer.max_steps = 8" in seen["settings"]
    assert "\\x1b]0;title\\x07the last line" in seen["log"]


async def test_before_the_first_step_the_parts_of_the_start_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / CONFIG).write_text(to_yaml(compose("quickstart", ["trainer.max_steps=8"])))
    process = {"host": "", "pid": 1, "version": "", "python": "", "config": "", "git": None, "command": []}
    for engines in (None, 75.0):
        log = EventLog(path / EVENTS, clock=lambda: 5.0)
        log.record("process", **process)
        log.record("start_up", name="model \x1b[31m", t0=1.0, t1=None)
        log.record("start_up", name="model \x1b[31m", t0=1.0, t1=3.5)
        log.record("start_up", name="engines", t0=3.5, t1=engines and engines + 3.5)
        log.close()
        app = RunScreens(WatchedRun(path), poll_s=600.0)
        async with app.run_test(size=(120, 40)) as pilot:
            await app.workers.wait_for_complete()
            await pilot.pause()
            shown = text_of(app, "panel")
        watch(path, once=True)
        for text in (shown, capsys.readouterr().out):  # of the last command only
            assert text.count("model \\x1b[31m: 2.5 s") == text.count(f"engines: {'1:15' if engines else '...'}") == 1
    with (path / "metrics.jsonl").open("w") as file:
        file.write(json.dumps({"step": 1, "time": time.time() + 10.0}) + "\n")
    app = RunScreens(WatchedRun(path), poll_s=600.0)
    async with app.run_test(size=(120, 40)) as pilot:
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert "engines: " not in text_of(app, "panel") and "step 1/8" in text_of(app, "panel")


async def test_the_length_of_a_run_by_epochs_is_shown_once_training_has_begun(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / CONFIG).write_text(to_yaml(compose("quickstart", ["trainer.max_steps=null"])))
    app = RunScreens(WatchedRun(path), poll_s=600.0, share=math.inf)  # as of `train --watch`
    log = EventLog(path / EVENTS)
    log.record("process", host="", pid=1, version="", python="", config="", git=None, command=[])
    log.record("run", step=0, total_steps=50)
    log.close()
    (path / "metrics.jsonl").write_text('{"step": 3, "reward/mean": 0.5}\n')
    async with app.run_test(size=(120, 40)) as pilot:
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert "step 3/50" in text_of(app, "panel")


async def test_samples_of_evaluations_and_of_versions_without_tokens_are_shown(tmp_path: Path) -> None:
    path = RecordedRun(tmp_path / "run", steps=3).path
    shutil.copy(path / "samples" / "step_000001.parquet", path / "samples" / "eval_000002.parquet")
    old = tmp_path / "old"
    old.mkdir()
    (old / "metrics.jsonl").touch()
    (old / "samples.jsonl").write_text('{"step": 2, "group_index": 7, "prompt": "p", "response": "r\\u001b[31m"}\n')
    seen = {}
    for run in (path, old):
        app = RunScreens(WatchedRun(run), poll_s=600.0)
        async with app.run_test(size=(120, 40)) as pilot:
            for key in ("3", "e"):
                await pilot.press(key)
                for _ in range(2):
                    await app.workers.wait_for_complete()
                    await pilot.pause()
                table = app.query_one(DataTable)
                seen[run.name, key] = str(table.ordered_columns[0].label), *map(str, table.get_row_at(0)[:2])
            if run == old:
                assert "pr\\x1b[31m" in text_of(app, "sample")
    assert seen["run", "3"] == ("step", "3", "8") and seen["run", "e"] == ("version", "2", "0")
    assert seen["old", "3"] == seen["old", "e"] == ("step", "2", "7"), "it has no others"


async def test_a_step_that_ends_meanwhile_is_shown(tmp_path: Path) -> None:
    path = RecordedRun(tmp_path / "run", steps=3).path
    metrics = path / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:2]))
    app = RunScreens(WatchedRun(path), poll_s=600.0, share=math.inf)
    async with app.run_test() as pilot:
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert "step 2/" in text_of(app, "panel")
        metrics.write_text("".join(lines))
        app.look()
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert "step 3/" in text_of(app, "panel")


async def test_an_empty_run_has_screens_too(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    app = RunScreens(WatchedRun(tmp_path / "run"), poll_s=600.0)
    async with app.run_test() as pilot:
        for number in range(1, len(SCREENS) + 1):
            await pilot.press(str(number))
            await app.workers.wait_for_complete()
            await pilot.pause()
        assert "recorded no events" in text_of(app, "timeline-text")
        assert "No samples" in text_of(app, "sample")


def test_a_lane_has_the_versions_of_its_tokens_in_their_time(tmp_path: Path) -> None:
    log = EventLog(tmp_path / EVENTS, clock=lambda: 110.0)
    log.record("process", host="", pid=1, version="", python="", config="", git=None, command=[])
    log.record("admitted", groups=[5, 6], versions=[1, 1])
    segments = [[1, 10, 100.0, 105.0, 0], [2, 10, 105.0, 110.0, 0]]
    fields = {"session": "", "group": 5, "sample": 0, "prompt_tokens": 1, "stop": "stop", "replayed": 0}
    log.record("request", t_submit=100.0, t_first=None, t_end=110.0, segments=segments, seams=["update"], **fields)
    log.close()
    store = EventStore(tmp_path / EVENTS)
    offset = store.window(0.0, 1e12)["first"] - 110.0  # type: ignore[index]  # Unix times
    unrecorded, lane = timeline_text(store.window(100.0 + offset, 110.0 + offset), 28).plain.splitlines()[-2:]
    assert lane.startswith("#5") and lane[8:] == "1" * 10 + "2" * 10
    assert unrecorded.startswith("#6") and "┈" in unrecorded  # the limit left its responses out


async def test_a_chosen_sample_stays_when_a_step_ends(tmp_path: Path) -> None:
    path = RecordedRun(tmp_path / "run", steps=3).path
    metrics, newest = path / "metrics.jsonl", path / "samples" / "step_000003.parquet"
    later = newest.rename(tmp_path / "later.parquet")
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:2]))
    app = RunScreens(WatchedRun(path), poll_s=600.0, share=math.inf)

    async def settled() -> None:
        await app.workers.wait_for_complete()
        await pilot.pause()

    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("3")
        await settled()
        await pilot.press("down", "down")
        await settled()
        later.rename(newest)
        metrics.write_text("".join(lines))
        app.look()
        await settled()
        table = app.query_one(DataTable)
        assert (table.cursor_row, str(table.get_row_at(0)[0])) == (2, "2")
        await pilot.press("full_stop")
        await settled()
        assert str(table.get_row_at(0)[0]) == "3"


async def test_what_was_read_before_the_reader_has_left_is_not_drawn_afterwards(tmp_path: Path) -> None:
    app = RunScreens(WatchedRun(RecordedRun(tmp_path / "run", steps=3).path), poll_s=600.0)
    async with app.run_test():
        await app.workers.wait_for_complete()
    for name in ("samples", "run"):  # the widgets are gone
        app._draw(name, None, Text("late"), (), True)
    app._draw_sample(Text("late"))


async def test_a_run_that_is_removed_is_said_on_the_screen(tmp_path: Path) -> None:
    path = RecordedRun(tmp_path / "run", steps=3).path
    app = RunScreens(WatchedRun(path), poll_s=600.0)
    async with app.run_test(size=(120, 40)) as pilot:
        await app.workers.wait_for_complete()
        await pilot.pause()
        shutil.rmtree(path)
        app.look()
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert "cannot be read now" in text_of(app, "panel")


async def test_what_has_not_changed_is_not_read_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = WatchedRun(run)
    windows = []
    monkeypatch.setattr(watched.store, "window", lambda *arguments: windows.append(arguments))
    app = RunScreens(watched, poll_s=600.0, share=math.inf)
    async with app.run_test() as pilot:
        await pilot.press("2")
        for _ in range(3):
            await app.workers.wait_for_complete()
            await pilot.pause()
            app.look()
        await app.workers.wait_for_complete()
    assert len(windows) == 1


def test_the_groups_that_are_left_out_are_counted(tmp_path: Path) -> None:
    path = RecordedRun(tmp_path / "run", steps=8, groups=60, samples=8).path
    lines = timeline_text(EventStore(path / EVENTS).window(None, None, 6), 100).plain.splitlines()
    lanes = sum(line.startswith("#") for line in lines)
    assert lanes > 0 and lines[-1].startswith(f"{lanes} of ") and "the longest" in lines[-1]

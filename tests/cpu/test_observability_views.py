"""The output of a run: a panel, plain lines, curves and the last line."""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import re
import shlex
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from skyrl_train.config.compose import compose
from skyrl_train.config.schema import RunConfig
from skyrl_train.observability import reporter as reporter_module
from skyrl_train.observability.advice import Advice
from skyrl_train.observability.failures import REASON_WIDTH
from skyrl_train.observability.reporter import Reporter
from skyrl_train.observability.run_folder import RunFolder
from skyrl_train.observability.screen import (
    ASCII,
    BLOCKS,
    PLAIN_INTERVAL_MAX_S,
    PLAIN_INTERVAL_S,
    REFRESH_INTERVAL_S,
    WAITING_INTERVAL_S,
    Failures,
    PlainView,
    RunSummary,
    StepReport,
    TerminalView,
    duration,
    final_lines,
    make_view,
    sparkline,
    spent_s,
    summarize,
    train_command,
)

# Curves -----------------------------------------------------------------------------------------------------------


def test_a_rising_curve_rises() -> None:
    assert sparkline(range(8), 8) == BLOCKS
    assert sparkline([0.0, 1.0], 8) == "▁█"
    assert sparkline(range(7), 7, ASCII) == ASCII


def test_more_values_than_columns_are_averaged() -> None:
    assert sparkline([0, 0, 0, 0, 8, 8, 8, 8], 2) == "▁█"
    assert sparkline([0, 9, 0, 9], 2) == "▁▁"


@pytest.mark.parametrize("values", [[], [math.nan], [math.inf, -math.inf]])
def test_a_curve_of_nothing_is_empty(values: list[float]) -> None:
    assert sparkline(values, 8) == ""


@given(st.lists(st.floats(-1e300, 1e300) | st.just(math.nan), max_size=50), st.integers(0, 20))
def test_a_curve_is_as_wide_as_it_may_and_reaches_both_ends(values: list[float], width: int) -> None:
    finite = [value for value in values if not math.isnan(value)]
    drawn = sparkline(values, width)
    assert len(drawn) == min(len(finite), width)
    assert set(drawn) <= set(BLOCKS)
    if drawn:
        assert BLOCKS[0] in drawn
    # Half of the smallest float is 0: values that differ by less than that are drawn as equal.
    if 1 < len(finite) <= width and min(finite) / 2 < max(finite) / 2:
        assert drawn[finite.index(max(finite))] == BLOCKS[-1]
        assert drawn[finite.index(min(finite))] == BLOCKS[0]


# Views ------------------------------------------------------------------------------------------------------------


class ManualClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def console_of(*, terminal: bool, encoding: str = "utf-8") -> tuple[Console, io.BytesIO]:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    environment = {"TERM": "xterm-256color"}
    return Console(file=file, force_terminal=terminal, width=120, _environ=environment), raw


REPORT = StepReport(
    step=3,
    reward=0.512,
    lag_mean=1.25,
    lag_max=3,
    in_flight=28,
    buffered=4,
    generated_tokens_per_s=12_345.0,
    trained_tokens_per_s=678.0,
    wait_for_batch=0.05,
    wait_for_policy=0.125,
    train=0.8,
    weight_sync=0.1,
    running=9.6,
    waiting=3.0,
    kv_cache_usage=0.71,
    oldest_s=4.12,
    oldest_lag=1,
    checkpoint_step=2,
)
FACTS = (
    "3/300",
    "0.512",
    "1.2 (max 3)",
    "28 in flight (oldest: 4.1 s, lag 1), 4 buffered",
    "step 2",
)
PANEL_FACTS = (
    "█ train 80% ░ wait 5% ▒ sync 10%",
    "678 tokens/s",
    "12.3k tokens/s, 10 running, 3 waiting, KV cache 71%, slots idle 12%",
)
LINE_FACTS = ("12.3k generated, 678 trained", "trainer 5% for groups", "generation 12% for a policy")


@pytest.mark.parametrize(("terminal", "kind"), [(True, TerminalView), (False, PlainView)])
def test_a_terminal_gets_a_panel_and_everything_else_lines(terminal: bool, kind: type) -> None:
    view = make_view(console_of(terminal=terminal)[0], 300, "quickstart", clock=ManualClock())
    view.close()
    assert type(view) is kind


@pytest.mark.parametrize("terminal", [True, False])
def test_every_fact_of_a_step_is_shown(terminal: bool) -> None:
    console, raw = console_of(terminal=terminal)
    view = make_view(console, 300, "[quickstart] fully_async", clock=ManualClock())
    view.update(REPORT)
    view.note("resumed [from] step 2")
    view.close()
    view.close()
    shown = re.sub(r"\x1b\[[0-9;]*m", "", raw.getvalue().decode())
    of_view = PANEL_FACTS if terminal else LINE_FACTS
    for fact in (*FACTS, *of_view, "[quickstart] fully_async", "resumed [from] step 2"):
        assert fact in shown, fact


def test_the_panel_keeps_to_one_line_for_each_fact_and_shows_what_alarms_in_red() -> None:
    console, raw = console_of(terminal=True)
    console.width = 80
    view = make_view(console, 300, "quickstart", clock=ManualClock())
    for step in range(1, 20):
        view._panel._progress.update(StepReport(step=step, reward=step / 100))
    report = dataclasses.replace(
        REPORT,
        reward_std=0.25,
        entropy=1.5,
        step=20,
        grad_norm=0.7,
        ess=0.2,
        no_signal=0.75,
        truncated=0.1,
        groups_by_lag={0: 1, 1: 3},
        evaluation="version 100: pass@1 0.710, pass@8 0.900 (64 prompts x 8 samples, 0:02)",
        sample="1.00  lag 1  'the prompt' -> '" + "response " * 20,
    )
    assert isinstance(view, TerminalView)
    view.update(report)
    view.close()
    shown = raw.getvalue().decode()
    for fact in ("0.512 ±0.25", "+0.131 in 10 steps", "version 100: pass@1", "entropy 1.50  grad 0.7", "0 █████ 25%"):
        assert fact in shown, fact
    # Fits at 80 columns, and the bar has its ten characters.
    assert "\x1b[32m████████\x1b[0m" in shown and "678 tokens/s" in shown
    assert "\x1b[31mess 0.20" in shown and "\x1b[31mno signal 75%" in shown and "\x1b[31mtruncated" not in shown
    # Each frame of the live panel is drawn over the one before; the last one has no more lines than the first.
    last = shown[shown.rindex("╭") :]
    assert last.count("│") // 2 == 9 and "the prompt" in last and "…" in last


def test_the_panel_shows_the_most_urgent_alarm_and_what_to_do() -> None:
    alarms = [Advice(name, "alarm", f"The {name} [is] wrong.", f"Mend the {name}.") for name in ("first", "second")]
    for advice, label in ((alarms, "ALARM"), ([Advice("it", "tuning", "It is slow.", "Make it fast.")], "advice")):
        console, raw = console_of(terminal=True)
        view = make_view(console, 300, "quickstart", clock=ManualClock())
        view.update(dataclasses.replace(REPORT, advice=advice))
        view.close()
        shown = raw.getvalue().decode()
        assert label in shown and advice[0].finding in shown and advice[0].action in shown
        assert ("(and 1 more)" in shown) is (label == "ALARM")


def test_the_trend_says_over_how_many_steps_it_is_and_leaves_out_steps_without_a_reward() -> None:
    console, raw = console_of(terminal=True)
    earlier = {step: step / 1000 for step in range(0, 1000, 50)}  # as a reader of a long run knows them
    view = make_view(console, 10_000, "quickstart", clock=ManualClock(), rewards=earlier)
    for step, reward in ((1000, 1.0), (1001, math.nan)):
        view.update(dataclasses.replace(REPORT, step=step, reward=reward))
    view.close()
    shown = raw.getvalue().decode()
    assert "+0.500 in 500 steps" in shown and "nan in" not in shown


def test_the_panel_draws_the_rewards_so_far() -> None:
    console, raw = console_of(terminal=True)
    view = make_view(console, 300, "quickstart", clock=ManualClock())
    for step in range(1, 9):
        view.update(StepReport(step=step, reward=step / 8))
    view.close()
    assert BLOCKS in raw.getvalue().decode()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_console_without_unicode_is_no_reason_to_fail(terminal: bool) -> None:
    console, raw = console_of(terminal=terminal, encoding="ascii")
    view = make_view(console, 300, "quickstart", clock=ManualClock())
    for step in range(1, 4):
        view.update(StepReport(step=step, reward=float(step)))
    view.close()
    assert b"3.000" in raw.getvalue()


def test_the_panel_is_redrawn_no_more_often_than_eyes_can_follow() -> None:
    clock = ManualClock()
    console, raw = console_of(terminal=True)
    view = make_view(console, 300, "quickstart", clock=clock)
    view.update(StepReport(step=1, reward=0.0))
    drawn = len(raw.getvalue())
    view.update(StepReport(step=2, reward=0.0))
    assert len(raw.getvalue()) == drawn
    clock.now += REFRESH_INTERVAL_S
    view.update(StepReport(step=3, reward=0.0))
    assert len(raw.getvalue()) > drawn
    view.close()


def steps_shown(raw: io.BytesIO) -> list[int]:
    lines = [line for line in raw.getvalue().decode().splitlines() if line.startswith("step ")]
    return [int(line.split()[1].partition("/")[0]) for line in lines]


def test_lines_come_now_and_then_and_the_last_step_always() -> None:
    clock = ManualClock()
    console, raw = console_of(terminal=False)
    view = make_view(console, 100, "quickstart", clock=clock)
    for step in range(1, 10):
        view.update(StepReport(step=step, reward=0.0))
        clock.now += PLAIN_INTERVAL_S / 4
    assert steps_shown(raw) == [1, 5, 9]
    view.update(StepReport(step=10, reward=0.0))
    view.close()  # stopped here
    assert steps_shown(raw) == [1, 5, 9, 10]


def test_lines_become_rarer_as_the_run_grows_older() -> None:
    clock = ManualClock()
    console, raw = console_of(terminal=False)
    view = make_view(console, 10_000, "quickstart", clock=clock)
    shown_at = []
    for step in range(1, 3601):  # an hour of steps of a second
        clock.now += 1.0
        before = len(raw.getvalue())
        view.update(StepReport(step=step, reward=0.0))
        view.waiting(4, Failures())
        if len(raw.getvalue()) > before:
            shown_at.append(clock.now)
    gaps = [b - a for a, b in itertools.pairwise(shown_at)]
    assert gaps == sorted(gaps)
    assert gaps[0] == PLAIN_INTERVAL_S and gaps[-1] == PLAIN_INTERVAL_MAX_S
    assert len(steps_shown(raw)) == len(shown_at) < 150


FAILING = Failures(groups=2, allowed=16, retries=5, last_reason="it raised ValueError('no\n[key]')")


def test_a_run_without_a_step_says_every_few_seconds_that_it_lives_and_why_it_has_none() -> None:
    clock = ManualClock()
    console, raw = console_of(terminal=False)
    view = make_view(console, 100, "quickstart", clock=clock)
    for _ in range(12):
        clock.now += 1.0
        view.waiting(8, FAILING, 75.0)
    view.update(REPORT)
    assert steps_shown(raw) == []  # it does not wait for the sign of life, nor the other way round
    clock.now += PLAIN_INTERVAL_S
    view.waiting(1, Failures())
    assert steps_shown(raw) == [3]
    clock.now += PLAIN_INTERVAL_S
    view.waiting(1, Failures())
    lines = raw.getvalue().decode().splitlines()[1:]
    failed = "failed 2 groups (16 allowed), 5 retries (last: it raised ValueError('no [key]'))"
    alive = f"no step yet: 8 groups in flight, the oldest for 1:15, {failed}"
    assert lines[0] == lines[1] == alive
    assert lines[3:] == ["no step since step 3: 1 group in flight"]


def test_after_the_last_step_the_screen_waits_for_no_step() -> None:
    clock = ManualClock()
    console, raw = console_of(terminal=False)
    view = make_view(console, REPORT.step, "quickstart", clock=clock)
    view.update(REPORT)
    clock.now += PLAIN_INTERVAL_S
    view.waiting(0, Failures())
    assert raw.getvalue().decode().splitlines()[-1] == "all steps have trained; the last evaluation and checkpoint end"


def test_the_panel_is_redrawn_every_second_without_a_step_and_says_why_there_is_none() -> None:
    clock = ManualClock()
    console, raw = console_of(terminal=True)
    view = make_view(console, 100, "quickstart", clock=clock)
    view.waiting(8, FAILING)
    drawn = len(raw.getvalue())
    assert "no step yet: 8 groups in flight, failed 2 groups" in raw.getvalue().decode()
    view.waiting(7, FAILING)
    assert len(raw.getvalue()) == drawn
    view.update(REPORT)
    clock.now += WAITING_INTERVAL_S
    view.waiting(31, FAILING, 9.0)
    view.close()
    shown = raw.getvalue().decode()
    assert "31 in flight (oldest: 9.0 s, lag 1), 4 buffered" in shown and "no [key]" in shown


@pytest.mark.parametrize("terminal", [True, False])
def test_failures_are_shown_where_there_are_any(terminal: bool) -> None:
    for failures, shown in ((Failures(0, 16), False), (Failures(0, 16, 1), True), (Failures(1, 16), True)):
        console, raw = console_of(terminal=terminal)
        view = make_view(console, 300, "quickstart", clock=ManualClock())
        view.update(dataclasses.replace(REPORT, failures=failures))
        view.close()
        assert ("(16 allowed)" in raw.getvalue().decode()) is shown


def test_a_long_reason_is_cut() -> None:
    assert len(str(Failures(1, 16, 0, "x" * 10_000))) < REASON_WIDTH + 50


def test_a_reason_cannot_steer_the_terminal() -> None:
    assert (
        str(Failures(1, 16, 0, "got \u202e\x1b[31m\x07 \n<b>é"))
        == "1 group (16 allowed), 0 retries (last: got [31m <b>é)"
    )


@pytest.mark.parametrize("terminal", [True, False])
def test_the_name_of_a_prompt_cannot_steer_the_terminal(tmp_path: Path, terminal: bool) -> None:
    console, raw = console_of(terminal=terminal)
    config = RunConfig()
    config.trainer.trackers = []
    with closing(RunFolder(tmp_path, config)) as folder:
        reporter = Reporter(config, folder, console, 10)
        reporter.begin(0)
        reporter.attempt_failed("\x1b]0;title\x07@3", "it raised")
        reporter.evaluated(1, {}, {}, "evaluation of version 1: \u202e\x1b[2J")
        reporter.close()
    shown = raw.getvalue().decode()
    assert r"\x1b]0;title\x07@3" in shown and r"\u202e\x1b[2J" in shown
    assert not any(text in shown for text in ("\x1b]", "\x07", "\u202e", "\x1b[2J"))


def test_the_step_is_legible_in_a_narrow_terminal() -> None:
    console, raw = console_of(terminal=True)
    console.width = 40
    view = make_view(console, 100_000, "quickstart", clock=ManualClock())
    view.update(dataclasses.replace(REPORT, step=12_345, checkpoint_step=12_300))
    view.close()
    assert "step 12345/100000" in raw.getvalue().decode()


def test_the_first_failure_is_on_the_screen_at_once_and_the_others_are_counted(tmp_path: Path) -> None:
    console, raw = console_of(terminal=False)
    config = RunConfig()
    config.trainer.trackers = []
    with closing(RunFolder(tmp_path, config)) as folder:
        reporter = Reporter(config, folder, console, 10)
        reporter.begin(0)
        reporter.attempt_failed("group 3", "it raised KeyError('[number]')")
        reporter.attempt_failed("group 4", "it raised TypeError()")
        reporter.close()
    lines = raw.getvalue().decode().splitlines()[1:]
    assert len(lines) == 1
    assert "group 3" in lines[0] and "KeyError('[number]')" in lines[0] and "trainer.log" in lines[0]


def test_a_part_of_the_start_is_recorded_again_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter_module, "ALIVE_S", 0.001)
    config = RunConfig()
    config.trainer.trackers = []
    again, recorded = threading.Event(), list[float | None]()
    with closing(RunFolder(tmp_path, config)) as folder:
        record = folder.events.record

        def recording(kind: str, **fields: Any) -> None:
            record(kind, **fields)
            if kind == "start_up":
                recorded.append(fields["t1"])
                if len(recorded) == 3:
                    again.set()

        monkeypatch.setattr(folder.events, "record", recording)
        with Reporter(config, folder, console_of(terminal=False)[0], 10).start_up("engines"):
            assert again.wait(60)
    assert recorded[-1] is not None and set(recorded[:-1]) == {None}


def test_the_final_step_is_shown_once() -> None:
    console, raw = console_of(terminal=False)
    view = make_view(console, 2, "quickstart", clock=ManualClock())
    view.update(StepReport(step=1, reward=0.0))
    view.update(StepReport(step=2, reward=0.0))
    view.close()
    assert steps_shown(raw) == [1, 2]


def test_a_line_is_one_line_however_narrow_the_console() -> None:
    raw = io.StringIO()
    view = make_view(Console(file=raw, width=20), 300, "quickstart", clock=ManualClock())
    view.update(REPORT)
    view.close()
    assert len(raw.getvalue().splitlines()) == 2


def test_a_panel_begins_at_the_step_that_the_run_resumed_from() -> None:
    console, raw = console_of(terminal=True)
    make_view(console, 300, "quickstart", start_step=100, clock=ManualClock()).close()
    assert "step 100/300" in raw.getvalue().decode()
    assert "step 0/300" not in raw.getvalue().decode()


def test_time_to_go_counts_from_where_the_run_resumed() -> None:
    clock = ManualClock()
    console, raw = console_of(terminal=False)
    view = make_view(console, 300, "quickstart", start_step=100, clock=clock)
    clock.now += 20.0
    view.update(StepReport(step=110, reward=0.0))  # 10 steps in 20 s: 190 more take 380 s
    assert "to go 6:20" in raw.getvalue().decode()
    view.close()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3661, "1:01:01"), (math.inf, "-:--"), (-1, "0:00")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# The last line ----------------------------------------------------------------------------------------------------


def test_the_summary_has_the_mean_rewards_of_the_first_and_the_last_twentieth() -> None:
    rows = [{"step": step, "reward/mean": step / 100} for step in range(1, 101)]
    summary = summarize([*rows[:-1], {**rows[-1], "time/step": 61.0}])
    assert summary.steps == 100
    assert summary.first_reward == pytest.approx(0.03)
    assert summary.last_reward == pytest.approx(0.98)
    assert summary.best_reward == 1.0
    assert summary.training_s == 61.0


def test_steps_without_a_reward_do_not_count() -> None:
    rows = [{"step": 1, "reward/mean": None}, {"step": 2}, {"step": 3, "reward/mean": 0.25}, {"step": 4}]
    assert summarize(rows) == RunSummary(4, 0.25, 0.25, 0.25, 0.0)


def test_the_last_lines_begin_with_what_was_learned_and_end_with_the_next_commands() -> None:
    again = train_command("skyrl-train", ["quickstart", "trainer.run_name=a b"])
    assert shlex.split(again)[-1] == "trainer.run_name=a b"
    commands = {"Look at it": "skyrl-train page runs", "Train again": again}
    text = final_lines("Learned: a lot.", "runs/x", finished=True, report=True, seconds=61.0, commands=commands)
    assert text.splitlines() == [
        "Learned: a lot.",
        "Finished after 1:01. Everything is in runs/x: report.html has curves, samples and advice on speed.",
        "Look at it:  skyrl-train page runs",
        f"Train again: {again}",
    ]
    text = final_lines("Learned: a lot.", "runs/x", finished=False, report=False, seconds=61.0, commands=commands)
    assert "Stopped after 1:01. Everything is in runs/x.\n" in text


def test_a_run_whose_rewards_are_all_equal_is_known_by_its_only_reward() -> None:
    def only(*rewards: tuple[float, float]) -> float | None:
        rows = [{"step": 1, "reward/mean": low, "reward/min": low, "reward/max": high} for low, high in rewards]
        return summarize(rows).only_reward

    assert only((0.25, 0.25), (0.25, 0.25)) == 0.25
    assert only((0.25, 0.25), (0.5, 0.5)) is None  # equal within each step only
    assert only((0.25, 0.5)) is None
    assert summarize([{"step": 1, "reward/mean": 0.0}]).only_reward is None, "a row of an earlier version"


def test_a_run_that_was_stopped_before_its_first_step_has_learned_nothing() -> None:
    commands = {"Start again": "the command"}
    text = final_lines(None, "runs/x", finished=False, report=True, seconds=20.0, commands=commands)
    assert "0:20, before the first step: nothing is trained yet" in text and text.endswith("Start again: the command")


def test_a_run_has_taken_the_time_of_this_command_and_the_steps_of_those_before_it() -> None:
    rows = [{"step": step, "time/step": 10.0} for step in (1, 2, 3)]
    assert spent_s(rows, 0, 35.0) == 35.0
    assert spent_s(rows, 2, 12.0) == 32.0


def test_the_command_that_trains_on_or_again_names_the_folder_and_drops_conflicting_settings() -> None:
    given = [
        "quickstart",
        "trainer.resume=never",
        "trainer.seed=1",
        "+trainer.run_dir=elsewhere",
        "trainer.resume_step=3",
    ]
    assert train_command("./uvw run skyrl-train", given, run_dir="runs/x-1") == (
        "./uvw run skyrl-train train quickstart trainer.seed=1 trainer.run_dir=runs/x-1"
    )
    assert train_command("skyrl-train", given, run_dir="elsewhere-2", resumes=False) == (
        "skyrl-train train quickstart trainer.resume=never trainer.seed=1 trainer.run_dir=elsewhere-2"
    )


@pytest.mark.parametrize("folder", ["runs/lr=1e-4", "runs/Zahlen-größer-1", "runs/a (copy), 'old'"])
def test_the_folder_in_a_printed_command_is_read_as_it_is(folder: str) -> None:
    *_, given = shlex.split(train_command("skyrl-train", ["quickstart"], run_dir=folder))
    assert compose("quickstart", [given]).trainer.run_dir == folder

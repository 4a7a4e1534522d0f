"""Alarms and tuning advice: each rule goes off where it should, none on a healthy run, and nothing makes them fail."""

from __future__ import annotations

import dataclasses
import io
import math
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from skyrl_train.config.keys import known_keys
from skyrl_train.config.schema import RunConfig
from skyrl_train.observability.advice import (
    ALARMS,
    HOLD_STEPS,
    LAST_STEPS,
    TUNING,
    Advice,
    AdviceHistory,
    advise,
    edge_rows,
)
from skyrl_train.observability.metrics import spec_of
from skyrl_train.observability.reporter import Reporter
from skyrl_train.observability.run import load_run
from skyrl_train.observability.run_folder import RunFolder

Row = dict[str, Any]
CONFIG = RunConfig()
CONFIG.trainer.trackers = []
BEGAN = 1_800_000_000.0  # Unix time
SETTINGS = {"trainer": {"mode": "fully_async"}}
DOCS = Path(__file__).parents[2]


def healthy(steps: int) -> list[Row]:
    """The rows of a run that learns, in which training and generation keep pace."""
    return [
        {
            "step": step,
            "time": BEGAN + 10.0 * step,
            "reward/mean": 0.02 + 0.004 * step,
            "reward/min": 0.0,
            "reward/max": 1.0,
            "reward/zero_variance_groups": 0.2,
            "generate/truncated": 0.1,
            "generate/turns": 4.0,
            "generate/drifted_turns": 0.1,
            "generate/latency_s_p99": 30.0,
            "generate/latency_s_oldest": 50.0,
            "loss/entropy": 3.0 - 0.02 * step,
            "policy/skipped_nonfinite": 0.0,
            "policy/micro_batches": 4.0,
            "policy/micro_batch_fill": 0.7,
            "off_policy/ess": 0.9,
            "off_policy/engine_gap": 0.001,
            "staleness/exceeded": 0.0,
            "time/step": 10.0,
            "time/train": 7.0,
            "time/wait_for_batch": 1.0,
            "time/gather": 0.1,
            "time/wait_for_weight_sync": 0.4,
            "async/idle_fraction": 0.2,
            "async/trained": 16.0 * step,
            "async/dropped": 0.0,
            "inference/engine_restarts": 0.0,
            "system/disk_free_bytes": 50e9,
            "system/checkpoint_bytes": 1e9,
        }
        for step in range(1, steps + 1)
    ]


def with_(metrics: Row, last: int = LAST_STEPS) -> Callable[[list[Row]], None]:
    """Change the last rows of a run."""

    def change(rows: list[Row]) -> None:
        for row in rows[-last:]:
            row.update(metrics)

    return change


def retried(reason: str, ago_s: float = 0.0) -> Row:
    return {"kind": "retried", "t": BEGAN + 300.0 - ago_s, "reason": reason}


EQUAL = {"reward/mean": 0.0, "reward/min": 0.0, "reward/max": 0.0, "reward/zero_variance_groups": 1.0}
SOLVED = {"reward/mean": 0.9, "reward/zero_variance_groups": 0.8, "loss/entropy": 0.01}

# Of each rule: a change that triggers it, failed attempts, and the figure in its finding.
CASES: dict[str, tuple[Callable[[list[Row]], None], list[Row], str]] = {
    "nonfinite-updates": (with_({"policy/skipped_nonfinite": 1.0}, 1), [], "1 of the last 10"),
    "prompts-too-long": (
        with_({}),
        [retried("Prompt 'a' has 9 tokens, more than generator.max_input_length=8")],
        "1 a",
    ),
    "failing-rollouts": (with_({}), [retried("old", 500), retried("it raised\n\x1b[31mKeyError")], "1 attempt failed"),
    "constant-reward": (with_(EQUAL, 5), [], "0"),
    "engine-gap": (with_({"off_policy/engine_gap": 0.2}), [], "0.2"),
    "entropy-collapse": (with_({"loss/entropy": 0.06}), [], "0.06 nats, 2%"),
    "no-signal": (with_({"reward/zero_variance_groups": 0.75}), [], "75%"),
    "truncated-responses": (with_({"generate/truncated": 0.5}), [], "50%"),
    "low-effective-sample-size": (with_({"off_policy/ess": 0.1}), [], "0.10"),
    "rewritten-history": (with_({"generate/drifted_turns": 2.0}), [], "50%"),
    "stuck-group": (with_({"generate/latency_s_oldest": 200.0}, 1), [], "200 s"),
    "engine-restarts": (with_({"inference/engine_restarts": 2.0}, 3), [], "2 engines"),
    "full-disk": (with_({"system/disk_free_bytes": 1.5e9}, 1), [], "1.5 more"),
    "solved-prompts": (with_(SOLVED), [], "80%"),
    "slow-training": (with_({"time/train": 9.0, "async/idle_fraction": 0.6}), [], "90%"),
    "busy-control-process": (with_({"time/wait_for_batch": 5.0, "system/control_busy": 0.9}), [], "90%"),
    "slow-generation": (with_({"time/wait_for_batch": 5.0, "system/control_busy": 0.5}), [], "50%"),
    "stale-groups": (with_({"staleness/exceeded": 4.0}), [], "25%"),
    "slow-weight-sync": (with_({"time/gather": 2.0}), [], "24%"),
    "underfilled-micro-batches": (with_({"policy/micro_batch_fill": 0.45}), [], "4 micro-batches of an update are 45%"),
}


@pytest.mark.parametrize("name", CASES)
def test_each_rule_goes_off_alone_and_has_its_figure(name: str) -> None:
    change, failures, figure = CASES[name]
    rows = healthy(30)
    change(rows)
    (advice,) = advise(edge_rows(rows), failures, SETTINGS)
    assert advice.id == name and figure in advice.finding, advice
    assert advise(rows, failures, SETTINGS) == [advice], "the edges of a run are enough"
    assert advice.finding.isprintable() and advice.finding.endswith(".")


def test_each_rule_has_a_case_and_a_section_of_the_documentation() -> None:
    names = [rule.__name__.replace("_", "-") for rule in (*ALARMS, *TUNING)]
    assert names == list(CASES)
    sections = re.findall(r"^### (.*)$", (DOCS / Advice("", "alarm", "", "").docs.partition("#")[0]).read_text(), re.M)
    assert [section.lower().replace(" ", "-") for section in sections] == names


def test_each_setting_and_metric_that_is_named_exists() -> None:
    text = (DOCS / "docs/tutorials/troubleshooting.md").read_text()
    for change, failures, _ in CASES.values():
        rows = healthy(30)
        change(rows)
        text += "".join(map(str, advise(rows, failures, SETTINGS) + advise(rows, failures, {})))
    known = known_keys()
    named = set(re.findall(r"\b(?:trainer|generator|rollout|environment)\.[a-z_.]*[a-z]", text)) - {"trainer.log"}
    assert len(named) > 15
    assert [name for name in named if name not in known and not any(key.startswith(f"{name}.") for key in known)] == []
    for name in re.findall(r"`([a-z_]+/[a-z_]+)`", text):
        spec_of(name)


def test_a_busy_control_process_gives_away_what_it_still_has() -> None:
    rows = healthy(30)
    with_({"time/wait_for_batch": 5.0, "system/control_busy": 0.9})(rows)
    (alone,), (helped,) = (advise(rows, [], {"rollout": {"num_actors": number}}) for number in (0, 2))
    assert "rollout.num_actors" in alone.action and "fewer, longer turns" in helped.action


def test_a_healthy_run_has_neither_alarms_nor_advice() -> None:
    for steps in (0, 1, 9, 10, 60):
        assert advise(edge_rows(healthy(steps)), [], SETTINGS) == []


def test_a_run_that_learned_its_task_has_no_alarm() -> None:
    rows = healthy(30)
    solved = {"reward/mean": 1.0, "reward/min": 1.0, "reward/zero_variance_groups": 1.0, "loss/entropy": 0.001}
    with_(solved)(rows)
    assert [advice.id for advice in advise(rows, [], SETTINGS)] == ["solved-prompts"]
    always = healthy(30)
    with_(solved, last=30)(always)
    ids = [advice.id for advice in advise(always, [], SETTINGS)]
    assert ids == ["constant-reward"], "a reward that was perfect from the first step on is none"


def test_equal_rewards_are_no_alarm_for_estimators_that_compare_with_other_groups() -> None:
    rows = healthy(30)
    with_({"reward/zero_variance_groups": 1.0})(rows)
    settings = {"trainer": {"algorithm": {"advantage_estimator": "reinforce++"}}}
    assert advise(rows, [], settings) == [] != advise(rows, [], SETTINGS)


def test_tuning_waits_until_alarms_are_over() -> None:
    rows = healthy(30)
    with_({"time/wait_for_batch": 5.0, "generate/truncated": 0.5})(rows)
    assert [advice.id for advice in advise(rows, [], SETTINGS)] == ["truncated-responses"]


def test_the_alarm_about_a_cause_comes_before_those_about_its_effects() -> None:
    rows = healthy(30)
    with_({"loss/entropy": 0.0, "reward/zero_variance_groups": 1.0, "generate/truncated": 1.0})(rows)
    assert [advice.id for advice in advise(rows, [], SETTINGS)] == [
        "entropy-collapse",
        "no-signal",
        "truncated-responses",
    ]


def test_failures_before_the_first_step_are_an_alarm() -> None:
    (advice,) = advise([], [retried("it raised KeyError('answer')", 1000)], {})
    assert advice.id == "failing-rollouts" and "KeyError('answer')" in advice.finding


def test_a_long_reason_of_one_word_is_cut_within_it() -> None:
    (advice,) = advise([], [retried(f"it raised on {'x' * 1000}")], {})
    assert "it raised on xxx" in advice.finding and advice.finding.endswith("xxx...") and len(advice.finding) < 250


def test_slow_generation_has_the_advice_for_its_mode() -> None:
    rows = healthy(30)
    with_({"time/wait_for_batch": 5.0})(rows)
    actions = [advise(rows, [], {"trainer": {"mode": mode}})[0].action for mode in ("sync", "fully_async")]
    with_({"async/idle_fraction": 0.7})(rows)
    actions.append(advise(rows, [], SETTINGS)[0].action)
    # Engines in which requests wait have no use for more of them.
    with_({"inference/running_requests": 8.0, "inference/waiting_requests": 40.0})(rows)
    actions.append(advise(rows, [], SETTINGS)[0].action)
    named = ("trainer.mode=", "num_engines", "generate_ahead_steps", "40 requests wait in them, and 8 are sampled. Add")
    for action, setting in zip(actions, named, strict=True):
        assert setting in action


def test_slow_weight_syncs_have_the_advice_for_their_settings() -> None:
    rows = healthy(30)
    with_({"time/gather": 2.0})(rows)
    of_settings = ({}, {"generate_ahead_steps": 1}, {"generate_ahead_steps": 1, "overlap_weight_sync": False})
    actions = [
        advise(rows, [], {"trainer": {"mode": "fully_async", "fully_async": settings}})[0].action
        for settings in of_settings
    ]
    assert ["overlap_weight_sync=true" in action for action in actions] == [True, False, True]


def test_a_weight_sync_in_each_fourth_step_takes_a_fourth_of_its_share() -> None:
    rows = healthy(30)
    for row in rows:
        if row["step"] % 4:
            del row["time/gather"], row["time/wait_for_weight_sync"]
        else:
            row |= {"time/gather": 1.0, "time/wait_for_weight_sync": 1.0}
    assert advise(rows, [], SETTINGS) == []  # it is 5 % of the time


def test_the_wait_for_an_evaluation_is_no_weight_sync() -> None:
    rows = healthy(30)
    with_({"time/wait_for_weight_sync": 3.4, "time/wait_for_evaluation": 3.0})(rows)
    assert advise(rows, [], SETTINGS) == []


def test_underfilled_micro_batches_have_the_advice_for_their_settings_unless_they_are_few() -> None:
    rows = healthy(30)
    with_({"policy/micro_batch_fill": 0.3})(rows)
    of_settings = ({"packing": False}, {"fully_async": {"streaming_min_groups": 2}}, {"packing": None})
    named = ("trainer.packing unset", "streaming_min_groups", "micro_batch_tokens")
    for settings, setting in zip(of_settings, named, strict=True):
        assert setting in advise(rows, [], {"trainer": settings})[0].action
    with_({"policy/micro_batches": 2.0})(rows)
    assert advise(rows, [], SETTINGS) == []


def test_only_what_takes_most_of_the_time_is_called_the_bottleneck() -> None:
    findings = []
    for seconds in (4.0, 8.0):
        rows = healthy(30)
        with_({"time/wait_for_batch": seconds, "time/step": 10.0})(rows)
        findings.append(advise(rows, [], SETTINGS)[0].finding)
    assert findings == [
        "Training waits for groups 40% of the time.",
        "Generation is the bottleneck. Training waits for groups 80% of the time.",
    ]


ODD = [None, True, "1.0", [1.0], {}, math.nan, math.inf, -math.inf, 0, -1.5, 1e308, -1e308, 5e-324, 10**400, 0.3, 7.0]
NAMES = sorted(healthy(1)[0])


@given(st.integers(0, 2**32))
def test_no_metrics_failures_or_settings_make_it_fail(seed: int) -> None:
    random = Random(seed)
    rows = [{name: random.choice(ODD) for name in NAMES if random.random() < 0.8} for _ in range(random.randrange(14))]
    failures = [{"t": random.choice(ODD), "reason": random.choice([*ODD, "\ud800\u202e"])}] * random.randrange(2)
    settings = random.choice([{}, {"trainer": random.choice(ODD)}, {"trainer": {"algorithm": random.choice(ODD)}}])
    for advice in advise(rows, failures, settings):
        assert advice.finding.isprintable() and advice.action


@given(st.sampled_from(sorted(CASES)), st.lists(st.sampled_from(NAMES)), st.sampled_from(ODD))
def test_nor_do_gaps_in_a_run_with_an_alarm(name: str, gaps: list[str], odd: Any) -> None:
    rows = healthy(15)
    CASES[name][0](rows)
    for place, gap in enumerate(gaps):
        rows[-1 - place % 15][gap] = odd
    advise(rows, CASES[name][1], SETTINGS)


def test_advice_begins_once_and_ends_once_it_was_not_found_for_a_while() -> None:
    history, alarm = AdviceHistory(), Advice("a", "alarm", "", "")
    again = dataclasses.replace(alarm, finding="51%")
    steps = [[alarm], [], [again], *[[]] * HOLD_STEPS, [alarm]]
    seen = [history.update(step, found) for step, found in enumerate(steps)]
    assert seen[0] == ([alarm], []) and seen[2 + HOLD_STEPS] == ([], [again]) and seen[-1] == ([alarm], [])
    assert all(both == ([], []) for both in [*seen[1 : 2 + HOLD_STEPS]])


# In a run ---------------------------------------------------------------------------------------------------------


def report(reporter: Reporter, row: Row) -> None:
    """Give a finished step to the reporter."""
    screen = ("staleness/mean", "staleness/max", "async/in_flight", "async/buffered", "async/failed", "async/retries")
    speeds = ("inference/tokens_per_second", "policy/tokens_per_second")
    metrics = {name: value for name, value in row.items() if name not in ("step", "time")}
    metrics |= dict.fromkeys([*screen, *speeds], 1.0)
    step: dict[str, Any] = {"samples": [], "decode": str, "untrained": {}, "checkpoint_step": None, "elapsed_s": 1.0}
    reporter.step(row["step"], [], metrics, **step)


def test_a_run_shows_and_records_when_alarms_begin_and_end(tmp_path: Path) -> None:
    shown = io.StringIO()
    with closing(RunFolder(tmp_path, CONFIG)) as folder:
        reporter = Reporter(CONFIG, folder, Console(file=shown, width=200), 40)
        reporter.begin(0)
        reporter.attempt_failed("group 3", "it raised KeyError('[number]')")
        for row in healthy(30):
            # A failure within the last ten steps: on any machine, these 30 take less than the one hour that they claim for each.
            report(reporter, row | {"time/step": 3600.0} | (EQUAL if 5 <= row["step"] <= 20 else {}))
            if row["step"] == 20:
                during = load_run(tmp_path).advice
        reporter.close()
    run = load_run(tmp_path)
    assert [advice.id for advice in during] == ["constant-reward"] and run.advice == []
    alarms = [event for event in run.events if event["kind"] == "alarm"]
    assert [(event["step"], event["id"], event["state"]) for event in alarms] == [
        (1, "failing-rollouts", "begins"),
        (9, "constant-reward", "begins"),
        (30, "constant-reward", "ends"),
    ]
    assert alarms[1]["level"] == "alarm" and "reward 0" in alarms[1]["finding"] and alarms[1]["action"]
    lines = [line for line in shown.getvalue().splitlines() if line.startswith("alarm")]
    assert len(lines) == 3 and "KeyError('[number]')" in lines[0] and lines[1] == str(during[0])
    assert lines[2] == "alarm over: constant-reward"


def test_a_resumed_run_remembers_the_steps_before_it(tmp_path: Path) -> None:
    rows = [row | EQUAL for row in healthy(6)]
    for start, end in ((0, 5), (4, 6)):
        shown = io.StringIO()
        with closing(RunFolder(tmp_path, CONFIG)) as folder:
            reporter = Reporter(CONFIG, folder, Console(file=shown, width=200), 40)
            reporter.begin(start)
            for row in rows[start:end]:
                before = shown.getvalue()
                assert "constant-reward" not in before, "with the fifth step, not earlier"
                report(reporter, row)
                if row["step"] == 5:
                    assert "constant-reward" in shown.getvalue()
                    break
            reporter.close()

"""Reports and comparisons: what they say of whole, damaged and hostile run folders, and what their files contain."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_runs import RecordedRun

from skyrl_train.entrypoints.command_line import main
from skyrl_train.events.log import EVENTS, EventLog
from skyrl_train.observability.readers.verdict import SYNCS, TURNS, WAITS, bottleneck, learning, time_shares
from skyrl_train.observability.report import compare, files
from skyrl_train.observability.report.facts import Z, intervals, lag_shares, repeat_command, typical_steps
from skyrl_train.observability.report.files import OVERVIEW, try_to_write_report, write_report
from skyrl_train.observability.report.html import STATIC
from skyrl_train.observability.report.markdown import to_markdown
from skyrl_train.observability.report.sections import (
    Paragraph,
    Preformatted,
    Section,
    TextTable,
    shown,
    text_curve,
)
from skyrl_train.observability.run_folder import CONFIG, EVALUATIONS, FINISHED, LOCK, METRICS, SAMPLES

HOSTILE = "</script><img src=x onerror=alert(1)>\u202e\u0000\x1b[31m```\n|a|b|"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "first-1"
    RecordedRun(run, steps=12)
    evaluation = {"step": 8, "eval/pass@1": 0.25, "eval/reward": 0.3, "eval/prompts": 64}
    (run / EVALUATIONS).write_text(json.dumps(evaluation) + "\n")
    (run / FINISHED).write_text("{}")
    write_report(run)
    return run


def columns_of(**metrics: Any) -> dict[str, np.ndarray]:
    columns = {name.replace("__", "/"): np.array(values, dtype=float) for name, values in metrics.items()}
    rows = len(next(iter(columns.values())))
    return {"step": np.arange(1.0, rows + 1), **columns}


# The verdict ------------------------------------------------------------------------------------------------------

NOISE = [0.01, -0.01, 0.0] * 20


@pytest.mark.parametrize(
    ("rewards", "beginning"),
    [
        ([], "No step with a reward has ended"),
        ([math.nan, math.nan], "No step with a reward has ended"),
        ([0.1, 0.9], "Too few steps"),
        ([0.5 + noise for noise in NOISE], "No clear change"),
        ([index / 60 + noise for index, noise in enumerate(NOISE)], "Learned: reward"),
        ([1 - index / 60 + noise for index, noise in enumerate(NOISE)], "Got worse"),
        ([min(index, 60 - index) / 60 + noise for index, noise in enumerate(NOISE)], "Learned, and lost it again"),
        (
            [min(index, 45 - index / 2) / 60 + noise for index, noise in enumerate(NOISE)],
            "Learned, and lost some of it",
        ),
    ],
)
def test_a_run_has_learned_if_its_ends_differ_by_more_than_their_noise(rewards: list[float], beginning: str) -> None:
    assert learning(columns_of(reward__mean=rewards)).startswith(beginning)


def test_a_run_whose_reward_ends_above_its_start_did_not_get_worse() -> None:
    """Between its ends it was better."""
    rewards = [0.0774, 0.0757, 0.0814, *[0.08] * 8, 0.0974, 0.0980, 0.0970, *[0.08] * 3, 0.0768, 0.0797, 0.0831]
    assert learning(columns_of(reward__mean=rewards)).startswith("Learned, and lost it again: reward 0.0782")


def test_rewards_that_are_all_equal_teach_nothing() -> None:
    columns = columns_of(reward__mean=[1.0] * 9, reward__min=[1.0] * 9, reward__max=[1.0] * 9)
    assert learning(columns).startswith("Nothing was learned: all samples have the reward 1,")


def test_the_part_of_the_step_that_takes_longest_is_the_bottleneck() -> None:
    columns = columns_of(time__step=[2.0, 2.0], time__train=[0.5, 0.5], time__wait_for_batch=[1.0, 1.4])
    shares, idle = time_shares(columns)
    assert shares[WAITS] == pytest.approx(0.6) and idle is None
    assert bottleneck(shares, idle) == "Bottleneck: generation. The trainer waits for groups 60% of the time."
    shares, idle = time_shares(columns_of(time__step=[2.0], time__train=[1.8], async__idle_fraction=[0.7]))
    assert bottleneck(shares, idle).startswith(
        "Bottleneck: training. It takes 90% of the time. Generation slots are idle 70%"
    )
    assert bottleneck(
        *time_shares(columns_of(time__step=[2.0], time__train=[1.9], async__idle_fraction=[0.0]))
    ).startswith("Balanced")
    assert bottleneck(*time_shares(columns_of(time__step=[2.0], time__train=[1.0], time__wait_for_batch=[0.8]))) == (
        "No single bottleneck: training takes 50%, the trainer waits for groups 40% of the time."
    )
    assert bottleneck({}, None).startswith("No step has ended")


def test_a_sync_that_overlaps_with_training_counts_with_the_time_that_training_waits_for_it() -> None:
    times = {"time__step": [1.0], "time__gather": [0.1], "time__transfer": [0.4], "time__pause": [0.2]}
    assert time_shares(columns_of(**times))[0][SYNCS] == pytest.approx(0.7)
    assert time_shares(columns_of(**times, time__wait_for_weight_sync=[0.05]))[0][SYNCS] == pytest.approx(0.15)


def test_the_wait_for_an_evaluation_is_no_weight_sync() -> None:
    times = {
        "time__step": [10.0],
        "time__train": [3.0],
        "time__wait_for_batch": [0.4],
        "time__wait_for_weight_sync": [6.6],
    }
    shares, _ = time_shares(columns_of(**times, time__wait_for_evaluation=[6.0]))
    assert (shares[SYNCS], shares[TURNS], shares[WAITS]) == pytest.approx((0.06, 0.6, 0.04))
    # One that ended while the policy trained has cost no time.
    times |= {"time__wait_for_weight_sync": [0.0], "time__wait_for_batch": [7.0]}
    shares, _ = time_shares(columns_of(**times, time__wait_for_evaluation=[2.0]))
    assert (shares[SYNCS], shares[TURNS], shares[WAITS]) == pytest.approx((0.0, 0.0, 0.7))


_numbers = st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 10)


@settings(max_examples=40)
@given(st.lists(st.tuples(_numbers, _numbers, _numbers, _numbers, _numbers), max_size=8))
def test_any_metrics_have_a_verdict_and_shares_of_at_most_the_whole(rows: list[tuple[float, ...]]) -> None:
    names = ("time__step", "time__train", "time__wait_for_batch", "reward__mean", "time")
    columns = columns_of(**{name: [row[index] for row in rows] for index, name in enumerate(names)})
    with np.errstate(all="ignore"):
        shares, idle = time_shares(columns)
        assert learning(columns) and bottleneck(shares, idle)
        typical_steps(columns)
    assert all(0 <= share <= 1 for share in shares.values()) and sum(shares.values()) <= 1 + 1e-9


def test_typical_steps_follow_each_other_and_take_as_long_as_the_median() -> None:
    seconds = [30.0, 1.0, 5.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 9.0]
    columns = columns_of(time=100 + np.cumsum(seconds), time__step=seconds)
    # Three steps that follow each other, without the first one, take 7, 7, 3, 4, 5, 6, 13 s.
    begin, end = typical_steps(columns) or (0.0, 0.0)
    assert (begin - 100, end - 100) == (39.0, 45.0)
    assert typical_steps(columns_of(time=[7.0], time__step=[2.0])) == (5.0, 7.0)
    assert typical_steps({}) is None


@given(st.integers(1, 500), st.floats(0, 1))
def test_the_ends_of_an_interval_are_the_shares_from_which_the_measured_one_is_z_deviations_away(
    n: int, share: float
) -> None:
    low, high = intervals({"eval/pass@1": share, "eval/prompts": n, "eval/reward": 0.5})["eval/pass@1"]
    assert 0 <= low <= share + 1e-9 and share - 1e-9 <= high <= 1
    for end in (low, high):
        if 0 < end < 1:
            # Solved for the end, the definition loses half of the digits where the share is 0 or 1.
            assert abs(end - share) == pytest.approx(Z * math.sqrt(end * (1 - end) / n), rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("prompts", [None, 0, "64", math.nan])
def test_an_evaluation_of_unknown_size_has_no_intervals(prompts: Any) -> None:
    assert intervals({"eval/pass@1": 0.5, "eval/prompts": prompts}) == {}


def test_lags_are_shares_of_all_trained_groups() -> None:
    columns = columns_of(staleness__histogram__0=[1, math.nan], staleness__histogram__2=[1, 2])
    assert lag_shares(columns) == {0: 0.25, 2: 0.75}


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ([], ""),
        (["/x/skyrl_train/__main__.py", "train", "quickstart"], "python -m skyrl_train train quickstart"),
        (["/venv/bin/skyrl-train", "train", "quickstart", "a=b c"], "skyrl-train train quickstart 'a=b c'"),
        (["mine.py", 3], "python mine.py 3"),
    ],
)
def test_the_command_can_be_given_to_a_shell(command: list[Any], line: str) -> None:
    assert repeat_command(command) == line


# The files --------------------------------------------------------------------------------------------------------


def test_the_report_has_its_sections_in_the_order_of_the_questions(recorded: Path) -> None:
    text = (recorded / "report.md").read_text()
    headings = re.findall("^## (.+)$", text, re.MULTILINE)
    assert headings == [
        "Advice",
        "Curves",
        "Who waited",
        "Lag",
        "Lengths",
        "Evaluations",
        "Samples",
        "Failures",
        "Typical steps",
        "Settings that differ from their defaults",
        "Environment",
        "The command",
    ]  # fmt: skip
    html = (recorded / "report.html").read_text()
    assert re.findall('<h2 class="section">(.+)</h2>', html) == headings
    for fact in (
        "Bottleneck: training. It takes 65% of the time",
        "Nothing failed.",
        "0.250 (0.160 to 0.368)",
        "trainer.max_steps",
    ):
        assert fact in text and fact in html
    assert len(re.findall(r"(?:First|Last|Best|Worst|Stalest|Longest): step \d+, reward", text)) == 6


def test_the_html_file_needs_nothing_else(recorded: Path) -> None:
    html = (recorded / "report.html").read_text()
    assert len(html) < 1_000_000
    assert not re.findall(r"<link|<img|<iframe|<script[^>]+src=|@import|url\(", html)
    answers = json.loads(html.partition('id="answers">')[2].partition("</script>")[0])
    assert answers["metrics ."]["mean"]["reward/mean"][0] == pytest.approx(1 / 6, abs=1e-5)
    assert len(answers["timeline ."]["steps"]) == 3 and answers["timeline ."]["groups"]
    # Every module that another one imports is there.
    modules = json.loads(html.partition('type="importmap">')[2].partition("</script>")[0])["imports"]
    for name in modules:
        source = next(STATIC.rglob(Path(name).name)).read_text()
        assert {f"page/{Path(other).name}" for other in re.findall(r'from "(\./[^"]+)"', source)} <= modules.keys()


def test_the_report_has_all_metrics_that_the_overview_draws() -> None:
    script = (STATIC / "overview.js").read_text()
    listed = re.findall(r'"([a-z_0-9/]+)"', script.partition("const WANTED = [")[2].partition("];")[0])
    tokens = re.search(r'TOKENS = "(.+)"', (STATIC / "charts.js").read_text())
    assert tokens is not None and set(OVERVIEW) == {*listed, tokens[1]}


def test_a_long_run_fits_into_a_megabyte(tmp_path: Path) -> None:
    run = tmp_path / "long-1"
    run.mkdir()
    names = [name for name in OVERVIEW if not name.endswith("/")] + [f"staleness/histogram/{lag}" for lag in range(8)]
    times = {f"time/{part}": 0.1234567 for part in ("step", "train", "wait_for_batch", "gather", "transfer", "pause")}
    values = dict.fromkeys(names, 0.7654321) | times
    text = json.dumps(values)[1:]
    (run / METRICS).write_text("".join(f'{{"step": {step}, "time": {step}.5, {text}\n' for step in range(1, 2501)))
    html = write_report(run).read_text()
    assert len(html) < 1_000_000 and "step 2500" in html


def test_texts_of_a_run_cannot_change_the_report(tmp_path: Path) -> None:
    run = tmp_path / "hostile"
    run.mkdir()
    (run / CONFIG).write_text(json.dumps({"trainer": {"mode": HOSTILE, HOSTILE: HOSTILE, "fully_async": [HOSTILE]}}))
    rows = [
        {"step": 1, HOSTILE: 1.0, "elapsed_s": HOSTILE, "time": [1], "reward/mean": 0.5},
        {"step": 2, "reward/mean": 1e999},
    ]
    (run / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"st')
    (run / EVALUATIONS).write_text(json.dumps({"step": 1, HOSTILE: HOSTILE, "eval/pass@1": HOSTILE}) + "\n")
    sample = {"step": 1, "prompt": HOSTILE, "response": HOSTILE, "reward": HOSTILE, "stop_reason": HOSTILE}
    (run / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    log = EventLog(run / EVENTS, 100)
    facts = {"host": HOSTILE, "version": HOSTILE, "python": HOSTILE, "config": HOSTILE, "git": HOSTILE}
    log.record("process", pid=1, command=[HOSTILE], **facts)
    log.record("retried", group=0, attempt=1, reason=HOSTILE)
    log.record("warning", level="WARNING", source=HOSTILE, text=HOSTILE)
    log.close()
    html = write_report(run).read_text()
    assert "<img" not in html and "&lt;img" in html
    # Data of the pictures may have them: the page's scripts draw them.
    texts = re.sub('data-with="[^"]+"', "", html.partition("<body>")[2])
    assert not re.search("[\u202e\u0000\x1b]", texts)
    markdown = (run / "report.md").read_text()
    assert not re.search("[\u202e\u0000\x1b]", markdown)
    # Outside of fences and code, no tag begins.
    outside = re.sub(r"(`+).*?\1", "", re.sub(r"^(`{3,})text\n.*?^\1$", "", markdown, flags=re.DOTALL | re.MULTILINE))
    assert not re.search(r"(?<!\\)<", outside)


@pytest.mark.parametrize(
    "damage",
    [
        lambda run: [path.unlink() for path in run.iterdir() if path.is_file()] + [(run / LOCK).touch()],
        lambda run: (run / METRICS).unlink(),
        lambda run: (run / METRICS).write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2, "rew'),
        lambda run: [path.write_bytes(path.read_bytes()[:1000]) for path in (run / EVENTS).iterdir()],
        lambda run: [path.write_bytes(path.read_bytes()[:100]) for path in (run / SAMPLES).iterdir()],
        lambda run: [path.unlink() for folder in (EVENTS, SAMPLES) for path in (run / folder).iterdir()],
        lambda run: (run / CONFIG).write_text("a: [1"),
    ],
    ids=[
        "only a lock",
        "no metrics",
        "torn metrics",
        "torn events",
        "torn samples",
        "no events or samples",
        "torn settings",
    ],
)
def test_a_damaged_run_has_a_report(tmp_path: Path, damage: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "damaged-1"
    RecordedRun(run, steps=3)
    damage(run)
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert (run / "report.md").read_text().startswith("# Report of damaged-1\n")


def test_a_killed_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "killed-1"
    RecordedRun(run, steps=3)
    (segment,) = (run / EVENTS).iterdir()
    segment.write_bytes(b"\n".join(segment.read_bytes().splitlines()[:-1]) + b"\n")
    assert "The run is under way, after step 3 of 3." in write_report(run).read_text()
    monkeypatch.setattr("skyrl_train.observability.readers.folders.LIVE_S", -1.0)
    assert "The run stopped writing after step 3 of 3, without an end" in write_report(run).read_text()


def test_a_report_of_a_folder_that_cannot_be_written_goes_elsewhere(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.html").mkdir()
    assert main(["report", str(recorded), "--output", str(tmp_path)]) == 2
    assert "--output" in capsys.readouterr().err
    assert main(["report", str(recorded), "--output", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / "report.md").read_bytes() == (recorded / "report.md").read_bytes()
    assert main(["report", str(tmp_path / "new")]) == 2


def test_a_report_that_fails_does_not_fail_the_run(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("scripted")

    monkeypatch.setattr(files, "sections", fail)
    try_to_write_report(recorded)
    assert f"the report of {recorded} cannot be written" in caplog.text


# Comparisons ------------------------------------------------------------------------------------------------------


def write_run(run: Path, rewards: list[float], seed: int = 0) -> None:
    run.mkdir(parents=True)
    (run / CONFIG).write_text(json.dumps({"trainer": {"seed": seed, "mode": "sync"}}))
    rows = [
        {"step": step, "elapsed_s": 2.0 * step, "time/step": 2.0, "reward/mean": reward, OVERVIEW[0]: 100 * step}
        for step, reward in enumerate(rewards, 1)
    ]
    (run / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_runs_are_compared_at_equal_budgets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs" / "a-1", [0.1] * 20)
    write_run(tmp_path / "runs" / "a-2", [0.2] * 40 + [0.9] * 20, seed=7)
    write_run(tmp_path / "runs" / "no-steps", [])
    output = tmp_path / "both.html"
    assert main(["compare", str(tmp_path / "runs"), "--output", str(output)]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert [line[1:6] for line in lines if line[:1] == ["a-1"]] == [["0.1", "0.1", "0.1", "2", "s"]]
    assert [line[1:6] for line in lines if line[:1] == ["a-2"]] == [["0.2", "0.2", "0.2", "2", "s"]], (
        "not what came later"
    )
    assert ["trainer.seed", "0", "7", "0"] in lines
    assert "20 steps" in out and "0:40" in out and "2000 tokens" in out and "seed 0" in out
    html = output.read_text()
    answers = json.loads(html.partition('id="answers">')[2].partition("</script>")[0])
    assert [answers[f"compare {axis}"]["at"]["budget"] for axis in ("step", "elapsed", "tokens")] == [20, 40, 2000]
    assert len(answers["metrics 1"]["step"]) == 60


@pytest.mark.parametrize(
    ("by", "axis", "figures", "in_all"),
    [
        ("step", "step", ["20", "steps", "0:40", "2000", "tokens"], ["20", "60"]),
        ("time", "elapsed", ["0:40", "20", "steps", "2000", "tokens"], ["0:40", "2:00"]),
        ("tokens", "tokens", ["2000", "tokens", "20", "steps", "0:40"], ["2000", "6000"]),
    ],
)
def test_the_chosen_axis_comes_first_in_the_table_and_opens_the_file(
    by: str, axis: str, figures: list[str], in_all: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "runs" / "a-1", [0.1] * 20)
    write_run(tmp_path / "runs" / "a-2", [0.2] * 60)
    output = tmp_path / "both.html"
    assert main(["compare", str(tmp_path / "runs"), "--by", by, "--output", str(output)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert next(line for line in lines if line[:1] == ["run"])[1 : 1 + len(figures)] == figures
    assert [line[-1] for line in lines if line[:1] in (["a-1"], ["a-2"])] == in_all
    assert f"&quot;opens&quot;:&quot;{axis}&quot;" in output.read_text()


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        (["a"], "needs two runs"),
        (["none"], "no run in"),
        (["a", "none"], "no run in"),
        (["a", "a", "none"], "no run in"),
    ],
)
def test_a_comparison_needs_two_runs_and_names_one_that_is_missing(
    tmp_path: Path, runs: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a", [0.1])
    assert main(["compare", *(str(tmp_path / run) for run in runs)]) == 2
    told = capsys.readouterr().err
    assert said in told and (said == "needs two runs" or str(tmp_path / "none") in told)


def test_runs_of_the_same_name_are_told_apart_and_texts_are_harmless(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "x" / "[red]a\x1b[31m", [0.1])
    write_run(tmp_path / "y" / "[red]a\x1b[31m", [0.1])
    (tmp_path / "y" / "[red]a\x1b[31m" / CONFIG).write_text(json.dumps({"trainer": {HOSTILE: HOSTILE}}))
    assert main(["compare", str(tmp_path / "x"), str(tmp_path / "y"), "--output", str(tmp_path / "c.html")]) == 0
    assert "[red]a\\x1b[31m" in (out := capsys.readouterr().out).replace("\n", "") and "\x1b" not in out
    assert "<img" not in (tmp_path / "c.html").read_text()
    assert main(["compare", str(tmp_path / "x"), str(tmp_path / "y"), "--output", str(tmp_path)]) == 2


def test_a_comparison_has_all_metrics_that_its_view_draws() -> None:
    script = (STATIC / "compare.js").read_text()
    listed = re.findall(r'\["([a-z_0-9/]+)"', script.partition("const CURVES = [")[2].partition("];")[0])
    assert (OVERVIEW[0], *listed) == compare.CURVES


# Parts ------------------------------------------------------------------------------------------------------------


def test_markdown_keeps_texts_apart_from_its_own_marks() -> None:
    table = TextTable(("a|b", "c"), [["x*y", "`|`"], ["snake_case _em_", ""]], frozenset({0}), frozenset({1}))
    text = to_markdown("t", [Section("s", [Paragraph("<b>", strong=True), table, Preformatted("```\nx")])])
    assert text.splitlines() == [
        "# t",
        "",
        "## s",
        "",
        "**\\<b>**",
        "",
        "| a\\|b | c |",
        "| ---: | --- |",
        "| x\\*y | `` `\\|` `` |",
        "| snake_case \\_em\\_ |  |",
        "",
        "````text",
        "```",
        "x",
        "````",
    ]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.1234, "", "0.123"), (1234.5, "", "1234"), (12345.0, "", "12.3k"), (2.5e6, "tokens", "2.5M"), (0.5, "share", "50.0%"),
        (999.7, "", "1000"), (999_700, "", "1M"), (1.7e308, "", "1.7e+296T"), (0.0123, "s", "12.3 ms"), (12.0, "s", "12 s"),
        (math.nan, "s", "–"), (math.inf, "", "–"), (None, "", "–"), ("x", "", "–"),
    ],
)  # fmt: skip
def test_numbers_are_short(value: Any, unit: str, text: str) -> None:
    assert shown(value, unit) == text


@given(st.lists(_numbers, max_size=80), st.integers(1, 40), st.integers(1, 9))
def test_a_text_curve_stays_within_its_lines_and_columns(values: list[float], width: int, height: int) -> None:
    finite = [value for value in values if math.isfinite(value) and abs(value) < 1e300]
    curve = text_curve(finite, width, height)
    assert bool(curve) == bool(finite)
    if finite:
        drawn = [line.partition("┤")[2] for line in curve.split("\n")]
        assert len(drawn) == height and max(map(len, drawn)) <= width
        assert len(drawn[-1]) == min(width, len(finite)), "each column has a mark"


def test_a_text_curve_shows_the_values_as_heights() -> None:
    assert text_curve([0.0, 1.0, 2.0, 3.0], 4, 2) == "3 ┤  ▃█\n0 ┤▁▆██"
    assert text_curve([0.5, math.nan], 4, 1) == "0.5 ┤▁"

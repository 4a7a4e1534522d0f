"""The content of a report as data: the verdict, figures, samples and failures. Every fact is a function of the run folder.

run folder ──read_facts──> RunFacts ──> report.html, report.md
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_train.observability.advice import Advice
from skyrl_train.observability.failures import sentence
from skyrl_train.observability.readers.comparison import Columns, bootstrap_interval
from skyrl_train.observability.readers.folders import RunsFolder, read_settings
from skyrl_train.observability.readers.incidents import incidents, run_advice
from skyrl_train.observability.readers.samples import recorded_files, step_rows, whole_sequence
from skyrl_train.observability.readers.settings import setting_of, settings_table
from skyrl_train.observability.readers.timeline import EventStore
from skyrl_train.observability.run_folder import CONFIG, EVALUATIONS, read_jsonl
from skyrl_train.observability.screen import counted, duration

# Parts of a step's time. Where two overlap, the time counts for the first one.
COMPUTES, SYNCS, TURNS, WAITS = "training", "weight sync", "other turns", "waits for groups"
_TURNS = ("sleep", "wake_up", "offload_states", "reload_states", "wait_for_evaluation")

FIGURES = (
    "reward/mean", "reward/std", "reward/zero_variance_groups", "loss/entropy", "policy/grad_norm", "policy/kl_to_reference",
    "off_policy/ess", "off_policy/kl_k3", "policy/clip_fraction", "staleness/mean", "generate/response_tokens",
    "generate/response_tokens_p90", "generate/response_tokens_max", "generate/truncated", "time/step", "generate/latency_s_p50",
    "generate/latency_s_p99", "inference/tokens_per_second", "policy/tokens_per_second", "async/idle_fraction",
)  # fmt: skip
END_SHARE = 0.1  # of the steps at either end that are averaged
FEW_STEPS = 6  # with fewer there is no trend
SAMPLED_FILES = 10  # in which samples are looked for
RECORD_SEGMENTS = 20  # of 4 MB each, the newest ones, in which failures are looked for
Z = 1.96  # of a 95 % interval


@dataclass(frozen=True)
class Figure:
    """A metric over the run: its means over the first and the last tenth of the steps, its extremes, and its values."""

    name: str
    first: float
    last: float
    low: float
    high: float
    values: NDArray[np.float64]


@dataclass(frozen=True)
class RunFacts:
    """The content of a report.

    Attributes:
        row: name, state, mode, steps and times, see ``RunsFolder.row``.
        columns: the metrics, each of shape ``[rows]``.
        verdict: does it learn, who is the bottleneck, what failed: a sentence or two for each.
        advice: alarms after the last step, or, without any, advice for tuning.
        shares: of the training time, by part, and of the generation slots' time that was idle (None: not measured).
        lags: share of the trained groups by lag, and the bound (None: the mode has none).
        evaluations: rows of ``eval.jsonl``, each with ``intervals``: low and high by metric.
        samples: at most six recorded sequences, each with ``why``.
        incidents: alarms, failures, warnings and processes, see :func:`incidents`; None: nothing is recorded.
        settings: those that differ from their defaults.
        process: the command that last opened the run folder; empty: not recorded.
    """

    row: dict[str, Any]
    columns: Columns
    verdict: tuple[str, str, str]
    advice: list[Advice]
    figures: list[Figure]
    shares: dict[str, float]
    idle: float | None
    lags: dict[int, float]
    bound: int | None
    evaluations: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    incidents: dict[str, Any] | None
    settings: list[dict[str, Any]]
    process: dict[str, Any]


def read_facts(run: Path, columns: Columns, store: EventStore) -> RunFacts:
    """Read the run in the folder ``run``, which may be unfinished, damaged, or of another version.

    Args:
        columns: its metrics.
        store: its record.
    """
    row = RunsFolder(run).row(".")
    settings = read_settings(run / CONFIG)
    found = incidents(store, RECORD_SEGMENTS)
    shares, idle = time_shares(columns)
    bound = setting_of(settings, "trainer.fully_async.max_staleness_steps")
    processes = [event for event in found["processes"] if event["kind"] == "process"] if found else []
    return RunFacts(
        row=row,
        columns=columns,
        verdict=(learning(columns), bottleneck(shares, idle), trouble(row, columns, found)),
        advice=run_advice(columns, store, settings),
        figures=[figure for name in FIGURES if (figure := _figure(name, columns)) is not None],
        shares=shares,
        idle=idle,
        lags=lag_shares(columns),
        bound=bound if isinstance(bound, int) and "async" in row["mode"] else None,
        evaluations=[{**each, "intervals": intervals(each)} for each in read_jsonl(run / EVALUATIONS)],
        samples=choose_samples(run),
        incidents=found,
        settings=[setting for setting in settings_table(settings) if setting["differs"]],
        process=processes[-1] if processes else {},
    )


# The verdict -------------------------------------------------------------------------------------------------------


def learning(columns: Columns) -> str:
    """Return whether the reward rose: its means over the first and the last tenth of the steps are compared.

    The rewards are taken as different if their 95 % intervals, from a bootstrap of blocks of steps, do not overlap.
    """
    rewards = _finite(columns, "reward/mean")
    if not len(rewards):
        return "No step with a reward has ended, so nothing can be said about learning."
    extremes = np.concatenate([_finite(columns, "reward/min"), _finite(columns, "reward/max")])
    if len(extremes) and extremes.min() == extremes.max():
        return f"Nothing was learned: all samples have the reward {extremes[0]:.3g}, which teaches nothing."
    length = f"in {counted(len(rewards), 'step', 'steps')}, {duration(_last(columns, 'elapsed_s'))} of training"
    if len(rewards) < FEW_STEPS:
        return f"Too few steps to see a trend: reward {rewards[0]:.3g} → {rewards[-1]:.3g} {length}."
    ends = max(3, round(len(rewards) * END_SHARE))
    first, last = rewards[:ends], rewards[-ends:]
    (low, high), (low_last, high_last) = bootstrap_interval(first), bootstrap_interval(last)
    change = f"reward {first.mean():.3g} ({low:.3g} to {high:.3g}) → {last.mean():.3g} "
    change += f"({low_last:.3g} to {high_last:.3g}) {length}"
    sums = np.concatenate([[0.0], np.cumsum(rewards)])
    means = (sums[ends:] - sums[:-ends]) / ends
    best = int(means.argmax())
    low_best, _ = bootstrap_interval(rewards[best : best + ends])
    if low_best > high_last:
        peak = columns["step"][np.isfinite(columns["reward/mean"])][best + ends // 2]
        judgement = "Learned, and lost some of it" if low_last > high else "Got worse"
        return f"{judgement}: {change}; the best stretch, around step {peak:.0f}, had {means[best]:.3g}."
    if low_last > high:
        return f"Learned: {change}."
    return f"Got worse: {change}." if high_last < low else f"No clear change: {change}; the intervals overlap."


def bottleneck(shares: Mapping[str, float], idle: float | None) -> str:
    """Return what bounds the speed, from :func:`time_shares`."""
    if not shares:
        return "No step has ended, so nothing can be said about speed."
    slots = "" if idle is None else f" Generation slots are idle {idle:.0%} of the time."
    largest = max(shares, key=lambda part: shares[part])
    if largest == WAITS:
        return f"Bottleneck: generation. The trainer waits for groups {shares[WAITS]:.0%} of the time.{slots}"
    if largest == COMPUTES and idle is not None and idle < 0.1 and shares[WAITS] < 0.1:
        return f"Balanced: training takes {shares[COMPUTES]:.0%} of the time, and generation slots are idle {idle:.0%}."
    return f"Bottleneck: {largest}. It takes {shares[largest]:.0%} of the time.{slots}"


def trouble(row: Mapping[str, Any], columns: Columns, found: Mapping[str, Any] | None) -> str:
    """Return how the run ended, and what failed in it."""
    steps = f"after step {row['step']}" + (f" of {row['total_steps']}" if row["total_steps"] else "")
    ends = [event for event in found["processes"] if event["kind"] == "end"] if found else []
    error = next((event["error"] for event in reversed(ends) if event["error"]), None)
    state = {
        "live": f"The run is under way, {steps}.",
        "silent": f"The run stopped writing {steps}, without an end: it was killed, or it waits.",
        "stopped": f"The run was stopped {steps}, and can be resumed.",
        "failed": f"The run failed {steps}{f': {sentence(error)}' if error else '.'}",
    }.get(row["state"], "")
    reasons = found["failures"] if found else []

    def recorded(kind: str) -> int:
        return sum(each["count"] for each in reasons if each["kind"] == kind)

    counts = [
        # The metrics end with the last step, and the record may lack its beginning.
        (max(recorded("failed"), _last(columns, "async/failed")), "group failed for good", "groups failed for good"),
        (max(recorded("retried"), _last(columns, "async/retries")), "attempt was repeated", "attempts were repeated"),
        (_last(columns, "async/engine_failures"), "group lost all its engines", "groups lost all their engines"),
        (float(_finite(columns, "policy/skipped_nonfinite").sum()), "update was not finite", "updates were not finite"),
    ]
    failed = [counted(int(count), one, many) for count, one, many in counts if count > 0]
    said = f"{', '.join(failed)}." if failed else "Nothing failed."
    if reasons:
        most = max(reasons, key=lambda each: each["count"])
        said += f" Most often: {sentence(most['reason'])}"
    return f"{state} {said}".lstrip()


# Figures -----------------------------------------------------------------------------------------------------------


def time_shares(columns: Columns) -> tuple[dict[str, float], float | None]:
    """Return the shares of the training time by part, and the idle share of the generation slots (None: not measured).

    Parts that overlap with another one count once. Both are empty if no step has ended.
    """

    def spent(name: str) -> NDArray[np.float64]:
        return np.nan_to_num(columns.get(f"time/{name}", np.zeros(len(steps))), posinf=0.0, neginf=0.0)

    steps = columns.get("time/step", np.empty(0))
    known = np.isfinite(steps) & (steps > 0)
    if not known.any():
        return {}, None
    overlapped = "time/wait_for_weight_sync" in columns
    sync = spent("gather") + (spent("wait_for_weight_sync") if overlapped else spent("transfer") + spent("pause"))
    parts = {COMPUTES: spent("train"), SYNCS: sync, TURNS: sum(map(spent, _TURNS)), WAITS: spent("wait_for_batch")}
    left, shares = steps.copy(), {}
    for part, seconds in parts.items():
        taken = np.clip(seconds, 0.0, left)
        left = left - taken
        shares[part] = float(taken[known].sum() / steps[known].sum())
    idle = columns.get("async/idle_fraction", np.full(len(steps), np.nan))
    known &= np.isfinite(idle)
    return shares, float(np.average(idle[known], weights=steps[known])) if known.any() else None


def lag_shares(columns: Columns) -> dict[int, float]:
    """Return the share of the trained groups by lag."""
    prefix = "staleness/histogram/"
    groups = {
        int(name.removeprefix(prefix)): float(_finite(columns, name).sum())
        for name in columns
        if name.startswith(prefix) and name.removeprefix(prefix).isdecimal()
    }
    total = sum(groups.values())
    return {lag: groups[lag] / total for lag in sorted(groups)} if total else {}


def intervals(evaluation: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return the 95 % intervals of an evaluation's pass@k and avg@k: Wilson's, with one observation per prompt.

    The samples of a prompt are not independent, so they count as one observation; with several of them the intervals are too
    wide. Other metrics have none, because their spread is not recorded.
    """
    prompts = evaluation.get("eval/prompts")
    if not isinstance(prompts, int | float) or not prompts >= 1:
        return {}
    found = {}
    for name, share in evaluation.items():
        if name.startswith(("eval/pass@", "eval/avg@")) and isinstance(share, int | float) and 0 <= share <= 1:
            centre, scale = share + Z**2 / (2 * prompts), 1 + Z**2 / prompts
            half = Z * math.sqrt(share * (1 - share) / prompts + Z**2 / (4 * prompts**2))
            found[name] = (max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale))
    return found


def typical_steps(columns: Columns, count: int = 3) -> tuple[float, float] | None:
    """Return the Unix times between which ``count`` steps ran whose duration is nearest to the median; None: no such steps.

    The first step, which waits for the first groups, is left out if there are others. Of equal ones the last are taken.
    """
    if "time" not in columns or "time/step" not in columns:
        return None
    ends, seconds = columns["time"], columns["time/step"]
    begins = ends - seconds
    known = np.isfinite(begins) & (seconds > 0)
    ends, begins = ends[known], begins[known]
    first = 1 if len(ends) > count else 0
    ends, begins = ends[first:], begins[first:]
    count = min(count, len(ends))
    if not count:
        return None
    lengths = ends[count - 1 :] - begins[: len(begins) - count + 1]
    off = np.abs(lengths - np.median(lengths))
    chosen = len(off) - 1 - int(off[::-1].argmin())
    return float(begins[chosen]), float(ends[chosen + count - 1])


def repeat_command(command: Sequence[Any]) -> str:
    """Return a recorded command line for a shell."""
    words = [str(word) for word in command]
    if not words:
        return ""
    program = Path(words[0])
    if program.name == "__main__.py":
        return shlex.join(["python", "-m", program.parent.name, *words[1:]])
    return shlex.join(["python", *words] if program.suffix == ".py" else [program.name, *words[1:]])


def _figure(name: str, columns: Columns) -> Figure | None:
    values = _finite(columns, name)
    if not len(values):
        return None
    ends = max(1, round(len(values) * END_SHARE))
    first, last = float(values[:ends].mean()), float(values[-ends:].mean())
    return Figure(name, first, last, float(values.min()), float(values.max()), values)


def _finite(columns: Columns, name: str) -> NDArray[np.float64]:
    values = columns.get(name, np.empty(0))
    return np.asarray(values[np.isfinite(values)])


def _last(columns: Columns, name: str) -> float:
    values = _finite(columns, name)
    return float(values[-1]) if len(values) else math.nan


# Samples -----------------------------------------------------------------------------------------------------------


def choose_samples(run: Path) -> list[dict[str, Any]]:
    """Return at most six recorded sequences of training in the order of their steps, each with ``why`` it was chosen."""
    steps = [step for phase, step in recorded_files(run) if phase == "train"] or step_rows(run, "train", 0)["steps"]
    # The files of each tenth step also have its best, worst and stalest groups.
    rich = [step for step in steps if step % 10 == 0] or steps
    spread = (
        {rich[index] for index in np.linspace(0, len(rich) - 1, SAMPLED_FILES - 2).round().astype(int)} if rich else ()
    )
    rows = [row for step in sorted({*steps[:1], *spread, *steps[-1:]}) for row in step_rows(run, "train", step)["rows"]]

    def value(row: Mapping[str, Any], name: str, missing: float) -> float:
        return float(row[name]) if isinstance(row.get(name), int | float) and math.isfinite(row[name]) else missing

    orders: dict[str, Any] = {
        "first": lambda row: -row["step"],
        "last": lambda row: row["step"],
        "best": lambda row: value(row, "reward", -math.inf),
        "worst": lambda row: -value(row, "reward", math.inf),
        "stalest": lambda row: value(row, "lag", -1.0),
        "longest": lambda row: value(row, "tokens", 0.0),
    }
    chosen = []
    for why, order in orders.items():
        if rows:
            row = max(rows, key=lambda row: (order(row), row["step"]))
            rows.remove(row)
            whole = whole_sequence(run, "train", row["step"], row["row"]) if "row" in row else None
            chosen.append({**row, **(whole or {}), "tokens": row.get("tokens"), "why": why})
    return sorted(chosen, key=lambda row: row["step"])

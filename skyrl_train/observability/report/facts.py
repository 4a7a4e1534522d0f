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
from skyrl_train.observability.metrics import is_finite_number
from skyrl_train.observability.readers.comparison import Columns
from skyrl_train.observability.readers.folders import RunsFolder, read_settings
from skyrl_train.observability.readers.incidents import incidents, run_advice
from skyrl_train.observability.readers.samples import recorded_files, step_rows, whole_sequence
from skyrl_train.observability.readers.settings import setting_of, settings_table
from skyrl_train.observability.readers.timeline import EventStore
from skyrl_train.observability.readers.verdict import (
    END_SHARE,
    RECORD_SEGMENTS,
    finite_values,
    time_shares,
    verdict,
)
from skyrl_train.observability.run_folder import CONFIG, EVALUATIONS, read_jsonl

FIGURES = (
    "reward/mean", "reward/std", "reward/zero_variance_groups", "loss/entropy", "policy/grad_norm", "policy/kl_to_reference",
    "off_policy/ess", "off_policy/kl_k3", "policy/clip_fraction", "staleness/mean", "generate/response_tokens",
    "generate/response_tokens_p90", "generate/response_tokens_max", "generate/truncated", "time/step", "generate/latency_s_p50",
    "generate/latency_s_p99", "inference/tokens_per_second", "policy/tokens_per_second", "async/idle_fraction",
)  # fmt: skip
SAMPLED_FILES = 10  # in which samples are looked for
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
        verdict=verdict(row, columns, found),
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


# Figures -----------------------------------------------------------------------------------------------------------


def lag_shares(columns: Columns) -> dict[int, float]:
    """Return the share of the trained groups by lag."""
    prefix = "staleness/histogram/"
    groups = {
        int(name.removeprefix(prefix)): float(finite_values(columns, name).sum())
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
    values = finite_values(columns, name)
    if not len(values):
        return None
    ends = max(1, round(len(values) * END_SHARE))
    first, last = float(values[:ends].mean()), float(values[-ends:].mean())
    return Figure(name, first, last, float(values.min()), float(values.max()), values)


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
        return float(row[name]) if is_finite_number(row.get(name)) else missing

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

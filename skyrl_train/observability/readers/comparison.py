"""Runs side by side at an equal budget of steps, time or tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

EQUAL = {"step": "steps", "elapsed": "time", "tokens": "tokens"}  # names of the axes
AXES = {"step": "step", "elapsed": "elapsed_s", "tokens": "inference/generated_tokens_total"}
LAST_SHARE = 0.1  # of the budget, over which rewards are averaged
RESAMPLES = 1000
MIN_STEPS = 3  # of an interval

Columns = Mapping[str, NDArray[np.float64]]


def compared(runs: Sequence[Columns], axis: str) -> dict[str, Any]:
    """Compare runs at the largest budget that all of them have reached, except those without a step.

    Args:
        runs: the columns of each run's metrics, each of shape ``[rows]``.
        axis: "step", "elapsed" (seconds of training) or "tokens" (sampled).

    Returns:
        ``budget``, and per run ``reward`` (mean over the steps in the last tenth of the budget), ``low`` and ``high`` (its 95 %
        interval, from a bootstrap of blocks of steps), ``steps``, ``best``, and means over the steps within the budget.
    """
    name = AXES[axis]
    reached = [float(np.nanmax(run[name])) if name in run and np.isfinite(run[name]).any() else 0.0 for run in runs]
    budget = min((one for one in reached if one > 0), default=0.0)
    return {"budget": budget, "reached": reached, "runs": [_within(run, name, budget) for run in runs]}


def best_run(names: Sequence[str], at: Mapping[str, Any], axis: str) -> str:
    """Return in a few words which run has the highest reward, and whether the noise of steps explains the difference.

    Args:
        names: of the runs.
        at: what :func:`compared` returned of them along ``axis``.
    """
    runs = {
        name: run for name, run in zip(names, at["runs"], strict=True) if math.isfinite(run.get("reward", math.nan))
    }
    if len(runs) < 2:
        return f"At equal {EQUAL[axis]}, fewer than two runs have rewards."
    best = max(runs, key=lambda name: runs[name]["reward"])
    others = [name for name in runs if name != best]
    said = f"At equal {EQUAL[axis]}, {best} has the highest reward. "
    if any(math.isnan(run["low"]) for run in runs.values()):
        return (
            f"{said}This difference may be noise: an interval needs {MIN_STEPS} steps in the last tenth of the budget, which not "
            "every run has."
        )
    alike = [name for name in others if runs[name]["high"] >= runs[best]["low"]]
    if alike:
        return f"{said}Its interval overlaps the interval of {', '.join(alike)}, so this difference may be noise."
    return f"{said}Its whole interval is above the interval of {', '.join(others)}."


def _within(run: Columns, name: str, budget: float) -> dict[str, Any]:
    if name not in run or "reward/mean" not in run:
        return {}
    known = np.isfinite(run["reward/mean"])
    inside = known & (run[name] <= budget)
    rewards = run["reward/mean"][inside & (run[name] > budget * (1 - LAST_SHARE))]
    low, high = bootstrap_interval(rewards)

    def mean_of(metric: str) -> float:
        values = run[metric][inside] if metric in run else np.empty(0)
        values = values[np.isfinite(values)]
        return float(values.mean()) if len(values) else math.nan

    return {
        "reward": float(rewards.mean()) if len(rewards) else math.nan,
        "low": low,
        "high": high,
        "steps": int(inside.sum()),
        "best": float(run["reward/mean"][inside].max()) if inside.any() else math.nan,
        "step_s": mean_of("time/step"),
        "idle": mean_of("async/idle_fraction"),
        "lag": mean_of("staleness/mean"),
        "sampled_per_s": mean_of("inference/tokens_per_second"),
        "truncated": mean_of("generate/truncated"),
    }


def bootstrap_interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of consecutive values; NaN for fewer than :data:`MIN_STEPS`.

    Blocks of n^(1/3) consecutive values are drawn (the moving block bootstrap, Kuensch 1989), because neighbouring steps are
    alike.
    """
    count = len(values)
    if count < MIN_STEPS:
        return math.nan, math.nan
    block = math.ceil(count ** (1 / 3))
    starts = np.random.default_rng(0).integers(0, count - block + 1, (RESAMPLES, math.ceil(count / block)))
    drawn = values[(starts[..., None] + np.arange(block)).reshape(RESAMPLES, -1)[:, :count]]
    low, high = np.percentile(drawn.mean(axis=1), [2.5, 97.5])
    return float(low), float(high)

"""The verdict on a run: does it learn, what bounds its speed, what failed. The page and the report begin with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_train.observability.failures import sentence
from skyrl_train.observability.readers.comparison import Columns, bootstrap_interval
from skyrl_train.observability.screen import counted, duration

# Parts of a step's time. Where two overlap, the time counts for the first one.
COMPUTES, SYNCS, TURNS, WAITS = "training", "weight sync", "other turns", "waits for groups"
_TURNS = ("sleep", "wake_up", "offload_states", "reload_states")

END_SHARE = 0.1  # of the steps at either end that are averaged
FEW_STEPS = 6  # with fewer there is no trend
RECORD_SEGMENTS = 20  # of 4 MB each, the newest ones, in which failures are looked for


def verdict(row: Mapping[str, Any], columns: Columns, found: Mapping[str, Any] | None) -> tuple[str, str, str]:
    """Return a sentence or two for each of: does it learn, what bounds its speed, what failed.

    Args:
        row: of the run, see ``RunsFolder.row``.
        columns: the metrics, each of shape ``[rows]``.
        found: see :func:`~skyrl_train.observability.readers.incidents.incidents`; None: nothing is recorded.
    """
    return learning(columns), bottleneck(*time_shares(columns)), trouble(row, columns, found)


def learning(columns: Columns) -> str:
    """Return whether the reward rose: its means over the first and the last tenth of the steps are compared.

    The rewards are taken as different if their 95 % intervals, from a bootstrap of blocks of steps, do not overlap.
    """
    rewards = finite_values(columns, "reward/mean")
    if not len(rewards):
        return "No step with a reward has ended, so nothing can be said about learning."
    extremes = np.concatenate([finite_values(columns, "reward/min"), finite_values(columns, "reward/max")])
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
    if low_best > high_last and (low_last > high or low_best > high or high_last < low):
        peak = columns["step"][np.isfinite(columns["reward/mean"])][best + ends // 2]
        if low_last > high:
            judgement = "Learned, and lost some of it"
        else:
            judgement = "Got worse" if high_last < low else "Learned, and lost it again"
        return f"{judgement}: {change}; the best stretch, around step {peak:.0f}, had {means[best]:.3g}."
    if low_last > high:
        return f"Learned: {change}."
    return f"Got worse: {change}." if high_last < low else f"No clear change: {change}; the intervals overlap."


CLEAR = 0.6  # share of the time of a part that alone bounds the speed


def bottleneck(shares: Mapping[str, float], idle: float | None) -> str:
    """Return what bounds the speed, from :func:`time_shares`."""
    if not shares:
        return "No step has ended, so nothing can be said about speed."
    slots = "" if idle is None else f" Generation slots are idle {idle:.0%} of the time."
    largest, second = sorted(shares, key=lambda part: -shares[part])[:2]
    if shares[largest] < CLEAR and shares[second] > CLEAR / 2:
        parts = [
            f"the trainer waits for groups {shares[part]:.0%}" if part == WAITS else f"{part} takes {shares[part]:.0%}"
            for part in (largest, second)
        ]
        return f"No single bottleneck: {parts[0]}, {parts[1]} of the time.{slots}"
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
        (
            float(finite_values(columns, "policy/skipped_nonfinite").sum()),
            "update was not finite",
            "updates were not finite",
        ),
    ]
    failed = [counted(int(count), one, many) for count, one, many in counts if count > 0]
    said = f"{', '.join(failed)}." if failed else "Nothing failed."
    if reasons:
        most = max(reasons, key=lambda each: each["count"])
        said += f" Most often: {sentence(most['reason'])}"
    return f"{state} {said}".lstrip()


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
    sync, evaluates = spent("gather"), spent("wait_for_evaluation")
    if "time/wait_for_weight_sync" in columns:
        # Training waits for the evaluation on the engines first: the sync begins when it has ended.
        evaluates = np.minimum(evaluates, spent("wait_for_weight_sync"))
        sync += spent("wait_for_weight_sync") - evaluates
    else:
        sync += spent("transfer") + spent("pause")
    turns = sum(map(spent, _TURNS)) + evaluates
    parts = {COMPUTES: spent("train"), SYNCS: sync, TURNS: turns, WAITS: spent("wait_for_batch")}
    left, shares = steps.copy(), {}
    for part, seconds in parts.items():
        taken = np.clip(seconds, 0.0, left)
        left = left - taken
        shares[part] = float(taken[known].sum() / steps[known].sum())
    idle = columns.get("async/idle_fraction", np.full(len(steps), np.nan))
    known &= np.isfinite(idle)
    return shares, float(np.average(idle[known], weights=steps[known])) if known.any() else None


def finite_values(columns: Columns, name: str) -> NDArray[np.float64]:
    """Return the finite values of a metric in their order; none if the run lacks it."""
    values = columns.get(name, np.empty(0))
    return np.asarray(values[np.isfinite(values)])


def _last(columns: Columns, name: str) -> float:
    values = finite_values(columns, name)
    return float(values[-1]) if len(values) else math.nan

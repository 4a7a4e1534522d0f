"""The metrics of one step, from its groups and the state of the pipeline (SEMANTICS 8). Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from skyrl_train.observability.metrics import Metrics, histogram
from skyrl_train.rollout.counts import RolloutCounts
from skyrl_train.rollout.group import RolloutGroup


def step_metrics(
    step: int,
    batch: Sequence[RolloutGroup],
    parts: Mapping[str, float],
    *,
    counts: RolloutCounts,
    totals: Mapping[str, float],
    max_staleness_steps: int,
    step_s: float,
    idle_fraction: float,
    generated_tokens: int,
) -> dict[str, float]:
    """Everything that ``metrics.jsonl`` has about a step.

    Args:
        parts: what the phases of the step reported.
        totals: further counts, by metric name.
        step_s: seconds since the end of the previous step.
        idle_fraction: of the generation slots during the step.
        generated_tokens: sampled during the step, in requests that have ended.
    """
    metrics = Metrics()
    metrics.record_all(parts)
    for group in batch:
        metrics.record_all(group.metrics)
    metrics.record_all(_reward_metrics(batch))
    metrics.record_all(_lag_metrics(step, batch, max_staleness_steps))
    metrics.record_all(
        {
            "async/submitted": counts.submitted,
            "async/in_flight": counts.running,
            "async/buffered": counts.buffered,
            "async/trained": counts.trained,
            "async/failed": counts.failed,
            "async/filtered": counts.filtered,
            "async/dropped": counts.dropped,
            **totals,
            "async/idle_fraction": idle_fraction,
            "time/step": step_s,
            "time/wait_for_policy": idle_fraction * step_s,
            "inference/generated_tokens": generated_tokens,
            "inference/tokens_per_second": generated_tokens / step_s if step_s > 0 else 0.0,
            "policy/tokens_per_second": parts.get("policy/tokens", 0.0) / step_s if step_s > 0 else 0.0,
        }
    )
    return metrics.flush()


def _reward_metrics(batch: Sequence[RolloutGroup]) -> dict[str, float]:
    # A group that failed has samples of nothing, which are worth nothing and say nothing about the policy.
    returns = [[sample.reward for sample in group.samples if sample.sequences] for group in batch]
    returns = [group for group in returns if group]
    if not returns:
        return {}
    flat = [value for group in returns for value in group]
    return {
        "reward/mean": statistics.fmean(flat),
        "reward/max": max(flat),
        "reward/min": min(flat),
        "reward/zero_variance_groups": statistics.fmean(len(set(group)) == 1 for group in returns),
    }


def _lag_metrics(step: int, batch: Sequence[RolloutGroup], max_staleness_steps: int) -> dict[str, float]:
    lags = [group.lag(step) for group in batch]
    in_flight = [group.newest_version - group.oldest_version for group in batch]
    in_queue = [(step - 1) - group.newest_version for group in batch]
    return {
        "async/lag_mean": statistics.fmean(lags),
        "async/lag_max": max(lags),
        "async/lag_in_flight_mean": statistics.fmean(in_flight),
        "async/lag_in_queue_mean": statistics.fmean(in_queue),
        "async/over_bound": sum(lag > max_staleness_steps for lag in lags),
        **histogram("async/lag_histogram", lags),
        **histogram("async/lag_in_flight_histogram", in_flight),
        **histogram("async/lag_in_queue_histogram", in_queue),
    }

"""The report of a finished step: its metrics, its samples, and the prompts that left without being trained."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.interface import StopReason
from skyrl_train.observability.gpus import TrainingFlops
from skyrl_train.observability.metrics import Metrics, histogram, quantiles
from skyrl_train.observability.reporter import Reporter
from skyrl_train.observability.samples import RecordedGroup
from skyrl_train.rollout.manager import RolloutManager
from skyrl_train.rollout.staleness.manager import RolloutCounts
from skyrl_train.runtime.process import resident_bytes
from skyrl_train.sample_recorder import engine_gap
from skyrl_train.types import RolloutGroup


@dataclass(frozen=True)
class TrainedStep:
    """A finished optimizer step: its groups in training order, the metrics of its phases, and the groups to record."""

    batch: Sequence[RolloutGroup]
    metrics: dict[str, float]
    samples: Sequence[RecordedGroup] = ()


class StepReports:
    """Writes each step to the reporter. Totals over the run are reported as the difference to the previous step.

    Args:
        flops: of the training passes; None: unknown, or training is on no GPU.

    Attributes:
        untrained_reported: number of prompts in the reports so far, by outcome; part of a checkpoint.
        totals: sums over all reported steps of the run: tokens by metric, and ``elapsed_s``; part of a checkpoint.
    """

    def __init__(
        self,
        reporter: Reporter,
        client: InferenceEngineClient,
        rollout: RolloutManager,
        clock: Callable[[], float],
        flops: TrainingFlops | None = None,
    ) -> None:
        self._reporter = reporter
        self._client = client
        self._rollout = rollout
        self._clock = clock
        self._flops = flops
        self._observed: dict[str, list[float]] = {}
        self._step_ended_s = clock()
        self._computed_s, self._measured_s = time.thread_time(), time.perf_counter()  # real time, also in a simulation
        self._tokens_reported = 0
        self.untrained_reported: dict[str, int] = {}
        self.totals = {"inference/generated_tokens_total": 0.0, "policy/tokens_total": 0.0, "elapsed_s": 0.0}

    def begin(self) -> None:
        """Start the clock of the first step, so that start-up counts neither as step time nor as idle time."""
        self._step_ended_s = self._clock()
        self._take_busy_share()
        self._rollout.dispatcher.slots.take_idle_fraction()

    def _take_busy_share(self) -> float:
        """Return the share of the time since the previous call in which the calling thread, the control loop's, computed."""
        computed_s, now_s = time.thread_time(), time.perf_counter()
        share = (computed_s - self._computed_s) / (now_s - self._measured_s)
        self._computed_s, self._measured_s = computed_s, now_s
        return share

    def observe(self, values: Mapping[str, float]) -> None:
        """Take figures of this moment. A step has the means of those since the step before, or else the newest ones."""
        for name, value in values.items():
            self._observed.setdefault(name, []).append(value)

    def write(self, step: int, trained: TrainedStep, *, checkpoint_step: int | None) -> None:
        """Write the step's metrics and samples and refresh the screen.

        Args:
            checkpoint_step: step of the newest checkpoint on disk.
        """
        rollout, ledger = self._rollout, self._rollout.prompts.ledger
        trained.metrics.update(rollout.stages.take_metrics())
        trained.metrics.update(rollout.group_generator.take_metrics())
        trained.metrics.update(engine_gap(step, trained.samples))
        if self._flops is not None and trained.metrics.get("time/train", 0.0) > 0:
            sequences = [each for group in trained.batch for sample in group.samples for each in sample.sequences]
            lengths = [len(each.token_array) for each in sequences]
            trained.metrics["perf/mfu"] = self._flops.utilization(lengths, trained.metrics["time/train"])
        if running := rollout.staleness.view().running:
            trained.metrics["staleness/oldest_in_flight"] = float(step - min(running))
        now, tokens = self._clock(), self._client.generated_tokens
        totals = self.totals
        totals["elapsed_s"] += now - self._step_ended_s
        totals["inference/generated_tokens_total"] += tokens - self._tokens_reported
        totals["policy/tokens_total"] += trained.metrics.get("policy/tokens", 0.0)
        metrics = step_metrics(
            step,
            trained.batch,
            trained.metrics,
            counts=rollout.staleness.counts,
            totals={
                "async/generate_ahead_steps": rollout.staleness.ahead,
                "async/failed_and_masked": rollout.dispatcher.failed_and_masked,
                "async/engine_failures": rollout.group_generator.engine_failures,
                "async/retries": rollout.group_generator.retries,
                "inference/engine_restarts": self._client.engine_restarts,
                **self._client.replay_cache.metrics(),
                **{name: total for name, total in totals.items() if name != "elapsed_s"},
                "system/control_busy": self._take_busy_share(),
                "system/rss_bytes": resident_bytes(),
                **{name: statistics.fmean(values) for name, values in self._observed.items()},
            },
            max_staleness_steps=rollout.staleness.max_staleness_steps,
            step_s=now - self._step_ended_s,
            idle_fraction=rollout.dispatcher.slots.take_idle_fraction(),
            generated_tokens=tokens - self._tokens_reported,
        )
        self._step_ended_s, self._tokens_reported = now, tokens
        self._observed = {name: values[-1:] for name, values in self._observed.items()}

        # The ledger lists are never cleared; report the part that is new since the previous step.
        lists = {"failed": ledger.failed, "filtered": ledger.filtered, "dropped": ledger.dropped}
        untrained = {name: indices[self.untrained_reported.get(name, 0) :] for name, indices in lists.items()}
        self.untrained_reported = {name: len(indices) for name, indices in lists.items()}
        self._reporter.step(
            step,
            trained.batch,
            metrics,
            elapsed_s=totals["elapsed_s"],
            samples=trained.samples,
            decode=functools.partial(self._client.decode, special_tokens=True),
            untrained=untrained,
            checkpoint_step=checkpoint_step,
        )


def step_metrics(
    step: int,
    batch: Sequence[RolloutGroup],
    phases: Mapping[str, float],
    *,
    counts: RolloutCounts,
    totals: Mapping[str, float],
    max_staleness_steps: int,
    step_s: float,
    idle_fraction: float,
    generated_tokens: int,
) -> dict[str, float]:
    """Compute all metrics of one step. Pure.

    Args:
        phases: metrics that the phases of the step returned.
        totals: further numbers by metric name.
        step_s: seconds since the end of the previous step.
        idle_fraction: of the generation slots during the step, in [0, 1].
        generated_tokens: tokens sampled during the step, in requests that have ended.

    Raises:
        ConfigError: a metric is not declared.
    """
    # A phase records a metric once, groups record it once each; its declared aggregation makes one number of them.
    metrics = Metrics()
    metrics.record_all(phases)
    for group in batch:
        metrics.record_all(group.metrics)

    # Samples without sequences belong to failed groups: they have no reward and say nothing about the policy.
    returns = [[sample.reward for sample in group.samples if sample.sequences] for group in batch]
    returns = [group for group in returns if group]
    if returns:
        flat = [value for group in returns for value in group]
        samples = [sample for group in batch for sample in group.samples if sample.sequences]
        lengths = [len(sample.sampled_versions) for sample in samples]
        # Generators of this library report it, others need not.
        if not any("generate/response_tokens" in group.metrics for group in batch):
            metrics.record("generate/response_tokens", statistics.fmean(lengths))
        metrics.record_all(
            {
                "reward/mean": statistics.fmean(flat),
                "reward/std": statistics.pstdev(flat),
                **quantiles("reward/p", flat, 10, 50, 90),
                "reward/max": max(flat),
                "reward/min": min(flat),
                "reward/zero_variance_groups": statistics.fmean(len(set(group)) == 1 for group in returns),
                **quantiles("generate/response_tokens_p", lengths, 50, 90),
                "generate/response_tokens_max": max(lengths),
                "generate/truncated": statistics.fmean(
                    sample.sequences[-1].stop_reason == StopReason.LENGTH for sample in samples
                ),
            }
        )

    # Lag = in flight (from the oldest to the newest token) + in queue (from the newest token to this step).
    lags = [group.lag(step) for group in batch]
    in_flight = [group.newest_version - group.oldest_version for group in batch]
    in_queue = [(step - 1) - group.newest_version for group in batch]
    metrics.record_all(
        {
            "staleness/mean": statistics.fmean(lags),
            "staleness/max": max(lags),
            "staleness/in_flight_mean": statistics.fmean(in_flight),
            "staleness/in_queue_mean": statistics.fmean(in_queue),
            "staleness/exceeded": sum(lag > max_staleness_steps for lag in lags),
            **histogram("staleness/histogram", lags),
            **histogram("staleness/in_flight_histogram", in_flight),
            **histogram("staleness/in_queue_histogram", in_queue),
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
            "time/generation_idle": idle_fraction * step_s,
            "inference/generated_tokens": generated_tokens,
            "inference/tokens_per_second": generated_tokens / step_s if step_s > 0 else 0.0,
            "policy/tokens_per_second": phases.get("policy/tokens", 0.0) / step_s if step_s > 0 else 0.0,
        }
    )
    return metrics.flush()

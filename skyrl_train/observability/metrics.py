"""Names, meanings and aggregation of all metrics, and their collection during a step.

    record(name, value) many times a step ──Metrics──> flush(): one number per name

The aggregation of a metric is declared once, here or with :func:`declare`, and never guessed from its name.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeGuard

import numpy as np

from skyrl_train.config.keys import did_you_mean
from skyrl_train.errors import ConfigError


class Aggregation(StrEnum):
    """How several recorded numbers become one."""

    mean = "mean"
    sum = "sum"
    max = "max"
    min = "min"
    last = "last"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric, or with a name that ends in ``/`` all metrics below it without a more specific declaration."""

    name: str
    aggregation: Aggregation
    meaning: str  # one sentence without its full stop
    unit: str = ""  # empty: a number without a unit. share: in [0, 1]


_MEAN, _SUM, _MAX, _MIN, _LAST = Aggregation
_specs: dict[str, MetricSpec] = {}


def declare(*specs: MetricSpec) -> None:
    """Declare metrics. Repeating a declaration has no effect.

    Raises:
        ConfigError: the name is declared with another aggregation.
    """
    for spec in specs:
        known = _specs.setdefault(spec.name, spec)
        if known.aggregation is not spec.aggregation:
            raise ConfigError(
                f"Metric {spec.name!r} is declared as {known.aggregation} and again as {spec.aggregation}; rename one."
            )


def spec_of(name: str) -> MetricSpec:
    """Return the specification of a metric, or of its longest declared prefix.

    Raises:
        ConfigError: neither is declared; the message says how to declare it.
    """
    # The longest prefix wins: a/b/c, then a/b/, then a/.
    candidate = name
    while candidate:
        if candidate in _specs:
            return _specs[candidate]
        candidate = candidate.rstrip("/")
        candidate = candidate[: candidate.rfind("/") + 1]
    raise ConfigError(
        f"Metric {name!r} is not declared.{did_you_mean(name, _specs)} Declare it once: "
        f"declare(MetricSpec({name!r}, Aggregation.mean, 'what it means'))."
    )


def known_spec(name: str) -> MetricSpec:
    """Return the specification of a recorded metric, which another version or a user's code may have declared.

    If it is not declared here, the specification has neither meaning nor unit.
    """
    try:
        return spec_of(name)
    except ConfigError:
        return MetricSpec(name, _LAST, "")


def declared() -> Mapping[str, MetricSpec]:
    """Return all specifications in the order of their declaration, which is the order of the reference and of each row."""
    return dict(_specs)


class Metrics:
    """Collects metric values during one step."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def record(self, name: str, value: float) -> None:
        """Add one observation.

        Raises:
            ConfigError: the metric is not declared.
        """
        # Checked when it is first recorded: the error then names the code that records it.
        if name not in self._values:
            spec_of(name)
        self._values.setdefault(name, []).append(float(value))

    def record_all(self, values: Mapping[str, float]) -> None:
        """Add one observation of each metric in ``values``.

        Raises:
            ConfigError: a metric is not declared.
        """
        for name, value in values.items():
            self.record(name, value)

    def flush(self) -> dict[str, float]:
        """Return one number per metric in the order of the declarations, and forget the observations."""
        collected, self._values = self._values, {}
        rank = {name: number for number, name in enumerate(_specs)}
        # What a person looks at first is declared first; a tracker or a table may keep this order.
        ordered = sorted(collected, key=lambda name: (rank[spec_of(name).name], name))
        return {name: _aggregate(spec_of(name).aggregation, collected[name]) for name in ordered}


def _aggregate(aggregation: Aggregation, values: list[float]) -> float:
    if aggregation is Aggregation.last:
        return values[-1]
    if aggregation is Aggregation.max:
        return max(values)
    if aggregation is Aggregation.min:
        return min(values)
    total = math.fsum(values) if all(map(math.isfinite, values)) else sum(values)  # fsum rejects infinities
    return total / len(values) if aggregation is Aggregation.mean else total


class SlotTimeIntegral:
    """Integrates busy and available slots over time.

    ``idle fraction = 1 - busy slot-seconds / available slot-seconds``. Busy slots beyond the capacity (after it was reduced)
    do not count, so the fraction stays in [0, 1].

    Args:
        clock: in seconds.
    """

    def __init__(self, capacity: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._capacity = capacity
        self._busy = 0
        self._since = clock()
        self._busy_slot_s = 0.0
        self._available_slot_s = 0.0

    def set_busy(self, busy: int) -> None:
        """Set the number of busy slots from now on."""
        self._advance()
        self._busy = busy

    def set_capacity(self, capacity: int) -> None:
        """Set the number of slots from now on."""
        self._advance()
        self._capacity = capacity

    def take_idle_fraction(self) -> float:
        """Return the idle fraction since the last call, in [0, 1]; 0 if no slot-time has passed."""
        self._advance()
        busy, available = self._busy_slot_s, self._available_slot_s
        self._busy_slot_s = self._available_slot_s = 0.0
        return 1.0 - busy / available if available > 0 else 0.0

    def _advance(self) -> None:
        now = self._clock()
        elapsed, self._since = max(0.0, now - self._since), now
        # Both sums grow by products with the same factor, so rounding cannot make the first exceed the second.
        self._busy_slot_s += elapsed * min(self._busy, self._capacity)
        self._available_slot_s += elapsed * self._capacity


def histogram(prefix: str, values: Iterable[int]) -> dict[str, float]:
    """Return counts of small integers as metrics ``<prefix>/<value>``. Declare the prefix with the aggregation sum."""
    counts: dict[str, float] = {}
    for value in sorted(values):
        name = f"{prefix}/{value}"
        counts[name] = counts.get(name, 0.0) + 1.0
    return counts


def quantiles(prefix: str, values: Sequence[float], *percents: int) -> dict[str, float]:
    """Return percentiles of ``values`` (at least one), interpolated linearly, as metrics ``<prefix><percent>``."""
    found = np.percentile(values, percents).tolist()
    return {f"{prefix}{percent}": value for percent, value in zip(percents, found, strict=True)}


def is_finite_number(value: Any) -> TypeGuard[float]:
    """Return whether a value of a foreign row is a number that is finite as a float; an integer may have hundreds of digits."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max  # false for NaN


# Metrics that answer "does it learn, is it sane" come first, counts that are 0 in most runs last.
# `python docs/generate.py` writes the reference (docs/reference/metrics.md) from these declarations.
declare(
    # Learning
    MetricSpec("reward/", _MEAN, "Returns of the step's trajectories (the sum of all rewards of a trajectory)"),
    MetricSpec("reward/mean", _MEAN, "Mean over the samples of the step"),
    MetricSpec("reward/std", _MEAN, "Standard deviation over the samples of the step (of the population)"),
    MetricSpec("reward/p10", _MEAN, "10th percentile over the samples of the step, interpolated linearly"),
    MetricSpec("reward/p50", _MEAN, "Median over the samples of the step"),
    MetricSpec("reward/p90", _MEAN, "90th percentile over the samples of the step"),
    MetricSpec("reward/min", _MIN, "The worst trajectory"),
    MetricSpec("reward/max", _MAX, "The best trajectory"),
    MetricSpec(
        "reward/zero_variance_groups",
        _MEAN,
        "Groups whose samples all have the same return; they teach nothing",
        "share",
    ),
    MetricSpec("environment/", _MEAN, "The environments' and agents' own metrics, averaged over the trajectories"),
    MetricSpec(
        "eval/",
        _LAST,
        "Evaluations of one policy version, in `eval.jsonl` and in trackers, under the step after which it was synced. "
        "`eval/pass@<k>` and `eval/avg@<k>` have k = 1, 2, 4, ... and the number of samples; `eval/<data source>/...` are the "
        "same over the prompts of one source",
    ),
    MetricSpec("eval/reward", _LAST, "Mean return of the samples that ended"),
    MetricSpec("eval/response_tokens", _LAST, "Mean length of a response, sampled tokens only", "tokens"),
    MetricSpec("eval/truncated", _LAST, "Samples that a length limit ended", "share"),
    MetricSpec("eval/prompts", _LAST, "Evaluated prompts", "prompts"),
    MetricSpec("eval/failed", _LAST, "Samples that failed twice; they count as not passed", "samples"),
    MetricSpec("eval/seconds", _LAST, "Duration of the evaluation", "s"),
    MetricSpec("loss/", _MEAN, "Losses, reduced over tokens as `trainer.algorithm.loss_reduction` says"),
    MetricSpec("loss/policy", _MEAN, "The policy loss with its off-policy weights, without KL term and entropy bonus"),
    MetricSpec("loss/entropy", _MEAN, "Entropy of the policy's distribution over the vocabulary", "nats"),
    MetricSpec("loss/value", _MEAN, "The critic's loss"),
    MetricSpec("policy/", _MEAN, "The policy and its update"),
    MetricSpec("policy/grad_norm", _MEAN, "Norm of the gradient before clipping"),
    MetricSpec(
        "policy/kl_to_reference", _MEAN, "KL(policy || reference) of the loss's KL term, mean over tokens", "nats"
    ),
    MetricSpec(
        "policy/behaviour_kl_to_reference", _MEAN, "KL(behaviour policy || reference), mean over sampled tokens", "nats"
    ),
    MetricSpec("policy/kl_factor", _MEAN, "Factor of both KL coefficients in this step"),
    MetricSpec("policy/ratio_mean", _MEAN, "Mean ratio of current to proximal probability of a trained token"),
    MetricSpec("policy/clip_fraction", _MEAN, "Trained tokens whose ratio the loss clips", "share"),
    MetricSpec("policy/lr", _LAST, "Learning rate"),
    MetricSpec("policy/lr/", _LAST, "Learning rate of the parameters that a pattern of `lr_multipliers` matches"),
    MetricSpec("policy/tokens", _SUM, "Trained tokens; masked ones are left out", "tokens"),
    MetricSpec("policy/tokens_per_second", _LAST, "Trained tokens by the duration of the step", "tokens/s"),
    MetricSpec("policy/tokens_total", _LAST, "Trained tokens since training began", "tokens"),
    MetricSpec("policy/micro_batches", _MEAN, "Forward and backward passes of an update, on the first rank", "passes"),
    MetricSpec(
        "policy/micro_batch_fill",
        _MEAN,
        "Tokens in these passes by those with room: `trainer.micro_batch_tokens` each, or, without `trainer.packing`, rows x "
        "longest sequence",
        "share",
    ),
    MetricSpec(
        "policy/distinct_shapes",
        _MEAN,
        "Different numbers of rows and tokens among these passes; compiled or planned kernels prepare for each once",
        "shapes",
    ),
    MetricSpec(
        "policy/skipped_nonfinite", _SUM, "Updates skipped because the loss or a gradient was not finite", "updates"
    ),
    MetricSpec("critic/", _MEAN, "The critic and its update"),
    MetricSpec("critic/explained_variance", _MEAN, "1 - Var(return - value) / Var(return), over trained tokens"),
    MetricSpec("critic/value_mean", _MEAN, "Mean value of a trained token's state"),
    MetricSpec("critic/return_mean", _MEAN, "Mean target of the value"),
    MetricSpec("critic/clip_fraction", _MEAN, "Trained tokens whose value the loss clips", "share"),
    MetricSpec("critic/grad_norm", _MEAN, "Norm of the gradient before clipping"),
    MetricSpec("critic/lr", _LAST, "Learning rate"),
    MetricSpec("critic/micro_batches", _MEAN, "As `policy/micro_batches`", "passes"),
    MetricSpec("critic/micro_batch_fill", _MEAN, "As `policy/micro_batch_fill`", "share"),
    MetricSpec("critic/distinct_shapes", _MEAN, "As `policy/distinct_shapes`", "shapes"),
    MetricSpec(
        "critic/skipped_nonfinite", _SUM, "Updates skipped because the loss or a gradient was not finite", "updates"
    ),
    MetricSpec("generate/", _MEAN, "The trajectories of the step"),
    MetricSpec("generate/response_tokens", _MEAN, "Sampled tokens of a trajectory", "tokens"),
    MetricSpec("generate/response_tokens_p50", _MEAN, "Median of the same", "tokens"),
    MetricSpec("generate/response_tokens_p90", _MEAN, "90th percentile of the same", "tokens"),
    MetricSpec("generate/response_tokens_max", _MAX, "The longest trajectory", "tokens"),
    MetricSpec("generate/truncated", _MEAN, "Trajectories that a length limit ended", "share"),
    MetricSpec("generate/turns", _MEAN, "Turns of a trajectory", "turns"),
    MetricSpec(
        "generate/latency_s_p50",
        _LAST,
        "Median time from a group's admission to the end of its stages, over groups that finished since the previous step",
        "s",
    ),
    MetricSpec("generate/latency_s_p99", _LAST, "99th percentile of the same", "s"),
    MetricSpec("generate/latency_s_oldest", _LAST, "Age of the oldest attempt at a group that still runs", "s"),
    MetricSpec(
        "generate/unfinished_episodes",
        _MEAN,
        "Episodes that generator.max_turns or the context ended before their environment was done",
        "share",
    ),
    MetricSpec("generate/postprocessed_actions", _MEAN, "Turns whose text the environment changed", "turns"),
    MetricSpec("generate/agent_seconds", _MEAN, "Duration of an agent's run", "s"),
    MetricSpec("generate/failed_agents", _MEAN, "Agents that failed and train all the same", "share"),
    MetricSpec("generate/branches", _MEAN, "Token sequences of a session; more than 1: its history was rewritten"),
    MetricSpec(
        "generate/drifted_turns",
        _MEAN,
        "Turns whose request had earlier responses, but not with their sampled tokens",
        "turns",
    ),
    MetricSpec(
        "generate/drifted_tokens", _MEAN, "Reused tokens that a fresh rendering would tokenize differently", "tokens"
    ),
    MetricSpec(
        "generate/overridden_requests", _MEAN, "Requests whose sampling parameters the run replaced", "requests"
    ),
    # The mismatch between the policies
    MetricSpec(
        "staleness/", _MEAN, "Policy versions between a group's oldest token and the policy that trains on it (the lag)"
    ),
    MetricSpec("staleness/mean", _MEAN, "Lag of a group", "steps"),
    MetricSpec("staleness/max", _MAX, "Lag of the stalest group", "steps"),
    MetricSpec("staleness/in_flight_mean", _MEAN, "Lag gained while the group was generated", "steps"),
    MetricSpec("staleness/in_queue_mean", _MEAN, "Lag gained while the group waited to be trained", "steps"),
    MetricSpec(
        "staleness/exceeded",
        _SUM,
        "Groups whose lag exceeds the bound (under `mask`, their older tokens are not trained)",
        "groups",
    ),
    MetricSpec(
        "staleness/oldest_in_flight",
        _LAST,
        "Lag that the oldest group in generation would have in the next step; missing if none is in generation",
        "steps",
    ),
    MetricSpec("staleness/histogram/", _SUM, "Groups by lag", "groups"),
    MetricSpec("staleness/in_flight_histogram/", _SUM, "Groups by the lag gained while generating", "groups"),
    MetricSpec("staleness/in_queue_histogram/", _SUM, "Groups by the lag gained while waiting", "groups"),
    MetricSpec(
        "off_policy/",
        _MEAN,
        "Importance weights r of proximal over behaviour policy, over trained tokens before truncation and rejection",
    ),
    MetricSpec("off_policy/ratio_mean", _MEAN, "Mean of r; near 1 where engines and trainer agree"),
    MetricSpec("off_policy/ratio_max", _MAX, "The largest r"),
    MetricSpec("off_policy/ess", _MEAN, "Effective sample size (sum r)^2 / (N sum r^2)", "share"),
    MetricSpec("off_policy/clipped_fraction", _MEAN, "Tokens whose weight is truncated", "share"),
    MetricSpec("off_policy/chi2", _MEAN, "Mean r^2 - 1, an estimate of the chi-square divergence"),
    MetricSpec("off_policy/kl_k1", _MEAN, "Estimate k1 of KL(behaviour || proximal)", "nats"),
    MetricSpec("off_policy/kl_k3", _MEAN, "Estimate k3 of KL(behaviour || proximal)", "nats"),
    MetricSpec(
        "off_policy/engine_gap",
        _LAST,
        "Mean absolute difference between the trainer's and the engines' log-probs, over recorded groups that were generated "
        "with the weights of this step alone (lag 0, from the first token on); missing if there are none",
        "nats",
    ),
    MetricSpec("off_policy/rejected_tokens/", _SUM, "Tokens rejected by each rule, and by `any`", "tokens"),
    MetricSpec("off_policy/rejected_sequences/", _SUM, "Sequences rejected by each rule, and by `any`", "sequences"),
    # Speed
    MetricSpec("time/", _SUM, "The parts of a step's time; with overlap they add up to more than the step", "s"),
    MetricSpec("time/step", _SUM, "From the end of the previous step to the end of this one", "s"),
    MetricSpec("time/train", _SUM, "The backend's update: forward and backward passes and the optimizer", "s"),
    MetricSpec(
        "time/prepare_update",
        _SUM,
        "Beside the backend's update: the minibatch is built, unless it is ready, and threads wait for each other",
        "s",
    ),
    MetricSpec("time/wait_for_batch", _SUM, "Training waits for groups", "s"),
    MetricSpec(
        "time/generation_idle",
        _SUM,
        "Generation has free slots, but waits for the next policy; weighted by free slots",
        "s",
    ),
    MetricSpec("time/gather", _SUM, "The weights are copied for the engines", "s"),
    MetricSpec("time/transfer", _SUM, "The copy travels to the engines", "s"),
    MetricSpec("time/pause", _SUM, "Engines are paused for new weights", "s"),
    MetricSpec(
        "time/wait_for_weight_sync",
        _SUM,
        "Training waits for the previous weight sync, and first for the evaluation before it",
        "s",
    ),
    MetricSpec("time/wait_for_evaluation", _SUM, "A weight sync waits for an evaluation", "s"),
    MetricSpec("time/sleep", _SUM, "Colocated engines give their memory to the trainer", "s"),
    MetricSpec("time/wake_up", _SUM, "Colocated engines take their memory again", "s"),
    MetricSpec("time/offload_states", _SUM, "The training state leaves the shared devices", "s"),
    MetricSpec("time/reload_states", _SUM, "The training state returns to the shared devices", "s"),
    MetricSpec("inference/", _MEAN, "The inference engines"),
    MetricSpec("inference/tokens_per_second", _LAST, "Sampled tokens by the duration of the step", "tokens/s"),
    MetricSpec(
        "inference/generated_tokens", _SUM, "Tokens sampled during the step, in requests that have ended", "tokens"
    ),
    MetricSpec(
        "inference/generated_tokens_total",
        _LAST,
        "Tokens sampled since training began, in requests that have ended",
        "tokens",
    ),
    MetricSpec(
        "inference/running_requests",
        _LAST,
        "Requests that the engines sample at once, all engines together: mean of a look per second during the step",
        "requests",
    ),
    MetricSpec(
        "inference/waiting_requests", _LAST, "Requests that wait in the engines for a free place: likewise", "requests"
    ),
    MetricSpec(
        "inference/kv_cache_usage",
        _LAST,
        "Share of the KV cache that requests hold, of the fullest engine: likewise. Missing for caches without a fixed size",
        "share",
    ),
    MetricSpec(
        "inference/busy_share",
        _LAST,
        "Share of their time in which the engines that answer have requests and are neither paused nor asleep: likewise",
        "share",
    ),
    MetricSpec("inference/down_share", _LAST, "Share of the engines that do not answer: likewise", "share"),
    MetricSpec(
        "inference/engine_restarts", _LAST, "Restarts of engines that had died, since the process began", "restarts"
    ),
    MetricSpec("weight_sync/", _LAST, "The last weight sync"),
    MetricSpec("weight_sync/changed_fraction", _LAST, "Bytes of the weights that changed", "share"),
    MetricSpec("perf/", _LAST, "The use of the hardware"),
    MetricSpec(
        "perf/mfu",
        _LAST,
        "Model FLOPs utilization: FLOPs of the policy's forward and backward passes over the step's sequences, without "
        "recomputation, by what the training GPUs can do in bfloat16 during `time/train`. Missing on CPUs, for mixtures of "
        "experts, and for GPUs that are not listed in `config/hardware.py`",
        "share",
    ),
    MetricSpec("system/", _LAST, "The machine of the control process"),
    MetricSpec(
        "system/gpu_utilization",
        _LAST,
        "Share of the time in which a kernel ran, mean of its GPUs, by nvidia-smi; a look every ten seconds",
        "share",
    ),
    MetricSpec("system/gpu_memory_bytes", _LAST, "Used memory of its fullest GPU", "bytes"),
    MetricSpec("system/gpu_memory_share", _LAST, "The same by the GPU's memory", "share"),
    MetricSpec(
        "system/control_busy",
        _LAST,
        "Share of the step's time in which the event loop of the control process computed: admission, environments that do "
        "not block, chat templates, messages to engines. Near 1, everything waits for it",
        "share",
    ),
    MetricSpec("system/rss_bytes", _LAST, "Resident memory of the control process as the step ends", "bytes"),
    MetricSpec("system/checkpoint_bytes", _LAST, "Size of the last checkpoint that this process wrote", "bytes"),
    MetricSpec("system/disk_free_bytes", _LAST, "Free space where it was written, just afterwards", "bytes"),
    # The pipeline
    MetricSpec(
        "stages/",
        _LAST,
        "Each stage between generation and buffer, as `stages/<stage>/...`: `queue_length` (groups that wait as the step ends), "
        "`busy_share` of its slots, `groups` that left it and `seconds_per_group` since the previous step",
    ),
    MetricSpec("async/", _MEAN, "The asynchronous pipeline: its state as the step ends, and totals of the run"),
    MetricSpec(
        "async/idle_fraction", _LAST, "Share of the generation slots' time that was idle during the step", "share"
    ),
    MetricSpec(
        "async/generate_ahead_steps", _LAST, "D, how far generation may run ahead until the next weight sync", "steps"
    ),
    MetricSpec("async/in_flight", _LAST, "Groups in generation", "groups"),
    MetricSpec("async/buffered", _LAST, "Finished groups that wait to be trained", "groups"),
    MetricSpec("async/submitted", _LAST, "Groups admitted since training began", "groups"),
    MetricSpec("async/trained", _LAST, "Groups trained since training began", "groups"),
    MetricSpec("async/failed", _LAST, "Groups failed for good since training began", "groups"),
    MetricSpec("async/retries", _LAST, "Attempts beyond the first of each group since training began", "attempts"),
    MetricSpec("async/filtered", _LAST, "Groups filtered since training began", "groups"),
    MetricSpec("async/dropped", _LAST, "Groups that the staleness policy dropped since training began", "groups"),
    MetricSpec(
        "async/failed_and_masked", _LAST, "Groups that failed and train without samples since training began", "groups"
    ),
    MetricSpec("async/engine_failures", _LAST, "Groups that lost all their engines since the process began", "groups"),
    MetricSpec("async/replayed_tokens", _LAST, "Recorded tokens that were replayed since the process began", "tokens"),
    MetricSpec(
        "async/replay_mismatches", _LAST, "Replayed sessions whose requests differed from the recorded ones", "sessions"
    ),
    MetricSpec(
        "async/replay_discarded_tokens", _LAST, "Recorded tokens that were not requested again, or too old", "tokens"
    ),
)

"""Names, meanings and aggregation of all metrics, and their collection during a step.

    record(name, value) many times a step ──Metrics──> flush(): one number per name

The aggregation of a metric is declared once, here or with :func:`declare`, and never guessed from its name.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

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
    meaning: str


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


def declared() -> Mapping[str, MetricSpec]:
    """Return all specifications, sorted by name; the table of the documentation."""
    return dict(sorted(_specs.items()))


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
        """Return one number per metric, sorted by name, and forget the observations."""
        collected, self._values = self._values, {}
        return {name: _aggregate(spec_of(name).aggregation, collected[name]) for name in sorted(collected)}


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


declare(
    # The system
    MetricSpec("async/", _MEAN, "of the asynchronous pipeline"),
    MetricSpec(
        "staleness/mean", _MEAN, "steps between the policy of the oldest token and the policy that trained on it"
    ),
    MetricSpec("staleness/max", _MAX, "the largest lag of a trained group"),
    MetricSpec("staleness/in_flight_mean", _MEAN, "lag gained while the group was generated"),
    MetricSpec("staleness/in_queue_mean", _MEAN, "lag gained while the group waited to be trained"),
    MetricSpec("staleness/histogram/", _SUM, "trained groups by lag"),
    MetricSpec("staleness/in_flight_histogram/", _SUM, "trained groups by the lag gained while generating"),
    MetricSpec("staleness/in_queue_histogram/", _SUM, "trained groups by the lag gained while waiting"),
    MetricSpec(
        "staleness/exceeded",
        _SUM,
        "trained groups whose lag exceeded S (under mask, their older tokens were not trained)",
    ),
    MetricSpec("async/submitted", _LAST, "groups admitted since training began"),
    MetricSpec("async/in_flight", _LAST, "groups in generation as the step ended"),
    MetricSpec("async/buffered", _LAST, "finished groups that wait to be trained as the step ended"),
    MetricSpec("async/trained", _LAST, "groups trained since training began"),
    MetricSpec("async/failed", _LAST, "groups failed for good since training began"),
    MetricSpec("async/filtered", _LAST, "groups filtered because they had no signal, since training began"),
    MetricSpec("async/dropped", _LAST, "groups that the staleness policy dropped, since training began"),
    MetricSpec("async/failed_and_masked", _LAST, "groups that failed and train without samples, since training began"),
    MetricSpec("async/engine_failures", _LAST, "groups that lost all their engines, since the process began"),
    MetricSpec("async/retries", _LAST, "attempts beyond the first of each group, of the whole run"),
    MetricSpec("async/replayed_tokens", _LAST, "recorded tokens that were replayed, since the process began"),
    MetricSpec("async/replay_mismatches", _LAST, "replayed sessions whose requests differed from the recorded ones"),
    MetricSpec("async/replay_discarded_tokens", _LAST, "recorded tokens that were not requested again, or too old"),
    MetricSpec("async/idle_fraction", _LAST, "share of the generation slots' time that was idle during the step"),
    MetricSpec("stages/", _LAST, "of a stage between generation and the buffer, since the previous step"),
    MetricSpec("time/", _SUM, "seconds of the step"),
    MetricSpec("time/wait_for_batch", _SUM, "seconds that training waited for groups"),
    MetricSpec("time/wait_for_evaluation", _SUM, "seconds that a weight sync waited for an evaluation"),
    MetricSpec(
        "time/generation_idle", _SUM, "seconds in which generation had free slots, but waited for the next policy"
    ),
    MetricSpec("time/pause", _SUM, "seconds that engines were paused for new weights"),
    MetricSpec("weight_sync/", _LAST, "of the last weight sync"),
    MetricSpec("weight_sync/changed_fraction", _LAST, "share of the weights' bytes that changed"),
    MetricSpec("inference/", _MEAN, "of the inference engines"),
    MetricSpec("inference/generated_tokens", _SUM, "tokens sampled"),
    MetricSpec("inference/tokens_per_second", _LAST, "tokens sampled per second of the step"),
    # Learning
    MetricSpec("loss/", _MEAN, "of the loss"),
    MetricSpec("policy/", _MEAN, "of the policy and its update"),
    MetricSpec("policy/lr", _LAST, "learning rate of the step"),
    MetricSpec("policy/lr/", _LAST, "learning rate of the parameters that a pattern of lr_multipliers matches"),
    MetricSpec("policy/tokens", _SUM, "tokens trained on, masked ones left out"),
    MetricSpec("policy/tokens_per_second", _LAST, "tokens trained on per second of the step"),
    MetricSpec("policy/skipped_nonfinite", _SUM, "updates skipped because a gradient was not finite"),
    MetricSpec("critic/", _MEAN, "of the critic and its update"),
    MetricSpec("critic/lr", _LAST, "learning rate of the step"),
    MetricSpec("critic/skipped_nonfinite", _SUM, "updates skipped because a gradient was not finite"),
    MetricSpec("reward/", _MEAN, "of the trajectories' returns"),
    MetricSpec("reward/max", _MAX, "the best trajectory's return"),
    MetricSpec("reward/min", _MIN, "the worst trajectory's return"),
    MetricSpec("off_policy/", _MEAN, "of the mismatch between behaviour, proximal and current policy"),
    MetricSpec("off_policy/ratio_max", _MAX, "the largest importance weight before truncation"),
    # The model
    MetricSpec("eval/", _LAST, "of one policy version, over the prompts of the evaluation"),
    MetricSpec("generate/", _MEAN, "of the trajectories"),
    MetricSpec("environment/", _MEAN, "of the environments' own metrics"),
)

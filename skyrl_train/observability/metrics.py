"""Names, meanings and aggregation of all metrics, and what adds them up over a step (SEMANTICS 8).

    record(name, value) many times a step ──Metrics──> flush(): one number per name

How a metric aggregates is declared once, here or by :func:`declare`, and never guessed from its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from skyrl_train.config.keys import did_you_mean
from skyrl_train.errors import ConfigError


class Aggregation(StrEnum):
    """What one number stands for several recorded ones."""

    mean = "mean"
    sum = "sum"
    max = "max"
    min = "min"
    last = "last"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric, or with a name that ends in ``/`` all metrics below it that have no specification of their own."""

    name: str
    aggregation: Aggregation
    meaning: str


_MEAN, _SUM, _MAX, _MIN, _LAST = Aggregation
_specs: dict[str, MetricSpec] = {}


def declare(*specs: MetricSpec) -> None:
    """Makes metrics known. Declaring the same again is fine.

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
    """The specification of a metric: its own, or that of the longest declared prefix.

    Raises:
        ConfigError: neither exists; the message says how to declare it.
    """
    candidate = name
    while candidate:
        if candidate in _specs:
            return _specs[candidate]
        candidate = candidate.rstrip("/")
        candidate = candidate[: candidate.rfind("/") + 1]
    raise ConfigError(
        f"Metric {name!r} does not say how it is aggregated.{did_you_mean(name, _specs)} Declare it once: "
        f"declare(MetricSpec({name!r}, Aggregation.mean, 'what it means'))."
    )


def declared() -> Mapping[str, MetricSpec]:
    """All specifications by name; the documentation's table."""
    return dict(sorted(_specs.items()))


class Metrics:
    """Adds up what is recorded during one step."""

    def __init__(self) -> None:
        self._values: dict[str, _Accumulator] = {}

    def record(self, name: str, value: float) -> None:
        """Adds one observation.

        Raises:
            ConfigError: the metric is not declared.
        """
        accumulator = self._values.get(name)
        if accumulator is None:
            accumulator = self._values[name] = _Accumulator(spec_of(name).aggregation)
        accumulator.add(float(value))

    def record_all(self, values: Mapping[str, float]) -> None:
        """Adds one observation of each metric in ``values``."""
        for name, value in values.items():
            self.record(name, value)

    def flush(self) -> dict[str, float]:
        """One number per metric recorded since the last flush, by name; forgets them."""
        values, self._values = self._values, {}
        return {name: values[name].result() for name in sorted(values)}


class _Accumulator:
    def __init__(self, aggregation: Aggregation) -> None:
        self._aggregation = aggregation
        self._values: list[float] = []

    def add(self, value: float) -> None:
        if self._aggregation is Aggregation.last:
            self._values.clear()
        self._values.append(value)

    def result(self) -> float:
        return _REDUCE[self._aggregation](self._values)


def _mean(values: list[float]) -> float:
    return _sum(values) / len(values)


def _sum(values: list[float]) -> float:
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def _last(values: list[float]) -> float:
    return values[-1]


_REDUCE: Mapping[Aggregation, Callable[[list[float]], float]] = {
    Aggregation.mean: _mean,
    Aggregation.sum: _sum,
    Aggregation.max: max,
    Aggregation.min: min,
    Aggregation.last: _last,
}


def histogram(prefix: str, values: Iterable[int]) -> dict[str, float]:
    """Counts of small integers as metrics ``<prefix>/<value>``; declare the prefix as a sum."""
    counts: dict[str, float] = {}
    for value in sorted(values):
        name = f"{prefix}/{value}"
        counts[name] = counts.get(name, 0.0) + 1.0
    return counts


declare(
    # What did the system do?
    MetricSpec("async/", _MEAN, "of the asynchronous pipeline"),
    MetricSpec("async/lag_mean", _MEAN, "steps between the oldest token's policy and the one that trained on it"),
    MetricSpec("async/lag_max", _MAX, "the largest lag of a trained group"),
    MetricSpec("async/lag_in_flight_mean", _MEAN, "the part of the lag that passed while the group was generated"),
    MetricSpec(
        "async/lag_in_queue_mean", _MEAN, "the part of the lag that passed while the group waited to be trained"
    ),
    MetricSpec("async/lag_histogram/", _SUM, "trained groups by lag"),
    MetricSpec("async/lag_in_flight_histogram/", _SUM, "trained groups by the lag gained while generating"),
    MetricSpec("async/lag_in_queue_histogram/", _SUM, "trained groups by the lag gained while waiting"),
    MetricSpec(
        "async/over_bound",
        _SUM,
        "trained groups whose lag exceeded S (under mask, their older tokens were not trained)",
    ),
    MetricSpec("async/submitted", _LAST, "groups admitted since training began"),
    MetricSpec("async/in_flight", _LAST, "groups in generation as the step ended"),
    MetricSpec("async/buffered", _LAST, "finished groups that wait to be trained as the step ended"),
    MetricSpec("async/trained", _LAST, "groups trained since training began"),
    MetricSpec("async/failed", _LAST, "groups failed for good since training began"),
    MetricSpec("async/filtered", _LAST, "groups filtered because they had no signal, since training began"),
    MetricSpec("async/dropped", _LAST, "groups that the straggler policy dropped, since training began"),
    MetricSpec("async/failed_and_masked", _LAST, "groups that failed and train without samples, since training began"),
    MetricSpec("async/engine_failures", _LAST, "groups that lost all engines under them, since the process began"),
    MetricSpec("async/retries", _LAST, "attempts at a group beyond its first, of the whole run"),
    MetricSpec("async/replayed_tokens", _LAST, "recorded tokens that were served again, since the process began"),
    MetricSpec("async/replay_mismatches", _LAST, "replayed sessions that asked for something else than recorded"),
    MetricSpec("async/replay_discarded_tokens", _LAST, "recorded tokens that were not asked for again, or too old"),
    MetricSpec("async/idle_fraction", _LAST, "share of the generation slots' time that was idle during the step"),
    MetricSpec("stages/", _LAST, "of a stage between generation and the buffer, since the step before"),
    MetricSpec("time/", _SUM, "seconds of the step"),
    MetricSpec("time/wait_for_batch", _SUM, "seconds that training waited for groups"),
    MetricSpec("time/wait_for_evaluation", _SUM, "seconds that a publication waited for an evaluation"),
    MetricSpec("time/wait_for_policy", _SUM, "seconds that generation had free slots, but waited for the next policy"),
    MetricSpec("time/pause", _SUM, "seconds that engines were paused for new weights"),
    MetricSpec("publication/", _LAST, "of the last publication"),
    MetricSpec("publication/changed_fraction", _LAST, "share of the weights' bytes that the step has changed"),
    MetricSpec("inference/", _MEAN, "of the inference engines"),
    MetricSpec("inference/generated_tokens", _SUM, "tokens sampled"),
    MetricSpec("inference/tokens_per_second", _LAST, "tokens sampled per second of the step"),
    # How did it learn?
    MetricSpec("loss/", _MEAN, "of the loss"),
    MetricSpec("policy/", _MEAN, "of the policy and its update"),
    MetricSpec("policy/lr", _LAST, "learning rate of the step"),
    MetricSpec("policy/lr/", _LAST, "that of the parameters that a pattern of lr_multipliers matches"),
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
    # What did the model do?
    MetricSpec("eval/", _LAST, "of one policy version, over the prompts of the evaluation"),
    MetricSpec("generate/", _MEAN, "of the trajectories"),
    MetricSpec("environment/", _MEAN, "of the environments' own metrics"),
)

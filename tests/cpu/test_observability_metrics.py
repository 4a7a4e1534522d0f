"""Metrics: aggregated as declared, never as guessed; idle time as an integral."""

from __future__ import annotations

import ast
import math
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.errors import ConfigError
from skyrl_train.observability.metrics import (
    Aggregation,
    Metrics,
    MetricSpec,
    SlotTimeIntegral,
    declare,
    declared,
    histogram,
    quantiles,
    spec_of,
)
from skyrl_train.rollout.staleness.manager import RolloutCounts
from skyrl_train.step_metrics import step_metrics
from skyrl_train.types import RolloutGroup, RolloutSequence, Sample

ROOT = Path(__file__).parents[2]

VALUES = [3.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("mean", 2.0), ("sum", 6.0), ("max", 3.0), ("min", 1.0), ("last", 2.0)]
)
def test_a_metric_aggregates_as_it_was_declared(aggregation: str, expected: float) -> None:
    name = f"tests/{aggregation}"
    declare(MetricSpec(name, Aggregation(aggregation), "of this test"))
    metrics = Metrics()
    for value in VALUES:
        metrics.record(name, value)
    assert metrics.flush() == {name: expected}


def test_nothing_is_guessed_from_a_name() -> None:
    assert spec_of("loss/max_of_something").aggregation is Aggregation.mean  # by its prefix, not by "max"
    assert spec_of("reward/max").aggregation is Aggregation.max  # its own declaration


def test_the_longest_declared_prefix_counts() -> None:
    assert spec_of("staleness/histogram/3").aggregation is Aggregation.sum
    assert spec_of("async/anything/else").aggregation is Aggregation.mean


@pytest.mark.parametrize("name", ["unheard_of", "unheard/of", "", "/loss"])
def test_an_undeclared_metric_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not declared"):
        Metrics().record(name, 1.0)


def test_a_misspelt_metric_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean reward/max"):
        spec_of("rewrd/max")


def test_one_name_has_one_aggregation() -> None:
    declare(MetricSpec("tests/once", Aggregation.sum, "of this test"))
    declare(MetricSpec("tests/once", Aggregation.sum, "of this test"))
    with pytest.raises(ConfigError, match="declared as sum and again as mean"):
        declare(MetricSpec("tests/once", Aggregation.mean, "of this test"))


def test_every_group_of_names_has_a_declared_prefix_and_every_metric_a_meaning() -> None:
    groups = (
        "async/",
        "time/",
        "inference/",
        "loss/",
        "policy/",
        "reward/",
        "off_policy/",
        "environment/",
        "generate/",
    )
    assert set(groups) <= set(declared())
    assert all(spec.meaning for spec in declared().values())


def test_every_metric_that_the_library_names_has_a_declaration_of_its_own() -> None:
    groups = tuple(name for name in declared() if name.endswith("/"))
    named = {
        node.value
        for path in (ROOT / "skyrl_train").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(groups)
        if not any(character in " :." or character.isupper() for character in node.value)  # prose, addresses and files
    }
    undeclared = {name for name in named if not any(known.startswith(name) for known in declared())}
    assert len(named) > 50 and undeclared == {"eval/pass@", "eval/avg@"}  # with k behind it, under eval/


def test_the_reference_has_every_declared_metric() -> None:
    written = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    assert all(f"| `{name}" in written or f"## {name}" in written for name in declared() if name[:5] != "tests")


def test_a_row_begins_with_rewards_and_ends_with_counts() -> None:
    metrics = Metrics()
    metrics.record_all({"async/failed": 0.0, "time/step": 1.0, "loss/policy": 0.0, "reward/mean": 0.5})
    assert list(metrics.flush()) == ["reward/mean", "loss/policy", "time/step", "async/failed"]


@given(st.lists(st.floats(-1e6, 1e6), min_size=2), st.integers(0, 100))
def test_quantiles_interpolate_between_sorted_values(values: list[float], percent: int) -> None:
    place = (len(values) - 1) * percent / 100
    low, high = sorted(values)[math.floor(place)], sorted(values)[math.ceil(place)]
    expected = low + (high - low) * (place - math.floor(place))
    assert quantiles("a/p", values, percent) == {f"a/p{percent}": pytest.approx(expected, abs=1e-6)}


def sample_of(reward: float, tokens: int, stop_reason: str = "stop") -> Sample:
    """A response with an observed token before the sampled ones."""
    mask = [0] + [1] * tokens
    return Sample(
        (
            RolloutSequence.of_lists(
                [7], mask, mask, [0.0] * len(mask), [0] * len(mask), [0.0] * tokens + [reward], stop_reason
            ),
        )
    )


def test_rewards_and_lengths_have_their_spread_over_the_samples_of_the_step() -> None:
    samples = [sample_of(1.0, 1), sample_of(0.0, 4, "length"), sample_of(0.0, 2), sample_of(3.0, 9, "length")]
    groups = [RolloutGroup(i, "p", "", tuple(samples[2 * i : 2 * i + 2]), submitted_version=0) for i in (0, 1)]
    failed = RolloutGroup(2, "p", "", (Sample(()), Sample(())), submitted_version=0, masked=True)
    metrics = step_metrics(
        *(1, [*groups, failed], {}),
        counts=RolloutCounts(),
        totals={},
        max_staleness_steps=1,
        step_s=1.0,
        idle_fraction=0.0,
        generated_tokens=0,
    )
    assert metrics["reward/std"] == statistics.pstdev([1, 0, 0, 3])
    assert metrics["reward/p50"] == 0.5 and metrics["reward/p90"] == pytest.approx(2.4) and metrics["reward/p10"] == 0
    assert metrics["generate/response_tokens"] == 4.0 and metrics["generate/response_tokens_p50"] == 3.0
    assert (
        metrics["generate/response_tokens_p90"] == pytest.approx(7.5) and metrics["generate/response_tokens_max"] == 9.0
    )
    assert metrics["generate/truncated"] == 0.5


def test_flushing_forgets() -> None:
    metrics = Metrics()
    metrics.record_all({"loss/policy": 1.0, "time/train": 2.0})
    assert metrics.flush() == {"loss/policy": 1.0, "time/train": 2.0}
    assert metrics.flush() == {}


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_aggregations_agree_with_the_standard_library(values: list[float]) -> None:
    names = {"loss/x": statistics.fmean, "time/x": math.fsum, "reward/max": max, "reward/min": min}
    metrics = Metrics()
    for value in values:
        metrics.record_all(dict.fromkeys(names, value))
    flushed = metrics.flush()
    for name, reference in names.items():
        assert flushed[name] == pytest.approx(reference(values))


def test_a_value_that_is_not_finite_stays_visible() -> None:
    metrics = Metrics()
    metrics.record_all({"loss/policy": math.nan})
    metrics.record_all({"loss/policy": 1.0})
    assert math.isnan(metrics.flush()["loss/policy"])


def test_histogram_counts() -> None:
    assert histogram("staleness/histogram", [2, 0, 2]) == {"staleness/histogram/0": 1.0, "staleness/histogram/2": 2.0}


class ManualClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_half_of_the_slots_busy_for_half_of_the_time_is_three_quarters_idle() -> None:
    clock = ManualClock()
    slots = SlotTimeIntegral(4, clock)
    slots.set_busy(2)
    clock.now = 1.0
    slots.set_busy(0)
    clock.now = 2.0
    assert slots.take_idle_fraction() == 0.75


def test_idle_time_is_counted_from_the_last_look() -> None:
    clock = ManualClock()
    slots = SlotTimeIntegral(1, clock)
    clock.now = 5.0
    assert slots.take_idle_fraction() == 1.0
    slots.set_busy(1)
    clock.now = 6.0
    assert slots.take_idle_fraction() == 0.0
    assert slots.take_idle_fraction() == 0.0  # no time has passed


Change = tuple[str, int, int]


@given(
    st.integers(0, 5),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 20)), max_size=20),
)
def test_idle_fraction_is_the_integral_and_never_outside_0_and_1(capacity: int, changes: list[tuple[int, int]]) -> None:
    clock = ManualClock()
    slots = SlotTimeIntegral(capacity, clock)
    busy_time = slot_time = 0
    for busy, seconds in changes:
        slots.set_busy(busy)
        for _ in range(seconds):  # second by second, as the reference
            busy_time += min(busy, capacity)
            slot_time += capacity
        clock.now += seconds
    fraction = slots.take_idle_fraction()
    assert 0.0 <= fraction <= 1.0
    assert fraction == pytest.approx((1 - busy_time / slot_time) if slot_time else 0.0)


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 1e3)), max_size=30))
def test_rounding_never_carries_the_idle_fraction_out_of_0_and_1(changes: list[tuple[int, float]]) -> None:
    clock = ManualClock()
    slots = SlotTimeIntegral(3, clock)
    for busy, seconds in changes:
        slots.set_busy(busy)
        clock.now += seconds
    assert 0.0 <= slots.take_idle_fraction() <= 1.0

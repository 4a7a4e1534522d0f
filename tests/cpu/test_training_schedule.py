"""Learning-rate schedules: no step of a run stands still, the first included."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.errors import ConfigError
from skyrl_train.training.schedules import SCHEDULES, learning_rate


def rates(schedule: str, warmup: int, total: int) -> list[float]:
    return [
        learning_rate(t, peak=2.0, schedule=schedule, num_warmup_steps=warmup, total_steps=total)
        for t in range(1, total + 1)
    ]


def test_the_schedules_by_hand() -> None:
    assert rates("constant", 2, 4) == [1.0, 2.0, 2.0, 2.0]
    assert rates("linear", 2, 6) == [1.0, 2.0, 2.0, 1.5, 1.0, 0.5]
    assert rates("cosine", 0, 4) == pytest.approx([2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5)])


@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(0, 20), st.integers(1, 40))
def test_every_step_learns_and_none_passes_the_peak(schedule: str, warmup: int, total: int) -> None:
    values = rates(schedule, warmup, total)
    assert all(0 < value <= 2.0 for value in values)
    assert values[:warmup] == sorted(values[:warmup])
    assert values[warmup:] == sorted(values[warmup:], reverse=True)


def test_an_unknown_schedule_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"scheduler='cosinus' is unknown. Did you mean 'cosine'"):
        learning_rate(1, peak=1.0, schedule="cosinus", num_warmup_steps=0, total_steps=1)


@pytest.mark.parametrize("factor", [math.nan, math.inf, -0.1])
def test_a_schedule_of_ones_own_gives_a_finite_factor_of_at_least_0(
    monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    monkeypatch.setitem(SCHEDULES._entries, "own", lambda progress: factor)
    assert rates("own", 4, 4) == [0.5, 1.0, 1.5, 2.0], "it is not asked during the warm-up"
    with pytest.raises(ConfigError, match=f"'own' returned {factor} at the progress 0.5"):
        learning_rate(3, peak=1.0, schedule="own", num_warmup_steps=0, total_steps=4)


@pytest.mark.parametrize("broken", [lambda progress: 1 / 0, lambda progress: None], ids=["raises", "nothing"])
def test_a_schedule_of_ones_own_that_raises_is_named(monkeypatch: pytest.MonkeyPatch, broken: Any) -> None:
    monkeypatch.setitem(SCHEDULES._entries, "own", broken)
    with pytest.raises(ConfigError, match=r"optimizer_config\.scheduler=own raised (ZeroDivision|Type)Error"):
        rates("own", 0, 2)


def test_a_factor_that_rounding_brings_below_0_is_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULES._entries, "own", lambda progress: -1e-17)
    assert rates("own", 0, 2) == [0.0, 0.0]

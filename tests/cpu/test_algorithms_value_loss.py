"""The critic's loss and its metrics against loops written straight from their formulas (SEMANTICS 7.4)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.algorithms.losses import value_loss, value_metrics, value_statistics

numbers = st.floats(-3, 3, allow_nan=False, width=32)
tokens = st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=12)


@given(tokens, st.one_of(st.none(), st.floats(0.01, 2)))
def test_the_loss_is_the_larger_of_two_squared_errors(
    tokens: list[tuple[float, float, float]], clip: float | None
) -> None:
    values, old, returns = torch.tensor(tokens, dtype=torch.float64).T
    values = values.clone().requires_grad_()
    losses, clipped = value_loss(values, old, returns, clip)
    (gradient,) = torch.autograd.grad(losses.sum(), values)
    for index, (v, v_old, target) in enumerate(tokens):
        moved = v if clip is None else min(max(v, v_old - clip), v_old + clip)
        expected = max((v - target) ** 2, (moved - target) ** 2) / 2
        assert losses[index].item() == pytest.approx(expected, abs=1e-12)
        without_gain = (moved - target) ** 2 > (v - target) ** 2
        assert bool(clipped[index]) == without_gain
        if without_gain:
            assert gradient[index] == 0


@given(tokens)
def test_metrics_are_those_of_their_definitions(tokens: list[tuple[float, float, float]]) -> None:
    values, old, returns = torch.tensor(tokens, dtype=torch.float64).T
    losses, clipped = value_loss(values, old, returns, 0.2)
    metrics = value_metrics(value_statistics(losses, clipped, old, returns), 1 / len(tokens))
    variance = returns.var(correction=0).item()
    if variance > 1e-6:
        expected = 1 - (returns - old).var(correction=0).item() / variance
        assert metrics["critic/explained_variance"] == pytest.approx(expected, abs=1e-5, rel=1e-5)
    assert metrics["loss/value"] == pytest.approx(losses.mean().item())
    assert metrics["critic/clip_fraction"] == pytest.approx(clipped.double().mean().item())
    assert metrics["critic/value_mean"] == pytest.approx(old.mean().item())
    assert metrics["critic/return_mean"] == pytest.approx(returns.mean().item())


def test_without_tokens_the_only_metric_is_a_loss_of_0() -> None:
    nothing = torch.zeros(0)
    losses, clipped = value_loss(nothing, nothing, nothing, 0.2)
    assert value_metrics(value_statistics(losses, clipped, nothing, nothing), 0.0) == {"loss/value": 0.0}


def explained_variance(old: torch.Tensor, returns: torch.Tensor) -> float:
    losses, clipped = value_loss(torch.zeros(3), old, returns, None)
    return value_metrics(value_statistics(losses, clipped, old, returns), 1 / 3)["critic/explained_variance"]


def test_returns_that_are_all_the_same_have_no_variance_to_explain() -> None:
    equal = torch.full((3,), 0.1, dtype=torch.float32)
    for old in (equal - 1, torch.tensor([0.0, 1.0, 3.0])):
        assert explained_variance(old, equal) == 0.0


def test_rounding_in_the_sums_is_no_variance() -> None:
    old, equal = torch.tensor([0.0, 1.0, 3.0]), torch.full((3,), 0.1)
    statistics = value_statistics(*value_loss(torch.zeros(3), old, equal, None), old, equal)
    statistics.sums["return_squared"] *= 1 + 1e-15
    assert value_metrics(statistics, 1 / 3)["critic/explained_variance"] == 0.0


def test_values_that_are_wrong_by_a_constant_explain_all_variance() -> None:
    returns = torch.tensor([0.0, 1.0, 3.0])
    assert explained_variance(returns - 1, returns) == 1.0

"""Each advantage estimator against a loop written straight from its formula (SEMANTICS 7.4)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from algorithm_worlds import few
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    STD_EPSILON,
    GroupRewards,
    gae,
    normalized_over_minibatch,
    rewards_of_trained_tokens,
)
from skyrl_train.config.schema import AlgorithmConfig
from skyrl_train.errors import GeneratorOutputError

reward = st.floats(-5, 5, allow_nan=False, width=32)
sample = st.lists(st.tuples(reward, st.booleans()), max_size=5)  # rewards and mask of each token
groups = st.lists(sample, min_size=1, max_size=6)
Sample = Sequence[tuple[float, bool]]


def group_of(samples: Sequence[Sample], inside: Sequence[bool] | None = None) -> GroupRewards:
    return GroupRewards(
        [[r for r, _ in tokens] for tokens in samples],
        [torch.tensor([m for _, m in tokens], dtype=torch.bool) for tokens in samples],
        [True] * len(samples) if inside is None else inside,
    )


def returns_of(samples: Sequence[Sample]) -> list[float]:
    return torch.tensor([sum(r for r, _ in tokens) for tokens in samples], dtype=torch.float32).tolist()


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum((v - mean(values)) ** 2 for v in values) / max(len(values) - 1, 1))


def check(
    name: str,
    samples: Sequence[Sample],
    inside: Sequence[bool],
    expected: Callable[[int, list[float], list[float]], float],
    **settings: object,
) -> None:
    """``expected(i, returns, those of the baseline)`` on each trained token of sample i; 0 where the baseline is equal."""
    result = ADVANTAGE_ESTIMATORS.get(name)(group_of(samples, inside), AlgorithmConfig(**settings))
    returns = returns_of(samples)
    compared = [r for r, i in zip(returns, inside, strict=True) if i] or returns
    for i, (tokens, advantages) in enumerate(zip(samples, result, strict=True)):
        value = expected(i, returns, compared) if len(set(compared)) > 1 else 0.0
        assert advantages.dtype == torch.float32
        assert advantages.tolist() == pytest.approx([value if m else 0.0 for _, m in tokens], rel=1e-5, abs=1e-5)


def insides(samples: Sequence[Sample], data: st.DataObject) -> list[bool]:
    return data.draw(st.lists(st.booleans(), min_size=len(samples), max_size=len(samples)))


@few
@given(groups, st.booleans(), st.data())
def test_grpo(samples: list[Sample], norm: bool, data: st.DataObject) -> None:
    def expected(i: int, returns: list[float], compared: list[float]) -> float:
        return (returns[i] - mean(compared)) / (std(compared) + STD_EPSILON if norm else 1)

    check("grpo", samples, insides(samples, data), expected, grpo_norm_by_std=norm)


@few
@given(groups, st.data())
def test_rloo(samples: list[Sample], data: st.DataObject) -> None:
    inside = insides(samples, data)

    def expected(i: int, returns: list[float], compared: list[float]) -> float:
        in_it = inside if any(inside) else [True] * len(inside)
        others = [r for j, (r, counted) in enumerate(zip(returns, in_it, strict=True)) if counted and j != i]
        return returns[i] - mean(others)

    check("rloo", samples, inside, expected)


@few
@given(groups, st.data())
def test_maxrl(samples: list[Sample], data: st.DataObject) -> None:
    successes = [[(abs(round(r)), m) for r, m in tokens] for tokens in samples]
    check("maxrl", successes, insides(samples, data), lambda i, r, compared: (r[i] - mean(compared)) / mean(compared))


def test_maxrl_rejects_negative_returns() -> None:
    with pytest.raises(GeneratorOutputError, match="maxrl divides by the mean return"):
        ADVANTAGE_ESTIMATORS.get("maxrl")(group_of([[(1.0, True)], [(-0.5, True)]]), AlgorithmConfig())


@few
@given(groups, st.floats(0, 1))
def test_reinforce_plus_plus_is_the_discounted_reward_to_go(samples: list[Sample], gamma: float) -> None:
    result = ADVANTAGE_ESTIMATORS.get("reinforce++")(group_of(samples), AlgorithmConfig(gamma=gamma))
    for tokens, advantages in zip(samples, result, strict=True):
        places = [t for t, (_, m) in enumerate(tokens) if m]
        credited = credited_rewards(tokens)
        expected = [0.0] * len(tokens)
        for n, place in enumerate(places):
            expected[place] = sum(gamma ** (k - n) * credited[k] for k in range(n, len(places)))
        assert advantages.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def credited_rewards(tokens: Sample) -> list[float]:
    """Token by token: to the last trained one so far, or to the first one of all."""
    places = [t for t, (_, m) in enumerate(tokens) if m]
    credited = [0.0] * len(places)
    for t, (r, _) in enumerate(tokens):
        if places:
            credited[max(sum(p <= t for p in places) - 1, 0)] += r
    return credited


@few
@given(sample)
def test_a_reward_of_an_untrained_token_counts_for_the_trained_one_before_it(tokens: list[tuple[float, bool]]) -> None:
    mask = torch.tensor([m for _, m in tokens], dtype=torch.bool)
    assert rewards_of_trained_tokens([r for r, _ in tokens], mask) == pytest.approx(credited_rewards(tokens), abs=1e-9)


@few
@given(st.lists(st.tuples(reward, st.booleans(), reward), max_size=6), st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_sum_of_discounted_td_errors(
    tokens: list[tuple[float, bool, float]], gamma: float, lam: float
) -> None:
    rewards, mask, values = (torch.tensor([t[i] for t in tokens], dtype=torch.float64) for i in range(3))
    advantages, returns = gae(rewards, values, mask.bool(), gamma, lam)
    places = [t for t, (_, m, _) in enumerate(tokens) if m]
    credited = credited_rewards([(r, m) for r, m, _ in tokens])
    v = [tokens[place][2] for place in places] + [0.0]
    delta = [credited[n] + gamma * v[n + 1] - v[n] for n in range(len(places))]
    expected = [0.0] * len(tokens)
    for n, place in enumerate(places):
        expected[place] = sum((gamma * lam) ** (k - n) * delta[k] for k in range(n, len(places)))
    assert advantages.tolist() == pytest.approx(expected, abs=1e-9)
    assert returns.tolist() == pytest.approx(
        [a + t[2] if t[1] else 0.0 for a, t in zip(expected, tokens, strict=True)], abs=1e-9
    )


@few
@given(groups, st.floats(0, 1), st.floats(0, 1))
def test_the_estimator_takes_each_sample_alone(samples: list[Sample], gamma: float, lam: float) -> None:
    values = [torch.linspace(-1, 2, len(tokens)) for tokens in samples]
    rewarded = dataclasses.replace(group_of(samples), values=values)
    result = ADVANTAGE_ESTIMATORS.get("gae")(rewarded, AlgorithmConfig(gamma=gamma, lambd=lam))
    for tokens, of_sample, advantages in zip(samples, values, result, strict=True):
        rewards, mask = torch.tensor([r for r, _ in tokens], dtype=torch.float64), torch.tensor([m for _, m in tokens])
        assert torch.equal(advantages, gae(rewards, of_sample, mask.bool(), gamma, lam)[0].float())


def test_the_estimator_needs_values() -> None:
    with pytest.raises(ValueError, match="values of a critic"):
        ADVANTAGE_ESTIMATORS.get("gae")(group_of([[(1.0, True)]]), AlgorithmConfig())


def test_gae_with_lambda_1_is_the_return_less_the_value() -> None:
    rewards, values, mask = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.2, 0.4, 0.6]), torch.ones(3)
    advantages, returns = gae(rewards, values, mask, 1.0, 1.0)
    assert advantages.tolist() == pytest.approx([0.8, 0.6, 0.4])
    assert returns.tolist() == pytest.approx([1.0, 1.0, 1.0])


@few
@given(st.lists(sample, max_size=5))
def test_normalised_advantages_have_mean_0_and_deviation_1_over_all_tokens(samples: list[Sample]) -> None:
    values = [torch.tensor([r for r, _ in tokens], dtype=torch.float64) for tokens in samples]
    masks = [torch.tensor([m for _, m in tokens], dtype=torch.bool) for tokens in samples]
    result = normalized_over_minibatch(values, masks)
    every = [r for tokens in samples for r, m in tokens if m]
    for tokens, normalized in zip(samples, result, strict=True):
        equal = len(set(every)) <= 1
        expected = [(r - mean(every)) / (std(every) + STD_EPSILON) if m and not equal else 0.0 for r, m in tokens]
        assert normalized.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", ["grpo", "rloo", "maxrl"])
@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3, 123.456])
def test_equal_returns_give_exactly_zero(name: str, value: float) -> None:
    for n in (1, 7):
        result = ADVANTAGE_ESTIMATORS.get(name)(group_of([[(value, True)] * 3] * n), AlgorithmConfig())
        assert all(not advantages.any() for advantages in result)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_rejected(value: float) -> None:
    with pytest.raises(GeneratorOutputError, match=r"sample 1 of a group of 2 has the return (nan|inf)"):
        group_of([[(1.0, True)], [(value, True)]])


def test_a_group_that_lost_a_member_is_rejected() -> None:
    with pytest.raises(ValueError, match="3 rewards, 2 loss masks and 3 samples"):
        GroupRewards([[1.0]] * 3, [torch.ones(1)] * 2, [True] * 3)


def test_the_advantages_of_nearly_equal_returns_are_bounded() -> None:
    group = group_of([[(0.0, True)], [(1e-6, True)]])
    expected = 5e-7 / (math.sqrt(0.5) * 1e-6 + 1e-6)
    first, second = (float(each) for each in ADVANTAGE_ESTIMATORS.get("grpo")(group, AlgorithmConfig()))
    assert (first, second) == pytest.approx((-expected, expected), rel=1e-5)
    [normalized] = normalized_over_minibatch([torch.tensor([0.0, 1e-6])], [torch.ones(2, dtype=torch.bool)])
    assert normalized.tolist() == pytest.approx([-expected, expected], rel=1e-5)

"""Reward shaping, the adaptive KL coefficient, and what of both reaches a minibatch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from algorithm_worlds import few
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl_train.algorithms.advantages import STD_EPSILON, GroupRewards, overlong_penalty
from skyrl_train.algorithms.kl import KL_ESTIMATORS, KlControl, kl_penalties
from skyrl_train.config.schema import (
    AlgorithmConfig,
    KlControlConfig,
    KlControlType,
    OffPolicyCorrectionConfig,
    OverlongConfig,
    RejectionConfig,
    RejectionLevel,
)
from skyrl_train.errors import ConfigError, GeneratorOutputError
from skyrl_train.training.minibatch import build_minibatch, kl_to_reference
from skyrl_train.types import RolloutGroup, RolloutSequence, Sample


def sample(length: int, reward: float, *, reference: float | None = None, **changes: object) -> Sample:
    lists: dict[str, Any] = {
        "prompt_token_ids": [1],
        "response_ids": [2] * length,
        "loss_mask": [1] * length,
        "logprobs": [-1.0] * length,
        "versions": [0] * length,
        "rewards": [0.0] * (length - 1) + [reward] if length else [],
        "stop_reason": "stop",
        "reference_logprobs": None if reference is None else [reference] * length,
    }
    return Sample((RolloutSequence.of_lists(**{**lists, **changes}),))


def group(*samples: Sample, masked: bool = False) -> RolloutGroup:
    return RolloutGroup(0, "0", "test", samples, 0, masked=masked)


def per_sample(groups: list[RolloutGroup], algorithm: AlgorithmConfig, **settings: float) -> list[float]:
    """The advantage of each sample's first token; 0 for an empty response."""
    sequences = build_minibatch(groups, 1, algorithm, **settings).sequences
    return [float(s.advantages[1]) if len(s) > 1 else 0.0 for s in sequences]


@few
@given(st.integers(0, 200), st.integers(1, 50), st.integers(50, 100), st.floats(0, 2))
def test_the_overlong_penalty_is_equation_13_of_dapo(length: int, buffer: int, longest: int, factor: float) -> None:
    if length <= longest - buffer:
        expected = 0.0
    elif length <= longest:
        expected = ((longest - buffer) - length) / buffer
    else:
        expected = -1.0
    config = OverlongConfig(buffer_len=buffer, max_response_len=longest, penalty_factor=factor)
    assert overlong_penalty(length, config) == pytest.approx(factor * expected)


@pytest.mark.parametrize(("buffer", "longest"), [(0, 4), (2, None)])
def test_without_a_buffer_or_a_limit_no_length_has_a_penalty(buffer: int, longest: int | None) -> None:
    assert overlong_penalty(100, OverlongConfig(buffer, 1.0, longest)) == 0.0


def test_the_penalty_for_length_is_part_of_the_return() -> None:
    config = AlgorithmConfig(grpo_norm_by_std=False, overlong=OverlongConfig(2, 1.0, 4))
    assert per_sample([group(sample(4, 1.0), sample(3, 1.0), sample(1, 1.0))], config) == pytest.approx([-0.5, 0, 0.5])


def test_an_estimator_of_ones_own_may_write_into_what_it_gets_and_the_group_stays_as_it_was() -> None:
    rewarded = group(sample(2, 1.0), sample(2, 3.0))
    assert per_sample([rewarded], AlgorithmConfig(advantage_estimator=f"{__name__}:writes")) == [-2, 0]
    assert [each.sequences[0].rewards for each in rewarded.samples] == [[0, 1], [0, 3]], (
        "metrics and samples show these"
    )


def writes(given: GroupRewards, config: AlgorithmConfig) -> list[torch.Tensor]:
    for rewards in given.token_rewards:
        assert isinstance(rewards, list)
        rewards[-1] -= 3.0
    return given.on_trained_tokens(given.returns)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("raises", r"raised ZeroDivisionError"),
        ("of_samples", r"shapes \[\[\], \[\]\] for samples of \[2, 1\] tokens"),
        ("of_one_sample", r"shapes \[\[2\]\] for samples of \[2, 1\] tokens"),
        ("as_columns", r"shapes \[\[2, 1\], \[1, 1\]\]"),
        ("divides", r"returned nan for token 0 of sample 0, in a group with the returns \[1\.0, 1\.0\]"),
        ("nothing", r"raised TypeError"),
    ],
)
def test_an_estimator_of_ones_own_that_breaks_its_contract_is_named(name: str, complaint: str) -> None:
    path = f"{__name__}:{name}"
    with pytest.raises(ConfigError, match=f"advantage_estimator={path} .*{complaint}"):
        build_minibatch([group(sample(2, 1.0), sample(1, 1.0))], 1, AlgorithmConfig(advantage_estimator=path))


@pytest.mark.parametrize(
    ("estimate", "complaint"),
    [
        (lambda behaviour, reference: 1 / 0, "raised ZeroDivisionError"),
        (lambda behaviour, reference: (behaviour - reference).mean(), r"shape \[\] for 2 tokens"),
    ],
    ids=["raises", "mean"],
)
def test_an_estimator_of_the_divergence_that_breaks_its_contract_is_named(
    monkeypatch: pytest.MonkeyPatch, estimate: Any, complaint: str
) -> None:
    monkeypatch.setitem(KL_ESTIMATORS._entries, "own", estimate)
    config = AlgorithmConfig(kl_reward_coef=0.1, kl_estimator_type="own")
    with pytest.raises(ConfigError, match=f"kl_estimator_type=own .*{complaint}"):
        build_minibatch([group(sample(2, 1.0, reference=-1.0))], 1, config)


def test_advantages_that_nothing_is_trained_with_need_not_be_finite() -> None:
    config = AlgorithmConfig(advantage_estimator=f"{__name__}:divides")
    untrained = sample(2, 1.0, loss_mask=[0, 0], versions=[-1, -1])
    for equal in (group(sample(2, 1.0), sample(1, 1.0), masked=True), group(untrained, untrained)):
        assert not any(s.loss_mask.any() for s in build_minibatch([equal], 1, config).sequences)


def raises(given: GroupRewards, config: AlgorithmConfig) -> list[torch.Tensor]:
    raise ZeroDivisionError


def of_samples(given: GroupRewards, config: AlgorithmConfig) -> list[torch.Tensor]:
    return list(given.returns)


def of_one_sample(given: GroupRewards, config: AlgorithmConfig) -> list[torch.Tensor]:
    return given.on_trained_tokens(given.returns)[:1]


def as_columns(given: GroupRewards, config: AlgorithmConfig) -> list[torch.Tensor]:
    return [values[:, None] for values in given.on_trained_tokens(given.returns)]


def divides(given: GroupRewards, config: AlgorithmConfig) -> list[torch.Tensor]:
    return given.on_trained_tokens((given.returns - given.returns.mean()) / given.returns.std())


def nothing(given: GroupRewards, config: AlgorithmConfig) -> None:
    return None


def test_a_response_that_was_cut_off_leaves_the_numerator_and_stays_in_denominator_and_baseline() -> None:
    cut = group(sample(3, 4.0, stop_reason="length"), sample(2, 2.0), sample(2, 0.0))
    config = AlgorithmConfig(grpo_norm_by_std=False, overlong=OverlongConfig(filter=True))
    batch = build_minibatch([cut], 1, config)
    assert [int(s.loss_mask.sum()) for s in batch.sequences] == [0, 2, 2]
    assert [s.counts.tokens for s in batch.sequences] == [3, 2, 2]
    assert per_sample([cut], config) == pytest.approx([2, 0, -2])
    config.off_policy_correction.baseline_without_rejected = True
    assert per_sample([cut], config)[1:] == pytest.approx([1, -1])


def test_a_baseline_leaves_out_the_samples_that_a_rule_about_sequences_rejects() -> None:
    far = sample(2, 9.0, proximal_logprobs=[-3.0, -3.0])
    near = [sample(2, r, proximal_logprobs=[-1.0, -1.0]) for r in (0.0, 2.0)]
    rules = [RejectionConfig("k3", RejectionLevel.sequence_mean, high=0.5)]
    correction = OffPolicyCorrectionConfig(rejections=rules, baseline_without_rejected=True)
    config = AlgorithmConfig(grpo_norm_by_std=False, off_policy_correction=correction)
    assert per_sample([group(far, *near)], config)[1:] == pytest.approx([-1, 1])


@few
@given(st.floats(-3, 0), st.floats(0, 1), st.floats(0.1, 3), st.sampled_from(["k1", "k2", "k3"]))
def test_the_divergence_is_taken_from_the_reward_of_each_token(
    reference: float, coef: float, factor: float, name: str
) -> None:
    config = AlgorithmConfig(grpo_norm_by_std=False, kl_reward_coef=coef, kl_estimator_type=name)
    log_r = reference + 1.0  # of the reference over the behaviour policy
    kl = {"k1": -log_r, "k2": log_r**2 / 2, "k3": math.exp(log_r) - 1 - log_r}[name]
    a_group = group(sample(3, 1.0, reference=reference), sample(1, 1.0, reference=reference))
    returns = [1 - 3 * factor * coef * kl, 1 - factor * coef * kl]
    assert per_sample([a_group], config, kl_factor=factor) == pytest.approx(
        [r - sum(returns) / 2 for r in returns], abs=1e-5
    )
    assert kl_to_reference([a_group, group(sample(5, 0.0), masked=True)], config) == pytest.approx((4 * kl, 4, 2))


def test_a_penalty_without_reference_log_probs_is_rejected_and_a_masked_group_needs_none() -> None:
    config = AlgorithmConfig(kl_reward_coef=0.1)
    with pytest.raises(GeneratorOutputError, match="no reference log-probs"):
        build_minibatch([group(sample(1, 1.0))], 1, config)
    build_minibatch([group(sample(1, 1.0), masked=True)], 1, config)


def test_reinforce_plus_plus_normalises_over_all_groups_and_leaves_masked_ones_out() -> None:
    groups = [group(sample(1, 0.0), sample(2, 3.0)), group(sample(1, 6.0)), group(sample(4, 99.0), masked=True)]
    values = torch.tensor([0.0, 3.0, 3.0, 6.0])
    mean, std = float(values.mean()), float(values.std()) + STD_EPSILON
    found = per_sample(groups, AlgorithmConfig(advantage_estimator="reinforce++"))
    assert found == pytest.approx([(v - mean) / std for v in (0.0, 3.0, 6.0)] + [0.0], abs=1e-5)


def test_a_nan_reward_and_an_empty_response_are_not_trained_silently() -> None:
    with pytest.raises(GeneratorOutputError, match="sample 1 of a group of 2 has the return nan"):
        build_minibatch([group(sample(1, 1.0), sample(1, math.nan))], 1, AlgorithmConfig())
    assert per_sample([group(sample(0, 0.0), sample(1, 1.0))], AlgorithmConfig())[1] > 0


@few
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 64)), max_size=6), st.floats(0.01, 0.5))
def test_the_adaptive_factor_follows_ziegler(steps: list[tuple[float, int]], target: float) -> None:
    config = AlgorithmConfig(kl_ctrl=KlControlConfig(KlControlType.adaptive, target, 100.0), kl_loss_coef=0.1)
    control, expected = KlControl(config), 1.0
    for kl, samples in steps:
        control.observe(kl * 3, 5, samples - 1)  # parts of a step add up
        control.observe(kl * 7, 5, 1)
        assert control.step_ended() == pytest.approx(
            {"policy/behaviour_kl_to_reference": kl, "policy/kl_factor": expected}
        )
        expected *= 1 + min(max(kl / target - 1, -0.2), 0.2) * samples / 100
    assert control.factor == pytest.approx(expected)
    assert control.step_ended() == {}


@pytest.mark.parametrize(
    ("loss_coef", "reward_coef", "kind", "observes", "adapts"),
    [
        (0.0, 0.0, KlControlType.adaptive, False, False),
        (0.1, 0.0, KlControlType.fixed, False, False),
        (0.0, 0.1, KlControlType.fixed, True, False),
        (0.1, 0.0, KlControlType.adaptive, True, True),
        (0.0, 0.1, KlControlType.adaptive, True, True),
    ],
)
def test_the_factor_adapts_only_if_it_scales_a_term(
    loss_coef: float, reward_coef: float, kind: KlControlType, observes: bool, adapts: bool
) -> None:
    ctrl = KlControlConfig(kind, 0.1, 100.0)
    control = KlControl(AlgorithmConfig(kl_ctrl=ctrl, kl_loss_coef=loss_coef, kl_reward_coef=reward_coef))
    assert control.observes is observes
    control.observe(5.0, 5, 10)
    control.step_ended()
    assert (control.factor != 1.0) is adapts


def test_an_untrained_token_has_no_penalty() -> None:
    config = AlgorithmConfig(kl_reward_coef=0.1, kl_estimator_type="k1")
    assert kl_penalties([-1.0, -2.0, -0.5], [-1.5, -2.5, 0.0], [1, 0, 1], config) == [0.5, 0.0, -0.5]


class CountedOperations(TorchDispatchMode):
    """Counts torch operations, without conversions from and to numpy, which keep the interpreter lock."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func not in (torch.ops.aten.lift_fresh.default, torch.ops.aten.detach.default)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "maxrl"])
def test_more_groups_need_no_more_torch_operations(estimator: str) -> None:
    """Each releases the interpreter lock, and the thread that builds the minibatch then waits for the control loop."""
    numbers = []
    for groups in (1, 20):
        with CountedOperations() as counted:
            a_group = group(sample(3, 1.0), sample(1, 0.0), sample(2, 3.0))
            build_minibatch([a_group] * groups, 1, AlgorithmConfig(advantage_estimator=estimator))
        numbers.append(counted.number)
    assert 0 < numbers[0] == numbers[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_an_estimator_may_give_values_of_any_dtype(dtype: torch.dtype) -> None:
    rewards = GroupRewards([[1.0, 0.0], [2.0]], [torch.tensor([1, 0]), torch.tensor([True])], [True, True])
    of_samples = rewards.on_trained_tokens(torch.tensor([0.5, -2.0], dtype=dtype))
    assert [(values.dtype, values.tolist()) for values in of_samples] == [
        (torch.float32, [0.5, 0.0]),
        (torch.float32, [-2.0]),
    ]

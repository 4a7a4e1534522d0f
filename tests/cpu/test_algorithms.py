"""Each estimator, loss, correction and reduction against a loop written straight from its formula (SEMANTICS 7.4)."""

from __future__ import annotations

import math
from fractions import Fraction
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.algorithms.advantages import ADVANTAGE_ESTIMATORS, STD_EPSILON, group_returns, grpo
from skyrl_train.algorithms.losses import MAX_LOG_RATIO, POLICY_LOSSES, bounded_ratio, ppo_clip
from skyrl_train.algorithms.off_policy import (
    CORRECTIONS,
    mismatch_metrics,
    mismatch_statistics,
    truncated_token_weights,
)
from skyrl_train.algorithms.reductions import (
    REDUCTIONS,
    Reduction,
    Share,
    reduction_scale,
    sequence_mean,
    token_mean,
)
from skyrl_train.algorithms.registry import Registry
from skyrl_train.config.schema import AlgorithmConfig
from skyrl_train.errors import ConfigError
from skyrl_train.training.objective import Objective

rewards = st.floats(-5, 5, allow_nan=False, width=32)
logprob = st.floats(-6, 0, allow_nan=False)
masks = st.lists(st.lists(st.booleans(), min_size=0, max_size=6), min_size=1, max_size=6)


def tokens(size: int, *fields: st.SearchStrategy[float]) -> st.SearchStrategy[list[tuple[float, ...]]]:
    return st.lists(st.tuples(*fields), min_size=1, max_size=size)


def columns(rows: list[tuple[float, ...]]) -> list[torch.Tensor]:
    return [torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)]


class TestGrpo:
    @given(st.lists(st.tuples(rewards, st.lists(st.booleans(), max_size=5)), min_size=1, max_size=8), st.booleans())
    def test_is_the_standardised_return_on_every_trained_token(
        self, group: list[tuple[float, list[bool]]], norm_by_std: bool
    ) -> None:
        returns = [r for r, _ in group]
        result = grpo(
            torch.tensor(returns), [torch.tensor(m, dtype=torch.bool) for _, m in group], norm_by_std=norm_by_std
        )

        mean = math.fsum(returns) / len(returns)
        std = math.sqrt(sum((r - mean) ** 2 for r in returns) / max(len(returns) - 1, 1))
        for (value, mask), advantages in zip(group, result, strict=True):
            expected = 0.0
            if len(set(returns)) > 1:
                expected = (value - mean) / (std + STD_EPSILON) if norm_by_std else value - mean
            assert advantages.dtype == torch.float32
            assert advantages.tolist() == pytest.approx([expected if m else 0.0 for m in mask], rel=1e-5, abs=1e-5)

    @pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3, -123.456])
    def test_equal_returns_give_exactly_zero(self, value: float) -> None:
        result = grpo(torch.full((7,), value), [torch.ones(3)] * 7, norm_by_std=True)
        assert all(not advantages.any() for advantages in result)

    def test_a_group_of_one_gives_zero(self) -> None:
        assert grpo(torch.tensor([1.0]), [torch.ones(2)], norm_by_std=True)[0].tolist() == [0.0, 0.0]

    def test_a_group_that_lost_a_member_is_refused(self) -> None:
        with pytest.raises(ValueError, match="3 returns but 2"):
            grpo(torch.zeros(3), [torch.ones(2)] * 2, norm_by_std=False)

    def test_the_return_is_the_sum_of_the_per_token_rewards(self) -> None:
        assert group_returns([[0.0, 0.5, 1.0], [], [2.0]]).tolist() == [1.5, 0.0, 2.0]


class TestPpoClip:
    @given(tokens(12, logprob, logprob, rewards), st.floats(0, 0.9), st.floats(0, 3))
    def test_is_the_clipped_surrogate_of_each_token(
        self, rows: list[tuple[float, ...]], low: float, high: float
    ) -> None:
        result = ppo_clip(*columns(rows), eps_clip_low=low, eps_clip_high=high)
        for i, (current, proximal, advantage) in enumerate(rows):
            u = math.exp(current - proximal)
            bounded = min(max(u, 1 - low), 1 + high)
            assert result.loss[i].item() == pytest.approx(-min(u * advantage, bounded * advantage), abs=1e-12)
            assert result.ratio[i].item() == pytest.approx(u)
            assert result.clipped[i].item() is (bounded * advantage < u * advantage)

    def test_the_gradient_is_advantage_times_ratio_inside_the_bounds_and_zero_outside(self) -> None:
        logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
        proximal = torch.tensor([-1.1, -3.0, -3.0])  # ratios 1.1, 7.4, 7.4
        loss = ppo_clip(logprobs, proximal, torch.tensor([2.0, 2.0, -2.0]), eps_clip_low=0.2, eps_clip_high=0.2).loss
        loss.sum().backward()
        assert logprobs.grad is not None
        assert logprobs.grad.tolist() == pytest.approx([-2 * math.exp(0.1), 0.0, 2 * math.exp(2)])

    def test_no_gradient_reaches_the_proximal_policy(self) -> None:
        proximal = torch.tensor([-1.0], requires_grad=True)
        loss = ppo_clip(
            torch.tensor([-1.0], requires_grad=True), proximal, torch.ones(1), eps_clip_low=0.2, eps_clip_high=0.2
        ).loss
        loss.sum().backward()
        assert proximal.grad is None

    def test_a_far_ratio_stays_finite(self) -> None:
        ratio = bounded_ratio(torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0]))
        assert ratio.tolist() == pytest.approx([math.exp(MAX_LOG_RATIO), math.exp(-MAX_LOG_RATIO)])


class TestTruncatedImportanceSampling:
    @given(tokens(12, logprob, logprob), st.floats(0.1, 10))
    def test_is_the_ratio_up_to_the_cap(self, rows: list[tuple[float, ...]], cap: float) -> None:
        weights = truncated_token_weights(*columns(rows), clip_high=cap)
        expected = [min(math.exp(proximal - behaviour), cap) for proximal, behaviour in rows]
        assert weights.tolist() == pytest.approx(expected)

    def test_carries_no_gradient(self) -> None:
        current = torch.tensor([-1.0], requires_grad=True)
        assert not truncated_token_weights(current, torch.tensor([-2.0]), clip_high=2.0).requires_grad

    @given(tokens(12, logprob, logprob), st.floats(0.1, 10))
    def test_metrics_are_those_of_the_untruncated_ratio(self, rows: list[tuple[float, ...]], cap: float) -> None:
        ratios = [math.exp(proximal - behaviour) for proximal, behaviour in rows]
        n = len(ratios)
        statistics = mismatch_statistics(*columns(rows), clip_high=cap)
        assert mismatch_metrics(n, statistics.values()) == pytest.approx(
            {
                "off_policy/ratio_mean": sum(ratios) / n,
                "off_policy/ratio_max": max(ratios),
                "off_policy/clipped_fraction": sum(torch.tensor(r, dtype=torch.float64).item() > cap for r in ratios)
                / n,
                "off_policy/ess": sum(ratios) ** 2 / (n * sum(r * r for r in ratios)),
                "off_policy/kl_k1": -sum(math.log(r) for r in ratios) / n,
                "off_policy/kl_k3": sum(r - 1 - math.log(r) for r in ratios) / n,
            },
            abs=1e-9,
        )

    def test_k1_and_k3_estimate_the_kl_of_behaviour_from_proximal(self) -> None:
        behave, prox = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
        drawn = torch.multinomial(behave, 200_000, replacement=True, generator=torch.Generator().manual_seed(0))
        statistics = mismatch_statistics(prox.log()[drawn], behave.log()[drawn], clip_high=2.0)
        metrics = mismatch_metrics(statistics.tokens, statistics.values())
        kl = (behave * (behave / prox).log()).sum().item()
        assert metrics["off_policy/kl_k1"] == pytest.approx(kl, abs=2e-3)
        assert metrics["off_policy/kl_k3"] == pytest.approx(kl, abs=2e-3)


class TestReductions:
    @given(masks, st.data())
    def test_token_mean_is_the_mean_over_all_trained_tokens(
        self, ragged: list[list[bool]], data: st.DataObject
    ) -> None:
        losses = self.losses(ragged, data)
        trained = [x for row, mask in zip(losses, ragged, strict=True) for x, m in zip(row, mask, strict=True) if m]
        assert self.reduced(token_mean, losses, ragged) == pytest.approx(sum(trained) / max(len(trained), 1))

    @given(masks, st.data())
    def test_sequence_mean_is_the_mean_over_sequences_of_their_token_means(
        self, ragged: list[list[bool]], data: st.DataObject
    ) -> None:
        losses = self.losses(ragged, data)
        means = []
        for row, mask in zip(losses, ragged, strict=True):
            trained = [x for x, m in zip(row, mask, strict=True) if m]
            means.append(sum(trained) / len(trained) if trained else 0.0)
        assert self.reduced(sequence_mean, losses, ragged) == pytest.approx(sum(means) / len(means))

    def test_a_rejected_token_leaves_the_numerator_but_not_the_denominator(self) -> None:
        for reduction in (token_mean, sequence_mean):
            share = reduction(2)  # losses 4 and 6, the second one rejected
            assert share.token_weight * (4.0 * 1 + 6.0 * 0) * reduction_scale([share.denominator]) == 4.0 / 2

    @given(st.lists(st.floats(1e-6, 1e12), max_size=20), st.randoms())
    def test_the_scale_is_the_reciprocal_of_the_sum_in_any_order_to_the_last_bit(
        self, denominators: list[float], random: Random
    ) -> None:
        shuffled = random.sample(denominators, k=len(denominators))
        exact = sum(map(Fraction, denominators), Fraction(0))
        assert reduction_scale(shuffled) == (1 / float(exact) if denominators else 0.0)

    def test_what_has_no_tokens_has_the_scale_zero(self) -> None:
        assert reduction_scale([token_mean(0).denominator] * 3) == 0.0

    def test_a_registered_one_takes_part_in_the_loss_by_its_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(REDUCTIONS, "_entries", dict(REDUCTIONS._entries))

        @REDUCTIONS.register("sum_over_10")  # Dr. GRPO: a constant length in place of the sequence's own
        def sum_over_10(counted_tokens: int) -> Share:
            return Share(token_weight=1 / 10, denominator=1)

        assert Objective(AlgorithmConfig(loss_reduction="sum_over_10")).share(7) == Share(0.1, 1)

    @pytest.mark.parametrize(
        "share",
        [Share(math.inf, 1), Share(1, math.nan), Share(1, -1), Share(1, 0)],
        ids=lambda share: str(tuple(share)),
    )
    def test_a_registered_one_that_breaks_the_contract_is_named(
        self, share: Share, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(REDUCTIONS, "_entries", {"mine": lambda counted_tokens: share})
        with pytest.raises(ConfigError, match=r"loss_reduction='mine' returned Share.* for a sequence of 7 tokens"):
            Objective(AlgorithmConfig(loss_reduction="mine")).share(7)

    @staticmethod
    def losses(ragged: list[list[bool]], data: st.DataObject) -> list[list[float]]:
        return [data.draw(st.lists(rewards, min_size=len(mask), max_size=len(mask))) for mask in ragged]

    @staticmethod
    def reduced(reduction: Reduction, losses: list[list[float]], ragged: list[list[bool]]) -> float:
        shares = [reduction(sum(mask)) for mask in ragged]
        total = 0.0
        for share, row, mask in zip(shares, losses, ragged, strict=True):
            total += sum(share.token_weight * x for x, m in zip(row, mask, strict=True) if m)
        return total * reduction_scale(share.denominator for share in shares)


class TestRegistries:
    @pytest.mark.parametrize(
        ("registry", "known"),
        [
            (ADVANTAGE_ESTIMATORS, ["grpo"]),
            (POLICY_LOSSES, ["ppo_clip"]),
            (CORRECTIONS, ["token"]),
            (REDUCTIONS, ["sequence_mean", "token_mean"]),
        ],
    )
    def test_know_the_names_that_the_configuration_documents(
        self, registry: Registry[object], known: list[str]
    ) -> None:
        assert registry.names() == known

    def test_an_unknown_name_is_refused_with_the_nearest_and_all_known_ones(self) -> None:
        with pytest.raises(ConfigError) as caught:
            REDUCTIONS.get("token_maen")
        message = str(caught.value)
        assert "trainer.algorithm.loss_reduction='token_maen'" in message
        assert "Did you mean 'token_mean'?" in message
        assert "sequence_mean, token_mean" in message

    def test_a_name_is_registered_once(self) -> None:
        registry: Registry[int] = Registry("a.setting")
        registry.register("one")(1)
        with pytest.raises(ConfigError, match=r"a\.setting: 'one' is registered already"):
            registry.register("one")(2)
        assert registry.get("one") == 1

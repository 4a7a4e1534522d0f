"""Each reduction against a loop written straight from its formula, and the registries (SEMANTICS 7.3, 7.4)."""

from __future__ import annotations

import math
from fractions import Fraction
from random import Random

import pytest
from algorithm_worlds import few
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.algorithms.advantages import ADVANTAGE_ESTIMATORS
from skyrl_train.algorithms.losses import POLICY_LOSSES
from skyrl_train.algorithms.off_policy import CORRECTIONS, REJECTION_STATISTICS
from skyrl_train.algorithms.reductions import (
    REDUCTIONS,
    Reduction,
    SequenceCounts,
    Share,
    prompt_mean,
    reduction_scale,
    seq_mean_token_sum_norm,
    sequence_mean,
    token_mean,
)
from skyrl_train.algorithms.registry import Registry
from skyrl_train.config.schema import AlgorithmConfig
from skyrl_train.errors import ConfigError
from skyrl_train.training.objective import Objective

rewards = st.floats(-5, 5, allow_nan=False, width=32)
masks = st.lists(st.lists(st.booleans(), min_size=0, max_size=6), min_size=1, max_size=6)
ALGORITHM = AlgorithmConfig(max_seq_len=10)


def alone(tokens: int) -> SequenceCounts:
    return SequenceCounts(tokens, tokens, 1)


class TestReductions:
    @few
    @given(masks, st.data())
    def test_token_mean_is_the_mean_over_all_trained_tokens(
        self, ragged: list[list[bool]], data: st.DataObject
    ) -> None:
        losses = self.losses(ragged, data)
        trained = [x for row, mask in zip(losses, ragged, strict=True) for x, m in zip(row, mask, strict=True) if m]
        assert self.reduced(token_mean, losses, ragged) == pytest.approx(sum(trained) / max(len(trained), 1))

    @few
    @given(st.lists(masks, min_size=1, max_size=3), st.data())
    def test_prompt_mean_is_the_mean_over_groups_of_the_mean_over_their_tokens(
        self, groups: list[list[list[bool]]], data: st.DataObject
    ) -> None:
        means, total, denominators = [], 0.0, []
        for ragged in groups:
            losses, counted = self.losses(ragged, data), sum(map(sum, ragged))
            trained = [x for row, mask in zip(losses, ragged, strict=True) for x, m in zip(row, mask, strict=True) if m]
            means.append(sum(trained) / max(counted, 1))
            for row, mask in zip(losses, ragged, strict=True):
                share = prompt_mean(SequenceCounts(sum(mask), counted, len(ragged)), ALGORITHM)
                total += sum(share.token_weight * x for x, m in zip(row, mask, strict=True) if m)
                denominators.append(share.denominator)
        assert total * reduction_scale(denominators) == pytest.approx(sum(means) / len(means))

    @few
    @given(masks, st.data())
    def test_seq_mean_token_sum_norm_divides_each_sum_by_one_length(
        self, ragged: list[list[bool]], data: st.DataObject
    ) -> None:
        losses = self.losses(ragged, data)
        sums = [sum(x for x, m in zip(row, mask, strict=True) if m) for row, mask in zip(losses, ragged, strict=True)]
        assert self.reduced(seq_mean_token_sum_norm, losses, ragged) == pytest.approx(sum(sums) / 10 / len(sums))

    @few
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
        for reduction in (token_mean, sequence_mean, prompt_mean):
            share = reduction(alone(2), ALGORITHM)  # losses 4 and 6, the second one rejected
            assert share.token_weight * (4.0 * 1 + 6.0 * 0) * reduction_scale([share.denominator]) == 4.0 / 2

    @few
    @given(st.lists(st.floats(1e-6, 1e12), max_size=20), st.randoms())
    def test_the_scale_is_the_reciprocal_of_the_sum_in_any_order_to_the_last_bit(
        self, denominators: list[float], random: Random
    ) -> None:
        shuffled = random.sample(denominators, k=len(denominators))
        exact = sum(map(Fraction, denominators), Fraction(0))
        assert reduction_scale(shuffled) == (1 / float(exact) if denominators else 0.0)

    def test_a_step_without_tokens_has_the_scale_zero(self) -> None:
        assert reduction_scale([token_mean(alone(0), ALGORITHM).denominator] * 3) == 0.0

    def test_a_registered_one_takes_part_in_the_loss_by_its_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(REDUCTIONS, "_entries", dict(REDUCTIONS._entries))

        @REDUCTIONS.register("sum_over_10")
        def sum_over(counts: SequenceCounts, config: AlgorithmConfig) -> Share:
            return Share(token_weight=1 / config.kwargs["length"], denominator=1)

        config = AlgorithmConfig(loss_reduction="sum_over_10", kwargs={"length": 10})
        assert Objective(config).share(alone(7)) == Share(0.1, 1)

    @pytest.mark.parametrize(
        "share",
        [Share(math.inf, 1), Share(1, math.nan), Share(1, -1), Share(1, 0)],
        ids=lambda share: str(tuple(share)),
    )
    def test_a_registered_one_that_breaks_the_contract_is_named(
        self, share: Share, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(REDUCTIONS, "_entries", {"mine": lambda counts, config: share})
        with pytest.raises(ConfigError, match=r"loss_reduction=mine returned Share.* for a sequence of 7 tokens"):
            Objective(AlgorithmConfig(loss_reduction="mine")).share(alone(7))

    @pytest.mark.parametrize("returned", [None, 1.0, (1.0,), ("1", 1)], ids=str)
    def test_one_that_returns_no_share_or_raises_is_named(
        self, returned: object, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(REDUCTIONS._entries, "mine", lambda counts, config: returned)
        with pytest.raises(ConfigError, match=r"loss_reduction=mine raised TypeError"):
            Objective(AlgorithmConfig(loss_reduction="mine")).share(alone(7))

    @staticmethod
    def losses(ragged: list[list[bool]], data: st.DataObject) -> list[list[float]]:
        return [data.draw(st.lists(rewards, min_size=len(mask), max_size=len(mask))) for mask in ragged]

    @staticmethod
    def reduced(reduction: Reduction, losses: list[list[float]], ragged: list[list[bool]]) -> float:
        shares = [reduction(alone(sum(mask)), ALGORITHM) for mask in ragged]
        total = 0.0
        for share, row, mask in zip(shares, losses, ragged, strict=True):
            total += sum(share.token_weight * x for x, m in zip(row, mask, strict=True) if m)
        return total * reduction_scale(share.denominator for share in shares)


class TestRegistries:
    @pytest.mark.parametrize(
        ("registry", "known"),
        [
            (ADVANTAGE_ESTIMATORS, ["gae", "grpo", "maxrl", "reinforce++", "rloo"]),
            (
                POLICY_LOSSES,
                ["cispo", "clip_cov", "dual_clip", "gspo", "importance_sampling", "kl_cov", "ppo_clip", "sapo"],
            ),
            (CORRECTIONS, ["geometric", "icepop", "sequence", "token"]),
            (REJECTION_STATISTICS, ["k1", "k2", "k3", "probability_difference", "ratio"]),
            (REDUCTIONS, ["prompt_mean", "seq_mean_token_sum_norm", "sequence_mean", "token_mean"]),
        ],
    )
    def test_know_the_names_that_the_configuration_documents(
        self, registry: Registry[object], known: list[str]
    ) -> None:
        assert [name for name in registry.names() if name != "modelled"] == known

    def test_an_unknown_name_is_rejected_with_the_nearest_and_all_known_ones(self) -> None:
        with pytest.raises(ConfigError) as caught:
            REDUCTIONS.get("token_maen")
        message = str(caught.value)
        assert "trainer.algorithm.loss_reduction='token_maen'" in message
        assert "Did you mean 'token_mean'?" in message
        assert "sequence_mean, token_mean" in message

    def test_the_message_names_the_setting_that_has_the_value_and_guesses_no_name_that_is_far_away(self) -> None:
        with pytest.raises(ConfigError, match=r"^my\.setting='zzzzzz' is unknown\. Known: prompt_mean"):
            REDUCTIONS.get("zzzzzz", "my.setting")

    def test_a_name_is_registered_once(self) -> None:
        registry: Registry[int] = Registry("a.setting")
        registry.register("one")(1)
        with pytest.raises(ConfigError, match=r"a\.setting: 'one' is registered already"):
            registry.register("one")(2)
        assert registry.get("one") == 1

    def test_an_import_path_is_a_name(self) -> None:
        assert REDUCTIONS.get("skyrl_train.algorithms.reductions:token_mean") is token_mean
        with pytest.raises(ConfigError, match=r"trainer\.algorithm\.loss_reduction='no\.such' cannot be imported"):
            REDUCTIONS.get("no.such")

"""Our advantages, losses, KL, corrections and reductions against SkyRL's own functions.

SkyRL computes ratios in float32, so equal means within 1e-6.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import (
    CLOSE,
    Batch,
    Outcome,
    assert_equal,
    assert_same,
    our_advantages,
    our_correction,
    our_loss,
    outcome_rewards,
    random_batch,
    settings,
    their_loss,
)
from documented import documented_dppo

from skyrl_train.algorithms import kl
from skyrl_train.algorithms.advantages import gae
from skyrl_train.algorithms.losses import value_loss
from skyrl_train.config.schema import RejectionConfig, RejectionLevel

pytestmark = pytest.mark.oracle


def skyrl_settings(skyrl: SimpleNamespace, **changes: Any) -> Any:
    """SkyRL's settings with ``a__b=value`` set at ``a.b``."""
    config = skyrl.settings.AlgorithmConfig()
    for key, value in changes.items():
        *path, name = key.split("__")
        node: Any = config
        for part in path:
            node = getattr(node, part)
        assert hasattr(node, name), key
        setattr(node, name, value)
    return config


def skyrl_loss(skyrl: SimpleNamespace, batch: Batch, **changes: Any) -> Outcome:
    """SkyRL's policy loss: advantages are scaled for the reduction, then losses are summed."""
    config = skyrl_settings(skyrl, **changes)
    starts = [row for row, group in enumerate(batch.groups) if row == 0 or batch.groups[row - 1] != group]
    scaled = skyrl.ppo.apply_loss_reduction_to_advantages_minibatch(
        batch.advantages,
        batch.weight,
        config.loss_reduction,
        micro_batch_size=len(batch.groups),
        max_seq_len=config.max_seq_len,
        prompt_boundaries=list(zip(starts, [*starts[1:], len(batch.groups)], strict=True)),
    )
    function = skyrl.ppo.PolicyLossRegistry.get(config.policy_loss_type)
    return their_loss(
        batch,
        lambda current: function(current, batch.proximal, scaled, config, batch.weight, batch.behaviour)[0],
    )


# Advantages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("grpo", {}),
        ("grpo", {"grpo_norm_by_std": False}),
        ("rloo", {"advantage_estimator": "rloo"}),
    ],
)
def test_advantages_within_groups(skyrl: SimpleNamespace, name: str, ours: dict[str, Any], seed: int) -> None:
    batch = random_batch(seed, groups=(0, 0, 0, 0, 1, 1))
    rewards = outcome_rewards(batch, seed)
    theirs, _ = skyrl.ppo.compute_advantages_and_returns(
        rewards.clone(), batch.weight, batch.index, name, None, grpo_norm_by_std=ours.get("grpo_norm_by_std", True)
    )
    assert_equal(our_advantages(rewards, batch.mask, batch.groups, settings(**ours)), theirs, CLOSE)


def test_maxrl(skyrl: SimpleNamespace) -> None:
    """1e-6 is added to SkyRL's mean, so rewards are large here."""
    batch = random_batch(groups=(0, 0, 0, 0, 1, 1))
    rewards = outcome_rewards(batch, scale=1e3).abs()
    theirs, _ = skyrl.ppo.compute_advantages_and_returns(rewards.clone(), batch.weight, batch.index, "maxrl", None)
    ours = our_advantages(rewards, batch.mask, batch.groups, settings(advantage_estimator="maxrl"))
    assert_equal(ours, theirs, CLOSE)


@pytest.mark.parametrize(("name", "lonely"), [("grpo", 1 / (1 + 1e-6)), ("rloo", 0.0), ("maxrl", 1.0)])
def test_a_group_of_one_has_no_advantage_and_skyrl_may_train_on_its_reward(
    skyrl: SimpleNamespace, name: str, lonely: float
) -> None:
    batch = random_batch(lengths=(2,), groups=(0,), tools=False)
    rewards = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    theirs, _ = skyrl.ppo.compute_advantages_and_returns(rewards.clone(), batch.weight, batch.index, name, None)
    assert theirs[0].tolist() == pytest.approx([lonely] * 2, rel=CLOSE)
    ours = our_advantages(rewards, batch.mask, batch.groups, settings(advantage_estimator=name))
    assert ours.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_without_tools(skyrl: SimpleNamespace, gamma: float) -> None:
    batch = random_batch(tools=False)
    rewards = 1e3 * batch.advantages * batch.mask  # large: see verl's tests
    theirs, _ = skyrl.ppo.compute_advantages_and_returns(
        rewards.clone(), batch.weight, batch.index, "reinforce++", None, gamma=gamma
    )
    config = settings(advantage_estimator="reinforce++", gamma=gamma)
    assert_equal(our_advantages(rewards, batch.mask, batch.groups, config), theirs, CLOSE)


def test_reinforce_plus_plus_reaches_back_over_a_tools_result_and_in_skyrl_it_does_not(skyrl: SimpleNamespace) -> None:
    mask = torch.tensor([[True, False, True]])
    rewards = torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)
    _, returns = skyrl.ppo.compute_reinforce_plus_plus_outcome_advantage(rewards, mask.double(), gamma=1.0)
    assert returns.tolist() == [[0.0, 1.0, 1.0]]  # the reward reaches the tool's result and ends there
    config = settings(advantage_estimator="reinforce++", advantage_batch_normalize=False)
    assert our_advantages(rewards, mask, (0,), config).tolist() == [[1.0, 0.0, 1.0]]


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.95, 0.9), (1.0, 0.0)])
def test_gae_without_tools(skyrl: SimpleNamespace, gamma: float, lambd: float) -> None:
    batch = random_batch(tools=False)
    rewards, values = 1e3 * batch.advantages, 1e3 * batch.entropy
    theirs, returns = skyrl.ppo.compute_advantages_and_returns(
        rewards, batch.weight, batch.index, "gae", None, values=values, gamma=gamma, lambd=lambd
    )
    config = settings(advantage_estimator="gae", gamma=gamma, lambd=lambd)
    assert_equal(our_advantages(rewards, batch.mask, batch.groups, config, values), theirs * batch.mask, CLOSE)
    raw = [gae(*row, gamma, lambd)[1] for row in zip(rewards, values, batch.mask, strict=True)]
    assert_equal(torch.stack(raw), returns * batch.mask)


def test_a_tools_result_takes_no_time_in_gae_and_skyrl_steps_over_its_tokens(skyrl: SimpleNamespace) -> None:
    mask = torch.tensor([[True, False, True]])
    rewards = torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)
    values = torch.tensor([[0.0, 5.0, 0.0]], dtype=torch.float64)
    _, returns = skyrl.ppo.compute_gae_advantage_return(rewards, values, mask.double(), gamma=0.5, lambd=0.0)
    assert returns[0, 0].item() == 2.5  # half the value of the tool's token
    assert gae(rewards[0], values[0], mask[0], 0.5, 0.0)[1][0].item() == 0.0  # half the value of the next sampled one


# Policy losses and reductions -----------------------------------------------------------------------------------------

CLIP = {"eps_clip_low": 0.2, "eps_clip_high": 0.28}
REDUCTIONS = ["token_mean", "sequence_mean", "prompt_mean", "seq_mean_token_sum_norm"]


@pytest.mark.parametrize("extreme", [0.0, 30.0])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("ppo_clip", CLIP),
        ("dual_clip", {**CLIP, "clip_ratio_c": 3.0}),
        ("cispo", {"cispo__cispo_eps_clip_low": 0.5, "cispo__cispo_eps_clip_high": 2.0}),
        ("sapo", {"sapo__tau_pos": 1.0, "sapo__tau_neg": 1.3}),
    ],
)
def test_policy_loss_of_tokens(
    skyrl: SimpleNamespace, name: str, same: dict[str, Any], reduction: str, extreme: float
) -> None:
    batch = random_batch(extreme=extreme)
    same = {**same, "loss_reduction": reduction, "max_seq_len": 32}
    theirs = skyrl_loss(skyrl, batch, policy_loss_type="regular" if name == "ppo_clip" else name, **same)
    assert_same(our_loss(batch, settings(policy_loss_type=name, **same)), theirs, CLOSE)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gspo(skyrl: SimpleNamespace, reduction: str, seed: int) -> None:
    batch = random_batch(seed, spread=0.1)
    same = {
        "policy_loss_type": "gspo",
        "loss_reduction": reduction,
        "max_seq_len": 32,
        "eps_clip_low": 0.02,
        "eps_clip_high": 0.03,
    }
    assert_same(our_loss(batch, settings(**same)), skyrl_loss(skyrl, batch, **same))


def test_importance_sampling_is_a_mean_and_in_skyrl_a_sum(skyrl: SimpleNamespace) -> None:
    """SkyRL's scaled advantages make the same mean of it."""
    batch = random_batch(extreme=5.0)
    ours = our_loss(batch, settings(policy_loss_type="importance_sampling"))
    assert_same(ours, skyrl_loss(skyrl, batch, policy_loss_type="importance_sampling"))


@pytest.mark.parametrize("seed", range(5))
def test_dppo_as_documented(skyrl: SimpleNamespace, seed: int) -> None:
    """In the first pass, below the cap of 20."""
    batch = random_batch(seed, spread=1.0).first_pass()
    bounds = {"dppo__dppo_type": "binary_tv", "dppo__delta_low": 0.2, "dppo__delta_high": 0.2}
    ratio = (batch.current - batch.behaviour).exp()[batch.mask]
    assert (ratio > 2).any() and (ratio < 20).all()
    ours = our_loss(batch, documented_dppo())
    assert (ours.gradient == 0)[batch.mask].any()
    assert_same(ours, skyrl_loss(skyrl, batch, policy_loss_type="dppo", **bounds), CLOSE)


def test_skyrls_dppo_has_no_cap(skyrl: SimpleNamespace) -> None:
    batch = random_batch(lengths=(1,), groups=(0,)).first_pass()
    batch = replace(
        batch,
        current=torch.full_like(batch.current, -6.0),
        proximal=torch.full_like(batch.current, -6.0),
        behaviour=torch.full_like(batch.current, -10.0),
        advantages=torch.ones_like(batch.current),
    )
    bounds = {"dppo__dppo_type": "binary_tv", "dppo__delta_low": 0.2, "dppo__delta_high": 0.2}
    assert our_loss(batch, documented_dppo()).loss.item() == pytest.approx(-20.0)
    theirs = skyrl_loss(skyrl, batch, policy_loss_type="dppo", **bounds)
    assert theirs.loss.item() == pytest.approx(-math.exp(4.0), rel=CLOSE)


def shifted(seed: int) -> Batch:
    """All current log-probs are shifted by the same number, so both policies give the same covariances."""
    batch = random_batch(seed)
    return replace(batch, current=batch.proximal + 0.1)


@pytest.mark.parametrize("seed", range(3))
def test_kl_covs_penalty_is_a_mean_over_tokens_and_in_skyrl_a_sum(skyrl: SimpleNamespace, seed: int) -> None:
    """The number of tokens divides SkyRL's advantages only."""
    batch = shifted(seed)
    tokens = int(batch.mask.sum())
    share = 8 / tokens
    ours = our_loss(batch, settings(policy_loss_type="kl_cov", kl_cov__kl_cov_frac=share, kl_cov__ppo_kl_coef=0.5))
    same = {"policy_loss_type": "kl_cov", "kl_cov__kl_cov_frac": share}
    assert_same(ours, skyrl_loss(skyrl, batch, **same, kl_cov__ppo_kl_coef=0.5 / tokens))
    undivided = skyrl_loss(skyrl, batch, **same, kl_cov__ppo_kl_coef=0.5)
    assert (undivided.loss - ours.loss).item() == pytest.approx(0.5 * 0.1 * (8 - share))


@pytest.mark.parametrize("seed", range(3))
def test_clip_covs_bounds_apply_to_advantages_and_in_skyrl_to_scaled_ones(skyrl: SimpleNamespace, seed: int) -> None:
    """Where every candidate is chosen; otherwise both draw among the candidates, each in its own way."""
    batch = shifted(seed)
    tokens = int(batch.mask.sum())
    same = {"policy_loss_type": "clip_cov", "clip_cov__clip_ratio": 1.0, **CLIP}
    ours = our_loss(batch, settings(**same, clip_cov__clip_cov_lb=0.05, clip_cov__clip_cov_ub=5.0))
    assert ((ours.gradient == 0) & batch.mask).any(), "some are chosen"
    scaled = {"clip_cov__clip_cov_lb": 0.05 / tokens, "clip_cov__clip_cov_ub": 5.0 / tokens}
    assert_same(ours, skyrl_loss(skyrl, batch, **same, **scaled))


@pytest.mark.parametrize("reduction", ["sequence_mean", "seq_mean_token_sum_norm", "token_mean", "prompt_mean"])
def test_an_empty_sequence_counts_in_both_means(skyrl: SimpleNamespace, reduction: str) -> None:
    batch = random_batch()
    batch.mask[0] = False
    same = {"loss_reduction": reduction, "max_seq_len": 32}
    assert_same(our_loss(batch, settings(**same)), skyrl_loss(skyrl, batch, **same), CLOSE)


# KL and values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_kl_estimators(skyrl: SimpleNamespace, name: str) -> None:
    batch = random_batch(spread=0.5)
    ours = their_loss(batch, lambda current: (getattr(kl, name)(current, batch.reference) * batch.mask).sum())
    theirs = their_loss(
        batch, lambda current: skyrl.ppo.compute_approx_kl(current, batch.reference, batch.weight, name).sum()
    )
    assert_same(ours, theirs)


def test_skyrls_k3_is_at_most_10_and_ours_grows_on(skyrl: SimpleNamespace) -> None:
    current, reference = torch.tensor([[-8.0]]), torch.tensor([[-4.0]])
    assert skyrl.ppo.compute_approx_kl(current, reference, kl_estimator_type="k3").item() == 10.0
    assert kl.k3(current, reference).item() == pytest.approx(math.exp(4.0) - 5)


def test_value_loss_of_sequences_of_one_length(skyrl: SimpleNamespace) -> None:
    batch = random_batch(lengths=(9, 9, 9), groups=(0, 0, 1), spread=1.0)
    theirs = their_loss(
        batch,
        lambda values: skyrl.ppo.ppo_critic_loss(
            values, batch.proximal, batch.reference, skyrl_settings(skyrl, value_clip=0.2), batch.weight
        )[0],
    )
    assert_same(our_value_loss(batch), theirs)


def test_the_value_loss_is_a_mean_over_tokens_and_in_skyrl_over_sequences(skyrl: SimpleNamespace) -> None:
    batch = random_batch(lengths=(1, 3), groups=(0, 1), tools=False)
    batch = replace(batch, proximal=batch.current, reference=batch.current - torch.tensor([[2.0], [0.0]]))
    theirs, _ = skyrl.ppo.ppo_critic_loss(
        batch.current, batch.proximal, batch.reference, skyrl_settings(skyrl), batch.weight
    )
    assert theirs.item() == pytest.approx(1.0)  # (2^2 + 0) / 2 sequences / 2
    assert our_value_loss(batch).loss.item() == pytest.approx(0.5)  # (2^2 + 0 + 0 + 0) / 4 tokens / 2


def our_value_loss(batch: Batch) -> Outcome:
    mask = batch.mask
    return their_loss(
        batch, lambda values: value_loss(values[mask], batch.proximal[mask], batch.reference[mask], 0.2)[0].mean()
    )


# Off-policy correction ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "same",
    [
        {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.5},
        {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.2},
    ],
    ids=["token", "sequence"],
)
def test_the_loss_with_weights(skyrl: SimpleNamespace, same: dict[str, Any], seed: int) -> None:
    batch = random_batch(seed)
    both = {f"off_policy_correction__{key}": value for key, value in same.items()}
    assert_same(our_loss(batch, settings(**both)), skyrl_loss(skyrl, batch, **both), CLOSE)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("rule", "theirs"),
    [
        (
            RejectionConfig("ratio", RejectionLevel.token, 0.8, 1.3),
            {"token_mask_is_threshold_low": 0.8, "token_mask_is_threshold_high": 1.3},
        ),
        (
            RejectionConfig("ratio", RejectionLevel.sequence_max, 0.5, 1.8),
            {"outlier_token_is_threshold_low": 0.5, "outlier_token_is_threshold_high": 1.8},
        ),
        (
            RejectionConfig("ratio", RejectionLevel.sequence_mean, 0.9, 1.1),
            {"sequence_mask_metric": "geometric", "geo_mask_low": 0.9, "geo_mask_high": 1.1},
        ),
        (
            RejectionConfig("ratio", RejectionLevel.sequence_sum, 0.5, 2.0),
            {"sequence_mask_metric": "product", "product_mask_low": 0.5, "product_mask_high": 2.0},
        ),
    ],
    ids=["token", "outlier", "geometric", "product"],
)
def test_the_loss_with_rejections(
    skyrl: SimpleNamespace, rule: RejectionConfig, theirs: dict[str, Any], seed: int
) -> None:
    """Rejected tokens leave the numerator and not the denominator, on both sides."""
    batch = random_batch(seed)
    config = settings(off_policy_correction__rejections=[rule])
    _, kept = our_correction(batch, config)
    assert kept.any() and (batch.mask & ~kept).any()
    other = skyrl_loss(skyrl, batch, **{f"off_policy_correction__{key}": value for key, value in theirs.items()})
    assert_same(our_loss(batch, config), other, CLOSE)


def test_a_rule_about_sequences_sees_all_their_tokens_and_in_skyrl_only_those_that_token_rules_kept(
    skyrl: SimpleNamespace,
) -> None:
    """Ratios of 3 and 1: the token rule rejects the first, and the geometric mean of both is out of bounds."""
    batch = random_batch(lengths=(2,), groups=(0,), tools=False)
    batch = replace(batch, behaviour=batch.proximal - torch.tensor([[3.0, 1.0]], dtype=torch.float64).log())
    correction = skyrl_settings(
        skyrl,
        off_policy_correction__token_mask_is_threshold_low=0.5,
        off_policy_correction__token_mask_is_threshold_high=2.0,
        off_policy_correction__sequence_mask_metric="geometric",
        off_policy_correction__geo_mask_low=0.9,
        off_policy_correction__geo_mask_high=1.1,
    ).off_policy_correction
    _, _, theirs = skyrl.correction.compute_off_policy_correction(
        batch.proximal, batch.behaviour, batch.weight, correction
    )
    rules = [
        RejectionConfig("ratio", RejectionLevel.token, 0.5, 2.0),
        RejectionConfig("ratio", RejectionLevel.sequence_mean, 0.9, 1.1),
    ]
    _, kept = our_correction(batch, settings(off_policy_correction__rejections=rules))
    assert theirs.tolist() == [[0.0, 1.0]] and kept.tolist() == [[False, False]]

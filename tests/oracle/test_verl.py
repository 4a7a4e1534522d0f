"""Our advantages, losses, KL, corrections and reductions against verl's own functions."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import (
    CLOSE,
    EXACT,
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
from skyrl_train.training.objective import Objective, TokenFields

pytestmark = pytest.mark.oracle

UNBOUNDED = 1e30
MODES = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "seq_mean_token_sum_norm": "seq-mean-token-sum-norm",
}


def actor_config(verl: SimpleNamespace, **changes: Any) -> Any:
    loss = {name: changes.pop(name) for name in list(changes) if name in verl.config.PolicyLossConfig.__annotations__}
    known = {"strategy": "fsdp", "rollout_n": 1, "use_dynamic_bsz": True} | changes
    return verl.config.ActorConfig(**known, policy_loss=verl.config.PolicyLossConfig(**loss))


def verl_loss(verl: SimpleNamespace, name: str, batch: Batch, mode: str = "token-mean", **changes: Any) -> Outcome:
    """verl's policy loss; ``is_weights`` are its rollout correction, ``mask`` its response mask."""
    weights, mask = changes.pop("is_weights", None), changes.pop("mask", batch.weight)
    info = changes.pop("info", {})
    config = actor_config(verl, **changes)
    config.global_batch_info.update(info)
    function = verl.algos.get_policy_loss_fn(name)
    return their_loss(
        batch,
        lambda current: function(
            batch.proximal, current, batch.advantages, mask, mode, config, rollout_is_weights=weights
        )[0],
    )


# Advantages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_by_std", [True, False])
@pytest.mark.parametrize("name", ["compute_grpo_outcome_advantage", "compute_grpo_vectorized_outcome_advantage"])
@pytest.mark.parametrize("seed", range(3))
def test_grpo(verl: SimpleNamespace, name: str, norm_by_std: bool, seed: int) -> None:
    batch = random_batch(seed, groups=(0, 0, 0, 1, 1, 1))
    rewards = outcome_rewards(batch, seed)
    theirs, _ = getattr(verl.algos, name)(
        rewards.clone(), batch.weight, batch.index, norm_adv_by_std_in_grpo=norm_by_std
    )
    ours = our_advantages(rewards, batch.mask, batch.groups, settings(grpo_norm_by_std=norm_by_std))
    assert_equal(ours, theirs, CLOSE)


def test_grpo_over_groups_of_different_sizes(verl: SimpleNamespace) -> None:
    batch = random_batch(groups=(0, 0, 0, 0, 1, 1))
    rewards = outcome_rewards(batch)
    theirs, _ = verl.algos.compute_grpo_outcome_advantage(rewards.clone(), batch.weight, batch.index)
    assert_equal(our_advantages(rewards, batch.mask, batch.groups, settings()), theirs, CLOSE)


@pytest.mark.parametrize("name", ["compute_rloo_outcome_advantage", "compute_rloo_vectorized_outcome_advantage"])
def test_rloo_over_groups_of_different_sizes(verl: SimpleNamespace, name: str) -> None:
    batch = random_batch(groups=(0, 0, 0, 0, 1, 1))
    rewards = outcome_rewards(batch)
    theirs, _ = getattr(verl.algos, name)(rewards.clone(), batch.weight, batch.index)
    ours = our_advantages(rewards, batch.mask, batch.groups, settings(advantage_estimator="rloo"))
    assert_equal(ours, theirs, CLOSE)


def test_a_group_of_one_has_no_advantage_and_verls_grpo_trains_on_its_reward(verl: SimpleNamespace) -> None:
    batch = random_batch(lengths=(3,), groups=(0,), tools=False)
    rewards = torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)
    theirs, _ = verl.algos.compute_grpo_outcome_advantage(rewards.clone(), batch.weight, batch.index)
    assert theirs[0].tolist() == pytest.approx([1 / (1 + 1e-6)] * 3, rel=CLOSE)
    assert our_advantages(rewards, batch.mask, batch.groups, settings()).tolist() == [[0.0] * 3]


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("tools", [False, True])
def test_reinforce_plus_plus_with_rewards_on_sampled_tokens(verl: SimpleNamespace, gamma: float, tools: bool) -> None:
    batch = random_batch(tools=tools)
    # Large rewards, so that the numbers added to the deviation (1e-6) and to the variance (1e-8) do not show.
    rewards = 1e3 * batch.advantages * batch.mask
    theirs, _ = verl.algos.compute_reinforce_plus_plus_outcome_advantage(
        rewards.clone(), batch.weight, config=verl.AlgoConfig(gamma=gamma)
    )
    config = settings(advantage_estimator="reinforce++", gamma=gamma)
    assert_equal(our_advantages(rewards, batch.mask, batch.groups, config), theirs, CLOSE)


def test_a_reward_on_a_tools_result_counts_for_the_token_before_it_and_in_verl_for_none(verl: SimpleNamespace) -> None:
    mask = torch.tensor([[True, False, True, True]])
    rewards = torch.tensor([[0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    _, returns = verl.algos.compute_reinforce_plus_plus_outcome_advantage(
        rewards.clone(), mask.double(), config=verl.AlgoConfig(gamma=1.0)
    )
    assert returns.tolist() == [[0.0, 0.0, 0.0, 0.0]]
    config = settings(advantage_estimator="reinforce++", advantage_batch_normalize=False)
    assert our_advantages(rewards, mask, (0,), config).tolist() == [[1.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.95, 0.9), (1.0, 0.0)])
def test_gae(verl: SimpleNamespace, gamma: float, lambd: float, tools: bool) -> None:
    batch = random_batch(tools=tools)
    rewards = 1e3 * batch.advantages * batch.mask
    values = 1e3 * batch.entropy
    theirs, returns = verl.algos.compute_gae_advantage_return(rewards, values, batch.weight, gamma, lambd)
    config = settings(advantage_estimator="gae", gamma=gamma, lambd=lambd)
    ours = our_advantages(rewards, batch.mask, batch.groups, config, values)
    assert_equal(ours, theirs * batch.mask, CLOSE)
    raw = [gae(*row, gamma, lambd)[1] for row in zip(rewards, values, batch.mask, strict=True)]
    assert_equal(torch.stack(raw), returns * batch.mask)


def test_small_advantages_are_normalised_less_than_in_verl(verl: SimpleNamespace) -> None:
    """1e-6 is added to the deviation, in verl 1e-8 to the variance."""
    mask = torch.ones(1, 2, dtype=torch.bool)
    rewards = torch.tensor([[2e-6, 0.0]], dtype=torch.float64)  # returns 2e-6 and 0, whose deviation is sqrt(2) * 1e-6
    config = settings(advantage_estimator="reinforce++")
    ours = our_advantages(rewards, mask, (0,), config)
    theirs, _ = verl.algos.compute_reinforce_plus_plus_outcome_advantage(
        rewards.clone(), mask.double(), config=verl.AlgoConfig(gamma=1.0)
    )
    assert ours[0].tolist() == pytest.approx([1 / (1 + 2**0.5), -1 / (1 + 2**0.5)], rel=1e-5)
    assert theirs[0].tolist() == pytest.approx([0.01, -0.01], rel=1e-3)


# Policy losses --------------------------------------------------------------------------------------------------------

CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
OUR_CLIP = {"eps_clip_low": 0.2, "eps_clip_high": 0.28}


@pytest.mark.parametrize("extreme", [0.0, 5.0, 30.0])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("vanilla", {"policy_loss_type": "ppo_clip", **OUR_CLIP}, {**CLIP, "clip_ratio_c": UNBOUNDED}),
        ("vanilla", {"policy_loss_type": "dual_clip", "clip_ratio_c": 3.0, **OUR_CLIP}, {**CLIP, "clip_ratio_c": 3.0}),
        (
            "vanilla",
            {"policy_loss_type": "importance_sampling"},
            {"clip_ratio_low": 1.0, "clip_ratio_high": UNBOUNDED, "clip_ratio_c": UNBOUNDED},
        ),
        ("cispo", {"policy_loss_type": "cispo"}, {"clip_ratio_low": 1.0, "clip_ratio_high": 5.0}),
    ],
    ids=["ppo_clip", "dual_clip", "importance_sampling", "cispo"],
)
def test_policy_loss_of_tokens(
    verl: SimpleNamespace, name: str, ours: dict[str, Any], theirs: dict[str, Any], seed: int, extreme: float
) -> None:
    batch = random_batch(seed, extreme=extreme)
    assert_same(our_loss(batch, settings(**ours)), verl_loss(verl, name, batch, **theirs))


@pytest.mark.parametrize("seed", range(3))
def test_sapo(verl: SimpleNamespace, seed: int) -> None:
    batch = random_batch(seed, extreme=30.0)
    ours = our_loss(batch, settings(policy_loss_type="sapo", loss_reduction="sequence_mean"))
    assert_same(ours, verl_loss(verl, "sapo", batch), CLOSE)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_gspo(verl: SimpleNamespace, reduction: str, seed: int) -> None:
    batch = random_batch(seed, spread=0.1)
    ours = our_loss(
        batch, settings(policy_loss_type="gspo", loss_reduction=reduction, eps_clip_low=0.02, eps_clip_high=0.03)
    )
    theirs = verl_loss(verl, "gspo", batch, MODES[reduction], clip_ratio_low=0.02, clip_ratio_high=0.03)
    assert_same(ours, theirs, CLOSE)


def shifted(seed: int, by: float, **changes: Any) -> Batch:
    """All current log-probs are shifted by the same number, so both policies give the same covariances."""
    batch = random_batch(seed, **changes)
    return replace(batch, current=batch.proximal + by)


@pytest.mark.parametrize("seed", range(3))
def test_kl_cov(verl: SimpleNamespace, seed: int) -> None:
    batch = shifted(seed, 0.3)
    share = 8 / int(batch.mask.sum())
    ours = our_loss(batch, settings(policy_loss_type="kl_cov", kl_cov__kl_cov_frac=share, kl_cov__ppo_kl_coef=0.5))
    theirs = verl_loss(verl, "kl_cov", batch, kl_cov_ratio=share, ppo_kl_coef=0.5)
    assert_same(ours, theirs)


def test_kl_cov_rounds_the_number_of_tokens_up_and_verl_down_to_at_least_one(verl: SimpleNamespace) -> None:
    batch = shifted(0, 0.3, lengths=(3,), groups=(0,), tools=False)
    ours = our_loss(batch, settings(policy_loss_type="kl_cov", kl_cov__kl_cov_frac=0.5, kl_cov__ppo_kl_coef=1.0))
    theirs = verl_loss(verl, "kl_cov", batch, kl_cov_ratio=0.5, ppo_kl_coef=1.0)
    assert (ours.loss - theirs.loss).item() == pytest.approx(0.3 / 3)  # the penalty of one more token of three


@pytest.mark.parametrize("seed", range(3))
def test_clip_cov_where_every_candidate_is_chosen(verl: SimpleNamespace, seed: int) -> None:
    """Otherwise both draw among the candidates, each in its own way."""
    batch = shifted(seed, 0.1)
    bounds = {"clip_cov_lb": 0.05, "clip_cov_ub": 5.0}
    ours = our_loss(
        batch,
        settings(
            policy_loss_type="clip_cov",
            clip_cov__clip_ratio=1.0,
            clip_cov__clip_cov_lb=0.05,
            clip_cov__clip_cov_ub=5.0,
            **OUR_CLIP,
        ),
    )
    assert ((ours.gradient == 0) & batch.mask).any(), "some are chosen"
    assert_same(ours, verl_loss(verl, "clip_cov", batch, clip_cov_ratio=1.0, **bounds, **CLIP))


@pytest.mark.parametrize("seed", range(5))
def test_dppo_as_documented_has_verls_gradient(verl: SimpleNamespace, seed: int) -> None:
    """In the first pass; verl's loss is of the form ``-sg(ratio) A log pi``, so values differ and gradients do not."""
    batch = random_batch(seed, spread=1.0).first_pass()
    batch.behaviour[1, 1] = batch.current[1, 1] - 4.0  # a ratio of 55
    mine = our_loss(batch, documented_dppo())
    theirs = verl_loss(
        verl,
        "dppo_tv",
        replace(batch, proximal=batch.behaviour),  # DPPO compares with the sampling policy
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        clip_ratio_c=20.0,
    )
    assert (mine.gradient == 0)[batch.mask].any() and (mine.gradient != 0).any()
    ratio = (batch.current - batch.behaviour).exp()[batch.mask]
    assert (ratio > 20).any() and ((ratio > 2) & (ratio < 20)).any()
    assert_equal(mine.gradient, theirs.gradient)


def test_verls_own_default_caps_dppos_weights_at_3(verl: SimpleNamespace) -> None:
    assert actor_config(verl).get("clip_ratio_c", 20.0) == 3.0


# Reductions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", MODES)
def test_reduction(verl: SimpleNamespace, reduction: str) -> None:
    batch = random_batch()
    theirs = verl_loss(verl, "vanilla", batch, MODES[reduction], info={"loss_scale_factor": 32}, clip_ratio_c=UNBOUNDED)
    assert_same(our_loss(batch, settings(loss_reduction=reduction, max_seq_len=32)), theirs, CLOSE)


@pytest.mark.parametrize("reduction", ["sequence_mean", "seq_mean_token_sum_norm"])
def test_an_empty_sequence_counts_in_the_mean_over_sequences_and_in_verl_only_with_the_global_batch_size(
    verl: SimpleNamespace, reduction: str
) -> None:
    batch = random_batch()
    batch.mask[0] = False
    ours = our_loss(batch, settings(loss_reduction=reduction, max_seq_len=32))
    scale = {"loss_scale_factor": 32}
    mode, sequences = MODES[reduction], len(batch.groups)
    told = verl_loss(
        verl, "vanilla", batch, mode, info=scale | {"global_batch_size": sequences}, clip_ratio_c=UNBOUNDED
    )
    assert_same(ours, told, CLOSE)
    counted = verl_loss(verl, "vanilla", batch, mode, info=scale, clip_ratio_c=UNBOUNDED)
    assert counted.loss.item() == pytest.approx(ours.loss.item() * sequences / (sequences - 1), rel=CLOSE)


# KL -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ours", "theirs"), [("k1", "kl"), ("k1", "k1"), ("k2", "mse"), ("k3", "low_var_kl")])
def test_kl_estimators(verl: SimpleNamespace, ours: str, theirs: str) -> None:
    batch = random_batch(spread=0.5)
    mine = their_loss(batch, lambda current: (getattr(kl, ours)(current, batch.reference) * batch.mask).sum())
    other = their_loss(
        batch, lambda current: (verl.algos.kl_penalty(current, batch.reference, theirs) * batch.mask).sum()
    )
    assert_same(mine, other)


def test_verls_k3_is_at_most_10_and_ours_grows_on(verl: SimpleNamespace) -> None:
    current, reference = torch.tensor([-8.0], requires_grad=True), torch.tensor([-4.0])
    theirs = verl.algos.kl_penalty(current, reference, "k3")
    assert theirs.item() == 10.0 and torch.autograd.grad(theirs.sum(), current)[0].item() == 0.0
    ours = kl.k3(current, reference)
    assert ours.item() == pytest.approx(torch.tensor(4.0).exp().item() - 5)
    assert torch.autograd.grad(ours.sum(), current)[0].item() < 0


def test_verls_straight_through_k3_has_the_gradient_of_our_k2(verl: SimpleNamespace) -> None:
    batch = random_batch()
    theirs = their_loss(
        batch, lambda current: (verl.algos.kl_penalty(current, batch.reference, "k3+") * batch.mask).sum()
    )
    k2 = their_loss(batch, lambda current: (kl.k2(current, batch.reference) * batch.mask).sum())
    assert_equal(k2.gradient, theirs.gradient)
    assert_equal((kl.k3(batch.current, batch.reference) * batch.mask).sum(), theirs.loss)


# Off-policy correction ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("ours", "level", "threshold"),
    [
        ({"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.5}, "token", 1.5),
        ({"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.2}, "sequence", 1.2),
        ({"tis_ratio_type": "icepop", "icepop_ratio_low": 0.8, "icepop_ratio_high": 1.3}, "token", "0.8_1.3"),
    ],
    ids=["token", "sequence", "icepop"],
)
def test_weights(verl: SimpleNamespace, ours: dict[str, Any], level: str, threshold: float | str, seed: int) -> None:
    batch = random_batch(seed)
    weights, _ = our_correction(batch, settings(**{f"off_policy_correction__{key}": v for key, v in ours.items()}))
    theirs, _ = verl.correction.compute_rollout_correction_weights(
        batch.proximal - batch.behaviour, batch.weight, level, threshold
    )
    assert len(weights[batch.mask].unique()) > 2
    assert_equal(weights, theirs)


LEVELS = {
    "token": RejectionLevel.token,
    "seq_sum": RejectionLevel.sequence_sum,
    "seq_mean": RejectionLevel.sequence_mean,
    "seq_max": RejectionLevel.sequence_max,
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("level", "statistic"),  # verl has no largest k1
    [pair for pair in itertools.product(LEVELS, ["k1", "k2", "k3"]) if pair != ("seq_max", "k1")],
)
def test_rejections(verl: SimpleNamespace, level: str, statistic: str, seed: int) -> None:
    batch = random_batch(seed, spread=0.5)
    high = {"token": 0.12, "seq_mean": 0.12, "seq_sum": 0.6, "seq_max": 0.5}[level]
    bounds, threshold = {"low": None, "high": high}, str(high)
    if statistic == "k1":  # verl gives bounds of -log r as exponentials
        bounds, threshold = {"low": -high, "high": high}, f"{math.exp(-high)}_{math.exp(high)}"
    _, kept = our_correction(
        batch, settings(off_policy_correction__rejections=[RejectionConfig(statistic, LEVELS[level], **bounds)])
    )
    theirs, _ = verl.correction.compute_rollout_rejection_mask(
        batch.proximal - batch.behaviour, batch.weight, f"{level}_{statistic}", threshold
    )
    assert kept.any() and (batch.mask & ~kept).any()
    assert torch.equal(kept, theirs.bool())


def corrected(verl: SimpleNamespace, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """verl's weights, and its response mask without the rejected tokens."""
    weights, mask, _ = verl.correction.compute_rollout_correction_and_rejection_mask(
        batch.proximal,
        batch.behaviour,
        batch.weight,
        rollout_is="token",
        rollout_is_threshold=1.5,
        rollout_rs="token_k2",
        rollout_rs_threshold=0.1,
    )
    return weights.batch["rollout_is_weights"], mask


CORRECTION = {
    "off_policy_correction__tis_ratio_type": "token",
    "off_policy_correction__token_tis_ratio_clip_high": 1.5,
    "off_policy_correction__rejections": [RejectionConfig("k2", RejectionLevel.token, None, 0.1)],
}


@pytest.mark.parametrize("seed", range(3))
def test_the_loss_with_weights_and_rejections(verl: SimpleNamespace, seed: int) -> None:
    batch = random_batch(seed)
    weights, mask = corrected(verl, batch)
    theirs = verl_loss(
        verl,
        "vanilla",
        batch,
        is_weights=weights,
        mask=mask,
        info={"batch_num_tokens": int(batch.mask.sum())},
        clip_ratio_c=UNBOUNDED,
    )
    assert_same(our_loss(batch, settings(**CORRECTION)), theirs)


def test_a_rejected_token_stays_in_the_denominator_and_leaves_verls(verl: SimpleNamespace) -> None:
    batch = random_batch()
    weights, mask = corrected(verl, batch)
    assert mask.sum() < batch.mask.sum()
    ours = our_loss(batch, settings(**CORRECTION))
    theirs = verl_loss(verl, "vanilla", batch, is_weights=weights, mask=mask, clip_ratio_c=UNBOUNDED)
    share_kept = mask.sum().item() / batch.mask.sum().item()
    assert theirs.loss.item() * share_kept == pytest.approx(ours.loss.item(), rel=EXACT)


def test_metrics_of_the_mismatch(verl: SimpleNamespace) -> None:
    batch = random_batch(spread=0.5)
    theirs = verl.correction.compute_offpolicy_metrics(batch.proximal, batch.behaviour, batch.weight)
    found = our_metrics(batch)
    assert found["off_policy/kl_k1"] == pytest.approx(theirs["kl"], rel=CLOSE)
    assert found["off_policy/kl_k3"] == pytest.approx(theirs["k3_kl"], rel=CLOSE)
    assert found["off_policy/chi2"] == pytest.approx(theirs["chi2_token"], rel=CLOSE)


def our_metrics(batch: Batch) -> dict[str, float]:
    objective = Objective(settings())
    rows, current = batch.mask.nonzero()[:, 0], batch.current[batch.mask]
    fields = TokenFields(
        batch.advantages[batch.mask],
        batch.behaviour[batch.mask],
        torch.ones_like(current),
        batch.proximal[batch.mask],
        rows,
        len(batch.groups),
        torch.zeros_like(rows),
    )
    return objective.metrics(objective.loss(current, batch.entropy[batch.mask], fields)[1], scale=1.0)


# KL and entropy in the loss, values -----------------------------------------------------------------------------------


def verl_full_loss(verl: SimpleNamespace, batch: Batch, config: Any, **fields: torch.Tensor) -> Outcome:
    """verl's ``ppo_loss``: policy loss, entropy bonus and KL term over nested rows of one prompt token and a response."""
    response = torch.ones_like(batch.mask)  # verl masks within rows; here all rows have the same length
    rows, length = batch.mask.shape

    def nested(values: torch.Tensor) -> torch.Tensor:
        # The model's output at a position belongs to the next token, so the last of each row is not used.
        padded = torch.cat([values, torch.zeros(rows, 1, dtype=values.dtype)], dim=1)
        return torch.nested.nested_tensor_from_jagged(padded.reshape(-1), offsets=torch.arange(rows + 1) * (length + 1))

    data = verl.TensorDict(
        {
            "prompts": torch.zeros(rows, 1, dtype=torch.int64),
            "responses": torch.zeros(rows, length, dtype=torch.int64),
            "attention_mask": torch.cat([response[:, :1], response], dim=1).long(),
            "response_mask": batch.mask,
            "old_log_probs": batch.proximal,
            "advantages": batch.advantages,
            "ref_log_prob": batch.reference,
            **fields,
        },
        batch_size=[rows],
    )
    for name, value in {"dp_size": 1, "batch_num_tokens": int(batch.mask.sum()), "global_batch_size": rows}.items():
        data[name] = verl.NonTensorData(value)
    return their_loss(
        batch,
        lambda current: verl.losses.ppo_loss(
            config, {"log_probs": nested(current), "entropy": nested(batch.entropy)}, data
        )[0],
    )


@pytest.mark.parametrize("reduction", MODES)
@pytest.mark.parametrize(("ours", "theirs"), [("k2", "mse"), ("k3", "low_var_kl")])
def test_the_loss_with_kl_term_and_entropy_bonus(verl: SimpleNamespace, ours: str, theirs: str, reduction: str) -> None:
    batch = random_batch()
    config = actor_config(
        verl,
        clip_ratio_c=UNBOUNDED,
        use_kl_loss=True,
        kl_loss_coef=0.3,
        kl_loss_type=theirs,
        entropy_coeff=0.05,
        loss_agg_mode=MODES[reduction],
        loss_scale_factor=32,
    )
    mine = our_loss(
        batch,
        settings(kl_loss_coef=0.3, kl_estimator_type=ours, entropy_coef=0.05, loss_reduction=reduction, max_seq_len=32),
    )
    assert_same(mine, verl_full_loss(verl, batch, config), CLOSE)


def test_the_off_policy_weight_also_applies_to_the_kl_term_and_not_in_verl(verl: SimpleNamespace) -> None:
    """One token with ratio 4 to the sampling policy, weight 2, advantage 0: only the KL term is left."""
    batch = random_batch(lengths=(1,), groups=(0,)).first_pass()
    batch = replace(
        batch,
        behaviour=batch.current - torch.tensor(4.0).double().log(),
        advantages=torch.zeros_like(batch.current),
    )
    weight = torch.full_like(batch.current, 2.0)
    config = actor_config(verl, use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type="mse")
    theirs = verl_full_loss(verl, batch, config, rollout_is_weights=weight)
    ours = our_loss(
        batch, settings(kl_loss_coef=1.0, kl_estimator_type="k2", off_policy_correction__tis_ratio_type="token")
    )
    assert ours.loss.item() == pytest.approx(2 * theirs.loss.item(), rel=EXACT)


@pytest.mark.parametrize("seed", range(3))
def test_value_loss(verl: SimpleNamespace, seed: int) -> None:
    batch = random_batch(seed, spread=1.0)
    old, returns = batch.proximal, batch.reference
    theirs = their_loss(
        batch, lambda values: verl.algos.compute_value_loss(values, returns, old, batch.weight, cliprange_value=0.2)[0]
    )
    ours = their_loss(
        batch,
        lambda values: value_loss(values[batch.mask], old[batch.mask], returns[batch.mask], 0.2)[0].mean(),
    )
    assert_same(ours, theirs)

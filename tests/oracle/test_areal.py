"""Our advantages, losses, KL, corrections and proximal policies against AReaL's own functions.

AReaL names the current, the proximal and the behaviour policy ``logprobs``, ``proximal_logprobs`` and ``old_logprobs``.
Its correction and its advantages are computed in float32, so equal means within 1e-6 there.
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

from skyrl_train.algorithms import kl
from skyrl_train.algorithms.advantages import gae, overlong_penalty
from skyrl_train.algorithms.losses import value_loss
from skyrl_train.algorithms.off_policy import interpolated_logprobs
from skyrl_train.config.schema import OverlongConfig, RejectionConfig, RejectionLevel

pytestmark = pytest.mark.oracle

CORRECTION = "off_policy_correction__"


def areal_loss(
    areal: SimpleNamespace, batch: Batch, rejection: dict[str, Any] | None = None, **changes: Any
) -> Outcome:
    """AReaL's decoupled PPO."""
    config = None if rejection is None else areal.settings.RejectionSamplingConfig(**rejection)
    return their_loss(
        batch,
        lambda current: areal.functional.ppo_actor_loss_fn(
            current,
            batch.proximal,
            batch.behaviour,
            batch.advantages,
            loss_mask=batch.mask,
            rejection_sampling=config,
            **{"eps_clip": 0.2, "eps_clip_higher": 0.28} | changes,
        )[0],
    )


CLIP = {"eps_clip_low": 0.2, "eps_clip_high": 0.28}

# Policy losses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extreme", [0.0, 15.0])
@pytest.mark.parametrize("seed", range(3))
def test_ppo_clip(areal: SimpleNamespace, seed: int, extreme: float) -> None:
    batch = random_batch(seed, extreme=extreme)
    assert_same(our_loss(batch, settings(**CLIP)), areal_loss(areal, batch))


@pytest.mark.parametrize("extreme", [0.0, 15.0])
@pytest.mark.parametrize("seed", range(3))
def test_dual_clip(areal: SimpleNamespace, seed: int, extreme: float) -> None:
    batch = random_batch(seed, extreme=extreme)
    ours = our_loss(batch, settings(policy_loss_type="dual_clip", clip_ratio_c=3.0, **CLIP))
    assert_same(ours, areal_loss(areal, batch, c_clip=3.0))


def test_a_log_ratio_is_cut_at_20_and_not_in_areal(areal: SimpleNamespace) -> None:
    batch = random_batch(lengths=(1,), groups=(0,))
    batch = replace(batch, current=torch.zeros(1, 1), proximal=torch.full((1, 1), -30.0), advantages=-torch.ones(1, 1))
    assert our_loss(batch, settings(**CLIP)).loss.item() == pytest.approx(math.exp(20.0))
    assert areal_loss(areal, batch).loss.item() == pytest.approx(math.exp(30.0))


@pytest.mark.parametrize("seed", range(3))
def test_gspo_where_no_token_is_between_sampled_ones(areal: SimpleNamespace, seed: int) -> None:
    """AReaL's ratio is the sequence form of GSPO and takes the mean advantage of a sequence: equal for outcome rewards."""
    batch = random_batch(seed, spread=0.05)
    batch = replace(batch, advantages=batch.advantages[:, :1].expand_as(batch.advantages))
    ours = our_loss(batch, settings(policy_loss_type="gspo", eps_clip_low=0.02, eps_clip_high=0.03))
    theirs = areal_loss(areal, batch, importance_sampling_level="sequence", eps_clip=0.02, eps_clip_higher=0.03)
    assert_same(ours, theirs)


def test_gspo_keeps_the_advantage_of_each_token_and_areal_averages_over_the_sequence(areal: SimpleNamespace) -> None:
    batch = random_batch(lengths=(2,), groups=(0,)).first_pass()
    batch = replace(batch, advantages=torch.tensor([[2.0, 0.0]], dtype=torch.float64))
    ours = our_loss(batch, settings(policy_loss_type="gspo"))
    theirs = areal_loss(areal, batch, importance_sampling_level="sequence")
    assert ours.gradient[0].tolist() == pytest.approx([-1.0, 0.0])
    assert theirs.gradient[0].tolist() == pytest.approx([-0.5, -0.5])


@pytest.mark.parametrize("seed", range(3))
def test_sapo(areal: SimpleNamespace, seed: int) -> None:
    batch = random_batch(seed, extreme=10.0)
    theirs = their_loss(
        batch,
        lambda current: areal.functional.sapo_loss_fn(
            current, batch.proximal, batch.advantages, tau_pos=1.0, tau_neg=1.3, loss_mask=batch.mask
        )[0],
    )
    assert_same(our_loss(batch, settings(policy_loss_type="sapo", sapo__tau_pos=1.0, sapo__tau_neg=1.3)), theirs)


# Off-policy correction ------------------------------------------------------------------------------------------------

RATIO = RejectionConfig("ratio", RejectionLevel.sequence_mean, 0.9, 1.1)
CORRECTIONS = {
    "truncated tokens": (
        {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.3},
        {"level": "token", "action": "clamp", "upper": 1.3},
    ),
    "masked tokens": (
        {"tis_ratio_type": "icepop", "icepop_ratio_low": 0.8, "icepop_ratio_high": 1.3},
        {"level": "token", "action": "mask", "lower": 0.8, "upper": 1.3},
    ),
    "truncated sequences": (
        {"tis_ratio_type": "geometric", "sequence_tis_ratio_clip_high": 1.05},
        {"level": "sequence", "action": "clamp", "upper": 1.05},
    ),
    "masked sequences": (
        {"tis_ratio_type": "geometric", "sequence_tis_ratio_clip_high": 1e9, "rejections": [RATIO]},
        {"level": "sequence", "action": "mask", "lower": 0.9, "upper": 1.1},
    ),
    "second moments": (
        {
            "tis_ratio_type": "token",
            "token_tis_ratio_clip_high": 1e9,
            "rejections": [RejectionConfig("k2", RejectionLevel.token, None, 0.1)],
        },
        {"level": "token", "action": "mask", "metric": "kl_k2", "upper": 0.1},
    ),
    "mean second moments": (
        {
            "tis_ratio_type": "token",
            "token_tis_ratio_clip_high": 1e9,
            "rejections": [RejectionConfig("k2", RejectionLevel.sequence_mean, None, 0.08)],
        },
        {"level": "sequence", "action": "mask", "metric": "kl_k2", "upper": 0.08},
    ),
    "largest second moments": (
        {
            "tis_ratio_type": "token",
            "token_tis_ratio_clip_high": 1e9,
            "rejections": [RejectionConfig("k2", RejectionLevel.sequence_max, None, 0.3)],
        },
        {"level": "sequence", "action": "mask", "metric": "kl_k2", "agg": "max", "upper": 0.3},
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CORRECTIONS)
def test_decoupled_ppo_with_a_correction(areal: SimpleNamespace, name: str, seed: int) -> None:
    """The weights, the rejections, and the denominator, which counts rejected tokens on both sides."""
    ours, theirs = CORRECTIONS[name]
    batch = random_batch(seed)
    mine = our_loss(batch, settings(**CLIP, **{f"{CORRECTION}{key}": value for key, value in ours.items()}))
    uncorrected = our_loss(batch, settings(**CLIP))
    assert not torch.allclose(mine.gradient, uncorrected.gradient)
    assert_same(mine, areal_loss(areal, batch, theirs), CLOSE)


def kept_by_areal(areal: SimpleNamespace, batch: Batch, metric: str, upper: float) -> torch.Tensor:
    config = areal.settings.RejectionSamplingConfig(action="mask", metric=metric, upper=upper)
    return areal.functional.apply_rejection_sampling(
        batch.proximal, batch.behaviour, batch.mask, None, config
    ).loss_mask


def test_k3_of_the_rejections_estimates_another_divergence_than_areals(areal: SimpleNamespace) -> None:
    """Ours is ``r - 1 - log r`` with ``r = pi_prox / pi_behave``, AReaL's the same of ``1 / r``."""
    batch = random_batch(lengths=(2,), groups=(0,), tools=False)
    batch = replace(batch, behaviour=batch.proximal - torch.tensor([[2.0, -2.0]], dtype=torch.float64))
    rule = RejectionConfig("k3", RejectionLevel.token, None, 2.0)
    _, kept = our_correction(batch, settings(**{f"{CORRECTION}rejections": [rule]}))
    assert kept.tolist() == [[False, True]]  # e^2 - 3 = 4.4 and e^-2 + 1 = 1.1
    assert kept_by_areal(areal, batch, "kl_k3", 2.0).tolist() == [[True, False]]
    swapped = replace(batch, behaviour=batch.proximal, proximal=batch.behaviour)
    assert torch.equal(kept, kept_by_areal(areal, swapped, "kl_k3", 2.0))


def test_k1_of_the_rejections_has_the_other_sign_than_areals(areal: SimpleNamespace) -> None:
    batch = random_batch(lengths=(2,), groups=(0,), tools=False)
    batch = replace(batch, behaviour=batch.proximal - torch.tensor([[2.0, -2.0]], dtype=torch.float64))
    rule = RejectionConfig("k1", RejectionLevel.token, None, 1.0)
    _, kept = our_correction(batch, settings(**{f"{CORRECTION}rejections": [rule]}))
    assert kept.tolist() == [[True, False]]
    assert kept_by_areal(areal, batch, "kl_k1", 1.0).tolist() == [[False, True]]


@pytest.mark.parametrize("seed", range(5))
def test_m2po(areal: SimpleNamespace, seed: int) -> None:
    batch = random_batch(seed)
    kept = our_m2po(batch, 0.04)
    assert kept.any() and (batch.mask & ~kept).any()
    theirs = areal.actor._apply_m2po_masking(batch.behaviour, batch.proximal, batch.mask, 0.04)
    assert torch.equal(kept, theirs)


def test_m2po_may_reject_every_token_and_areal_keeps_one(areal: SimpleNamespace) -> None:
    batch = random_batch(lengths=(2,), groups=(0,), tools=False)
    batch = replace(batch, behaviour=batch.proximal - torch.tensor([[1.0, 2.0]], dtype=torch.float64))
    assert not our_m2po(batch, 0.04).any()
    theirs = areal.actor._apply_m2po_masking(batch.behaviour, batch.proximal, batch.mask, 0.04)
    assert theirs.tolist() == [[True, False]]


def our_m2po(batch: Batch, threshold: float) -> torch.Tensor:
    """Which tokens have a gradient; all would without M2PO."""
    batch = replace(batch, advantages=torch.ones_like(batch.current))
    config = settings(policy_loss_type="importance_sampling", **{f"{CORRECTION}m2po_threshold": threshold})
    return our_loss(batch, config).gradient != 0


def test_the_interpolated_proximal_policy(areal: SimpleNamespace) -> None:
    """A-3PO. AReaL interpolates towards the current policy, which is ours in the first pass."""
    batch = random_batch()
    versions = torch.arange(batch.mask.numel()).reshape(batch.mask.shape) % 5
    theirs = areal.actor.compute_prox_logp_approximations(
        batch.behaviour, batch.current, versions, current_version=4, method="loglinear"
    )["loglinear"]
    ours = interpolated_logprobs(batch.behaviour, batch.current, 4 - versions)
    assert_equal(ours, theirs, CLOSE)


# Advantages -----------------------------------------------------------------------------------------------------------


def areal_advantages(
    areal: SimpleNamespace,
    rewards: torch.Tensor,
    mask: torch.Tensor,
    values: torch.Tensor | None = None,
    reference: tuple[torch.Tensor, torch.Tensor] | None = None,
    **changes: Any,
) -> dict[str, torch.Tensor]:
    """``PPOActor.compute_advantages`` of one prompt token and a response in each row.

    Args:
        rewards: [B], of sequences. values: [B, T]. reference: behaviour and reference log-probs, [B, T].

    Returns:
        Advantages, returns and rewards, [B, T].
    """
    rows = len(mask)
    known = {"kl_ctl": 0.0, "reward_clip": math.inf, "mb_spec": areal.settings.MicroBatchSpec()} | changes
    actor = areal.actor.PPOActor(areal.settings.PPOActorConfig(experiment_name="", trial_name="", **known), None)
    prompt = torch.zeros(rows, 1)
    behaviour, of_reference = (torch.zeros(mask.shape),) * 2 if reference is None else reference
    # The end of a row is the end of its response, whichever tokens of it were sampled.
    lengths = torch.tensor([int(row.nonzero()[-1]) + 2 for row in mask])
    attention = torch.arange(mask.shape[1] + 2) < lengths[:, None]
    padding = torch.zeros(rows, 1)
    data = {
        "input_ids": torch.zeros(attention.shape, dtype=torch.int64),
        "attention_mask": attention.long(),
        "loss_mask": torch.cat([prompt, mask, padding], dim=1),
        "logprobs": torch.cat([prompt, behaviour, padding], dim=1).float(),
        "ref_logp": torch.cat([of_reference, padding, padding], dim=1).float(),
        "rewards": rewards.float(),
    }
    if values is not None:
        data["values"] = torch.cat([values, padding, padding], dim=1).float()
    result = actor._compute_advantages(data)
    # Entry t of a row belongs to token t + 1.
    return {name: result[name][:, : mask.shape[1]] for name in ("advantages", "returns", "tot_rewards")}


def of_sequences(rewards: torch.Tensor) -> torch.Tensor:
    return rewards.sum(1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("ours", "norm"),
    [
        ({}, {"mean_level": "group", "std_level": "group"}),
        ({"grpo_norm_by_std": False}, {"mean_level": "group", "std_level": None}),
        ({"advantage_estimator": "rloo"}, {"mean_level": "group", "std_level": None, "mean_leave1out": True}),
    ],
    ids=["grpo", "dr_grpo", "rloo"],
)
def test_advantages_within_groups(
    areal: SimpleNamespace, ours: dict[str, Any], norm: dict[str, Any], seed: int
) -> None:
    batch = random_batch(seed, groups=(0, 0, 0, 1, 1, 1))
    rewards = outcome_rewards(batch, seed)
    theirs = areal_advantages(
        areal,
        of_sequences(rewards),
        batch.mask,
        reward_norm=areal.settings.NormConfig(**norm, group_size=3, eps=1e-6),
    )
    mine = our_advantages(rewards, batch.mask, batch.groups, settings(**ours))
    assert_equal(mine, theirs["advantages"] * batch.mask, CLOSE)


def test_areal_adds_1e_5_to_the_deviation_unless_told_otherwise(areal: SimpleNamespace) -> None:
    norm = areal.settings.NormConfig(mean_level="group", std_level="group", group_size=2)
    mask = torch.ones(2, 1, dtype=torch.bool)
    theirs = areal_advantages(areal, torch.tensor([1e-5, 0.0]), mask, reward_norm=norm)["advantages"]
    ours = our_advantages(torch.tensor([[1e-5], [0.0]]), mask, (0, 0), settings())
    deviation = 1e-5 * 0.5**0.5
    assert theirs[0, 0].item() == pytest.approx(0.5e-5 / (deviation + 1e-5), rel=1e-4)
    assert ours[0, 0].item() == pytest.approx(0.5e-5 / (deviation + 1e-6), rel=1e-4)


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.95, 0.9)])
def test_gae(areal: SimpleNamespace, gamma: float, lambd: float) -> None:
    """Over tools' results too."""
    batch = random_batch()
    rewards, values = outcome_rewards(batch), batch.entropy * batch.mask
    theirs = areal_advantages(
        areal,
        of_sequences(rewards),
        batch.mask,
        values,
        discount=gamma,
        gae_lambda=lambd,
        adv_norm=areal.settings.NormConfig(eps=1e-6),
    )
    config = settings(advantage_estimator="gae", gamma=gamma, lambd=lambd)
    ours = our_advantages(rewards, batch.mask, batch.groups, config, values)
    assert_equal(ours, theirs["advantages"] * batch.mask, CLOSE)
    raw = [gae(*row, gamma, lambd)[1] for row in zip(rewards, values, batch.mask, strict=True)]
    assert_equal(torch.stack(raw), theirs["returns"] * batch.mask, CLOSE)


# KL, values, length ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_kl_estimators(areal: SimpleNamespace, name: str) -> None:
    batch = random_batch()
    estimate = areal.data.KLEstimator(name)
    ours = their_loss(batch, lambda current: (getattr(kl, name)(current, batch.reference) * batch.mask).sum())
    theirs = their_loss(batch, lambda current: (estimate(current, batch.reference) * batch.mask).sum())
    assert_equal(ours.loss, theirs.loss, CLOSE)
    assert_equal(ours.gradient, theirs.gradient, CLOSE)


def test_areals_k3_is_at_most_10_and_ours_grows_on(areal: SimpleNamespace) -> None:
    current, reference = torch.tensor([-8.0]), torch.tensor([-4.0])
    assert areal.data.KLEstimator("k3")(current, reference).item() == 10.0
    assert kl.k3(current, reference).item() == pytest.approx(math.exp(4.0) - 5)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_the_kl_penalty_on_rewards(areal: SimpleNamespace, name: str) -> None:
    batch = random_batch()
    theirs = areal_advantages(
        areal,
        torch.zeros(len(batch.groups)),
        batch.mask,
        reference=(batch.behaviour, batch.reference),
        kl_ctl=0.3,
        kl_estimator=name,
    )
    config = settings(kl_estimator_type=name)
    ours = [
        kl.kl_penalties(behaviour.tolist(), reference.tolist(), mask.tolist(), config)
        for behaviour, reference, mask in zip(batch.behaviour, batch.reference, batch.mask, strict=True)
    ]
    assert_equal(-0.3 * torch.tensor(ours), theirs["tot_rewards"], CLOSE)


@pytest.mark.parametrize("seed", range(3))
def test_value_loss(areal: SimpleNamespace, seed: int) -> None:
    batch = random_batch(seed, spread=1.0)
    old, returns, mask = batch.proximal, batch.reference, batch.mask
    theirs = their_loss(
        batch,
        lambda values: areal.functional.ppo_critic_loss_fn(
            values.float(), old.float(), returns.float(), value_eps_clip=0.2, loss_mask=mask
        )[0],
    )
    ours = their_loss(batch, lambda values: value_loss(values[mask], old[mask], returns[mask], 0.2)[0].mean())
    assert_equal(ours.loss, theirs.loss, CLOSE)
    assert_equal(ours.gradient, theirs.gradient, CLOSE)


def test_the_overlong_penalty_ends_at_the_limit_and_areals_grows_beyond(areal: SimpleNamespace) -> None:
    lengths = [10, 12, 14, 18]
    mask = torch.arange(18) < torch.tensor(lengths)[:, None]
    data = {"rewards": torch.zeros(4), "input_ids": torch.zeros(4, 18), "loss_mask": mask}
    theirs = areal.functional.reward_overlong_penalty(
        data, overlong_tokens=4, overlong_penalty_factor=0.5, max_response_length=14
    )["rewards"]
    config = OverlongConfig(buffer_len=4, penalty_factor=0.5, max_response_len=14)
    assert theirs.tolist() == [0.0, -0.25, -0.5, -1.0]
    assert [overlong_penalty(length, config) for length in lengths] == [0.0, -0.25, -0.5, -0.5]

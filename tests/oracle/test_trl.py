"""Our advantages, losses, KL and reductions against TRL's own trainers. Their losses get random log-probs, not a model's."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
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
    our_loss,
    outcome_rewards,
    random_batch,
    settings,
    their_loss,
)
from minibatches import build_model, trl_trainer

pytestmark = pytest.mark.oracle

CLIP = {"eps_clip_low": 0.2, "eps_clip_high": 0.28}
LENGTH = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("model"))


def trl_loss(trl: SimpleNamespace, model: Path, batch: Batch, importance: Any = None, **changes: Any) -> Outcome:
    """``GRPOTrainer._compute_loss``; ``importance`` are the weights that it computes where vLLM generates."""
    known = {"epsilon": 0.2, "epsilon_high": 0.28, "max_completion_length": LENGTH} | changes
    trainer = trl_trainer(trl, model, **known)
    place = torch.arange(batch.mask.shape[1])
    lengths = torch.tensor([int(row.nonzero()[-1]) + 1 for row in batch.mask])
    prompt = torch.ones(len(batch.groups), 1, dtype=torch.int64)
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": torch.zeros_like(batch.mask, dtype=torch.int64),
        "completion_mask": (place < lengths[:, None]).long(),
        "tool_mask": batch.mask.long(),
        "advantages": batch.advantages,
        "old_per_token_logps": batch.proximal,
        "ref_per_token_logps": batch.reference,
        "num_items_in_batch": batch.mask.sum(),
    }
    if importance is not None:
        trainer.use_vllm = True
        inputs["importance_sampling_ratio"] = importance

    def loss(current: torch.Tensor) -> torch.Tensor:
        trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (current, batch.entropy, None)
        return trainer._compute_loss(trainer.model, inputs)

    return their_loss(batch, loss)


def outcome_advantages(batch: Batch) -> Batch:
    """One advantage for all tokens of a sequence."""
    return replace(batch, advantages=batch.advantages[:, :1].expand_as(batch.advantages))


# Losses and reductions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extreme", [0.0, 15.0])
@pytest.mark.parametrize(
    ("reduction", "loss_type"),
    [
        ("token_mean", "dapo"),
        ("token_mean", "bnpo"),
        ("sequence_mean", "grpo"),
        ("seq_mean_token_sum_norm", "dr_grpo"),
    ],
)
def test_ppo_clip_and_reductions(
    trl: SimpleNamespace, model: Path, reduction: str, loss_type: str, extreme: float
) -> None:
    batch = random_batch(extreme=extreme)
    ours = our_loss(batch, settings(loss_reduction=reduction, max_seq_len=LENGTH, **CLIP))
    assert_same(ours, trl_loss(trl, model, batch, loss_type=loss_type))


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo"])
def test_an_empty_sequence_counts_in_the_mean_over_sequences(trl: SimpleNamespace, model: Path, loss_type: str) -> None:
    batch = random_batch(lengths=(3, 9), groups=(0, 0))
    empty = replace(batch, mask=batch.mask & torch.tensor([[False], [True]]))
    reduction = {"grpo": "sequence_mean", "dr_grpo": "seq_mean_token_sum_norm"}[loss_type]
    ours = our_loss(empty, settings(loss_reduction=reduction, max_seq_len=LENGTH, **CLIP))
    # The lengths of completions are those of the responses: only the tool mask of the first one is empty.
    theirs = trl_loss(trl, model, replace(batch, advantages=batch.advantages * empty.mask), loss_type=loss_type)
    assert_same(ours, theirs)


@pytest.mark.parametrize("seed", range(3))
def test_dual_clip_is_trls_two_sided_clipping(trl: SimpleNamespace, model: Path, seed: int) -> None:
    batch = random_batch(seed, extreme=5.0)
    ours = our_loss(batch, settings(policy_loss_type="dual_clip", clip_ratio_c=3.0, **CLIP))
    assert_same(ours, trl_loss(trl, model, batch, loss_type="dapo", delta=3.0))


def test_a_log_ratio_is_cut_at_20_and_not_in_trl(trl: SimpleNamespace, model: Path) -> None:
    batch = random_batch(lengths=(1,), groups=(0,))
    batch = replace(batch, current=torch.zeros(1, 1), proximal=torch.full((1, 1), -30.0), advantages=-torch.ones(1, 1))
    assert our_loss(batch, settings(**CLIP)).loss.item() == pytest.approx(math.exp(20.0))
    assert trl_loss(trl, model, batch, loss_type="dapo").loss.item() == pytest.approx(math.exp(30.0))


@pytest.mark.parametrize("seed", range(3))
def test_cispo(trl: SimpleNamespace, model: Path, seed: int) -> None:
    """TRL's ``epsilon_high`` is the largest weight itself, ours its distance from 1."""
    batch = random_batch(seed, extreme=5.0)
    ours = our_loss(
        batch, settings(policy_loss_type="cispo", cispo__cispo_eps_clip_low=1.0, cispo__cispo_eps_clip_high=4.0)
    )
    assert_same(ours, trl_loss(trl, model, batch, loss_type="cispo", epsilon_high=5.0))


@pytest.mark.parametrize("seed", range(3))
def test_sapo(trl: SimpleNamespace, model: Path, seed: int) -> None:
    batch = random_batch(seed, extreme=5.0)
    ours = our_loss(
        batch,
        settings(policy_loss_type="sapo", loss_reduction="sequence_mean", sapo__tau_pos=1.0, sapo__tau_neg=1.3),
    )
    theirs = trl_loss(trl, model, batch, loss_type="sapo", sapo_temperature_pos=1.0, sapo_temperature_neg=1.3)
    assert_same(ours, theirs, CLOSE)  # the temperatures are float32 there


@pytest.mark.parametrize("seed", range(3))
def test_gspo_of_outcome_advantages(trl: SimpleNamespace, model: Path, seed: int) -> None:
    batch = outcome_advantages(random_batch(seed, spread=0.1))
    ours = our_loss(
        batch,
        settings(policy_loss_type="gspo", loss_reduction="sequence_mean", eps_clip_low=0.02, eps_clip_high=0.03),
    )
    theirs = trl_loss(
        trl,
        model,
        replace(batch, advantages=batch.advantages[:, 0]),
        loss_type="grpo",
        importance_sampling_level="sequence",
        epsilon=0.02,
        epsilon_high=0.03,
    )
    assert_same(ours, theirs)


@pytest.mark.parametrize(("reduction", "loss_type"), [("token_mean", "dapo"), ("sequence_mean", "grpo")])
def test_the_kl_term(trl: SimpleNamespace, model: Path, reduction: str, loss_type: str) -> None:
    batch = random_batch()
    ours = our_loss(batch, settings(loss_reduction=reduction, kl_loss_coef=0.3, kl_estimator_type="k3", **CLIP))
    theirs = trl_loss(trl, model, batch, loss_type=loss_type, beta=0.3, use_bias_correction_kl=False)
    assert_same(ours, theirs)


def test_trl_weighs_the_kl_term_by_the_ratio_to_the_proximal_policy(trl: SimpleNamespace, model: Path) -> None:
    """By default, in later passes: one token with ``u = 3``, advantage 0."""
    batch = random_batch(lengths=(1,), groups=(0,))
    batch = replace(batch, proximal=batch.current - math.log(3), advantages=torch.zeros_like(batch.current))
    ours = our_loss(batch, settings(kl_loss_coef=0.3))
    assert trl_loss(trl, model, batch, loss_type="dapo", beta=0.3).loss.item() == pytest.approx(3 * ours.loss.item())


@pytest.mark.parametrize("seed", range(3))
def test_weights_of_tokens(trl: SimpleNamespace, model: Path, seed: int) -> None:
    batch = random_batch(seed)
    importance = (batch.proximal - batch.behaviour).exp().clamp(max=1.3)
    ours = our_loss(
        batch,
        settings(
            off_policy_correction__tis_ratio_type="token",
            off_policy_correction__token_tis_ratio_clip_high=1.3,
            **CLIP,
        ),
    )
    assert_same(ours, trl_loss(trl, model, batch, importance, loss_type="dapo"))


def test_the_off_policy_weight_also_applies_to_the_kl_term_and_not_in_trl(trl: SimpleNamespace, model: Path) -> None:
    """One token with ratio 4 to the sampling policy, weight 2, advantage 0: only the KL term is left."""
    batch = random_batch(lengths=(1,), groups=(0,)).first_pass()
    batch = replace(batch, behaviour=batch.current - math.log(4), advantages=torch.zeros_like(batch.current))
    ours = our_loss(batch, settings(kl_loss_coef=0.3, off_policy_correction__tis_ratio_type="token"))
    theirs = trl_loss(trl, model, batch, torch.full_like(batch.current, 2.0), loss_type="dapo", beta=0.3)
    assert ours.loss.item() == pytest.approx(2 * theirs.loss.item())


def test_the_entropy_bonus_is_reduced_like_the_loss_and_in_trl_a_mean_over_tokens(
    trl: SimpleNamespace, model: Path
) -> None:
    batch = random_batch(lengths=(1, 2), groups=(0, 0), tools=False)
    batch = replace(batch, entropy=torch.tensor([[3.0, 0.0], [0.0, 0.0]]).double())
    bonus = {"token_mean": 0.1, "sequence_mean": 0.15}
    for reduction, loss_type in (("token_mean", "dapo"), ("sequence_mean", "grpo")):
        ours = [
            our_loss(batch, settings(loss_reduction=reduction, entropy_coef=coef, **CLIP)).loss for coef in (0, 0.1)
        ]
        theirs = [trl_loss(trl, model, batch, loss_type=loss_type, entropy_coef=coef).loss for coef in (0.0, 0.1)]
        assert (ours[0] - ours[1]).item() == pytest.approx(bonus[reduction])
        assert (theirs[0] - theirs[1]).item() == pytest.approx(bonus["token_mean"])


# Advantages -----------------------------------------------------------------------------------------------------------


def trl_advantages(trainer: Any, rewards: list[float]) -> torch.Tensor:
    """What ``_generate_and_score_completions`` computes of the rewards, ``[B]``."""
    trainer.reward_funcs = [lambda completions, **kwargs: rewards]
    count = len(rewards)
    trainer._generate = lambda prompts: ([[1]] * count, [[2]] * count, None, [""] * count, None, {}, None, None)
    return trainer._generate_and_score_completions([{"prompt": "1"} for _ in rewards])["advantages"]


@pytest.mark.parametrize("scale_rewards", ["group", "none"])
def test_grpo(trl: SimpleNamespace, model: Path, scale_rewards: str) -> None:
    """1e-4 is added to TRL's deviation, so rewards are large here."""
    batch = random_batch(groups=(0, 0, 0, 1, 1, 1))
    rewards = outcome_rewards(batch, scale=1e4)
    trainer = trl_trainer(trl, model, num_generations=3, per_device_train_batch_size=6, scale_rewards=scale_rewards)
    theirs = trl_advantages(trainer, rewards.sum(1).tolist())
    ours = our_advantages(rewards, batch.mask, batch.groups, settings(grpo_norm_by_std=scale_rewards == "group"))
    assert_equal(ours, theirs[:, None].double() * batch.mask, CLOSE)


def test_trl_adds_1e_4_to_the_deviation_and_we_1e_6(trl: SimpleNamespace, model: Path) -> None:
    trainer = trl_trainer(trl, model, num_generations=2, per_device_train_batch_size=2)
    mask, deviation = torch.ones(2, 1, dtype=torch.bool), 0.5**0.5
    ours = our_advantages(torch.tensor([[1.0], [0.0]]), mask, (0, 0), settings())
    assert ours[0, 0].item() == pytest.approx(0.5 / (deviation + 1e-6), rel=1e-6)
    assert trl_advantages(trainer, [1.0, 0.0])[0].item() == pytest.approx(0.5 / (deviation + 1e-4), rel=1e-6)


def rloo_trainer(trl: SimpleNamespace, model: Path, **changes: Any) -> Any:
    return trl_trainer(
        trl, model, "RLOO", num_generations=3, per_device_train_batch_size=6, max_completion_length=LENGTH, **changes
    )


def test_rloo(trl: SimpleNamespace, model: Path) -> None:
    batch = random_batch(groups=(0, 0, 0, 1, 1, 1))
    rewards = outcome_rewards(batch)
    trainer = rloo_trainer(trl, model, beta=0.0)
    trainer.reward_funcs = [lambda completions, **kwargs: rewards.sum(1).tolist()]
    trainer._generate = lambda prompts: ([[1]] * 6, [[2] for _ in range(6)], [""] * 6)
    theirs = trainer._generate_and_score_completions([{"prompt": "1"} for _ in range(6)])["advantages"]
    ours = our_advantages(rewards, batch.mask, batch.groups, settings(advantage_estimator="rloo"))
    assert_equal(ours, theirs[:, None].double() * batch.mask, CLOSE)


@pytest.mark.parametrize("seed", range(3))
def test_trls_rloo_sums_over_the_tokens_of_a_sequence(trl: SimpleNamespace, model: Path, seed: int) -> None:
    """Its ratio is the product over the sequence: in the first pass our reduction with a length of 1 has its gradient."""
    batch = outcome_advantages(random_batch(seed, tools=False)).first_pass()
    trainer = rloo_trainer(trl, model)
    prompt = torch.ones(len(batch.groups), 1, dtype=torch.int64)
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": torch.zeros_like(batch.mask, dtype=torch.int64),
        "completion_mask": batch.mask.long(),
        "advantages": batch.advantages[:, 0],
        "old_logps": (batch.proximal * batch.mask).sum(1),
    }

    def loss(current: torch.Tensor) -> torch.Tensor:
        trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (current, batch.entropy, None)
        return trainer._compute_loss(trainer.model, inputs)

    ours = our_loss(batch, settings(loss_reduction="seq_mean_token_sum_norm", max_seq_len=1))
    assert_equal(ours.gradient, their_loss(batch, loss).gradient)

"""One whole minibatch through each project's functions and through ours: the gradient of a small model.

Ours: rollout groups, advantages, micro-batches, log-probs, correction, loss, reduction, up to the optimizer. Theirs: the same
from their functions, in the order in which their trainers call them.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from batches import settings
from minibatches import (
    SAMPLES,
    TEMPERATURE,
    assert_same_gradient,
    build_model,
    our_gradient,
    random_rollouts,
    trl_trainer,
)

pytestmark = pytest.mark.oracle

TOKEN_WEIGHTS = {
    "off_policy_correction__tis_ratio_type": "token",
    "off_policy_correction__token_tis_ratio_clip_high": 1.3,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("model"))


def logits_of(model: Any, rollouts: Any) -> torch.Tensor:
    """[B, T, vocabulary], of the responses, at the sampling temperature."""
    logits = model(input_ids=rollouts.input_ids, attention_mask=rollouts.attention_mask).logits
    return rollouts.of_responses(logits) / TEMPERATURE


def test_verl(verl: SimpleNamespace, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = random_rollouts()
    config = settings(**TOKEN_WEIGHTS, entropy_coef=0.02, loss_reduction="sequence_mean")
    model, ours, loss = our_gradient(folder, rollouts, config, monkeypatch)

    mask, index = rollouts.mask, np.array(rollouts.groups)
    logits = logits_of(model, rollouts)
    logprobs = verl.functional.logprobs_from_logits(logits, rollouts.labels)
    entropy = verl.functional.entropy_from_logits(logits)
    advantages, _ = verl.algos.compute_grpo_outcome_advantage(rollouts.token_rewards, mask.double(), index)
    weights, _, _ = verl.correction.compute_rollout_correction_and_rejection_mask(
        logprobs.detach(), rollouts.behaviour, mask.double(), rollout_is="token", rollout_is_threshold=1.3
    )
    actor = verl.config.ActorConfig(strategy="fsdp", rollout_n=SAMPLES, use_dynamic_bsz=True, clip_ratio_c=1e30)
    mode = "seq-mean-token-mean"
    policy_loss, _ = verl.algos.get_policy_loss_fn("vanilla")(
        logprobs.detach(),
        logprobs,
        advantages,
        mask,
        mode,
        actor,
        rollout_is_weights=weights.batch["rollout_is_weights"],
    )
    assert loss == pytest.approx(policy_loss.item(), rel=1e-6, abs=1e-6)
    assert_same_gradient(ours, model, policy_loss - 0.02 * verl.algos.agg_loss(entropy, mask, mode))


def test_skyrl(skyrl: SimpleNamespace, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a KL term and an entropy bonus, which SkyRL reduces by sequence. Its weights do not apply to the KL term."""
    rollouts = random_rollouts()
    same = {"policy_loss_type": "dual_clip", "loss_reduction": "sequence_mean"}
    plain = settings(**same, entropy_coef=0.02, kl_loss_coef=0.1)
    model, ours, _ = our_gradient(folder, rollouts, plain, monkeypatch)
    assert_same_gradient(ours, model, skyrl_step(skyrl, model, rollouts, same, 0.02, 0.1))

    weighted = settings(**same, **TOKEN_WEIGHTS)
    model, ours, loss = our_gradient(folder, rollouts, weighted, monkeypatch)
    theirs = skyrl_step(skyrl, model, rollouts, same | TOKEN_WEIGHTS, 0.0, 0.0)
    assert loss == pytest.approx(theirs.item(), rel=1e-6, abs=1e-6)
    assert_same_gradient(ours, model, theirs)


def skyrl_step(
    skyrl: SimpleNamespace, model: Any, rollouts: Any, changes: dict[str, Any], entropy_coef: float, kl_coef: float
) -> torch.Tensor:
    config = skyrl.settings.AlgorithmConfig()
    for key, value in changes.items():
        node, _, name = key.rpartition("__")
        setattr(getattr(config, node) if node else config, name, value)
    mask, index = rollouts.mask.double(), np.array(rollouts.groups)
    logits = logits_of(model, rollouts)
    logprobs = skyrl.functional.logprobs_from_logits(logits, rollouts.labels)
    entropy = skyrl.functional.chunked_entropy_from_logits(logits, requires_grad=True)
    advantages, _ = skyrl.ppo.compute_advantages_and_returns(
        rollouts.token_rewards, mask, index, "grpo", config, grpo_norm_by_std=True
    )
    advantages = skyrl.ppo.apply_loss_reduction_to_advantages_minibatch(
        advantages, mask, config.loss_reduction, micro_batch_size=len(mask), max_seq_len=None
    )
    loss, _ = skyrl.ppo.PolicyLossRegistry.get(config.policy_loss_type)(
        logprobs, logprobs.detach(), advantages, config, mask, rollouts.behaviour
    )
    kl = skyrl.ppo.compute_approx_kl(logprobs, rollouts.reference, mask, "k3")
    kl, entropy = (skyrl.functional.masked_mean(values, mask, dim=-1).mean() for values in (kl, entropy))
    return loss + kl_coef * kl - entropy_coef * entropy


class Engine:
    """AReaL's training engine, as far as its actor calls it: one forward and backward pass over padded rows."""

    def __init__(self, areal: SimpleNamespace, model: Any) -> None:
        self._areal, self._model = areal, model
        self.loss: torch.Tensor | None = None

    def train(self) -> None:
        pass

    def get_version(self) -> int:
        return 1

    def logprobs(self, data: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._model(input_ids=data["input_ids"], attention_mask=data["attention_mask"]).logits
        labels = torch.roll(data["input_ids"], shifts=-1, dims=-1)
        return self._areal.functional.gather_logprobs_entropy(logits, labels, TEMPERATURE)

    def train_batch(self, batch: dict[str, Any], loss_fn: Any, loss_weight_fn: Any) -> dict[str, float]:
        self.loss = loss_fn(*self.logprobs(batch), batch)
        return {}


def test_areal(areal: SimpleNamespace, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoupled PPO: advantages and the update of AReaL's own actor."""
    rollouts = random_rollouts()
    config = settings(**TOKEN_WEIGHTS)
    model, ours, loss = our_gradient(folder, rollouts, config, monkeypatch)

    engine = Engine(areal, model)
    actor = areal.actor.PPOActor(
        areal.settings.PPOActorConfig(
            experiment_name="",
            trial_name="",
            mb_spec=areal.settings.MicroBatchSpec(),
            ppo_n_minibatches=1,
            kl_ctl=0.0,
            reward_norm=areal.settings.NormConfig(mean_level="group", std_level="group", group_size=SAMPLES, eps=1e-6),
            use_decoupled_loss=True,
            rejection_sampling=areal.settings.RejectionSamplingConfig(level="token", action="clamp", upper=1.3),
            temperature=TEMPERATURE,
        ),
        engine,
    )
    rows, length = rollouts.input_ids.shape
    mask, behaviour = torch.zeros(rows, length), torch.zeros(rows, length)
    for row, (prompt, response) in enumerate(zip(rollouts.prompts, rollouts.responses, strict=True)):
        place = slice(len(prompt), len(prompt) + len(response))
        mask[row, place] = rollouts.mask[row, : len(response)].float()
        behaviour[row, place] = rollouts.behaviour[row, : len(response)].float()
    data = {
        "input_ids": rollouts.input_ids,
        "attention_mask": rollouts.attention_mask,
        "loss_mask": mask,
        "logprobs": behaviour,
        "rewards": rollouts.rewards.float(),
        "versions": torch.zeros(rows, length, dtype=torch.int64),
    }
    data["prox_logp"] = engine.logprobs(data)[0].detach()
    actor._ppo_update(actor._compute_advantages(data))
    assert engine.loss is not None
    assert loss == pytest.approx(engine.loss.item(), rel=1e-6, abs=1e-6)
    assert_same_gradient(ours, model, engine.loss)


def test_trl(trl: SimpleNamespace, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's trainer from finished completions to the loss, with the weights that it computes where vLLM samples."""
    rollouts = random_rollouts()
    algorithm = settings(**TOKEN_WEIGHTS, grpo_norm_by_std=False, entropy_coef=0.02)
    model, ours, _ = our_gradient(folder, rollouts, algorithm, monkeypatch)

    trainer = trl_trainer(
        trl,
        folder,
        num_generations=SAMPLES,
        per_device_train_batch_size=len(rollouts.groups),
        temperature=TEMPERATURE,
        loss_type="dapo",
        scale_rewards="none",
        entropy_coef=0.02,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=1.3,
        vllm_importance_sampling_clip_min=None,
    )
    trainer.model.double()
    trainer.use_vllm = True  # only the weights: nothing is generated
    rows = zip(rollouts.responses, rollouts.mask, rollouts.behaviour, strict=True)
    kept = [(mask[: len(r)].int().tolist(), behaviour[: len(r)].tolist()) for r, mask, behaviour in rows]
    masks, behaviour = ([row[part] for row in kept] for part in (0, 1))
    count = len(rollouts.groups)
    trainer._generate = lambda prompts: (
        rollouts.prompts, rollouts.responses, masks, [""] * count, behaviour, {}, None, None,
    )  # fmt: skip
    trainer.reward_funcs = [lambda completions, **kwargs: rollouts.rewards.tolist()]
    inputs = trainer._generate_and_score_completions([{"prompt": "1"}] * count)
    loss = trainer._compute_loss(trainer.model, inputs)
    assert ours.keys() == dict(model.named_parameters()).keys()
    assert_same_gradient(ours, trainer.model, loss)

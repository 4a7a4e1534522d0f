"""The critic: its update against a loop, and that it learns, splits and resumes."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from checkpoint_worlds import checksums_of
from critic_worlds import actor_critic, critic, critic_config, off_zero, valued_minibatch, values_of, with_values
from training_worlds import backend, config, learned, minibatch, same, weights

from skyrl_train.errors import CheckpointError, ConfigError, GeneratorOutputError, HalfStepError
from skyrl_train.training.actor_critic import CRITIC_FOLDER, ActorCritic
from skyrl_train.training.backend import Minibatch
from skyrl_train.training.batch import MicroBatch
from skyrl_train.training.critic_worker import can_pack
from skyrl_train.training.local_backend import LocalBackend, LocalCritic

pytestmark = pytest.mark.usefixtures("one_compute_thread")


def parameters(of: LocalCritic) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in of.model.named_parameters()}


def brute_force_loss(model: torch.nn.Module, batch: Minibatch, clip: float | None) -> torch.Tensor:
    """The documented loss, token by token."""
    total, count = torch.zeros(()).double(), 0
    for s, values in zip(batch.sequences, values_of(batch.sequences, model), strict=True):
        count += s.counts.tokens
        for t in s.loss_mask.nonzero().flatten().tolist():
            old, target = s.values[t].double(), s.returns[t].double()
            error = (values[t] - target) ** 2
            if clip is not None:
                error = torch.maximum(error, (values[t].clamp(old - clip, old + clip) - target) ** 2)
            total = total + error / 2
    return total / count


def test_a_pattern_that_matches_nothing_is_named_as_the_critics(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.critic\.optimizer_config\.lr_multipliers: .*'nowhere'"):
        critic(folder, critic__optimizer_config__lr_multipliers={"nowhere": 2.0})


def test_errors_of_the_critics_model_name_the_critics_settings(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl_train.training.layers.GradientCheckpointingLayer", str)  # no layer is one
    with pytest.raises(ConfigError, match=r"^trainer\.critic\.gradient_checkpointing: .* has no layers"):
        critic(folder, critic__gradient_checkpointing=True)


def test_a_state_of_another_dtype_is_named_as_the_critics(folder: str) -> None:
    wide, narrow = (critic(folder, critic__dtype=dtype).optimizer for dtype in ("float32", "bfloat16"))
    assert narrow.check_state_dict(wide.state_dict()) == "other master weights (trainer.critic.dtype differs)"


# Values and updates ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [None, False])
def test_values_are_those_of_each_sequence_alone(folder: str, packing: bool | None) -> None:
    trained, batch = critic(folder, packing=packing, micro_batch_tokens=34), minibatch()
    assert all(not bool(values.any()) for values in trained.forward_values(batch.sequences)), "it begins with zeros"
    trained.update(valued_minibatch())
    expected = values_of(batch.sequences, trained.model)
    for ours, of_sequence in zip(trained.forward_values(batch.sequences), expected, strict=True):
        torch.testing.assert_close(ours, of_sequence.detach(), atol=2e-6, rtol=0)
        assert bool(ours[1:].any()) or len(ours) == 1
    assert trained.forward_values([]) == []


@pytest.mark.parametrize("clip", [0.2, None])
def test_an_update_descends_the_gradient_of_the_formula(folder: str, clip: float | None) -> None:
    trained = off_zero(folder, algorithm__value_clip=clip, micro_batch_tokens=34)
    batch = valued_minibatch()
    masked = dataclasses.replace(batch.sequences[1], counted_tokens=9)  # some of its tokens were masked for their age
    batch = dataclasses.replace(batch, sequences=[batch.sequences[0], masked, *batch.sequences[2:]])
    loss = brute_force_loss(trained.model, batch, clip)
    gradients = torch.autograd.grad(loss, list(trained.model.parameters()))
    metrics = trained.update(batch)
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
    assert metrics["loss/value"] == pytest.approx(loss.item(), rel=1e-6)
    assert metrics["critic/grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert metrics["critic/lr"] == 1e-2
    assert metrics["critic/skipped_nonfinite"] == 0


def test_parts_give_the_gradient_of_the_whole(folder: str) -> None:
    batch, gradients = valued_minibatch(), []
    for budget, cuts in ((16384, [8]), (25, [3, 8]), (17, [1, 2, 8])):
        trained = off_zero(folder, micro_batch_tokens=budget)
        for start, end in zip([0, *cuts], cuts, strict=False):
            trained.accumulate(Minibatch(batch.sequences[start:end], 1, 1))
        gradients.append([p.grad.clone() for p in trained.model.parameters() if p.grad is not None])
    assert gradients[0]
    for other in gradients[1:]:
        for a, b in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(b, a, atol=1e-12, rtol=1e-9)


def test_it_learns_what_its_returns_are(folder: str) -> None:
    trained, explained = critic(folder, update_epochs_per_batch=2, algorithm__value_clip=None), []
    for step in range(1, 31):
        metrics = trained.update(with_values(minibatch(seed=1, step=step), trained))
        explained.append(metrics["critic/explained_variance"])
    assert explained[0] == 0.0, "zeros explain nothing"
    assert explained[-1] > 0.8


def test_a_broken_number_moves_nothing_and_is_counted(folder: str) -> None:
    trained, batch = critic(folder), valued_minibatch()
    before = parameters(trained)
    broken = dataclasses.replace(batch.sequences[1], returns=torch.full((9,), math.nan))
    metrics = trained.update(dataclasses.replace(batch, sequences=[broken]))
    assert metrics["critic/skipped_nonfinite"] == 1
    silent = [dataclasses.replace(s, loss_mask=torch.zeros_like(s.loss_mask)) for s in batch.sequences]
    assert trained.update(dataclasses.replace(batch, sequences=silent))["loss/value"] == 0.0
    assert same(before, parameters(trained))


def test_sequences_without_values_are_rejected(folder: str) -> None:
    with pytest.raises(GeneratorOutputError, match="of 6 training sequences 0 have a value and 0 a return"):
        critic(folder).update(minibatch())


def test_a_model_of_another_vocabulary_is_rejected(folder: str) -> None:
    batch = minibatch()
    alien = dataclasses.replace(batch.sequences[0], token_ids=torch.tensor([1, 99]))
    with pytest.raises(GeneratorOutputError, match=r"token id 99 .* trainer\.critic\.model\.path"):
        critic(folder).forward_values([alien])


# Beside the policy ----------------------------------------------------------------------------------------------------


def test_both_train_and_only_the_policy_is_synced_and_exported(folder: str, tmp_path: Path) -> None:
    both, alone, own = actor_critic(folder), LocalBackend(folder, config(), 10, 1.0, 0), critic(folder)
    for step in (1, 2):
        batch = valued_minibatch(step, step)
        expected = {**alone.update(batch), **own.update(batch)}
        assert both.update(batch) == expected
    assert same(dict(both.named_weights()), weights(alone))
    values = both.submit_values(batch.sequences).result()
    assert all(map(torch.equal, values, own.forward_values(batch.sequences)))
    both.export_hf(tmp_path / "policy")
    assert same(weights(LocalBackend(str(tmp_path / "policy"), config(), 10, 1.0, 0)), weights(alone))
    both.close()


def test_a_resumed_pair_continues_as_if_it_had_never_stopped(folder: str, tmp_path: Path) -> None:
    first, second = actor_critic(folder), actor_critic(folder)
    first.update(valued_minibatch(1, 1))
    assert first.save(first.snapshot(), tmp_path) == checksums_of(tmp_path)
    second.accumulate(valued_minibatch(9, 1))
    second.load(tmp_path)
    for step in (2, 3):
        batch = valued_minibatch(step, step)
        assert first.update(batch) == second.update(batch)
    last = [each.submit_values(batch.sequences).result() for each in (first, second)]
    assert all(map(torch.equal, *last))
    assert same(dict(first.named_weights()), dict(second.named_weights()))


def test_a_checkpoint_without_a_critic_is_rejected(folder: str, tmp_path: Path) -> None:
    alone = LocalBackend(folder, config(), 10, 1.0, 0)
    alone.save(alone.snapshot(), tmp_path)
    both = actor_critic(folder)
    before = {name: weight.clone() for name, weight in both.named_weights()}
    with pytest.raises(CheckpointError, match="has no critic"):
        both.load(tmp_path)
    assert same(before, dict(both.named_weights()))
    (tmp_path / CRITIC_FOLDER).mkdir()
    with pytest.raises(CheckpointError, match="is incomplete"):
        both.load(tmp_path)


def test_a_minibatch_that_one_rejects_moves_neither(folder: str) -> None:
    policy, of_critic = backend(folder, micro_batch_tokens=17), critic(folder, micro_batch_tokens=17)
    both, batch = ActorCritic(policy, of_critic), valued_minibatch()
    models = (policy.model, of_critic.model)
    before = [{name: weight.clone() for name, weight in model.named_parameters()} for model in models]

    def moves_nothing(batch: Minibatch, error: type[Exception], message: str) -> None:
        for step in (both.update, both.accumulate):
            with pytest.raises(error, match=message):
                step(batch)
            assert all(same(then, dict(now.named_parameters())) for then, now in zip(before, models, strict=True))
            with pytest.raises(ValueError, match="nothing accumulated"):
                both.finish(1)

    moves_nothing(valued_minibatch(lengths=(18, 2)), ConfigError, "micro_batch_tokens")
    moves_nothing(dataclasses.replace(batch, sequences=minibatch().sequences), GeneratorOutputError, "of 6")
    ragged = dataclasses.replace(batch.sequences[1], behaviour_logprobs=torch.zeros(1))
    moves_nothing(dataclasses.replace(batch, sequences=[ragged]), GeneratorOutputError, "ragged")

    def no_memory(*arguments: object, **named: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy._objective, "loss", no_memory)  # in the pass: the critic has made its own by then
        moves_nothing(batch, ConfigError, "micro_batch_tokens=17: .*CUDA out of memory")


def test_with_several_passes_a_rejection_by_one_says_so(folder: str) -> None:
    both, batch = actor_critic(folder, update_epochs_per_batch=2), valued_minibatch()
    with pytest.raises(HalfStepError, match="the critic rejected: of 6"):
        both.update(dataclasses.replace(batch, sequences=minibatch().sequences))
    ragged = dataclasses.replace(batch.sequences[1], behaviour_logprobs=torch.zeros(1))
    with pytest.raises(HalfStepError, match=r"the policy rejected: training sequence 0 .* ragged"):
        both.update(dataclasses.replace(batch, sequences=[ragged]))


def test_a_refusal_does_not_hide_that_the_other_broke(folder: str) -> None:
    """Of a refusal alone a run is told that nothing has moved, and it saves what it has."""

    class Broken(LocalCritic):
        def update(self, minibatch: Minibatch) -> dict[str, float]:
            raise RuntimeError("no memory in the optimizer's step")

    both = ActorCritic(backend(folder, micro_batch_tokens=17), Broken(folder, critic_config(), 10), in_parts=False)
    with pytest.raises(RuntimeError, match="no memory"):
        both.update(valued_minibatch(lengths=(18, 2)))


def test_values_are_computed_where_the_model_computes(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parameters may wait elsewhere (``trainer.critic.fsdp.cpu_offload``)."""
    trained, sequences = off_zero(folder), minibatch().sequences
    expected = trained.forward_values(sequences)
    here = torch.device("cpu")
    monkeypatch.setattr("skyrl_train.training.scorer.compute_device", lambda model: here)
    monkeypatch.setattr(type(trained.model), "device", property(lambda model: torch.device("meta")))
    assert all(map(torch.equal, trained.forward_values(sequences), expected))


def test_values_rounded_to_bfloat16_count_as_equal(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sharded critic of that dtype has float32 parameters, and computes in bfloat16."""

    def rounded(model: object, micro_batch: MicroBatch, then: object) -> torch.Tensor:
        return torch.full((3, 4), 3.0 if micro_batch.segments is None else 3.0 + 2**-6, dtype=torch.bfloat16)

    monkeypatch.setattr("skyrl_train.training.critic_worker.scored_hidden", rounded)
    assert can_pack(critic(folder).model)


def test_a_step_in_parts_is_the_whole_step(folder: str) -> None:
    whole, parts = actor_critic(folder), actor_critic(folder)
    batch = valued_minibatch()
    for start, end in ((0, 3), (3, 8)):
        parts.accumulate(Minibatch(batch.sequences[start:end], 1, 1))
    assert learned(parts.finish(1)) == pytest.approx(learned(whole.update(batch)), rel=1e-5, abs=1e-6)
    parts.accumulate(Minibatch(batch.sequences[:3], 1, 2))
    parts.discard()
    with pytest.raises(ValueError, match="nothing accumulated"):
        parts.finish(2)


def test_close_ends_both(folder: str) -> None:
    closed: list[str] = []

    class Policy(LocalBackend):
        def close(self) -> None:
            closed.append("policy")

    class Critic(LocalCritic):
        def close(self) -> None:
            closed.append("critic")

    both = ActorCritic(Policy(folder, config(), 10, 1.0, 0), Critic(folder, critic_config(), 10))
    both.close()
    assert closed == ["critic", "policy"]
    with pytest.raises(RuntimeError, match="shutdown"):
        both.submit_values([])

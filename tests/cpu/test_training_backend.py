"""The local backend against loops written from the formulas, and against itself under other splits and restarts."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from checkpoint_worlds import checksums_of
from distributed_worlds import one_rank
from safetensors.torch import load_file
from training_worlds import (
    SMALL,
    VOCABULARY,
    backend,
    brute_force_loss,
    config,
    learned,
    minibatch,
    optimizer_state,
    same,
    weights,
)
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from skyrl_train.build.checks import known_names
from skyrl_train.config import derive
from skyrl_train.config.compose import compose
from skyrl_train.config.schema import BuildModelConfig, TrainerConfig
from skyrl_train.config.validate import validate
from skyrl_train.errors import CheckpointError, ConfigError, EngineError, GeneratorOutputError
from skyrl_train.inference.engines.embedded.core import build_core
from skyrl_train.inference.engines.embedded.engine import EngineSettings
from skyrl_train.models.tiny import build_model_folder, character_tokenizer
from skyrl_train.training.backend import Minibatch, TrainingSequence
from skyrl_train.training.checkpoint import CheckpointStore
from skyrl_train.training.messages import ModelSettings
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.shared_memory import SharedMemoryTransport

pytestmark = pytest.mark.usefixtures("one_compute_thread")

LOGPROBS = 1e-5  # float32 sums in another order: 5e-7 apart at most, over 6,400 sequences


def brute_force_logprobs(model: torch.nn.Module, ids: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """One sequence, no padding, the full softmax: ``[T]`` with 0 at the first token."""
    logits = model(input_ids=ids[None]).logits[0] / temperature
    table = torch.log_softmax(logits.double(), dim=-1)
    return torch.stack([table[t - 1, ids[t]] if t else table.new_zeros(()) for t in range(len(ids))])


class TestForwardLogprobs:
    @pytest.mark.parametrize("budget", [17, 40, 16384])
    @pytest.mark.parametrize("temperature", [1.0, 0.5])
    def test_equal_those_of_each_sequence_alone(self, folder: str, budget: int, temperature: float) -> None:
        trained = backend(folder, temperature, micro_batch_tokens=budget)
        batch = minibatch()
        results = trained.forward_logprobs(batch.sequences)
        assert len(results) == len(batch.sequences)
        for s, result in zip(batch.sequences, results, strict=True):
            expected = brute_force_logprobs(trained.model, s.token_ids, temperature).float()
            assert result.dtype == torch.float32
            assert result.shape == (len(s),)
            torch.testing.assert_close(result, expected, atol=LOGPROBS, rtol=0)

    def test_greedy_sampling_counts_as_temperature_one(self, folder: str) -> None:
        sequences = minibatch().sequences
        for a, b in zip(
            backend(folder, 0.0).forward_logprobs(sequences),
            backend(folder, 1.0).forward_logprobs(sequences),
            strict=True,
        ):
            assert torch.equal(a, b)

    def test_of_nothing_is_nothing(self, folder: str) -> None:
        assert backend(folder).forward_logprobs([]) == []


class TestUpdate:
    @pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
    @pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
    @pytest.mark.parametrize("max_grad_norm", [0.05, 1e9])
    def test_one_step_is_the_hand_written_one(
        self, folder: str, reduction: str, entropy_coef: float, max_grad_norm: float
    ) -> None:
        settings = {
            "algorithm__loss_reduction": reduction,
            "algorithm__entropy_coef": entropy_coef,
            "policy__optimizer_config__max_grad_norm": max_grad_norm,
            "policy__optimizer_config__weight_decay": 0.3,
            "policy__optimizer_config__adam_betas": [0.8, 0.9],
        }
        trained = backend(folder, micro_batch_tokens=34, **settings)
        trained.model.double()
        model = copy.deepcopy(trained.model)
        batch = minibatch()

        metrics = trained.update(batch)

        loss = brute_force_loss(model, batch, config(**settings))
        loss.backward()
        parameters = dict(model.named_parameters())
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in parameters.values() if p.grad is not None))
        with torch.no_grad():
            for p in parameters.values():
                assert p.grad is not None
                gradient = p.grad * min(1.0, max_grad_norm / (norm + 1e-6))
                decay = 0.3 if p.ndim >= 2 else 0.0
                first, second = 0.2 * gradient / (1 - 0.8), 0.1 * gradient.square() / (1 - 0.9)  # bias-corrected
                p.mul_(1 - 1e-2 * decay).sub_(1e-2 * first / (second.sqrt() + 1e-8))
        assert metrics["policy/grad_norm"] == pytest.approx(norm, rel=1e-6)
        total = metrics["loss/policy"] - entropy_coef * metrics["loss/entropy"]
        assert total == pytest.approx(loss.item(), abs=1e-6)
        for name, weight in trained.named_weights():
            torch.testing.assert_close(weight, parameters[name].detach(), atol=1e-5, rtol=0)  # of 1e-2 that it moved

    @pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
    def test_the_gradient_does_not_depend_on_the_split_into_micro_batches(self, folder: str, reduction: str) -> None:
        gradients = []
        for budget in (17, 25, 60, 16384):
            trained = backend(folder, micro_batch_tokens=budget, algorithm__loss_reduction=reduction)
            trained.model.double()
            trained.accumulate(minibatch())
            gradients.append({name: p.grad for name, p in trained.model.named_parameters()})
        for other in gradients[1:]:
            for name, gradient in gradients[0].items():
                torch.testing.assert_close(other[name], gradient, atol=1e-12, rtol=1e-9)

    def test_the_order_of_the_sequences_does_not_matter(self, folder: str) -> None:
        batch = minibatch()
        turned = dataclasses.replace(batch, sequences=list(reversed(batch.sequences)))
        a, b = backend(folder), backend(folder)
        assert a.update(batch) == pytest.approx(b.update(turned), rel=1e-4, abs=1e-5)

    def test_the_same_inputs_give_the_same_bits(self, folder: str) -> None:
        a, b = backend(folder), backend(folder)
        for step in (1, 2, 3):
            assert a.update(minibatch(step, step)) == b.update(minibatch(step, step))
        assert same(weights(a), weights(b))

    def test_it_learns_what_is_rewarded(self, folder: str) -> None:
        trained = backend(folder)
        ids = torch.tensor([3, 4, 5, 6])
        mask = torch.tensor([False, True, True, True])
        before = trained.forward_logprobs([minibatch().sequences[0]])
        for step in range(1, 6):
            s = TrainingSequence(ids, mask, mask.float(), torch.zeros(4), torch.where(mask, 0, -1), 0)
            now = trained.forward_logprobs([s])[0]
            trained.update(Minibatch([dataclasses.replace(s, behaviour_logprobs=now * mask)], 1, step))
            assert trained.forward_logprobs([s])[0].sum() > now.sum()
        assert not torch.equal(before[0], trained.forward_logprobs([minibatch().sequences[0]])[0])

    def test_an_on_policy_step_reports_no_mismatch(self, folder: str) -> None:
        trained = backend(folder)
        batch = minibatch()
        own = trained.forward_logprobs(batch.sequences)
        on_policy = [
            dataclasses.replace(s, behaviour_logprobs=values * s.loss_mask)
            for s, values in zip(batch.sequences, own, strict=True)
        ]
        metrics = trained.update(dataclasses.replace(batch, sequences=on_policy))
        assert metrics["policy/ratio_mean"] == 1.0
        assert metrics["policy/clip_fraction"] == 0.0
        assert metrics["off_policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["off_policy/ess"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["off_policy/kl_k3"] == pytest.approx(0.0, abs=1e-6)
        assert metrics["policy/tokens"] == sum(int(s.loss_mask.sum()) for s in batch.sequences)

    def test_an_update_counts_its_passes_their_shapes_and_their_tokens(self, folder: str) -> None:
        metrics = backend(folder, micro_batch_tokens=9).update(minibatch(lengths=(6, 9, 6)))
        assert (metrics["policy/micro_batches"], metrics["policy/distinct_shapes"]) == (3.0, 2.0)
        assert metrics["policy/micro_batch_fill"] == (5 + 8 + 5) / (8 + 8 + 8)
        # Packed, the last token of a sequence is no input; padded, that of a shorter row is one, because the row goes on.
        for packing, fill in ((True, (5 + 8 + 5) / (40 - 3)), (False, (6 + 8 + 6) / (3 * 8))):
            metrics = backend(folder, micro_batch_tokens=40, packing=packing).update(minibatch(lengths=(6, 9, 6)))
            assert metrics["policy/micro_batch_fill"] == fill

    def test_its_size_decides_whether_layers_run_again(self, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
        sizes: list[int] = []

        def by_size(trainer: TrainerConfig, num_parameters: int) -> bool:
            sizes.append(num_parameters)
            return True

        plain = backend(folder).model
        monkeypatch.setattr(derive, "gradient_checkpointing", by_size)
        model = backend(folder).model
        assert sizes == [sum(weight.numel() for weight in plain.parameters())]
        again, once = (hasattr(each.model.layers[0].forward, "__wrapped__") for each in (model, plain))
        assert again and not once

    def test_without_correction_the_behaviour_log_probs_do_not_reach_the_weights(self, folder: str) -> None:
        uncorrected = {"algorithm__off_policy_correction__tis_ratio_type": None}
        batch = minibatch()
        other = dataclasses.replace(
            batch, sequences=[dataclasses.replace(s, behaviour_logprobs=-5.0 * s.loss_mask) for s in batch.sequences]
        )
        a, b = backend(folder, **uncorrected), backend(folder, **uncorrected)
        a.update(batch)
        b.update(other)
        assert same(weights(a), weights(b))

    def test_the_learning_rate_follows_the_step(self, folder: str) -> None:
        trained = backend(folder, policy__optimizer_config__scheduler="linear")
        assert [trained.update(minibatch(step=t))["policy/lr"] for t in (1, 6, 10)] == pytest.approx([1e-2, 5e-3, 1e-3])


class TestProximalPolicy:
    def test_is_the_policy_before_the_first_of_several_passes(self, folder: str) -> None:
        batch = minibatch()
        derived, given = backend(folder, update_epochs_per_batch=3), backend(folder, update_epochs_per_batch=3)
        proximal = given.forward_logprobs(batch.sequences)
        with_proximal = [
            dataclasses.replace(s, proximal_logprobs=p) for s, p in zip(batch.sequences, proximal, strict=True)
        ]
        a = derived.update(batch)
        b = given.update(dataclasses.replace(batch, sequences=with_proximal))
        assert a == pytest.approx(b, rel=1e-3, abs=1e-4)
        assert a["policy/ratio_mean"] != 1.0  # the later passes moved away from it

    def test_given_log_probs_are_used_in_a_single_pass(self, folder: str) -> None:
        batch = minibatch()
        elsewhere = [dataclasses.replace(s, proximal_logprobs=-9.0 * s.loss_mask) for s in batch.sequences]
        metrics = backend(folder).update(dataclasses.replace(batch, sequences=elsewhere))
        assert metrics["policy/ratio_mean"] > 2

    def test_is_that_of_each_sequence_where_only_some_are_given(self, folder: str) -> None:
        batch = minibatch()
        own = backend(folder).forward_logprobs(batch.sequences)
        shifted = [
            dataclasses.replace(s, proximal_logprobs=(p - 0.1 * (i % 2)) * s.loss_mask)
            for i, (s, p) in enumerate(zip(batch.sequences, own, strict=True))
        ]
        mixed = [s if i % 2 else dataclasses.replace(s, proximal_logprobs=None) for i, s in enumerate(shifted)]
        for passes in (1, 2):
            a, b = (backend(folder, update_epochs_per_batch=passes) for _ in range(2))
            whole = a.update(dataclasses.replace(batch, sequences=shifted))
            assert whole["policy/ratio_mean"] > 1.01
            assert learned(b.update(dataclasses.replace(batch, sequences=mixed))) == pytest.approx(
                learned(whole), rel=1e-3, abs=1e-4
            )

    def test_several_passes_are_several_optimizer_steps(self, folder: str) -> None:
        """With equal batches and no clipping in reach, pass 2 is another step around the same proximal policy."""
        free = {"algorithm__eps_clip_low": 0.99, "algorithm__eps_clip_high": 1e6}
        uncorrected = {"algorithm__off_policy_correction__tis_ratio_type": None}
        passes = backend(folder, update_epochs_per_batch=2, **free, **uncorrected)
        steps = backend(folder, **free, **uncorrected)
        batch = minibatch()
        proximal = steps.forward_logprobs(batch.sequences)
        again = [dataclasses.replace(s, proximal_logprobs=p) for s, p in zip(batch.sequences, proximal, strict=True)]
        passes.update(batch)
        steps.update(batch)
        steps.update(dataclasses.replace(batch, sequences=again))
        for name, weight in passes.named_weights():
            torch.testing.assert_close(weight, dict(steps.named_weights())[name], atol=2e-4, rtol=0)


class TestNothingToLearn:
    def test_sequences_without_trained_tokens_count_in_the_denominator_only(self, folder: str) -> None:
        batch = minibatch()
        silent = dataclasses.replace(batch.sequences[1], loss_mask=torch.zeros(9, dtype=torch.bool))
        padded = dataclasses.replace(batch, sequences=[*batch.sequences, silent])
        sums = {}
        for reduction in ("token_mean", "sequence_mean"):
            a, b = (backend(folder, algorithm__loss_reduction=reduction) for _ in range(2))
            sums[reduction] = (a.update(batch)["loss/policy"], b.update(padded)["loss/policy"])
        assert sums["token_mean"][1] == pytest.approx(sums["token_mean"][0])
        assert sums["sequence_mean"][1] == pytest.approx(sums["sequence_mean"][0] * 8 / 9)

    def test_a_minibatch_without_trained_tokens_moves_nothing(self, folder: str) -> None:
        trained = backend(folder, policy__optimizer_config__weight_decay=0.5)
        before = weights(trained)
        batch = minibatch()
        silent = [dataclasses.replace(s, loss_mask=torch.zeros_like(s.loss_mask)) for s in batch.sequences]
        metrics = trained.update(dataclasses.replace(batch, sequences=silent))
        assert same(before, weights(trained))
        assert metrics["policy/tokens"] == metrics["loss/policy"] == metrics["policy/skipped_nonfinite"] == 0.0
        assert all(math.isfinite(value) for value in metrics.values())

    def test_zero_variance_groups_have_a_finite_loss_and_no_gradient(self, folder: str) -> None:
        batch = minibatch()
        flat = [dataclasses.replace(s, advantages=torch.zeros(len(s))) for s in batch.sequences]
        trained = backend(folder)
        before = weights(trained)
        metrics = trained.update(dataclasses.replace(batch, sequences=flat))
        assert metrics["loss/policy"] == 0.0
        assert metrics["policy/grad_norm"] == 0.0
        assert same(before, weights(trained))


class TestNotFinite:
    def test_the_step_is_skipped_and_counted(self, folder: str) -> None:
        trained = backend(folder)
        trained.update(minibatch())
        before, moments = weights(trained), optimizer_state(trained)
        broken = minibatch()
        broken.sequences[1].advantages[broken.sequences[1].loss_mask] = math.nan
        assert trained.update(broken)["policy/skipped_nonfinite"] == 1.0
        assert same(before, weights(trained))
        assert str(optimizer_state(trained)) == str(moments)

    def test_training_continues_afterwards_as_if_it_had_not_been(self, folder: str) -> None:
        a, b = backend(folder), backend(folder)
        broken = minibatch()
        broken.sequences[1].advantages[broken.sequences[1].loss_mask] = math.inf
        a.update(broken)
        assert a.update(minibatch(5)) == b.update(minibatch(5))
        assert same(weights(a), weights(b))


class TestBadSequences:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda s: dataclasses.replace(s, advantages=s.advantages[:-1]), "sequence 1 .group 0. is ragged"),
            (lambda s: dataclasses.replace(s, loss_mask=torch.ones_like(s.loss_mask)), "trains its first token"),
            (lambda s: dataclasses.replace(s, counted_tokens=1), "counts 1 tokens but trains [2-9]"),
            (lambda s: dataclasses.replace(s, token_ids=s.token_ids + VOCABULARY), "outside the model's vocabulary"),
        ],
    )
    def test_are_named(self, folder: str, change: Callable[[TrainingSequence], TrainingSequence], message: str) -> None:
        batch = minibatch()
        sequences = [batch.sequences[0], change(batch.sequences[1])]
        with pytest.raises(GeneratorOutputError, match=message):
            backend(folder).update(dataclasses.replace(batch, sequences=sequences))

    def test_an_empty_sequence_is_named(self, folder: str) -> None:
        with pytest.raises(GeneratorOutputError, match=r"sequence 0 .* is empty"):
            backend(folder).forward_logprobs([_empty()])

    def test_one_longer_than_the_budget_is_rejected_before_anything_moves(self, folder: str) -> None:
        trained = backend(folder, micro_batch_tokens=16)
        before = weights(trained)
        with pytest.raises(ConfigError, match="the longest has 17 tokens"):
            trained.update(minibatch())
        assert same(before, weights(trained))


def _empty() -> TrainingSequence:
    nothing = torch.zeros(0)
    return TrainingSequence(nothing.long(), nothing.bool(), nothing, nothing, nothing.long(), 0)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("algorithm__policy_loss_type", "ppo_klip"),
        ("algorithm__loss_reduction", "sum"),
        ("algorithm__off_policy_correction__tis_ratio_type", "sequences"),
        ("policy__dtype", "float16"),
        ("policy__optimizer_config__scheduler", "step"),
        ("device", "cuda:99"),
        ("device", "gpu"),
    ],
)
def test_an_unusable_name_is_rejected_before_training(folder: str, setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=setting.split("__")[-1]):
        backend(folder, **{setting: value})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("algorithm.eps_clip_low", "1.5"),
        ("algorithm.eps_clip_high", "-0.1"),
        ("algorithm.kl_loss_coef", "-1"),
        ("algorithm.kl_loss_coef", "inf"),
        ("algorithm.off_policy_correction.token_tis_ratio_clip_high", "0"),
        ("algorithm.off_policy_correction.sequence_tis_ratio_clip_high", "0"),
        ("policy.optimizer_config.lr", "-1"),
        ("policy.optimizer_config.lr", "inf"),
        ("policy.optimizer_config.scheduler", "step"),
        ("critic.optimizer_config.scheduler", "step"),
        ("policy.optimizer_config.max_grad_norm", "0"),
        ("policy.optimizer_config.adam_betas", "[0.9]"),
        ("policy.optimizer_config.adam_eps", "0"),
        ("policy.optimizer_config.weight_decay", "-1"),
        ("policy.optimizer_config.num_warmup_steps", "-1"),
        ("policy.optimizer_config.lr_multipliers", "{a: inf}"),
        ("update_epochs_per_batch", "0"),
        ("micro_batch_tokens", "0"),
        ("max_ckpts_to_keep", "0"),
    ],
)
def test_an_impossible_setting_is_rejected_by_name_before_a_model_is_loaded(setting: str, value: str) -> None:
    errors = validate(compose("quickstart", [f"trainer.{setting}={value}"]), known_names()).errors
    assert any(f"trainer.{setting}" in error for error in errors), errors


@pytest.mark.parametrize("tf32", [True, False])
def test_tf32_is_switched_on_where_the_model_computes(folder: str, tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device] = []
    monkeypatch.setattr("skyrl_train.training.local_backend.use_tf32", devices.append)
    backend(folder, tf32=tf32)
    assert devices == [torch.device("cpu")] * tf32


class TestBfloat16:
    def test_small_steps_add_up_in_the_float32_masters(self, folder: str) -> None:
        trained = backend(folder, policy__dtype="bfloat16", policy__optimizer_config__lr=3e-5)
        exact = backend(folder, policy__optimizer_config__lr=3e-5)
        before, exact_before = weights(trained), weights(exact)
        assert all(weight.dtype == torch.bfloat16 for weight in before.values())
        for step in range(1, 15):
            trained.update(minibatch(step=step))
            exact.update(minibatch(step=step))
        name = "model.layers.0.mlp.up_proj.weight"
        moved = (weights(trained)[name].float() - before[name].float()).abs().mean()
        should = (weights(exact)[name] - exact_before[name]).abs().mean()
        assert moved.item() == pytest.approx(should.item(), rel=0.5)

    def test_resumes_with_its_masters(self, folder: str, tmp_path: Path) -> None:
        a, b = (backend(folder, policy__dtype="bfloat16") for _ in range(2))
        a.update(minibatch())
        a.save(a.snapshot(), tmp_path)
        b.load(tmp_path)
        a.update(minibatch(2, step=2))
        b.update(minibatch(2, step=2))
        assert same(weights(a), weights(b))


class TestCheckpoint:
    def test_a_resumed_run_continues_bit_for_bit(self, folder: str, tmp_path: Path) -> None:
        a = backend(folder)
        for step in (1, 2):
            a.update(minibatch(step, step))
        store = CheckpointStore(tmp_path, 1)
        generator = torch.get_rng_state()
        snapshot = a.snapshot()
        saved = store.write(2, lambda path: a.save(snapshot, path))
        b = backend(folder)
        torch.rand(1)
        b.load(saved)
        assert torch.equal(torch.get_rng_state(), generator)
        for step in (3, 4):
            assert a.update(minibatch(step, step)) == b.update(minibatch(step, step))
        assert same(weights(a), weights(b))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_saving_returns_the_checksum_of_every_file(self, folder: str, tmp_path: Path, dtype: str) -> None:
        trained = backend(folder, policy__dtype=dtype)
        trained.update(minibatch())
        returned = trained.save(trained.snapshot(), tmp_path)
        assert returned == checksums_of(tmp_path) and returned.keys() == {"policy.safetensors", "optimizer.pt"}
        assert same(load_file(tmp_path / "policy.safetensors"), weights(trained))

    def test_a_snapshot_does_not_see_later_training(self, folder: str, tmp_path: Path) -> None:
        trained = backend(folder)
        trained.update(minibatch())
        then, snapshot = weights(trained), trained.snapshot()
        trained.update(minibatch(2, step=2))
        trained.save(snapshot, tmp_path)
        trained.load(tmp_path)
        assert same(then, weights(trained))

    def test_a_snapshot_of_a_fresh_policy_loads(self, folder: str, tmp_path: Path) -> None:
        fresh, other = backend(folder), backend(folder)
        other.update(minibatch())
        fresh.save(fresh.snapshot(), tmp_path)
        other.load(tmp_path)
        assert fresh.update(minibatch()) == other.update(minibatch())
        assert same(weights(fresh), weights(other))

    @pytest.mark.parametrize(
        ("other", "dtype", "message"),
        [
            (dataclasses.replace(SMALL, intermediate_size=48), "float32", r"mlp.* is .*32.* there and .*48.* here"),
            (dataclasses.replace(SMALL, num_layers=3), "float32", r"lacks 'model.layers.2"),
            (dataclasses.replace(SMALL, num_layers=1), "float32", r"has 'model.layers.1"),
            (SMALL, "bfloat16", "float32 there and .* bfloat16 here"),
        ],
    )
    def test_of_another_model_is_rejected_and_changes_nothing(
        self, folder: str, tmp_path: Path, other: BuildModelConfig, dtype: str, message: str
    ) -> None:
        source = backend(folder)
        source.save(source.snapshot(), tmp_path)
        build_model_folder(other, tmp_path / "other", seed=1)
        target = backend(str(tmp_path / "other"), policy__dtype=dtype)
        before = weights(target)
        with pytest.raises(CheckpointError, match=f"belongs to another model: .*{message}"):
            target.load(tmp_path)
        assert same(before, weights(target))

    @pytest.mark.parametrize("name", ["policy.safetensors", "optimizer.pt"])
    @pytest.mark.parametrize("damage", ["missing", "truncated", "garbage", "empty"])
    def test_that_is_broken_is_rejected_and_changes_nothing(
        self, folder: str, tmp_path: Path, name: str, damage: str
    ) -> None:
        source, target = backend(folder), backend(folder)
        source.update(minibatch())
        source.save(source.snapshot(), tmp_path)
        data = (tmp_path / name).read_bytes()
        match damage:
            case "missing":
                (tmp_path / name).unlink()
            case "truncated":
                (tmp_path / name).write_bytes(data[: len(data) // 2])
            case "garbage":
                (tmp_path / name).write_bytes(b"garbage" * 100)
            case "empty":
                (tmp_path / name).write_bytes(b"")
        before = weights(target)
        with pytest.raises(CheckpointError, match=name):
            target.load(tmp_path)
        assert same(before, weights(target))

    def test_with_other_optimizer_content_is_rejected(self, folder: str, tmp_path: Path) -> None:
        trained = backend(folder)
        trained.save(trained.snapshot(), tmp_path)
        optimizer = optimizer_state(trained)
        for payload in ({"optimizer": {"adamw": {}}, "rng": {}}, {"optimizer": optimizer, "rng": {}}, {}):
            torch.save(payload, tmp_path / "optimizer.pt")
            with pytest.raises(CheckpointError, match="not an optimizer state"):
                trained.load(tmp_path)

    def test_a_full_disk_is_reported_as_such(self, folder: str, tmp_path: Path) -> None:
        trained = backend(folder)
        store = CheckpointStore(tmp_path, 1)

        def writer(path: Path) -> dict[str, str]:
            (path / "optimizer.pt").symlink_to("/dev/full")
            return trained.save(trained.snapshot(), path)

        with pytest.raises(CheckpointError, match="disk is full"):
            store.write(1, writer)
        assert store.latest() is None


def test_the_exported_folder_opens_in_transformers(folder: str, tmp_path: Path) -> None:
    trained = backend(folder)
    trained.update(minibatch())
    for _ in range(2):  # the second export replaces the first
        trained.export_hf(tmp_path / "export")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert same(weights(trained), {name: p.detach() for name, p in model.named_parameters()})
    assert AutoTokenizer.from_pretrained(tmp_path / "export")("42").input_ids == [7, 5]


@pytest.fixture
def scaled(tmp_path: Path) -> PreTrainedModel:
    """A model whose checkpoint has numbers that are not trained: Gemma 4 scales each layer by one."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    heads = {"head_dim": 8, "global_head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 64}
    tokens = {"vocab_size": 20, "vocab_size_per_layer_input": 20, "hidden_size_per_layer_input": 0}
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    ends = {"eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0}
    config = AutoConfig.for_model("gemma4_text", **sizes, **heads, **tokens, **layers, **ends)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for index, layer in enumerate(model.model.layers):
        layer.layer_scalar.fill_(0.3 + 0.1 * index)
    model.save_pretrained(tmp_path / "scaled")
    character_tokenizer("0123456789").save_pretrained(tmp_path / "scaled")
    return model


@torch.no_grad()
def computes_as(model: PreTrainedModel, other: PreTrainedModel) -> bool:
    tokens = torch.arange(2, 12)[None]
    return torch.equal(model(input_ids=tokens).logits, other(input_ids=tokens).logits)


@pytest.mark.parametrize("strategy", ["local", "fsdp2"])
def test_what_a_checkpoint_has_beside_parameters_is_synced_and_exported(
    scaled: PreTrainedModel, tmp_path: Path, strategy: str
) -> None:
    folder, transport = str(tmp_path / "scaled"), SharedMemoryTransport()
    if strategy == "local":
        trained = backend(folder)
        update = trained.stage(transport, 0)
        trained.export_hf(tmp_path / "export")
    else:
        settings = config(strategy="fsdp2", fsdp__num_workers=1)
        rank = one_rank(settings, policy=ModelSettings(folder, settings, 10, 1.0, 0))
        staged = rank.stage(0, transport, 0)
        assert staged is not None and [spec.name for spec in staged.tensors] == rank.weight_names()
        update = staged
    engine = build_core(EngineSettings(folder, "cpu", "float32", 1, 16, False, 0))
    engine.receive(update)
    engine.pause(PauseMode.KEEP)
    engine.load(update)
    assert computes_as(engine.model, scaled)
    if strategy == "fsdp2":
        rank.export_hf(tmp_path / "export")
        rank.leave()
    assert computes_as(AutoModelForCausalLM.from_pretrained(tmp_path / "export"), scaled)


def test_an_engine_rejects_an_update_that_lacks_them(scaled: PreTrainedModel, tmp_path: Path) -> None:
    engine = build_core(EngineSettings(str(tmp_path / "scaled"), "cpu", "float32", 1, 16, False, 0))
    with closing(SharedMemoryTransport()) as transport:
        update = transport.gather(scaled.named_parameters(), 0)
        engine.receive(update)
        engine.pause(PauseMode.KEEP)
        with pytest.raises(
            EngineError, match=r"misses 2 weights of the model, the first is 'model.layers.0.layer_scalar'"
        ):
            engine.load(update)


def test_a_folder_that_cannot_be_exported_to_is_named(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot be exported to .*export"):
        backend(folder).export_hf(tmp_path / "file" / "export")


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2", "cohere"])
def test_other_architectures_are_scored_as_they_score_themselves(model_type: str, tmp_path: Path) -> None:
    """Among them tied embeddings, learned positions, and logits scaled or soft-capped after the output layer."""
    build_model_folder(dataclasses.replace(SMALL, model_type=model_type), tmp_path / "model", seed=0)
    trained = backend(str(tmp_path / "model"))
    batch = minibatch()
    for s, result in zip(batch.sequences, trained.forward_logprobs(batch.sequences), strict=True):
        expected = brute_force_logprobs(trained.model, s.token_ids).float()
        torch.testing.assert_close(result, expected, atol=LOGPROBS, rtol=0)
    assert trained.update(batch)["policy/skipped_nonfinite"] == 0.0

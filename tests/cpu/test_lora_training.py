"""A LoRA adapter is what is trained, checkpointed and exported; the base model stays."""

from __future__ import annotations

import copy
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_worlds import checksums_of
from safetensors.torch import load_file
from training_worlds import SMALL, backend, minibatch, same, weights
from transformers import AutoModelForCausalLM, GenerationConfig

from skyrl_train.config.schema import LoraConfig, OptimizerConfig
from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.models.lora import add_adapter
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.training.backend import TrainingBackend
from skyrl_train.training.local_backend import LocalBackend
from skyrl_train.training.optimizer import PolicyOptimizer
from skyrl_train.training.reference import FrozenPolicy, TokensToScore

pytestmark = pytest.mark.usefixtures("one_compute_thread")

pytest.importorskip("peft")

RANK, ALPHA = 4, 6.0


def lora(**changes: object) -> LoraConfig:
    return LoraConfig(**{"rank": RANK, "alpha": ALPHA, **changes})


def adapted(folder: str, *, settings: LoraConfig | None = None, **changes: object) -> LocalBackend:
    return backend(folder, policy__model__lora=settings or lora(), **changes)


def trained(folder: str, steps: int = 3, **changes: object) -> LocalBackend:
    policy = adapted(folder, **changes)
    for step in range(1, steps + 1):
        policy.update(minibatch(step, step))
    return policy


def brute_force_merge(folder: str, adapter: dict[str, torch.Tensor], scale: float) -> torch.nn.Module:
    """The base model with ``W + scale * B A`` in the place of each adapted ``W``."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, a in adapter.items():
            if ".lora_A." in name:
                b = adapter[name.replace("lora_A", "lora_B")]
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                model.get_submodule(module).weight += scale * b @ a
    return model


class TestTraining:
    def test_a_run_starts_from_the_base_model_bit_for_bit(self, folder: str) -> None:
        sequences = minibatch().sequences
        for ours, base in zip(
            adapted(folder).forward_logprobs(sequences), backend(folder).forward_logprobs(sequences), strict=True
        ):
            assert torch.equal(ours, base)

    def test_the_reference_policy_is_the_policy_at_its_start(self, folder: str) -> None:
        reference = FrozenPolicy(folder, dtype="float32", device="cpu", temperature=1.0, micro_batch_tokens=64)
        ids = minibatch().sequences[3].token_ids.tolist()
        scored = reference([TokensToScore(ids[:1], ids[1:], [1] * (len(ids) - 1))])[0]
        mine = adapted(folder).forward_logprobs([minibatch().sequences[3]])[0]
        assert scored == pytest.approx(mine[1:].tolist(), abs=1e-6)

    def test_only_the_adapter_moves_and_only_it_has_gradients_and_moments(self, folder: str, tmp_path: Path) -> None:
        policy = adapted(folder)
        before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
        policy.accumulate(minibatch())
        assert {name for name, p in policy.model.named_parameters() if p.grad is not None} == {
            name for name in before if ".lora_" in name
        }
        policy.finish(1)
        policy.update(minibatch(2, 2))
        moved = {name for name, p in policy.model.named_parameters() if not torch.equal(p, before[name])}
        assert moved == {name for name in before if ".lora_" in name}
        policy.save(policy.snapshot(), tmp_path)
        kept = torch.load(tmp_path / "optimizer.pt")["optimizer"]["adamw"]["state"]
        assert len(kept) == len(moved) == 2 * 2 * 7

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_log_probs_are_those_of_the_merged_model(self, folder: str, dtype: str) -> None:
        policy = trained(folder, policy__dtype=dtype)
        merged = brute_force_merge(folder, {n: w.float() for n, w in weights(policy).items()}, ALPHA / RANK)
        for s, ours in zip(minibatch().sequences, policy.forward_logprobs(minibatch().sequences), strict=True):
            table = torch.log_softmax(merged(input_ids=s.token_ids[None]).logits[0].float(), -1)
            expected = [table[t - 1, s.token_ids[t]].item() for t in range(1, len(s))]
            assert ours[1:].tolist() == pytest.approx(expected, abs=1e-5 if dtype == "float32" else 0.05)

    def test_other_layers_and_gradient_checkpointing(self, folder: str) -> None:
        plain, checkpointed = (
            trained(folder, settings=lora(target_modules=["q_proj", "v_proj"]), policy__gradient_checkpointing=on)
            for on in (False, True)
        )
        assert {name.split(".")[-3] for name in weights(plain)} == {"q_proj", "v_proj"}
        assert same(weights(plain), weights(checkpointed))

    def test_it_learns(self, folder: str) -> None:
        policy, batch = adapted(folder), minibatch()
        good = [dataclasses.replace(s, advantages=s.loss_mask.float()) for s in batch.sequences]
        batch = dataclasses.replace(batch, sequences=good)

        def mean_logprob() -> float:
            scores = policy.forward_logprobs(batch.sequences)
            return torch.cat([x[s.loss_mask] for x, s in zip(scores, good, strict=True)]).mean().item()

        before = mean_logprob()
        for step in range(1, 6):
            policy.update(dataclasses.replace(batch, step=step))
        assert mean_logprob() > before + 0.1


class TestRates:
    def test_each_pattern_has_its_rate_in_the_schedule_and_the_metrics(self, folder: str) -> None:
        """AdamW's first step moves every element by its rate (there is no epsilon to speak of)."""
        rates = {"policy__optimizer_config__lr_multipliers": {"*.lora_B.*": 16.0}}
        policy = adapted(folder, policy__optimizer_config__num_warmup_steps=2, **rates)
        before = weights(policy)
        metrics = policy.update(minibatch())
        assert metrics["policy/lr"] == pytest.approx(5e-3)
        assert metrics["policy/lr/*.lora_B.*"] == pytest.approx(16 * 5e-3)
        change = max((w - before[n]).abs().max().item() for n, w in weights(policy).items() if "lora_B" in n)
        assert change == pytest.approx(16 * 5e-3, rel=1e-2)
        before = weights(policy)
        assert policy.update(minibatch(2, 2))["policy/lr"] == pytest.approx(1e-2)
        change = max((w - before[n]).abs().max().item() for n, w in weights(policy).items() if "lora_A" in n)
        assert 0 < change <= 1e-2 * 1.01

    def test_the_first_pattern_that_matches_counts(self) -> None:
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
        optimizer = PolicyOptimizer(model, OptimizerConfig(lr_multipliers={"a.*": 0.0, "*.weight": 2.0}))
        before = copy.deepcopy(model.state_dict())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(0.1, 1.0)
        moved = {name: (p - before[name]).abs().max().item() for name, p in model.state_dict().items()}
        assert moved == pytest.approx({"a.weight": 0.0, "a.bias": 0.0, "b.weight": 0.2, "b.bias": 0.1}, rel=1e-4)

    def test_a_pattern_that_matches_nothing_is_rejected(self, folder: str) -> None:
        with pytest.raises(ConfigError, match=r"lr_multipliers.*'\*.lora_C.\*'"):
            adapted(folder, policy__optimizer_config__lr_multipliers={"*.lora_C.*": 2.0})


def checks_a_resumed_run(first: TrainingBackend, second: TrainingBackend, path: Path) -> None:
    """``second``, of the same settings, goes on from ``first``'s checkpoint exactly as ``first`` does."""
    first.update(minibatch())
    path.mkdir()
    first.save(first.snapshot(), path)
    second.load(path)
    for step in (2, 3):
        assert first.update(minibatch(step, step)) == second.update(minibatch(step, step))
    assert same({n: w.clone() for n, w in first.named_weights()}, {n: w.clone() for n, w in second.named_weights()})


class TestCheckpoints:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_resuming_is_exact_and_the_files_hold_the_adapter_only(
        self, folder: str, tmp_path: Path, dtype: str
    ) -> None:
        checks_a_resumed_run(
            adapted(folder, policy__dtype=dtype), adapted(folder, policy__dtype=dtype), tmp_path / "one"
        )
        names = set(weights(adapted(folder)))
        assert load_file(tmp_path / "one" / "policy.safetensors").keys() == names | {"base_fingerprint"}
        assert all(".lora_" in name for name in names)

    def test_another_base_model_or_scale_is_rejected(self, folder: str, tmp_path: Path) -> None:
        policy = trained(folder)
        assert policy.save(policy.snapshot(), tmp_path) == checksums_of(tmp_path)
        build_model_folder(SMALL, tmp_path / "other", seed=1)
        for other in (adapted(str(tmp_path / "other")), adapted(folder, settings=lora(alpha=2.0))):
            before = weights(other)
            with pytest.raises(CheckpointError, match="another base model"):
                other.load(tmp_path)
            assert same(before, weights(other))
        with pytest.raises(CheckpointError, match="another model"):
            adapted(folder, settings=lora(rank=2)).load(tmp_path)
        with pytest.raises(CheckpointError, match="another model"):
            backend(folder).load(tmp_path)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_the_export_opens_in_transformers_merged_and_in_peft(self, folder: str, tmp_path: Path, dtype: str) -> None:
        policy = trained(folder, policy__dtype=dtype)
        policy.export_hf(tmp_path / "policy")
        checks_the_export(folder, tmp_path / "policy", weights(policy))

    @pytest.mark.parametrize("trainer", [backend, adapted], ids=["whole", "merged"])
    def test_the_export_keeps_the_models_generation_settings(
        self, folder: str, tmp_path: Path, trainer: Callable[[str], LocalBackend]
    ) -> None:
        shutil.copytree(folder, tmp_path / "model")
        given = GenerationConfig(temperature=0.6, top_k=7)  # transformers does not save them: do_sample is missing
        given.to_json_file(tmp_path / "model" / "generation_config.json")
        trainer(str(tmp_path / "model")).export_hf(tmp_path / "policy")
        found = GenerationConfig.from_pretrained(tmp_path / "policy")
        assert (found.temperature, found.top_k, found.do_sample) == (0.6, 7, given.do_sample)


def checks_the_export(folder: str, exported: Path, adapter: dict[str, torch.Tensor]) -> None:
    """The folder is the merged model in transformers, and its ``adapter`` on the base model is the same in peft."""
    from peft import PeftModel

    dtype = next(iter(adapter.values())).dtype
    merged = AutoModelForCausalLM.from_pretrained(exported)
    assert merged.dtype == dtype
    expected = brute_force_merge(folder, {n: w.float() for n, w in adapter.items()}, ALPHA / RANK)
    if dtype == torch.float32:
        for (name, ours), theirs in zip(merged.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0, msg=name)
    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), exported / "adapter")
    found = {name.replace(".default", ""): p for name, p in opened.named_parameters() if ".lora_" in name}
    assert same({n: w.to(dtype) for n, w in found.items()}, adapter)
    ids = torch.arange(7)[None]
    torch.testing.assert_close(
        opened(input_ids=ids).logits.float(),
        expected(input_ids=ids).logits,
        atol=1e-5 if dtype == torch.float32 else 0.05,
        rtol=0,
    )


class TestRefusals:
    @pytest.mark.parametrize(
        ("targets", "word"), [(["lm_head"], "head"), (["embed_tokens"], "Embedding"), (["nothing"], "nothing")]
    )
    def test_targets_that_are_no_linear_layers_inside(self, folder: str, targets: list[str], word: str) -> None:
        with pytest.raises(ConfigError, match=rf"target_modules.*{word}"):
            adapted(folder, settings=lora(target_modules=targets))

    def test_some_may_be_left_out(self, folder: str) -> None:
        found = weights(adapted(folder, settings=lora(exclude_modules=["down_proj", "o_proj"])))
        assert {name.split(".")[-3] for name in found} == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}

    def test_peft_must_be_there(self, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "peft", None)
        with pytest.raises(ConfigError, match="extra `lora`"):
            adapted(folder)


def test_the_start_of_an_adapter_is_a_function_of_the_seed(folder: str) -> None:
    models = [AutoModelForCausalLM.from_pretrained(folder) for _ in range(3)]
    first, again, other = (
        dict(add_adapter(model, lora(init_method="gaussian"), seed=seed).named_parameters())
        for model, seed in zip(models, (0, 0, 1), strict=True)
    )
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name])

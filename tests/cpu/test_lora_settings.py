"""LoRA in a configuration: errors with their remedies, the plan, and a whole run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from skyrl_train.config.compose import compose
from skyrl_train.config.model_shape import model_shape
from skyrl_train.config.plan import resolve
from skyrl_train.config.validate import validate
from skyrl_train.entrypoints.command_line import main
from skyrl_train.models.lora import add_adapter, policy_weights
from skyrl_train.models.tiny import build_model_folder

pytest.importorskip("peft")

LORA = "trainer.policy.model.lora"
ENGINE = "generator.inference_engine"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([f"{LORA}.rank=-1"], "lora.rank=-1"),
        ([f"{LORA}.alpha=0"], "lora.alpha=0"),
        ([f"{LORA}.dropout=0.1"], "dropout=0.1: engines sample without dropout"),
        ([f"{LORA}.init_method=pissa"], "init_method=pissa is unknown or changes the base model"),
        (["trainer.policy.compile=true"], "adapters are not compiled"),
        ([f"{LORA}.target_modules=[]"], "target_modules=[]"),
        ([f"{LORA}.target_modules=[all-linear,q_proj]"], "set it to [all-linear]"),
        ([f"{ENGINE}.backend=vllm_remote", f"{ENGINE}.remote_urls=[http://h]"], "backend to vllm or embedded"),
        ([f"{ENGINE}.backend=vllm", f"{LORA}.rank=1024"], "ranks up to 512"),
        ([f"{ENGINE}.backend=vllm", f"{ENGINE}.engine_args={{max_loras: 3}}"], "max_loras: follows from"),
        ([f"{ENGINE}.backend=vllm", f"{ENGINE}.engine_args={{load_format: dummy}}"], "load_format=dummy"),
        (["trainer.policy.optimizer_config.lr_multipliers={a: -1}"], "policy.optimizer_config.lr_multipliers['a']=-1"),
        (["trainer.critic.optimizer_config.lr_multipliers={a: -1}"], "critic.optimizer_config.lr_multipliers['a']=-1"),
    ],
)
def test_settings_that_cannot_work_are_errors(overrides: list[str], expected: str) -> None:
    found = validate(compose("quickstart", [f"{LORA}.rank=8", *overrides])).errors
    assert any(expected in problem for problem in found), found


def test_settings_of_an_adapter_without_a_rank_are_a_warning() -> None:
    found = validate(compose("quickstart", [f"{LORA}.alpha=8", f"{LORA}.dropout=0.1"]))
    (warning,) = found.warnings
    assert found.errors == []
    assert f"{LORA}.alpha, {LORA}.dropout with {LORA}.rank=0" in warning and f"Set {LORA}.rank" in warning


def test_without_peft_the_remedy_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl_train.config.validate.find_spec", lambda name: None)
    assert "extra `lora`" in validate(compose("quickstart", [f"{LORA}.rank=8"])).errors[0]
    assert not validate(compose("quickstart")).errors


@pytest.mark.parametrize("names", ["[all-linear]", "[q_proj,v_proj]", "[q_proj,down_proj]"])
def test_the_plan_counts_an_adapter_as_torch_does(tmp_path: Path, names: str) -> None:
    overrides = [f"{LORA}.rank=3", f"{LORA}.target_modules={names}", f"{LORA}.exclude_modules=[down_proj]"]
    config = compose("quickstart", overrides)
    build_model_folder(config.trainer.policy.model.build, tmp_path / "model", seed=0)
    lora = config.trainer.policy.model.lora
    model = add_adapter(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), lora)
    number = sum(weight.numel() for _, weight in policy_weights(model))
    shape = model_shape(config.trainer.policy.model)
    assert shape is not None and shape.adapter_parameters(lora) == number
    plan = resolve(config, dataset_len=512)
    assert plan.memory is not None
    assert plan.memory.optimizer_bytes == 8 * number
    assert plan.memory.engine_weight_bytes == 4 * (shape.num_parameters + number)
    assert f"{shape.num_parameters:,}, and {number:,} of the adapter" in plan.describe()
    assert "LoRA of rank 3" in plan.describe()


def test_a_run_trains_checkpoints_and_exports_an_adapter(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = [
        "quickstart",
        f"{LORA}.rank=4",
        "trainer.policy.optimizer_config.lr_multipliers={*.lora_B.*: 4}",
        "trainer.algorithm.kl_loss_coef=0.01",
        "trainer.algorithm.kl_estimator_type=k3",
        "rollout.stages.reference.executor=thread",
        "generator.verify_weights=true",
        f"{ENGINE}.executor=thread",
        "trainer.trackers=[]",
        "trainer.max_steps=2",
        f"trainer.run_dir={folder}",
    ]
    assert main(["train", *settings]) == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    # The engine's log-probs are the trainer's: what the correction sees of the mismatch is rounding.
    assert 0 <= rows[0]["off_policy/kl_k3"] < 1e-6
    assert rows[1]["policy/lr/*.lora_B.*"] == pytest.approx(4 * rows[1]["policy/lr"])
    saved = load_file(next((folder / "checkpoints").glob("global_step_2/**/policy.safetensors")))
    assert all(".lora_" in name or name == "base_fingerprint" for name in saved)
    base = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    merged = AutoModelForCausalLM.from_pretrained(folder / "policy").state_dict()
    changed = {name for name, weight in merged.items() if not torch.equal(weight, base[name])}
    assert main(["export", str(folder), str(folder / "exported")]) == 0
    exported = AutoModelForCausalLM.from_pretrained(folder / "exported").state_dict()
    assert all(torch.equal(exported[name], weight) for name, weight in merged.items())
    adapters = [load_file(folder / name / "adapter/adapter_model.safetensors") for name in ("policy", "exported")]
    assert all(torch.equal(adapters[0][name], weight) for name, weight in adapters[1].items())
    assert changed == {name for name in base if "_proj." in name}

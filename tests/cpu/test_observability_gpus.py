"""GPUs as nvidia-smi reports them, and the FLOPs of training compared with a count of what torch computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from skyrl_train.config.compose import compose
from skyrl_train.config.model_shape import ModelShape
from skyrl_train.observability import gpus

SHAPE = ModelShape(2, 64, 4, 2, 32, 96, 200, 512, tied_embeddings=True)


def smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_flops_are_those_that_torch_counts() -> None:
    config = Qwen3Config(
        num_hidden_layers=SHAPE.num_layers,
        hidden_size=SHAPE.hidden_size,
        num_attention_heads=SHAPE.num_heads,
        num_key_value_heads=SHAPE.num_kv_heads,
        head_dim=SHAPE.head_dim,
        intermediate_size=SHAPE.intermediate_size,
        vocab_size=SHAPE.vocab_size,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model, tokens = Qwen3ForCausalLM(config), torch.zeros(1, 50, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens, use_cache=False).logits.sum().backward()
    flops = gpus.flops_of(SHAPE, adapter=False, peak=1.0)
    # Eager attention also computes the half that the causal mask hides, and the first layer needs no gradient of its input.
    whole = 50 * flops.per_token + 50 * 50 * flops.per_pair
    # Some versions of transformers compute the angles of the positions with a matrix product: 2 operations for each angle.
    angles = 2 * 50 * SHAPE.head_dim // 2
    assert counter.get_total_flops() in (whole, whole + angles)
    assert flops.utilization([50], 2.0) == pytest.approx((whole - 50 * 49 / 2 * flops.per_pair) / 2)


def test_an_adapter_needs_no_gradients_of_the_frozen_matrices() -> None:
    whole, adapter = (gpus.flops_of(SHAPE, adapter=adapter, peak=8.0) for adapter in (False, True))
    assert adapter.per_token == pytest.approx(whole.per_token * 4 / 6)
    assert adapter.utilization([7, 9], 1.0) == pytest.approx(sum(adapter.utilization([each], 1.0) for each in (7, 9)))


@pytest.mark.parametrize(("name", "peak"), [
    ("NVIDIA H100 80GB HBM3", 989e12),
    ("NVIDIA H100 PCIe", 756e12),
    ("NVIDIA H20", 148e12),
    ("NVIDIA A100-SXM4-40GB", 312e12),
    ("NVIDIA A10G", 70e12),
    ("NVIDIA L40S", 362e12),
    ("NVIDIA GeForce RTX 4090", 165e12),
    ("NVIDIA GeForce GTX 1080", None),
])  # fmt: skip
def test_the_peak_of_a_gpu_follows_from_its_name(name: str, peak: float | None) -> None:
    assert gpus.peak_flops(name) == peak


def test_the_figures_of_nvidia_smi_are_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "NVIDIA H100 80GB HBM3, 90, 1000, 80000\nNVIDIA H100 80GB HBM3, 50, 40000, 80000\nodd\nNVIDIA X, [N/A], [N/A], 1"
    smi(tmp_path, monkeypatch, f'printf "{rows}\\n"; echo "$@" > {tmp_path}/asked')
    assert gpus.gpu_metrics() == {
        "system/gpu_utilization": 0.7,
        "system/gpu_memory_bytes": 40000 * 2**20,
        "system/gpu_memory_share": 0.5,
    }
    assert "--id" not in (tmp_path / "asked").read_text()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    gpus.read_gpus()
    assert "--id=1,2" in (tmp_path / "asked").read_text()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus.gpu_metrics() == {}


@pytest.mark.parametrize("script", ["exit 9", "echo nothing useful"])
def test_a_driver_that_fails_is_no_reason_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    smi(tmp_path, monkeypatch, script)
    assert gpus.gpu_metrics() == {}
    assert gpus.training_flops(compose("quickstart", ["trainer.device=cuda"])) is None


def test_training_flops_are_known_for_dense_models_on_known_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path, monkeypatch, 'echo "NVIDIA A100-SXM4-80GB, 0, 1, 2"')
    qwen = ["trainer.device=cuda", "trainer.policy.model.path=Qwen/Qwen3-0.6B"]
    assert gpus.training_flops(compose("quickstart", [])) is None
    one = gpus.training_flops(compose("quickstart", qwen))
    many = gpus.training_flops(compose("quickstart", [*qwen, "trainer.strategy=fsdp2", "trainer.fsdp.num_workers=4"]))
    assert one is not None and many is not None
    assert (one.peak, many.peak) == (312e12, 4 * 312e12)
    # 0.44e9 weights in layers and 0.16e9 in the output layer.
    assert one.per_token == pytest.approx(6 * 0.596e9, rel=0.01)

"""The local backend on one GPU agrees with itself on the CPU, and its checkpoints move between the two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skyrl_train.config.schema import BuildModelConfig, TrainerConfig
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.training.backend import Minibatch, TrainingSequence
from skyrl_train.training.local_backend import LocalBackend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "small"
    build_model_folder(BuildModelConfig(), path, seed=0)
    return str(path)


def backend(folder: str, device: str, dtype: str = "float32") -> LocalBackend:
    config = TrainerConfig(device=device)
    config.policy.dtype = dtype
    config.policy.optimizer_config.lr = 1e-3
    return LocalBackend(folder, config, total_steps=10, temperature=1.0, seed=0)


def minibatch(step: int) -> Minibatch:
    generator = torch.Generator().manual_seed(step)
    sequences = []
    for index in range(32):
        length = int(torch.randint(5, 40, (), generator=generator))
        mask = torch.arange(length) >= 4
        sequences.append(
            TrainingSequence(
                token_ids=torch.randint(0, 13, (length,), generator=generator),
                loss_mask=mask,
                advantages=torch.randn(length, generator=generator) * mask,
                behaviour_logprobs=-2.5 * mask,
                versions=torch.where(mask, 0, -1),
                group_index=index // 8,
            )
        )
    return Minibatch(sequences, 4, step)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 5e-2)])
def test_log_probs_and_metrics_agree_with_the_cpu(folder: str, dtype: str, tolerance: float) -> None:
    cpu, gpu = backend(folder, "cpu"), backend(folder, "cuda", dtype)
    batch = minibatch(1)
    for a, b in zip(cpu.forward_logprobs(batch.sequences), gpu.forward_logprobs(batch.sequences), strict=True):
        assert b.device.type == "cpu"
        torch.testing.assert_close(a, b, atol=tolerance, rtol=0)
    a, b = cpu.update(batch), gpu.update(batch)
    assert a.keys() == b.keys()
    for key in ("loss/policy", "loss/entropy", "policy/grad_norm", "off_policy/ess"):
        assert a[key] == pytest.approx(b[key], rel=4 * tolerance, abs=tolerance), key


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_continues(folder: str, tmp_path: Path, dtype: str) -> None:
    a, b = backend(folder, "cuda", dtype), backend(folder, "cuda", dtype)
    a.update(minibatch(1))
    snapshot = a.snapshot()
    a.save(snapshot, tmp_path)
    b.load(tmp_path)
    for (name, weight), (other, restored) in zip(a.named_weights(), b.named_weights(), strict=True):
        assert name == other
        assert torch.equal(weight, restored), name
    a.update(minibatch(2))
    b.update(minibatch(2))
    for (name, weight), (_, restored) in zip(a.named_weights(), b.named_weights(), strict=True):
        torch.testing.assert_close(weight, restored, atol=1e-5, rtol=1e-2, msg=name)


def test_a_checkpoint_of_the_gpu_loads_on_the_cpu(folder: str, tmp_path: Path) -> None:
    gpu, cpu = backend(folder, "cuda"), backend(folder, "cpu")
    gpu.update(minibatch(1))
    gpu.save(gpu.snapshot(), tmp_path)
    cpu.load(tmp_path)
    for (_, a), (name, b) in zip(gpu.named_weights(), cpu.named_weights(), strict=True):
        assert torch.equal(a.cpu(), b), name

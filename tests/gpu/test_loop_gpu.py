"""The whole asynchronous loop on one GPU: training and the embedded engine share it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from skyrl_train.entrypoints.command_line import main
from skyrl_train.observability.samples import read_samples


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["sync", "fully_async"])
def test_the_quickstart_trains_on_a_gpu(tmp_path: Path, mode: str, dtype: str) -> None:
    run = tmp_path / "run"
    overrides = [
        f"trainer.run_dir={run}",
        f"trainer.mode={mode}",
        "trainer.max_steps=60",
        "trainer.device=cuda",
        f"trainer.policy.dtype={dtype}",
        "generator.inference_engine.device=cuda",
        f"generator.inference_engine.dtype={dtype}",
        "generator.verify_weights=true",
    ]
    assert main(["train", "quickstart", *overrides]) == 0
    rewards = [json.loads(line)["reward/mean"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum(rewards[-5:]) > 2 * sum(rewards[:5])


def test_bound_zero_repeats_the_synchronous_mode_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEMANTICS 4.7. Kernels that add in any order are excluded, because two equal runs differ with them already."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        sync = train(tmp_path / "sync", "trainer.mode=sync")
        zero = ("trainer.fully_async.max_staleness_steps=0", "trainer.fully_async.generate_ahead_steps=0")
        bound_zero = train(tmp_path / "async", "trainer.mode=fully_async", *zero)
        other_seed = train(tmp_path / "seed", "trainer.mode=sync", "trainer.seed=1")
    finally:
        torch.use_deterministic_algorithms(False)
    assert bound_zero[0] == sync[0], "tokens"
    assert all(bound_zero[1][name].equal(weight) for name, weight in sync[1].items())
    assert other_seed[0] != sync[0], "a comparison that cannot fail compares nothing"


def train(run: Path, *overrides: str) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Train four steps; return the rows of the samples, and the weights."""
    steps = 4
    settings = [
        f"trainer.run_dir={run}",
        f"trainer.max_steps={steps}",
        "trainer.policy_mini_batch_size=4",
        "trainer.samples_per_step=100",
        "trainer.device=cuda",
        "generator.n_samples_per_prompt=4",
        "generator.inference_engine.device=cuda",
        "generator.inference_engine.executor=thread",
        "generator.inference_engine.batch_invariant=true",
        "generator.verify_weights=true",
    ]
    assert main(["train", "quickstart", *settings, *overrides]) == 0
    weights = run / "checkpoints" / f"global_step_{steps}" / "policy" / "policy.safetensors"
    rows = read_samples(run / "samples").drop_columns(["time", "generation_s"]).to_pylist()
    return rows, load_file(weights)

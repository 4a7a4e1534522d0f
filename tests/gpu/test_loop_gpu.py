"""The whole asynchronous loop on one GPU: training and the embedded engine share it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyrl_train.entrypoints.train import main


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
    assert main(["--config-name=quickstart", *overrides]) == 0
    rewards = [json.loads(line)["reward/mean"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum(rewards[-5:]) > 2 * sum(rewards[:5])

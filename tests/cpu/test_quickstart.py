"""The README's first command, shortened: the real command, an engine process, and a policy that learns."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("steps", [30, pytest.param(70, marks=pytest.mark.slow)])
def test_the_quickstart_learns(tmp_path: Path, steps: int) -> None:
    command = [sys.executable, "-m", "skyrl_train", "train", "quickstart"]
    overrides = [f"trainer.max_steps={steps}", f"trainer.run_dir={tmp_path / 'run'}"]
    done = subprocess.run([*command, *overrides], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rewards = [
        json.loads(line)["reward/mean"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert statistics.fmean(rewards[-10:]) > 2 * statistics.fmean(rewards[:10])
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith(f"Trained {steps} steps")
    assert "Train again with: python -m skyrl_train train quickstart" in last
    assert (tmp_path / "run" / "logs" / "training.log").exists()  # it trained in a process of its own

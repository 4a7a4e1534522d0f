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
    learned, where, *commands = done.stdout.strip().splitlines()[-5:]
    assert learned.startswith("Learned: reward") and f"in {steps} steps" in learned
    assert str(tmp_path / "run") in where and (tmp_path / "run" / "report.html").is_file()
    assert [command.partition(":")[0] for command in commands] == ["Look at it", "Your own task", "Train again"]
    assert "python -m skyrl_train train quickstart" in commands[-1]
    assert (tmp_path / "run" / "logs" / "training.log").exists()  # it trained in a process of its own

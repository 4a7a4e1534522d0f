"""Every example runs, shortened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "async"
SHORT = [
    "trainer.max_steps=2",
    "trainer.policy_mini_batch_size=4",
    "generator.inference_engine.placement=thread",
]


@pytest.mark.parametrize("name", ["quickstart", "synchronous", "multi_turn", "custom_generator"])
def test_an_example_trains(tmp_path: Path, name: str) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *SHORT, f"trainer.run_dir={tmp_path / 'run'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]


MODES = sorted(path.stem for path in (EXAMPLES / "modes").glob("*.py"))


@pytest.mark.parametrize("name", MODES)
def test_an_example_of_a_mode_trains(tmp_path: Path, name: str) -> None:
    command = [sys.executable, str(EXAMPLES / "modes" / f"{name}.py"), *SHORT, f"trainer.run_dir={tmp_path / 'run'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]


def test_the_resume_example_loses_nothing() -> None:
    command = [sys.executable, str(EXAMPLES / "resume.py"), "generator.n_samples_per_prompt=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lost: 0, twice: 0" in done.stdout
    assert "resuming after step" in done.stdout


def test_all_examples_are_tested() -> None:
    tested = {"quickstart", "synchronous", "multi_turn", "custom_generator", "resume"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested

"""Every example runs, shortened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from forked_runs import ForkServer

EXAMPLES = Path(__file__).parents[2] / "examples" / "async"
SHORT = [
    "trainer.max_steps=2",
    "trainer.policy_mini_batch_size=4",
    "generator.inference_engine.executor=thread",
]


MODES = sorted(path.stem for path in (EXAMPLES / "modes").glob("*.py"))


def test_an_example_is_a_command(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "quickstart.py"), *SHORT, f"trainer.run_dir={tmp_path / 'run'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_trained(tmp_path / "run")


@pytest.mark.parametrize(
    "name", ["synchronous", "multi_turn", "custom_generator", *(f"modes/{name}" for name in MODES)]
)
def test_an_example_trains(fork_server: ForkServer, tmp_path: Path, name: str) -> None:
    output = tmp_path / "output.log"
    code = fork_server.run(output, [*SHORT, f"trainer.run_dir={tmp_path / 'run'}"], script=EXAMPLES / f"{name}.py")
    assert code == 0, output.read_text()
    assert_trained(tmp_path / "run")


def assert_trained(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]


@pytest.mark.timeout(600)  # four commands, one after the other
def test_the_resume_example_loses_nothing() -> None:
    command = [sys.executable, str(EXAMPLES / "resume.py"), "generator.n_samples_per_prompt=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lost: 0, twice: 0" in done.stdout
    assert "resuming after step" in done.stdout


def test_all_examples_are_tested() -> None:
    tested = {"quickstart", "synchronous", "multi_turn", "custom_generator", "resume"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested

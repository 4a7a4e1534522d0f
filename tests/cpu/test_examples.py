"""Every example runs, shortened. A fork server has imported what they need; ``test_quickstart`` starts a command from nothing."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_runs import ForkedRuns
from forks import Forks

EXAMPLES = Path(__file__).parents[2] / "examples" / "async"
SHORT = [
    "trainer.max_steps=2",
    "trainer.policy_mini_batch_size=4",
    "generator.inference_engine.executor=thread",
]
SIMPLE = {"quickstart", "synchronous", "multi_turn", "custom_generator"}
MODES = {path.stem for path in (EXAMPLES / "modes").glob("*.py")} - {"decoupled_stages"}


def train(forked_runs: ForkedRuns, folder: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    """The rows of the two steps that the example trains."""
    output = folder / "output.log"
    arguments = [*SHORT, *overrides, f"trainer.run_dir={folder / 'run'}"]
    assert forked_runs.run(output, arguments, script=EXAMPLES / f"{name}.py") == 0, output.read_text()
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    return rows


@pytest.mark.parametrize("name", sorted(SIMPLE) + [f"modes/{name}" for name in sorted(MODES)])
def test_an_example_trains(forked_runs: ForkedRuns, tmp_path: Path, name: str) -> None:
    train(forked_runs, tmp_path, name)


def test_decoupled_stages_have_a_reward_function_and_a_reference_in_processes_of_their_own(
    forked_runs: ForkedRuns, tmp_path: Path
) -> None:
    no_warmup = "trainer.policy.optimizer_config.num_warmup_steps=0"
    first, second = train(forked_runs, tmp_path, "modes/decoupled_stages", no_warmup)
    assert first["policy/kl_to_reference"] == pytest.approx(0.0, abs=1e-6), "the policy is the reference still"
    assert second["policy/kl_to_reference"] > 1e-5
    for stage in ("reward", "reference"):
        assert first[f"stages/{stage}/groups"] + second[f"stages/{stage}/groups"] >= 8


def test_the_resume_example_loses_nothing(
    forks: Forks, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    small = [
        "generator.n_samples_per_prompt=2",
        "generator.inference_engine.executor=thread",
        "generator.sampling_params.max_tokens=12",
        "trainer.policy.model.build.hidden_size=32",
        "trainer.policy.model.build.num_layers=1",
    ]
    main = runpy.run_path(str(EXAMPLES / "resume.py"))["main"]
    monkeypatch.setattr(sys, "argv", ["resume.py", *small])
    monkeypatch.setitem(main.__globals__, "subprocess", forks)
    code = main()
    printed = capfd.readouterr().out
    assert code == 0, printed
    assert "lost: 0, twice: 0" in printed
    assert "resuming after step" in printed


def test_all_examples_are_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == SIMPLE | {"resume"}

"""The six prepared runs of examples/page: they show the alarms and the advice that the guide promises."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import skyrl_train
from skyrl_train.config.compose import compose
from skyrl_train.config.validate import validate
from skyrl_train.observability.advice import advise, edge_rows
from skyrl_train.simulation.engine import EngineSpeed
from skyrl_train.simulation.lengths import log_normal
from skyrl_train.simulation.run import Workload, simulate
from skyrl_train.simulation.training import TrainingSpeed

SCRIPT = Path(__file__).parents[2] / "examples" / "page" / "six_runs.py"
SHORT = [
    "generator.inference_engine.executor=thread",
    "generator.n_samples_per_prompt=2",
    "trainer.policy.model.build.hidden_size=32",
    "trainer.policy.model.build.num_layers=1",
    "trainer.policy_mini_batch_size=4",
    "trainer.trackers=[]",
]
# The first alarm or advice of each run, as docs/tutorials/reading_a_run.md says.
FOUND = {
    "generation_bound": "slow-generation",
    "training_bound": "slow-training",
    "zero_signal": "constant-reward",
    "failing_agent": "failing-rollouts",
}


@pytest.mark.parametrize(("name", "steps"), [("zero_signal", 5), ("failing_agent", 4)])
def test_a_run_with_a_mistake_has_its_alarm(tmp_path: Path, name: str, steps: int) -> None:
    recipe, own = runpy.run_path(str(SCRIPT))["RUNS"][name]
    overrides = [*own, *SHORT, f"trainer.max_steps={steps}", f"trainer.run_dir={tmp_path / name}"]
    run = skyrl_train.train(recipe, overrides=overrides, quiet=True)
    assert run.advice[0].id == FOUND[name], run.advice


@pytest.mark.parametrize(
    ("name", "slots", "training_s"), [("generation_bound", 4, 8.0), ("training_bound", 256, 128.0)]
)
def test_a_run_that_waits_has_its_advice(name: str, slots: int, training_s: float) -> None:
    # In virtual time, so that the load of this machine does not matter.
    lengths = log_normal(16 * 2 * 12, 8, 4, 0)
    engine = EngineSpeed(slots, step_s=1.0)
    outcome = simulate(Workload(lengths, 16, 12, engine, TrainingSpeed(training_s), samples=2))
    # A length limit ends each modelled response. Virtual time never waits, so that the control loop always computes.
    other = {"generate/truncated": 0.0, "system/control_busy": 0.1}
    rows = [{"step": record.step, **record.metrics, **other} for record in outcome.records]
    found = advise(edge_rows(rows), [], {"trainer": {"mode": "fully_async"}})
    assert [advice.id for advice in found] == [FOUND[name]]


@pytest.mark.parametrize("name", runpy.run_path(str(SCRIPT))["RUNS"])
def test_each_run_has_settings_that_can_work(name: str) -> None:
    recipe, own = runpy.run_path(str(SCRIPT))["RUNS"][name]
    assert not validate(compose(str(recipe), own)).errors

"""Evaluation in whole trainers, of every mode: each row is of one version, and training neither loses nor repeats."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any

import pytest
from harness import EchoGenerator, Harness

from skyrl_train.config.schema import EvalConfig, RunConfig, TrainerConfig
from skyrl_train.errors import ConfigError, EvaluationError
from skyrl_train.observability.run import load_run
from skyrl_train.observability.run_folder import RunFolder, read_jsonl
from skyrl_train.rollout.stages.reward import GroupToReward
from skyrl_train.training.backend import Minibatch
from skyrl_train.types import GeneratorInput, GeneratorOutput

MODES = ["sync", "one_step_off", "fully_async", "partial_rollout"]
EVALUATION = ["trainer.eval.interval=3", "trainer.eval.before_train=true", "trainer.eval.generate=3"]


def is_evaluation(batch: GeneratorInput) -> bool:
    return batch["batch_metadata"].training_phase == "eval"


def evaluations(h: Harness) -> list[dict[str, Any]]:
    return list(read_jsonl(h.run_folder.evaluations.path))


def steps(h: Harness) -> list[int]:
    return [row["step"] for row in evaluations(h)]


def generator_of_the_evaluation(h: Harness) -> EchoGenerator:
    generator = h.generator if h.evaluation_engines is None else h.evaluation_engines.generator
    assert isinstance(generator, EchoGenerator)
    return generator


# By default each mode, with engines of its own or with those that train; as slow tests with the others.
MODES_AND_ENGINES = pytest.mark.parametrize(
    ("mode", "own"),
    [
        pytest.param(mode, own, marks=() if number % 2 == own else pytest.mark.slow)
        for number, mode in enumerate(MODES)
        for own in (0, 1)
    ],
)


@MODES_AND_ENGINES
async def test_each_row_is_of_one_version_and_training_does_not_change(tmp_path: Path, mode: str, own: int) -> None:
    h = Harness(tmp_path, f"trainer.mode={mode}", f"trainer.eval.num_engines={own}", *EVALUATION)
    await h.train()
    rows = evaluations(h)
    assert [row["step"] for row in rows] == [row["policy_version"] for row in rows] == [0, 3, 6, 8]
    assert all(row["eval/prompts"] == 3 and row["eval/failed"] == 0 for row in rows)
    assert sorted(h.trained) == list(range(32)) and not h.trainer.evaluation.cancelled
    assert "evaluation of version 8" in h.screen.getvalue()


@MODES_AND_ENGINES
async def test_a_reward_function_scores_training_and_evaluation_alike(tmp_path: Path, mode: str, own: int) -> None:
    """Nothing else that happens gives the reward 7, and a sample passes by it."""
    settings = [f"trainer.mode={mode}", f"trainer.eval.num_engines={own}", "trainer.eval.pass_threshold=7", *EVALUATION]
    h = Harness(tmp_path, "rollout.stages.reward.function=test_evaluation_trainers:seven", *settings)
    await h.train()
    assert {row["reward/mean"] for row in h.rows} == {7.0}
    rows = evaluations(h)
    assert [row["step"] for row in rows] == [0, 3, 6, 8]
    assert {(row["eval/reward"], row["eval/pass@1"], row["eval/failed"]) for row in rows} == {(7.0, 1.0, 0)}


def seven(group: GroupToReward) -> list[float]:
    return [7.0 for _ in group.samples]


def rewards_training_only(group: GroupToReward) -> list[float]:
    if group.uid == "asked":
        raise ValueError("scripted")
    return [7.0 for _ in group.samples]


async def test_a_reward_that_fails_in_an_evaluation_is_named_by_its_row(tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "1"}\n{"prompt": "2", "uid": "asked"}\n')
    data = ["trainer.eval.interval=8", f"trainer.eval.eval_data=[{held_out}]"]
    reward = "rollout.stages.reward.function=test_evaluation_trainers:rewards_training_only"
    h = Harness(tmp_path / "run", reward, *data)
    await h.train()
    (failed,) = [line for line in h.screen.getvalue().splitlines() if "an attempt failed" in line]
    prompt = "row 1 (counted from 0, prompt 'asked') of data source 'held_out'"
    assert failed.startswith(f"evaluation of version 8, {prompt}: an attempt failed at ")
    assert "in rewards_training_only: its reward function failed" in failed


async def test_with_rare_weight_sync_the_last_policy_is_published_to_be_measured(tmp_path: Path) -> None:
    overrides = ["trainer.fully_async.weight_sync_interval=3", "trainer.fully_async.overlap_weight_sync=true"]
    h = Harness(tmp_path, *overrides, *EVALUATION)
    await h.train()
    assert steps(h) == [0, 3, 6, 8]


REWARDS = {0: 0.95, 2: 0.9, 4: 0.5, 6: 0.7, 8: 0.1}  # of the policy after a step


def reward_by_version(output: GeneratorOutput) -> None:
    assert output["rollout_versions"] is not None
    output["rewards"] = [REWARDS.get(versions[0], 0.0) for versions in output["rollout_versions"]]


@pytest.mark.parametrize(
    ("mode", "own"),
    [
        ("sync", 0),
        ("fully_async", 1),
        pytest.param("sync", 1, marks=pytest.mark.slow),
        pytest.param("fully_async", 0, marks=pytest.mark.slow),
    ],
)
async def test_the_best_checkpoint_by_evaluation_stays(tmp_path: Path, mode: str, own: int) -> None:
    best = ["trainer.eval.best_metric=eval/reward", "trainer.eval.interval=2", "trainer.eval.before_train=true"]
    settings = [f"trainer.mode={mode}", f"trainer.eval.num_engines={own}", "trainer.max_ckpts_to_keep=1"]
    h = Harness(tmp_path, *settings, *best)
    for generator in (h.generator, generator_of_the_evaluation(h)):
        generator.after = reward_by_version
    await h.train()
    assert [(row["step"], row["eval/reward"]) for row in evaluations(h)] == [*REWARDS.items()]
    kept = {path.name for path in h.run_folder.checkpoints.glob("global_step_*")}
    assert {"global_step_2", "global_step_8"} <= kept <= {f"global_step_{step}" for step in (2, 6, 8)}
    run = load_run(tmp_path)
    assert run.checkpoint("best").name == "global_step_2" and run.checkpoint().name == "global_step_8"


async def test_the_best_checkpoint_stays_on_another_machine_which_has_no_earlier_evaluations(tmp_path: Path) -> None:
    settings = ["trainer.eval.best_metric=eval/reward", "trainer.eval.interval=2", "trainer.max_ckpts_to_keep=1"]
    for stop_after in (5, 7, 8):
        h = Harness(tmp_path, *settings)
        h.generator.after = reward_by_version
        h.backend.before_update = functools.partial(stop_in, h, stop_after)
        await h.train()
        assert h.trainer.global_step == stop_after
        h.run_folder.evaluations.path.unlink()
    assert {"global_step_2", "global_step_8"} <= {path.name for path in h.run_folder.checkpoints.iterdir()}


def stop_in(h: Harness, step: int, minibatch: Minibatch) -> None:
    if minibatch.step == step:
        h.trainer.request_stop()


def test_the_best_checkpoint_of_a_run_without_one_is_an_error(tmp_path: Path) -> None:
    RunFolder(tmp_path, RunConfig()).close()
    with pytest.raises(ConfigError, match=r"keeps no best checkpoint: trainer\.eval\.best_metric is not set"):
        load_run(tmp_path).checkpoint("best")
    RunFolder(tmp_path, RunConfig(TrainerConfig(eval=EvalConfig(best_metric="eval/reward")))).close()
    with pytest.raises(ConfigError, match=r"no checkpoint yet whose evaluation has eval/reward"):
        load_run(tmp_path).checkpoint("best")


@pytest.mark.parametrize("own", [0, 1])
async def test_a_stop_in_the_middle_of_an_evaluation_runs_it_again_and_repeats_no_row(tmp_path: Path, own: int) -> None:
    settings = [f"trainer.eval.num_engines={own}", *EVALUATION]
    h = Harness(tmp_path, *settings)

    def stop_at_6(batch: GeneratorInput) -> Any:
        if is_evaluation(batch) and batch["batch_metadata"].global_step == 6:
            h.trainer.request_stop()
            return asyncio.get_running_loop().create_future()
        return None

    generator_of_the_evaluation(h).before = stop_at_6
    await h.train()
    stopped_at = h.trainer.global_step
    assert steps(h) == [0, 3] and h.trainer.evaluation.cancelled and stopped_at in (6, 7)
    resumed = Harness(tmp_path, *settings)
    await resumed.train()
    assert steps(resumed) == [0, 3, stopped_at, 8], "the weights that there are, under their own name"
    assert sorted(resumed.trained) == list(range(32))


async def test_a_stop_while_the_last_policy_is_measured_leaves_that_to_be_done(tmp_path: Path) -> None:
    h = Harness(tmp_path, *EVALUATION)

    def stop_at_8(batch: GeneratorInput) -> Any:
        if is_evaluation(batch) and batch["batch_metadata"].global_step == 8:
            h.trainer.request_stop()
            return asyncio.get_running_loop().create_future()
        return None

    h.generator.before = stop_at_8
    await h.train()
    assert h.trainer.global_step == 8 and h.trainer.evaluation.cancelled and steps(h) == [0, 3, 6]
    resumed = Harness(tmp_path, *EVALUATION)
    await resumed.train()
    assert steps(resumed) == [0, 3, 6, 8] and not resumed.trainer.evaluation.cancelled


async def test_a_token_of_another_version_ends_the_run_after_saving_the_trained_steps(tmp_path: Path) -> None:
    h = Harness(tmp_path, *EVALUATION)

    def spoil(output: GeneratorOutput) -> None:
        ids, versions = output["trajectory_ids"], output["rollout_versions"]
        if ids is not None and versions is not None and "@eval-3" in ids[0].instance_id:
            versions[0][-1] += 1

    h.generator.after = spoil
    with pytest.raises(EvaluationError, match="version 3 got tokens of version 4"):
        await h.train()
    assert steps(h) == [0] and h.trainer.components.checkpoints.latest() is not None


async def test_failing_evaluations_never_stop_training(tmp_path: Path) -> None:
    h = Harness(tmp_path, *EVALUATION)

    def fail(batch: GeneratorInput) -> None:
        if is_evaluation(batch):
            raise ValueError("scripted")

    h.generator.before = fail
    await h.train()
    assert [row["eval/failed"] for row in evaluations(h)] == [3, 3, 3, 3]
    assert sorted(h.trained) == list(range(32)) and h.rows[-1]["async/failed"] == 0

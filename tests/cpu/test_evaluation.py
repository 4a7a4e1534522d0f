"""Evaluation beside training: of one version each, complete, bounded, and never in training's way."""

from __future__ import annotations

import asyncio
import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation_worlds import OneTurn, World, forever, prompts_of
from scripted import in_virtual_time, settle

from skyrl_train.config.schema import BuildModelConfig
from skyrl_train.environments import episode
from skyrl_train.environments.base import PromptRecord
from skyrl_train.environments.episode import EnvironmentCall
from skyrl_train.errors import EngineError, EvaluationError, RolloutError
from skyrl_train.evaluation.engines import OwnEngines
from skyrl_train.evaluation.runner import Evaluation
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.engines.embedded import EmbeddedEngine
from skyrl_train.inference.interface import InferenceEngineInput
from skyrl_train.models.folder import load_model, load_tokenizer
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.rollout.stages.reward import with_rewards
from skyrl_train.runtime.seeds import derive_seed
from skyrl_train.types import GeneratorInput, GeneratorOutput, PauseMode, RolloutGroup
from skyrl_train.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_train.weight_sync.syncer import WeightSyncer, weights_of

# Samples ------------------------------------------------------------------------------------------------------------


async def evaluate(world: World) -> dict[str, Any]:
    """One evaluation; its row."""
    await world.begin()
    await world.train_step(1)
    await world.evaluation.finish()
    ((_, row),) = world.results
    return dict(row)


async def test_requests_say_that_they_are_an_evaluation_and_merge_the_sampling_parameters() -> None:
    world = World(sampling_params={"temperature": 0.0, "max_tokens": 3}, n_samples_per_prompt=2)
    row = await evaluate(world)
    inputs = world.generator.inputs
    assert len(inputs) == 4
    assert {batch["batch_metadata"].training_phase for batch in inputs} == {"eval"}
    assert all(len(batch["prompts"]) == 1 for batch in inputs), "a sample that fails takes no other with it"
    for batch in inputs:
        params = dict(batch["sampling_params"] or {})
        assert (params["temperature"], params["max_tokens"], params["top_p"]) == (0.0, 3, 1.0)
        assert batch["env_classes"] == ["run_length"]
    assert len({batch["trajectory_ids"][0] for batch in inputs}) == 4
    assert row["eval/response_tokens"] == 3 and row["eval/truncated"] == 1


async def test_two_versions_are_measured_with_the_same_random_numbers_which_training_never_uses() -> None:
    world = World(n_samples_per_prompt=3)
    await world.begin()
    for step in (1, 2):
        await world.train_step(step)
        await world.evaluation.finish()
    seeds: dict[int, dict[tuple[str, int], int]] = {1: {}, 2: {}}
    for batch in world.generator.inputs:
        trajectory = batch["trajectory_ids"][0]
        uid = trajectory.instance_id.partition("@")[0]
        seeds[batch["batch_metadata"].global_step][uid, trajectory.repetition_id] = batch["batch_metadata"].seeds[0]
    assert seeds[1] == seeds[2] and len(set(seeds[1].values())) == 6
    training = {
        derive_seed(0, group_index, number, attempt)
        for group_index in range(50)
        for number in range(3)
        for attempt in range(2)
    }
    assert not training & set(seeds[1].values())


async def test_the_pass_threshold_is_a_setting() -> None:
    world = World(pass_threshold=0.5)
    world.generator.reward = lambda batch: 0.5 if "p0" in batch["trajectory_ids"][0].instance_id else 0.49
    row = await evaluate(world)
    assert row["eval/pass@1"] == 0.5 and row["eval/reward"] == pytest.approx(0.495)


async def test_a_sample_that_fails_once_is_tried_again() -> None:
    world = World()
    failed: list[GeneratorInput] = []

    def fail_once(batch: GeneratorInput) -> None:
        if not failed:
            failed.append(batch)
            raise ValueError("scripted")

    world.generator.before = fail_once
    row = await evaluate(world)
    assert row["eval/failed"] == 0 and row["eval/pass@1"] == 1 and len(world.generator.inputs) == 3


def of_p0(batch: GeneratorInput) -> bool:
    return batch["trajectory_ids"][0].instance_id.startswith("p0@")


def raises(batch: GeneratorInput) -> None:
    if of_p0(batch):
        raise ValueError("scripted failure")


def ends_the_program(batch: GeneratorInput) -> None:
    if of_p0(batch):
        raise SystemExit(0)


def hangs(batch: GeneratorInput) -> Any:
    return forever() if of_p0(batch) else None


def cancels_itself(batch: GeneratorInput) -> None:
    if of_p0(batch):
        task = asyncio.current_task()
        assert task is not None
        task.cancel()


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (raises, "scripted failure"),
        (ends_the_program, "exit status 0"),
        (hangs, "rollout_timeout_s"),
        (cancels_itself, "cancelled itself"),
    ],
)
@in_virtual_time
async def test_a_sample_that_always_fails_has_not_passed_and_stops_nothing(before: Any, reason: str) -> None:
    world = World(timeout_s=0.05, n_samples_per_prompt=2)
    world.generator.before = before
    row = await evaluate(world)
    assert row["eval/pass@1"] == 0.5 and row["eval/failed"] == 2 and row["eval/reward"] == 1.0
    assert [failure["uid"] for failure in row["failures"]] == ["p0", "p0"]
    assert all(reason in failure["reason"] for failure in row["failures"])
    assert len(world.generator.inputs) == 2 * 2 + 2, "each is tried twice"
    assert world.evaluation.error is None and world.moved == 2


@in_virtual_time
async def test_a_sample_out_of_time_tells_where_its_environment_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def explores(batch: GeneratorInput) -> Any:
        if of_p0(batch):
            call = EnvironmentCall("maze", "step", threading.get_ident())
            monkeypatch.setitem(episode._running, batch["trajectory_ids"][0].to_string(), call)
        return hangs(batch)

    world = World(timeout_s=0.05)
    world.generator.before = explores
    [failure] = (await evaluate(world))["failures"]
    assert "= 0.05 s; samples that wait for environment 'maze': 1 of 1, in step(): " in failure["reason"]


async def test_a_generator_that_breaks_its_contract_in_an_evaluation_stops_nothing() -> None:
    world = World()

    def spoil(output: GeneratorOutput) -> None:
        output["rewards"] = [math.nan]

    world.generator.after = spoil
    row = await evaluate(world)
    assert row["eval/failed"] == 2 and "finite" in row["failures"][0]["reason"] and world.evaluation.error is None


@in_virtual_time
async def test_rewards_of_a_function_apart_from_the_generator_count_here_too() -> None:
    seen: list[tuple[int, int]] = []

    async def score(group: RolloutGroup, record: PromptRecord) -> RolloutGroup:
        seen.append((group.group_index, len(group.samples)))
        if record.uid == "p1":
            raise RolloutError("scripted: no reward")
        return replace(group, samples=with_rewards(group.samples, [0.25] * (len(group.samples) - 1) + [1.0]))

    world = World(n_samples_per_prompt=4, timeout_s=0.05, score=score)
    world.generator.before = lambda batch: raises(batch) if batch["trajectory_ids"][0].repetition_id == 0 else None
    row = await evaluate(world)
    assert sorted(seen) == [(-2, 4), (-1, 3)], "a sample that failed has nothing to be scored"
    assert row["eval/failed"] == 1 + 4 and row["eval/avg@4"] == 1 / 8 and row["eval/reward"] == pytest.approx(0.5)
    assert {failure["reason"] for failure in row["failures"]} >= {"scripted: no reward"}


# One version --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, -1])
async def test_a_single_token_of_another_version_is_an_error_and_leaves_no_row(position: int) -> None:
    world = World(before_train=True)

    def spoil(output: GeneratorOutput) -> None:
        versions = output["rollout_versions"]
        assert versions is not None
        versions[0][position] += 1

    world.generator.after = spoil
    await world.begin()
    with pytest.raises(EvaluationError, match="version 0 got tokens of version 1"):
        await world.evaluation.finish()
    assert world.results == [] and isinstance(world.evaluation.error, EvaluationError)
    assert len(world.generator.inputs) <= 2, "it is not tried again"


async def test_tokens_that_were_not_sampled_have_no_version_to_be_wrong() -> None:
    world = World(prompts_of("a"), sampling_params={"max_tokens": 4})

    def observe(output: GeneratorOutput) -> None:
        for name, value in (
            ("response_ids", 9),
            ("loss_masks", 0),
            ("rollout_logprobs", 0.0),
            ("rollout_versions", -1),
        ):
            output[name][0].append(value)  # type: ignore[literal-required]

    world.generator.after = observe
    row = await evaluate(world)
    assert row["eval/failed"] == 0 and row["eval/response_tokens"] <= 4


async def test_weights_that_are_published_in_the_middle_are_noticed() -> None:
    world = World(before_train=True)
    released = asyncio.Event()
    world.generator.before = lambda batch: released.wait()
    await world.begin()
    await settle()
    await world.syncer.sync(1)  # without asking hold()
    released.set()
    with pytest.raises(EvaluationError, match="bug"):
        await world.evaluation.hold()


async def test_a_version_that_the_engines_do_not_hold_is_not_evaluated_on_them() -> None:
    world = World()
    await world.begin()
    await world.evaluation.served(3)
    with pytest.raises(EvaluationError, match="serve policy version 0"):
        await world.evaluation.finish()


# The run's engines --------------------------------------------------------------------------------------------------


async def test_the_next_weight_sync_waits_while_generation_continues() -> None:
    world = World(interval=2)
    released = asyncio.Event()
    world.generator.before = lambda batch: released.wait()
    await world.begin()
    assert await world.train_step(1) == {}
    await world.train_step(2)
    world.now = 10.0
    step = asyncio.ensure_future(world.train_step(3))
    await settle()
    assert not step.done() and world.engine.policy_version == 2 and world.generator.at_once == 2
    training = await world.client.generate(
        InferenceEngineInput(prompt_token_ids=[[1, 2, 3]], sampling_params={"max_tokens": 8, "seed": 5})
    )
    assert set(training["response_versions"][0]) == {2}, "generation continues with the evaluated version"
    assert not step.done()
    world.now = 14.0
    released.set()
    assert await step == {"time/wait_for_evaluation": 4.0}
    assert world.engine.policy_version == 3 and world.versions == [2]


async def test_an_evaluation_has_its_own_share_of_concurrency() -> None:
    world = World(prompts_of(*"aaaaaaa"), max_parallel=2, n_samples_per_prompt=3)
    await evaluate(world)
    assert world.generator.most_at_once == 2 * 3


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("last", "expected"), [(8, [0, 3, 6, 8]), (6, [0, 3, 6])])
async def test_every_version_that_is_due_has_one_row_and_so_has_the_last_one(
    own: bool, last: int, expected: list[int]
) -> None:
    world = World(own=own, interval=3, before_train=True)
    await world.begin()
    for step in range(1, last + 1):
        await world.train_step(step)
    await world.evaluation.conclude(last)
    assert world.versions == expected
    await world.evaluation.aclose()


@pytest.mark.parametrize(("reported", "again"), [([6], [8]), ([6, 8], [])])
async def test_a_run_that_was_killed_while_it_measured_its_last_policy_measures_it_after_resuming(
    reported: list[int], again: list[int]
) -> None:
    world = World(interval=3)
    await world.begin(8, reported)
    await world.evaluation.conclude(8)
    assert world.versions == again


@pytest.mark.parametrize("own", [False, True])
async def test_without_an_interval_nothing_is_evaluated_and_nothing_waits(own: bool) -> None:
    world = World((), own=own, interval=0, before_train=True)
    await world.begin()
    for step in range(1, 4):
        assert await world.train_step(step) == {}
    await world.evaluation.conclude(3)
    assert world.results == [] and world.generator.inputs == [] and world.transport.gathered == []


async def test_it_describes_its_activities_and_reports_progress() -> None:
    world = World()
    released = asyncio.Event()
    world.generator.before = lambda batch: released.wait() if of_p0(batch) else None
    await world.begin()
    assert world.evaluation.describe() == []
    await world.train_step(1)
    await world.changed.wait_until(lambda: world.moved == 1)
    world.now = 5.0
    assert world.evaluation.describe() == [
        "evaluation of version 1: 1 of 2 prompts have ended, since 5 s",
        "evaluation prompt 'p0': since 5 s",
    ]
    assert world.moved == 1
    released.set()
    await world.evaluation.finish()
    assert world.evaluation.describe() == [] and world.moved == 2


# Engines of its own -------------------------------------------------------------------------------------------------


async def test_with_engines_of_its_own_weight_sync_do_not_wait_and_versions_do_not_mix() -> None:
    world = World(own=True, interval=2)
    released = asyncio.Event()
    world.generator.before = lambda batch: released.wait()
    await world.begin()
    for step in range(1, 4):
        assert await world.train_step(step) == {}
    assert world.engine.policy_version == 3 and world.eval_engine.policy_version == 2
    released.set()
    await world.evaluation.finish()
    assert world.versions == [2]
    assert world.generator.started and world.generator.may_begin is not None and not world.generator.may_begin()
    await world.evaluation.aclose()
    assert world.generator.closed and world.transport.closed and not world.eval_engine.alive and world.engine.alive


async def test_nothing_is_skipped_one_copy_is_pending_at_most_and_the_third_makes_training_wait() -> None:
    world = World(own=True)
    released = {version: asyncio.Event() for version in range(1, 5)}
    world.generator.before = lambda batch: released[batch["batch_metadata"].global_step].wait()
    await world.begin()
    await world.train_step(1)
    await world.changed.wait_until(lambda: world.eval_engine.policy_version == 1)
    await world.train_step(2)
    assert world.transport.gathered == [1, 2], "the weights of the pending version are copied before they change"
    third = asyncio.ensure_future(world.train_step(3))
    await settle(50)
    assert not third.done() and world.transport.gathered == [1, 2] and world.engine.policy_version == 2
    assert world.evaluation.describe()[-1] == "evaluation of version 2: waits for its turn"
    released[1].set()
    await third
    assert world.transport.gathered == [1, 2, 3] and world.eval_engine.policy_version == 2, "its areas are two"
    for event in released.values():
        event.set()
    await world.train_step(4)
    await world.evaluation.finish()
    assert world.versions == [1, 2, 3, 4]
    await world.evaluation.aclose()


async def test_its_engines_sample_from_the_weights_of_the_step_that_was_due_however_far_training_has_gone(
    tmp_path: Path,
) -> None:
    folder = str(tmp_path / "model")
    build_model_folder(BuildModelConfig(hidden_size=32, num_layers=1), Path(folder), seed=0)
    model = load_model(folder, "float32", "cpu")
    client = InferenceEngineClient([EmbeddedEngine(folder, executor="thread")], load_tokenizer(folder), folder)
    await client.start()
    world = World(prompts_of("a"), own=True)
    syncer = WeightSyncer(client, SharedMemoryTransport(), weights_of(model.named_parameters), PauseMode.KEEP)
    generator = OneTurn(client)
    evaluation = Evaluation(
        world.config,
        OwnEngines(generator, client, syncer),
        prompts_of("a"),
        reporter=world,
        changed=world.changed,
    )
    sampled: dict[int, list[float]] = {}
    released = {version: asyncio.Event() for version in (1, 2, 3)}
    generator.before = lambda batch: released[batch["batch_metadata"].global_step].wait()
    generator.after = lambda output: sampled.update({output["rollout_versions"][0][0]: output["rollout_logprobs"][0]})  # type: ignore[index]
    await evaluation.start(0, ())
    for step in (1, 2):  # both copies are made before either is measured
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        await evaluation.trained(step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for step in (1, 2):
        released[step].set()
    await evaluation.finish()
    uniform = -math.log(model.config.vocab_size)
    assert set(sampled) == {1, 2} and sampled[1] != sampled[2]
    assert all(abs(values[0] - uniform) > 1e-3 for values in sampled.values()), "no weight was zero yet"
    released[3].set()
    await evaluation.trained(3)
    await evaluation.finish()
    assert sampled[3] == pytest.approx([uniform] * len(sampled[3])), "and here all of them are"
    await evaluation.aclose()


@pytest.mark.parametrize("what", ["load", "receive", "gather"])
async def test_weights_that_do_not_reach_its_engines_leave_no_row_and_training_continues(what: str) -> None:
    world = World(own=True)
    await world.begin()
    world.transport.fails = what == "gather"
    world.eval_engine.fail[what] = EngineError("scripted")
    await world.train_step(1)
    await world.evaluation.finish()
    assert world.results == [] and world.evaluation.error is None
    assert len(world.notes) == 1 and "version 1 leaves no row" in world.notes[0]
    world.transport.fails = False
    world.eval_engine.fail.clear()
    await world.train_step(2)
    await world.evaluation.finish()
    assert world.versions == [2]
    await world.evaluation.aclose()


@pytest.mark.parametrize("own", [False, True])
async def test_engines_that_die_end_an_evaluation_without_a_row_of_zeros(own: bool) -> None:
    world = World(own=own)
    world.generator.before = lambda batch: world.eval_engine.die()
    await world.begin()
    await world.train_step(1)
    await world.evaluation.finish()
    assert world.results == [] and world.evaluation.error is None and "leaves no row" in world.notes[0]


@in_virtual_time
async def test_samples_that_run_out_of_time_because_no_engine_serves_are_no_zeros_either() -> None:
    world = World(timeout_s=0.05, engine_wait_timeout_s=60.0)
    world.generator.before = lambda batch: world.eval_engine.die()
    await world.begin()
    await world.train_step(1)
    await world.evaluation.finish()
    assert world.results == [] and "no engine served" in world.notes[0]


# Stopping and resuming ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True])
async def test_a_stop_keeps_finished_rows_and_cancels_running_and_pending_evaluations(own: bool) -> None:
    world = World(own=own)
    await world.begin()
    await world.train_step(1)
    await world.evaluation.finish()
    world.generator.before = lambda batch: forever()
    await world.train_step(2)
    if own:
        await world.changed.wait_until(lambda: world.eval_engine.policy_version == 2)
        await world.train_step(3)
    waiting = asyncio.ensure_future(world.train_step(4))
    await settle()
    assert not waiting.done() and not world.evaluation.cancelled
    world.evaluation.stop()
    await waiting
    await world.evaluation.finish()
    assert world.versions == [1] and world.evaluation.cancelled and world.generator.at_once == 0
    calls = len(world.generator.inputs)
    await world.train_step(5)
    await world.evaluation.finish()
    assert len(world.generator.inputs) == calls, "after a stop nothing begins"
    await world.evaluation.aclose()


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    ("step", "reported", "again"), [(4, [2], [4]), (4, [2, 4], []), (5, [2], [5]), (5, [2, 5], [])]
)
async def test_after_a_resume_only_versions_without_a_row_are_evaluated_again(
    own: bool, step: int, reported: list[int], again: list[int]
) -> None:
    world = World(own=own, interval=2)
    await world.begin(step, reported)
    await world.evaluation.finish()
    assert world.versions == again
    await world.evaluation.aclose()


async def test_a_result_that_cannot_be_written_ends_the_run() -> None:
    world = World()

    def full(*result: object, **recorded: object) -> None:
        raise OSError("scripted: the disk is full")

    world.evaluation._reporter.evaluated = full  # type: ignore[method-assign]
    await world.begin()
    await world.train_step(1)
    woken = asyncio.ensure_future(world.changed.wait_until(lambda: world.evaluation.error is not None))
    await asyncio.wait_for(woken, 60)
    with pytest.raises(OSError, match="disk is full"):
        await world.train_step(2)

"""Between generation and the buffer: groups stream through stages, in bounds, and nothing that fails there goes unnoticed."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Harness
from hypothesis import given
from hypothesis import strategies as st
from rollout_worlds import World
from scripted import settle
from stage_worlds import work
from training_worlds import backend, build_small_model, one_thread

from skyrl_train.config import refusals
from skyrl_train.config.compose import compose
from skyrl_train.config.schema import AlgorithmConfig, DynamicSampling, RunConfig
from skyrl_train.environments.base import PromptRecord
from skyrl_train.errors import ConfigError, GeneratorOutputError, RolloutError, StageError
from skyrl_train.rollout.buffer import size_bytes
from skyrl_train.rollout.checkpoint import read_recordings
from skyrl_train.rollout.group import RolloutGroup, RolloutSequence, Sample
from skyrl_train.rollout.group_json import decode_group, encode_group, from_line, to_line
from skyrl_train.rollout.logprob_stages import (
    ProximalStage,
    ReferenceStage,
    tokens_to_score,
    with_scores,
    worth_scoring,
)
from skyrl_train.rollout.placement.local import LoopPlace, ThreadWorker
from skyrl_train.rollout.placement.process import ProcessWorker
from skyrl_train.rollout.placement.workers import WorkerPlace
from skyrl_train.rollout.reward_function import GroupToReward, is_async, load_reward_function, reward_work
from skyrl_train.rollout.reward_stage import RewardStage, group_to_reward, with_rewards
from skyrl_train.rollout.stages import Seats, Stage, StagePipeline
from skyrl_train.stage_factory import build_stages
from skyrl_train.training.backend import TrainingSequence
from skyrl_train.training.frozen_policy import FrozenPolicy
from skyrl_train.training.minibatch import build_minibatch

RECORD = PromptRecord("p", [{"role": "user", "content": "3?"}], env_extras={"answer": "3"}, data_source="d")


def sequence(*ids: int, mask: list[int] | None = None, rewards: list[float] | None = None) -> RolloutSequence:
    mask = [1] * len(ids) if mask is None else mask
    return RolloutSequence(
        prompt_token_ids=[5, 6],
        response_ids=list(ids),
        loss_mask=mask,
        logprobs=[-0.5 * value for value in mask],
        versions=[3 if value else -1 for value in mask],
        rewards=[0.0] * len(ids) if rewards is None else rewards,
        stop_reason="stop",
    )


def group(*samples: Sample, ordinal: int = 7) -> RolloutGroup:
    return RolloutGroup(ordinal, "p", "d", samples or (Sample((sequence(1, 2),)), Sample((sequence(3),))), 3)


def decode(ids: Any) -> str:
    return "".join(map(str, ids))


class Scripted:
    """A stage that waits for permission, and does ``then`` with each group."""

    def __init__(self, name: str = "scripted", max_parallel: int = 1) -> None:
        self.name = name
        self.max_parallel = max_parallel
        self.open = asyncio.Event()
        self.open.set()
        self.begun: list[int] = []
        self.cancelled: list[int] = []
        self.most_at_once = 0
        self._inside = 0
        self.then: Callable[[RolloutGroup], RolloutGroup] = lambda group: group
        self.closed = False
        self.held: set[int] | None = None  # those that wait; None: all

    async def start(self) -> None:
        return

    async def run(self, group: RolloutGroup, record: PromptRecord) -> RolloutGroup:
        self.begun.append(group.ordinal)
        self._inside += 1
        self.most_at_once = max(self.most_at_once, self._inside)
        try:
            if self.held is None or group.ordinal in self.held:
                await self.open.wait()
            return self.then(group)
        except asyncio.CancelledError:
            self.cancelled.append(group.ordinal)
            raise
        finally:
            self._inside -= 1

    async def aclose(self) -> None:
        self.closed = True


async def turns_until(happened: Callable[[], bool]) -> None:
    """Nothing here waits for anything but turns of the loop, so a few of them are enough."""
    for _ in range(1000):
        if happened():
            return
        await asyncio.sleep(0)
    raise AssertionError("it does not happen")


def staged(world: World, *stages: Stage) -> World:
    """Every group of ``world`` goes through ``stages``."""
    world.runner.stages = StagePipeline(stages, clock=lambda: world.now)
    return world


# Seats ----------------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.sampled_from(["take", "leave", "cancel"]), st.integers(0, 5)), max_size=60), st.integers(1, 3)
)
def test_no_seat_is_lost_or_given_twice_and_the_earliest_deadline_goes_first(
    events: list[tuple[str, int]], count: int
) -> None:
    async def play() -> None:
        seats, tasks, holding = Seats(count), list[tuple[tuple[int, int], asyncio.Task[None]]](), set[tuple[int, int]]()

        async def sit(priority: tuple[int, int]) -> None:
            await seats.take(priority)
            holding.add(priority)

        for number, (event, choice) in enumerate(events):
            waiting = [(priority, task) for priority, task in tasks if not task.done()]
            if event == "take":
                tasks.append(((choice, number), asyncio.create_task(sit((choice, number)))))
            elif event == "leave" and holding:
                due = min(waiting, default=None)
                leaver = sorted(holding)[choice % len(holding)]
                holding.remove(leaver)
                seats.give_back()
                await asyncio.sleep(0)
                if due is not None:
                    assert due[0] in holding
            elif event == "cancel" and waiting:
                waiting[choice % len(waiting)][1].cancel()
            await settle()
            free = count - len(holding)
            assert free >= 0 and (free == 0 or seats.waiting == 0)
            assert seats.waiting == sum(not task.done() for _, task in tasks)
        for _, task in tasks:
            task.cancel()
        await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)

    asyncio.run(play())


async def test_a_seat_that_is_given_to_somebody_who_leaves_at_that_moment_goes_to_the_next() -> None:
    seats = Seats(1)
    await seats.take((0, 0))
    first, second = (asyncio.create_task(seats.take((n, n))) for n in (1, 2))
    await settle()
    seats.give_back()
    first.cancel()
    await asyncio.wait_for(second, 5)
    assert first.cancelled()


# The pipeline ---------------------------------------------------------------------------------------------------------


async def test_a_group_goes_through_all_stages_in_order_while_others_are_generated() -> None:
    one, other = Scripted("one"), Scripted("other")
    one.then = lambda g: dataclasses.replace(g, metrics={**g.metrics, "environment/one": 1.0})
    other.then = lambda g: dataclasses.replace(g, metrics={**g.metrics, "environment/two": 1.0 + len(g.metrics)})
    async with staged(World(s=1, depth=1), one, other) as w:
        await w.step(fill=True)
        assert one.begun[:4] == other.begun[:4]
        assert {tuple(g.metrics.items()) for g in w.buffer} <= {(("environment/one", 1.0), ("environment/two", 2.0))}
        w.check_books()


async def test_a_stage_starts_when_a_group_arrives_and_not_when_the_batch_is_full() -> None:
    stage = Scripted(max_parallel=4)
    async with staged(World(b=4), stage) as w:
        never = asyncio.Event()
        w.generator.plays[3] = [lambda batch: never.wait()]  # type: ignore[list-item]
        w.workers.start()
        await w.until(lambda: len(w.buffer) == 3)
        assert sorted(stage.begun) == [0, 1, 2], "the fourth is still being generated"


async def test_a_stage_that_falls_behind_holds_up_admission_and_works_on_no_more_than_it_may() -> None:
    stage = Scripted(max_parallel=2)
    stage.open.clear()
    async with staged(World(b=4, s=3, depth=3, workers=6), stage) as w:
        w.workers.start()
        await turns_until(lambda: len(w.generator.calls) == 6)
        await settle()
        assert len(stage.begun) == 2 and w.staleness.counts.running == 6
        assert len(w.generator.calls) == 6, "groups in a stage and before it count as running"
        stage.open.set()
        for _ in range(3):
            await w.step()
        assert stage.most_at_once == 2
        w.check_books()


async def test_the_group_with_the_earliest_deadline_goes_first() -> None:
    stage = Scripted()
    pipeline = StagePipeline([stage])
    stage.open.clear()

    def of_version(ordinal: int, version: int) -> RolloutGroup:
        old = dataclasses.replace(sequence(1), versions=[version])
        return group(Sample((old,)), ordinal=ordinal)

    tasks = [asyncio.create_task(pipeline.run(of_version(o, v), RECORD)) for o, v in ((0, 9), (1, 9), (2, 4), (3, 6))]
    await settle()
    stage.open.set()
    await asyncio.gather(*tasks)
    assert stage.begun == [0, 2, 3, 1]


async def test_a_group_that_is_dropped_leaves_its_stage() -> None:
    stage = Scripted(max_parallel=4)
    stage.open.clear()
    stage.held = {0}
    async with staged(World(b=2, s=1, depth=1, policy="drop"), stage) as w:
        w.workers.start()
        assert await w.step() == [1, 2] and w.workers.drop_overdue() == []
        assert await w.step() == [3, 4]
        assert w.workers.drop_overdue() == [0]
        await settle()
        assert stage.cancelled == [0]
        assert await w.step() == [5, 6], "its seat goes to the next prompt"
        w.check_books()


async def test_a_stage_that_fails_stops_the_run_and_is_named() -> None:
    stage = Scripted("reference")

    def fail(g: RolloutGroup) -> RolloutGroup:
        if g.ordinal == 2:
            raise MemoryError("no memory")
        return g

    stage.then = fail
    async with staged(World(), stage) as w:
        with pytest.raises(
            StageError, match=r"stage 'reference' failed on group 2: MemoryError\('no memory'\)"
        ) as caught:
            await w.step(fill=True)
        assert isinstance(caught.value.__cause__, MemoryError)
        assert w.staleness.counts.failed == 0 and 2 in w.workers._seated, "it is no outcome: the prompt comes again"


async def test_a_group_that_a_stage_cannot_use_is_a_failed_rollout() -> None:
    stage = Scripted()

    def refuse(g: RolloutGroup) -> RolloutGroup:
        if g.ordinal == 2:
            raise RolloutError("no reward")
        return g

    stage.then = refuse
    async with staged(World(), stage) as w:
        assert await w.step(fill=True) == [0, 1, 3, 4]
        assert w.loader.failed == [2]
        w.check_books()


async def test_the_filter_sees_the_rewards_of_the_stage() -> None:
    place = LoopPlace(reward_work("stage_worlds:async_length_reward", {}))
    stage = RewardStage(place, decode, max_parallel=4)
    await stage.start()
    async with staged(
        World(max_filtered_share=0.5), stage
    ) as w:  # the generator's rewards differ, the function's do not
        with pytest.raises(RolloutError, match="had no signal"):
            await w.step(fill=True)


async def test_closing_the_workers_cancels_what_is_in_a_stage() -> None:
    stage = Scripted(max_parallel=4)
    stage.open.clear()
    w = staged(World(), stage)
    async with w:
        w.workers.start()
        await turns_until(lambda: len(stage.begun) == 4)
    assert sorted(stage.cancelled) == [0, 1, 2, 3]
    await w.runner.stages.aclose()
    assert stage.closed


async def test_a_stage_tells_how_busy_it_is_and_who_waits() -> None:
    stage = Scripted("reference", max_parallel=2)
    stage.open.clear()
    async with staged(World(b=4), stage) as w:
        w.workers.start()
        await turns_until(lambda: len(stage.begun) == 2)
        await settle()
        w.now = 10.0
        assert (
            "stage 'reference': works on 2 groups (at most 2 at once), on group 0 for 10 s; 2 wait for it"
            in w.workers.describe()
        )
        assert sum("generated, and in its stages" in line for line in w.workers.describe()) == 4
        metrics = w.runner.stages.take_metrics()
        assert metrics == {
            "stages/reference/queue_length": 2.0,
            "stages/reference/busy_share": 1.0,
            "stages/reference/groups": 0.0,
        }
        stage.open.set()
        await w.step()
        w.now = 20.0
        assert w.runner.stages.take_metrics() == {
            "stages/reference/queue_length": 0.0,
            "stages/reference/busy_share": 0.0,
            "stages/reference/groups": 4.0,
            "stages/reference/seconds_per_group": 5.0,
        }
        assert not any(line.startswith("stage") for line in w.workers.describe())


# Rewards --------------------------------------------------------------------------------------------------------------


def test_a_reward_function_sees_the_prompts_row_and_the_last_sequence_of_each_sample() -> None:
    branched = Sample((sequence(1, 2, rewards=[0.0, 0.25]), sequence(3, 4, 5, mask=[1, 0, 1], rewards=[0.0, 0.0, 0.5])))
    asked = group_to_reward(RECORD, [branched, Sample((sequence(9),))], decode)
    assert (asked.uid, asked.data_source, asked.prompt, asked.env_extras) == ("p", "d", RECORD.prompt, {"answer": "3"})
    assert [s.text for s in asked.samples] == ["345", "9"]
    assert [s.reward for s in asked.samples] == [0.75, 0.0]
    assert asked.samples[0].loss_mask == [1, 0, 1] and asked.samples[0].prompt_token_ids == [5, 6]


def test_rewards_replace_those_of_the_generator_and_stand_on_the_last_token() -> None:
    branched = Sample((sequence(1, 2, rewards=[0.5, 0.25]), sequence(3, 4, rewards=[0.0, 0.5])))
    cut_off = Sample((sequence(1, rewards=[1.0]), sequence()))
    rewarded = with_rewards([branched, cut_off, Sample((sequence(),))], [2.0, 3, 4.0])
    assert [[s.rewards for s in sample.sequences] for sample in rewarded] == [
        [[0.0, 0.0], [0.0, 2.0]],
        [[3.0], []],
        [[]],
    ]
    assert [sample.reward for sample in rewarded] == [2.0, 3.0, 0]


@pytest.mark.parametrize(
    "answer", [None, 1.0, [1.0], [1.0, 2.0, 3.0], [1.0, float("nan")], ["a", "b"], [1.0, None], "12x"], ids=repr
)
def test_what_is_no_reward_for_each_sample_stops_the_run(answer: Any) -> None:
    with pytest.raises(StageError, match="one finite number for each"):
        with_rewards(group().samples, answer)


def test_numbers_of_other_libraries_are_rewards() -> None:
    assert [s.reward for s in with_rewards(group().samples, torch.tensor([1.0, 2.0]))] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("path", "kwargs", "rewards"),
    [("length_reward", {"scale": 2.0}, [4.0, 2.0]), ("Model", {"bonus": 1.5}, [1.5, 1.5])],
)
def test_a_reward_function_is_a_function_with_arguments_or_a_class(
    path: str, kwargs: dict[str, float], rewards: list[float]
) -> None:
    function = load_reward_function(f"stage_worlds:{path}", kwargs)
    assert list(function(group_to_reward(RECORD, group().samples, decode))) == rewards


def test_what_a_setting_names_wrongly_is_refused_before_the_run() -> None:
    assert [
        is_async(f"stage_worlds:{name}") for name in ("length_reward", "async_length_reward", "Model", "AsyncModel")
    ] == [
        False,
        True,
        False,
        True,
    ]
    with pytest.raises(ConfigError, match="cannot be called"):
        is_async("stage_worlds:NOT_CALLABLE")
    with pytest.raises(ConfigError, match=r"rollout.stages.reward.function='stage_worlds:nothing' cannot be imported"):
        is_async("stage_worlds:nothing")
    with pytest.raises(ConfigError, match=r"rollout.stages.reward.kwargs.*no_such"):
        load_reward_function("stage_worlds:Model", {"no_such": 1})


def reward_stage(
    place: Any, told: list[tuple[int, str]], attempts: int = 2, timeout_s: float | None = None
) -> RewardStage:
    return RewardStage(
        place,
        decode,
        max_parallel=1,
        attempts=attempts,
        timeout_s=timeout_s,
        on_failure=lambda ordinal, reason: told.append((ordinal, reason)),
    )


class FlakyPlace:
    """Fails as often as it is told to."""

    def __init__(self, place: WorkerPlace, *orders: str) -> None:
        self.orders = list(orders)
        self.place = place
        self.start, self.aclose = place.start, place.aclose

    async def call(self, argument: GroupToReward, timeout_s: float | None = None) -> Any:
        order = self.orders.pop(0) if self.orders else [float(i) for i, _ in enumerate(argument.samples)]
        return await self.place.call(order, timeout_s)


@pytest.mark.parametrize("order", ["raise", "hang", "die"])
async def test_a_reward_function_that_fails_once_is_asked_again(order: str) -> None:
    told: list[tuple[int, str]] = []
    stage = reward_stage(FlakyPlace(WorkerPlace([ProcessWorker(work())]), order), told, timeout_s=0.3)
    await stage.start()
    try:
        rewarded = await stage.run(group(), RECORD)
        assert [sample.reward for sample in rewarded.samples] == [0.0, 1.0]
        assert [ordinal for ordinal, _ in told] == [7]
    finally:
        await stage.aclose()


async def test_a_reward_function_that_fails_for_good_is_a_failed_rollout_with_its_reason() -> None:
    told: list[tuple[int, str]] = []
    stage = reward_stage(FlakyPlace(WorkerPlace([ThreadWorker(work())]), "raise", "raise"), told)
    await stage.start()
    with pytest.raises(RolloutError, match=r"no reward after 2 attempts; .* it raised ValueError: scripted") as caught:
        await stage.run(group(), RECORD)
    assert "in __call__" in caught.value.__cause__.__notes__[0]  # type: ignore[union-attr]
    assert len(told) == 2
    await stage.aclose()


# Log-probs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_small_model(tmp_path_factory.mktemp("model"))


def scored_group() -> RolloutGroup:
    branched = Sample((sequence(1, 2, 3), sequence(4, 5, 6, 7, mask=[1, 0, 0, 1])))
    return group(branched, Sample((sequence(),)), Sample((sequence(8, 9, mask=[0, 0]),)), Sample((sequence(2),)))


def frozen(folder: str, temperature: float = 1.0) -> FrozenPolicy:
    return FrozenPolicy(folder, dtype="float32", device="cpu", temperature=temperature, micro_batch_tokens=16)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_the_frozen_policy_scores_as_the_trained_one_did_when_it_started(folder: str, temperature: float) -> None:
    with one_thread():
        trained = backend(folder, temperature=temperature, micro_batch_tokens=64)
        scores = frozen(folder, temperature)(tokens_to_score(scored_group()))
        sequences = build_minibatch(
            [with_scores(scored_group(), "reference_logprobs", scores)], 1, AlgorithmConfig()
        ).sequences
        for s, expected in zip(sequences, trained.forward_logprobs(sequences), strict=True):
            assert s.reference_logprobs is not None
            torch.testing.assert_close(s.reference_logprobs, expected * s.loss_mask, rtol=1e-5, atol=1e-5)
    assert not any(parameter.requires_grad for parameter in frozen(folder)._model.parameters())


def test_scores_are_aligned_with_the_response_and_survive_the_checkpoint() -> None:
    scores = [[-1.0, -2.0, -3.0], [-4.0, 0.0, 0.0, -5.0], [], [0.0, 0.0], [-6.0]]
    scored = with_scores(scored_group(), "reference_logprobs", scores)
    assert [s.reference_logprobs for sample in scored.samples for s in sample.sequences] == scores
    assert decode_group(encode_group(scored)) == scored
    assert size_bytes(scored) == size_bytes(scored_group()) + 32 * 10


def test_a_group_that_was_written_before_there_were_stages_is_read() -> None:
    row = from_line(encode_group(scored_group()))
    for sample in row["samples"]:
        for written in sample["sequences"]:
            del written["reference_logprobs"], written["proximal_logprobs"]
    assert decode_group(to_line(row)) == scored_group()


async def test_proximal_logprobs_are_those_of_the_policy_when_the_group_is_finished(folder: str) -> None:
    with one_thread():
        trained = backend(folder, algorithm__entropy_coef=0.1)

        async def forward(sequences: list[TrainingSequence]) -> list[torch.Tensor]:
            return await asyncio.to_thread(trained.forward_logprobs, sequences)

        arrived = await ProximalStage(forward).run(scored_group(), RECORD)
        expected = frozen(folder)(tokens_to_score(scored_group()))
        (before,) = [build_minibatch([arrived], 1, AlgorithmConfig())]
        given = [s.proximal_logprobs for sample in arrived.samples for s in sample.sequences]
        assert [len(values) for values in given if values is not None] == [3, 4, 0, 2, 1]
        flat = [value for values in given for value in values or ()]
        assert flat == pytest.approx([value for values in expected for value in values], abs=1e-5)

        moved = trained.update(build_minibatch([with_rewards_of(scored_group())], 1, AlgorithmConfig()))
        assert moved["policy/ratio_mean"] == 1.0, "proximal and current policy are the same"
        trained.accumulate(before)
        assert trained.finish(1)["policy/ratio_mean"] != pytest.approx(1.0, abs=1e-4), "the policy has moved since"


def with_rewards_of(g: RolloutGroup) -> RolloutGroup:
    return dataclasses.replace(g, samples=with_rewards(g.samples, [float(i) for i, _ in enumerate(g.samples)]))


async def test_a_reference_that_fails_stops_the_run() -> None:
    place = WorkerPlace([ThreadWorker(work())])
    stage = ReferenceStage(place, max_parallel=1)
    await stage.start()
    place.call = lambda argument, timeout_s=None: WorkerPlace.call(place, "raise")  # type: ignore[method-assign]
    with pytest.raises(StageError, match="reference log-probs cannot be computed: it raised ValueError"):
        await stage.run(group(), RECORD)
    await stage.aclose()


async def test_groups_that_the_filter_will_take_away_are_not_scored() -> None:
    async def forward(sequences: Any) -> list[torch.Tensor]:
        return [torch.full((len(s),), -1.0) for s in sequences]

    filtering = AlgorithmConfig(dynamic_sampling=DynamicSampling.filter)
    alike = group()
    for algorithm, scored in ((filtering, False), (AlgorithmConfig(), True)):
        result = await ProximalStage(forward, needed=worth_scoring(algorithm)).run(alike, RECORD)
        assert (result.samples[0].sequences[0].proximal_logprobs is not None) is scored
    different = with_rewards_of(alike)
    result = await ProximalStage(forward, needed=worth_scoring(filtering)).run(different, RECORD)
    assert result.samples[0].sequences[0].proximal_logprobs == [-1.0, -1.0]


# Settings -------------------------------------------------------------------------------------------------------------


def configured(*overrides: str) -> RunConfig:
    return compose("quickstart", list(overrides))


REWARD = "rollout.stages.reward"
FUNCTION = f"{REWARD}.function=stage_worlds:length_reward"
ASYNC = f"{REWARD}.function=stage_worlds:async_length_reward"


def test_without_settings_there_are_no_stages(folder: str) -> None:
    assert build_stages(configured(), folder, decode, lambda ordinal, reason: None) == []


def test_stages_are_built_in_their_order(folder: str) -> None:
    stages = build_stages(
        configured(FUNCTION, "trainer.algorithm.kl_loss_coef=0.1"), folder, decode, lambda ordinal, reason: None
    )
    assert [(stage.name, stage.max_parallel) for stage in stages] == [("reward", 8), ("reference", 1)]


@pytest.mark.parametrize(
    ("overrides", "place"),
    [([FUNCTION], WorkerPlace), ([ASYNC], LoopPlace), ([ASYNC, f"{REWARD}.placement=process"], WorkerPlace)],
)
def test_a_reward_function_has_a_fitting_place_by_default(folder: str, overrides: list[str], place: type) -> None:
    (stage,) = build_stages(configured(*overrides), folder, decode, lambda ordinal, reason: None)
    assert isinstance(stage, RewardStage) and isinstance(stage._place, place)


def test_a_function_that_blocks_is_refused_on_the_loop(folder: str) -> None:
    with pytest.raises(ConfigError, match="Set placement=thread or process"):
        build_stages(configured(FUNCTION, f"{REWARD}.placement=loop"), folder, decode, lambda ordinal, reason: None)


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        (f"{REWARD}.kwargs={{scale: 1}}", "Name the function"),
        (f"{REWARD}.function=length_reward", "Name it as package.module:function"),
        (f"{REWARD}.max_parallel=0", "must be at least 1"),
        (f"{REWARD}.timeout_s=0", "must be more than 0"),
        (f"{REWARD}.placement=proces", "Did you mean process"),
        ("rollout.stages.reference.placement=loop", "unknown"),
        ("rollout.stages.reference.ray_num_gpus=-1", "must be at least 0"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_their_remedy(override: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        refusals.refuse(configured(override))


# A trainer ------------------------------------------------------------------------------------------------------------


class StagedRun(Harness):
    """A trainer whose groups go through a scripted stage."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        super().__init__(folder, *overrides)
        self.stage = Scripted("reference", max_parallel=4)
        self.trainer.runner.stages = StagePipeline([self.stage])


def runs_on(h: StagedRun) -> None:
    def score(g: RolloutGroup) -> RolloutGroup:
        scores = [[-float(g.ordinal)] * len(s.response_ids) for sample in g.samples for s in sample.sequences]
        return with_scores(g, "reference_logprobs", scores)

    h.stage.then = score


@pytest.mark.parametrize("mode", ["sync", "fully_async", "one_step_off", "partial_rollout"])
async def test_in_every_mode_what_a_stage_adds_reaches_the_backend(tmp_path: Path, mode: str) -> None:
    h = StagedRun(tmp_path, f"trainer.mode={mode}")
    runs_on(h)
    await h.train()
    assert sorted(h.trained) == list(range(32))
    for minibatch, row in zip(h.backend.minibatches, h.rows, strict=True):
        for s in minibatch.sequences:
            assert s.reference_logprobs is not None
            assert s.reference_logprobs[s.loss_mask].unique().tolist() == [-float(row["ordinals"][s.group_index])]


async def test_a_failed_stage_leaves_a_checkpoint_that_has_what_was_sampled(tmp_path: Path) -> None:
    h = StagedRun(tmp_path)

    def fail(g: RolloutGroup) -> RolloutGroup:
        if g.ordinal == 13:
            raise GeneratorOutputError("scripted")
        return g

    h.stage.then = fail
    with pytest.raises(StageError, match="stage 'reference' failed on group 13"):
        await h.train()
    checkpoint = h.trainer.parts.checkpoints.latest()
    assert checkpoint is not None
    assert 13 in {recording["group"] for recording in read_recordings(checkpoint)}

    again = StagedRun(tmp_path)
    await again.train()
    assert sorted(again.trained) == list(range(32)), "no prompt is lost, none comes twice"
    assert again.client.recordings.totals.replayed_tokens > 0, "group 13 was not sampled again"


# The real thing -------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_the_example_trains_with_a_reward_function_and_a_reference_in_processes_of_their_own(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "async" / "modes" / "decoupled_stages.py"
    overrides = [
        "trainer.max_steps=2",
        "trainer.policy_mini_batch_size=4",
        "trainer.policy.optimizer_config.num_warmup_steps=0",
        "generator.inference_engine.placement=thread",
        f"trainer.run_dir={tmp_path / 'run'}",
    ]
    done = subprocess.run([sys.executable, str(example), *overrides], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert first["policy/kl_to_reference"] == pytest.approx(0.0, abs=1e-6), "the policy is the reference still"
    assert second["policy/kl_to_reference"] > 1e-5
    for stage in ("reward", "reference"):
        assert first[f"stages/{stage}/groups"] + second[f"stages/{stage}/groups"] >= 8

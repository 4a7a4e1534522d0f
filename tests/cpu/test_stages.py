"""Between generation and the buffer: groups stream through stages, in bounds, and nothing that fails there goes unnoticed."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import Harness
from hypothesis import given
from hypothesis import strategies as st
from rollout_worlds import World
from scripted import settle
from stage_worlds import RECORD, decode, group, sequence

from skyrl_train.environments.base import PromptRecord
from skyrl_train.errors import GeneratorOutputError, RolloutError, StageError, TrainingWorkerError
from skyrl_train.rollout.checkpoint import read_replay_cache
from skyrl_train.rollout.stages.logprobs import (
    with_scores,
)
from skyrl_train.rollout.stages.pipeline import PrioritySemaphore, Stage, StagePipeline
from skyrl_train.rollout.stages.reward import RewardStage, reward_work
from skyrl_train.types import RolloutGroup, Sample
from skyrl_train.workers.executors import LoopExecutor


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
        self.begun.append(group.group_index)
        self._inside += 1
        self.most_at_once = max(self.most_at_once, self._inside)
        try:
            if self.held is None or group.group_index in self.held:
                await self.open.wait()
            return self.then(group)
        except asyncio.CancelledError:
            self.cancelled.append(group.group_index)
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
    world.group_generator.stages = StagePipeline(stages, clock=lambda: world.now)
    return world


# Slots ----------------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.sampled_from(["take", "leave", "cancel"]), st.integers(0, 5)), max_size=60), st.integers(1, 3)
)
def test_no_slot_is_lost_or_given_twice_and_the_earliest_deadline_goes_first(
    events: list[tuple[str, int]], count: int
) -> None:
    async def play() -> None:
        semaphore, tasks, holding = (
            PrioritySemaphore(count),
            list[tuple[tuple[int, int], asyncio.Task[None]]](),
            set[tuple[int, int]](),
        )

        async def sit(priority: tuple[int, int]) -> None:
            await semaphore.acquire(priority)
            holding.add(priority)

        for number, (event, choice) in enumerate(events):
            waiting = [(priority, task) for priority, task in tasks if not task.done()]
            if event == "take":
                tasks.append(((choice, number), asyncio.create_task(sit((choice, number)))))
            elif event == "leave" and holding:
                due = min(waiting, default=None)
                leaver = sorted(holding)[choice % len(holding)]
                holding.remove(leaver)
                semaphore.release()
                await asyncio.sleep(0)
                if due is not None:
                    assert due[0] in holding
            elif event == "cancel" and waiting:
                waiting[choice % len(waiting)][1].cancel()
            await settle()
            free = count - len(holding)
            assert free >= 0 and (free == 0 or semaphore.waiting == 0)
            assert semaphore.waiting == sum(not task.done() for _, task in tasks)
        for _, task in tasks:
            task.cancel()
        await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)

    asyncio.run(play())


async def test_a_slot_that_is_given_to_a_waiter_cancelled_at_that_moment_goes_to_the_next() -> None:
    semaphore = PrioritySemaphore(1)
    await semaphore.acquire((0, 0))
    first, second = (asyncio.create_task(semaphore.acquire((n, n))) for n in (1, 2))
    await settle()
    semaphore.release()
    first.cancel()
    await asyncio.wait_for(second, 300)
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
        w.dispatcher.start()
        await w.until(lambda: len(w.buffer) == 3)
        assert sorted(stage.begun) == [0, 1, 2], "the fourth is still being generated"


async def test_a_stage_that_falls_behind_holds_up_admission_and_works_on_no_more_than_it_may() -> None:
    stage = Scripted(max_parallel=2)
    stage.open.clear()
    async with staged(World(b=4, s=3, depth=3, workers=6), stage) as w:
        w.dispatcher.start()
        await turns_until(lambda: len(w.generator.calls) == 6)
        await settle()
        assert len(stage.begun) == 2 and w.staleness.counts.running == 6
        assert len(w.generator.calls) == 6, "groups in a stage and before it count as running"
        stage.open.set()
        for _ in range(3):
            await w.step()
        assert stage.most_at_once == 2
        w.check_books()


@pytest.mark.parametrize("policy", ["accept", "mask", "wait", "drop"])
async def test_groups_that_a_stage_never_returns_do_not_pile_up(policy: str) -> None:
    """Whatever is trained meanwhile; and of one that is given up, nothing is kept."""
    stage = Scripted(max_parallel=4)
    stage.open.clear()
    stage.held = set(range(0, 200, 5))
    seen: list[weakref.ref[RolloutGroup]] = []
    workers, b, depth = 6, 2, 1
    arrives = Scripted()
    arrives.then = lambda g: seen.append(weakref.ref(g)) or g  # type: ignore[func-returns-value]
    async with staged(World(b=b, s=2, depth=depth, workers=workers, policy=policy), arrives, stage) as w:

        async def play() -> None:
            for _ in range(20):
                await w.step()
                w.dispatcher.drop_overdue()
                counts = w.staleness.counts
                assert counts.running <= workers and counts.running + counts.buffered <= workers + (depth + 1) * b

        w.dispatcher.start()
        playing = asyncio.create_task(play())
        await settle(2000)
        assert playing.done() is (policy == "drop"), "a run that gives them up goes on, any other one waits for them"
        assert len(w.batches) >= 1 and len(seen) == len(w.generator.calls)
        gc.collect()
        assert sum(group() is not None for group in seen) <= workers + (depth + 1) * b
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=policy != "drop")
        w.check_books()


async def test_the_group_with_the_earliest_deadline_goes_first() -> None:
    stage = Scripted()
    pipeline = StagePipeline([stage])
    stage.open.clear()

    def of_version(group_index: int, version: int) -> RolloutGroup:
        old = dataclasses.replace(sequence(1), version_array=np.array([version]))
        return group(Sample((old,)), group_index=group_index)

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
        w.dispatcher.start()
        assert await w.step() == [1, 2] and w.dispatcher.drop_overdue() == []
        assert await w.step() == [3, 4]
        assert w.dispatcher.drop_overdue() == [0]
        await settle()
        assert stage.cancelled == [0]
        assert await w.step() == [5, 6], "its slot goes to the next prompt"
        w.check_books()


async def test_a_stage_that_fails_stops_the_run_and_is_named() -> None:
    stage = Scripted("reference")

    def fail(g: RolloutGroup) -> RolloutGroup:
        if g.group_index == 2:
            raise MemoryError("no memory")
        return g

    stage.then = fail
    async with staged(World(), stage) as w:
        with pytest.raises(
            StageError, match=r"stage 'reference' failed on group 2: MemoryError\('no memory'\)"
        ) as caught:
            await w.step(fill=True)
        assert isinstance(caught.value.__cause__, MemoryError)
        assert w.staleness.counts.failed == 0 and 2 in w.dispatcher._running, "it is no outcome: the prompt comes again"


async def test_a_training_worker_that_dies_under_a_stage_is_no_failure_of_the_stage() -> None:
    stage = Scripted("proximal")

    def fail(g: RolloutGroup) -> RolloutGroup:
        raise TrainingWorkerError("rank 1 is gone")  # a run with trainer.max_restarts goes on after this one only

    stage.then = fail
    async with staged(World(), stage) as w:
        with pytest.raises(TrainingWorkerError, match="rank 1 is gone"):
            await w.step(fill=True)
        assert w.staleness.counts.failed == 0 and 0 in w.dispatcher._running, "it is no outcome: the prompt comes again"


async def test_a_group_that_a_stage_cannot_use_is_a_failed_rollout() -> None:
    stage = Scripted()

    def refuse(g: RolloutGroup) -> RolloutGroup:
        if g.group_index == 2:
            raise RolloutError("no reward")
        return g

    stage.then = refuse
    async with staged(World(), stage) as w:
        assert await w.step(fill=True) == [0, 1, 3, 4]
        assert w.loader.ledger.failed == [2]
        w.check_books()


async def test_the_filter_sees_the_rewards_of_the_stage() -> None:
    place = LoopExecutor(reward_work("stage_worlds:async_length_reward", {}))
    stage = RewardStage(place, decode, max_parallel=4)
    await stage.start()
    async with staged(
        World(max_filtered_share=0.5), stage
    ) as w:  # the generator's rewards differ, the function's do not
        with pytest.raises(RolloutError, match="had no signal"):
            await w.step(fill=True)


async def test_closing_the_dispatcher_cancels_groups_in_a_stage() -> None:
    stage = Scripted(max_parallel=4)
    stage.open.clear()
    w = staged(World(), stage)
    async with w:
        w.dispatcher.start()
        await turns_until(lambda: len(stage.begun) == 4)
    assert sorted(stage.cancelled) == [0, 1, 2, 3]
    await w.group_generator.stages.aclose()
    assert stage.closed


async def test_a_stage_describes_its_load_and_its_queue() -> None:
    stage = Scripted("reference", max_parallel=2)
    stage.open.clear()
    async with staged(World(b=4), stage) as w:
        w.dispatcher.start()
        await turns_until(lambda: len(stage.begun) == 2)
        await settle()
        w.now = 10.0
        assert (
            "stage 'reference': works on 2 groups (at most 2 at once), on group 0 for 10 s; 2 wait for it"
            in w.dispatcher.describe()
        )
        assert sum("generated, and in its stages" in line for line in w.dispatcher.describe()) == 4
        assert w.group_generator.take_metrics() == {"generate/latency_s_oldest": 10.0}
        metrics = w.group_generator.stages.take_metrics()
        assert metrics == {
            "stages/reference/queue_length": 2.0,
            "stages/reference/busy_share": 1.0,
            "stages/reference/groups": 0.0,
        }
        stage.open.set()
        await w.step()
        w.now = 20.0
        assert w.group_generator.stages.take_metrics() == {
            "stages/reference/queue_length": 0.0,
            "stages/reference/busy_share": 0.0,
            "stages/reference/groups": 4.0,
            "stages/reference/seconds_per_group": 5.0,
        }
        assert not any(line.startswith("stage") for line in w.dispatcher.describe())


# A trainer ------------------------------------------------------------------------------------------------------------


class StagedRun(Harness):
    """A trainer whose groups go through a scripted stage."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        super().__init__(folder, *overrides)
        self.stage = Scripted("reference", max_parallel=4)
        self.trainer.rollout.group_generator.stages = StagePipeline([self.stage])


def runs_on(h: StagedRun) -> None:
    def score(g: RolloutGroup) -> RolloutGroup:
        scores = [[-float(g.group_index)] * len(s.response_ids) for sample in g.samples for s in sample.sequences]
        return with_scores(g, "reference_logprobs", scores)

    h.stage.then = score


@pytest.mark.parametrize("mode", ["sync", "fully_async", "one_step_off", "partial_rollout"])
async def test_in_every_mode_the_numbers_of_a_stage_reach_the_backend(tmp_path: Path, mode: str) -> None:
    h = StagedRun(tmp_path, f"trainer.mode={mode}")
    runs_on(h)
    await h.train()
    assert sorted(h.trained) == list(range(32))
    for minibatch, row in zip(h.backend.minibatches, h.rows, strict=True):
        for s in minibatch.sequences:
            assert s.reference_logprobs is not None
            assert s.reference_logprobs[s.loss_mask].unique().tolist() == [-float(row["group_indices"][s.group_index])]


async def test_a_failed_stage_leaves_a_checkpoint_with_the_sampled_tokens(tmp_path: Path) -> None:
    h = StagedRun(tmp_path)

    def fail(g: RolloutGroup) -> RolloutGroup:
        if g.group_index == 13:
            raise GeneratorOutputError("scripted")
        return g

    h.stage.then = fail
    with pytest.raises(StageError, match="stage 'reference' failed on group 13"):
        await h.train()
    checkpoint = h.trainer.components.checkpoints.latest()
    assert checkpoint is not None
    assert 13 in {recording["group"] for recording in read_replay_cache(checkpoint)}

    again = StagedRun(tmp_path)
    await again.train()
    assert sorted(again.trained) == list(range(32)), "no prompt is lost, none comes twice"
    assert again.client.replay_cache.totals.replayed_tokens > 0, "group 13 was not sampled again"


@pytest.mark.parametrize("policy", ["step", "arrival"])
async def test_the_proximal_policy_is_the_one_at_arrival_where_that_is_asked_for(tmp_path: Path, policy: str) -> None:
    h = Harness(tmp_path, f"trainer.algorithm.proximal_policy={policy}")
    h.backend.forward_logprobs = lambda sequences: [  # type: ignore[method-assign]
        torch.full((len(s),), -1.0 - float(h.backend.weight)) for s in sequences
    ]
    await h.train()
    assert sorted(h.trained) == list(range(32))
    for minibatch in h.backend.minibatches:
        for s in minibatch.sequences:
            assert (s.proximal_logprobs is not None) is (policy == "arrival")
            if s.proximal_logprobs is not None:
                (scored,) = s.proximal_logprobs[s.loss_mask].unique().tolist()
                updates = -scored - 1.0
                assert int(s.versions.max()) <= updates <= minibatch.step - 1, "between its end and its step"

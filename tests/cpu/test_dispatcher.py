"""The dispatcher: batch slots, admission, supervision (SEMANTICS 4)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rollout_worlds import (
    RAISE,
    World,
    cancel_its_task,
    fail,
    group_index_of,
    hang,
    ignore_cancellation,
    quiet,
    return_late,
)
from scripted import in_virtual_time, settle

from skyrl_train.errors import NoEngineError, RolloutError
from skyrl_train.types import GeneratorInput, GeneratorOutput

# Dynamic sampling -----------------------------------------------------------------------------------------------------


async def test_groups_without_signal_leave_as_they_arrive_and_the_step_is_full_all_the_same() -> None:
    async with World(max_filtered_share=0.9) as w:
        w.generator.plays.update({0: [quiet], 2: [quiet], 5: [quiet]})
        assert await w.step(fill=True) == [1, 3, 4, 6]
        assert sorted(w.loader.ledger.filtered) == [0, 2, 5] and w.staleness.counts.filtered == 3
        w.check_books()


async def test_a_run_in_which_nothing_has_signal_stops_with_the_remedy() -> None:
    async with World(max_filtered_share=0.9, b=1) as w:
        w.generator.plays.update({group_index: [quiet] for group_index in range(200)})
        await w.dispatcher.fill()
        with pytest.raises(RolloutError, match="dynamic_sampling=none"):
            w.raise_if_failed()
        assert w.staleness.counts.filtered == 58, "the first that is more than 0.9 of 64"
        w.check_books()


@settings(max_examples=12)
@given(st.sets(st.integers(0, 40), max_size=25), st.sets(st.integers(0, 40), max_size=8), st.integers(0, 2**32))
def test_with_depth_zero_the_same_groups_train_in_the_same_order_as_in_sync(
    silent: set[int], failing: set[int], seed: int
) -> None:
    """SEMANTICS 4.7, with filters and failures: in any order of finishing and of refilled slots."""

    assume(not {0, 1, 2} <= failing)  # these end a run

    async def run(background: bool, rng: random.Random) -> list[list[int]]:
        async with World(max_filtered_share=0.99, max_rollout_retries=0, max_failed_rollouts=99) as w:

            async def shuffled(batch: GeneratorInput) -> GeneratorOutput | None:
                await settle(rng.randrange(20))
                group_index = group_index_of(batch)
                if group_index in failing:
                    raise ValueError("scripted")
                return await quiet(batch) if group_index in silent else None

            w.generator.plays = {group_index: [shuffled] for group_index in range(200)}
            if background:
                w.dispatcher.start()
            for _ in range(5):
                await w.step(fill=not background)
            w.check_books()
            return w.batches

    synchronous = asyncio.run(run(False, random.Random(seed)))
    assert synchronous == asyncio.run(run(True, random.Random(seed + 1)))
    kept = [group_index for group_index in range(200) if group_index not in silent | failing]
    assert [group_index for batch in synchronous for group_index in batch] == kept[:20]


# Dropped groups -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("play", [hang, return_late, ignore_cancellation])
@in_virtual_time
async def test_an_overdue_group_is_cancelled_and_its_slot_goes_to_the_next_prompt(
    play: Callable[[GeneratorInput], Awaitable[GeneratorOutput | None]],
) -> None:
    async with World(policy="drop", s=1, depth=1, b=2) as w:
        w.generator.plays[0] = [play]
        w.dispatcher.start()
        dropped = []
        for _ in range(4):
            await w.step()
            dropped.append(w.dispatcher.drop_overdue())
            w.check_books()
        assert [0] in dropped and w.loader.ledger.dropped == [0]
        assert 0 not in w.trained and 0 not in [group.group_index for group in w.buffer]
        assert w.staleness.counts.dropped == 1


async def test_an_overdue_group_in_the_buffer_is_dropped_as_well() -> None:
    async with World(policy="drop", s=0, depth=0, b=2) as w:
        await w.dispatcher.fill()
        w.staleness.step = 3  # its step has come and gone
        assert w.dispatcher.drop_overdue() == [0, 1]
        assert len(w.buffer) == 0 and w.staleness.counts.running == 0
        w.check_books()
        assert w.dispatcher.drop_overdue() == []


# Admission ------------------------------------------------------------------------------------------------------------


async def test_admission_ends_quietly_with_the_prompts() -> None:
    async with World(b=2, s=1, depth=1) as w:
        issue, left = w.loader.issue, iter(range(3))
        w.loader.issue = lambda: issue() if next(left, None) is not None else None  # type: ignore[method-assign]
        w.dispatcher.start()
        await w.until(lambda: w.dispatcher.exhausted and len(w.buffer) == 3)
        assert w.dispatcher.error is None
        assert await w.step() == [0, 1]
        await asyncio.wait_for(w.dispatcher.idle(), 60)
        await asyncio.wait_for(w.dispatcher.fill(), 60)
        assert w.staleness.counts.submitted == 3
        assert "the prompts have ended" in w.dispatcher.describe()[0]


async def test_admission_waits_for_rows_that_are_still_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    is_ready = False
    monkeypatch.setattr("skyrl_train.rollout.data.loader.PromptLoader.ready", property(lambda loader: is_ready))
    async with World() as w:
        filling = asyncio.create_task(w.dispatcher.fill())
        await settle()
        assert not filling.done() and w.generator.calls == []
        assert "wait for the next rows of the data set" in w.dispatcher.describe()[0]
        is_ready = True
        w.changed.notify()
        await asyncio.wait_for(filling, 60)
        assert len(w.buffer) == 4


async def test_a_group_that_continues_from_recorded_tokens_is_admitted_under_their_version() -> None:
    async with World(s=4, depth=1) as w:
        w.engines.policy_version = 2
        w.dispatcher._admission_version = lambda group_index: 1 if group_index == 2 else 2
        admit, admitted = w.staleness.admit, dict[int, int]()

        def noting(group_index: int, version: int) -> None:
            admitted[group_index] = version
            admit(group_index, version)

        w.staleness.admit = noting  # type: ignore[method-assign]
        w.dispatcher.start()
        await w.until(lambda: len(w.buffer) == 8)
        assert admitted == {group_index: 1 if group_index == 2 else 2 for group_index in range(8)}


async def test_released_slots_are_filled_at_once_and_not_when_all_groups_have_ended() -> None:
    async with World(max_rollout_retries=0) as w:
        released = asyncio.Event()

        async def hold(batch: GeneratorInput) -> None:
            await released.wait()

        w.generator.plays.update({0: [fail], 1: [hold]})
        filling = asyncio.create_task(w.dispatcher.fill())
        await w.until(lambda: len(w.buffer) == 3)
        assert 4 in w.generator.calls and not filling.done()
        released.set()
        await filling


async def test_idle_means_that_no_group_runs_and_none_is_about_to() -> None:
    async with World(b=2) as w:
        released = asyncio.Event()

        async def hold(batch: GeneratorInput) -> None:
            await released.wait()

        w.generator.plays[1] = [hold]
        w.dispatcher.start()
        idle = asyncio.create_task(w.dispatcher.idle())
        await w.until(lambda: len(w.buffer) == 1)
        await settle()
        assert not idle.done()
        released.set()
        await asyncio.wait_for(idle, 60)
        assert len(w.buffer) == 2


# Supervision ----------------------------------------------------------------------------------------------------------


def task_named(prefix: str) -> asyncio.Task[object]:
    return next(task for task in asyncio.all_tasks() if task.get_name() == prefix)


@pytest.mark.parametrize("name", ["group-1", "admission"])
async def test_a_task_cancelled_from_outside_is_an_error_that_the_trainer_sees(name: str) -> None:
    async with World() as w:
        w.generator.plays[1] = [hang]
        w.dispatcher.start()
        await w.until(lambda: len(w.buffer) == 3)
        task_named(name).cancel()
        with pytest.raises(RolloutError, match="cancelled from outside"):
            await asyncio.wait_for(w.step(), 60)


async def test_a_bug_in_any_part_of_the_workers_reaches_the_trainer_as_itself() -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("scripted")

    for owner, name in (("loader", "issue"), ("loader", "settle"), ("staleness", "finish"), ("buffer", "put")):
        async with World(max_rollout_retries=0) as w:
            w.generator.plays[1] = [fail]
            setattr(getattr(w, owner), name, broken)
            w.dispatcher.start()
            with pytest.raises(ZeroDivisionError, match="scripted"):
                await asyncio.wait_for(w.step(), 60)


async def test_after_the_first_error_nothing_more_is_admitted_and_the_first_is_raised() -> None:
    async with World(on_rollout_failure=RAISE, max_rollout_retries=0) as w:
        w.generator.plays.update({group_index: [fail] for group_index in range(20)})
        w.dispatcher.start()
        await w.until(lambda: w.dispatcher.error is not None)
        await settle()
        assert max(w.generator.calls) == 3
        assert "'" + w.loader.source.record(0).uid + "'" in str(w.dispatcher.error)


async def test_groups_are_described_with_their_age_the_oldest_first() -> None:
    async with World(b=20, workers=20, max_rollout_retries=1, prompts=40) as w:
        w.generator.plays.update({group_index: [hang] for group_index in range(20)})
        w.generator.plays[7] = [fail, hang]
        w.dispatcher.start()
        await settle()
        w.now = 903.0
        lines = w.dispatcher.describe()
        uid = w.loader.source.record(7).uid
        assert lines[0] == "generation: 20 of 20 groups run, 0 wait to be trained; capacity for 0 more"
        assert f"group 7 (prompt {uid!r}): attempt 2 of 2 began 903 s ago, 2 sessions from {uid}@7_0 on" in lines
        assert len(lines) == 1 + 16 + 1 and lines[-1] == "and 4 groups that began later"


async def test_every_group_that_ends_counts_as_progress_with_any_outcome() -> None:
    async with World(max_filtered_share=0.9, max_rollout_retries=0) as w:
        w.generator.plays.update({0: [quiet], 1: [fail]})
        await w.dispatcher.fill()
        assert w.ended == 6


# All of it at random --------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.sampled_from(["accept", "wait", "mask", "drop"]), st.sampled_from(["replace", "mask"]))
def test_books_agree_at_every_step_of_every_schedule(seed: int, policy: str, on_failure: str) -> None:
    async def run() -> None:
        rng = random.Random(seed)
        depth = rng.choice([0, 0.5, 1, 2])
        async with World(
            b=rng.randint(1, 4),
            s=int(depth) + 1 + rng.randint(0, 2),
            depth=depth,
            workers=rng.randint(4, 12),
            policy=policy,
            max_filtered_share=0.99,
            max_failed_rollouts=10**6,
            max_engine_failures=10**6,
            max_rollout_retries=1,
            on_rollout_failure=on_failure,
        ) as w:

            async def play(batch: GeneratorInput) -> GeneratorOutput | None:
                await settle(int(rng.lognormvariate(2, 1.5)) % 400)
                kind = rng.random()
                if kind < 0.1:
                    raise ValueError("scripted")
                if kind < 0.15:
                    await cancel_its_task(batch)
                if kind < 0.2:
                    raise NoEngineError("scripted")
                return await quiet(batch) if kind < 0.4 else None

            w.generator.plays = {group_index: [play] for group_index in range(2000)}
            w.dispatcher.start()
            for _ in range(12):
                await asyncio.wait_for(w.step(), 60)
                w.check_books()
                w.dispatcher.drop_overdue()
                w.check_books()
            assert policy == "drop" or not w.loader.ledger.dropped
            await w.dispatcher.close()
            w.check_books()
            assert w.group_generator._running == {}

    asyncio.run(run())

"""Every order in which generation, training and weight syncs can follow each other, on scripted parts."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
from harness import Harness
from scripted import ScriptedEngine, hashed_token, settle

from skyrl_train.errors import EngineError, WeightSyncError
from skyrl_train.inference.interface import EngineCapabilities
from skyrl_train.minibatch_builder import MinibatchInputs
from skyrl_train.rollout.staleness.policies import MaskPolicy, StalenessView
from skyrl_train.step_metrics import TrainedStep
from skyrl_train.training.backend import Minibatch
from skyrl_train.types import GeneratorInput, PauseMode, RolloutGroup

STREAMING = "trainer.fully_async.streaming_min_groups=1"
OVERLAP = "trainer.fully_async.overlap_weight_sync=true"


def group_index_of(batch: GeneratorInput) -> int:
    return int(batch["trajectory_ids"][0].instance_id.rpartition("@")[2])


# One step off ---------------------------------------------------------------------------------------------------------


async def test_one_step_off_trains_on_what_the_policy_before_generated(tmp_path: Path) -> None:
    h = Harness(tmp_path, "trainer.mode=one_step_off")
    await h.train()
    assert h.trained == list(range(32)), "whole batches, one after the other"
    assert [row["staleness/max"] for row in h.rows] == [0, 1, 1, 1, 1, 1, 1, 1]
    for minibatch in h.backend.minibatches:
        sampled = {int(v) for s in minibatch.sequences for v in s.versions if v >= 0}
        assert len(sampled) == 1, "no request sees two policies"


async def test_one_step_off_generates_while_it_trains_and_publishes_when_nothing_runs(tmp_path: Path) -> None:
    h = Harness(tmp_path, "trainer.mode=one_step_off")
    loop = asyncio.get_running_loop()
    running_at_load: list[int] = []
    load = h.engine.load_weights

    async def observed(update: object) -> None:
        running_at_load.append(len(h.engine.running))
        await load(update)  # type: ignore[arg-type]

    h.engine.load_weights = observed  # type: ignore[method-assign,assignment]

    def update_waits_for_the_next_batch(minibatch: Minibatch) -> None:
        async def generated() -> None:
            want = min((h.trainer.global_step + 2) * 4, 32)
            await h.trainer.changed.wait_until(lambda: h.trainer.rollout.staleness.counts.accepted >= want)

        asyncio.run_coroutine_threadsafe(generated(), loop).result(timeout=300)

    h.backend.before_update = update_waits_for_the_next_batch
    await h.train()
    assert running_at_load == [0] * 9


@pytest.mark.parametrize("mode", ["trainer.mode=sync", "trainer.mode=one_step_off", STREAMING])
async def test_the_parts_of_a_step_add_up_to_it(tmp_path: Path, mode: str) -> None:
    """Of a clock that goes on only where a part says so. ``one_step_off`` waits for its next batch before a weight sync."""
    now_s, parts = [0.0], [0]
    h = Harness(tmp_path, mode, clock=lambda: now_s[0])
    build, idle = h.trainer.minibatches.build, h.trainer.rollout.dispatcher.idle

    def built(inputs: MinibatchInputs) -> tuple[Sequence[RolloutGroup], Minibatch]:
        now_s[0] += 2.0
        return build(inputs)

    def trained(part: Minibatch) -> None:
        now_s[0] += 5.0
        parts[0] += 1

    async def ended() -> None:
        now_s[0] += 3.0
        await idle()

    h.trainer.minibatches.build = built  # type: ignore[method-assign,assignment]
    h.trainer.rollout.dispatcher.idle = ended  # type: ignore[method-assign]
    h.backend.before_update = trained
    await h.train()
    waited = 3.0 if "one_step_off" in mode else 0.0
    assert {row["time/wait_for_batch"] for row in h.rows} == {waited}
    assert sum(row["time/train"] for row in h.rows) == 5.0 * parts[0]
    assert [row["time/prepare_update"] for row in h.rows] == [row["time/train"] / 5.0 * 2.0 for row in h.rows]
    assert [row["time/step"] for row in h.rows] == [waited + row["time/train"] / 5.0 * 7.0 for row in h.rows]


async def test_the_change_of_turns_is_no_wait_for_groups(tmp_path: Path) -> None:
    now_s = [0.0]
    h = Harness(tmp_path, "trainer.mode=partial_rollout", clock=lambda: now_s[0])
    colocation = h.trainer.colocation
    assert colocation is not None
    begin = colocation.begin_training

    async def slow() -> dict[str, float]:
        now_s[0] += 4.0
        return await begin()

    colocation.begin_training = slow  # type: ignore[method-assign]
    await h.train()
    assert {(row["time/step"], row["time/wait_for_batch"]) for row in h.rows} == {(4.0, 0.0)}


async def test_an_update_policy_that_measures_nothing_counts_as_training(tmp_path: Path) -> None:
    now_s = [0.0]
    h = Harness(tmp_path, "trainer.mode=sync", clock=lambda: now_s[0])

    def trained(part: Minibatch) -> None:
        now_s[0] += 5.0

    h.backend.before_update = trained
    h.trainer.update_policy = lambda batch: h.backend.update(h.trainer.minibatch(batch))  # type: ignore[method-assign]
    await h.train()
    assert {(row["time/train"], row["time/prepare_update"]) for row in h.rows} == {(5.0, 0.0)}


async def test_one_step_off_changes_no_weights_under_a_batch_that_a_slow_weight_sync_delayed(tmp_path: Path) -> None:
    h = Harness(tmp_path, "trainer.mode=one_step_off")
    running_at_load: list[int] = []
    ended = [asyncio.Event() for _ in range(10)]  # of steps
    load, finish_step = h.engine.load_weights, h.trainer.finish_step

    async def slow(update: object) -> None:
        version = update.version  # type: ignore[attr-defined]
        if 0 < version < 8:  # is served only once the step after it has ended
            await ended[version + 1].wait()
        running_at_load.append(len(h.engine.running))
        await load(update)  # type: ignore[arg-type]

    def observed(batch: Sequence[RolloutGroup], metrics: dict[str, float]) -> TrainedStep:
        trained = finish_step(batch, metrics)
        ended[h.trainer.global_step].set()
        return trained

    h.engine.load_weights = slow  # type: ignore[method-assign,assignment]
    h.trainer.finish_step = observed  # type: ignore[method-assign]
    await h.train()
    assert running_at_load == [0] * 9
    assert h.trained == list(range(32)) and max(row["staleness/max"] for row in h.rows) == 1


# Publication every k steps ---------------------------------------------------------------------------------------------


async def test_weights_are_synced_every_k_steps(tmp_path: Path) -> None:
    h = Harness(tmp_path, "trainer.fully_async.weight_sync_interval=2", "trainer.fully_async.staleness_policy=wait")
    await h.train()
    assert sorted(h.trained) == list(range(32))
    assert h.engine.calls.count("load") == 1 + 4 and h.engine.policy_version == 8
    versions = {int(v) for m in h.backend.minibatches for s in m.sequences for v in s.versions}
    assert versions <= {-1, 0, 2, 4, 6}


@pytest.mark.parametrize(("interval", "versions"), [(0, [0, 3, 6]), (6, [0, 3, 6, 8])])
async def test_a_last_step_without_a_weight_sync_gets_one_for_its_evaluation_alone(
    tmp_path: Path, interval: int, versions: list[int]
) -> None:
    evaluation = (f"trainer.eval.interval={interval}", "trainer.eval.generate=3")
    h = Harness(tmp_path, "trainer.fully_async.weight_sync_interval=3", *evaluation)
    loaded: list[int] = []
    load = h.engine.load_weights

    async def observed(update: object) -> None:
        loaded.append(update.version)  # type: ignore[attr-defined]
        await load(update)  # type: ignore[arg-type]

    h.engine.load_weights = observed  # type: ignore[method-assign,assignment]
    await h.train()
    assert loaded == versions and h.trainer.finished


# Streaming minibatches -------------------------------------------------------------------------------------------------


async def test_a_step_begins_before_its_last_groups_are_generated(tmp_path: Path) -> None:
    h = Harness(tmp_path, STREAMING, "trainer.max_steps=2")
    loop, first_part_trained, sizes = asyncio.get_running_loop(), asyncio.Event(), []

    def note(part: Minibatch) -> None:
        sizes.append(part.num_groups)
        loop.call_soon_threadsafe(first_part_trained.set)

    h.backend.before_update = note
    h.generator.before = lambda batch: first_part_trained.wait() if group_index_of(batch) >= 3 else None
    await h.train()
    assert sizes[0] <= 3 and sum(sizes) == 8
    assert sorted(h.trained) == list(range(8))


async def test_with_depth_zero_streaming_trains_the_synchronous_batches(tmp_path: Path) -> None:
    sync = Harness(tmp_path / "sync", "trainer.mode=sync")
    zero = ("trainer.fully_async.max_staleness_steps=0", "trainer.fully_async.generate_ahead_steps=0")
    streaming = Harness(tmp_path / "streaming", STREAMING, *zero)
    for h in (sync, streaming):
        await h.train()

    def tokens(h: Harness) -> list[list[tuple[int, ...]]]:
        return [sorted(tuple(s.token_ids.tolist()) for s in m.sequences) for m in h.backend.minibatches]

    assert tokens(streaming) == tokens(sync)


async def test_a_stop_within_a_streaming_step_leaves_its_groups_to_be_trained_later(tmp_path: Path) -> None:
    h = Harness(tmp_path, STREAMING)
    loop = asyncio.get_running_loop()

    def stop(part: Minibatch) -> None:
        if h.trainer.global_step == 2:
            loop.call_soon_threadsafe(h.trainer.request_stop)

    h.backend.before_update = stop
    h.generator.before = lambda batch: asyncio.Event().wait() if group_index_of(batch) == 11 else None
    await h.train()
    assert h.trainer.global_step == 2 and not h.backend.parts
    again = Harness(tmp_path, STREAMING)
    await again.train()
    assert sorted(again.trained) == list(range(32))


async def test_under_wait_streaming_leaves_room_for_the_slow_group(tmp_path: Path) -> None:
    h = Harness(
        tmp_path,
        STREAMING,
        "trainer.fully_async.staleness_policy=wait",
        "trainer.fully_async.max_staleness_steps=2",
    )
    released = asyncio.Event()
    h.generator.before = lambda batch: released.wait() if group_index_of(batch) == 1 else None
    loop, taken, three_taken = asyncio.get_running_loop(), [], asyncio.Event()

    def count(part: Minibatch) -> None:
        if part.step == 3:
            taken.append(part.num_groups)
            if sum(taken) == 3:
                loop.call_soon_threadsafe(three_taken.set)

    h.backend.before_update = count
    training = asyncio.ensure_future(h.train())
    # Step 3 is the slow group's last: the trainer takes three groups of it and keeps a slot.
    await asyncio.wait_for(three_taken.wait(), 60)
    await settle(2000)
    assert h.trainer.global_step == 2 and sum(taken) == 3
    released.set()
    await training
    assert next(row["step"] for row in h.rows if 1 in row["group_indices"]) == 3
    assert sorted(h.trained) == list(range(32))


# Publication beside training -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode", [(OVERLAP, "trainer.fully_async.staleness_policy=wait"), ("trainer.mode=one_step_off",)]
)
async def test_the_next_step_trains_while_the_engines_load(tmp_path: Path, mode: tuple[str, ...]) -> None:
    h = Harness(tmp_path, *mode)
    loop, trained_beside = asyncio.get_running_loop(), []
    next_update = asyncio.Event()
    load = h.engine.load_weights

    async def slow(update: object) -> None:
        version = update.version  # type: ignore[attr-defined]
        if 0 < version < 8:  # is served only once the step after it has begun
            await asyncio.wait_for(next_update.wait(), 60)
            next_update.clear()
            trained_beside.append(version)
        await load(update)  # type: ignore[arg-type]

    h.engine.load_weights = slow  # type: ignore[method-assign,assignment]

    def begun(minibatch: Minibatch) -> None:
        async def next_batch_is_there() -> None:  # a paused engine could not finish it
            want = min((h.trainer.global_step + 2) * 4, 32)
            await h.trainer.changed.wait_until(lambda: h.trainer.rollout.staleness.counts.accepted >= want)

        if h.trainer.global_step > 0:
            loop.call_soon_threadsafe(next_update.set)
        asyncio.run_coroutine_threadsafe(next_batch_is_there(), loop).result(timeout=300)

    h.backend.before_update = begun
    await h.train()
    assert trained_beside == [1, 2, 3, 4, 5, 6, 7]
    assert sorted(h.trained) == list(range(32)) and h.engine.policy_version == 8
    assert max(row["staleness/max"] for row in h.rows) <= h.plan.max_staleness_steps


async def test_a_weight_sync_that_fails_beside_training_stops_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    h = Harness(tmp_path, OVERLAP)
    loop = asyncio.get_running_loop()

    def break_engine(minibatch: Minibatch) -> None:
        if h.trainer.global_step == 3:
            loop.call_soon_threadsafe(h.engine.fail.__setitem__, "load", EngineError("scripted"))

    h.backend.before_update = break_engine
    with pytest.raises(WeightSyncError, match="scripted"):
        await h.train()
    again = Harness(tmp_path, OVERLAP)
    await again.train()
    assert sorted(again.trained) == list(range(32))


# Partial rollouts ------------------------------------------------------------------------------------------------------


def short_or_long(tokens: Sequence[int], seed: int) -> int:
    """Responses end after 1 to 6 tokens."""
    return hashed_token(tokens, seed, vocab=6)


class SlowEngine(ScriptedEngine):
    """The loop turns often enough between two of its tokens for a pause to come in the middle of a response."""

    async def _run_free(self) -> None:
        while self.running and self.paused in (None, PauseMode.WAIT):
            self.tick()
            for _ in range(30):
                await asyncio.sleep(0)


class SleepyEngine(SlowEngine):
    """Can sleep, and notes what it was asked while it did."""

    asleep: frozenset[str] = frozenset()

    @property
    def capabilities(self) -> EngineCapabilities:
        return dataclasses.replace(super().capabilities, sleep=True)

    async def sleep(self, level: int = 1) -> None:
        assert self.paused is not None and not self.running
        self.asleep = frozenset({"weights", "kv_cache"})
        self.calls.append("sleep")

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        if self.asleep.intersection(tags or self.asleep):
            self.calls.append(f"wake_up {tags}")
        self.asleep = self.asleep.difference(tags or self.asleep)

    async def receive_weights(self, update: object) -> None:
        assert "weights" not in self.asleep
        await super().receive_weights(update)  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", [SlowEngine, SleepyEngine])
async def test_partial_rollouts_are_interrupted_for_training_and_go_on_after_it(
    tmp_path: Path, engine: type[ScriptedEngine]
) -> None:
    one = engine(short_or_long, free_running=True)
    h = Harness(tmp_path, "trainer.mode=partial_rollout", engine=one)
    paused_while_training: list[bool] = []
    h.backend.before_update = lambda part: paused_while_training.append(
        one.paused is not None and (engine is SlowEngine or one.calls[-1] == "sleep")
    )
    await h.train()
    assert paused_while_training == [True] * 8
    assert sorted(h.trained) == list(range(32))
    versions = [{int(v) for v in s.versions if v >= 0} for m in h.backend.minibatches for s in m.sequences]
    assert any(len(seen) > 1 for seen in versions), "a response was sampled under two policies"
    if engine is SleepyEngine:
        assert one.calls.count("sleep") == 8
        assert one.calls.count("wake_up ['weights']") == one.calls.count("wake_up ['kv_cache']") == 8


async def test_partial_rollouts_keep_the_bound_under_wait(tmp_path: Path) -> None:
    h = Harness(
        tmp_path,
        "trainer.mode=partial_rollout",
        "trainer.fully_async.staleness_policy=wait",
        "trainer.fully_async.max_staleness_steps=1",
        "trainer.partial_rollout.oversubmit_factor=1.5",
    )
    assert h.plan.capacity == h.plan.num_workers == 6
    await h.train()
    assert sorted(h.trained) == list(range(32))
    assert max(row["staleness/max"] for row in h.rows) <= 1


# While it runs ---------------------------------------------------------------------------------------------------------


async def test_depth_and_workers_change_while_the_run_continues(tmp_path: Path) -> None:
    h = Harness(tmp_path, "trainer.fully_async.generate_ahead_steps=0", "trainer.fully_async.staleness_policy=wait")
    loop = asyncio.get_running_loop()

    def deeper(minibatch: Minibatch) -> None:
        async def resize() -> None:
            if h.trainer.global_step == 2:
                h.trainer.rollout.resize(generate_ahead_steps=2, num_workers=12)
            if h.trainer.global_step >= 2:  # the depth is used: two batches more are generated while this one trains
                want = min((h.trainer.global_step + 3) * 4, 32)
                await h.trainer.changed.wait_until(lambda: h.trainer.rollout.staleness.counts.accepted >= want)

        asyncio.run_coroutine_threadsafe(resize(), loop).result(timeout=300)

    h.backend.before_update = deeper
    await h.train()
    assert [row["staleness/max"] for row in h.rows] == [0, 0, 0, 1, 2, 2, 2, 2]
    assert sorted(h.trained) == list(range(32))


class NothingAhead(MaskPolicy):
    """One step ahead at first, none once version 1 is served."""

    def depth(self, view: StalenessView, generate_ahead_steps: float, weight_sync_interval: int) -> float:
        return 0


async def test_slots_that_a_smaller_depth_closes_are_not_idle(tmp_path: Path) -> None:
    served_before_a_step = "trainer.fully_async.overlap_weight_sync=false"
    h = Harness(tmp_path, f"trainer.fully_async.staleness_policy={__name__}:NothingAhead", served_before_a_step)
    slots: list[int] = []
    h.backend.before_update = lambda minibatch: slots.append(h.trainer.rollout.dispatcher.slots._capacity)
    await h.train()
    assert slots == [8] + [4] * 7, "nothing is admitted for step 2: its groups run or are finished"


async def test_settings_changed_during_the_run_are_restored_by_a_resume(tmp_path: Path) -> None:
    settings = (
        "trainer.fully_async.max_staleness_steps=0",
        "trainer.fully_async.generate_ahead_steps=0",
        "trainer.fully_async.staleness_policy=wait",
    )
    h = Harness(tmp_path, *settings)
    loop = asyncio.get_running_loop()

    def deeper(minibatch: Minibatch) -> None:
        async def resize() -> None:
            h.trainer.rollout.resize(max_staleness_steps=2, generate_ahead_steps=2, num_workers=12)
            await h.trainer.changed.wait_until(lambda: h.trainer.rollout.staleness.counts.accepted >= 12)
            h.trainer.request_stop()

        asyncio.run_coroutine_threadsafe(resize(), loop).result(timeout=300)

    h.backend.before_update = deeper
    await h.train()
    again = Harness(tmp_path, *settings)
    await again.train()
    assert sorted(again.trained) == list(range(32))
    assert [row["staleness/max"] for row in again.rows][:3] == [0, 1, 2], "what a bound of 0 would not let train"
    assert again.trainer.rollout.dispatcher.slots._capacity == 12


# All of them -----------------------------------------------------------------------------------------------------------

EVERY_MODE = [
    ("trainer.mode=sync",),
    ("trainer.mode=one_step_off",),
    ("trainer.mode=partial_rollout",),
    ("trainer.fully_async.weight_sync_interval=2",),
    ("trainer.fully_async.generate_ahead_steps=0.5",),
    (STREAMING,),
    (OVERLAP,),
    (OVERLAP, "trainer.fully_async.streaming_min_groups=2", "trainer.fully_async.weight_sync_interval=2"),
]


@pytest.mark.parametrize("overrides", EVERY_MODE, ids=" ".join)
async def test_every_mode_loses_nothing_when_it_is_stopped_again_and_again(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    loop = asyncio.get_running_loop()
    for stop_at in (0, 3, 6):
        h = Harness(tmp_path, *overrides)

        def stop(minibatch: Minibatch, h: Harness = h, stop_at: int = stop_at) -> None:
            if h.trainer.global_step == stop_at:
                loop.call_soon_threadsafe(h.trainer.request_stop)

        h.backend.before_update = stop
        await h.train()
    h = Harness(tmp_path, *overrides)
    await h.train()
    assert sorted(h.trained) == list(range(32))
    assert [row["step"] for row in h.rows] == list(range(1, 9))


@pytest.mark.parametrize("overrides", EVERY_MODE, ids=" ".join)
async def test_every_mode_ends_with_the_error_of_a_part_that_fails(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    h = Harness(tmp_path, *overrides)

    def broken() -> int:
        raise ZeroDivisionError("scripted")

    def break_later(minibatch: Minibatch) -> None:
        if h.trainer.global_step == 2:
            h.trainer.rollout.prompts.issue = broken  # type: ignore[method-assign]

    h.backend.before_update = break_later
    with pytest.raises(ZeroDivisionError, match="scripted"):
        await h.train()
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == f"global_step_{h.trainer.global_step}"
    again = Harness(tmp_path, *overrides)
    await again.train()
    assert sorted(again.trained) == list(range(32))

"""The instrument that the scheduling figures come from: virtual time, modelled engines, the oracle, and whole runs."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import scripted_update

from skyrl_train.errors import ConfigError, SimulationError
from skyrl_train.inference.interface import InferenceEngineInput, InferenceEngineOutput
from skyrl_train.simulation.clock import VirtualTimeLoop, run_in_virtual_time
from skyrl_train.simulation.engine import EngineSpeed, ModelledEngine
from skyrl_train.simulation.lengths import Lengths, constant, log_normal, pareto, rare_tail
from skyrl_train.simulation.run import Outcome, Workload, simulate
from skyrl_train.simulation.schedule import Pipeline, best_found, least_time, planned_time
from skyrl_train.simulation.training import TrainingSpeed
from skyrl_train.types import PauseMode

T = TypeVar("T")


def virtually(main: Callable[[VirtualTimeLoop], Awaitable[T]]) -> T:
    async def run(loop: VirtualTimeLoop) -> T:
        return await main(loop)

    return run_in_virtual_time(run)


# Virtual time ----------------------------------------------------------------------------------------------------------


def test_a_century_of_sleep_takes_no_time_and_timers_keep_their_order() -> None:
    woke: list[tuple[str, float]] = []

    async def main(loop: VirtualTimeLoop) -> None:
        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            woke.append((name, loop.time()))

        await asyncio.gather(sleeper("late", 3e9), sleeper("early", 1.5))

    virtually(main)
    assert woke == [("early", 1.5), ("late", pytest.approx(3e9))]


def test_an_executor_does_one_thing_at_a_time_and_calls_without_one_overlap() -> None:
    async def main(loop: VirtualTimeLoop) -> tuple[float, float]:
        with ThreadPoolExecutor(1) as executor:
            await asyncio.gather(*(loop.run_in_executor(executor, loop.spend, 2.0) for _ in range(3)))
        in_turn = loop.time()
        await asyncio.gather(*(asyncio.to_thread(loop.spend, 2.0) for _ in range(3)))
        return in_turn, loop.time() - in_turn

    assert virtually(main) == (6.0, 2.0)


def test_a_deadlock_is_an_error_at_once_and_so_is_work_on_the_loop() -> None:
    async def wait_for_nothing(loop: VirtualTimeLoop) -> None:
        await loop.create_future()

    async def work_on_the_loop(loop: VirtualTimeLoop) -> None:
        loop.spend(1.0)

    with pytest.raises(SimulationError, match="deadlock"):
        virtually(wait_for_nothing)
    with pytest.raises(SimulationError, match="executor"):
        virtually(work_on_the_loop)


# Lengths ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [log_normal, pareto])
@settings(max_examples=20)  # each finds the shape of a distribution
@given(tail=st.floats(2, 20), seed=st.integers(0, 3))
def test_lengths_have_the_mean_and_the_tail_that_they_say(kind: Callable[..., Lengths], tail: float, seed: int) -> None:
    lengths = kind(2000, 100, tail, seed)
    assert lengths.mean == pytest.approx(100, rel=0.01) and lengths.tail == pytest.approx(tail, rel=0.02)


def test_a_rare_tail_is_as_rare_as_it_says_and_an_impossible_one_is_refused() -> None:
    lengths = rare_tail(1000, 100, 20, 0)
    assert lengths.mean == pytest.approx(100, rel=0.01) and (lengths.values >= 1900).sum() == 10
    with pytest.raises(ConfigError, match="leaves nothing"):
        rare_tail(1000, 100, 200, 0)
    with pytest.raises(ConfigError, match="no tail"):
        log_normal(10, 100, 50, 0)


# The modelled engine ---------------------------------------------------------------------------------------------------


def request(tokens: int, priority: int = 0) -> InferenceEngineInput:
    return InferenceEngineInput(prompt_token_ids=[[5, 6]], sampling_params={"max_tokens": tokens}, priority=priority)


async def updated(engine: ModelledEngine, version: int, mode: PauseMode = PauseMode.KEEP) -> None:
    update = scripted_update(version)
    await engine.receive_weights(update)
    await engine.pause(mode)
    await engine.load_weights(update)
    await engine.resume()


async def serving(**speed: float) -> ModelledEngine:
    engine = ModelledEngine(EngineSpeed(**{"slots": 2, "step_s": 1.0, **speed}))  # type: ignore[arg-type]
    await engine.start()
    await updated(engine, 0)
    return engine


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 4))
def test_slots_are_filled_in_order_and_every_token_takes_a_step(lengths: list[int], slots: int) -> None:
    async def main(loop: VirtualTimeLoop) -> tuple[list[float], float]:
        engine = await serving(slots=slots)

        async def ended(tokens: int) -> float:
            output = await engine.generate(request(tokens))
            assert len(output["response_ids"][0]) == tokens
            return loop.time()

        ends = await asyncio.gather(*map(ended, lengths))
        await engine.teardown()
        return ends, engine.busy_slot_s

    free, expected = [0.0] * slots, []
    for tokens in lengths:  # each goes to the slot that is free first
        free.sort()
        free[0] += tokens
        expected.append(free[0])
    ends, busy_s = virtually(main)
    assert ends == pytest.approx(expected) and busy_s == pytest.approx(sum(lengths))


@pytest.mark.parametrize(
    ("mode", "ends_at", "versions", "reason"),
    [
        (PauseMode.KEEP, 11.0, [0] * 4 + [1] * 6, "length"),  # a second for the load
        (PauseMode.RECOMPUTE, 14.0, [0] * 4 + [1] * 6, "length"),  # and half a step for each of 6 tokens in the cache
        (PauseMode.ABORT, 4.0, [0] * 4, "abort"),
        (PauseMode.WAIT, 10.0, [0] * 10, "length"),
    ],
)
def test_an_update_in_the_middle_of_a_response(
    mode: PauseMode, ends_at: float, versions: list[int], reason: str
) -> None:
    async def main(loop: VirtualTimeLoop) -> tuple[float, InferenceEngineOutput]:
        engine = await serving()  # loads nothing yet, so time is 0
        engine.speed = EngineSpeed(slots=2, step_s=1.0, load_s=1.0, prefill_steps_per_token=0.5)
        answer = asyncio.ensure_future(engine.generate(request(10)))
        await asyncio.sleep(4 + 1)  # its prompt takes one step
        updating = asyncio.ensure_future(updated(engine, 1, mode))
        output = await answer
        ended = loop.time() - 1
        await updating
        await engine.teardown()
        return ended, output

    ended, output = virtually(main)
    assert (ended, output["response_versions"][0], output["stop_reasons"]) == (
        pytest.approx(ends_at),
        versions,
        [reason],
    )


def test_the_oldest_waits_least() -> None:
    async def main(loop: VirtualTimeLoop) -> list[int]:
        engine, order = await serving(slots=1), []

        async def ask(priority: int) -> None:
            await engine.generate(request(5, priority))
            order.append(priority)

        await asyncio.gather(*map(ask, (3, 2, 0, 1)))
        await engine.teardown()
        return order

    assert virtually(main) == [3, 0, 1, 2], "the first one found the slot free"


# The oracle ------------------------------------------------------------------------------------------------------------


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    batch, steps = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    durations = draw(st.lists(st.integers(1, 9), min_size=batch * steps, max_size=batch * steps))
    return Pipeline(
        durations, batch, draw(st.integers(0, 3)), draw(st.sampled_from([0.5, 2.0, 6.0])), draw(st.integers(1, 6))
    )


@given(pipelines())
def test_no_schedule_that_is_found_beats_the_bound(pipeline: Pipeline) -> None:
    assert least_time(pipeline) <= best_found(pipeline, width=16) + 1e-9


@given(pipelines())
def test_without_slack_and_with_slots_for_all_the_bound_is_the_synchronous_schedule(pipeline: Pipeline) -> None:
    batch = pipeline.batch_groups
    sync = Pipeline(pipeline.durations, batch, 0, pipeline.step_s, slots=batch)
    blocks = [pipeline.durations[i * batch : (i + 1) * batch] for i in range(pipeline.steps)]
    expected = sum(max(block) + pipeline.step_s for block in blocks)
    assert least_time(sync) == pytest.approx(expected) == best_found(sync)


@given(pipelines())
def test_more_slack_is_never_slower(pipeline: Pipeline) -> None:
    bounds = [
        least_time(Pipeline(pipeline.durations, pipeline.batch_groups, s, pipeline.step_s, pipeline.slots))
        for s in range(4)
    ]
    assert all(less >= more - 1e-9 for less, more in itertools.pairwise(bounds))


# Whole runs ------------------------------------------------------------------------------------------------------------


def work(
    lengths: Lengths, *, ratio: float = 1.0, batch: int = 16, steps: int = 60, slots: int | None = None
) -> Workload:
    """``ratio``: training time over generation time."""
    slots = slots or batch
    generation_s = lengths.mean * batch / slots
    return Workload(
        lengths,
        batch,
        steps,
        EngineSpeed(slots=slots, step_s=1.0),
        TrainingSpeed(per_token_s=ratio * generation_s / (batch * lengths.mean)),
    )


def bounded(policy: str, bound: int, depth: float) -> list[str]:
    settings = {"staleness_policy": policy, "max_staleness_steps": bound, "generate_ahead_steps": depth}
    return ["trainer.mode=fully_async", *(f"trainer.fully_async.{name}={value}" for name, value in settings.items())]


def schedule(outcome: Outcome) -> list[tuple[float, tuple[int, ...]]]:
    return [(record.ended_s, record.lags) for record in outcome.records]


def test_a_synchronous_run_of_equal_lengths_takes_the_calculated_time_and_an_asynchronous_one_half() -> None:
    equal = work(constant(64, 32), steps=8)
    assert simulate(equal, "trainer.mode=sync").total_s == pytest.approx(8 * (32 + 32))
    one_ahead = simulate(equal, *bounded("accept", 1, 1), "trainer.fully_async.num_parallel_generation_workers=16")
    assert one_ahead.total_s == pytest.approx(32 + 8 * 32)


def test_a_run_is_the_same_each_time() -> None:
    long_tail = work(log_normal(160, 32, 6, 0), steps=10)
    assert schedule(simulate(long_tail, *bounded("accept", 2, 2))) == schedule(
        simulate(long_tail, *bounded("accept", 2, 2))
    )


@pytest.mark.parametrize(
    ("policy", "ratio"),
    [
        ("accept", 0.6),
        ("accept", 1.5),
        pytest.param("accept", 1.0, marks=pytest.mark.slow),
        pytest.param("mask", 1.0, marks=pytest.mark.slow),
    ],
)
def test_the_slower_of_generation_and_training_hardly_waits(policy: str, ratio: float) -> None:
    lengths = log_normal(16 * 60, 32, 8, 0)
    outcome = simulate(work(lengths, ratio=ratio), *bounded(policy, 2, 2), edge=10)
    assert outcome.utilization >= 0.94  # with the 64 groups a step of benchmarks/staleness_price.py: 0.97
    assert policy == "accept" or outcome.max_trained_lag <= 2


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_a_planner_that_knows_the_distribution_lies_between_the_oracle_s_bound_and_its_own_rules(bound: int) -> None:
    lengths = log_normal(8 * 12, 32, 12, 0)
    pipeline = Pipeline([lengths[i] for i in range(8 * 12)], 8, bound, 10.0, 8)
    planned_s = planned_time(pipeline, futures=20, horizon=6)
    assert planned_s == planned_time(pipeline, futures=20, horizon=6)
    assert least_time(pipeline) <= planned_s <= 1.1 * best_found(pipeline, width=16)
    assert bound > 0 or planned_s == best_found(pipeline)


def test_wait_keeps_the_bound_and_no_schedule_that_keeps_it_is_much_faster() -> None:
    lengths = log_normal(16 * 30, 32, 8, 0)
    workload = work(lengths, steps=30)
    outcome = simulate(workload, *bounded("wait", 2, 2), "trainer.fully_async.num_parallel_generation_workers=16")
    assert outcome.max_trained_lag <= 2 and outcome.masked_share == 0
    pipeline = Pipeline(
        [lengths[i] for i in range(16 * 30)], 16, 2, workload.training.per_token_s * 16 * lengths.mean, 16
    )
    assert least_time(pipeline) <= outcome.total_s <= least_time(pipeline) * 1.25


def test_an_adapting_depth_is_as_fast_as_the_bound_allows_and_no_staler_than_it_has_to_be() -> None:
    """Groups of eight: the slowest of eight responses decides when a group is finished."""
    lengths = log_normal(8 * 8 * 24, 32, 8, 0)
    by_ratio = {}
    for ratio in (0.6, 2.0):  # bound by generation, and by training
        training = TrainingSpeed(per_token_s=ratio / 64)
        groups_of_8 = Workload(lengths, 8, 24, EngineSpeed(slots=64, step_s=1.0), training, samples=8)
        adapting = ("trainer.mode=fully_async", "trainer.fully_async.generate_ahead_steps=null")
        by_ratio[ratio] = simulate(groups_of_8, *adapting, edge=6)
    assert by_ratio[0.6].utilization >= 0.97 and by_ratio[2.0].utilization >= 0.97
    assert by_ratio[2.0].mean_lag < 2.5, "a fixed depth of S = 4 has a lag of 4"
    assert max(outcome.max_trained_lag for outcome in by_ratio.values()) <= 4

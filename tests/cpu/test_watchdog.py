"""The reports of a run that makes no progress."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from harness import TOKENIZER, Harness
from hypothesis import given
from hypothesis import strategies as st
from scripted import ScriptedEngine, settle

from skyrl_train.errors import EngineDeadError, NoEngineError
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.interface import InferenceEngineInput
from skyrl_train.inference.pool.fleet import FleetLimits
from skyrl_train.runtime.watchdog import LoopMonitor, Phase, Watchdog
from skyrl_train.types import PauseMode


class Time:
    """A clock that a test turns, and a sleep that waits for it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        assert seconds > 0
        sleeper = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now + seconds, sleeper))
        await sleeper

    async def advance_to(self, until: float) -> None:
        """Lets everybody wake up at their time, in order."""
        await asyncio.sleep(0)
        while due := sorted((at, i) for i, (at, _) in enumerate(self._sleepers) if at <= until):
            self.now, index = due[0]
            self._sleepers.pop(index)[1].set_result(None)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        self.now = until


class Watched:
    """A watchdog with a limit of 10 s, and its messages with their times."""

    def __init__(self, describe: Callable[[], list[str]] = list) -> None:
        self.time = Time()
        self.said: list[tuple[float, str]] = []
        self.dog = Watchdog(
            10.0, self.time, describe, lambda text: self.said.append((self.time.now, text)), self.time.sleep
        )

    async def __aenter__(self) -> Watched:
        self.task = asyncio.create_task(self.dog.run())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    @property
    def times(self) -> list[float]:
        return [when for when, _ in self.said]


# The watchdog ---------------------------------------------------------------------------------------------------------


async def test_it_speaks_once_the_limit_has_passed_and_again_after_twice_four_times_as_long() -> None:
    async with Watched() as w:
        await w.time.advance_to(9.9)
        assert w.said == []
        await w.time.advance_to(100.0)
        assert w.times == [10.0, 30.0, 70.0]


async def test_progress_silences_it_and_makes_it_as_watchful_as_at_first() -> None:
    async with Watched() as w:
        for second in range(0, 50, 5):
            await w.time.advance_to(float(second))
            w.dog.progress()
        assert w.said == []
        await w.time.advance_to(60.0)
        assert w.times == [55.0]
        w.dog.progress()  # at 60, with the next message planned for 75
        await w.time.advance_to(74.0)
        assert w.times == [55.0, 70.0]


@given(st.lists(st.floats(0.1, 45.0), max_size=12))
def test_it_speaks_exactly_when_nothing_has_moved_for_the_limit(gaps: list[float]) -> None:
    async def run() -> None:
        async with Watched() as w:
            expected: list[float] = []
            moved = 0.0
            for gap in gaps:
                expected += [moved + after for after in (10.0, 30.0) if after <= gap]
                moved += gap
                await w.time.advance_to(moved)
                w.dog.progress()
            assert w.times == pytest.approx(expected)

    asyncio.run(run())


async def test_it_says_for_how_long_and_asks_for_the_description_only_then() -> None:
    asked: list[float] = []

    def describe() -> list[str]:
        asked.append(w.time.now)
        return ["the trainer: waiting", "engine 0: dead"]

    w = Watched(describe)
    async with w:
        await w.time.advance_to(9.0)
        assert asked == []
        await w.time.advance_to(10.0)
    assert w.said == [
        (
            10.0,
            "no group and no step has ended for 10 s. Current activities of the run:\n"
            "  the trainer: waiting\n  engine 0: dead",
        )
    ]


async def test_a_description_that_fails_is_said_and_ends_nothing() -> None:
    def broken() -> list[str]:
        raise ZeroDivisionError("scripted")

    async with Watched(broken) as w:
        await w.time.advance_to(30.0)
        assert w.times == [10.0, 30.0]
        assert "ZeroDivisionError('scripted')" in w.said[0][1]


def test_a_phase_has_a_name_and_an_age() -> None:
    time = Time()
    phase = Phase(time, "starting")
    time.now = 5.0
    assert phase.describe() == "the trainer starting, for 5 s"
    phase.enter("training step 3")
    time.now = 905.0
    assert phase.describe() == "the trainer training step 3, for 900 s"


async def test_a_report_at_the_end_says_what_a_run_still_does(tmp_path: Path) -> None:
    harness = Harness(tmp_path, "trainer.mode=sync", "trainer.max_steps=1")
    harness.trainer.components = replace(harness.trainer.components, export_folder=tmp_path / "policy")
    said: list[str] = []

    def busy(*_: object) -> dict[str, str]:
        said.append(harness.trainer.describe()[0].partition(",")[0])
        return {}

    harness.backend.save = harness.backend.export_hf = busy  # type: ignore[method-assign, assignment]
    await harness.train()
    assert said == ["the trainer writes the checkpoint of step 1", "the trainer exports the final policy"]


# The loop monitor -----------------------------------------------------------------------------------------------------


async def test_a_call_that_blocks_the_loop_is_named_with_its_task_and_place() -> None:
    said: list[str] = []
    told = threading.Event()

    def say(text: str) -> None:
        if "'group-17-1'" in text:  # a busy machine may hold up other calls as long
            said.append(text)
            told.set()

    def send(layers: int) -> None:
        if layers:
            send(layers - 1)
        else:
            told.wait(timeout=300)  # until the monitor has noticed

    async def a_blocking_generator() -> None:
        send(layers=17)  # as deep as a request of openai's client

    with LoopMonitor(0.02, say):
        await asyncio.create_task(a_blocking_generator(), name="group-17-1")
    assert len(said) == 1, "once per call, however long it takes"
    assert "0.02 s" in said[0]
    assert "test_watchdog.py" in said[0] and "in a_blocking_generator" in said[0]


async def test_the_monitor_looks_again_long_before_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl_train.runtime.watchdog.LOOK_S", 0.001)
    loop, looks, again = asyncio.get_running_loop(), [], asyncio.Event()
    ask = loop.call_soon_threadsafe

    def look(callback: Callable[[], None]) -> asyncio.Handle:
        looks.append(callback)
        if len(looks) == 3:
            ask(again.set)
        return ask(callback)

    monkeypatch.setattr(loop, "call_soon_threadsafe", look)
    with LoopMonitor(3000.0, lambda text: None):
        async with asyncio.timeout(300):
            await again.wait()


async def test_the_monitor_ends_with_its_block_and_has_nothing_to_say_of_a_loop_that_turns() -> None:
    said: list[str] = []
    with LoopMonitor(3000.0, said.append):
        watcher = next(thread for thread in threading.enumerate() if thread.name == "loop-monitor")
        await settle()
    await asyncio.to_thread(watcher.join, 300)
    assert not watcher.is_alive(), "it does not sit out its interval"
    assert said == []


# Engines --------------------------------------------------------------------------------------------------------------


def request() -> InferenceEngineInput:
    return InferenceEngineInput(prompt_token_ids=[[5, 6, 7]], sampling_params={"max_tokens": 6})


async def test_engines_report_their_state_and_the_age_of_their_requests() -> None:
    time = Time()
    engine = ScriptedEngine()
    client = InferenceEngineClient([engine, ScriptedEngine()], TOKENIZER, clock=time)
    time.now = 40.0
    running = asyncio.create_task(client.generate(request()))
    await settle()
    assert engine.running
    time.now = 100.0
    assert client.describe() == [
        "engine 0: healthy for 100 s, 1 request inside, the longest for 60 s",
        "engine 1: healthy for 100 s, 0 requests inside",
    ]
    await client.pause_generation(PauseMode.KEEP)
    later = asyncio.create_task(client.generate(request()))
    await settle()
    assert client.describe()[-1] == "engines: paused for new weights; requests that wait before them: 1"
    for task in (running, later):
        task.cancel()
    await asyncio.gather(running, later, return_exceptions=True)
    await client.resume_generation()
    await client.teardown()


async def test_a_dead_engine_says_why() -> None:
    engine = ScriptedEngine()
    client = InferenceEngineClient([engine], TOKENIZER, limits=FleetLimits(max_restarts=0), clock=Time())
    engine.die()
    with pytest.raises((NoEngineError, EngineDeadError)):
        await client.generate(request())
    assert client.describe() == ["engine 0: dead for 0 s (scripted death), 0 requests inside"]
    assert not client.serving
    with pytest.raises(NoEngineError, match="scripted death"):
        await client.wait_for_engine()


async def test_waiting_for_an_engine_ends_when_one_joins() -> None:
    client = InferenceEngineClient([ScriptedEngine()], TOKENIZER)
    assert client.serving
    await client.wait_for_engine()
    pool = client._pool
    pool.missed_update(0, "scripted")
    assert not client.serving
    waiting = asyncio.create_task(client.wait_for_engine())
    await asyncio.sleep(0)
    assert not waiting.done()
    pool.join(0)
    await waiting
    assert client.serving

"""An episode keeps a blocking environment off the event loop, in order, and closes it however it ended."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from skyrl_train.environments.base import Environment, EnvironmentStep
from skyrl_train.environments.episode import Episode, environment_call
from skyrl_train.environments.registry import environment_factory
from skyrl_train.errors import GeneratorOutputError, RolloutError
from skyrl_train.runtime.process import DaemonThreadPool


class Recorder(Environment):
    """Writes down (call, thread) into ``extras["calls"]`` and runs ``extras["on_step"]`` in its step."""

    def __init__(self, extras: Mapping[str, Any]) -> None:
        super().__init__(extras)
        self._note("make")
        self._stop_reason = ""

    def observe_stop(self, stop_reason: str) -> None:
        self._stop_reason = stop_reason

    def step(self, action: str) -> EnvironmentStep:
        self._note(f"step {action} {self._stop_reason}")
        on_step: Callable[[], Any] = self.extras.get("on_step", lambda: None)
        made = on_step()
        return made or {"observations": [], "reward": 1.0, "done": True}

    def close(self) -> None:
        self._note("close")
        if "on_close" in self.extras:
            self.extras["on_close"]()

    def _note(self, call: str) -> None:
        self.extras["calls"].append((call, threading.get_ident()))


class QuickRecorder(Recorder):
    is_blocking = False


def episode(cls: type[Recorder], **extras: Any) -> tuple[Episode, list[tuple[str, int]]]:
    calls: list[tuple[str, int]] = []
    return Episode(environment_factory("recorder", cls, {}), {"calls": calls, **extras}, "prompt-7"), calls


def fail() -> None:
    raise KeyError("lost")


async def test_a_blocking_environment_has_one_thread_of_its_own() -> None:
    running, calls = episode(Recorder)
    async with running:
        await running.init([])
        await running.step("a", "stop")
        await running.step("b", "length")
    assert [call for call, _ in calls] == ["make", "step a stop", "step b length", "close"]
    threads = {thread for _, thread in calls}
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


async def test_a_thread_serves_the_next_episode_but_never_two_at_once_or_after_a_failure() -> None:
    idle: list[DaemonThreadPool] = []

    def next_one(**extras: Any) -> tuple[Episode, list[tuple[str, int]]]:
        calls: list[tuple[str, int]] = []
        factory = environment_factory("recorder", Recorder, {})
        return Episode(factory, {"calls": calls, **extras}, "prompt-7", idle_threads=idle), calls

    first, calls = next_one()
    beside, calls_beside = next_one()
    async with first, beside:
        await first.init([])
        await beside.init([])
        await first.end()
    assert [call for call, _ in calls] == [call for call, _ in calls_beside] == ["make", "close"]
    threads = {thread for _, thread in calls} | {thread for _, thread in calls_beside}
    assert len(threads) == len(idle) == 2
    failing, calls = next_one(on_step=fail)
    with pytest.raises(RolloutError):
        async with failing:
            await failing.step("a", "stop")
    assert calls[0][1] in threads
    assert len(idle) == 1, "what failed may still run"
    unclosed, calls = next_one(on_close=fail)
    with pytest.raises(RolloutError):
        async with unclosed:
            await unclosed.init([])
    assert not idle


async def test_a_quick_environment_runs_on_the_event_loop() -> None:
    running, calls = episode(QuickRecorder)
    async with running:
        await running.step("a", "stop")
    assert {thread for _, thread in calls} == {threading.get_ident()}


async def test_the_event_loop_continues_while_a_step_blocks() -> None:
    release = threading.Event()

    def wait() -> None:
        assert release.wait(300), "the event loop was blocked"

    running, _ = episode(Recorder, on_step=wait)
    async with running:
        step = asyncio.create_task(running.step("a", "stop"))
        await asyncio.sleep(0)
        release.set()  # only a loop that is free gets here
        assert (await step)["reward"] == 1.0


@pytest.mark.parametrize("cls", [Recorder, QuickRecorder])
async def test_an_error_of_the_environment_names_it_and_the_prompt_and_closes_it(cls: type[Recorder]) -> None:
    closed = threading.Event()
    running, calls = episode(cls, on_step=fail, on_close=closed.set)
    with pytest.raises(
        RolloutError, match="Environment 'recorder' failed on prompt 'prompt-7': KeyError: 'lost'"
    ) as info:
        async with running:
            await running.step("a", "stop")
    assert isinstance(info.value.__cause__, KeyError)
    assert closed.wait(300)
    assert [call for call, _ in calls].count("close") == 1


@pytest.mark.parametrize("raised", [SystemExit(0), StopIteration(), GeneratorExit()], ids=repr)
@pytest.mark.parametrize("cls", [Recorder, QuickRecorder])
async def test_text_of_the_model_can_neither_end_the_program_nor_keep_it_waiting(
    cls: type[Recorder], raised: BaseException
) -> None:
    def run_it() -> None:
        raise raised

    running, _ = episode(cls, on_step=run_it, on_close=run_it)
    with pytest.raises(RolloutError, match=type(raised).__name__):
        async with running, asyncio.timeout(60):
            await running.step("exit()", "stop")


async def test_a_hanging_step_does_not_hold_up_its_cancellation_and_is_closed_afterwards() -> None:
    begun, release, closed = threading.Event(), threading.Event(), threading.Event()

    def hang() -> EnvironmentStep:
        begun.set()
        release.wait(300)
        return {"observations": [], "reward": 0.0, "done": True}

    running, calls = episode(Recorder, on_step=hang, on_close=closed.set)

    async def play() -> None:
        async with running:
            await running.step("a", "stop")

    task = asyncio.create_task(play())
    await asyncio.to_thread(begun.wait, 300)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [call for call, _ in calls] == ["make", "step a stop"], "the step still runs: never two calls at once"
    release.set()
    assert await asyncio.to_thread(closed.wait, 300)


async def test_the_call_that_a_sample_waits_for_is_known_while_it_runs() -> None:
    begun, release = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        release.wait(300)

    factory = environment_factory("recorder", Recorder, {})
    async with Episode(factory, {"calls": [], "on_step": hang}, "prompt-7", session="p@3_0") as running:
        await running.init([])
        assert environment_call("p@3_0") is None
        step = asyncio.create_task(running.step("a", "stop"))
        await asyncio.to_thread(begun.wait, 300)
        call = environment_call("p@3_0")
        assert call is not None and (call.environment, call.call) == ("recorder", "step")
        assert "in hang" in call.stack()
        release.set()
        await step
        assert environment_call("p@3_0") is None


async def test_a_failing_close_fails_a_good_episode_and_never_hides_an_error(caplog: pytest.LogCaptureFixture) -> None:
    good, _ = episode(QuickRecorder, on_close=fail)
    with pytest.raises(RolloutError, match="lost"):
        async with good:
            await good.step("a", "stop")
    bad, _ = episode(QuickRecorder, on_close=fail)
    with caplog.at_level(logging.WARNING), pytest.raises(KeyError, match="absent"):
        async with bad:
            _ = (await bad.init([]))[1]["absent"]
    assert "raised while it was closed" in caplog.text


def observing(*observations: Any) -> dict[str, Any]:
    return {"observations": list(observations), "reward": 1.0, "done": False}


@pytest.mark.parametrize(
    "step",
    [
        {"reward": 1.0},
        {"done": True},
        {"reward": "x", "done": True},
        3,
        observing("Wrong."),
        observing({"content": "Wrong."}),
        observing({"role": "user", "content": 5}),
        observing({"role": "user", "content": None}),
    ],
)
async def test_a_step_that_breaks_the_contract_stops_the_run(step: Any) -> None:
    running, _ = episode(QuickRecorder, on_step=lambda: step)
    with pytest.raises(GeneratorOutputError, match=r"step\(\) of environment 'recorder'"):
        async with running:
            await running.step("a", "stop")


@pytest.mark.parametrize("method", ["end_early", "get_metrics"])
async def test_a_method_that_forgets_to_return_stops_the_run(method: str) -> None:
    running, _ = episode(type("Forgetful", (QuickRecorder,), {method: lambda self: None}))

    async def run() -> None:
        async with running:
            await running.step("a", "stop")
            await running.end_early()
            await running.end()

    with pytest.raises(GeneratorOutputError, match=rf"{method}\(\) of environment 'recorder' \(.*\) returned None"):
        await run()


async def test_a_reward_that_is_not_finite_is_a_failed_rollout() -> None:
    running, _ = episode(QuickRecorder, on_step=lambda: {"reward": float("nan"), "done": True})
    with pytest.raises(RolloutError, match="failed on prompt 'prompt-7'"):
        async with running:
            await running.step("a", "stop")


HELLO = {"role": "user", "content": "Hello."}


@pytest.mark.parametrize("answer", [[HELLO], [HELLO, HELLO], ("Hello.", {}), (["Hello."], {}), None], ids=repr)
async def test_an_init_that_breaks_the_contract_stops_the_run(answer: Any) -> None:
    class Wrong(QuickRecorder):
        def init(self, prompt: Any) -> Any:
            return answer

    running, _ = episode(Wrong)
    with pytest.raises(
        GeneratorOutputError, match=r"init\(\) of environment 'recorder' \(.*episode\.py:\d+\) returned"
    ):
        async with running:
            await running.init([])


@pytest.mark.parametrize("number", [math.nan, -math.inf, 10**400], ids=["nan", "-inf", "10**400"])
async def test_a_metric_that_is_not_finite_is_a_failed_rollout(number: float) -> None:
    class Unmeasured(QuickRecorder):
        def get_metrics(self) -> dict[str, Any]:
            return {"note": "x", "accuracy": number}

    running, calls = episode(Unmeasured)

    async def run() -> None:
        async with running:
            await running.step("a", "stop")
            await running.end()

    with pytest.raises(RolloutError, match=r"failed on prompt 'prompt-7': (ValueError.* accuracy=|OverflowError)"):
        await run()
    assert calls[-1][0] == "close"

"""Engines that die, return, join and leave while requests run (SEMANTICS 2.7), with scripted engines and a clock of ours."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from scripted import ScriptedEngine, in_virtual_time, scripted_update, settle
from test_client import TOKENIZER, publish, request, uninterrupted
from test_fleet import Clock

from skyrl_train.errors import EngineDeadError, EngineError, NoEngineError
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.interface import InferenceEngineInput, SamplingParams
from skyrl_train.inference.pool.fleet import EngineState, FleetLimits
from skyrl_train.inference.requests import GenerationRequest
from skyrl_train.types import PauseMode

LIMITS = FleetLimits(max_failed_probes=2, max_restarts=2, backoff_s=1.0)


def fleet_of(*engines: ScriptedEngine, **kwargs: Any) -> tuple[InferenceEngineClient, Clock]:
    clock = Clock()
    return InferenceEngineClient(
        engines,
        TOKENIZER,
        limits=LIMITS,
        probe_interval_s=10.0,
        clock=clock,
        **{"engine_wait_timeout_s": 5.0, **kwargs},
    ), clock


async def after(client: InferenceEngineClient, clock: Clock, seconds: float) -> None:
    """Lets time pass, and the supervisor do what has become due."""
    clock.now += seconds
    client.supervisor.step()
    while running := client.supervisor._working:
        await asyncio.gather(*running.values(), return_exceptions=True)


async def test_a_dead_engine_is_started_again_and_serves_only_after_it_caught_up() -> None:
    a, b = ScriptedEngine(free_running=True), ScriptedEngine(free_running=True)
    client, clock = fleet_of(a, b)
    await publish(client, 0)
    a.die()
    await client.health()
    assert client.engine_states == {0: EngineState.DEAD, 1: EngineState.HEALTHY}
    await publish(client, 1)
    await publish(client, 2)
    await after(client, clock, 1.0)
    assert client.engines == [a, b]
    assert a.calls[-5:] == ["start", "receive", "pause", "load", "resume"]
    assert a.policy_version == 2
    output = await client.generate(request(max_tokens=3, ignore_eos=True))
    assert output["response_versions"] == [[2, 2, 2]]


async def test_a_restart_that_hangs_is_given_up_and_tried_again() -> None:
    a, b = ScriptedEngine(free_running=True), ScriptedEngine(free_running=True)
    client, clock = fleet_of(a, b)
    await publish(client, 0)
    client._pool.fleet.limits = dataclasses.replace(LIMITS, start_timeout_s=0.01)
    start, hangs = a.start, True

    async def hung() -> None:
        await (asyncio.get_running_loop().create_future() if hangs else start())

    a.start = hung  # type: ignore[method-assign]
    a.die()
    await client.health()
    await after(client, clock, 1.0)
    assert client.engine_states[0] is EngineState.DEAD
    assert "did not start within 0.01 s" in client.describe()[0]
    hangs = False
    await after(client, clock, 2.0)
    assert client.engine_states[0] is EngineState.HEALTHY


async def test_an_engine_that_missed_an_update_catches_up_and_returns() -> None:
    a, b = ScriptedEngine(free_running=True), ScriptedEngine(free_running=True)
    client, clock = fleet_of(a, b)
    await publish(client, 0)
    a.fail["load"] = EngineError("scripted")
    await publish(client, 1)
    assert client.engine_states[0] is EngineState.STALE
    await after(client, clock, 1.0)  # still failing: later again
    assert client.engine_states[0] is EngineState.STALE
    del a.fail["load"]
    await after(client, clock, 1.0)
    assert client.engine_states[0] is EngineState.STALE  # the second wait is longer
    await after(client, clock, 1.0)
    assert client.engine_states[0] is EngineState.HEALTHY
    assert a.policy_version == 1


async def test_a_silent_engine_gets_no_new_requests_and_keeps_its_own_until_it_is_given_up() -> None:
    a, b = ScriptedEngine(), ScriptedEngine()
    client, clock = fleet_of(a, b)
    await publish(client, 0)
    engine_input = request(max_tokens=6, stop=["zzz"])
    expected = await uninterrupted(engine_input)
    task = asyncio.ensure_future(client.generate(engine_input))
    await settle()
    a.tick(2)
    a.fail["health"] = EngineError("no answer")
    await after(client, clock, 10.0)
    assert client.engine_states[0] is EngineState.SUSPECT
    assert client.engines == [b] and len(a.running) == 1
    del a.fail["health"]
    await after(client, clock, 10.0)
    assert client.engine_states[0] is EngineState.HEALTHY
    a.fail["health"] = EngineError("no answer")
    await after(client, clock, 10.0)
    await after(client, clock, 10.0)
    assert client.engine_states[0] is EngineState.DEAD
    await settle()
    b.tick(6)
    assert (await task)["response_ids"] == expected["response_ids"]


async def test_an_engine_that_was_suspect_during_an_update_does_not_come_back_with_old_weights() -> None:
    a, b = ScriptedEngine(free_running=True), ScriptedEngine(free_running=True)
    client, clock = fleet_of(a, b)
    await publish(client, 0)
    a.fail["health"] = EngineError("no answer")
    await after(client, clock, 10.0)
    await publish(client, 1)
    del a.fail["health"]
    assert client.engine_states[0] is EngineState.STALE
    await after(client, clock, 1.0)
    assert client.engine_states[0] is EngineState.HEALTHY
    assert a.policy_version == 1


async def test_requests_wait_for_an_engine_that_comes_back_and_lose_nothing() -> None:
    engine = ScriptedEngine()
    client, clock = fleet_of(engine)
    await publish(client, 0)
    engine_input = request(max_tokens=8, stop=["zzz"])
    expected = await uninterrupted(engine_input)
    task = asyncio.ensure_future(client.generate(engine_input))
    await settle()
    engine.tick(3)
    await settle()
    engine.die()
    await settle()
    assert client.engines == [] and not task.done()
    await after(client, clock, 1.0)
    await settle()
    assert len(engine.requests[-1]["prompt_token_ids"][0]) == 2 + 3
    engine.tick(8)
    assert (await task)["response_ids"] == expected["response_ids"]


@in_virtual_time
async def test_requests_that_wait_too_long_fail_with_a_typed_error_that_says_why() -> None:
    engine = ScriptedEngine()
    client, _ = fleet_of(engine, engine_wait_timeout_s=0.001)
    await publish(client, 0)
    engine.die()
    with pytest.raises(NoEngineError, match="scripted death"):
        await client.generate(request())


async def test_an_engine_that_cannot_be_started_again_is_given_up_and_requests_fail_at_once() -> None:
    engine = ScriptedEngine()
    client, clock = fleet_of(engine)
    await publish(client, 0)
    engine.fail["start"] = EngineDeadError("out of memory")
    engine.die()
    await client.health()
    task = asyncio.ensure_future(client.generate(request()))
    for _ in range(2):
        await after(client, clock, 100.0)
    with pytest.raises(NoEngineError, match="out of memory"):
        await client.generate(request())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@in_virtual_time
async def test_an_engine_that_hangs_in_an_update_holds_up_no_later_one_and_is_started_again() -> None:
    class Hanging(ScriptedEngine):
        async def start(self) -> None:
            self.hang.clear()
            self.fail.clear()
            await super().start()

    a, b = Hanging(free_running=True), ScriptedEngine(free_running=True)
    client, clock = fleet_of(a, b)
    await publish(client, 0)
    a.hang |= {"receive", "pause", "load", "resume"}
    a.fail["health"] = EngineError("no answer")
    await publish(client, 1)
    assert client.engine_states[0] is EngineState.STALE
    clock.now += 1.0
    client.supervisor.step()  # its first attempt to catch up
    await settle()
    loop = asyncio.get_running_loop()
    begun = loop.time()
    await publish(client, 2)
    assert loop.time() == begun
    await after(client, clock, 2.0)
    assert client.engine_states[0] is EngineState.DEAD
    await after(client, clock, 4.0)
    assert client.engines == [a, b] and a.policy_version == 2


async def test_an_added_engine_catches_up_and_takes_new_sessions() -> None:
    a, b = ScriptedEngine(), ScriptedEngine()
    client, _ = fleet_of(a)
    await publish(client, 3)
    tasks = [asyncio.ensure_future(client.generate(request()))]
    await settle()
    assert await client.add_engine(b) == 1
    assert b.policy_version == 3
    other = InferenceEngineInput(prompt_token_ids=[[5]], session_ids=["t"], sampling_params={})
    tasks.append(asyncio.ensure_future(client.generate(other)))
    await settle()
    assert len(a.running) == len(b.running) == 1
    await publish(client, 4)
    assert b.policy_version == 4
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_engine_that_joins_between_transfer_and_load_gets_the_new_weights_too() -> None:
    a, b = ScriptedEngine(), ScriptedEngine()
    client, _ = fleet_of(a)
    await publish(client, 0)
    await client.receive_weights(scripted_update(1))
    await client.add_engine(b)
    assert b.policy_version == 0
    await client.load_weights(scripted_update(1), PauseMode.KEEP)
    assert (a.policy_version, b.policy_version) == (1, 1)
    assert client.engines == [a, b]


async def test_an_engine_that_joins_while_generation_is_paused_is_paused_too() -> None:
    a, b = ScriptedEngine(), ScriptedEngine()
    client, _ = fleet_of(a)
    await publish(client, 0)
    await client.pause_generation(PauseMode.KEEP)
    await client.add_engine(b)
    assert b.paused is PauseMode.KEEP
    await client.resume_generation()
    assert b.paused is None


async def test_an_added_engine_that_cannot_take_the_weights_is_no_part_of_the_fleet() -> None:
    a, b = ScriptedEngine(), ScriptedEngine()
    client, clock = fleet_of(a)
    await publish(client, 0)
    b.fail["load"] = EngineError("wrong shape")
    with pytest.raises(EngineError, match="wrong shape"):
        await client.add_engine(b)
    assert client.engines == [a]
    assert client.engine_states[1] is EngineState.RETIRED
    assert not b.alive
    await after(client, clock, 1000.0)
    assert client.engine_states[1] is EngineState.RETIRED


@pytest.mark.parametrize("stop", [[], ["zzz"]])
async def test_a_removed_engine_hands_its_requests_over_with_their_tokens(stop: list[str]) -> None:
    a, b = ScriptedEngine(), ScriptedEngine()
    client, _ = fleet_of(a, b)
    await publish(client, 0)
    engine_input = request(max_tokens=9, stop=stop)
    expected = await uninterrupted(engine_input)
    task = asyncio.ensure_future(client.generate(engine_input))
    await settle()
    a.tick(4)
    await client.remove_engine(0)
    await client.remove_engine(0)
    await settle()
    assert len(b.requests[0]["prompt_token_ids"][0]) == 2 + 4
    b.tick(9)
    assert (await task)["response_ids"] == expected["response_ids"]
    assert not a.alive


async def test_stragglers_go_before_fresh_requests_where_engines_know_priorities() -> None:
    engine = ScriptedEngine(lambda tokens, seed: 9)
    client, _ = fleet_of(engine)
    await publish(client, 4)
    task = asyncio.ensure_future(client.generate(request(max_tokens=5)))
    old_session = asyncio.ensure_future(
        client.complete(GenerationRequest([5], SamplingParams(max_tokens=5), oldest_version=2))
    )
    await settle()
    engine.tick()
    await publish(client, 5, PauseMode.ABORT)
    await settle()
    assert [r["priority"] for r in engine.requests] == [4, 2, 4, 2]
    engine.tick(5)
    await asyncio.gather(task, old_session)


async def test_engines_that_still_start_do_not_go_on_when_another_one_cannot() -> None:
    class Starting(ScriptedEngine):
        given_up = False

        async def start(self) -> None:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self.given_up = True

    broken, starting = ScriptedEngine(), Starting()
    broken.fail["start"] = EngineError("no memory")
    client, _ = fleet_of(broken, starting)
    with pytest.raises(EngineError, match="no memory"):
        await client.start()
    assert starting.given_up
    await client.teardown()


async def test_the_supervisor_watches_by_itself_once_the_client_is_started() -> None:
    engine = ScriptedEngine(free_running=True)
    client = InferenceEngineClient([engine], TOKENIZER, limits=FleetLimits(backoff_s=0.0), probe_interval_s=0.001)
    await client.start()
    try:
        await publish(client, 3)
        engine.die()
        output = await asyncio.wait_for(client.generate(request(max_tokens=2, ignore_eos=True)), 60)
        assert output["response_versions"] == [[3, 3]]
        assert engine.calls.count("start") == 2
    finally:
        await client.teardown()


@pytest.mark.parametrize("culprit", ["supervisor", "first engine"])
async def test_teardown_stops_every_engine_even_if_one_part_fails(
    monkeypatch: pytest.MonkeyPatch, culprit: str
) -> None:
    class Stubborn(ScriptedEngine):
        async def teardown(self) -> None:
            await super().teardown()
            if culprit == "first engine":
                raise EngineError("will not")

    class Slow(ScriptedEngine):
        async def teardown(self) -> None:
            await settle()
            await super().teardown()

    a, b = Stubborn(), Slow()
    client, _ = fleet_of(a, b)
    await publish(client, 0)
    if culprit == "supervisor":

        async def cannot() -> None:
            raise EngineError("will not")

        monkeypatch.setattr(client.supervisor, "stop", cannot)
    with pytest.raises(EngineError, match="will not"):
        await client.teardown()
    healths = [await engine.health() for engine in (a, b)]
    assert not any(health.alive for health in healths)

"""Updates with failing, silent, joining and leaving engines: each serving engine holds the version that the client reports."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from scripted import ScriptedEngine, in_virtual_time, scripted_update, settle
from test_client import publish, request
from test_client_fleet import after, fleet_of

from skyrl_train.errors import EngineDeadError, EngineError, NoEngineError, RequestError, WeightSyncError
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.interface import EngineCapabilities, InferenceEngineInput
from skyrl_train.inference.pool.fleet import EngineState
from skyrl_train.types import PauseMode


class Slow(ScriptedEngine):
    """Its phases end when the test says so."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(free_running=True, **kwargs)
        self.blocked: dict[str, asyncio.Event] = {}
        self.fail_after_block: EngineError | None = None

    def block(self, phase: str) -> asyncio.Event:
        self.blocked[phase] = asyncio.Event()
        return self.blocked[phase]

    async def _phase(self, name: str) -> None:
        await super()._phase(name)
        if name in self.blocked:
            await self.blocked.pop(name).wait()
            if self.fail_after_block is not None:
                raise self.fail_after_block
            if not self.alive:
                raise EngineDeadError("scripted death")


def served_versions(client: InferenceEngineClient) -> set[int]:
    return {engine.policy_version for engine in client.engines}


async def loading(client: InferenceEngineClient, version: int) -> asyncio.Task[float]:
    await client.receive_weights(scripted_update(version))
    task = asyncio.create_task(client.load_weights(scripted_update(version), PauseMode.KEEP))
    await settle()
    return task


async def test_a_silent_engine_that_answers_while_others_load_does_not_serve_old_weights() -> None:
    a, b = Slow(), Slow()
    client, clock = fleet_of(a, b)
    await publish(client, 0)
    b.fail["health"] = EngineError("no answer")
    await after(client, clock, 10.0)
    assert client.engine_states[1] is EngineState.SUSPECT
    del b.fail["health"]
    loaded = a.block("load")
    task = await loading(client, 1)
    await after(client, clock, 10.0)
    loaded.set()
    await task
    assert served_versions(client) == {1}
    await after(client, clock, 1.0)
    assert client.engines == [a, b] and served_versions(client) == {1}


@pytest.mark.parametrize("phase", ["pause", "load"])
async def test_probes_during_an_update_change_nothing(phase: str) -> None:
    engine = Slow()
    client, clock = fleet_of(engine)
    await publish(client, 0)
    engine.fail["health"] = EngineError("busy")
    ended = engine.block(phase)
    task = await loading(client, 1)
    for _ in range(5):
        await after(client, clock, 10.0)
    ended.set()
    await task
    assert client.engine_states[0] is EngineState.HEALTHY
    assert (client.policy_version, engine.paused) == (1, None)


async def test_an_engine_that_is_busy_with_new_weights_does_not_count_as_silent() -> None:
    a, b = Slow(), Slow()
    client, clock = fleet_of(a, b)
    await publish(client, 0)
    a.fail["health"] = b.fail["health"] = EngineError("busy")
    received = a.block("receive")
    task = asyncio.create_task(client.receive_weights(scripted_update(1)))
    for _ in range(5):
        await after(client, clock, 10.0)
    assert client.engines == [a, b]
    received.set()
    await task
    await after(client, clock, 10.0)
    assert set(client.engine_states.values()) == {EngineState.SUSPECT}, "afterwards it does"


@in_virtual_time
async def test_a_limit_that_an_engine_exceeds_is_named() -> None:
    engine = Slow()
    client, _ = fleet_of(engine, pause_timeout_s=60.0)
    engine.block("receive")
    with pytest.raises(WeightSyncError, match=r"did not receive within 60 s \(generator.pause_timeout_s\)"):
        await publish(client, 0)


async def test_an_update_cancelled_in_the_middle_is_not_half_visible() -> None:
    a, b = Slow(), Slow()
    client, clock = fleet_of(a, b)
    await publish(client, 0)
    b.block("load")
    task = await loading(client, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.policy_version == 1 and client.engines == [a]
    await after(client, clock, 1.0)
    assert client.engines == [a, b] and served_versions(client) == {1}
    assert b.paused is None


async def test_an_engine_that_fails_in_its_own_way_leaves_and_the_update_holds_for_the_others() -> None:
    a, b = ScriptedEngine(free_running=True), ScriptedEngine(free_running=True)
    client, _ = fleet_of(a, b)
    await publish(client, 0)
    b.fail["load"] = RuntimeError("CUDA out of memory")
    await publish(client, 1)
    assert client.engines == [a] and served_versions(client) == {client.policy_version} == {1}


@in_virtual_time
async def test_an_engine_that_did_not_say_whether_it_loaded_serves_only_after_it_caught_up() -> None:
    engine = Slow()
    client, clock = fleet_of(engine, pause_timeout_s=0.01)
    await publish(client, 0)
    engine.block("load")
    with pytest.raises(WeightSyncError, match="did not load"):
        await publish(client, 1)
    assert client.engines == [] and client.policy_version == 0
    engine._version = 1  # it did load, late
    await after(client, clock, 1.0)
    output = await client.generate(request(max_tokens=1))
    assert output["response_versions"] == [[0]]


async def test_an_engine_found_with_another_version_is_brought_back_to_the_current_one() -> None:
    a, b = Slow(), Slow()
    client, clock = fleet_of(a, b)
    await publish(client, 3)
    b._version = 2
    await after(client, clock, 10.0)
    assert client.engines == [a]
    await after(client, clock, 1.0)
    assert served_versions(client) == {3} and client.engines == [a, b]


async def test_an_engine_that_cannot_resume_does_not_keep_requests_for_ever() -> None:
    engine = ScriptedEngine(free_running=True)
    client, clock = fleet_of(engine)
    await publish(client, 0)
    engine.fail["resume"] = EngineError("once")
    with pytest.raises(WeightSyncError, match="resume"):
        await publish(client, 1)
    engine.fail.clear()
    await after(client, clock, 1.0)
    output = await asyncio.wait_for(client.generate(request(max_tokens=3, ignore_eos=True)), 60)
    assert output["response_versions"] == [[1, 1, 1]]


async def test_an_update_loaded_while_generation_is_paused_leaves_it_paused() -> None:
    engine = ScriptedEngine()
    client, _ = fleet_of(engine)
    await publish(client, 0)
    await client.pause_generation(PauseMode.ABORT)
    waiting = asyncio.create_task(client.generate(request(max_tokens=1)))
    await client.receive_weights(scripted_update(1))
    await client.load_weights(scripted_update(1), PauseMode.KEEP)
    await settle()
    assert engine.paused is PauseMode.ABORT and not engine.running
    await client.resume_generation()
    await settle()
    engine.tick()
    assert (await waiting)["response_versions"] == [[1]]


async def test_generation_resumed_while_an_engine_is_joining_leaves_it_running() -> None:
    a, b = Slow(), Slow()
    client, _ = fleet_of(a)
    await publish(client, 0)
    await client.pause_generation(PauseMode.KEEP)
    first = b.block("pause")
    joining = asyncio.create_task(client.add_engine(b))
    await settle()
    second = asyncio.Event()
    b.blocked["pause"] = second
    first.set()
    await settle()
    await client.resume_generation()
    second.set()
    await joining
    assert client.engines == [a, b] and b.paused is None


async def test_a_death_from_before_a_restart_does_not_count_against_the_restarted_engine() -> None:
    a, b = Slow(), Slow()
    client, clock = fleet_of(a, b)
    await publish(client, 0)
    slow_a, slow_b = a.block("receive"), b.block("receive")
    transfer = asyncio.create_task(client.receive_weights(scripted_update(1)))
    await settle()
    b.die()
    slow_b.set()
    await settle()
    assert client.engine_states[1] is EngineState.DEAD, "a death is acted upon at once, not after the slowest"
    await after(client, clock, 1.0)
    assert client.engine_states[1] is EngineState.HEALTHY
    slow_a.set()
    await transfer
    assert client.engine_states[1] is EngineState.HEALTHY


async def test_an_error_from_before_the_only_engines_restart_fails_the_sync_with_its_reason() -> None:
    a = Slow()
    client, clock = fleet_of(a)
    await publish(client, 0)
    slow = a.block("receive")
    a.fail_after_block = EngineError("scripted: the connection was reset")
    transfer = asyncio.create_task(client.receive_weights(scripted_update(1)))
    await settle()
    a.die()
    await client.health()
    await after(client, clock, 1.0)
    assert client.engine_states[0] is EngineState.HEALTHY, "restarted while the call is pending"
    slow.set()
    with pytest.raises(WeightSyncError, match="receive failed on every engine: scripted: the connection was reset"):
        await transfer
    assert client.engine_states[0] is EngineState.HEALTHY


@pytest.mark.parametrize("phase", ["start", "health"])
async def test_an_engine_that_raises_its_own_errors_is_still_supervised(phase: str) -> None:
    a, b = ScriptedEngine(free_running=True), ScriptedEngine(free_running=True)
    client, clock = fleet_of(a, b)
    await publish(client, 0)
    if phase == "health":
        a.fail["health"] = ConnectionResetError("gone")
        await after(client, clock, 10.0)
        await after(client, clock, 10.0)
    else:
        a.fail["start"] = OSError("fork: out of memory")
        a.die()
        await client.health()
    assert client.engine_states[0] is EngineState.DEAD
    await after(client, clock, 1.0)
    a.fail.clear()
    await after(client, clock, 100.0)
    assert client.engines == [a, b]


async def test_a_request_moves_on_at_once_however_long_its_engine_takes_to_let_go() -> None:
    class HangingAbort(ScriptedEngine):
        async def generate(self, engine_input: InferenceEngineInput) -> Any:
            try:
                return await super().generate(engine_input)
            finally:
                await letting_go.wait()

    letting_go = asyncio.Event()
    a, b = HangingAbort(), ScriptedEngine(free_running=True)
    client, clock = fleet_of(a, b)
    await publish(client, 0)
    task = asyncio.create_task(client.generate(request(max_tokens=3, ignore_eos=True)))
    await settle()
    a.fail["load"] = EngineError("misses it")
    await publish(client, 1)
    a.fail.clear()
    await after(client, clock, 1.0)  # it is back before its old request has ended there
    output = await asyncio.wait_for(task, 60)
    assert output["response_versions"] == [[1, 1, 1]]
    letting_go.set()
    await settle()


async def test_a_suspect_returns_with_the_load_that_it_has() -> None:
    a, b = ScriptedEngine(), ScriptedEngine()
    client, clock = fleet_of(a, b)
    await publish(client, 0)
    tasks = [
        asyncio.create_task(client.generate(InferenceEngineInput(prompt_token_ids=[[5]], sampling_params={})))
        for _ in range(8)
    ]
    await settle()
    a.fail["health"] = EngineError("overloaded")
    await after(client, clock, 10.0)
    a.fail.clear()
    await after(client, clock, 10.0)
    tasks += [
        asyncio.create_task(client.generate(InferenceEngineInput(prompt_token_ids=[[5]], sampling_params={})))
        for _ in range(4)
    ]
    await settle()
    assert [len(engine.running) for engine in (a, b)] == [6, 6]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_response_that_moves_to_a_smaller_context_ends_with_its_tokens_so_far() -> None:
    a, b = ScriptedEngine(lambda tokens, seed: 9), ScriptedEngine(lambda tokens, seed: 9, max_model_len=6)
    client, _ = fleet_of(a, b)
    await publish(client, 0)
    task = asyncio.create_task(client.generate(request([5, 6], max_tokens=20, stop=["zz"])))
    await settle()
    a.tick(5)
    await settle()
    a.die()
    output = await task
    assert (output["stop_reasons"], len(output["response_ids"][0])) == (["length"], 5)


async def test_a_request_that_is_rejected_in_the_middle_fails_and_does_not_end_early() -> None:
    class Diverging(ScriptedEngine):
        def _submit(self, engine_input: InferenceEngineInput) -> Any:
            if self._version:
                raise RequestError("the logits are not numbers")
            return super()._submit(engine_input)

    engine = Diverging(lambda tokens, seed: 9)
    client, _ = fleet_of(engine)
    await publish(client, 0)
    task = asyncio.create_task(client.generate(request(max_tokens=20)))
    await settle()
    engine.tick(5)
    await publish(client, 1, PauseMode.ABORT)
    with pytest.raises(RequestError, match="not numbers"):
        await task


@pytest.mark.parametrize("paused", [False, True])
async def test_teardown_ends_requests_that_run_wait_or_come_later(paused: bool) -> None:
    client, _ = fleet_of(ScriptedEngine(), engine_wait_timeout_s=600)
    await client.start()
    await publish(client, 0)
    running = asyncio.create_task(client.generate(request(max_tokens=3)))
    await settle()
    if paused:
        await client.pause_generation(PauseMode.KEEP)
    waiting = asyncio.create_task(client.generate(request(max_tokens=3)))
    await settle()
    await client.teardown()
    for task in (running, waiting, asyncio.create_task(client.generate(request(max_tokens=3)))):
        with pytest.raises(NoEngineError, match="torn down"):
            await asyncio.wait_for(task, 60)


async def test_a_cancelled_removal_still_tears_the_engine_down() -> None:
    class HangingAbort(ScriptedEngine):
        async def abort_generation(self) -> None:
            await asyncio.get_running_loop().create_future()

    engine = HangingAbort()
    client, _ = fleet_of(engine, ScriptedEngine())
    await publish(client, 0)
    removal = asyncio.create_task(client.remove_engine(0))
    await settle()
    removal.cancel()
    await asyncio.gather(removal, return_exceptions=True)
    assert not engine.alive


class Adapting(Slow):
    """Has adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters: set[str] = set()

    @property
    def capabilities(self) -> EngineCapabilities:
        return dataclasses.replace(super().capabilities, adapters=True)

    async def load_adapter(self, name: str, path: str) -> None:
        self.adapters.add(name)

    async def unload_adapter(self, name: str) -> None:
        self.adapters.discard(name)


async def test_adapters_reach_engines_that_join_meanwhile_return_later_or_were_silent() -> None:
    a, b, c = Adapting(), Adapting(), Adapting()
    client, clock = fleet_of(a, b)
    await publish(client, 0)
    received = c.block("receive")
    joining = asyncio.create_task(client.add_engine(c))
    await settle()
    adapting = asyncio.create_task(client.load_adapter("x", "/x"))
    await settle()
    received.set()
    await asyncio.gather(joining, adapting)
    assert a.adapters == b.adapters == c.adapters == {"x"}
    b.fail["health"] = EngineError("no answer")
    await after(client, clock, 10.0)
    await client.load_adapter("y", "/y")
    b.fail.clear()
    await after(client, clock, 1.0)
    assert client.engines == [a, b, c]
    assert b.adapters == {"x", "y"}

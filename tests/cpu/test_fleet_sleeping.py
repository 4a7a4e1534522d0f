"""A fleet whose device memory is the trainer's in turns: no engine holds any of it in the trainer's turn (SEMANTICS 6.4),
whatever state it was in when that turn began, and every engine that can serve again does so in the next one."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from scripted import ScriptedEngine, scripted_update, settle
from test_client import publish, request
from test_client_fleet import after, fleet_of
from test_fleet import Clock

from skyrl_train.colocation import Colocation
from skyrl_train.config.compose import compose
from skyrl_train.errors import EngineError, WeightSyncError
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.interface import EngineCapabilities
from skyrl_train.inference.pool.fleet import EngineState
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.syncer import StagedWeights


class Sleeper(ScriptedEngine):
    """Holds device memory while its process lives and does not sleep."""

    def __init__(self) -> None:
        super().__init__(free_running=True)
        self.holds_memory = True
        self.may_start = asyncio.Event()
        self.may_start.set()

    @property
    def capabilities(self) -> EngineCapabilities:
        return dataclasses.replace(super().capabilities, sleep=True)

    async def start(self) -> None:
        self.holds_memory = True
        await self.may_start.wait()
        await super().start()

    def die(self) -> None:
        super().die()
        self.holds_memory = False

    async def sleep(self, level: int = 1) -> None:
        assert self.paused is not None and not self.running
        await self._phase("sleep")
        self.holds_memory = False

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        if not self.holds_memory:
            await self._phase("wake")
        self.holds_memory = True

    async def resume(self) -> None:
        assert self.holds_memory, "its tokens would come from weights that are not there"
        await super().resume()

    async def load_weights(self, update: Any) -> None:
        assert self.holds_memory
        await super().load_weights(update)


async def pair() -> tuple[InferenceEngineClient, Clock, Sleeper, Sleeper]:
    engines = Sleeper(), Sleeper()
    client, clock = fleet_of(*engines)
    await publish(client, 0)
    return client, clock, *engines


async def train(client: InferenceEngineClient) -> None:
    """The turn of the trainer begins."""
    await client.pause_generation(PauseMode.ABORT)
    await client.sleep(2)


async def generate(client: InferenceEngineClient, version: int) -> None:
    """The turn of the engines begins, with new weights."""
    await client.wake_up(["weights"])
    await client.receive_weights(scripted_update(version))
    await client.load_weights(scripted_update(version), PauseMode.KEEP)
    await client.wake_up(["kv_cache"])
    await client.resume_generation()


async def all_serve(client: InferenceEngineClient, clock: Clock, version: int) -> None:
    await after(client, clock, 10.0)
    assert set(client.engine_states.values()) == {EngineState.HEALTHY}
    assert {engine.policy_version for engine in client.engines} == {version}
    outputs = await asyncio.gather(*(client.generate(request(max_tokens=3, ignore_eos=True)) for _ in range(4)))
    assert all(output["response_versions"] == [[version] * 3] for output in outputs)


async def test_an_engine_that_is_starting_is_waited_for_and_sleeps() -> None:
    client, clock, a, b = await pair()
    b.may_start.clear()
    b.die()
    await client.health()
    clock.now += 1.0
    client.supervisor.step()
    await settle()
    turn = asyncio.create_task(train(client))
    await settle()
    assert not turn.done() and b.holds_memory
    b.may_start.set()
    await turn
    assert not a.holds_memory and not b.holds_memory
    await generate(client, 1)
    await all_serve(client, clock, 1)


async def test_an_engine_that_is_being_removed_has_left_the_device_when_the_trainer_comes() -> None:
    client, _, a, b = await pair()
    may_end, teardown = asyncio.Event(), b.teardown

    async def slow_teardown() -> None:
        await may_end.wait()
        await teardown()
        b.holds_memory = False

    b.teardown = slow_teardown  # type: ignore[method-assign]
    removal = asyncio.create_task(client.remove_engine(1))
    await settle()
    turn = asyncio.create_task(train(client))
    await settle()
    assert not turn.done() and b.holds_memory
    may_end.set()
    await asyncio.gather(removal, turn)
    assert not a.holds_memory and not b.holds_memory


async def test_a_suspect_engine_sleeps_and_its_requests_continue_elsewhere() -> None:
    client, clock, a, b = await pair()
    requests = [
        asyncio.create_task(client.generate({**request(max_tokens=50), "session_ids": [str(n)]})) for n in range(2)
    ]
    b.fail["health"] = EngineError("no answer")
    await after(client, clock, 10.0)
    assert client.engine_states[1] is EngineState.SUSPECT
    await train(client)
    assert not a.holds_memory and not b.holds_memory and not b.running
    del b.fail["health"]
    await generate(client, 1)
    await asyncio.gather(*requests)
    await all_serve(client, clock, 1)


async def test_a_stale_engine_sleeps_and_is_woken_as_it_catches_up() -> None:
    client, clock, a, b = await pair()
    b.fail["load"] = EngineError("scripted")
    await publish(client, 1)
    assert client.engine_states[1] is EngineState.STALE
    del b.fail["load"]
    await train(client)
    assert not a.holds_memory and not b.holds_memory
    await after(client, clock, 0.0)
    assert not b.holds_memory, "it would catch up in the trainer's turn"
    await generate(client, 2)
    await all_serve(client, clock, 2)


async def test_an_engine_that_was_started_again_while_generation_was_paused_sleeps() -> None:
    client, clock, a, b = await pair()
    await client.pause_generation(PauseMode.ABORT)
    b.fail["receive"] = EngineError("scripted")
    b.die()
    await client.health()
    await after(client, clock, 1.0)
    assert client.engine_states[1] is EngineState.STALE and b.paused is None
    await client.sleep(2)
    assert client.engine_states[1] is EngineState.STALE
    assert not a.holds_memory and not b.holds_memory
    b.fail.clear()
    await generate(client, 1)
    await all_serve(client, clock, 1)


@pytest.mark.parametrize("fault", ["fails", "hangs"])
async def test_an_engine_that_does_not_fall_asleep_is_ended_and_started_again(fault: str) -> None:
    engines = Sleeper(), Sleeper()
    client, clock = fleet_of(*engines, pause_timeout_s=0.01)
    await publish(client, 0)
    if fault == "fails":
        engines[1].fail["sleep"] = EngineError("scripted")
    else:
        engines[1].hang.add("sleep")
    await train(client)
    assert client.engine_states[1] is EngineState.DEAD
    assert not engines[0].holds_memory and not engines[1].holds_memory
    engines[1].fail.clear()
    engines[1].hang.clear()
    await generate(client, 1)
    await all_serve(client, clock, 1)


async def test_an_engine_that_counts_as_dead_because_it_hangs_is_ended_before_the_trainer_comes() -> None:
    client, clock, _, b = await pair()
    client._pool.died(1, "scripted: no answer for too long")
    assert b.holds_memory
    await train(client)
    assert not b.holds_memory
    await generate(client, 1)
    await all_serve(client, clock, 1)


async def test_an_engine_that_died_asleep_sleeps_in_the_next_turn_too() -> None:
    client, clock, a, b = await pair()
    await train(client)
    b.die()
    client._pool.died(1, "scripted")
    await generate(client, 1)
    await all_serve(client, clock, 1)
    await train(client)
    assert not a.holds_memory and not b.holds_memory
    await generate(client, 2)
    await all_serve(client, clock, 2)


async def test_an_engine_that_failed_to_wake_twice_serves_at_last() -> None:
    client, clock, _, b = await pair()
    await train(client)
    b.fail["wake"] = EngineError("scripted")
    await generate(client, 1)
    assert client.engine_states[1] is EngineState.STALE
    await after(client, clock, 10.0)
    assert client.engine_states[1] is EngineState.STALE
    b.fail.clear()
    await all_serve(client, clock, 1)


async def test_an_engine_that_is_added_in_the_turn_of_the_trainer_starts_when_it_has_ended() -> None:
    client, clock, *_ = await pair()
    await train(client)
    added = Sleeper()
    added.die()
    adding = asyncio.create_task(client.add_engine(added))
    await settle()
    assert not added.holds_memory
    await generate(client, 1)
    await adding
    await all_serve(client, clock, 1)


async def test_if_no_engine_falls_asleep_the_error_says_why_and_all_of_them_live() -> None:
    client, clock, a, b = await pair()
    for engine in (a, b):
        engine.fail["sleep"] = EngineError("scripted: no sleep mode")
    await client.pause_generation(PauseMode.ABORT)
    with pytest.raises(WeightSyncError, match="no sleep mode"):
        await client.sleep(2)
    await client.wake_up()
    await client.resume_generation()
    await all_serve(client, clock, 0)


async def test_an_adapter_is_loaded_when_the_engines_are_awake() -> None:
    class Adapting(Sleeper):
        @property
        def capabilities(self) -> EngineCapabilities:
            return dataclasses.replace(super().capabilities, adapters=True)

        async def load_adapter(self, name: str, path: str) -> None:
            assert self.holds_memory
            self.calls.append(f"load {name}")

    engines = Adapting(), Adapting()
    client, _ = fleet_of(*engines)
    await publish(client, 0)
    await train(client)
    loading = asyncio.create_task(client.load_adapter("judge", "/judge"))
    await settle()
    assert not loading.done()
    await generate(client, 1)
    await loading
    assert all("load judge" in engine.calls for engine in engines)


async def test_a_copy_of_the_weights_is_kept_until_an_engine_that_catches_up_has_read_it() -> None:
    client, clock, _, b = await pair()
    b.fail["load"] = EngineError("scripted")
    await publish(client, 1)
    del b.fail["load"]
    reads, may_end = asyncio.Event(), asyncio.Event()
    receive = b.receive_weights

    async def slow_receive(update: Any) -> None:
        reads.set()
        await may_end.wait()
        await receive(update)
        reads.clear()

    class Syncer:
        transport = None

        async def gather(self, version: int) -> StagedWeights:
            return StagedWeights(scripted_update(version), 0.0)

        async def send(self, staged: StagedWeights) -> dict[str, float]:
            await client.receive_weights(staged.update)
            await client.load_weights(staged.update, PauseMode.KEEP)
            b.receive_weights = slow_receive  # type: ignore[method-assign]
            clock.now += 10.0
            client.supervisor.step()
            await reads.wait()
            return {}

    released: list[bool] = []
    backend = SimpleNamespace(
        offload_states=lambda: None,
        reload_states=lambda: None,
        release_staging=lambda transport: released.append(not reads.is_set()) or True,
    )
    config = compose("quickstart", ["trainer.mode=sync", "trainer.placement.colocate_all=true"])
    turns = Colocation(config, client, Syncer(), backend, SimpleNamespace(run=asyncio.to_thread))  # type: ignore[arg-type]
    turn = asyncio.create_task(turns.begin_generation(2))
    await reads.wait()
    await settle()
    assert not released
    may_end.set()
    await turn
    assert released == [True]
    await all_serve(client, clock, 2)

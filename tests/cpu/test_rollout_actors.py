"""Generators in actors (``rollout.num_actors``): the same rollouts, and nothing is left behind however a call ends."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from actor_worlds import Beside, Obeying, said, told
from harness import TOKENIZER
from harness_worlds import CURRENT, batch, harness
from ray_worlds import RayNodes
from replay_worlds import CountingEngine
from rollout_worlds import World as Groups
from scripted import scripted_update, settle
from test_sync_equivalence import train

from skyrl_train.config.compose import compose
from skyrl_train.config.plan import resolve
from skyrl_train.config.schema import EnvironmentConfig, GeneratorConfig, SamplingConfig
from skyrl_train.errors import (
    ConfigError,
    EngineError,
    GeneratorOutputError,
    NoEngineError,
    RequestError,
    RolloutActorError,
    RolloutError,
)
from skyrl_train.events.log import NO_EVENTS, EventLog
from skyrl_train.events.reader import EventReader
from skyrl_train.generators.construction import GeneratorSpec
from skyrl_train.generators.remote.generator import RemoteGenerator
from skyrl_train.generators.remote.host import ActorSetup, GeneratorHost
from skyrl_train.generators.validation import to_samples
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.interface import InferenceEngineInput
from skyrl_train.runtime.concurrency import Signal
from skyrl_train.types import PauseMode
from skyrl_train.workers.connection import WorkerLink


class Noting(CountingEngine):
    """Says when a request arrives, and hands tokens over as they are sampled."""

    def __init__(self, *, free_running: bool) -> None:
        super().__init__(free_running=free_running)
        self.arrived = Signal()

    def _submit(self, engine_input: InferenceEngineInput) -> Any:
        request = super()._submit(engine_input)
        self.arrived.notify()
        return request

    async def run_freely(self) -> None:
        """From now on nobody need tick."""
        self._free_running = True
        await self.resume()


class World:
    """A remote generator on a scripted engine, with the links that were made so far."""

    def __init__(self, engine: Noting, client: InferenceEngineClient, generator: RemoteGenerator) -> None:
        self.engine, self.client, self.generator = engine, client, generator

    async def play(self, order: str) -> Any:
        return await asyncio.wait_for(self.generator.generate(told(order)), 300)

    def begin(self, order: str) -> asyncio.Task[Any]:
        return asyncio.create_task(self.generator.generate(told(order)))

    async def until_sampling(self, requests: int) -> None:
        await self.engine.arrived.wait_until(lambda: len(self.engine.running) >= requests)


@asynccontextmanager
async def world(
    links: Sequence[Callable[[], WorkerLink]],
    *,
    name: str = "actor_worlds:Obeying",
    free_running: bool = True,
    events: EventLog = NO_EVENTS,
    **kwargs: Any,
) -> AsyncIterator[World]:
    engine = Noting(free_running=free_running)
    client = InferenceEngineClient([engine], TOKENIZER, engine_wait_timeout_s=0.01, events=events)
    config = GeneratorConfig(name=name, kwargs=kwargs, sampling_params=SamplingConfig(max_tokens=6, temperature=0.7))
    setup = ActorSetup(
        GeneratorSpec(config, EnvironmentConfig(), ""),
        TOKENIZER,
        str(Path.cwd()),
        (str(Path(__file__).parent),),
    )
    generator = RemoteGenerator(links, setup, client)
    generator.pace(lambda: client.policy_version > 0)
    said.clear()
    await client.start()
    await client.load_weights(scripted_update(0), PauseMode.KEEP)
    try:
        await generator.start()
        yield World(engine, client, generator)
    finally:
        await generator.aclose()
        await client.teardown()


class Links:
    """Makes links beside the test, and remembers them."""

    def __init__(self) -> None:
        self.made: list[Beside] = []

    def __call__(self) -> Beside:
        self.made.append(Beside())
        return self.made[-1]


async def test_a_generator_samples_the_same_as_without_actors() -> None:
    async with world([Beside, Beside]) as remote:
        direct = Obeying(remote.client)
        for order in ("generate", "chat", "text", "stream"):
            assert await remote.play(order) == await direct.generate(told(order)), order
        assert len(await remote.play("stream")) == 40
        assert remote.engine.running == []


async def test_start_pace_and_close_reach_the_generator_and_it_sees_the_drivers_state() -> None:
    async with world([Beside]) as remote:
        assert said == ["pace", "start"]
        client = remote.client
        assert await remote.play("look") == (0, client.capabilities, client.engine_states, False)
        await client.load_weights(scripted_update(1), PauseMode.KEEP)
        assert await remote.play("look") == (1, client.capabilities, client.engine_states, True)
    assert said == ["pace", "start", "aclose"]


async def test_what_happens_in_an_actor_is_in_the_record_of_the_run(tmp_path: Path) -> None:
    """Environments and agents of actors have the driver's clock, and the group of their sample."""
    with closing(EventLog(tmp_path, 100, clock=lambda: 1000.0)) as log:
        async with world([Beside], events=log) as remote:
            assert await remote.play("record") == "recorded"
    tool, call = (event for event in EventReader(tmp_path).poll() if event["kind"] in ("environment", "tool"))
    assert (call["group"], call["sample"], call["call"], call["ok"]) == (4, 1, "step", False)
    assert call["t1"] - call["t0"] == pytest.approx(0.25)
    assert 990.0 < call["t1"] <= 1000.0
    assert (tool["session"], tool["names"]) == ("p@4_1", ["search"])


async def test_a_generator_that_cannot_be_built_fails_the_start_with_its_own_error() -> None:
    with pytest.raises(ConfigError, match=r"generator\.name='actor_worlds:Obeying' cannot be constructed"):
        async with world([Beside], no_such=1):
            pass
    with pytest.raises(RolloutError, match="it was told to refuse"):
        async with world([Beside, Beside], mark="refuse"):
            pass


@pytest.mark.parametrize(
    ("order", "error", "message"),
    [
        ("raise", RolloutError, r"it raised ValueError: scripted"),
        ("end the program", RolloutError, "exit status 3"),
        ("cancel itself", RolloutError, "it cancelled itself"),
        ("engine", EngineError, "scripted"),
        ("no engine", NoEngineError, "scripted"),
        ("too long", RequestError, "5000"),
        ("unpicklable", GeneratorOutputError, "cannot leave its actor"),
    ],
)
async def test_an_error_of_a_call_keeps_its_class_and_fails_no_other_call(
    order: str, error: type[Exception], message: str
) -> None:
    async with world([Beside]) as remote:
        other = remote.begin("generate")
        with pytest.raises(error, match=message) as caught:
            await remote.play(order)
        assert type(caught.value) is error
        assert (order == "cancel itself") or "Traceback" in caught.value.__notes__[0], "the other side's"
        assert len((await other)["response_ids"]) == 2
        with pytest.raises(RolloutError, match="cannot travel to an actor"):
            await remote.generator.generate({**told("generate"), "env_extras": [{"order": lambda: None}]})


async def test_a_call_goes_to_the_actor_with_the_fewest() -> None:
    async with world([Beside, Beside, Beside], free_running=False) as remote:
        calls = [remote.begin("sample for ever") for _ in range(7)]
        await remote.until_sampling(7)
        assert sorted(actor.outstanding for actor in remote.generator.actors) == [2, 2, 3]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_a_cancelled_call_is_cancelled_in_the_actor_and_in_the_engine_before_it_returns() -> None:
    async with world([Beside], free_running=False) as remote:
        (actor,) = remote.generator.actors
        calls = [remote.begin("sample for ever") for _ in range(3)]
        await remote.until_sampling(3)
        calls[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await calls[1]
        assert said.count("cleaned up") == 1
        await settle()
        assert (len(remote.engine.running), actor.outstanding, len(actor.connection.running)) == (2, 2, 2)
        left = remote.begin("leave a stream")
        await remote.until_sampling(3)
        remote.engine.tick()
        assert await left == "left"
        await settle()
        assert (len(remote.engine.running), len(actor.connection.running)) == (2, 2)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await settle()
        assert (remote.engine.running, actor.outstanding, len(actor.connection.running)) == ([], 0, 0)


async def test_closing_ends_calls_and_requests() -> None:
    async with world([Beside, Beside], free_running=False) as remote:
        calls = [remote.begin("sample for ever") for _ in range(4)]
        await remote.until_sampling(4)
        await remote.generator.aclose()
        for call in calls:
            with pytest.raises(RolloutActorError, match="it was stopped"):
                await call
        assert remote.engine.running == []


async def test_an_actor_that_dies_fails_its_own_calls_by_name_and_is_started_again() -> None:
    first, second = Links(), Links()
    async with world([first, second], free_running=False) as remote:
        actors = remote.generator.actors
        calls = [remote.begin("sample for ever") for _ in range(4)]
        await remote.until_sampling(4)
        first.made[0].kill()
        for call in (calls[0], calls[2]):
            with pytest.raises(RolloutActorError, match="rollout actor 0 is gone: it was killed"):
                await call
        assert len(remote.engine.running) == 2, "the requests of a dead actor are cancelled"
        assert await remote.play("where") == os.getpid()
        assert len(first.made) == 2 and all(actor.alive for actor in actors)
        assert not calls[1].done() and not calls[3].done()
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_without_any_actor_calls_wait_for_one_and_fail_where_none_can_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    links = Links()
    async with world([links]) as remote:
        (actor,) = remote.generator.actors
        monkeypatch.setattr(Beside, "may_start", asyncio.Event())
        links.made[-1].kill()
        await settle()
        assert not actor.alive
        waiting = remote.begin("where")
        await settle()
        assert not waiting.done()
        assert Beside.may_start is not None
        Beside.may_start.set()
        assert await waiting == os.getpid()
        monkeypatch.setattr(Beside, "refuses", True)
        links.made[-1].kill()
        await settle()
        assert not actor.alive
        with pytest.raises(RolloutActorError, match=r"no rollout actor is left: .*there is no room"):
            await remote.play("where")
        monkeypatch.setattr(Beside, "refuses", False)
        assert await remote.play("where") == os.getpid(), "the next call tries again"


async def test_a_harness_has_an_endpoint_in_each_actor_and_samples_the_same() -> None:
    async def agent(prompt: Any, base_url: str, api_key: str, **_: Any) -> float:
        import httpx

        messages = [*prompt]
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {api_key}"}) as http:
            for _turn in range(2):
                answer = await http.post(f"{base_url}/chat/completions", json={"model": "policy", "messages": messages})
                messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "3"}]
        return float(len(messages))

    async with harness() as direct:
        expected = await direct.samples(agent, samples=3)
    async with world([Beside, Beside], name="harness", agent=CURRENT) as remote:
        outputs = await asyncio.gather(*(remote.generator.generate(batch(3)) for _ in range(2)))
        assert [to_samples(output, 3) for output in outputs] == [expected, expected]


def test_the_plan_names_the_actors_and_rejects_a_port_that_they_cannot_share() -> None:
    config = compose("quickstart", ["rollout.num_actors=3", "rollout.ray_num_cpus=0.5"])
    assert "in 3 Ray actors of 0.5 CPUs each" in resolve(config, 64).describe()
    port = ["generator.name=harness", "+generator.kwargs.agent=a:b", "+generator.kwargs.endpoint={port: 8000}"]
    resolve(compose("quickstart", [*port, "rollout.num_actors=1"]), 64)
    with pytest.raises(ConfigError, match=r"endpoint.port=8000 with rollout.num_actors=2"):
        resolve(compose("quickstart", [*port, "rollout.num_actors=2"]), 64)
    with pytest.raises(ConfigError, match=r"rollout.num_actors=-1: must be at least 0"):
        resolve(compose("quickstart", ["rollout.num_actors=-1"]), 64)


# With Ray, on two nodes -----------------------------------------------------------------------------------------------

MOST_CPUS = 3  # of a node: no node has room for two such actors


@pytest.fixture
def cluster(ray_nodes: RayNodes) -> RayNodes:
    ray_nodes.have_far()
    return ray_nodes


async def test_a_ray_actor_is_cancelled_dies_and_comes_back_like_any_other(cluster: RayNodes) -> None:
    from skyrl_train.workers.ray import RayLink, RayPlacement

    async with world([lambda: RayLink(GeneratorHost, RayPlacement(num_cpus=0))], free_running=False) as remote:
        (actor,) = remote.generator.actors
        pid = await remote.play("where")
        assert pid != os.getpid()
        calls = [remote.begin("sample for ever") for _ in range(2)]
        await remote.until_sampling(2)
        calls[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await calls[0]
        await settle()
        assert (len(remote.engine.running), actor.outstanding, len(actor.connection.running)) == (1, 1, 1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RolloutActorError, match="rollout actor 0 is gone: its process has ended"):
            await asyncio.wait_for(calls[1], 300)
        assert remote.engine.running == []
        again = await remote.play("where")
        assert again not in (pid, os.getpid())
        watch = os.pidfd_open(again)
    poll = select.poll()
    poll.register(watch, select.POLLIN)
    assert await asyncio.to_thread(poll.poll, 20_000), "the kernel says when the actor has ended"
    os.close(watch)


def test_a_synchronous_run_in_actors_on_two_nodes_is_the_run_without_them(cluster: RayNodes, tmp_path: Path) -> None:
    here = train(tmp_path / "here", "guess_number", "trainer.mode=sync")
    there = train(  # no node has room for both
        tmp_path / "there",
        "guess_number",
        "trainer.mode=sync",
        "rollout.num_actors=2",
        f"rollout.ray_num_cpus={MOST_CPUS}",
    )
    assert there[0] == here[0]
    assert there[1] == here[1]
    logs = tmp_path / "there" / "logs"
    assert ["a rollout actor starts" in (logs / f"actor-{number}.log").read_text() for number in range(2)] == [
        True,
        True,
    ]
    assert all(there[2][name].equal(tensor) for name, tensor in here[2].items())


@pytest.mark.last_in_its_file
async def test_the_groups_of_a_node_that_dies_continue_elsewhere(cluster: RayNodes) -> None:
    from skyrl_train.workers.ray import RayLink, RayPlacement

    links = [lambda: RayLink(GeneratorHost, RayPlacement(num_cpus=MOST_CPUS))] * 2
    async with world(links, name="actor_worlds:Sampling", free_running=False) as remote, Groups(b=4) as w:
        w.group_generator._generator, w.group_generator._replay_cache = remote.generator, remote.client.replay_cache
        stepping = asyncio.create_task(w.step(fill=True))
        await remote.until_sampling(4)
        actors, before = remote.generator.actors, list(remote.engine.running)
        assert [actor.outstanding for actor in actors] == [2, 2]
        remote.engine.tick(2)
        await settle()
        cluster.lose_far()
        await remote.engine.arrived.wait_until(lambda: len(remote.engine.requests) == 6)
        assert sum(request in before for request in remote.engine.running) == 2, "the other node's go on as they were"
        assert sorted((actor.alive, actor.outstanding) for actor in actors) == [(False, 0), (True, 4)]
        await remote.engine.run_freely()
        assert await asyncio.wait_for(stepping, 300) == [0, 1, 2, 3]
        assert (w.group_generator.retries, remote.engine.running) == (2, [])
        assert remote.client.replay_cache.totals.replayed_tokens == 2 * 2, (
            "what was sampled for them is not sampled again"
        )
        assert all("is gone: its process has ended" in reason for _, reason in w.failed_attempts)
        w.check_books()

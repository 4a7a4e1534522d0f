"""An engine in a Ray actor, or in a process, keeps the engine's contract: the same answers, errors, cancellations and deaths."""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import dataclasses
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
import torch
from hypothesis import given
from hypothesis import strategies as st
from repeated_runs import SYNCHRONOUS, assert_equal, command, outcome
from scripted import ScriptedEngine, settle
from vllm_engines import TOLERANCE, token_logprobs

from skyrl_train.config.schema import BuildModelConfig
from skyrl_train.entrypoints.command_line import main
from skyrl_train.errors import ConfigError, EngineDeadError, EngineError, GrammarError, QuotaError, RequestError
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.engines.embedded import EmbeddedEngine
from skyrl_train.inference.interface import InferenceEngineInput, InferenceEngineInterface, StructuredOutput, TokenChunk
from skyrl_train.inference.pool.fleet import FleetLimits
from skyrl_train.models.folder import load_model, load_tokenizer
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_train.workers.connection import Peer, StartError
from skyrl_train.workers.host import host_peer, join_items
from skyrl_train.workers.messages import (
    Call,
    Cancel,
    Failure,
    Item,
    LastWords,
    Message,
    PeerState,
    Result,
    encode,
    frames,
)

pytest.importorskip("ray")
from ray.exceptions import RayError
from ray_worlds import FAR, RayNodes

from skyrl_train.inference.engines.proxy import EngineHost, EngineProxy, ProcessEngine
from skyrl_train.inference.engines.ray_engine import RayEngine
from skyrl_train.weight_sync.process_group import GlooTransport
from skyrl_train.weight_sync.update import WeightTransport
from skyrl_train.workers import ray as workers_ray
from skyrl_train.workers.ray import RayPlacement, connect

on_the_modules_loop = pytest.mark.asyncio(loop_scope="module")
EMBEDDED = "skyrl_train.inference.engines.embedded:EmbeddedEngine"
PROMPT = [3, 4, 5]
POSITIONS = 1 << 14  # of the model
LONG = POSITIONS - 100  # tokens: a request that does not end while a test looks away
LENGTHS = (150, 300, 600, 1500)  # tokens of responses; when an update comes, one of them is not complete
SIZES = {"executor": "thread", "max_num_seqs": 8, "max_model_len": POSITIONS}


# What runs in the actor, without Ray ----------------------------------------------------------------------------------


def test_an_engine_in_an_actor_has_the_time_that_it_has_in_a_process() -> None:
    """vLLM compiles for minutes, and its processes take a while to give their memory back."""
    engine = RayEngine(EMBEDDED, {})
    assert engine._start_timeout_s == FleetLimits().start_timeout_s
    assert engine._stop_timeout_s == ProcessEngine(EMBEDDED, {})._stop_timeout_s


tokens_or_result = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=30
)  # (stream, how many tokens; 0 tokens stand for some other message)


@given(tokens_or_result)
def test_joining_keeps_every_token_in_order_and_one_chunk_per_stream(drawn: list[tuple[int, int]]) -> None:
    counters: dict[int, int] = {}
    messages: list[Message] = []
    for stream, count in drawn:
        if count == 0:
            messages.append(Result(100 + len(messages)))
            continue
        first = counters.get(stream, 0)
        ids = list(range(first, first + count))
        counters[stream] = first + count
        messages.append(Item(stream, TokenChunk(ids, [-float(i) for i in ids], [7] * count)))
    result = join_items(messages, EngineHost())
    chunks = {message.id: message.value for message in result if isinstance(message, Item)}
    assert {stream: chunk.token_ids for stream, chunk in chunks.items()} == {
        stream: list(range(count)) for stream, count in counters.items()
    }
    assert all(chunk.logprobs == [-float(i) for i in chunk.token_ids] for chunk in chunks.values())
    assert len(result) == len(chunks) + sum(count == 0 for _, count in drawn)


def test_a_joined_chunk_ends_the_stream_and_keeps_its_alternatives() -> None:
    first = TokenChunk([1], [-1.0], [0], None, [[(1, -1.0)]], 16)
    last = TokenChunk([2], [-2.0], [1], "stop", [[(2, -2.0)]])
    (item,) = join_items([Item(1, first), Item(1, last)], EngineHost())
    assert item == Item(1, TokenChunk([1, 2], [-1.0, -2.0], [0, 1], "stop", [[(1, -1.0)], [(2, -2.0)]], 16))


def test_errors_cross_the_border_under_their_own_class() -> None:
    error = Failure.of(3, RequestError("too long")).error(EngineError, "the hosted engine")
    assert (type(error), str(error)) == (RequestError, "too long")
    foreign = Failure.of(3, ZeroDivisionError("by zero")).error(EngineError, "the hosted engine")
    assert (type(foreign), str(foreign)) == (EngineError, "the hosted engine raised ZeroDivisionError: by zero")
    made_of_more = Failure.of(3, QuotaError("later", retry_after_s=1.0)).error(EngineError, "the hosted engine")
    assert (type(made_of_more), str(made_of_more)) == (EngineError, "the hosted engine raised QuotaError: later")


async def scripted_host() -> tuple[Peer, ScriptedEngine, list[Message]]:
    """The host's end of a connection, its engine, and what it sends from now on."""
    hosted, sent = EngineHost(), list[Message]()
    peer = host_peer(hosted, sent.extend)
    peer.deliver([Call(0, "start", ("test_ray_engine:ScriptedEngine", {}))])
    await settle()
    assert [type(message) for message in sent] == [PeerState, Result]
    sent.clear()
    assert isinstance(hosted._engine, ScriptedEngine)
    return peer, hosted._engine, sent


@on_the_modules_loop
async def test_a_cancelled_call_leaves_nothing_in_the_engine_and_no_answer() -> None:
    peer, engine, sent = await scripted_host()
    peer.deliver([Call(1, "generate", (request(),)), Call(2, "stream", (request(),)), Call(3, "health")])
    await settle()
    assert len(engine.running) == 2
    peer.deliver([Cancel(1), Cancel(2), Call(4, "generate", (request(),)), Cancel(4)])  # the last before it has begun
    await settle()
    assert engine.running == []
    assert [message.id for message in sent if not isinstance(message, PeerState | LastWords)] == [3]


@on_the_modules_loop
async def test_an_actor_serves_only_who_knows_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_ray.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    host = workers_ray.ActorHost(EngineHost, b"secret")
    address = await host.listen()
    serving = asyncio.create_task(host.serve())
    for other in (b"secre!", b"sec"):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(other + encode([Call(1, "health")]))
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"secret" + encode([Call(1, "start", ("test_ray_engine:ScriptedEngine", {}))]))
    assert [type(message) for message in await anext(aiter(frames(reader)))] == [PeerState, Result]
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*address)
    writer.write_eof()
    await serving
    writer.close()


@on_the_modules_loop
async def test_an_actor_that_cannot_be_reached_fails_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def elsewhere() -> tuple[str, int]:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            return closed.getsockname()  # type: ignore[no-any-return]

    async def create(*_: object) -> SimpleNamespace:
        return SimpleNamespace(listen=SimpleNamespace(remote=elsewhere))

    link = workers_ray.RayLink(EngineHost, RayPlacement())
    monkeypatch.setattr(link, "_create", create)
    with pytest.raises(StartError, match=r"127\.0\.0\.1:\d+.*cannot be reached.*all ports"):
        await link.start(lambda messages: None, lambda reason: None)


@on_the_modules_loop
async def test_the_end_of_a_machine_that_closes_no_connection_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def keep_open(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(keep_open, "127.0.0.1", 0)
    serving: concurrent.futures.Future[None] = concurrent.futures.Future()

    async def listen() -> Any:
        return server.sockets[0].getsockname()

    async def create(*_: object) -> SimpleNamespace:
        reference = SimpleNamespace(future=lambda: serving)
        return SimpleNamespace(listen=SimpleNamespace(remote=listen), serve=SimpleNamespace(remote=lambda: reference))

    link, gone = workers_ray.RayLink(EngineHost, RayPlacement()), asyncio.Future[str]()
    monkeypatch.setattr(link, "_create", create)
    async with server:
        await link.start(lambda messages: None, gone.set_result)
        await settle()
        assert not gone.done()
        serving.set_exception(RayError("the node is dead"))
        assert await gone == "its process has ended (RayError: the node is dead)"
        await link.stop(graceful=False)


# In a cluster of two nodes on this machine, and in a child process -----------------------------------------------------


@pytest.fixture(scope="module")
def cluster(ray_nodes: RayNodes) -> None:
    ray_nodes.have_far()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("ray") / "model"
    build = BuildModelConfig(hidden_size=32, intermediate_size=48, max_position_embeddings=POSITIONS)
    build_model_folder(build, path, seed=0)
    return str(path)


@pytest.fixture(scope="module", autouse=True)
def _one_compute_thread() -> Iterator[None]:
    """The engines of this process leave a core to those in actors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def transport() -> SharedMemoryTransport:
    return SharedMemoryTransport(verify=True)


# The actor's process finds the tests' own engine by this.
WITH_TESTS: dict[str, Any] = {"num_cpus": 0, "environment": {"PYTHONPATH": str(Path(__file__).parent)}}


def proxy(host: str, factory: str, arguments: dict[str, Any], **placement: Any) -> EngineProxy:
    if host == "process":
        return ProcessEngine(factory, arguments)
    return RayEngine(factory, arguments, RayPlacement(**placement), start_timeout_s=6000)


def quick(host: str) -> EngineProxy:
    """An engine whose process need not import torch."""
    return proxy(host, "receiving_engine:ReceivingEngine", {}, **WITH_TESTS)


async def publish(
    engine: InferenceEngineInterface,
    folder: str,
    transport: WeightTransport,
    version: int,
    reads_back: bool = True,
) -> None:
    update = transport.gather(load_model(folder, "float32", "cpu").named_parameters(), version)
    await engine.receive_weights(update)
    await engine.pause(PauseMode.KEEP)
    await engine.load_weights(update)
    if reads_back:
        assert await engine.served_checksum() == update.checksum
    await engine.resume()
    assert engine.policy_version == version


@pytest.fixture(scope="module", params=["process", "ray"])
def host(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(cluster: None, host: str, folder: str, transport: SharedMemoryTransport) -> AsyncIterator[EngineProxy]:
    engine = proxy(host, EMBEDDED, {"model_path": folder, **SIZES}, resources={FAR: 1})
    await engine.start()
    assert engine.policy_version == -1
    await publish(engine, folder, transport, 0)
    yield engine
    await engine.teardown()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared: EngineProxy) -> AsyncIterator[EngineProxy]:
    """The module's engine; each test leaves it as it found it."""
    yield shared
    health = await shared.health()
    assert (health.running, health.waiting, health.paused, health.alive) == (0, 0, False, True)


def request(*prompts: list[int], **params: object) -> InferenceEngineInput:
    return InferenceEngineInput(
        prompt_token_ids=list(prompts) or [PROMPT], sampling_params={"ignore_eos": True, **params}
    )


@on_the_modules_loop
async def test_it_answers_as_the_engine_itself_does(
    engine: EngineProxy, folder: str, transport: SharedMemoryTransport
) -> None:
    direct = EmbeddedEngine(folder, **SIZES)
    await direct.start()
    for each in (engine, direct):
        await publish(each, folder, transport, 0)
        await each.load_tokenizer(True)
    digits = request(max_tokens=9, seed=4, structured=StructuredOutput("regex", "[1-3]{4}7?"))
    for asked in (request([3], [4, 5], max_tokens=9, seed=4), request(max_tokens=5, temperature=0.0), digits):
        assert await engine.generate(asked) == await direct.generate(asked)
    assert set((await engine.generate(digits))["response_ids"][0][:4]) <= {4, 5, 6}  # the tokens of 1 to 3
    for each in (engine, direct):
        with pytest.raises(GrammarError, match="unclosed group"):
            await each.generate(request(structured=StructuredOutput("regex", "(1")))
    assert engine.capabilities == direct.capabilities
    assert engine.pid not in (None, os.getpid())
    await direct.teardown()


@on_the_modules_loop
async def test_a_stream_has_the_tokens_of_the_whole_answer(engine: EngineProxy) -> None:
    chunks = [chunk async for chunk in engine.stream(request(max_tokens=30, seed=4))]
    whole = await engine.generate(request(max_tokens=30, seed=4))
    assert [token for chunk in chunks for token in chunk.token_ids] == whole["response_ids"][0]
    assert [logprob for chunk in chunks for logprob in chunk.logprobs] == whole["response_logprobs"][0]
    assert [chunk.stop_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


@on_the_modules_loop
async def test_a_bad_request_fails_its_own_call_with_the_engines_own_error(engine: EngineProxy) -> None:
    good = asyncio.create_task(engine.generate(request(max_tokens=30)))
    with pytest.raises(RequestError, match="vocabulary"):
        await engine.generate(request([3], [10_000], max_tokens=LONG))
    with pytest.raises(RequestError, match="vocabulary"):
        await anext(engine.stream(request([10_000])))
    with pytest.raises(ConfigError, match="max_tokens"):
        await engine.generate(request(max_tokens=0))
    with pytest.raises(EngineError, match="call pause"):
        await engine.sleep()
    with pytest.raises(EngineError, match="adapters"):
        await engine.load_adapter("a", "/nowhere")
    assert len((await good)["response_ids"][0]) == 30


@on_the_modules_loop
async def test_cancelling_a_call_aborts_its_requests_in_the_engine(engine: EngineProxy) -> None:
    await engine.pause(PauseMode.KEEP)
    call = asyncio.create_task(engine.generate(request([3], [4], max_tokens=LONG)))
    await asyncio.sleep(0)
    assert (await engine.health()).waiting == 2
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await engine.health()).waiting == 0
    await engine.resume()


@on_the_modules_loop
async def test_closing_a_stream_aborts_its_request_in_the_engine(engine: EngineProxy) -> None:
    stream = engine.stream(request(max_tokens=LONG))
    await anext(stream)
    await stream.aclose()
    health = await engine.health()
    assert (health.running, health.waiting) == (0, 0)


@on_the_modules_loop
async def test_abort_generation_returns_the_partial_tokens(engine: EngineProxy) -> None:
    stream = engine.stream(request(max_tokens=LONG))
    first = await anext(stream)
    call = asyncio.create_task(engine.generate(request(max_tokens=LONG)))
    await asyncio.sleep(0)
    await engine.abort_generation()
    rest = [chunk async for chunk in stream]
    assert rest[-1].stop_reason == "abort"
    assert 0 < len(first.token_ids) + sum(len(chunk.token_ids) for chunk in rest) < LONG
    assert (await call)["stop_reasons"] == ["abort"]


@on_the_modules_loop
async def test_many_streams_at_once_all_arrive_whole(engine: EngineProxy) -> None:
    async def lengths(seed: int) -> int:
        return sum([len(chunk.token_ids) async for chunk in engine.stream(request(max_tokens=40, seed=seed))])

    assert await asyncio.gather(*(lengths(seed) for seed in range(20))) == [40] * 20


@on_the_modules_loop
async def test_an_in_flight_update_through_the_client_has_exact_versions(
    engine: EngineProxy, folder: str, transport: SharedMemoryTransport
) -> None:
    client = InferenceEngineClient([engine], load_tokenizer(folder))
    model = load_model(folder, "float32", "cpu")
    for mode in (PauseMode.ABORT, PauseMode.KEEP, PauseMode.RECOMPUTE):
        for length in LENGTHS:
            expected = engine.policy_version + 1
            update = transport.gather(model.named_parameters(), expected)
            await client.receive_weights(update)
            answer = asyncio.create_task(client.generate(request(max_tokens=length, seed=5)))
            while not answer.done() and (await engine.health()).running == 0:
                pass  # each look is a round trip
            await client.load_weights(update, mode)
            versions = (await answer)["response_versions"][0]
            assert versions == sorted(versions) and len(versions) == length
            if set(versions) != {expected - 1}:  # else the response had ended before
                break
        assert set(versions) == {expected - 1, expected}, mode


@on_the_modules_loop
async def test_an_engine_elsewhere_receives_the_trainers_broadcast(
    engine: EngineProxy, folder: str, trainer_elsewhere: None
) -> None:
    with closing(GlooTransport(verify=True, bucket_bytes=10_000)) as transport:
        for _ in range(2):
            await publish(engine, folder, transport, engine.policy_version + 1)
        damaged = dataclasses.replace(transport.gather([], engine.policy_version + 1), checksum="crc32:00000000")
        await engine.receive_weights(damaged)
        await engine.pause(PauseMode.KEEP)
        with pytest.raises(EngineError, match="differ"):
            await engine.load_weights(damaged)
        await engine.resume()


@on_the_modules_loop
async def test_a_host_that_is_killed_fails_all_calls_at_once_and_can_be_started_again(
    cluster: None, host: str, folder: str, transport: SharedMemoryTransport
) -> None:
    engine = quick(host)
    await engine.start()
    await publish(engine, folder, transport, 0)
    await engine.pause(PauseMode.KEEP)
    calls = [asyncio.create_task(engine.generate(request())) for _ in range(3)]
    calls.append(asyncio.create_task(anext(engine.stream(request()))))
    await engine.health()
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"process .*ended"):
        await calls[0]
    await settle()
    assert all(call.done() for call in calls), "the end is noticed once, for all of them"
    for call in calls[1:]:
        with pytest.raises(EngineDeadError, match=r"process .*ended"):
            await call
    for later in (engine.generate(request()), engine.pause(PauseMode.KEEP), engine.resume()):
        with pytest.raises(EngineDeadError):
            await later
    assert not (await engine.health()).alive
    await engine.start()
    assert (engine.policy_version, (await engine.health()).policy_version) == (-1, -1)
    assert (await engine.generate(request(max_tokens=2)))["response_versions"] == [[-1, -1]]
    await engine.teardown()


@on_the_modules_loop
async def test_teardown_ends_the_host_and_fails_pending_calls(cluster: None, host: str) -> None:
    engine = quick(host)
    with pytest.raises(EngineDeadError, match=r"start\(\)"):
        await engine.generate(request())
    await engine.teardown()
    await engine.start()
    await engine.pause(PauseMode.KEEP)
    call = asyncio.create_task(engine.generate(request()))
    await engine.health()
    assert engine.pid is not None
    watch = os.pidfd_open(engine.pid)
    await engine.teardown()
    with pytest.raises(EngineDeadError, match="torn down"):
        await call
    await engine.teardown()
    assert not (await engine.health()).alive
    await asyncio.wait_for(_ended(watch), 300)
    os.close(watch)


@on_the_modules_loop
async def test_a_start_that_fails_says_why(cluster: None, host: str) -> None:
    with pytest.raises(EngineError, match="no such model"):
        await proxy(host, "receiving_engine:refusing", {"message": "no such model"}, **WITH_TESTS).start()
    with pytest.raises(ConfigError, match="cannot be imported"):
        await proxy(host, "nowhere:Engine", {}).start()


@on_the_modules_loop
async def test_a_start_without_resources_names_what_is_free(cluster: None) -> None:
    with pytest.raises(EngineDeadError, match=r"num_gpus=1.*free in the cluster"):
        await RayEngine(EMBEDDED, {}, RayPlacement(num_gpus=1), start_timeout_s=0.5).start()


@on_the_modules_loop
async def test_the_actor_has_the_environment_that_was_asked_for(cluster: None) -> None:
    placement = RayPlacement(num_cpus=0, environment={"SKYRL_TEST": "hello"})
    with pytest.raises(EngineError, match="'str' object has no attribute 'start'"):
        await RayEngine("os:getenv", {"key": "SKYRL_TEST"}, placement).start()


@on_the_modules_loop
async def test_teardown_lets_the_engine_clean_up_and_ends_one_that_hangs(tmp_path: Path) -> None:
    file = tmp_path / "cleaned up"
    for hangs, limit_s in ((False, 600.0), (True, 0.1)):
        engine = ProcessEngine("receiving_engine:Leaving", {"file": str(file), "hangs": hangs}, stop_timeout_s=limit_s)
        await engine.start()
        watch = os.pidfd_open(engine.pid or 0)
        await engine.teardown()
        assert file.exists()
        await _ended(watch)
        os.close(watch)


@on_the_modules_loop
async def test_a_start_that_is_cancelled_leaves_no_process_behind(tmp_path: Path) -> None:
    """As when the user interrupts while vLLM's process still imports."""
    pipe = tmp_path / "pid"
    os.mkfifo(pipe)
    start = asyncio.create_task(ProcessEngine("receiving_engine:Importing", {"pipe": str(pipe)}).start())
    watch = os.pidfd_open(int(await asyncio.to_thread(pipe.read_text)))
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    await _ended(watch)
    os.close(watch)


@on_the_modules_loop
async def test_all_output_of_a_process_is_in_its_log(tmp_path: Path) -> None:
    engine = ProcessEngine("receiving_engine:Talking", {}, log_file=str(tmp_path / "engine-0.log"))
    await engine.start()
    await engine.teardown()
    assert (tmp_path / "engine-0.log").read_text().splitlines() == ["in Python", "beneath Python"]


@pytest.mark.last_in_its_file
@on_the_modules_loop
async def test_a_request_of_a_killed_host_continues_elsewhere_token_for_token(
    shared: EngineProxy, folder: str, transport: SharedMemoryTransport
) -> None:
    """It ends the shared engine."""
    other = EmbeddedEngine(folder, **SIZES)
    await other.start()
    try:
        client = InferenceEngineClient([shared, other], load_tokenizer(folder))
        for each in (shared, other):
            await publish(each, folder, transport, 0)
        asked = [request([3 + i], max_tokens=300, temperature=0.0) | {"session_ids": [f"s{i}"]} for i in range(6)]
        expected = [output["response_ids"] for output in await asyncio.gather(*map(other.generate, asked))]
        while True:
            before = (await shared.health()).generated_tokens
            answers = [asyncio.create_task(client.generate(each)) for each in asked]
            while (await shared.health()).generated_tokens < before + 100:
                pass  # each look is a round trip
            await shared.pause(PauseMode.KEEP)
            if (await shared.health()).running:
                break  # on a busy machine, all responses may have ended between two looks
            await asyncio.gather(*answers)
            await shared.resume()
        assert shared.pid is not None
        os.kill(shared.pid, signal.SIGKILL)
        assert [(await answer)["response_ids"] for answer in answers] == expected
        assert client.engines == [other]
    finally:
        await other.teardown()


def test_a_run_with_its_engine_in_an_actor_is_the_run_with_its_engine_in_a_thread(
    cluster: None, tmp_path: Path
) -> None:
    outcomes = []
    for executor in ("thread", "ray"):
        folder = tmp_path / executor
        arguments = command("sort_digits", folder, *SYNCHRONOUS, f"generator.inference_engine.executor={executor}")
        assert main(["train", *arguments]) == 0
        outcomes.append(outcome(folder))
    assert_equal(*outcomes)


def test_signals_come_to_python_after_ray_has_put_its_own_handlers_beneath(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            ctypes.pythonapi.PyOS_setsig(number, ctypes.c_void_p(signal.SIG_IGN.value))

    monkeypatch.setattr(workers_ray, "ray", SimpleNamespace(is_initialized=lambda: False, init=init))
    heard: list[int] = []
    before = {number: signal.signal(number, lambda n, _: heard.append(n)) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        connect()
        for number in before:
            signal.raise_signal(number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert heard == list(before)


async def test_engines_that_start_at_once_connect_to_ray_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr("ray.is_initialized", lambda: bool(calls))
    monkeypatch.setattr("ray.init", lambda: calls.append(1))
    await asyncio.gather(*(asyncio.to_thread(connect) for _ in range(8)))
    assert calls == [1]


def test_without_a_cluster_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable() -> None:
        raise ConnectionError("nobody there\nand much more")

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", unreachable)
    with pytest.raises(ConfigError, match=r"nobody there\. Check RAY_ADDRESS"):
        connect()


def test_a_recorded_cluster_that_has_ended_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(workers_ray, "ray", SimpleNamespace(is_initialized=lambda: False, init=lambda: calls.append(1)))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    record = tmp_path / "ray" / "ray_current_cluster"  # as `ray start` writes it
    record.parent.mkdir()
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{head.getsockname()[1]}"
        record.write_text(address)
        with pytest.raises(ConfigError, match=f"{record} names a Ray cluster at {address}.*delete the file"):
            connect()
        assert calls == []
        monkeypatch.setenv("RAY_ADDRESS", "local")  # the record is not used
        connect()
        monkeypatch.delenv("RAY_ADDRESS")
        head.listen()
        connect()
    assert calls == [1, 1]


def children_of(pid: int) -> list[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")  # one per thread
    return [int(child) for children in lists for child in children.read_text().split()]


async def _ended(descriptor: int) -> None:
    """Returns when the process behind a pidfd has ended."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)


@pytest.mark.slow
@on_the_modules_loop
async def test_vllm_in_an_actor_is_updated_in_flight_and_its_processes_end_with_the_actor(
    cluster: None, tmp_path: Path, transport: SharedMemoryTransport
) -> None:
    pytest.importorskip("vllm")
    # vLLM's attention has no heads as small as the other tests' model.
    build = BuildModelConfig(hidden_size=64, intermediate_size=96, num_heads=2, max_position_embeddings=POSITIONS)
    folder, trained = str(tmp_path / "model"), str(tmp_path / "trained")
    build_model_folder(build, Path(folder), seed=0)
    build_model_folder(build, Path(trained), seed=1)
    arguments = {"model_path": folder, "max_num_seqs": 8, "max_model_len": POSITIONS}
    engine = RayEngine("skyrl_train.inference.engines.vllm:VLLMEngine", arguments, start_timeout_s=300)
    await engine.start()
    await publish(engine, folder, transport, 0, reads_back=False)
    stream = engine.stream(request(max_tokens=LONG))
    versions = list((await anext(stream)).versions)
    await publish(engine, trained, transport, 1, reads_back=False)
    async for chunk in stream:
        versions += chunk.versions
        if 1 in chunk.versions:
            break
    await stream.aclose()
    assert (versions, set(versions)) == (sorted(versions), {0, 1})
    served = await engine.generate(request(max_tokens=8))
    expected = token_logprobs(load_model(trained, "float32", "cpu"), PROMPT, served["response_ids"][0])
    assert served["response_logprobs"] == [pytest.approx(expected, abs=TOLERANCE)]
    call = asyncio.create_task(engine.generate(request(max_tokens=LONG)))
    while not call.done() and (await engine.health()).running == 0:
        pass  # each look is a round trip
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    while (await engine.health()).running:
        pass  # each look is a round trip
    watches = [os.pidfd_open(pid) for pid in children_of(engine.pid or 0)]
    assert watches
    os.kill(engine.pid or 0, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        await engine.generate(request())
    for watch in watches:
        await asyncio.wait_for(_ended(watch), 300)
        os.close(watch)
    await engine.teardown()


def test_a_cluster_lives_longer_than_the_thread_that_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel ends Ray's processes with the thread that started them, and each run of an event loop ends its own."""
    started: list[threading.Thread] = []

    def init() -> None:
        started.append(threading.current_thread())
        if len(started) == 2:
            raise RuntimeError("no such cluster")

    monkeypatch.setattr(workers_ray, "ray", SimpleNamespace(is_initialized=lambda: False, init=init))
    asking = threading.Thread(target=connect)
    asking.start()
    asking.join()
    assert started[0] is not asking and started[0].is_alive()
    with pytest.raises(ConfigError, match="no such cluster"):
        connect()

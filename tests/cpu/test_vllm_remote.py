"""A vLLM server that somebody started keeps the engine's contract over HTTP."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from embedded_models import full_greedy, full_logprobs
from hypothesis import given
from hypothesis import strategies as st
from scripted import pass_time, settle
from vllm_engines import TOLERANCE
from vllm_read_back import EXTENSION, served_checksum
from vllm_servers import KEY, FakeServer, VLLMServer, event, free_port, get, saying, whole

from skyrl_train.config.schema import BuildModelConfig
from skyrl_train.errors import ConfigError, EngineDeadError, EngineError, GrammarError, RequestError
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.engines.vllm.arguments import WORKER_EXTENSION
from skyrl_train.inference.engines.vllm.remote import RemoteVLLMEngine
from skyrl_train.inference.engines.vllm.remote_link import RemoteRequest
from skyrl_train.inference.engines.vllm.remote_server import authorized, receives_weights
from skyrl_train.inference.engines.vllm.remote_wire import GENERATE_PATH, parse_part, request_body
from skyrl_train.inference.engines.vllm.requests import (
    EngineRequest,
    Spans,
    grammar_spec,
    read_grammar_spec,
    token_versions,
)
from skyrl_train.inference.interface import (
    InferenceEngineInput,
    InferenceEngineOutput,
    SamplingParams,
    StructuredOutput,
    TokenChunk,
)
from skyrl_train.models.folder import load_model, load_tokenizer
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.disk import DiskTransport
from skyrl_train.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_train.weight_sync.update import WeightTransport, WeightUpdate

on_the_modules_loop = pytest.mark.asyncio(loop_scope="module")
POSITIONS = 1 << 14  # of the model
LONG = POSITIONS - 100  # tokens: a request that does not end while a test looks away


def request(*prompts: list[int], **params: object) -> InferenceEngineInput:
    return InferenceEngineInput(
        prompt_token_ids=list(prompts) or [[3, 4, 5]], sampling_params={"ignore_eos": True, **params}
    )


# Messages -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=5), st.data())
def test_spans_give_each_token_the_version_of_the_span_it_lies_in(
    runs: list[tuple[int, int]], data: st.DataObject
) -> None:
    labels = [version for version, length in runs for _ in range(length)]
    spans = [(version, sum(length for _, length in runs[:i])) for i, (version, _) in enumerate(runs)]
    first = data.draw(st.integers(0, len(labels)))
    count = data.draw(st.integers(0, len(labels) - first))
    assert token_versions(spans, first, count) == labels[first : first + count]


def test_no_version_and_no_logprob_is_ever_made_up() -> None:
    with pytest.raises(EngineError, match="which weight version"):
        token_versions([], 0, 1)
    missing = event([5, 6])
    missing["choices"][0]["logprobs"]["content"].pop()
    with pytest.raises(EngineError, match="log-prob"):
        parse_part(missing, 0)
    clamped = event([5])
    clamped["choices"][0]["logprobs"]["content"][0]["logprob"] = -9999.0
    with pytest.raises(EngineError, match="log-prob"):
        parse_part(clamped, 0)


def test_the_sampled_token_is_not_counted_among_the_alternatives_unless_it_is_one() -> None:
    part = event([5])
    part["choices"][0]["logprobs"]["content"][0]["top_logprobs"] = [
        {"token_id": 5, "logprob": -5.0},
        {"token_id": 1, "logprob": -0.5},
        {"token_id": 2, "logprob": -1.0},
    ]
    assert parse_part(part, 2).top_logprobs == [[(1, -0.5), (2, -1.0)]]
    part["choices"][0]["logprobs"]["content"][0]["top_logprobs"][2]["logprob"] = -9999.0  # in place of -inf
    assert parse_part(part, 3).top_logprobs == [[(1, -0.5), (5, -5.0)]]
    body = request_body("a", EngineRequest([1], SamplingParams(top_logprobs=2), stream=False), salt="s")
    assert body["sampling_params"]["logprobs"] == 3


def test_a_key_is_asked_for_where_the_server_has_one() -> None:
    assert authorized(None, [])
    assert authorized("Bearer b", ["a", "b"])
    assert not any(authorized(given, ["a"]) for given in (None, "", "a", "Bearer", "Bearer aa", "Basic a", "Bearer é"))


def test_an_extension_that_builds_on_ours_receives_weights_too() -> None:
    assert receives_weights(WORKER_EXTENSION) and receives_weights(EXTENSION)
    assert not any(receives_weights(other) for other in ("", "builtins.dict", "no.such.Extension", "json.dumps"))


# Against a scripted server --------------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def fake() -> AsyncIterator[FakeServer]:
    server = FakeServer()
    await server.start()
    yield server
    await server.stop()


@pytest_asyncio.fixture
async def faked(fake: FakeServer) -> AsyncIterator[RemoteVLLMEngine]:
    engine = RemoteVLLMEngine(fake.url, start_timeout_s=300, control_timeout_s=300)
    await engine.start()
    yield engine
    await engine.teardown()


async def test_a_server_with_prompt_details_says_what_it_had_cached(fake: FakeServer, faked: RemoteVLLMEngine) -> None:
    usage = {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 32}}
    fake.answer = saying(
        {**whole([5]), "usage": usage}, {**whole([5]), "usage": {**usage, "prompt_tokens_details": None}}
    )
    before = (await faked.health()).prefill_tokens
    outputs = [await faked.generate(request([3] * 40)) for _ in range(2)]
    assert [output.get("cached_tokens") for output in outputs] == [[32], None]
    assert (await faked.health()).prefill_tokens - before == 8 + 40


async def test_a_server_says_which_share_of_its_kv_cache_requests_hold(
    fake: FakeServer, faked: RemoteVLLMEngine
) -> None:
    fake.facts |= {"kv_cache_usage": 0.25}
    assert (await faked.health()).kv_cache_usage == 0.25


def an_update(version: int) -> WeightUpdate:
    return WeightUpdate(version, "shared_memory", "/nowhere", 0, ())


async def load(engine: RemoteVLLMEngine, version: int, mode: PauseMode = PauseMode.KEEP) -> None:
    await engine.receive_weights(an_update(version))
    await engine.pause(mode)
    await engine.load_weights(an_update(version))
    await engine.resume()


@pytest.mark.parametrize(
    ("fact", "value", "remedy"),
    [
        ("token_endpoint", False, "--enable-scale-out"),
        ("weight_reception", False, "--worker-extension-cls"),
        ("logprobs_mode", "raw_logprobs", "--logprobs-mode processed_logprobs"),
        ("server_processes", 4, "--api-server-count 1"),
        ("data_parallel_size", 2, "--data-parallel-size 1"),
    ],
)
async def test_a_server_that_lacks_something_is_refused_with_the_remedy(
    fake: FakeServer, fact: str, value: Any, remedy: str
) -> None:
    fake.facts[fact] = value
    with pytest.raises(ConfigError, match=remedy):
        await RemoteVLLMEngine(fake.url).start()


async def test_a_server_follows_grammars_with_our_scheduler_and_biases_without_drafts_only(fake: FakeServer) -> None:
    for there in (True, False):
        fake.facts["structured_output"] = fake.facts["speculative_decoding"] = there
        engine = RemoteVLLMEngine(fake.url)
        await engine.start()
        can = engine.capabilities
        assert (can.structured_output, can.grammar_continuation) == (there, there)
        assert (can.min_p, can.logit_bias, can.logit_adjustment) == (not there, not there, True)
        await engine.teardown()


def test_a_request_brings_the_tokens_that_its_grammar_has_seen() -> None:
    words = StructuredOutput("regex", '"{*/}\\u00e9', continued_tokens=2)
    params = SamplingParams(structured=words, stop_token_ids=(7, 8))
    sent = request_body("r", EngineRequest([3, 4, 5], params, stream=False), "s")["sampling_params"][
        "structured_outputs"
    ]
    assert read_grammar_spec(sent["json"]) == {
        "kind": "regex",
        "value": words.value,
        "token_ids": [4, 5],
        "stop_token_ids": [7, 8],
    }
    for other in ("true", '{"type": "object"}', '{"$comment": 7}', '{"$comment": "skyrl"}'):
        assert read_grammar_spec(other) is None
    begun = EngineRequest([3], dataclasses.replace(params, structured=StructuredOutput("json_object")), stream=False)
    assert (read_grammar_spec(grammar_spec(begun) or "") or {})["token_ids"] == []


async def test_only_a_server_that_makes_text_is_asked_to_find_stop_strings(fake: FakeServer) -> None:
    for there in (True, False):
        fake.facts["stop_strings"] = there
        engine = RemoteVLLMEngine(fake.url)
        await engine.start()
        assert engine.capabilities.stop_strings is there
        await engine.teardown()
    for stop in ((), ("x",)):
        asked = EngineRequest([3], SamplingParams(stop=stop), stream=False)
        sent = request_body("r", asked, "s")["sampling_params"]
        assert (sent["stop"], sent["detokenize"]) == (list(stop), bool(stop))


async def test_a_plain_vllm_server_and_a_wrong_key_are_told_apart(fake: FakeServer) -> None:
    fake.fail["/skyrl/engine"] = (404, {"detail": "Not Found"})
    with pytest.raises(ConfigError, match=r"has no /skyrl/engine.*engines\.md"):
        await RemoteVLLMEngine(fake.url).start()
    fake.fail["/skyrl/engine"] = (401, {"error": "Unauthorized"})
    with pytest.raises(ConfigError, match="API key"):
        await RemoteVLLMEngine(fake.url).start()


async def test_where_nobody_listens_start_says_so_in_time() -> None:
    with pytest.raises(EngineDeadError, match=r"start_timeout_s=0\.3"):
        await RemoteVLLMEngine(f"http://127.0.0.1:{free_port()}", start_timeout_s=0.3).start()


async def test_weights_of_another_trainer_do_not_count(fake: FakeServer) -> None:
    fake.facts |= {"weight_version": "7", "paused": True}
    engine = RemoteVLLMEngine(fake.url)
    await engine.start()
    assert (engine.policy_version, (await engine.health()).policy_version) == (-1, -1)
    assert not fake.facts["paused"]
    await engine.teardown()


async def test_a_server_that_comes_back_is_dead_until_it_is_started_with_again_and_then_stale(
    fake: FakeServer, faked: RemoteVLLMEngine
) -> None:
    await load(faked, 3)
    assert (await faked.health()).policy_version == 3
    fake.hang.add(GENERATE_PATH)
    pending = asyncio.create_task(faked.generate(request()))
    await fake.hanging.wait()
    await fake.stop()
    with pytest.raises(EngineDeadError):
        await pending
    assert not (await faked.health()).alive
    fake.facts |= {"instance": "two", "weight_version": "default"}
    fake.hang.clear()
    await fake.start()
    assert not (await faked.health()).alive, "nobody has looked at the new server yet"
    with pytest.raises(EngineDeadError):
        await faked.generate(request())
    await faked.start()
    health = await faked.health()
    assert (health.alive, health.policy_version, faked.policy_version) == (True, -1, -1)
    await load(faked, 4)
    fake.answer = saying(whole([5], "4"))
    assert (await faked.generate(request()))["response_versions"] == [[4]]


async def test_a_server_that_was_restarted_unnoticed_gives_no_token(fake: FakeServer, faked: RemoteVLLMEngine) -> None:
    await load(faked, 3)
    fake.answer = saying(whole([5], "default"))
    with pytest.raises(EngineDeadError, match="started again"):
        await faked.generate(request())


async def test_health_notices_another_instance(fake: FakeServer, faked: RemoteVLLMEngine) -> None:
    fake.facts["instance"] = "two"
    assert not (await faked.health()).alive
    with pytest.raises(EngineDeadError, match="started again"):
        await faked.pause(PauseMode.KEEP)


async def test_the_same_server_after_a_lost_network_still_holds_its_version(
    fake: FakeServer, faked: RemoteVLLMEngine
) -> None:
    await load(faked, 3)
    await fake.stop()
    assert not (await faked.health()).alive
    await fake.start()
    await faked.start()
    assert (faked.policy_version, (await faked.health()).alive) == (3, True)


async def test_a_lost_connection_interrupts_its_request_only(fake: FakeServer, faked: RemoteVLLMEngine) -> None:
    fake.drop.add(GENERATE_PATH)
    output = await faked.generate(request())
    assert (output["stop_reasons"], output["response_ids"]) == (["abort"], [[]])
    assert (await faked.health()).alive


async def test_a_failing_engine_process_is_death_and_a_failing_request_is_not(
    fake: FakeServer, faked: RemoteVLLMEngine
) -> None:
    fake.fail[GENERATE_PATH] = (500, {"error": {"message": "boom"}})
    with pytest.raises(EngineError, match="boom") as failed:
        await faked.generate(request())
    assert not isinstance(failed.value, EngineDeadError)
    fake.facts["dead"] = True
    with pytest.raises(EngineDeadError, match="engine process"):
        await faked.generate(request())


async def chunks(engine: RemoteVLLMEngine) -> list[TokenChunk]:
    return [chunk async for chunk in engine.stream(request())]


@pytest.mark.parametrize("answer", ["no object", {"choices": []}, [{"choices": []}]])
async def test_an_answer_of_another_shape_is_an_error(fake: FakeServer, faked: RemoteVLLMEngine, answer: Any) -> None:
    fake.answer = saying(answer)
    with pytest.raises(EngineError, match="answer to a request is unreadable"):
        await (chunks(faked) if isinstance(answer, list) else faked.generate(request()))


@pytest.mark.parametrize("answer", [[], [event([5])]])
async def test_a_stream_without_an_end_is_an_error(fake: FakeServer, faked: RemoteVLLMEngine, answer: Any) -> None:
    fake.answer = saying(answer)
    with pytest.raises(EngineError, match="did not finish"):
        await chunks(faked)


async def test_a_control_call_that_hangs_ends_in_time(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = RemoteVLLMEngine(fake.url, control_timeout_s=100)
    await engine.start()
    fake.hang.add("/resume")
    resuming = asyncio.create_task(engine.resume())
    await fake.hanging.wait()
    pass_time(monkeypatch, 101)
    with pytest.raises(EngineError, match="within 100 s"):
        await resuming
    await engine.teardown()


async def test_an_update_that_failed_half_way_needs_another_server(fake: FakeServer, faked: RemoteVLLMEngine) -> None:
    await faked.receive_weights(an_update(1))
    await faked.pause(PauseMode.KEEP)
    fake.fail["/collective_rpc"] = (500, {"error": {"message": "half"}})
    with pytest.raises(EngineDeadError, match="half-way"):
        await faked.load_weights(an_update(1))
    with pytest.raises(EngineDeadError, match="start a new server"):
        await faked.start()
    fake.facts["instance"] = "two"
    await faked.start()
    assert faked.policy_version == -1


class Asking:
    """Answers with spans when a request asks for its own, and counts."""

    def __init__(self, *spans: Spans | None) -> None:
        self.spans, self.asked = list(spans), 0

    async def __call__(self, name: str) -> Spans | None:
        self.asked += 1
        return self.spans.pop(0)


def a_request() -> RemoteRequest:
    return RemoteRequest(EngineRequest([3], SamplingParams(), stream=True), "a", [], spans=[(0, 0)], version=0, loads=4)


async def test_without_an_update_a_stream_has_the_servers_version() -> None:
    ask = Asking()
    chunk = await a_request().label(parse_part(event([5, 6]), 0), loads=4, version=0, ask=ask)
    assert chunk is not None and (chunk.versions, ask.asked) == ([0, 0], 0)


async def test_after_an_update_the_server_says_where_the_new_version_began() -> None:
    """Tokens of the old version can arrive after the update, and wait here for a slow reader."""
    sent, ask = a_request(), Asking([(0, 0)], [(0, 0), (1, 5)])
    versions = []
    for tokens in ([5, 6], [7], [8, 9, 10], [11]):
        chunk = await sent.label(parse_part(event(tokens), 0), loads=5, version=1, ask=ask)
        assert chunk is not None and chunk.token_ids == tokens
        versions += chunk.versions
    assert (versions, ask.asked) == ([0, 0, 0, 0, 0, 1, 1], 2)


async def test_tokens_are_held_back_until_their_version_is_known() -> None:
    sent, ask = a_request(), Asking(None)
    assert await sent.label(parse_part(event([5, 6]), 0), loads=5, version=1, ask=ask) is None
    last = parse_part(event([7], "length", [("0", 0), ("1", 1)]), 0)
    chunk = await sent.label(last, loads=5, version=1, ask=ask)
    assert chunk is not None
    assert (chunk.token_ids, chunk.logprobs, chunk.versions) == ([5, 6, 7], [-5.0, -6.0, -7.0], [0, 1, 1])
    assert chunk.stop_reason == "length"


@pytest.mark.parametrize(
    ("sampled", "first", "asked_again"),
    [
        (None, whole([5], "1"), True),  # it arrived after the update, with the salt of before it
        (None, whole([5], "0"), False),  # its answer was on its way
        (0, event([], "abort", []), True),  # it waited in the server
        (2, whole([5], "0"), False),  # it was being sampled
    ],
)
async def test_under_keep_no_prompt_is_computed_from_prefixes_cached_under_old_weights(
    fake: FakeServer, faked: RemoteVLLMEngine, sampled: int | None, first: Any, asked_again: bool
) -> None:
    await load(faked, 0)
    arrived, go = asyncio.Event(), asyncio.Event()
    bodies: list[dict[str, Any]] = []

    async def answer(body: dict[str, Any]) -> Any:
        bodies.append(body)
        if len(bodies) > 1:
            return whole([6], "1")
        arrived.set()
        await go.wait()
        return first

    fake.answer = answer
    fake.on_abort = go.set
    pending = asyncio.create_task(faked.generate(request()))
    await arrived.wait()
    if sampled is not None:
        name = f"generate-tokens-{bodies[0]['request_id']}"
        fake.requests = {name: {"sampled": sampled, "versions": [["0", 0]] if sampled else []}}
    await load(faked, 1)
    go.set()
    output = await pending
    assert output["response_ids"] == ([[6]] if asked_again else [[5]])
    assert len({body["cache_salt"] for body in bodies}) == len(bodies) == 1 + asked_again


async def test_weights_that_cannot_get_there_are_not_offered(fake: FakeServer) -> None:
    fake.facts["machine"] = "another one"
    engine = RemoteVLLMEngine(fake.url)
    await engine.start()
    assert engine.capabilities.transports == {"disk", "delta"}
    await engine.receive_weights(an_update(1))
    await engine.pause(PauseMode.KEEP)
    with pytest.raises(EngineError, match="weight_folder"):
        await engine.load_weights(an_update(1))
    await engine.teardown()


# Against vLLM itself --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("vllm") / "model"
    build_model_folder(
        BuildModelConfig(hidden_size=64, intermediate_size=96, num_heads=2, max_position_embeddings=POSITIONS),
        path,
        seed=0,
    )
    return str(path)


@pytest.fixture(scope="module")
def server(folder: str, vllm_forks: None) -> Iterator[VLLMServer]:
    server = VLLMServer(folder, Path(folder).parent / "server.log", free_port())
    yield server
    server.kill()


@pytest.fixture(scope="module")
def transport() -> SharedMemoryTransport:
    return SharedMemoryTransport(verify=True)


def weights(folder: str, scale: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    return [(name, weight.detach() * scale) for name, weight in load_model(folder, "float32", "cpu").named_parameters()]


async def sync_weights(
    engine: RemoteVLLMEngine,
    named: list[tuple[str, torch.Tensor]],
    transport: WeightTransport,
    version: int,
    mode: PauseMode = PauseMode.KEEP,
) -> WeightUpdate:
    update = transport.gather(named, version)
    await engine.receive_weights(update)
    await engine.pause(mode)
    await engine.load_weights(update)
    assert await served_checksum(engine, update) == update.checksum
    await engine.resume()
    assert (engine.policy_version, (await engine.health()).policy_version) == (version, version)
    return update


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(server: VLLMServer, folder: str, transport: SharedMemoryTransport) -> AsyncIterator[RemoteVLLMEngine]:
    engine = RemoteVLLMEngine(server.url, api_key=KEY, start_timeout_s=500)
    await engine.start()
    await sync_weights(engine, weights(folder), transport, 0)
    yield engine
    await engine.teardown()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared: RemoteVLLMEngine) -> AsyncIterator[RemoteVLLMEngine]:
    """The module's engine; each test leaves it as it found it."""
    yield shared
    async with asyncio.timeout(300):
        await until_idle(shared)
    health = await shared.health()
    assert (health.running, health.waiting, health.paused, health.alive) == (0, 0, False, True)


async def until_running(engine: RemoteVLLMEngine, count: int) -> None:
    while (await engine.health()).running < count:
        pass  # each look is a round trip


async def until_idle(engine: RemoteVLLMEngine) -> None:
    while (health := await engine.health()).running or health.waiting:
        pass  # each look is a round trip


@on_the_modules_loop
async def test_greedy_tokens_and_logprobs_are_those_of_transformers(
    engine: RemoteVLLMEngine, folder: str, transport: SharedMemoryTransport
) -> None:
    await sync_weights(engine, weights(folder), transport, 0)
    model = load_model(folder, "float32", "cpu")
    prompts = [[3, 4, 5], [7], list(range(3, 13))]
    output = await engine.generate(request(*prompts, max_tokens=12, temperature=0.0))
    for prompt, ids, logprobs in zip(prompts, output["response_ids"], output["response_logprobs"], strict=True):
        assert ids == full_greedy(model, prompt, 12)
        assert logprobs == pytest.approx(list(full_logprobs(model, prompt, ids)), abs=TOLERANCE)
    assert output["stop_reasons"] == ["length"] * 3
    assert output["response_versions"] == [[engine.policy_version] * 12] * 3


@on_the_modules_loop
async def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(
    engine: RemoteVLLMEngine, folder: str, transport: SharedMemoryTransport
) -> None:
    await sync_weights(engine, weights(folder), transport, 0)
    model = load_model(folder, "float32", "cpu")
    output = await engine.generate(request(max_tokens=8, temperature=0.7, top_k=4, seed=3, top_logprobs=2))
    ids, logprobs = output["response_ids"][0], output["response_logprobs"][0]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[3, 4, 5, *ids]])).logits[0, 2:-1] / 0.7
    best = logits.topk(4)
    expected = logits.masked_fill(logits < best.values[:, -1:], -torch.inf).log_softmax(-1)
    assert logprobs == pytest.approx([expected[i, token].item() for i, token in enumerate(ids)], abs=TOLERANCE)
    for alternatives, row in zip(output["response_top_logprobs"][0], expected, strict=True):
        assert [token for token, _ in alternatives] == row.topk(2).indices.tolist()
        assert [logprob for _, logprob in alternatives] == pytest.approx(row.topk(2).values.tolist(), abs=TOLERANCE)


@on_the_modules_loop
async def test_a_stream_has_the_tokens_of_the_whole_answer(engine: RemoteVLLMEngine) -> None:
    # A busy machine joins tokens of several steps, but not all of them.
    chunks = [chunk async for chunk in engine.stream(request(max_tokens=100, seed=4))]
    whole_answer = await engine.generate(request(max_tokens=100, seed=4))
    assert [token for chunk in chunks for token in chunk.token_ids] == whole_answer["response_ids"][0]
    assert len(chunks) > 1
    assert [chunk.stop_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


@on_the_modules_loop
async def test_a_request_that_does_not_fit_fails_its_own_call_only(engine: RemoteVLLMEngine) -> None:
    good = asyncio.create_task(engine.generate(request(max_tokens=30)))
    for prompt, reason in (([3] * POSITIONS, f"max_model_len={POSITIONS}"), ([], "empty"), ([10_000], "vocabulary")):
        with pytest.raises(RequestError, match=reason):
            await engine.generate(request(prompt))
        with pytest.raises(RequestError, match=reason):
            await anext(engine.stream(request(prompt)))
    with pytest.raises(RequestError, match="n=2"):
        await engine.generate(request(n=2))
    with pytest.raises(RequestError, match="max-logprobs"):
        await engine.generate(request(top_logprobs=20))
    assert len((await good)["response_ids"][0]) == 30
    full = await engine.generate(request([3] * (POSITIONS - 10), max_tokens=50))
    assert (len(full["response_ids"][0]), full["stop_reasons"]) == (10, ["length"])


@on_the_modules_loop
async def test_a_caller_that_goes_away_leaves_nothing_in_the_server(engine: RemoteVLLMEngine) -> None:
    call = asyncio.create_task(engine.generate(request([3], [4], max_tokens=LONG)))
    stream = engine.stream(request(max_tokens=LONG))
    await anext(stream)
    await until_running(engine, 3)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await stream.aclose()


@on_the_modules_loop
async def test_abort_generation_returns_the_partial_tokens(engine: RemoteVLLMEngine) -> None:
    stream = engine.stream(request(max_tokens=LONG))
    first = await anext(stream)
    call = asyncio.create_task(engine.generate(request(max_tokens=LONG)))
    await settle()  # it is on its way, and nobody knows how far
    await engine.abort_generation()
    rest = [chunk async for chunk in stream]
    assert rest[-1].stop_reason == "abort"
    assert 0 < len(first.token_ids) + sum(len(chunk.token_ids) for chunk in rest) < LONG
    output = await call
    assert output["stop_reasons"] == ["abort"]
    assert len(output["response_logprobs"][0]) == len(output["response_versions"][0]) == len(output["response_ids"][0])


@on_the_modules_loop
@pytest.mark.parametrize(
    "mode",
    [
        PauseMode.ABORT,
        PauseMode.RECOMPUTE,
        *(pytest.param(mode, marks=pytest.mark.slow) for mode in (PauseMode.KEEP, PauseMode.WAIT)),
    ],
)
async def test_an_update_in_flight_has_exact_versions_in_every_pause_mode(
    engine: RemoteVLLMEngine, folder: str, transport: SharedMemoryTransport, mode: PauseMode
) -> None:
    """Every token's log-prob is that of the weights that its version names."""
    scales = {0: 1.0, 1: 1.1}
    old, new = scales
    await sync_weights(engine, weights(folder, scales[old]), transport, old)
    length = 100 if mode is PauseMode.WAIT else LONG
    whole_answer = asyncio.create_task(engine.generate(request(max_tokens=length, seed=5)))
    stream = engine.stream(request([9, 8], max_tokens=length, seed=6))
    chunks = [await anext(stream)]
    while not whole_answer.done() and (await engine.health()).running < 2:
        pass  # each look is a round trip
    await sync_weights(engine, weights(folder, scales[new]), transport, new, mode)
    late = await engine.generate(request(max_tokens=3))
    assert late["response_versions"] == [[new] * 3]
    async for chunk in stream:
        chunks.append(chunk)
        if new in chunk.versions:
            break
    await engine.abort_generation()
    chunks += [chunk async for chunk in stream]
    output = await whole_answer
    streamed = [[x for chunk in chunks for x in getattr(chunk, name)] for name in ("token_ids", "logprobs", "versions")]
    answers = [
        ([3, 4, 5], output["response_ids"][0], output["response_logprobs"][0], output["response_versions"][0]),
        ([9, 8], *streamed),
    ]
    model = load_model(folder, "float32", "cpu")
    for prompt, ids, logprobs, versions in answers:
        assert versions == sorted(versions)
        boundary = versions.count(old)
        assert boundary > 0
        if mode in (PauseMode.ABORT, PauseMode.WAIT):
            assert set(versions) == {old}
        else:
            assert set(versions) == {old, new}
        for version, part in ((old, slice(0, boundary)), (new, slice(boundary, None))):
            if mode is PauseMode.KEEP and version == new:
                continue  # computed from the old weights' KV cache
            if versions[part]:
                expected = full_logprobs(scaled(model, scales[version]), prompt, ids)[part]
                assert logprobs[part] == pytest.approx(list(expected), abs=TOLERANCE), (mode, version)
    assert output["stop_reasons"] == ["length" if mode is PauseMode.WAIT else "abort"]


def scaled(model: Any, scale: float) -> Any:
    """The model with its weights multiplied."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(scale)
    return other


@on_the_modules_loop
async def test_a_cached_prefix_never_serves_another_version(
    engine: RemoteVLLMEngine, folder: str, transport: SharedMemoryTransport
) -> None:
    prompt = [3 + i % 8 for i in range(300)]  # more than two blocks of the cache
    model = load_model(folder, "float32", "cpu")
    for version, scale in ((10, 1.0), (11, 1.5), (12, 1.0)):
        await sync_weights(engine, weights(folder, scale), transport, version, PauseMode.KEEP)
        for cached in (None, [256]):
            output = await engine.generate(request(prompt, max_tokens=4, temperature=0.0))
            assert output.get("cached_tokens") == cached
            expected = full_logprobs(scaled(model, scale), prompt, output["response_ids"][0])
            assert output["response_logprobs"][0] == pytest.approx(list(expected), abs=TOLERANCE)


@on_the_modules_loop
async def test_nothing_is_sampled_while_paused_and_new_requests_wait(engine: RemoteVLLMEngine) -> None:
    stream = engine.stream(request(max_tokens=LONG))
    await anext(stream)
    await engine.pause(PauseMode.KEEP)
    late = asyncio.create_task(engine.generate(request(max_tokens=2)))
    await settle()
    health = await engine.health()
    assert (health.paused, health.running + health.waiting) == (True, 2)
    frozen = await engine._alive()[0].unfinished_requests()
    assert await engine._alive()[0].unfinished_requests() == frozen and not late.done()
    await engine.resume()
    await late
    assert await engine._alive()[0].unfinished_requests() != frozen
    await stream.aclose()


@on_the_modules_loop
async def test_resuming_fails_a_wait_that_is_still_draining(engine: RemoteVLLMEngine) -> None:
    stream = engine.stream(request(max_tokens=LONG))
    await anext(stream)
    waiting = asyncio.create_task(engine.pause(PauseMode.WAIT))
    await settle()
    await engine.resume()
    with pytest.raises(EngineError, match="resumed"):
        await waiting
    await stream.aclose()


@on_the_modules_loop
async def test_a_bad_update_is_refused_and_the_old_weights_stay(
    engine: RemoteVLLMEngine, folder: str, transport: SharedMemoryTransport
) -> None:
    version = engine.policy_version
    served = await sync_weights(engine, weights(folder), transport, version)
    update = transport.gather([], version + 1)
    await engine.receive_weights(update)
    with pytest.raises(EngineError, match="pause"):
        await engine.load_weights(update)
    await engine.pause(PauseMode.KEEP)
    with pytest.raises(EngineError, match="misses"):
        await engine.load_weights(update)
    await engine.resume()
    assert (await served_checksum(engine, served), engine.policy_version) == (served.checksum, version)


@on_the_modules_loop
async def test_weights_travel_through_a_folder_where_memory_is_not_shared(
    engine: RemoteVLLMEngine, folder: str, transport: SharedMemoryTransport, tmp_path: Path
) -> None:
    on_disk = DiskTransport(str(tmp_path), verify=True)
    for version in (20, 21):
        await sync_weights(engine, weights(folder), on_disk, version)
        assert (await engine.generate(request(max_tokens=2)))["response_versions"] == [[version] * 2]
    on_disk.close()
    assert not await asyncio.to_thread(os.listdir, tmp_path)
    await sync_weights(engine, weights(folder), transport, 22)


@on_the_modules_loop
async def test_a_stop_string_ends_the_response_in_the_server_and_its_answer_comes_as_a_whole(
    engine: RemoteVLLMEngine, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.capabilities.stop_strings
    tokenizer, answers, generate = load_tokenizer(folder), list[InferenceEngineOutput](), engine.generate

    async def noted(engine_input: InferenceEngineInput) -> InferenceEngineOutput:
        answers.append(await generate(engine_input))
        return answers[-1]

    monkeypatch.setattr(engine, "generate", noted)
    client = InferenceEngineClient([engine], tokenizer, folder)
    params = {"max_tokens": 200, "temperature": 1.0, "seed": 4}
    (plain,) = (await client.generate(request(**params)))["response_ids"]
    ends = [tokenizer.decode(plain[: length + 1], skip_special_tokens=True) for length in range(len(plain))]
    # Two characters that occur late and nowhere before.
    length = next(
        n for n in range(50, 199) if len(ends[n]) > len(ends[n - 1]) and ends[n].find(ends[n][-2:]) == len(ends[n]) - 2
    )
    output = await client.generate(request(**params, stop=[ends[length][-2:]]))
    assert output["response_ids"] == [plain[: length + 1]] and output["stop_reasons"] == ["stop"]
    assert output["responses"] == [ends[length][:-2]]
    # The server has ended it. The client, which looks for the string as well, would continue if it had found none.
    assert answers[-1]["stop_reasons"] == ["abort"] and answers[-1]["response_ids"] == output["response_ids"]


@on_the_modules_loop
async def test_a_grammar_is_followed_and_a_broken_one_refused(engine: RemoteVLLMEngine) -> None:
    digits = StructuredOutput("regex", "[0-3]{4}")
    output = await engine.generate(request(max_tokens=4, temperature=0.0, structured=digits))
    (whole,) = output["response_ids"]
    assert all(3 <= token <= 6 for token in whole)  # the tokens of the characters 0 to 3
    rest = dataclasses.replace(digits, continued_tokens=3)
    output = await engine.generate(request([3, 4, 5, *whole[:3]], max_tokens=9, temperature=0.0, structured=rest))
    assert (output["response_ids"], output["stop_reasons"]) == ([[whole[3], 1]], ["stop"])
    with pytest.raises(GrammarError, match="unclosed"):
        await engine.generate(request(structured=StructuredOutput("regex", "[")))


@on_the_modules_loop
async def test_a_wrong_key_opens_nothing_but_health(engine: RemoteVLLMEngine, server: VLLMServer) -> None:
    for key in (None, "wrong"):
        for path in ("/skyrl/engine", "/skyrl/requests", "/is_paused", "/weight_info", "/v1/models", "/metrics"):
            assert (await asyncio.to_thread(get, server.url + path, key))[0] == 401, path
        for path in ("/pause", "/collective_rpc", "/update_weights", GENERATE_PATH):
            assert (await asyncio.to_thread(get, server.url + path, key, {}))[0] == 401, path
    assert (await asyncio.to_thread(get, server.url + "/health"))[0] == 200
    with pytest.raises(ConfigError, match="API key"):
        await RemoteVLLMEngine(server.url, api_key="wrong").start()


@pytest.mark.last_in_its_file
@on_the_modules_loop
async def test_when_the_server_is_killed_all_calls_fail_at_once(shared: RemoteVLLMEngine, server: VLLMServer) -> None:
    calls = [asyncio.create_task(shared.generate(request(max_tokens=LONG))) for _ in range(3)]
    stream = shared.stream(request(max_tokens=LONG))
    await anext(stream)
    await until_running(shared, 4)
    server.kill()
    with pytest.raises(EngineDeadError):
        await calls[0]
    await settle()
    assert all(call.done() for call in calls), "the end is noticed once, for all of them"
    for call in calls[1:]:
        with pytest.raises(EngineDeadError):
            await call
    with pytest.raises(EngineDeadError):
        _ = [chunk async for chunk in stream]
    for later in (shared.generate(request()), shared.pause(PauseMode.KEEP), shared.resume()):
        with pytest.raises(EngineDeadError):
            await later
    assert not (await shared.health()).alive


@pytest.mark.slow
@on_the_modules_loop
async def test_a_killed_server_that_is_started_again_is_stale_until_the_next_weight_sync(
    vllm_forks: None, folder: str, tmp_path: Path, transport: SharedMemoryTransport
) -> None:
    server = VLLMServer(folder, tmp_path / "server.log", free_port())
    engine = RemoteVLLMEngine(server.url, api_key=KEY, start_timeout_s=500)
    try:
        await engine.start()
        await sync_weights(engine, weights(folder), transport, 0)
        server.kill()
        assert not (await engine.health()).alive
        server = VLLMServer(folder, server.log, server.port)
        await engine.start()
        assert (engine.policy_version, (await engine.health()).policy_version) == (-1, -1)
        assert (await engine.generate(request(max_tokens=2)))["response_versions"] == [[-1, -1]]
        await sync_weights(engine, weights(folder), transport, 30)
        assert (await engine.generate(request(max_tokens=2)))["response_versions"] == [[30, 30]]
    finally:
        await engine.teardown()
        server.kill()

"""The harness generator with the real endpoint and sessions, on scripted engines: agents become training data."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_models import chat_tokenizer
from harness import TOKENIZER, Harness
from harness_worlds import CURRENT, batch, harness
from scripted import ScriptedEngine, pass_time, scripted_update, settle

from skyrl_train.build.checks import check_import_paths
from skyrl_train.config.compose import compose
from skyrl_train.config.schema import GeneratorConfig
from skyrl_train.errors import ConfigError, EngineError, GeneratorOutputError, NoEngineError, RolloutError
from skyrl_train.events.log import EventLog
from skyrl_train.events.reader import EventReader
from skyrl_train.generators.harness import generator
from skyrl_train.generators.harness.agent import AgentTask
from skyrl_train.generators.harness.generator import HarnessGenerator
from skyrl_train.generators.validation import to_samples
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.interface import InferenceEngineInput, InferenceEngineOutput
from skyrl_train.observability.failures import user_frame
from skyrl_train.types import PauseMode, TrajectoryID

Messages = list[dict[str, Any]]
THREADED: dict[str, Callable[..., float]] = {}


def in_thread(prompt: Messages, base_url: str, api_key: str) -> float:
    """The synchronous agent of the running test."""
    return THREADED["agent"](prompt, base_url, api_key)


def closing_in_thread(on_close: Any) -> float:
    return THREADED["closing"](on_close)


class Model:
    """The parts of an SDK that an agent uses."""

    def __init__(self, base_url: str, api_key: str) -> None:
        headers = {"authorization": f"Bearer {api_key}"}
        self.http = httpx.AsyncClient(base_url=base_url, headers=headers, trust_env=False, timeout=300)

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        response = await self.http.post(path, json=body)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer

    async def answer(self, messages: Messages, **body: Any) -> dict[str, Any]:
        """The answer as a message, to be appended."""
        body = {"model": "policy", "messages": messages, **body}
        message: dict[str, Any] = (await self.post("/chat/completions", **body))["choices"][0]["message"]
        return message


async def one_turn(prompt: Messages, base_url: str, api_key: str, **_: Any) -> float:
    await Model(base_url, api_key).answer(prompt)
    return 0.5


# Sessions to training data ------------------------------------------------------------------------------------------


async def test_a_turn_becomes_the_tokens_that_were_sampled_and_the_reward_lies_on_the_last() -> None:
    async with harness() as it:
        output = await it.play(one_turn, samples=2)
        assert output["is_last_step"] == [True, True]
        assert output["trajectory_ids"] == [TrajectoryID("p", 0), TrajectoryID("p", 1)]
        for sample in to_samples(output, 2):
            [row] = sample.sequences
            assert row.prompt_token_ids == TOKENIZER("go")["input_ids"]
            assert row.loss_mask == [1] * len(row.response_ids) and set(row.versions) == {0}
            assert row.rewards == [0.0] * (len(row.rewards) - 1) + [0.5]
        assert output["rollout_metrics"] is not None
        assert output["rollout_metrics"]["generate/turns"] == output["rollout_metrics"]["generate/branches"] == 1.0


async def test_a_conversation_is_one_sequence_and_a_rewritten_history_another() -> None:
    async def run(prompt: Messages, base_url: str, api_key: str, **_: Any) -> dict[str, Any]:
        model = Model(base_url, api_key)
        first = await model.answer(prompt)
        longer = [*prompt, first, {"role": "user", "content": "more"}]
        await model.answer(longer)
        await model.answer([*prompt, {"role": "assistant", "content": "rewritten"}, {"role": "user", "content": "and"}])
        return {"reward": 1.0, "turn_rewards": [0.25, 0.5], "metrics": {"solved": 1}}

    async with harness() as it:
        output = await it.play(run)
        [sample] = to_samples(output, 1)
        conversation, rewritten = sample.sequences
        assert output["is_last_step"] == [False, True]
        assert [sum(row.rewards) for row in sample.sequences] == [0.75, 1.0] and sample.reward == 1.75
        text = TOKENIZER.decode([*rewritten.prompt_token_ids])
        assert text.startswith("go") and text.endswith("rewrittenand")
        turns = "".join(map(str, conversation.loss_mask)).split("0" * len("more"))
        assert len(turns) == 2 and all(set(turn) == {"1"} for turn in turns)
        ends = [index for index, reward in enumerate(conversation.rewards) if reward]
        assert ends == [len(turns[0]) - 1, len(conversation.rewards) - 1]
        metrics = output["rollout_metrics"] or {}
        assert (metrics["generate/turns"], metrics["generate/branches"]) == (3.0, 2.0)
        assert metrics["generate/drifted_turns"] == 1.0 and metrics["environment/solved"] == 1.0


async def test_the_life_of_an_agent_and_the_time_of_its_tools_are_in_the_record(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("Qwen/Qwen3-0.6B")
    call = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call><|im_end|>'
    tokens = iter(tokenizer(call)["input_ids"] + tokenizer("4<|im_end|>")["input_ids"])
    engine = ScriptedEngine(lambda *_: next(tokens), free_running=True, eos=tokenizer.eos_token_id)
    now = [100.0]

    async def agent(prompt: Messages, base_url: str, api_key: str, **_: Any) -> float:
        model, tools = Model(base_url, api_key), [{"type": "function", "function": {"name": "add", "parameters": {}}}]
        answer = await model.answer(prompt, tools=tools)
        now[0] += 7.0
        result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "4"}
        await model.answer([*prompt, answer, result], tools=tools)
        return 1.0

    with closing(EventLog(tmp_path, 100, clock=lambda: now[0])) as log:
        async with harness(engine=engine, tokenizer=tokenizer, max_tokens=100, events=log) as world:
            await world.play(agent)
    events = {event["kind"]: event for event in EventReader(tmp_path).poll()}
    tool, life = events["tool"], events["agent"]
    assert (tool["session"], tool["names"], tool["t1"]) == ("p_0", ["add"], 107.0)
    assert tool["t0"] <= tool["t1"]
    assert (life["turns"], life["t0"], life["t1"], life["ok"]) == (2, 100.0, 107.0, True)


async def test_a_session_across_a_weight_update_records_the_version_of_each_token() -> None:
    async def run(prompt: Messages, base_url: str, api_key: str, **_: Any) -> float:
        model = Model(base_url, api_key)
        answer = await model.answer(prompt)
        await it.client.load_weights(scripted_update(1), PauseMode.KEEP)
        await model.answer([*prompt, answer, {"role": "user", "content": "more"}])
        return 1.0

    async with harness() as it:
        [sample] = await it.samples(run)
        versions = sample.sampled_versions.tolist()
        assert set(versions) == {0, 1} and versions == sorted(versions)


async def test_the_run_sets_the_sampling_parameters_and_equal_seeds_sample_equally() -> None:
    async def run(prompt: Messages, base_url: str, api_key: str, **_: Any) -> float:
        model = Model(base_url, api_key)
        await asyncio.gather(*(model.answer(prompt, temperature=0.1, max_tokens=4, seed=1) for _ in range(3)))
        return 1.0

    async def responses(seed: int) -> list[list[int]]:
        [sample] = await it.samples(run, seed=seed)
        return sorted(row.response_ids for row in sample.sequences)

    async with harness() as it:
        first = await responses(7)
        assert len({tuple(response) for response in first}) == 3
        assert {(params.temperature, params.max_tokens) for params in it.sampled_with} == {(0.7, 4)}
        assert await responses(7) == first != await responses(8)
        assert (await it.play(run))["rollout_metrics"]["generate/overridden_requests"] == 3.0  # type: ignore[index]
    async with harness(agents_choose_sampling=True) as it:
        assert len({tuple(response) for response in await responses(7)}) == 1, "a fixed seed is a fixed answer"
        assert {params.temperature for params in it.sampled_with} == {0.1}


async def test_completions_without_messages_are_sampled_by_the_run_too() -> None:
    async def run(base_url: str, api_key: str, **_: Any) -> float:
        await Model(base_url, api_key).post("/completions", model="policy", prompt="go", temperature=0.1, max_tokens=3)
        return 1.0

    async with harness() as it:
        first, again = await it.samples(run), await it.samples(run)
        assert first == again
        assert {params.temperature for params in it.sampled_with} == {0.7}


async def test_an_agent_may_ask_for_more_tokens_than_the_context_has() -> None:
    async def run(prompt: Messages, base_url: str, api_key: str, **_: Any) -> float:
        model = Model(base_url, api_key)
        await model.answer(prompt, max_tokens=32_000)
        await model.post("/completions", model="policy", prompt="go", max_tokens=32_000)
        return 1.0

    async with harness(max_tokens=6) as it:
        await it.samples(run)
        assert it.client.capabilities.max_model_len < 32_000
        assert [params.max_tokens for params in it.sampled_with] == [6, 6], "the smaller of the agent's and the run's"


# Rewards ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("finish", [False, True])
async def test_a_reward_may_be_posted_with_the_sessions_key(finish: bool) -> None:
    async def run(prompt: Messages, base_url: str, api_key: str, session_id: str, **_: Any) -> None:
        model = Model(base_url, api_key)
        await model.answer(prompt)
        await model.post(f"/sessions/{session_id}/reward", reward=0.25)
        if finish:
            await model.post(f"/sessions/{session_id}/finish")

    async with harness() as it:
        assert [sample.reward for sample in await it.samples(run)] == [0.25]


PROGRAM = (
    "import json, os, sys, urllib.request\n"
    "task = json.load(sys.stdin)\n"
    "body = json.dumps({'model': 'policy', 'messages': task['prompt']}).encode()\n"
    "request = urllib.request.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', body, {\n"
    "    'Content-Type': 'application/json', 'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']})\n"
    "opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))\n"
    "json.load(opener.open(request))\n"
)


async def test_a_program_in_any_language_is_an_agent() -> None:
    source = PROGRAM + "print(json.dumps({'reward': task['extras']['number']}))\n"
    async with harness(agent=None, command=[sys.executable, "-c", source]) as it:
        assert [sample.reward for sample in await it.samples(one_turn, samples=3)] == [0.0, 1.0, 2.0]


async def test_a_program_may_name_the_python_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    source = PROGRAM + f"print(float(sys.executable == {sys.executable!r} and sys.argv[1:] == ['a{{python}}']))\n"
    async with harness(agent=None, command=["{python}", "-c", source, "a{python}"]) as it:
        assert [sample.reward for sample in await it.samples(one_turn)] == [1.0]


# Failures -----------------------------------------------------------------------------------------------------------


async def never_asks(**_: Any) -> float:
    return 1.0


@pytest.mark.parametrize("direct", ["", "other.example", "*"])
async def test_an_agent_reaches_the_endpoint_although_its_http_clients_have_a_proxy(
    direct: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(prompt: Messages, base_url: str, api_key: str, **_: Any) -> float:
        model = Model(base_url, api_key)
        model.http = httpx.AsyncClient(
            base_url=base_url, headers=model.http.headers, timeout=300
        )  # trusts the environment
        await model.answer(prompt)
        return 0.5

    with closing(socket.socket()) as dead:
        dead.bind(("127.0.0.1", 0))  # without a listener
        for name in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{dead.getsockname()[1]}")
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.setenv(name, direct)
        async with harness() as it:
            assert len((await it.play(run))["response_ids"]) == 1
    assert os.environ["NO_PROXY"].split(",")[0] in (direct, "127.0.0.1")


@pytest.mark.parametrize("public", ["http://localhost:{port}", "http://localhost:{port}/"])
async def test_an_agent_is_given_the_public_url(public: str) -> None:
    async def run(prompt: Messages, base_url: str, api_key: str, **_: Any) -> float:
        assert re.fullmatch(r"http://localhost:\d+/v1", base_url)
        return await one_turn(prompt, base_url, api_key)

    async with harness(endpoint={"public_url": public}) as it:
        output = await it.play(run)
    assert len(output["response_ids"]) == 1


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ("{public_url: http://host}", "its port a free one"),
        ("{public_uri: http://host}", "endpoint.public_uri is unknown. Did you mean public_url"),
        ("text", "endpoint must be a mapping"),
    ],
)
def test_a_wrong_setting_of_the_endpoint_is_found_by_a_plan(endpoint: str, message: str) -> None:
    settings = ["generator.name=harness", "generator.kwargs.agent=json:dumps", f"generator.kwargs.endpoint={endpoint}"]
    config = compose("quickstart", settings)
    with pytest.raises(ConfigError, match=message):
        check_import_paths(config)


@pytest.mark.parametrize("answers", ["the endpoint", "another program", "nobody"])
async def test_a_public_url_that_does_not_lead_here_is_a_warning(
    answers: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok")
        writer.close()

    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))  # without listen() it refuses connections, and nobody else gets the port
    port = taken.getsockname()[1]
    server = await asyncio.start_server(other, sock=taken) if answers == "another program" else None
    public = "http://127.0.0.1:{port}" if answers == "the endpoint" else f"http://127.0.0.1:{port}/{{port}}"
    async with harness(endpoint={"public_url": public}):
        pass
    warned = [record.getMessage() for record in caplog.records if "public_url" in record.getMessage()]
    (taken if server is None else server).close()
    expected = {"another program": "is answered by another program", "nobody": "does not answer"}
    assert len(warned) == (answers in expected) and all(expected[answers] in text for text in warned)


@pytest.mark.parametrize("end", ["reward", "error", "time limit", "cancelled"])
async def test_what_an_agent_opened_is_closed_however_its_run_ends(
    end: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Any] = []
    waiting = asyncio.Event()

    async def close(name: str) -> None:
        await asyncio.sleep(0)
        closed.append(name)

    def broken(key: str) -> None:
        raise ValueError(key)

    async def run(prompt: Messages, base_url: str, api_key: str, on_close: Any, **_: Any) -> float:
        on_close(close, "first")
        on_close(closed.append, "second")
        on_close(broken, api_key)
        await one_turn(prompt, base_url, api_key)
        if end == "error":
            raise ValueError("broken")
        if end != "reward":
            waiting.set()
            await asyncio.Event().wait()
        return 1.0

    async with harness() as it:
        playing = asyncio.create_task(it.play(run))
        if end in ("time limit", "cancelled"):
            await waiting.wait()
        if end == "time limit":
            pass_time(monkeypatch, 601)
        if end == "cancelled":
            playing.cancel()
        raised = {"reward": None, "cancelled": asyncio.CancelledError}.get(end, RolloutError)
        with contextlib.nullcontext() if raised is None else pytest.raises(raised):
            await playing
    assert closed == ["second", "first"], "the last one first, and one that fails keeps none open"
    assert "on_close failed" in caplog.text and "<api key>" in caplog.text and "sk-" not in caplog.text


async def test_a_thread_that_outlives_its_run_has_its_things_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    opened, ended, told = (threading.Event() for _ in range(3))

    def close() -> None:
        closed.append(threading.current_thread().name)
        ended.set()

    def run(on_close: Any) -> float:
        on_close(close)
        opened.set()
        ended.wait(60)
        on_close(closed.append, "late")
        told.set()
        return 0.0

    THREADED["closing"] = run
    async with harness(agent=f"{__name__}:closing_in_thread") as it:
        playing = asyncio.create_task(it.generator.generate(batch(1)))
        await asyncio.to_thread(opened.wait, 60)
        pass_time(monkeypatch, 601)
        with pytest.raises(RolloutError, match="took longer"):
            await playing
        await asyncio.to_thread(told.wait, 60)
    assert closed == ["agent-close", "late"]


async def gives_no_reward(prompt: Messages, base_url: str, api_key: str, **_: Any) -> None:
    await Model(base_url, api_key).answer(prompt)


def returns(value: Any) -> Callable[..., Any]:
    async def run(prompt: Messages, base_url: str, api_key: str, **_: Any) -> Any:
        await Model(base_url, api_key).answer(prompt)
        return value

    return run


async def asks_for_nothing(prompt: Messages, base_url: str, api_key: str, **_: Any) -> float:
    await Model(base_url, api_key).answer(prompt, max_tokens=0)
    return 1.0


async def shows_its_key(api_key: str, **_: Any) -> float:
    raise ValueError(f"my key is {api_key}")


async def cancels_itself(**_: Any) -> float:
    raise asyncio.CancelledError


async def rewards_a_turn_too_many(prompt: Messages, base_url: str, api_key: str, **_: Any) -> dict[str, Any]:
    await Model(base_url, api_key).answer(prompt)
    return {"turn_rewards": [1.0, 1.0]}


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (asks_for_nothing, r"it raised HTTPStatusError\(.*400 Bad Request"),
        (
            shows_its_key,
            r"it raised ValueError\('my key is <api key>'\) \(test_harness_generator.py, line \d+, in shows",
        ),
        (cancels_itself, "it cancelled itself"),
        (returns(float("nan")), "the reward that it returned is nan, not a finite number"),
        (rewards_a_turn_too_many, "its reward cannot be set: .* has no turn 1"),
    ],
)
async def test_a_failed_run_names_the_sample_and_never_a_key(agent: Callable[..., Any], message: str) -> None:
    async with harness() as it:
        with pytest.raises(RolloutError, match=rf"The agent of sample 'p_0' failed: {message}") as info:
            await it.play(agent)
        chain = repr((info.value, info.value.__cause__, info.value.__context__ if info.value.__cause__ else None))
        assert "sk-" not in chain


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (never_asks, "it never got a response from the model. It must send its requests to the base_url"),
        (gives_no_reward, "it gave no reward: it returned none"),
        (returns("1.0"), "the reward that it returned is '1.0', not a finite number"),
        (returns({"score": 1.0}), "it returned an object with the unknown key 'score'"),
        (returns({"turn_rewards": 1.0}), r"it returned turn_rewards=1\.0"),
    ],
)
async def test_an_agent_that_breaks_its_contract_stops_the_run(agent: Callable[..., Any], message: str) -> None:
    async with harness(failure_reward=0.0) as it:  # which is for runs that fail
        with pytest.raises(
            GeneratorOutputError, match=rf"The agent of sample 'p_0' \(.*harness_worlds\.py:\d+ in current\): {message}"
        ):
            await it.play(agent)


async def test_a_program_that_breaks_its_contract_stops_the_run_and_its_output_is_kept() -> None:
    async with harness(agent=None, command=[sys.executable, "-c", PROGRAM + "print('all done')"]) as it:
        with pytest.raises(GeneratorOutputError, match="the last line that it printed is not JSON: 'all done'") as info:
            await it.generator.generate(batch(1))
        assert "all done" in "".join(info.value.__notes__)


async def test_a_failure_says_whether_any_request_has_arrived() -> None:
    async def unconnected(**_: Any) -> float:
        raise OSError("connection refused")

    async with harness() as it:
        with pytest.raises(RolloutError, match="no agent has sent a request to its base_url with its api_key yet"):
            await it.play(unconnected)
        await it.play(one_turn)
        with pytest.raises(RolloutError, match="connection refused") as info:
            await it.play(unconnected)
        assert "no agent has sent" not in str(info.value)


@pytest.mark.parametrize("kind", [httpx.HTTPStatusError, None])
async def test_an_agent_that_asks_for_a_wrong_model_has_asked(kind: type[Exception] | None) -> None:
    async def asks(prompt: Messages, base_url: str, api_key: str, **_: Any) -> float:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}) as http:
            response = await http.post(f"{base_url}/chat/completions", json={"model": "gpt-4o", "messages": prompt})
        if kind is not None:
            response.raise_for_status()
        return 1.0

    told = (
        r"404"
        if kind
        else r"it never got a response from the model\. Its last request was refused: The model 'gpt-4o' is not"
    )
    async with harness() as it:
        with pytest.raises(RolloutError, match=told) as info:
            await it.play(asks)
    assert "no agent has sent a request" not in str(info.value)


async def test_an_agent_that_finds_no_reason_to_ask_has_only_failed() -> None:
    async with harness() as it:
        await it.play(one_turn)
        with pytest.raises(RolloutError, match="it never got a response"):
            await it.play(never_asks)


async def test_a_run_that_times_out_cancels_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async with harness(free_running=False, timeout_s=100) as it:  # the engine samples nothing
        playing = asyncio.create_task(it.play(one_turn))
        await until(lambda: len(it.engine.requests) == 1)
        pass_time(monkeypatch, 101)
        with pytest.raises(RolloutError, match=r"it took longer than generator.kwargs.timeout_s=100 s") as info:
            await playing
        assert user_frame("".join(traceback.format_exception(info.value))).endswith("in post")
        await until(lambda: not it.engine.running)


async def test_an_agent_that_answers_its_cancellation_with_a_reward_is_late() -> None:
    async def run(prompt: Messages, base_url: str, api_key: str, **_: Any) -> float:
        await Model(base_url, api_key).answer(prompt)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.get_running_loop().create_future()
        return 1.0

    async with harness(timeout_s=0.5) as it:
        with pytest.raises(RolloutError, match="it took longer than"):
            await it.play(run)


async def test_an_agent_that_ignores_its_cancellation_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "_CANCEL_LIMIT_S", 0.1)
    over = asyncio.Event()

    async def run(**_: Any) -> float:
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):  # as a bare except does
                await over.wait()
        return 1.0

    async with harness(timeout_s=0.1) as it:
        with pytest.raises(RolloutError, match=r"it took longer than .*, and ignores its cancellation; abandoned"):
            await it.play(run)
    over.set()


async def test_the_key_of_a_thread_that_cannot_be_ended_is_revoked() -> None:
    statuses: list[int] = []
    over = threading.Event()

    def run(prompt: Messages, base_url: str, api_key: str) -> float:
        for _ in range(2):
            headers = {"authorization": f"Bearer {api_key}"}
            with httpx.Client(base_url=base_url, headers=headers, trust_env=False, timeout=300) as http:
                statuses.append(
                    http.post("/chat/completions", json={"model": "policy", "messages": prompt}).status_code
                )
        over.set()
        return 1.0

    THREADED["agent"] = run
    async with harness(free_running=False, timeout_s=0.3, agent=f"{__name__}:in_thread") as it:
        with pytest.raises(RolloutError, match="it took longer") as info:
            await it.generator.generate(batch(1))
        assert user_frame("".join(traceback.format_exception(info.value))).endswith("in run")
        assert await asyncio.to_thread(over.wait, 300)
        assert not it.engine.running
    assert statuses[0] >= 400 and statuses[1] == 401


async def test_a_run_that_fails_takes_its_background_requests_and_its_siblings_along() -> None:
    background: set[asyncio.Task[Any]] = set()

    async def run(prompt: Messages, base_url: str, api_key: str, extras: dict[str, int], **_: Any) -> float:
        background.add(asyncio.create_task(Model(base_url, api_key).answer(prompt)))
        await until(lambda: len(it.engine.running) == 3)
        if extras["number"] == 1:
            raise OSError("sandbox gone")
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async with harness(free_running=False) as it:
        with pytest.raises(RolloutError, match=r"sample 'p_1' failed: it raised OSError\('sandbox gone'\)"):
            await it.play(run, samples=3)
        await until(lambda: not it.engine.running)
        answers = await asyncio.gather(*background, return_exceptions=True)
        assert all(isinstance(answer, httpx.HTTPStatusError) for answer in answers)


async def test_a_failed_run_may_be_data_with_a_reward_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    async def run(prompt: Messages, base_url: str, api_key: str, extras: dict[str, int], **_: Any) -> float:
        await Model(base_url, api_key).answer(prompt)
        if extras["number"]:
            raise OSError("nonsense in the answer")
        return 1.0

    async with harness(failure_reward=-1.0) as it:
        with caplog.at_level(logging.WARNING):
            output = await it.play(run, samples=2)
        assert [sample.reward for sample in to_samples(output, 2)] == [1.0, -1.0]
        assert (output["rollout_metrics"] or {})["generate/failed_agents"] == 0.5
        assert "sample 'p_1' failed: it raised OSError('nonsense in the answer')" in caplog.text
        with pytest.raises(RolloutError, match="never got a response"):
            await it.play(never_asks)


async def test_the_reward_of_a_failed_run_takes_the_place_of_all_others() -> None:
    async def run(
        prompt: Messages, base_url: str, api_key: str, session_id: str, extras: dict[str, int], **_: Any
    ) -> dict[str, Any]:
        model = Model(base_url, api_key)
        await model.answer(prompt)
        if extras["number"] == 0:
            return {"reward": 1.0, "turn_rewards": [0.5, 0.5]}  # for one turn
        if extras["number"] == 1:
            await model.post(f"/sessions/{session_id}/reward", reward=0.25, turn=0)
        else:
            await model.post(f"/sessions/{session_id}/finish")
        raise OSError("sandbox gone")

    async with harness(failure_reward=-1.0) as it:
        assert [sample.reward for sample in await it.samples(run, samples=3)] == [-1.0] * 3


async def test_engines_that_fail_are_not_the_agents_fault() -> None:
    async def run(prompt: Messages, base_url: str, api_key: str, **_: Any) -> float:
        it.engine.die()
        return await one_turn(prompt, base_url, api_key)

    async with harness(failure_reward=0.0) as it:
        with pytest.raises(NoEngineError):
            await it.play(run)


async def test_an_engines_fault_is_not_the_agents_although_another_of_its_requests_succeeded() -> None:
    async def run(prompt: Messages, base_url: str, api_key: str, **_: Any) -> float:
        model = Model(base_url, api_key)
        beside = asyncio.create_task(model.answer([{"role": "user", "content": "beside"}]))
        await until(lambda: len(it.engine.running) == 1)
        failing[0] = True
        with pytest.raises(httpx.HTTPStatusError):
            await model.answer(prompt)
        it.engine.tick(20)
        await beside
        raise ValueError("no answer")

    failing = [False]
    async with harness(engine=FailingEngine(failing), failure_reward=0.0) as it:
        with pytest.raises(EngineError, match="out of memory"):
            await it.play(run)


class FailingEngine(ScriptedEngine):
    """Fails requests while it is told to."""

    def __init__(self, failing: list[bool]) -> None:
        super().__init__()
        self._failing = failing

    async def generate(self, input_batch: InferenceEngineInput) -> InferenceEngineOutput:
        if self._failing[0]:
            raise EngineError("out of memory")
        return await super().generate(input_batch)


# Programs beside the run --------------------------------------------------------------------------------------------

ADMIN = "the-administrators-key"


async def open_beside(base_url: str) -> httpx.Response:
    return await Model(base_url, ADMIN).http.post("/sessions", json={})


async def test_a_spent_staleness_budget_throttles_outside_sessions_but_not_the_run() -> None:
    answers: list[httpx.Response] = []
    may_begin = [True]

    async def run(prompt: Messages, base_url: str, api_key: str, **_: Any) -> float:
        answers.append(await open_beside(base_url))
        may_begin[0] = not may_begin[0]
        await Model(base_url, answers[0].json()["api_key"]).answer(prompt)  # open sessions continue
        return await one_turn(prompt, base_url, api_key)

    async with harness(endpoint={"admin_key": ADMIN}, session_limits={"retry_after_s": 7}, max_concurrency=1) as it:
        it.generator.pace(lambda: may_begin[0])
        assert len(await it.samples(run, samples=3)) == 3
    assert [answer.status_code for answer in answers] == [201, 429, 201]
    assert answers[1].headers["retry-after"] == "7"


async def test_outside_sessions_do_not_count_against_the_run() -> None:
    async def run(prompt: Messages, base_url: str, api_key: str, **_: Any) -> float:
        statuses.append((await open_beside(base_url)).status_code)
        return await one_turn(prompt, base_url, api_key)

    statuses: list[int] = []
    async with harness(endpoint={"admin_key": ADMIN}, session_limits={"max_sessions": 1}, max_concurrency=2) as it:
        assert len(await it.samples(run, samples=4)) == 4
    assert sorted(statuses) == [201, 429, 429, 429]


async def test_a_session_without_room_rejects_the_request_and_is_trained_on() -> None:
    async def run(prompt: Messages, base_url: str, api_key: str, **_: Any) -> float:
        model = Model(base_url, api_key)
        await model.answer(prompt)
        refused = await model.http.post("/chat/completions", json={"model": "policy", "messages": prompt})
        assert refused.status_code == 400 and "max_exported_tokens" in refused.text, refused.text
        return 1.0

    async with harness(session_limits={"max_exported_tokens": 9}) as it:
        [sample] = await it.samples(run)
        assert len(sample.sequences) == 1


async def test_a_program_gets_no_key_of_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOUSE", ADMIN)
    monkeypatch.setenv("SERVERS", "secret")
    source = "import os; print(*[name for name in ('HOUSE', 'SERVERS', 'PATH') if name in os.environ])"
    config = GeneratorConfig()
    config.inference_engine.remote_api_key_variable = "SERVERS"
    client = InferenceEngineClient([ScriptedEngine()], TOKENIZER)
    command = [sys.executable, "-c", source]
    generator = HarnessGenerator(client, config, command=command, endpoint={"admin_key": ADMIN})
    task = AgentTask([], {}, "http://127.0.0.1:9/v1", "sk-a-key", "s", None)
    assert "not JSON: 'PATH'" in (await generator._agent.run(task)).remark


# Many at once -------------------------------------------------------------------------------------------------------


async def test_no_more_runs_at_once_than_allowed_and_none_waits_longer_than_it_must() -> None:
    running, most = 0, 0

    async def run(prompt: Messages, base_url: str, api_key: str, **_: Any) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await Model(base_url, api_key).answer(prompt)
        running -= 1
        return 1.0

    async with harness(max_concurrency=3) as it:
        assert len(await it.samples(run, samples=10)) == 10
        assert most == 3


async def test_generate_needs_start_and_nothing_listens_after_aclose() -> None:
    seen: list[str] = []

    async def run(prompt: Messages, base_url: str, api_key: str, **_: Any) -> float:
        seen.append(base_url)
        return await one_turn(prompt, base_url, api_key)

    async with harness() as it:
        await it.play(run)
    with pytest.raises(httpx.ConnectError):
        await Model(seen[0], "sk-").post("/chat/completions")
    with pytest.raises(ConfigError, match="was not started"):
        await it.generator.generate(batch(1))


async def test_a_trainer_starts_its_generator_before_the_first_group_and_closes_it_after_the_last(
    tmp_path: Path,
) -> None:
    trainer = Harness(tmp_path / "run", "trainer.max_steps=2")
    log: list[str] = trainer.generator.calls
    trainer.generator.start = log_call(log, "start")  # type: ignore[method-assign]
    trainer.generator.aclose = log_call(log, "aclose")  # type: ignore[method-assign]
    await trainer.train()
    assert (log[0], log[-1]) == ("start", "aclose") and len(log) > 2


def log_call(log: list[str], name: str) -> Callable[[], Any]:
    async def call() -> None:
        log.append(name)

    return call


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"agent": None}, "needs one agent"),
        ({"command": ["true"]}, "needs one agent"),
        ({"agent": "nowhere:run"}, "generator.kwargs.agent='nowhere:run' cannot be imported"),
        ({"timeout_s": 0}, "timeout_s=0: must be more than 0"),
        ({"max_concurrency": 0}, "max_concurrency=0: must be more than 0"),
        ({"failure_reward": float("nan")}, "failure_reward=nan"),
        ({"environment": {"A": "b"}}, "needs generator.kwargs.command"),
        ({"endpoint": {"prot": 1}}, "generator.kwargs.endpoint.prot is unknown"),
        ({"endpoint": {"host": "0.0.0.0"}}, "needs an admin key"),
        ({"session_limits": {"max_turn": 1}}, "generator.kwargs.session_limits.max_turn is unknown"),
    ],
)
def test_impossible_settings_are_rejected_before_anything_starts(kwargs: dict[str, Any], message: str) -> None:
    client = InferenceEngineClient([ScriptedEngine()], TOKENIZER)
    with pytest.raises(ConfigError, match=message):
        HarnessGenerator(client, GeneratorConfig(), **{"agent": CURRENT, **kwargs})


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop turn until ``condition`` holds; the test's own timeout ends it where it never does."""
    while not condition():
        await settle(1)

"""Replay through every way in: environments, chat in this process, and agents over HTTP."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness_worlds import HarnessWorld, batch, harness
from replay_worlds import CountingEngine, World, checkpoint, tokens_in, world

from skyrl_train.config.schema import EnvironmentConfig, GeneratorConfig, SamplingConfig
from skyrl_train.environments.base import Environment, EnvironmentStep
from skyrl_train.errors import NoEngineError
from skyrl_train.generators.gym import GymGenerator
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.types import GeneratorInput, GeneratorOutput

GROUP, SESSIONS = 4, ["p_0", "p_1"]
Messages = list[dict[str, Any]]


class Talk(Environment):
    """Answers with what it was told, backwards; ``mood`` is what drifts between runs."""

    is_blocking = False
    mood = ""

    def step(self, action: str) -> EnvironmentStep:
        self.turns = getattr(self, "turns", 0) + 1
        said = f"{action[::-1]}{self.mood if self.turns == 2 else ''}"
        return {
            "observations": [{"role": "user", "content": said}],
            "reward": float(len(action)),
            "done": self.turns == 4,
            "metadata": {},
        }


def gym(client: InferenceEngineClient) -> GymGenerator:
    config = GeneratorConfig(max_turns=8, sampling_params=SamplingConfig(max_tokens=12))
    return GymGenerator(client, client.tokenizer, config, EnvironmentConfig(env_class=f"{__name__}:Talk"), "")


def rollouts() -> GeneratorInput:
    request = batch(samples=2)
    request["env_classes"] = [f"{__name__}:Talk"] * 2
    return request


async def play(it: World) -> GeneratorOutput:
    it.client.replay_cache.begin(GROUP, SESSIONS)
    return await gym(it.client).generate(rollouts())


async def killed(it: World, sampled: int) -> list[dict[str, Any]]:
    """The record of a rollout that dies when so many tokens are sampled."""
    running = asyncio.create_task(play(it))
    await it.tick_until(lambda: it.engine.sampled >= sampled)
    record = checkpoint(it)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return record


@pytest.mark.parametrize("sampled", [3, 25, 51, 60])
async def test_an_environment_runs_again_and_only_missing_tokens_are_sampled(sampled: int) -> None:
    async with world() as it:
        expected, tokens = await play(it), it.engine.sampled
    async with world(free_running=False) as it:
        record = await killed(it, sampled)
    assert tokens > sampled + 2, "the rollout was not over"
    async with world(record) as it:
        assert await play(it) == expected
        assert it.engine.sampled == tokens - tokens_in(record) < tokens
        assert it.client.replay_cache.totals.mismatches == 0
        assert all(len(prompt) > len("go") for prompt in it.engine.prompts), "the first turns were served"


async def test_an_environment_that_drifts_is_sampled_afresh_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(free_running=False) as it:
        record = await killed(it, 60)
    monkeypatch.setattr(Talk, "mood", "!")
    async with world() as it:
        expected = await play(it)
    async with world(record) as it:
        assert await play(it) == expected
        totals = it.client.replay_cache.totals
        assert totals.mismatches == 2, "one per trajectory"
        assert 0 < totals.replayed_tokens < tokens_in(record)
        assert totals.replayed_tokens + totals.discarded_tokens == tokens_in(record)


async def test_chat_in_this_process_is_replayed_under_the_session_that_its_body_names() -> None:
    async def converse(client: InferenceEngineClient) -> list[Any]:
        client.replay_cache.begin(GROUP, SESSIONS)
        messages: Messages = [{"role": "user", "content": "go"}]
        got = []
        for _ in range(3):
            body = {"model": "policy", "messages": messages, "n": 2, "max_tokens": 9, "seed": 3, "session_id": "p_0"}
            answer = await client.chat_completion({"json": {**body, "return_token_ids": True, "logprobs": True}})
            got.append([{**choice, "skyrl": None} for choice in answer["choices"]])
            messages = [*messages, answer["choices"][1]["message"], {"role": "user", "content": "more"}]
        return got

    async with world() as it:
        expected, tokens = await converse(it.client), it.engine.sampled
    async with world(free_running=False) as it:
        running = asyncio.create_task(converse(it.client))
        await it.tick_until(lambda: it.engine.sampled >= tokens - 5)
        record = checkpoint(it)
        running.cancel()
    async with world(record) as it:
        assert await converse(it.client) == expected
        assert 0 < it.engine.sampled == tokens - tokens_in(record) < tokens


# Agents over HTTP ---------------------------------------------------------------------------------------------------


@dataclass
class Process:
    """One process of a harness run."""

    it: HarnessWorld
    world: World

    async def play(self, agent: Callable[..., Any]) -> GeneratorOutput:
        self.it.client.replay_cache.begin(GROUP, SESSIONS)
        return await self.it.play(agent, samples=2)

    async def killed(self, agent: Callable[..., Any], sampled: int) -> list[dict[str, Any]]:
        running = asyncio.create_task(self.play(agent))
        await self.world.tick_until(lambda: self.world.engine.sampled >= sampled)
        record = checkpoint(self.world)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return record


@asynccontextmanager
async def process(
    record: list[dict[str, Any]] | None = None, *, free_running: bool = True, **kwargs: Any
) -> AsyncIterator[Process]:
    engine = CountingEngine(free_running=free_running)
    async with harness(engine=engine, **kwargs) as it:
        it.client.replay_cache.load(record or [])
        yield Process(it, World(engine, it.client))


def trained(output: GeneratorOutput) -> dict[str, Any]:
    timed = {"generate/agent_seconds"}
    metrics = {k: v for k, v in (output["rollout_metrics"] or {}).items() if k not in timed}
    return {**output, "rollout_metrics": metrics}


@dataclass
class Conversation:
    """An agent with two sub-agents at once, streams among their requests, and a session of its own in every run."""

    session_ids: list[str] = field(default_factory=list)

    async def __call__(self, prompt: Messages, base_url: str, api_key: str, session_id: str, **_: Any) -> float:
        self.session_ids.append(session_id)
        headers = {"authorization": f"Bearer {api_key}"}
        async with httpx.AsyncClient(base_url=base_url, headers=headers, trust_env=False, timeout=300) as http:
            told = await asyncio.gather(self._talk(http, prompt, "a", False), self._talk(http, prompt, "b", True))
            await self._answer(http, [*prompt, {"role": "user", "content": "".join(told)}], False)
        return 1.0

    async def _talk(self, http: httpx.AsyncClient, prompt: Messages, name: str, streamed: bool) -> str:
        messages = [{**prompt[0], "content": f"{prompt[0]['content']}{name}"}]
        for _ in range(3):
            said = await self._answer(http, messages, streamed)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
        return said

    async def _answer(self, http: httpx.AsyncClient, messages: Messages, streamed: bool) -> str:
        body = {"model": "policy", "messages": messages, "stream": streamed}
        if not streamed:
            response = await http.post("/chat/completions", json=body)
            return str(response.raise_for_status().json()["choices"][0]["message"]["content"])
        text = ""
        async with http.stream("POST", "/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                data: Mapping[str, Any] = httpx.Response(200, content=line[6:]).json() if line[6:7] == "{" else {}
                text += "".join(choice["delta"].get("content") or "" for choice in data.get("choices", ()))
        return text


@pytest.mark.parametrize("share", [pytest.param(0.3, marks=pytest.mark.slow), 0.8])
async def test_an_agent_over_http_with_parallel_requests_and_streams_is_replayed(share: float) -> None:
    async with process() as first:
        expected, tokens = trained(await first.play(Conversation())), first.world.engine.sampled
    async with process(free_running=False) as second:
        record = await second.killed(Conversation(), int(share * tokens))
    async with process(record) as third:
        agent = Conversation()
        assert by_tokens(trained(await third.play(agent))) == by_tokens(expected)
        assert third.world.engine.sampled == tokens - tokens_in(record) < tokens
        assert third.it.client.replay_cache.totals.mismatches == 0
        assert not {row["session"] for row in record} & set(agent.session_ids)


@dataclass
class Resigned:
    """An agent of two turns that makes do without an answer. ``between`` is called after its first turn."""

    between: Callable[[], None] = lambda: None

    async def __call__(self, prompt: Messages, base_url: str, api_key: str, **_: Any) -> float:
        messages, headers = [*prompt], {"authorization": f"Bearer {api_key}"}
        async with httpx.AsyncClient(base_url=base_url, headers=headers, trust_env=False, timeout=300) as http:
            for _turn in range(2):
                answer = await http.post("/chat/completions", json={"model": "policy", "messages": messages})
                if answer.is_error:
                    return 0.0
                messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "more"}]
                self.between()
        return 1.0


async def test_an_agent_that_lost_its_engine_between_two_turns_is_run_again_even_if_it_made_do_without() -> None:
    async with process() as first:
        expected, tokens = trained(await first.play(Resigned())), first.world.engine.sampled
    async with process() as second:
        with pytest.raises(NoEngineError):
            await second.play(Resigned(between=second.world.engine.die))
        record = checkpoint(second.world)
    assert 0 < tokens_in(record) < tokens
    async with process(record) as third:
        assert trained(await third.play(Resigned())) == expected
        assert third.world.engine.sampled == tokens - tokens_in(record)


def by_tokens(output: dict[str, Any]) -> Any:
    """Without the order of a session's sequences: that of its branches is the order in which they were answered."""
    columns = ("prompt_token_ids", "response_ids", "rollout_logprobs", "rollout_versions", "loss_masks")
    rows = zip(*(output[column] for column in columns), output["trajectory_ids"], strict=True)
    return sorted(str(row) for row in rows), output["rollout_metrics"]


PROGRAM = """
import json, os, sys, urllib.request

def answer(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return json.load(opener.open(request))["choices"][0]["message"]

with open(sys.argv[1], "a") as log:
    messages = json.load(sys.stdin)["prompt"]
    for turn in range(4):
        messages += [answer(messages), {"role": "user", "content": "more"}]
        print(os.getpid(), turn, file=log, flush=True)
print(0.5)
"""


async def test_a_program_that_was_killed_is_run_again_and_finds_its_answers(tmp_path: Path) -> None:
    program, log = tmp_path / "agent.py", tmp_path / "log"
    program.write_text(PROGRAM)
    command: dict[str, Any] = {"agent": None, "command": [sys.executable, "-S", str(program), str(log)]}

    async def nothing(**_: Any) -> None:
        raise AssertionError("the command is the agent")

    async with process(**command) as first:
        expected, tokens = trained(await first.play(nothing)), first.world.engine.sampled
    assert len(log.read_text().splitlines()) == 8
    log.unlink()
    async with process(free_running=False, **command) as second:
        record = await second.killed(nothing, tokens * 2 // 3)
    finished_turns = len(log.read_text().splitlines())
    assert 0 < finished_turns < 8, "both programs were killed on their way"
    async with process(record, **command) as third:
        assert trained(await third.play(nothing)) == expected
        assert third.world.engine.sampled == tokens - tokens_in(record) < tokens
    assert len(log.read_text().splitlines()) == finished_turns + 8, "they were run again, from their beginnings"

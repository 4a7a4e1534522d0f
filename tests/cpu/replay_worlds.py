"""What the tests of replay share: an engine that counts what it samples, and programs that ask a client for turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from scripted import ScriptedEngine, scripted_update

from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.interface import EngineCapabilities, SamplingParams
from skyrl_train.inference.requests import Generation, GenerationRequest
from skyrl_train.models.tiny import character_tokenizer
from skyrl_train.rollout.buffer import from_line, to_line
from skyrl_train.runtime.concurrency import Signal
from skyrl_train.runtime.seeds import derive_seed
from skyrl_train.types import PauseMode

TOKENIZER = character_tokenizer("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJK=")
PARAMS = SamplingParams(max_tokens=24, min_tokens=3, seed=11)
SESSION = "prompt@4_0"


class CountingEngine(ScriptedEngine):
    """Hands tokens over as they are sampled, and counts them."""

    sampled = 0

    @property
    def capabilities(self) -> EngineCapabilities:
        return replace(super().capabilities, chunked_streaming=True)

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.sampled += sum(request.stop_reason is None for request in self.running)
            super().tick()

    @property
    def prompts(self) -> list[list[int]]:
        return [list((request["prompt_token_ids"] or [])[0]) for request in self.requests]


@dataclass
class World:
    engine: CountingEngine
    client: InferenceEngineClient
    recorded_tokens: int = 0  # that the record had when it was loaded

    async def tick_until(self, happened: Callable[[], bool]) -> None:
        """Samples token by token until then."""
        while not happened():
            self.engine.tick()
            for _ in range(20):
                await asyncio.sleep(0)

    async def publish(self, version: int) -> None:
        await self.client.load_weights(scripted_update(version), PauseMode.KEEP)


@asynccontextmanager
async def world(
    record: Sequence[dict[str, Any]] = (), version: int = 0, *, free_running: bool = True, **client: Any
) -> AsyncIterator[World]:
    """A process of its own: engine, client, and the record that a checkpoint has brought."""
    engine = CountingEngine(free_running=free_running)
    it = World(engine, InferenceEngineClient([engine], TOKENIZER, engine_wait_timeout_s=0.01, **client))
    await it.client.start()
    await it.publish(version)
    it.client.replay_cache.load(record)
    it.recorded_tokens = tokens_in(record)
    try:
        yield it
    finally:
        await it.client.teardown()


def checkpoint(it: World) -> list[dict[str, Any]]:
    """The record as it comes back from a disk."""
    return [from_line(to_line(session.to_json())) for session in it.client.replay_cache.snapshot()]


def tokens_in(record: Sequence[dict[str, Any]]) -> int:
    return sum(count for row in record for request in row["requests"] for _, count in request["versions"])


@dataclass
class Program:
    """Branches that ask at the same time, ``turns`` times each; what was answered is part of the next prompt."""

    branches: int = 1
    turns: int = 3
    choices: int = 1
    streamed: bool = False
    params: SamplingParams = PARAMS
    session_id: str = SESSION
    observe: Callable[[int, int], list[int]] = lambda branch, turn: [7, turn]
    before_turn: Callable[[int, int], Awaitable[Any]] | None = None
    got: dict[tuple[int, int, int], Generation] = field(default_factory=dict)
    answered: Signal = field(default_factory=Signal)

    async def run(self, client: InferenceEngineClient) -> dict[tuple[int, int, int], Generation]:
        async with asyncio.TaskGroup() as group:
            for branch in range(self.branches):
                group.create_task(self._branch(client, branch))
        return self.got

    async def _branch(self, client: InferenceEngineClient, branch: int) -> None:
        prompt = [5, 6, branch + 10]
        for turn in range(self.turns):
            if self.before_turn is not None:
                await self.before_turn(branch, turn)
            seed = None if self.params.seed is None else derive_seed(self.params.seed, branch, turn)
            params = replace(self.params, seed=seed)
            answers = await asyncio.gather(
                *(
                    self._ask(client, GenerationRequest(prompt, params, self.session_id, choice))
                    for choice in range(self.choices)
                )
            )
            self.got |= {(branch, turn, choice): answer for choice, answer in enumerate(answers)}
            self.answered.notify()
            prompt = [*prompt, *answers[0].token_ids, *self.observe(branch, turn)]

    async def _ask(self, client: InferenceEngineClient, request: GenerationRequest) -> Generation:
        if not self.streamed:
            return await client.complete(request)
        pieces = [piece async for piece in client.stream(request)]
        last = pieces[-1].generation
        assert last is not None and "".join(piece.text for piece in pieces) == last.text
        assert [token for piece in pieces for token in piece.token_ids] == last.token_ids
        assert [version for piece in pieces for version in piece.versions] == last.versions
        return last


def content(got: dict[tuple[int, int, int], Generation]) -> dict[tuple[int, int, int], tuple[Any, ...]]:
    """What a trainer sees of the responses."""
    return {
        key: (g.prompt_token_ids, g.token_ids, g.logprobs, g.versions, g.stop_reason, g.text, g.stop_string)
        for key, g in got.items()
    }


async def interrupted(it: World, program: Program, ticks: int) -> list[dict[str, Any]]:
    """The record of ``program`` after so many tokens of time; then the process is killed."""
    it.client.replay_cache.begin(4, [program.session_id])
    running = asyncio.create_task(program.run(it.client))
    left = ticks

    def over() -> bool:
        nonlocal left
        left -= 1
        return left < 0 or running.done()

    await it.tick_until(over)
    record = checkpoint(it)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return record

"""Continuation with a real engine in a thread: any schedule of interruptions gives the uninterrupted response."""

from __future__ import annotations

import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from embedded_models import TOLERANCE

from skyrl_train.config.schema import BuildModelConfig
from skyrl_train.errors import GrammarError
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.engines.embedded import EmbeddedEngine
from skyrl_train.inference.interface import SamplingParams, StructuredOutput
from skyrl_train.inference.requests import Generation, GenerationRequest
from skyrl_train.models.folder import load_model, load_tokenizer
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_train.weight_sync.syncer import WeightSyncer, weights_of


class World:
    """A client with two engines, whose weights are published again and again and never change."""

    def __init__(self, folder: str) -> None:
        self.model = load_model(folder, "float32", "cpu")
        self.engines = [EmbeddedEngine(folder, executor="thread", max_num_seqs=4, seed=index) for index in range(2)]
        self.client = InferenceEngineClient(self.engines, load_tokenizer(folder), folder)
        self.transport = SharedMemoryTransport()
        self.version = -1

    async def publish(self, mode: PauseMode) -> None:
        self.version += 1
        syncer = WeightSyncer(self.client, self.transport, weights_of(self.model.named_parameters), mode)
        await syncer.sync(self.version)

    async def play(self, params: SamplingParams, events: list[Any], session: str) -> Generation:
        """Streams a response; after each piece the next event happens, if there is one."""
        waiting = list(events)
        async for chunk in self.client.stream(GenerationRequest([3, 4, 5], params, session)):
            if chunk.generation is not None:
                return chunk.generation
            if waiting and (event := waiting.pop(0)) is not None:
                await self.publish(event)
        raise AssertionError("a stream ends with its generation")


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    build_model_folder(BuildModelConfig(), tmp_path / "model", seed=0)
    world = World(str(tmp_path / "model"))
    await world.client.start()
    await world.publish(PauseMode.KEEP)
    yield world
    await world.client.teardown()
    world.transport.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("schedule", [0, *(pytest.param(schedule, marks=pytest.mark.slow) for schedule in (1, 2))])
async def test_any_schedule_of_updates_gives_the_uninterrupted_response(
    world: World, schedule: int, temperature: float
) -> None:
    draw = random.Random(schedule)
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=schedule, ignore_eos=True)
    expected = await world.play(params, [], "a")
    modes = [PauseMode.ABORT, PauseMode.ABORT, PauseMode.KEEP, PauseMode.RECOMPUTE, None, None]
    got = await world.play(params, [draw.choice(modes) for _ in range(20)], "a")
    assert got.token_ids == expected.token_ids
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=TOLERANCE)
    assert got.versions == sorted(got.versions) and got.versions[-1] > got.versions[0]


@pytest.mark.parametrize(
    ("temperature", "structured"),
    [(0.0, None), (1.0, None), (1.0, StructuredOutput("regex", "[0-9]{2}([1-4]|78){60}"))],  # no end is allowed before
)
async def test_the_death_of_its_engine_does_not_change_a_response(
    world: World, temperature: float, structured: StructuredOutput | None
) -> None:
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=5, ignore_eos=True, structured=structured)
    expected = await world.play(params, [], "b")
    pieces = 0
    async for chunk in world.client.stream(GenerationRequest([3, 4, 5], params, "c")):
        pieces += 1
        if pieces == 3:
            serving = [engine for engine in world.engines if (await engine.health()).running]
            await serving[0].teardown()
        if chunk.generation is not None:
            assert chunk.generation.segments == 2
            assert chunk.generation.token_ids == expected.token_ids
            np.testing.assert_allclose(chunk.generation.logprobs, expected.logprobs, atol=TOLERANCE)


async def test_a_chat_follows_its_format(world: World) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "12"}], "max_tokens": 30, "seed": 3}
    asked = {**body, "structured_outputs": {"regex": "7{3}[12]+8"}, "return_token_ids": True}
    (choice,) = (await world.client.chat_completion({"json": asked}))["choices"]
    assert re.fullmatch("7{3}[12]+8", choice["message"]["content"]) and choice["finish_reason"] == "stop"
    assert choice["skyrl"]["logprobs"][:3] == [0.0] * 3, "nothing else was allowed"
    completion = {"model": "m", "prompt": "12", "max_tokens": 30, "structured_outputs": {"regex": "[56]{4}"}}
    (choice,) = (await world.client.completion({"json": completion}))["choices"]
    assert re.fullmatch("[56]{4}", choice["text"])
    for further, message in (
        ({"response_format": {"type": "json_object"}}, "vocabulary cannot spell"),
        ({"structured_outputs": {"json": {"not": {}}}}, "Unimplemented keys"),
        ({"structured_outputs": {"regex": "(1"}}, "unclosed group"),
    ):
        with pytest.raises(GrammarError, match=message):
            await world.client.chat_completion({"json": {**body, **further}})

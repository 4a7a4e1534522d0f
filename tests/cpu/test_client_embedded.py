"""Continuation with a real engine in a thread: any schedule of interruptions gives the uninterrupted response."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import re
import threading
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
from skyrl_train.inference.continuation import Continuation
from skyrl_train.inference.engines.embedded import EmbeddedEngine
from skyrl_train.inference.engines.embedded import core as engine_core
from skyrl_train.inference.engines.embedded.core import EmbeddedEngineCore
from skyrl_train.inference.grammar import Grammars
from skyrl_train.inference.interface import LogitAdjustment, SamplingParams, StructuredOutput, TokenChunk
from skyrl_train.inference.requests import Generation, GenerationRequest
from skyrl_train.models.folder import load_model, load_tokenizer
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_train.weight_sync.syncer import WeightSyncer, weights_of
from skyrl_train.workers.messages import Message


class World:
    """A client with two engines, whose weights are published again and again and never change."""

    def __init__(self, folder: str) -> None:
        self.model = load_model(folder, "float32", "cpu")
        self.engines = [EmbeddedEngine(folder, executor="thread", max_num_seqs=4, seed=index) for index in range(2)]
        self.client = InferenceEngineClient(self.engines, load_tokenizer(folder), folder)
        self.transport = SharedMemoryTransport()
        self.version = -1
        self.freezes = False

    def freeze_after(self, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Freeze the engine that makes the next step after ``steps`` of them, until the next update resumes it.

        Engines run ahead of a stalled event loop, which would see only the end of a response.
        """
        step, cores = EmbeddedEngineCore.step, list[EmbeddedEngineCore]()

        def counted(core: EmbeddedEngineCore) -> list[Message]:
            answers = step(core)
            cores.append(core)
            if self.freezes and core is cores[0] and len(cores) == steps:
                core.pause(PauseMode.KEEP)
            return answers

        self.freezes = True
        monkeypatch.setattr(EmbeddedEngineCore, "step", counted)

    async def publish(self, mode: PauseMode) -> None:
        self.freezes = False
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


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
@pytest.mark.parametrize("schedule", [0, *(pytest.param(schedule, marks=pytest.mark.slow) for schedule in (1, 2))])
async def test_any_schedule_of_updates_gives_the_uninterrupted_response(
    world: World, schedule: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(schedule)
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=schedule, ignore_eos=True)
    expected = await world.play(params, [], "a")
    modes = [PauseMode.ABORT, PauseMode.ABORT, PauseMode.KEEP, PauseMode.RECOMPUTE, None, None]
    world.freeze_after(10, monkeypatch)
    got = await world.play(params, [draw.choice(modes[:4]), *(draw.choice(modes) for _ in range(19))], "a")
    assert got.token_ids == expected.token_ids
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=TOLERANCE)
    assert got.versions == sorted(got.versions) and got.versions[-1] > got.versions[0]


@pytest.mark.parametrize("interrupted", [False, True])
async def test_a_response_with_stop_strings_comes_in_large_pieces_and_ends_in_the_engine(
    world: World, interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=120, temperature=1.0, seed=6, ignore_eos=True)
    plain = await world.client.complete(GenerationRequest([3, 4, 5], params))
    text = plain.text
    place = next(n for n in range(40, len(text) - 1) if text.find(text[n : n + 2]) == n)
    pieces, add = list[int](), Continuation.add

    def counted(response: Continuation, chunk: TokenChunk, segment: int) -> None:
        pieces.append(len(chunk.token_ids))
        add(response, chunk, segment)

    monkeypatch.setattr(Continuation, "add", counted)
    if interrupted:
        world.freeze_after(20, monkeypatch)
    request = GenerationRequest([3, 4, 5], dataclasses.replace(params, stop=(text[place : place + 2],)))
    call = asyncio.create_task(world.client.complete(request))
    if interrupted:
        while sum([(await engine.health()).paused for engine in world.engines]) == 0:
            pass  # each look is a round trip
        await world.publish(PauseMode.ABORT)
    got = await call
    assert (got.text, got.stop_string, got.segments) == (text[:place], text[place : place + 2], 1 + interrupted)
    assert got.token_ids == plain.token_ids[: len(got.token_ids)]
    assert sum(pieces) == len(got.token_ids), "the engine sampled nothing behind it"
    assert len(pieces) <= 2 + interrupted


@pytest.mark.parametrize(
    ("temperature", "structured", "adjustment"),
    [
        pytest.param(0.0, None, None, marks=pytest.mark.slow),
        pytest.param(1.0, None, None, marks=pytest.mark.slow),
        (1.0, StructuredOutput("regex", "[0-9]{2}([1-4]|78){60}"), None),  # no end is allowed before
        (1.0, None, LogitAdjustment(0.5, 0.4, 1.3, ((5, 1.0),))),
    ],
)
async def test_the_death_of_its_engine_does_not_change_a_response(
    world: World,
    temperature: float,
    structured: StructuredOutput | None,
    adjustment: LogitAdjustment | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = SamplingParams(
        max_tokens=60,
        temperature=temperature,
        seed=5,
        ignore_eos=True,
        structured=structured,
        adjustment=adjustment,
    )
    expected = await world.play(params, [], "b")
    world.freeze_after(10, monkeypatch)
    got, serving = None, list[EmbeddedEngine]()
    async for chunk in world.client.stream(GenerationRequest([3, 4, 5], params, "c")):
        if not serving:
            serving = [engine for engine in world.engines if (await engine.health()).running]
            await serving[0].teardown()
        got = chunk.generation
    assert got is not None and got.segments == 2
    assert got.token_ids == expected.token_ids
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=TOLERANCE)


async def test_engines_serve_while_they_load_what_a_grammar_needs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, release = threading.Event(), threading.Event()

    def slow(*args: Any) -> Grammars:
        began.set()
        release.wait()
        return Grammars(*args)

    monkeypatch.setattr(engine_core, "Grammars", slow)
    asked = SamplingParams(max_tokens=9, structured=StructuredOutput("regex", "[12]{3}"))
    guided = asyncio.create_task(world.client.complete(GenerationRequest([3, 4, 5], asked, "g")))
    try:
        await asyncio.to_thread(began.wait)
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        # As many as both engines share, so that one of them is on the engine that loads.
        requests = [GenerationRequest([3, 4, 5], params, f"f{number}") for number in range(4)]
        free = await asyncio.gather(*map(world.client.complete, requests))
        await world.publish(PauseMode.ABORT)
        assert [len(each.token_ids) for each in free] == [5] * 4 and not guided.done()
    finally:
        release.set()
    got = await guided
    assert re.fullmatch("[12]{3}", got.text) and set(got.versions) == {world.version}


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

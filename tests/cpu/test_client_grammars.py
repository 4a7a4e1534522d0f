"""Responses under grammars over a fleet that is updated, dies and returns at random: none differs from the uninterrupted one.

The scripted engines follow the grammars of real requests, and know of a response only what each request tells them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random

import pytest
from embedded_models import EOS
from scripted import ScriptedEngine, _Running, in_virtual_time, settle
from test_client import publish
from test_fleet import Clock
from test_grammar import KINDS, allowed, grammars, tiny_tokenizer

from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.grammar import GrammarMatcher, Grammars
from skyrl_train.inference.interface import EngineCapabilities, SamplingParams
from skyrl_train.inference.pool.fleet import FleetLimits
from skyrl_train.inference.requests import Generation, GenerationRequest
from skyrl_train.runtime.seeds import derive_seed
from skyrl_train.types import PauseMode


class GuidedEngine(ScriptedEngine):
    """Samples one of the tokens that the grammar allows, decided by the sequence so far and the seed of the position."""

    def __init__(self, of_model: Grammars) -> None:
        super().__init__(structured_output=True, eos=EOS)
        self._grammars = of_model
        self._matchers: dict[_Running, GrammarMatcher] = {}

    @property
    def capabilities(self) -> EngineCapabilities:
        return dataclasses.replace(super().capabilities, grammar_continuation=True)

    def _sample(self, request: _Running) -> None:
        if request.stop_reason is not None:
            return
        structured = request.params.structured
        assert structured is not None
        matcher = self._matchers.get(request)
        if matcher is None:
            assert not request.sampled
            continued = request.tokens[len(request.tokens) - structured.continued_tokens :]
            matcher = self._matchers[request] = self._grammars.matcher(structured, continued)
        tokens = sorted(allowed(matcher))
        self._next_token = lambda said, seed: tokens[derive_seed(len(said), said[-1], seed) % len(tokens)]
        super()._sample(request)
        if request.stop_reason is None:
            matcher.consume(request.sampled[-1:])
            matcher.compute_mask()


def asked_for(draw: random.Random) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            [draw.randrange(3, 20) for _ in range(draw.choice([1, 4, 12]))],
            SamplingParams(max_tokens=draw.randrange(1, 45), seed=draw.randrange(1 << 40), structured=structured),
        )
        for structured in KINDS
    ]


async def sample_all(requests: list[GenerationRequest], draw: random.Random | None) -> tuple[list[Generation], int]:
    """The responses, and how many events interrupted them. ``draw`` decides about the events; None: there are none."""
    clock = Clock()
    engines = [GuidedEngine(grammars()) for _ in range(1 if draw is None else 3)]
    client = InferenceEngineClient(
        engines,
        tiny_tokenizer(),
        limits=FleetLimits(max_failed_probes=2, max_restarts=1000, backoff_s=1.0),
        probe_interval_s=10.0,
        clock=clock,
        engine_wait_timeout_s=60.0,
    )
    version = events = 0
    await publish(client, version)
    calls = asyncio.gather(*map(client.complete, requests))
    while not calls.done():
        await settle()
        if draw is None:
            engines[0].tick()
            continue
        engine, event = draw.choice(engines), draw.choice(["tick"] * 5 + ["update", "death"])
        if event == "tick":
            engine.tick(draw.randrange(1, 6))
        elif event == "update":
            version += 1
            await publish(client, version, draw.choice(list(PauseMode)))
        else:
            engine.die()
        events += event != "tick"
        clock.now += 10.0
        client.supervisor.step()  # dead engines start again
        while running := client.supervisor._working:
            await asyncio.gather(*running.values(), return_exceptions=True)
    return await calls, events


@pytest.mark.parametrize("schedule", [*range(10), *(pytest.param(n, marks=pytest.mark.slow) for n in range(10, 300))])
@in_virtual_time
async def test_any_schedule_of_updates_and_deaths_gives_the_uninterrupted_responses(schedule: int) -> None:
    draw = random.Random(schedule)
    requests = asked_for(draw)
    expected, _ = await sample_all(requests, None)
    # A schedule without an event, or whose events meet no response, shows nothing: then another is drawn.
    segments = 0
    while not segments > len(requests):
        got, events = await sample_all(requests, draw)
        segments = sum(each.segments for each in got) if events else 0
    for one, other in zip(got, expected, strict=True):
        assert (one.token_ids, one.logprobs, one.stop_reason) == (other.token_ids, other.logprobs, other.stop_reason)
        assert one.restarts == 0

"""Sampling of agents' requests: the run's settings apply, overrides are counted, and seeds repeat."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.errors import NoEngineError
from skyrl_train.generators.harness.sampling import RunSampling, SessionSampling, run_params
from skyrl_train.inference.interface import (
    EngineCapabilities,
    LogitAdjustment,
    SamplingParams,
    StopReason,
    StructuredOutput,
)
from skyrl_train.inference.requests import Generation, GenerationChunk, GenerationRequest

RUN = SamplingParams(max_tokens=32, temperature=0.7, top_p=0.9, top_k=40, min_p=0.1, stop=("\n",), stop_token_ids=(3,))

params = st.builds(
    SamplingParams,
    max_tokens=st.integers(5, 100),
    min_tokens=st.integers(0, 5),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_p=st.sampled_from([0.5, 1.0]),
    top_k=st.sampled_from([-1, 5]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.none() | st.integers(0, 9),
    stop=st.sampled_from([(), ("x",)]),
    stop_token_ids=st.sampled_from([(), (3, 4)]),
    ignore_eos=st.booleans(),
)
FILTERS = ("temperature", "top_p", "top_k", "min_p")
SILENT = SamplingParams()


class Engines:
    """Responds at once and keeps the requests."""

    capabilities = EngineCapabilities(frozenset(), frozenset(), 64)
    policy_version = 3

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []
        self.error: Exception | None = None

    async def complete(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        return Generation(list(request.prompt_token_ids), [1], [-0.5], [3], StopReason.STOP, "a")

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        yield GenerationChunk(generation=await self.complete(request))


def ask(
    prompt: list[int], asked: SamplingParams = SILENT, *, session: str | None = "s", choice: int = 0
) -> GenerationRequest:
    return GenerationRequest(prompt, asked, session_id=session, choice=choice)


@given(params, params)
def test_by_default_the_run_decides_the_distribution(asked: SamplingParams, run: SamplingParams) -> None:
    sampled, differs = run_params(asked, run, agents_choose=False)
    for name in FILTERS:
        assert getattr(sampled, name) == getattr(run, name)
    wanted_else = any(getattr(asked, name) not in (getattr(SILENT, name), getattr(run, name)) for name in FILTERS)
    assert differs == (wanted_else or asked.seed is not None)


@given(params, params)
def test_agents_may_be_allowed_to_choose_and_the_run_fills_in_the_rest(
    asked: SamplingParams, run: SamplingParams
) -> None:
    sampled, differs = run_params(asked, run, agents_choose=True)
    for name in FILTERS:
        silent = getattr(asked, name) == getattr(SILENT, name)
        assert getattr(sampled, name) == getattr(run if silent else asked, name)
    assert not differs


@given(params, params, st.booleans())
def test_limits_and_ends_come_from_both(asked: SamplingParams, run: SamplingParams, agents_choose: bool) -> None:
    sampled, _ = run_params(asked, run, agents_choose=agents_choose)
    assert sampled.max_tokens == min(asked.max_tokens, run.max_tokens)
    assert sampled.min_tokens == min(asked.min_tokens or run.min_tokens, sampled.max_tokens)
    assert sampled.stop == (asked.stop or run.stop)
    assert set(sampled.stop_token_ids) == {*asked.stop_token_ids, *run.stop_token_ids}
    assert sampled.ignore_eos == (asked.ignore_eos or run.ignore_eos)


async def seeds(order: list[GenerationRequest], seed: int | None = 5) -> dict[tuple[object, ...], list[int | None]]:
    """By prompt and choice, the seeds that requests got, in whichever order they came."""
    engines = Engines()
    sampling = RunSampling(engines)
    sampling.sessions["s"] = SessionSampling(RUN, seed)
    for request in order:
        await sampling.complete(request)
    got: dict[tuple[object, ...], list[int | None]] = {}
    for request in engines.requests:
        got.setdefault((tuple(request.prompt_token_ids), request.choice), []).append(request.params.seed)
    return got


async def test_seeds_follow_from_trajectory_prompt_and_repetition_not_from_the_order() -> None:
    requests = [ask([1, 2]), ask([1, 2]), ask([1, 3]), ask([1, 3], choice=1)]
    first = await seeds(requests)
    assert first == await seeds(requests[::-1])
    assert first != await seeds(requests, seed=6)
    assert len(set(first[(1, 2), 0])) == 2, "the same prompt asked twice is sampled anew"
    assert first[(1, 3), 0] == first[(1, 3), 1], "the choices of one request differ by their number, in the client"


async def test_a_seed_that_an_agent_sets_would_make_all_samples_of_a_group_alike() -> None:
    fixed = replace(SILENT, seed=1)
    assert await seeds([ask([1], fixed)]) == await seeds([ask([1])])
    assert await seeds([ask([1], fixed)], seed=None) == {((1,), 0): [1]}


@pytest.mark.parametrize("agents_choose", [False, True])
async def test_a_request_that_names_an_adapter_is_sampled_as_it_asks(agents_choose: bool) -> None:
    engines = Engines()
    sampling = RunSampling(engines, agents_choose=agents_choose)
    session = sampling.sessions["s"] = SessionSampling(RUN, 5, "p@0_1")
    asked = SamplingParams(max_tokens=100, temperature=0.0, stop=("x",), seed=8)
    judged = replace(ask([1, 2], asked), adapter="judge")
    await sampling.complete(judged)
    await sampling.complete(replace(judged, params=replace(asked, seed=None)))
    first, second = engines.requests
    assert first == replace(judged, session_id="p@0_1")
    assert replace(second.params, seed=8) == asked and second.params.seed is not None
    assert session.overridden == 0
    engines.error = NoEngineError("gone")
    with pytest.raises(NoEngineError):
        await sampling.complete(judged)
    assert session.engine_error is engines.error, "the engines are at fault here too, not the agent"


async def test_requests_of_other_sessions_pass_as_they_are() -> None:
    engines = Engines()
    sampling = RunSampling(engines)
    usage = sampling.sessions["s"] = SessionSampling(RUN, 5)
    for request in (ask([1], session=None), ask([1], session="other")):
        await sampling.complete(request)
        assert engines.requests[-1] is request
    del sampling.sessions["s"]
    await sampling.complete(ask([1]))
    assert engines.requests[-1].params is SILENT and usage.overridden == 0


@pytest.mark.parametrize("streamed", [False, True])
async def test_overrides_are_counted_and_engine_failures_remembered_until_the_request_succeeds(streamed: bool) -> None:
    engines = Engines()
    sampling = RunSampling(engines)
    usage = sampling.sessions["s"] = SessionSampling(RUN, 5)

    async def request() -> None:
        hot = ask([1], replace(SILENT, temperature=1.5))
        if streamed:
            [chunk] = [chunk async for chunk in sampling.stream(hot)]
            assert chunk.generation is not None
        else:
            await sampling.complete(hot)

    await request()
    assert (usage.overridden, usage.engine_error, engines.requests[-1].params.temperature) == (1, None, 0.7)
    engines.error = NoEngineError("all gone")
    with pytest.raises(NoEngineError):
        await request()
    assert usage.engine_error is engines.error
    engines.error = None
    await sampling.complete(ask([2]))
    assert usage.engine_error is not None, "another request says nothing of this one"
    await request()
    assert (usage.overridden, usage.engine_error) == (3, None)


async def test_a_success_does_not_hide_the_fault_of_a_request_that_ran_beside_it() -> None:
    class Half(Engines):
        """Fails every second request; answers the others when told to."""

        def __init__(self) -> None:
            super().__init__()
            self.answer = asyncio.Event()

        async def complete(self, request: GenerationRequest) -> Generation:
            self.requests.append(request)
            if len(self.requests) == 2:
                raise NoEngineError("all gone")
            await self.answer.wait()
            return Generation(list(request.prompt_token_ids), [1], [-0.5], [3], StopReason.STOP, "a")

    for other in (ask([1]), ask([2])):
        engines = Half()
        sampling = RunSampling(engines)
        usage = sampling.sessions["s"] = SessionSampling(RUN, 5)
        slow = asyncio.create_task(sampling.complete(ask([1])))
        await asyncio.sleep(0)
        with pytest.raises(NoEngineError):
            await sampling.complete(other)
        engines.answer.set()
        await slow
        assert isinstance(usage.engine_error, NoEngineError)


@pytest.mark.parametrize("agents_choose", [False, True])
async def test_penalties_apply_only_where_agents_choose(agents_choose: bool) -> None:
    engines = Engines()
    sampling = RunSampling(engines, agents_choose=agents_choose)
    usage = sampling.sessions["s"] = SessionSampling(RUN, 5)
    adjustment = LogitAdjustment(presence_penalty=0.5)
    await sampling.complete(ask([1], replace(SILENT, adjustment=adjustment)))
    kept = adjustment if agents_choose else None
    assert (engines.requests[-1].params.adjustment, usage.overridden) == (kept, not agents_choose)


@pytest.mark.parametrize(("agents_choose", "counted"), [(False, 1), (True, 0)])
async def test_a_grammar_is_kept_and_counted_as_another_distribution(agents_choose: bool, counted: int) -> None:
    engines = Engines()
    sampling = RunSampling(engines, agents_choose=agents_choose)
    usage = sampling.sessions["s"] = SessionSampling(RUN, 5)
    grammar = StructuredOutput("json_object")
    await sampling.complete(ask([1], replace(SILENT, structured=grammar)))
    assert (engines.requests[-1].params.structured, usage.overridden) == (grammar, counted)

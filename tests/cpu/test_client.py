"""Results and errors of the client while engines pause, update and fail (SEMANTICS 2), with a scripted engine."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import EOS, ScriptedEngine, hashed_token, in_virtual_time, scripted_update, settle
from transformers import PreTrainedTokenizerFast

from skyrl_train.config.schema import GeneratorConfig
from skyrl_train.errors import ConfigError, EngineError, NoEngineError, RequestError, WeightSyncError
from skyrl_train.inference import client as client_module
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.interface import (
    EngineHealth,
    InferenceEngineInput,
    InferenceEngineOutput,
    SamplingParams,
    StructuredOutput,
)
from skyrl_train.inference.requests import Generation, GenerationChunk, GenerationRequest
from skyrl_train.models.tiny import character_tokenizer
from skyrl_train.runtime.seeds import derive_seed
from skyrl_train.types import PauseMode

TOKENIZER: PreTrainedTokenizerFast = character_tokenizer("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJK")


def request(prompt: list[int] | None = None, **params: Any) -> InferenceEngineInput:
    return InferenceEngineInput(
        prompt_token_ids=[prompt or [5, 6]], sampling_params={"seed": 7, **params}, session_ids=["s"]
    )


def client_of(*engines: ScriptedEngine, **kwargs: Any) -> InferenceEngineClient:
    return InferenceEngineClient(engines, TOKENIZER, **{"engine_wait_timeout_s": 0, **kwargs})


async def publish(client: InferenceEngineClient, version: int, mode: PauseMode = PauseMode.KEEP) -> None:
    await client.receive_weights(scripted_update(version))
    await client.load_weights(scripted_update(version), mode)


async def uninterrupted(engine_input: InferenceEngineInput) -> InferenceEngineOutput:
    client = client_of(ScriptedEngine(free_running=True))
    await publish(client, 0)
    return await client.generate(engine_input)


@settings(max_examples=60)
@given(
    schedule=st.lists(st.tuples(st.integers(0, 5), st.sampled_from(list(PauseMode))), max_size=8),
    max_tokens=st.integers(1, 40),
    min_tokens=st.integers(0, 40),
    stop=st.lists(st.text("0123abcd", min_size=1, max_size=3), max_size=2),
    seed=st.integers(0, 2**62),
)
async def test_any_schedule_of_updates_gives_the_uninterrupted_response(
    schedule: list[tuple[int, PauseMode]], max_tokens: int, min_tokens: int, stop: list[str], seed: int
) -> None:
    engine_input = request(max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), stop=stop, seed=seed)
    expected = await uninterrupted(engine_input)
    engine = ScriptedEngine()
    client = client_of(engine)
    await publish(client, 0)
    task = asyncio.ensure_future(client.generate(engine_input))
    version, token_versions = 0, []
    for new_version, (ticks, mode) in enumerate(schedule, start=1):
        await settle()
        for _ in range(ticks):
            if engine.running and not task.done():
                engine.tick()
                token_versions.append(version)
                await settle(6)
        version = new_version
        await publish(client, version, mode)
    while not task.done():
        await settle()
        engine.tick()
        await settle(6)
    output = await task
    for key in ("responses", "response_ids", "response_logprobs", "stop_reasons"):
        assert output[key] == expected[key]
    versions = output["response_versions"][0]
    assert len(versions) == len(output["response_ids"][0]) and versions == sorted(versions)
    if PauseMode.WAIT not in [mode for _, mode in schedule]:  # under wait the engine runs requests to their end itself
        assert versions[: len(token_versions)] == token_versions[: len(versions)]


async def test_each_token_has_the_version_that_sampled_it() -> None:
    engine = ScriptedEngine(lambda tokens, seed: 9)
    client = client_of(engine)
    await publish(client, 0)
    task = asyncio.ensure_future(client.generate(request(max_tokens=6)))
    for version, mode in enumerate([PauseMode.KEEP, PauseMode.ABORT, PauseMode.RECOMPUTE], start=1):
        await settle()
        engine.tick(version)
        await publish(client, version, mode)
    output = await task
    assert output["response_versions"] == [[0, 1, 1, 2, 2, 2]]
    assert output["stop_reasons"] == ["length"]


async def test_a_continued_request_is_the_prompt_plus_the_sampled_tokens_with_smaller_budgets() -> None:
    engine = ScriptedEngine(lambda tokens, seed: 9)
    client = client_of(engine)
    await publish(client, 0)
    task = asyncio.ensure_future(client.generate(request([5, 6], max_tokens=10, min_tokens=4, seed=3)))
    await settle()
    engine.tick(3)
    await publish(client, 1, PauseMode.ABORT)
    await settle()
    await publish(client, 2, PauseMode.ABORT)  # a segment without tokens is resent unchanged
    await settle()
    first, second, third = engine.requests
    assert second["prompt_token_ids"] == [[5, 6, 9, 9, 9]]
    assert second["sampling_params"] == dataclasses.replace(
        first["sampling_params"], max_tokens=7, min_tokens=1, seed=derive_seed(3, 0) + 3
    )
    assert third == second
    engine.tick(7)
    assert len((await task)["response_ids"][0]) == 10


async def test_a_budget_spent_at_the_abort_sends_nothing_more() -> None:
    engine = ScriptedEngine(lambda tokens, seed: 9)
    client = client_of(engine)
    await publish(client, 0)
    task = asyncio.ensure_future(client.generate(request(max_tokens=3)))
    await settle()
    for running in engine.running:  # the engine has sampled three tokens and is aborted before it noticed the limit
        for _ in range(3):
            running.sampled.append(9), running.logprobs.append(-1.0), running.versions.append(0)
    await publish(client, 1, PauseMode.ABORT)
    assert (await task)["stop_reasons"] == ["length"]
    assert len(engine.requests) == 1


async def test_stop_strings_match_across_a_segment_boundary_and_end_the_sampling() -> None:
    text = TOKENIZER.encode("abcdefgh")
    engine = ScriptedEngine(lambda tokens, seed: text[len(tokens) - 2])
    client = client_of(engine)
    await publish(client, 0)
    task = asyncio.ensure_future(client.generate(request(max_tokens=8, stop=["cde"])))
    await settle()
    engine.tick(3)
    await settle()
    await publish(client, 1, PauseMode.ABORT)
    await settle()
    engine.tick(2)
    output = await task
    assert output["responses"] == ["ab"]
    assert output["response_ids"] == [text[:5]]
    assert output["stop_reasons"] == ["stop"]
    assert not engine.running


@pytest.mark.parametrize(("stop", "ended_by"), [(("gh", "cde"), "cde"), (("x",), None), ((), None)])
async def test_a_response_names_the_stop_string_that_ended_it(stop: tuple[str, ...], ended_by: str | None) -> None:
    text = TOKENIZER.encode("abcdefgh")
    client = client_of(ScriptedEngine(lambda tokens, seed: text[len(tokens) - 2], free_running=True))
    await publish(client, 0)
    done = await client.complete(GenerationRequest([5, 6], SamplingParams(max_tokens=8, stop=stop)))
    assert done.stop_string == ended_by


async def test_a_caller_that_reads_no_text_gets_the_same_tokens_without_it() -> None:
    expected = await uninterrupted(request(max_tokens=4))
    assert expected["responses"] != [""]
    assert await uninterrupted({**request(max_tokens=4), "detokenize": False}) == {**expected, "responses": [""]}
    # The client decodes the tokens itself to find a stop string.
    with_stop = await uninterrupted({**request(max_tokens=4, stop=["never said"]), "detokenize": False})
    assert with_stop["responses"] == [""]


async def test_n_choices_are_independent_continuations_in_prompt_order() -> None:
    client = client_of(ScriptedEngine(free_running=True))
    await publish(client, 0)
    batch = InferenceEngineInput(
        prompt_token_ids=[[5], [6]], sampling_params={"n": 3, "seed": 1, "max_tokens": 20, "ignore_eos": True}
    )
    output = await client.generate(batch)
    assert len(output["response_ids"]) == 6
    assert len({tuple(ids) for ids in output["response_ids"]}) == 6


async def test_while_paused_new_requests_wait_at_the_gate() -> None:
    engine = ScriptedEngine()
    client = client_of(engine)
    await publish(client, 0)
    await client.pause_generation(PauseMode.KEEP)
    task = asyncio.ensure_future(client.generate(request(max_tokens=1)))
    await settle()
    assert engine.requests == []
    await client.resume_generation()
    await settle()
    engine.tick()
    assert len((await task)["response_ids"][0]) == 1


async def test_a_cancelled_call_leaves_no_request_in_the_engine() -> None:
    engine = ScriptedEngine()
    client = client_of(engine)
    await publish(client, 0)
    for params in ({}, {"stop": ["zz"]}):
        task = asyncio.ensure_future(client.generate(request(n=4, **params)))
        await settle()
        assert len(engine.running) == 4
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert engine.running == []


async def test_one_bad_prompt_fails_the_call_with_its_own_error_and_cancels_the_rest() -> None:
    engine = ScriptedEngine(max_model_len=8)
    client = client_of(engine)
    await publish(client, 0)
    with pytest.raises(RequestError, match="does not fit"):
        await client.generate(InferenceEngineInput(prompt_token_ids=[[5], [5] * 9], sampling_params={}))
    assert engine.running == []


async def test_a_stream_that_cannot_begin_raises_the_error_of_its_request() -> None:
    client = client_of(ScriptedEngine(max_model_len=8))
    await publish(client, 0)
    with pytest.raises(RequestError, match="does not fit"):
        await anext(client.stream(GenerationRequest([5] * 9, SamplingParams())))


# Engines that fail -------------------------------------------------------------------------------------------------


async def test_requests_of_a_dead_engine_continue_on_another_with_the_tokens_they_streamed() -> None:
    a, b = ScriptedEngine(), ScriptedEngine()
    client = client_of(a, b)
    await publish(client, 0)
    engine_input = request(max_tokens=12, stop=["zzz"], seed=11)
    expected = await uninterrupted(engine_input)
    task = asyncio.ensure_future(client.generate(engine_input))
    await settle()
    a.tick(4)
    await settle()
    a.die()
    await settle()
    assert len(b.requests[0]["prompt_token_ids"][0]) == 2 + 4
    b.tick(12)
    output = await task
    assert output["response_ids"] == expected["response_ids"]
    assert client.engines == [b]


async def test_without_any_engine_requests_fail_with_a_typed_error_that_says_why() -> None:
    engine = ScriptedEngine()
    client = client_of(engine)
    await publish(client, 0)
    engine.die()
    with pytest.raises(NoEngineError, match=r"no inference engine is left.*scripted death"):
        await client.generate(request())


def test_a_client_made_by_hand_has_the_time_limits_of_the_default_configuration() -> None:
    generator = GeneratorConfig()
    fleet = generator.inference_engine.fleet
    parameters = inspect.signature(InferenceEngineClient).parameters
    names = ("pause_timeout_s", "engine_wait_timeout_s", "probe_interval_s")
    expected = [generator.pause_timeout_s, fleet.wait_timeout_s, fleet.probe_interval_s]
    assert [parameters[name].default for name in names] == expected


async def test_sessions_stick_to_their_engine_and_new_ones_go_to_the_least_loaded() -> None:
    engines = [ScriptedEngine(), ScriptedEngine()]
    client = client_of(*engines)
    await publish(client, 0)
    tasks = [
        asyncio.ensure_future(
            client.generate(InferenceEngineInput(prompt_token_ids=[[5]], session_ids=[s], sampling_params={}))
        )
        for s in ("a", "b", "c", "d", "a", "a")
    ]
    await settle()
    assert [len(engine.running) for engine in engines] == [4, 2]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(("phase", "how"), [("pause", "fail"), ("pause", "hang"), ("load", "fail")])
@in_virtual_time
async def test_a_failed_update_leaves_the_engine_serving_its_old_weights(phase: str, how: str) -> None:
    engine = ScriptedEngine(lambda tokens, seed: 9, free_running=True)
    client = client_of(engine, pause_timeout_s=0.01)
    await publish(client, 0)
    if how == "fail":
        engine.fail[phase] = EngineError("scripted")
    else:
        engine.hang.add(phase)
    with pytest.raises(WeightSyncError, match=phase):
        await publish(client, 1)
    assert client.policy_version == 0
    output = await client.generate(request(max_tokens=2))
    assert output["response_versions"] == [[0, 0]]


async def test_an_engine_that_missed_an_update_leaves_the_routing() -> None:
    a, b = ScriptedEngine(free_running=True), ScriptedEngine(free_running=True)
    client = client_of(a, b)
    await publish(client, 0)
    a.fail["load"] = EngineError("scripted")
    await publish(client, 1)
    assert client.engines == [b]
    output = await client.generate(request(max_tokens=3, ignore_eos=True))
    assert output["response_versions"] == [[1, 1, 1]]


@pytest.mark.parametrize("phase", ["pause", "load", "resume"])
@pytest.mark.parametrize("how", ["fail", "hang"])
@pytest.mark.parametrize("stop", [[], ["zzz"]])
@in_virtual_time
async def test_requests_of_an_engine_that_missed_an_update_continue_on_another(
    phase: str, how: str, stop: list[str]
) -> None:
    a, b = ScriptedEngine(), ScriptedEngine(free_running=True)
    client = client_of(a, b, pause_timeout_s=0.01)
    await publish(client, 0)
    engine_input = request(max_tokens=12, stop=stop, ignore_eos=True)
    expected = await uninterrupted(engine_input)
    task = asyncio.ensure_future(client.generate(engine_input))
    await settle()
    a.tick(4)
    await settle()
    if how == "fail":
        a.fail[phase] = EngineError("scripted")
    else:
        a.hang.add(phase)
    await publish(client, 1)
    output = await asyncio.wait_for(task, 60)
    assert output["response_ids"] == expected["response_ids"]
    assert client.engines == [b]
    assert a.running == []


async def test_an_update_has_no_fixed_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    real_sleep = asyncio.sleep

    async def only_yield(delay: float, result: object = None) -> object:
        assert delay == 0, "an update waits for events, never for time to pass"
        return await real_sleep(0, result)

    monkeypatch.setattr(asyncio, "sleep", only_yield)
    client = client_of(ScriptedEngine(free_running=True))
    await publish(client, 0)
    task = asyncio.ensure_future(client.generate(request(max_tokens=500, ignore_eos=True)))
    for version, mode in enumerate(PauseMode, start=1):
        await publish(client, version, mode)
    assert len((await task)["response_ids"][0]) == 500


async def test_a_request_that_comes_to_an_engine_behind_its_abort_waits_there() -> None:
    """It had passed the client's gate before. It has no token of the old weights, so it may begin under the new ones."""

    class Late(ScriptedEngine):
        async def health(self) -> EngineHealth:
            return dataclasses.replace(await super().health(), waiting=1)

    engine = Late()
    client = client_of(engine)
    await publish(client, 0, PauseMode.ABORT)
    assert client.policy_version == 0 and engine.paused is None


async def test_an_abort_is_verified() -> None:
    engine = ScriptedEngine()
    client = client_of(engine)
    await publish(client, 0)
    task = asyncio.ensure_future(client.generate(request()))
    await settle()
    engine.ignores_abort = True
    with pytest.raises(WeightSyncError, match="still holds 1 requests"):
        await publish(client, 1, PauseMode.ABORT)
    assert client.policy_version == 0
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_gate_closes_before_the_engines_pause_and_opens_after_they_resume() -> None:
    engine = ScriptedEngine()
    client = client_of(engine)
    await publish(client, 0)
    assert engine.calls == ["receive", "pause", "load", "resume"]


# Responses in pieces -----------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    schedule=st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.booleans()), max_size=12),
    stop=st.lists(st.text("0123abcd", min_size=1, max_size=3), max_size=2),
    seed=st.integers(0, 2**62),
    largest=st.sampled_from([1, 2, 64]),
)
async def test_the_pieces_of_a_stream_joined_are_the_whole_response(
    schedule: list[tuple[int, bool, bool]], stop: list[str], seed: int, largest: int
) -> None:
    with patch.object(client_module, "_LARGEST_CHUNK", largest):
        await check_that_pieces_join(schedule, stop, seed, largest)


async def check_that_pieces_join(
    schedule: list[tuple[int, bool, bool]], stop: list[str], seed: int, largest: int
) -> None:
    params = SamplingParams(max_tokens=20, stop=tuple(stop), seed=seed, ignore_eos=True)
    reference = client_of(ScriptedEngine(free_running=True))
    await publish(reference, 0)
    expected = await reference.complete(GenerationRequest([5, 6], params))
    engine = ScriptedEngine()
    client = client_of(engine)
    await publish(client, 0)
    chunks: list[GenerationChunk] = []
    reading = asyncio.Event()

    async def read() -> None:
        async for chunk in client.stream(GenerationRequest([5, 6], params)):
            assert chunk.generation is not None or chunk.token_ids
            assert len(chunk.token_ids) <= largest
            chunks.append(chunk)
            await reading.wait()

    reader = asyncio.ensure_future(read())
    for version, (ticks, reads, updates) in enumerate(schedule, start=1):
        reading.set() if reads else reading.clear()
        await settle()
        if engine.running:
            engine.tick(ticks)
        if updates:
            await publish(client, version, PauseMode.ABORT)
    reading.set()
    while not reader.done():
        await settle(5)
        engine.tick()
    await reader
    generation = chunks[-1].generation
    assert generation is not None
    assert "".join(chunk.text for chunk in chunks) == generation.text == expected.text
    assert [t for chunk in chunks for t in chunk.token_ids] == generation.token_ids == expected.token_ids
    assert [p for chunk in chunks for p in chunk.logprobs] == expected.logprobs
    assert [v for chunk in chunks for v in chunk.versions] == generation.versions
    assert generation.stop_string == expected.stop_string
    assert all(chunk.generation is None for chunk in chunks[:-1])


async def test_a_slow_reader_gets_larger_pieces_and_holds_nothing_up() -> None:
    engine = ScriptedEngine(lambda tokens, seed: 9)
    client = client_of(engine)
    await publish(client, 0)
    stream = client.stream(GenerationRequest([5], SamplingParams(max_tokens=10)))
    first = asyncio.ensure_future(anext(stream))
    await settle()
    engine.tick()
    assert len((await first).token_ids) == 1
    for _ in range(8):
        engine.tick()
        await settle()
    assert len((await anext(stream)).token_ids) == 8
    await stream.aclose()
    assert engine.running == []


@pytest.mark.parametrize("ended", [False, True], ids=["goes on", "has ended"])
async def test_a_slow_reader_gets_the_accumulated_tokens_in_chunks_of_bounded_size(ended: bool) -> None:
    engine = ScriptedEngine(lambda tokens, seed: 9)
    client = client_of(engine)
    await publish(client, 0)
    stream = client.stream(GenerationRequest([5], SamplingParams(max_tokens=1000 if ended else 2000)))
    first = asyncio.ensure_future(anext(stream))
    await settle()
    engine.tick()
    await first
    for _ in range(999):
        engine.tick()
    await settle(20)
    sizes = [len((await anext(stream)).token_ids) for _ in range(math.ceil(999 / 64))]
    assert max(sizes) <= 64 and sum(sizes) == 999
    await stream.aclose()


async def test_closing_a_stream_that_nobody_read_yet_leaves_no_request() -> None:
    engine = ScriptedEngine()
    client = client_of(engine)
    await publish(client, 0)
    stream = client.stream(GenerationRequest([5], SamplingParams()))
    first = asyncio.ensure_future(anext(stream))
    await settle()
    assert len(engine.running) == 1
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert engine.running == []


@pytest.mark.parametrize("streams", [False, True])
async def test_a_response_with_a_grammar_starts_over_after_an_abort_and_counts_it(streams: bool) -> None:
    engine = ScriptedEngine(lambda tokens, seed: 9, structured_output=True)
    client = client_of(engine)
    await publish(client, 0)
    asked = GenerationRequest([5], SamplingParams(max_tokens=4, seed=1, structured=StructuredOutput("json_object")))

    async def read() -> Generation:
        pieces = [chunk async for chunk in client.stream(asked)]
        assert len(pieces) == 1, "a piece shown could not be taken back"
        assert pieces[0].generation is not None
        return pieces[0].generation

    task = asyncio.ensure_future(read() if streams else client.complete(asked))
    await settle()
    engine.tick(3)
    await publish(client, 1, PauseMode.ABORT)
    await settle()
    assert engine.requests[0] == engine.requests[1] | {"priority": 0}
    engine.tick(4)
    generation = await task
    assert (generation.restarts, generation.segments, generation.versions) == (1, 2, [1, 1, 1, 1])
    assert generation.grammar is None, "which tokens it masked is unknown, so the trainer masks none"


async def test_top_logprobs_come_with_every_token_across_segments() -> None:
    engine = ScriptedEngine(lambda tokens, seed: 9)
    client = client_of(engine)
    await publish(client, 0)
    task = asyncio.ensure_future(client.generate(request(max_tokens=4, top_logprobs=2)))
    await settle()
    engine.tick(2)
    await publish(client, 1, PauseMode.ABORT)
    await settle()
    engine.tick(2)
    (top,) = (await task)["response_top_logprobs"]
    assert [len(alternatives) for alternatives in top] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"top_logprobs": 99}, "at most 20 top_logprobs"),
        ({"structured": StructuredOutput("json_object")}, "cannot follow a grammar"),
    ],
)
async def test_unsupported_requests_are_rejected_before_anything_is_sent(params: dict[str, Any], message: str) -> None:
    engine = ScriptedEngine()
    with pytest.raises(ConfigError, match=message):
        await client_of(engine).generate(request(**params))
    assert engine.requests == []


# Bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"min_tokens": 300}, "min_tokens"),
        ({"n": 0}, "n must be"),
        ({"n": float("nan")}, "n must be"),
        ({"max_tokens": float("nan")}, "max_tokens must be"),
        ({"top_logprobs": float("nan")}, "top_logprobs must be"),
        ({"stop": [""]}, "empty string"),
        ({"temprature": 1}, "temprature is unknown"),
    ],
)
async def test_impossible_sampling_parameters_are_refused_by_name(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await client_of(ScriptedEngine()).generate(request(**params))


async def test_prompts_come_as_tokens_or_as_conversations_not_both() -> None:
    client = client_of(ScriptedEngine(lambda tokens, seed: EOS, free_running=True))
    await publish(client, 0)
    output = await client.generate(InferenceEngineInput(prompts=[[{"role": "user", "content": "12"}]]))
    assert output["stop_reasons"] == ["stop"]
    for both in ({}, {"prompts": [[]], "prompt_token_ids": [[5]]}):
        with pytest.raises(ConfigError, match="exactly one"):
            await client.generate(both)  # type: ignore[arg-type]


async def test_each_prompt_has_its_session() -> None:
    client = client_of(ScriptedEngine())
    with pytest.raises(ConfigError, match="1 entries for 2 prompts"):
        await client.generate(InferenceEngineInput(prompt_token_ids=[[5], [6]], session_ids=["s"]))


def test_the_scripted_engine_depends_on_seed_and_position(tmp_path: Path) -> None:
    assert len({hashed_token([5, 6], seed) for seed in range(100)}) > 20

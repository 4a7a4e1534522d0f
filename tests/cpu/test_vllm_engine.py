"""The engine contract with a real vLLM: results, rejected requests, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import math
import os

import numpy as np
import pytest
import torch
from embedded_models import adjusted_logits
from vllm_engines import (
    ALPHABET,
    CONTEXT,
    PROMPT,
    SLOTS,
    TOLERANCE,
    Served,
    full_greedy,
    full_logprobs,
    greedy_after,
    request,
    tiny_model,
)
from vllm_engines import token_logprobs as reference

from skyrl_train.errors import EngineError, GrammarError, RequestError
from skyrl_train.inference.chat.renderer import ChatRenderer
from skyrl_train.inference.chat.requests import ChatRequest
from skyrl_train.inference.chat.service import ChatService
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.engines.vllm.arguments import vllm_arguments
from skyrl_train.inference.engines.vllm.requests import EngineRequest
from skyrl_train.inference.grammar import Grammars
from skyrl_train.inference.interface import (
    InferenceEngineInput,
    InferenceEngineOutput,
    LogitAdjustment,
    SamplingParams,
    StructuredOutput,
)
from skyrl_train.models.tiny import character_tokenizer
from skyrl_train.types import PauseMode

pytestmark = pytest.mark.asyncio(loop_scope="session")
LONG = CONTEXT - 20
VOCAB = 3 + len(set(ALPHABET))


async def test_greedy_tokens_and_log_probs_are_those_of_the_plain_model(vllm: Served) -> None:
    prompts = [[5], [6, 7], list(range(3, 40))]
    output = await vllm.engine.generate(request(*prompts, max_tokens=20))
    assert output["stop_reasons"] == ["length"] * 3
    assert output["responses"] == [""] * 3
    assert output["response_versions"] == [[vllm.version] * 20] * 3
    for prompt, tokens, logprobs in zip(prompts, output["response_ids"], output["response_logprobs"], strict=True):
        assert tokens == greedy_after(tiny_model(0), prompt, tokens)
        assert logprobs == pytest.approx(reference(tiny_model(0), prompt, tokens), abs=TOLERANCE)


@pytest.mark.parametrize(
    "params", [{"temperature": 0.7}, {"temperature": 1.3, "top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}]
)
async def test_log_probs_are_those_of_the_distribution_sampled_from(vllm: Served, params: dict[str, float]) -> None:
    params = {"temperature": 1.0, **params}
    # A greedy neighbour in the same batch changes nothing.
    greedy = asyncio.create_task(vllm.engine.generate(request(max_tokens=30)))
    output = await vllm.engine.generate(request(max_tokens=30, seed=5, **params))
    tokens, logprobs = output["response_ids"][0], output["response_logprobs"][0]
    expected = full_logprobs(tiny_model(0), PROMPT, tokens) / params["temperature"]
    for position, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        kept = _kept(expected[position].softmax(-1), **params)
        assert logprob == pytest.approx(math.log(kept[token] / kept.sum()), abs=TOLERANCE)
    neighbour = await greedy
    expected_greedy = reference(tiny_model(0), PROMPT, neighbour["response_ids"][0])
    assert neighbour["response_logprobs"][0] == pytest.approx(expected_greedy, abs=TOLERANCE)


async def test_penalties_and_biases_change_the_distribution_by_their_formulas(vllm: Served) -> None:
    change = LogitAdjustment(0.5, 0.4, 1.5, ((5, 3.0), (9, -100.0)))
    output = await vllm.engine.generate(request(max_tokens=30, temperature=0.7, seed=5, adjustment=change))
    tokens, logprobs = output["response_ids"][0], output["response_logprobs"][0]
    with torch.inference_mode():
        logits = tiny_model(0)(input_ids=torch.tensor([PROMPT + tokens]), use_cache=False).logits[0].float()
    for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        z = adjusted_logits(logits[len(PROMPT) + place - 1].tolist(), change, PROMPT, tokens[:place])
        assert logprob == pytest.approx((torch.tensor(z) / 0.7).log_softmax(-1)[token].item(), abs=TOLERANCE)


def _kept(probs: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0):
    """The probabilities that the filters leave, one after the other; the rest are 0."""
    del temperature
    ordered, order = probs.sort(descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if top_k:
        keep[int(top_k) :] = False
    keep &= ordered.cumsum(-1) - ordered < top_p
    keep &= ordered >= min_p * ordered[0]
    return torch.zeros_like(probs).scatter(-1, order, ordered * keep)


async def test_a_seed_decides_the_sample_and_no_seed_draws_on(vllm: Served) -> None:
    async def sample(**params: object) -> list[int]:
        return (await vllm.engine.generate(request(max_tokens=24, temperature=1.0, **params)))["response_ids"][0]

    assert await sample(seed=3) == await sample(seed=3)
    assert await sample(seed=3) != await sample(seed=(1 << 62) - 1)
    assert await sample() != await sample()


async def test_a_stream_yields_tokens_as_they_are_sampled(vllm: Served) -> None:
    # A busy machine joins tokens of several steps, but not all of them.
    chunks = [chunk async for chunk in vllm.engine.stream(request(max_tokens=100, top_logprobs=3))]
    assert len(chunks) > 1
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    assert len(tokens) == 100
    assert tokens == greedy_after(tiny_model(0), PROMPT, tokens)
    assert [chunk.stop_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    expected = full_logprobs(tiny_model(0), PROMPT, tokens)
    assert [x for chunk in chunks for x in chunk.logprobs] == pytest.approx(expected.amax(-1).tolist(), abs=TOLERANCE)
    top = [alternatives for chunk in chunks for alternatives in chunk.top_logprobs or []]
    for alternatives, row in zip(top, expected, strict=True):
        values, ids = row.topk(3)
        assert [token for token, _ in alternatives] == ids.tolist()
        assert [logprob for _, logprob in alternatives] == pytest.approx(values.tolist(), abs=TOLERANCE)


async def test_vllm_knows_the_arguments_that_only_gpus_have(vllm: Served) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    settings = dataclasses.replace(vllm.engine._settings, devices=(1,), lora_rank=8, kv_cache_memory_bytes=1)
    arguments = vllm_arguments(settings, on_cpu=False, kv_bytes_per_token=1, context=CONTEXT)
    assert {"device_ids", "max_lora_rank"} <= arguments.keys() <= AsyncEngineArgs.__dataclass_fields__.keys()


async def test_ranks_of_an_engine_are_processes_also_in_a_placement_group_of_ray(vllm: Served) -> None:
    placement = pytest.importorskip("ray.util.placement_group", reason="needs Ray")
    from ray import PlacementGroupID
    from vllm.config import ParallelConfig

    # As vLLM finds it in the actor of an engine: the group of all actors of the run.
    group = placement.PlacementGroup(PlacementGroupID.from_random())
    assert ParallelConfig(tensor_parallel_size=2, placement_group=group).distributed_executor_backend == "ray"
    settings = dataclasses.replace(vllm.engine._settings, tensor_parallel_size=2)
    arguments = vllm_arguments(settings, on_cpu=False, kv_bytes_per_token=1, context=CONTEXT)
    chosen = {name: arguments[name] for name in arguments if name in ParallelConfig.__dataclass_fields__}
    assert ParallelConfig(**chosen, placement_group=group).distributed_executor_backend == "mp"


async def test_a_stream_may_have_larger_chunks(vllm: Served) -> None:
    from vllm import SamplingParams  # vLLM is installed: the fixture has started it

    assert vllm.engine.capabilities.chunked_streaming == (
        "stream_interval" in inspect.signature(SamplingParams).parameters
    )
    if not vllm.engine.capabilities.chunked_streaming:
        pytest.skip("this release of vLLM has no sizes of streamed outputs")
    asked = {**request(max_tokens=40), "chunk_tokens": 16}
    chunks = [chunk async for chunk in vllm.engine.stream(asked)]
    assert len(chunks) <= 4
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    assert len(tokens) == 40
    assert tokens == greedy_after(tiny_model(0), PROMPT, tokens)
    logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
    assert logprobs == pytest.approx(reference(tiny_model(0), PROMPT, tokens), abs=TOLERANCE)


async def test_alternatives_of_a_sampled_token_are_the_most_likely_ones(vllm: Served) -> None:
    output = await vllm.engine.generate(request(max_tokens=20, temperature=1.0, seed=1, top_logprobs=2))
    tokens, top = output["response_ids"][0], output["response_top_logprobs"][0]
    expected = full_logprobs(tiny_model(0), PROMPT, tokens).topk(2)
    assert [[token for token, _ in alternatives] for alternatives in top] == expected.indices.tolist()
    assert any(token not in dict(alternatives) for token, alternatives in zip(tokens, top, strict=True))
    assert "response_top_logprobs" not in await vllm.engine.generate(request())
    filtered = await vllm.engine.generate(request(max_tokens=20, temperature=1.0, top_k=2, top_logprobs=3))
    assert [len(others) for others in filtered["response_top_logprobs"][0]] == [2] * 20, "no other could be drawn"


async def test_each_way_in_which_a_response_ends_has_its_stop_reason(vllm: Served) -> None:
    greedy = full_greedy(tiny_model(0), PROMPT, 30)
    stop = next(token for token in greedy if token != greedy[0])
    first = greedy.index(stop)
    output = await vllm.engine.generate(request(max_tokens=30, stop_token_ids=[stop, 10_000]))
    assert (output["response_ids"][0], output["stop_reasons"]) == (greedy[: first + 1], ["stop"])
    output = await vllm.engine.generate(request(max_tokens=30, min_tokens=first + 5, stop_token_ids=[stop]))
    assert len(output["response_ids"][0]) >= first + 5
    output = await vllm.engine.generate(request([3 + i % 40 for i in range(CONTEXT - 20)], max_tokens=CONTEXT))
    assert (len(output["response_ids"][0]), output["stop_reasons"]) == (20, ["length"])
    many = [[3 + first, 4 + second] for first in range(6) for second in range(6)]
    output = await vllm.engine.generate(request(*many, max_tokens=40, temperature=1.0, seed=1, ignore_eos=False))
    ended = [ids for ids, why in zip(output["response_ids"], output["stop_reasons"], strict=True) if why == "stop"]
    assert ended
    assert all(ids.index(1) == len(ids) - 1 for ids in ended), "the end of sequence is a sampled token too"


async def test_long_prompts_with_seeds_are_sampled_from(vllm: Served) -> None:
    """More tokens than vLLM's CPU engine takes in one step, of requests that each have their generator."""
    prompts = [[3 + (first + i * i) % 40 for i in range(6000)] for first in range(3)]
    output = await vllm.engine.generate(request(*prompts, max_tokens=6, temperature=1.0, seed=1))
    for prompt, tokens, logprobs in zip(
        prompts, output["response_ids"], output["response_logprobs"] or (), strict=True
    ):
        assert logprobs == pytest.approx(reference(tiny_model(0), prompt, tokens), abs=TOLERANCE)


def masked_logprobs(
    structured: StructuredOutput, tokens: list[int], temperature: float = 1.0, top_p: float = 1.0
) -> list[float]:
    """The reference: one plain forward pass, and a softmax over the tokens that the grammar allows at each place."""
    grammars = Grammars(character_tokenizer(ALPHABET), tiny_model(0).config)
    logits = full_logprobs(tiny_model(0), PROMPT, tokens) / temperature
    found = []
    for row, token, mask in zip(logits, tokens, grammars.replay(structured, tokens), strict=True):
        allowed = torch.from_numpy(np.unpackbits(mask, bitorder="little")[:VOCAB]).bool()
        kept = _kept(row.masked_fill(~allowed, -math.inf).softmax(-1), temperature, top_p=top_p)
        found.append(math.log(kept[token] / kept.sum()))
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.7])
async def test_a_response_continues_in_its_grammar(vllm: Served, temperature: float) -> None:
    words = StructuredOutput("regex", "(([a-c]{3}|7)x){9}")
    filters = {"temperature": temperature, "top_p": 0.9} if temperature else {"temperature": 0.0}

    async def answer(prompt: list[int], **params: object) -> InferenceEngineOutput:
        return await vllm.engine.generate(
            request(prompt, **{"structured": words, "ignore_eos": False, **filters, **params})
        )

    whole = (await answer(PROMPT, max_tokens=60))["response_ids"][0]
    for cut in (1, 6, len(whole) - 2):
        begun = whole[:cut]
        going_on = dataclasses.replace(words, continued_tokens=cut)
        output = await answer([*PROMPT, *begun], structured=going_on, max_tokens=60 - cut, min_tokens=60 - cut)
        tokens = [*begun, *output["response_ids"][0]]
        assert output["stop_reasons"] == ["stop"] and tokens[-1] == 1
        assert temperature or tokens == whole
        expected = masked_logprobs(words, tokens, **filters) if temperature else masked_logprobs(words, tokens)
        assert output["response_logprobs"][0] == pytest.approx(expected[cut:], abs=TOLERANCE)


async def test_a_grammar_is_followed(vllm: Served) -> None:
    tokenizer = character_tokenizer(ALPHABET)
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    schema["x-guidance"] = {"whitespace_flexible": False}  # else this model writes nothing but spaces

    async def answer(kind: str, value: str = "") -> str:
        params = {"structured": StructuredOutput(kind, value), "ignore_eos": False, "max_tokens": 60}
        output = await vllm.engine.generate(request(**params))
        assert max(output["response_logprobs"][0]) <= 0.0
        return tokenizer.decode(output["response_ids"][0], skip_special_tokens=True)

    assert set(json.loads(await answer("json_schema", json.dumps(schema)))) == {"a"}
    assert await answer("regex", "(ab){2}c") == "ababc"
    assert await answer("grammar", 'start: "x" "yz"') == "xyz"
    assert (await answer("json_object")).startswith("{")
    with pytest.raises(GrammarError, match="unclosed group"):
        await answer("regex", "(unbalanced")
    for unusable in (StructuredOutput("regex", "ABC"), StructuredOutput("regex", "ab", continued_tokens=1)):
        with pytest.raises(GrammarError, match="cannot follow"):  # no such letters, or not the tokens of the prompt
            await vllm.engine.generate(request(structured=unusable))
    assert await answer("regex", "a{7}") == "a" * 7


@pytest.mark.parametrize("forced", [None, "look"])
async def test_a_tool_call_is_forced(vllm: Served, forced: str | None) -> None:
    # The format that is JSON alone: this vocabulary has no marks.
    tokenizer, temperature = character_tokenizer(ALPHABET), 2.0  # colder, this model writes long runs of spaces
    renderer = ChatRenderer(tokenizer, "", tool_parser="llama-3")
    client = InferenceEngineClient([vllm.engine], tokenizer, renderer=renderer)
    schemas = {
        "look": {"properties": {"at": {"enum": ["a", "bc"]}}, "required": ["at"], "additionalProperties": False},
        "stop": {"properties": {"now": {"const": True}}, "required": ["now"], "additionalProperties": False},
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": of}} for name, of in schemas.items()]
    asked = ChatRequest(
        ({"role": "user", "content": tokenizer.decode(PROMPT)},),
        SamplingParams(temperature=temperature, seed=1),
        tools=tuple(tools),
        tool_choice="required",
        allowed_tools=None if forced is None else (forced,),
    )
    (choice,) = (await ChatService(client, renderer).complete(asked)).choices
    (call,) = choice.message.tool_calls
    expected = {"look": [{"at": "a"}, {"at": "bc"}], "stop": [{"now": True}]}
    assert json.loads(call.arguments) in expected[call.name] and call.name in (forced, *(() if forced else schemas))
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "")
    sampled = choice.generation
    assert sampled.prompt_token_ids == PROMPT and sampled.grammar is not None
    grammar = StructuredOutput(sampled.grammar.kind, sampled.grammar.value)
    assert sampled.logprobs == pytest.approx(masked_logprobs(grammar, sampled.token_ids, temperature), abs=TOLERANCE)


async def test_another_client_of_the_same_vllm_has_vllms_own_grammars(vllm: Served) -> None:
    from vllm import SamplingParams as VLLMParams
    from vllm.sampling_params import StructuredOutputsParams

    link, _ = vllm.engine._alive()
    made = link._sampling_params

    def plain(asked: EngineRequest) -> VLLMParams:
        params = made(asked)
        params.structured_outputs = StructuredOutputsParams(choice=["abba", "cd"])
        return params

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "_sampling_params", plain)
        output = await vllm.engine.generate(request(ignore_eos=False))
    text = character_tokenizer(ALPHABET).decode(output["response_ids"][0], skip_special_tokens=True)
    assert text in ("abba", "cd")


async def test_a_grammar_takes_drafts_back_and_refuses_what_it_does_not_allow(vllm: Served) -> None:
    from skyrl_train.inference.engines.vllm.grammars import ResponseGrammar

    tokenizer = character_tokenizer(ALPHABET)
    grammars = Grammars(tokenizer, tiny_model(0).config)
    grammar = ResponseGrammar(grammars.matcher(StructuredOutput("regex", "abc?")))
    a, b, c, x = tokenizer.convert_tokens_to_ids([*"abcx"])
    masks = torch.zeros((2, 3), dtype=torch.int32)  # wider than the vocabulary

    def allowed() -> set[int]:
        masks.fill_(-1)
        grammar.fill_bitmask(masks, 1)
        assert masks[0].eq(-1).all()
        return set(np.unpackbits(masks[1].numpy().view(np.uint8), bitorder="little").nonzero()[0].tolist())

    assert allowed() == {a}
    assert grammar.validate_tokens([a, b, x]) == [a, b]
    assert grammar.accept_tokens("r", [a, b]) and allowed() == {c, 1}
    assert grammar.accept_tokens("r", [1]) and grammar.is_terminated()
    grammar.rollback(2)
    assert not grammar.is_terminated() and allowed() == {b}
    assert not grammar.accept_tokens("r", [1]), "it is too early for an end"
    assert not grammar.accept_tokens("r", [b]), "after an error, nothing is accepted"
    assert len(allowed()) == 3 * 32, "vLLM samples one more token, which is refused"


async def test_a_lower_priority_is_scheduled_first(vllm: Served) -> None:
    ended: list[str] = []

    async def one(name: str, priority: int, length: int) -> None:
        await vllm.engine.generate({**request([5], max_tokens=length), "priority": priority})
        ended.append(name)

    # All come at once, when the engine resumes: a busy machine could end the first ones before the others are in line.
    await vllm.engine.pause(PauseMode.KEEP)
    running = [asyncio.create_task(one("running", 0, 400)) for _ in range(SLOTS)]
    late = [asyncio.create_task(one("late", 9, 8)) for _ in range(SLOTS)]
    early = [asyncio.create_task(one("early", 1, 8)) for _ in range(SLOTS)]
    while (await vllm.engine.health()).waiting < 3 * SLOTS:
        pass
    await vllm.engine.resume()
    await asyncio.gather(*running, *late, *early)
    assert ended == ["running"] * SLOTS + ["early"] * SLOTS + ["late"] * SLOTS
    assert vllm.engine.capabilities.priorities


async def test_a_bad_request_fails_alone(vllm: Served) -> None:
    good = asyncio.create_task(vllm.engine.generate(request(max_tokens=60)))
    for bad, message in [
        (request([3], []), "empty"),
        (request([3], [VOCAB]), "vocabulary"),
        (request([-1]), "vocabulary"),
        (request([3] * CONTEXT), "max_model_len"),
        (request(n=2), "n=2"),
        (request(top_logprobs=21), "at most 20"),
        ({**request(), "adapter": "nobody"}, "nobody"),
    ]:
        with pytest.raises(RequestError, match=message):
            await vllm.engine.generate(bad)
    with pytest.raises(EngineError, match="prompt_token_ids"):
        await vllm.engine.generate(InferenceEngineInput(prompts=[[{"role": "user", "content": "hi"}]]))
    with pytest.raises(EngineError, match="exactly one prompt"):
        await anext(vllm.engine.stream(request([3], [4])))
    assert len((await good)["response_ids"][0]) == 60


async def test_a_cancelled_call_leaves_nothing_in_vllm(vllm: Served) -> None:
    calls = [asyncio.create_task(vllm.engine.generate(request([3 + i], [4], max_tokens=LONG))) for i in range(8)]
    stream = vllm.engine.stream(request(max_tokens=LONG))
    await anext(stream)
    for turns, call in enumerate(
        calls
    ):  # cancelled at once, or a little later: also in the middle of being handed over
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    await stream.aclose()
    await vllm.empty()


@pytest.mark.parametrize("paused", [False, True])
async def test_abort_generation_returns_the_partial_tokens(vllm: Served, paused: bool) -> None:
    stream = vllm.engine.stream(request(max_tokens=LONG))
    call = asyncio.create_task(vllm.engine.generate(request([7], max_tokens=LONG)))
    tokens = list((await anext(stream)).token_ids)
    if paused:
        await vllm.engine.pause(PauseMode.KEEP)
        late = asyncio.create_task(vllm.engine.generate(request([8], max_tokens=LONG)))
        async with asyncio.timeout(300):
            while (await vllm.engine.health()).waiting == 0:
                pass
        busy_s = (await vllm.engine.health()).busy_s
        assert (await vllm.engine.health()).busy_s == busy_s > 0, "requests that stand still keep nobody busy"
    await vllm.engine.abort_generation()
    health = await vllm.engine.health()
    assert (health.running, health.waiting) == (0, 0)
    async for chunk in stream:
        tokens += chunk.token_ids
        last = chunk.stop_reason
    assert (last, tokens) == ("abort", greedy_after(tiny_model(0), PROMPT, tokens))
    output = await call
    assert output["stop_reasons"] == ["abort"]
    assert output["response_ids"][0] == greedy_after(tiny_model(0), [7], output["response_ids"][0])
    if paused:
        output = await late
        assert (output["response_ids"], output["stop_reasons"]) == ([[]], ["abort"])
        await vllm.engine.resume()


async def test_health_counts(vllm: Served) -> None:
    before = await vllm.engine.health()
    await vllm.engine.generate(request([3] * 5, [4] * 6, max_tokens=10))
    after = await vllm.engine.health()
    assert after.generated_tokens - before.generated_tokens == 20
    assert after.prefill_tokens - before.prefill_tokens == 11
    assert after.busy_s > before.busy_s
    await vllm.engine.pause(PauseMode.KEEP)
    call = asyncio.create_task(vllm.engine.generate(request([3])))
    await asyncio.sleep(0)
    health = await vllm.engine.health()
    assert (health.paused, health.running, health.waiting) == (True, 0, 1)
    await vllm.engine.resume()
    await call


async def test_health_has_the_share_of_the_kv_cache_that_requests_hold(vllm: Served) -> None:
    assert (await vllm.engine.health()).kv_cache_usage == 0
    streams = [vllm.engine.stream(request([token] * 20, max_tokens=LONG)) for token in (5, 6)]
    usage = []
    for stream in streams:
        await anext(stream)
        await vllm.engine.pause(PauseMode.KEEP)
        usage.append((await vllm.engine.health()).kv_cache_usage)
        await vllm.engine.resume()
    assert 0 < usage[0] < usage[1] <= 1
    for stream in streams:
        await stream.aclose()
    await vllm.empty()
    assert (await vllm.engine.health()).kv_cache_usage == 0


async def test_unsupported_calls_are_rejected(vllm: Served) -> None:
    can = vllm.engine.capabilities
    assert (can.max_model_len, can.sleep, can.adapters) == (CONTEXT, False, False)
    assert (can.structured_output, can.grammar_continuation) == (True, True)
    assert can.pause_modes == frozenset(PauseMode)
    assert can.transports == {"shared_memory", "disk", "delta", "gloo"}
    with pytest.raises(EngineError, match="enable_sleep_mode"):
        await vllm.engine.sleep()
    with pytest.raises(EngineError, match="cannot sleep"):
        await vllm.engine.wake_up()
    with pytest.raises(EngineError, match="enable_lora"):
        await vllm.engine.load_adapter("a", "/nowhere")


async def test_the_owner_of_vllms_process_is_known_to_it(vllm: Served) -> None:
    assert await vllm.worker_variable("SKYRL_TRAIN_ENGINE_OWNER") == str(os.getpid())
    assert "SKYRL_TRAIN_ENGINE_OWNER" not in os.environ

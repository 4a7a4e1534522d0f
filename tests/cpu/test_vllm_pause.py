"""Weight swaps in a real vLLM: the pause modes, exact versions, and cached prefixes that serve no other version."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import pytest
import torch
from transformers.cache_utils import DynamicCache
from vllm_engines import PROMPT, SLOTS, TOLERANCE, Served, full_greedy, greedy_after, request, tiny_model
from vllm_engines import token_logprobs as reference

from skyrl_train.errors import EngineError
from skyrl_train.inference.interface import TokenChunk
from skyrl_train.types import PauseMode

pytestmark = pytest.mark.asyncio(loop_scope="session")
LENGTH = 100


class Reader:
    """Reads a stream to its end; the tokens so far can be looked at."""

    def __init__(self, stream: AsyncIterator[TokenChunk]) -> None:
        self._stream = stream
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.stop_reason: str | None = None

    async def read(self, tokens: int = 1 << 30) -> None:
        """Until the end, or until there are that many tokens."""
        while self.stop_reason is None and len(self.tokens) < tokens:
            chunk = await anext(self._stream)
            self.tokens += chunk.token_ids
            self.logprobs += chunk.logprobs
            self.versions += chunk.versions
            self.stop_reason = chunk.stop_reason


def old_keys_new_weights(tokens: list[int], old_tokens: int) -> list[float]:
    """The reference for ``keep``: the old model's KV of all but the newest of ``old_tokens``, then the new model."""
    sequence = PROMPT + tokens
    frozen = len(PROMPT) + old_tokens - 1
    cache = DynamicCache(config=tiny_model(0).config)
    with torch.inference_mode():
        tiny_model(0)(input_ids=torch.tensor([sequence[:frozen]]), past_key_values=cache, use_cache=True)
        logits = tiny_model(1)(input_ids=torch.tensor([sequence[frozen:]]), past_key_values=cache, use_cache=True)
    logprobs = logits.logits[0].float().log_softmax(-1)
    return [logprobs[i, token].item() for i, token in enumerate(tokens[old_tokens:])]


@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.RECOMPUTE])
async def test_a_frozen_request_goes_on_under_the_new_weights(vllm: Served, mode: PauseMode) -> None:
    old = vllm.version
    update = await vllm.gather(tiny_model(1))
    reader = Reader(vllm.engine.stream(request(max_tokens=LENGTH)))
    company = asyncio.create_task(vllm.engine.generate(request([8] * 11, max_tokens=LENGTH)))
    await reader.read(10)
    await vllm.load(update, mode)
    assert await vllm.served_checksum(update) == update.checksum
    await reader.read()
    assert reader.versions == sorted(reader.versions)
    before = reader.versions.count(old)
    assert 10 <= before < LENGTH
    assert reader.versions.count(old + 1) == LENGTH - before
    assert reader.tokens[:before] == greedy_after(tiny_model(0), PROMPT, reader.tokens[:before])
    assert reader.logprobs[:before] == pytest.approx(
        reference(tiny_model(0), PROMPT, reader.tokens[:before]), abs=TOLERANCE
    )
    if mode is PauseMode.KEEP:
        expected = old_keys_new_weights(reader.tokens, before)
    else:
        expected = reference(tiny_model(1), PROMPT, reader.tokens)[before:]
    # The versions are exact: were one token more or less counted as old, its log-prob would be off by far.
    assert reader.logprobs[before:] == pytest.approx(expected, abs=TOLERANCE)
    output = await company
    split = output["response_versions"][0].count(old)
    tokens, logprobs = output["response_ids"][0], output["response_logprobs"][0]
    assert output["response_versions"][0] == [old] * split + [old + 1] * (LENGTH - split)
    assert logprobs[:split] == pytest.approx(reference(tiny_model(0), [8] * 11, tokens[:split]), abs=TOLERANCE)
    if mode is PauseMode.RECOMPUTE:
        assert logprobs[split:] == pytest.approx(reference(tiny_model(1), [8] * 11, tokens)[split:], abs=TOLERANCE)


async def test_abort_returns_the_partial_tokens_and_leaves_nothing(vllm: Served) -> None:
    reader = Reader(vllm.engine.stream(request(max_tokens=LENGTH)))
    # More than may run at once: some have no token yet.
    calls = [
        asyncio.create_task(vllm.engine.generate(request([3 + i % 20], max_tokens=LENGTH))) for i in range(SLOTS + 8)
    ]
    await reader.read(5)
    await vllm.engine.pause(PauseMode.ABORT)
    health = await vllm.engine.health()
    assert (health.running, health.waiting, health.paused) == (0, 0, True)
    await reader.read()
    outputs = await asyncio.gather(*calls)
    assert {reader.stop_reason, *(output["stop_reasons"][0] for output in outputs)} == {"abort"}
    lengths = [len(output["response_ids"][0]) for output in outputs]
    assert min(lengths) == 0 < max(lengths) < LENGTH
    assert reader.tokens == greedy_after(tiny_model(0), PROMPT, reader.tokens)
    await vllm.engine.resume()


async def test_wait_lets_begun_requests_finish_and_the_others_wait(vllm: Served) -> None:
    old = vllm.version
    calls = [asyncio.create_task(vllm.engine.generate(request([3 + i % 20], max_tokens=40))) for i in range(SLOTS + 8)]
    reader = Reader(vllm.engine.stream(request(max_tokens=40)))
    await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    update = await vllm.gather(tiny_model(1))
    await vllm.engine.pause(PauseMode.WAIT)
    health = await vllm.engine.health()
    assert (health.running, health.paused) == (0, True)
    await vllm.engine.load_weights(update)
    await vllm.engine.resume()
    await reader.read()
    versions = [set(output["response_versions"][0]) for output in await asyncio.gather(*calls)]
    assert all(len(seen) == 1 for seen in [*versions, set(reader.versions)]), "no response has two versions"
    assert {old} in versions


async def test_resuming_fails_a_wait_that_is_still_draining(vllm: Served) -> None:
    reader = Reader(vllm.engine.stream(request(max_tokens=LENGTH)))
    await reader.read(1)
    waiting = asyncio.create_task(vllm.engine.pause(PauseMode.WAIT))
    await asyncio.sleep(0)
    await vllm.engine.resume()
    with pytest.raises(EngineError, match="resumed"):
        await waiting
    await reader.read()
    assert reader.stop_reason == "length"


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_requests_that_arrive_while_paused_wait_and_have_the_new_version(vllm: Served, mode: PauseMode) -> None:
    await vllm.engine.pause(mode)
    call = asyncio.create_task(vllm.engine.generate(request()))
    update = await vllm.gather(tiny_model(1))
    before = (await vllm.engine.health()).generated_tokens
    await vllm.engine.load_weights(update)
    health = await vllm.engine.health()
    assert (health.generated_tokens, health.waiting, call.done()) == (before, 1, False)
    await vllm.engine.resume()
    output = await call
    assert output["response_versions"] == [[vllm.version] * 12]
    assert output["response_ids"][0] == full_greedy(tiny_model(1), PROMPT, 12)


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_no_cached_prefix_serves_another_version(vllm: Served, mode: PauseMode) -> None:
    """The prompt fills two of vLLM's cache blocks, is cached under the old weights, and is asked again under the new."""
    prompt = [3 + i % 40 for i in range(300)]
    first = await vllm.engine.generate(request(prompt))
    assert first["response_logprobs"][0] == pytest.approx(
        reference(tiny_model(0), prompt, first["response_ids"][0]), abs=TOLERANCE
    )
    # All batch slots are taken: this one waits in vLLM, without a token, while the weights change.
    update = await vllm.gather(tiny_model(1))
    others = [asyncio.create_task(vllm.engine.generate(request([3 + i % 20], max_tokens=LENGTH))) for i in range(SLOTS)]
    reader = Reader(vllm.engine.stream(request(max_tokens=LENGTH)))
    queued = asyncio.create_task(vllm.engine.generate(request(prompt)))
    await reader.read(3)
    await vllm.load(update, mode)
    second = await vllm.engine.generate(request(prompt))
    await asyncio.gather(reader.read(), *others)
    for output in (second, await queued):
        if output["stop_reasons"] == ["abort"]:
            continue
        tokens = output["response_ids"][0]
        model = tiny_model(1) if output["response_versions"][0] == [vllm.version] * 12 else tiny_model(0)
        assert output["response_logprobs"][0] == pytest.approx(reference(model, prompt, tokens), abs=TOLERANCE)
    assert second["response_versions"] == [[vllm.version] * 12]


async def computed(served: Served, prompt: list[int]) -> int:
    """Asks once; returns how many tokens of the prompt were not found in the cache."""
    before = (await served.engine.health()).prefill_tokens
    await served.engine.generate(request(prompt))
    return (await served.engine.health()).prefill_tokens - before


async def test_within_a_version_prefixes_are_cached_until_they_are_to_be_forgotten(vllm: Served) -> None:
    prompt = [4 + i % 30 for i in range(300)]
    assert await computed(vllm, prompt) == 300
    assert await computed(vllm, prompt) == 300 - 256
    assert (await vllm.engine.generate(request(prompt)))["cached_tokens"] == [256]
    assert max([chunk.cached_tokens async for chunk in vllm.engine.stream(request(prompt))]) == 256
    await vllm.engine.reset_prefix_cache()
    assert await computed(vllm, prompt) == 300


async def test_cached_prefixes_serve_later_versions_where_that_is_wanted(started_vllm: dict[str, Served]) -> None:
    twin, prompt = started_vllm["twin"], [4 + i % 30 for i in range(300)]
    await twin.sync_weights(0)
    assert await computed(twin, prompt) == 300
    await twin.sync_weights(1)
    assert await computed(twin, prompt) == 300 - 256


@pytest.mark.parametrize("what", ["missing", "unknown", "shape", "dtype", "bytes", "transport", "not received"])
async def test_a_bad_update_is_refused_and_the_old_weights_serve_on(vllm: Served, what: str) -> None:
    good = await vllm.gather(tiny_model(1))
    specs = list(good.tensors)
    if what == "missing":
        bad = dataclasses.replace(good, tensors=tuple(specs[:-1]))
    elif what == "unknown":
        bad = dataclasses.replace(good, tensors=(*specs, dataclasses.replace(specs[0], name="model.extra.weight")))
    elif what == "shape":
        bad = dataclasses.replace(good, tensors=(dataclasses.replace(specs[0], shape=(1, 64)), *specs[1:]))
    elif what == "dtype":
        bad = dataclasses.replace(good, tensors=(dataclasses.replace(specs[0], dtype="bfloat16"), *specs[1:]))
    elif what == "bytes":
        bad = dataclasses.replace(good, checksum="crc32:00000000")
    elif what == "transport":
        bad = dataclasses.replace(good, transport="cuda_ipc")
    else:
        bad = dataclasses.replace(good, version=good.version + 1)
    running = asyncio.create_task(vllm.engine.generate(request(max_tokens=LENGTH)))
    if what != "not received":
        await vllm.engine.receive_weights(bad)
    with pytest.raises(EngineError, match="pause"):
        await vllm.engine.load_weights(bad)
    await vllm.engine.pause(PauseMode.KEEP)
    with pytest.raises(EngineError):
        await vllm.engine.load_weights(bad)
    await vllm.engine.resume()
    assert vllm.engine.policy_version == good.version - 1
    tokens = (await running)["response_ids"][0]
    assert tokens == greedy_after(tiny_model(0), PROMPT, tokens)
    vllm.version -= 1


async def test_vllm_stays_paused_as_it_wakes_up(vllm: Served) -> None:
    """Its scheduler is the one of a GPU; a worker on a CPU keeps its memory."""
    link, _ = vllm.engine._alive()
    await vllm.engine.pause(PauseMode.KEEP)
    for tags in (["weights", "kv_cache"], ["kv_cache", "weights"]):
        await link.sleep(1)
        await link.wake_up(tags[:1], last=False)
        await link.wake_up(tags[1:], last=True)
        assert await link._llm.engine_core.is_scheduler_paused_async()
    await vllm.engine.resume()

"""OpenAI's own client against the endpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from chat_models import HERMES, byte_tokenizer
from endpoint_worlds import ASK, TOKENIZER, WatchedEngine, endpoint
from scripted import EOS, hashed_token, settle
from transformers import PreTrainedTokenizerFast

from skyrl_train.endpoint.server.generation import encode_events
from skyrl_train.inference.openai.dialect import Frame
from skyrl_train.types import PauseMode

GET_WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def saying(tokenizer: PreTrainedTokenizerFast, text: str) -> Callable[[Sequence[int], int], int]:
    """A model that says ``text`` to whatever it is asked without a seed."""
    answer = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return lambda tokens, position: int(answer[min(position, len(answer) - 1)])


async def test_a_chat_completion_has_the_sampled_tokens() -> None:
    async with endpoint() as world:
        done = await world.openai.chat.completions.create(
            **ASK, max_tokens=8, seed=3, extra_body={"return_token_ids": True}
        )
        [choice] = done.choices
        assert choice.finish_reason == "length" and len(choice.message.content) == 8
        shown = choice.model_extra["skyrl"]
        assert TOKENIZER.decode(shown["token_ids"]) == choice.message.content
        assert shown["logprobs"] == [-math.log(2 + token) for token in shown["token_ids"]]
        assert shown["versions"] == [0] * 8
        assert done.usage.prompt_tokens == len(done.model_extra["skyrl"]["prompt_token_ids"]) == 4
        assert done.usage.completion_tokens == 8


async def test_a_stream_joined_is_the_whole_response() -> None:
    async with endpoint() as world:
        world.engine.cached_tokens = 2
        whole = await world.openai.chat.completions.create(**ASK, max_tokens=20, seed=3)
        stream = await world.openai.chat.completions.create(
            **ASK, max_tokens=20, seed=3, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
        assert reasons == [whole.choices[0].finish_reason]
        assert chunks[-1].usage == whole.usage
        assert whole.usage.prompt_tokens_details.cached_tokens == 2


def test_an_event_is_one_line_to_clients_that_split_at_any_line_end_of_unicode() -> None:
    text = "".join(map(chr, [*range(0x20), 0x85, 0x2028, 0x2029, 0xFEFF])) + "\u00a8\u2018é\U0001f600"
    line, end = encode_events([Frame({"text": text})]).decode().splitlines()
    assert json.loads(line.removeprefix("data: ")) == {"text": text} and not end


async def test_the_first_chunk_has_the_prompt_as_with_vllms_server() -> None:
    ids = {"extra_body": {"return_token_ids": True}}
    async with endpoint() as world:
        prompt = (await world.openai.chat.completions.create(**ASK, max_tokens=1, **ids)).model_extra[
            "prompt_token_ids"
        ]
        chat = await world.openai.chat.completions.create(**ASK, max_tokens=3, n=2, stream=True, **ids)
        shown = [chunk.model_extra.get("prompt_token_ids") async for chunk in chat]
        assert shown[0] == prompt and len(shown) > 4 and not any(shown[1:])
        text = await world.openai.completions.create(
            model="policy", prompt=["012", "9"], max_tokens=3, stream=True, **ids
        )
        choices = [chunk.choices[0] async for chunk in text]
        for index, of in enumerate([TOKENIZER("012")["input_ids"], TOKENIZER("9")["input_ids"]]):
            shown = [choice.model_extra.get("prompt_token_ids") for choice in choices if choice.index == index]
            assert shown[0] == of and len(shown) > 1 and not any(shown[1:])


async def test_equal_seeds_repeat_and_others_do_not() -> None:
    async with endpoint() as world:

        async def say(seed: int) -> str:
            done = await world.openai.chat.completions.create(**ASK, max_tokens=12, seed=seed)
            return str(done.choices[0].message.content)

        first, again, other = await say(5), await say(5), await say(6)
        assert first == again != other


async def test_n_choices_are_independent_whole_and_streamed() -> None:
    async with endpoint() as world:
        whole = await world.openai.chat.completions.create(**ASK, max_tokens=12, seed=3, n=3)
        texts = [choice.message.content for choice in whole.choices]
        assert len(set(texts)) == 3
        stream = await world.openai.chat.completions.create(**ASK, max_tokens=12, seed=3, n=3, stream=True)
        streamed = ["", "", ""]
        async for chunk in stream:
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
        assert streamed == texts


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_stop_string_ends_the_text_and_stays_in_the_tokens(streamed: bool) -> None:
    engine = WatchedEngine(saying(TOKENIZER, "abcdefgh"), free_running=True)
    async with endpoint(engine) as world:
        asked: dict[str, Any] = {**ASK, "stop": ["de", "zz"], "extra_body": {"return_token_ids": True}}
        if streamed:
            stream = await world.openai.chat.completions.create(**asked, stream=True)
            choices = [choice async for chunk in stream for choice in chunk.choices]
            text = "".join(choice.delta.content or "" for choice in choices)
            tokens = [token for choice in choices for token in choice.model_extra.get("skyrl", {}).get("token_ids", ())]
            reason = choices[-1].finish_reason
        else:
            [choice] = (await world.openai.chat.completions.create(**asked)).choices
            text, tokens, reason = (
                choice.message.content,
                choice.model_extra["skyrl"]["token_ids"],
                choice.finish_reason,
            )
        assert (text, reason) == ("abc", "stop")
        assert TOKENIZER.decode(tokens) == "abcde"


async def test_logprobs_come_with_their_tokens() -> None:
    async with endpoint() as world:
        done = await world.openai.chat.completions.create(**ASK, max_tokens=6, seed=1, logprobs=True)
        content = done.choices[0].logprobs.content
        assert "".join(entry.token for entry in content) == done.choices[0].message.content
        assert [bytes(entry.bytes).decode() for entry in content] == [entry.token for entry in content]
        assert all(entry.logprob < 0 and entry.top_logprobs == [] for entry in content)


@pytest.mark.parametrize("streamed", [False, True])
async def test_tools_are_called_in_openais_shape(streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripted.EOS", -1)  # in this vocabulary 1 is a quotation mark
    tokenizer = byte_tokenizer(["<|im_start|>", "<|im_end|>"], ["<tool_call>", "</tool_call>"], "<|im_end|>", HERMES)
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
    engine = WatchedEngine(saying(tokenizer, "Let me see. " + call), free_running=True)
    stop_ids = {"extra_body": {"stop_token_ids": [tokenizer.eos_token_id]}}
    async with endpoint(engine, tokenizer=tokenizer) as world:
        asked: dict[str, Any] = {**ASK, "tools": [GET_WEATHER], **stop_ids}
        if streamed:
            stream = await world.openai.chat.completions.create(**asked, stream=True)
            choices = [choice async for chunk in stream for choice in chunk.choices]
            pieces = [piece for choice in choices for piece in choice.delta.tool_calls or ()]
            name = next(piece.function.name for piece in pieces if piece.function.name)
            arguments = "".join(piece.function.arguments or "" for piece in pieces)
            content, reason = "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason
        else:
            [choice] = (await world.openai.chat.completions.create(**asked)).choices
            [made] = choice.message.tool_calls
            name, arguments = made.function.name, made.function.arguments
            content, reason = choice.message.content, choice.finish_reason
        assert (name, json.loads(arguments), reason) == ("get_weather", {"city": "Zürich"}, "tool_calls")
        assert content.strip() == "Let me see."


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_prefill_that_opens_reasoning_is_closed_by_the_response(streamed: bool) -> None:
    tokenizer = byte_tokenizer(["<|im_start|>", "<|im_end|>"], ["<think>", "</think>"], "<|im_end|>", HERMES)
    engine = WatchedEngine(saying(tokenizer, "hm</think>ok"), free_running=True, eos=tokenizer.eos_token_id)
    messages = [*ASK["messages"], {"role": "assistant", "content": "<think>So"}]
    body = {"continue_final_message": True, "add_generation_prompt": False}
    async with endpoint(engine, tokenizer=tokenizer) as world:
        answer = await world.openai.chat.completions.create(
            model="policy", messages=messages, stream=streamed, extra_body=body
        )
        parts = [chunk.choices[0].delta async for chunk in answer] if streamed else [answer.choices[0].message]
        assert "".join(part.content or "" for part in parts) == "ok"
        assert "".join(part.model_extra.get("reasoning_content") or "" for part in parts) == "hm"


async def test_a_weight_update_in_the_middle_of_a_stream_is_invisible_to_the_client() -> None:
    def no_end(tokens: Sequence[int], seed: int) -> int:
        return max(3, hashed_token(tokens, seed))

    engine = WatchedEngine(no_end)
    async with endpoint(engine) as world:
        quiet = WatchedEngine(no_end, free_running=True)
        async with endpoint(quiet) as other:
            expected = await other.openai.chat.completions.create(**ASK, max_tokens=10, seed=9)
        for mode in (PauseMode.KEEP, PauseMode.ABORT, PauseMode.RECOMPUTE):
            version = world.client.policy_version
            stream = await _begin(world, max_tokens=10, seed=9)
            await world.publish(version + 1, mode)
            await engine.holds(1)
            await world.tick(6)
            text, versions, reason = await stream
            assert text == expected.choices[0].message.content and reason == "length"
            assert versions == [version] * 4 + [version + 1] * 6


async def _begin(world: Any, **params: Any) -> Any:
    """A stream of which four tokens are sampled; the returned function ends it."""
    import asyncio

    async def read() -> tuple[str, list[int], str | None]:
        text, versions, reason = "", [], None
        stream = await world.openai.chat.completions.create(
            **ASK, **params, stream=True, extra_body={"return_token_ids": True}
        )
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                versions += choice.model_extra.get("skyrl", {}).get("versions", [])
                reason = choice.finish_reason or reason
        return text, versions, reason

    reading = asyncio.create_task(read())
    await world.engine.holds(1)
    await world.tick(4)
    await settle()
    return reading


async def test_completions_take_tokens_and_give_the_older_shape() -> None:
    async with endpoint() as world:
        create = world.openai.completions.create
        by_text = await create(model="policy", prompt="012", max_tokens=6, seed=2, logprobs=0)
        by_tokens = await create(model="policy", prompt=TOKENIZER("012")["input_ids"], max_tokens=6, seed=2)
        assert by_text.choices[0].text == by_tokens.choices[0].text
        assert len(by_text.choices[0].logprobs.token_logprobs) == 6
        stream = await create(model="policy", prompt=["012", "9"], max_tokens=6, seed=2, stream=True)
        texts = ["", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        both = await create(model="policy", prompt=["012", "9"], max_tokens=6, seed=2)
        assert texts == [choice.text for choice in both.choices]


async def test_models_tokens_health_and_metrics() -> None:
    async with endpoint(model_names=("policy", "student")) as world:
        assert [model.id async for model in world.openai.models.list()] == ["policy", "student"]
        assert (await world.openai.models.retrieve("student")).id == "student"
        prompt = {"prompt": "0a"}
        tokens = (await world.http.post("/tokenize", json=prompt)).json()["tokens"]
        assert (await world.http.post("/detokenize", json={"tokens": tokens})).json() == prompt
        rendered = (await world.http.post("/tokenize", json={"messages": ASK["messages"]})).json()
        assert rendered["count"] == 4
        assert (await world.http.get("/health")).json() == {
            "status": "ok",
            "policy_version": 0,
            "engines": {"0": "healthy"},
        }
        await world.openai.chat.completions.create(**{**ASK, "model": "student"}, max_tokens=5)
        text = (await world.http.get("/metrics")).text
        for line in (
            'skyrl_http_requests_total{route="/v1/chat/completions",status="200"} 1.0',
            "skyrl_sampled_tokens_total 5.0",
            "skyrl_prompt_tokens_total 4.0",
            'skyrl_engines{state="healthy"} 1.0',
            "skyrl_policy_version 0.0",
        ):
            assert line in text.splitlines()


async def test_without_an_engine_health_says_so_and_requests_get_retry_after() -> None:
    async with endpoint() as world:
        world.engine.die()
        answer = await world.http.post("/v1/chat/completions", json=ASK)
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "engine_unavailable"
        health = await world.http.get("/health")
        assert (health.status_code, health.json()["engines"]) == (503, {"0": "dead"})


def test_the_scripted_end_is_the_tokenizers() -> None:
    assert TOKENIZER.eos_token_id == EOS

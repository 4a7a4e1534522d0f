"""OpenAI's bodies without HTTP: SkyRL's ``chat_completion`` and ``completion`` of the client."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from scripted import ScriptedEngine, settle
from test_client import TOKENIZER, client_of, publish

from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.interface import EngineCapabilities
from skyrl_train.inference.openai.errors import DialectError
from skyrl_train.types import PauseMode

MESSAGES = [{"role": "user", "content": "ab"}]


def payload(**body: Any) -> dict[str, Any]:
    return {"json": {"model": "policy", **body}, "headers": {}}


def writes(text: str) -> ScriptedEngine:
    """An engine that continues the two-character prompt with ``text``."""
    tokens = TOKENIZER.encode(text)
    return ScriptedEngine(lambda so_far, seed: tokens[len(so_far) - 2])


async def test_a_chat_completion_across_an_abort_is_one_openai_response_with_its_tokens() -> None:
    engine = writes("hello")
    client: InferenceEngineClient = client_of(engine)
    await publish(client, 0)
    body = payload(messages=MESSAGES, max_tokens=5, return_token_ids=True, session_id="s")
    task = asyncio.ensure_future(client.chat_completion(body))
    await settle()
    assert engine.requests[0]["session_ids"] == ["s"]
    engine.tick(2)
    await publish(client, 1, PauseMode.ABORT)
    await settle()
    engine.tick(3)
    response = await task
    (choice,) = response["choices"]
    assert choice["message"]["content"] == "hello"
    assert choice["finish_reason"] == "length"
    assert choice["skyrl"]["token_ids"] == TOKENIZER.encode("hello")
    assert choice["skyrl"]["versions"] == [0, 0, 1, 1, 1]
    assert response["usage"]["completion_tokens"] == 5


async def test_a_completion_takes_text_or_tokens() -> None:
    for prompt in ("ab", TOKENIZER.encode("ab")):
        engine = writes("xyz")
        client: InferenceEngineClient = client_of(engine)
        await publish(client, 0)
        task = asyncio.ensure_future(client.completion(payload(prompt=prompt, max_tokens=3)))
        await settle()
        engine.tick(3)
        assert (await task)["choices"][0]["text"] == "xyz"


class AdaptingEngine(ScriptedEngine):
    """Takes LoRA adapters."""

    @property
    def capabilities(self) -> EngineCapabilities:
        return dataclasses.replace(super().capabilities, adapters=True)

    async def load_adapter(self, name: str, path: str) -> None: ...


async def test_a_body_names_an_adapter_as_its_model_as_over_http() -> None:
    engine = AdaptingEngine(free_running=True)
    client = client_of(engine)
    await publish(client, 0)
    await client.load_adapter("judge", "/judge")
    for model in ("policy", "judge"):
        await client.chat_completion(payload(model=model, messages=MESSAGES, max_tokens=2))
        await client.completion(payload(model=model, prompt="ab", max_tokens=2))
    assert [request.get("adapter") for request in engine.requests] == [None, None, "judge", "judge"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": MESSAGES, "stream": True}, "stream"),
        ({"messages": MESSAGES, "max_tokens": 0}, "max_tokens"),
        ({}, "messages"),
    ],
)
async def test_bad_bodies_are_refused_by_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(DialectError) as error:
        await client_of(ScriptedEngine()).chat_completion(payload(**body))
    assert error.value.param == param


async def test_a_completion_without_a_body_is_refused() -> None:
    with pytest.raises(DialectError) as error:
        await client_of(ScriptedEngine()).completion({})
    assert error.value.param == "model"

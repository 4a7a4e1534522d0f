"""Bad input: an OpenAI-shaped error with the right status, no request left in an engine, no crash."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import time
from typing import Any

import openai
import orjson
import pytest
from endpoint_worlds import ADMIN_KEY, ASK, WatchedEngine, World, endpoint

from skyrl_train.endpoint.server.settings import ServerSettings
from skyrl_train.errors import ConfigError, EngineError
from skyrl_train.inference.interface import LogitAdjustment, SamplingParams
from skyrl_train.inference.requests import GenerationRequest

CHAT = "/v1/chat/completions"


def told(answer: Any, status: int, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param), error
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert answer.headers["x-request-id"] and answer.headers["content-type"] == "application/json"
    return error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"a": NaN}',
        b"\xff\xfe",
        b'{"model": "\xc3\x28"}',
        b'"\\ud800"',
        b"[]",
        b"1",
        b"[" * 5000,
    ],
    ids=repr,
)
async def test_a_body_that_is_no_json_object_is_rejected(body: bytes) -> None:
    async with endpoint() as world:
        answer = await world.http.post(CHAT, content=body, headers={"content-type": "application/json"})
        told(answer, 400, "invalid_json")


async def test_a_deeply_nested_body_is_rejected() -> None:
    async with endpoint() as world:
        body = json.dumps({**ASK, "metadata": None})[:-5] + '{"a":' * 500 + "1" + "}" * 501
        answer = await world.http.post(CHAT, content=body, headers={"content-type": "application/json"})
        told(answer, 400, "invalid_json")


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"model": "gpt-5"}, 404, "model_not_found", "model"),
        ({"model": None}, 400, "missing_required_parameter", "model"),
        ({"messages": "hi"}, 400, "invalid_type", "messages"),
        ({"max_tokens": 0}, 400, "invalid_value", "max_tokens"),
        ({"max_tokens": -3}, 400, "invalid_value", "max_tokens"),
        ({"max_tokens": 100_000}, 400, "context_length_exceeded", None),
        ({"stop": ["a", "b", "c", "d", "e"]}, 400, "array_above_max_length", "stop"),
        ({"frequency_penalty": 1}, 400, "unsupported_parameter", "frequency_penalty"),
        ({"response_format": {"type": "json_object"}}, 400, "unsupported_parameter", "response_format"),
        ({"surprise": 1}, 400, "unknown_parameter", "surprise"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_wrong_field_is_named(
    fields: dict[str, Any], status: int, code: str, param: str | None, streamed: bool
) -> None:
    async with endpoint() as world:
        told(await world.http.post(CHAT, json={**ASK, **fields, "stream": streamed}), status, code, param)
        assert world.engine.requests == []


async def test_more_top_logprobs_than_the_engines_support_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    few = dataclasses.replace(WatchedEngine().capabilities, max_top_logprobs=2)
    monkeypatch.setattr(WatchedEngine, "capabilities", few)
    async with endpoint() as world:
        asked = {**ASK, "logprobs": True, "top_logprobs": 3}
        told(await world.http.post(CHAT, json=asked), 400, "unsupported_parameter", "top_logprobs")
        asked = {"model": "policy", "prompt": "0", "logprobs": 3}
        told(await world.http.post("/v1/completions", json=asked), 400, "unsupported_parameter", "logprobs")


FORMAT = {"type": "json_schema", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "0", "response_format": {"type": "json_object"}}, "response_format"),
        ("/v1/completions", {"prompt": "0", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ("/v1/responses", {"input": "0", "text": {"format": {**FORMAT, "name": "x"}}}, "text.format"),
        ("/v1/responses", {"input": "0", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ("/v1/messages", {**ASK, "max_tokens": 1, "output_config": {"format": FORMAT}}, "output_config.format"),
        ("/v1/messages", {**ASK, "max_tokens": 1, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        (CHAT, {**ASK, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
async def test_a_format_is_rejected_by_the_name_that_the_caller_used(
    path: str, fields: dict[str, Any], param: str
) -> None:
    async with endpoint() as world:
        answer = await world.http.post(path, json={"model": "policy", **fields})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["message"] == f"{param}: the engines here cannot follow a format."
        assert error.get("param", param) == param  # Anthropic's errors have none


@pytest.mark.parametrize("field", ["min_p", "logit_bias"])
async def test_speculative_decoding_leaves_out_two_fields(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    can = dataclasses.replace(WatchedEngine().capabilities, logit_adjustment=True, **{field: False})
    monkeypatch.setattr(WatchedEngine, "capabilities", can)
    async with endpoint() as world:
        values: dict[str, Any] = {"min_p": 0.1, "logit_bias": {"5": 1.0}, "presence_penalty": 1.0}
        asked = {**ASK, "max_tokens": 2, field: values.pop(field)}
        told(await world.http.post(CHAT, json=asked), 400, "unsupported_parameter", field)
        asked = {"model": "policy", "prompt": "0", field: asked[field]}
        told(await world.http.post("/v1/completions", json=asked), 400, "unsupported_parameter", field)
        assert (await world.http.post(CHAT, json={**ASK, **values})).status_code == 200
        biased = SamplingParams(adjustment=LogitAdjustment(logit_bias=((5, 1.0),)))
        params = SamplingParams(min_p=0.1) if field == "min_p" else biased
        with pytest.raises(ConfigError, match=f"no {field}: vLLM excludes it"):
            await world.client.complete(GenerationRequest([3], params))


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_bias_of_a_token_that_the_model_lacks_is_rejected(
    streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        WatchedEngine, "capabilities", dataclasses.replace(WatchedEngine().capabilities, logit_adjustment=True)
    )
    async with endpoint() as world:
        asked = {"model": "policy", "stream": streamed, "logit_bias": {str(10**6): 1}}
        for path, fields in [(CHAT, ASK), ("/v1/completions", {"prompt": "0"}), ("/v1/responses", {"input": "0"})]:
            told(await world.http.post(path, json={**fields, **asked}), 400, "invalid_value", "logit_bias")
        answer = await world.http.post("/v1/messages", json={**ASK, "max_tokens": 1, **asked})
        assert answer.status_code == 400 and "logit_bias: 1000000" in answer.json()["error"]["message"]
        assert world.engine.requests == []


async def test_a_prompt_beyond_the_context_is_rejected() -> None:
    async with endpoint(WatchedEngine(max_model_len=16, free_running=True)) as world:
        long = {"model": "policy", "messages": [{"role": "user", "content": "0" * 16}]}
        told(await world.http.post(CHAT, json=long), 400, "context_length_exceeded")
        prompt = {"model": "policy", "prompt": "0" * 10, "max_tokens": 7}
        told(await world.http.post("/v1/completions", json=prompt), 400, "context_length_exceeded", "max_tokens")
        unknown = {"model": "policy", "prompt": [10**6]}
        told(await world.http.post("/v1/completions", json=unknown), 400, "invalid_value", "prompt")


LARGE: list[tuple[str, dict[str, Any], str | None]] = [
    (CHAT, {"messages": [{"role": "user", "content": "0" * 10_000_000}]}, None),
    (CHAT, {"messages": [{"role": "user", "content": "0"}] * 100_000}, "messages"),
    ("/v1/messages", {"messages": [{"role": "user", "content": "0"}] * 100_000, "max_tokens": 1}, "messages"),
    ("/v1/responses", {"input": [{"role": "user", "content": "0"}] * 100_000}, "input"),
    ("/v1/completions", {"prompt": [1] * 4_000_000}, "prompt"),
    ("/inference/v1/generate", {"token_ids": [1] * 4_000_000, "sampling_params": {}}, "token_ids"),
    ("/v1/completions", {"prompt": [[1], [1] * 4_000_000]}, "prompt[1]"),
    ("/v1/completions", {"prompt": "0" * 10_000_000}, "prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": "0" * 10_000_000}]}, None),
    ("/tokenize", {"prompt": "0" * 10_000_000}, "prompt"),
    ("/detokenize", {"tokens": [1] * 4_000_000}, "tokens"),
    (CHAT, {**ASK, "metadata": [[]] * 200_000, "max_tokens": 0}, "max_tokens"),
]


@pytest.mark.parametrize(
    ("path", "body", "param", "in_session"),
    [
        pytest.param(*large, in_session, marks=() if in_session == bool(number % 2) else pytest.mark.slow)
        for number, large in enumerate(LARGE)
        for in_session in (False, True)
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value),
)
async def test_one_body_does_not_block_other_requests(
    path: str, body: dict[str, Any], param: str | None, in_session: bool
) -> None:
    """Rejected by counting. Validation would block the event loop for up to 40 seconds, counting takes about 0.01.

    Seconds are processor time of this thread, so that other programs do not count. The limit is a multiple of the time for
    a fixed amount of parsing (0.01 s there), so that it grows with the slowness of the machine.
    """
    gc.disable()  # one collection takes longer than the parsing
    begun = time.thread_time()
    json.loads(f"[{'[],' * 100_000}0]")
    limit = 200 * (time.thread_time() - begun)
    gc.enable()
    content = orjson.dumps({"model": "policy", **body})
    async with endpoint(WatchedEngine(max_model_len=4096)) as world:
        key = world.store.open().api_key if in_session else ADMIN_KEY
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        longest = asyncio.create_task(longest_stall())
        answer = await world.http.post(path, content=content, headers=headers, timeout=500)
        assert answer.status_code == 400, answer.text
        if path != "/v1/messages":
            told(answer, 400, "invalid_value" if param == "max_tokens" else "context_length_exceeded", param)
        longest.cancel()
        assert await longest < limit
        assert world.engine.requests == []


async def longest_stall() -> float:
    """Processor seconds of this thread in the longest turn of the event loop; until it is cancelled."""
    worst, last = 0.0, time.thread_time()
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(0)
            worst, last = max(worst, time.thread_time() - last), time.thread_time()
    return worst


async def test_head_is_answered_wherever_get_is() -> None:
    async with endpoint() as world:
        for path in ("/health", "/v1/models", "/openapi.json"):
            head, get = await world.http.head(path), await world.http.get(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-length"] == get.headers["content-length"]
        assert (await world.http.head(CHAT)).status_code == 405
        assert (await world.http.head("/v1/images")).status_code == 404


async def test_the_sdk_raises_its_own_errors() -> None:
    async with endpoint() as world:
        with pytest.raises(openai.NotFoundError):
            await world.openai.chat.completions.create(**{**ASK, "model": "other"})
        with pytest.raises(openai.BadRequestError) as caught:
            await world.openai.chat.completions.create(**ASK, max_tokens=0)
        assert caught.value.param == "max_tokens"
        with pytest.raises(openai.AuthenticationError):
            await world.sdk("sk-wrong").chat.completions.create(**ASK)


async def test_unknown_routes_and_wrong_methods_have_the_same_shape() -> None:
    async with endpoint() as world:
        told(await world.http.get("/v1/images"), 404, "not_found")
        for wrong, right in (("/chat/completions", "/v1/chat/completions"), ("/v1/v1/messages", "/v1/messages")):
            answer = await world.http.post(wrong, json={})
            told(answer, 404, "not_found")
            assert f"{right!r} is one: the base URL" in answer.text
        answer = await world.http.delete(CHAT)
        told(answer, 405, "method_not_allowed")
        assert answer.headers["allow"] == "POST"
        told(
            await world.http.post(CHAT, content=b"{}", headers={"content-type": "text/plain"}),
            415,
            "unsupported_media_type",
        )


async def test_a_large_body_is_rejected_by_its_announced_and_by_its_real_size() -> None:
    async with endpoint(max_body_bytes=10_000) as world:
        body = json.dumps({**ASK, "metadata": "x" * 20_000}).encode()

        async def in_pieces() -> Any:
            for start in range(0, len(body), 1000):
                yield body[start : start + 1000]

        headers = {"content-type": "application/json"}
        told(await world.http.post(CHAT, content=body, headers=headers), 413, "request_too_large")
        told(await world.http.post(CHAT, content=in_pieces(), headers=headers), 413, "request_too_large")
        assert (await world.http.post(CHAT, json={**ASK, "max_tokens": 2})).status_code == 200


@pytest.mark.parametrize("sizes", [(70_000,), (40_000, 40_000)], ids=["one header", "many"])
@pytest.mark.parametrize("ended", [True, False])
async def test_large_headers_are_rejected(sizes: tuple[int, ...], ended: bool) -> None:
    async with endpoint() as world:
        reader, writer = await connect(world)
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n")
        for number, size in enumerate(sizes):
            writer.write(b"x-%d: %b" % (number, b"a" * size) + (b"\r\n" if ended else b""))
        if ended:
            writer.write(b"\r\n")
        answer = await asyncio.wait_for(reader.read(), 60)
        assert answer.startswith(b"HTTP/1.1 431 ") and b'"code":"headers_too_large"' in answer
        writer.close()


async def test_a_body_that_does_not_arrive_ends_with_408() -> None:
    async with endpoint(body_timeout_s=0.05) as world:
        reader, writer = await connect(world)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {ADMIN_KEY}\r\n"
        writer.write((head + "content-type: application/json\r\ncontent-length: 100\r\n\r\n{").encode())
        line = await asyncio.wait_for(reader.readline(), 60)
        assert line.startswith(b"HTTP/1.1 408 ")
        writer.close()


async def test_no_http_at_all_is_answered_and_forgotten() -> None:
    async with endpoint() as world:
        reader, writer = await connect(world)
        writer.write(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 60)).startswith(b"HTTP/1.1 400 ")
        writer.close()
        assert (await world.http.get("/health")).status_code == 200


async def test_requests_beyond_the_slots_get_429_and_retry_after() -> None:
    async with endpoint(WatchedEngine(), max_in_flight=1) as world:
        first = asyncio.create_task(world.http.post(CHAT, json={**ASK, "max_tokens": 1}))
        await world.engine.holds(1)
        answer = await world.http.post(CHAT, json=ASK)
        told(answer, 429, "rate_limit_exceeded")
        assert int(answer.headers["retry-after"]) >= 1
        world.engine.tick()
        assert (await first).status_code == 200


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_unexpected_error_reveals_no_internals(
    streamed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with endpoint() as world:

        def broken(*_: Any) -> Any:
            raise ZeroDivisionError("a secret of the inside")

        monkeypatch.setattr(world.client.renderer, "render", broken)
        answer = await world.http.post(CHAT, json={**ASK, "stream": streamed})
        error = told(answer, 500, "internal_error")
        assert error["type"] == "server_error" and "secret" not in answer.text
        assert "a secret of the inside" in caplog.text, "the log has the reason"
        assert f"request {answer.headers['x-request-id']} failed" in caplog.text, "and says whose it is"
        answer = await world.http.post("/tokenize", json={"messages": ASK["messages"]})
        told(answer, 500, "internal_error")


async def test_a_failure_inside_a_stream_is_an_error_event_and_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = WatchedEngine()
    async with endpoint(engine) as world:
        stream = await begun_stream(world)
        failing = EngineError("a secret of the inside")
        monkeypatch.setattr(type(engine), "_progress", _raising(failing))
        engine.tick()
        with pytest.raises(openai.APIError) as caught:
            [chunk async for chunk in stream]
        assert caught.value.code == "internal_error" and "secret" not in str(caught.value)


def _raising(error: Exception) -> Any:
    async def fail(*_: Any) -> None:
        raise error

    return fail


async def begun_stream(world: World) -> Any:
    asked = asyncio.create_task(world.openai.chat.completions.create(**ASK, stream=True))
    await world.engine.holds(1)
    await world.tick(1)
    return await asked


async def connect(world: World) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = world.http.base_url
    return await asyncio.open_connection(url.host, url.port)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host": "0.0.0.0"}, "admin key"),
        ({"host": "0.0.0.0", "admin_key": ADMIN_KEY, "open": True}, "without keys"),
        ({"host": "example.org"}, "admin key"),
        ({"admin_key": "short"}, "16"),
        ({"model_names": ()}, "model name"),
        ({"public_url": "10.0.0.7:8000", "port": 8000}, "must be a URL"),
        ({"public_url": "http://:8000", "port": 8000}, "must be a URL"),
        ({"public_url": "http://host:port", "port": 8000}, "must be a URL"),
        ({"public_url": "http://host:{Port}"}, "must be a URL"),
        ({"public_url": "http://user@host:{port}"}, "must be a URL"),
        ({"public_url": "http://host:{port}/?a=b"}, "must be a URL"),
        ({"public_url": "http://host:{port}/v1/"}, "/v1"),
        ({"public_url": "http://host:8000"}, "set the port"),
    ],
)
def test_an_endpoint_that_anybody_could_use_or_nobody_could_reach_is_rejected(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerSettings(**settings)


async def test_a_port_that_is_taken_is_a_configuration_error() -> None:
    async with endpoint() as world:
        with pytest.raises(ConfigError, match="cannot listen"):
            async with endpoint(port=world.http.base_url.port):
                pass

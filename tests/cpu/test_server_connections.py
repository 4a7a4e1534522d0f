"""Callers that leave, stand still, half-close or come again; and the endpoint's own end."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import openai
import pytest
from endpoint_worlds import ADMIN_KEY, ASK, WatchedEngine, World, endpoint
from scripted import settle

CHAT = "/v1/chat/completions"


def raw_request(key: str = ADMIN_KEY, **fields: Any) -> bytes:
    body = json.dumps({**ASK, **fields}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def connect(world: World) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = world.http.base_url
    return await asyncio.open_connection(url.host, url.port)


@pytest.mark.parametrize("key", [ADMIN_KEY, None], ids=["without a session", "with a session"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_caller_that_leaves_cancels_its_generation(streamed: bool, n: int, key: str | None) -> None:
    async with endpoint(WatchedEngine()) as world:
        session = None if key else world.store.open()
        _, writer = await connect(world)
        writer.write(raw_request(key or session.api_key, stream=streamed, n=n))
        await world.engine.holds(n)
        await world.tick(3)
        writer.close()
        await world.engine.holds(0)
        if session is not None:
            assert session.session.statistics().turns == 0, "what nobody got is not recorded"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_caller_that_leaves_cancels_all_its_completions(streamed: bool) -> None:
    async with endpoint(WatchedEngine()) as world:
        body = {"model": "policy", "prompt": ["0", "1"], "n": 2, "stream": streamed}
        asking = asyncio.create_task(world.http.post("/v1/completions", json=body))
        await world.engine.holds(4)
        await world.tick(3)
        asking.cancel()
        await world.engine.holds(0)


async def test_a_caller_that_half_closes_cancels_too() -> None:
    async with endpoint(WatchedEngine()) as world:
        _, writer = await connect(world)
        writer.write(raw_request())
        await world.engine.holds(1)
        writer.write_eof()
        await world.engine.holds(0)
        writer.close()


async def test_a_caller_that_resets_the_connection_cancels_too() -> None:
    async with endpoint(WatchedEngine()) as world:
        _, writer = await connect(world)
        writer.write(raw_request(stream=True))
        await world.engine.holds(1)
        await world.tick(2)
        linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
        await world.engine.holds(0)


async def test_a_cancelled_sdk_call_cancels_its_generation() -> None:
    async with endpoint(WatchedEngine()) as world:
        asking = asyncio.create_task(world.openai.chat.completions.create(**ASK))
        await world.engine.holds(1)
        asking.cancel()
        await world.engine.holds(0)
        stream = asyncio.create_task(world.openai.chat.completions.create(**ASK, stream=True))
        await world.engine.holds(1)
        await world.tick(2)
        await (await stream).close()
        await world.engine.holds(0)


async def test_a_reader_that_stands_still_is_given_up_and_holds_little() -> None:
    # Every token comes with its log-prob: some 150 bytes, so that the sockets' buffers are soon full.
    async with endpoint(WatchedEngine(lambda tokens, seed: 5), write_timeout_s=0.2) as world:
        _, writer = await connect(world)
        writer.transport.pause_reading()
        writer.write(raw_request(stream=True, logprobs=True, max_tokens=4000))
        await world.engine.holds(1)
        url = world.http.base_url
        for connection in list(world.server._server.server_state.connections):  # type: ignore[union-attr]
            if connection.client == writer.get_extra_info("sockname"):
                sock = connection.transport.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
                server_side = connection
        async with asyncio.timeout(20):
            while world.engine.running:
                world.engine.tick()
                await settle(4)
                assert server_side.transport.get_write_buffer_size() < 200_000, url
        assert len(world.engine.requests) == 1
        writer.transport.abort()


async def test_a_retry_joins_the_request_in_flight() -> None:
    async with endpoint(WatchedEngine()) as world:
        opened = world.store.open()
        sdk = world.sdk(opened.api_key)
        first = asyncio.create_task(sdk.chat.completions.create(**ASK, max_tokens=5))
        await world.engine.holds(1)
        again = {"x-stainless-retry-count": "1"}
        retry = asyncio.create_task(sdk.chat.completions.create(**ASK, max_tokens=5, extra_headers=again))
        await world.gateway.changed.wait_until(lambda: world.gateway.in_flight == 2)
        await settle()
        first.cancel()  # the first caller leaves; the retry keeps the generation alive
        await settle()
        await world.tick(5)
        done = await retry
        assert len(world.engine.requests) == 1, "sampled once"
        assert done.usage.completion_tokens == 5
        assert opened.session.statistics().turns == 1


async def test_a_retry_of_a_stream_gets_it_from_the_beginning() -> None:
    async with endpoint(WatchedEngine()) as world:
        opened = world.store.open()
        headers = {"authorization": f"Bearer {opened.api_key}"}
        asked = {**ASK, "max_tokens": 6, "stream": True}
        first = asyncio.create_task(world.http.post(CHAT, json=asked, headers=headers))
        await world.engine.holds(1)
        await world.tick(3)
        retrying = {**headers, "x-stainless-retry-count": "2"}
        retry = asyncio.create_task(world.http.post(CHAT, json=asked, headers=retrying))
        await world.gateway.changed.wait_until(lambda: world.gateway.in_flight == 2)
        await settle()
        await world.tick(3)
        assert (await first).content == (await retry).content
        assert len(world.engine.requests) == 1 and opened.session.statistics().turns == 1


async def test_the_sdks_own_retry_after_a_lost_answer_gets_the_same_answer() -> None:
    """The first answer is lost on the way; the SDK asks again by itself, and no second sample is drawn."""
    async with endpoint(WatchedEngine(free_running=True)) as world:
        opened = world.store.open()
        lost: list[httpx.Request] = []

        class LosesTheFirst(httpx.AsyncHTTPTransport):
            async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
                response = await super().handle_async_request(request)
                if not lost:
                    lost.append(request)
                    await response.aread()
                    raise httpx.ReadError("the network was away", request=request)
                return response

        async with httpx.AsyncClient(transport=LosesTheFirst()) as http:
            sdk = openai.AsyncOpenAI(base_url=world.url, api_key=opened.api_key, http_client=http, max_retries=1)
            done = await sdk.chat.completions.create(**ASK, max_tokens=5)
        assert done.choices[0].message.content
        assert len(world.engine.requests) == 1 and opened.session.statistics().turns == 1


@pytest.mark.parametrize("streamed", [False, True])
async def test_stopping_lets_requests_end_within_the_drain(streamed: bool) -> None:
    async with endpoint(WatchedEngine()) as world:
        asking = asyncio.create_task(world.http.post(CHAT, json={**ASK, "max_tokens": 3, "stream": streamed}))
        await world.engine.holds(1)
        stopping = asyncio.create_task(world.server.stop(drain_s=20))
        await settle()
        refused = await world.http.post(CHAT, json=ASK)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        world.engine.tick(3)
        answer = await asking
        assert answer.status_code == 200 and "length" in answer.text
        await stopping
        with pytest.raises(httpx.ConnectError):
            await world.http.get("/health")


async def test_stopping_interrupts_what_does_not_end() -> None:
    async with endpoint(WatchedEngine()) as world:
        whole = asyncio.create_task(world.http.post(CHAT, json=ASK))
        streamed = asyncio.create_task(world.http.post(CHAT, json={**ASK, "stream": True}))
        await world.engine.holds(2)
        await world.tick(2)
        await world.server.stop(drain_s=0)
        assert (await whole).status_code == 503
        assert '"code":"stopping"' in (await streamed).text
        assert world.engine.running == []


async def test_the_endpoint_leaves_signal_handlers_alone() -> None:
    import signal

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    async with endpoint() as world:
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
        assert (await world.http.get("/health")).status_code == 200

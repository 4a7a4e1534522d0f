"""Clients that disconnect, stall, half-close or retry; and the shutdown of the endpoint."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from endpoint_worlds import ADMIN_KEY, ASK, WatchedEngine, World, endpoint
from rich.console import Console
from scripted import ScriptedEngine, settle

from skyrl_train.config.schema import BuildModelConfig
from skyrl_train.endpoint.server.settings import ServerSettings
from skyrl_train.entrypoints import serve
from skyrl_train.models.tiny import build_model_folder

CHAT = "/v1/chat/completions"


def raw_request(key: str = ADMIN_KEY, **fields: Any) -> bytes:
    body = json.dumps({**ASK, **fields}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def connect(world: World) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = world.http.base_url
    return await asyncio.open_connection(url.host, url.port)


async def stand_still(world: World, **asked: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Any]:
    """Asks and reads nothing. The kernel holds little for this connection: left to itself it takes megabytes, at times all
    of an answer, and nobody would have to wait. Returns both sides of it."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    url = world.http.base_url
    await asyncio.get_running_loop().sock_connect(sock, (url.host, url.port))
    reader, writer = await asyncio.open_connection(sock=sock)
    writer.transport.pause_reading()
    writer.write(raw_request(**asked))
    await world.engine.holds(1)
    [connection] = [c for c in connections(world) if c.client == writer.get_extra_info("sockname")]
    connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return reader, writer, connection


@pytest.mark.parametrize("key", [ADMIN_KEY, None], ids=["without a session", "with a session"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_disconnects_cancels_its_generation(streamed: bool, n: int, key: str | None) -> None:
    async with endpoint(WatchedEngine()) as world:
        session = None if key else world.store.open()
        _, writer = await connect(world)
        writer.write(raw_request(key or session.api_key, stream=streamed, n=n))
        await world.engine.holds(n)
        await world.tick(3)
        writer.close()
        await world.engine.holds(0)
        if session is not None:
            assert session.session.statistics().turns == 0, "a response that nobody received is not recorded"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_disconnects_cancels_all_its_completions(streamed: bool) -> None:
    async with endpoint(WatchedEngine()) as world:
        body = {"model": "policy", "prompt": ["0", "1"], "n": 2, "stream": streamed}
        asking = asyncio.create_task(world.http.post("/v1/completions", json=body))
        await world.engine.holds(4)
        await world.tick(3)
        asking.cancel()
        await world.engine.holds(0)


async def test_a_client_that_half_closes_cancels_too() -> None:
    async with endpoint(WatchedEngine()) as world:
        _, writer = await connect(world)
        writer.write(raw_request())
        await world.engine.holds(1)
        writer.write_eof()
        await world.engine.holds(0)
        writer.close()


async def test_a_client_that_resets_the_connection_cancels_too() -> None:
    async with endpoint(WatchedEngine()) as world:
        _, writer = await connect(world)
        writer.write(raw_request(stream=True))
        await world.engine.holds(1)
        await world.tick(2)
        linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
        await world.engine.holds(0)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_reader_that_takes_nothing_of_its_answer_is_cut_off(streamed: bool) -> None:
    """The sampling has ended; the end of a stream, or a whole response, waits for the reader."""
    async with endpoint(WatchedEngine(free_running=True, max_model_len=10_000), write_timeout_s=0.2) as world:
        asked = {"stream": streamed, "logprobs": True, "max_tokens": 8_000, "ignore_eos": True}
        _, writer, connection = await stand_still(world, **asked, return_token_ids=True)
        async with asyncio.timeout(60):
            await world.gateway.changed.wait_until(lambda: world.gateway.in_flight == 0)
            while connection in connections(world):
                await settle()
        assert connection.transport.get_write_buffer_size() == 0
        assert world.engine.running == []
        writer.transport.abort()


async def test_a_response_holds_its_slot_until_the_reader_has_taken_it() -> None:
    async with endpoint(WatchedEngine(free_running=True, max_model_len=10_000), max_in_flight=1) as world:
        asked = {"logprobs": True, "max_tokens": 8_000, "ignore_eos": True, "return_token_ids": True}
        reader, writer, connection = await stand_still(world, **asked)
        await world.engine.holds(0)
        async with asyncio.timeout(60):
            while not connection.transport.get_write_buffer_size():
                await settle()
        assert (await world.http.post(CHAT, json=ASK)).status_code == 429
        writer.transport.resume_reading()
        async with asyncio.timeout(60):
            while world.gateway.in_flight:
                await reader.read(1 << 20)
        writer.close()


def connections(world: World) -> list[Any]:
    return list(world.server._server.server_state.connections)  # type: ignore[union-attr]


@pytest.mark.parametrize("said", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n", b"\r\n"], ids=repr)
async def test_a_connection_without_a_complete_head_is_closed(said: bytes) -> None:
    async with endpoint(head_timeout_s=0.1) as world:
        reader, writer = await connect(world)
        writer.write(said)
        answer = await asyncio.wait_for(reader.read(), 60)
        assert (
            answer.startswith(b"HTTP/1.1 408 ") and b'"code":"request_timeout"' in answer
            if len(said) > 2
            else not answer
        )
        writer.close()


async def test_a_line_end_between_requests_does_not_keep_a_connection_open() -> None:
    async with endpoint(head_timeout_s=0.1) as world:
        reader, writer = await connect(world)
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.write(b"\r\n")
        await asyncio.wait_for(reader.read(), 60)
        writer.close()


async def test_half_of_a_next_request_does_not_end_the_answer_to_this_one() -> None:
    async with endpoint(WatchedEngine(), head_timeout_s=0.05) as world:
        reader, writer = await connect(world)
        writer.write(raw_request(max_tokens=2) + b"GET /hea")
        await world.engine.holds(1)
        await asyncio.get_running_loop().run_in_executor(None, threading.Event().wait, 0.2)  # past the timeout
        await world.tick(2)
        assert (await asyncio.wait_for(reader.read(), 60)).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_connections_beyond_the_limit_are_rejected() -> None:
    async with endpoint(max_connections=2) as world:
        assert (await world.http.get("/health")).status_code == 200  # its connection stays open
        _, second = await connect(world)
        await settle(10)
        reader, third = await connect(world)
        answer = await asyncio.wait_for(reader.read(), 60)
        assert answer.startswith(b"HTTP/1.1 503 ") and b'"code":"too_many_connections"' in answer
        third.close()
        second.close()
        assert (await world.http.get("/health")).status_code == 200


@pytest.mark.parametrize("key", ["sk-wrong", ADMIN_KEY])
async def test_trailers_without_end_are_cut_off_and_none_are_kept(key: str) -> None:
    async with endpoint(body_timeout_s=600) as world:
        _, writer = await connect(world)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
        writer.write((head + "content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n0\r\n").encode())
        await settle(10)
        [connection] = connections(world)

        async def send_trailers() -> None:
            for _ in range(2000):  # 60 MB, more than the sockets hold
                writer.write(b"x-trailer: %b\r\n" % (b"v" * 30_000))
                await writer.drain()

        with pytest.raises(OSError):  # reset or broken, as it happens
            await send_trailers()
        assert len(connection.headers) == 4 and connection not in connections(world)


async def test_an_answer_before_the_end_of_the_body_ends_the_connection_and_arrives() -> None:
    async with endpoint() as world:
        reader, writer = await connect(world)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write((head + "content-length: 3000000\r\n\r\n").encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        writer.write(b" " * 3_000_000)
        await writer.drain()  # a sender that goes on is read, and not reset
        rest = await asyncio.wait_for(reader.read(), 60)
        assert b"connection: close\r\n" in rest and b"missing_api_key" in rest
        writer.close()


async def test_no_part_of_an_answer_waits_until_the_one_before_is_acknowledged() -> None:
    async with endpoint() as world:
        await world.http.get("/health")
        [connection] = connections(world)
        assert connection.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_an_answer_after_the_body_keeps_the_connection() -> None:
    async with endpoint() as world:
        reader, writer = await connect(world)
        for _ in range(2):
            writer.write(raw_request(key="sk-wrong"))
            assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
            while (await reader.readline()).strip():
                pass
            await reader.readexactly(
                len(
                    b'{"error":{"message":"The API key is wrong, or its session has ended.","type":'
                    b'"authentication_error","param":null,"code":"invalid_api_key"}}'
                )
            )
        writer.close()


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


async def test_a_stalled_reader_is_disconnected_and_holds_little_memory() -> None:
    # Every token comes with its log-prob: some 150 bytes, so that the sockets' buffers are soon full.
    async with endpoint(WatchedEngine(lambda tokens, seed: 5), write_timeout_s=0.2) as world:
        _, writer, connection = await stand_still(world, stream=True, logprobs=True, max_tokens=4000)
        async with asyncio.timeout(60):
            while world.engine.running:
                world.engine.tick()
                await settle(4)
                assert connection.transport.get_write_buffer_size() < 200_000
        assert len(world.engine.requests) == 1
        writer.transport.abort()


async def test_a_reader_that_resumes_gets_the_backlog_piece_by_piece() -> None:
    """The tokens sampled meanwhile wait as tokens, not as bytes in the connection's buffer."""
    async with endpoint(WatchedEngine(lambda tokens, seed: 5), write_timeout_s=600) as world:
        reader, writer, connection = await stand_still(world, stream=True, logprobs=True, max_tokens=4000)
        for _ in range(3900):
            world.engine.tick()
            await settle(2)
        writer.transport.resume_reading()
        held, taken = 0, 0
        async with asyncio.timeout(60):
            while taken < 200_000:
                taken += len(await reader.read(1 << 16))
                held = max(held, connection.transport.get_write_buffer_size())
        assert held < 200_000
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


async def test_the_retry_of_a_refused_request_takes_no_response_of_an_equal_one() -> None:
    """An agent samples twice in parallel, and the endpoint has no room for the second request at first."""
    async with endpoint(WatchedEngine(), max_in_flight=2) as world:
        opened = world.store.open()
        headers, asked = {"authorization": f"Bearer {opened.api_key}"}, {**ASK, "max_tokens": 4}
        first = asyncio.create_task(world.http.post(CHAT, json=asked, headers=headers))
        other = asyncio.create_task(world.http.post(CHAT, json=ASK))
        await world.engine.holds(2)
        assert (await world.http.post(CHAT, json=asked, headers=headers)).status_code == 429
        other.cancel()
        await world.engine.holds(1)
        again = {**headers, "x-stainless-retry-count": "1"}
        retry = asyncio.create_task(world.http.post(CHAT, json=asked, headers=again))
        await world.engine.holds(2)
        await world.tick(4)
        assert [(await request).status_code for request in (first, retry)] == [200, 200]
        assert opened.session.statistics().turns == 2


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


async def test_stopping_interrupts_requests_that_do_not_end() -> None:
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_server_whose_engines_still_start_ends_at_a_signal(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_model_folder(BuildModelConfig(), tmp_path / "model", seed=0)
    engine, starting = ScriptedEngine(), asyncio.Event()

    async def start() -> None:
        starting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(engine, "start", start)
    settings = ServerSettings(admin_key=ADMIN_KEY)
    model, quiet = str(tmp_path / "model"), Console(quiet=True)
    serving = asyncio.create_task(serve._serve(model, [engine], settings, "float32", 0.0, quiet))
    try:
        began = asyncio.create_task(starting.wait())
        await asyncio.wait([began, serving], return_when=asyncio.FIRST_COMPLETED)
        if began.done():
            os.kill(os.getpid(), number)
        await serving
        assert began.done()
    finally:
        for each in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(each)

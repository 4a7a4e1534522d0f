"""Processor time and memory of the control process per request to a remote vLLM engine, beside SkyRL's client.

    pip install --no-deps --target FOLDER skyrl==0.3.0
    python benchmarks/remote_wire.py --skyrl FOLDER [--in-flight 64 512 2000] [--tokens 64 1024] [--rounds 5]

A scripted server in a process of its own answers both clients at the same route (``/inference/v1/generate``) with the same
bytes, token ids and log-probs as vLLM's server sends them. It holds each request until all places are taken, so that the
given number is in flight. Each client runs in a process of its own, and they take turns. SkyRL's client gets a tokenizer that
does nothing, and no limit to its requests in flight.

Printed: processor milliseconds per request (median over the rounds) and KiB of memory per request in flight (the growth of the
resident set from idle to all in flight), of both, and the ratios ours / theirs. Without ``--skyrl``, ours alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, ClassVar

from skyrl_train.inference.engines.vllm.remote_server import ENGINE_PATH
from skyrl_train.inference.engines.vllm.remote_wire import GENERATE_PATH
from skyrl_train.weight_sync.shared_area import machine

PROMPT = list(range(64))
FACTS = {
    "instance": "one",
    "machine": machine(),
    "dead": False,
    "max_model_len": 1 << 20,
    "logprobs_mode": "processed_logprobs",
    "max_logprobs": 20,
    "priorities": True,
    "prefix_caching": True,
    "structured_output": True,
    "token_endpoint": True,
    "server_processes": 1,
    "weight_reception": True,
}


def answer(tokens: int) -> bytes:
    """Return the body of a finished answer, in the shape of vLLM's server."""
    content = [
        {"token": f"token_id:{i % 1000}", "logprob": -1.2345678 - i / 7919, "bytes": None, "top_logprobs": []}
        for i in range(tokens)
    ]
    choice = {
        "index": 0,
        "token_ids": [i % 1000 for i in range(tokens)],
        "finish_reason": "length",
        "logprobs": {"content": content},
        "weight_versions": [{"version": "default", "start": 0, "end": tokens}],
    }
    return json.dumps({"request_id": "0", "choices": [choice], "prompt_logprobs": None}).encode()


class ScriptedServer(asyncio.Protocol):
    """One connection. Generation requests wait in ``held`` until ``in_flight`` of them have come, from all connections."""

    in_flight = 1
    reply = b""
    held: ClassVar[list[ScriptedServer]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.received = transport, b""

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, separator, rest = self.received.partition(b"\r\n\r\n")
        if not separator:
            return
        lines = head.lower().split(b"\r\n")
        length = next((int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length")), 0)
        if len(rest) < length:
            return
        self.received = rest[length:]
        path = head.split(b" ", 2)[1].decode()
        if path == GENERATE_PATH:
            ScriptedServer.held.append(self)
            if len(ScriptedServer.held) == ScriptedServer.in_flight:
                waiting, ScriptedServer.held = ScriptedServer.held, []
                for connection in waiting:
                    connection.send(ScriptedServer.reply)
        elif path.startswith("/reply/"):  # what the next requests get
            in_flight, tokens = path.split("/")[2:]
            ScriptedServer.in_flight, ScriptedServer.reply = int(in_flight), answer(int(tokens))
            self.send(b"{}")
        else:
            self.send(json.dumps(FACTS).encode() if path == ENGINE_PATH else b"{}")

    def send(self, body: bytes) -> None:
        if not self.transport.is_closing():
            head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            self.transport.write(head.encode() + body)


def serve(pipe: Pipe) -> None:
    """Run the server; its port goes into the pipe."""

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(ScriptedServer, "127.0.0.1", 0, backlog=8192)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    raise_file_limit()
    asyncio.run(run())


def raise_file_limit() -> None:
    """Let this process open as many sockets as it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class NullTokenizer:
    """Decodes nothing."""

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def batch_decode(self, sequences: list[list[int]], **_: Any) -> list[str]:
        return [""] * len(sequences)


async def our_client(url: str, tokens: int) -> tuple[Callable[[], Awaitable[Any]], Callable[[], Awaitable[None]]]:
    """Return a function that makes one request, and one that closes the client."""
    from skyrl_train.inference.engines.vllm.remote import RemoteVLLMEngine
    from skyrl_train.inference.interface import InferenceEngineInput

    engine = RemoteVLLMEngine(url)
    await engine.start()
    asked = InferenceEngineInput(prompt_token_ids=[PROMPT], sampling_params={"max_tokens": tokens})

    async def once() -> None:
        output = await engine.generate(asked)
        assert len(output["response_ids"][0]) == tokens == len(output["response_logprobs"][0])

    return once, engine.teardown


async def their_client(url: str, tokens: int) -> tuple[Callable[[], Awaitable[Any]], Callable[[], Awaitable[None]]]:
    """The same for SkyRL's client."""
    import typing

    import typing_extensions

    vars(typing)["TypedDict"] = typing_extensions.TypedDict  # SkyRL wants Python 3.12, where the two are the same
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient

    client = RemoteInferenceClient(
        proxy_url=url, server_urls=[url], data_parallel_size=1, model_name="policy", tokenizer=NullTokenizer()
    )
    asked = {"prompt_token_ids": [PROMPT], "sampling_params": {"max_tokens": tokens, "logprobs": 0}}

    async def once() -> None:
        output = await client.generate(asked)
        assert len(output["response_ids"][0]) == tokens == len(output["response_logprobs"][0])

    async def close() -> None:
        session = await client._get_session()
        await session.close()

    return once, close


def peak_kib() -> int:
    """Return the most memory that this process has held since the last call of :func:`forget_peak`, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def forget_peak() -> None:
    """Let :func:`peak_kib` begin anew with what is held now."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(name: str, folder: str | None, port: int, in_flight: int, tokens: int) -> tuple[float, float]:
    """Return processor milliseconds per request, and KiB per request in flight. Runs in a fresh process."""
    raise_file_limit()
    if folder is not None:
        sys.path.append(folder)  # after ours, so that it shadows nothing
    os.environ["SKYRL_GENERATE_CONCURRENCY_PER_ENGINE"] = "0"

    async def run() -> tuple[float, float]:
        import aiohttp

        url = f"http://127.0.0.1:{port}"
        once, close = await (our_client if name == "ours" else their_client)(url, tokens)
        turns = max(2, 2000 // in_flight)
        async with aiohttp.ClientSession() as session:
            for places in (1, in_flight):
                async with session.get(f"{url}/reply/{places}/{tokens}") as response:
                    await response.read()
                if places == 1:
                    await once()  # imports what it needs
        forget_peak()
        before_kib = peak_kib()
        await asyncio.gather(*(once() for _ in range(in_flight)))  # opens the connections
        start = time.process_time()
        for _ in range(turns):
            await asyncio.gather(*(once() for _ in range(in_flight)))
        spent = time.process_time() - start
        held_kib = peak_kib() - before_kib
        await close()
        return 1e3 * spent / (turns * in_flight), held_kib / in_flight

    return asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skyrl", metavar="FOLDER", help="where SkyRL's package is")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[64, 512, 2000])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    server = spawn.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    port = ours.recv()
    names = ["ours", *(["SkyRL"] if options.skyrl else [])]
    both = " / ".join(names)
    print(f"| in flight | tokens | processor time of a request, {both} | ratio | memory of a request, {both} | ratio |")
    print("|---" * 6 + "|", flush=True)
    for in_flight in options.in_flight:
        for tokens in options.tokens:
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
            for _ in range(options.rounds):
                for name in names:
                    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
                        job = pool.submit(measure, name, options.skyrl, port, in_flight, tokens)
                        found[name].append(job.result())
            medians = {
                name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in found.items()
            }
            line = f"| {in_flight:,} | {tokens} |"
            for place, unit, digits in ((0, "ms", 2), (1, "KiB", 0)):
                values = [medians[name][place] for name in names]
                ratio = f"{values[0] / values[1]:.2f}" if options.skyrl else ""
                line += f" {' / '.join(f'{value:.{digits}f}' for value in values)} {unit} | {ratio} |"
            print(line, flush=True)
    server.terminate()


if __name__ == "__main__":
    main()

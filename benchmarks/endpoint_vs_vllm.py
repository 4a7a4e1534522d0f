"""Our endpoint in front of a vLLM engine against vLLM's own OpenAI server, with the same engine arguments and the same load.

    python benchmarks/endpoint_vs_vllm.py [--requests 64] [--tokens 64] [--rounds 5] [--width 128]
        [--logprobs | --hidden-logprobs] [--grammar]

Both servers run on the CPU and stay up; rounds alternate between them, whole answers and streams. A round keeps
``--requests`` chat completions in flight until four times as many have ended. Printed: tokens per second and the p99 of the
latency of a request, per server (medians over the rounds), and the ratios ours / theirs. Our engine computes a log-prob
for every token whether or not the answer shows it. For vLLM's server:

| | its engine computes log-probs | answers show them, of both servers |
|---|---|---|
| (nothing) | no | no |
| ``--hidden-logprobs`` | yes, in the form that ours asks for | no |
| ``--logprobs`` | yes | yes |

``--grammar`` also measures answers that follow a JSON schema, in the same rounds, and prints the share of the speed that it
leaves to each server.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import runpy
import signal
import socket
import statistics
import string
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_train.config.schema import BuildModelConfig
from skyrl_train.models.tiny import build_model_folder

CONTEXT = 256
THEIRS = "vllm.entrypoints.openai.api_server"
LAUNCH_THEIRS = "launch-theirs-with-hidden-logprobs"  # as the first argument, this file is that server
START_S = 600.0
# An array of so many short strings is long enough for every answer.
SCHEMA = {
    "type": "array",
    "minItems": 200,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer"}},
        "required": ["name", "n"],
        "additionalProperties": False,
    },
}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@dataclass(frozen=True)
class Served:
    """A running server: its process, its port and its name of the model."""

    process: subprocess.Popen[bytes]
    port: int
    model: str


@dataclass(frozen=True)
class Round:
    """Results of one server under one load."""

    tokens_per_s: float
    p99_s: float


def start(command: list[str], port: int, model: str, log: Path) -> Served:
    """Start a server in a separate process session, so that its engine process ends with it."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command, "--host", "127.0.0.1", "--port", str(port)],
            env={**os.environ, **ENVIRONMENT},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    return Served(process, port, model)


def start_ours(folder: str, requests: int, log: Path) -> Served:
    """Start the endpoint over ``VLLMEngine``."""
    command = ["-m", "skyrl_train", "serve", folder, "--backend", "vllm", "--open"]
    sizes = ["--max-num-seqs", str(requests), "--max-model-len", str(CONTEXT)]
    return start([*command, *sizes], free_port(), "policy", log)


def start_theirs(folder: str, requests: int, log: Path, hidden_logprobs: bool) -> Served:
    """Start vLLM's own server with the engine arguments of ``VLLMEngine``."""
    sizes = ["--max-num-seqs", str(requests), "--max-model-len", str(CONTEXT)]
    engine = ["--dtype", "float32", "--enforce-eager", "--logprobs-mode", "processed_logprobs"]
    quiet = ["--disable-log-stats", "--disable-uvicorn-access-log", "--generation-config", "vllm"]
    cache = ["--scheduling-policy", "priority", "--kv-cache-memory-bytes", str(1 << 28)]
    program = [__file__, LAUNCH_THEIRS] if hidden_logprobs else ["-m", THEIRS]
    command = [*program, "--model", folder, "--served-model-name", "policy"]
    return start([*command, *sizes, *engine, *quiet, *cache], free_port(), "policy", log)


def serve_theirs_with_hidden_logprobs(arguments: list[str]) -> None:
    """vLLM's own server, which asks its engine for log-probs that no answer shows. It has no setting for that."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    as_asked = ChatCompletionRequest.to_sampling_params

    def with_logprobs(request: Any, *args: Any, **kwargs: Any) -> Any:
        params = as_asked(request, *args, **kwargs)
        params.logprobs, params.flat_logprobs = 0, True
        return params

    ChatCompletionRequest.to_sampling_params = with_logprobs
    sys.argv = [THEIRS, *arguments]
    runpy.run_module(THEIRS, run_name="__main__")


async def wait_until_up(server: Served, log: Path) -> None:
    """Wait until the server answers."""
    async with asyncio.timeout(START_S):
        while True:
            if server.process.poll() is not None:
                raise SystemExit(f"a server ended while it started; its output:\n{await asyncio.to_thread(tail, log)}")
            try:
                if (
                    await exchange(server.port, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                ).ok:
                    return
            except OSError:
                pass
            await asyncio.sleep(0.5)


def tail(log: Path) -> str:
    """Return the last lines of a server's output."""
    return log.read_text()[-3000:]


@dataclass(frozen=True)
class Answer:
    """Status and size of a response: the load must cost little beside the servers."""

    ok: bool
    events: int
    beginning: bytes


async def exchange(port: int, request: bytes) -> Answer:
    """Send one request on a new connection and read the answer to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        events, beginning = 0, b""
        while part := await reader.read(1 << 16):
            beginning = beginning or part[:300]
            events += part.count(b"data: ")
        return Answer(b" 200 " in head.split(b"\r\n", 1)[0], events, beginning)
    finally:
        writer.close()


def chat_request(server: Served, tokens: int, stream: bool, logprobs: bool, guided: bool) -> bytes:
    """Return the request of a chat completion of exactly ``tokens`` tokens."""
    body: dict[str, Any] = {
        "model": server.model,
        "messages": [{"role": "user", "content": "07c="}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": stream,
        "logprobs": logprobs,
    }
    if guided:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(content)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + content


async def measure(server: Served, requests: int, tokens: int, request: bytes, stream: bool) -> Round:
    """Keep ``requests`` in flight until four times as many have ended."""
    total = left = 4 * requests
    latencies: list[float] = []

    async def worker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            began = time.perf_counter()
            answer = await exchange(server.port, request)
            if not answer.ok or (stream and answer.events < 2):
                raise RuntimeError(f"port {server.port} rejected a request: {answer.beginning!r}")
            latencies.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(requests)))
    return Round(total * tokens / (time.perf_counter() - began), statistics.quantiles(latencies, n=100)[98])


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def compare(ours: Served, theirs: Served, options: argparse.Namespace) -> None:
    """Alternate between the servers and print a row per kind of answer."""
    print(
        f"{options.requests} in flight, {options.tokens} tokens each, width {options.width}, {options.rounds} rounds\n"
    )
    head = ["answers", "tokens/s, ours / theirs", "ratio", "p99 latency, ours / theirs", "ratio"]
    head += ["speed left by the grammar, ours / theirs"] if options.grammar else []
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    servers, kinds = {"ours": ours, "theirs": theirs}, (False, True) if options.grammar else (False,)
    for stream in (False, True):
        rounds: dict[tuple[str, bool], list[Round]] = {}
        for number in range(options.rounds + 1):
            for guided, (name, server) in itertools.product(kinds, servers.items()):
                request = chat_request(server, options.tokens, stream, options.logprobs, guided)
                measured = await measure(server, options.requests, options.tokens, request, stream)
                if number:  # the first round warms up
                    rounds.setdefault((name, guided), []).append(measured)
        speed = {kind: statistics.median(one.tokens_per_s for one in measured) for kind, measured in rounds.items()}
        late = {kind: statistics.median(one.p99_s for one in measured) for kind, measured in rounds.items()}
        for guided in kinds:
            mine, other = ("ours", guided), ("theirs", guided)
            label = f"{'stream' if stream else 'whole'}{', grammar' if guided else ''}"
            row = (
                f"| {label} | {speed[mine]:,.0f} / {speed[other]:,.0f} | **{speed[mine] / speed[other]:.2f}** "
                f"| {late[mine]:.2f} / {late[other]:.2f} s | **{late[mine] / late[other]:.2f}** |"
            )
            if options.grammar:
                left = [f"{speed[name, True] / speed[name, False]:.2f}" for name in servers]
                row += f" {' / '.join(left) if guided else ''} |"
            print(row, flush=True)


def main() -> None:
    """Parse the command line, start both servers, compare them, and end them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64, help="in flight; also max_num_seqs of both engines")
    parser.add_argument("--tokens", type=int, default=64, help="per answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=128, help="of the model's two layers")
    logprobs = parser.add_mutually_exclusive_group()
    logprobs.add_argument("--logprobs", action="store_true", help="answers show the log-prob of each token")
    logprobs.add_argument("--hidden-logprobs", action="store_true", help="vLLM's engine computes them as ours does")
    parser.add_argument("--grammar", action="store_true", help="also measure answers under a JSON schema")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the servers end with this program
    with tempfile.TemporaryDirectory() as folder:
        model, logs = Path(folder) / "model", (Path(folder) / "ours.log", Path(folder) / "theirs.log")
        build = BuildModelConfig(hidden_size=options.width, intermediate_size=2 * options.width)
        if options.grammar:
            build.alphabet = string.printable
        build_model_folder(build, model, seed=0)
        servers = [start_ours(str(model), options.requests, logs[0])]
        try:
            servers.append(start_theirs(str(model), options.requests, logs[1], options.hidden_logprobs))
            asyncio.run(run(servers, logs, options))
        finally:
            for server in servers:
                os.killpg(server.process.pid, signal.SIGKILL)
                server.process.wait()


async def run(servers: list[Served], logs: tuple[Path, Path], options: argparse.Namespace) -> None:
    """Wait for both servers, then compare them."""
    for server, log in zip(servers, logs, strict=True):
        await wait_until_up(server, log)
    await compare(servers[0], servers[1], options)


if __name__ == "__main__":
    if sys.argv[1:2] == [LAUNCH_THEIRS]:
        serve_theirs_with_hidden_logprobs(sys.argv[2:])
    else:
        main()

"""Two servers for the remote vLLM engine: a real ``vllm serve`` on the CPU, and a scripted one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from vllm_forks import fork_server_command
from vllm_read_back import EXTENSION

from skyrl_train.inference.engines.vllm.arguments import SCHEDULER
from skyrl_train.inference.engines.vllm.remote_server import ENGINE_PATH, MIDDLEWARE, REQUESTS_PATH
from skyrl_train.inference.engines.vllm.remote_wire import GENERATE_PATH
from skyrl_train.weight_sync.shared_area import machine

KEY = "open-sesame"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_API_KEY": KEY,
}


class VLLMServer:
    """A process of its own session, so that its children end with it."""

    def __init__(self, model_path: str, log: Path, port: int, **options: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self.log = log
        settings = {
            "model": model_path,
            "host": "127.0.0.1",
            "port": str(port),
            "dtype": "float32",
            "kv-cache-memory-bytes": str(64 << 20),
            "max-model-len": "16384",
            "max-num-seqs": "8",
            "generation-config": "vllm",
            "logprobs-mode": "processed_logprobs",
            "scheduling-policy": "priority",
            "worker-extension-cls": EXTENSION,
            "scheduler-cls": SCHEDULER,
            "middleware": MIDDLEWARE,
            **options,
        }
        flags = [word for name, value in settings.items() for word in (f"--{name}", value)]
        switches = ["enable-scale-out", "enable-prompt-tokens-details", "enforce-eager"]
        switches += ["disable-uvicorn-access-log", "disable-log-stats"]
        self._process = fork_server_command([*flags, *(f"--{name}" for name in switches)], ENVIRONMENT, log)

    def kill(self) -> None:
        """Ends the server and its engine process, now. Idempotent."""
        if self._process.is_alive():
            os.killpg(self._process.pid or 0, signal.SIGKILL)
            self._process.join()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get(url: str, key: str | None = None, body: Any = None) -> tuple[int, Any]:
    """Status and JSON, as any HTTP client sees them. Blocks."""
    headers = {"content-type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.loads(response.read() or "null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or "null")


# A scripted server ----------------------------------------------------------------------------------------------------

Reply = tuple[int, Any]


class FakeServer:
    """Speaks HTTP like the server; a test sets ``facts`` and ``answer``, and may drop the connections.

    ``answer`` makes the reply to a generation request, and may take its time; a list is sent as the events of a stream.
    """

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {
            "instance": "one",
            "machine": machine(),
            "dead": False,
            "max_model_len": 64,
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": 20,
            "priorities": True,
            "prefix_caching": True,
            "structured_output": True,
            "token_endpoint": True,
            "server_processes": 1,
            "data_parallel_size": 1,
            "weight_reception": True,
            "weight_version": "default",
            "paused": False,
            "unfinished": 0,
            "held": 0,
        }
        self.seen: list[tuple[str, Any]] = []  # path and body of each request, in order
        self.requests: dict[str, Any] = {}
        self.answer: Callable[[dict[str, Any]], Awaitable[Any]] = saying(whole([5]))
        self.on_abort: Callable[[], None] = lambda: None
        self.fail: dict[str, Reply] = {}  # path -> its answer instead
        self.drop: set[str] = set()  # paths whose connection is closed without an answer
        self.hang: set[str] = set()
        self.hanging = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port, backlog=4096)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Nobody listens any more, and open connections are reset."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            length = next((int(line.split(":")[1]) for line in head if line.lower().startswith("content-length")), 0)
            body = json.loads(await reader.readexactly(length)) if length else None
            await self._reply(head[0].split(" ")[1], body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _reply(self, path: str, body: Any, writer: asyncio.StreamWriter) -> None:
        self.seen.append((path, body))
        place = path.partition("?")[0]
        if place in self.hang:
            self.hanging.set()
            await asyncio.get_running_loop().create_future()
        if place in self.drop:
            return
        status, content = self.fail[place] if place in self.fail else (200, await self._content(place, body))
        text = (
            "".join(f"data: {json.dumps(event)}\n\n" for event in content) + "data: [DONE]\n\n"
            if isinstance(content, list)
            else json.dumps(content)
        )
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(text)}\r\nconnection: close\r\n\r\n{text}".encode())
        await writer.drain()

    async def _content(self, path: str, body: Any) -> Any:
        match path:
            case _ if path == ENGINE_PATH:
                return self.facts
            case _ if path == REQUESTS_PATH:
                return self.requests
            case _ if path == GENERATE_PATH:
                return await self.answer(body)
            case "/update_weight_version":
                self.facts["weight_version"] = body["new_version"]
            case "/abort_requests":
                self.on_abort()
            case "/pause" | "/resume":
                self.facts["paused"] = path == "/pause"
            case "/collective_rpc":
                return {"results": [None]}
        return {}


def saying(*contents: Any) -> Callable[[dict[str, Any]], Awaitable[Any]]:
    """Answers with these in turn, then with the last one."""
    left = list(contents)

    async def answer(body: dict[str, Any]) -> Any:
        return left.pop(0) if len(left) > 1 else left[0]

    return answer


def event(tokens: list[int], reason: str | None = None, spans: list[tuple[str, int]] | None = None) -> dict[str, Any]:
    """One part of an answer in the server's shape."""
    return {
        "choices": [
            {
                "token_ids": tokens,
                "finish_reason": reason,
                "logprobs": {"content": [{"token_id": token, "logprob": -float(token)} for token in tokens]},
                "weight_versions": None
                if spans is None
                else [{"version": version, "start": start, "end": -1} for version, start in spans],
            }
        ]
    }


def whole(tokens: list[int], version: str = "0") -> dict[str, Any]:
    """A finished answer."""
    return event(tokens, "length", [(version, 0)])

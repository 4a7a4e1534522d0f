"""Any engine in another process: a proxy with the engine's own contract. Where the process is, subclasses say.

generate / pause / load_weights ──calls──> WorkerConnection ~~> EngineHost ──> engine
                        futures <──items, results──

Only plain data crosses the border: token ids, log-probs, versions, and errors with class and message.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_train.config.import_path import import_name
from skyrl_train.inference.engines.hosted import HostedEngine, plain_request
from skyrl_train.inference.interface import (
    EngineCapabilities,
    InferenceEngineInput,
    InferenceEngineInterface,
    InferenceEngineOutput,
    TokenChunk,
)
from skyrl_train.runtime.process import gc_paused, write_output_to
from skyrl_train.workers.connection import WorkerLink
from skyrl_train.workers.host import Hosted
from skyrl_train.workers.process import ProcessLink, SocketChannel, serve_hosted

# An engine of vLLM that is torn down waits up to a minute for its processes, whose memory the next one needs.
STOP_LIMIT_S = 90.0


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """The facts about a running engine that the proxy needs."""

    capabilities: EngineCapabilities
    policy_version: int
    pid: int


class EngineProxy(HostedEngine):
    """The engine that ``factory(**arguments)`` returns, hosted in another process.

    Args:
        factory: import path, such as ``skyrl_train.inference.engines.vllm:VLLMEngine``. It is imported in that process only.
        arguments: of the factory; plain data.
        name: for errors.
    """

    def __init__(self, factory: str, arguments: Mapping[str, Any], name: str) -> None:
        super().__init__(name)
        self._factory = factory
        self._arguments = dict(arguments)
        self._started: StartedEngine | None = None

    @property
    def capabilities(self) -> EngineCapabilities:
        """The hosted engine's capabilities.

        Raises:
            EngineDeadError: the engine was never started.
        """
        if self._started is None:
            raise self._gone_error("it was not started; call start() first")
        return self._started.capabilities

    @property
    def pid(self) -> int | None:
        """The process id of the engine's host on its machine, once started."""
        return None if self._started is None else self._started.pid

    async def _start(self, link: WorkerLink, log_file: str | None, timeout_s: float | None) -> None:
        """Bring the host up and start the engine in it.

        Args:
            log_file: for all output of the host's process; None: where the link lets it go.
        """
        connection = self._connect(link)
        self._started = await connection.start(self._factory, self._arguments, log_file, timeout_s=timeout_s)
        self._version = self._started.policy_version

    async def generate(self, engine_input: InferenceEngineInput) -> InferenceEngineOutput:
        output: InferenceEngineOutput = await self.connection.call("generate", _plain(engine_input))
        return output

    async def stream(self, engine_input: InferenceEngineInput) -> AsyncIterator[TokenChunk]:
        async with aclosing(self.connection.stream("stream", _plain(engine_input))) as chunks:
            async for chunk in chunks:
                yield chunk

    async def reset_prefix_cache(self) -> None:
        await self.connection.call("reset_prefix_cache")

    async def load_adapter(self, name: str, path: str) -> None:
        """See the interface; ``path`` is looked for on the host's machine."""
        await self.connection.call("load_adapter", name, path)

    async def unload_adapter(self, name: str) -> None:
        await self.connection.call("unload_adapter", name)


class ProcessEngine(EngineProxy):
    """An engine in a child process, so that its own work does not share this process's interpreter.

    Args:
        factory, arguments: see :class:`EngineProxy`.
        log_file: for all output of the process; None: it is this process's.
        stop_timeout_s: how long :meth:`teardown` lets the engine clean up before its process is killed.

    After the process has died, :meth:`start` makes a new one, whose engine has no weights.
    """

    def __init__(
        self,
        factory: str,
        arguments: Mapping[str, Any],
        *,
        log_file: str | None = None,
        stop_timeout_s: float = STOP_LIMIT_S,
    ) -> None:
        super().__init__(factory, arguments, f"The engine {factory.rpartition(':')[2]} in its process")
        self._log_file = log_file
        self._stop_timeout_s = stop_timeout_s

    async def start(self) -> None:
        """Start the process, and the engine in it.

        Raises:
            EngineDeadError: the process has ended meanwhile.
            SkyRLError: the engine could not be built or started.
        """
        await self.teardown()
        link = ProcessLink(f"{__name__}:serve_engine", num_threads=None, stop_timeout_s=self._stop_timeout_s)
        await self._start(link, self._log_file, timeout_s=None)  # vLLM may compile for minutes


def serve_engine(channel: SocketChannel) -> None:
    """Serve an engine in a child process."""
    serve_hosted(channel, EngineHost)


class EngineHost(Hosted):
    """The engine in its process: methods that are not defined here are the engine's own."""

    def __init__(self) -> None:
        self._engine: InferenceEngineInterface | None = None

    async def start(self, factory: str, arguments: Mapping[str, Any], log_file: str | None = None) -> StartedEngine:
        """Build and start the engine ``factory(**arguments)``; all output of this process goes to ``log_file``, if given."""
        if log_file is not None:
            write_output_to(Path(log_file))
        with gc_paused():  # there is no garbage, and collections walk through all that is imported
            engine = import_name(factory, "factory")(**arguments)
            await engine.start()
        self._engine = engine
        return StartedEngine(engine.capabilities, engine.policy_version, os.getpid())

    def __getattr__(self, method: str) -> Any:
        return getattr(self._engine, method)

    def state(self) -> int | None:
        return None if self._engine is None else self._engine.policy_version

    def joined(self, first: TokenChunk, second: TokenChunk) -> TokenChunk:
        top = None
        if first.top_logprobs is not None or second.top_logprobs is not None:
            top = [*(first.top_logprobs or ()), *(second.top_logprobs or ())]
        return TokenChunk(
            first.token_ids + second.token_ids,
            first.logprobs + second.logprobs,
            first.versions + second.versions,
            second.stop_reason,
            top,
            max(first.cached_tokens, second.cached_tokens),
        )

    async def stop(self) -> None:
        """Tear the engine down."""
        if self._engine is not None:
            await self._engine.teardown()


def _plain(engine_input: InferenceEngineInput) -> InferenceEngineInput:
    prompts, params = plain_request(engine_input)
    plain = engine_input.copy()
    plain["sampling_params"] = params
    if prompts is not None:
        plain["prompt_token_ids"] = prompts
    return plain

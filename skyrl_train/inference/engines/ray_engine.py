"""Any engine in a Ray actor, on any node of the cluster: a proxy with the engine's own contract.

generate / pause / load_weights ──calls──> WorkerConnection ~~> actor: EngineHost ──> engine
                        futures <──items, results──

Only plain data crosses the border: token ids, log-probs, versions, and errors with class and message.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
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
from skyrl_train.workers.host import Hosted
from skyrl_train.workers.ray import RayLink, RayPlacement, connect


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """The facts about a running engine that the proxy needs."""

    capabilities: EngineCapabilities
    policy_version: int
    pid: int


class RayEngine(HostedEngine):
    """The engine that ``factory(**arguments)`` returns, hosted in an actor.

    Args:
        factory: import path, such as ``skyrl_train.inference.engines.embedded:EmbeddedEngine``. It is imported in the
            actor only.
        arguments: of the factory; plain data.
        placement: resources and environment of the actor.
        start_timeout_s: limit of :meth:`start`, waiting for resources included.
        stop_timeout_s: how long :meth:`teardown` lets the hosted engine clean up before the actor is killed.

    After the actor has died, :meth:`start` makes a new one, which has no weights.
    """

    def __init__(
        self,
        factory: str,
        arguments: Mapping[str, Any],
        placement: RayPlacement | None = None,
        *,
        start_timeout_s: float = 600.0,
        stop_timeout_s: float = 10.0,
    ) -> None:
        super().__init__("The engine in a Ray actor")
        self._factory = factory
        self._arguments = dict(arguments)
        self._placement = placement or RayPlacement()
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
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
        """The process id of the actor on its node, once started."""
        return None if self._started is None else self._started.pid

    async def start(self) -> None:
        """Create the actor, on any node of the cluster that has room, and start the engine in it.

        Raises:
            ConfigError: Ray cannot be reached or started.
            EngineDeadError: the actor did not start, or not in time; the message says what to check.
            SkyRLError: the engine could not be built or started.
        """
        await self.teardown()
        await asyncio.to_thread(connect)  # outside of the time limit: Ray itself may have to start
        link = RayLink(EngineHost, self._placement, stop_timeout_s=self._stop_timeout_s)
        connection = self._connect(link)
        self._started = await connection.start(self._factory, self._arguments, timeout_s=self._start_timeout_s)
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
        """See the interface; ``path`` is looked for on the actor's node."""
        await self.connection.call("load_adapter", name, path)

    async def unload_adapter(self, name: str) -> None:
        await self.connection.call("unload_adapter", name)


class EngineHost(Hosted):
    """The engine in the actor: methods that are not defined here are the engine's own."""

    def __init__(self) -> None:
        self._engine: InferenceEngineInterface | None = None

    async def start(self, factory: str, arguments: Mapping[str, Any]) -> StartedEngine:
        """Build and start the engine ``factory(**arguments)``."""
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

"""Any engine in a Ray actor, on any node of the cluster: a proxy with the engine's own contract.

generate / pause / load_weights ──calls──> WorkerConnection ~~> actor: EngineHost ──> engine
                        futures <──items, results──

Only plain data crosses the border: token ids, log-probs, versions, and errors with class and message.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from ray.exceptions import RayError

from skyrl_train.config.import_path import import_name
from skyrl_train.errors import EngineError, first_line
from skyrl_train.inference.engines.hosted import HostedEngine, plain_request
from skyrl_train.inference.interface import (
    EngineCapabilities,
    InferenceEngineInput,
    InferenceEngineInterface,
    InferenceEngineOutput,
    TokenChunk,
)
from skyrl_train.weight_sync.shared_area import SharedArea
from skyrl_train.weight_sync.update import WeightUpdate
from skyrl_train.workers.host import Hosted
from skyrl_train.workers.ray import RayLink, RayPlacement, connect, this_node

# One part of an update on its way to another node: passes through the object store, which may be small.
RELAY_PART_BYTES = 32 << 20
SHARED_MEMORY = "shared_memory"


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """The facts about a running engine that the proxy needs."""

    capabilities: EngineCapabilities
    policy_version: int
    pid: int


class RayEngine(HostedEngine):
    """The engine that ``factory(**arguments)`` returns, hosted in an actor.

    An update by shared memory also reaches an actor on another node: its bytes then travel through Ray's object store
    in parts, so that the hosted engine offers its ``capabilities.transports`` on every node.

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

    async def receive_weights(self, update: WeightUpdate) -> None:
        connection = self.connection
        connection.raise_if_gone()
        link = connection.link
        if update.transport != SHARED_MEMORY or not isinstance(link, RayLink) or link.node == this_node():
            await connection.call("receive_weights", update)
            return
        # The trainer's staging area is not visible on the actor's node: copy its bytes there first.
        try:
            await self._relay(link, update)
        except RayError as error:
            raise self._gone_error(f"its process has ended ({first_line(error)})") from error
        await connection.call("receive_relayed", update)

    async def load_adapter(self, name: str, path: str) -> None:
        """See the interface; ``path`` is looked for on the actor's node."""
        await self.connection.call("load_adapter", name, path)

    async def unload_adapter(self, name: str) -> None:
        await self.connection.call("unload_adapter", name)

    async def _relay(self, link: RayLink, update: WeightUpdate) -> None:
        """Copy the bytes of an update from this machine's memory to the actor's machine."""
        try:
            staging = np.memmap(update.location, dtype=np.uint8, mode="r", shape=(update.num_bytes,))
        except (OSError, ValueError) as error:
            raise EngineError(
                f"Cannot open the weights of version {update.version} at {update.location!r}: {error}. The transport "
                "must still be open, and the client of a Ray engine must run beside the trainer."
            ) from error
        for offset in range(0, update.num_bytes, RELAY_PART_BYTES):
            part = np.asarray(staging[offset : offset + RELAY_PART_BYTES])
            await link.call_directly("write_weights", update.num_bytes, offset, part)


class EngineHost(Hosted):
    """The engine in the actor: methods that are not defined here are the engine's own.

    An update that arrives over the network is put together in this machine's shared memory, where the engine receives it. Two
    areas take turns, as at the trainer: the update received last must stay as it is until it has been loaded.
    """

    def __init__(self) -> None:
        self._engine: InferenceEngineInterface | None = None
        self._areas: list[SharedArea] = []
        self._filling = 0  # index of the area that takes the next bytes
        self._relayed: tuple[WeightUpdate, WeightUpdate] | None = None  # the last one: as it was sent, as it lies here

    async def start(self, factory: str, arguments: Mapping[str, Any]) -> StartedEngine:
        """Build and start the engine ``factory(**arguments)``."""
        engine = import_name(factory, "factory")(**arguments)
        await engine.start()
        self._engine = engine
        return StartedEngine(engine.capabilities, engine.policy_version, os.getpid())

    def __getattr__(self, method: str) -> Any:
        return getattr(self._engine, method)

    def write_weights(self, num_bytes: int, offset: int, part: npt.NDArray[np.uint8]) -> None:
        """Copy ``part`` (uint8 ``[n]``) of a staging copy of ``num_bytes`` on the proxy's machine to its place here."""
        # The first part of an update creates or resizes its area; further parts find it ready.
        while len(self._areas) <= self._filling:
            self._areas.append(SharedArea(num_bytes))
        if len(self._areas[self._filling].memory) != num_bytes:
            self._areas[self._filling].close()
            self._areas[self._filling] = SharedArea(num_bytes)
        memory = np.frombuffer(self._areas[self._filling].memory, dtype=np.uint8)
        memory[offset : offset + len(part)] = part

    async def receive_relayed(self, update: WeightUpdate) -> None:
        """Receive an update whose bytes :meth:`write_weights` has brought."""
        here = dataclasses.replace(update, location=self._areas[self._filling].location)
        # The other area is filled next, so that this update stays intact until it has been loaded.
        self._filling = 1 - self._filling
        self._relayed = update, here
        await self.receive_weights(here)

    async def load_weights(self, update: WeightUpdate) -> None:
        """Load an update, relayed or not."""
        assert self._engine is not None, "started first"
        if self._relayed is not None and self._relayed[0] == update:
            update = self._relayed[1]
        await self._engine.load_weights(update)

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
        for area in self._areas:
            area.close()
        self._areas.clear()


def _plain(engine_input: InferenceEngineInput) -> InferenceEngineInput:
    prompts, params = plain_request(engine_input)
    plain = engine_input.copy()
    plain["sampling_params"] = params
    if prompts is not None:
        plain["prompt_token_ids"] = prompts
    return plain

"""Any engine in a Ray actor, on any node of the cluster: a proxy with the engine's own contract.

generate / pause / load_weights ──commands──> actor: EngineHost ──> engine
                       futures  <──batches of events── (one waiting call at a time)

What crosses the border is data: token ids, log-probs, versions, and errors by class and message. Nothing here blocks the
event loop: object references are awaited, and the few calls of Ray that block run in threads.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from skyrl_train.errors import ConfigError, EngineDeadError, EngineError, SkyRLError
from skyrl_train.inference.engines.pending import Pending
from skyrl_train.inference.engines.ray_host import (
    Batch,
    Cancel,
    Command,
    Done,
    EngineHost,
    Event,
    Failed,
    Run,
    Started,
    Tokens,
)
from skyrl_train.inference.interface import (
    EngineCapabilities,
    EngineHealth,
    InferenceEngineInput,
    InferenceEngineInterface,
    InferenceEngineOutput,
    PauseMode,
    SamplingParams,
    TokenChunk,
)
from skyrl_train.inference.weight_update import WeightUpdate
from skyrl_train.threads import in_lasting_thread, keeping_signal_handlers

# One part of an update on its way to another node: passes through the object store, which may be small.
RELAY_PART_BYTES = 32 << 20
SHARED_MEMORY = "shared_memory"
_connecting = threading.Lock()  # engines start at once


@dataclass(frozen=True, slots=True)
class RayPlacement:
    """What the actor asks of the cluster.

    Args:
        num_cpus, num_gpus, resources: reserved for the actor; fractions are allowed.
        environment: variables of the actor's process, set before Python starts.
        placement_group: an actor in bundle ``bundle_index`` of it (-1: any).
    """

    num_cpus: float = 1
    num_gpus: float = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    placement_group: PlacementGroup | None = None
    bundle_index: int = -1

    def options(self) -> dict[str, Any]:
        """The options of a Ray actor."""
        options: dict[str, Any] = {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            "resources": dict(self.resources),
            "runtime_env": {"env_vars": dict(self.environment)},
        }
        if self.placement_group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=self.placement_group, placement_group_bundle_index=self.bundle_index
            )
        return options


class RayEngine(InferenceEngineInterface):
    """The engine that ``factory(**arguments)`` returns, hosted in an actor.

    An update by shared memory also reaches an actor on another node: its bytes then travel through Ray's object store
    in parts, so that ``capabilities.transports`` are those of the hosted engine wherever it runs.

    Args:
        factory: import path, such as ``skyrl_train.inference.engines.embedded:EmbeddedEngine``. It is imported in the
            actor only.
        arguments: of the factory; plain data.
        placement: resources and environment of the actor.
        start_timeout_s: limit of :meth:`start`, waiting for resources included.
        stop_timeout_s: how long :meth:`teardown` lets the hosted engine clean up before the actor is killed.

    After the actor has died, :meth:`start` makes a new one, which holds no published version.
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
        self._factory = factory
        self._arguments = dict(arguments)
        self._placement = placement or RayPlacement()
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._actor: Any = None
        self._started: Started | None = None
        self._version = -1
        self._pending = Pending("The engine in a Ray actor")
        self._far = False
        self._reading: asyncio.Task[None] | None = None
        self._ids = itertools.count(1)
        self._sequence = itertools.count()
        self._outbox: list[Command] = []

    @property
    def capabilities(self) -> EngineCapabilities:
        """Those of the hosted engine.

        Raises:
            EngineDeadError: the engine was never started.
        """
        if self._started is None:
            raise self._pending.error()
        return self._started.capabilities

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def pid(self) -> int | None:
        """The process id of the actor on its node, once started."""
        return None if self._started is None else self._started.pid

    async def start(self) -> None:
        """Creates the actor, wherever the cluster has room, and starts the engine in it.

        Raises:
            ConfigError: Ray cannot be reached or started.
            EngineDeadError: the engine could not be built, or not in time; the message says what to look at.
        """
        await asyncio.to_thread(connect)
        await self.teardown()
        self._outbox.clear()
        self._sequence = itertools.count()
        try:
            async with asyncio.timeout(self._start_timeout_s):
                self._actor = await asyncio.to_thread(self._create_actor)
                started = await self._actor.start.remote()
                node = await self._actor.node.remote()
        except TimeoutError:
            await self.teardown()
            raise EngineDeadError(await asyncio.to_thread(self._why_not_started)) from None
        except RayError as error:
            await self.teardown()
            raise EngineDeadError(f"The actor of an engine ended while it started: {_first_line(error)}") from error
        except BaseException:
            await self.teardown()
            raise
        if isinstance(started, Failed):
            await self.teardown()
            raise started.error()
        self._started, self._version = started, started.policy_version
        self._pending.begin()
        self._far = node != ray.get_runtime_context().get_node_id()
        self._reading = asyncio.create_task(self._read(), name="ray-engine-reader")

    async def generate(self, engine_input: InferenceEngineInput) -> InferenceEngineOutput:
        output: InferenceEngineOutput = await self._call("generate", _plain(engine_input))
        return output

    async def stream(self, engine_input: InferenceEngineInput) -> AsyncIterator[TokenChunk]:
        self._pending.raise_if_dead()
        stream_id = next(self._ids)
        queue: asyncio.Queue[TokenChunk | SkyRLError | None] = asyncio.Queue()
        self._pending.streams[stream_id] = queue
        item: TokenChunk | SkyRLError | None = TokenChunk([], [], [])
        try:
            self._send(Run(stream_id, "stream", (_plain(engine_input),)))
            while isinstance(item := await queue.get(), TokenChunk):
                yield item
            if item is not None:
                raise item
        finally:
            del self._pending.streams[stream_id]
            if isinstance(item, TokenChunk):  # left before its end: this aborts the request in the engine
                self._send(Cancel((stream_id,)))

    async def abort_generation(self) -> None:
        await self._call("abort_generation")

    async def pause(self, mode: PauseMode) -> None:
        await self._call("pause", PauseMode(mode))

    async def resume(self) -> None:
        await self._call("resume")

    async def sleep(self, level: int = 1) -> None:
        await self._call("sleep", level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        await self._call("wake_up", tags)

    async def reset_prefix_cache(self) -> None:
        await self._call("reset_prefix_cache")

    async def receive_weights(self, update: WeightUpdate) -> None:
        if not (self._far and update.transport == SHARED_MEMORY):
            await self._call("receive_weights", update)
            return
        self._pending.raise_if_dead()
        try:
            await self._relay(update)
        except RayError as error:
            self._pending.die(f"its actor ended: {_first_line(error)}")
            self._pending.raise_if_dead()
        await self._call("receive_relayed", update)

    async def load_weights(self, update: WeightUpdate) -> None:
        await self._call("load_weights", update)

    async def served_checksum(self) -> str:
        return str(await self._call("served_checksum"))

    async def load_adapter(self, name: str, path: str) -> None:
        """See the interface; ``path`` is looked for on the actor's node."""
        await self._call("load_adapter", name, path)

    async def unload_adapter(self, name: str) -> None:
        await self._call("unload_adapter", name)

    async def health(self) -> EngineHealth:
        """A snapshot; of a dead engine one that says so."""
        try:
            health: EngineHealth = await self._call("health")
        except EngineDeadError:
            return EngineHealth(alive=False, policy_version=self._version)
        return health

    async def teardown(self) -> None:
        """Lets the hosted engine clean up, then kills the actor. Idempotent; pending calls raise ``EngineDeadError``."""
        serving = self._pending.alive
        self._pending.die("it was torn down")
        actor, self._actor = self._actor, None
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            self._reading = None
        if actor is None:
            return
        try:
            if serving:
                async with asyncio.timeout(self._stop_timeout_s):
                    await actor.stop.remote()
        except (RayError, TimeoutError):
            pass  # it is gone, or so stuck that only the kill below helps
        finally:
            await asyncio.to_thread(ray.kill, actor)

    def _create_actor(self) -> Any:
        # Two slots would do: one for the waiting call, one for the others, of which none waits for anything.
        remote = ray.remote(_ActorHost).options(max_concurrency=16, **self._placement.options())
        return remote.remote(self._factory, self._arguments)

    def _why_not_started(self) -> str:
        placement = self._placement
        free = {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
        return (
            f"The engine did not start within start_timeout_s={self._start_timeout_s:g}. Its actor asks for "
            f"num_cpus={placement.num_cpus:g} and num_gpus={placement.num_gpus:g}; free in the cluster now: {free}. Free "
            "some, or allow more time."
        )

    async def _read(self) -> None:
        """Consumes batches of events / waits for one call of the actor / unblocked by events or the actor's end /
        produces the outcomes of calls and streams."""
        try:
            while True:
                batch: Batch = await self._actor.next_events.remote()
                self._version = batch.policy_version
                for event in batch.events:
                    self._deliver(event)
        except RayError as error:
            self._pending.die(f"its actor ended: {_first_line(error)}")

    def _deliver(self, event: Event) -> None:
        queue, call = self._pending.streams.get(event.id), self._pending.calls.get(event.id)
        match event:
            case Tokens(_, chunk):
                if queue is not None:
                    queue.put_nowait(chunk)
            case Done(_, value):
                if queue is not None:
                    queue.put_nowait(None)
                elif call is not None and not call.done():
                    call.set_result(value)
            case Failed():
                if queue is not None:
                    queue.put_nowait(event.error())
                elif call is not None and not call.done():
                    call.set_exception(event.error())

    async def _call(self, method: str, *arguments: Any) -> Any:
        self._pending.raise_if_dead()
        call_id = next(self._ids)
        reply = self._pending.calls[call_id] = asyncio.get_running_loop().create_future()
        self._send(Run(call_id, method, arguments))
        try:
            return await reply
        except asyncio.CancelledError:
            self._send(Cancel((call_id,)))
            raise
        finally:
            del self._pending.calls[call_id]

    def _send(self, command: Command) -> None:
        """Commands of one turn of the loop travel together."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(command)

    def _flush(self) -> None:
        commands, self._outbox = self._outbox, []
        if commands and self._pending.alive:
            self._actor.send.remote(next(self._sequence), commands)

    async def _relay(self, update: WeightUpdate) -> None:
        """Ships the bytes of an update that lies in this machine's memory to the actor's machine."""
        try:
            staging = np.memmap(update.location, dtype=np.uint8, mode="r", shape=(update.num_bytes,))
        except (OSError, ValueError) as error:
            raise EngineError(
                f"Cannot open the weights of version {update.version} at {update.location!r}: {error}. The transport "
                "must still be open, and the client of a Ray engine must run beside the trainer."
            ) from error
        for offset in range(0, update.num_bytes, RELAY_PART_BYTES):
            part = staging[offset : offset + RELAY_PART_BYTES]
            # In a thread: Ray copies large arguments into the object store before it returns.
            await (
                await asyncio.to_thread(self._actor.write_weights.remote, update.num_bytes, offset, np.asarray(part))
            )


def connect() -> None:
    """Connects this process to Ray unless it is: to the cluster that RAY_ADDRESS names, or that runs on this machine, else
    to one that it starts. Blocks.

    Raises:
        ConfigError: there is no such cluster.
    """
    with _connecting:
        if ray.is_initialized():
            return
        try:
            with keeping_signal_handlers():  # Ray's library would meet SIGTERM with a stack trace
                in_lasting_thread(ray.init)  # what it starts on this machine ends with the thread that has started it
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"Ray cannot be reached: {_first_line(error)}. Look at RAY_ADDRESS, or start a cluster with ray start."
            ) from error


def cluster_is_own() -> bool:
    """Whether this process has started the Ray that it is connected to: one machine, which no other will join."""
    node = ray._private.worker._global_node
    return node is not None and node.is_head()


class _ActorHost(EngineHost):
    """The host, and where it is."""

    async def node(self) -> str:
        """The id of the node."""
        return str(ray.get_runtime_context().get_node_id())


def _plain(engine_input: InferenceEngineInput) -> InferenceEngineInput:
    """The request as plain data; stop strings are the client's business and need not travel."""
    plain = engine_input.copy()
    params = SamplingParams.parse(engine_input.get("sampling_params"))
    plain["sampling_params"] = dataclasses.replace(params, stop=()) if params.stop else params
    prompts = engine_input.get("prompt_token_ids")
    if prompts is not None:
        plain["prompt_token_ids"] = [list(map(int, prompt)) for prompt in prompts]
    return plain


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

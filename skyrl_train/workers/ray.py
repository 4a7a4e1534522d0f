"""Hosting in a Ray actor: connecting to a cluster, an actor's resources, and links to actors. Imported only where Ray is used.

Ray pickles messages between its processes, and a pickle can run code: keep the cluster's network private, as Ray asks.
A call of an actor costs the caller about a millisecond, so an object that serves many calls at once gets them over a socket. Ray
starts it, ends it, and says why it has ended.
Nothing here blocks the event loop: object references are awaited, and the calls of Ray that block run in threads.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Ray starts its workers with the `uv run ...` that started the driver. Each worker would then install packages into the
# environment that the others are importing from. Ray reads the variable when it is imported.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

import ray
from ray._common.utils import get_ray_address_file
from ray._private.utils import read_ray_address
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from skyrl_train.errors import ConfigError, first_line
from skyrl_train.runtime.process import in_lasting_thread, keeping_signal_handlers, write_output_to
from skyrl_train.workers.connection import OnGone, OnMessages, StartError, WorkerLink
from skyrl_train.workers.host import Hosted, serve
from skyrl_train.workers.messages import Call, Message, encode, frames

logger = logging.getLogger(__name__)

START_LIMIT_S = 600.0  # default limit of a start, waiting for the cluster's resources included
CONNECT_LIMIT_S = 5.0  # for a TCP connection to a recorded cluster
STOP_LIMIT_S = 10.0  # time for an object to clean up before its actor is killed
EXIT_LIMIT_S = 5.0  # time until Ray says why an actor has ended whose connection has

_connecting = threading.Lock()  # several engines may start at once, each in its own thread


@dataclass(frozen=True, slots=True)
class RayPlacement:
    """Resources and environment of an actor.

    Args:
        num_cpus, num_gpus, resources: reserved for the actor; fractions are allowed.
        environment: variables of the actor's process, set before Python starts.
        log_file: for all output of the actor's process, if its node has the folder; None: Ray keeps it.
        placement_group: the actor runs in bundle ``bundle_index`` of it (-1: any), as long as the bundle's node lives.
    """

    num_cpus: float = 1
    num_gpus: float = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    log_file: str | None = None
    placement_group: PlacementGroup | None = None
    bundle_index: int = -1

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of ``ray.remote(...).options``. Asks Ray about the bundle, and blocks meanwhile."""
        options: dict[str, Any] = {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            "resources": dict(self.resources),
            "runtime_env": {"env_vars": dict(self.environment)},
        }
        if self.placement_group is not None and self._bundle_lives(self.placement_group):
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=self.placement_group, placement_group_bundle_index=self.bundle_index
            )
        return options

    def _bundle_lives(self, group: PlacementGroup) -> bool:
        """Return whether the bundle's node is there. An actor that starts again after its node has died may go anywhere."""
        node = placement_group_table(group)["bundles_to_node_id"].get(self.bundle_index)
        return self.bundle_index < 0 or any(each["Alive"] and each["NodeID"] == node for each in ray.nodes())


def connect() -> None:
    """Connect this process to Ray, unless it is connected already. Blocks.

    Ray uses the cluster that RAY_ADDRESS names, else one that runs on this machine, else it starts one. A user's own
    ``ray.init()`` before this call is respected.

    Raises:
        ConfigError: there is no such cluster.
    """
    with _connecting:
        if ray.is_initialized():
            return
        # `ray start` records its cluster, and a head that is killed leaves the record behind. Ray would try it for minutes.
        recorded = None if os.environ.get("RAY_ADDRESS") else read_ray_address()
        host, _, port = (recorded or "").rpartition(":")
        if host:
            try:
                socket.create_connection((host.strip("[]"), port), CONNECT_LIMIT_S).close()
            except OSError as error:
                file = get_ray_address_file(None)
                raise ConfigError(
                    f"{file} names a Ray cluster at {recorded}, which does not answer: {error}. If it has ended, delete the file "
                    "(ray stop does, and ends all of Ray on this machine). Or set RAY_ADDRESS to another cluster, or to local."
                ) from error
        try:
            # Ray's C++ library installs a SIGTERM handler that prints a stack trace, and the kernel ends the processes
            # that Ray starts on this machine together with the thread that has started them.
            with keeping_signal_handlers():
                in_lasting_thread(ray.init)
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"Ray cannot be reached: {first_line(error)}. Check RAY_ADDRESS, or start a cluster with ray start."
            ) from error


def cluster_is_own() -> bool:
    """Return whether this process started the Ray that it uses: one machine, and no other will join it."""
    node = ray._private.worker._global_node
    return node is not None and node.is_head()


def free_resources() -> dict[str, float]:
    """Return the CPUs and GPUs that are free in the cluster now, for error messages."""
    return {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}


class _ActorLink(WorkerLink):
    """A link to an actor; what :class:`RayLink` and :class:`RayBlockingLink` share."""

    def __init__(self, placement: RayPlacement) -> None:
        self._placement = placement
        self._actor: Any = None

    async def _create(self, actor_class: type, *arguments: Any) -> Any:
        """Create the actor with these constructor arguments; returns before it has started."""

        def create() -> Any:
            connect()
            return ray.remote(actor_class).options(**self._placement.options()).remote(*arguments)

        self._actor = await asyncio.to_thread(create)  # Ray's calls block
        return self._actor

    async def diagnosis(self) -> str:
        free = await asyncio.to_thread(free_resources)
        return (
            f"Its actor asks for num_cpus={self._placement.num_cpus:g} and num_gpus={self._placement.num_gpus:g}; free in the "
            f"cluster now: {free}. Free some, allow more time, or look at `ray status`."
        )


class ActorHost:
    """The actor of :class:`RayLink`. All methods run on one event loop.

    Args:
        token: the first bytes of the driver's connection. A connection without them is closed.
        log_file: for all output of this process, if this machine has its folder.
    """

    def __init__(self, hosted: type[Hosted], token: bytes, log_file: str | None = None) -> None:
        if log_file is not None:
            with suppress(OSError):
                write_output_to(Path(log_file))
        self._hosted = hosted()
        self._token = token
        self._server: asyncio.Server | None = None
        self._connected: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

    async def listen(self) -> tuple[str, int]:
        """Return host and port where the driver can connect."""

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(asyncio.IncompleteReadError, OSError):
                if hmac.compare_digest(await reader.readexactly(len(self._token)), self._token):
                    await self._connected.put((reader, writer))
                    return
            writer.close()

        self._server = await asyncio.start_server(accept, ray.util.get_node_ip_address(), 0)
        host, port, *_ = self._server.sockets[0].getsockname()
        return host, port

    async def serve(self) -> None:
        """Serve the driver until it closes its end, and clean up."""
        reader, writer = await self._connected.get()
        assert self._server is not None, "listen() was called"
        self._server.close()
        await serve(reader, writer, self._hosted)


class RayLink(_ActorLink):
    """An actor that serves ``hosted()``, on any node of the cluster whose ports this machine reaches.

    Raises (``start``):
        ConfigError: Ray cannot be reached or started.

    Args:
        stop_timeout_s: time for the object to clean up before the actor is killed.
    """

    def __init__(self, hosted: type[Hosted], placement: RayPlacement, *, stop_timeout_s: float = STOP_LIMIT_S) -> None:
        super().__init__(placement)
        self._hosted = hosted
        self._stop_timeout_s = stop_timeout_s
        self._writer: asyncio.StreamWriter | None = None
        self._serving: asyncio.Future[None] | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self, on_messages: OnMessages, on_gone: OnGone) -> None:
        token = secrets.token_bytes(32)
        try:
            actor = await self._create(ActorHost, self._hosted, token, self._placement.log_file)
            # The first answer of the actor: resources were found and its process has started.
            host, port = await actor.listen.remote()
        except RayError as error:
            # Ray appends the remote traceback to the message.
            raise StartError(f"its actor ended: {first_line(error)}") from error
        try:
            reader, writer = await asyncio.open_connection(host, port)
        except OSError as error:
            raise StartError(
                f"its actor listens at {host}:{port}, which cannot be reached from here: {error}. Each machine of a Ray "
                "cluster must reach all ports of the others."
            ) from error
        self._writer = writer
        writer.write(token)
        # Ray knows why an actor has ended. It also notices the end of a machine, which does not close its connections.
        serving = self._serving = asyncio.wrap_future(actor.serve.remote().future())

        def ended(serving: asyncio.Future[None]) -> None:
            writer.transport.abort()
            if not serving.cancelled():
                serving.exception()  # asyncio reports one that was never read

        serving.add_done_callback(ended)

        async def read() -> None:
            """Consumes frames / waits for the socket / unblocked by the actor or its end / produces messages."""
            try:
                async for messages in frames(reader):
                    on_messages(messages)
            except Exception as error:  # nobody listens to it any more, as if it were dead
                logger.exception("messages of an actor cannot be read")
                on_gone(f"its messages cannot be read: {error!r}")
                return
            await asyncio.wait([serving], timeout=EXIT_LIMIT_S)
            cause = serving.exception() if serving.done() and not serving.cancelled() else None
            why = "" if cause is None else f" ({type(cause).__name__}: {first_line(cause)})"
            on_gone(f"its process has ended{why}")

        self._reading = asyncio.create_task(read(), name="actor-reader")

    def send(self, messages: list[Message]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(messages))

    async def stop(self, graceful: bool) -> None:
        actor, self._actor = self._actor, None
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        # A stop during the start, or a second stop.
        if actor is None:
            return
        try:
            if graceful and self._writer is not None and self._serving is not None:
                with suppress(OSError):  # it has just ended
                    self._writer.write_eof()
                # It may be so stuck that only the kill helps.
                await asyncio.wait([self._serving], timeout=self._stop_timeout_s)
        finally:
            if self._writer is not None:
                self._writer.close()
            await asyncio.to_thread(ray.kill, actor)


class RayBlockingLink(_ActorLink):
    """An actor of ``actor_class`` with one blocking method ``answer(call) -> Result | Failure``, called in its main thread."""

    def __init__(self, actor_class: type, placement: RayPlacement) -> None:
        super().__init__(placement)
        self._actor_class = actor_class
        self._answering: set[asyncio.Task[None]] = set()

    async def start(self, on_messages: OnMessages, on_gone: OnGone) -> None:
        self._on_messages, self._on_gone = on_messages, on_gone
        await self._create(self._actor_class)

    def send(self, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, Call) and self._actor is not None:
                task = asyncio.create_task(self._answer(self._actor, message), name="actor-call")
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)

    async def stop(self, graceful: bool) -> None:
        actor, self._actor = self._actor, None
        for task in self._answering:
            task.cancel()
        if actor is not None:
            await asyncio.to_thread(ray.kill, actor)

    async def _answer(self, actor: Any, call: Call) -> None:
        try:
            self._on_messages([await actor.answer.remote(call)])
        except RayError as error:
            self._on_gone(f"its actor ended: {type(error).__name__}: {first_line(error)}")

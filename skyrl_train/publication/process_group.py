"""Publication over the network: engines pull a version's bytes, in buckets, each through a process group with the trainer.

gather ──> staging area ──thread per engine──> buckets ══gloo or NCCL══> engine's receive buffer ──load──> model

One group of two per engine, instead of one broadcast to all: an engine that dies, hangs or joins late concerns nobody else,
and whoever joins asks for the current version like everybody. The price is that k engines cost the trainer k sends.
"""

from __future__ import annotations

import functools
import json
import logging
import secrets
import socket
import threading
from collections.abc import Iterable

import torch

from skyrl_train.errors import PublicationError
from skyrl_train.inference.process_group import (
    ENGINE_RANK,
    GLOO,
    NCCL,
    TRAINER_RANK,
    ControlConnection,
    Pair,
    buckets,
    join_pair,
    open_store,
)
from skyrl_train.inference.shared_weights import checksum
from skyrl_train.inference.weight_update import WeightUpdate
from skyrl_train.publication.base import WeightTransport
from skyrl_train.publication.layout import pack
from skyrl_train.publication.staging import DeviceStaging, DoubleBuffer

logger = logging.getLogger(__name__)
BUCKET_BYTES = 64 << 20
CLOSE_LIMIT_S = 5.0  # what each conversation may take to end
ACCEPT_PAUSE_S = 1.0  # after a connection that could not be taken


class ProcessGroupTransport(WeightTransport):
    """Casts to ``dtype`` (a torch name: what the engines serve) while gathering; ``verify`` adds a checksum.

    Holds two staging copies on ``device``.

    Args:
        backend: gloo | nccl.
        bucket_bytes: how much is sent at once.
        address: of this machine, as engines reach it; None: that of the interface that leads outside. Connections are
            taken on this address only, and only with the token that travels in the update; the bytes are not encrypted.
        timeout_s: of each step of a transfer.
    """

    def __init__(
        self,
        backend: str,
        device: torch.device,
        dtype: str,
        verify: bool,
        bucket_bytes: int,
        address: str | None,
        timeout_s: float,
    ) -> None:
        self.name = backend
        self._device = device
        self._dtype = dtype
        self._verify = verify
        self._bucket_bytes = bucket_bytes
        self._address = address
        self._timeout_s = timeout_s
        self._areas = DoubleBuffer(functools.partial(DeviceStaging, device))
        self._server: _Server | None = None

    def gather(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate:
        """Copies the weights, cast, into the older of two staging areas.

        Raises:
            PublicationError: the transport is closed, or there is no memory or no address for it.
        """
        area = self._areas.next()
        if self._server is None:
            self._server = self._serve()
        self._server.withdraw(id(area))
        specs, num_bytes = pack(weights, self._dtype, area.room)
        staging = area.settle(num_bytes)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # it is sent from another stream
        self._server.offer(id(area), version, staging)
        return WeightUpdate(
            version=version,
            transport=self.name,
            location=self._server.location,
            num_bytes=num_bytes,
            tensors=specs,
            checksum=checksum(staging) if self._verify else None,
        )

    def close(self) -> None:
        """Ends all connections and frees the staging areas. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._areas.close()

    def _serve(self) -> _Server:
        address = self._address or outward_address()
        try:
            return _Server(self.name, address, self._bucket_bytes, self._timeout_s)
        except OSError as error:
            raise PublicationError(
                f"The trainer cannot take connections on {address}: {error.strerror}. Set "
                "generator.weight_transport_kwargs.address to an address of its machine."
            ) from error


class GlooTransport(ProcessGroupTransport):
    """From main memory to main memory, over TCP. See :class:`ProcessGroupTransport`."""

    def __init__(
        self,
        dtype: str = "float32",
        verify: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        address: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(GLOO, torch.device("cpu"), dtype, verify, bucket_bytes, address, timeout_s)


class NcclTransport(ProcessGroupTransport):
    """From the trainer's GPU to each engine's, which must be another one. See :class:`ProcessGroupTransport`."""

    def __init__(
        self,
        dtype: str = "bfloat16",
        device: str = "cuda",
        verify: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        address: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(NCCL, torch.device(device), dtype, verify, bucket_bytes, address, timeout_s)


def outward_address() -> str:
    """This machine's address on the interface that leads outside; the loopback's where none does. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address reserved for documentation
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


class _Server:
    """Hands out what is offered, in a thread per engine.

    An area is withdrawn before it is written again, so that an engine that was too slow hears that its bytes are mixed.
    """

    def __init__(self, backend: str, address: str, bucket_bytes: int, timeout_s: float) -> None:
        self._backend, self._bucket_bytes, self._timeout_s = backend, bucket_bytes, timeout_s
        self._token = secrets.token_hex(16)
        self._offers: dict[int, tuple[int, torch.Tensor]] = {}  # by area: version, bytes
        self._lock = threading.Lock()
        self._connections: set[ControlConnection] = set()
        self._conversations: list[threading.Thread] = []
        self._closed = threading.Event()
        listening = socket.create_server((address, 0))
        meeting = socket.create_server((address, 0))
        store_port = meeting.getsockname()[1]
        self._store = open_store(address, store_port, timeout_s, listening=meeting.detach())
        self._listening = listening
        self.location = json.dumps(
            {
                "host": address,
                "port": listening.getsockname()[1],
                "store_port": store_port,
                "token": self._token,
                "bucket_bytes": bucket_bytes,
                "timeout_s": timeout_s,
            }
        )
        self._accepting = threading.Thread(target=self._accept, name="weight-server", daemon=True)
        self._accepting.start()

    def withdraw(self, area: int) -> None:
        """Who asks for what lies in ``area`` from now on is refused."""
        with self._lock:
            self._offers.pop(area, None)

    def offer(self, area: int, version: int, staging: torch.Tensor) -> None:
        """From now on engines can have ``version``: the bytes ``staging`` in ``area``."""
        with self._lock:
            self._offers = {other: offer for other, offer in self._offers.items() if offer[0] != version}
            self._offers[area] = version, staging

    def close(self) -> None:
        """Ends every conversation. A process that ended in the middle of one would be aborted: a group's threads are its own."""
        with self._lock:
            self._closed.set()
            connections = list(self._connections)
        try:
            self._listening.shutdown(socket.SHUT_RDWR)
        except OSError:
            logger.debug("the weight server's socket was closed already")
        self._listening.close()
        for connection in connections:
            connection.close()
        self._accepting.join(CLOSE_LIMIT_S)
        for conversation in self._conversations:  # it takes no further ones
            conversation.join(CLOSE_LIMIT_S)

    def _accept(self) -> None:
        """Consumes connections / waits for the socket / unblocked by an engine or ``close`` / produces a thread for each."""
        pairs = 0
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError as error:
                if not self._closed.is_set():  # no descriptor left, or a peer that is gone already: others will come
                    logger.warning("the weight server cannot take a connection, and goes on: %s", error)
                if self._closed.wait(ACCEPT_PAUSE_S):
                    return
                continue
            pairs += 1
            control = ControlConnection(connection, self._timeout_s)
            with self._lock:
                if self._closed.is_set():
                    control.close()
                    return
                self._connections.add(control)
            conversation = threading.Thread(
                target=self._serve,
                args=(control, connection, f"pair-{pairs}"),
                name=f"weight-server-{pairs}",
                daemon=True,
            )
            conversation.start()
            self._conversations = [*(known for known in self._conversations if known.is_alive()), conversation]

    def _serve(self, control: ControlConnection, connection: socket.socket, pair: str) -> None:
        """Consumes an engine's requests / waits for the next one / unblocked by its end / produces the bytes it asked for."""
        try:
            token = str(control.receive().get("token"))
            if not secrets.compare_digest(token, self._token):
                control.send({"error": "the token is not this transport's"})
                return
            control.send({"pair": pair})
            group = join_pair(self._backend, self._store, pair, TRAINER_RANK, control.own_address, self._timeout_s)
            connection.settimeout(None)  # the next version may be hours away
            while True:
                self._answer(control, group, int(control.receive()["version"]))
        except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            if not self._closed.is_set():
                logger.info("an engine has left the weight server: %s", error)
        finally:
            control.close()
            with self._lock:
                self._connections.discard(control)

    def _answer(self, control: ControlConnection, group: Pair, version: int) -> None:
        with self._lock:
            offers = [(area, offer) for area, offer in self._offers.items() if offer[0] == version]
        if not offers:
            control.send({"error": "it is not staged any more"})
            return
        area, offer = offers[0]
        staging = offer[1]
        control.send({"num_bytes": staging.numel()})
        for bucket in buckets(staging, self._bucket_bytes):
            group.send([bucket], ENGINE_RANK, 0).wait()
        with self._lock:
            overwritten = self._offers.get(area) is not offer
        control.send({"error": "a newer version has taken its place meanwhile" if overwritten else None})

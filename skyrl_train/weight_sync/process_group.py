"""The gloo and NCCL transports: engines pull a version's bytes, in buckets, each through a process group with the trainer.

gather ──> staging area ──thread per engine──> buckets ══gloo or NCCL══> engine's receive buffer ──load──> model

Each engine has a group of two with the trainer, instead of one broadcast group for all. So an engine that dies, hangs or
joins late does not affect the others, and an engine that joins asks for the current version like every other one. The
price: k engines cost the trainer k sends.

    engine                                             trainer
    connects, shows the update's token ─────────────>  checks it, answers with the pair's name
    both join a group of two: rank 0 the trainer, rank 1 the engine
    {"version": v} ─────────────────────────────────>  holds it: {"num_bytes": n}, else {"error": why}
    receives the buckets <═════════════════════════════ sends them
                         <─────────────────────────────  {"error": null}, or why the bytes are not version v's

Control messages are lines of JSON on a TCP connection; nothing is pickled.
"""

from __future__ import annotations

import functools
import json
import logging
import secrets
import socket
import threading
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from skyrl_train.errors import EngineError, WeightSyncError
from skyrl_train.weight_sync.checksum import checksum
from skyrl_train.weight_sync.staging import DeviceStaging, DoubleBuffer, pack
from skyrl_train.weight_sync.update import WeightTransport, WeightUpdate

GLOO, NCCL = "gloo", "nccl"
TRAINER_RANK, ENGINE_RANK = 0, 1
BUCKET_BYTES = 64 << 20
MAX_LINE_BYTES = 65_536  # of a control message
CLOSE_LIMIT_S = 5.0  # that each connection may take to end
ACCEPT_PAUSE_S = 1.0  # after a connection that could not be accepted

logger = logging.getLogger(__name__)
_DIST: Any = torch.distributed  # the parts of it used here have no type stubs


# The trainer's side ---------------------------------------------------------------------------------------------------


class ProcessGroupTransport(WeightTransport):
    """Holds two staging copies on ``device`` and serves them to the engines that ask.

    Args:
        backend: gloo | nccl.
        dtype: a torch name, the dtype that the engines serve. Weights are cast while they are gathered.
        verify: adds a checksum to each update.
        bucket_bytes: the size of one send.
        address: this machine's address as engines reach it; None: the address of the interface that leads outside.
            Connections are accepted on this address only, and only with the token that travels in the update. The bytes
            are not encrypted.
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
        # Started with the first version, so that an unused transport can be pickled.
        self._server: _WeightServer | None = None

    def gather(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate:
        """Copy the weights, cast, into the older of the two staging areas.

        Raises:
            WeightSyncError: the transport is closed, or there is no memory or no address for it.
        """
        area = self._areas.next()
        if self._server is None:
            address = self._address or outward_address()
            try:
                self._server = _WeightServer(self.name, address, self._bucket_bytes, self._timeout_s)
            except OSError as error:
                raise WeightSyncError(
                    f"The trainer cannot take connections on {address}: {error.strerror}. Set "
                    "generator.weight_transport_kwargs.address to an address of its machine."
                ) from error
        # Withdrawn before it is overwritten, so that an engine that still reads it learns that its bytes are mixed.
        self._server.withdraw(id(area))
        specs, staging = pack(weights, self._dtype, area)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the bytes are sent from another stream
        self._server.offer(id(area), version, staging)
        return WeightUpdate(
            version=version,
            transport=self.name,
            location=self._server.location,
            num_bytes=staging.numel(),
            tensors=specs,
            checksum=checksum(staging) if self._verify else None,
        )

    def close(self) -> None:
        """End all connections and free the staging areas. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._areas.close()


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
    """Return this machine's address on the interface that leads outside, or the loopback address. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address reserved for documentation
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


class _WeightServer:
    """Sends the offered versions to the engines that ask for them, in a thread per engine."""

    def __init__(self, backend: str, address: str, bucket_bytes: int, timeout_s: float) -> None:
        self._backend, self._bucket_bytes, self._timeout_s = backend, bucket_bytes, timeout_s
        self._token = secrets.token_hex(16)
        self._offers: dict[int, tuple[int, torch.Tensor]] = {}  # by area: version, bytes
        self._lock = threading.Lock()
        self._connections: set[_ControlConnection] = set()
        self._threads: list[threading.Thread] = []  # one per engine
        self._closed = threading.Event()
        # Port 0: the system picks a free one, and the update carries it.
        listening = socket.create_server((address, 0))
        meeting = socket.create_server((address, 0))  # of the store where the two members of a group find each other
        store_port = meeting.getsockname()[1]
        self._store = _DIST.TCPStore(
            address,
            store_port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=meeting.detach(),
        )
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
        """Stop offering the version in ``area``. Engines that ask for it get an error."""
        with self._lock:
            self._offers.pop(area, None)

    def offer(self, area: int, version: int, staging: torch.Tensor) -> None:
        """Offer ``version``: the bytes ``staging`` in ``area``."""
        with self._lock:
            # A version that is gathered again replaces its earlier copy, so a version is in one area at most.
            self._offers = {other: offer for other, offer in self._offers.items() if offer[0] != version}
            self._offers[area] = version, staging

    def close(self) -> None:
        """End every connection and wait for its thread.

        A process that exits while a group still transfers is aborted by the group's C++ threads.
        """
        with self._lock:
            self._closed.set()
            # Copied: the threads remove their connections when those close.
            connections = list(self._connections)
        try:
            self._listening.shutdown(socket.SHUT_RDWR)
        except OSError:
            logger.debug("the weight server's socket was closed already")
        self._listening.close()
        for connection in connections:
            connection.close()
        self._accepting.join(CLOSE_LIMIT_S)
        for thread in self._threads:  # no thread is added after the accepting one has ended
            thread.join(CLOSE_LIMIT_S)

    def _accept(self) -> None:
        """Consumes connections / waits for the socket / unblocked by an engine or ``close`` / produces a thread for each."""
        pairs = 0
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError as error:
                if not self._closed.is_set():  # out of descriptors, or the peer has gone: later ones may succeed
                    logger.warning("the weight server cannot take a connection and continues: %s", error)
                if self._closed.wait(ACCEPT_PAUSE_S):
                    return
                continue
            pairs += 1
            control = _ControlConnection(connection, self._timeout_s)
            with self._lock:
                if self._closed.is_set():
                    control.close()
                    return
                self._connections.add(control)
            thread = threading.Thread(
                target=self._serve,
                args=(control, connection, f"pair-{pairs}"),
                name=f"weight-server-{pairs}",
                daemon=True,
            )
            thread.start()
            self._threads = [*(known for known in self._threads if known.is_alive()), thread]

    def _serve(self, control: _ControlConnection, connection: socket.socket, pair: str) -> None:
        """Consumes an engine's requests / waits for the next one / unblocked by its end / produces the bytes it asked for."""
        try:
            token = str(control.receive().get("token"))
            # Constant time, so that a stranger cannot find the token byte by byte.
            if not secrets.compare_digest(token, self._token):
                control.send({"error": "the token is not this transport's"})
                return
            control.send({"pair": pair})
            group = _join_pair(self._backend, self._store, pair, TRAINER_RANK, control.own_address, self._timeout_s)
            connection.settimeout(None)  # the next version may be hours away
            while True:
                self._send_version(control, group, int(control.receive()["version"]))
        except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            if not self._closed.is_set():
                logger.info("an engine has left the weight server: %s", error)
        finally:
            control.close()
            with self._lock:
                self._connections.discard(control)

    def _send_version(self, control: _ControlConnection, group: Any, version: int) -> None:
        with self._lock:
            # The lock is not held during the transfer: gathering the next version must not wait for a slow engine.
            offers = [(area, offer) for area, offer in self._offers.items() if offer[0] == version]
        if not offers:
            control.send({"error": "it is not staged any more"})
            return
        area, offer = offers[0]
        staging = offer[1]
        control.send({"num_bytes": staging.numel()})
        for bucket in staging.split(self._bucket_bytes):
            group.send([bucket], ENGINE_RANK, 0).wait()
        if staging.is_cuda:
            # With NCCL, wait() makes the current stream wait, not this thread.
            torch.cuda.current_stream(staging.device).synchronize()
        # The area may have been overwritten while its bytes were sent. Then the engine must discard them.
        with self._lock:
            overwritten = self._offers.get(area) is not offer
        control.send({"error": "a newer version has taken its place meanwhile" if overwritten else None})


# The engine's side ----------------------------------------------------------------------------------------------------


class ProcessGroupReceiver:
    """Holds the pair with one trainer, and makes a new one after a failure.

    Args:
        device: where buckets are received: the CPU with gloo, the engine's GPU with NCCL.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._location: str | None = None
        self._control: _ControlConnection | None = None
        self._group: Any = None
        self._store: Any = None

    def receive(self, update: WeightUpdate, staging: torch.Tensor) -> None:
        """Fill ``staging`` (uint8 ``[num_bytes]``) with the update's bytes.

        Raises:
            EngineError: the transfer failed; the contents of ``staging`` are undefined then.
        """
        try:
            location = json.loads(update.location)
            if self._location != update.location:  # another trainer, or the same one after a restart
                self.close()
            # One pair serves all versions; it is joined again only after a failure.
            if self._control is None:
                self._control = self._join(update, location)
            self._control.send({"version": update.version})
            answer = _answer_of(self._control, update)
            if answer["num_bytes"] != staging.numel():
                raise EngineError(
                    f"The trainer has {answer['num_bytes']} bytes of version {update.version}; sync the weights again."
                )
            for bucket in staging.split(location["bucket_bytes"]):
                self._group.recv([bucket], TRAINER_RANK, 0).wait()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            _answer_of(self._control, update)
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            self.close()
            raise EngineError(
                f"The weights of version {update.version} did not come by {update.transport!r}: {error}. The trainer's "
                "machine must be reachable from the engine's, and the transport must still be open."
            ) from error
        except EngineError:
            self.close()
            raise

    def close(self) -> None:
        """Leave the pair. Idempotent."""
        self._location = self._group = self._store = None
        control, self._control = self._control, None
        if control is not None:
            control.close()

    def _join(self, update: WeightUpdate, location: Mapping[str, Any]) -> _ControlConnection:
        host, timeout_s = location["host"], location["timeout_s"]
        connection = socket.create_connection((host, location["port"]), timeout=timeout_s)
        # Kept at once, so that a failure below closes it.
        control = self._control = _ControlConnection(connection, timeout_s)
        control.send({"token": location["token"]})
        answer = _answer_of(control, update)
        self._store = _DIST.TCPStore(
            host, location["store_port"], is_master=False, timeout=timedelta(seconds=timeout_s)
        )
        self._group = _join_pair(
            update.transport, self._store, answer["pair"], ENGINE_RANK, control.own_address, timeout_s
        )
        self._location = update.location
        return control


def _answer_of(control: _ControlConnection, update: WeightUpdate) -> dict[str, Any]:
    answer = control.receive()
    if answer.get("error") is not None:
        raise EngineError(f"The trainer cannot send version {update.version}: {answer['error']}.")
    return answer


# Both sides -----------------------------------------------------------------------------------------------------------


class _ControlConnection:
    """Lines of JSON between the two. Every method raises ``OSError`` when the peer is gone or too slow."""

    def __init__(self, connection: socket.socket, timeout_s: float | None) -> None:
        connection.settimeout(timeout_s)
        self._connection = connection
        self._reader = connection.makefile("rb")
        # An address of the interface that leads to the peer: where the peer reaches this side.
        self.own_address = str(connection.getsockname()[0])

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Wait for one message."""
        # Bounded, so that a stranger's endless line does not fill the memory.
        line = self._reader.readline(MAX_LINE_BYTES)
        if not line.endswith(b"\n"):
            raise ConnectionError("the other side has closed the connection")
        try:
            message = json.loads(line)
        except ValueError as error:
            raise ConnectionError("the other side does not speak this protocol") from error
        if not isinstance(message, dict):
            raise ConnectionError("the other side does not speak this protocol")
        return message

    def close(self) -> None:
        """Close the connection, which wakes threads that wait on either side of it."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the peer had closed it already
        finally:
            self._reader.close()
            self._connection.close()


def _join_pair(backend: str, store: Any, name: str, rank: int, own_address: str, timeout_s: float) -> Any:
    """Join the group of two called ``name`` and return it when both have joined.

    The group's ``send`` and ``recv`` start a transfer. ``wait()`` of their result returns when it has ended; with NCCL the
    current CUDA stream waits for its end instead.

    Raises:
        RuntimeError: the other one did not join in time.
    """
    timeout, names = timedelta(seconds=timeout_s), _DIST.PrefixStore(name, store)
    if backend == NCCL:
        nccl = _DIST.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return _DIST.ProcessGroupNCCL(names, rank, 2, nccl)
    gloo = _DIST.ProcessGroupGloo._Options()
    gloo._timeout = timeout
    gloo._devices = [_DIST.ProcessGroupGloo.create_device(hostname=own_address)]
    return _DIST.ProcessGroupGloo(names, rank, 2, gloo)

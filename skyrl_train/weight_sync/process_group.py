"""The gloo and NCCL transports: one broadcast takes a version to all engines (``docs/design/weight_broadcast.md``).

gather ──> staging copy ══buckets, one broadcast group══> staging copy in each worker of each engine ──load──> model

Each engine has a :class:`BroadcastClient`, which asks the trainer for versions. Its workers (one, or one for each tensor and
pipeline rank) are members of the group, each with a :class:`BroadcastReceiver`. Both are in ``broadcast_receiver.py``.

    engine                                  trainer                                     engine's workers
    {"version", "receivers", "of"} ────────> waits until all of the transfer have asked
                   <──────────────────────── {"assignment": group, first rank}
                                             both join, if it is a new group
                                             sends the buckets ════════════════════════> receive them, verify them
                                                      <───────────────────────────────── {"attempt", "rank", "again": no}
                   <──────────────────────── {"error": none}, a next assignment, or why there are no bytes

A group lives as long as the same engines take part and all goes well. After a failure, those that answer are assigned to a new
group within the same sync; the others are left out. An engine that comes alone (late, restarted) gets a group of its own.

Control messages are lines of JSON on TCP connections; nothing is pickled.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.broadcast_group import GLOO, NCCL, TRAINER_RANK, BroadcastGroup
from skyrl_train.weight_sync.checksum import checksum
from skyrl_train.weight_sync.control import ControlConnection, address_towards
from skyrl_train.weight_sync.shared_area import machine
from skyrl_train.weight_sync.staging import DeviceStaging, DoubleBuffer, HostStaging, pack
from skyrl_train.weight_sync.update import WeightTransport, WeightUpdate

BUCKET_BYTES = 64 << 20
JOIN_WAIT_S = 2.0  # for engines of a transfer that have not asked yet; later they get the bytes in a group of their own
STALLS = 4  # time limits of a member that stands still, in the time limit of a transfer
REPORT_WAIT_S = 5.0  # after a failure, which some workers notice a little later than the trainer
CHECKED_BYTES_PER_S = 100e6  # at least, by a worker that verifies what it got
CLOSE_LIMIT_S = 5.0  # that each connection may take to end
ACCEPT_PAUSE_S = 1.0  # after a connection that could not be accepted

logger = logging.getLogger(__name__)
_DIST: Any = torch.distributed  # the parts of it used here have no type stubs


# The trainer's side ---------------------------------------------------------------------------------------------------


class ProcessGroupTransport(WeightTransport):
    """Holds two staging copies on ``device`` and broadcasts them to the engines that ask.

    Args:
        backend: gloo | nccl.
        dtype: a torch name, the dtype that the engines serve. Weights are cast while they are gathered.
        verify: adds a checksum to each update.
        bucket_bytes: the size of one broadcast.
        address: this machine's address as engines reach it; None: the address of the interface that leads outside.
            Connections are accepted on this address only, and only with the token that travels in the update. The bytes
            are not encrypted.
        timeout_s: of a transfer, as the client has it. A member that stands still for a quarter of it, while a group meets or
            during a bucket, is left out, so that the others receive in a new group before the time is over.
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
        self._stall_s = timeout_s / STALLS
        # In main memory, engines on this machine map the copy.
        self._areas: DoubleBuffer[HostStaging | DeviceStaging] = DoubleBuffer(
            HostStaging if device.type == "cpu" else functools.partial(DeviceStaging, device)
        )
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
                self._server = _WeightServer(self.name, self._device, address, self._bucket_bytes, self._stall_s)
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
        location, mapped_on, gpu = self._server.location, "", None
        if isinstance(area, HostStaging):
            location, mapped_on, gpu = {**location, "path": area.location}, machine(), area.gpu
        return WeightUpdate(
            version=version,
            transport=self.name,
            location=json.dumps(location),
            num_bytes=staging.numel(),
            tensors=specs,
            checksum=checksum(staging, gpu) if self._verify else None,
            machine=mapped_on,
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
    """From the trainer's GPU to those of the engines, which must be other ones. See :class:`ProcessGroupTransport`."""

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
    """Return this machine's address on the interface that leads outside, or the loopback address."""
    return address_towards("192.0.2.1") or "127.0.0.1"  # an address reserved for documentation


@dataclass(eq=False)
class _Engine:
    """An engine that has asked for a version."""

    control: ControlConnection
    receivers: int = 0  # its workers
    # Of this attempt, by rank: whether the worker needs the bytes again.
    reports: dict[int, bool] = field(default_factory=dict)
    gone: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether it is gone, or all its workers have reported."""
        return self.gone or len(self.reports) == self.receivers

    @property
    def has_bytes(self) -> bool:
        return self.has_ended and not self.gone and not any(self.reports.values())

    @property
    def needs_bytes(self) -> bool:
        return self.has_ended and not self.gone and any(self.reports.values())

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message, if the engine is still there."""
        try:
            self.control.send(message)
        except OSError:
            self.gone = True


@dataclass(eq=False)
class _Round:
    """Engines that ask for ``version`` together, and the number of workers that they will have."""

    version: int
    expected: int
    engines: list[_Engine] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return sum(engine.receivers for engine in self.engines) >= self.expected


class _WeightServer:
    """Sends the offered versions to the engines that ask for them. A thread per connection listens, one per round sends."""

    def __init__(self, backend: str, device: torch.device, address: str, bucket_bytes: int, stall_s: float) -> None:
        self._backend, self._device, self._address = backend, device, address
        self._bucket_bytes, self._stall_s = bucket_bytes, stall_s
        self._token = secrets.token_hex(16)
        self._id = secrets.token_hex(4)  # groups of another trainer have other names
        self._attempts, self._last_attempt = itertools.count(), 0
        self._offers: dict[int, tuple[int, torch.Tensor]] = {}  # by area: version, bytes
        # Guards all below; notified when an engine asks, reports or leaves, and by ``close``.
        self._changed = threading.Condition()
        self._rounds: dict[int, _Round] = {}  # by version: those that wait for engines
        self._workers: dict[tuple[int, int], _Engine] = {}  # by attempt and rank: those that will report
        self._kept: tuple[BroadcastGroup, list[_Engine]] | None = None  # the last round's, and its engines by rank
        self._in_use: set[BroadcastGroup] = set()
        self._connections: set[ControlConnection] = set()
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()
        # Port 0: the system picks a free one, and the update carries it.
        listening = socket.create_server((address, 0))
        meeting = socket.create_server((address, 0))  # of the store where the members of a group find each other
        store_port = meeting.getsockname()[1]
        self._store = _DIST.TCPStore(
            address,
            store_port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=stall_s),
            master_listen_fd=meeting.detach(),
        )
        self._listening = listening
        self.location = {
            "host": address,
            "port": listening.getsockname()[1],
            "store_port": store_port,
            "token": self._token,
            "bucket_bytes": bucket_bytes,
            "stall_s": stall_s,
        }
        self._accepting = threading.Thread(target=self._accept, name="weight-server", daemon=True)
        self._accepting.start()

    def withdraw(self, area: int) -> None:
        """Stop offering the version in ``area``. Engines that ask for it get an error."""
        with self._changed:
            self._offers.pop(area, None)

    def offer(self, area: int, version: int, staging: torch.Tensor) -> None:
        """Offer ``version``: the bytes ``staging`` in ``area``."""
        with self._changed:
            # A version that is gathered again replaces its earlier copy, so a version is in one area at most.
            self._offers = {other: offer for other, offer in self._offers.items() if offer[0] != version}
            self._offers[area] = version, staging

    def close(self) -> None:
        """End every connection and group, and wait for their threads.

        A process that exits while a group still transfers is aborted by the group's C++ threads.
        """
        with self._changed:
            self._closed.set()
            self._changed.notify_all()
            # Copied: the threads remove their connections when those close.
            connections, groups = list(self._connections), list(self._in_use)
            kept = self._keep(None)
            if kept is not None:
                groups.append(kept[0])
        try:
            self._listening.shutdown(socket.SHUT_RDWR)
        except OSError:
            logger.debug("the weight server's socket was closed already")
        self._listening.close()
        for connection in connections:
            connection.close()
        for group in groups:
            group.leave()
        self._accepting.join(CLOSE_LIMIT_S)
        for thread in list(self._threads):
            thread.join(CLOSE_LIMIT_S)

    # Engines that ask ---------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        """Consumes connections / waits for the socket / unblocked by an engine or ``close`` / produces a thread for each."""
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError as error:
                if not self._closed.is_set():  # out of descriptors, or the peer has gone: later ones may succeed
                    logger.warning("the weight server cannot take a connection and continues: %s", error)
                if self._closed.wait(ACCEPT_PAUSE_S):
                    return
                continue
            engine = _Engine(ControlConnection(connection, self._stall_s))
            with self._changed:
                if self._closed.is_set():
                    engine.control.close()
                    return
                self._connections.add(engine.control)
                self._start_thread(self._listen, engine)

    def _start_thread(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(
            target=target, args=arguments, name=f"weight-server-{target.__name__.strip('_')}", daemon=True
        )
        thread.start()
        self._threads = [*(known for known in self._threads if known.is_alive()), thread]

    def _listen(self, engine: _Engine) -> None:
        """Consumes an engine's or a worker's messages / waits for the next one / unblocked by its end / produces rounds and
        reports."""
        try:
            while True:
                message = engine.control.receive()
                # Constant time, so that a stranger cannot find the token byte by byte.
                if not secrets.compare_digest(str(message.get("token")), self._token):
                    engine.control.send({"error": "the token is not this transport's"})
                    return
                engine.control.keep_alive()  # the next version may be hours away
                with self._changed:
                    if "attempt" in message:
                        asked = self._workers.pop((int(message["attempt"]), int(message["rank"])), None)
                        if asked is not None:
                            asked.reports[int(message["rank"])] = bool(message["again"])
                    else:
                        engine.receivers = int(message["receivers"])
                        self._join_round(engine, int(message["version"]), int(message["of"]))
                    self._changed.notify_all()
        except (OSError, ValueError, KeyError, TypeError) as error:
            if engine.receivers and not self._closed.is_set():
                logger.info("an engine has left the weight server: %s", error)
        finally:
            engine.control.close()
            with self._changed:
                self._connections.discard(engine.control)
                engine.gone = True
                self._changed.notify_all()

    def _join_round(self, engine: _Engine, version: int, together: int) -> None:
        """Add an engine to the round for ``version`` with ``together`` workers; 0: it comes alone."""
        round_ = self._rounds.get(version) if together else None
        if round_ is None:
            round_ = _Round(version, together or engine.receivers)
            if together:
                self._rounds[version] = round_
            if not self._closed.is_set():
                self._start_thread(self._serve, round_)
        round_.engines.append(engine)

    # Rounds -------------------------------------------------------------------------------------------------------

    def _serve(self, round_: _Round) -> None:
        """Consumes a round / waits for its engines / unblocked by the last one, time or ``close`` / produces the bytes."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed.is_set() or round_.is_complete, JOIN_WAIT_S)
            if self._rounds.get(round_.version) is round_:
                del self._rounds[round_.version]
            parts = [list(round_.engines)]
        while parts and not self._closed.is_set():
            engines = parts.pop()
            again, was_kept, error = self._send(round_.version, engines)
            if not again:
                continue
            if len(again) < len(engines) or was_kept:
                # Without those that are gone or do not answer; or a firewall has forgotten the group's idle connections.
                parts.append(again)
            elif len(engines) > 1:  # all answer, so perhaps some do not reach each other
                parts.extend([engine] for engine in again)
            else:
                again[0].tell({"error": error})

    def _send(self, version: int, engines: list[_Engine]) -> tuple[list[_Engine], bool, str]:
        """Send ``version`` to the engines by one broadcast, and tell them the result.

        Returns:
            The engines that need the bytes again, which have been told nothing; whether their group was an earlier one; and
            what went wrong.
        """
        with self._changed:
            # The lock is not held during the transfer: gathering the next version must not wait for a slow engine.
            offers = [(area, offer) for area, offer in self._offers.items() if offer[0] == version]
            engines = [engine for engine in engines if not engine.gone]
            attempt = self._last_attempt = next(self._attempts)
            kept = self._keep(None)
        group: BroadcastGroup | None = None
        was_kept = kept is not None and set(kept[1]) == set(engines)
        if kept is not None and was_kept:
            group, engines = kept
        elif kept is not None:
            kept[0].leave()
        if not offers or not engines:
            for engine in engines:
                engine.tell({"error": "it is not staged any more"})
            return [], was_kept, ""
        area, offer = offers[0]
        staging = offer[1]
        name = f"{self._id}-{attempt}" if group is None else group.name
        size = 1 + sum(engine.receivers for engine in engines)
        first = TRAINER_RANK + 1
        for engine in engines:
            with self._changed:
                engine.reports = {}
                self._workers.update({(attempt, rank): engine for rank in range(first, first + engine.receivers)})
            engine.tell({"assignment": {"attempt": attempt, "group": name, "rank": first, "size": size}})
            first += engine.receivers
        error = None
        try:
            if group is None:
                group = self._join(name, size)
            with self._changed:
                self._in_use.add(group)
            group.broadcast(staging, self._bucket_bytes)
        except RuntimeError as failure:
            error = f"the broadcast to {size - 1} workers failed: {failure}"
            logger.warning("version %d: %s", version, error)
        if error is not None and group is not None:
            group.leave()  # so that the other members notice, too
        # A worker that failed answers at once; one that has the bytes verifies them first.
        limit_s = REPORT_WAIT_S if error else self._stall_s + staging.numel() / CHECKED_BYTES_PER_S
        end, waiting, again = time.monotonic() + limit_s, engines, list[_Engine]()
        while waiting:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed.is_set() or any(one.has_ended for one in waiting),  # noqa: B023
                    max(0.0, end - time.monotonic()),
                )
                ended = [one for one in waiting if one.has_ended] or waiting  # none: the time is over
                waiting = [one for one in waiting if one not in ended]
                again += [one for one in ended if one.needs_bytes]
                # The area may have been overwritten while its bytes were sent.
                intact = self._offers.get(area) is offer
                if not waiting:
                    for rank in range(size):
                        self._workers.pop((attempt, rank), None)
                    if group is not None:
                        self._in_use.discard(group)
                        # Kept before the last engine is told the result, because the next version may be asked for then. A later
                        # attempt has taken engines out of this group.
                        fine = error is None and all(one.has_bytes for one in engines)
                        if fine and attempt == self._last_attempt and not self._closed.is_set():
                            other = self._keep((group, engines))
                            group = None if other is None else other[0]
            # Each engine as soon as its own workers have answered: one that hangs is no other one's matter.
            for engine in ended:
                if not engine.has_ended or engine.gone:
                    engine.tell({"error": "its workers did not report in time that they have it"})
                elif engine.has_bytes:
                    engine.tell({"error": None if intact else "a newer version has taken its place meanwhile"})
        if group is not None:
            group.leave()
        return again, was_kept, error or "a worker did not get all bytes"

    def _keep(self, kept: tuple[BroadcastGroup, list[_Engine]] | None) -> tuple[BroadcastGroup, list[_Engine]] | None:
        """Keep a group for the next round; returns the one that was kept."""
        before, self._kept = self._kept, kept
        return before

    def _join(self, name: str, size: int) -> BroadcastGroup:
        return BroadcastGroup(
            self._backend, self._store.clone(), name, TRAINER_RANK, size, self._address, self._device, self._stall_s
        )

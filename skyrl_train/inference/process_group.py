"""Weights from the trainer to one engine, in buckets, through a process group of the two (gloo, or NCCL between GPUs).

    engine                                             trainer
    connects, shows the update's token ─────────────>  checks it, answers with the pair's name
    both join a group of two: rank 0 the trainer, rank 1 the engine
    {"version": v} ─────────────────────────────────>  has it still: {"num_bytes": n}, else {"error": why}
    receives the buckets <═════════════════════════════ sends them
                         <─────────────────────────────  {"error": null}, or why the bytes are not version v's after all

Control messages are lines of JSON on the connection; nothing is pickled. An engine that dies or hangs is the matter of
its own pair only.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed

from skyrl_train.errors import EngineError
from skyrl_train.inference.weight_update import WeightUpdate

GLOO, NCCL = "gloo", "nccl"
TRAINER_RANK, ENGINE_RANK = 0, 1
MAX_LINE_BYTES = 65_536
_DIST: Any = torch.distributed  # what is used of it has no types


class Pair(Protocol):
    """The group of the trainer and one engine."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Starts to send; ``wait()`` of the result returns when the memory may change."""

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Starts to receive; ``wait()`` of the result returns when the bytes are there."""


class ControlConnection:
    """Lines of JSON between the two. Every method raises ``OSError`` when the other one is gone or too slow."""

    def __init__(self, connection: socket.socket, timeout_s: float | None) -> None:
        connection.settimeout(timeout_s)
        self._connection = connection
        self._reader = connection.makefile("rb")

    @property
    def own_address(self) -> str:
        """Where this end is reached: an address of the interface that leads to the other one."""
        return str(self._connection.getsockname()[0])

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends one message."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Waits for one message."""
        line = self._reader.readline(MAX_LINE_BYTES)
        if not line.endswith(b"\n"):
            raise ConnectionError("the other end has closed the connection")
        try:
            message = json.loads(line)
        except ValueError as error:
            raise ConnectionError("the other end speaks another language") from error
        if not isinstance(message, dict):
            raise ConnectionError("the other end speaks another language")
        return message

    def close(self) -> None:
        """Ends the conversation; whoever waits at either end hears of it."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it had ended already
        finally:
            self._reader.close()
            self._connection.close()


def open_store(address: str, port: int, timeout_s: float, *, listening: int | None = None) -> Any:
    """Where the two find each other: the trainer's with the descriptor ``listening``, the engine's without.

    Raises:
        RuntimeError: it cannot be reached.
    """
    timeout = timedelta(seconds=timeout_s)
    if listening is None:
        return _DIST.TCPStore(address, port, is_master=False, timeout=timeout)
    return _DIST.TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listening
    )


def join_pair(backend: str, store: Any, name: str, rank: int, own_address: str, timeout_s: float) -> Pair:
    """The group called ``name``; returns when both have joined.

    Raises:
        RuntimeError: the other one did not come in time.
    """
    timeout, names = timedelta(seconds=timeout_s), _DIST.PrefixStore(name, store)
    pair: Pair
    if backend == NCCL:
        nccl = _DIST.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        pair = _DIST.ProcessGroupNCCL(names, rank, 2, nccl)
        return pair
    gloo = _DIST.ProcessGroupGloo._Options()
    gloo._timeout = timeout
    gloo._devices = [_DIST.ProcessGroupGloo.create_device(hostname=own_address)]
    pair = _DIST.ProcessGroupGloo(names, rank, 2, gloo)
    return pair


def buckets(staging: torch.Tensor, bucket_bytes: int) -> Iterator[torch.Tensor]:
    """The bytes in order, ``bucket_bytes`` at a time; the last one may be shorter."""
    yield from staging.split(bucket_bytes)


class ProcessGroupReceiver:
    """The engine's end: keeps the pair with one trainer, and makes a new one when that has failed.

    ``device``: where buckets are received: the CPU with gloo, the engine's GPU with NCCL.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._location: str | None = None
        self._control: ControlConnection | None = None
        self._group: Pair | None = None
        self._store: Any = None

    def receive(self, update: WeightUpdate, staging: torch.Tensor) -> None:
        """Fills ``staging`` (uint8 ``[num_bytes]``) with the update's bytes.

        Raises:
            EngineError: they did not come; ``staging`` holds anything then.
        """
        try:
            location = json.loads(update.location)
            if self._location != update.location:
                self.close()
            self._pull(update, staging, location)
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
        """Leaves the pair. Idempotent."""
        self._location = self._group = self._store = None
        control, self._control = self._control, None
        if control is not None:
            control.close()

    def _pull(self, update: WeightUpdate, staging: torch.Tensor, location: Mapping[str, Any]) -> None:
        if self._control is None:
            self._join(update, location)
        assert self._control is not None and self._group is not None, "just joined"
        self._control.send({"version": update.version})
        self._refused(update, answer := self._control.receive())
        if answer["num_bytes"] != staging.numel():
            raise EngineError(
                f"The trainer has {answer['num_bytes']} bytes of version {update.version}; publish again."
            )
        for bucket in buckets(staging, location["bucket_bytes"]):
            self._group.recv([bucket], TRAINER_RANK, 0).wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._refused(update, self._control.receive())

    def _join(self, update: WeightUpdate, location: Mapping[str, Any]) -> None:
        host, timeout_s = location["host"], location["timeout_s"]
        connection = socket.create_connection((host, location["port"]), timeout=timeout_s)
        self._control = ControlConnection(connection, timeout_s)
        self._control.send({"token": location["token"]})
        self._refused(update, answer := self._control.receive())
        self._store = open_store(host, location["store_port"], timeout_s)
        own = self._control.own_address
        self._group = join_pair(update.transport, self._store, answer["pair"], ENGINE_RANK, own, timeout_s)
        self._location = update.location

    @staticmethod
    def _refused(update: WeightUpdate, answer: Mapping[str, Any]) -> None:
        if answer.get("error") is not None:
            raise EngineError(f"The trainer cannot send version {update.version}: {answer['error']}.")

"""The engine's side of the gloo and NCCL transports; ``process_group.py`` has the trainer's, and the protocol.

An engine has one :class:`BroadcastClient`, and one :class:`BroadcastReceiver` in each process that takes weights: a vLLM engine's
workers, or the process of an embedded engine.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from skyrl_train.errors import EngineError
from skyrl_train.weight_sync.broadcast_group import NCCL, BroadcastGroup
from skyrl_train.weight_sync.control import ControlConnection, address_towards
from skyrl_train.weight_sync.pinning import Registration
from skyrl_train.weight_sync.staging import checked_views
from skyrl_train.weight_sync.update import WeightUpdate

logger = logging.getLogger(__name__)
_DIST: Any = torch.distributed  # the parts of it used here have no type stubs


class BroadcastClient:
    """An engine's conversation with one trainer. One call at a time; ``close`` may come from another thread."""

    def __init__(self) -> None:
        self._token: str | None = None  # of the trainer that it is connected to
        self._control: ControlConnection | None = None

    def assignments(self, update: WeightUpdate, receivers: int) -> Iterator[dict[str, Any]]:
        """Ask for the bytes of an update for the engine's ``receivers`` workers; end when all of them have got them.

        Yields:
            The rank of the first worker in a group of ``size`` members; the others have the ranks after it. The workers must
            join (:class:`BroadcastReceiver`) before the next assignment is asked for, which means that this one has failed.

        Raises:
            EngineError: the trainer cannot be reached or does not have the version, or the transfer has failed.
        """
        try:
            location = json.loads(update.location)
            if self._token != location["token"]:  # another trainer, or the same one after a restart
                self.close()
            if self._control is None:
                self._control = ControlConnection.open(location)
                self._control.keep_alive()
                self._token = location["token"]
            control = self._control
            control.send(
                {
                    "token": location["token"],
                    "version": update.version,
                    "receivers": receivers,
                    "of": update.receivers,
                }
            )
            while "assignment" in (answer := control.receive()):
                yield answer["assignment"]
        except (OSError, ValueError, KeyError) as error:
            self.close()
            raise EngineError(
                f"The weights of version {update.version} did not come by {update.transport!r}: {error}. The trainer's "
                "machine must be reachable from the engine's, and the transport must still be open."
            ) from error
        if answer.get("error") is not None:
            raise EngineError(f"The trainer cannot send version {update.version}: {answer['error']}.")

    def close(self) -> None:
        """Leave the trainer, which wakes a thread that waits for it. Idempotent."""
        self._token = None
        control, self._control = self._control, None
        if control is not None:
            control.close()


class BroadcastReceiver:
    """Takes the bytes in the process that needs them, into one staging copy: an update lasts until the next one begins.

    The copy lies in main memory with gloo, where a GPU copies from it asynchronously, and on ``device`` with NCCL.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._registration = Registration()  # of main memory, if the model is on a GPU
        self._group: BroadcastGroup | None = None
        # One thread: a group is joined when the work in the one before has ended.
        self._thread: ThreadPoolExecutor | None = None
        self._begun: tuple[int, Future[Mapping[str, torch.Tensor]]] | None = None

    def receive(
        self, update: WeightUpdate, assignment: Mapping[str, Any], number: int = 0
    ) -> Mapping[str, torch.Tensor]:
        """Join as :meth:`BroadcastClient.assignments` says, take the bytes, verify them, and report to the trainer.

        Args:
            number: of this worker in its engine.

        Returns:
            The weights (shapes and dtypes of ``update.tensors``) by name, as read-only views.

        Raises:
            EngineError: the transfer failed, there is no memory, a tensor lies outside, or the checksum differs.
        """
        location, rank, failed = json.loads(update.location), assignment["rank"] + number, False
        try:
            staging = self._room(update)
            try:
                self._join(update.transport, location, assignment, rank).broadcast(staging, location["bucket_bytes"])
            except (RuntimeError, OSError) as error:
                failed = True
                self._leave()
                raise EngineError(f"The broadcast of version {update.version} failed: {error}.") from error
            return checked_views(update, staging, self._registration.device)
        finally:
            _report(location, {"attempt": assignment["attempt"], "rank": rank, "again": failed})

    def begin(self, update: WeightUpdate, assignment: Mapping[str, Any], number: int) -> None:
        """:meth:`receive` in a thread beside this one."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="weight-member")
        self._begun = update.version, self._thread.submit(self.receive, update, assignment, number)

    def result(self, version: int) -> Mapping[str, torch.Tensor]:
        """Return the weights that :meth:`begin` was to bring, as :meth:`receive` does. Waits for the thread."""
        if self._begun is None or self._begun[0] != version:
            raise EngineError(f"Version {version} was not received; call receive_weights() first.")
        return self._begun[1].result()

    def close(self) -> None:
        """Leave the group and free the staging copy. Idempotent."""
        self._leave()
        self._registration.release()
        self._staging = torch.empty(0, dtype=torch.uint8)
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None

    def _room(self, update: WeightUpdate) -> torch.Tensor:
        if self._staging.numel() != update.num_bytes:
            device = self._device if update.transport == NCCL else torch.device("cpu")
            self._registration.release()
            self._staging = torch.empty(0, dtype=torch.uint8)  # freed first
            try:
                self._staging = torch.empty(update.num_bytes, dtype=torch.uint8, device=device)
                if device.type == "cuda":
                    # Kernels of the memory's last owner may still run, and the broadcast has a stream of its own.
                    torch.cuda.current_stream(device).synchronize()
            except RuntimeError as error:
                remedy = "Free some memory of the engine's machine."
                if device.type == "cuda":
                    remedy = "Lower the engine's gpu_memory_utilization, or set generator.weight_transport=gloo."
                raise EngineError(
                    f"No memory on {device} for {update.num_bytes / 1e6:.0f} MB of weights beside the model. {remedy}"
                ) from error
            if self._device.type == "cuda" and device.type == "cpu":
                self._registration.cover(self._staging, self._device)
        return self._staging

    def _join(
        self, backend: str, location: Mapping[str, Any], assignment: Mapping[str, Any], rank: int
    ) -> BroadcastGroup:
        if self._group is None or self._group.name != assignment["group"]:
            self._leave()
            host, timeout_s = location["host"], location["stall_s"]
            timeout = timedelta(seconds=timeout_s)
            store = _DIST.TCPStore(host, location["store_port"], is_master=False, timeout=timeout)
            address = address_towards(host) or host
            self._group = BroadcastGroup(
                backend, store, assignment["group"], rank, assignment["size"], address, self._staging.device, timeout_s
            )
        return self._group

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.leave()


def _report(location: Mapping[str, Any], report: Mapping[str, Any]) -> None:
    try:
        with closing(ControlConnection.open(location)) as control:
            control.send({"token": location["token"], **report})
    except OSError as error:
        logger.info("the trainer does not take a worker's report: %s", error)

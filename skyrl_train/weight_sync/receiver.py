"""The engine's side of a weight sync: opens an update by the transport that it names.

disk, cuda_ipc, shared_memory, gloo from this machine ──────────────┐
gloo, nccl: broadcast ───────> staging copy ────────────────────────┼──> views of the weights ──load──> model
delta: base + what changed ──> receive buffer ──shared memory───────┘

A transport from outside the package names its reading side by import path: ``open_update(update, device)`` returns the
weights by name.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

import torch

from skyrl_train.config.import_path import import_name, is_import_path
from skyrl_train.errors import EngineError
from skyrl_train.weight_sync.broadcast_group import GLOO, NCCL
from skyrl_train.weight_sync.broadcast_receiver import BroadcastClient, BroadcastReceiver
from skyrl_train.weight_sync.cuda_ipc import CUDA_IPC, open_device_memory
from skyrl_train.weight_sync.delta import DELTA, Chain, read_into
from skyrl_train.weight_sync.disk import DISK, open_file
from skyrl_train.weight_sync.shared_area import SharedArea, machine
from skyrl_train.weight_sync.shared_memory import SHARED_MEMORY, SharedMemoryReceiver
from skyrl_train.weight_sync.staging import checked_views
from skyrl_train.weight_sync.update import WeightUpdate


class WeightReceiver:
    """Opens updates for a model on ``device``. One call at a time; the result of a call is valid until the next one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shared_memory = SharedMemoryReceiver(device)
        self._receive_buffer = ReceiveBuffer()
        self._broadcast_client, self._broadcast_receiver = BroadcastClient(), BroadcastReceiver(device)

    def open_update(self, update: WeightUpdate) -> Mapping[str, torch.Tensor]:
        """Return the weights (shapes and dtypes of ``update.tensors``) by name, as read-only views.

        Raises:
            EngineError: the update does not reach this process, a tensor lies outside, or the checksum differs.
        """
        if update.transport == DISK:
            return checked_views(update, open_file(update, update.location))
        if update.transport == CUDA_IPC:
            return checked_views(update, open_device_memory(update, self._device))
        if update.transport in (GLOO, NCCL) and not update.is_mapped_on(machine()):
            return self._receive_broadcast(update)
        if is_import_path(update.transport):
            function = import_name(update.transport, "the transport of a weight update", "function")
            weights: Mapping[str, torch.Tensor] = function(update, self._device)
            return weights
        return self._shared_memory.open_update(self._receive_buffer.fetch(update))

    def _receive_broadcast(self, update: WeightUpdate) -> Mapping[str, torch.Tensor]:
        if update.transport == NCCL and self._device.type != "cuda":
            raise EngineError(
                f"An engine on {self._device.type} cannot receive by 'nccl'; set generator.weight_transport=gloo."
            )
        received: Mapping[str, torch.Tensor] | EngineError = EngineError("The trainer has sent nothing; sync again.")
        for assignment in self._broadcast_client.assignments(update, receivers=1):
            try:
                received = self._broadcast_receiver.receive(update, assignment)
            except EngineError as error:
                received = error  # the trainer decides whether there is another attempt
        if isinstance(received, EngineError):
            raise received
        return received

    def close(self) -> None:
        """Leave all connections and forget the opened updates. Idempotent."""
        self._shared_memory.close()
        self._receive_buffer.close()
        self._broadcast_client.close()
        self._broadcast_receiver.close()


class ReceiveBuffer:
    """Puts updates together that come in parts, in two areas of shared memory that alternate.

    One call at a time. The update fetched last stays intact while the next one is fetched.
    """

    def __init__(self) -> None:
        self._areas: list[tuple[SharedArea, torch.Tensor] | None] = [None, None]
        self._last = 0  # the area of the update fetched last
        self._held: tuple[str, int] | None = None  # delta chain and version in that area

    def fetch(self, update: WeightUpdate) -> WeightUpdate:
        """Copy the bytes of ``update`` into shared memory, unless they lie somewhere as a whole.

        Returns:
            An update by shared memory for processes on this machine, or ``update`` itself.

        Raises:
            EngineError: the bytes could not be fetched, or are damaged.
        """
        if update.transport == GLOO:  # from this machine
            return dataclasses.replace(update, transport=SHARED_MEMORY, location=json.loads(update.location)["path"])
        if update.transport != DELTA:
            return update
        chain = Chain.parse(update)
        location, staging = self._other_area(update.num_bytes)
        # The version fetched last is the base, if it belongs to the same chain.
        base, last = None, self._areas[self._last]
        if self._held is not None and self._held[0] == chain.id and last is not None:
            base = self._held[1], last[1]
        read_into(staging, update, chain, base)
        self._held = chain.id, update.version
        # The areas alternate only after a success, so a failed update does not replace the base of the next delta.
        self._last = 1 - self._last
        return dataclasses.replace(update, transport=SHARED_MEMORY, location=location)

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._held = None
        for index, area in enumerate(self._areas):
            if area is not None:
                area[0].close()
                self._areas[index] = None

    def _other_area(self, num_bytes: int) -> tuple[str, torch.Tensor]:
        """Return location and bytes of the area that was not used last."""
        index = 1 - self._last
        area = self._areas[index]
        if area is None or area[1].numel() != num_bytes:
            if area is not None:  # the update changed its size, for example to another model's
                area[0].close()
            memory = SharedArea(num_bytes)
            area = self._areas[index] = memory, torch.frombuffer(memory.memory, dtype=torch.uint8)
        return area[0].location, area[1]

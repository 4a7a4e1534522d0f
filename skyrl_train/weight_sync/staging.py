"""Staging copies: the byte layout that trainer and engines agree on, and the memory that holds it.

Weights lie side by side in one contiguous buffer. They arrive one at a time and are released at once: of a sharded
model, never more than one gathered weight exists beside the staging copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

import torch

from skyrl_train.errors import EngineError, WeightSyncError
from skyrl_train.weight_sync.checksum import checksum
from skyrl_train.weight_sync.shared_area import SharedArea
from skyrl_train.weight_sync.update import TensorSpec, WeightUpdate

ALIGNMENT_BYTES = 64  # a cache line; no dtype needs more
NUM_STAGING_AREAS = 2  # one that engines may still read, and one that is being gathered into


# The layout -----------------------------------------------------------------------------------------------------------


def pack(
    weights: Iterable[tuple[str, torch.Tensor]], dtype: str, room: Callable[[int], torch.Tensor]
) -> tuple[tuple[TensorSpec, ...], int]:
    """Copy the weights, cast to ``dtype`` (a torch name), each to an aligned offset.

    Args:
        room: ``room(n)`` returns a uint8 buffer of at least ``n`` bytes that keeps what earlier calls wrote.

    Returns:
        The place of each weight, and the total size in bytes.
    """
    itemsize = getattr(torch, dtype).itemsize
    specs, offset = [], 0
    with torch.no_grad():
        for name, weight in weights:
            spec = TensorSpec(name, tuple(weight.shape), dtype, offset)
            end = offset + weight.numel() * itemsize
            offset = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            # Asked for at each weight, because the total size is known only at the end.
            staging = room(offset)
            tensor_view(staging, spec).copy_(weight)
            # The gap may hold bytes of an earlier layout, which would change the checksum.
            staging[end:offset].zero_()
            specs.append(spec)
    # Memory of size 0 can be neither mapped nor sent.
    num_bytes = max(offset, ALIGNMENT_BYTES)
    if not specs:
        room(num_bytes).zero_()
    return tuple(specs), num_bytes


def tensor_view(staging: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return the tensor that ``spec`` describes, as a view of the staging copy (uint8 ``[num_bytes]``).

    Raises:
        EngineError: the dtype is unknown, or the tensor does not lie within the copy.
    """
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise EngineError(f"Weight {spec.name!r} has the unknown dtype {spec.dtype!r}; send torch dtype names.")
    size = dtype.itemsize
    for dimension in spec.shape:
        size *= dimension
    if not 0 <= spec.offset <= spec.offset + size <= staging.numel():
        raise EngineError(
            f"Weight {spec.name!r} lies outside the staging copy of {staging.numel()} bytes; gather the update again."
        )
    return staging[spec.offset : spec.offset + size].view(dtype).view(spec.shape)


def checked_views(update: WeightUpdate, staging: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Return the weights in a staging copy (uint8 ``[num_bytes]`` on any device) as read-only views.

    Raises:
        EngineError: a tensor lies outside the copy, or the checksum differs.
    """
    tensors = {spec.name: tensor_view(staging, spec) for spec in update.tensors}
    if update.checksum is not None and checksum(staging) != update.checksum:
        raise EngineError(
            f"The weights of version {update.version} differ from their checksum; the old ones stay. Sync them again."
        )
    return tensors


# The memory -----------------------------------------------------------------------------------------------------------


class HostStaging:
    """Main memory that engines on this machine can map."""

    def __init__(self) -> None:
        self.location = ""  # path of the memory; it exists after the first :meth:`room`, and growing keeps it
        self._area: SharedArea | None = None
        self._staging = torch.empty(0, dtype=torch.uint8)

    def room(self, num_bytes: int) -> torch.Tensor:
        """Return a uint8 buffer of at least ``num_bytes`` with its earlier contents. See :func:`pack`.

        Raises:
            WeightSyncError: there is not enough shared memory.
        """
        if num_bytes > self._staging.numel():
            size = max(num_bytes, 2 * self._staging.numel())  # doubling keeps the number of resizes small
            try:
                if self._area is None:
                    self._area = SharedArea(size)
                    self.location = self._area.location
                else:
                    self._area.reserve(size)
            except OSError as error:
                raise WeightSyncError(
                    f"No shared memory for {num_bytes / 1e6:.0f} MB of weights: {error.strerror}. Free some memory."
                ) from error
            self._staging = torch.frombuffer(self._area.memory, dtype=torch.uint8)
        return self._staging

    def close(self) -> None:
        """Release the memory. Engines that mapped it keep their mapping."""
        self._staging = torch.empty(0, dtype=torch.uint8)
        if self._area is not None:
            self._area.close()
            self._area = None


class DeviceStaging:
    """Memory of one device. While the first version makes it grow, it needs up to twice its size."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)

    def room(self, num_bytes: int) -> torch.Tensor:
        """Like :meth:`HostStaging.room`, on the device.

        Raises:
            WeightSyncError: there is not enough memory.
        """
        held = self._staging.numel()
        if num_bytes > held:
            self._resize(max(num_bytes, held + held // 2), kept=held)
        return self._staging

    def trim(self, num_bytes: int) -> torch.Tensor:
        """Free what is beyond ``num_bytes`` and return the rest."""
        if self._staging.numel() > num_bytes:
            self._resize(num_bytes, kept=num_bytes)
        return self._staging

    def close(self) -> None:
        """Release the memory. It is freed when no engine maps it any more."""
        self._staging = torch.empty(0, dtype=torch.uint8, device=self._device)

    def _resize(self, num_bytes: int, kept: int) -> None:
        try:
            staging = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise WeightSyncError(
                f"No memory on {self._device} for a staging copy of {num_bytes / 1e6:.0f} MB. Lower the engine's "
                "gpu_memory_utilization, or set generator.weight_transport=shared_memory."
            ) from error
        staging[:kept].copy_(self._staging[:kept])
        self._staging = staging


Area = TypeVar("Area", bound=HostStaging | DeviceStaging)


class DoubleBuffer(Generic[Area]):
    """Two staging areas that alternate. Each is created at its first use, so an unused buffer can be pickled."""

    def __init__(self, make: Callable[[], Area]) -> None:
        self._make = make
        self._areas: list[Area | None] = [None] * NUM_STAGING_AREAS
        self._turns = 0
        self._closed = False

    def next(self) -> Area:
        """Return the area that was not used last.

        Raises:
            WeightSyncError: the buffer is closed.
        """
        if self._closed:
            raise WeightSyncError("The weight transport is closed; make a new one to sync weights again.")
        index = self._turns % NUM_STAGING_AREAS
        self._turns += 1
        area = self._areas[index]
        if area is None:
            area = self._areas[index] = self._make()
        return area

    def close(self) -> None:
        """Free both areas. Idempotent."""
        self._closed = True
        self.release()

    def release(self) -> None:
        """Free both areas until the next :meth:`next`."""
        for index, area in enumerate(self._areas):
            if area is not None:
                area.close()
                self._areas[index] = None

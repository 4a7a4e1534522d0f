"""Staging copies: the byte layout that trainer and engines agree on, and the memory that holds it.

Weights lie side by side in one contiguous buffer. They arrive one at a time and are released at once: of a sharded
model, never more than one gathered weight exists beside the staging copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

import torch

from skyrl_train.errors import EngineError, WeightSyncError
from skyrl_train.weight_sync.checksum import checksum
from skyrl_train.weight_sync.pinning import Registration, wait_for_copies
from skyrl_train.weight_sync.shared_area import SharedArea
from skyrl_train.weight_sync.update import TensorSpec, WeightUpdate

ALIGNMENT_BYTES = 64  # a cache line; no dtype needs more
MAX_MOVED_BYTES = 256 << 20  # larger weights are embeddings and heads
NUM_STAGING_AREAS = 2  # one that engines may still read, and one that is being gathered into


# The layout -----------------------------------------------------------------------------------------------------------


def pack(
    weights: Iterable[tuple[str, torch.Tensor]], dtype: str, area: Staging
) -> tuple[tuple[TensorSpec, ...], torch.Tensor]:
    """Copy the weights, cast to ``dtype`` (a torch name), each to an aligned offset; return when all copies have ended.

    Returns:
        The place of each weight, and the staging copy (uint8 ``[num_bytes]``).
    """
    torch_dtype = getattr(torch, dtype)
    specs, offset, device = [], 0, None
    try:
        with torch.no_grad():
            for name, weight in weights:
                if weight.is_cuda:
                    device = weight.device
                spec = TensorSpec(name, tuple(weight.shape), dtype, offset)
                end = offset + weight.numel() * torch_dtype.itemsize
                offset = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
                # Asked for at each weight, because the total size is known only at the end.
                staging = area.room(offset)
                # Between devices, a copy would cast in main memory: after the way over the bus, by the CPU.
                leaves_gpu = weight.is_cuda and not staging.is_cuda
                source = weight.to(torch_dtype) if leaves_gpu else weight
                # On the current stream: its order lets one weight's memory be used again for the next.
                tensor_view(staging, spec).copy_(source, non_blocking=True)
                # The gap may hold bytes of an earlier layout, which would change the checksum.
                staging[end:offset].zero_()
                specs.append(spec)
    finally:
        if device is not None:
            wait_for_copies(device)
    # Memory of size 0 can be neither mapped nor sent.
    num_bytes = max(offset, ALIGNMENT_BYTES)
    if not specs:
        area.room(num_bytes).zero_()
    return tuple(specs), area.finish(num_bytes, device)


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


def checked_views(
    update: WeightUpdate, staging: torch.Tensor, gpu: torch.device | None = None
) -> Mapping[str, torch.Tensor]:
    """Return the weights in a staging copy (uint8 ``[num_bytes]`` on any device) as read-only views.

    Args:
        gpu: computes the checksum of registered memory, see :func:`checksum`.

    Raises:
        EngineError: a tensor lies outside the copy, or the checksum differs.
    """
    tensors = {spec.name: tensor_view(staging, spec) for spec in update.tensors}
    if update.checksum is not None and checksum(staging, gpu) != update.checksum:
        raise EngineError(
            f"The weights of version {update.version} differ from their checksum; the old ones stay. Sync them again."
        )
    return tensors


def moved(weights: Mapping[str, torch.Tensor], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each weight on ``device``. Copies are asked for on the current stream and not waited for.

    The largest weights stay where they are, so that loading takes little memory beside the model's.
    """
    for name, weight in weights.items():
        yield name, weight if weight.nbytes > MAX_MOVED_BYTES else weight.to(device, non_blocking=True)


# The memory -----------------------------------------------------------------------------------------------------------


class Staging(ABC):
    """Memory for one version at a time. It grows while the first one is gathered, and keeps its size afterwards."""

    @abstractmethod
    def room(self, num_bytes: int) -> torch.Tensor:
        """Return a uint8 buffer of at least ``num_bytes`` that keeps what earlier calls wrote.

        Raises:
            WeightSyncError: there is not enough memory.
        """

    @abstractmethod
    def finish(self, num_bytes: int, source: torch.device | None) -> torch.Tensor:
        """Return the version, uint8 ``[num_bytes]``, when all of it is written.

        Args:
            source: the GPU that the weights came from; None: from main memory.

        Raises:
            WeightSyncError: there is not enough memory.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the memory. It is freed when no engine maps it any more."""


class HostStaging(Staging):
    """Main memory that engines on this machine can map."""

    def __init__(self) -> None:
        self.location = ""  # path of the memory; it exists after the first :meth:`room`, and growing keeps it
        self._area: SharedArea | None = None
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._registration = Registration()

    def room(self, num_bytes: int) -> torch.Tensor:
        if num_bytes > self._registration.num_bytes:
            self._registration.release()  # a copy must not cross the end of registered memory
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

    @property
    def gpu(self) -> torch.device | None:
        """The GPU that the memory is registered for, if it is."""
        return self._registration.device

    def finish(self, num_bytes: int, source: torch.device | None) -> torch.Tensor:
        staging = self._staging[:num_bytes]
        if source is not None:
            # Now, because the size is known and all pages are there: later versions are copied asynchronously.
            self._registration.cover(staging, source)
        return staging

    def close(self) -> None:
        self._registration.release()
        self._staging = torch.empty(0, dtype=torch.uint8)
        if self._area is not None:
            self._area.close()
            self._area = None


class DeviceStaging(Staging):
    """Memory of one device, of the exact size of a version. Only a version that does not fit grows, in main memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)
        self._last_bytes = 0  # of the last version

    def room(self, num_bytes: int) -> torch.Tensor:
        held = self._staging.numel()
        if held == 0 and num_bytes <= self._last_bytes:  # it was closed since
            held = self._last_bytes
            self._staging = self._allocate(held)
        if num_bytes > held:
            # Growing on a GPU would need the old and the new memory at once, where models hardly fit.
            grown = torch.empty(max(num_bytes, 2 * held), dtype=torch.uint8)
            grown[:held].copy_(self._staging)
            self._staging = grown
        return self._staging

    def finish(self, num_bytes: int, source: torch.device | None) -> torch.Tensor:
        # The whole storage is shared with the engine, so spare memory would be held twice.
        if self._staging.numel() != num_bytes or self._staging.device.type != self._device.type:
            self._staging = self._allocate(num_bytes).copy_(self._staging[:num_bytes])
        self._last_bytes = num_bytes
        return self._staging

    def close(self) -> None:
        self._staging = torch.empty(0, dtype=torch.uint8, device=self._device)

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise WeightSyncError(
                f"No memory on {self._device} for a staging copy of {num_bytes / 1e6:.0f} MB. Lower the engine's "
                "gpu_memory_utilization, or set generator.weight_transport=shared_memory."
            ) from error


Area = TypeVar("Area", bound=Staging)


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
        """Free the memory of both areas until they are used again."""
        for area in self._areas:
            if area is not None:
                area.close()
        self._turns = 0  # the first one knows the size of a version

"""The shared-memory transport: the trainer gathers into memory that engines on the same machine map.

The location of an update is a path that any process of this user on this machine can open: ``/proc/<pid>/fd/<n>`` of
the trainer's anonymous memory, or a temporary file where there is no ``memfd``. Nothing is copied until the load.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from skyrl_train.errors import EngineError
from skyrl_train.weight_sync.checksum import checksum
from skyrl_train.weight_sync.pinning import Registration
from skyrl_train.weight_sync.staging import DoubleBuffer, HostStaging, checked_views, pack
from skyrl_train.weight_sync.update import WeightTransport, WeightUpdate

SHARED_MEMORY = "shared_memory"


class SharedMemoryTransport(WeightTransport):
    """The trainer's side.

    Args:
        dtype: a torch name, the dtype that the engines serve. Weights are cast while they are gathered.
        verify: adds a checksum to each update.
    """

    name = SHARED_MEMORY

    def __init__(self, dtype: str = "float32", verify: bool = False) -> None:
        self._dtype = dtype
        self._verify = verify
        self._areas = DoubleBuffer(HostStaging)

    def gather(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate:
        """Copy the weights, cast, into the older of the two staging areas.

        Raises:
            WeightSyncError: the transport is closed, or there is not enough shared memory.
        """
        area = self._areas.next()
        specs, staging = pack(weights, self._dtype, area)
        return WeightUpdate(
            version=version,
            transport=self.name,
            location=area.location,
            num_bytes=staging.numel(),
            tensors=specs,
            checksum=checksum(staging, area.gpu) if self._verify else None,
        )

    def close(self) -> None:
        """Free the staging areas. Engines that mapped one keep their mapping. Idempotent."""
        self._areas.close()


class SharedMemoryReceiver:
    """The engine's side. Keeps one mapping per location, because a trainer alternates between two staging areas.

    Args:
        device: where the weights go. For a GPU, mapped memory is registered with CUDA.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._gpu = device if device is not None and device.type == "cuda" else None
        self._mappings: dict[str, _Mapping] = {}  # by location

    def open_update(self, update: WeightUpdate) -> Mapping[str, torch.Tensor]:
        """Return read-only views (shapes and dtypes of ``update.tensors``) of the mapped memory.

        Raises:
            EngineError: the transport or location cannot be read here, a tensor lies outside, or the checksum differs.
        """
        if update.transport != SHARED_MEMORY:
            raise EngineError(f"This engine receives by {SHARED_MEMORY!r}, not by {update.transport!r}.")
        try:
            mapping = self._map(update.location)
        except (OSError, ValueError) as error:  # mmap raises ValueError for a file of size 0
            raise EngineError(
                f"Cannot open the weights of version {update.version} at {update.location!r}: {error}. The transport "
                "must still be open, and engine and trainer must run on one machine as one user; else set "
                "generator.weight_transport=gloo."
            ) from error
        if mapping.memory.numel() < update.num_bytes:
            raise EngineError(
                f"The staging area at {update.location!r} has {mapping.memory.numel()} bytes, the update needs "
                f"{update.num_bytes}; gather the update again."
            )
        if self._gpu is not None:
            mapping.registration.cover(mapping.memory[: update.num_bytes], self._gpu)
        return checked_views(update, mapping.memory[: update.num_bytes], mapping.registration.device)

    def close(self) -> None:
        """Forget the mappings. The memory is freed with its last view. Idempotent."""
        for mapping in self._mappings.values():
            mapping.registration.release()
        self._mappings.clear()

    def _map(self, location: str) -> _Mapping:
        # Opened each time, also for a known location: only the open file tells which memory the path names now.
        descriptor = os.open(location, os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            # Descriptor numbers are reused, so a path can come to name other memory. Device and inode tell them apart.
            identity = (status.st_dev, status.st_ino, status.st_size)
            known = self._mappings.get(location)
            if known is None or known.identity != identity:
                if known is not None:
                    known.registration.release()
                memory = torch.frombuffer(mmap.mmap(descriptor, status.st_size), dtype=torch.uint8)
                known = self._mappings[location] = _Mapping(identity, memory)
            return known
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class _Mapping:
    """Mapped memory of a trainer (uint8 ``[size]``); device, inode and size identify it."""

    identity: tuple[int, int, int]
    memory: torch.Tensor
    registration: Registration = field(default_factory=Registration)

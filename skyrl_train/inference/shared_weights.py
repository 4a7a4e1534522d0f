"""The receiving half of the shared-memory transport: maps a staging copy and looks at it as tensors.

The location of an update is a path that any process of this user on this machine can open: ``/proc/<pid>/fd/<n>`` of
the trainer's anonymous memory, or a temporary file where there is no such thing. Nothing is copied until the load.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from skyrl_train.errors import EngineError
from skyrl_train.inference.weight_update import TensorSpec, WeightUpdate

TRANSPORT_NAME = "shared_memory"


def checksum(staging: torch.Tensor) -> str:
    """CRC-32 over the bytes of a contiguous uint8 tensor, as it appears in :class:`WeightUpdate`."""
    return checksum_text(zlib.crc32(staging.cpu().numpy().data))


def checksum_text(crc: int) -> str:
    """A CRC-32 in the form of :func:`checksum`."""
    return f"crc32:{crc:08x}"


def tensor_view(staging: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The tensor that ``spec`` describes, as a view of the staging copy's bytes (uint8 ``[num_bytes]``).

    Raises:
        EngineError: the dtype is unknown or the tensor does not lie within the copy.
    """
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise EngineError(f"Weight {spec.name!r} has the unknown dtype {spec.dtype!r}; publish torch dtype names.")
    size = dtype.itemsize
    for dimension in spec.shape:
        size *= dimension
    if not 0 <= spec.offset <= spec.offset + size <= staging.numel():
        raise EngineError(
            f"Weight {spec.name!r} lies outside the staging copy of {staging.numel()} bytes; gather the update again."
        )
    return staging[spec.offset : spec.offset + size].view(dtype).view(spec.shape)


def checked_views(update: WeightUpdate, staging: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """The weights in a staging copy (uint8 ``[num_bytes]`` on any device) as views: read them, never write.

    Raises:
        EngineError: a tensor lies outside, or the checksum differs.
    """
    tensors = {spec.name: tensor_view(staging, spec) for spec in update.tensors}
    if update.checksum is not None and checksum(staging) != update.checksum:
        raise EngineError(
            f"The weights of version {update.version} differ from their checksum; the old ones stay. Publish again."
        )
    return tensors


@dataclass(frozen=True, slots=True)
class _Mapping:
    identity: tuple[int, int, int]
    staging: torch.Tensor


class SharedMemoryReceiver:
    """Opens updates; keeps one mapping per location, because a trainer alternates between few staging areas."""

    def __init__(self) -> None:
        self._mappings: dict[str, _Mapping] = {}

    def open_update(self, update: WeightUpdate) -> Mapping[str, torch.Tensor]:
        """Returns views (shapes and dtypes of ``update.tensors``) of the mapped memory; read them, never write.

        Raises:
            EngineError: the transport or location is not readable here, a tensor lies outside, or the checksum differs.
        """
        if update.transport != TRANSPORT_NAME:
            raise EngineError(f"This engine receives by {TRANSPORT_NAME!r}, not by {update.transport!r}.")
        return checked_views(update, self._map(update))

    def close(self) -> None:
        """Forgets the mappings; the memory goes when the last view does. Idempotent."""
        self._mappings.clear()

    def _map(self, update: WeightUpdate) -> torch.Tensor:
        try:
            staging = self._staging(update.location)
        except (OSError, ValueError) as error:  # mmap says ValueError where there is nothing to map
            raise EngineError(
                f"Cannot open the weights of version {update.version} at {update.location!r}: {error}. The engine and "
                "the trainer must run on one machine as one user, and the transport must still be open."
            ) from error
        if staging.numel() < update.num_bytes:
            raise EngineError(
                f"The staging area at {update.location!r} has {staging.numel()} bytes, the update needs "
                f"{update.num_bytes}; gather the update again."
            )
        return staging[: update.num_bytes]

    def _staging(self, location: str) -> torch.Tensor:
        descriptor = os.open(location, os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            # A path can come to mean other memory (descriptor numbers are used again); device and inode cannot.
            identity = (status.st_dev, status.st_ino, status.st_size)
            known = self._mappings.get(location)
            if known is None or known.identity != identity:
                memory = mmap.mmap(descriptor, status.st_size)
                known = _Mapping(identity, torch.frombuffer(memory, dtype=torch.uint8))
                self._mappings[location] = known
            return known.staging
        finally:
            os.close(descriptor)

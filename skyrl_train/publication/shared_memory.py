"""Publication through shared memory: the trainer gathers into memory that engines on the same machine map.

On Linux the memory is anonymous (``memfd``): it has no name to collide with, and the kernel frees it when the last
process that maps it is gone, however that one died. Elsewhere a temporary file takes its place.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from skyrl_train.errors import PublicationError
from skyrl_train.inference.shared_weights import TRANSPORT_NAME, checksum, tensor_view
from skyrl_train.inference.weight_update import WeightUpdate
from skyrl_train.publication.base import WeightTransport
from skyrl_train.publication.layout import layout

NUM_STAGING_AREAS = 2  # the one that engines may still read, and the one being gathered into


class SharedMemoryTransport(WeightTransport):
    """Casts to ``dtype`` (a torch name: what the engines serve) while gathering; ``verify`` adds a checksum."""

    name = TRANSPORT_NAME

    def __init__(self, dtype: str = "float32", verify: bool = False) -> None:
        self._dtype = dtype
        self._verify = verify
        self._areas: list[_StagingArea | None] = [None] * NUM_STAGING_AREAS
        self._gathered = 0
        self._closed = False

    def gather(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate:
        """Copies the weights, cast, into the older of two staging areas.

        Raises:
            PublicationError: the transport is closed, or there is not enough shared memory.
        """
        if self._closed:
            raise PublicationError("The shared-memory transport is closed; make a new one to publish again.")
        named = list(weights)
        specs, num_bytes = layout(named, self._dtype)
        area = self._area(self._gathered % NUM_STAGING_AREAS, num_bytes)
        self._gathered += 1
        with torch.no_grad():
            for (_, weight), spec in zip(named, specs, strict=True):
                tensor_view(area.staging, spec).copy_(weight)
        return WeightUpdate(
            version=version,
            transport=self.name,
            location=area.location,
            num_bytes=num_bytes,
            tensors=specs,
            checksum=checksum(area.staging[:num_bytes]) if self._verify else None,
        )

    def close(self) -> None:
        """Frees the staging areas; engines that mapped one keep it until they let go. Idempotent."""
        self._closed = True
        for index, area in enumerate(self._areas):
            if area is not None:
                area.close()
                self._areas[index] = None

    def _area(self, index: int, num_bytes: int) -> _StagingArea:
        area = self._areas[index]
        if area is None or area.staging.numel() < num_bytes:
            if area is not None:
                area.close()
                self._areas[index] = None
            try:
                area = _StagingArea(num_bytes)
            except OSError as error:
                raise PublicationError(
                    f"No shared memory for {num_bytes / 1e6:.0f} MB of weights: {error.strerror}. Free some memory."
                ) from error
            self._areas[index] = area
        return area


class _StagingArea:
    """``staging`` is uint8 ``[num_bytes]`` on the CPU; ``location`` is where other processes find the same bytes."""

    def __init__(self, num_bytes: int) -> None:
        self._path: str | None = None
        if sys.platform == "linux":
            self._descriptor = os.memfd_create("skyrl-weights", os.MFD_CLOEXEC)
            self.location = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        else:
            self._descriptor, self._path = tempfile.mkstemp(prefix="skyrl-weights-")
            self.location = self._path
        try:
            os.ftruncate(self._descriptor, num_bytes)
            self.staging = torch.frombuffer(mmap.mmap(self._descriptor, num_bytes), dtype=torch.uint8)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._descriptor)
        if self._path is not None:
            Path(self._path).unlink()

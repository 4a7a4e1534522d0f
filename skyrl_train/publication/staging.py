"""Staging areas: memory that grows while the weights of a version arrive, and two of them that take turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch

from skyrl_train.errors import PublicationError
from skyrl_train.inference.shared_area import SharedArea

NUM_STAGING_AREAS = 2  # the one that engines may still read, and the one being gathered into


class StagingArea(Protocol):
    """What :class:`DoubleBuffer` takes turns with."""

    def close(self) -> None:
        """Frees the memory."""


A = TypeVar("A", bound=StagingArea)


class DoubleBuffer(Generic[A]):
    """Two areas; each is made when its first turn comes, so that the buffer can be pickled until then."""

    def __init__(self, make: Callable[[], A]) -> None:
        self._make = make
        self._areas: list[A | None] = [None] * NUM_STAGING_AREAS
        self._turns = 0
        self._closed = False

    def next(self) -> A:
        """The area that was not used last.

        Raises:
            PublicationError: the buffer is closed.
        """
        if self._closed:
            raise PublicationError("The weight transport is closed; make a new one to publish again.")
        index = self._turns % NUM_STAGING_AREAS
        self._turns += 1
        area = self._areas[index]
        if area is None:
            area = self._areas[index] = self._make()
        return area

    def close(self) -> None:
        """Frees both. Idempotent."""
        self._closed = True
        for index, area in enumerate(self._areas):
            if area is not None:
                area.close()
                self._areas[index] = None


class HostStaging:
    """Main memory that engines on this machine can map."""

    def __init__(self) -> None:
        self._area: SharedArea | None = None
        self._staging = torch.empty(0, dtype=torch.uint8)

    @property
    def location(self) -> str:
        """A path to the memory, once there is some."""
        assert self._area is not None, "only what was gathered is located"
        return self._area.location

    def room(self, num_bytes: int) -> torch.Tensor:
        """uint8, ``num_bytes`` or more, with what was there before. See :func:`layout.pack`.

        Raises:
            PublicationError: there is not enough shared memory.
        """
        if num_bytes > self._staging.numel():
            size = max(num_bytes, 2 * self._staging.numel())  # so that few weights make it grow
            try:
                if self._area is None:
                    self._area = SharedArea(size)
                else:
                    self._area.reserve(size)
            except OSError as error:
                raise PublicationError(
                    f"No shared memory for {num_bytes / 1e6:.0f} MB of weights: {error.strerror}. Free some memory."
                ) from error
            self._staging = torch.frombuffer(self._area.memory, dtype=torch.uint8)
        return self._staging

    def close(self) -> None:
        """Lets go of the memory; engines that mapped it keep it until they let go."""
        self._staging = torch.empty(0, dtype=torch.uint8)
        if self._area is not None:
            self._area.close()
            self._area = None


class DeviceStaging:
    """Memory of a GPU. The first version makes it grow, which needs up to twice its size for a moment."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)

    def room(self, num_bytes: int) -> torch.Tensor:
        """As :meth:`HostStaging.room`, on the device.

        Raises:
            PublicationError: there is not enough memory.
        """
        held = self._staging.numel()
        if num_bytes > held:
            self._staging = self._resized(max(num_bytes, held + held // 2), held)
        return self._staging

    def settle(self, num_bytes: int) -> torch.Tensor:
        """Gives back what is beyond ``num_bytes``; returns what is left."""
        if self._staging.numel() > num_bytes:
            self._staging = self._resized(num_bytes, num_bytes)
        return self._staging

    def close(self) -> None:
        """Frees the memory once no engine looks at it."""
        self._staging = torch.empty(0, dtype=torch.uint8, device=self._device)

    def _resized(self, num_bytes: int, kept: int) -> torch.Tensor:
        try:
            staging = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise PublicationError(
                f"No memory on {self._device} for a staging copy of {num_bytes / 1e6:.0f} MB. Lower the engine's "
                "gpu_memory_utilization, or set generator.weight_transport=shared_memory."
            ) from error
        staging[:kept].copy_(self._staging[:kept])
        return staging

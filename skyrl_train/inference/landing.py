"""Where updates land that do not lie in this machine's memory yet: two areas of shared memory that take turns.

gloo: buckets ──────────────> area ──┐
delta: base + what changed ─> area ──┴──> the same update by shared memory, for whoever serves on this machine
"""

from __future__ import annotations

import dataclasses

import torch

from skyrl_train.inference import delta_weights, process_group
from skyrl_train.inference.delta_weights import Chain, read_into
from skyrl_train.inference.process_group import ProcessGroupReceiver
from skyrl_train.inference.shared_area import SharedArea
from skyrl_train.inference.shared_weights import TRANSPORT_NAME as SHARED_MEMORY
from skyrl_train.inference.weight_update import WeightUpdate


class Landing:
    """One call at a time. What landed last stays as it is while the next update lands."""

    def __init__(self) -> None:
        self._areas: list[tuple[SharedArea, torch.Tensor] | None] = [None, None]
        self._last = 0  # the area with what landed last
        self._held: tuple[str, int] | None = None  # chain and version in that area
        self._pairs = ProcessGroupReceiver(torch.device("cpu"))

    def land(self, update: WeightUpdate) -> WeightUpdate:
        """Brings the bytes of ``update`` into this machine's memory, if they are not there.

        Returns:
            Where they are now: an update by shared memory, or ``update`` itself.

        Raises:
            EngineError: they did not come, or are not what they claim to be.
        """
        if update.transport == process_group.GLOO:
            location, staging = self._other_area(update.num_bytes)
            self._pairs.receive(update, staging)
            self._held = None
        elif update.transport == delta_weights.TRANSPORT_NAME:
            chain = Chain.parse(update)
            location, staging = self._other_area(update.num_bytes)
            read_into(staging, update, chain, self._base(chain))
            self._held = chain.id, update.version
        else:
            return update
        self._last = 1 - self._last
        return dataclasses.replace(update, transport=SHARED_MEMORY, location=location)

    def close(self) -> None:
        """Leaves all connections and frees the memory. Idempotent."""
        self._pairs.close()
        self._held = None
        for index, area in enumerate(self._areas):
            if area is not None:
                area[0].close()
                self._areas[index] = None

    def _base(self, chain: Chain) -> tuple[int, torch.Tensor] | None:
        """The version of ``chain`` that landed last, with its bytes."""
        area = self._areas[self._last]
        if self._held is None or self._held[0] != chain.id or area is None:
            return None
        return self._held[1], area[1]

    def _other_area(self, num_bytes: int) -> tuple[str, torch.Tensor]:
        index = 1 - self._last
        area = self._areas[index]
        if area is None or area[1].numel() != num_bytes:
            if area is not None:
                area[0].close()
            memory = SharedArea(num_bytes)
            area = self._areas[index] = memory, torch.frombuffer(memory.memory, dtype=torch.uint8)
        return area[0].location, area[1]

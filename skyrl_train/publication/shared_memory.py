"""Publication through shared memory: the trainer gathers into memory that engines on the same machine map."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from skyrl_train.inference.shared_weights import TRANSPORT_NAME, checksum
from skyrl_train.inference.weight_update import WeightUpdate
from skyrl_train.publication.base import WeightTransport
from skyrl_train.publication.layout import pack
from skyrl_train.publication.staging import DoubleBuffer, HostStaging


class SharedMemoryTransport(WeightTransport):
    """Casts to ``dtype`` (a torch name: what the engines serve) while gathering; ``verify`` adds a checksum."""

    name = TRANSPORT_NAME

    def __init__(self, dtype: str = "float32", verify: bool = False) -> None:
        self._dtype = dtype
        self._verify = verify
        self._areas = DoubleBuffer(HostStaging)

    def gather(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate:
        """Copies the weights, cast, into the older of two staging areas.

        Raises:
            PublicationError: the transport is closed, or there is not enough shared memory.
        """
        area = self._areas.next()
        specs, num_bytes = pack(weights, self._dtype, area.room)
        return WeightUpdate(
            version=version,
            transport=self.name,
            location=area.location,
            num_bytes=num_bytes,
            tensors=specs,
            checksum=checksum(area.room(num_bytes)[:num_bytes]) if self._verify else None,
        )

    def close(self) -> None:
        """Frees the staging areas; engines that mapped one keep it until they let go. Idempotent."""
        self._areas.close()

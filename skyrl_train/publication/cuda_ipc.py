"""Publication on one GPU: the trainer gathers into memory there that the engine's process opens by CUDA IPC.

Nothing crosses the bus; NCCL does not allow two processes of one device in a group.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from skyrl_train.errors import PublicationError
from skyrl_train.inference.cuda_ipc_weights import TRANSPORT_NAME, location_of
from skyrl_train.inference.shared_weights import checksum, tensor_view
from skyrl_train.inference.weight_update import WeightUpdate
from skyrl_train.publication.base import WeightTransport
from skyrl_train.publication.layout import layout

NUM_STAGING_AREAS = 2  # the one that engines may still read, and the one being gathered into


class CudaIpcTransport(WeightTransport):
    """Casts to ``dtype`` (a torch name: what the engines serve) while gathering; ``verify`` adds a checksum.

    Holds two staging copies of the weights on ``device``.
    """

    name = TRANSPORT_NAME

    def __init__(self, dtype: str = "bfloat16", device: str = "cuda", verify: bool = False) -> None:
        self._dtype = dtype
        self._device = torch.device(device)
        self._verify = verify
        self._areas: list[torch.Tensor | None] = [None] * NUM_STAGING_AREAS
        self._gathered = 0
        self._closed = False

    def gather(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate:
        """Copies the weights, cast, into the older of two staging areas.

        Raises:
            PublicationError: the transport is closed, or the GPU has no memory left for it.
        """
        if self._closed:
            raise PublicationError("The CUDA IPC transport is closed; make a new one to publish again.")
        named = list(weights)
        specs, num_bytes = layout(named, self._dtype)
        staging = self._area(self._gathered % NUM_STAGING_AREAS, num_bytes)
        self._gathered += 1
        with torch.no_grad():
            for (_, weight), spec in zip(named, specs, strict=True):
                tensor_view(staging, spec).copy_(weight)
        torch.cuda.synchronize(self._device)  # another process does not see this one's streams
        return WeightUpdate(
            version=version,
            transport=self.name,
            location=location_of(staging),
            num_bytes=num_bytes,
            tensors=specs,
            checksum=checksum(staging[:num_bytes].cpu()) if self._verify else None,
        )

    def close(self) -> None:
        """Frees the staging areas once no engine looks at them. Idempotent."""
        self._closed = True
        self._areas = [None] * NUM_STAGING_AREAS

    def _area(self, index: int, num_bytes: int) -> torch.Tensor:
        area = self._areas[index]
        if area is None or area.numel() < num_bytes:
            self._areas[index] = None
            try:
                area = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            except torch.OutOfMemoryError as error:
                raise PublicationError(
                    f"No GPU memory for a staging copy of {num_bytes / 1e6:.0f} MB. Lower the engine's "
                    "gpu_memory_utilization, or publish by 'shared_memory'."
                ) from error
            self._areas[index] = area
        return area

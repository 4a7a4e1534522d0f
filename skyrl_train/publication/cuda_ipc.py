"""Publication on one GPU: the trainer gathers into memory there that the engine's process opens by CUDA IPC.

Nothing crosses the bus; NCCL does not allow two processes of one device in a group.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from skyrl_train.inference.cuda_ipc_weights import TRANSPORT_NAME, location_of
from skyrl_train.inference.shared_weights import checksum
from skyrl_train.inference.weight_update import WeightUpdate
from skyrl_train.publication.base import WeightTransport
from skyrl_train.publication.layout import pack
from skyrl_train.publication.staging import DeviceStaging, DoubleBuffer


class CudaIpcTransport(WeightTransport):
    """Casts to ``dtype`` (a torch name: what the engines serve) while gathering; ``verify`` adds a checksum.

    Holds two staging copies of the weights on ``device``.
    """

    name = TRANSPORT_NAME

    def __init__(self, dtype: str = "bfloat16", device: str = "cuda", verify: bool = False) -> None:
        self._dtype = dtype
        self._device = torch.device(device)
        self._verify = verify
        self._areas = DoubleBuffer(functools.partial(DeviceStaging, self._device))

    def gather(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate:
        """Copies the weights, cast, into the older of two staging areas.

        Raises:
            PublicationError: the transport is closed, or the GPU has no memory left for it.
        """
        area = self._areas.next()
        specs, num_bytes = pack(weights, self._dtype, area.room)
        staging = area.settle(num_bytes)
        torch.cuda.synchronize(self._device)  # another process does not see this one's streams
        return WeightUpdate(
            version=version,
            transport=self.name,
            location=location_of(staging),
            num_bytes=num_bytes,
            tensors=specs,
            checksum=checksum(staging[:num_bytes]) if self._verify else None,
        )

    def close(self) -> None:
        """Frees the staging areas once no engine looks at them. Idempotent."""
        self._areas.close()

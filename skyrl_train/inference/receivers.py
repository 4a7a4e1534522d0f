"""An engine's receiving half: opens an update by whichever transport it came."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from skyrl_train.errors import EngineError
from skyrl_train.inference import cuda_ipc_weights, disk_weights, process_group
from skyrl_train.inference.cuda_ipc_weights import CudaIpcReceiver
from skyrl_train.inference.disk_weights import open_file
from skyrl_train.inference.landing import Landing
from skyrl_train.inference.process_group import ProcessGroupReceiver
from skyrl_train.inference.shared_weights import SharedMemoryReceiver, checked_views
from skyrl_train.inference.weight_update import WeightUpdate


class WeightReceiver:
    """For a model on ``device``. One call at a time; what :meth:`open_update` gave stays valid over the next one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shared_memory = SharedMemoryReceiver()
        self._cuda_ipc = CudaIpcReceiver()
        self._landing = Landing()
        self._pairs = ProcessGroupReceiver(device)

    def open_update(self, update: WeightUpdate) -> Mapping[str, torch.Tensor]:
        """The weights (shapes and dtypes of ``update.tensors``) by name, as views: read them, never write.

        Raises:
            EngineError: the update does not reach this process, a tensor lies outside, or the checksum differs.
        """
        if update.transport == disk_weights.TRANSPORT_NAME:
            return checked_views(update, open_file(update, update.location))
        if update.transport == process_group.NCCL:
            return checked_views(update, self._over_nccl(update))
        if update.transport == cuda_ipc_weights.TRANSPORT_NAME:
            return self._cuda_ipc.open_update(update, self._device)
        return self._shared_memory.open_update(self._landing.land(update))

    def close(self) -> None:
        """Forgets what it has opened. Idempotent."""
        self._shared_memory.close()
        self._landing.close()
        self._pairs.close()

    def _over_nccl(self, update: WeightUpdate) -> torch.Tensor:
        """Into new memory of the GPU: PyTorch keeps what an earlier update has let go, so that two take turns."""
        if self._device.type != "cuda":
            raise EngineError(
                f"An engine on {self._device.type} cannot receive by 'nccl'; set generator.weight_transport=gloo."
            )
        staging = torch.empty(update.num_bytes, dtype=torch.uint8, device=self._device)
        self._pairs.receive(update, staging)
        return staging

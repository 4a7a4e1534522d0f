"""The receiving half of the CUDA IPC transport: opens the trainer's staging copy on the same GPU, without a copy.

The location of an update is text: what the CUDA driver needs to open another process's memory, as JSON.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from skyrl_train.errors import EngineError
from skyrl_train.inference.shared_weights import checked_views
from skyrl_train.inference.weight_update import WeightUpdate

TRANSPORT_NAME = "cuda_ipc"


def location_of(staging: torch.Tensor) -> str:
    """Describes ``staging`` (uint8 ``[num_bytes]`` on a GPU) so that another process on this machine can open it.

    Each description can be opened once by each receiver; the memory must outlive them.
    """
    handle: Sequence[Any] = staging.untyped_storage()._share_cuda_()
    gpu = str(torch.cuda.get_device_properties(staging.device).uuid)
    return json.dumps({"gpu": gpu, "handle": [_encode(part) for part in handle]})


class CudaIpcReceiver:
    """Opens updates that were gathered on the GPU that this process serves from."""

    def open_update(self, update: WeightUpdate, device: torch.device) -> Mapping[str, torch.Tensor]:
        """Returns views (shapes and dtypes of ``update.tensors``) of the trainer's memory; read them, never write.

        Raises:
            EngineError: the update is on another GPU or cannot be opened, a tensor lies outside, or the checksum differs.
        """
        if device.type != "cuda":
            raise EngineError(f"An engine on {device.type} cannot receive by {TRANSPORT_NAME!r}; use 'shared_memory'.")
        return checked_views(update, _open(update, device))


def _open(update: WeightUpdate, device: torch.device) -> torch.Tensor:
    try:
        location = json.loads(update.location)
        gpu, handle = location["gpu"], [_decode(part) for part in location["handle"]]
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(f"Version {update.version} has no CUDA IPC location: {error}. Publish again.") from error
    own = str(torch.cuda.get_device_properties(device).uuid)
    if gpu != own:
        raise EngineError(
            f"Version {update.version} lies on GPU {gpu}, this engine serves from {own}; CUDA IPC needs one device. "
            "Use 'shared_memory'."
        )
    handle[0] = device.index or 0  # device numbers are each process's own
    try:
        storage = torch.UntypedStorage._new_shared_cuda(*handle)
    except RuntimeError as error:
        raise EngineError(
            f"Cannot open the weights of version {update.version}: {error}. The trainer must still run, without "
            "expandable segments in PYTORCH_CUDA_ALLOC_CONF."
        ) from error
    staging = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    if staging.numel() < update.num_bytes:
        raise EngineError(f"Version {update.version} has {staging.numel()} of {update.num_bytes} bytes; publish again.")
    return staging[: update.num_bytes]


def _encode(part: Any) -> Any:
    return {"bytes": base64.b64encode(part).decode()} if isinstance(part, bytes) else part


def _decode(part: Any) -> Any:
    return base64.b64decode(part["bytes"]) if isinstance(part, dict) else part

"""The CUDA IPC transport: the trainer gathers into GPU memory that the engine's process opens on the same GPU.

rank 0 (GPU a) ── gather ──> copy on a ── handle ──┐                        ┌──> worker of an engine on a opens its copy
rank 1 (GPU b) ── gather ──> copy on b ── handle ──┴─ one update, by GPU ───┴──> worker of an engine on b opens its copy

Nothing crosses the bus. NCCL cannot replace it: it does not allow two processes of one device in a group. The location
of an update holds the CUDA driver's handle of the memory for each GPU, by its UUID, as JSON.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from skyrl_train.errors import EngineError
from skyrl_train.weight_sync.checksum import checksum
from skyrl_train.weight_sync.staging import DeviceStaging, DoubleBuffer, pack
from skyrl_train.weight_sync.update import WeightTransport, WeightUpdate

CUDA_IPC = "cuda_ipc"


class CudaIpcTransport(WeightTransport):
    """The trainer's side. Holds two staging copies of the weights on ``device``: with several ranks, on each one's.

    Args:
        dtype: a torch name, the dtype that the engines serve. Weights are cast while they are gathered.
        verify: adds a checksum to each update.
    """

    name = CUDA_IPC
    on_every_rank = True

    def __init__(self, dtype: str = "bfloat16", device: str = "cuda", verify: bool = False) -> None:
        self._dtype = dtype
        self._device = torch.device(device)
        self._verify = verify
        self._areas = DoubleBuffer(functools.partial(DeviceStaging, self._device))
        # Of the copies since the last release: where torch counts who may still use them.
        self._shared: list[tuple[bytes, int]] = []

    def gather(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate:
        """Copy the weights, cast, into the older of the two staging areas.

        Raises:
            WeightSyncError: the transport is closed, or the GPU has not enough memory.
        """
        area = self._areas.next()
        specs, staging = pack(weights, self._dtype, area)
        torch.cuda.synchronize(self._device)  # another process does not wait for this one's streams
        handle: Sequence[Any] = staging.untyped_storage()._share_cuda_()  # of numbers and bytes
        self._shared.append((handle[4], handle[5]))
        parts = [{"bytes": base64.b64encode(part).decode()} if isinstance(part, bytes) else part for part in handle]
        gpu = str(torch.cuda.get_device_properties(staging.device).uuid)
        return WeightUpdate(
            version=version,
            transport=self.name,
            # Each receiver can open a handle once; the memory must outlive it.
            location=json.dumps({gpu: parts}),
            num_bytes=staging.numel(),
            tensors=specs,
            checksum=checksum(staging) if self._verify else None,
        )

    def merged(self, updates: Sequence[WeightUpdate]) -> WeightUpdate:
        """See :meth:`WeightTransport.merged`: each engine finds the copy on its GPU."""
        handles = {gpu: parts for update in updates for gpu, parts in json.loads(update.location).items()}
        return replace(updates[0], location=json.dumps(handles))

    def release(self) -> bool:
        """See :meth:`WeightTransport.release`."""
        # torch keeps what was shared until it was opened and closed. Nobody may have done so: an engine has died, or only one of
        # another GPU had to catch up.
        for counter in self._shared:
            torch.UntypedStorage._release_ipc_counter_cuda(*counter)
        self._shared.clear()
        self._areas.release()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        return True

    def close(self) -> None:
        """Release the staging areas. They are freed when no engine maps them any more. Idempotent."""
        self._areas.close()


def open_device_memory(update: WeightUpdate, device: torch.device) -> torch.Tensor:
    """Open the trainer's staging copy in the engine's process, without copying it.

    Returns:
        uint8 ``[num_bytes]`` on ``device``: the trainer's memory, to be read only.

    Raises:
        EngineError: no copy is on this GPU, or it cannot be opened.
    """
    if device.type != "cuda":
        raise EngineError(f"An engine on {device.type} cannot receive by {CUDA_IPC!r}; use 'shared_memory'.")
    try:
        handles = json.loads(update.location)
        own = str(torch.cuda.get_device_properties(device).uuid)
        if own not in handles:
            raise EngineError(
                f"Version {update.version} lies on GPU {', '.join(handles)}, this engine serves from {own}; CUDA IPC needs one "
                "device. Use 'shared_memory'."
            )
        handle = [base64.b64decode(part["bytes"]) if isinstance(part, dict) else part for part in handles[own]]
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(
            f"Version {update.version} has no CUDA IPC location: {error}. Sync the weights again."
        ) from error
    handle[0] = device.index or 0  # each process numbers its devices itself
    try:
        storage = torch.UntypedStorage._new_shared_cuda(*handle)
    except RuntimeError as error:
        raise EngineError(
            f"Cannot open the weights of version {update.version}: {error}. The trainer must still run, without "
            "expandable segments in PYTORCH_CUDA_ALLOC_CONF."
        ) from error
    staging = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    if staging.numel() < update.num_bytes:
        raise EngineError(
            f"Version {update.version} has {staging.numel()} of {update.num_bytes} bytes; sync the weights again."
        )
    return staging[: update.num_bytes]

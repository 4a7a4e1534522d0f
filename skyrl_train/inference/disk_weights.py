"""The receiving half of the disk transport: maps a safetensors file that trainer and engine both see.

A file appears whole, under a name of its own (the trainer renames it into place), and its bytes never change.
"""

from __future__ import annotations

import mmap
import os

import torch

from skyrl_train.errors import EngineError
from skyrl_train.inference.weight_update import WeightUpdate

TRANSPORT_NAME = "disk"
LENGTH_BYTES = 8  # a safetensors file begins with the length of its header, little-endian


def open_file(update: WeightUpdate, path: str) -> torch.Tensor:
    """The weights' bytes (uint8 ``[num_bytes]``) in a file of the update, read once: a later look at them waits for no disk.

    Raises:
        EngineError: there is no such file here, or it is shorter than the update says.
    """
    try:
        contents = _map(path)
    except (OSError, ValueError) as error:  # mmap says ValueError where there is nothing to map
        raise EngineError(
            f"Cannot open the weights of version {update.version} at {path!r}: {error}. Trainer and engine must "
            "see generator.weight_folder under the same path, and the transport must still be open."
        ) from error
    begin = LENGTH_BYTES + int.from_bytes(bytes(contents[:LENGTH_BYTES].tolist()), "little")
    staging = contents[begin : begin + update.num_bytes]
    if staging.numel() < update.num_bytes:
        raise EngineError(
            f"The file {path!r} has {staging.numel()} of {update.num_bytes} bytes of weights; publish again."
        )
    int(staging[:: mmap.PAGESIZE].sum())  # touches each page
    return staging


def _map(path: str) -> torch.Tensor:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Private: torch wants memory that it may write to, and nobody does.
        memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size, access=mmap.ACCESS_COPY)
        return torch.frombuffer(memory, dtype=torch.uint8)
    finally:
        os.close(descriptor)

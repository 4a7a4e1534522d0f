"""Weights side by side in a staging copy, whatever memory that is in.

They come one at a time and are let go at once: of a sharded model, never more than one gathered weight exists beside the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from skyrl_train.inference.shared_weights import tensor_view
from skyrl_train.inference.weight_update import TensorSpec

ALIGNMENT_BYTES = 64  # a cache line; no dtype needs more


def pack(
    weights: Iterable[tuple[str, torch.Tensor]], dtype: str, room: Callable[[int], torch.Tensor]
) -> tuple[tuple[TensorSpec, ...], int]:
    """Copies the weights, stored as ``dtype`` (a torch name), each to an aligned place.

    Args:
        room: gives uint8 ``[n]`` or more for ``n`` bytes, with what earlier calls were given still in it.

    Returns:
        Where each weight lies, and the size of the whole in bytes.
    """
    itemsize = getattr(torch, dtype).itemsize
    specs, offset = [], 0
    with torch.no_grad():
        for name, weight in weights:
            spec = TensorSpec(name, tuple(weight.shape), dtype, offset)
            end = offset + weight.numel() * itemsize
            offset = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            staging = room(offset)
            tensor_view(staging, spec).copy_(weight)
            staging[end:offset].zero_()  # another layout's bytes there would change the checksum
            specs.append(spec)
    num_bytes = max(offset, ALIGNMENT_BYTES)
    if not specs:
        room(num_bytes).zero_()
    return tuple(specs), num_bytes

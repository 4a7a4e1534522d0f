"""Where each weight lies in a staging copy, whatever memory that is in."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skyrl_train.inference.weight_update import TensorSpec

ALIGNMENT_BYTES = 64  # a cache line; no dtype needs more


def layout(named: Sequence[tuple[str, torch.Tensor]], dtype: str) -> tuple[tuple[TensorSpec, ...], int]:
    """Where each weight lies (aligned), stored as ``dtype`` (a torch name), and the size of the whole, in bytes."""
    itemsize = getattr(torch, dtype).itemsize
    specs, offset = [], 0
    for name, weight in named:
        specs.append(TensorSpec(name, tuple(weight.shape), dtype, offset))
        offset += -(-weight.numel() * itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(specs), max(offset, ALIGNMENT_BYTES)

"""Copies of small inputs to the device, between two passes of a model."""

from __future__ import annotations

import torch


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``tensor``, which is in main memory, on ``device``.

    A plain ``tensor.to(gpu)`` waits until the GPU has done all that was queued before, and it would stand still while the next
    pass is prepared. Pinned memory is copied by the GPU itself, in its turn.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)

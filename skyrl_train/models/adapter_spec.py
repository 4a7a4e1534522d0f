"""Rank and scale of a LoRA adapter, for modules that handle no tensors. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """An adapter that adds ``scale * B (A x)`` to a linear layer's output, with A ``[rank, in]`` and B ``[out, rank]``."""

    rank: int
    scale: float  # alpha / rank

    def __str__(self) -> str:
        return f"an adapter of rank {self.rank} and scale {self.scale:g}"

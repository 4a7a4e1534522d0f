"""What a LoRA adapter is, for those that handle no tensors. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """A linear layer's output gains ``scale * B (A x)``, with A ``[rank, in]`` and B ``[out, rank]``."""

    rank: int
    scale: float  # alpha / rank

    def __str__(self) -> str:
        return f"an adapter of rank {self.rank} and scale {self.scale:g}"

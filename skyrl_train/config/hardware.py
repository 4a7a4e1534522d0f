"""Kinds of GPUs, and clusters of alike nodes: the figures that :mod:`skyrl_train.config.machine_plan` computes with. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from skyrl_train.errors import ConfigError

_GIB = 2**30


# FLOPs per second of dense products of bfloat16 matrices (V100: float16) with float32 sums, by the names that nvidia-smi reports.
# From NVIDIA's data sheets. Of names that begin alike, the longer one comes first.
BF16_FLOPS: Mapping[str, float] = {
    "GB200": 2500e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
}


@dataclass(frozen=True, slots=True)
class GPUKind:
    """A GPU by its data sheet, in the form with the fastest links (SXM where there is one).

    Attributes:
        memory_bytes: that the driver reports, a little less than the name says.
        bf16_flops: dense products of bfloat16 matrices, per second.
        memory_bytes_s: of the GPU's own memory.
        link_bytes_s: to the other GPUs of the node, in one direction (NVLink; without it, the bus).
        bus_bytes_s: to main memory, in one direction (PCIe).
        network_bytes_s: to other nodes for each GPU: its share of the usual network cards.
    """

    memory_bytes: int
    bf16_flops: float
    memory_bytes_s: float
    link_bytes_s: float
    bus_bytes_s: float
    network_bytes_s: float


# NVIDIA's data sheets. Networks: 400 Gbit/s per GPU in nodes of H100, H200 and B200, 200 in nodes of A100, one card of 100 for
# eight GPUs in others.
GPU_KINDS: Mapping[str, GPUKind] = {
    "B200": GPUKind(int(178.4 * _GIB), BF16_FLOPS["B200"], 7.7e12, 900e9, 64e9, 50e9),
    "H200": GPUKind(int(139.8 * _GIB), BF16_FLOPS["H200"], 4.8e12, 450e9, 64e9, 50e9),
    "H100": GPUKind(int(79.18 * _GIB), BF16_FLOPS["H100"], 3.35e12, 450e9, 64e9, 50e9),
    "A100-80GB": GPUKind(int(79.15 * _GIB), BF16_FLOPS["A100"], 2.04e12, 300e9, 32e9, 25e9),
    "A100-40GB": GPUKind(int(39.4 * _GIB), BF16_FLOPS["A100"], 1.555e12, 300e9, 32e9, 25e9),
    "L40S": GPUKind(int(44.4 * _GIB), BF16_FLOPS["L40S"], 0.864e12, 32e9, 32e9, 1.6e9),
    "RTX4090": GPUKind(int(23.5 * _GIB), BF16_FLOPS["RTX 4090"], 1.008e12, 32e9, 32e9, 1.6e9),
}
_CLUSTER = re.compile(r"(?:(\d+)x)?(?:(\d+)x)?([A-Za-z][\w-]*)")


@dataclass(frozen=True, slots=True)
class Cluster:
    """``nodes`` alike nodes with ``gpus_per_node`` GPUs of one kind each."""

    nodes: int
    gpus_per_node: int
    kind: str  # of GPU_KINDS

    @property
    def gpu(self) -> GPUKind:
        return GPU_KINDS[self.kind]

    def __str__(self) -> str:
        nodes = f"{self.nodes} nodes of " if self.nodes > 1 else ""
        return f"{nodes}{self.gpus_per_node} {self.kind}"


def parse_cluster(text: str) -> Cluster:
    """Read ``2x8xH100`` (nodes, GPUs of each, kind), ``8xH100`` (one node) or ``H100``.

    Raises:
        ConfigError: another form, a number below 1, or an unknown kind.
    """
    match = _CLUSTER.fullmatch(text.strip())
    kinds = {name.casefold(): name for name in GPU_KINDS}
    kind = None if match is None else kinds.get(match[3].casefold())
    if match is None or kind is None:
        raise ConfigError(
            f"{text!r} names no machine. Write nodes x GPUs x kind, such as 2x8xH100, 8xH100 or H100; kinds: "
            f"{', '.join(GPU_KINDS)}."
        )
    numbers = [int(number) for number in match.groups()[:2] if number is not None]
    nodes, gpus = [1] * (2 - len(numbers)) + numbers
    if min(nodes, gpus) < 1:
        raise ConfigError(f"{text!r}: the numbers of nodes and GPUs must be at least 1.")
    return Cluster(nodes, gpus, kind)

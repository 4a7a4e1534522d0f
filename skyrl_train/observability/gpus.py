"""The GPUs of this machine as nvidia-smi reports them, and which share of their peak training uses."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_train.config.hardware import BF16_FLOPS
from skyrl_train.config.model_shape import ModelShape, model_shape
from skyrl_train.config.schema import RunConfig, TrainingStrategy

_LIMIT_S = 20.0  # of one call; a driver that hangs must not keep the thread for ever
_QUERY = ("name", "utilization.gpu", "memory.used", "memory.total")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. ``utilization``: share of the last moments in which a kernel ran; None where the driver does not tell."""

    name: str
    utilization: float | None
    used_bytes: int
    total_bytes: int


def read_gpus() -> list[Gpu]:
    """Return the GPUs that this process may use; none without nvidia-smi, or if it fails. Blocks for a moment."""
    program, visible = shutil.which("nvidia-smi"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if program is None or visible == "":
        return []
    chosen = [] if visible is None else [f"--id={visible}"]
    command = [program, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits", *chosen]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = []
    for row in csv.reader(answer.stdout.splitlines(), skipinitialspace=True):
        if (
            len(row) == len(_QUERY) and row[2].isdecimal() and row[3].isdecimal()
        ):  # "[N/A]" where the driver does not tell
            busy = int(row[1]) / 100 if row[1].isdecimal() else None
            gpus.append(Gpu(row[0], busy, int(row[2]) << 20, int(row[3]) << 20))
    return gpus


def gpu_metrics() -> dict[str, float]:
    """Return the metrics ``system/gpu_*`` of this moment; none without a GPU. Blocks for a moment."""
    gpus = read_gpus()
    busy = [gpu.utilization for gpu in gpus if gpu.utilization is not None]
    metrics = {"system/gpu_utilization": sum(busy) / len(busy)} if busy else {}
    if gpus:
        fullest = max(gpus, key=lambda gpu: gpu.used_bytes / max(1, gpu.total_bytes))
        metrics["system/gpu_memory_bytes"] = fullest.used_bytes
        metrics["system/gpu_memory_share"] = fullest.used_bytes / max(1, fullest.total_bytes)
    return metrics


def peak_flops(name: str) -> float | None:
    """Return the FLOPs per second of a GPU by its name; None: it is not listed."""
    return next((peak for known, peak in BF16_FLOPS.items() if re.search(rf"\b{known}\b", name)), None)


@dataclass(frozen=True, slots=True)
class TrainingFlops:
    """The FLOPs of a training pass, and those that the training GPUs can do.

    Each weight of a matrix costs 2 FLOPs per token forward and 4 backward (2 if only an adapter is trained). A query and a key
    of one layer, of all heads together, cost 4 x heads x head size forward, and twice as much backward. This is the count of
    PaLM (Chowdhery et al. 2022, appendix B), with the causal half of the attention.

    Attributes:
        per_token: of all matrices.
        per_pair: of a query and a key that it sees, in all layers.
        peak: FLOPs per second of all training GPUs together.
    """

    per_token: float
    per_pair: float
    peak: float

    def utilization(self, lengths: Sequence[int], seconds: float) -> float:
        """Return the model FLOPs utilization (MFU) of passes over sequences of these lengths that took ``seconds``."""
        flops = sum(length * self.per_token + length * (length + 1) / 2 * self.per_pair for length in lengths)
        return flops / (seconds * self.peak)


def training_flops(config: RunConfig) -> TrainingFlops | None:
    """Return the FLOPs of the policy's training; None: it is on no GPU, or its model or GPU is unknown. Blocks for a moment.

    In a cluster, all training GPUs are taken to be of the type of this machine's.
    """
    trainer = config.trainer
    shape = model_shape(trainer.policy.model) if str(trainer.device).startswith("cuda") else None
    gpus = [] if shape is None else read_gpus()
    peak = peak_flops(gpus[0].name) if gpus else None
    if shape is None or peak is None:
        return None
    number = 1 if trainer.strategy is TrainingStrategy.local else trainer.fsdp.num_workers
    return flops_of(shape, adapter=trainer.policy.model.lora.rank > 0, peak=number * peak)


def flops_of(shape: ModelShape, *, adapter: bool, peak: float) -> TrainingFlops:
    """Return the FLOPs of a model of this shape; ``adapter``: only an adapter is trained, whose own FLOPs are left out."""
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = 2 * shape.hidden_size * (heads + kv_heads) + 3 * shape.hidden_size * shape.intermediate_size
    weights = shape.num_layers * layer + shape.vocab_size * shape.hidden_size  # the output layer, also if it is tied
    return TrainingFlops((4 if adapter else 6) * weights, 12 * shape.num_layers * heads, peak)

"""Whole runs with vLLM beside the trainer: on GPUs by NCCL, and the same on a CPU by gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from skyrl_train.entrypoints.command_line import main

ENGINE = "generator.inference_engine"
ON_GPUS = [
    "trainer.device=cuda",
    "trainer.policy.dtype=bfloat16",
    f"{ENGINE}.device=cuda",
    f"{ENGINE}.dtype=bfloat16",
    f"{ENGINE}.engine_args={{gpu_memory_utilization: 0.3}}",
    "generator.weight_transport=nccl",
]
ON_CPU = [
    f"{ENGINE}.engine_args={{kv_cache_memory_bytes: 67108864, enforce_eager: true}}",
    "generator.weight_transport=gloo",
]
# By name: the GPUs that a run needs, and the overrides of where its parts compute.
PLACES = {
    "one trainer, one engine": (2, [f"{ENGINE}.executor=process"]),
    "one trainer, two engines": (3, [f"{ENGINE}.executor=process", f"{ENGINE}.num_engines=2"]),
    "two ranks, one engine in Ray": (
        3,
        [
            "trainer.strategy=fsdp2",
            "trainer.fsdp.num_workers=2",
            "trainer.fsdp.ray_num_cpus=0.5",
            f"{ENGINE}.executor=ray",
        ],
    ),
}


def overrides(place: str, *, on_gpus: bool) -> list[str]:
    """The overrides of the quickstart for one of ``PLACES``."""
    gpus, settings = PLACES[place]
    # The trainer has the first GPU. In Ray, Ray chooses.
    devices = (
        [f"{ENGINE}.devices={list(range(1, gpus))}"] if on_gpus and f"{ENGINE}.executor=process" in settings else []
    )
    every = [f"{ENGINE}.backend=vllm", "generator.verify_weights=true", "trainer.trackers=[]"]
    return [*every, *(ON_GPUS if on_gpus else ON_CPU), *settings, *devices]


def train(folder: Path, place: str, *, on_gpus: bool, steps: int = 3) -> list[dict[str, Any]]:
    """Train the quickstart; return the metrics of each step."""
    run = [f"trainer.run_dir={folder / 'run'}", f"trainer.max_steps={steps}"]
    assert main(["train", "quickstart", *overrides(place, on_gpus=on_gpus), *run]) == 0
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    return rows

"""Weight syncs from a training GPU to an engine on the same GPU, part by part, beside one plain copy of the same bytes.

    python benchmarks/gpu_weight_sync.py [--engine embedded] [--shapes 0.6b 1.7b] [--updates 6] [--output figures.json]

The trainer holds a Qwen3 of random weights in bf16 and changes it before each update. Parts: *gather* (the trainer waits),
*transfer* (the engine serves), *paused* (from the pause to the resume) with the *load* in it. The floor is one
device-to-host copy of as many bytes into pinned memory. Each time is a median; the first updates, which make the memory,
are not counted. ``--dry`` runs a small model on the CPU, where the figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from skyrl_train.inference.engines.embedded import EmbeddedEngine
from skyrl_train.inference.engines.vllm import VLLMEngine
from skyrl_train.models.folder import quiet_transformers
from skyrl_train.models.tiny import character_tokenizer
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.checksum import checksum
from skyrl_train.weight_sync.cuda_ipc import CudaIpcTransport
from skyrl_train.weight_sync.pinning import Registration
from skyrl_train.weight_sync.shared_area import SharedArea
from skyrl_train.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_train.weight_sync.update import WeightTransport, WeightUpdate

# Qwen3's: hidden size, layers, heads, intermediate size, tied embeddings
SHAPES = {"0.6b": (1024, 28, 16, 3072, True), "1.7b": (2048, 28, 16, 6144, True), "dry": (64, 2, 2, 128, True)}
HEAD_SIZE, KEY_VALUE_HEADS, VOCABULARY, CONTEXT = 128, 8, 151_936, 1024
# These suit installations without FlashInfer and DeepGEMM kernels, too.
ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0"}
WARM_UP = 3  # updates: the two staging areas are made and registered
PAGEABLE = "shared_memory, not registered by the trainer"
PARTS = ("gather", "transfer", "paused", "load")


def save_config(folder: Path, shape: str) -> None:
    """Write a model folder without weights: those of the engines come with the first update."""
    hidden, layers, heads, intermediate, tied = SHAPES[shape]
    dry = shape == "dry"
    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads if dry else KEY_VALUE_HEADS,
        head_dim=hidden // heads if dry else HEAD_SIZE,
        intermediate_size=intermediate,
        vocab_size=128 if dry else VOCABULARY,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=0,
        architectures=["Qwen3ForCausalLM"],
    )
    config.save_pretrained(folder)
    character_tokenizer("0123456789").save_pretrained(folder)


def make_model(folder: Path, device: str) -> PreTrainedModel:
    """Return the trainer's model, with weights that no engine starts with."""
    torch.manual_seed(1)
    with quiet_transformers(), torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)


def make_engine(kind: str, folder: Path, device: str) -> EmbeddedEngine | VLLMEngine:
    if kind == "embedded":
        executor = "process" if device == "cuda" else "thread"  # a dry run need not wait for a process's imports
        return EmbeddedEngine(
            str(folder), executor=executor, device=device, dtype="bfloat16", max_num_seqs=8, max_model_len=CONTEXT
        )
    on_gpu: dict[str, Any] = {}
    if device == "cuda":
        # A cache of a given size spares vLLM the measurement of its memory, which takes seconds.
        on_gpu["kv_cache_memory_bytes"] = 1 << 30
        on_gpu["engine_args"] = {"gpu_memory_utilization": 0.3, "enforce_eager": True}
        on_gpu["environment"] = ENVIRONMENT
    return VLLMEngine(
        str(folder), dtype="bfloat16", max_num_seqs=8, max_model_len=CONTEXT, load_format="dummy", **on_gpu
    )


def transports(device: str) -> dict[str, Callable[[], WeightTransport]]:
    named: dict[str, Callable[[], WeightTransport]] = {"shared_memory": lambda: SharedMemoryTransport("bfloat16")}
    if device == "cuda":
        named[PAGEABLE] = named["shared_memory"]
        named["cuda_ipc"] = lambda: CudaIpcTransport("bfloat16")
    return named


def milliseconds(do: Callable[[], object], repeat: int = 5) -> float:
    """Return the median duration, with all of the GPU's work in it."""
    times = []
    for _ in range(repeat):
        wait_for_gpu()
        started = time.perf_counter()
        do()
        wait_for_gpu()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def plain_copies(num_bytes: int, device: str) -> dict[str, float]:
    """Return the milliseconds of plain copies and of the checksums of ``num_bytes``."""
    there = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
    pageable = torch.zeros(num_bytes, dtype=torch.uint8)
    pinned = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device == "cuda")
    figures = {
        "device to pinned": milliseconds(lambda: pinned.copy_(there, non_blocking=True)),
        "pinned to device": milliseconds(lambda: there.copy_(pinned, non_blocking=True)),
        "device to pageable": milliseconds(lambda: pageable.copy_(there)),
        "pageable to device": milliseconds(lambda: there.copy_(pageable)),
        "checksum in main memory": milliseconds(lambda: checksum(pageable), repeat=2),
    }
    if device == "cuda":
        other = torch.empty_like(there)
        figures["device to device"] = milliseconds(lambda: other.copy_(there))
        figures |= copies_of_registered_memory(there)
        figures["checksum on the device"] = milliseconds(lambda: checksum(there))
    return figures


def copies_of_registered_memory(there: torch.Tensor) -> dict[str, float]:
    """Return the milliseconds of copies of memory that other processes can map and that is registered with CUDA."""
    area, cudart = SharedArea(there.numel()), torch.cuda.cudart()
    memory = torch.frombuffer(area.memory, dtype=torch.uint8)
    memory.zero_()  # makes the pages
    started = time.perf_counter()
    error = cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 1)
    figures = {"registration": 1e3 * (time.perf_counter() - started)}
    if error != cudart.cudaError.success:
        print(f"CUDA does not register shared memory: {cudart.cudaGetErrorString(error)}")
        with contextlib.suppress(RuntimeError):  # torch reports the error of a failed call from the next kernel
            torch.zeros(1, device="cuda").add_(1)
    figures["device to registered"] = milliseconds(lambda: memory.copy_(there, non_blocking=True))
    figures["registered to device"] = milliseconds(lambda: there.copy_(memory, non_blocking=True))
    figures["checksum of registered memory"] = milliseconds(lambda: checksum(memory, there.device))
    cudart.cudaHostUnregister(memory.data_ptr())
    area.close()
    return figures


async def one_update(
    engine: EmbeddedEngine | VLLMEngine, transport: WeightTransport, model: PreTrainedModel, version: int
) -> tuple[WeightUpdate, dict[str, float]]:
    """Change the weights and sync them; return the milliseconds of each part."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.001)
    wait_for_gpu()
    started = time.perf_counter()
    update = await asyncio.to_thread(transport.gather, model.named_parameters(), version)
    gathered = time.perf_counter()
    await engine.receive_weights(update)
    transferred = time.perf_counter()
    await engine.pause(PauseMode.KEEP)
    loading = time.perf_counter()
    await engine.load_weights(update)
    loaded = time.perf_counter()
    await engine.resume()
    resumed = time.perf_counter()
    load_s = engine.last_load_s if isinstance(engine, VLLMEngine) else loaded - loading
    seconds = (gathered - started, transferred - gathered, resumed - transferred, load_s)
    return update, {part: 1e3 * value for part, value in zip(PARTS, seconds, strict=True)}


async def measure(
    kind: str, shape: str, updates: int, device: str, engine: EmbeddedEngine | VLLMEngine, folder: Path
) -> list[dict[str, Any]]:
    """Return one row per transport, with the plain copies of this shape's bytes."""
    model, rows, copies, version = make_model(folder, device), [], {}, 0
    for name, make in transports(device).items():
        transport, times = make(), []
        registered = mock.patch.object(Registration, "cover") if name == PAGEABLE else contextlib.nullcontext()
        with registered, contextlib.closing(transport):
            for number in range(WARM_UP + updates):
                update, parts = await one_update(engine, transport, model, version)
                version += 1
                if number >= WARM_UP:
                    times.append(parts)
        copies = copies or plain_copies(update.num_bytes, device)
        medians = {part: statistics.median(time[part] for time in times) for part in PARTS}
        row = {"engine": kind, "shape": shape, "transport": name, "num_bytes": update.num_bytes, "ms": medians}
        rows.append({**row, "plain_ms": copies, "all_ms": times})
        report(rows[-1])
    return rows


def report(row: dict[str, Any]) -> None:
    floor, gigabytes = row["plain_ms"]["device to pinned"], row["num_bytes"] / 1e9
    parts = ", ".join(f"{part} {ms:.1f} ms ({ms / floor:.2f} x)" for part, ms in row["ms"].items())
    speed = " and ".join(f"{part} {1e3 * gigabytes / row['ms'][part]:.1f}" for part in ("gather", "load"))
    print(
        f"{row['engine']} {row['shape']} {row['transport']}: {gigabytes:.2f} GB: {parts}; GB/s of {speed}", flush=True
    )


async def run(options: argparse.Namespace) -> None:
    device = "cpu" if options.dry else "cuda"
    shapes = ["dry"] if options.dry else options.shapes
    rows = []
    with tempfile.TemporaryDirectory() as root:
        folders = {shape: Path(root) / shape for shape in shapes}
        for shape, folder in folders.items():
            save_config(folder, shape)
        engines = {shape: make_engine(options.engine, folder, device) for shape, folder in folders.items()}
        try:
            # At once, because a start takes longer than all else.
            await asyncio.gather(*(engine.start() for engine in engines.values()))
            for shape, engine in engines.items():
                rows += await measure(options.engine, shape, options.updates, device, engine, folders[shape])
        finally:
            await asyncio.gather(*(engine.teardown() for engine in engines.values()))
    for shape in shapes:
        copies = next(row["plain_ms"] for row in rows if row["shape"] == shape)
        print(f"{shape}: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in copies.items()))
    if options.output is not None:
        name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        options.output.write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": rows}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["embedded", "vllm"], default="embedded")
    parser.add_argument("--shapes", nargs="+", choices=["0.6b", "1.7b"], default=["0.6b", "1.7b"])
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--output", type=Path, help="a JSON file with all figures")
    parser.add_argument("--dry", action="store_true", help="a small model on the CPU")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()

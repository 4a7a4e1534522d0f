"""Cost of syncing a LoRA adapter, compared with the whole model: bytes, pause, and tokens per second afterwards.

    python benchmarks/lora_weight_sync.py [--engine embedded] [--rank 16] [--hidden-size 512] [--layers 4] [--updates 20]

Two engines with the same base model run in separate processes. One gets whole models, the other adapters, in turn, so that other
load on the machine affects both. Requests run meanwhile. All numbers are medians of one run.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel

from skyrl_train.config.schema import BuildModelConfig, LoraConfig
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.engines.embedded import EmbeddedEngine
from skyrl_train.inference.engines.vllm import VLLMEngine
from skyrl_train.inference.interface import InferenceEngineInput, InferenceEngineInterface
from skyrl_train.models.folder import load_model, load_tokenizer
from skyrl_train.models.lora import adapter_of, add_adapter, policy_weights
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_train.weight_sync.syncer import WeightSyncer
from skyrl_train.weight_sync.update import WeightTransport, WeightUpdate

TOKENS, REQUESTS, CONTEXT = 64, 8, 512


@dataclass
class Side:
    """One of the two methods, and its measurements."""

    name: str
    model: PreTrainedModel
    client: InferenceEngineClient
    transport: WeightTransport = field(default_factory=SharedMemoryTransport)
    version: int = -1
    num_bytes: int = 0
    rows: list[dict[str, float]] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.syncer = WeightSyncer(self.client, self.transport, self.stage, PauseMode.KEEP)

    def stage(self, transport: WeightTransport, version: int) -> WeightUpdate:
        update = transport.gather(policy_weights(self.model), version)
        self.num_bytes = update.num_bytes
        return dataclasses.replace(update, adapter=adapter_of(self.model))

    async def sync(self) -> None:
        self.version += 1
        with torch.no_grad():
            for _, weight in policy_weights(self.model):
                weight += 1e-4
        started = time.perf_counter()
        times = await self.syncer.sync(self.version)
        self.rows.append({**times, "whole": time.perf_counter() - started})

    async def generate(self) -> None:
        params = {"max_tokens": TOKENS, "ignore_eos": True}
        prompts = [[5, 6, 7 + i % 3] for i in range(REQUESTS)]
        started = time.perf_counter()
        await self.client.generate(InferenceEngineInput(prompt_token_ids=prompts, sampling_params=params))
        self.tokens_per_s.append(REQUESTS * TOKENS / (time.perf_counter() - started))

    def median(self, key: str) -> float:
        return statistics.median(row[key] for row in self.rows)


async def measure(kind: str, rank: int, hidden_size: int, layers: int, updates: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model"
        build = BuildModelConfig(hidden_size=hidden_size, intermediate_size=4 * hidden_size, num_layers=layers)
        build_model_folder(build, Path(path), seed=0)
        lora = LoraConfig(rank=rank)
        whole, adapted = load_model(path, "float32", "cpu"), add_adapter(load_model(path, "float32", "cpu"), lora)
        sides = [_side("whole model", whole, kind, path, None), _side("adapter", adapted, kind, path, lora)]
        await asyncio.gather(*(side.client.start() for side in sides))
        try:
            for side in sides:
                await side.sync()
                await side.generate()
                side.rows.clear()
                side.tokens_per_s.clear()
            for _ in range(updates):
                for side in sides:
                    requests = asyncio.create_task(side.generate())
                    await asyncio.sleep(0)  # they are on their way
                    await side.sync()
                    await requests
                    side.tokens_per_s.pop()  # that one was interrupted
                    await side.generate()
        finally:
            for side in sides:
                side.syncer.close()
                await side.client.teardown()
        _report(kind, rank, sides)


def _side(name: str, model: PreTrainedModel, kind: str, path: str, lora: LoraConfig | None) -> Side:
    client = InferenceEngineClient([_engine(kind, path, lora)], load_tokenizer(path), path)
    return Side(name, model, client)


def _engine(kind: str, path: str, lora: LoraConfig | None) -> InferenceEngineInterface:
    if kind == "embedded":
        return EmbeddedEngine(path, max_model_len=CONTEXT, lora=lora)
    load = {"load_format": "dummy"} if lora is None else {"lora_rank": lora.rank}
    return VLLMEngine(path, max_model_len=CONTEXT, max_num_seqs=REQUESTS, **load)  # type: ignore[arg-type]


def _report(kind: str, rank: int, sides: list[Side]) -> None:
    print(f"| {kind}, rank {rank} | bytes | weight sync | gather | transfer | pause | tokens/s afterwards |")
    print("|---" * 7 + "|")
    for side in sides:
        times = [
            f"{1e3 * side.median(name):.1f} ms" for name in ("whole", "time/gather", "time/transfer", "time/pause")
        ]
        print(
            f"| {side.name} | {side.num_bytes / 1e6:.2f} MB | {' | '.join(times)} | {statistics.median(side.tokens_per_s):,.0f} |"
        )
    whole, adapter = sides
    print(
        f"| adapter / whole | **{adapter.num_bytes / whole.num_bytes:.3f}** "
        f"| **{adapter.median('whole') / whole.median('whole'):.2f}** | | "
        f"| **{adapter.median('time/pause') / whole.median('time/pause'):.2f}** "
        f"| **{statistics.median(adapter.tokens_per_s) / statistics.median(whole.tokens_per_s):.2f}** |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--updates", type=int, default=20)
    options = parser.parse_args()
    asyncio.run(measure(options.engine, options.rank, options.hidden_size, options.layers, options.updates))


if __name__ == "__main__":
    main()

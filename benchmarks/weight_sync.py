"""Time that the client adds to a weight sync, beside the engine's pause and load.

    python benchmarks/weight_sync.py [--updates 50] [--requests 64]

An embedded engine in its own process serves requests while new weights are synced again and again. One run alternates between
calls of the engine itself and calls through the client; the difference is the client's share.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from skyrl_train.config.schema import BuildModelConfig
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.engines.embedded import EmbeddedEngine
from skyrl_train.inference.interface import InferenceEngineInput
from skyrl_train.models.folder import load_model, load_tokenizer
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.shared_memory import SharedMemoryTransport

PARAMS = {"max_tokens": 64, "ignore_eos": True}


async def measure(updates: int, requests: int, mode: PauseMode) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model"
        build_model_folder(BuildModelConfig(alphabet="0123456789abc"), Path(path), seed=0)
        model, tokenizer = load_model(path, "float32", "cpu"), load_tokenizer(path)
        engine = EmbeddedEngine(path, max_model_len=512)
        # A probe between a call of the engine itself and the next one through the client would find a version that the client
        # does not know, and take the engine out of the routing. So there is none while this runs.
        client = InferenceEngineClient([engine], tokenizer, path, probe_interval_s=3600.0)
        transport = SharedMemoryTransport()
        await client.start()
        await client.load_weights(await _gather(client, transport, model, 0), mode)
        direct, through_client = [], []
        async with asyncio.TaskGroup() as load:  # a request that fails ends the measurement
            serving = [load.create_task(_serve(client)) for _ in range(requests)]
            for version in range(1, 2 * updates + 1):
                update = await _gather(client, transport, model, version)
                started = time.perf_counter()
                if version % 2:
                    await engine.pause(mode)
                    await engine.load_weights(update)
                    await engine.resume()
                    direct.append(time.perf_counter() - started)
                else:
                    await client.load_weights(update, mode)
                    through_client.append(time.perf_counter() - started)
            for task in serving:
                task.cancel()
        await client.teardown()
        transport.close()
    engine_ms, client_ms = 1e3 * statistics.median(direct), 1e3 * statistics.median(through_client)
    print(
        f"| `{mode.value}` | {engine_ms:.2f} ms | {client_ms:.2f} ms | {client_ms - engine_ms:.2f} ms "
        f"| {client_ms / engine_ms:.2f} |",
        flush=True,
    )


async def _gather(client: InferenceEngineClient, transport: SharedMemoryTransport, model, version: int):
    update = await asyncio.to_thread(transport.gather, model.named_parameters(), version)
    await client.receive_weights(update)
    return update


async def _serve(client: InferenceEngineClient) -> None:
    while True:
        await client.generate(InferenceEngineInput(prompt_token_ids=[[5, 6, 7]], sampling_params=PARAMS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--requests", type=int, default=64)
    options = parser.parse_args()
    print(f"{options.requests} requests in flight, medians of {options.updates} updates\n")
    print("| pause mode | engine alone: pause, load, resume | through the client | the client adds | ratio |")
    print("|---" * 5 + "|", flush=True)
    for mode in (PauseMode.KEEP, PauseMode.RECOMPUTE):
        asyncio.run(measure(options.updates, options.requests, mode))


if __name__ == "__main__":
    main()

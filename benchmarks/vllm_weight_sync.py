"""Pause of 64 requests by a weight sync to vLLM on the CPU, beside the load itself.

    python benchmarks/vllm_weight_sync.py [--updates 40] [--requests 64] [--modes keep recompute]

The target is one decode step and 10 ms. One run measures decode steps and weight syncs with the same requests in flight, and
compares them by their ratio. A weight sync passes through the client: gate, pause, load, resume.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from pathlib import Path

from skyrl_train.config.schema import BuildModelConfig
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.engines.vllm import VLLMEngine
from skyrl_train.inference.interface import InferenceEngineInput
from skyrl_train.models.folder import load_model, load_tokenizer
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_train.weight_sync.update import WeightUpdate

PARAMS = {"max_tokens": 400, "ignore_eos": True, "temperature": 1.0}
STEPS_S = 2.0  # of undisturbed decoding before the updates of each mode
BETWEEN_S = (
    0.4  # between two updates: after `recompute`, long prefills come first, and a pause waits for the step that runs
)


async def measure(updates: int, requests: int, modes: list[PauseMode]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model"
        build_model_folder(BuildModelConfig(alphabet="0123456789abc"), Path(path), seed=0)
        model, tokenizer = load_model(path, "float32", "cpu"), load_tokenizer(path)
        engine = VLLMEngine(path, max_num_seqs=requests, max_model_len=512)
        client, transport = InferenceEngineClient([engine], tokenizer, path), SharedMemoryTransport()
        await client.start()
        load = [asyncio.create_task(serve(client)) for _ in range(requests)]
        version = 0
        for mode in modes:
            step_ms = await decode_step_ms(engine, requests)
            beyond, loads = [], []
            for _ in range(updates):
                update = await asyncio.to_thread(transport.gather, model.named_parameters(), version)
                await client.receive_weights(update)
                paused_s = await timed(client, update, mode)
                loads.append(1e3 * engine.last_load_s)
                beyond.append(1e3 * (paused_s - engine.last_load_s))
                version += 1
                await asyncio.sleep(BETWEEN_S)
            report(mode, step_ms, beyond, loads)
        for task in load:
            task.cancel()
        await asyncio.gather(*load, return_exceptions=True)
        await client.teardown()
        transport.close()


async def timed(client: InferenceEngineClient, update: WeightUpdate, mode: PauseMode) -> float:
    """Return the seconds from the closing of the gate to its opening."""
    started = time.perf_counter()
    await client.load_weights(update, mode)
    return time.perf_counter() - started


async def decode_step_ms(engine: VLLMEngine, requests: int) -> float:
    """Return the mean duration of a step in which every request gets a token."""
    before, started = (await engine.health()).generated_tokens, time.perf_counter()
    await asyncio.sleep(STEPS_S)
    tokens = (await engine.health()).generated_tokens - before
    return 1e3 * (time.perf_counter() - started) * requests / tokens


async def serve(client: InferenceEngineClient) -> None:
    while True:
        await client.generate(InferenceEngineInput(prompt_token_ids=[[5, 6, 7]], sampling_params=PARAMS))


def report(mode: PauseMode, step_ms: float, beyond: list[float], loads: list[float]) -> None:
    median, worst = statistics.median(beyond), sorted(beyond)[int(0.95 * len(beyond))]
    allowed = step_ms + 10
    print(
        f"| `{mode.value}` | {step_ms:.1f} ms | {statistics.median(loads):.1f} ms | {median:.1f} ms | {worst:.1f} ms "
        f"| **{median / allowed:.2f}** | {worst / allowed:.2f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--modes", nargs="+", default=["keep", "recompute"], choices=[mode.value for mode in PauseMode])
    options = parser.parse_args()
    print(
        f"{options.requests} requests in flight, {options.updates} updates; the ratios are to one decode step and 10 ms\n"
    )
    print(
        "| pause mode | decode step | load | paused beyond it, median | 95th percentile | ratio, median | 95th percentile |"
    )
    print("|---" * 7 + "|", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(measure(options.updates, options.requests, [PauseMode(mode) for mode in options.modes]))


if __name__ == "__main__":
    main()

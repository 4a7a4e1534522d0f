"""Loss of one of two engines under load: lost requests, and time until the other engine has its full throughput.

    python benchmarks/engine_loss.py [--requests 64] [--seconds 6]

Two embedded engines, each in its own process, serve a constant number of requests. One process is killed (SIGKILL). The
remaining capacity is the throughput that the other engine then sustains; the time to recover counts from the detection.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path

from skyrl_train.config.schema import BuildModelConfig
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.engines.embedded import EmbeddedEngine
from skyrl_train.inference.interface import SamplingParams
from skyrl_train.inference.pool.fleet import FleetLimits
from skyrl_train.inference.requests import GenerationRequest
from skyrl_train.models.folder import load_model, load_tokenizer
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.shared_memory import SharedMemoryTransport

WINDOW_S = 0.25


class Load:
    """Keeps ``requests`` in flight; counts complete and wrong responses."""

    def __init__(self, client: InferenceEngineClient, requests: int) -> None:
        self._client = client
        self.finished = self.wrong = 0
        self.failures: list[BaseException] = []
        self._tasks = [asyncio.create_task(self._serve(index)) for index in range(requests)]

    async def _serve(self, index: int) -> None:
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        while True:
            try:
                generation = await self._client.complete(GenerationRequest([5, 6, 7], params, f"session-{index}"))
            except Exception as error:
                self.failures.append(error)
                return
            self.finished += 1
            self.wrong += len(generation.token_ids) != params.max_tokens

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def tokens_per_s(engines: list[EmbeddedEngine], seconds: float) -> list[float]:
    """Return the sampled tokens per second of some engines, by windows of WINDOW_S."""
    rates, last, since = [], await _generated(engines), time.perf_counter()
    until = since + seconds
    while since < until:
        await asyncio.sleep(WINDOW_S)
        now, generated = time.perf_counter(), await _generated(engines)
        rates.append((generated - last) / (now - since))
        last, since = generated, now
    return rates


async def _generated(engines: list[EmbeddedEngine]) -> int:
    return sum(health.generated_tokens for health in [await engine.health() for engine in engines])


async def measure(requests: int, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model"
        build_model_folder(BuildModelConfig(alphabet="0123456789abc"), Path(path), seed=0)
        engines = [EmbeddedEngine(path, max_model_len=512, seed=index) for index in range(2)]
        client = InferenceEngineClient(
            engines, load_tokenizer(path), path, limits=FleetLimits(max_restarts=0), probe_interval_s=60.0
        )
        transport = SharedMemoryTransport()
        await client.start()
        update = transport.gather(load_model(path, "float32", "cpu").named_parameters(), 0)
        await client.receive_weights(update)
        await client.load_weights(update, PauseMode.KEEP)
        load = Load(client, requests)
        await tokens_per_s(engines, 1.0)
        both = await tokens_per_s(engines, seconds)
        assert engines[0].pid is not None
        os.kill(engines[0].pid, signal.SIGKILL)
        killed = time.perf_counter()
        while len(client.engines) == 2:  # noqa: ASYNC110 (the moment of the detection is what is measured)
            await asyncio.sleep(0)
        detected_s = time.perf_counter() - killed
        one = await tokens_per_s(engines[1:], seconds)
        finished = load.finished
        await asyncio.sleep(1.0)
        await load.stop()
        await client.teardown()
        transport.close()
    capacity = statistics.median(one[len(one) // 2 :])
    recovered = next(index for index, rate in enumerate(one) if rate >= 0.9 * capacity)
    print("| | |\n|---|---|")
    print(f"| requests in flight | {requests} |")
    print(f"| two engines | {statistics.median(both):,.0f} tokens/s |")
    print(f"| the loss of one is detected after | {1e3 * detected_s:.0f} ms |")
    print(f"| the other sustains | {capacity:,.0f} tokens/s |")
    print(f"| and reaches 0.9 of that within | {(recovered + 1) * WINDOW_S:.2f} s of the detection |")
    print(f"| its first {WINDOW_S} s, over the sustained speed | **{one[0] / capacity:.2f}** |")
    print(f"| requests finished, lost, cut short | {finished}, **{len(load.failures)}**, **{load.wrong}** |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=6.0)
    options = parser.parse_args()
    asyncio.run(measure(options.requests, options.seconds))


if __name__ == "__main__":
    main()

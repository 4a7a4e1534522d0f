"""Cost of a request in flight for the client: memory, and lag of the event loop.

    python benchmarks/in_flight.py [--requests 1000 10000] [--seconds 10]

A scripted engine samples a token per request and second. Requests are streamed or not and spread over sessions, and weights are
synced meanwhile (each weight sync wakes every request at once; with ``--mode abort`` all of them are sent again). The lag is the
delay of a timer of 5 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.interface import (
    EngineCapabilities,
    EngineHealth,
    InferenceEngineInput,
    InferenceEngineInterface,
    InferenceEngineOutput,
    SamplingParams,
    StopReason,
    TokenChunk,
)
from skyrl_train.inference.requests import GenerationRequest
from skyrl_train.models.tiny import character_tokenizer
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.update import WeightUpdate

TICKS_PER_S = 100
PROMPT = list(range(3, 13)) * 50  # 500 tokens


class ScriptedEngine(InferenceEngineInterface):
    """Samples a token per second for each request, with a timer for each hundredth of them."""

    def __init__(self) -> None:
        self.requests: dict[int, asyncio.Queue[TokenChunk]] = {}
        self._ids = itertools.count()
        self._version = -1
        self._ticking: asyncio.Task[None] | None = None

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(frozenset(PauseMode), frozenset({"none"}), 1 << 20)

    @property
    def policy_version(self) -> int:
        return self._version

    async def start(self) -> None:
        self._ticking = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        for tick in itertools.count():
            for request_id, queue in self.requests.items():
                if request_id % TICKS_PER_S == tick % TICKS_PER_S:
                    queue.put_nowait(TokenChunk([5], [-1.0], [self._version]))
            await asyncio.sleep(1 / TICKS_PER_S)

    async def generate(self, engine_input: InferenceEngineInput) -> InferenceEngineOutput:
        chunks = [chunk async for chunk in self.stream(engine_input)]
        return InferenceEngineOutput(
            responses=[""],
            response_ids=[[t for c in chunks for t in c.token_ids]],
            stop_reasons=[str(chunks[-1].stop_reason)],
            response_logprobs=[[p for c in chunks for p in c.logprobs]],
            response_versions=[[v for c in chunks for v in c.versions]],
        )

    async def stream(self, engine_input: InferenceEngineInput) -> AsyncIterator[TokenChunk]:
        request_id = next(self._ids)
        queue = self.requests[request_id] = asyncio.Queue()
        try:
            while True:
                chunk = await queue.get()
                yield chunk
                if chunk.stop_reason is not None:
                    return
        finally:
            del self.requests[request_id]

    async def abort_generation(self) -> None:
        for count, queue in enumerate(list(self.requests.values())):
            queue.put_nowait(TokenChunk([], [], [], StopReason.ABORT))
            if count % 128 == 127:  # like messages from another process: not all in one turn of the loop
                await asyncio.sleep(0)
        while self.requests:  # noqa: ASYNC110 (each turn of the loop ends some)
            await asyncio.sleep(0)

    async def pause(self, mode: PauseMode) -> None:
        if mode is PauseMode.ABORT:
            await self.abort_generation()

    async def resume(self) -> None:
        return None

    async def sleep(self, level: int = 1) -> None:
        raise NotImplementedError

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        raise NotImplementedError

    async def reset_prefix_cache(self) -> None:
        return None

    async def receive_weights(self, update: WeightUpdate) -> None:
        return None

    async def load_weights(self, update: WeightUpdate) -> None:
        self._version = update.version

    async def health(self) -> EngineHealth:
        return EngineHealth(alive=True, policy_version=self._version, running=len(self.requests))

    async def teardown(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()


async def measure(requests: int, seconds: float, mode: PauseMode, streams: bool) -> tuple[float, float, float]:
    """Return KiB per request, and the median and the 99th percentile of the loop's lag in ms."""
    client = InferenceEngineClient([ScriptedEngine(), ScriptedEngine()], character_tokenizer("0123456789abcdef"))
    await client.start()
    await sync_weights(client, 0, mode)
    gc.collect()
    before = resident_bytes()
    tasks = [asyncio.create_task(serve(client, index, streams)) for index in range(requests)]
    while await running(client) < requests:  # noqa: ASYNC110 (set-up, before anything is measured)
        await asyncio.sleep(0.05)
    gc.collect()
    gc.freeze()
    lags: list[float] = []
    watching = asyncio.create_task(watch(lags))
    version, until = 0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        await asyncio.sleep(2)
        version += 1
        await sync_weights(client, version, mode)
    kib = (resident_bytes() - before) / requests / 1024
    watching.cancel()
    for task in tasks:
        task.cancel()
    await asyncio.gather(watching, *tasks, return_exceptions=True)
    await client.teardown()
    gc.unfreeze()
    cuts = statistics.quantiles(lags, n=100)
    return kib, 1e3 * statistics.median(lags), 1e3 * cuts[98]


async def serve(client: InferenceEngineClient, index: int, streams: bool) -> None:
    request = GenerationRequest(PROMPT, SamplingParams(max_tokens=100_000), session_id=f"session-{index}")
    if not streams:
        await client.complete(request)
    async for _ in client.stream(request):
        pass


async def sync_weights(client: InferenceEngineClient, version: int, mode: PauseMode) -> None:
    update = WeightUpdate(version, "none", "", 0, ())
    await client.receive_weights(update)
    await client.load_weights(update, mode)


async def running(client: InferenceEngineClient) -> int:
    return sum(health.running for health in await client.health())


async def watch(lags: list[float]) -> None:
    while True:
        began = time.perf_counter()
        await asyncio.sleep(0.005)
        lags.append(time.perf_counter() - began - 0.005)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--mode", choices=[mode.value for mode in PauseMode], default="keep")
    options = parser.parse_args()
    print("| answers | in flight | memory of each | of that with the fewest | event-loop lag, median | p99 |")
    print("|---" * 6 + "|", flush=True)
    for streams in (False, True):
        per_request = []
        for requests in options.requests:
            # In a new process: otherwise memory freed by an earlier measurement would be reused and not counted.
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
                kib, median, p99 = process.submit(
                    run, requests, options.seconds, PauseMode(options.mode), streams
                ).result()
            per_request.append(kib)
            print(
                f"| {'streamed' if streams else 'whole'} | {requests:,} | {kib:.1f} KiB | {kib / per_request[0]:.2f} "
                f"| {median:.2f} ms | {p99:.1f} ms |",
                flush=True,
            )


def run(requests: int, seconds: float, mode: PauseMode, streams: bool) -> tuple[float, float, float]:
    return asyncio.run(measure(requests, seconds, mode, streams))


if __name__ == "__main__":
    main()

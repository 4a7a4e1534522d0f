"""Cost of each weight transport: wait of the trainer and pause of the engine, with overlap and without.

    python benchmarks/weight_transports.py [--updates 20] [--hidden-size 512]

One embedded engine in its own process serves requests while new weights are synced, by each transport in turn. With overlap the
trainer should wait for *gather* only, and the engine should be idle for *load* only: the ratios to these times are medians of one
run that takes turns. The engine is idle from its answer to *pause*, before which it ends its decode step, to its answer to
*resume*.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from skyrl_train.config.schema import BuildModelConfig
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.engines.embedded import EmbeddedEngine
from skyrl_train.inference.interface import InferenceEngineInput
from skyrl_train.models.folder import load_model, load_tokenizer
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync import process_group
from skyrl_train.weight_sync.delta import DeltaTransport
from skyrl_train.weight_sync.disk import DiskTransport
from skyrl_train.weight_sync.process_group import GlooTransport
from skyrl_train.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_train.weight_sync.syncer import WeightSyncer, weights_of
from skyrl_train.weight_sync.update import WeightTransport, WeightUpdate

PARAMS = {"max_tokens": 64, "ignore_eos": True}
CHANGED_WORDS = 100  # one in so many changes from version to version


@dataclasses.dataclass(frozen=True)
class Row:
    """One update; seconds."""

    waited: float  # wait of the trainer until it may continue
    gather: float
    transfer: float
    pause: float  # counted by the client, from its request on
    idle: float  # the part of it in which the engine samples nothing
    load: float  # duration in the engine


class WeightSyncs:
    """Syncs weights by one transport, as a trainer does."""

    def __init__(self, client: InferenceEngineClient, engine: TimedEngine, transport: WeightTransport, model) -> None:
        self._engine = engine
        self._syncer = WeightSyncer(client, transport, weights_of(model.named_parameters), PauseMode.KEEP)

    async def one(self, version: int, overlap: bool) -> Row:
        async def nothing(version: int = 0) -> dict[str, float]:
            return {}

        started = time.perf_counter()
        await self._syncer.begin(version, before_send=nothing, on_served=nothing, on_end=lambda: None)
        if overlap:
            waited = time.perf_counter() - started
            times = await self._syncer.wait()  # the next step is longer than that
        else:
            times = await self._syncer.wait()
            waited = time.perf_counter() - started
        engine = self._engine
        idle = engine.resumed_at - engine.paused_at
        return Row(waited, times["time/gather"], times["time/transfer"], times["time/pause"], idle, engine.last_load_s)

    def close(self) -> None:
        self._syncer.close()


class TimedEngine(EmbeddedEngine):
    """Records the times of the last pause, resume and load."""

    paused_at = resumed_at = last_load_s = 0.0

    async def pause(self, mode: PauseMode) -> None:
        await super().pause(mode)
        self.paused_at = time.perf_counter()

    async def resume(self) -> None:
        await super().resume()
        self.resumed_at = time.perf_counter()

    async def load_weights(self, update: WeightUpdate) -> None:
        started = time.perf_counter()
        await super().load_weights(update)
        self.last_load_s = time.perf_counter() - started


async def measure(updates: int, requests: int, hidden_size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model"
        build_model_folder(
            BuildModelConfig(hidden_size=hidden_size, intermediate_size=4 * hidden_size), Path(path), seed=0
        )
        model = load_model(path, "float32", "cpu")
        megabytes = sum(parameter.nbytes for parameter in model.parameters()) / 1e6
        print(f"{megabytes:.0f} MB of weights, 1 word in {CHANGED_WORDS} changes, {requests} requests in flight\n")
        print(
            "| transport | trainer waits over gather, with `overlap_weight_sync` | without | engine idle over load ",
            end="",
        )
        print("| gather | transfer | pause | idle | load |")
        print("|---" * 9 + "|", flush=True)
        kinds: dict[str, Callable[[], WeightTransport]] = {
            "shared_memory": SharedMemoryTransport,
            "disk": lambda: DiskTransport(f"{folder}/disk"),
            "delta": lambda: DeltaTransport(f"{folder}/delta", "float32"),
            "gloo": lambda: GlooTransport(address="127.0.0.1"),  # as to an engine on another machine
        }
        process_group.machine = lambda: "another machine"
        engine = TimedEngine(path, max_model_len=512)
        client = InferenceEngineClient([engine], load_tokenizer(path), path)
        await client.start()
        version, load = 0, []
        try:
            for name, make in kinds.items():
                weight_syncs = WeightSyncs(client, engine, make(), model)
                await weight_syncs.one(version, overlap=False)  # areas are made
                load = load or [asyncio.create_task(_serve(client)) for _ in range(requests)]
                rows: dict[bool, list[Row]] = {True: [], False: []}
                for number in range(1, 2 * updates + 2):
                    version += 1
                    _change(model)
                    row = await weight_syncs.one(version, overlap=number % 2 == 0)
                    if number > 1:  # the second area is made
                        rows[number % 2 == 0].append(row)
                weight_syncs.close()
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


def _report(name: str, rows: dict[bool, list[Row]]) -> None:
    both = rows[True] + rows[False]
    gather, transfer, pause, idle, load = (
        1e3 * statistics.median(getattr(row, part) for row in both)
        for part in ("gather", "transfer", "pause", "idle", "load")
    )
    overlapped, without = (
        statistics.median(row.waited / row.gather for row in rows[overlap]) for overlap in (True, False)
    )
    beyond = statistics.median(row.idle / row.load for row in both)
    print(
        f"| `{name}` | **{overlapped:.2f}** | {without:.2f} | **{beyond:.2f}** | {gather:.1f} ms | {transfer:.1f} ms "
        f"| {pause:.1f} ms | {idle:.1f} ms | {load:.1f} ms |",
        flush=True,
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

"""One broadcast to real vLLM engines of one and of two tensor-parallel ranks, one of which stops and dies during it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
import vllm_read_back
from vllm_engines import CONTEXT, request, save_folder, tiny_model

from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.engines.vllm import VLLMEngine
from skyrl_train.models.folder import load_tokenizer
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.broadcast_group import BroadcastGroup
from skyrl_train.weight_sync.process_group import GlooTransport
from skyrl_train.weight_sync.update import WeightUpdate

BUCKET_BYTES = 10_000


@pytest.fixture
def in_the_middle_of_the_next_broadcast(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Calls a function in the trainer when five buckets of the next broadcast are sent."""
    broadcast = BroadcastGroup.broadcast

    def interrupt(call: Callable[[], None]) -> None:
        def interrupted(group: BroadcastGroup, staging: torch.Tensor, bucket_bytes: int) -> None:
            monkeypatch.setattr(BroadcastGroup, "broadcast", broadcast)
            sent = 5 * bucket_bytes
            assert staging.numel() > 2 * sent
            broadcast(group, staging[:sent], bucket_bytes)
            call()
            broadcast(group, staging[sent:], bucket_bytes)

        monkeypatch.setattr(BroadcastGroup, "broadcast", interrupted)

    return interrupt


@pytest.mark.slow
@pytest.mark.usefixtures("vllm_forks", "reading_back", "trainer_elsewhere")
async def test_an_engine_that_stops_or_dies_during_a_broadcast_costs_the_other_one_nothing(
    tmp_path: Path, in_the_middle_of_the_next_broadcast: Callable[[Callable[[], None]], None]
) -> None:
    folder = save_folder(tmp_path / "model")
    options = {"max_model_len": CONTEXT, "max_num_seqs": 4}
    living, ill = VLLMEngine(folder, tensor_parallel_size=2, **options), VLLMEngine(folder, **options)
    client = InferenceEngineClient([living, ill], load_tokenizer(folder), folder)
    await client.start()
    # Each of a transfer's parts may take 10 s; the client waits for a minute.
    with closing(
        GlooTransport(verify=True, address="127.0.0.1", bucket_bytes=BUCKET_BYTES, timeout_s=40.0)
    ) as transport:

        async def sync(version: int) -> WeightUpdate:
            update = transport.gather(tiny_model(version).named_parameters(), version)
            await client.receive_weights(update)
            await client.load_weights(update, PauseMode.KEEP)
            assert await vllm_read_back.served_checksum(living, update) == update.checksum
            return update

        def workers() -> int:
            assert transport._server is not None and transport._server._kept is not None
            return sum(engine.receivers for engine in transport._server._kept[1])

        try:
            await sync(0)
            assert workers() == 3
            running = [asyncio.create_task(client.generate(request(max_tokens=2000))) for _ in range(4)]
            (pid,) = await ill.worker_pids()
            in_the_middle_of_the_next_broadcast(lambda: os.kill(pid, signal.SIGSTOP))
            await sync(1)
            assert (living.policy_version, ill.policy_version, workers()) == (1, 0, 2)
            os.kill(pid, signal.SIGCONT)
            async with asyncio.timeout(300):
                while ill.policy_version < 1 or len(client._pool.router.routed) < 2:
                    await ill.health()
            update = await sync(2)
            assert await vllm_read_back.served_checksum(ill, update) == update.checksum
            in_the_middle_of_the_next_broadcast(lambda: os.kill(pid, signal.SIGKILL))
            await sync(3)
            assert living.policy_version == 3
            for output in await asyncio.gather(*running):
                (versions,) = output["response_versions"]
                assert len(versions) == 2000 and versions == sorted(versions)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            await client.teardown()

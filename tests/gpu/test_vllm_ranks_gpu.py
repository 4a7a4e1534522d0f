"""Weight syncs to a vLLM with tensor parallelism, and syncs of an adapter. The tests on the CPU run the same."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
from test_vllm_gpu import ENVIRONMENT
from vllm_read_back import EXTENSION

from skyrl_train.inference.engines.vllm import VLLMEngine, arguments
from skyrl_train.weight_sync.cuda_ipc import CudaIpcTransport
from skyrl_train.weight_sync.process_group import NcclTransport
from skyrl_train.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_train.weight_sync.update import WeightTransport, WeightUpdate
from tests.syncs_with_vllm import ADAPTER, CONTEXT, policy, save_model, serves_each_version

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.timeout(900),
]
DTYPE = "bfloat16"
TRANSPORTS: dict[str, type[WeightTransport]] = {
    "shared_memory": SharedMemoryTransport,
    "cuda_ipc": CudaIpcTransport,
    "nccl": NcclTransport,
}


def needs_gpus(number: int) -> None:
    if torch.cuda.device_count() < number:
        pytest.skip(f"needs {number} GPUs, and there are {torch.cuda.device_count()}")


def transport_to(name: str) -> WeightTransport:
    return TRANSPORTS[name](dtype=DTYPE, verify=True)  # type: ignore[call-arg]


def vllm_on(folder: str, devices: Sequence[int], monkeypatch: pytest.MonkeyPatch, lora_rank: int = 0) -> VLLMEngine:
    """An engine with a rank on each of ``devices``, whose weights can be read back."""
    pytest.importorskip("vllm", reason="needs the extra vllm")
    monkeypatch.setattr(arguments, "WORKER_EXTENSION", EXTENSION)
    return VLLMEngine(
        folder,
        dtype=DTYPE,
        max_num_seqs=8,
        max_model_len=CONTEXT,
        tensor_parallel_size=len(devices),
        devices=devices,
        lora_rank=lora_rank,
        load_format="auto" if lora_rank else "dummy",
        engine_args={"gpu_memory_utilization": 0.3, "enforce_eager": True},
        environment=ENVIRONMENT,
    )


# By default weights reach an engine in a process by shared memory. The trainer is on the first GPU; NCCL needs another one.
@pytest.mark.parametrize(("name", "devices"), [("shared_memory", (0, 1)), ("nccl", (1, 2))])
async def test_a_sync_changes_the_weights_of_both_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, devices: tuple[int, int]
) -> None:
    needs_gpus(1 + max(devices))
    folder = save_model(tmp_path / "model")
    engine = vllm_on(folder, devices, monkeypatch)
    with closing(transport_to(name)) as transport:
        await engine.start()
        try:
            link, _ = engine._alive()
            assert sorted(await link.on_workers("skyrl_device")) == [f"cuda:{device}" for device in devices]
            trainer = policy(folder, "cuda", DTYPE)
            await serves_each_version(engine, trainer, lambda version: trainer.stage(transport, version), DTYPE)
            assert len(set(await link.on_workers("skyrl_in_place"))) == 1, "both load in the same way"
        finally:
            await engine.teardown()


async def test_each_rank_opens_the_copy_of_the_training_rank_on_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with ``trainer.placement.colocate_all`` and two training ranks, each of which gathers the whole weights."""
    needs_gpus(2)
    folder = save_model(tmp_path / "model")
    engine = vllm_on(folder, (0, 1), monkeypatch)
    ranks = [CudaIpcTransport(DTYPE, device=f"cuda:{gpu}", verify=True) for gpu in range(2)]
    with closing(ranks[0]), closing(ranks[1]):
        await engine.start()
        try:
            trainer = policy(folder, "cuda", DTYPE)

            def stage(version: int) -> WeightUpdate:
                updates = []
                for gpu, rank in enumerate(ranks):
                    with torch.cuda.device(gpu):
                        copies = [(name, weight.to(f"cuda:{gpu}")) for name, weight in trainer.named_weights()]
                        updates.append(rank.gather(copies, version))
                return ranks[0].merged(updates)

            await serves_each_version(engine, trainer, stage, DTYPE)
        finally:
            await engine.teardown()


@pytest.mark.parametrize(
    ("name", "devices"), [("shared_memory", (0,)), ("cuda_ipc", (0,)), ("nccl", (1,)), ("shared_memory", (0, 1))]
)
async def test_vllm_serves_each_adapter_that_the_trainer_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, devices: tuple[int, ...]
) -> None:
    pytest.importorskip("peft", reason="needs the extra lora")
    needs_gpus(1 + max(devices))
    folder = save_model(tmp_path / "model")
    engine = vllm_on(folder, devices, monkeypatch, lora_rank=ADAPTER.rank)
    with closing(transport_to(name)) as transport:
        await engine.start()
        try:
            trainer = policy(folder, "cuda", DTYPE, ADAPTER)
            whole = sum(parameter.nbytes for parameter in trainer.model.parameters())

            def stage(version: int) -> WeightUpdate:
                update = trainer.stage(transport, version)
                assert update.num_bytes < whole / 2
                return update

            # Of two ranks, each holds a part of B, which the read-back does not put together.
            await serves_each_version(engine, trainer, stage, DTYPE, reads_back=len(devices) == 1)
        finally:
            await engine.teardown()

"""Weights from a training GPU: asynchronous copies of registered memory keep every bit, and leave nothing behind."""

from __future__ import annotations

import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from skyrl_train.config.schema import BuildModelConfig
from skyrl_train.inference.engines.embedded import EmbeddedEngine
from skyrl_train.models.folder import load_model
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.checksum import LANES, checksum, folded_crc
from skyrl_train.weight_sync.cuda_ipc import CudaIpcTransport
from skyrl_train.weight_sync.pinning import Registration
from skyrl_train.weight_sync.shared_memory import SharedMemoryReceiver, SharedMemoryTransport
from skyrl_train.weight_sync.staging import DeviceStaging, HostStaging, pack
from skyrl_train.weight_sync.update import WeightTransport

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
GPU = torch.device("cuda", 0)
LONG = 200_000_000  # cycles of a kernel that does nothing: about 0.1 s


def weights(scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda") * scale

    return {
        "matrix": random(1024, 4096),
        "transposed": random(2048, 1024).t(),
        "scalar": random(1)[0],
        "empty": random(0, 3),
        "half": random(777, 33).half(),
        "main memory": random(50).cpu(),
    }


@pytest.fixture
def transport() -> Iterator[SharedMemoryTransport]:
    with closing(SharedMemoryTransport("bfloat16", verify=True)) as transport:
        yield transport


def needs_registered(memory: torch.Tensor) -> None:
    if not memory.is_pinned():
        pytest.skip("this machine's driver does not register shared memory")


def test_registered_and_pageable_memory_get_the_same_bits(transport: SharedMemoryTransport) -> None:
    receiver = SharedMemoryReceiver()
    checksums = set()
    for version in range(5):  # the first two are gathered before the areas are registered
        update = transport.gather(weights().items(), version)
        received = receiver.open_update(update)
        for name, weight in weights().items():
            assert torch.equal(received[name], weight.to(torch.bfloat16).cpu()), (version, name)
        checksums.add(update.checksum)
    assert len(checksums) == 1


def test_memory_is_registered_until_the_end_of_the_area() -> None:
    area = HostStaging()
    _, staging = pack(weights().items(), "float32", area)
    needs_registered(staging)
    area.close()
    assert not staging.is_pinned()


def test_an_engine_registers_what_it_maps_until_it_leaves(transport: SharedMemoryTransport) -> None:
    receiver = SharedMemoryReceiver(GPU)
    view = receiver.open_update(transport.gather(weights().items(), 0))["matrix"]
    needs_registered(view)
    there = view.to(GPU, non_blocking=True)
    assert torch.equal(there, weights()["matrix"].bfloat16())
    receiver.close()
    assert not view.is_pinned()
    assert torch.equal(view, there.cpu()), "a view outlives the registration"


def test_a_refused_registration_leaves_no_error_for_the_next_kernel() -> None:
    area = HostStaging()
    _, staging = pack(weights().items(), "float32", area)
    needs_registered(staging)
    again = Registration()
    again.cover(staging, GPU)  # CUDA refuses to register memory twice
    assert torch.ones(3, device=GPU).add_(1).sum().item() == 6
    again.release()
    assert staging.is_pinned(), "the first registration stays"
    area.close()


@pytest.mark.parametrize("kind", ["shared_memory", "cuda_ipc"])
def test_a_gather_holds_what_was_asked_before_it_and_nothing_that_comes_after(kind: str) -> None:
    before = {name: weight for name, weight in weights().items() if weight.is_cuda}
    area = HostStaging() if kind == "shared_memory" else DeviceStaging(GPU)
    for round_ in range(4):  # pageable memory first, then registered
        expected = {name: weight.add(1) for name, weight in before.items()}
        torch.cuda._sleep(LONG)  # the step's kernels have not run when the gather begins
        for weight in before.values():
            weight.add_(1)
        specs, staging = pack(before.items(), "float32", area)
        seen = staging.clone() if staging.is_cuda else staging.numpy().copy()  # at once: the copies must have ended
        torch.cuda._sleep(LONG)
        for weight in before.values():
            weight.mul_(-1)  # the next step
        torch.cuda.synchronize()
        for weight in before.values():
            weight.mul_(-1)
        bytes_ = seen.cpu() if isinstance(seen, torch.Tensor) else torch.from_numpy(seen)
        for spec in specs:
            end = spec.offset + expected[spec.name].numel() * 4
            got = bytes_[spec.offset : end].view(torch.float32).view(spec.shape)
            assert torch.equal(got, expected[spec.name].float().cpu()), (round_, spec.name)
        assert torch.equal(staging.cpu(), bytes_), "training goes on and the version stays"
    area.close()


def test_the_first_version_on_a_device_needs_its_own_size_once() -> None:
    model = {f"w{index}": torch.ones(1 << 20, device=GPU) for index in range(40)}
    total = 40 * (4 << 20)
    area = DeviceStaging(GPU)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    pack(model.items(), "float32", area)
    assert torch.cuda.max_memory_allocated() - before <= total + (4 << 20)
    assert torch.cuda.memory_allocated() - before == total
    area.close()
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.parametrize("num_bytes", [4, 64, 4 * LANES, 4 * LANES + 64, 100_000_064])
def test_a_gpu_computes_the_checksum_that_the_cpu_computes(num_bytes: int) -> None:
    staging = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=GPU)
    host = staging.cpu()
    expected = zlib.crc32(host.numpy().data)
    assert folded_crc(staging, LANES, GPU) == expected
    assert folded_crc(host.pin_memory(), LANES, GPU) == expected, "copied part by part"
    assert checksum(staging) == checksum(host) == checksum(host.pin_memory(), GPU)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["shared_memory", "cuda_ipc"])
async def test_an_engine_in_a_process_serves_each_version_bit_for_bit(tmp_path: Path, kind: str, dtype: str) -> None:
    folder = tmp_path / "model"
    build_model_folder(BuildModelConfig(), folder, seed=0)
    model = load_model(str(folder), "float32", "cuda")
    transport: WeightTransport
    transport = SharedMemoryTransport(dtype, True) if kind == "shared_memory" else CudaIpcTransport(dtype, verify=True)
    engine = EmbeddedEngine(str(folder), device="cuda", dtype=dtype)
    await engine.start()
    try:
        await engine.pause(PauseMode.KEEP)
        served = []
        for version in range(5):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1e-3)
            update = transport.gather(model.named_parameters(), version)
            await engine.receive_weights(update)
            await engine.load_weights(update)
            served.append(await engine.served_checksum())
            assert served[-1] == update.checksum
        assert len(set(served)) == 5
    finally:
        await engine.teardown()
        transport.close()


def test_a_copy_that_no_engine_opens_is_freed() -> None:
    transport = CudaIpcTransport()
    weight = torch.ones(1 << 22, device=GPU)
    before = torch.cuda.memory_allocated()
    for version in range(3):  # the third one lies where the first one did
        transport.gather([("weight", weight)], version)
    assert torch.cuda.memory_allocated() > before
    assert transport.release()
    assert torch.cuda.memory_allocated() <= before
    transport.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_thread_that_uses_a_stream_of_the_second_gpu_takes_nothing_of_the_first() -> None:
    program = """
import threading, torch
from skyrl_train.weight_sync.pinning import using
torch.cuda.set_device(1)
def work():
    with using(torch.cuda.Stream(torch.device("cuda", 1))):
        torch.ones(1, device="cuda:1")
thread = threading.Thread(target=work)
thread.start()
thread.join()
assert torch._C._cuda_hasPrimaryContext(1) and not torch._C._cuda_hasPrimaryContext(0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

"""Staging copies: memory that grows, and memory that CUDA knows."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from skyrl_train.weight_sync import pinning
from skyrl_train.weight_sync.shared_memory import SharedMemoryReceiver, SharedMemoryTransport
from skyrl_train.weight_sync.staging import DeviceStaging, HostStaging, moved, pack

GPU = torch.device("cuda")


class Cuda:
    """Takes the part of CUDA's runtime that registers memory."""

    cudaError = SimpleNamespace(success=0)

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, int]] = []
        self.sizes: dict[int, int] = {}  # registered now, by address
        self.answer = 0
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
        monkeypatch.setattr(pinning, "wait_for_copies", lambda _: self.calls.append(("wait", 0)))
        monkeypatch.setattr(pinning, "_forget_error", lambda _: self.calls.append(("forget", 0)))
        pinning._say_once.cache_clear()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert address not in self.sizes, "CUDA refuses to register memory twice"
        self.calls.append(("register", size))
        if not self.answer:
            self.sizes[address] = size
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", self.sizes.pop(address)))
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return f"error {error}"

    def taken(self) -> list[tuple[str, int]]:
        """The calls since the last time."""
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def test_an_area_is_registered_at_the_size_of_a_version_and_released_before_it_grows(cuda: Cuda) -> None:
    area = HostStaging()
    for step in (64, 128, 4096):
        area.room(step)
    assert cuda.taken() == [], "its size is not known yet"
    area.finish(4096, GPU)
    assert cuda.taken() == [("register", 4096)]
    area.room(4096)
    area.finish(4096, GPU)
    area.finish(64, GPU)
    assert cuda.taken() == [], "registered once"
    area.room(4160)
    assert cuda.taken() == [("wait", 0), ("unregister", 4096)], "copies that are under way have ended before that"
    area.finish(4160, GPU)
    area.close()
    assert cuda.taken() == [("register", 4160), ("wait", 0), ("unregister", 4160)]
    assert not cuda.sizes


def test_weights_in_main_memory_need_no_registration(cuda: Cuda) -> None:
    transport = SharedMemoryTransport()
    transport.gather([("w", torch.arange(4))], 0)
    transport.close()
    assert cuda.taken() == []


def test_an_engine_on_a_gpu_registers_each_area_once_and_forgets_it_at_the_end(cuda: Cuda) -> None:
    transport, receiver = SharedMemoryTransport(), SharedMemoryReceiver(GPU)
    for version in range(4):
        receiver.open_update(transport.gather([("w", torch.arange(32))], version))
    assert cuda.taken() == [("register", 128)] * 2
    for version in range(4, 6):
        receiver.open_update(transport.gather([("w", torch.arange(48))], version))
    assert cuda.taken() == [("wait", 0), ("unregister", 128), ("register", 192)] * 2
    receiver.close()
    assert cuda.taken() == [("wait", 0), ("unregister", 192)] * 2
    transport.close()
    assert not cuda.sizes


def test_memory_that_cuda_refuses_is_used_as_it_is_and_the_log_says_so_once(
    cuda: Cuda, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.answer = 304
    transport, receiver = SharedMemoryTransport(verify=True), SharedMemoryReceiver(GPU)
    with caplog.at_level(logging.WARNING):
        for version in range(4):
            weights = receiver.open_update(transport.gather([("w", torch.arange(32.0) + version)], version))
            assert torch.equal(weights["w"], torch.arange(32.0) + version)
    assert cuda.taken() == [("register", 128), ("forget", 0)] * 2, "asked once per area"
    assert [record.getMessage() for record in caplog.records if "error 304" in record.getMessage()] == [
        "CUDA does not register the memory for weights (error 304): they are copied more slowly."
    ]
    receiver.close()
    transport.close()
    assert cuda.taken() == []


def test_weights_move_to_the_device_one_by_one_and_the_largest_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl_train.weight_sync.staging.MAX_MOVED_BYTES", 40)
    weights = {"small": torch.zeros(10), "large": torch.zeros(11)}
    devices = {name: weight.device.type for name, weight in moved(weights, torch.device("meta"))}
    assert devices == {"small": "meta", "large": "cpu"}


@pytest.mark.parametrize("make", [HostStaging, lambda: DeviceStaging(torch.device("cpu"))])
def test_an_area_holds_the_bits_of_versions_of_any_size(make: type[HostStaging]) -> None:
    area = make()
    for sizes in ([4, 0, 7], [4, 0, 7], [40_000, 3, 500], [9], [], [40_000, 3, 500]):
        weights = {f"w{index}": torch.randn(size) for index, size in enumerate(sizes)}
        specs, staging = pack(weights.items(), "float32", area)
        assert staging.numel() == max(64, sum(-(-size // 16) * 64 for size in sizes))
        for spec, (name, weight) in zip(specs, weights.items(), strict=True):
            assert spec.name == name
            assert torch.equal(staging[spec.offset :][: weight.nbytes].view(torch.float32), weight)
    area.close()


def test_a_device_gets_one_copy_of_the_version_and_none_while_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []  # on the device; growing names none
    empty = torch.empty

    def counted(size: int, *, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        if device is not None:
            made.append(size)
        return empty(size, dtype=dtype)

    area = DeviceStaging(torch.device("cpu"))
    monkeypatch.setattr(torch, "empty", counted)
    for _ in range(2):
        pack([(f"w{index}", torch.zeros(1000)) for index in range(20)], "float32", area)
    assert made == [20 * 4032]


def test_a_thread_that_uses_a_stream_of_another_gpu_takes_nothing_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA takes memory of each GPU that becomes a thread's current one. A thread begins on the first."""
    current, taken = [0], list[int]()

    def become(index: int) -> None:
        current[0] = index
        taken.append(index)

    class Device:
        """``torch.cuda.device``, which returns to a GPU that was not used before only in its own books."""

        def __init__(self, device: torch.device) -> None:
            self._index = device.index or 0

        def __enter__(self) -> None:
            self._before = current[0]
            become(self._index)

        def __exit__(self, *_: object) -> None:
            current[0] = self._before

    class OfStream:
        """``torch.cuda.stream``, which returns to the stream of the GPU before, and so to that GPU."""

        def __init__(self, stream: SimpleNamespace) -> None:
            self._index = stream.device.index

        def __enter__(self) -> None:
            self._before = current[0]
            if self._index != self._before:
                become(self._index)

        def __exit__(self, *_: object) -> None:
            if self._index != self._before:
                become(self._before)

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "stream", OfStream)
    with pinning.using(SimpleNamespace(device=torch.device("cuda", 1))):  # type: ignore[arg-type]
        assert current == [1]
    assert current == [0] and taken == [1]

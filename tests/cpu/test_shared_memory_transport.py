"""Weights through shared memory: the same bits on the other side, two at a time, nothing left behind."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from skyrl_train.errors import EngineError, WeightSyncError
from skyrl_train.weight_sync import shared_area
from skyrl_train.weight_sync.shared_memory import SharedMemoryReceiver, SharedMemoryTransport

WEIGHTS = {
    "a": torch.randn(3, 5),
    "scalar": torch.tensor(2.5),
    "transposed": torch.randn(4, 6).t(),
    "empty": torch.zeros(0, 3),
    "b": torch.randn(7, dtype=torch.float64),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("verify", [False, True])
def test_received_weights_are_bit_for_bit_the_trainers_in_the_engines_dtype(dtype: str, verify: bool) -> None:
    transport, receiver = SharedMemoryTransport(dtype, verify), SharedMemoryReceiver()
    update = transport.gather(WEIGHTS.items(), 3)
    assert (update.version, update.transport, update.checksum is not None) == (3, "shared_memory", verify)
    received = receiver.open_update(update)
    assert list(received) == list(WEIGHTS)
    for name, weight in WEIGHTS.items():
        assert torch.equal(received[name], weight.to(getattr(torch, dtype)))
        assert received[name].dtype == getattr(torch, dtype)
    transport.close()


def test_an_update_stays_valid_until_the_next_but_one_gather() -> None:
    transport, receiver = SharedMemoryTransport(), SharedMemoryReceiver()
    updates = [transport.gather([("w", torch.full((4,), float(version)))], version) for version in range(2)]
    views = [receiver.open_update(update)["w"] for update in updates]
    assert [view[0].item() for view in views] == [0.0, 1.0]
    third = transport.gather([("w", torch.full((4,), 2.0))], 2)
    assert third.location == updates[0].location
    assert [view[0].item() for view in views] == [2.0, 1.0], "zero-copy: the view looks at the area itself"
    transport.close()


def test_changed_bytes_are_found_by_the_checksum() -> None:
    transport, receiver = SharedMemoryTransport(verify=True), SharedMemoryReceiver()
    update = transport.gather(WEIGHTS.items(), 0)
    view = receiver.open_update(update)["a"]
    view[0, 0] += 1
    with pytest.raises(EngineError, match="checksum"):
        receiver.open_update(update)
    transport.close()


def test_a_location_that_means_other_memory_now_is_mapped_again() -> None:
    receiver, locations = SharedMemoryReceiver(), []
    for value in (1.0, 2.0):
        transport = SharedMemoryTransport()
        update = transport.gather([("w", torch.full((4,), value))], 0)
        locations.append(update.location)
        assert receiver.open_update(update)["w"][0].item() == value
        transport.close()
    assert locations[0] == locations[1], "the descriptor's number is used again, or this test shows nothing"


def test_weights_that_grow_get_a_larger_area() -> None:
    transport, receiver = SharedMemoryTransport(), SharedMemoryReceiver()
    for size in (4, 4, 40_000, 40_000):
        update = transport.gather([("w", torch.arange(size))], 0)
        assert receiver.open_update(update)["w"][-1].item() == size - 1
    transport.close()


def test_a_closed_transport_says_so_and_its_updates_cannot_be_opened() -> None:
    transport = SharedMemoryTransport()
    update = transport.gather(WEIGHTS.items(), 0)
    transport.close()
    transport.close()
    with pytest.raises(EngineError, match="still be open"):
        SharedMemoryReceiver().open_update(update)
    with pytest.raises(WeightSyncError, match="closed"):
        transport.gather(WEIGHTS.items(), 1)


def test_nothing_is_leaked() -> None:
    def descriptors_and_maps() -> tuple[int, int]:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())), Path("/proc/self/maps").read_text().count("skyrl-weights")

    before = descriptors_and_maps()
    for _ in range(3):
        transport, receiver = SharedMemoryTransport(), SharedMemoryReceiver()
        for version in range(3):
            receiver.open_update(transport.gather(WEIGHTS.items(), version))
        receiver.close()
        transport.close()
    del transport, receiver
    assert descriptors_and_maps() == before


def test_another_process_reads_the_same_bytes() -> None:
    transport = SharedMemoryTransport()
    update = transport.gather([("w", torch.tensor([1.5]))], 0)
    reader = "import struct, sys; print(struct.unpack('f', open(sys.argv[1], 'rb').read(4))[0])"
    said = subprocess.run([sys.executable, "-c", reader, update.location], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "1.5"
    transport.close()


def test_without_anonymous_memory_a_temporary_file_is_used_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_area.sys, "platform", "darwin")
    transport, receiver = SharedMemoryTransport(verify=True), SharedMemoryReceiver()
    update = transport.gather(WEIGHTS.items(), 0)
    assert Path(update.location).is_file()
    assert torch.equal(receiver.open_update(update)["a"], WEIGHTS["a"])
    transport.close()
    assert not Path(update.location).exists()

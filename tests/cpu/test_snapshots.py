"""Training goes on while the state is copied, and waits before it changes it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_worlds import backend, build_small_model, minibatch, same, weights

from skyrl_train.errors import CheckpointError
from skyrl_train.training import state as of_snapshots
from skyrl_train.training.state import POLICY_FILE, BackendState, Snapshots, write_state

pytestmark = pytest.mark.usefixtures("one_compute_thread")


def test_the_policy_moves_only_after_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = backend(build_small_model(tmp_path))
    before = weights(trained)
    may_copy, waiting, moving = threading.Event(), threading.Event(), threading.Event()
    copy, copied, step = of_snapshots._copy, trained._snapshots.copied, trained.optimizer.step

    def patient(*arguments: object) -> None:
        assert may_copy.wait(60)
        copy(*arguments)  # type: ignore[arg-type]

    def waits() -> None:
        waiting.set()
        copied()

    def recorded(*arguments: float) -> object:
        moving.set()
        return step(*arguments)

    monkeypatch.setattr(of_snapshots, "_copy", patient)
    monkeypatch.setattr(trained.optimizer, "step", recorded)
    snapshot = trained.snapshot()
    monkeypatch.setattr(trained._snapshots, "copied", waits)
    trained.accumulate(minibatch())  # a forward and a backward pass wait for nothing
    finishing = threading.Thread(target=trained.finish, args=[1])
    finishing.start()
    assert waiting.wait(60)
    assert not moving.is_set() and same(before, weights(trained))
    may_copy.set()
    finishing.join(60)
    assert moving.is_set() and not same(before, weights(trained))
    trained.save(snapshot, tmp_path)
    trained.load(tmp_path)
    assert same(before, weights(trained))


def test_memory_is_used_again_and_only_the_latest_can_be_read() -> None:
    snapshots: Snapshots[torch.Tensor] = Snapshots()
    live = torch.arange(4.0)
    first = snapshots.take(lambda buffers: buffers.copy_of("w", live))
    place = snapshots.state(first).data_ptr()
    live += 1
    second = snapshots.take(lambda buffers: buffers.copy_of("w", live))
    assert torch.equal(snapshots.state(second), live) and snapshots.state(second).data_ptr() == place
    wider = snapshots.take(lambda buffers: buffers.copy_of("w", live.double()))
    assert snapshots.state(wider).dtype == torch.float64
    with pytest.raises(CheckpointError, match="a later snapshot"):
        snapshots.state(second)


def test_weights_of_any_dtype_are_written(tmp_path: Path) -> None:
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    others = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
    written = {str(dtype): torch.tensor([[0, 1, 2]]).to(dtype) for dtype in floats + others}
    written["scalar"] = torch.tensor(3)
    write_state(BackendState(written, {}, {}), tmp_path)
    read = load_file(tmp_path / POLICY_FILE)
    assert read.keys() == written.keys()
    for name, weight in written.items():
        assert read[name].dtype == weight.dtype and read[name].equal(weight), name

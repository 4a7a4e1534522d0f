"""Only what has changed travels, and the result is the same bytes: in order, undamaged, or not at all."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_train.errors import EngineError, WeightSyncError
from skyrl_train.weight_sync.delta import MAX_DELTAS, Chain, DeltaTransport, Link, apply_delta, changes
from skyrl_train.weight_sync.receiver import WeightReceiver
from skyrl_train.weight_sync.update import TensorSpec

CPU = torch.device("cpu")
SPECIAL = [0.0, -0.0, float("nan"), float("inf"), 1.0, -1.5]


@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    before=st.lists(st.sampled_from(SPECIAL), max_size=40),
    changed=st.dictionaries(st.integers(0, 39), st.sampled_from(SPECIAL), max_size=40),
)
@settings(max_examples=60)
def test_any_change_gives_identical_bytes(dtype: torch.dtype, before: list[float], changed: dict[int, float]) -> None:
    old = torch.tensor(before, dtype=dtype)
    new = old.clone()
    for index, value in changed.items():
        if index < len(before):
            new[index] = value
    entries, num_changed = changes(old, new, "w")
    differing = sum(
        bytes(a.view(torch.uint8).tolist()) != bytes(b.view(torch.uint8).tolist())
        for a, b in zip(old.split(1), new.split(1), strict=True)
    )
    assert num_changed == (differing * new.element_size() if before else 0)
    assert sum(entry.nbytes for entry in entries.values()) <= new.nbytes
    staging = old.clone().view(torch.uint8)
    contents = safetensors.torch.save(entries)
    spec = TensorSpec("w", tuple(new.shape), str(dtype).removeprefix("torch."), 0)
    apply_delta(staging, {"w": spec}, link_of(contents), contents, 3)
    assert torch.equal(staging, new.view(torch.uint8))


def link_of(contents: bytes) -> Link:
    import zlib

    return Link(4, 3, "", zlib.crc32(contents))


def test_a_delta_is_applied_to_the_version_that_it_builds_on_only() -> None:
    entries, _ = changes(torch.zeros(9), torch.arange(9.0), "w")
    contents, staging = safetensors.torch.save(entries), torch.zeros(36, dtype=torch.uint8)
    specs = {"w": TensorSpec("w", (9,), "float32", 0)}
    for held in (2, 4):
        with pytest.raises(EngineError, match="in order"):
            apply_delta(staging, specs, link_of(contents), contents, held)
    damaged = contents[:-1] + bytes([contents[-1] ^ 1])
    with pytest.raises(EngineError, match="checksum"):
        apply_delta(staging, specs, link_of(contents), damaged, 3)
    with pytest.raises(EngineError, match="does not match"):
        apply_delta(staging, {}, link_of(contents), contents, 3)
    assert not staging.any()


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {"a": torch.randn(100, 20), "b": torch.randn(300)}


def touch(weights: Mapping[str, torch.Tensor]) -> None:
    """One word of thousands."""
    weights["a"][3, 4] += 1


def test_a_small_change_is_a_small_file_and_an_engine_that_follows_reads_nothing_else(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    with closing(DeltaTransport(str(tmp_path), "float32")) as transport, closing(WeightReceiver(CPU)) as receiver:
        receiver.open_update(transport.gather(weights.items(), 0))
        for version in (1, 2, 3):
            touch(weights)
            update = transport.gather(weights.items(), version)
            full, *deltas = Chain.parse(update).links
            assert [(link.version, link.base) for link in deltas] == [(v, v - 1) for v in range(1, version + 1)]
            assert Path(deltas[-1].path).stat().st_size < 1000
            assert update.changed_fraction == 4 / (2300 * 4)
            moved = dataclasses.replace(
                update,
                location=Chain(Chain.parse(update).id, (dataclasses.replace(full, path="/gone"), *deltas)).location(),
            )
            assert torch.equal(receiver.open_update(moved)["a"], weights["a"])


def test_an_engine_that_missed_a_version_applies_all_missed_deltas_and_a_new_one_begins_with_the_full_file(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    transport = DeltaTransport(str(tmp_path), "float32", verify=True)
    with closing(transport), closing(WeightReceiver(CPU)) as absent, closing(WeightReceiver(CPU)) as late:
        absent.open_update(transport.gather(weights.items(), 0))
        for version in (1, 2, 5):
            touch(weights)
            update = transport.gather(weights.items(), version)
        for receiver in (absent, late):
            assert torch.equal(receiver.open_update(update)["a"], weights["a"])


def test_a_version_that_is_not_newer_is_refused_at_the_trainer(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    with closing(DeltaTransport(str(tmp_path))) as transport:
        transport.gather(weights.items(), 3)
        for version in (2, 3):
            with pytest.raises(WeightSyncError, match="in order"):
                transport.gather(weights.items(), version)
        transport.gather(weights.items(), 4)


def test_a_damaged_file_is_refused_and_the_version_that_was_held_is_not_touched(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    with closing(DeltaTransport(str(tmp_path), "float32")) as transport, closing(WeightReceiver(CPU)) as receiver:
        held = receiver.open_update(transport.gather(weights.items(), 0))
        before = held["a"].clone()
        touch(weights)
        update = transport.gather(weights.items(), 1)
        path = Path(Chain.parse(update).links[-1].path)
        good = path.read_bytes()
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with pytest.raises(EngineError, match="checksum"):
            receiver.open_update(update)
        assert torch.equal(held["a"], before)
        path.write_bytes(good)
        assert torch.equal(receiver.open_update(update)["a"], weights["a"])


def test_a_new_full_file_begins_before_a_joiner_reads_more_than_two_copies(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    with closing(DeltaTransport(str(tmp_path), "float32")) as transport:
        lengths = []
        for version in range(MAX_DELTAS + 3):
            touch(weights)
            links = Chain.parse(transport.gather(weights.items(), version)).links
            lengths.append(len(links))
        assert max(lengths) == MAX_DELTAS + 1 and lengths[-1] == 2
        for version in range(100, 104):
            weights["a"].normal_()
            update = transport.gather(weights.items(), version)
            sizes = [Path(link.path).stat().st_size for link in Chain.parse(update).links]
            assert sum(sizes) < 2 * 2300 * 4 + (1 << 20)
        kept = {Path(link.path).name for link in Chain.parse(update).links}
        assert kept <= {path.name for path in tmp_path.iterdir()} and len(list(tmp_path.glob("skyrl*"))) <= 4


def test_a_failure_leaves_nothing_to_build_on(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    with closing(DeltaTransport(str(tmp_path), "float32")) as transport, closing(WeightReceiver(CPU)) as receiver:
        receiver.open_update(transport.gather(weights.items(), 0))
        with pytest.raises(WeightSyncError, match="weight_folder"):
            transport.gather(iter(_failing(weights)), 1)
        update = transport.gather(weights.items(), 1)
        assert len(Chain.parse(update).links) == 1
        assert torch.equal(receiver.open_update(update)["b"], weights["b"])


class _failing:
    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.first = iter(weights.items())
        self.given = 0

    def __iter__(self) -> _failing:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        self.given += 1
        if self.given > 1:
            raise OSError(28, "No space left on device")
        name, weight = next(self.first)
        return name, weight + 1


@pytest.mark.parametrize(
    "location", ["", "{}", json.dumps({"id": "x", "links": []}), json.dumps({"id": "x", "links": [[1]]})]
)
def test_a_location_that_is_no_chain_is_rejected(
    tmp_path: Path, weights: dict[str, torch.Tensor], location: str
) -> None:
    with closing(DeltaTransport(str(tmp_path))) as transport, closing(WeightReceiver(CPU)) as receiver:
        update = dataclasses.replace(transport.gather(weights.items(), 0), location=location)
        with pytest.raises(EngineError, match="ync the weights again"):
            receiver.open_update(update)

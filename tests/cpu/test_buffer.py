"""Finished groups that wait, in memory and on the disk."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import sys
import threading
import tracemalloc
from pathlib import Path

import pytest
from harness import Harness
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import settle

from skyrl_train.errors import StalenessError
from skyrl_train.rollout.buffer import RolloutBuffer, SpilledGroup, size_bytes
from skyrl_train.rollout.checkpoint import read_rollout_state, write_rollout_state
from skyrl_train.types import RolloutGroup, RolloutSequence, Sample


def group(group_index: int, version: int = 0, tokens: int = 40, uid: str = "u") -> RolloutGroup:
    rng = random.Random(group_index)
    sequence = RolloutSequence.of_lists(
        prompt_token_ids=[rng.randrange(300, 50_000) for _ in range(5)],
        response_ids=[rng.randrange(300, 50_000) for _ in range(tokens)],
        loss_mask=[1] * tokens,
        logprobs=[-rng.random() for _ in range(tokens)],
        versions=[version] * tokens,
        rewards=[rng.random() for _ in range(tokens)],
        stop_reason="stop",
    )
    return RolloutGroup(group_index, uid, "s", (Sample((sequence,)), Sample((sequence, sequence))), 0, {"m": 0.1})


def in_memory(buffer: RolloutBuffer) -> list[int]:
    return sorted(entry.group_index for entry in buffer if isinstance(entry, RolloutGroup))


def files(folder: Path) -> list[str]:
    gc.collect()  # a file goes with its group, which a finished write's bookkeeping may still be a cycle around
    return sorted(path.name.split("-")[1] for path in folder.glob("*"))


async def until_files(folder: Path, expected: list[str]) -> None:
    """Wait for it: a file goes with its group, which the thread that read or wrote it may hold for a moment longer."""
    while files(folder) != expected:
        await settle(1)


async def test_beyond_the_limit_the_groups_with_the_latest_deadlines_go_to_the_disk(tmp_path: Path) -> None:
    buffer = RolloutBuffer(memory_bytes=3 * size_bytes(group(0)), folder=tmp_path / "spill")
    versions = {0: 5, 1: 2, 2: 7, 3: 2, 4: 1, 5: 7}
    for group_index, version in versions.items():
        buffer.put(group(group_index, version))
        await buffer.flushed()
    assert in_memory(buffer) == [1, 3, 4]
    assert files(tmp_path / "spill") == ["0", "2", "5"]
    assert {entry.group_index: entry.oldest_version for entry in buffer} == versions, "selection needs no file"
    chosen = [entry for entry in buffer if entry.group_index in (5, 1, 0)]
    assert await buffer.load(chosen) == [group(entry.group_index, versions[entry.group_index]) for entry in chosen]
    buffer.take(chosen)
    assert in_memory(buffer) == [3, 4] and len(buffer) == 3
    del chosen
    await until_files(tmp_path / "spill", ["2"])
    await buffer.aclose()


async def test_groups_that_have_left_are_forgotten_and_the_others_keep_their_order(tmp_path: Path) -> None:
    rng = random.Random(0)
    buffer = RolloutBuffer(20 * size_bytes(group(0)), tmp_path)
    staying: list[tuple[int, int]] = []
    for group_index in range(100):
        finished = group(group_index, version=rng.randrange(200, 300))
        buffer.put(finished)
        if group_index % 5:
            buffer.take([finished])
        else:
            staying.append((finished.oldest_version, group_index))
    assert len(buffer._latest) <= 2 * len(buffer) + 1, "not all that were ever there"
    for group_index in range(100, 140):
        staying.append((rng.randrange(200, 300), group_index))
        buffer.put(group(group_index, version=staying[-1][0]))
        await buffer.flushed()
        assert in_memory(buffer) == sorted(of for _, of in sorted(staying)[:20]), "the earliest deadlines"
    await buffer.aclose()


async def test_memory_stays_bounded_however_many_groups_wait(tmp_path: Path) -> None:
    one = size_bytes(group(0, tokens=1500))
    limit = 4 * one
    buffer = RolloutBuffer(limit, tmp_path)
    tracemalloc.start()
    try:
        for group_index in range(30):
            buffer.put(group(group_index, tokens=1500))
            assert buffer.memory_bytes <= limit + one
            await buffer.flushed()
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert buffer.memory_bytes <= limit
    # The samples of a group share a sequence here, which counts three times; the estimate is of groups that do not.
    assert held < limit
    assert peak < limit + 3 * one, "one group being written, and its text"
    assert (len(buffer), len(buffer) - len(in_memory(buffer))) == (30, 26)
    await buffer.aclose()


def test_the_size_of_a_group_is_estimated_well_enough() -> None:
    tracemalloc.start()
    try:
        groups = [
            RolloutGroup(o, "u", "s", (group(o, tokens=1000).samples[0],), submitted_version=0) for o in range(20)
        ]
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.7 * held < sum(map(size_bytes, groups)) < 1.3 * held


def test_the_estimate_counts_every_array_and_every_number_that_a_stage_adds() -> None:
    def sequence(prompt: int, response: int, **added: list[float]) -> RolloutSequence:
        tokens = [[0] * response for _ in range(5)]
        return RolloutSequence.of_lists([0] * prompt, *tokens, stop_reason="stop", **added)

    def size(*sequences: RolloutSequence) -> int:
        return size_bytes(RolloutGroup(0, "u", "s", tuple(Sample((each,)) for each in sequences), 0))

    long = sequence(7, 5)
    arrays = (long.token_array, long.sampled, long.logprob_array, long.version_array, long.reward_array)
    assert size(long) == size(sequence(0, 0)) + sum(array.nbytes for array in arrays)
    assert size(long, long) == 2 * size(long)
    number = 8 + sys.getsizeof(0.5)  # a reference in the list, and the number
    for name in ("reference_logprobs", "proximal_logprobs", "values"):
        assert size(sequence(7, 5, **{name: [0.5] * 5})) == size(long) + 5 * number


async def test_a_slow_disk_does_not_block_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write = threading.Event()
    write = RolloutBuffer._write
    writers = set()

    def slow(self: RolloutBuffer, group: RolloutGroup, spilled: list[SpilledGroup]) -> None:
        assert may_write.wait(60)
        writers.add(threading.current_thread().name)
        write(self, group, spilled)

    monkeypatch.setattr(RolloutBuffer, "_write", slow)
    buffer = RolloutBuffer(0, tmp_path)
    for group_index in range(3):
        buffer.put(group(group_index))
    assert await buffer.load(list(buffer)) == [group(0), group(1), group(2)], (
        "groups that are being written are still there"
    )
    buffer.take([group(1)])
    may_write.set()
    await buffer.flushed()
    assert in_memory(buffer) == [] and len(buffer) == 2
    await until_files(tmp_path, ["0", "2"])  # a group that was taken meanwhile leaves no file
    assert buffer.memory_bytes == 0
    assert writers == {"spill_0"}, "one thread writes, so a slow disk takes no other work's threads"
    for _ in range(2):
        await buffer.aclose()
    with pytest.raises(RuntimeError, match="shutdown"):
        buffer.put(group(3))


def test_a_limit_needs_a_folder() -> None:
    with pytest.raises(ValueError, match="needs a folder"):
        RolloutBuffer(memory_bytes=10)


async def test_groups_that_cannot_be_written_stay_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    buffer = RolloutBuffer(0, tmp_path / "file" / "folder")
    with caplog.at_level(logging.ERROR):
        for group_index in range(3):
            buffer.put(group(group_index))
            await buffer.flushed()
    assert "group 0 cannot be written to disk and stays in memory" in caplog.text
    assert await buffer.load(list(buffer)) == [group(0), group(1), group(2)]
    buffer.take(list(buffer))
    assert buffer.memory_bytes == 0
    await buffer.aclose()


async def test_groups_of_a_checkpoint_that_cannot_be_written_hold_no_others_up(tmp_path: Path) -> None:
    write_rollout_state({}, [group(0)], tmp_path)
    (tmp_path / "file").write_text("")
    buffer = RolloutBuffer(0, tmp_path / "file" / "folder")
    await asyncio.to_thread(buffer.restore, read_rollout_state(tmp_path)[1])
    buffer.put(group(1))
    assert await buffer.load(list(buffer)) == [group(0), group(1)]
    await buffer.aclose()


async def test_groups_of_a_checkpoint_that_could_not_be_written_are_written_once_there_is_room(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.write_text("a file in the way")
    buffer = RolloutBuffer(2 * size_bytes(group(0)), folder)
    buffer.restore([group(0, 7), group(1, 8), group(2, 6)])
    assert in_memory(buffer) == [0, 1, 2]
    folder.unlink()
    buffer.put(group(3, 5))
    await buffer.flushed()
    assert in_memory(buffer) == [2, 3]
    await buffer.aclose()


def test_a_restored_buffer_has_the_groups_of_the_checkpoint_and_no_others(tmp_path: Path) -> None:
    one = size_bytes(group(0))
    buffer = RolloutBuffer(2 * one, tmp_path / "not" / "there")
    buffer.restore([group(5), group(6)])
    assert in_memory(buffer) == [5, 6], "the limit is not exceeded"
    buffer.restore([group(0, 3), group(1, 1), group(2, 2)])
    assert (len(buffer), in_memory(buffer), buffer.memory_bytes) == (3, [1, 2], 2 * one)


async def test_a_snapshot_can_be_written_after_its_groups_were_trained(tmp_path: Path) -> None:
    buffer = RolloutBuffer(size_bytes(group(0)), tmp_path / "spill")
    for group_index in range(4):
        buffer.put(group(group_index))
    await buffer.flushed()
    snapshot = tuple(buffer)
    buffer.take(list(buffer))
    assert len(buffer) == 0 and len(files(tmp_path / "spill")) == 3
    write_rollout_state({}, snapshot, tmp_path)
    del snapshot
    assert files(tmp_path / "spill") == []
    await buffer.aclose()
    restored = RolloutBuffer(2 * size_bytes(group(0)), tmp_path / "other")
    await asyncio.to_thread(restored.restore, read_rollout_state(tmp_path)[1])
    assert in_memory(restored) == [0, 1], "the limit holds while a checkpoint is read"
    assert sorted(await restored.load(list(restored)), key=lambda group: group.group_index) == [
        group(o) for o in range(4)
    ]


async def test_files_of_a_killed_run_are_removed_from_the_folder(tmp_path: Path) -> None:
    (tmp_path / "group-7-0.json").write_text("{")
    buffer = RolloutBuffer(0, tmp_path)
    buffer.put(group(1))
    await buffer.aclose()
    assert files(tmp_path) == ["1"]


@settings(max_examples=80)
@given(
    st.lists(st.sampled_from(["put", "put", "take", "load", "flush", "snapshot", "restore"]), max_size=40),
    st.randoms(use_true_random=False),
    st.integers(0, 4),
)
def test_a_spilling_buffer_holds_the_same_groups_as_one_in_memory(
    tmp_path_factory: pytest.TempPathFactory, events: list[str], rng: random.Random, fit: int
) -> None:
    folder = tmp_path_factory.mktemp("buffer")

    async def play() -> None:
        limit = fit * size_bytes(group(0))
        buffer, held = RolloutBuffer(limit, folder), dict[int, RolloutGroup]()
        saved, group_index = (tuple(buffer), dict(held)), 0
        for event in events:
            if event == "put":
                held[group_index] = group(group_index, version=rng.randrange(4))
                buffer.put(held[group_index])
                group_index += 1
            elif event in ("take", "load"):
                chosen = rng.sample(list(buffer), min(2, len(buffer)))
                assert await buffer.load(chosen) == [held[entry.group_index] for entry in chosen]
                if event == "take":
                    buffer.take(chosen)
                    for entry in chosen:
                        del held[entry.group_index]
            elif event == "flush":
                await buffer.flushed()
                assert buffer.memory_bytes <= limit
            elif event == "snapshot":
                saved = (tuple(buffer), dict(held))
                write_rollout_state({}, saved[0], folder)
            elif event == "restore" and (folder / "groups.jsonl").exists():
                await buffer.aclose()
                buffer, held = RolloutBuffer(limit, folder / str(group_index)), dict(saved[1])
                await asyncio.to_thread(buffer.restore, read_rollout_state(folder)[1])
            assert {entry.group_index for entry in buffer} == held.keys()
        assert {g.group_index: g for g in await buffer.load(list(buffer))} == held
        assert buffer.memory_bytes == sum(size_bytes(g) for g in held.values() if g.group_index in in_memory(buffer))
        await buffer.aclose()

    asyncio.run(play())


def test_a_group_cannot_finish_twice() -> None:
    buffer = RolloutBuffer()
    buffer.put(group(3))
    with pytest.raises(StalenessError, match="group 3 finished twice"):
        buffer.put(group(3))


async def test_without_a_limit_everything_stays_in_memory() -> None:
    buffer = RolloutBuffer()
    for group_index in range(100):
        buffer.put(group(group_index, tokens=1))
        buffer.take([group(group_index, tokens=1)] if group_index % 10 else [])
    assert in_memory(buffer) == list(range(0, 100, 10))
    assert buffer.memory_bytes == 10 * size_bytes(group(0, tokens=1))


async def test_a_run_with_spilled_groups_trains_and_resumes_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "spill"
    monkeypatch.setattr("skyrl_train.rollout.manager.RolloutBuffer", lambda *_, **__: RolloutBuffer(0, folder))
    overrides = ["trainer.mode=fully_async", "trainer.max_steps=8", "trainer.ckpt_interval=1"]
    stopped = Harness(tmp_path / "run", *overrides)
    spilled: list[int] = []

    def look(_: object) -> None:
        buffer = stopped.trainer.rollout.buffer
        spilled.append(len(buffer) - len(in_memory(buffer)))
        if stopped.trainer.global_step == 3:
            stopped.trainer.request_stop()

    stopped.backend.before_update = look
    await stopped.train()
    resumed = Harness(tmp_path / "run", *overrides)
    await resumed.train()
    assert max(spilled) > 0
    assert sorted(resumed.trained) == list(range(32))

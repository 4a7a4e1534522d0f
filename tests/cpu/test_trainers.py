"""The loops of both trainers (SEMANTICS 4 and 5) on a scripted engine."""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Harness
from scripted import ScriptedEngine, hashed_token, in_virtual_time

from skyrl_train.algorithms.advantages import ADVANTAGE_ESTIMATORS, GroupRewards, grpo
from skyrl_train.config.schema import AlgorithmConfig
from skyrl_train.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    GeneratorOutputError,
    RolloutError,
    SkyRLError,
    WeightSyncError,
)
from skyrl_train.inference.pool.fleet import FleetLimits
from skyrl_train.observability.failures import place_of
from skyrl_train.training.backend import Minibatch
from skyrl_train.training.checkpoint import Evaluated, Writer
from skyrl_train.types import GeneratorInput, GeneratorOutput

MODES = ["sync", "fully_async"]


def group_index_of(batch: GeneratorInput) -> int:
    return int(batch["trajectory_ids"][0].instance_id.rpartition("@")[2])


@pytest.mark.parametrize("mode", MODES)
async def test_every_prompt_is_trained_once_per_epoch_without_a_barrier(tmp_path: Path, mode: str) -> None:
    h = Harness(tmp_path, f"trainer.mode={mode}")  # 8 steps of 4 groups over 10 prompts: 3.2 epochs
    await h.train()
    assert sorted(h.trained) == list(range(32))
    uids = [h.trainer.rollout.prompts.source.record(o).uid for o in range(30)]
    assert all(len(set(uids[e * 10 : e * 10 + 10])) == 10 for e in range(3))
    assert h.engine.policy_version == 8 and float(h.backend.weight) == 8


@pytest.mark.parametrize("policy", ["accept", "wait"])
async def test_depth_zero_is_the_synchronous_trainer(tmp_path: Path, policy: str) -> None:
    sync = Harness(tmp_path / "sync", "trainer.mode=sync")
    asynchronous = Harness(
        tmp_path / "async",
        "trainer.fully_async.max_staleness_steps=0",
        "trainer.fully_async.generate_ahead_steps=0",
        f"trainer.fully_async.staleness_policy={policy}",
    )
    for h in (sync, asynchronous):
        await h.train()
    assert asynchronous.trained == sync.trained == list(range(32))
    for a, b in zip(asynchronous.backend.minibatches, sync.backend.minibatches, strict=True):
        for x, y in zip(a.sequences, b.sequences, strict=True):
            assert x.token_ids.equal(y.token_ids) and x.versions.equal(y.versions)
            assert x.advantages.equal(y.advantages) and x.behaviour_logprobs.equal(y.behaviour_logprobs)
    assert all(row["staleness/max"] == 0 for row in asynchronous.rows)


@pytest.mark.parametrize("mode", ["sync", "fully_async"])
async def test_a_generator_knows_whether_there_is_room_for_more_than_it_was_asked_for(
    tmp_path: Path, mode: str
) -> None:
    h = Harness(tmp_path, f"trainer.mode={mode}")
    await h.train()
    assert all(h.generator.could_begin), "what the trainer asks for has its slot"
    assert not h.generator.may_begin(), "all that will be trained was generated"


async def test_generation_continues_while_the_policy_trains(tmp_path: Path) -> None:
    h = Harness(tmp_path)
    loop = asyncio.get_running_loop()

    def update_waits_for_the_next_batch(minibatch: object) -> None:
        # The backend's thread returns only when the loop has generated all that depth 1 allows meanwhile.
        async def generated() -> None:
            want = min(h.trainer.rollout.staleness.counts.trained + 4, 32)
            await h.trainer.changed.wait_until(lambda: h.trainer.rollout.staleness.counts.accepted >= want)

        asyncio.run_coroutine_threadsafe(generated(), loop).result(timeout=300)

    h.backend.before_update = update_waits_for_the_next_batch
    await h.train()
    assert [row["staleness/max"] for row in h.rows] == [0, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(("policy", "worst"), [("wait", 2), ("accept", 6)])
async def test_a_slow_group_makes_wait_stop_and_accept_continue(tmp_path: Path, policy: str, worst: int) -> None:
    h = Harness(tmp_path, f"trainer.fully_async.staleness_policy={policy}", "trainer.fully_async.max_staleness_steps=2")
    released = asyncio.Event()

    def hold_the_second(batch: GeneratorInput) -> object:
        return released.wait() if group_index_of(batch) == 1 else None

    def release_when_stuck(minibatch: object) -> None:
        if h.trainer.global_step == 5:
            loop.call_soon_threadsafe(released.set)

    loop = asyncio.get_running_loop()
    h.generator.before = hold_the_second
    h.backend.before_update = release_when_stuck
    training = asyncio.ensure_future(h.train())
    if policy == "wait":
        await h.trainer.changed.wait_until(lambda: h.trainer.global_step == 2)
        for _ in range(2000):
            await asyncio.sleep(0)
        assert h.trainer.global_step == 2, "step 3 is the slow group's deadline: the trainer may not pass it by"
        released.set()
    await training
    assert sorted(h.trained) == list(range(32)), "nothing is dropped"
    trained_in = {o: row["step"] for row in h.rows for o in row["group_indices"]}
    assert trained_in[1] <= 3 if policy == "wait" else trained_in[1] >= 6
    # The lag counts tokens: this group had none before its release, so only its admission binds the schedule.
    assert max(row["staleness/max"] for row in h.rows) <= worst


async def test_several_minibatches_per_weight_sync_share_their_policy(tmp_path: Path) -> None:
    h = Harness(tmp_path, "trainer.mode=sync", "trainer.train_batch_size=8")
    await h.train()
    assert sorted(h.trained) == list(range(32))
    assert [row["staleness/max"] for row in h.rows] == [0, 1] * 4
    assert h.engine.calls.count("load") == 1 + 4


# Failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_a_rollout_that_raises_once_is_tried_again(tmp_path: Path, mode: str) -> None:
    h = Harness(tmp_path, f"trainer.mode={mode}")
    failed: set[int] = set()

    def fail_once(batch: GeneratorInput) -> None:
        if group_index_of(batch) == 3 and 3 not in failed:
            failed.add(3)
            raise ValueError("scripted")

    h.generator.before = fail_once
    await h.train()
    assert sorted(h.trained) == list(range(32)) and h.trainer.rollout.group_generator.retries == 1


@pytest.mark.parametrize("mode", MODES)
async def test_a_rollout_that_always_raises_gives_its_slot_to_the_next_prompt(tmp_path: Path, mode: str) -> None:
    h = Harness(tmp_path, f"trainer.mode={mode}")

    def fail_always(batch: GeneratorInput) -> None:
        if group_index_of(batch) == 3:
            raise ValueError("scripted")

    h.generator.before = fail_always
    await h.train()
    assert sorted(h.trained) == [o for o in range(33) if o != 3]
    assert h.rows[-1]["async/failed"] == 1


@pytest.mark.parametrize("mode", MODES)
async def test_too_many_failures_stop_the_run_with_a_checkpoint(tmp_path: Path, mode: str) -> None:
    h = Harness(tmp_path, f"trainer.mode={mode}", "trainer.failures.max_failed_rollouts=2")

    def fail_late(batch: GeneratorInput) -> None:
        if group_index_of(batch) >= 12:
            raise ValueError("scripted")

    h.generator.before = fail_late
    with pytest.raises(RolloutError, match="max_failed_rollouts = 2"):
        await h.train()
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == f"global_step_{h.trainer.global_step}"
    assert h.trainer.global_step >= 2
    assert h.trainer.rollout.staleness.counts.failed <= 3 + h.plan.num_workers, (
        "nothing is admitted after the failure that stops the run"
    )


async def test_on_rollout_failure_raise_stops_at_the_first(tmp_path: Path) -> None:
    h = Harness(tmp_path, "trainer.failures.on_rollout_failure=raise")

    def fail(batch: GeneratorInput) -> None:
        if group_index_of(batch) == 9:
            raise ValueError("scripted reason")

    h.generator.before = fail
    with pytest.raises(RolloutError, match="scripted reason"):
        await h.train()


@in_virtual_time
async def test_a_rollout_that_hangs_times_out(tmp_path: Path) -> None:
    h = Harness(tmp_path, "trainer.failures.rollout_timeout_s=0.5")
    h.generator.before = lambda batch: asyncio.Event().wait() if group_index_of(batch) == 2 else None
    await h.train()
    assert h.rows[-1]["async/failed"] == 1 and 2 not in h.trained


async def test_a_generator_that_cancels_itself_has_failed(tmp_path: Path) -> None:
    h = Harness(tmp_path)

    def cancel(batch: GeneratorInput) -> None:
        if group_index_of(batch) == 2:
            raise asyncio.CancelledError

    h.generator.before = cancel
    await h.train()
    assert h.rows[-1]["async/failed"] == 1 and len(h.trained) == 32


def _ragged(output: GeneratorOutput) -> None:
    output["loss_masks"][1].append(1)


def _no_logprobs(output: GeneratorOutput) -> None:
    output["rollout_logprobs"] = None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("corrupt", "field"), [(_ragged, "loss_masks"), (_no_logprobs, "rollout_logprobs")])
async def test_a_generator_that_breaks_its_contract_stops_the_run_by_name(
    tmp_path: Path, mode: str, corrupt: object, field: str
) -> None:
    h = Harness(tmp_path, f"trainer.mode={mode}")
    h.generator.after = corrupt  # type: ignore[assignment]
    with pytest.raises(GeneratorOutputError, match=field):
        await h.train()


@pytest.mark.parametrize("mode", MODES)
async def test_a_failed_weight_sync_stops_the_run_with_the_finished_step_saved(tmp_path: Path, mode: str) -> None:
    h = Harness(tmp_path, f"trainer.mode={mode}")

    def break_engine(minibatch: object) -> None:
        if h.trainer.global_step == 2:
            h.engine.fail["load"] = EngineError("scripted")

    h.backend.before_update = break_engine
    with pytest.raises(WeightSyncError, match="scripted"):
        await h.train()
    again = Harness(tmp_path, f"trainer.mode={mode}")
    await again.train()
    assert sorted(again.trained) == list(range(32))
    trained = [minibatch.step for harness in (h, again) for minibatch in harness.backend.minibatches]
    assert trained == list(range(1, 9)), "neither the step whose weight sync failed is trained again, nor one beside it"


class MortalEngine(ScriptedEngine):
    """Dies at the beginning of the phase ``dies_at``, once."""

    dies_at = ""

    async def _phase(self, name: str) -> None:
        if name == self.dies_at:
            self.dies_at = ""
            self.die()
        await super()._phase(name)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("phase", ["receive", "pause", "load", "resume"])
async def test_the_only_engine_may_die_during_a_weight_sync(tmp_path: Path, mode: str, phase: str) -> None:
    engine = MortalEngine(free_running=True)
    h = Harness(tmp_path, f"trainer.mode={mode}", engine=engine)
    h.client._pool.fleet.limits = FleetLimits(backoff_s=0.0)
    h.client.supervisor.start()

    def dies(minibatch: Minibatch) -> None:
        if minibatch.step == 3:
            engine.dies_at = phase

    h.backend.before_update = dies
    await h.train()
    assert (h.client.engine_restarts, engine.policy_version) == (1, 8)
    assert sorted(h.trained) == list(range(32))


@pytest.mark.parametrize("mode", MODES)
async def test_an_error_in_the_backend_is_raised_as_itself_and_leaves_the_last_checkpoint(
    tmp_path: Path, mode: str
) -> None:
    h = Harness(tmp_path, f"trainer.mode={mode}", "trainer.ckpt_interval=2")

    def break_backend(minibatch: object) -> None:
        if h.trainer.global_step == 5:
            raise ZeroDivisionError("scripted")

    h.backend.before_update = break_backend
    with pytest.raises(ZeroDivisionError, match="scripted"):
        await h.train()
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "global_step_4"


# Stopping and resuming ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_a_stopped_run_resumes_with_nothing_lost_and_nothing_twice(tmp_path: Path, mode: str) -> None:
    loop = asyncio.get_running_loop()
    for stop_at in (0, 3, 6):
        h = Harness(tmp_path, f"trainer.mode={mode}")

        def stop(minibatch: object, h: Harness = h, stop_at: int = stop_at) -> None:
            if h.trainer.global_step == stop_at:
                loop.call_soon_threadsafe(h.trainer.request_stop)

        h.backend.before_update = stop
        await h.train()
        assert h.trainer.global_step == stop_at + 1
    h = Harness(tmp_path, f"trainer.mode={mode}")
    await h.train()
    assert sorted(h.trained) == list(range(32))
    assert [row["step"] for row in h.rows] == list(range(1, 9))


async def test_a_run_that_waits_for_groups_stops_at_once(tmp_path: Path) -> None:
    for mode in MODES:
        h = Harness(tmp_path / mode, f"trainer.mode={mode}")
        called = asyncio.Event()

        def hang(batch: GeneratorInput, called: asyncio.Event = called) -> object:
            called.set()
            return asyncio.Event().wait()

        h.generator.before = hang
        training = asyncio.ensure_future(h.train())
        await called.wait()
        h.trainer.request_stop()
        await training
        assert h.trainer.global_step == 0


async def test_finished_groups_are_trained_after_resuming_and_not_generated_again(tmp_path: Path) -> None:
    h = Harness(tmp_path)
    loop = asyncio.get_running_loop()

    def stop_when_the_next_batch_is_finished(minibatch: object) -> None:
        async def stop() -> None:
            await h.trainer.changed.wait_until(lambda: len(h.trainer.rollout.buffer) == 8)  # with the batch in training
            h.trainer.request_stop()

        asyncio.run_coroutine_threadsafe(stop(), loop).result(timeout=300)

    h.backend.before_update = stop_when_the_next_batch_is_finished
    await h.train()
    kept = sorted(group.group_index for group in h.trainer.rollout.buffer)
    assert len(kept) == 4
    again = Harness(tmp_path)
    await again.train()
    generated = {int(call.rpartition("@")[2]) for call in again.generator.calls}
    assert generated.isdisjoint(kept)
    assert sorted(again.trained) == list(range(32))


async def test_a_resumed_synchronous_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    whole = Harness(tmp_path / "whole", "trainer.mode=sync")
    await whole.train()
    first = Harness(tmp_path / "parts", "trainer.mode=sync", "trainer.ckpt_interval=3")

    def crash(minibatch: object) -> None:
        if first.trainer.global_step == 5:
            raise ZeroDivisionError

    first.backend.before_update = crash
    with pytest.raises(ZeroDivisionError):
        await first.train()
    second = Harness(tmp_path / "parts", "trainer.mode=sync", "trainer.ckpt_interval=3")
    await second.train()
    assert second.trainer.components.checkpoints.latest().name == "global_step_8"  # type: ignore[union-attr]
    assert second.trained == whole.trained
    for a, b in zip(second.backend.minibatches, whole.backend.minibatches[3:], strict=True):
        assert all(x.token_ids.equal(y.token_ids) for x, y in zip(a.sequences, b.sequences, strict=True))


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async", "partial_rollout"])
async def test_a_finished_run_trains_on_when_it_gets_more_steps(tmp_path: Path, mode: str) -> None:
    for steps in (3, 8):
        h = Harness(tmp_path, f"trainer.mode={mode}", f"trainer.max_steps={steps}")
        await h.train()
        assert h.trainer.finished and h.trainer.global_step == steps
    assert sorted(h.trained) == list(range(32)) and float(h.backend.weight) == 8
    shorter = Harness(tmp_path, f"trainer.mode={mode}", "trainer.max_steps=5")
    await shorter.train()
    assert shorter.trainer.finished and sorted(shorter.trained) == list(range(32)), "it has trained more already"


async def test_a_policy_is_exported_at_its_interval_and_once(tmp_path: Path) -> None:
    h = Harness(tmp_path, "trainer.mode=sync", "trainer.hf_save_interval=3", "trainer.max_ckpts_to_keep=9")
    loop = asyncio.get_running_loop()

    def stop_in_step_6(part: Minibatch) -> None:
        if part.step == 6:
            loop.call_soon_threadsafe(h.trainer.request_stop)

    h.backend.before_update = stop_in_step_6
    await h.train()
    assert h.trainer.global_step == 6 and h.exported == [3, 6]
    resumed = Harness(tmp_path, "trainer.mode=sync", "trainer.hf_save_interval=4", "trainer.max_ckpts_to_keep=9")
    await resumed.train()
    assert resumed.exported == [8]
    kept = {path.name for path in h.run_folder.checkpoints.glob("global_step_*")}
    assert kept == {"global_step_3", "global_step_6", "global_step_8"}


async def test_training_and_checkpoints_continue_beside_an_export_whose_checkpoint_stays(tmp_path: Path) -> None:
    often = ["trainer.ckpt_interval=1", "trainer.hf_save_interval=3", "trainer.max_ckpts_to_keep=1"]
    h = Harness(tmp_path, "trainer.mode=sync", *often)
    trained, kept = threading.Event(), dict[int, set[str]]()

    def export(step: int) -> None:
        trained.wait()
        kept[step] = {path.name for path in h.run_folder.checkpoints.glob("global_step_*")}

    def end_of_export(part: Minibatch) -> None:
        if part.step == 7:  # the checkpoint of step 5 is written, and that of step 4 removed
            trained.set()

    h.on_export, h.backend.before_update = export, end_of_export
    await h.train()
    assert kept.keys() == {3, 6}
    assert "global_step_3" in kept[3] and "global_step_4" not in kept[3]
    assert {path.name for path in h.run_folder.checkpoints.glob("global_step_*")} <= {"global_step_6", "global_step_8"}


async def test_no_checkpoint_waits_for_an_export_and_a_stop_writes_the_exported_one_again(tmp_path: Path) -> None:
    often = ["trainer.ckpt_interval=1", "trainer.hf_save_interval=2", "trainer.max_ckpts_to_keep=1"]
    h = Harness(tmp_path, "trainer.mode=sync", *often)
    written, begun, said = list[int](), list[tuple[int, list[int]]](), threading.Event()
    store, reporter, loop = h.trainer.components.checkpoints, h.trainer.components.reporter, asyncio.get_running_loop()
    write, note = store.write, reporter.note

    def recorded_write(step: int, writer: Writer, evaluated: Evaluated) -> Path:
        folder = write(step, writer, evaluated)
        written.append(step)
        return folder

    def recorded_note(text: str) -> None:
        note(text)
        if "exports of step 2, 4, 6 still run" in text:
            said.set()

    def export(step: int) -> None:
        said.wait()
        begun.append((step, list(written)))
        assert (h.run_folder.checkpoints / f"global_step_{step}").is_dir(), "it stays until its turn has come"

    def stop_in_step_6(part: Minibatch) -> None:
        if part.step == 6:
            loop.call_soon_threadsafe(h.trainer.request_stop)

    store.write, reporter.note = recorded_write, recorded_note  # type: ignore[method-assign]
    h.on_export, h.backend.before_update = export, stop_in_step_6
    await h.train()
    assert begun == [(step, [1, 2, 3, 4, 5, 6, 6]) for step in (2, 4, 6)]


async def test_training_waits_before_the_checkpoints_of_three_exports_would_be_kept(tmp_path: Path) -> None:
    h = Harness(tmp_path, "trainer.mode=sync", "trainer.hf_save_interval=1", "trainer.max_ckpts_to_keep=1")
    store, waits, exported = h.trainer.components.checkpoints, threading.Event(), list[int]()
    enter, write, before = h.trainer.phase.enter, store.write, dict[int, list[int]]()

    def recorded_enter(name: str) -> None:
        enter(name)
        if name.startswith("may export step 3 "):
            before[0] = h.trainer.saving.exporting
            waits.set()

    def recorded_write(step: int, writer: Writer, evaluated: Evaluated) -> Path:
        before[step] = list(exported)
        return write(step, writer, evaluated)

    def export(step: int) -> None:
        waits.wait()
        exported.append(step)

    h.trainer.phase.enter, store.write, h.on_export = recorded_enter, recorded_write, export  # type: ignore[method-assign]
    await h.train()
    assert before[0] == [1, 2] and before[2] == [] and 1 in before[3] and exported == list(range(1, 9))


async def test_the_checkpoint_of_another_data_set_is_rejected(tmp_path: Path) -> None:
    await Harness(tmp_path, "trainer.max_steps=2").train()
    other = Harness(tmp_path, "data.seed=1")
    with pytest.raises(CheckpointError, match="fingerprint"):
        await other.train()


async def test_rows_are_on_the_disk_before_a_checkpoint_of_their_steps_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure, a resumed run does not repeat the steps of its checkpoint."""
    h = Harness(tmp_path, "trainer.ckpt_interval=3")
    rows, checkpoints, fsync = [0], [], os.fsync

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.name == "metrics.jsonl":
            rows.append(h.rows[-1]["step"])
        elif path.name == "manifest.json":
            checkpoints.append((int(path.parent.name.rpartition("_")[2]), rows[-1]))

    monkeypatch.setattr(os, "fsync", synced)
    await h.train()
    assert [step for step, _ in checkpoints] == [3, 6, 8]
    assert all(step <= on_disk for step, on_disk in checkpoints)


@pytest.mark.parametrize("mode", MODES)
async def test_a_step_without_a_row_of_metrics_is_trained_again(tmp_path: Path, mode: str) -> None:
    h = Harness(tmp_path, f"trainer.mode={mode}", "trainer.ckpt_interval=2")
    append = h.run_folder.metrics.append

    def full_disk(row: Mapping[str, Any]) -> None:
        if row["step"] == 4:
            raise SkyRLError("Cannot write metrics.jsonl: No space left on device")
        append(row)

    h.run_folder.metrics.append = full_disk  # type: ignore[method-assign]
    with pytest.raises(SkyRLError, match="No space left") as told:
        await h.train()
    assert told.value.__notes__ == ["Step 4 has no row of metrics, so it is not saved: it is trained again."]
    resumed = Harness(tmp_path, f"trainer.mode={mode}")
    await resumed.train()
    assert [row["step"] for row in resumed.rows] == list(range(1, 9)) and sorted(resumed.trained) == list(range(32))


async def test_a_failed_checkpoint_ends_the_run_and_leaves_the_previous_one(tmp_path: Path) -> None:
    h = Harness(tmp_path, "trainer.ckpt_interval=2")
    save = h.backend.save

    def full_disk(snapshot: dict[str, object], folder: Path) -> dict[str, str]:
        if snapshot["w"] == 4.0:
            raise OSError(28, "No space left on device")
        return save(snapshot, folder)

    h.backend.save = full_disk  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="disk"):
        await h.train()
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "global_step_2"


async def test_metrics_say_what_the_system_did(tmp_path: Path) -> None:
    h = Harness(tmp_path, "trainer.ckpt_interval=2", engine=ScriptedEngine(hashed_token, free_running=True))
    await h.train()
    row = h.rows[-1]
    assert row["async/trained"] == 32 and row["async/submitted"] == 32 and row["async/in_flight"] == 0
    assert 0 <= row["async/idle_fraction"] <= 1 and row["system/control_busy"] > 0
    for key in (
        "time/wait_for_batch",
        "time/pause",
        "reward/mean",
        "inference/tokens_per_second",
        "staleness/histogram/1",
    ):
        assert key in row
    assert "system/checkpoint_bytes" not in h.rows[0]
    # The checkpoint of step 2 is written before a snapshot for step 4 is taken.
    assert h.rows[4]["system/checkpoint_bytes"] > 100 and h.rows[4]["system/disk_free_bytes"] > 0


async def test_times_and_totals_continue_over_a_kill_and_a_resume(tmp_path: Path) -> None:
    first = Harness(tmp_path, "trainer.ckpt_interval=2")
    first.backend.before_update = lambda part: fail_at_step(first, 5)
    with pytest.raises(ZeroDivisionError):
        await first.train()
    second = Harness(tmp_path, "trainer.ckpt_interval=2")
    await second.train()

    assert second.trainer.components.reporter.start_step == 4
    elapsed_s = tokens = generated = 0.0
    for number, row in enumerate(second.rows, 1):
        elapsed_s += row["time/step"]
        tokens += row["policy/tokens"]
        generated += row["inference/generated_tokens"]
        assert row["elapsed_s"] == pytest.approx(elapsed_s, abs=0.001)  # rounded to milliseconds
        assert (row["policy/tokens_total"], row["inference/generated_tokens_total"]) == (tokens, generated)
        assert row["async/trained"] == 4 * number and row["system/rss_bytes"] > 2**20
    assert all(row["time"] > 1.7e9 for row in second.rows), "unix time"
    assert len(second.rows) == 8 and generated > 0
    assert 0 < second.rows[0]["generate/latency_s_p50"] <= second.rows[0]["generate/latency_s_p99"]
    assert all(row["inference/engine_restarts"] == 0 for row in second.rows)


def fail_at_step(h: Harness, step: int) -> None:
    if h.trainer.global_step + 1 == step:
        raise ZeroDivisionError


async def test_groups_that_training_rejects_are_generated_again_after_resuming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mode in MODES:
        h = Harness(tmp_path / mode, f"trainer.mode={mode}")

        def refuse(minibatch: object, h: Harness = h) -> None:
            if h.trainer.global_step == 2:
                raise GeneratorOutputError("scripted: a token outside the vocabulary")

        finished: list[int] = []  # those in the rejected minibatch, and further ones
        discard = h.trainer.rollout.discard_finished

        def spied(h: Harness = h, finished: list[int] = finished, discard: Callable[[], None] = discard) -> None:
            finished += [group.group_index for group in h.trainer.rollout.buffer]
            discard()

        h.backend.before_update = refuse
        monkeypatch.setattr(h.trainer.rollout, "discard_finished", spied)
        with pytest.raises(GeneratorOutputError, match="scripted"):
            await h.train()
        again = Harness(tmp_path / mode, f"trainer.mode={mode}")
        await again.train()
        assert sorted(again.trained) == list(range(32))
        generated = {int(instance_id.rpartition("@")[2]) for instance_id in again.generator.calls}
        assert len(finished) >= 4 and generated >= set(finished)


async def test_groups_that_finish_after_training_has_rejected_others_are_generated_again_too(tmp_path: Path) -> None:
    settings = ("trainer.fully_async.generate_ahead_steps=2", "trainer.fully_async.max_staleness_steps=2")
    h = Harness(tmp_path, *settings)
    loop, go, snapshot = asyncio.get_running_loop(), asyncio.Event(), h.backend.snapshot
    h.generator.before = lambda batch: go.wait() if group_index_of(batch) >= 4 else None

    def refuse(minibatch: object) -> None:
        raise GeneratorOutputError("scripted: a token outside the vocabulary")

    def after_the_others() -> dict[str, object]:
        async def ended() -> None:
            go.set()
            await h.trainer.changed.wait_until(lambda: not h.trainer.rollout.dispatcher._tasks)

        asyncio.run_coroutine_threadsafe(ended(), loop).result(timeout=300)
        return snapshot()

    h.backend.before_update, h.backend.snapshot = refuse, after_the_others  # type: ignore[method-assign]
    with pytest.raises(GeneratorOutputError, match="scripted"):
        await h.train()
    again = Harness(tmp_path, *settings)
    await again.train()
    generated = {int(instance_id.rpartition("@")[2]) for instance_id in again.generator.calls}
    assert sorted(again.trained) == sorted(generated) == list(range(32))


async def test_groups_that_have_finished_are_kept_when_the_output_of_another_one_breaks_the_contract(
    tmp_path: Path,
) -> None:
    h = Harness(tmp_path, "trainer.mode=sync")

    def others_have_finished(batch: GeneratorInput) -> object:
        three = h.trainer.changed.wait_until(lambda: len(h.trainer.rollout.buffer) == 3)
        return three if group_index_of(batch) == 3 else three.close()

    def corrupt(output: GeneratorOutput) -> None:
        if (output["trajectory_ids"] or [])[0].instance_id.endswith("@3"):
            _ragged(output)

    h.generator.before, h.generator.after = others_have_finished, corrupt
    with pytest.raises(GeneratorOutputError, match="loss_masks"):
        await h.train()
    again = Harness(tmp_path, "trainer.mode=sync")
    await again.train()
    assert again.trained == list(range(32)) and len(again.generator.calls) == 32 - 3


async def test_an_estimator_of_ones_own_that_raises_costs_neither_steps_nor_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mode in MODES:
        h = Harness(tmp_path / mode, f"trainer.mode={mode}")

        def breaks(group: GroupRewards, config: AlgorithmConfig, h: Harness = h) -> list[torch.Tensor]:
            if h.trainer.global_step == 2:
                raise ZeroDivisionError("scripted")
            return grpo(group, config)

        h.trainer.minibatches.prepare = lambda inputs: None  # type: ignore[method-assign]
        with monkeypatch.context() as patched:
            patched.setitem(ADVANTAGE_ESTIMATORS._entries, "grpo", breaks)
            with pytest.raises(
                ConfigError, match=r"advantage_estimator=grpo raised ZeroDivisionError\('scripted'\)"
            ) as caught:
                await h.train()
        assert place_of(caught.value).endswith("in breaks")
        assert (tmp_path / mode / "checkpoints" / "latest").read_text().strip() == "global_step_2"
        again = Harness(tmp_path / mode, f"trainer.mode={mode}")
        await again.train()
        assert sorted(again.trained) == list(range(32))
        assert len(again.generator.calls) <= 32 - 12, "the groups of its step are not generated again"


async def test_a_run_resumed_between_two_weight_sync_keeps_their_rhythm(tmp_path: Path) -> None:
    overrides = ("trainer.mode=sync", "trainer.train_batch_size=8", "trainer.ckpt_interval=1")
    whole = Harness(tmp_path / "whole", *overrides)
    await whole.train()
    first = Harness(tmp_path / "parts", *overrides)

    def crash(minibatch: object) -> None:
        if first.trainer.global_step == 4:
            raise ZeroDivisionError

    first.backend.before_update = crash
    with pytest.raises(ZeroDivisionError):
        await first.train()
    second = Harness(tmp_path / "parts", *overrides)
    await second.train()
    versions = [[s.versions.max().item() for m in h.backend.minibatches for s in m.sequences] for h in (whole, second)]
    assert versions[1] == versions[0][-len(versions[1]) :]
    assert second.trained == whole.trained


@pytest.mark.parametrize("metrics", [{"mine": 1.0}, {"environment/x": math.nan}, {"environment/x": "a"}])
async def test_a_metric_that_nobody_can_aggregate_is_rejected_before_training(
    tmp_path: Path, metrics: dict[str, float]
) -> None:
    h = Harness(tmp_path)
    h.generator.after = lambda output: output.update(rollout_metrics=metrics)
    with pytest.raises(GeneratorOutputError, match="rollout_metrics"):
        await h.train()


async def test_an_admission_loop_that_breaks_stops_the_run(tmp_path: Path) -> None:
    h = Harness(tmp_path)

    def broken() -> int:
        raise ZeroDivisionError("scripted")

    h.trainer.rollout.prompts.issue = broken  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        await h.train()


async def test_a_time_out_of_the_generators_own_is_not_called_ours(tmp_path: Path) -> None:
    h = Harness(tmp_path, "trainer.failures.on_rollout_failure=raise")

    def time_out(batch: GeneratorInput) -> None:
        raise TimeoutError("scripted")

    h.generator.before = time_out
    with pytest.raises(RolloutError, match=r"raised TimeoutError\('scripted'\)"):
        await h.train()

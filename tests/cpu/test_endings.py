"""How runs end and what that leaves behind: stops within a step, parts that do not close, engines that slept."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import harness
import pytest
from harness import TOKENIZER, Harness
from scripted import ScriptedEngine, scripted_update, settle
from test_modes import SlowEngine, group_index_of

from skyrl_train.errors import EngineError, RolloutError
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.interface import EngineCapabilities
from skyrl_train.inference.pool.fleet import EngineState, FleetLimits
from skyrl_train.rollout.data.dataset import RecordMaker
from skyrl_train.rollout.data.streaming import StreamingPrompts
from skyrl_train.training.backend import Minibatch
from skyrl_train.types import GeneratorInput, GeneratorOutput, PauseMode

FIRST_FAILURE = ("trainer.failures.on_rollout_failure=raise", "trainer.failures.max_rollout_retries=0")


async def test_groups_that_finish_within_the_step_that_was_resumed_are_kept_by_the_next_stop(tmp_path: Path) -> None:
    first = Harness(tmp_path, "trainer.mode=sync", "trainer.max_steps=8")
    loop = asyncio.get_running_loop()

    def stop(minibatch: Minibatch) -> None:
        if first.trainer.global_step == 1:
            loop.call_soon_threadsafe(first.trainer.request_stop)

    first.backend.before_update = stop
    await first.train()
    second = Harness(tmp_path, "trainer.mode=sync", "trainer.max_steps=8")
    second.generator.before = lambda batch: asyncio.Event().wait() if group_index_of(batch) == 11 else None
    training = asyncio.ensure_future(second.train())
    await second.trainer.changed.wait_until(lambda: len(second.trainer.rollout.buffer) == 3)
    second.trainer.request_stop()
    await training
    assert second.trainer.global_step == 2
    third = Harness(tmp_path, "trainer.mode=sync", "trainer.max_steps=8")
    await third.train()
    assert not {8, 9, 10} & {int(call.rpartition("@")[2]) for call in third.generator.calls}, "generated again"
    assert sorted(third.trained) == list(range(32))


@pytest.mark.parametrize("what", ["failed", "filtered"])
async def test_groups_that_end_between_the_last_report_and_a_stop_are_reported_by_the_resumed_run(
    tmp_path: Path, what: str
) -> None:
    setting = "trainer.failures.max_rollout_retries=0"
    if what == "filtered":
        setting = "trainer.algorithm.dynamic_sampling=filter"
    h = Harness(tmp_path, setting)
    go = asyncio.Event()

    async def ninth() -> None:
        await go.wait()
        if what == "failed":
            raise ValueError("scripted")

    def before(batch: GeneratorInput) -> Any:
        group_index = group_index_of(batch)
        return ninth() if group_index == 9 else asyncio.Event().wait() if group_index >= 8 else None

    def rewards(output: GeneratorOutput) -> None:
        ids = output["trajectory_ids"]
        assert ids is not None
        worthless = what == "filtered" and ids[0].instance_id.endswith("@9")
        output["rewards"] = [1.0, 1.0] if worthless else [0.0, 1.0]

    h.generator.before, h.generator.after = before, rewards
    training = asyncio.ensure_future(h.train())
    await h.trainer.changed.wait_until(lambda: h.trainer.global_step == 2)
    go.set()
    await h.trainer.changed.wait_until(
        lambda: bool(h.trainer.rollout.prompts.ledger.failed or h.trainer.rollout.prompts.ledger.filtered)
    )
    h.trainer.request_stop()
    await training
    again = Harness(tmp_path, setting)
    again.generator.after = rewards
    await again.train()
    reported = [o for row in again.rows for key in ("group_indices", f"{what}_group_indices") for o in row[key]]
    assert sorted(reported) == list(range(33))


async def test_a_stop_before_the_last_whole_batches_of_a_stream_leaves_them_to_be_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}=", "answer": str(i)}) + "\n" for i in range(15)))

    class Counted(StreamingPrompts):
        def __len__(self) -> int:
            return 15

    monkeypatch.setattr(
        harness, "load_dataset", lambda *_: Counted([rows], RecordMaker("prompt", "run_length"), epochs=1)
    )
    settings = (f"data.train_data=[{rows}]", "trainer.fully_async.generate_ahead_steps=3", "trainer.max_steps=30")
    h = Harness(tmp_path / "run", *settings)
    loop = asyncio.get_running_loop()

    def stop_when_all_is_generated(minibatch: Minibatch) -> None:
        async def generated() -> None:
            await h.trainer.changed.wait_until(
                lambda: h.trainer.rollout.dispatcher.exhausted and len(h.trainer.rollout.buffer) == 15
            )
            h.trainer.request_stop()

        asyncio.run_coroutine_threadsafe(generated(), loop).result(timeout=300)

    h.backend.before_update = stop_when_all_is_generated
    await h.train()
    assert h.trainer.global_step == 1 and not h.trainer.finished
    again = Harness(tmp_path / "run", *settings)
    await again.train()
    assert again.trainer.finished and len(again.trained) == 12, "three are fewer than a minibatch"


async def test_a_part_that_does_not_close_hides_no_error_and_keeps_no_other_part_open(tmp_path: Path) -> None:
    h = Harness(tmp_path, *FIRST_FAILURE)
    torn_down: list[bool] = []
    teardown = h.engine.teardown

    async def observed() -> None:
        torn_down.append(True)
        await teardown()

    async def broken() -> None:
        raise OSError("scripted: the generator does not close")

    def fail(batch: GeneratorInput) -> None:
        if group_index_of(batch) == 9:
            raise ValueError("the first cause")

    h.engine.teardown = observed  # type: ignore[method-assign]
    h.generator.aclose = broken  # type: ignore[method-assign]
    h.generator.before = fail
    with pytest.raises(RolloutError, match="the first cause"):
        await h.train()
    assert torn_down


@pytest.mark.parametrize("part", ["copies of the weights", "resources of a cluster"])
async def test_what_is_freed_last_hides_no_error_either(tmp_path: Path, part: str) -> None:
    h = Harness(tmp_path, *FIRST_FAILURE)

    def broken() -> None:
        raise OSError("scripted: it is not freed")

    def fail(batch: GeneratorInput) -> None:
        raise ValueError("the first cause")

    if part == "copies of the weights":
        h.trainer.components.syncer.close = broken  # type: ignore[method-assign]
    else:
        h.trainer.components = dataclasses.replace(h.trainer.components, release_resources=broken)
    h.generator.before = fail
    with pytest.raises(RolloutError, match="the first cause"):
        await h.train()
    again = Harness(tmp_path)
    again.trainer.components = dataclasses.replace(again.trainer.components, release_resources=broken)
    with pytest.raises(OSError, match="not freed"):
        await again.train()
    assert again.trainer.global_step == 8


async def test_a_part_that_does_not_close_is_the_error_of_a_run_without_another(tmp_path: Path) -> None:
    h = Harness(tmp_path)

    async def broken() -> None:
        raise OSError("scripted: the generator does not close")

    h.generator.aclose = broken  # type: ignore[method-assign]
    with pytest.raises(OSError, match="does not close"):
        await h.train()
    assert h.trainer.global_step == 8


async def test_a_snapshot_that_fails_does_not_hide_why_it_was_taken(tmp_path: Path) -> None:
    h = Harness(tmp_path, *FIRST_FAILURE)

    def fail(batch: GeneratorInput) -> None:
        if group_index_of(batch) == 9:
            raise ValueError("the first cause")

    def no_memory() -> dict[str, object]:
        raise MemoryError("scripted")

    h.generator.before, h.backend.snapshot = fail, no_memory  # type: ignore[method-assign]
    with pytest.raises(RolloutError, match="the first cause") as raised:
        await h.train()
    assert any("scripted" in note for note in raised.value.__notes__)


async def test_a_cancelled_run_waits_for_the_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    h = Harness(tmp_path)
    loop, writing = asyncio.get_running_loop(), asyncio.Event()
    go, ended = threading.Event(), threading.Event()
    save = h.backend.save

    def slow(snapshot: dict[str, object], folder: Path) -> None:
        loop.call_soon_threadsafe(writing.set)
        assert go.wait(300)
        save(snapshot, folder)
        ended.set()

    h.backend.save = slow  # type: ignore[method-assign]
    training = asyncio.ensure_future(h.trainer.train())
    await writing.wait()
    training.cancel()
    loop.call_later(0.05, go.set)
    with pytest.raises(asyncio.CancelledError):
        await training
    assert ended.is_set(), "nobody else may use the folder while a thread writes to it"
    h.run_folder.close()


async def test_one_step_off_does_not_publish_under_the_requests_that_a_stop_leaves_running(tmp_path: Path) -> None:
    engine = SlowEngine(free_running=True)
    h = Harness(tmp_path, "trainer.mode=one_step_off", engine=engine)
    running_at_load: list[int] = []
    load, loop = engine.load_weights, asyncio.get_running_loop()

    async def observed(update: Any) -> None:
        running_at_load.append(len(engine.running))
        await load(update)

    def stop(minibatch: Minibatch) -> None:
        if h.trainer.global_step == 2:
            loop.call_soon_threadsafe(h.trainer.request_stop)

    engine.load_weights = observed  # type: ignore[method-assign]
    h.backend.before_update = stop
    await h.train()
    assert set(running_at_load) == {0}
    again = Harness(tmp_path, "trainer.mode=one_step_off")
    await again.train()
    assert sorted(again.trained) == list(range(32)) and max(row["staleness/max"] for row in again.rows) <= 1


# Fleets that sleep -----------------------------------------------------------------------------------------------------


class Sleeper(ScriptedEngine):
    """Sleeps when told to; ``busy``: refuses to wake, once."""

    asleep = False
    busy = False

    @property
    def capabilities(self) -> EngineCapabilities:
        return dataclasses.replace(super().capabilities, sleep=True)

    async def sleep(self, level: int = 1) -> None:
        self.asleep = True

    async def wake_up(self, tags: object = None) -> None:
        if self.busy:
            self.busy = False
            raise EngineError("scripted: busy")
        self.asleep = False

    async def resume(self) -> None:
        if self.asleep:
            raise EngineError("it sleeps")
        await super().resume()


async def sleeping_pair() -> tuple[InferenceEngineClient, Sleeper, Sleeper]:
    pair = Sleeper(free_running=True), Sleeper(free_running=True)
    limits = FleetLimits(backoff_s=0.0, max_backoff_s=0.0)
    client = InferenceEngineClient(pair, TOKENIZER, limits=limits, probe_interval_s=1000)
    await client.start()
    await client.receive_weights(scripted_update(0))
    await client.load_weights(scripted_update(0), PauseMode.KEEP)
    await client.pause_generation(PauseMode.ABORT)
    await client.sleep()
    return client, *pair


async def until(condition: Any) -> None:
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came true")


async def test_an_engine_that_could_not_wake_at_first_is_woken_as_it_catches_up() -> None:
    client, _, late = await sleeping_pair()
    late.busy = True
    await client.wake_up()
    await client.receive_weights(scripted_update(1))
    await client.load_weights(scripted_update(1), PauseMode.KEEP)
    await until(lambda: client.engine_states[1] is EngineState.HEALTHY)
    assert not late.asleep and late.policy_version == 1
    await client.teardown()


async def test_an_engine_is_started_again_and_joins_only_when_the_fleet_is_awake() -> None:
    client, _, died = await sleeping_pair()
    died.alive = died.asleep = False
    client._pool.died(1, "scripted")
    await until(lambda: client.engine_states[1] is EngineState.STARTING)
    await settle(200)
    assert died.calls[-1] != "start", "its memory is the trainer's now"
    assert client.engine_states[1] is not EngineState.HEALTHY
    await client.wake_up()
    await client.resume_generation()
    await until(lambda: client.engine_states[1] is EngineState.HEALTHY)
    assert "start" in died.calls
    await client.teardown()

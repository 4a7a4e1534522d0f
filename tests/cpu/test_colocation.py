"""Engines and trainer use the same devices in turns (``trainer.placement.colocate_all``)."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed_worlds import one_rank
from harness import Harness
from scripted import ScriptedEngine, scripted_update
from test_modes import short_or_long
from test_sync_equivalence import train
from training_worlds import backend, build_small_model, config, minibatch, optimizer_state, same, weights

from skyrl_train.colocation import DeviceTurn
from skyrl_train.config import derive
from skyrl_train.config.cluster import cluster_needs
from skyrl_train.config.compare import differences
from skyrl_train.config.compose import compose
from skyrl_train.config.schema import LoraConfig
from skyrl_train.config.validate import validate
from skyrl_train.errors import ConfigError, EngineDeadError, EngineError, NoEngineError, WeightSyncError
from skyrl_train.inference.interface import EngineCapabilities, InferenceEngineInput
from skyrl_train.inference.pool.fleet import FleetLimits
from skyrl_train.simulation.engine import EngineSpeed
from skyrl_train.simulation.lengths import constant
from skyrl_train.simulation.run import Workload, simulate
from skyrl_train.simulation.training import TrainingSpeed
from skyrl_train.training.backend import Minibatch
from skyrl_train.training.distributed.sharding import local_shard
from skyrl_train.training.messages import ModelSettings, PackedSequences, Role
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.cuda_ipc import CudaIpcTransport, open_device_memory
from skyrl_train.weight_sync.update import WeightUpdate

COLOCATE = "trainer.placement.colocate_all=true"
MODES = ["sync", "partial_rollout"]
MEMORY = {"weights", "kv_cache"}


class Device:
    """What lies on the shared device, and everything that has happened to it, in order."""

    def __init__(self) -> None:
        self.held: set[str] = set(MEMORY)
        self.log: list[str] = []

    def happens(self, event: str) -> None:
        if self.log[-1:] != [event]:  # requests come in any number
            self.log.append(event)


class ColocatedEngine(ScriptedEngine):
    """Has its weights and its KV cache on the device, and fails where it is asked to use what is not there."""

    not_beside_kv_cache = frozenset({"staging copy"})

    def __init__(self, device: Device) -> None:
        super().__init__(short_or_long, free_running=True)
        self.device = device
        self.broken: set[str] = set()  # events that fail
        self.dies_at: set[str] = set()  # events at which the process is found dead, once

    @property
    def capabilities(self) -> EngineCapabilities:
        return dataclasses.replace(super().capabilities, sleep=True)

    def _happens(self, event: str) -> None:
        if event in self.dies_at:
            self.dies_at.discard(event)
            self.die()
        if not self.alive:
            self.device.held -= MEMORY
            raise EngineDeadError("scripted death")
        self.device.happens(event)
        if event in self.broken:
            raise EngineError(f"scripted: {event}")

    async def start(self) -> None:
        if not self.alive:
            self.device.happens("start")
            assert "training state" not in self.device.held, "its memory is the trainer's"
            self.device.held |= MEMORY
        await super().start()

    def _submit(self, engine_input: InferenceEngineInput) -> Any:
        assert self.device.held >= MEMORY, "a request has reached a sleeping engine"
        assert "training state" not in self.device.held
        request = super()._submit(engine_input)
        self.device.happens("generate")
        return request

    async def _run_free(self) -> None:
        while self.running and self.paused is None:
            self.tick()
            for _ in range(30):
                await asyncio.sleep(0)

    async def sleep(self, level: int = 1) -> None:
        assert self.paused is not None and not self.running
        if self.alive and self.device.held.isdisjoint(MEMORY):
            return
        self._happens(f"sleep {level}")
        self.device.held -= MEMORY

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        if self.alive and self.device.held >= set(tags or MEMORY):
            return
        self._happens(f"wake {' '.join(tags or MEMORY)}")
        assert "training state" not in self.device.held
        assert tags == ["weights"] or self.not_beside_kv_cache.isdisjoint(self.device.held), (
            "the KV cache needs its room"
        )
        self.device.held |= set(tags or MEMORY)

    async def resume(self) -> None:
        assert self.device.held >= MEMORY
        self._happens("resume")
        await super().resume()

    async def pause(self, mode: PauseMode) -> None:
        self._happens(f"pause {mode}")
        await super().pause(mode)

    async def receive_weights(self, update: WeightUpdate) -> None:
        self._happens(f"receive {update.version}")
        assert "staging copy" in self.device.held, "there is nothing to receive"
        await super().receive_weights(update)

    async def load_weights(self, update: WeightUpdate) -> None:
        self._happens(f"load {update.version}")
        assert "weights" in self.device.held
        await super().load_weights(update)


class Colocated(Harness):
    """A trainer whose parts lie on one device; the staging copy of a weight sync does too."""

    def __init__(self, folder: Path, mode: str, *overrides: str) -> None:
        self.device = device = Device()
        self.colocated = ColocatedEngine(device)
        super().__init__(folder, f"trainer.mode={mode}", COLOCATE, *overrides, engine=self.colocated)
        backend, transport = self.backend, self.trainer.components.syncer.transport

        def offload() -> None:
            device.happens("offload")
            device.held.discard("training state")

        def reload() -> None:
            device.happens("reload")
            assert device.held.isdisjoint(MEMORY | {"staging copy"}), "the engine sleeps by now"
            device.held.add("training state")

        def gather(weights: Any, version: int) -> WeightUpdate:
            device.happens(f"gather {version}")
            device.held.add("staging copy")
            return scripted_update(version)

        def release() -> bool:
            if "staging copy" in device.held:
                device.happens("release")
            device.held.discard("staging copy")
            return True

        def update(part: Minibatch) -> None:
            assert device.held == {"training state"}
            device.happens(f"train {part.step}")

        backend.offload_states, backend.reload_states = offload, reload  # type: ignore[method-assign]
        backend.before_update = update
        transport.gather, transport.release = gather, release  # type: ignore[method-assign,assignment]

    def supervised(self) -> None:
        """Restarts dead engines at once."""
        self.client._pool.fleet.limits = FleetLimits(backoff_s=0.0, max_backoff_s=0.0)
        self.client.supervisor.start()


def turn(version: int) -> list[str]:
    """The events from one policy's weight sync to the end of its requests."""
    before, after = ["offload", "wake weights", f"receive {version}", f"load {version}"], ["wake kv_cache", "resume"]
    return [f"gather {version}", *before, "release", *after, "generate"]


# The order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_each_turn_begins_when_the_other_has_left_the_device(tmp_path: Path, mode: str) -> None:
    h = Colocated(tmp_path, mode, "trainer.max_steps=3")
    await h.train()
    sleep = ["pause abort", "sleep 2", "reload"]
    steps = [event for step in (1, 2, 3) for event in (*sleep, f"train {step}", *turn(step))]
    expected = [*sleep, *turn(0), *steps]
    assert h.device.log == expected[:-1], "nothing is generated that no step trains"
    assert all(row["time/sleep"] >= 0 and row["time/offload_states"] >= 0 for row in h.rows)


async def test_the_minibatches_of_a_batch_share_a_turn(tmp_path: Path) -> None:
    h = Colocated(tmp_path, "sync", "trainer.train_batch_size=8", "trainer.max_steps=4")
    await h.train()
    assert [event for event in h.device.log if event.startswith(("sleep", "train", "load"))] == [
        "sleep 2", "load 0", "sleep 2", "train 1", "train 2", "load 2", "sleep 2", "train 3", "train 4", "load 4",
    ]  # fmt: skip


async def test_the_last_policy_is_served_for_its_evaluation(tmp_path: Path) -> None:
    """Four steps of two minibatches each; the run ends within the third batch."""
    evaluated = ("trainer.eval.interval=2", "trainer.eval.generate=2")
    h = Colocated(tmp_path, "sync", "trainer.train_batch_size=8", "trainer.max_steps=5", *evaluated)
    await h.train()
    assert h.client.policy_version == 5 and h.trainer.colocation is not None
    assert h.trainer.colocation.turn is DeviceTurn.generation
    assert h.device.log[-2:] == ["resume", "generate"]


async def test_without_the_setting_only_the_caches_of_the_trainer_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()
    engine = ColocatedEngine(device)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: device.happens("empty cache"))
    device.held.add("staging copy")  # in main memory
    monkeypatch.setattr(ColocatedEngine, "not_beside_kv_cache", frozenset())
    h = Harness(tmp_path, "trainer.mode=partial_rollout", "trainer.max_steps=1", engine=engine)
    await h.train()
    assert device.log == [
        "empty cache", "receive 0", "pause keep", "load 0", "resume", "generate",
        "pause abort", "sleep 2", "empty cache", "wake weights", "receive 1", "load 1", "wake kv_cache", "resume",
    ]  # fmt: skip


async def test_engines_that_hold_adapters_keep_their_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    h = Colocated(tmp_path, "sync", "trainer.max_steps=1")
    able = dataclasses.replace(h.colocated.capabilities, adapters=True)
    monkeypatch.setattr(ColocatedEngine, "capabilities", property(lambda engine: able))
    await h.train()
    assert [event for event in h.device.log if event.startswith("sleep")] == ["sleep 1"] * 2


async def test_engines_must_be_able_to_sleep(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot sleep"):
        await Harness(tmp_path, "trainer.mode=sync", COLOCATE).train()


# Faults ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_a_run_that_is_stopped_while_its_engine_sleeps_loses_nothing(tmp_path: Path, mode: str) -> None:
    loop = asyncio.get_running_loop()
    for stop_at in (0, 3):
        h = Colocated(tmp_path, mode, "trainer.train_batch_size=8" if mode == "sync" else "trainer.train_batch_size=4")
        checked = h.backend.before_update

        def stop(part: Minibatch, h: Colocated = h, checked: Any = checked, stop_at: int = stop_at) -> None:
            checked(part)
            if h.trainer.global_step == stop_at:
                loop.call_soon_threadsafe(h.trainer.request_stop)

        h.backend.before_update = stop
        await h.train()
        assert h.trainer.global_step == stop_at + 1
    h = Colocated(tmp_path, mode, "trainer.train_batch_size=8" if mode == "sync" else "trainer.train_batch_size=4")
    await h.train()
    assert sorted(h.trained) == list(range(32))


async def test_a_run_may_continue_with_turns_and_without(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    runs = [Harness(tmp_path, "trainer.mode=sync")]
    runs[0].backend.before_update = lambda part: loop.call_soon_threadsafe(runs[0].trainer.request_stop)
    await runs[0].train()
    runs.append(Colocated(tmp_path, "sync"))
    assert not differences(runs[0].config, runs[1].config)
    await runs[1].train()
    assert runs[1].trained == list(range(32))


FAULTS = ["pause abort", "sleep 2", "wake weights", "receive 2", "load 2", "wake kv_cache", "resume"]
IN_TURNS = [(MODES[place % 2], event) for place, event in enumerate(FAULTS)]
THE_OTHERS = [(MODES[1 - place % 2], event) for place, event in enumerate(FAULTS)]


@pytest.mark.parametrize(
    ("mode", "event"), [*IN_TURNS, *(pytest.param(*case, marks=pytest.mark.slow) for case in THE_OTHERS)]
)
async def test_what_fails_ends_the_run_with_what_it_has_trained(tmp_path: Path, mode: str, event: str) -> None:
    h = Colocated(tmp_path, mode)
    checked = h.backend.before_update

    def breaks(part: Minibatch) -> None:
        checked(part)
        if part.step == 2:
            h.colocated.broken.add(event)

    h.backend.before_update = breaks
    with pytest.raises((WeightSyncError, NoEngineError), match="scripted"):
        await h.train()
    assert h.trainer.global_step == 2
    again = Colocated(tmp_path, mode)
    await again.train()
    assert sorted(again.trained) == list(range(32))


@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.slow), "partial_rollout"])
async def test_an_engine_that_died_asleep_starts_when_the_trainer_has_left(tmp_path: Path, mode: str) -> None:
    h = Colocated(tmp_path, mode)
    h.supervised()
    checked = h.backend.before_update

    def dies(part: Minibatch) -> None:
        checked(part)
        if part.step == 2:
            h.colocated.dies_at.add("wake weights")

    h.backend.before_update = dies
    await h.train()
    assert sorted(h.trained) == list(range(32))
    at = h.device.log.index("start")
    assert h.device.log[at - 1] == "offload" and "load 2" in h.device.log[at:]


@pytest.mark.parametrize(
    ("event", "between"),
    [
        # It is up and asleep before the trainer comes.
        (
            "pause abort",
            ["start", "gather 2", "receive 2", "pause abort", "load 2", "resume", "pause abort", "sleep 2"],
        ),
        # A dead one has freed its memory. The next one starts when the trainer has left.
        ("sleep 2", []),
    ],
)
async def test_the_only_engine_may_die_as_it_is_interrupted(tmp_path: Path, event: str, between: list[str]) -> None:
    h = Colocated(tmp_path, "partial_rollout")
    h.supervised()
    checked, died = h.backend.before_update, []

    def dies(part: Minibatch) -> None:
        checked(part)
        if part.step == 2:
            h.colocated.dies_at.add(event)
            died.append(len(h.device.log))

    h.backend.before_update = dies
    await h.train()
    assert sorted(h.trained) == list(range(32)) and h.client.engine_restarts == 1
    since = [each for each in h.device.log[died[0] :] if each != "generate"]
    resumed, reloaded = since.index("resume"), since.index("reload")
    assert [each for each in since[resumed + 1 : reloaded] if each != "release"] == (between or ["pause abort"]), (
        "of the interruption before the third step"
    )
    assert ("start" in since[reloaded:]) == (not between)


async def test_an_engine_that_dies_as_it_loads_gets_the_version_again(tmp_path: Path) -> None:
    h = Colocated(tmp_path, "sync")
    h.supervised()

    def dies(output: Any) -> None:
        if h.trainer.global_step == 1:
            h.colocated.dies_at.add("load 2")

    h.generator.after = dies
    await h.train()
    assert sorted(h.trained) == list(range(32)) and h.client.engine_restarts == 1


@pytest.mark.parametrize("event", ["wake kv_cache", "resume"])
async def test_the_only_engine_may_die_as_generation_begins(tmp_path: Path, event: str) -> None:
    h = Colocated(tmp_path, "sync")
    h.supervised()

    def dies(output: Any) -> None:
        if h.trainer.global_step == 1:
            h.colocated.dies_at.add(event)

    h.generator.after = dies
    await h.train()
    assert sorted(h.trained) == list(range(32)) and h.client.engine_restarts == 1
    events = h.device.log[h.device.log.index("start") :]
    assert events[: events.index("generate")] == ["start", "gather 2", "receive 2", "pause abort", "load 2", "resume"]


@pytest.mark.parametrize("mode", ["sync", pytest.param("partial_rollout", marks=pytest.mark.slow)])
async def test_an_engine_that_starts_again_gets_weights_that_are_staged_anew(tmp_path: Path, mode: str) -> None:
    h = Colocated(tmp_path, mode)
    h.supervised()
    died: list[int] = []

    def dies(batch: Any) -> None:
        if h.trainer.global_step == 2 and not died:
            died.append(len(h.device.log))
            h.colocated.die()
            h.client._pool.died(0, "scripted")

    h.generator.before = dies
    await h.train()
    assert sorted(h.trained) == list(range(32))
    events = [event for event in h.device.log[died[0] :] if event.startswith(("start", "gather", "receive", "load"))]
    assert events[:4] == ["start", "gather 2", "receive 2", "load 2"], "its version, not an older one"


async def test_an_engine_that_dies_as_generation_ends_is_up_and_asleep_before_the_trainer_comes(tmp_path: Path) -> None:
    h = Colocated(tmp_path, "sync")
    h.supervised()
    ended: list[int] = []

    def dies(output: Any) -> None:
        ended.append(len(h.device.log))
        if len(ended) == 12:  # the last group of the third step
            h.colocated.die()
            h.client._pool.died(0, "scripted")

    h.generator.after = dies
    await h.train()
    assert sorted(h.trained) == list(range(32))
    events = h.device.log[ended[11] :]
    assert events[: events.index("reload") + 1] == [
        "start", "gather 2", "receive 2", "pause abort", "load 2", "resume", "pause abort", "sleep 2", "release", "reload",
    ]  # fmt: skip


# The backend ----------------------------------------------------------------------------------------------------------


def outside(of: Any) -> list[bool]:
    return [tensor.untyped_storage().filename is not None for tensor in of._states()]


@pytest.mark.usefixtures("one_compute_thread")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"policy__dtype": "bfloat16"}, marks=pytest.mark.slow),
        {"policy__model__lora": LoraConfig(rank=2)},
    ],
    ids=str,
)
def test_training_state_that_has_moved_out_and_back_trains_bit_for_bit(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = build_small_model(tmp_path)
    plain, moved = backend(folder, **changes), backend(folder, **changes)
    for step in range(1, 4):
        moved.reload_states()
        assert not any(outside(moved))
        expected, metrics = plain.update(minibatch(step, step)), moved.update(minibatch(step, step))
        assert metrics == expected
        moved.offload_states()
        moved.offload_states()
        assert all(outside(moved)), "parameters, masters and moments"
        assert same(weights(plain), weights(moved)), "they can be read where they are"
    assert len(list(moved._states())) >= 3 * len(weights(moved))


@pytest.mark.usefixtures("one_compute_thread")
def test_a_checkpoint_is_written_and_read_while_the_state_is_out(tmp_path: Path) -> None:
    folder = build_small_model(tmp_path)
    plain, moved, resumed = (backend(folder, policy__dtype="bfloat16") for _ in range(3))
    plain.update(minibatch())
    moved.update(minibatch())
    early = moved.snapshot()
    moved.offload_states()
    (tmp_path / "early").mkdir()
    moved.save(early, tmp_path / "early")
    (tmp_path / "late").mkdir()
    moved.save(moved.snapshot(), tmp_path / "late")
    for name in ("early", "late"):
        resumed.reload_states()
        resumed.update(minibatch(7))  # has other weights now
        resumed.offload_states()
        resumed.load(tmp_path / name)
        assert same(weights(plain), weights(resumed))
        resumed.reload_states()
    assert str(optimizer_state(plain)) == str(optimizer_state(resumed))
    assert plain.update(minibatch(2, 2)) == resumed.update(minibatch(2, 2))
    assert same(weights(plain), weights(resumed))


@pytest.mark.usefixtures("one_compute_thread")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"policy__dtype": "bfloat16"}, marks=pytest.mark.slow),
        {"policy__model__lora": LoraConfig(rank=2)},
        pytest.param({"fsdp__reshard_after_forward": False}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_shards_that_have_moved_out_and_back_train_bit_for_bit(tmp_path: Path, changes: dict[str, Any]) -> None:
    settings = config(strategy="fsdp2", fsdp__num_workers=1, **changes)
    models = {Role.policy: ModelSettings(build_small_model(tmp_path), settings, 10, 1.0, 0)}
    worker = one_rank(settings, **models)
    held = worker._held[Role.policy].worker

    def tensors() -> list[torch.Tensor]:
        moments = [value for state in held.optimizer.adamw.state.values() for value in state.values() if value.ndim]
        return [local_shard(each) for each in (*held.model.parameters(), *moments)]

    def trained(moves: bool) -> tuple[list[dict[str, float]], list[torch.Tensor]]:
        metrics = []
        for step in range(1, 4):
            sequences = minibatch(step, step)
            worker.reload_states()
            assert not any(tensor.untyped_storage().filename for tensor in tensors())
            packed = PackedSequences.of(sequences.sequences)
            metrics.append(worker.update(Role.policy, packed, dataclasses.replace(sequences, sequences=())))
            if moves:
                worker.offload_states()
                worker.offload_states()
                outside = [tensor.untyped_storage().filename is not None for tensor in tensors()]
                assert all(outside) and len(outside) >= 3 * len(list(held.optimizer.adamw.state))
        return metrics, [tensor.clone() for tensor in tensors()]

    try:
        (tmp_path / "start").mkdir()
        worker.save(Role.policy, worker.snapshot(Role.policy), tmp_path / "start")
        plain = trained(moves=False)
        worker.offload_states()
        worker.load(Role.policy, tmp_path / "start")  # a checkpoint is read where the state is
        moved = trained(moves=True)
    finally:
        worker.leave()
    assert plain[0] == moved[0]
    assert all(torch.equal(*pair) for pair in zip(plain[1], moved[1], strict=True))


# Whole runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_a_colocated_run_equals_the_plain_one_bit_for_bit(tmp_path: Path, executor: str) -> None:
    settings = ("trainer.mode=sync", "trainer.ckpt_interval=3", f"generator.inference_engine.executor={executor}")
    plain = train(tmp_path / "plain", "quickstart", *settings)
    colocated = train(tmp_path / "colocated", "quickstart", COLOCATE, *settings)
    assert colocated[0] == plain[0] and colocated[1] == plain[1]
    assert all(torch.equal(colocated[2][name], weight) for name, weight in plain[2].items())


@pytest.mark.usefixtures("ray_nodes", "one_compute_thread")
def test_a_run_in_turns_with_two_ranks_equals_the_plain_one_bit_for_bit(tmp_path: Path) -> None:
    ranks = ["trainer.strategy=fsdp2", "trainer.fsdp.num_workers=2", "trainer.fsdp.ray_num_cpus=0.5"]
    settings = ("trainer.mode=sync", "trainer.ckpt_interval=2", "trainer.max_steps=3", *ranks)
    plain = train(tmp_path / "plain", "quickstart", *settings)
    colocated = train(tmp_path / "colocated", "quickstart", COLOCATE, *settings)
    assert len(plain[0]) == 3 and colocated[0] == plain[0] and colocated[1] == plain[1]
    assert {"training-0.log", "training-1.log"} <= {path.name for path in (tmp_path / "plain").rglob("*.log")}
    assert all(torch.equal(colocated[2][name], weight) for name, weight in plain[2].items())


def test_a_simulated_turn_takes_the_time_to_sleep_and_to_wake() -> None:
    engine = EngineSpeed(slots=8, step_s=0.5, prefill_steps_per_token=0.0, sleep_s=3.0)
    work = Workload(constant(8, 10), batch_groups=8, steps=4, engine=engine, training=TrainingSpeed(per_step_s=2.0))
    plain, colocated = simulate(work, "trainer.mode=sync"), simulate(work, "trainer.mode=sync", COLOCATE)
    assert colocated.steady_s == pytest.approx(plain.steady_s * (5.0 + 2.0 + 6.0) / 7.0)


# Settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.mode=fully_async", "take turns"),
        ("trainer.mode=one_step_off", "take turns"),
        ("generator.inference_engine.backend=vllm_remote", "does not sleep"),
        ("generator.inference_engine.executor=ray", "Ray chooses"),
        ("generator.inference_engine.backend=vllm", "on a GPU only"),
        ("generator.inference_engine.device=cuda", "nothing is shared"),
        ("generator.weight_transport=nccl", "a GPU per process"),
        ("trainer.algorithm.advantage_estimator=gae", "the critic"),
        ("trainer.algorithm.proximal_policy=arrival", "proximal_policy=step"),
        ("trainer.eval.num_engines=1", "would not sleep"),
    ],
)
def test_what_cannot_take_turns_is_refused(override: str, message: str) -> None:
    config = compose("quickstart", ["trainer.mode=sync", COLOCATE, "trainer.eval.interval=1", override])
    errors = [error for error in validate(config).errors if "colocate_all" in error]
    assert len(errors) == 1 and message in errors[0], errors


def test_vllm_and_the_trainer_share_a_gpu_and_a_reference_may_not_stay() -> None:
    engine = "generator.inference_engine"
    gpu = ["trainer.mode=sync", COLOCATE, "trainer.device=cuda", f"{engine}.backend=vllm", f"{engine}.device=cuda"]
    assert not validate(compose("quickstart", gpu)).errors
    elsewhere = compose("quickstart", [*gpu, f"{engine}.devices=[1]"])
    assert ["nothing is shared" in error for error in validate(elsewhere).errors] == [True]
    on_two = compose("quickstart", [*gpu, f"{engine}.tensor_parallel_size=2"])
    assert not validate(on_two).errors and derive.weight_transport(on_two) == "shared_memory"
    assert derive.weight_transport(compose("quickstart", gpu)) == "cuda_ipc"
    awake = "+generator.inference_engine.engine_args.enable_sleep_mode=false"
    assert any("enable_sleep_mode" in error for error in validate(compose("quickstart", [*gpu, awake])).errors)
    reference = "trainer.algorithm.kl_loss_coef=0.1"
    assert any("reference policy" in error for error in validate(compose("quickstart", [*gpu, reference])).errors)
    on_cpu = [*gpu, reference, "rollout.stages.reference.device=cpu"]
    assert not validate(compose("quickstart", on_cpu)).errors


SHARED = [
    "trainer.mode=sync",
    COLOCATE,
    "trainer.strategy=fsdp2",
    "trainer.device=cuda",
    "trainer.fsdp.num_workers=8",
    "generator.inference_engine={backend: vllm, device: cuda, executor: ray, num_engines: 2, tensor_parallel_size: 4}",
]


def test_engines_share_the_gpus_of_all_ranks() -> None:
    config = compose("quickstart", SHARED)
    assert not validate(config).errors
    assert derive.engines_share_ranks(config) and derive.weight_transport(config) == "cuda_ipc"
    needs = cluster_needs(config)
    assert needs.ray_gpus == 8, "the engines need no others"
    assert not validate(compose("quickstart", [*SHARED, "generator.weight_transport=shared_memory"])).errors


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("generator.inference_engine.executor=process", "Set generator.inference_engine.executor=ray"),
        ("generator.inference_engine.num_engines=1", "do not share the same GPUs"),
        ("trainer.fsdp.num_workers=4", "do not share the same GPUs"),
        ("trainer.fsdp.ray_num_gpus=2", "each rank needs one GPU"),
        ("trainer.algorithm.kl_loss_coef=0.1", "rollout.stages.reference.executor"),
    ],
)
def test_ranks_and_engines_that_would_not_take_turns_are_refused(override: str, message: str) -> None:
    colocated = "rollout.stages.reference.executor=colocated"
    errors = validate(compose("quickstart", [*SHARED, colocated, override])).errors
    assert errors and message in errors[-1], errors


def test_without_turns_cuda_ipc_does_not_reach_engines_of_other_gpus() -> None:
    apart = [override for override in SHARED if override != COLOCATE]
    (error,) = validate(compose("quickstart", [*apart, "generator.weight_transport=cuda_ipc"])).errors
    assert "trainer.placement.colocate_all=true" in error


# CUDA IPC on several GPUs -----------------------------------------------------------------------------------------------


def test_each_engine_opens_the_copy_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[list[Any]] = []
    own = {0: "gpu-b", 1: "gpu-a", 2: "gpu-z"}

    def new_shared(*handle: Any) -> torch.UntypedStorage:
        opened.append(list(handle))
        return torch.UntypedStorage(64)

    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=own[torch.device(device).index])
    )
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", new_shared)

    def update(gpu: str, handle: bytes) -> WeightUpdate:
        parts = [7, {"bytes": base64.b64encode(handle).decode()}, 64]
        return WeightUpdate(3, "cuda_ipc", json.dumps({gpu: parts}), 64, ())

    merged = CudaIpcTransport().merged([update("gpu-a", b"A"), update("gpu-b", b"B")])
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *size, dtype, device: torch.zeros(0, dtype=dtype))
        assert open_device_memory(merged, torch.device("cuda:0")).numel() == 64
        assert open_device_memory(merged, torch.device("cuda:1")).numel() == 64
    # Each process numbers its devices itself.
    assert opened == [[0, b"B", 64], [1, b"A", 64]]
    with pytest.raises(EngineError, match="lies on GPU gpu-a, gpu-b, this engine serves from gpu-z"):
        open_device_memory(merged, torch.device("cuda:2"))


def test_copies_that_no_engine_opens_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch frees shared memory when its counter is down. It begins at one, for the receiver that closes the memory."""
    counters: dict[tuple[bytes, int], int] = {}

    def share(storage: torch.UntypedStorage) -> tuple[Any, ...]:
        counter = b"/torch_counters", len(counters)
        counters[counter] = 1
        return 0, b"memory", storage.nbytes(), 0, *counter, b"event", True

    def release(*counter: Any) -> None:
        counters[counter] -= 1

    def collect() -> None:
        assert not any(counters.values())

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", share)
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", release)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="gpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "ipc_collect", collect)
    transport = CudaIpcTransport(device="cpu")
    for _ in range(2):
        for version in range(3):
            transport.gather([("weight", torch.ones(4))], version)
        assert transport.release()
    assert len(counters) == 6

"""The settings of sharded training: errors, the plan, and restarts after the death of a worker."""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from rich.console import Console

from skyrl_train.build.processes import StartedProcesses
from skyrl_train.config import derive
from skyrl_train.config.compose import compose
from skyrl_train.config.plan import resolve
from skyrl_train.config.validate import Validation, validate
from skyrl_train.entrypoints.run import StopRequest, train_restarting
from skyrl_train.errors import CheckpointError, TrainingWorkerError
from skyrl_train.training.distributed import worker as of_ranks
from skyrl_train.training.distributed.worker import TrainingWorker
from skyrl_train.weight_sync.process_group import outward_address

FSDP = "trainer.strategy=fsdp2"
KL = "trainer.algorithm.kl_loss_coef=0.1"
REFERENCE = "rollout.stages.reference"
COLOCATED = f"{REFERENCE}.executor=colocated"
WORKERS = f"{REFERENCE}.executor=workers"


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        ([FSDP, "trainer.fsdp.num_workers=0"], "trainer.fsdp.num_workers=0: must be at least 1"),
        ([FSDP, "trainer.device=cuda:1"], "Set trainer.device=cuda"),
        ([FSDP, "trainer.device=cuda", "trainer.fsdp.ray_num_gpus=0.5"], "Set trainer.fsdp.ray_num_gpus=1"),
        ([FSDP, "trainer.device=cuda", "trainer.fsdp.ray_num_gpus=0"], "Set trainer.fsdp.ray_num_gpus=1"),
        (
            [FSDP, "trainer.fsdp.num_workers=3", "trainer.fsdp.sequence_parallel_size=2"],
            "Set trainer.fsdp.num_workers=4",
        ),
        ([FSDP, "trainer.fsdp.sequence_parallel_size=0"], "trainer.fsdp.sequence_parallel_size=0: must be at least 1"),
        ([FSDP, "trainer.fsdp.sequence_parallel_size=2", "trainer.packing=false"], "Set trainer.packing=null"),
        (
            [FSDP, "trainer.fsdp.num_workers=3", "trainer.fsdp.sequence_parallel_size=3"],
            "does not divide the policy's 4 attention heads",
        ),
        ([FSDP, "trainer.fsdp.num_workers=3", "trainer.fsdp.shard_size=2"], "Set trainer.fsdp.shard_size to a divisor"),
        ([FSDP, "trainer.fsdp.shard_size=0"], "Set trainer.fsdp.shard_size to a divisor"),
        ([FSDP, "trainer.max_restarts=-1"], "trainer.max_restarts=-1: must be at least 0"),
        (
            [FSDP, "trainer.device=cuda", KL],
            "Set rollout.stages.reference.executor=workers",
        ),
        (
            ["trainer.device=cuda", KL, "rollout.stages.reference.executor=ray"],
            "Set rollout.stages.reference.ray_num_gpus=1",
        ),
        (["rollout.stages.reference.num_workers=0"], "rollout.stages.reference.num_workers=0: must be at least 1"),
        (
            [FSDP, "trainer.device=cuda", "generator.weight_transport=cuda_ipc"],
            "Set generator.weight_transport=shared_memory",
        ),
        ([KL, COLOCATED], "Set rollout.stages.reference.executor=process, or trainer.strategy=fsdp2"),
        ([KL, WORKERS, f"{REFERENCE}.device=cuda:1"], f"Set {REFERENCE}.device=cuda"),
        (["trainer.device=cuda:1", KL, f"{REFERENCE}.executor=ray"], f"Set {REFERENCE}.device=cuda"),
        (["trainer.device=cuda", KL, WORKERS, f"{REFERENCE}.ray_num_gpus=0.5"], "which NCCL does not allow"),
    ],
)
def test_impossible_settings_are_rejected_with_a_remedy(overrides: list[str], remedy: str) -> None:
    assert any(remedy in problem for problem in validate(compose("quickstart", overrides)).errors)


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        ([FSDP, "trainer.fsdp.ray_num_gpus=1"], "Set trainer.device=cuda"),
        (["trainer.fsdp.num_workers=4"], "trainer.fsdp.num_workers with trainer.strategy=local"),
        (
            [KL, "rollout.stages.reference.executor=workers", "trainer.fsdp.shard_size=2"],
            "trainer.fsdp.shard_size with trainer.strategy=local",
        ),
        (
            ["trainer.algorithm.advantage_estimator=gae", "trainer.critic.fsdp.cpu_offload=true"],
            "trainer.critic.fsdp.cpu_offload with trainer.strategy=local",
        ),
        (
            ["rollout.stages.reference.executor=ray", "rollout.stages.reference.max_parallel=2"],
            "rollout.stages.reference.executor, rollout.stages.reference.max_parallel without a term",
        ),
        (
            ["trainer.max_restarts=1", "trainer.executor=thread"],
            "Set trainer.max_restarts=0, trainer.executor=process, or",
        ),
        ([FSDP, "trainer.executor=thread"], "trainer.executor=thread with trainer.strategy=fsdp2"),
        ([FSDP, KL, COLOCATED, "rollout.stages.reference.device=cpu"], "Set rollout.stages.reference.device=null"),
        (
            [FSDP, KL, COLOCATED, "rollout.stages.reference.max_parallel=2"],
            "Set rollout.stages.reference.max_parallel=1",
        ),
        ([KL, "rollout.stages.reference.cpu_offload=true"], "Set rollout.stages.reference.cpu_offload=null"),
        ([KL, WORKERS, f"{REFERENCE}.max_parallel=2"], f"Set {REFERENCE}.max_parallel=1"),
        ([KL, WORKERS, f"{REFERENCE}.ray_num_gpus=1"], f"or {REFERENCE}.ray_num_gpus=0"),
        ([KL, f"{REFERENCE}.num_workers=4"], f"Set {REFERENCE}.executor=workers, or leave it out"),
        ([KL, f"{REFERENCE}.ray_num_gpus=1"], f"Set {REFERENCE}.executor=ray or workers, or leave it out"),
        (
            [FSDP, KL, COLOCATED, f"{REFERENCE}.ray_num_cpus=2"],
            f"{REFERENCE}.ray_num_cpus with {COLOCATED}, so nothing",
        ),
    ],
)
def test_a_setting_without_effect_is_a_warning_with_its_reason(overrides: list[str], remedy: str) -> None:
    found = validate(compose("quickstart", overrides))
    assert found.errors == [] and any(remedy in warning for warning in found.warnings), found


def test_settings_that_work_together_have_neither_errors_nor_warnings() -> None:
    reference = [KL, "rollout.stages.reference.executor=workers"]
    for overrides in (
        [FSDP, "trainer.fsdp.num_workers=3", "trainer.max_restarts=2"],
        [FSDP, "trainer.device=cuda", *reference],
        [*reference, "trainer.max_restarts=1"],
        [*reference, "trainer.fsdp.cpu_offload=true"],  # the reference's workers have it too
        [FSDP, KL, COLOCATED, "trainer.device=cuda"],
    ):
        assert validate(compose("quickstart", overrides)) == Validation([], []), overrides


def test_workers_on_the_cpu_reserve_no_gpus() -> None:
    sharded = compose("quickstart", [FSDP, "trainer.fsdp.ray_num_gpus=1"])
    assert derive.fsdp_num_gpus(sharded.trainer) == 0
    reference = compose("quickstart", [KL, WORKERS, f"{REFERENCE}.ray_num_gpus=1"])
    assert derive.reference_num_gpus(reference) == 0


def test_the_plan_shows_the_ranks_and_the_memory_of_each() -> None:
    plan = resolve(compose("quickstart", [FSDP, "trainer.fsdp.num_workers=4", "trainer.max_restarts=2"]), 512)
    assert plan.memory is not None
    parameters = plan.memory.num_parameters
    assert plan.memory.rank_bytes == parameters * (4 + 4 + 8) // 4
    assert "4 Ray actors (FSDP2, gloo), each with 1 CPUs; up to 2 restarts" in plan.describe()
    assert "each rank" in plan.describe()
    assert "Ray actors" not in resolve(compose("quickstart", []), 512).describe()


@pytest.mark.parametrize(("split", "copies"), [(1, 4), (2, 2)])
def test_the_plan_tells_copies_from_ranks(split: int, copies: int) -> None:
    ranks = [FSDP, "trainer.fsdp.num_workers=4", f"trainer.fsdp.shard_size={split}"]
    rows = resolve(compose("quickstart", ranks), 512).describe().splitlines()
    row = {name: next(line for line in rows if line.strip().startswith(name)) for name in ("each rank", "trainer")}
    assert row["each rank"].endswith("of 4") and row["trainer"].endswith(f"in each of {copies} copies of the policy")
    assert any(line.endswith("on top of each rank") for line in rows)


@pytest.mark.parametrize(("device", "offloaded", "copies"), [("cpu", True, 5), ("cuda", False, 5), ("cuda", True, 4)])
def test_the_plan_counts_a_reference_that_lies_where_the_policy_does(device: str, offloaded: bool, copies: int) -> None:
    reference = [COLOCATED, f"rollout.stages.reference.cpu_offload={offloaded}", f"trainer.device={device}"]
    memory = resolve(compose("quickstart", [FSDP, KL, *reference, "trainer.fsdp.num_workers=4"]), 512).memory
    assert memory is not None
    assert memory.rank_bytes == copies * memory.num_parameters * 4 // 4


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        ([], "in a separate process, on cpu, {} of weights"),
        (
            [f"{REFERENCE}.executor=thread", f"{REFERENCE}.max_parallel=3", f"{REFERENCE}.device=cuda:1"],
            "a copy in each of 3 threads of this process, on cuda:1, {} of weights each",
        ),
        (
            [f"{REFERENCE}.executor=ray", f"{REFERENCE}.device=cuda", f"{REFERENCE}.ray_num_gpus=0.5"],
            "in a Ray actor of 1 CPUs and 0.5 GPUs, on cuda, {} of weights",
        ),
        (
            [WORKERS, f"{REFERENCE}.num_workers=4", f"{REFERENCE}.device=cuda", f"{REFERENCE}.cpu_offload=true"],
            "sharded over 4 Ray actors of 1 CPUs and 1 GPUs each, weights in main memory, on cuda, {} of weights",
        ),
        ([FSDP, COLOCATED], "in the policy's 2 ranks, on cpu, {} of weights"),
    ],
)
def test_the_plan_shows_place_and_memory_of_the_reference(overrides: list[str], where: str) -> None:
    plan = resolve(compose("quickstart", [KL, *overrides]), 512)
    assert plan.memory is not None
    size = f"{plan.memory.num_parameters * 4 / 2**20:,.1f} MiB"
    (row,) = [line for line in plan.describe().splitlines() if line.strip().startswith("reference")]
    assert row.split(maxsplit=1)[1] == where.format(size)
    assert "reference" not in resolve(compose("quickstart", []), 512).describe()


class Runs:
    """Scripted runs: each ends with the next of ``endings``."""

    def __init__(self, endings: Sequence[Exception | None]) -> None:
        self._endings = iter(endings)
        self.started: list[int] = []  # engines' processes that each run was given
        self.closed = 0
        self.screen = io.StringIO()
        self.stop = StopRequest()

    def go(self, max_restarts: int) -> tuple[bool, int]:
        config = compose("quickstart", [FSDP, f"trainer.max_restarts={max_restarts}"])
        engine: Any = "engine process"
        processes = StartedProcesses([engine])
        screen = Console(file=self.screen, width=200)
        return train_restarting(self._train, config, self._reporter, processes, screen, self.stop)

    def _train(self, reporter: Any, processes: StartedProcesses) -> bool:
        self.started.append(len(processes.engines))
        ending = next(self._endings)
        if ending is not None:
            raise ending
        return True

    def _reporter(self) -> Any:
        def close() -> None:
            self.closed += 1

        return SimpleNamespace(start_step=10 * len(self.started), close=close)


class TestRestarts:
    def test_a_run_goes_on_after_a_worker_has_died(self) -> None:
        runs = Runs([TrainingWorkerError("rank 1 is gone"), TrainingWorkerError("rank 0 is gone"), None])
        assert runs.go(max_restarts=2) == (True, 0)
        assert runs.started == [1, 0, 0], "processes of engines have ended with their run"
        assert runs.closed == 3
        assert "rank 1 is gone" in runs.screen.getvalue() and "restarts left: 0" in runs.screen.getvalue()

    def test_not_more_often_than_allowed(self) -> None:
        runs = Runs([TrainingWorkerError("first"), TrainingWorkerError("second"), None])
        with pytest.raises(TrainingWorkerError, match="second"):
            runs.go(max_restarts=1)
        assert len(runs.started) == runs.closed == 2

    def test_and_not_when_it_was_asked_to_stop(self) -> None:
        runs = Runs([TrainingWorkerError("ended by the same signal"), None])
        runs.stop.request()
        with pytest.raises(TrainingWorkerError, match="the same signal"):
            runs.go(max_restarts=5)
        assert len(runs.started) == runs.closed == 1

    def test_and_not_after_anything_else(self) -> None:
        runs = Runs([CheckpointError("the disk is full"), None])
        with pytest.raises(CheckpointError):
            runs.go(max_restarts=5)
        assert len(runs.started) == runs.closed == 1


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], None]], None]:
    """Join a group of one rank whose store is at an address; the function stands for all that makes groups."""

    def join(host: str, make_group: Callable[[], None]) -> None:
        for module, name in ((dist, "init_process_group"), (dist, "new_group"), (of_ranks, "shard_mesh")):
            monkeypatch.setattr(module, name, lambda *_, **__: make_group())
        worker = TrainingWorker()
        trainer = compose("quickstart", [FSDP]).trainer
        worker.join(0, 1, worker.host_store(host, 1), trainer, "trainer.fsdp")

    return join


@pytest.mark.parametrize("host", ["127.0.0.1", outward_address()])
def test_ranks_are_reached_at_the_address_that_leads_to_the_first_one(
    host: str, join: Callable[[str, Callable[[], None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo by itself takes the address of the machine's name, often 127.0.1.1, which no other node reaches."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    stores: list[dist.HashStore] = []

    def make_group() -> None:
        store = dist.HashStore()
        member = partial(dist.ProcessGroupGloo, store, size=2, timeout=timedelta(seconds=60))
        with ThreadPoolExecutor(2) as members:
            list(members.map(lambda rank: member(rank=rank), range(2)))
        stores.append(store)

    join(host, make_group)
    assert stores
    for store in stores:
        assert all(socket.inet_aton(host) in store.get(f"0/{rank}") for rank in range(2))
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_an_interface_that_the_user_names_is_kept(
    join: Callable[[str, Callable[[], None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine0")
    seen: list[str] = []
    join("127.0.0.1", lambda: seen.append(os.environ["GLOO_SOCKET_IFNAME"]))
    assert {*seen, os.environ["GLOO_SOCKET_IFNAME"]} == {"mine0"}

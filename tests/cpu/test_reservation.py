"""The resources of a run in a cluster of two nodes on this machine. Ray counts their GPUs, and nothing computes on them."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from ray.util.placement_group import placement_group_table
from ray_worlds import GPUS, RayNodes

from skyrl_train.build.trainer import _reserved_actors
from skyrl_train.config.cluster import (
    CRITIC_RANKS,
    ENGINES,
    POLICY_RANKS,
    REFERENCE_ACTORS,
    REPLICA,
    ClusterNeeds,
    RayActors,
)
from skyrl_train.config.compose import compose
from skyrl_train.config.placement import NodeResources, place_actors
from skyrl_train.errors import ConfigError, TrainingWorkerError
from skyrl_train.workers import reservation as module
from skyrl_train.workers.ray import RayPlacement
from skyrl_train.workers.reservation import Reservation

RECIPES = Path(__file__).parents[2] / "examples/recipes"
TIME_S = 100.0


@pytest.fixture(scope="module")
def nodes(ray_nodes: RayNodes) -> RayNodes:
    ray_nodes.have_far()
    return ray_nodes


@pytest.fixture
def reserved(nodes: RayNodes) -> Iterator[list[Reservation]]:
    """Reservations of a test, which end with it."""
    made: list[Reservation] = []
    yield made
    for each in made:
        each.release()


def node_ids() -> list[str]:
    """Of this machine's node, and of the other one."""
    here = ray.get_runtime_context().get_node_id()
    return [here, *(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here)]


def where(reservation: Reservation, role: str) -> list[str]:
    """Return the node of each actor of a role."""
    group = reservation.placements(role)[0].placement_group
    nodes_of = placement_group_table(group)["bundles_to_node_id"]
    return [nodes_of[placement.bundle_index] for placement in reservation.placements(role)]


def needs_of(*actors: tuple[str, int, float]) -> ClusterNeeds:
    return ClusterNeeds(0, 0, tuple(RayActors(role, number, 0.1, gpus) for role, number, gpus in actors))


FSDP = ["trainer.strategy=fsdp2", "trainer.fsdp.ray_num_cpus=0.1", "trainer.fsdp.num_workers=8"]
ENGINE = "generator.inference_engine"
IN_RAY = [f"{ENGINE}.executor=ray", f"{ENGINE}.ray_num_cpus=0.1"]
REPLICA_ON_A_GPU = "rollout.stages.proximal={executor: ray, device: cuda, ray_num_cpus: 0.1}"
LAYOUTS = {
    "8 ranks, 2 engines of 4": [*FSDP, *IN_RAY, f"{ENGINE}.num_engines=2", f"{ENGINE}.tensor_parallel_size=4"],
    "8 ranks, 8 engines": [*FSDP, *IN_RAY, f"{ENGINE}.num_engines=8"],
    "8 ranks, 1 engine of 8": [*FSDP, *IN_RAY, f"{ENGINE}.tensor_parallel_size=8"],
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", sorted(path.name for path in RECIPES.iterdir() if path.is_dir()))
def test_each_recipe_has_the_nodes_of_its_plan(recipe: str, layout: str, reserved: list[Reservation]) -> None:
    overrides = list(LAYOUTS[layout])
    if recipe == "critic_ppo":
        overrides.append("trainer.critic.placement=colocated")
    needs = _reserved_actors(compose(str(RECIPES / recipe / f"{recipe}.yaml"), overrides))
    assert needs is not None
    planned = place_actors(needs, [NodeResources(GPUS), NodeResources(GPUS)])
    assert planned is not None
    reserved.append(Reservation(needs, TIME_S, "less"))
    ids = node_ids()
    for role in (POLICY_RANKS, ENGINES):
        assert where(reserved[-1], role) == [ids[actor.node] for actor in planned if actor.role == role]


@pytest.mark.parametrize(("recipe", "machines"), [("eight_gpus", 1), ("four_nodes", 4)])
def test_a_recipe_for_several_gpus_has_the_nodes_of_its_plan(
    recipe: str, machines: int, nodes: RayNodes, reserved: list[Reservation]
) -> None:
    few_cpus = ["trainer.fsdp.ray_num_cpus=0.1", f"{ENGINE}.ray_num_cpus=0.1"]
    needs = _reserved_actors(compose(str(RECIPES / "gsm8k" / f"{recipe}.yaml"), few_cpus))
    assert needs is not None
    planned = place_actors(needs, [NodeResources(GPUS)] * machines)
    assert planned is not None
    with nodes.with_more(max(0, machines - len(node_ids()))):
        reservation = Reservation(needs, TIME_S, "less")
        real = {role: where(reservation, role) for role in (POLICY_RANKS, ENGINES)}
        here = node_ids()[0]
        reservation.release()
    in_plan = {role: [actor.node for actor in planned if actor.role == role] for role in real}
    # Only the node of this process has a number that is known before.
    pairs = {pair for role in real for pair in zip(in_plan[role], real[role], strict=True)}
    assert (0, here) in pairs
    assert len(pairs) == len({number for number, _ in pairs}) == len({node for _, node in pairs}) == machines


def test_what_computes_in_processes_of_this_machine_reserves_nothing() -> None:
    for recipe in ("gsm8k", "critic_ppo"):
        assert _reserved_actors(compose(str(RECIPES / recipe / f"{recipe}.yaml"), [])) is None
    assert _reserved_actors(compose("quickstart", [f"{ENGINE}.executor=ray"])) is None  # on the CPU: Ray places it


def test_all_actors_with_gpus_are_reserved_together(reserved: list[Reservation]) -> None:
    kl = ["trainer.algorithm.kl_loss_coef=0.1", "trainer.algorithm.advantage_estimator=gae", "trainer.device=cuda"]
    critic = ["trainer.critic.fsdp.num_workers=3", "trainer.critic.fsdp.ray_num_cpus=0.1"]
    reference = "rollout.stages.reference={executor: workers, num_workers: 2, ray_num_cpus: 0.1}"
    replica = ["trainer.algorithm.proximal_policy=arrival", REPLICA_ON_A_GPU]
    needs = _reserved_actors(compose("quickstart", [*FSDP, *kl, *critic, reference, *replica]))
    assert needs is not None
    reserved.append(Reservation(needs, TIME_S, "less"))
    here, far = node_ids()
    assert where(reserved[-1], POLICY_RANKS) == [here] * 8
    assert where(reserved[-1], CRITIC_RANKS) == [far] * 3 and where(reserved[-1], REFERENCE_ACTORS) == [far] * 2
    assert where(reserved[-1], REPLICA) == [far]


def test_what_another_run_has_is_left_out_and_comes_back(reserved: list[Reservation]) -> None:
    reserved.append(Reservation(needs_of((POLICY_RANKS, 1, 5.0)), TIME_S, "less"))
    engines = needs_of((ENGINES, 1, 4.0))
    second = Reservation(engines, TIME_S, "less")
    here, far = node_ids()
    assert where(second, ENGINES) == [far], "3 GPUs are left here"
    reserved[0].release()
    reserved[0].release()  # may be called twice
    second.release()
    third = Reservation(needs_of((POLICY_RANKS, 8, 1.0)), TIME_S, "less")
    reserved.append(third)
    assert where(third, POLICY_RANKS) == [here] * 8


def test_too_much_for_the_only_machines_is_an_error_without_waiting(nodes: RayNodes) -> None:
    with pytest.raises(
        ConfigError, match=r"3 engines with 0.1 CPU and 8 GPU each need .* free are .* Lower less, or start"
    ):
        Reservation(needs_of((ENGINES, 3, 8.0)), 0.01, "less")


def test_a_cluster_that_may_grow_is_waited_for(nodes: RayNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cluster_is_own", lambda: False)
    with pytest.raises(TrainingWorkerError, match=r"no room for 3 engines .* after 0.01 s, .* or lower less"):
        Reservation(needs_of((ENGINES, 3, 8.0)), 0.01, "less")
    again = Reservation(needs_of((ENGINES, 2, 8.0)), TIME_S, "less")  # the one before has left nothing behind
    again.release()


def test_a_node_that_starts_no_process_is_an_error_and_gives_its_gpus_back(
    nodes: RayNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = needs_of((POLICY_RANKS, 16, 1.0))
    reservation = Reservation(everything, TIME_S, "less")
    with monkeypatch.context() as patch:
        patch.setattr(module, "_ASK_S", 0.0)
        with pytest.raises(TrainingWorkerError, match=r"did not start a process .*GetTimeoutError, .* raylet's log"):
            reservation.beside_ranks(2, 8)
    Reservation(everything, TIME_S, "less").release()


@ray.remote(num_cpus=0)
def visible_gpus() -> list[int]:
    return list(ray.get_gpu_ids())


def test_engines_in_ray_do_not_get_the_gpu_of_a_trainer_in_this_process(reserved: list[Reservation]) -> None:
    overrides = ["trainer.device=cuda", *IN_RAY, f"{ENGINE}={{backend: vllm, device: cuda, num_engines: 7}}"]
    needs = _reserved_actors(compose("quickstart", overrides))
    assert needs is not None and needs.local_gpus == 1
    reserved.append(Reservation(needs, TIME_S, "less"))
    here, _ = node_ids()
    assert where(reserved[0], ENGINES) == [here] * 7
    of_engines = [visible_gpus.options(**each.options()).remote() for each in reserved[0].placements(ENGINES)]
    assert sorted(gpu for gpus in ray.get(of_engines) for gpu in gpus) == [1, 2, 3, 4, 5, 6, 7]


def test_ranks_get_the_gpus_behind_those_of_engines_in_processes(reserved: list[Reservation]) -> None:
    ranks = [*FSDP, "trainer.fsdp.num_workers=4", "trainer.device=cuda"]
    engines = f"{ENGINE}={{backend: vllm, device: cuda, num_engines: 4, devices: [%s]}}"
    needs = _reserved_actors(compose("quickstart", [*ranks, engines % "4,5,6,7"]))
    assert needs is not None
    with pytest.raises(ConfigError, match=r"4 ranks .* own processes, which have the GPUs up to number 7, leave"):
        Reservation(needs, TIME_S, "less")
    needs = _reserved_actors(compose("quickstart", [*ranks, engines % "0,1,2,3"]))
    assert needs is not None
    reserved.append(Reservation(needs, TIME_S, "less"))
    of_ranks = [visible_gpus.options(**each.options()).remote() for each in reserved[0].placements(POLICY_RANKS)]
    assert sorted(gpu for gpus in ray.get(of_ranks) for gpu in gpus) == [4, 5, 6, 7]


def test_a_gpu_of_this_process_that_ray_gave_to_another_job_is_an_error(reserved: list[Reservation]) -> None:
    reserved.append(Reservation(needs_of((POLICY_RANKS, 1, 1.0)), TIME_S, "less"))
    (first,) = ray.get(
        [visible_gpus.options(**each.options()).remote() for each in reserved[0].placements(POLICY_RANKS)]
    )
    needs = replace(needs_of((ENGINES, 1, 1.0)), local_gpus=1 + first[0])
    with pytest.raises(ConfigError, match=r"has given them to another job, .* Set trainer.strategy=fsdp2"):
        Reservation(needs, TIME_S, "less")


@pytest.mark.parametrize(
    "visible", ["0,1,2,3,4,5,6,7", "7,5,4,3,2,6,1,0", "GPU-b,GPU-a,GPU-h,GPU-g,GPU-f,GPU-e,GPU-d,GPU-c"]
)
def test_the_gpus_of_this_process_are_the_first_ones_that_it_sees(
    visible: str, reserved: list[Reservation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray, which was started with the same variable, names GPUs by it, in any order."""
    there = {"CUDA_VISIBLE_DEVICES": visible}
    monkeypatch.setattr(module, "RayPlacement", functools.partial(RayPlacement, environment=there))
    needs = replace(needs_of((ENGINES, 1, 1.0)), local_gpus=4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,9")
    with pytest.raises(
        ConfigError, match=r"compute on GPU 0, 1, 2, 9 of this machine, .* another CUDA_VISIBLE_DEVICES"
    ):
        Reservation(needs, TIME_S, "less")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    reserved.append(Reservation(needs, TIME_S, "less"))


@ray.remote
class Engine:
    def place(self) -> tuple[str, str | None]:
        return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES")


def test_engines_in_turns_see_the_gpus_of_their_ranks(reserved: list[Reservation]) -> None:
    """Ranks on both nodes: 2 here, 2 there, because another run has the other GPUs of this one. Two engines of two GPUs."""
    reserved.append(Reservation(needs_of((POLICY_RANKS, 1, 6.0)), TIME_S, "less"))
    reserved.append(Reservation(needs_of((POLICY_RANKS, 4, 1.0)), TIME_S, "less"))
    here, far = node_ids()
    with pytest.raises(ConfigError, match=r"of 4 GPUs would span several nodes: .* \[2, 2\] GPUs on theirs"):
        reserved[1].beside_ranks(1, 4)
    engines = [Engine.options(**place.options()).remote() for place in reserved[1].beside_ranks(2, 2)]
    of_ranks = [Engine.options(**rank.options()).remote() for rank in reserved[1].placements(POLICY_RANKS)]
    seen_by_ranks = ray.get([rank.place.remote() for rank in of_ranks])
    seen = ray.get([engine.place.remote() for engine in engines])
    assert [node for node, _ in seen] == [here, far]
    assert [gpus for _, gpus in seen] == ["6,7", "0,1"]
    assert {(node, gpu) for node, gpus in seen for gpu in str(gpus).split(",")} == set(seen_by_ranks)


@pytest.mark.last_in_its_file
def test_an_engine_whose_node_has_died_may_start_anywhere(nodes: RayNodes, reserved: list[Reservation]) -> None:
    reserved.append(Reservation(needs_of((POLICY_RANKS, 2, 1.0), (ENGINES, 1, 7.0)), TIME_S, "less"))
    _, far = node_ids()
    assert where(reserved[0], ENGINES) == [far]

    def is_bound(placement: RayPlacement) -> bool:
        return "scheduling_strategy" in placement.options()

    ranks, engines = reserved[0].placements(POLICY_RANKS), reserved[0].placements(ENGINES)
    assert all(is_bound(placement) for placement in (*ranks, *engines))
    nodes.lose_far()
    assert all(is_bound(placement) for placement in ranks)
    assert not is_bound(engines[0])

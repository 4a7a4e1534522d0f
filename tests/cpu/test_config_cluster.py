"""Where a run computes: GPUs of the command's machine, actors in Ray, and the nodes that hold them."""

from __future__ import annotations

import pytest

from skyrl_train.config.cluster import ClusterNeeds, RayActors, cluster_needs, node_cpus, node_memory, nodes_for
from skyrl_train.config.compose import compose
from skyrl_train.config.plan import resolve

FSDP = ["trainer.strategy=fsdp2", "trainer.device=cuda", "trainer.fsdp.num_workers=16"]
VLLM = "generator.inference_engine={backend: vllm, device: cuda, num_engines: 4, tensor_parallel_size: 4, executor: %s}"
GAE = "trainer.algorithm.advantage_estimator=gae"
RANKS = "ranks of the policy"
REFERENCE = "rollout.stages.reference={executor: workers, num_workers: 3, device: cuda}"
REWARD = "rollout.stages.reward={function: 'm:f', executor: ray, max_parallel: 5, ray_num_gpus: 0.5}"
KL = "trainer.algorithm.kl_loss_coef=0.1"


@pytest.mark.parametrize(
    ("overrides", "local_gpus", "engine_processes", "actors"),
    [
        ([], 0, 1, {}),
        (["trainer.device=cuda"], 1, 1, {}),
        (["trainer.device=cuda", GAE, "trainer.critic.device=cuda:2"], 3, 1, {}),
        (["trainer.device=cuda", KL, "rollout.stages.reference.device=cuda:1"], 2, 1, {}),
        (["trainer.device=cuda", VLLM % "process"], 16, 8, {}),
        ([VLLM % "process", "trainer.eval={interval: 5, num_engines: 1}"], 20, 10, {}),
        ([*FSDP, VLLM % "ray"], 0, 0, {RANKS: (16, 1), "engines": (4, 4)}),
        ([*FSDP, GAE, "trainer.critic.fsdp.num_workers=3"], 0, 1, {RANKS: (16, 1), "ranks of the critic": (3, 1)}),
        ([*FSDP, GAE, "trainer.critic.placement=colocated"], 0, 1, {RANKS: (16, 1)}),
        ([*FSDP, KL, "rollout.stages.reference.executor=colocated"], 0, 1, {RANKS: (16, 1)}),
        ([KL, REFERENCE], 0, 1, {"actors of the reference policy": (3, 1)}),
        (["rollout.num_actors=3", "trainer.eval={interval: 5, num_engines: 1}"], 0, 2, {"rollout actors": (6, 0)}),
        ([REWARD], 0, 1, {"reward actors": (5, 0.5)}),
    ],
)  # fmt: skip
def test_each_part_of_a_run_needs_its_processors(
    overrides: list[str], local_gpus: int, engine_processes: int, actors: dict[str, tuple[int, float]]
) -> None:
    needs = cluster_needs(compose("quickstart", overrides))
    assert {each.role: (each.number, each.gpus) for each in needs.actors} == actors
    assert (needs.local_gpus, needs.engine_processes) == (local_gpus, engine_processes)
    assert needs.ray_gpus == sum(number * gpus for number, gpus in actors.values())


@pytest.mark.parametrize(
    ("gpus", "per_node", "nodes"),
    [
        ([], 0, 1),
        ([0, 0, 0], 0, 1),
        ([1] * 16 + [4] * 4, 8, 4),
        ([3] * 3, 8, 2),  # 9 GPUs
        ([3] * 4, 8, 2),
        ([3] * 5, 8, 3),  # 15 GPUs: two of three GPUs leave two of eight
        ([0.1] * 10 + [1], 2, 1),
        ([0.1] * 11 + [1], 2, 2),
    ],
)
def test_an_actor_has_its_gpus_on_one_node(gpus: list[float], per_node: int, nodes: int) -> None:
    needs = ClusterNeeds(0, 0, tuple(RayActors("actors", 1, 1.0, each) for each in gpus))
    assert nodes_for(needs, per_node) == nodes


def test_a_node_has_cpus_for_any_actors_that_fit_its_gpus_and_for_the_command() -> None:
    ranks, engines = RayActors("ranks", 16, 4.0, 1.0), RayActors("engines", 4, 6.0, 4.0)
    assert node_cpus(ClusterNeeds(0, 0, (ranks, engines)), 4, 8) == 8 * 4 + 2  # eight ranks, and the command
    halves = RayActors("ranks", 4, 1.0, 1.0), RayActors("engines", 4, 1.0, 1.0)
    assert node_cpus(ClusterNeeds(0, 0, halves), 1, 8) == 4 + 4 + 2  # ranks and engines, on the same node
    rollouts = RayActors("rollout actors", 10, 1.0, 0.0)
    assert node_cpus(ClusterNeeds(0, 0, (ranks, rollouts)), 4, 8) == 8 * 4 + 3 + 2  # 2.5 rollout actors
    assert node_cpus(ClusterNeeds(1, 3, ()), 1, 1) == 2 + 3


def test_memory_counts_what_is_in_main_memory() -> None:
    def estimate(*overrides: str) -> int:
        config = compose("quickstart", overrides)
        memory = resolve(config, 100).memory
        return node_memory(config, cluster_needs(config), memory, 1)

    small = "trainer.policy.model.build={hidden_size: 128}"
    large = "trainer.policy.model.build={hidden_size: 4096, num_layers: 8}"
    on_gpu = [f"{part}.device=cuda" for part in ("trainer", "generator.inference_engine")]
    # Weights, gradients, moments, the engine's weights and more, in float32; on GPUs the snapshot, loading and staging remain.
    parameters = resolve(compose("quickstart", [large]), 100).memory.num_parameters  # type: ignore[union-attr]
    assert estimate(large) - estimate(small) > (4 + 12 + 8 + 16 + 4) * parameters * 0.99
    gained = estimate(large, *on_gpu) - estimate(small, *on_gpu)
    assert (4 + 12) * parameters * 0.99 < gained < (4 + 12 + 2 * 4 + 1) * parameters
    # The state that leaves a GPU in turns, each tensor in pinned memory of less than twice its bytes: weights and moments.
    in_turns = [*on_gpu, "trainer.mode=sync", "trainer.placement.colocate_all=true"]
    assert estimate(large, *in_turns) - estimate(large, *on_gpu) >= 2 * (4 + 8) * parameters
    assert node_memory(compose("quickstart"), ClusterNeeds(0, 1, ()), None, 1) == (64 + 8 + 2 * 2) * 2**30


def test_each_copy_of_the_policy_on_a_node_has_its_snapshot() -> None:
    def estimate(shard_size: int, nodes: int) -> int:
        config = compose(
            "quickstart",
            [
                "trainer.policy.model.build={hidden_size: 4096, num_layers: 8}",
                "trainer.strategy=fsdp2",
                "trainer.device=cuda",
                "trainer.fsdp.num_workers=8",
                f"trainer.fsdp.shard_size={shard_size}",
            ],
        )
        return node_memory(config, cluster_needs(config), resolve(config, 100).memory, nodes)

    memory = resolve(
        compose("quickstart", ["trainer.policy.model.build={hidden_size: 4096, num_layers: 8}"]), 100
    ).memory
    assert memory is not None
    assert estimate(2, 1) - estimate(8, 1) == 3 * memory.snapshot_bytes
    assert estimate(2, 2) - estimate(8, 2) == memory.snapshot_bytes  # four ranks, two copies

"""``plan --on``: a run on a machine that is not here. Figures are compared with sums on paper, and with what an H100 measured."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.config.cluster import CRITIC_RANKS, ENGINES, POLICY_RANKS, ClusterNeeds, RayActors
from skyrl_train.config.compose import compose
from skyrl_train.config.hardware import GPU_KINDS, Cluster, parse_cluster
from skyrl_train.config.machine_plan import (
    MachinePlan,
    decode_tokens_s,
    gemm_share,
    machine_plan,
    training_flops,
    update_seconds,
)
from skyrl_train.config.model_shape import ModelShape, model_shape
from skyrl_train.config.placement import NodeResources, place_actors
from skyrl_train.config.plan import resolve
from skyrl_train.config.schema import ModelConfig
from skyrl_train.entrypoints.command_line import main
from skyrl_train.errors import ConfigError

GSM8K = str(Path(__file__).parents[2] / "examples/recipes/gsm8k/gsm8k.yaml")
GIB = 2**30
FSDP = ["trainer.strategy=fsdp2", "generator.inference_engine.executor=ray"]
UTILIZATION = "generator.inference_engine.engine_args.gpu_memory_utilization=0.85"
QUANTIZED = "generator.inference_engine.engine_args.quantization=fp8"  # so that vLLM reloads


def plan_on(machine: str, *overrides: str, response_tokens: int | None = None) -> MachinePlan:
    return machine_plan(resolve(compose(GSM8K, overrides), 10_000), parse_cluster(machine), response_tokens)


def split(size: str, ranks: int, engines: int, tp: int = 1, *overrides: str) -> list[str]:
    """A Qwen2.5 whose ranks and engines have their own GPUs."""
    engine = "generator.inference_engine"
    return [
        *FSDP,
        UTILIZATION,
        f"trainer.policy.model.path=Qwen/Qwen2.5-{size}-Instruct",
        f"trainer.fsdp.num_workers={ranks}",
        f"{engine}.num_engines={engines}",
        f"{engine}.tensor_parallel_size={tp}",
        *overrides,
    ]


# The machine ----------------------------------------------------------------------------------------------------------


def test_a_machine_is_nodes_times_gpus_of_a_kind() -> None:
    assert parse_cluster("2x8xH100") == Cluster(2, 8, "H100")
    assert parse_cluster("4xa100-80gb") == Cluster(1, 4, "A100-80GB")
    assert parse_cluster("H200") == Cluster(1, 1, "H200")
    assert str(parse_cluster("2x8xH100")) == "2 nodes of 8 H100"
    for wrong in ("8xV100", "H100x8", "2x2x2xH100", "0xH100", ""):
        with pytest.raises(ConfigError, match=r"2x8xH100|at least 1"):
            parse_cluster(wrong)


def test_what_a_driver_reports_is_below_the_name_of_a_gpu() -> None:
    for kind, gigabytes in {"B200": 192, "H200": 141, "H100": 80, "A100-80GB": 80, "A100-40GB": 40, "L40S": 48}.items():
        assert 0.85 * gigabytes * GIB < GPU_KINDS[kind].memory_bytes < gigabytes * GIB, kind


# Who sits where -------------------------------------------------------------------------------------------------------


def needs_of(ranks: int, *engines: int, critic: int = 0) -> ClusterNeeds:
    actors = [RayActors(POLICY_RANKS, ranks, 1.0, 1.0)]
    actors += [RayActors(CRITIC_RANKS, critic, 1.0, 1.0)] if critic else []
    return ClusterNeeds(0, 0, (*actors, *(RayActors(ENGINES, 1, 1.0, float(gpus)) for gpus in engines)))


@pytest.mark.parametrize(
    ("needs", "nodes", "expected"),
    [
        (needs_of(4, 1, 1, 1, 1), [8], [0] * 8),
        (needs_of(8, 4, 4), [8, 8], [0] * 8 + [1, 1]),  # an engine is on one node
        (needs_of(12, 4), [8, 8], [0] * 8 + [1] * 5),
        (needs_of(2, 4, 4, 4), [8, 8], [0, 0, 0, 1, 1]),
        (needs_of(2, 8, 4), [8, 8], [0, 0, 1, 0]),  # the largest engine first
        (needs_of(7, 4, 4, 1), [8, 8], [0] * 7 + [1, 1, 0]),
        (needs_of(5, 4, 4, critic=3), [8, 8], [0] * 8 + [1, 1]),
        # Ranks alone would leave 2 + 2 GPUs on two nodes; the engine of 4 gets one node, and the ranks the rest.
        (needs_of(4, 4), [2, 4, 2], [0, 0, 2, 2, 1]),
        (needs_of(8, 8), [8, 4], None),
        (needs_of(1, 1), [0, 8], None),  # rank 0 belongs to the command's node
    ],
)  # fmt: skip
def test_ranks_are_neighbours_and_engines_whole(
    needs: ClusterNeeds, nodes: list[int], expected: list[int] | None
) -> None:
    placed = place_actors(needs, [NodeResources(gpus) for gpus in nodes])
    assert (None if placed is None else [actor.node for actor in placed]) == expected


@given(
    ranks=st.integers(1, 12),
    engines=st.lists(st.sampled_from([1, 2, 4, 8]), max_size=5),
    free=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    cpus=st.integers(0, 16),
)
def test_no_node_is_asked_for_more_than_it_has(ranks: int, engines: list[int], free: list[int], cpus: int) -> None:
    nodes = [NodeResources(gpus, cpus) for gpus in free]
    placed = place_actors(needs_of(ranks, *engines), nodes)
    if (
        placed is None
    ):  # whatever could be placed one by one on empty nodes was too much together, or in too small pieces
        assert sum(free) < ranks + sum(engines) or len(nodes) > 1 or cpus < ranks + len(engines)
        return
    assert [actor.role for actor in placed] == [POLICY_RANKS] * ranks + [ENGINES] * len(engines)
    assert placed[0].node == 0
    gpus, number = Counter[int](), Counter[int]()
    for actor in placed:
        gpus[actor.node] += int(actor.gpus)
        number[actor.node] += 1
    assert all(gpus[node] <= free[node] and number[node] <= cpus for node in range(len(nodes)))


def test_other_actors_without_gpus_are_left_to_ray() -> None:
    needs = needs_of(1, 1)
    more = dataclasses.replace(needs, actors=(*needs.actors, RayActors("rollout actors", 9, 1.0, 0.0)))
    assert place_actors(more, [NodeResources(2)]) == place_actors(needs, [NodeResources(2)])


# Against figures on paper ---------------------------------------------------------------------------------------------

# Parameters by hand: V h (1 or 2) + L (2 h a + 2 h kv + 3 h i + 2 h) + h, without biases
PARAMETERS = {"1.5B": 1.5436e9, "3B": 3.0858e9, "7B": 7.6154e9, "32B": 32.7633e9}
TIED = {"1.5B", "3B"}


@pytest.mark.parametrize(
    ("size", "machine", "ranks", "engines", "tp"),
    [
        ("1.5B", "8xH100", 4, 4, 1),
        ("1.5B", "2x8xH100", 8, 8, 1),
        ("1.5B", "8x8xH100", 32, 32, 1),
        ("7B", "8xH100", 4, 4, 1),
        ("7B", "2x8xH100", 8, 8, 1),
        ("7B", "8x8xH100", 32, 32, 1),
        ("32B", "2x8xH200", 8, 2, 4),
        ("32B", "8x8xH100", 32, 8, 4),
    ],
)
def test_memory_is_the_sum_on_paper(size: str, machine: str, ranks: int, engines: int, tp: int) -> None:
    there = plan_on(machine, *split(size, ranks, engines, tp))
    assert not [problem for problem in there.problems if "weight sync" not in problem.casefold()]
    training, engine = there.loads
    assert (training.number, engine.number) == (ranks, engines * tp)
    # FSDP2: float32 weights, gradients and two moments
    assert training.parts["weights, gradients, moments"] == pytest.approx(16 * PARAMETERS[size] / ranks, rel=1e-3)
    assert engine.parts["weights"] == pytest.approx(2 * PARAMETERS[size] / tp, rel=1e-3)
    gpu = parse_cluster(machine).gpu.memory_bytes
    assert sum(engine.parts.values()) == pytest.approx(0.85 * gpu, rel=1e-6)
    assert there.sync_bytes == pytest.approx(2 * PARAMETERS[size], rel=1e-3)
    nodes = Counter(actor.node for actor in there.actors if actor.role == POLICY_RANKS)
    assert all(number == 8 or len(nodes) == 1 for number in nodes.values())


@pytest.mark.parametrize(
    ("size", "machine", "overrides", "said"),
    [
        ("7B", "H100", [], "weights, gradients and moments"),  # 18 x 7.6 GB of state
        (
            "32B",
            "8xH100",
            [*split("32B", 4, 4), UTILIZATION.replace("0.85", "0.8")],
            "one request of 1536 tokens",
        ),  # 65.5 GB of 68
        ("32B", "8xH100", split("32B", 4, 1, 4), "weights, gradients and moments"),  # 131 GB for each rank
        ("7B", "8xH100", split("7B", 8, 8), "do not hold the run"),
        ("7B", "8xH100", split("7B", 4, 1, 8), "Each actor has its GPUs on one node"),
        ("7B", "8xH100", split("7B", 4, 4, 1, "generator.weight_transport=nccl"), "receive buffer"),
    ],
)
def test_what_does_not_fit_is_said_with_a_remedy(size: str, machine: str, overrides: list[str], said: str) -> None:
    there = plan_on(machine, f"trainer.policy.model.path=Qwen/Qwen2.5-{size}-Instruct", *overrides)
    (problem,) = [problem for problem in there.problems if said in problem]
    assert any(verb in problem for verb in ("Use ", "Raise ", "Lower ", "Leave "))


def test_a_weight_sync_to_eight_engines_of_a_node() -> None:
    """7B: 15.23 GB. NVLink 0.8 x 450 GB/s: 42 ms from the ranks, 42 ms to the engines; the copies at 2.88 TB/s 11 ms each."""
    sync = plan_on("2x8xH100", *split("7B", 8, 8)).syncs["nccl"]
    assert sync.gather == pytest.approx(15.23e9 * 7 / 8 / 360e9 + 2 * 15.23e9 / 2.881e12, rel=0.01)
    assert sync.transfer == pytest.approx(15.23e9 / (0.8 * 50e9), rel=0.01)  # the engines' node is another one
    here = plan_on("2x8xH100", *split("7B", 4, 4)).syncs["nccl"]
    assert here.transfer == pytest.approx(15.23e9 / 360e9, rel=0.01)
    assert here.paused == pytest.approx(339 * 0.0945e-3 + 2 * 15.23e9 / 2.881e12 + 0.015, rel=0.01)
    # The aims on paper: 7B in less than 1 s, 3B in less than 0.3 s, and only the gather in the trainer's way.
    assert sync.total < 1.0 and here.total < 0.3
    small = plan_on("8xH100", *split("3B", 4, 4)).syncs["nccl"]
    assert small.total < 0.3 and small.gather < 0.03
    # 7B paused for less than 100 ms: vLLM's reload would take 153 ms for 339 tensors.
    assert here.paused < 0.1
    by_reload = plan_on("2x8xH100", *split("7B", 4, 4, 1, QUANTIZED)).syncs["nccl"]
    assert by_reload.paused == pytest.approx(339 * 0.45e-3 + 2 * 15.23e9 / 2.881e12 + 0.015, rel=0.01)


def test_a_weight_sync_through_main_memory() -> None:
    """7B over a bus of 0.86 x 64 GB/s: 277 ms out, 277 ms in."""
    sync = plan_on("8xH100", *split("7B", 4, 4)).syncs["shared_memory"]
    assert sync.gather == pytest.approx(15.23e9 / 55e9, rel=0.01)
    assert sync.paused == pytest.approx(15.23e9 / 55e9 + 339 * 0.0945e-3 + 0.015, rel=0.01)


def test_the_slowest_node_decides_how_fast_ranks_exchange() -> None:
    """12 ranks on 8 + 4: the second node receives 8/12 by 4 network cards of 50 GB/s, so each of its ranks gets its 11/12 at
    50 x 4 x 11 / 8 = 275 GB/s. 8 ranks on 7 + 1, beside an engine that is not in Ray: 7/8 by one card."""
    for ranks, others, rate in (
        (12, [], 0.8 * 275e9),
        (16, [], 0.8 * 450e9),
        (8, ["generator.inference_engine.executor=process", "generator.inference_engine.devices=[0]"], 0.8 * 50e9),
    ):
        sync = plan_on("3x8xH100", *split("7B", ranks, 1), *others).syncs["nccl"]
        assert sync.gather == pytest.approx(15.23e9 * (ranks - 1) / ranks / rate + 2 * 15.23e9 / 2.881e12, rel=0.01)


def test_copies_of_the_policy_add_up_their_gradients_over_the_network() -> None:
    """8B on 2 x 8 ranks without compute: two gathers of 2 bytes and a sum of 4 within a node, and half of an eighth of the
    gradients to the other node and back, by one card each; then AdamW over an eighth."""
    shape, share = qwen3("8B"), 0.8
    trainer = compose(GSM8K, [*split("7B", 16, 1), "trainer.fsdp.shard_size=8"]).trainer
    within = 8 * shape.num_parameters * 7 / 8 / (share * 450e9)
    across = 2 * 4 * shape.num_parameters / 8 / 2 / (share * 50e9)
    optimizer = shape.num_parameters / 8 * 36 / (0.86 * 3.35e12)
    for nodes, seconds in (([0] * 8 + [1] * 8, within + across), ([0] * 16, within + across / 9)):
        update = update_seconds(trainer, shape, 1, 1, 1, Cluster(2, 8, "H100"), nodes)
        assert update == pytest.approx(seconds + optimizer, rel=1e-6)


def test_rank_0_holds_the_weights_on_their_way_to_the_engines() -> None:
    """32B on 8 ranks: 65.5 GB of state, and with NCCL two copies of 65.5 GB on the first one's GPU of 150 GB."""
    overrides = ["generator.inference_engine.engine_args.gpu_memory_utilization=0.3", "generator.pause_timeout_s=300"]
    by_gloo, by_nccl = (
        plan_on("2x8xH200", *split("32B", 8, 2, 4), *overrides, f"generator.weight_transport={transport}").problems
        for transport in ("gloo", "nccl")
    )
    assert by_gloo == ()
    (problem,) = by_nccl
    assert problem.startswith("Rank 0 of 8 ranks: ") and "another generator.weight_transport" in problem


def test_the_evaluations_engines_have_gpus_too() -> None:
    there = plan_on("8xH100", *split("7B", 4, 3), "trainer.eval.num_engines=1")
    assert [(load.who, load.number) for load in there.loads] == [("training", 4), ("engine", 4)]
    assert there.loads[1] == plan_on("8xH100", *split("7B", 4, 4)).loads[1]


REFERENCE, PROXIMAL = "rollout.stages.reference", "rollout.stages.proximal"


@pytest.mark.parametrize(
    ("overrides", "loads"),
    [
        # A replica has the engines' dtype, a whole copy of a reference the policy's, and shards are float32.
        ([f"{PROXIMAL}={{executor: ray, device: cuda}}"], [("replica", 1, 2.0)]),
        ([f"{PROXIMAL}={{executor: ray, device: cpu}}"], []),
        (["KL", f"{REFERENCE}={{executor: ray, max_parallel: 2, ray_num_gpus: 1}}"], [("reference", 2, 2.0)]),
        (["KL", f"{REFERENCE}={{executor: workers, num_workers: 2}}"], [("reference", 2, 4 / 2)]),
        (["KL", f"{REFERENCE}={{executor: workers, num_workers: 2, cpu_offload: true}}"], []),
        (["KL", f"{REFERENCE}.executor=colocated"], []),  # in the ranks' weights
    ],
)
def test_models_that_only_score_have_gpus_too(overrides: list[str], loads: list[tuple[str, int, float]]) -> None:
    settings = [each.replace("KL", "trainer.algorithm.kl_loss_coef=0.1") for each in overrides]
    settings += ["trainer.algorithm.proximal_policy=arrival"] * (PROXIMAL in overrides[0])
    there = plan_on("8xH100", *split("7B", 4, 2, 1, *settings))
    assert there.problems == () and (there.loads[0].who, there.loads[-1].who) == ("training", "engine")
    assert [(load.who, load.number) for load in there.loads[1:-1]] == [(who, number) for who, number, _ in loads]
    for load, (_, _, bytes_each) in zip(there.loads[1:-1], loads, strict=True):
        assert load.parts["weights"] == pytest.approx(bytes_each * PARAMETERS["7B"], rel=1e-3)


def test_a_model_that_only_scores_on_the_trainers_gpu_is_added_there() -> None:
    scoring = ["trainer.algorithm.proximal_policy=arrival", f"{PROXIMAL}.executor=process"]
    there = plan_on("2xH100", *scoring, "generator.inference_engine.devices=[1]")
    assert [load.who for load in there.loads] == ["training", "engine"]
    assert there.loads[0].parts["replica"] == pytest.approx(2 * PARAMETERS["1.5B"], rel=1e-3)
    apart = plan_on("3xH100", *scoring, f"{PROXIMAL}.device=cuda:2", "generator.inference_engine.devices=[1]")
    assert [load.who for load in apart.loads] == ["training", "replica", "engine"]


def test_a_replica_in_ray_that_no_gpu_holds_is_a_problem() -> None:
    """32B in bfloat16: 65.5 GB, and an L40S has 48."""
    replica = [f"{PROXIMAL}={{executor: ray, device: cuda}}", "trainer.algorithm.proximal_policy=arrival"]
    problems = plan_on("4x8xL40S", *split("32B", 24, 1, 4, *replica)).problems
    (problem,) = [each for each in problems if each.startswith("The replica of the policy on cuda: weights take")]
    assert f"Set {PROXIMAL}.executor=trainer." in problem


def test_layers_that_stay_gathered_count() -> None:
    """7B: 6.53 billion weights in linear layers, in bfloat16, on every rank."""
    kept = plan_on("8xH100", *split("7B", 4, 4), "trainer.fsdp.reshard_after_forward=false").loads[0]
    freed = plan_on("8xH100", *split("7B", 4, 4)).loads[0]
    assert kept.total - freed.total == kept.parts["gathered layers"] == pytest.approx(2 * 6.5253e9, rel=1e-3)


def test_quantized_engines_hold_less() -> None:
    """7B: 6.53 billion weights in linear layers at a byte each, and 1.09 billion of two bytes; a KV cache of half the size."""
    engine = "generator.inference_engine"
    quantized = [f"{engine}.engine_args.quantization=fp8", f"{engine}.engine_args.kv_cache_dtype=fp8"]
    full, small = plan_on("8xH100", *split("7B", 4, 4)), plan_on("8xH100", *split("7B", 4, 4), *quantized)
    assert small.loads[1].parts["weights"] == pytest.approx(6.5253e9 + 2 * 1.0902e9, rel=1e-3)
    assert small.loads[1].total == full.loads[1].total  # the rest of its share is KV cache
    assert small.sync_bytes == full.sync_bytes
    shape = model_shape(ModelConfig(path="Qwen/Qwen2.5-7B"))
    assert shape is not None
    few, many = (
        decode_tokens_s(compose(GSM8K, split("7B", 4, 4, 1, *each)), shape, 64, 1000, Cluster(1, 8, "H100"))
        for each in ([], quantized)
    )
    assert 1.3 * few < many < 2 * few
    # A quantized checkpoint has other sizes, which its name does not tell.
    packed = plan_on("8xH100", *split("7B", 4, 4, 1, f"{engine}.engine_args.quantization=awq"))
    assert packed.loads[1] == full.loads[1]


def test_a_slow_transport_to_other_nodes_is_a_problem() -> None:
    """8 workers elsewhere: ceil(log2(9)) = 4 copies of 15.23 GB at 1.5 GB/s leave the trainer."""
    there = plan_on("2x8xH100", *split("7B", 8, 8), "generator.pause_timeout_s=30")
    assert there.transport == "gloo" and there.syncs["gloo"].transfer == pytest.approx(4 * 15.23e9 / 1.5e9, rel=0.01)
    (problem,) = there.problems
    assert "generator.pause_timeout_s=30" in problem and "generator.weight_transport=nccl" in problem
    assert plan_on("2x8xH100", *split("7B", 8, 8)).problems == ()


def test_shared_memory_reaches_only_engines_on_the_trainers_node() -> None:
    """7B on 8 ranks of the first node, and 8 engines of the second one; or 16 engines in turns with 16 ranks."""
    by_shared_memory = "generator.weight_transport=shared_memory"
    here = plan_on("8xH100", *split("7B", 4, 4, 1, by_shared_memory))
    assert here.problems == () and "shared_memory" in here.syncs
    turns = ["trainer.mode=sync", "trainer.placement.colocate_all=true"]
    for ranks, engines, tp, overrides, far, remedy in (
        (8, 8, 1, [], 8, "gloo or nccl"),
        (16, 16, 1, turns, 8, "gloo or cuda_ipc"),
        (16, 4, 4, turns, 2, "gloo or cuda_ipc"),
    ):
        there = plan_on("2x8xH100", *split("7B", ranks, engines, tp, *overrides, by_shared_memory))
        (problem,) = there.problems
        assert problem.startswith(f"{far} engines are on other nodes") and f"weight_transport={remedy}." in problem
        assert "shared_memory" not in there.syncs and "(this run)" not in there.describe()
        assert "without the weight sync, which is not estimated" in there.describe()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "not estimated: as fast as the file system of their folder\n"),
        (
            ["generator.weight_transport=delta", "generator.weight_folder=/a/folder"],
            "not estimated: as fast as the file system of their folder (this run: delta)",
        ),
        (["generator.weight_transport=my.module:Mine"], "not estimated: your own (this run)"),
    ],
)
def test_the_plan_says_which_weight_syncs_it_does_not_estimate(overrides: list[str], said: str) -> None:
    described = plan_on("8xH100", *split("7B", 4, 4, 1, *overrides)).describe()
    assert said in described
    assert ("without the weight sync, which is not estimated" in described) == bool(overrides)
    assert (described.count("(this run") == 1) and ("training waits" in described) != bool(overrides)


def test_more_gpus_train_and_sample_more() -> None:
    """Eight times the ranks and engines: eight times the tokens, and the MFU stays where the links are fast enough."""
    few, many = (
        plan_on(machine, *split("7B", n, n), "trainer.policy_mini_batch_size=512", response_tokens=512).step
        for machine, n in (("8xH100", 4), ("8x8xH100", 32))
    )
    assert few is not None and many is not None
    assert many.training_tokens_s / few.training_tokens_s == pytest.approx(8, rel=0.05)
    assert many.generation_tokens_s / few.generation_tokens_s == pytest.approx(8, rel=0.3)  # fewer requests each
    assert 0.25 < many.mfu <= few.mfu < 0.36
    slow = plan_on("8xL40S", *split("1.5B", 4, 4), response_tokens=512).step  # no NVLink
    fast = plan_on("8xH100", *split("1.5B", 4, 4), response_tokens=512).step
    assert slow is not None and fast is not None and slow.mfu < fast.mfu
    assert 0.12 < fast.mfu < 0.28


def test_float32_is_slower_and_tf32_makes_up_for_a_part() -> None:
    rates = []
    for overrides in ([], ["trainer.policy.dtype=float32", "trainer.tf32=true"], ["trainer.policy.dtype=float32"]):
        step = plan_on("8xH100", *split("1.5B", 4, 4), *overrides).step
        assert step is not None
        rates.append(step.training_tokens_s)
    assert rates[0] > 1.5 * rates[1] and rates[1] > 1.5 * rates[2]


def test_weights_are_synced_and_turns_taken_every_k_steps() -> None:
    asynchronous = split("7B", 4, 4, 1, "trainer.fully_async.max_staleness_steps=8")
    turns = ["trainer.mode=sync", "trainer.placement.colocate_all=true", UTILIZATION]
    for base, setting, size in ((asynchronous, "fully_async.weight_sync_interval", 1), (turns, "train_batch_size", 64)):
        each, rarely = (plan_on("8xH100", *base, f"trainer.{setting}={k * size}").step for k in (1, 4))
        assert each is not None and rarely is not None
        assert rarely.sync_s == pytest.approx(each.sync_s / 4)
        assert rarely.turns_s == pytest.approx(each.turns_s / 4)
        assert each.step_s - rarely.step_s == pytest.approx(0.75 * (each.sync_s + each.turns_s), rel=0.05)


def test_weights_under_an_adapter_have_no_gradients() -> None:
    """4 operations instead of 6 for each weight and token, and 2 more with checkpointing; attention has all of its own."""
    shape = ModelShape(10, 64, 4, 4, 16, 256, 1000, 512, True)
    weights, pairs = 10 * (4 * 64 * 64 + 3 * 64 * 256 + 128) + 64, 5000.0
    attention = 12 * 10 * 64 * pairs
    assert training_flops(shape, 100, 40, pairs) == 6 * weights * 100 + attention + 6 * 64_000 * 40
    adapted = training_flops(shape, 100, 40, pairs, frozen_weights=True)
    assert adapted == 4 * weights * 100 + attention + 4 * 64_000 * 40
    large = qwen3("8B")
    layers = large.num_parameters - 2 * large.vocab_size * large.hidden_size
    for checkpointed in ("true", "false"):  # repeated or not, it is the gradients of the weights that are missing
        full, adapter = (
            update_seconds(
                compose(GSM8K, [f"trainer.policy.gradient_checkpointing={checkpointed}", *each]).trainer,
                large, 1e9, 0, 1, Cluster(1, 1, "H100"),
            )
            for each in ([], ["trainer.policy.model.lora.rank=16"])
        )  # fmt: skip
        assert full - adapter == pytest.approx(2 * layers * 1e9 / (989e12 * gemm_share(4096)), rel=1e-3)


def test_a_critic_takes_the_time_of_its_own_model() -> None:
    critic = ["trainer.algorithm.advantage_estimator=gae", "trainer.critic.placement=colocated"]
    gae = [*split("7B", 4, 4), *critic, "trainer.critic.dtype=bfloat16"]
    alone = plan_on("8xH100", *split("7B", 4, 4)).step
    same, small = (
        plan_on("8xH100", *gae, *path).step for path in ([], ["trainer.critic.model.path=Qwen/Qwen2.5-0.5B"])
    )
    assert alone is not None and same is not None and small is not None
    assert same.training_s > 1.8 * alone.training_s and small.training_s < 1.5 * alone.training_s


def test_the_slower_half_is_the_bottleneck() -> None:
    def bottleneck(ranks: int, engines: int, response: int) -> str:
        step = plan_on("8xH100", *split("1.5B", ranks, engines), response_tokens=response).step
        assert step is not None
        waits = 0.0 if "training waits" in step.bottleneck else step.sync_s
        assert step.step_s == pytest.approx(max(step.training_s + step.sync_s, step.generation_s)), waits
        return step.bottleneck

    assert bottleneck(1, 7, 256).startswith("training; engines have nothing to do for")
    assert bottleneck(7, 1, 1024).startswith("generation; training has nothing to do for")


def test_the_plan_says_what_the_control_process_has_to_do_and_who_could_do_it() -> None:
    engines, shares = split("0.5B", 4, 4), list[float]()
    for overrides, remedy in [(engines, "rollout.num_actors"), ([*engines, "rollout.num_actors=4"], "wait for it")]:
        step = plan_on("8xH100", *overrides, response_tokens=64).step
        assert step is not None
        shares.append(step.control_share)
        assert f"busy for {step.control_share:.0%} of the time" in step.control
        assert step.control_share > 0.6 and remedy in step.control
    assert shares[0] > 1.5 * shares[1]
    # A longer response takes longer in the engines as well.
    few = plan_on("8xH100", *split("32B", 4, 4), response_tokens=512).step
    assert few is not None and few.control_share < 0.6 and few.control.endswith("through the endpoint")


def test_on_one_gpu_the_two_halves_add_up() -> None:
    there = plan_on("H100")
    step = there.step
    assert step is not None and there.on_one_gpu
    assert step.step_s == pytest.approx(step.training_s + step.generation_s + step.sync_s)
    assert "together, on one GPU" in there.describe()


def test_in_turns_the_state_crosses_the_bus_twice() -> None:
    turns = ["trainer.mode=sync", "trainer.placement.colocate_all=true"]
    step = plan_on("H100", *turns, UTILIZATION).step
    # bfloat16 weights, float32 masters and moments: 14 bytes per parameter
    assert step is not None and step.turns_s == pytest.approx(0.24 + 2 * 14 * PARAMETERS["1.5B"] / 55e9, rel=0.01)


def test_what_is_not_known_is_not_estimated() -> None:
    unknown = plan_on("H100", "trainer.policy.model.path=some/where")
    assert unknown.loads == () and unknown.syncs == {} and unknown.step is None
    assert "unknown until the model is loaded" in unknown.describe()
    with pytest.raises(ConfigError, match=r"computes nothing on GPUs.*leave out --on"):
        machine_plan(resolve(compose("quickstart"), 100), parse_cluster("H100"))


# Against what an H100 measured (docs/tutorials/first_gpu_run.md) ------------------------------------------------------


def qwen3(size: str) -> ModelShape:
    shape = model_shape(ModelConfig(path=f"Qwen/Qwen3-{size}"))
    assert shape is not None
    return shape


def test_the_measured_update_of_an_h100() -> None:
    """0.6B, 68,983 tokens in micro-batches of 16,384 without checkpointing: 1.633 s, 165 TFLOP/s, all tokens scored but prompts.
    Checkpointing costs 7.4 us a token more (2.995 s against 2.483 s)."""
    base = ["trainer.policy.gradient_checkpointing=false", "trainer.micro_batch_tokens=16384"]
    config, again = compose(GSM8K, base), compose(GSM8K, base[1:])
    shape, tokens, cluster = qwen3("0.6B"), 68_983, Cluster(1, 1, "H100")
    # 165 TFLOP/s for 1.633 s: the scored tokens and lengths that make the benchmark's count of operations
    flops = 165e12 * 1.633
    scored = (flops - training_flops(shape, tokens, 0, tokens * 500)) / (6 * shape.vocab_size * shape.hidden_size)
    assert 0.5 * tokens < scored < tokens
    once = update_seconds(config.trainer, shape, tokens, scored, 1000, cluster)
    assert once == pytest.approx(1.633, rel=0.2)
    twice = update_seconds(again.trainer, shape, tokens, scored, 1000, cluster)
    assert (twice - once) / tokens == pytest.approx(7.4e-6, rel=0.2)


def test_the_measured_decoding_of_an_h100() -> None:
    config = compose(GSM8K)
    for requests, measured in ((1, 382.6), (16, 4441.0), (128, 12_761.9)):
        assert decode_tokens_s(config, qwen3("0.6B"), requests, 500, Cluster(1, 1, "H100")) == pytest.approx(
            measured, rel=0.15
        )


def test_the_measured_weight_sync_of_an_h100() -> None:
    """0.6B: 25.9 ms to gather and, with vLLM's reload, 172 ms of pause by shared memory, 177 ms of pause by CUDA IPC."""
    syncs = plan_on("H100", "trainer.policy.model.path=Qwen/Qwen3-0.6B", QUANTIZED).syncs
    assert syncs["shared_memory"].gather == pytest.approx(0.0259, rel=0.2)
    assert syncs["shared_memory"].paused == pytest.approx(0.172, rel=0.25)
    assert syncs["cuda_ipc"].paused == pytest.approx(0.177, rel=0.25)


def test_products_of_large_matrices_reach_more_of_the_gpu() -> None:
    assert [gemm_share(size) for size in (1024, 2048, 8192, 20_000)] == [0.51, 0.66, 0.755, 0.755]
    shares = [gemm_share(size) for size in range(256, 9000, 64)]
    assert shares == sorted(shares)


# The command ----------------------------------------------------------------------------------------------------------


def test_the_command_prints_it_and_fails_with_strict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    quickstart = [
        "trainer.device=cuda",
        "trainer.strategy=fsdp2",
        "generator.inference_engine={backend: vllm, device: cuda, executor: ray, num_engines: 6}",
    ]
    assert main(["plan", "quickstart", *quickstart, "--on", "8xH100"]) == 0
    out = capsys.readouterr().out
    assert "placement on 8 H100" in out and "2 ranks of the policy (2 GPUs), 6 engines (6 GPUs)" in out
    for section in ("memory of each GPU", "weight sync, estimated", "speed, estimated", "bottleneck"):
        assert section in out
    assert main(["plan", "quickstart", *quickstart, "--on", "4xH100"]) == 0
    assert "warning: does not fit: 4 H100 do not hold the run" in capsys.readouterr().out
    assert main(["plan", "quickstart", *quickstart, "--on", "4xH100", "--strict"]) == 2
    assert main(["plan", "quickstart", *quickstart, "--on", "4xV100"]) == 2
    assert "kinds: B200" in capsys.readouterr().err

"""The memory that a plan needs, by formula: against what a backward pass really keeps, and against machines of any size."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from training_worlds import LARGER, SMALL, backend, minibatch

from skyrl_train.config import derive
from skyrl_train.config.compose import compose
from skyrl_train.config.memory import Machine, MemoryWarnings, activation_bytes, memory_warnings, visible_gpus
from skyrl_train.config.model_shape import model_shape
from skyrl_train.config.plan import Plan, resolve
from skyrl_train.config.schema import BuildModelConfig, ModelConfig
from skyrl_train.models.tiny import build_model_folder

GIB = 2**30
KL = "trainer.algorithm.kl_loss_coef=0.1"
GAE = "trainer.algorithm.advantage_estimator=gae"
COLOCATED = "trainer.critic.placement=colocated"
CUDA = ["trainer.device=cuda"]
EVALUATION = ["trainer.eval.interval=1", "trainer.eval.num_engines=1"]
RANKS = [*CUDA, "trainer.strategy=fsdp2", "trainer.fsdp.num_workers=4"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_backward_pass_is_left_no_more_than_the_formula_says_and_not_much_less(
    dtype: str, checkpointing: bool, tmp_path: Path
) -> None:
    build_model_folder(LARGER, tmp_path / "model", seed=0)
    alone = backend(str(tmp_path / "model"), policy__dtype=dtype, policy__gradient_checkpointing=checkpointing)
    batch = minibatch(lengths=(200, 200))
    own = {p.untyped_storage().data_ptr() for p in alone.model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # by place: what is kept in two views is kept once

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        alone.accumulate(batch)
    measured = sum(storage.nbytes() for storage in kept.values())
    shape = model_shape(ModelConfig(path=None, build=LARGER))
    assert shape is not None
    trainer = alone._config
    tokens = sum(len(s) - 1 for s in batch.sequences)
    said = activation_bytes(trainer, shape, tokens)
    # Of a layer that runs again, what it keeps then is not seen here; of all, their inputs are.
    inputs = tokens * shape.num_layers * shape.hidden_size * alone.model.dtype.itemsize
    assert (inputs if checkpointing else 0.9 * said) < measured < said


@pytest.mark.parametrize(
    ("overrides", "checkpointed"),
    [
        (CUDA, {"critic"}),
        ([*CUDA, "trainer.critic.gradient_checkpointing=false"], set()),
        ([*CUDA, "trainer.policy.gradient_checkpointing=true"], {"policy", "critic"}),
        ([*CUDA, "trainer.critic.device=cpu"], set()),
        ([], set()),
    ],
)
def test_layers_of_models_of_a_billion_parameters_run_again_on_gpus(
    overrides: list[str], checkpointed: set[str]
) -> None:
    models = ["trainer.policy.model.path=Qwen/Qwen3-0.6B", "trainer.critic.model.path=Qwen/Qwen2.5-1.5B"]
    memory = planned(*models, GAE, *overrides).memory
    assert memory is not None and memory.checkpointed == checkpointed


def fit(plan: Plan, machine: Machine) -> MemoryWarnings:
    return memory_warnings(plan.config, plan.memory, machine)


def planned(*overrides: str) -> Plan:
    return resolve(compose("quickstart", list(overrides)), 512)


def with_state(plan: Plan, state: int, activations: int) -> Plan:
    """The same plan for a model with ``state`` bytes on each rank."""
    assert plan.memory is not None
    memory = dataclasses.replace(
        plan.memory,
        policy_bytes=state * plan.memory.num_ranks,
        gradient_bytes=0,
        optimizer_bytes=0,
        activation_bytes=activations,
    )
    return dataclasses.replace(plan, memory=memory)


@pytest.mark.parametrize(
    ("overrides", "machine", "impossible", "tight"),
    [
        ([], Machine(16 * GIB), None, None),
        ([], Machine(14 * GIB), None, "Training on cpu"),
        ([], Machine(9 * GIB), "Use trainer.strategy=fsdp2", None),
        (CUDA, Machine(9 * GIB, (16 * GIB,)), None, None),
        (CUDA, Machine(99 * GIB, (9 * GIB,)), "there are 9.0 GiB", None),
        (CUDA, Machine(99 * GIB), None, None),  # no GPU here that says
        (RANKS, Machine(99 * GIB, (16 * GIB,) * 4), None, None),
        (RANKS, Machine(99 * GIB, (12 * GIB,) * 4), None, "trainer.policy.gradient_checkpointing=true"),
        (RANKS, Machine(99 * GIB, (9 * GIB,) * 4), "or set trainer.fsdp.cpu_offload=true", None),
        ([*RANKS, "trainer.fsdp.cpu_offload=true"], Machine(99 * GIB, (9 * GIB,) * 4), None, None),
        ([*RANKS, "trainer.fsdp.cpu_offload=true"], Machine(39 * GIB, (9 * GIB,) * 4), "Use more nodes", None),
        (
            [*RANKS, "trainer.fsdp.shard_size=2"],
            Machine(99 * GIB, (9 * GIB,) * 4),
            "a larger trainer.fsdp.shard_size",
            None,
        ),
    ],
)
def test_ten_gib_of_state_and_five_of_activations(
    overrides: list[str], machine: Machine, impossible: str | None, tight: str | None
) -> None:
    found = fit(with_state(planned(*overrides), 10 * GIB, 5 * GIB), machine)
    for said, expected in ((found.insufficient, impossible), (found.tight, tight)):
        assert len(said) == (expected is not None)
        assert expected is None or expected in said[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_snapshot_has_the_planned_size(dtype: str, tmp_path: Path) -> None:
    plan = planned(f"trainer.policy.dtype={dtype}")
    assert plan.memory is not None
    build_model_folder(plan.config.trainer.policy.model.build, tmp_path / "model", seed=0)
    trained = backend(str(tmp_path / "model"), policy__dtype=dtype)
    trained.update(minibatch())
    trained.snapshot()
    buffers = trained._snapshots._buffers
    copied = sum(buffer.tensor.nbytes for name, buffer in buffers.items() if not name.endswith("step"))
    rng = torch.get_rng_state().nbytes  # and the formula leaves norms within heads out
    assert copied - rng == pytest.approx(plan.memory.snapshot_bytes, rel=1e-3)
    machine = Machine(plan.memory.rank_bytes + plan.memory.snapshot_bytes - 1)
    assert "snapshots" in fit(plan, machine).insufficient[0]


@pytest.mark.parametrize(
    ("overrides", "gpus", "snapshots", "whose"),
    [
        (CUDA, 2, 1.0, "The main memory: snapshots"),
        (RANKS, 8, 1.0, "The main memory, with 4 ranks: snapshots"),
        (RANKS, 2, 0.5, "with 2 ranks: snapshots"),  # the other two are on another machine
        ([*RANKS, "trainer.fsdp.shard_size=2"], 8, 2.0, "with 4 ranks: snapshots"),  # two copies of the policy
        (["trainer.strategy=fsdp2", "trainer.fsdp.num_workers=4"], 0, 0.25, "Each of 4 ranks: weights"),
    ],
)
def test_snapshots_lie_in_the_main_memory_of_the_ranks_wherever_they_train(
    overrides: list[str], gpus: int, snapshots: float, whose: str
) -> None:
    plan = planned(*overrides)
    assert plan.memory is not None
    needed = int(plan.memory.snapshot_bytes * snapshots) + (0 if gpus else plan.memory.rank_bytes)
    assert fit(plan, Machine(needed, (99 * GIB,) * gpus)).insufficient == []
    (impossible,) = fit(plan, Machine(needed - 1, (99 * GIB,) * gpus)).insufficient
    assert whose in impossible


TURNS = ["trainer.mode=sync", "trainer.placement.colocate_all=true"]
RANKS_IN_TURNS = [
    *RANKS,
    *TURNS,
    "generator.inference_engine={backend: vllm, device: cuda, executor: ray, num_engines: 4}",
]


@pytest.mark.parametrize(
    ("overrides", "gpus", "share", "whose"),
    [
        ([*CUDA, *TURNS, "generator.inference_engine.device=cuda"], 1, 1.0, "The main memory: the training state in"),
        (RANKS_IN_TURNS, 4, 1.0, "The main memory, with 4 ranks: the training state in the engines' turn"),
        (RANKS_IN_TURNS, 2, 0.5, "with 2 ranks"),
    ],
)
def test_the_main_memory_holds_the_state_while_engines_have_the_gpu(
    overrides: list[str], gpus: int, share: float, whose: str
) -> None:
    plan = planned(*overrides)
    memory = plan.memory
    assert memory is not None
    needed = int((memory.snapshot_bytes + memory.policy_bytes + memory.optimizer_bytes) * share)
    assert fit(plan, Machine(needed, (99 * GIB,) * gpus)).insufficient == []
    (impossible,) = fit(plan, Machine(needed - 1, (99 * GIB,) * gpus)).insufficient
    assert whose in impossible


def test_a_copy_is_split_over_the_ranks_of_its_shards() -> None:
    whole = planned().memory
    halves = planned("trainer.strategy=fsdp2", "trainer.fsdp.num_workers=4", "trainer.fsdp.shard_size=2").memory
    assert whole is not None and halves is not None
    assert halves.rank_bytes == whole.rank_bytes // 2


def test_a_slice_of_the_tokens_has_a_share_of_the_activations() -> None:
    ranks = ["trainer.strategy=fsdp2", "trainer.fsdp.num_workers=2"]
    apart, together = planned(*ranks).memory, planned(*ranks, "trainer.fsdp.sequence_parallel_size=2").memory
    assert apart is not None and together is not None
    assert together.activation_bytes == apart.activation_bytes // 2


@pytest.mark.parametrize("build", [LARGER, SMALL])
def test_a_critic_counts_with_the_size_of_its_own_model(tmp_path: Path, build: BuildModelConfig) -> None:
    build_model_folder(build, tmp_path / "critic", seed=0)
    shape, gae = model_shape(ModelConfig(build=build)), "trainer.algorithm.advantage_estimator=gae"
    own = planned(gae, f"trainer.critic.model.path={tmp_path / 'critic'}").memory
    of_policy, unknown = planned(gae).memory, planned(gae, "trainer.critic.model.path=some/where").memory
    assert shape is not None and own is not None and of_policy is not None and unknown is not None
    assert own.critic_bytes == shape.num_parameters * 16
    assert of_policy.critic_bytes == of_policy.num_parameters * 16 and unknown.critic_bytes == 0


@pytest.mark.parametrize(
    ("overrides", "beside", "elsewhere"),
    [
        ([], 16, 0),
        (["trainer.critic.fsdp.cpu_offload=true"], 0, 16),
        (["trainer.fsdp.cpu_offload=true"], 0, 16),
        (["trainer.fsdp.cpu_offload=true", "trainer.critic.fsdp.cpu_offload=true"], 16, 0),
        (["trainer.device=cpu", "trainer.critic.fsdp.cpu_offload=true"], 16, 0),
        (
            [KL, "rollout.stages.reference.executor=colocated", "rollout.stages.reference.cpu_offload=true"],
            16,
            4,
        ),
        (["trainer.critic.placement=workers"], 0, 0),
    ],
)
def test_a_critic_in_the_policys_ranks_counts_in_the_memory_that_its_state_is_in(
    overrides: list[str], beside: int, elsewhere: int
) -> None:
    memory = planned(*RANKS, GAE, COLOCATED, *overrides).memory
    assert memory is not None
    parameters = memory.num_parameters
    assert memory.rank_bytes == parameters * (4 + 4 + 8 + beside) // 4
    assert memory.rank_elsewhere_bytes == parameters * elsewhere // 4


@pytest.mark.parametrize(
    ("overrides", "short_by", "remedy"),
    [
        ([], 0, None),
        ([], 1, "trainer.critic.fsdp.cpu_offload=true, or trainer.critic.placement=workers"),
        (["trainer.fsdp.cpu_offload=true"], 0, None),
        (["trainer.fsdp.cpu_offload=true"], 1, "Set cpu_offload=true in"),
        (["trainer.critic.placement=workers", "trainer.fsdp.cpu_offload=true"], 0, None),
        (
            ["trainer.critic.placement=workers", "trainer.fsdp.cpu_offload=true"],
            1,
            "Use more than trainer.critic.fsdp.num_workers=4, or set trainer.critic.fsdp.cpu_offload=true",
        ),
    ],
)
def test_the_memory_of_a_critic_has_to_fit(overrides: list[str], short_by: int, remedy: str | None) -> None:
    """On GPUs with room for exactly that which stays there."""
    four = [] if "trainer.critic.placement=workers" not in overrides else ["trainer.critic.fsdp.num_workers=4"]
    plan = planned(*RANKS, GAE, COLOCATED, *overrides, *four)
    assert plan.memory is not None
    offloaded = plan.config.trainer.fsdp.cpu_offload
    state = 16 * plan.memory.num_parameters // 4 * (1 if offloaded else 2)
    found = fit(plan, Machine(99 * GIB, (state - short_by,) * 4)).insufficient
    assert len(found) == (remedy is not None), found
    assert remedy is None or remedy in found[0]


CHECKPOINTING = "trainer.{}.gradient_checkpointing=true"


@pytest.mark.parametrize(
    ("overrides", "times", "remedies"),
    [
        ([*RANKS, COLOCATED], 1, ["policy", "critic"]),  # one computes at a time
        (RANKS, 1, ["policy", "critic"]),  # each in workers of its own
        (CUDA, 2, ["policy", "critic"]),
        ([*CUDA, "trainer.critic.device=cpu"], 1, ["policy"]),
        ([*RANKS, COLOCATED, CHECKPOINTING.format("policy")], 1, ["critic"]),
        ([*RANKS, COLOCATED, *map(CHECKPOINTING.format, ("policy", "critic"))], None, []),
    ],
)
def test_activations_of_policy_and_critic_add_up_where_both_compute_at_once(
    overrides: list[str], times: int | None, remedies: list[str]
) -> None:
    alone, plan = (
        planned(*[name for name in overrides if "critic" not in name and "checkpointing" not in name]).memory,
        planned(*overrides, GAE),
    )
    assert alone is not None and plan.memory is not None
    assert times is None or plan.memory.activation_bytes == times * alone.activation_bytes
    machine = Machine(99 * GIB, (16 * plan.memory.num_parameters * 2 + plan.memory.activation_bytes // 2,) * 4)
    told = fit(plan, machine).tight
    assert len(told) == (2 if overrides == RANKS else 1)
    tight = "\n".join(told)
    named = [model for model in ("policy", "critic") if CHECKPOINTING.format(model) in tight]
    assert named == remedies and ("Lower trainer.micro_batch_tokens" in tight) == (not remedies)


LOCAL_REFERENCE = [KL, "rollout.stages.reference.max_parallel=2"]
CRITIC_ON = "trainer.critic.device={}"
REFERENCE_ON = "rollout.stages.reference.device={}"
STAGE = "rollout.stages.reference.{}"


@pytest.mark.parametrize(
    ("overrides", "gpu", "main", "whose"),
    [
        # bytes per parameter: 16 of a policy's or a critic's state, 12 of the snapshot of each, 4 of a copy of the reference
        ([GAE], None, 2 * (16 + 12), "Training on cpu"),
        ([GAE, CRITIC_ON.format("cuda")], 16, 16 + 2 * 12, "The critic on cuda:0"),
        ([GAE, *CUDA, CRITIC_ON.format("cuda:0")], 32, 2 * 12, "Training on cuda"),
        ([GAE, *CUDA, CRITIC_ON.format("cuda:1")], 16, 2 * 12, "Training on cuda"),
        ([GAE, *CUDA, CRITIC_ON.format("cpu")], 16, 16 + 2 * 12, "Training on cuda"),
        (LOCAL_REFERENCE, None, 16 + 12 + 2 * 4, "Training on cpu"),
        ([*LOCAL_REFERENCE, STAGE.format("executor=thread"), *CUDA], 16 + 2 * 4, 12, "Training on cuda"),
        ([*LOCAL_REFERENCE, *CUDA, REFERENCE_ON.format("cuda:1")], 16, 12, "Training on cuda"),
        ([*LOCAL_REFERENCE, *CUDA, REFERENCE_ON.format("cpu")], 16, 12 + 2 * 4, "Training on cuda"),
        ([*LOCAL_REFERENCE, REFERENCE_ON.format("cuda:1")], 2 * 4, 16 + 12, "The reference policy on cuda:1"),
        (
            [*LOCAL_REFERENCE, GAE, CRITIC_ON.format("cuda"), REFERENCE_ON.format("cuda:0")],
            16 + 2 * 4,
            16 + 2 * 12,
            "The critic and reference policy on cuda:0",
        ),
        ([KL, STAGE.format("executor=workers"), REFERENCE_ON.format("cuda")], 2, 16 + 12, "the reference's 2 actors"),
        ([KL, STAGE.format("executor=ray"), *CUDA, STAGE.format("ray_num_gpus=1")], 16, 12, "Training on cuda"),
        ([*RANKS, KL, REFERENCE_ON.format("cpu")], 4, 12 + 4, "Each of 4 ranks"),
        ([*RANKS, KL, REFERENCE_ON.format("cuda:1")], 4, 12, "Each of 4 ranks"),
        ([*RANKS[1:], KL], None, (16 + 12) / 4 + 4, "The reference policy and a rank"),
    ],
)
def test_each_memory_holds_its_models_and_main_memory_the_snapshots(
    overrides: list[str], gpu: float | None, main: float, whose: str
) -> None:
    """On machines with room for exactly that, and for a byte less."""
    plan = planned(*overrides)
    assert plan.memory is not None
    parameters = plan.memory.num_parameters
    on_gpu, in_main = None if gpu is None else int(gpu * parameters), int(main * parameters)
    gpus = () if on_gpu is None else (on_gpu,) * 4
    assert fit(plan, Machine(in_main, gpus)).insufficient == []
    short = fit(plan, Machine(in_main - 1, gpus)).insufficient
    assert len(short) == 1 and (on_gpu is None or "main memory" in short[0] or "Training on cpu" in short[0])
    if on_gpu is not None:
        short = fit(plan, Machine(in_main, (on_gpu - 1,) * 4)).insufficient
        assert all("cuda" in each or "ranks" in each or "actors" in each for each in short)
    assert any(whose in each for each in short), short


def test_copies_of_a_reference_may_be_fewer_or_sharded() -> None:
    plan = planned(*LOCAL_REFERENCE)
    (said,) = fit(plan, Machine(1)).insufficient
    assert said.endswith(
        "or set rollout.stages.reference.executor=workers, or rollout.stages.reference.max_parallel below 2."
    )


@pytest.mark.parametrize(
    ("overrides", "asked"),
    [
        ([], False),
        (CUDA, True),
        ([GAE], False),
        ([GAE, CRITIC_ON.format("cuda")], True),
        ([KL, REFERENCE_ON.format("cuda:1")], True),
    ],
)
def test_gpus_are_asked_about_where_anything_computes_on_them(overrides: list[str], asked: bool) -> None:
    assert derive.trains_on_gpus(compose("quickstart", overrides)) is asked


@pytest.mark.parametrize(
    ("visible", "mib"),
    [(None, (81920, 40960)), ("1", (40960,)), ("GPU-aa", (81920,)), ("", ())],
)
def test_gpus_that_are_hidden_do_not_count(visible: str | None, mib: tuple[int, ...]) -> None:
    answer = "0, GPU-aa11, 81920\n1, GPU-bb22, 40960\n"
    assert visible_gpus(answer, visible) == tuple(each * 2**20 for each in mib)
    assert visible_gpus("0, GPU-aa11, [N/A]\n", None) == ()


# Parameters that the hub counts in each model's files, tied weights once.
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B-Base": 1_720_574_976,
    "Qwen/Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_a_listed_model_of_the_hub_has_its_published_number_of_parameters(name: str, parameters: int) -> None:
    shape = model_shape(ModelConfig(path=name))
    assert shape is not None
    # What the shape leaves out: Qwen2.5's biases of queries, keys and values, Qwen3's norms within heads.
    biases = shape.head_dim * (shape.num_heads + 2 * shape.num_kv_heads) if "Qwen2.5" in name else 0
    norms = 2 * shape.head_dim if "Qwen3" in name else 0
    assert shape.num_parameters + shape.num_layers * (biases + norms) == parameters


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-30B-A3B", "Qwen/Qwen2.5-VL-7B", "somebody/Qwen3-8B", "Qwen/Qwen3-8B-FP8", "gpt2"]
)
def test_a_model_that_is_not_listed_has_no_shape(name: str) -> None:
    assert model_shape(ModelConfig(path=name)) is None


def test_the_positions_of_a_listed_model_limit_nothing() -> None:
    """They differ between trainings of one size, so the model's own limit is left to the engine."""
    plan = planned(
        "trainer.policy.model.path=Qwen/Qwen2.5-7B",
        "generator.max_input_length=100000",
        "trainer.micro_batch_tokens=200000",
    )
    assert plan.max_model_len == 100_000 + plan.config.generator.sampling_params.max_tokens


@pytest.mark.parametrize(
    ("overrides", "share"),
    [
        ([], 0.92),
        (["generator.inference_engine.engine_args.gpu_memory_utilization=0.3"], 0.3),
        (["generator.inference_engine.executor=ray"], 0.0),
        (["generator.inference_engine.device=cpu"], 0.0),
        (["trainer.placement.colocate_all=true", "trainer.mode=sync"], 0.0),
        (["generator.inference_engine.devices=[1]"], 0.0),
        # The evaluation's engine is on the second GPU, or on the trainer's.
        ([*EVALUATION, "generator.inference_engine.devices=[1,1]"], 0.0),
        ([*EVALUATION, "generator.inference_engine.devices=[1,0]"], 0.92),
    ],
)
def test_an_engine_on_the_trainers_gpu_takes_its_share(overrides: list[str], share: float) -> None:
    """On GPUs with room for the training state and nothing else, and for exactly both."""
    vllm = ["generator.inference_engine.backend=vllm", "generator.inference_engine.device=cuda", "trainer.max_steps=1"]
    plan = planned(*CUDA, *vllm, *overrides)
    assert plan.memory is not None
    transport = plan.memory.staging_bytes if "colocate_all" in str(overrides) else 0  # cuda_ipc
    room = int((plan.memory.rank_bytes + transport) / (1 - share)) + 1
    assert fit(plan, Machine(99 * GIB, (room,) * 2)).insufficient == []
    (said,) = fit(plan, Machine(99 * GIB, (room - 100,) * 2)).insufficient
    assert ("and engines" in said) == (share > 0)
    limit = derive.trainer_memory_fraction(plan.config)
    assert limit == (pytest.approx(1 - share - 0.02) if share else None)


def test_the_contexts_and_the_gradient_of_the_head_count_beside_the_activations() -> None:
    plan = planned(*CUDA)
    assert plan.memory is not None
    build = plan.config.trainer.policy.model.build
    shape = model_shape(ModelConfig(build=build))
    assert shape is not None
    assert plan.memory.head_gradient_bytes == 4 * shape.vocab_size * shape.hidden_size
    narrow = planned("trainer.policy.dtype=bfloat16").memory
    assert narrow is not None and narrow.head_gradient_bytes == 6 * shape.vocab_size * shape.hidden_size
    room = plan.memory.rank_peak_bytes + 600 * 2**20
    assert fit(plan, Machine(99 * GIB, (room,))).tight == []
    assert len(fit(plan, Machine(99 * GIB, (room - 1,))).tight) == 1

"""The plan: derived values, and errors with their remedies."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from composition import settings
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl_train.algorithms.losses import POLICY_LOSSES
from skyrl_train.algorithms.off_policy import CORRECTIONS
from skyrl_train.algorithms.reductions import REDUCTIONS
from skyrl_train.config import derive
from skyrl_train.config.keys import _limits, _types
from skyrl_train.config.model_shape import model_shape
from skyrl_train.config.plan import Plan, length_warnings, resolve
from skyrl_train.config.schema import FullyAsyncConfig, ModelConfig, OneOf, RunConfig, TrainerMode
from skyrl_train.config.validate import Validation, raise_errors, validate
from skyrl_train.entrypoints.inputs import load_inputs, print_warnings
from skyrl_train.errors import ConfigError
from skyrl_train.models.folder import DTYPES
from skyrl_train.rollout.staleness.manager import StalenessManager
from skyrl_train.rollout.staleness.policies import resolve_staleness_policy
from skyrl_train.types import PauseMode

BOUND, DEPTH, WORKERS, EVERY, OVERLAP, STREAMING, STRAGGLERS = (
    f"trainer.fully_async.{name}"
    for name in (
        "max_staleness_steps",
        "generate_ahead_steps",
        "num_parallel_generation_workers",
        "weight_sync_interval",
        "overlap_weight_sync",
        "streaming_min_groups",
        "staleness_policy",
    )
)
MINIBATCH = "trainer.policy_mini_batch_size"
UNCORRECTED = "trainer.algorithm.off_policy_correction.tis_ratio_type=null"
ENGINE = "generator.inference_engine"
GAE = "trainer.algorithm.advantage_estimator=gae"
VLLM_GPUS = (f"{ENGINE}.backend=vllm", f"{ENGINE}.device=cuda")
VLLM_IPC = (*VLLM_GPUS, "trainer.device=cuda", "generator.weight_transport=cuda_ipc")
VLLM_NCCL = (*VLLM_GPUS, "trainer.device=cuda", "generator.weight_transport=nccl")
VLLM_RAY = (*VLLM_GPUS, f"{ENGINE}.executor=ray")


def fully_async(*overrides: str) -> RunConfig:
    return settings("trainer.mode=fully_async", *overrides)


def the_error(config: RunConfig) -> str:
    (error,) = validate(config).errors
    return error


def the_warning(config: RunConfig) -> str:
    found = validate(config)
    assert found.errors == []
    (warning,) = found.warnings
    return warning


def test_by_default_the_depth_adapts_and_as_many_groups_run_at_once_as_are_ever_admitted() -> None:
    plan = resolve(fully_async(f"{MINIBATCH}=16", f"{BOUND}=4"), dataset_len=100)
    assert (plan.max_staleness_steps, plan.generate_ahead_steps, plan.num_workers, plan.capacity) == (4, None, 80, 80)
    assert "D adapts to the slowest groups: up to 4 step(s)" in plan.describe()


def test_a_bound_of_zero_leaves_no_depth() -> None:
    plan = resolve(fully_async(f"{MINIBATCH}=16", f"{BOUND}=0"), dataset_len=100)
    assert (plan.max_staleness_steps, plan.generate_ahead_steps, plan.num_workers) == (0, 0, 16)


def test_sync_ignores_the_asynchronous_settings_for_bound_and_depth() -> None:
    plan = resolve(settings("trainer.mode=sync", f"{BOUND}=4", f"{DEPTH}=2", f"{WORKERS}=99"), dataset_len=100)
    assert (plan.mode, plan.max_staleness_steps, plan.generate_ahead_steps) == (TrainerMode.sync, 0, 0)
    assert plan.num_workers == plan.train_batch_size == plan.policy_mini_batch_size


def test_steps_are_the_full_minibatches_of_all_epochs_together() -> None:
    config = fully_async(f"{MINIBATCH}=16", "trainer.epochs=3")
    assert resolve(config, dataset_len=40).total_steps == 3 * 40 // 16 == 7  # 2 an epoch would be 6


def test_max_steps_counts_instead_of_epochs() -> None:
    assert resolve(fully_async("trainer.max_steps=1000"), dataset_len=17).total_steps == 1000


def test_requests_are_as_long_as_the_limits_allow_within_the_model() -> None:
    limits = ["generator.max_input_length=100", "generator.sampling_params.max_tokens=60"]
    positions = "trainer.policy.model.build.max_position_embeddings"
    assert resolve(settings(*limits), 100).max_model_len == 160
    assert resolve(settings(*limits, f"{positions}=128"), 100).max_model_len == 128
    assert resolve(settings(*limits, "generator.inference_engine.max_model_len=90"), 100).max_model_len == 90


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([f"{WORKERS}=15"], "Set it to 80, or to null"),
        ([f"{BOUND}=-1"], "must be at least 0"),
        ([f"{DEPTH}=-1"], "must be at least 0"),
        ([f"{DEPTH}=inf"], "must be at least 0 and finite"),
        ([f"{DEPTH}=5", f"{BOUND}=4"], "Set max_staleness_steps=5 or generate_ahead_steps=4"),
        ([f"{DEPTH}=0.5", f"{BOUND}=0"], "Set max_staleness_steps=1 or generate_ahead_steps=0"),
        ([f"{EVERY}=0"], "must be at least 1"),
        ([f"{EVERY}=4", f"{BOUND}=2"], "Set max_staleness_steps=3 or weight_sync_interval=3 at most"),
        ([f"{EVERY}=3", f"{DEPTH}=1.5", f"{BOUND}=3"], "Set max_staleness_steps=4 or generate_ahead_steps=1"),
        ([f"{STREAMING}=0"], "must be at least 1"),
        ([f"{STREAMING}=17"], f"between 1 and {MINIBATCH}=16"),
        ([f"{STREAMING}=4", "trainer.update_epochs_per_batch=2"], "a second pass needs the whole minibatch"),
        ([UNCORRECTED], "tis_ratio_type=token"),
        ([UNCORRECTED], "allow_uncorrected=true"),
    ],
)
def test_asynchronous_settings_that_cannot_work_are_errors(overrides: list[str], expected: str) -> None:
    assert expected in the_error(fully_async(*overrides))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([f"{OVERLAP}=true", f"{BOUND}=0"], "Set generate_ahead_steps=1 and max_staleness_steps=1"),
        ([f"{OVERLAP}=true", f"{DEPTH}=0.5"], "overlap_weight_sync=false"),
        ([f"{OVERLAP}=true", f"{DEPTH}=0", f"{STREAMING}=1"], "nothing to train on before the weight sync is over"),
        (["trainer.train_batch_size=32"], "trainer.train_batch_size=null"),
    ],
)
def test_a_setting_without_effect_in_asynchronous_training_is_a_warning(overrides: list[str], expected: str) -> None:
    assert expected in the_warning(fully_async(*overrides))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([f"{MINIBATCH}=0"], f"{MINIBATCH}=0: must be at least 1"),
        (["trainer.train_batch_size=40"], "Set trainer.train_batch_size=32"),
        (["trainer.epochs=0"], "trainer.epochs=0"),
        (["trainer.max_steps=0"], "trainer.max_steps=0"),
        (["trainer.ckpt_interval=-1"], "must be at least 0"),
        (["trainer.max_ckpts_to_keep=0"], "must be at least 1"),
        (["trainer.samples_per_step=-1"], "must be at least 0"),
        (["trainer.failures.rollout_timeout_s=0"], "must be more than 0"),
        (["generator.pause_timeout_s=0"], "must be more than 0"),
        (["generator.n_samples_per_prompt=1"], "n_samples_per_prompt=8"),
        (["generator.n_samples_per_prompt=0"], "must be at least 1"),
        (["generator.max_turns=0"], "must be at least 1"),
        (["generator.sampling_params.temperature=0"], "Set temperature=1.0"),
        (["generator.sampling_params.temperature=-1"], "must be at least 0"),
        (["generator.sampling_params.temperature=nan"], "must be at least 0"),
        (["generator.sampling_params.top_p=0"], "must be more than 0 and at most 1"),
        (["generator.sampling_params.min_p=2"], "between 0 and 1"),
        (["generator.sampling_params.min_tokens=99"], "between 0 and max_tokens=64"),
        (["generator.sampling_params.top_p=0.9", UNCORRECTED], "another distribution"),
        (["generator.sampling_params.top_k=5", UNCORRECTED], "another distribution"),
        (
            ["trainer.train_batch_size=32", UNCORRECTED],
            "trainer.train_batch_size=32 trains on tokens of older policies",
        ),
        (["trainer.micro_batch_tokens=319"], "less than the 320 tokens"),
        (["trainer.policy.optimizer_config.lr=0"], "must be more than 0"),
        (["trainer.policy.optimizer_config.lr=nan"], "must be more than 0"),
        (["trainer.policy.optimizer_config.adam_betas=[0.9]"], "two numbers in [0, 1)"),
        (["trainer.policy.optimizer_config.adam_betas=[0.9,1]"], "two numbers in [0, 1)"),
        (["trainer.algorithm.eps_clip_low=1"], "must be at least 0 and less than 1"),
        (["trainer.algorithm.eps_clip_high=-0.1"], "must be at least 0"),
        (["trainer.policy.model.build.num_heads=0"], "must be at least 1"),
        (["trainer.policy.model.build.hidden_size=130"], "Set it to 132"),
        (["generator.inference_engine.max_model_len=600"], "exceeds the model's 512 positions"),
        (["generator.inference_engine.max_model_len=64"], "leaves no room for a prompt"),
        (["generator.pause_mode=kep"], "Did you mean keep?"),
        (["generator.inference_engine.executor=thred"], "Did you mean thread?"),
        (["generator.inference_engine.backend=vlm"], "Did you mean vllm?"),
        (["generator.inference_engine.backend=vllm_remote"], "names 0 servers"),
        (["generator.inference_engine.dtype=fp32"], "Known: float32, bfloat16"),
        ([*VLLM_GPUS, f"{ENGINE}.environment={{CUDA_VISIBLE_DEVICES: '1'}}"], f"Name the GPUs in {ENGINE}.devices"),
        ([*VLLM_GPUS, f"{ENGINE}.device=cuda:1"], f"name GPUs in {ENGINE}.devices"),
        ([*VLLM_GPUS, f"{ENGINE}.devices=[0,1]"], "each needs 1 GPU. Name 1 GPU;"),
        (
            [*VLLM_GPUS, f"{ENGINE}.num_engines=2", f"{ENGINE}.tensor_parallel_size=2", f"{ENGINE}.devices=[0,1]"],
            "Name 4 GPUs",
        ),
        ([*VLLM_GPUS, f"{ENGINE}.devices=[1,1]", f"{ENGINE}.tensor_parallel_size=2"], "need different GPUs"),
        ([*VLLM_GPUS, f"{ENGINE}.devices=[-1]"], "numbered from 0"),
        ([*VLLM_RAY, f"{ENGINE}.ray_num_gpus=2"], "need 1 GPU."),
        ([*VLLM_RAY, f"{ENGINE}.ray_num_gpus=0"], "Ray would give no engine a GPU of its own. Leave it out"),
        (
            [f"{ENGINE}.executor=ray", f"{ENGINE}.device=cuda", f"{ENGINE}.ray_num_gpus=0"],
            "Leave it out; a number below",
        ),
        ([*VLLM_RAY, f"{ENGINE}.tensor_parallel_size=4", f"{ENGINE}.ray_num_gpus=1"], "need 4 GPUs"),
        ([*VLLM_RAY, f"{ENGINE}.pipeline_parallel_size=2", f"{ENGINE}.ray_num_gpus=0.5"], "need 2 GPUs"),
        ([*VLLM_IPC, f"{ENGINE}.devices=[1]"], "cuda_ipc needs one GPU"),
        ([*VLLM_IPC, f"{ENGINE}.num_engines=2"], f"Name it for all in {ENGINE}.devices"),
        ([*VLLM_IPC, f"{ENGINE}.tensor_parallel_size=2"], "on [0, 1] and trainer.device=cuda:"),
        (list(VLLM_NCCL), "trainer and engines on cuda:0: NCCL needs a GPU per process"),
        ([*VLLM_NCCL, f"{ENGINE}.num_engines=2", f"{ENGINE}.devices=[1,1]"], "engines on cuda:1: NCCL"),
        ([*VLLM_GPUS, "trainer.strategy=fsdp2", "trainer.device=cuda"], f"Set {ENGINE}.executor=ray, or name"),
        (["data.generate=0"], "data.generate=0"),
        (
            [
                f"{ENGINE}.backend=vllm",
                f"{ENGINE}.engine_args={{speculative_config: {{method: ngram}}}}",
                "generator.sampling_params.min_p=0.1",
            ],
            "vLLM has no min_p with speculative decoding",
        ),
        (
            [f"{ENGINE}.backend=vllm", f"{ENGINE}.engine_args={{tensor_parallel_size: 4}}"],
            f"set {ENGINE}.tensor_parallel_size=4 instead",
        ),
        ([f"{ENGINE}.backend=vllm", f"{ENGINE}.engine_args={{data_parallel_size: 4}}"], f"({ENGINE}.num_engines)"),
    ],
)
def test_settings_that_work_in_no_mode_are_errors(overrides: list[str], expected: str) -> None:
    assert expected in the_error(settings(*overrides))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["generator.inference_engine.remote_urls=[http://a:1]"],
            "belongs to generator.inference_engine.backend=vllm_remote",
        ),
        (
            [
                "generator.inference_engine.backend=vllm_remote",
                "generator.inference_engine.remote_urls=[http://a:1]",
                "generator.inference_engine.executor=ray",
            ],
            "runs where it was started",
        ),
        (
            ["generator.inference_engine.backend=vllm", "generator.inference_engine.executor=thread"],
            "use process or ray",
        ),
        (["generator.inference_engine.tensor_parallel_size=2"], "the embedded engine is not parallel"),
        ([f"{ENGINE}.devices=[0]"], f"belongs to {ENGINE}.backend=vllm"),
        ([*VLLM_RAY, f"{ENGINE}.devices=[0]"], "Ray chooses the GPUs"),
        ([f"{ENGINE}.backend=vllm", f"{ENGINE}.devices=[0]"], f"Set {ENGINE}.device=cuda"),
        (
            ["generator.inference_engine.engine_args={block_size: 16}"],
            "belongs to generator.inference_engine.backend=vllm",
        ),
    ],
)
def test_a_setting_without_effect_in_any_mode_is_a_warning(overrides: list[str], expected: str) -> None:
    assert expected in the_warning(settings(*overrides))


@pytest.mark.parametrize(
    ("overrides", "devices"),
    [
        ([], [[0], [1], [2]]),
        ([f"{ENGINE}.tensor_parallel_size=2"], [[0, 1], [2, 3], [4, 5]]),
        ([f"{ENGINE}.devices=[3,1,3]"], [[3], [1], [3]]),
        ([f"{ENGINE}.pipeline_parallel_size=2", f"{ENGINE}.devices=[7,6,5,4,7,6]"], [[7, 6], [5, 4], [7, 6]]),
        ([f"{ENGINE}.device=cpu"], [[], [], []]),
        ([*VLLM_IPC, "trainer.device=cuda:1", f"{ENGINE}.devices=[1,1,1]"], [[1], [1], [1]]),
    ],
)
def test_each_engine_has_gpus_of_its_own_unless_they_are_named_twice(
    overrides: list[str], devices: list[list[int]]
) -> None:
    evaluated = ["trainer.eval.num_engines=1", "trainer.eval.interval=1", f"{ENGINE}.num_engines=2"]
    config = settings(*VLLM_GPUS, *evaluated, *overrides)
    assert validate(config).errors == []
    assert [derive.engine_devices(config.generator.inference_engine, index) for index in range(3)] == devices


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (
            [*VLLM_GPUS, f"{ENGINE}.num_engines=2", f"{ENGINE}.tensor_parallel_size=2"],
            "cuda:0+cuda:1 and cuda:2+cuda:3,",
        ),
        ([*VLLM_GPUS, f"{ENGINE}.devices=[3]"], "on cuda:3,"),
        ([*VLLM_RAY], "on cuda, ray"),
        ([], "on cpu,"),
    ],
)
def test_the_plan_shows_the_gpus_of_the_engines(overrides: list[str], where: str) -> None:
    (engines,) = (
        line for line in resolve(settings(*overrides, base="quickstart"), 64).describe().splitlines() if " x " in line
    )
    assert where in engines


@pytest.mark.parametrize(
    ("overrides", "shared"),
    [
        ([*VLLM_GPUS, "trainer.device=cuda"], True),
        ([f"{ENGINE}.device=cuda", "trainer.device=cuda:0"], True),
        ([*VLLM_GPUS, "trainer.device=cuda:1"], False),
        ([*VLLM_GPUS, "trainer.device=cuda", f"{ENGINE}.devices=[1]"], False),
        ([*VLLM_RAY, "trainer.device=cuda"], False),
        ([f"{ENGINE}={{backend: vllm_remote, remote_urls: ['http://a'], device: cuda}}", "trainer.device=cuda"], False),
        ([], False),
    ],
)
def test_the_plan_says_that_trainer_and_engines_share_a_gpu(overrides: list[str], shared: bool) -> None:
    described = resolve(settings(*overrides, base="quickstart"), 64).describe()
    assert ("trainer and engines share cuda:0" in described) == shared


@pytest.mark.parametrize(
    ("overrides", "gpus"),
    [
        ([*VLLM_RAY], 1),
        ([*VLLM_RAY, f"{ENGINE}.tensor_parallel_size=4", f"{ENGINE}.pipeline_parallel_size=2"], 8),
        ([*VLLM_RAY, f"{ENGINE}.ray_num_gpus=0.5"], 0.5),
        ([*VLLM_RAY, f"{ENGINE}.device=cpu"], 0),
        ([f"{ENGINE}.executor=ray", f"{ENGINE}.device=cuda"], 1),
        ([f"{ENGINE}.executor=ray", f"{ENGINE}.device=cuda:1", f"{ENGINE}.ray_num_gpus=0"], 0),  # named, so shared
        ([f"{ENGINE}.executor=ray"], 0),
    ],
)
def test_an_engine_in_ray_reserves_the_gpus_that_it_computes_on(overrides: list[str], gpus: float) -> None:
    config = settings(*overrides)
    assert validate(config).errors == []
    assert derive.engine_ray_num_gpus(config.generator.inference_engine) == gpus


def test_temperature_zero_is_fine_where_nothing_is_compared() -> None:
    greedy = ["generator.sampling_params.temperature=0", "generator.n_samples_per_prompt=1"]
    assert validate(settings(*greedy, "trainer.algorithm.advantage_estimator=mine.Estimator")).errors == []


@pytest.mark.parametrize("overrides", [[], [f"{BOUND}=0", UNCORRECTED], ["generator.sampling_params.top_p=0.9"]])
def test_corrected_or_on_policy_training_is_allowed(overrides: list[str]) -> None:
    assert validate(fully_async(*overrides)) == Validation([], [])


def test_the_opt_in_allows_uncorrected_training() -> None:
    allowed = fully_async(UNCORRECTED, "trainer.algorithm.off_policy_correction.allow_uncorrected=true")
    assert validate(allowed).errors == []


def test_all_problems_come_in_one_message() -> None:
    config = fully_async(f"{DEPTH}=9", "trainer.policy.optimizer_config.lr=0", "generator.pause_mode=kep")
    with pytest.raises(ConfigError, match="3 settings cannot work") as error:
        raise_errors(validate(config).errors)
    for key in (DEPTH, "trainer.policy.optimizer_config.lr", "generator.pause_mode"):
        assert key in str(error.value)


def test_names_of_registries_are_checked_against_the_registered_ones() -> None:
    names = {
        "trainer.algorithm.loss_reduction": REDUCTIONS.names(),
        "trainer.algorithm.policy_loss_type": POLICY_LOSSES.names(),
        "trainer.algorithm.off_policy_correction.tis_ratio_type": CORRECTIONS.names(),
        "trainer.trackers": ["tensorboard"],
    }
    assert validate(RunConfig(), names).errors == []
    config = settings("trainer.trackers=[tensorbord,my.Tracker]", "trainer.algorithm.loss_reduction=token_men")
    with pytest.raises(ConfigError) as error:
        raise_errors(validate(config, names).errors)
    assert "Did you mean tensorboard?" in str(error.value)
    assert "Did you mean token_mean?" in str(error.value)
    assert "my.Tracker" not in str(error.value)


def closed_choices() -> dict[str, tuple[str, ...]]:
    """By setting, the values of those that take no import path."""
    limits = {key: [limit for limit in _limits(kind) if isinstance(limit, OneOf)] for key, kind in _types().items()}
    return {key: found[0].names for key, found in limits.items() if found and not found[0].import_path}


@pytest.mark.parametrize("key", sorted(closed_choices()))
def test_a_closed_choice_takes_no_import_path(key: str) -> None:
    (error,) = [found for found in validate(settings(f"{key}=torch.bfloat16")).errors if "unknown" in found]
    assert f"{key}=torch.bfloat16 is unknown." in error


def test_the_choices_are_those_of_the_code_that_reads_them() -> None:
    assert set(closed_choices()["generator.pause_mode"]) == set(PauseMode)
    assert set(closed_choices()["trainer.policy.dtype"]) == set(DTYPES)


@pytest.mark.parametrize(
    ("overrides", "dataset_len", "expected"),
    [
        ([], 0, "no prompts"),
        ([], 15, "Set trainer.epochs=2, or trainer.policy_mini_batch_size=15"),
    ],
)
def test_a_data_set_too_small_is_refused(overrides: list[str], dataset_len: int, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        resolve(settings(*overrides), dataset_len)


def test_the_remedy_of_a_small_data_set_works() -> None:
    assert resolve(settings("trainer.epochs=2"), 15).total_steps == 1


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{OVERLAP}=true", f"{BOUND}=1", f"{DEPTH}=1"],
        [f"{OVERLAP}=true", f"{DEPTH}=0.5", f"{STREAMING}=8"],
        [f"{STREAMING}=16", f"{BOUND}=0"],
        [f"{EVERY}=3", f"{BOUND}=2"],
        ["trainer.fully_async.staleness_policy=drop", f"{BOUND}=0"],
    ],
)
def test_the_tightest_sizes_that_work_are_allowed(overrides: list[str]) -> None:
    assert validate(fully_async(*overrides)) == Validation([], [])


@pytest.mark.parametrize(
    ("overrides", "overlaps"),
    [
        ([f"{DEPTH}=1"], True),
        ([f"{DEPTH}=1", f"{OVERLAP}=false"], False),
        ([f"{DEPTH}=0.5"], False),
        ([f"{DEPTH}=0.5", f"{STREAMING}=8"], True),
        ([f"{DEPTH}=null"], False),
        ([f"{DEPTH}=null", f"{OVERLAP}=true"], True),
        (["trainer.mode=one_step_off"], True),
        (["trainer.mode=partial_rollout"], False),
    ],
)
def test_weight_syncs_overlap_where_a_given_depth_leaves_the_next_step_its_groups(
    overrides: list[str], overlaps: bool
) -> None:
    assert resolve(fully_async(*overrides), 1000).overlap_weight_sync is overlaps


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["trainer.partial_rollout.oversubmit_factor=0.9"], "must be at least 1"),
        (["trainer.partial_rollout.oversubmit_factor=inf"], "must be at least 1 and finite"),
        (["trainer.partial_rollout.oversubmit_factor=nan"], "must be at least 1 and finite"),
        (["trainer.partial_rollout.oversubmit_factor=2.5", f"{BOUND}=1"], "Set max_staleness_steps=2"),
        ([f"{BOUND}=-1"], "must be at least 0"),
    ],
)
def test_settings_that_cannot_work_with_partial_rollouts_are_errors(overrides: list[str], expected: str) -> None:
    assert expected in the_error(settings("trainer.mode=partial_rollout", *overrides))


@given(
    minibatch=st.integers(1, 64),
    bound=st.integers(-1, 8),
    depth=st.integers(-4, 36).map(lambda quarters: quarters / 4) | st.none(),
    workers=st.integers(0, 300) | st.none(),
    k=st.integers(0, 4),
    overlap=st.booleans(),
    streaming=st.integers(0, 70) | st.none(),
)
def test_the_staleness_manager_works_with_every_valid_configuration(
    minibatch: int,
    bound: int,
    depth: float | None,
    workers: int | None,
    k: int,
    overlap: bool,
    streaming: int | None,
) -> None:
    config = RunConfig()
    config.trainer.mode = TrainerMode.fully_async
    config.trainer.policy_mini_batch_size = minibatch
    config.trainer.fully_async = FullyAsyncConfig(
        max_staleness_steps=bound,
        generate_ahead_steps=depth,
        num_parallel_generation_workers=workers,
        weight_sync_interval=k,
        overlap_weight_sync=overlap,
        streaming_min_groups=streaming,
    )
    if validate(config).errors:
        chosen = derive.largest_depth(config)
        assert (
            bound < max(0, chosen + k - 1)
            or chosen < 0
            or k < 1
            or (workers is not None and workers < minibatch)
            or not 1 <= (streaming or minibatch) <= minibatch
            or streaming == 0
        )
        return
    plan = resolve(config, dataset_len=1000)
    manager = StalenessManager(
        batch_groups=minibatch,
        max_staleness_steps=plan.max_staleness_steps,
        generate_ahead_steps=plan.generate_ahead_steps,
        max_running=plan.num_workers,
        total_steps=1000,
        policy=resolve_staleness_policy("wait"),
        weight_sync_interval=plan.weight_sync_interval,
        overlap=plan.overlap_weight_sync,
    )
    # A depth that adapts begins with two steps.
    first = plan.capacity if plan.generate_ahead_steps is not None else min(plan.capacity, (2 + k) * minibatch)
    assert minibatch <= manager.capacity() == min(plan.num_workers, first)


@pytest.mark.parametrize("overrides", [[], ["trainer.policy.model.build.num_layers=3"]])
def test_parameters_are_counted_as_torch_counts_them(overrides: list[str]) -> None:
    model = settings(*overrides, base="quickstart").trainer.policy.model
    shape = model_shape(model)
    assert shape is not None
    config = AutoConfig.for_model(
        "llama",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        intermediate_size=shape.intermediate_size,
        tie_word_embeddings=False,
    )
    built = AutoModelForCausalLM.from_config(config)
    assert shape.num_parameters == sum(p.numel() for p in built.parameters())


def test_a_model_folders_shape_is_read_from_its_config(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "qwen3", num_key_value_heads=2, num_attention_heads=8, head_dim=16, tie_word_embeddings=True
    )
    config.save_pretrained(tmp_path)
    shape = model_shape(ModelConfig(path=str(tmp_path)))
    assert shape is not None
    assert (shape.num_kv_heads, shape.head_dim, shape.tied_embeddings) == (2, 16, True)


@pytest.mark.parametrize(("model_type", "tied"), [("gemma2", True), ("llama", False)])
def test_a_config_that_is_silent_about_its_head_has_its_types_default(
    tmp_path: Path, model_type: str, tied: bool
) -> None:
    config = AutoConfig.for_model(model_type)
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    written.pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(written))
    shape = model_shape(ModelConfig(path=str(tmp_path)))
    assert shape is not None and shape.tied_embeddings is tied
    assert AutoConfig.from_pretrained(tmp_path).tie_word_embeddings is tied


@pytest.mark.parametrize("other", [{"kv_lora_rank": 256}, {"layer_types": ["linear_attention", "full_attention"]}])
def test_layers_of_other_sizes_are_not_estimated(tmp_path: Path, other: dict[str, object]) -> None:
    AutoConfig.for_model("qwen3", layer_types=["full_attention"] * 2, num_hidden_layers=2).save_pretrained(tmp_path)
    assert model_shape(ModelConfig(path=str(tmp_path))) is not None
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | other))
    assert model_shape(ModelConfig(path=str(tmp_path))) is None


@pytest.mark.parametrize("text", ["{", "{}", json.dumps({"num_experts": 8})])
def test_a_shape_that_cannot_be_read_is_unknown_and_no_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    config = settings(f"trainer.policy.model.path={tmp_path}")
    assert model_shape(config.trainer.policy.model) is None
    assert resolve(config, 100).memory is None


def test_memory_adds_up() -> None:
    config = settings("generator.inference_engine.num_engines=2", "trainer.policy.dtype=bfloat16", base="quickstart")
    memory = resolve(config, 100).memory
    assert memory is not None
    n = memory.num_parameters
    assert memory.policy_bytes == n * (2 + 4)  # the weights and their float32 masters
    assert memory.optimizer_bytes == 8 * n
    assert memory.engine_weight_bytes == 2 * n * 4
    engine = config.generator.inference_engine
    per_token = 2 * 2 * 128 * 4  # keys and values, 2 layers, hidden size 128, float32
    assert memory.kv_cache_bytes == 2 * engine.max_num_seqs * 48 * per_token


def described(*overrides: str) -> tuple[Plan, str]:
    plan = resolve(settings(*overrides, base="quickstart"), 512)
    return plan, plan.describe()


def test_the_description_names_every_number_of_the_bound() -> None:
    _, text = described()
    for fact in (
        "fully_async",
        "300",
        "B=16",
        "n=8",
        "S=4",
        "D=1",
        "W=32",
        "v + 5",
        "= 32 groups",
        "runs/quickstart-N",
    ):
        assert fact in text, fact
    assert all(line.rstrip() == line for line in text.splitlines())


def test_the_description_of_sync_says_that_the_asynchronous_settings_do_not_count() -> None:
    _, text = described("trainer.mode=sync")
    assert "no effect in this mode" in text
    assert "S=" not in text


OWN_CODE = """import broken_package_that_is_not_there


class Outer:
    class Task:
        ...


async def run(prompt):
    ...


def reward(group):
    ...


def judge(group):
    ...
"""
AGENT = ("generator.name=harness", "generator.kwargs.agent=own.py:run")
SUMMED = (
    "rollout.stages.reward.function=skyrl_train.rollout.stages.reward:WeightedSum",
    "rollout.stages.reward.kwargs.functions=[own.py:reward,own.py:judge]",
)


@pytest.mark.parametrize(
    ("overrides", "rows"),
    [
        ([], ["generator gym", "environment run_length, up to 1 turn(s)", "reward by the environment"]),
        (
            ["environment.env_class=own.py:Outer.Task", "rollout.stages.reward.function=own.py:reward"],
            [
                "generator gym",
                "environment own.py:Outer.Task (own.py:5), up to 1 turn(s)",
                "reward by own.py:reward (own.py:13), in place of the environment's",
            ],
        ),
        (
            SUMMED,
            ["reward by the sum of own.py:reward (own.py:13), own.py:judge (own.py:17), in place of the environment's"],
        ),
        (AGENT, ["generator harness, which runs own.py:run (own.py:9) for each sample", "reward by the agent"]),
        (
            ["generator.name=harness", "generator.kwargs.command=[python,my agent.py]"],
            ["generator harness, which runs the program python 'my agent.py' for each sample"],
        ),
        (
            [*AGENT, "environment.env_class=verifiers:wordle"],
            ["environment verifiers:wordle", "reward by the agent"],
        ),
        (["generator.name=own.py:Outer"], ["generator own.py:Outer (own.py:4)", "reward by the generator"]),
        (["generator.name=skyrl"], ["generator skyrl, which calls the generator of skyrl-gym"]),
        (["generator.name=own.py:Missing"], ["generator own.py:Missing"]),
        (["generator.name=not_there.py:Missing"], ["generator not_there.py:Missing"]),
    ],
)
def test_the_plan_names_what_generates_and_what_rewards_without_executing_it(
    overrides: list[str], rows: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN_CODE)
    lines = [" ".join(line.split()) for line in described(*overrides)[1].splitlines()]
    assert [row for row in rows if row not in lines] == []
    if "generator.name=harness" in overrides:
        assert not any(line.startswith("environment run_length") for line in lines)


def test_the_plan_shows_the_correction_of_older_tokens() -> None:
    correction = "trainer.algorithm.off_policy_correction"
    assert "weights token: ratios up to 2" in described()[1]
    rules = f"{correction}.rejections=[{{statistic: ratio, level: sequence_mean, low: 0.5}}]"
    _, text = described(f"{correction}.tis_ratio_type=null", rules, f"{correction}.m2po_threshold=0.04")
    assert "rejected: ratio by sequence_mean outside [0.5, ]; rejected: M2PO beyond 0.04" in text
    assert "within [1 - 0.0003, 1 + 0.0004]" in described("trainer.algorithm.policy_loss_type=gspo")[1]


def test_the_description_names_the_staleness_policys_guarantee() -> None:
    assert "trained all the same, corrected and counted" in described("trainer.fully_async.staleness_policy=accept")[1]
    assert "never exceeded" in described("trainer.fully_async.staleness_policy=wait")[1]


def test_a_shortened_run_says_that_its_warm_up_is_longer() -> None:
    plan = resolve(settings("trainer.max_steps=3", "trainer.policy.optimizer_config.num_warmup_steps=10"), 100)
    assert "warm-up 10 steps, which this run does not reach the end of" in plan.describe()
    (warning,) = length_warnings(plan)
    assert "num_warmup_steps=10, and the run has 3 steps" in warning
    critic = ["trainer.algorithm.advantage_estimator=gae", "trainer.critic.optimizer_config.num_warmup_steps=4"]
    (warning,) = length_warnings(resolve(settings("trainer.max_steps=3", *critic), 100))
    assert warning.startswith("trainer.critic.optimizer_config.num_warmup_steps=4")
    exact = resolve(settings("trainer.max_steps=3", "trainer.policy.optimizer_config.num_warmup_steps=3"), 100)
    assert [*length_warnings(exact)] == []
    # A trial of a recipe may be short: it is printed, and no error with --strict.
    printed = StringIO()
    print_warnings(load_inputs(settings("trainer.max_steps=3", base="quickstart")), Console(file=printed), strict=True)
    assert "num_warmup_steps=10, and the run has 3 steps" in printed.getvalue()


def test_a_run_that_goes_beyond_its_epochs_says_so() -> None:
    def warnings(*overrides: str) -> list[str]:
        return [*length_warnings(resolve(settings(f"{MINIBATCH}=10", *overrides), 100))]

    (warning,) = warnings("trainer.epochs=3", "trainer.max_steps=31")
    assert "trainer.epochs=3 with trainer.max_steps=31, which alone ends the run, after 3.1 epochs" in warning
    assert warnings("trainer.epochs=3", "trainer.max_steps=30") == []  # a trial, or just as long
    assert warnings("trainer.epochs=3") == []
    assert warnings("trainer.max_steps=31") == []  # nobody asked for one epoch


@pytest.mark.parametrize(
    ("overrides", "slow"),
    [
        ([], []),
        (["trainer.device=cuda"], ["trainer.policy.dtype"]),
        (["trainer.device=cuda", "trainer.tf32=true"], []),
        (["trainer.device=cuda", "trainer.policy.dtype=bfloat16"], []),
        (["trainer.device=cuda", "trainer.policy.dtype=bfloat16", GAE], ["trainer.critic.dtype"]),
        (["trainer.device=cuda", "trainer.policy.dtype=bfloat16", GAE, "trainer.critic.device=cpu"], []),
        (["trainer.device=cuda", "trainer.tf32=true", GAE], []),
        (["trainer.device=cuda", f"{ENGINE}.device=cuda"], ["trainer.policy.dtype", f"{ENGINE}.dtype"]),
    ],
)
def test_a_plan_says_that_float32_is_slow_on_a_gpu(overrides: list[str], slow: list[str]) -> None:
    lines = resolve(settings(*overrides, base="quickstart"), 64).describe().splitlines()
    said = " ".join(line for line in lines if line.split()[0] == "precision")
    keys = ("trainer.policy.dtype", "trainer.critic.dtype", f"{ENGINE}.dtype")
    assert [key for key in keys if f"{key}=bfloat16" in said] == slow

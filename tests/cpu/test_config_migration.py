"""``--from skyrl``: settings of other libraries become ours, or are named with the reason."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from skyrl_train.config.compose import compose
from skyrl_train.config.keys import in_free_section, known_keys, setting
from skyrl_train.config.migration.table import UNSET
from skyrl_train.config.migration.translate import LIBRARIES, Migration, migrate
from skyrl_train.config.schema import (
    BuildModelConfig,
    RejectionConfig,
    RejectionLevel,
    ResumeMode,
    RunConfig,
    TrainingStrategy,
)
from skyrl_train.config.validate import validate
from skyrl_train.entrypoints.command_line import main
from skyrl_train.errors import ConfigError
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.observability.run import load_run

ENGINE = "generator.inference_engine"
BOTH = {  # settings of SkyRL's two example scripts of asynchronous training
    "data.train_data": "['gsm8k/train.parquet']",
    "data.val_data": "['gsm8k/test.parquet']",
    "trainer.algorithm.advantage_estimator": "grpo",
    "trainer.policy.model.path": "some/model",
    "trainer.placement.colocate_all": "false",
    "trainer.strategy": "fsdp",
    "trainer.placement.policy_num_gpus_per_node": "2",
    "trainer.placement.ref_num_gpus_per_node": "2",
    f"{ENGINE}.num_engines": "2",
    f"{ENGINE}.tensor_parallel_size": "1",
    "trainer.epochs": "3",
    "trainer.eval_batch_size": "512",
    "trainer.eval_before_train": "true",
    "trainer.eval_interval": "3",
    "trainer.update_epochs_per_batch": "1",
    "trainer.train_batch_size": "64",
    "trainer.policy_mini_batch_size": "64",
    "trainer.micro_forward_batch_size_per_gpu": "8",
    "trainer.micro_train_batch_size_per_gpu": "8",
    "trainer.ckpt_interval": "7",
    "trainer.max_prompt_length": "300",
    "generator.sampling_params.max_generate_length": "700",
    "trainer.policy.optimizer_config.lr": "2.0e-6",
    "trainer.algorithm.use_kl_loss": "true",
    f"{ENGINE}.backend": "vllm",
    f"{ENGINE}.run_engines_locally": "true",
    f"{ENGINE}.weight_sync_backend": "nccl",
    "generator.batched": "false",
    "environment.env_class": "gsm8k",
    "generator.n_samples_per_prompt": "4",
    f"{ENGINE}.gpu_memory_utilization": "0.7",
    "trainer.logger": "wandb",
    "trainer.project_name": "sums",
    "trainer.run_name": "sums-1",
    "trainer.resume_mode": "null",
    "trainer.ckpt_path": "checkpoints/sums",
}
ONE_STEP_OFF = BOTH | {"trainer.critic_mini_batch_size": "64"}
FULLY_ASYNC = BOTH | {
    "trainer.fully_async.enabled": "true",
    "trainer.fully_async.max_staleness_steps": "2",
    "trainer.fully_async.num_parallel_generation_workers": "128",
    "trainer.algorithm.policy_loss_type": "rollout_is",
    "trainer.algorithm.off_policy_correction.sequence_mask_metric": "geometric",
    "trainer.algorithm.off_policy_correction.geo_mask_high": "1.02",
    "trainer.algorithm.off_policy_correction.geo_mask_low": "0.98",
    "trainer.placement.critic_num_gpus_per_node": "2",
    f"{ENGINE}.async_engine": "true",
    f"{ENGINE}.enforce_eager": "false",
}


def skyrl(*overrides: str, **settings: str) -> Migration:
    return migrate("skyrl", [*(f"{key}={value}" for key, value in settings.items()), *overrides])


def test_the_settings_of_skyrls_script_for_one_step_off_training() -> None:
    migration = skyrl("trainer.mode=one_step_off", **ONE_STEP_OFF)
    assert len(ONE_STEP_OFF) == 37
    assert {name for name, reason in migration.without if reason} == {
        "trainer.critic_mini_batch_size",
        "trainer.micro_forward_batch_size_per_gpu",
        "trainer.project_name",
        "generator.batched",
    }
    config = migration.config
    trainer, generator = config.trainer, config.generator
    assert (trainer.mode, trainer.resume.value, trainer.run_dir) == ("one_step_off", "never", "checkpoints/sums")
    assert trainer.strategy is TrainingStrategy.fsdp2 and trainer.device == "cuda" and trainer.fsdp.num_workers == 2
    assert trainer.policy_mini_batch_size == 64 and trainer.micro_batch_tokens == 8 * (300 + 700)
    assert trainer.algorithm.kl_loss_coef == 0.001 and trainer.trackers == ["wandb"]
    assert config.rollout.stages.reference.executor == "colocated"
    assert generator.inference_engine.executor == "ray" and generator.sampling_params.max_tokens == 700
    assert generator.inference_engine.engine_args["gpu_memory_utilization"] == 0.7
    assert (generator.max_input_length, config.data.on_long_prompt) == (300, "filter")
    assert validate(config).errors == []


def test_42_of_the_46_settings_of_skyrls_script_for_fully_asynchronous_training() -> None:
    migration = skyrl(**FULLY_ASYNC)
    assert len(FULLY_ASYNC) == 46
    assert {name for name, *_ in migration.mapped} == FULLY_ASYNC.keys() - {name for name, _ in migration.without}
    assert {name for name, reason in migration.without if reason} == {
        "trainer.micro_forward_batch_size_per_gpu",
        "trainer.project_name",
        f"{ENGINE}.async_engine",
        "generator.batched",
    }
    asynchronous, algorithm = migration.config.trainer.fully_async, migration.config.trainer.algorithm
    assert migration.config.trainer.mode == "fully_async"
    assert (asynchronous.max_staleness_steps, asynchronous.generate_ahead_steps) == (2, 2)
    assert (asynchronous.num_parallel_generation_workers, asynchronous.staleness_policy) == (128, "accept")
    assert algorithm.policy_loss_type == "importance_sampling"
    correction = algorithm.off_policy_correction
    assert correction.tis_ratio_type == "icepop"
    assert (correction.icepop_ratio_low, correction.icepop_ratio_high) == (0.8, 1.2)
    assert correction.rejections == [RejectionConfig("ratio", RejectionLevel.sequence_mean, 0.98, 1.02)]
    assert validate(migration.config).errors == []


def test_each_setting_of_that_script_without_a_counterpart_has_a_reason_of_its_own() -> None:
    reasons = [reason for _, reason in skyrl(**FULLY_ASYNC).without]
    assert all(reasons) and "it has no counterpart" not in reasons


def test_defaults_of_skyrl_are_kept_and_named() -> None:
    migration = skyrl("trainer.epochs=2")
    for key, value in migration.defaults:
        if key in known_keys():
            assert setting(migration.config, key) == value != setting(RunConfig(), key)
    kept = dict(migration.defaults)
    assert kept["trainer.policy.optimizer_config.weight_decay"] == 0.01
    assert kept["generator.n_samples_per_prompt"] == 5 and kept["trainer.algorithm.kl_loss_coef"] == 0.001
    assert kept["trainer.eval.sampling_params.temperature"] == 0.0
    assert "trainer.epochs" not in kept and "trainer.algorithm.gamma" not in kept, "given, and the same here"


@pytest.mark.parametrize("theirs", ["", ", strategy: fsdp"])
def test_our_names_in_a_file_win_over_the_settings_of_skyrl(tmp_path: Path, theirs: str) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text(f"trainer: {{device: cpu{theirs}}}\nrollout: {{stages: {{reference: {{device: 'cuda:1'}}}}}}\n")
    migration = skyrl(str(file))
    assert migration.config.trainer.device == "cpu"
    assert migration.config.rollout.stages.reference.device == "cuda:1"
    assert not {"trainer.device", "rollout.stages.reference.device"} & dict(migration.defaults).keys()


def test_steps_count_batches_there_and_minibatches_here() -> None:
    trainer = skyrl(
        "trainer.train_batch_size=1024", "trainer.policy_mini_batch_size=256", "trainer.ckpt_interval=3"
    ).config.trainer
    assert (trainer.ckpt_interval, trainer.eval.interval) == (12, 20)
    assert skyrl("trainer.eval_interval=-1", "trainer.max_training_steps=5").config.trainer.max_steps == 20


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # Later minibatches of a batch are compared with the policy that sampled it.
        ([], {"trainer.algorithm.proximal_policy": "step", f"{ENGINE}.executor": "process", "trainer.strategy": "local"}),
        (
            ["trainer.placement.colocate_all=false"],
            {"trainer.algorithm.proximal_policy": "arrival", "trainer.algorithm.off_policy_correction.tis_ratio_type": None},
        ),
        (
            ["trainer.placement.policy_num_nodes=2", "trainer.placement.policy_num_gpus_per_node=8"],
            {"trainer.fsdp.num_workers": 16, "trainer.placement.colocate_all": True, f"{ENGINE}.executor": "ray"},
        ),
        (
            ["trainer.placement.colocate_all=false", "trainer.placement.colocate_policy_ref=false",
             "trainer.placement.ref_num_gpus_per_node=3"],
            {"rollout.stages.reference.executor": "workers", "rollout.stages.reference.num_workers": 3},
        ),
        (
            ["trainer.algorithm.use_kl_loss=false", "trainer.algorithm.use_kl_in_reward=true"],
            {"trainer.algorithm.kl_loss_coef": 0.0, "trainer.algorithm.kl_reward_coef": 0.001},
        ),
        (["trainer.algorithm.use_entropy_loss=true"], {"trainer.algorithm.entropy_coef": 0.01}),
        (["trainer.algorithm.policy_loss_type=gspo"], {"trainer.algorithm.eps_clip_low": 0.2}),
        (["trainer.algorithm.dynamic_sampling.type=replace"], {"trainer.algorithm.dynamic_sampling": "replace"}),
        (["trainer.fully_async.sample_full_batch=true"], {"trainer.algorithm.dynamic_sampling": "filter"}),
        (["trainer.max_tokens_per_microbatch=9000"], {"trainer.micro_batch_tokens": 9000}),
        (["trainer.ckpt_path=s3://bucket/sums"], {"trainer.ckpt_path": "s3://bucket/sums", "trainer.run_dir": None}),
        (["trainer.logger=console"], {"trainer.trackers": []}),
        (["environment.env_class=search", "environment.skyrl_gym.search.topk=5"], {"environment.kwargs": {"topk": 5}}),
        (["environment.env_class=other", "environment.skyrl_gym.search.topk=5"], {"environment.kwargs": {}}),
        (["generator.num_inference_engines=3"], {f"{ENGINE}.num_engines": 3}),
        (
            [f"{ENGINE}.run_engines_locally=false", f"{ENGINE}.external_server_urls=['http://a:1']"],
            {f"{ENGINE}.backend": "vllm_remote", f"{ENGINE}.remote_urls": ["http://a:1"]},
        ),
        (
            [f"{ENGINE}.engine_init_kwargs.hf_overrides.a.b=2", "generator.chat_template_kwargs.enable_thinking=false"],
            {"generator.chat_template_kwargs": {"enable_thinking": False}},
        ),
    ],
)  # fmt: skip
def test_settings_that_belong_together(overrides: list[str], expected: dict[str, object]) -> None:
    config = skyrl(*overrides).config
    assert {key: setting(config, key) for key in expected} == expected


def test_a_file_with_interpolations_and_overrides_behind_it(tmp_path: Path) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text(
        "defaults: [_self_, {megatron_config: policy}]\n"
        "trainer:\n  {epochs: 3, max_prompt_length: 100, policy: {model: {path: a/b}}, "
        "ref: {model: {path: '${trainer.policy.model.path}'}}}\n"
        "data: {seed: 5}\n"
        "generator:\n  {max_input_length: '${trainer.max_prompt_length}', "
        "inference_engine: {engine_init_kwargs: {hf_overrides: {a: 1}}}}\n"
    )
    migration = migrate(
        "skyrl", [str(file), "trainer.epochs=4", "trainer.samples_per_step=7", "data.sampler=sequential"]
    )
    config = migration.config
    assert (config.trainer.epochs, config.generator.max_input_length, config.trainer.policy.model.path) == (
        4,
        100,
        "a/b",
    )
    assert config.generator.inference_engine.engine_args["hf_overrides"] == {"a": 1}
    assert (config.trainer.samples_per_step, config.data.sampler) == (7, "sequential"), (
        "ours alone, applied as they are"
    )
    assert config.data.seed == 5, "ours alone in the file"
    assert [name for name, _ in migration.without] == ["defaults", "trainer.ref.model.path"]
    assert '{"megatron_config": "policy"}' in migration.without[0][1] and "--cfg job" in migration.without[0][1]


def test_a_setting_that_a_table_lacks_is_named_and_left_out() -> None:
    migration = migrate("trl", ["learning_rate=1e-6", "unheard_of=1", "num_generation=4"])
    assert [name for name, _, _, _ in migration.mapped] == ["learning_rate"]
    assert dict(migration.without) == {
        "unheard_of": "it is not in our table of TRL's settings.",
        "num_generation": "it is not in our table of TRL's settings. Did you mean num_generations?",
    }


def test_a_file_may_be_toml(tmp_path: Path) -> None:
    file = tmp_path / "rl.toml"
    file.write_text(
        'max_steps = 200\n[ckpt]\ninterval = 50\n[model]\nname = "a/b"\n[orchestrator]\nbatch_size = 128\ngroup_size = 8\n'
        '[[orchestrator.train.source]]\nname = "wordle"\n'
    )
    migration = migrate("prime-rl", [str(file), "orchestrator.group_size=16"])
    trainer = migration.config.trainer
    assert (trainer.max_steps, trainer.ckpt_interval, trainer.policy.model.path) == (200, 50, "a/b")
    assert trainer.policy_mini_batch_size == 8
    assert [name for name, _ in migration.without] == ["orchestrator.train.source"]
    file.write_text("max_steps: 200")
    with pytest.raises(ConfigError, match=r"rl.toml does not hold readable settings"):
        migrate("prime-rl", [str(file)])


def test_the_classes_of_hydras_sections_are_not_named(tmp_path: Path) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text("actor_rollout_ref: {actor: {_target_: verl.workers.config.ActorConfig, ppo_epochs: 2}}\n")
    assert migrate("verl", [str(file)]).without == []


def test_an_empty_section_of_a_file_is_not_named(tmp_path: Path) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text("trainer:\ngenerator: {n_samples_per_prompt: 3}\n")
    migration = migrate("skyrl", [str(file)])
    assert migration.without == [] and [name for name, _, _, _ in migration.mapped] == [
        "generator.n_samples_per_prompt"
    ]


def test_settings_without_a_model_and_data_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--from", "trl", "learning_rate=1e-6"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "These settings of TRL name neither a model nor data. Add ours: trainer.policy.model.path=MODEL" in told


def test_hydras_defaults_without_other_files_are_not_named(tmp_path: Path) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text("defaults: [_self_]\ntrainer: {epochs: 3}\n")
    assert migrate("skyrl", [str(file)]).without == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["trainer.polcy_mini_batch_size=4"],
            "neither SkyRL nor skyrl_train. Did you mean trainer.policy_mini_batch_size",
        ),
        (["trainer.strategy=megatron"], r"trainer.strategy \(in SkyRL's settings\) must be one of local, fsdp2"),
        (["trainer.epochs=many"], "trainer.epochs=many .* must be a number"),
        (["~trainer.epochs=1"], "leave the setting out"),
        (["a.yaml", "b.yaml"], "takes one file"),
        (["missing.yaml"], "cannot read missing.yaml"),
        (["trainer.run_name=${nothing.there}"], "readable settings"),
        (["trainer.samples_per_step=-1", "trainer.samples_per_step=x"], "must be an integer"),
        (["trainer.max_training_steps=many"], "trainer.max_training_steps=many .* cannot be translated"),
        (["trainer.ckpt_path=[a]"], "trainer.ckpt_path=.* cannot be translated"),
        (["trainer.eval_interval=often"], "trainer.eval_interval=often"),
    ],
)
def test_mistakes_name_the_setting(arguments: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        migrate("skyrl", arguments)


def test_a_value_that_does_not_fit_our_setting_is_told_under_their_name() -> None:
    told = r"num_generations=1.5 \(in TRL's settings\): generator.n_samples_per_prompt must be an integer, got 1.5"
    with pytest.raises(ConfigError, match=told):
        migrate("trl", ["num_generations=1.5"])


def test_a_rule_that_is_none_is_named() -> None:
    rules = [f"algorithm.rollout_correction.{text}" for text in ("rollout_rs=tokens_k1", "rollout_rs_threshold=2.0")]
    with pytest.raises(ConfigError, match=r"rollout_rs=tokens_k1 .* tokens_k1 begins with none of token, seq_sum"):
        migrate("verl", rules)


def test_a_minibatch_of_0_is_told_as_without_from() -> None:
    assert "trainer.policy_mini_batch_size=0" in validate(skyrl("trainer.policy_mini_batch_size=0").config).errors[0]


def test_an_unknown_library_is_told() -> None:
    with pytest.raises(ConfigError, match="Did you mean skyrl"):
        migrate("skylr", ["trainer.epochs=1"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trainer.algorithm.policy_loss_type", "dppo"),
        ("generator.chat_template.name_or_path", "qwen3_with_thinking"),
    ],
)
def test_a_value_without_a_counterpart_is_named(name: str, value: str) -> None:
    assert [key for key, _ in skyrl(f"{name}={value}").without] == [name]


@pytest.mark.parametrize(
    ("library", "path", "mode"),
    [
        ("skyrl", "trainer.resume_path", "trainer.resume_mode=from_path"),
        ("verl", "trainer.resume_from_path", "trainer.resume_mode=resume_path"),
    ],
)
def test_a_checkpoint_to_resume_from_is_one_of_a_run_of_this_library(library: str, path: str, mode: str) -> None:
    trainer = migrate(library, [f"{path}=runs/x-1/checkpoints/global_step_250", mode]).config.trainer
    assert (trainer.run_dir, trainer.resume_step, trainer.resume) == ("runs/x-1", 250, ResumeMode.latest)
    trainer = migrate(library, [f"{path}=runs/x-1/checkpoints/global_step_250"]).config.trainer
    assert (trainer.run_dir, trainer.resume_step) == (None, None), "only that mode reads the path"
    other = migrate(library, [f"{path}=/ckpts/global_step_250", mode])
    assert [key for key, _ in other.without] == [path] and other.config.trainer.resume_step is None


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_tables_name_settings_that_exist(library: str) -> None:
    rows = LIBRARIES[library].settings
    assert all(row.note for row in rows if row.here is None), "a setting without a counterpart needs the reason"
    mapped = [row.here.removesuffix(".*") for row in rows if row.here is not None]
    assert [key for key in mapped if key not in known_keys() and not in_free_section(key)] == []
    assert len({(row.name, row.here) for row in rows}) == len(rows)
    for name in {row.name for row in rows}:
        assert sum(row.default is not UNSET for row in rows if row.name == name) <= 1


def test_the_notes_name_pages_that_exist() -> None:
    docs = Path(__file__).parents[2] / "docs"
    named = {page for each in LIBRARIES.values() for row in each.settings for page in re.findall(r"\w+\.md", row.note)}
    assert named and named <= {page.name for page in docs.rglob("*.md")}


CORRECTION = "trainer.algorithm.off_policy_correction"


@pytest.mark.parametrize(
    ("library", "overrides", "expected"),
    [
        (
            "verl",
            ["data.train_batch_size=1024", "actor_rollout_ref.actor.ppo_mini_batch_size=256", "trainer.total_training_steps=100",
             "trainer.test_freq=5", "trainer.save_freq=20", "actor_rollout_ref.actor.optim.lr_warmup_steps=10"],
            {"trainer.train_batch_size": 1024, "trainer.policy_mini_batch_size": 256, "trainer.max_steps": 400,
             "trainer.eval.interval": 20, "trainer.ckpt_interval": 80,
             "trainer.policy.optimizer_config.num_warmup_steps": 40},
        ),
        (
            "verl",
            ["data.train_batch_size=0", "actor_rollout_ref.actor.ppo_mini_batch_size=256", "trainer.total_training_steps=100",
             "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.05"],
            {"trainer.train_batch_size": None, "trainer.max_steps": 100,
             "trainer.policy.optimizer_config.num_warmup_steps": 5},
        ),
        (
            "verl",
            ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0.01",
             "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean", "data.max_response_length=99",
             "async_training.partial_rollout=false", "trainer.n_gpus_per_node=4", "trainer.nnodes=2", "trainer.test_freq=-1"],
            {"trainer.algorithm.kl_loss_coef": 0.01, "trainer.algorithm.loss_reduction": "sequence_mean",
             "generator.sampling_params.max_tokens": 99, "generator.pause_mode": "wait", "trainer.fsdp.num_workers": 8,
             "trainer.eval.interval": 0},
        ),
        (
            "verl",
            ["actor_rollout_ref.actor.clip_ratio=0.1", "actor_rollout_ref.actor.clip_ratio_high=0.3",
             "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.05", "trainer.total_training_steps=200",
             "actor_rollout_ref.actor.optim.optimizer=AdamW", "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla",
             "algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=low_var_kl", "data.truncation=left", "data.shuffle=false",
             "data.filter_overlong_prompts=true", "critic.optim.lr=1e-5", "algorithm.adv_estimator=rloo_vectorized",
             "actor_rollout_ref.rollout.val_kwargs.do_sample=false", "actor_rollout_ref.actor.fsdp_config.fsdp_size=-1",
             "algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is_threshold=0.5_4.0",
             "trainer.v1.trainer_mode=separate_async", "trainer.v1.sampler.max_off_policy_strategy=drop"],
            {"trainer.algorithm.eps_clip_low": 0.1, "trainer.algorithm.eps_clip_high": 0.3,
             "trainer.policy.optimizer_config.num_warmup_steps": 10, "trainer.algorithm.policy_loss_type": "dual_clip",
             "trainer.algorithm.kl_reward_coef": 0.001, "trainer.algorithm.kl_estimator_type": "k3",
             "data.on_long_prompt": "filter", "data.sampler": "sequential", "trainer.critic.optimizer_config.lr": 1e-5,
             "trainer.algorithm.advantage_estimator": "rloo", "trainer.eval.sampling_params": {"temperature": 0.0},
             "trainer.fsdp.shard_size": None, f"{CORRECTION}.tis_ratio_type": "icepop",
             f"{CORRECTION}.icepop_ratio_low": 0.5, f"{CORRECTION}.icepop_ratio_high": 4.0,
             f"{CORRECTION}.token_tis_ratio_clip_high": 2.0, "trainer.mode": "fully_async",
             "trainer.fully_async.staleness_policy": "drop"},
        ),
        (
            "verl",
            ["actor_rollout_ref.actor.policy_loss.loss_mode=cispo", "actor_rollout_ref.actor.clip_ratio=0.2",
             "actor_rollout_ref.actor.clip_ratio_high=5.0", "algorithm.use_kl_in_reward=false", "algorithm.kl_penalty=abs",
             "algorithm.kl_ctrl.kl_coef=0.5", "data.truncation=left", "algorithm.rollout_correction.rollout_is=null",
             "algorithm.rollout_correction.rollout_rs=token_k1,seq_mean_k3",
             "algorithm.rollout_correction.rollout_rs_threshold='0.5_2.0,0.1'",
             "actor_rollout_ref.actor.optim.lr_warmup_steps=7", "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.5"],
            {"trainer.algorithm.policy_loss_type": "cispo", "trainer.algorithm.cispo.cispo_eps_clip_low": 0.2,
             "trainer.algorithm.cispo.cispo_eps_clip_high": 5.0, "trainer.algorithm.eps_clip_high": None,
             "trainer.algorithm.kl_reward_coef": 0.0, "trainer.algorithm.kl_estimator_type": "k3",
             "data.on_long_prompt": "truncate", "trainer.policy.optimizer_config.num_warmup_steps": 7,
             f"{CORRECTION}.tis_ratio_type": None, f"{CORRECTION}.allow_uncorrected": False,
             f"{CORRECTION}.rejections": [
                 RejectionConfig("k1", RejectionLevel.token, math.log(0.5), math.log(2.0)),
                 RejectionConfig("k3", RejectionLevel.sequence_mean, None, 0.1)]},
        ),
        (
            "verl",
            ["algorithm.rollout_correction.rollout_is=sequence", "algorithm.rollout_correction.rollout_is_threshold=3",
             "algorithm.rollout_correction.rollout_rs=seq_sum_k1", "algorithm.rollout_correction.rollout_rs_threshold=4.0"],
            {f"{CORRECTION}.tis_ratio_type": "sequence", f"{CORRECTION}.sequence_tis_ratio_clip_high": 3.0,
             f"{CORRECTION}.token_tis_ratio_clip_high": 2.0, f"{CORRECTION}.rejections": [
                 RejectionConfig("k1", RejectionLevel.sequence_sum, math.log(1 / 4), math.log(4.0))]},
        ),
        (
            "verl",
            ["algorithm.rollout_correction.rollout_is=null"],
            {f"{CORRECTION}.tis_ratio_type": None, f"{CORRECTION}.allow_uncorrected": True},
        ),
        (  # minibatches of a batch, also where its trainer is asynchronous; the warm-up counts each of its updates there
            "verl",
            ["trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.parameter_sync_step=4",
             "trainer.v1.sampler.max_off_policy_threshold=2", "trainer.v1.sampler.max_off_policy_strategy=wait",
             "data.train_batch_size=128", "actor_rollout_ref.actor.ppo_mini_batch_size=32", "trainer.total_training_steps=100",
             "trainer.save_freq=10", "actor_rollout_ref.actor.optim.lr_warmup_steps=7"],
            {"trainer.mode": "fully_async", "trainer.fully_async.weight_sync_interval": 4,
             "trainer.fully_async.max_staleness_steps": 7, "trainer.fully_async.staleness_policy": "wait",
             "trainer.max_steps": 400, "trainer.ckpt_interval": 40,
             "trainer.policy.optimizer_config.num_warmup_steps": 7},
        ),
        (  # at most (1 + 0.5) x 4 x 2 minibatches between two weight syncs
            "verl",
            ["async_training.staleness_threshold=0.5", "async_training.trigger_parameter_sync_step=4",
             "async_training.require_batches=2", "data.train_batch_size=0", "trainer.test_freq=10",
             "actor_rollout_ref.actor.ppo_mini_batch_size=32", "actor_rollout_ref.actor.optim.lr_warmup_steps=5"],
            {"trainer.mode": "fully_async", "trainer.fully_async.weight_sync_interval": 8,
             "trainer.fully_async.generate_ahead_steps": 4.0, "trainer.fully_async.max_staleness_steps": 11,
             "trainer.fully_async.staleness_policy": "accept", "trainer.eval.interval": 80,
             "trainer.policy.optimizer_config.num_warmup_steps": 10},
        ),
        (
            "verl",
            ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4",
             "actor_rollout_ref.rollout.val_kwargs.do_sample=false", "actor_rollout_ref.rollout.val_kwargs.temperature=0.6",
             "actor_rollout_ref.actor.optim.warmup_style=cosine"],
            {"trainer.micro_batch_tokens": 4 * 8192, "trainer.fsdp.sequence_parallel_size": 4,
             "trainer.eval.sampling_params": {"temperature": 0.6}, "trainer.policy.optimizer_config.scheduler": "cosine"},
        ),
        (
            "trl",
            ["max_staleness=3", "weight_sync_steps=2"],
            {"trainer.fully_async.max_staleness_steps": 7, "trainer.fully_async.weight_sync_interval": 2},
        ),
        (
            "trl",
            ["lr_scheduler_type=constant_with_warmup", "use_peft=true", "max_prompt_length=null",
             "generation_kwargs.stop=</answer>"],
            {"trainer.policy.optimizer_config.scheduler": "constant", "trainer.policy.model.lora.rank": 16,
             "trainer.policy.model.lora.alpha": 32.0, "generator.max_input_length": 256,
             "generator.sampling_params.stop": ["</answer>"]},
        ),
        (
            "trl",
            ["num_generations=4", "epsilon=0.1", "loss_type=dr_grpo", "scale_rewards=none", "use_vllm=true", "top_k=0",
             "max_steps=-1", "max_completion_length=128"],
            {"generator.n_samples_per_prompt": 4, "generator.sampling_params.max_tokens": 128,
             "trainer.algorithm.max_seq_len": 128, "trainer.algorithm.eps_clip_high": 0.1,
             "trainer.algorithm.loss_reduction": "seq_mean_token_sum_norm", "trainer.algorithm.grpo_norm_by_std": False,
             f"{ENGINE}.backend": "vllm", "generator.sampling_params.top_k": -1, "trainer.max_steps": None},
        ),
        (
            "trl",
            ["loss_type=cispo", "epsilon_high=5.0", "importance_sampling_level=token", "adam_beta2=0.95", "use_peft=true",
             "lora_r=8", "use_vllm=true", "vllm_mode=server", "vllm_server_base_url=http://a:1", "eval_steps=7",
             "eval_strategy=no", "save_strategy=no", "dtype=float32", "bf16=true", "max_staleness=3", "use_cpu=true",
             "max_tool_calling_iterations=2", "dataset_name=openai/gsm8k", "dataset_config=main", "shuffle_dataset=false"],
            {"trainer.algorithm.policy_loss_type": "cispo", "trainer.algorithm.cispo.cispo_eps_clip_high": 4.0,
             "trainer.algorithm.eps_clip_high": None, "trainer.algorithm.loss_reduction": "token_mean",
             "trainer.policy.optimizer_config.adam_betas": [0.9, 0.95], "trainer.policy.model.lora.rank": 8,
             f"{ENGINE}.backend": "vllm_remote", f"{ENGINE}.remote_urls": ["http://a:1"], "trainer.eval.interval": 0,
             "trainer.ckpt_interval": 0, "trainer.policy.dtype": "bfloat16", "trainer.mode": "fully_async",
             "trainer.fully_async.max_staleness_steps": 3, "trainer.fully_async.staleness_policy": "drop",
             "trainer.device": "cpu", "generator.max_turns": 3, "data.train_data": ["openai/gsm8k:main:train"],
             "data.sampler": "sequential"},
        ),
        (
            "trl",
            ["delta=3.5", "importance_sampling_level=token", "epsilon=0.1", "epsilon_high=null", "save_strategy=steps",
             "save_steps=9", "loss_type=bnpo", "optim=adamw_torch", "multi_objective_aggregation=sum_then_normalize",
             "resume_from_checkpoint=true", "num_generations_eval=null", "vllm_importance_sampling_cap=2.5"],
            {"trainer.algorithm.policy_loss_type": "dual_clip", "trainer.algorithm.clip_ratio_c": 3.5,
             "trainer.algorithm.eps_clip_low": 0.1, "trainer.algorithm.eps_clip_high": 0.1, "trainer.ckpt_interval": 9,
             "trainer.algorithm.loss_reduction": "token_mean", "trainer.eval.n_samples_per_prompt": 1,
             f"{CORRECTION}.tis_ratio_type": "sequence", f"{CORRECTION}.sequence_tis_ratio_clip_high": 2.5,
             f"{CORRECTION}.rejections": [RejectionConfig("ratio", RejectionLevel.sequence_sum, None, 2.5)]},
        ),
        (
            "trl",
            ["loss_type=sapo", "sapo_temperature_neg=1.5", "vllm_importance_sampling_mode=token_mask",
             "vllm_importance_sampling_clip_max=4.0", "vllm_importance_sampling_clip_min=0.25"],
            {"trainer.algorithm.policy_loss_type": "sapo", "trainer.algorithm.loss_reduction": "sequence_mean",
             "trainer.algorithm.sapo.tau_neg": 1.5, f"{CORRECTION}.tis_ratio_type": "icepop",
             f"{CORRECTION}.icepop_ratio_low": 0.25, f"{CORRECTION}.icepop_ratio_high": 4.0, f"{CORRECTION}.rejections": [],
             f"{CORRECTION}.token_tis_ratio_clip_high": 2.0},
        ),
        (
            "trl",
            ["num_train_epochs=3.0", "warmup_steps=0", "run_name=null", "bf16=null", "eval_steps=null", "torch_dtype=bfloat16"],
            {"trainer.epochs": 3, "trainer.policy.optimizer_config.num_warmup_steps": 0, "trainer.run_name": "run",
             "trainer.policy.dtype": "bfloat16"},
        ),
        (
            "trl",
            ["max_steps=200", "num_train_epochs=0.5", "warmup_steps=0", "warmup_ratio=0.1", "save_total_limit=3"],
            {"trainer.max_steps": 200, "trainer.policy.optimizer_config.num_warmup_steps": 20,
             "trainer.max_ckpts_to_keep": 3},
        ),
        (
            "trl",
            ["vllm_importance_sampling_mode=token_mask"],
            {f"{CORRECTION}.tis_ratio_type": "icepop", f"{CORRECTION}.icepop_ratio_low": 0.0,
             f"{CORRECTION}.icepop_ratio_high": 3.0},
        ),
        (
            "trl",
            ["vllm_importance_sampling_correction=true"],
            {f"{CORRECTION}.tis_ratio_type": "sequence", f"{CORRECTION}.sequence_tis_ratio_clip_high": 3.0,
             f"{CORRECTION}.rejections": [RejectionConfig("ratio", RejectionLevel.sequence_sum, None, 3.0)]},
        ),
        (
            "trl",
            ["vllm_importance_sampling_mode=token_truncate", "vllm_importance_sampling_clip_max=4.0"],
            {f"{CORRECTION}.tis_ratio_type": "token", f"{CORRECTION}.token_tis_ratio_clip_high": 4.0,
             f"{CORRECTION}.allow_uncorrected": False, f"{CORRECTION}.rejections": []},
        ),
        (
            "trl",
            ["vllm_importance_sampling_mode=sequence_mask", "vllm_importance_sampling_correction=false"],
            {f"{CORRECTION}.tis_ratio_type": None, f"{CORRECTION}.allow_uncorrected": True, f"{CORRECTION}.rejections": []},
        ),
        (
            "prime-rl",
            ["orchestrator.batch_size=128", "orchestrator.group_size=16", "orchestrator.max_off_policy_steps=3"],
            {"trainer.policy_mini_batch_size": 8, "trainer.mode": "fully_async",
             "trainer.fully_async.staleness_policy": "drop", "trainer.fully_async.max_staleness_steps": 3},
        ),
        (
            "prime-rl",
            ["output_dir=outputs", "run.name=wordle", "inference.vllm.data_parallel_size=4"],
            {"trainer.runs_dir": "outputs", "trainer.run_name": "wordle", "trainer.run_dir": None, f"{ENGINE}.num_engines": 4},
        ),
        (
            "areal",
            ["rollout.max_head_offpolicyness=4"],
            {"trainer.mode": "fully_async", "trainer.fully_async.generate_ahead_steps": 4,
             "trainer.fully_async.max_staleness_steps": 4, "trainer.fully_async.staleness_policy": "accept"},
        ),
        (
            "areal",
            ["rollout.max_head_offpolicyness=2", "actor.ppo_n_minibatches=4", "train_dataset.batch_size=256",
             "rollout.consumer_batch_size=256", "total_train_steps=100", "actor.eps_clip=0.4", "gconfig.n_samples=4"],
            {"trainer.policy_mini_batch_size": 64, "trainer.fully_async.weight_sync_interval": 4,
             "trainer.fully_async.generate_ahead_steps": 8, "trainer.fully_async.max_staleness_steps": 11,
             "trainer.max_steps": 400, "trainer.algorithm.eps_clip_low": 0.4, "trainer.algorithm.eps_clip_high": 0.4,
             "generator.n_samples_per_prompt": 4, "trainer.train_batch_size": None},
        ),
        (
            "areal",
            ["rollout.max_head_offpolicyness=0", "actor.ppo_n_minibatches=4", "train_dataset.batch_size=256",
             "actor.eps_clip=0.2", "actor.eps_clip_higher=0.28", "train_dataset.shuffle=false"],
            {"trainer.mode": "sync", "trainer.policy_mini_batch_size": 64, "trainer.train_batch_size": 256,
             "trainer.fully_async.weight_sync_interval": 1, "trainer.algorithm.eps_clip_high": 0.28,
             "data.sampler": "sequential"},
        ),
    ],
)  # fmt: skip
def test_other_libraries(library: str, overrides: list[str], expected: dict[str, object]) -> None:
    migration = migrate(library, overrides)
    assert {key: setting(migration.config, key) for key in expected} == expected
    assert migration.defaults == [], "only SkyRL's table has defaults"


@pytest.mark.parametrize(
    ("library", "given", "trainer", "engine", "told"),
    [
        ("trl", "learning_rate=1e-6", "cpu", "cpu", f"trainer.device=cpu and {ENGINE}.device=cpu, as by default here."),
        ("trl", "use_cpu=false", "cuda", "cuda", None),
        ("trl", "use_cpu=true", "cpu", "cpu", None),
        ("verl", "data.seed=1", "cpu", "cpu", f"trainer.device=cpu and {ENGINE}.device=cpu, as by default here."),
        ("verl", "trainer.device=cuda", "cuda", "cuda", None),
        ("areal", f"{ENGINE}.device=cuda", "cpu", "cuda", "Not named there: trainer.device=cpu, as"),
        ("skyrl", "trainer.epochs=1", "cuda", "cuda", None),
    ],
)
def test_the_device_is_that_of_the_other_library_or_said_to_be_a_cpu(
    library: str, given: str, trainer: str, engine: str, told: str | None
) -> None:
    migration = migrate(library, [given])
    devices = migration.config.trainer.device, migration.config.generator.inference_engine.device
    assert devices == (trainer, engine)
    described = migration.describe()
    assert "Not named there" not in described if told is None else told in described


@pytest.mark.parametrize(
    ("library", "given", "reason"),
    [
        ("verl", "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1", "counts steps"),
        ("verl", "algorithm.adv_estimator=remax", "no such estimator"),
        ("verl", "actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean", "no such loss"),
        ("verl", "actor_rollout_ref.actor.fsdp_config.dtype=fp16", "float32 or bfloat16"),
        ("verl", "actor_rollout_ref.actor.kl_loss_type=full", "the estimators k1, k2 and k3"),
        ("verl", "data.truncation=middle", "removes the beginning"),
        ("verl", "trainer.v1.trainer_mode=colocate_async", "sync and separate_async"),
        ("verl", "critic.ppo_epochs=2", "trains on the minibatches of the policy"),
        ("verl", "reward.num_workers=4", "takes a function"),
        ("verl", "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum", "no such reduction"),
        ("trl", "lr_scheduler_type=polynomial", "scheduler=path.to.Schedule"),
        ("trl", "loss_type=vespo", "there is no loss vespo here"),
        ("trl", "vllm_importance_sampling_clip_max=null", "weights have an upper bound here"),
        ("trl", "optim=adafactor", "the optimizer is AdamW"),
        ("trl", "eval_strategy=epoch", "trainer.eval.interval counts steps"),
        ("trl", "save_strategy=best", "trainer.eval.best_metric keeps the best"),
        ("trl", "dtype=float16", "float32 or bfloat16"),
        ("trl", "resume_from_checkpoint=out/checkpoint-5", "name the run in trainer.run_dir"),
        ("trl", "multi_objective_aggregation=normalize_then_sum", "summed before advantages"),
        ("trl", "num_train_epochs=0.5", "counts whole passes"),
        ("trl", "warmup_ratio=0.1", "a share needs their number"),
        ("trl", "save_total_limit=null", "not all checkpoints are kept"),
        ("verl", "trainer.max_actor_ckpt_to_keep=null", "not all checkpoints are kept"),
        ("trl", "report_to=all", "trainer.trackers has names"),
        ("trl", "logging_steps=1", "each step is logged"),
        ("trl", "model_init_kwargs.attn_implementation=sdpa", "as it is in its folder"),
    ],
)
def test_what_another_library_has_alone_is_named_with_the_reason(library: str, given: str, reason: str) -> None:
    [(name, said)] = migrate(library, [given]).without
    assert name == given.partition("=")[0] and reason in said and "not in our table" not in said


SMALL = [  # of SkyRL's names and of ours: trains on a CPU within seconds
    "environment.env_class=run_length", "data.train_data=[]", "trainer.eval_interval=-1", "trainer.bf16=false",
    "trainer.gradient_checkpointing=false", "trainer.algorithm.use_kl_loss=false", "trainer.strategy=local",
    f"{ENGINE}.backend=embedded", f"{ENGINE}.model_dtype=float32", "trainer.train_batch_size=4",
    "trainer.policy_mini_batch_size=4", "generator.n_samples_per_prompt=2", "generator.sampling_params.max_generate_length=8",
    "trainer.max_prompt_length=16", "trainer.micro_train_batch_size_per_gpu=8", "trainer.max_training_steps=1",
    "trainer.policy.model.path=null", "trainer.policy.model.build.alphabet='0123456789=abcdef'", "trainer.device=cpu",
    f"{ENGINE}.device=cpu", "generator.batched=true",
]  # fmt: skip


def test_plan_prints_the_names_that_change_the_defaults_and_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--from", "skyrl", *SMALL]) == 0
    printed = capsys.readouterr().out
    assert "SkyRL: 17 of 18 settings have a counterpart." in printed
    assert "trainer.max_training_steps=1 -> trainer.max_steps=1" in printed
    assert "trainer.policy.optimizer_config.weight_decay=0.01" in printed
    assert "generator.batched: engines batch" in printed
    assert main(["plan", "--strict", "--from", "skyrl", *SMALL]) == 2


def test_a_file_of_skyrls_settings_trains_its_environment(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("skyrl_gym")
    build_model_folder(
        BuildModelConfig(alphabet="0123456789+=# ", hidden_size=32, num_layers=1), tmp_path / "model", seed=0
    )
    prompts = [[{"role": "user", "content": f"{digit}+1="}] for digit in range(8)]
    answers = [{"method": "rule", "ground_truth": str(digit + 1)} for digit in range(8)]
    rows = [
        {"data_source": "sums", "prompt": prompt, "env_class": "gsm8k", "reward_spec": answer}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    file = {
        "data": {"train_data": [str(tmp_path / "train.parquet")]},
        "environment": {"env_class": "gsm8k"},
        "trainer": {
            "epochs": 1,
            "eval_interval": -1,
            "train_batch_size": 4,
            "policy_mini_batch_size": 4,
            "micro_train_batch_size_per_gpu": 8,
            "max_prompt_length": 32,
            "max_training_steps": 1,
            "ckpt_interval": -1,
            "algorithm": {"advantage_estimator": "grpo", "use_kl_loss": False},
            "policy": {"model": {"path": str(tmp_path / "model")}},
            "logger": "console",
        },
        "generator": {"n_samples_per_prompt": 2, "sampling_params": {"max_generate_length": 8}},
    }
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(file))
    here = [  # a machine without GPUs
        "trainer.device=cpu", "trainer.strategy=local", "trainer.bf16=false", "trainer.gradient_checkpointing=false",
        f"{ENGINE}.backend=embedded", f"{ENGINE}.device=cpu", f"{ENGINE}.model_dtype=float32", f"{ENGINE}.executor=thread",
        f"trainer.run_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    assert main(["train", "--from", "skyrl", str(tmp_path / "theirs.yaml"), *here]) == 0, capfd.readouterr().err
    assert dict(load_run(tmp_path / "run").metrics["async/trained"]) == {1: 4.0}


def test_launch_writes_the_translated_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "docker", "--from", "skyrl", "--folder", "job", *SMALL]) == 0
    translated, written = skyrl(*SMALL).config, compose("job/recipe.yaml")
    run_dir = written.trainer.run_dir
    assert written == replace(translated, trainer=replace(translated.trainer, run_dir=run_dir))


def test_a_folder_of_recipes_and_another_library_exclude_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--from", "skyrl", "--config-dir", str(tmp_path), "trainer.epochs=1"]) == 2
    assert "Give one of them" in capsys.readouterr().err


def test_a_sweep_translates_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs.yaml").write_text("trainer: {epochs: 1}\n")
    commands: list[list[str]] = []

    class Ended:
        def __init__(self, command: list[str], **_: object) -> None:
            commands.append(command)

        def wait(self) -> int:
            return 1

    monkeypatch.setattr("skyrl_train.entrypoints.sweep.subprocess.Popen", Ended)
    assert (
        main(["sweep", "--from", "skyrl", "theirs.yaml", *SMALL, "trainer.policy.optimizer_config.lr=1e-5,1e-6"]) == 1
    )
    rates = []
    for _, _, _, verb, *arguments, option, library in commands:
        assert (verb, option, library) == ("train", "--from", "skyrl")
        rates.append(skyrl(*arguments).config.trainer.policy.optimizer_config.lr)
    assert rates == [1e-5, 1e-6]


def test_doctor_checks_the_translated_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[RunConfig] = []

    def check(config: RunConfig) -> list[tuple[str, str, str]]:
        checked.append(config)
        return []

    for name in ("packages", "devices", "memory", "folders", "network", "sandbox", "inputs", "chat_template"):
        monkeypatch.setattr(f"skyrl_train.entrypoints.doctor.{name}", check)
    assert main(["doctor", "--from", "skyrl", *SMALL]) == 0
    assert checked == [skyrl(*SMALL).config] * 8


def test_eval_reads_the_settings_of_another_library(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text("trainer: {eval_intervall: 1}\n")
    assert main(["eval", "model", "--from", "skyrl", "--recipe", str(file)]) == 2
    assert "trainer.eval_intervall is a setting of neither SkyRL nor skyrl_train" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["doctor", "--from", "skyrl"], "doctor --from skyrl FILE"),
        (["eval", "runs/mine", "--from", "skyrl"], "--recipe FILE"),
        (["sweep", "--from", "skyrl", "trainer.epochs=1", "trainer.seed=0..2"], "takes a yaml file of skyrl"),
    ],
)
def test_a_library_without_its_file_is_an_error(
    command: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    assert message in capsys.readouterr().err

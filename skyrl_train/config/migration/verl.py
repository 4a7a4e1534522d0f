"""verl's settings that most scripts have."""

from __future__ import annotations

from typing import Any

from skyrl_train.config.migration.table import (
    UNSET,
    Library,
    Setting,
    Theirs,
    data_files,
    mapped_values,
    other_names,
    resumed,
    trackers,
    without,
)


def _or_0(value: Any, theirs: Theirs) -> Any:
    return 0 if value is None or value < 0 else value


_SETTINGS: list[Setting] = [
    *other_names(
        "actor_rollout_ref.actor.",
        {
            "optim.lr": "trainer.policy.optimizer_config.lr",
            "optim.weight_decay": "trainer.policy.optimizer_config.weight_decay",
            "optim.betas": "trainer.policy.optimizer_config.adam_betas",
            "optim.lr_scheduler_type": "trainer.policy.optimizer_config.scheduler",
            "grad_clip": "trainer.policy.optimizer_config.max_grad_norm",
            "ppo_mini_batch_size": "trainer.policy_mini_batch_size",
            "ppo_epochs": "trainer.update_epochs_per_batch",
            "ppo_max_token_len_per_gpu": "trainer.micro_batch_tokens",
            "clip_ratio_low": "trainer.algorithm.eps_clip_low",
            "clip_ratio_high": "trainer.algorithm.eps_clip_high",
            "clip_ratio_c": "trainer.algorithm.clip_ratio_c",
            "entropy_coeff": "trainer.algorithm.entropy_coef",
            "fsdp_config.offload_policy": "trainer.fsdp.cpu_offload",
            "ulysses_sequence_parallel_size": "trainer.fsdp.sequence_parallel_size",
        },
    ),
    Setting(
        "actor_rollout_ref.actor.optim.lr_warmup_steps",
        "trainer.policy.optimizer_config.num_warmup_steps",
        "-1: 0",
        UNSET,
        _or_0,
    ),
    Setting(
        "actor_rollout_ref.actor.strategy",
        "trainer.strategy",
        "fsdp, fsdp2: fsdp2",
        UNSET,
        mapped_values({"fsdp": "fsdp2"}),
    ),
    Setting(
        "actor_rollout_ref.actor.policy_loss.loss_mode",
        "trainer.algorithm.policy_loss_type",
        "vanilla: dual_clip",
        UNSET,
        mapped_values({"vanilla": "dual_clip"}),
    ),
    Setting(
        "actor_rollout_ref.actor.loss_agg_mode",
        "trainer.algorithm.loss_reduction",
        "token-mean, seq-mean-token-mean, seq-mean-token-sum-norm",
        UNSET,
        mapped_values(
            {
                "token-mean": "token_mean",
                "seq-mean-token-mean": "sequence_mean",
                "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
            }
        ),
    ),
    Setting(
        "actor_rollout_ref.actor.use_kl_loss",
        "trainer.algorithm.kl_loss_coef",
        "false: 0",
        UNSET,
        lambda value, theirs: theirs.get("actor_rollout_ref.actor.kl_loss_coef", 0.001) if value else 0.0,
    ),
    Setting(
        "actor_rollout_ref.actor.kl_loss_coef",
        "trainer.algorithm.kl_loss_coef",
        "with use_kl_loss",
        UNSET,
        lambda value, theirs: value if theirs.get("actor_rollout_ref.actor.use_kl_loss") else 0.0,
    ),
    Setting(
        "actor_rollout_ref.actor.kl_loss_type",
        "trainer.algorithm.kl_estimator_type",
        "low_var_kl: k3; mse: k2; kl: k1",
        UNSET,
        mapped_values({"low_var_kl": "k3", "mse": "k2", "kl": "k1"}),
    ),
    *other_names(
        "actor_rollout_ref.",
        {
            "model.path": "trainer.policy.model.path",
            "model.enable_gradient_checkpointing": "trainer.policy.gradient_checkpointing",
            "model.lora_rank": "trainer.policy.model.lora.rank",
            "model.lora_alpha": "trainer.policy.model.lora.alpha",
            "rollout.name": "generator.inference_engine.backend",
            "rollout.n": "generator.n_samples_per_prompt",
            "rollout.temperature": "generator.sampling_params.temperature",
            "rollout.top_p": "generator.sampling_params.top_p",
            "rollout.top_k": "generator.sampling_params.top_k",
            "rollout.tensor_model_parallel_size": "generator.inference_engine.tensor_parallel_size",
            "rollout.gpu_memory_utilization": "generator.inference_engine.engine_args.gpu_memory_utilization",
            "rollout.enforce_eager": "generator.inference_engine.engine_args.enforce_eager",
            "rollout.max_num_seqs": "generator.inference_engine.max_num_seqs",
            "rollout.max_model_len": "generator.inference_engine.max_model_len",
            "rollout.dtype": "generator.inference_engine.dtype",
            "rollout.multi_turn.max_assistant_turns": "generator.max_turns",
            "rollout.agent.num_workers": "rollout.num_actors",
            "rollout.val_kwargs.temperature": "trainer.eval.sampling_params.temperature",
            "rollout.val_kwargs.top_p": "trainer.eval.sampling_params.top_p",
            "rollout.val_kwargs.n": "trainer.eval.n_samples_per_prompt",
            "hybrid_engine": "trainer.placement.colocate_all",
        },
    ),
    Setting(
        "algorithm.adv_estimator",
        "trainer.algorithm.advantage_estimator",
        "reinforce_plus_plus: reinforce++",
        UNSET,
        mapped_values({"reinforce_plus_plus": "reinforce++"}),
    ),
    *other_names(
        "algorithm.",
        {
            "gamma": "trainer.algorithm.gamma",
            "lam": "trainer.algorithm.lambd",
            "norm_adv_by_std_in_grpo": "trainer.algorithm.grpo_norm_by_std",
        },
    ),
    Setting("data.train_files", "data.train_data", "", UNSET, data_files),
    Setting("data.val_files", "trainer.eval.eval_data", "", UNSET, data_files),
    *other_names(
        "data.",
        {
            "prompt_key": "data.prompt_key",
            "train_batch_size": "trainer.train_batch_size",
            "max_prompt_length": "generator.max_input_length",
            "max_response_length": "generator.sampling_params.max_tokens",
        },
    ),
    Setting(
        "data.filter_overlong_prompts",
        "data.on_long_prompt",
        "true: filter",
        UNSET,
        lambda value, theirs: "filter" if value else UNSET,
    ),
    *other_names(
        "trainer.",
        {
            "total_epochs": "trainer.epochs",
            "total_training_steps": "trainer.max_steps",
            "val_before_train": "trainer.eval.before_train",
            "default_local_dir": "trainer.run_dir",
            "experiment_name": "trainer.run_name",
            "max_actor_ckpt_to_keep": "trainer.max_ckpts_to_keep",
        },
    ),
    Setting("trainer.test_freq", "trainer.eval.interval", "-1: 0", UNSET, _or_0),
    Setting("trainer.save_freq", "trainer.ckpt_interval", "-1: 0", UNSET, _or_0),
    Setting(
        "trainer.resume_mode",
        "trainer.resume",
        "auto and resume_path: latest; disable: never",
        UNSET,
        mapped_values({"auto": "latest", "resume_path": "latest", "disable": "never"}),
    ),
    *resumed("trainer.resume_from_path", "trainer.resume_mode", "resume_path"),
    *[
        Setting(
            f"trainer.{name}",
            "trainer.fsdp.num_workers",
            "nodes x GPUs",
            UNSET,
            lambda value, theirs: theirs.get("trainer.nnodes", 1) * theirs.get("trainer.n_gpus_per_node", 8),
        )
        for name in ("nnodes", "n_gpus_per_node")
    ],
    Setting(
        "trainer.logger",
        "trainer.trackers",
        "console: none",
        UNSET,
        trackers,
    ),
    *other_names(
        "async_training.",
        {
            "staleness_threshold": "trainer.fully_async.generate_ahead_steps",
            "trigger_parameter_sync_step": "trainer.fully_async.weight_sync_interval",
        },
    ),
    Setting(
        "async_training.partial_rollout",
        "generator.pause_mode",
        "true: keep; false: wait",
        UNSET,
        mapped_values({True: "keep", False: "wait"}),
    ),
    *without("trainer.fully_async.streaming_min_groups counts groups, not batches", "async_training.require_batches"),
    *without("rollout.stages.reward.function takes a function `group -> list of numbers`", "custom_reward_function.*"),
    *without(
        "trainer.micro_batch_tokens limits tokens, not sequences",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    ),
    *without("prompts and responses are not padded", "actor_rollout_ref.model.use_remove_padding"),
    *without(
        "passes without gradients use trainer.micro_batch_tokens too",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    ),
    *without("trackers take it from the environment: WANDB_PROJECT, ...", "trainer.project_name"),
]

VERL = Library("verl", "0.9.1", _SETTINGS)

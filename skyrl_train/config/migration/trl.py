"""TRL's settings that most scripts have."""

from __future__ import annotations

from skyrl_train.config.migration.table import (
    UNSET,
    Library,
    Setting,
    Without,
    as_list,
    mapped_values,
    other_names,
    without,
)

_SETTINGS: list[Setting] = [
    Setting("model", "trainer.policy.model.path", "an argument of the trainer"),
    *other_names(
        "",
        {
            "num_generations": "generator.n_samples_per_prompt",
            "max_completion_length": "generator.sampling_params.max_tokens",
            "temperature": "generator.sampling_params.temperature",
            "top_p": "generator.sampling_params.top_p",
            "learning_rate": "trainer.policy.optimizer_config.lr",
            "weight_decay": "trainer.policy.optimizer_config.weight_decay",
            "max_grad_norm": "trainer.policy.optimizer_config.max_grad_norm",
            "lr_scheduler_type": "trainer.policy.optimizer_config.scheduler",
            "warmup_steps": "trainer.policy.optimizer_config.num_warmup_steps",
            "num_train_epochs": "trainer.epochs",
            "num_iterations": "trainer.update_epochs_per_batch",
            "beta": "trainer.algorithm.kl_loss_coef",
            "entropy_coef": "trainer.algorithm.entropy_coef",
            "mask_truncated_completions": "trainer.algorithm.overlong.filter",
            "seed": "trainer.seed",
            "gradient_checkpointing": "trainer.policy.gradient_checkpointing",
            "output_dir": "trainer.run_dir",
            "run_name": "trainer.run_name",
            "save_steps": "trainer.ckpt_interval",
            "save_total_limit": "trainer.max_ckpts_to_keep",
            "eval_steps": "trainer.eval.interval",
            "metric_for_best_model": "trainer.eval.best_metric",
            "chat_template_kwargs.*": "generator.chat_template_kwargs.*",
            "vllm_gpu_memory_utilization": "generator.inference_engine.engine_args.gpu_memory_utilization",
            "vllm_tensor_parallel_size": "generator.inference_engine.tensor_parallel_size",
            "vllm_max_model_length": "generator.inference_engine.max_model_len",
        },
    ),
    Setting("max_steps", "trainer.max_steps", "-1: null", UNSET, lambda value, theirs: None if value < 0 else value),
    Setting("top_k", "generator.sampling_params.top_k", "0: -1", UNSET, lambda value, theirs: value or -1),
    Setting("min_p", "generator.sampling_params.min_p", "None: 0", UNSET, lambda value, theirs: value or 0.0),
    Setting("epsilon", "trainer.algorithm.eps_clip_low"),
    Setting(
        "epsilon",
        "trainer.algorithm.eps_clip_high",
        "without epsilon_high",
        UNSET,
        lambda value, theirs: theirs.get("epsilon_high") or value,
    ),
    Setting("epsilon_high", "trainer.algorithm.eps_clip_high"),
    Setting(
        "loss_type",
        "trainer.algorithm.loss_reduction",
        "dapo: token_mean; grpo: sequence_mean; dr_grpo: seq_mean_token_sum_norm",
        UNSET,
        lambda value, theirs: {
            "dapo": "token_mean",
            "grpo": "sequence_mean",
            "dr_grpo": "seq_mean_token_sum_norm",
        }.get(value, Without(f"{value}: set trainer.algorithm.policy_loss_type and loss_reduction")),
    ),
    Setting(
        "importance_sampling_level",
        "trainer.algorithm.policy_loss_type",
        "token: ppo_clip; sequence: gspo",
        UNSET,
        mapped_values({"token": "ppo_clip", "sequence": "gspo"}),
    ),
    Setting(
        "scale_rewards",
        "trainer.algorithm.grpo_norm_by_std",
        "group, true: true; none, false: false",
        UNSET,
        lambda value, theirs: {"group": True, True: True, "none": False, False: False}.get(
            value, Without("trainer.algorithm.advantage_batch_normalize divides by the deviation of a minibatch")
        ),
    ),
    Setting(
        "use_vllm",
        "generator.inference_engine.backend",
        "true: vllm; false: embedded",
        UNSET,
        mapped_values({True: "vllm", False: "embedded"}),
    ),
    Setting(
        "bf16", "trainer.policy.dtype", "true: bfloat16", UNSET, mapped_values({True: "bfloat16", False: "float32"})
    ),
    Setting(
        "report_to",
        "trainer.trackers",
        "none: []",
        UNSET,
        lambda value, theirs: [] if value == "none" else as_list(value, theirs),
    ),
    *without(
        "trainer.policy_mini_batch_size counts prompts per optimizer step, over all devices",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "generation_batch_size",
        "steps_per_generation",
    ),
    *without("train(reward_fn=...) takes TRL's functions; see your_own_task.md", "reward_funcs"),
    *without("add the rewards in one function", "reward_weights"),
    *without("vLLM runs in separate processes, or as vllm_remote", "vllm_mode"),
]

TRL = Library("TRL", "1.16.0", _SETTINGS)

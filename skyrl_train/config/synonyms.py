"""Names of other libraries' settings, by their last part, and the settings here that mean the same.

verl, TRL, SkyRL, prime-rl, OpenRLHF, slime and AReaL have them. :func:`skyrl_train.config.keys.meant_setting` looks here first.
"""

_LR = "trainer.policy.optimizer_config.lr"
_WARMUP = "trainer.policy.optimizer_config.num_warmup_steps"
_SCHEDULER = "trainer.policy.optimizer_config.scheduler"
_CLIP_NORM = "trainer.policy.optimizer_config.max_grad_norm"
_MODEL = "trainer.policy.model.path"
_MINIBATCH = "trainer.policy_mini_batch_size"
_MICRO_BATCH = "trainer.micro_batch_tokens"
_SAMPLES = "generator.n_samples_per_prompt"
_RESPONSE = "generator.sampling_params.max_tokens"
_PROMPT = "generator.max_input_length"
_STALENESS = "trainer.fully_async.max_staleness_steps"
_KL = "trainer.algorithm.kl_loss_coef"
_CLIP = "trainer.algorithm.eps_clip_low"
_CLIP_HIGH = "trainer.algorithm.eps_clip_high"
_DATA = "data.train_data"
_REWARD = "rollout.stages.reward.function"
_INTERVAL = "trainer.ckpt_interval"
_EVALUATION = "trainer.eval.interval"
_VLLM = "generator.inference_engine"

SYNONYMS: dict[str, str] = {
    # Optimizer
    "learning_rate": _LR,
    "actor_learning_rate": _LR,
    "actor_lr": _LR,
    "policy_lr": _LR,
    "lr_scheduler": _SCHEDULER,
    "lr_scheduler_type": _SCHEDULER,
    "lr_decay_style": _SCHEDULER,
    "warmup_steps": _WARMUP,
    "lr_warmup_steps": _WARMUP,
    "warmup_ratio": _WARMUP,  # a share of the steps there, their number here
    "lr_warmup_ratio": _WARMUP,
    "lr_warmup_steps_ratio": _WARMUP,
    "clip_grad": _CLIP_NORM,
    "grad_clip": _CLIP_NORM,
    "max_norm": _CLIP_NORM,
    "critic_lr": "trainer.critic.optimizer_config.lr",
    # Batches
    "batch_size": _MINIBATCH,
    "global_batch_size": _MINIBATCH,
    "mini_batch_size": _MINIBATCH,
    "ppo_mini_batch_size": _MINIBATCH,
    "per_device_train_batch_size": _MINIBATCH,
    "rollout_batch_size": "trainer.train_batch_size",
    "gen_batch_size": "trainer.train_batch_size",
    "gradient_accumulation_steps": _MICRO_BATCH,
    "micro_batch_size": _MICRO_BATCH,
    "micro_train_batch_size_per_gpu": _MICRO_BATCH,
    "ppo_micro_batch_size_per_gpu": _MICRO_BATCH,
    "ppo_max_token_len_per_gpu": _MICRO_BATCH,
    "max_tokens_per_gpu": _MICRO_BATCH,
    "ppo_epochs": "trainer.update_epochs_per_batch",
    "num_iterations": "trainer.update_epochs_per_batch",
    # Length of the run
    "num_train_epochs": "trainer.epochs",
    "num_epochs": "trainer.epochs",
    "total_epochs": "trainer.epochs",
    "n_epochs": "trainer.epochs",
    "num_steps": "trainer.max_steps",
    "total_steps": "trainer.max_steps",
    "train_steps": "trainer.max_steps",
    "total_training_steps": "trainer.max_steps",
    # Sampling
    "num_generations": _SAMPLES,
    "group_size": _SAMPLES,
    "num_samples": _SAMPLES,
    "num_rollouts": _SAMPLES,
    "rollouts_per_example": _SAMPLES,
    "rollouts_per_prompt": _SAMPLES,
    "n_samples": _SAMPLES,
    "n": _SAMPLES,
    "max_new_tokens": _RESPONSE,
    "max_completion_length": _RESPONSE,
    "max_response_length": _RESPONSE,
    "max_generate_length": _RESPONSE,
    "generate_max_len": _RESPONSE,
    "response_length": _RESPONSE,
    "max_prompt_length": _PROMPT,
    "prompt_max_len": _PROMPT,
    "prompt_length": _PROMPT,
    "max_seq_length": f"{_VLLM}.max_model_len",
    "max_length": f"{_VLLM}.max_model_len",
    "stop_strings": "generator.sampling_params.stop",
    # Algorithm
    "adv_estimator": "trainer.algorithm.advantage_estimator",
    "loss_type": "trainer.algorithm.policy_loss_type",
    "loss_mode": "trainer.algorithm.policy_loss_type",
    "loss_agg_mode": "trainer.algorithm.loss_reduction",
    "beta": _KL,
    "kl_coef": _KL,
    "init_kl_coef": _KL,
    "epsilon": _CLIP,
    "clip_ratio": _CLIP,
    "cliprange": _CLIP,
    "clip_range": _CLIP,
    "clip_eps": _CLIP,
    "clip_ratio_low": _CLIP,
    "epsilon_high": _CLIP_HIGH,
    "clip_ratio_high": _CLIP_HIGH,
    "entropy_coeff": "trainer.algorithm.entropy_coef",
    "lam": "trainer.algorithm.lambd",
    "gae_lambda": "trainer.algorithm.lambd",
    "scale_rewards": "trainer.algorithm.grpo_norm_by_std",
    # Asynchrony
    "max_staleness": _STALENESS,
    "staleness": _STALENESS,
    "max_async_level": _STALENESS,
    "async_level": _STALENESS,
    "max_off_policy_steps": _STALENESS,
    "max_head_offpolicyness": _STALENESS,
    # Model and data
    "model": _MODEL,
    "model_name": _MODEL,
    "model_path": _MODEL,
    "model_id": _MODEL,
    "model_name_or_path": _MODEL,
    "base_model": _MODEL,
    "pretrain": _MODEL,
    "hf_checkpoint": _MODEL,
    "bf16": "trainer.policy.dtype",
    "lora_r": "trainer.policy.model.lora.rank",
    "lora_rank": "trainer.policy.model.lora.rank",
    "peft_config": "trainer.policy.model.lora.rank",
    "lora_alpha": "trainer.policy.model.lora.alpha",
    "dataset": _DATA,
    "dataset_name": _DATA,
    "data_path": _DATA,
    "train_file": _DATA,
    "train_files": _DATA,
    "prompt_data": _DATA,
    "val_data": "trainer.eval.eval_data",
    "val_files": "trainer.eval.eval_data",
    "input_key": "data.prompt_key",
    "filter_overlong_prompts": "data.on_long_prompt",
    "truncation": "data.on_long_prompt",
    "enable_thinking": "generator.chat_template_kwargs.enable_thinking",
    # Agents, which the constructor of generator.name=harness takes
    "agent": "generator.kwargs.agent",
    "command": "generator.kwargs.command",
    "failure_reward": "generator.kwargs.failure_reward",
    "session_limits": "generator.kwargs.session_limits",
    # Environments and rewards
    "env": "environment.env_class",
    "env_id": "environment.env_class",
    "env_name": "environment.env_class",
    "reward_fn": _REWARD,
    "reward_func": _REWARD,
    "reward_funcs": _REWARD,
    "reward_function": _REWARD,
    # Machines
    "gpu": "trainer.device",
    "gpus": "trainer.fsdp.num_workers",
    "num_gpus": "trainer.fsdp.num_workers",
    "n_gpus_per_node": "trainer.fsdp.num_workers",
    "use_vllm": f"{_VLLM}.backend",
    "gpu_memory_utilization": f"{_VLLM}.engine_args.gpu_memory_utilization",
    "tensor_model_parallel_size": f"{_VLLM}.tensor_parallel_size",
    "tp": f"{_VLLM}.tensor_parallel_size",
    # The run
    "experiment_name": "trainer.run_name",
    "output_dir": "trainer.run_dir",
    "default_local_dir": "trainer.run_dir",
    "resume_path": "trainer.run_dir",
    "resume_from_path": "trainer.run_dir",
    "resume_from_checkpoint": "trainer.run_dir",
    "resume_dir": "trainer.run_dir",
    "wandb_project": "trainer.trackers",
    "use_wandb": "trainer.trackers",
    "save_steps": _INTERVAL,
    "save_freq": _INTERVAL,
    "save_interval": _INTERVAL,
    "save_total_limit": "trainer.max_ckpts_to_keep",
    "eval_steps": _EVALUATION,
    "eval_interval": _EVALUATION,
    "test_freq": _EVALUATION,
    "report_to": "trainer.trackers",
    "logger": "trainer.trackers",
}

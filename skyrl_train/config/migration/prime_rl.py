"""prime-rl's settings that most scripts have."""

from __future__ import annotations

from skyrl_train.config.migration.table import UNSET, Library, Setting, mapped_values, other_names, without

_SETTINGS: list[Setting] = [
    *other_names(
        "",
        {
            "max_steps": "trainer.max_steps",
            "model.name": "trainer.policy.model.path",
            "output_dir": "trainer.runs_dir",
            "run.name": "trainer.run_name",
            "ckpt.interval": "trainer.ckpt_interval",
            "ckpt.keep_last": "trainer.max_ckpts_to_keep",
            "trainer.optim.lr": "trainer.policy.optimizer_config.lr",
            "trainer.optim.weight_decay": "trainer.policy.optimizer_config.weight_decay",
            "trainer.optim.max_norm": "trainer.policy.optimizer_config.max_grad_norm",
            "trainer.scheduler.type": "trainer.policy.optimizer_config.scheduler",
            "trainer.scheduler.warmup_steps": "trainer.policy.optimizer_config.num_warmup_steps",
            "trainer.model.lora.rank": "trainer.policy.model.lora.rank",
            "trainer.model.lora.alpha": "trainer.policy.model.lora.alpha",
            "trainer.model.lora.target_modules": "trainer.policy.model.lora.target_modules",
            "trainer.model.fsdp_cpu_offload": "trainer.fsdp.cpu_offload",
            "trainer.model.reshard_after_forward": "trainer.fsdp.reshard_after_forward",
            "orchestrator.train.sampling.temperature": "generator.sampling_params.temperature",
            "orchestrator.train.sampling.max_completion_tokens": "generator.sampling_params.max_tokens",
            "orchestrator.group_size": "generator.n_samples_per_prompt",
            "orchestrator.eval.interval": "trainer.eval.interval",
            "orchestrator.eval.group_size": "trainer.eval.n_samples_per_prompt",
            "deployment.num_train_gpus": "trainer.fsdp.num_workers",
            "seq_len": "generator.inference_engine.max_model_len",
            "inference.vllm.tensor_parallel_size": "generator.inference_engine.tensor_parallel_size",
            "inference.vllm.data_parallel_size": "generator.inference_engine.num_engines",
            "inference.vllm.gpu_memory_utilization": "generator.inference_engine.engine_args.gpu_memory_utilization",
        },
    ),
    Setting(
        "orchestrator.batch_size",
        "trainer.policy_mini_batch_size",
        "there: samples, here: groups",
        UNSET,
        lambda value, theirs: -(-value // theirs.get("orchestrator.group_size", 1)),
    ),
    Setting("orchestrator.max_off_policy_steps", "trainer.fully_async.max_staleness_steps"),
    Setting(
        "orchestrator.max_off_policy_steps",
        "trainer.fully_async.staleness_policy",
        "drop",
        UNSET,
        lambda value, theirs: "drop",
    ),
    Setting(
        "orchestrator.max_off_policy_steps", "trainer.mode", "fully_async", UNSET, lambda value, theirs: "fully_async"
    ),
    Setting("max_async_level", "trainer.fully_async.generate_ahead_steps", "earlier versions"),
    Setting(
        "orchestrator.train.filter_zero_advantages",
        "trainer.algorithm.dynamic_sampling",
        "true: filter",
        UNSET,
        mapped_values({True: "filter", False: "none"}),
    ),
    Setting(
        "weight_broadcast.type",
        "generator.weight_transport",
        "filesystem: disk",
        UNSET,
        mapped_values({"filesystem": "disk"}),
    ),
    *without("environments of verifiers run as agents over HTTP; see agent_harness.md", "orchestrator.train.source"),
    *without(
        "the loss is importance_sampling with a rejection by probability_difference; see algorithms.md",
        "trainer.loss.*",
    ),
    *without("trackers take it from the environment: WANDB_PROJECT, ...", "monitors.*"),
]

PRIME_RL = Library("prime-rl", "August 2026", _SETTINGS)

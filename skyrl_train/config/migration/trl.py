"""TRL's settings: of GRPOConfig with those that it inherits, of AsyncGRPOConfig, and of TRL's scripts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skyrl_train.config.migration.table import (
    UNSET,
    Library,
    Setting,
    Theirs,
    Without,
    as_list,
    checkpoints_to_keep,
    known_values,
    list_unless_none,
    mapped_values,
    other_names,
    share_of_steps,
    unless_none,
    without,
)

_CORRECTION = "trainer.algorithm.off_policy_correction"
_ENGINE = "generator.inference_engine"
_IS, _IS_MODE, _IS_MAX, _IS_MIN = (
    f"vllm_importance_sampling_{name}" for name in ("correction", "mode", "clip_max", "clip_min")
)
_NEVER = ("no", False)  # yaml reads no as false
_REDUCTIONS = {
    "grpo": "sequence_mean",
    "sapo": "sequence_mean",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "bnpo": "token_mean",
    "dr_grpo": "seq_mean_token_sum_norm",
}


def _epochs(value: Any, theirs: Theirs) -> Any:
    if (theirs.get("max_steps") or -1) > 0:
        return UNSET
    if not isinstance(value, float):
        return value
    return int(value) if value.is_integer() else Without("trainer.epochs counts whole passes; set max_steps")


def _warmup(value: Any, theirs: Theirs) -> Any:
    """Convert a number of steps, or below 1 a share of all steps."""
    if value is None:
        return UNSET
    if value >= 1:
        return value
    if value == 0:  # the other one of the two settings counts
        return UNSET if theirs.get("warmup_steps") or theirs.get("warmup_ratio") else 0
    steps = theirs.get("max_steps") or -1
    return share_of_steps(value, steps if steps > 0 else None)


def _trackers(value: Any, theirs: Theirs) -> Any:
    if value == "all":  # that are installed
        return Without("trainer.trackers has names, such as [wandb]")
    return [] if value == "none" else as_list(value, theirs)


def _dtype(value: Any, theirs: Theirs) -> Any:
    if theirs.get("bf16"):  # float32 weights that compute in bfloat16, as bfloat16 weights with a float32 copy do here
        return "bfloat16"
    return value if value in ("float32", "bfloat16") else Without("trainer.policy.dtype is float32 or bfloat16")


def _loss(value: Any, theirs: Theirs) -> str:
    """Three of their settings choose the loss."""
    if theirs.get("loss_type") in ("cispo", "sapo"):
        return str(theirs["loss_type"])
    if theirs.get("importance_sampling_level") == "sequence":
        return "gspo"
    return "ppo_clip" if theirs.get("delta") is None else "dual_clip"


def _reduction(value: Any, theirs: Theirs) -> Any:
    return _REDUCTIONS.get(value, Without(f"there is no loss {value} here; algorithms.md says which there are"))


def _norm(value: Any, theirs: Theirs) -> Any:
    # Their dr_grpo divides by the longest completion.
    return value if theirs.get("loss_type") == "dr_grpo" else UNSET


def _clip_high(value: Any, theirs: Theirs) -> Any:
    if theirs.get("loss_type") == "cispo":
        return UNSET
    return unless_none(theirs.get("epsilon_high") or value, theirs)


def _cispo_high(value: Any, theirs: Theirs) -> Any:
    # There it bounds the ratio, here the distance of the ratio from 1.
    return value - 1 if value is not None and theirs.get("loss_type") == "cispo" else UNSET


def _backend(value: Any, theirs: Theirs) -> str:
    if theirs.get("use_vllm") is False:
        return "embedded"
    mode = theirs.get("vllm_mode", "server" if theirs.get("vllm_server_base_url") else "colocate")
    return "vllm_remote" if mode == "server" else "vllm"


def _weights(value: Any, theirs: Theirs) -> Any:
    mode = theirs.get(_IS_MODE, "sequence_mask")
    if not _corrects(theirs):
        return None
    level, _, rule = mode.partition("_")
    if rule == "truncate" and theirs.get(_IS_MIN) is not None:
        return Without("a truncation has an upper bound alone")
    return "icepop" if mode == "token_mask" else level


def _uncorrected(value: Any, theirs: Theirs) -> Any:
    return UNSET if value else True


def _is_bound(name: str, *modes: str) -> Callable[[Any, Theirs], Any]:
    """Return a conversion of the bound ``name``, with its default there, for the modes in which it counts."""

    def convert(value: Any, theirs: Theirs) -> Any:
        if not _corrects(theirs) or theirs.get(_IS_MODE, "sequence_mask") not in modes:
            return UNSET
        if name == _IS_MIN:
            return theirs.get(name) or 0.0
        bound = theirs.get(name, 3.0)
        return Without("weights have an upper bound here") if bound is None else bound

    return convert


def _corrects(theirs: Theirs) -> bool:
    return bool(theirs.get(_IS, True))


def _rejections(value: Any, theirs: Theirs) -> Any:
    """Sequences whose ratio is out of bounds. Those that stay have weights below the upper bound, so nothing is truncated."""
    if not _corrects(theirs) or theirs.get(_IS_MODE, "sequence_mask") != "sequence_mask":
        return UNSET
    bounds = {"low": theirs.get(_IS_MIN), "high": theirs.get(_IS_MAX, 3.0)}
    return [{"statistic": "ratio", "level": "sequence_sum", **bounds}]


_CORRECTIONS = [
    *[
        Setting(name, f"{_CORRECTION}.{ours}", note, UNSET, convert)
        for name in (_IS, _IS_MODE, _IS_MAX, _IS_MIN)
        for ours, note, convert in (
            (
                "tis_ratio_type",
                "token_truncate: token; token_mask: icepop; sequence_...: sequence; false: null",
                _weights,
            ),
            ("token_tis_ratio_clip_high", "token_truncate", _is_bound(_IS_MAX, "token_truncate")),
            ("sequence_tis_ratio_clip_high", "sequence_...", _is_bound(_IS_MAX, "sequence_truncate", "sequence_mask")),
            ("icepop_ratio_low", "token_mask", _is_bound(_IS_MIN, "token_mask")),
            ("icepop_ratio_high", "token_mask", _is_bound(_IS_MAX, "token_mask")),
            ("rejections", "sequence_mask: a rule with statistic=ratio", _rejections),
        )
    ],
    Setting(_IS, f"{_CORRECTION}.allow_uncorrected", "false: true", UNSET, _uncorrected),
]

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
            "num_iterations": "trainer.update_epochs_per_batch",
            "beta": "trainer.algorithm.kl_loss_coef",
            "entropy_coef": "trainer.algorithm.entropy_coef",
            "mask_truncated_completions": "trainer.algorithm.overlong.filter",
            "seed": "trainer.seed",
            "gradient_checkpointing": "trainer.policy.gradient_checkpointing",
            "output_dir": "trainer.run_dir",
            "save_steps": "trainer.ckpt_interval",
            "eval_on_start": "trainer.eval.before_train",
            "metric_for_best_model": "trainer.eval.best_metric",
            "adam_epsilon": "trainer.policy.optimizer_config.adam_eps",
            "torch_compile": "trainer.policy.compile",
            "cast_lm_head_to_fp32": "trainer.policy.fp32_head",
            "sapo_temperature_pos": "trainer.algorithm.sapo.tau_pos",
            "sapo_temperature_neg": "trainer.algorithm.sapo.tau_neg",
            "model_name_or_path": "trainer.policy.model.path",
            "lora_alpha": "trainer.policy.model.lora.alpha",
            "lora_dropout": "trainer.policy.model.lora.dropout",
            "dataset_streaming": "data.streaming",
            "generation_kwargs.stop_token_ids": "generator.sampling_params.stop_token_ids",
            "generation_kwargs.min_tokens": "generator.sampling_params.min_tokens",
            "generation_kwargs.ignore_eos": "generator.sampling_params.ignore_eos",
            "vllm_model_impl": f"{_ENGINE}.engine_args.model_impl",
            "weight_sync_steps": "trainer.fully_async.weight_sync_interval",
            "chat_template_kwargs.*": "generator.chat_template_kwargs.*",
            "vllm_gpu_memory_utilization": "generator.inference_engine.engine_args.gpu_memory_utilization",
            "vllm_tensor_parallel_size": "generator.inference_engine.tensor_parallel_size",
            "vllm_max_model_length": "generator.inference_engine.max_model_len",
        },
    ),
    Setting("max_steps", "trainer.max_steps", "-1: null", UNSET, lambda value, theirs: None if value < 0 else value),
    Setting("num_train_epochs", "trainer.epochs", "whole passes; max_steps wins", UNSET, _epochs),
    *[
        Setting(name, "trainer.policy.optimizer_config.num_warmup_steps", note, UNSET, _warmup)
        for name, note in (("warmup_steps", "below 1: a share of max_steps"), ("warmup_ratio", "of max_steps"))
    ],
    Setting(
        "lr_scheduler_type",
        "trainer.policy.optimizer_config.scheduler",
        "constant_with_warmup: constant",
        UNSET,
        known_values(
            {"constant_with_warmup": "constant", **{name: name for name in ("constant", "linear", "cosine")}},
            "a schedule of your own is named by scheduler=path.to.Schedule",
        ),
    ),
    Setting("max_prompt_length", "generator.max_input_length", "", UNSET, unless_none),
    Setting("generation_kwargs.stop", "generator.sampling_params.stop", "a list", UNSET, list_unless_none),
    Setting("run_name", "trainer.run_name", "", UNSET, unless_none),
    Setting("save_total_limit", "trainer.max_ckpts_to_keep", "null has no counterpart", UNSET, checkpoints_to_keep),
    Setting("top_k", "generator.sampling_params.top_k", "0: -1", UNSET, lambda value, theirs: value or -1),
    Setting("min_p", "generator.sampling_params.min_p", "None: 0", UNSET, lambda value, theirs: value or 0.0),
    Setting("epsilon", "trainer.algorithm.eps_clip_low"),
    Setting("epsilon", "trainer.algorithm.eps_clip_high", "without epsilon_high", UNSET, _clip_high),
    Setting("epsilon_high", "trainer.algorithm.eps_clip_high", "but for cispo", UNSET, _clip_high),
    Setting(
        "epsilon_high",
        "trainer.algorithm.cispo.cispo_eps_clip_high",
        "cispo: there the largest ratio, here minus 1",
        UNSET,
        _cispo_high,
    ),
    Setting("loss_type", "trainer.algorithm.policy_loss_type", "cispo, sapo", UNSET, _loss),
    Setting(
        "loss_type",
        "trainer.algorithm.loss_reduction",
        "dapo, bnpo, cispo: token_mean; grpo, sapo: sequence_mean; dr_grpo: seq_mean_token_sum_norm",
        UNSET,
        _reduction,
    ),
    Setting("max_completion_length", "trainer.algorithm.max_seq_len", "dr_grpo", UNSET, _norm),
    Setting(
        "importance_sampling_level",
        "trainer.algorithm.policy_loss_type",
        "token: ppo_clip; sequence: gspo",
        UNSET,
        _loss,
    ),
    Setting("delta", "trainer.algorithm.policy_loss_type", "dual_clip", UNSET, _loss),
    Setting("delta", "trainer.algorithm.clip_ratio_c", "", UNSET, unless_none),
    Setting(
        "scale_rewards",
        "trainer.algorithm.grpo_norm_by_std",
        "group, true: true; none, false: false",
        UNSET,
        known_values(
            {"group": True, True: True, "none": False, False: False},
            "trainer.algorithm.advantage_batch_normalize divides by the deviation of a minibatch",
        ),
    ),
    Setting("use_vllm", f"{_ENGINE}.backend", "true: vllm; false: embedded", UNSET, _backend),
    Setting("vllm_mode", f"{_ENGINE}.backend", "colocate: vllm; server: vllm_remote", UNSET, _backend),
    Setting("vllm_server_base_url", f"{_ENGINE}.backend", "vllm_remote", UNSET, _backend),
    Setting("vllm_server_base_url", f"{_ENGINE}.remote_urls", "a list", UNSET, as_list),
    Setting(
        "vllm_enable_sleep_mode",
        "trainer.placement.colocate_all",
        "in the modes that take turns",
        UNSET,
        lambda value, theirs: True if value else UNSET,
    ),
    *_CORRECTIONS,
    Setting(
        "max_staleness",
        "trainer.fully_async.max_staleness_steps",
        "there weight syncs, here steps",
        UNSET,
        # The last step before the next sync trains on weights that are weight_sync_steps - 1 steps newer than the last synced.
        lambda value, theirs: (value + 1) * theirs.get("weight_sync_steps", 1) - 1,
    ),
    Setting("max_staleness", "trainer.fully_async.staleness_policy", "drop", UNSET, lambda value, theirs: "drop"),
    Setting("max_staleness", "trainer.mode", "fully_async", UNSET, lambda value, theirs: "fully_async"),
    Setting("token_budget", "trainer.micro_batch_tokens", "", UNSET, unless_none),
    *[
        Setting(
            f"adam_beta{number}",
            "trainer.policy.optimizer_config.adam_betas",
            "a list of both",
            UNSET,
            lambda value, theirs: [theirs.get("adam_beta1", 0.9), theirs.get("adam_beta2", 0.999)],
        )
        for number in (1, 2)
    ],
    Setting(
        "optim",
        "trainer.policy.optimizer_config",
        "AdamW alone",
        UNSET,
        lambda value, theirs: UNSET if str(value).startswith("adamw") else Without("the optimizer is AdamW"),
    ),
    Setting("tf32", "trainer.tf32", "", UNSET, unless_none),
    *[
        Setting("use_cpu", key, "true: cpu; false: cuda", UNSET, lambda value, theirs: "cpu" if value else "cuda")
        for key in ("trainer.device", f"{_ENGINE}.device")
    ],
    *[
        Setting(
            name,
            "trainer.policy.dtype",
            "float32 or bfloat16",
            UNSET,
            _dtype,
        )
        for name in ("dtype", "model_init_kwargs.dtype", "model_init_kwargs.torch_dtype")
    ],
    Setting(
        "lora_r",
        "trainer.policy.model.lora.rank",
        "with use_peft",
        UNSET,
        lambda value, theirs: value if theirs.get("use_peft") else UNSET,
    ),
    Setting(
        "use_peft",
        "trainer.policy.model.lora.rank",
        "true: lora_r; false: 0",
        UNSET,
        lambda value, theirs: theirs.get("lora_r", 16) if value else 0,
    ),
    Setting(
        "use_peft",
        "trainer.policy.model.lora.alpha",
        "true: lora_alpha, by default there 32",
        UNSET,
        lambda value, theirs: theirs.get("lora_alpha", 32) if value else UNSET,
    ),
    Setting(
        "lora_target_modules",
        "trainer.policy.model.lora.target_modules",
        "",
        UNSET,
        list_unless_none,
    ),
    Setting(
        "dataset_name",
        "data.train_data",
        "name:configuration:split",
        UNSET,
        lambda value, theirs: [
            ":".join(
                part
                for part in (value, theirs.get("dataset_config"), theirs.get("dataset_train_split", "train"))
                if part
            )
        ],
    ),
    *without("a part of dataset_name's name:configuration:split", "dataset_config", "dataset_train_split"),
    *without("name it in trainer.eval.eval_data, as name:configuration:split", "dataset_test_split"),
    Setting(
        "shuffle_dataset",
        "data.sampler",
        "true: shuffle; false: sequential",
        UNSET,
        mapped_values({True: "shuffle", False: "sequential"}),
    ),
    Setting("num_generations_eval", "trainer.eval.n_samples_per_prompt", "", UNSET, unless_none),
    Setting(
        "max_tool_calling_iterations",
        "generator.max_turns",
        "plus 1: the last answer",
        UNSET,
        lambda value, theirs: UNSET if value is None else value + 1,
    ),
    Setting(
        "eval_steps",
        "trainer.eval.interval",
        "but with eval_strategy=no",
        UNSET,
        lambda value, theirs: 0 if theirs.get("eval_strategy") in _NEVER else unless_none(value, theirs),
    ),
    Setting(
        "eval_strategy",
        "trainer.eval.interval",
        "no: 0; steps: eval_steps",
        UNSET,
        known_values({**dict.fromkeys(_NEVER, 0), "steps": UNSET}, "trainer.eval.interval counts steps"),
    ),
    Setting(
        "save_strategy",
        "trainer.ckpt_interval",
        "no: 0; steps: save_steps",
        UNSET,
        lambda value, theirs: {**dict.fromkeys(_NEVER, 0), "steps": theirs.get("save_steps", UNSET)}.get(
            value, Without("trainer.ckpt_interval counts steps; trainer.eval.best_metric keeps the best")
        ),
    ),
    Setting(
        "resume_from_checkpoint",
        "trainer.resume",
        "true: latest",
        UNSET,
        known_values(
            {True: "latest", False: UNSET, None: UNSET},
            "name the run in trainer.run_dir, and its step in trainer.resume_step",
        ),
    ),
    Setting(
        "multi_objective_aggregation",
        "rollout.stages.reward",
        "sum_then_normalize alone",
        UNSET,
        known_values({"sum_then_normalize": UNSET}, "rewards are summed before advantages are computed"),
    ),
    Setting(
        "bf16",
        "trainer.policy.dtype",
        "true: bfloat16",
        UNSET,
        mapped_values({True: "bfloat16", False: "float32", None: UNSET}),
    ),
    Setting(
        "report_to",
        "trainer.trackers",
        "none: []",
        UNSET,
        _trackers,
    ),
    *without(
        "trainer.policy_mini_batch_size counts prompts per optimizer step, over all devices",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "generation_batch_size",
        "steps_per_generation",
    ),
    *without(
        "rollout.stages.reward.function=FILE.py:FUNCTION, and train(reward_fn=...), take TRL's functions",
        "reward_funcs",
    ),
    *without("an argument of train(reward_fn=[...]), or rollout.stages.reward.kwargs.weights", "reward_weights"),
    *without("name servers in generator.inference_engine.remote_urls", "vllm_server_host", "vllm_server_port"),
    *without("generator.inference_engine.fleet.wait_timeout_s limits the wait for an engine", "vllm_server_timeout"),
    *without("a weight transport chooses its ports", "vllm_group_port"),
    *without("an agent's requests ask for structured outputs", "vllm_structured_outputs_regex"),
    *without(
        "sampling_params has no penalties: the probabilities of the policy itself are trained", "repetition_penalty"
    ),
    *without("generator.sampling_params has temperature, top_p, top_k, min_p and stops", "generation_kwargs.*"),
    *without(
        "the embedded engine or vLLM samples",
        "cache_implementation",
        "use_transformers_continuous_batching",
        "use_transformers_paged",
        "transformers_continuous_batching_config.*",
        "use_cache",
    ),
    *without("there is no loss vespo here", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    *without(
        "the reference is the policy that the run starts from",
        "sync_ref_model",
        "ref_model_mixup_alpha",
        "ref_model_sync_steps",
    ),
    *without("all tokens train; clip_cov and kl_cov choose tokens by covariance", "top_entropy_quantile"),
    *without(
        "trainer.algorithm.entropy_coef is fixed",
        "use_adaptive_entropy",
        "entropy_coef_min",
        "entropy_coef_max",
        "entropy_coef_delta",
        "entropy_target",
    ),
    *without(
        "trainer.algorithm.off_policy_correction.rejections ignore the advantage's sign", "off_policy_mask_threshold"
    ),
    *without("the KL term has no importance weights", "use_bias_correction_kl"),
    *without(
        "trainer.samples_per_step says how many groups of each step are recorded; the page shows them",
        "log_completions",
        "log_multimodal",
        "num_completions_to_print",
        "log_unique_prompts",
    ),
    *without("nothing is uploaded", "log_completions_hub_repo", "push_to_hub"),
    *[
        Setting(f"hub_{name}", None, "nothing is uploaded")
        for name in ("always_push", "model_id", "private_repo", "revision", "strategy", "token")
    ],
    *without("models are those that transformers itself knows", "trust_remote_code"),
    *without("the model is taken as it is in its folder", "model_init_kwargs.*", "model_revision"),
    *without("the attention is chosen by what the device can do", "attn_implementation"),
    *without("adapters are LoRA on linear layers", "lora_target_parameters", "lora_modules_to_save", "lora_task_type"),
    *without("adapters are plain LoRA", "use_rslora", "use_dora"),
    *without(
        "weights are float32 or bfloat16",
        "load_in_8bit",
        "load_in_4bit",
        "bnb_4bit_quant_type",
        "use_bnb_nested_quant",
        "bnb_4bit_quant_storage",
        "fp16",
        "fp16_full_eval",
        "bf16_full_eval",
    ),
    *without("the losses of experts' routers are not trained", "router_aux_loss_coef"),
    *without("dropout is always off", "disable_dropout"),
    *without("all columns of a row reach rewards and environments", "remove_unused_columns"),
    *without("prompts and responses are not padded", "pad_to_multiple_of"),
    *without(
        "trainer.strategy=fsdp2 and trainer.fsdp shard the policy",
        "ds3_gather_for_generation",
        "deepspeed",
        "deepspeed.*",
        "fsdp",
        "fsdp_config.*",
        "accelerator_config.*",
        "parallelism_config",
        "ddp_find_unused_parameters",
        "ddp_bucket_cap_mb",
        "ddp_broadcast_buffers",
        "ddp_static_graph",
        "ddp_backend",
        "ddp_timeout",
        "local_rank",
        "ignore_bias_buffers",
    ),
    *without("a schedule of your own takes them: scheduler=path.to.Schedule", "lr_scheduler_kwargs.*"),
    *without("the optimizer is AdamW over all trained parameters", "optim_args", "optim_target_modules"),
    *without("a loss is normalised over all devices", "average_tokens_across_devices"),
    *without("of supervised training", "label_smoothing_factor", "neftune_noise_alpha", "label_names"),
    *without("layers are computed again as a whole", "gradient_checkpointing_kwargs.*"),
    *without("torch.compile has its defaults", "torch_compile_backend", "torch_compile_mode"),
    *without("there are no kernels of Liger here", "use_liger_kernel", "liger_kernel_config.*"),
    *without(
        "trainer.micro_batch_tokens bounds the memory of a pass",
        "auto_find_batch_size",
        "torch_empty_cache_steps",
    ),
    *without(
        "each step is logged",
        "logging_strategy",
        "logging_steps",
        "logging_first_step",
        "logging_dir",
        "log_on_each_node",
        "logging_nan_inf_filter",
        "include_num_input_tokens_seen",
        "log_level",
        "log_level_replica",
        "disable_tqdm",
    ),
    *without("trackers take it from the environment: WANDB_PROJECT, ...", "project"),
    *without(
        "trackers take it from the environment", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"
    ),
    *without("trainer.eval.max_parallel counts the prompts at once", "per_device_eval_batch_size"),
    *without(
        "an evaluation generates answers and rewards them",
        "prediction_loss_only",
        "eval_delay",
        "eval_do_concat_batches",
        "eval_use_gather_object",
        "eval_accumulation_steps",
        "include_for_metrics",
        "batch_eval_metrics",
        "do_train",
        "do_eval",
        "do_predict",
    ),
    *without("trainer.hf_save_interval writes models; checkpoints resume a run", "save_only_model"),
    *without("the run folder is on one disk", "save_on_each_node"),
    *without("SIGTERM always writes a checkpoint", "enable_jit_checkpoint"),
    *without("`skyrl-train export RUN:best` takes it", "load_best_model_at_end", "greater_is_better"),
    *without("a resume loses and repeats nothing", "ignore_data_skip", "restore_callback_states_from_checkpoint"),
    *without("trainer.seed is the seed of the data's order too", "data_seed"),
    *without("sampled tokens are reproducible with generator.inference_engine.batch_invariant", "full_determinism"),
    *without(
        "data is read in the trainer's process",
        "dataloader_drop_last",
        "dataloader_num_workers",
        "dataloader_pin_memory",
        "dataloader_persistent_workers",
        "dataloader_prefetch_factor",
        "dataloader_multiprocessing_context",
        "dataloader_in_order",
        "train_sampling_strategy",
        "length_column_name",
    ),
    *without("metrics always have the memory of the process and of GPUs", "skip_memory_metrics"),
    *without("set the environment of the library that you debug", "debug"),
    *without(
        "generator.pause_timeout_s and trainer.failures limit waiting",
        "request_timeout",
        "weight_sync_timeout",
        "heartbeat_stale_after_s",
    ),
    *without(
        "trainer.fully_async.generate_ahead_steps and num_parallel_generation_workers count groups",
        "max_inflight_tasks",
        "queue_maxsize",
    ),
    *without("sessions keep the sampled tokens", "fork_threshold_tokens"),
]

TRL = Library(
    "TRL",
    "1.16.0",
    _SETTINGS,
    {
        "vllm_importance_sampling_cap": _IS_MAX,
        "torch_dtype": "dtype",
        "evaluation_strategy": "eval_strategy",
        "vllm_max_model_len": "vllm_max_model_length",
    },
)

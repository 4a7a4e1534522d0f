"""verl's settings: of its trainer with FSDP, and of its asynchronous one. Megatron and other backends have reasons."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from skyrl_train.config.migration.table import (
    UNSET,
    Library,
    Setting,
    Theirs,
    Without,
    checkpoints_to_keep,
    data_files,
    known_values,
    list_unless_none,
    mapped_values,
    other_names,
    resumed,
    share_of_steps,
    trackers,
    unless_none,
    without,
)
from skyrl_train.config.schema import TrainerConfig

_ACTOR, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
_THEIR_CORRECTION, _OUR_CORRECTION = "algorithm.rollout_correction", "trainer.algorithm.off_policy_correction"
_ENGINE = "generator.inference_engine"
_LEVELS = {"token": "token", "seq_sum": "sequence_sum", "seq_mean": "sequence_mean", "seq_max": "sequence_max"}
_KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_NO_KL_ESTIMATOR = "there are the estimators k1, k2 and k3"
_BATCHES = "there batches, here minibatches"
_AHEAD, _EVERY, _BATCHES_EACH = "staleness_threshold", "trigger_parameter_sync_step", "require_batches"
_DTYPES = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}


def _minibatches(theirs: Theirs) -> int:
    """Return the optimizer steps in a step of verl: a batch, or with ``async_training`` what it trains between weight syncs."""
    minibatch = theirs.get(f"{_ACTOR}.ppo_mini_batch_size", TrainerConfig().policy_mini_batch_size)
    batches = max(1, int(theirs.get("data.train_batch_size") or 0) // int(minibatch)) if minibatch else 1
    return _between_syncs(theirs) if _is_fully_async(theirs) else batches


def _is_fully_async(theirs: Theirs) -> bool:
    """Return whether the settings are of the script ``fully_async_main``."""
    return any(f"async_training.{name}" in theirs for name in (_AHEAD, _EVERY, _BATCHES_EACH))


def _between_syncs(theirs: Theirs) -> int:
    """Return the optimizer steps between two weight syncs of ``fully_async_main``."""
    return int(theirs.get(f"async_training.{_EVERY}", 1)) * int(theirs.get(f"async_training.{_BATCHES_EACH}", 1))


def _ahead(theirs: Theirs) -> float:
    """Return the steps that generation runs ahead; the threshold there is a share of the samples between two weight syncs."""
    ahead: float = theirs.get(f"async_training.{_AHEAD}", 0.0) * _between_syncs(theirs)
    return ahead


def _bound(value: Any, theirs: Theirs) -> Any:
    """Convert a number of versions that a group may span: the one that began it, and those of the steps until it has trained."""
    if theirs.get("trainer.v1.trainer_mode") != "separate_async":
        return UNSET
    if value is None:
        return Without("trainer.fully_async.staleness_policy=accept trains groups of any age")
    return value * int(theirs.get("trainer.v1.separate_async.parameter_sync_step", _minibatches(theirs))) - 1


def _steps(value: Any, theirs: Theirs) -> Any:
    return None if value is None else int(value) * _minibatches(theirs)


def _steps_or_0(value: Any, theirs: Theirs) -> Any:
    return 0 if value is None or value < 0 else int(value) * _minibatches(theirs)


def _warmup_steps(value: Any, theirs: Theirs) -> Any:
    """Convert steps of verl's scheduler, which makes one for each call that trains: with a batch, or with a part of it."""
    if theirs.get("trainer.v1.trainer_mode") == "separate_async":
        return max(0, value or 0)
    if _is_fully_async(theirs):
        return max(0, value or 0) * int(theirs.get(f"async_training.{_BATCHES_EACH}", 1))
    return _steps_or_0(value, theirs)


def _tokens(value: Any, theirs: Theirs) -> int:
    """Convert tokens for each GPU; here they are those of all ranks that share the sequences."""
    names = (f"{_ACTOR}.ulysses_sequence_parallel_size", f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size")
    return int(value * max(theirs.get(name) or 1 for name in names))


def _warmup(value: Any, theirs: Theirs) -> Any:
    steps = _steps(theirs.get("trainer.total_training_steps"), theirs)
    if not value or (theirs.get(f"{_ACTOR}.optim.lr_warmup_steps") or 0) > 0:
        return UNSET
    return share_of_steps(value, steps)


def _clip(side: str, *, cispo: bool) -> Callable[[Any, Theirs], Any]:
    """Return a conversion of the bound on one side: ``clip_ratio`` stands for both, and CISPO has bounds of its own."""

    def convert(value: Any, theirs: Theirs) -> Any:
        if (theirs.get(f"{_ACTOR}.policy_loss.loss_mode") == "cispo") is not cispo:
            return UNSET
        both = theirs.get(f"{_ACTOR}.clip_ratio", value)
        bound = theirs.get(f"{_ACTOR}.clip_ratio_{side}")
        return unless_none(both if bound is None else bound, theirs)

    return convert


def _weights(value: Any, theirs: Theirs) -> Any:
    bounded = "_" in str(theirs.get(f"{_THEIR_CORRECTION}.rollout_is_threshold", ""))
    if bounded and value == "sequence":
        return Without("icepop, which has two bounds, has weights of tokens")
    return "icepop" if bounded and value == "token" else value


def _uncorrected(value: Any, theirs: Theirs) -> Any:
    return True if value is None and theirs.get(f"{_THEIR_CORRECTION}.rollout_rs") is None else UNSET


def _threshold(kind: str) -> Callable[[Any, Theirs], Any]:
    def convert(value: Any, theirs: Theirs) -> Any:
        low, bounded, high = str(value).rpartition("_")
        weights = "icepop" if bounded else theirs.get(f"{_THEIR_CORRECTION}.rollout_is")
        if kind == "icepop_low":
            return float(low) if bounded else UNSET
        return float(high) if weights == kind else UNSET

    return convert


def _rejections(value: Any, theirs: Theirs) -> Any:
    options, given = (theirs.get(f"{_THEIR_CORRECTION}.{name}") for name in ("rollout_rs", "rollout_rs_threshold"))
    if options is None or given is None:
        return UNSET
    names, bounds = ([part.strip() for part in str(text).split(",") if part.strip()] for text in (options, given))
    rules = []
    for name, bound in zip(names, bounds * len(names) if len(bounds) == 1 else bounds, strict=True):
        level, _, statistic = name.rpartition("_")
        if level not in _LEVELS:
            raise ValueError(f"{name} begins with none of {', '.join(_LEVELS)}")
        low, _, high = bound.rpartition("_")
        rule: dict[str, Any] = {"statistic": statistic, "level": _LEVELS[level]}
        if statistic == "k1":  # bounds of 1 / ratio there
            rule["low"], rule["high"] = math.log(float(low) if low else 1 / float(high)), math.log(float(high))
        else:
            rule["high"] = float(high)
        rules.append(rule)
    return rules


def _long_prompts(value: Any, theirs: Theirs) -> Any:
    if theirs.get("data.filter_overlong_prompts"):
        return "filter"
    known = {True: "filter", False: UNSET, "error": "error", "left": "truncate"}
    return known.get(value, Without("data.on_long_prompt=truncate removes the beginning of the longest message"))


_SETTINGS: list[Setting] = [
    *other_names(
        "actor_rollout_ref.actor.",
        {
            "optim.lr": "trainer.policy.optimizer_config.lr",
            "optim.weight_decay": "trainer.policy.optimizer_config.weight_decay",
            "optim.clip_grad": "trainer.policy.optimizer_config.max_grad_norm",
            "optim.betas": "trainer.policy.optimizer_config.adam_betas",
            "optim.lr_scheduler_type": "trainer.policy.optimizer_config.scheduler",
            "grad_clip": "trainer.policy.optimizer_config.max_grad_norm",
            "ppo_mini_batch_size": "trainer.policy_mini_batch_size",
            "ppo_epochs": "trainer.update_epochs_per_batch",
            "clip_ratio_c": "trainer.algorithm.clip_ratio_c",
            "entropy_coeff": "trainer.algorithm.entropy_coef",
            "tau_pos": "trainer.algorithm.sapo.tau_pos",
            "tau_neg": "trainer.algorithm.sapo.tau_neg",
            "policy_loss.clip_cov_ratio": "trainer.algorithm.clip_cov.clip_ratio",
            "policy_loss.clip_cov_lb": "trainer.algorithm.clip_cov.clip_cov_lb",
            "policy_loss.clip_cov_ub": "trainer.algorithm.clip_cov.clip_cov_ub",
            "policy_loss.kl_cov_ratio": "trainer.algorithm.kl_cov.kl_cov_frac",
            "policy_loss.ppo_kl_coef": "trainer.algorithm.kl_cov.ppo_kl_coef",
            "fsdp_config.offload_policy": "trainer.fsdp.cpu_offload",
            "fsdp_config.reshard_after_forward": "trainer.fsdp.reshard_after_forward",
            "fsdp_config.ulysses_sequence_parallel_size": "trainer.fsdp.sequence_parallel_size",
            "ulysses_sequence_parallel_size": "trainer.fsdp.sequence_parallel_size",
        },
    ),
    Setting(
        f"{_ACTOR}.ppo_max_token_len_per_gpu",
        "trainer.micro_batch_tokens",
        "times ulysses_sequence_parallel_size",
        UNSET,
        _tokens,
    ),
    Setting(
        "actor_rollout_ref.actor.optim.lr_warmup_steps",
        "trainer.policy.optimizer_config.num_warmup_steps",
        f"-1: 0; {_BATCHES}",
        UNSET,
        _warmup_steps,
    ),
    Setting(f"{_ACTOR}.optim.warmup_style", "trainer.policy.optimizer_config.scheduler", "", UNSET, unless_none),
    Setting(
        f"{_ACTOR}.optim.lr_warmup_steps_ratio",
        "trainer.policy.optimizer_config.num_warmup_steps",
        f"of trainer.total_training_steps, without lr_warmup_steps; {_BATCHES}",
        UNSET,
        _warmup,
    ),
    Setting(
        f"{_ACTOR}.optim.optimizer",
        "trainer.policy.optimizer_config",
        "AdamW alone",
        UNSET,
        known_values({"AdamW": UNSET}, "the optimizer is AdamW"),
    ),
    *[
        Setting(f"{_ACTOR}.{name}", f"trainer.algorithm.{ours}", note, UNSET, _clip(side, cispo=cispo))
        for side in ("low", "high")
        for name, kind in ((f"clip_ratio_{side}", ""), ("clip_ratio", f"without clip_ratio_{side}"))
        for ours, cispo in ((f"eps_clip_{side}", False), (f"cispo.cispo_eps_clip_{side}", True))
        for note in ("; ".join(filter(None, [kind, "cispo" if cispo else ""])),)
    ],
    Setting(f"{_ACTOR}.loss_scale_factor", "trainer.algorithm.max_seq_len", "", UNSET, unless_none),
    Setting(
        f"{_ACTOR}.fsdp_config.fsdp_size",
        "trainer.fsdp.shard_size",
        "-1: null",
        UNSET,
        lambda value, theirs: None if value < 0 else value,
    ),
    Setting(
        f"{_ACTOR}.fsdp_config.dtype",
        "trainer.policy.dtype",
        "float32 or bfloat16",
        UNSET,
        known_values(_DTYPES, "trainer.policy.dtype is float32 or bfloat16"),
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
        known_values(
            {
                "vanilla": "dual_clip",
                **{name: name for name in ("gspo", "sapo", "cispo", "clip_cov", "kl_cov")},
                **{name.replace("_", "-"): name for name in ("clip_cov", "kl_cov")},
            },
            "there is no such loss here; algorithms.md says which there are",
        ),
    ),
    Setting(
        "actor_rollout_ref.actor.loss_agg_mode",
        "trainer.algorithm.loss_reduction",
        "token-mean, seq-mean-token-mean, seq-mean-token-sum-norm",
        UNSET,
        known_values(
            {
                "token-mean": "token_mean",
                "seq-mean-token-mean": "sequence_mean",
                "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
            },
            "there is no such reduction here; algorithms.md says which there are",
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
        known_values(_KL_ESTIMATORS, _NO_KL_ESTIMATOR),
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
            "rollout.prompt_length": "generator.max_input_length",
            "rollout.response_length": "generator.sampling_params.max_tokens",
            "rollout.ignore_eos": "generator.sampling_params.ignore_eos",
            "rollout.pipeline_model_parallel_size": "generator.inference_engine.pipeline_parallel_size",
            "rollout.max_num_batched_tokens": "generator.inference_engine.engine_args.max_num_batched_tokens",
            "rollout.enable_chunked_prefill": "generator.inference_engine.engine_args.enable_chunked_prefill",
            "rollout.enable_prefix_caching": "generator.inference_engine.engine_args.enable_prefix_caching",
            "rollout.disable_log_stats": "generator.inference_engine.engine_args.disable_log_stats",
            "rollout.engine_kwargs.vllm.*": "generator.inference_engine.engine_args.*",
            "rollout.temperature": "generator.sampling_params.temperature",
            "rollout.top_p": "generator.sampling_params.top_p",
            "rollout.top_k": "generator.sampling_params.top_k",
            "rollout.tensor_model_parallel_size": "generator.inference_engine.tensor_parallel_size",
            "rollout.gpu_memory_utilization": "generator.inference_engine.engine_args.gpu_memory_utilization",
            "rollout.enforce_eager": "generator.inference_engine.engine_args.enforce_eager",
            "rollout.max_num_seqs": "generator.inference_engine.max_num_seqs",
            "rollout.max_model_len": "generator.inference_engine.max_model_len",
            "rollout.dtype": "generator.inference_engine.dtype",
            "rollout.agent.num_workers": "rollout.num_actors",
            "rollout.val_kwargs.temperature": "trainer.eval.sampling_params.temperature",
            "rollout.val_kwargs.top_p": "trainer.eval.sampling_params.top_p",
            "rollout.val_kwargs.top_k": "trainer.eval.sampling_params.top_k",
            "rollout.val_kwargs.n": "trainer.eval.n_samples_per_prompt",
            "ref.fsdp_config.param_offload": "rollout.stages.reference.cpu_offload",
            "hybrid_engine": "trainer.placement.colocate_all",
        },
    ),
    Setting(f"{_ROLLOUT}.multi_turn.max_assistant_turns", "generator.max_turns", "", UNSET, unless_none),
    Setting(
        f"{_ROLLOUT}.val_kwargs.do_sample",
        "trainer.eval.sampling_params.temperature",
        "false, without a temperature: 0",  # its engines sample at the temperature in both cases
        UNSET,
        lambda value, theirs: theirs.get(f"{_ROLLOUT}.val_kwargs.temperature", UNSET if value else 0.0),
    ),
    Setting(f"{_ROLLOUT}.quantization", f"{_ENGINE}.engine_args.quantization", "", UNSET, unless_none),
    Setting(
        f"{_ROLLOUT}.checkpoint_engine.backend",
        "generator.weight_transport",
        "nccl: nccl",
        UNSET,
        known_values(
            {"nccl": "nccl", "naive": UNSET}, "generator.weight_transport has shared_memory, gloo, nccl, disk, ..."
        ),
    ),
    Setting(f"{_MODEL}.target_modules", "trainer.policy.model.lora.target_modules", "a list", UNSET, list_unless_none),
    Setting(
        f"{_MODEL}.exclude_modules", "trainer.policy.model.lora.exclude_modules", "a list", UNSET, list_unless_none
    ),
    Setting(
        "algorithm.adv_estimator",
        "trainer.algorithm.advantage_estimator",
        "reinforce_plus_plus: reinforce++",
        UNSET,
        known_values(
            {
                "reinforce_plus_plus": "reinforce++",
                "reinforce++": "reinforce++",
                "grpo_vectorized": "grpo",
                "rloo_vectorized": "rloo",
                **{name: name for name in ("gae", "grpo", "rloo", "maxrl")},
            },
            "there is no such estimator here; algorithms.md says which there are, and how to write one",
        ),
    ),
    Setting(
        "algorithm.use_kl_in_reward",
        "trainer.algorithm.kl_reward_coef",
        "false: 0",
        UNSET,
        lambda value, theirs: theirs.get("algorithm.kl_ctrl.kl_coef", 0.001) if value else 0.0,
    ),
    Setting(
        "algorithm.kl_ctrl.kl_coef",
        "trainer.algorithm.kl_reward_coef",
        "with use_kl_in_reward",
        UNSET,
        lambda value, theirs: value if theirs.get("algorithm.use_kl_in_reward") else 0.0,
    ),
    Setting(
        "algorithm.kl_penalty",
        "trainer.algorithm.kl_estimator_type",
        "with use_kl_in_reward; kl: k1; mse: k2; low_var_kl: k3",
        UNSET,
        lambda value, theirs: (
            _KL_ESTIMATORS.get(value, Without(_NO_KL_ESTIMATOR)) if theirs.get("algorithm.use_kl_in_reward") else UNSET
        ),
    ),
    Setting(
        "algorithm.filter_groups.enable",
        "trainer.algorithm.dynamic_sampling",
        "true: filter",
        UNSET,
        mapped_values({True: "filter", False: "none"}),
    ),
    Setting(
        f"{_THEIR_CORRECTION}.rollout_is",
        f"{_OUR_CORRECTION}.tis_ratio_type",
        "token with two bounds: icepop",
        UNSET,
        _weights,
    ),
    Setting(
        f"{_THEIR_CORRECTION}.rollout_is",
        f"{_OUR_CORRECTION}.allow_uncorrected",
        "null: true",
        UNSET,
        _uncorrected,
    ),
    *[
        Setting(f"{_THEIR_CORRECTION}.rollout_is_threshold", f"{_OUR_CORRECTION}.{ours}", note, UNSET, _threshold(kind))
        for kind, ours, note in (
            ("token", "token_tis_ratio_clip_high", "one bound"),
            ("sequence", "sequence_tis_ratio_clip_high", "one bound"),
            ("icepop_low", "icepop_ratio_low", "two bounds"),
            ("icepop", "icepop_ratio_high", "two bounds"),
        )
    ],
    *[
        Setting(f"{_THEIR_CORRECTION}.{name}", f"{_OUR_CORRECTION}.rejections", "a rule for each", UNSET, _rejections)
        for name in ("rollout_rs", "rollout_rs_threshold")
    ],
    *other_names(
        "algorithm.",
        {
            "gamma": "trainer.algorithm.gamma",
            "lam": "trainer.algorithm.lambd",
            "norm_adv_by_std_in_grpo": "trainer.algorithm.grpo_norm_by_std",
            "kl_ctrl.type": "trainer.algorithm.kl_ctrl.type",
            "kl_ctrl.horizon": "trainer.algorithm.kl_ctrl.horizon",
            "kl_ctrl.target_kl": "trainer.algorithm.kl_ctrl.kl_target",
        },
    ),
    Setting("data.train_files", "data.train_data", "", UNSET, data_files),
    Setting(
        "data.train_batch_size",
        "trainer.train_batch_size",
        "0, of its asynchronous trainer: null",
        UNSET,
        lambda value, theirs: value or None,
    ),
    Setting("data.val_files", "trainer.eval.eval_data", "", UNSET, data_files),
    *other_names(
        "data.",
        {
            "prompt_key": "data.prompt_key",
            "max_prompt_length": "generator.max_input_length",
            "max_response_length": "generator.sampling_params.max_tokens",
        },
    ),
    Setting("data.filter_overlong_prompts", "data.on_long_prompt", "true: filter", UNSET, _long_prompts),
    Setting(
        "data.truncation",
        "data.on_long_prompt",
        "error: error; left: truncate; without filter_overlong_prompts",
        UNSET,
        _long_prompts,
    ),
    Setting(
        "data.shuffle",
        "data.sampler",
        "true: shuffle; false: sequential",
        UNSET,
        mapped_values({True: "shuffle", False: "sequential"}),
    ),
    Setting("data.apply_chat_template_kwargs.*", "generator.chat_template_kwargs.*"),
    *other_names(
        "critic.",
        {
            "optim.lr": "trainer.critic.optimizer_config.lr",
            "optim.weight_decay": "trainer.critic.optimizer_config.weight_decay",
            "optim.betas": "trainer.critic.optimizer_config.adam_betas",
            "optim.lr_scheduler_type": "trainer.critic.optimizer_config.scheduler",
            "optim.clip_grad": "trainer.critic.optimizer_config.max_grad_norm",
            "grad_clip": "trainer.critic.optimizer_config.max_grad_norm",
            "model.path": "trainer.critic.model.path",
            "model.enable_gradient_checkpointing": "trainer.critic.gradient_checkpointing",
            "cliprange_value": "trainer.algorithm.value_clip",
        },
    ),
    Setting(
        "critic.optim.lr_warmup_steps",
        "trainer.critic.optimizer_config.num_warmup_steps",
        f"-1: 0; {_BATCHES}",
        UNSET,
        _warmup_steps,
    ),
    *[
        Setting("trainer.device", key, "cuda or cpu", UNSET, known_values({"cuda": "cuda", "cpu": "cpu"}, where))
        for key, where in (
            ("trainer.device", "training runs on cuda or cpu"),
            (f"{_ENGINE}.device", "engines run on cuda or cpu"),
        )
    ],
    Setting(
        "trainer.v1.trainer_mode",
        "trainer.mode",
        "separate_async: fully_async; sync: sync",
        UNSET,
        known_values(
            {"sync": "sync", "separate_async": "fully_async"}, "of these modes there are sync and separate_async"
        ),
    ),
    Setting("trainer.v1.separate_async.parameter_sync_step", "trainer.fully_async.weight_sync_interval"),
    Setting(
        "trainer.v1.sampler.max_off_policy_threshold",
        "trainer.fully_async.max_staleness_steps",
        "with separate_async; there versions, the first one included: times parameter_sync_step, minus 1",
        UNSET,
        _bound,
    ),
    Setting(
        "trainer.v1.sampler.max_off_policy_strategy",
        "trainer.fully_async.staleness_policy",
        "drop, wait",
        UNSET,
        known_values(
            {name: name for name in ("drop", "wait")},
            "trainer.fully_async.staleness_policy has mask, accept, wait and drop",
        ),
    ),
    *other_names(
        "trainer.",
        {
            "total_epochs": "trainer.epochs",
            "val_before_train": "trainer.eval.before_train",
            "default_local_dir": "trainer.run_dir",
            "experiment_name": "trainer.run_name",
        },
    ),
    Setting(
        "trainer.max_actor_ckpt_to_keep",
        "trainer.max_ckpts_to_keep",
        "null has no counterpart",
        UNSET,
        checkpoints_to_keep,
    ),
    Setting("trainer.total_training_steps", "trainer.max_steps", _BATCHES, UNSET, _steps),
    Setting("trainer.test_freq", "trainer.eval.interval", f"-1: 0; {_BATCHES}", UNSET, _steps_or_0),
    Setting("trainer.save_freq", "trainer.ckpt_interval", f"-1: 0; {_BATCHES}", UNSET, _steps_or_0),
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
    *[
        Setting(f"async_training.{name}", "trainer.mode", "fully_async", UNSET, lambda value, theirs: "fully_async")
        for name in (_AHEAD, _EVERY, _BATCHES_EACH)
    ],
    *[
        Setting(
            f"async_training.{name}",
            "trainer.fully_async.weight_sync_interval",
            f"{_EVERY} x {_BATCHES_EACH}",
            UNSET,
            lambda value, theirs: _between_syncs(theirs),
        )
        for name in (_EVERY, _BATCHES_EACH)
    ],
    *[
        Setting(f"async_training.{_AHEAD}", f"trainer.fully_async.{ours}", note, UNSET, convert)
        for ours, note, convert in (
            ("generate_ahead_steps", "times the steps between weight syncs", lambda value, theirs: _ahead(theirs)),
            (
                "max_staleness_steps",
                "the least that this allows",
                lambda value, theirs: math.ceil(_ahead(theirs)) + _between_syncs(theirs) - 1,
            ),
            ("staleness_policy", "there older groups are trained: accept", lambda value, theirs: "accept"),
        )
    ],
    Setting(
        "async_training.partial_rollout",
        "generator.pause_mode",
        "true: keep; false: wait",
        UNSET,
        mapped_values({True: "keep", False: "wait"}),
    ),
    *without(
        "rollout.stages.reward.function takes a function `group -> list of numbers`",
        "custom_reward_function.*",
        "reward.*",
        "reward_model.*",
        "data.reward_fn_key",
    ),
    *without("the environment python_tests has a sandbox", "sandbox_fusion.*"),
    *without(
        "trainer.micro_batch_tokens limits tokens, not sequences",
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
        f"{_ACTOR}.ppo_micro_batch_size",
        f"{_ACTOR}.use_dynamic_bsz",
    ),
    *without(
        "passes without gradients use trainer.micro_batch_tokens too",
        *(
            f"actor_rollout_ref.{part}.log_prob_{name}"
            for part in ("rollout", "ref")
            for name in ("micro_batch_size_per_gpu", "micro_batch_size", "use_dynamic_bsz", "max_token_len_per_gpu")
        ),
    ),
    *without(
        "prompts and responses are not padded",
        f"{_MODEL}.use_remove_padding",
        f"{_ACTOR}.use_remove_padding",
        f"{_ACTOR}.pad_to_length",
        f"{_ACTOR}.fsdp_config.pad_to_length",
        f"{_ACTOR}.fsdp_config.pad_to_length_bucket",
        "trainer.balance_batch",
    ),
    *without("trackers take it from the environment: WANDB_PROJECT, ...", "trainer.project_name"),
    *without(
        "a schedule of your own takes them: scheduler=path.to.Schedule",
        *(f"{_ACTOR}.optim.{name}" for name in ("min_lr_ratio", "num_cycles", "zero_indexed_step")),
    ),
    *without(
        "the optimizer is torch's AdamW",
        f"{_ACTOR}.optim.optimizer_impl",
        f"{_ACTOR}.optim.override_optimizer_config",
    ),
    *without("a schedule decays over trainer.max_steps", f"{_ACTOR}.optim.total_training_steps"),
    *without(
        "trainer.placement.colocate_all moves the training state between steps; trainer.fsdp.cpu_offload keeps it away",
        f"{_ACTOR}.fsdp_config.param_offload",
        f"{_ACTOR}.fsdp_config.optimizer_offload",
        f"{_MODEL}.enable_activation_offload",
    ),
    *without("bfloat16 weights have a float32 copy", f"{_ACTOR}.fsdp_config.model_dtype"),
    *without(
        "layers are wrapped one by one, and gathered in order",
        *(
            f"{_ACTOR}.fsdp_config.{name}"
            for name in (
                "wrap_policy.*",
                "forward_prefetch",
                "use_orig_params",
                "forward_only",
                "strategy",
                "turbo_config.*",
                "use_no_sync_for_gradient_accumulation",
            )
        ),
    ),
    *without(
        "logits are computed in blocks, and their log-probs and entropy with them",
        *(
            f"{_ACTOR}.{section}entropy_{name}"
            for section in ("", "fsdp_config.")
            for name in ("from_logits_with_chunking", "from_logits_chunk_size", "checkpointing")
        ),
        f"{_ACTOR}.calculate_entropy",
        f"{_ACTOR}.calculate_sum_pi_squared",
    ),
    *without(
        "trainer.policy.compile compiles the layers",
        f"{_ACTOR}.use_torch_compile",
        f"{_ACTOR}.fsdp_config.use_torch_compile",
    ),
    *without(
        "trainer.seed is the seed of all that is random",
        f"{_ACTOR}.fsdp_config.seed",
        f"{_ACTOR}.data_loader_seed",
        f"{_ROLLOUT}.seed",
        "data.seed",
    ),
    *without(
        "sampled tokens are reproducible with generator.inference_engine.batch_invariant",
        f"{_ACTOR}.fsdp_config.full_determinism",
        f"{_ROLLOUT}.full_determinism",
    ),
    *without(
        "quantized training is not there",
        f"{_ACTOR}.qat.*",
        f"{_ACTOR}.fsdp_config.qat.*",
        f"{_ROLLOUT}.qat",
        f"{_ROLLOUT}.qat.*",
        f"{_ROLLOUT}.quantization_config_file",
    ),
    *without("groups train in the order of their deadlines", f"{_ACTOR}.shuffle"),
    *without("generator.n_samples_per_prompt is the size of a group everywhere", f"{_ACTOR}.rollout_n"),
    *without("models have text alone", f"{_ACTOR}.freeze_vision_tower"),
    *without("there is no loss dro here", f"{_ACTOR}.policy_loss.dro_beta"),
    *without("the common tokens of a group are computed with each sample", f"{_ACTOR}.use_prefix_grouper"),
    *without("a checkpoint always has all that a resume needs", f"{_ACTOR}.checkpoint.*"),
    *without(
        "there are no fused kernels here",
        f"{_ACTOR}.use_fused_kernels",
        f"{_MODEL}.use_fused_kernels",
        f"{_MODEL}.fused_kernel_options.*",
        f"{_MODEL}.use_liger",
        f"{_MODEL}.tiled_mlp.*",
    ),
    *without("Megatron is not there; trainer.fsdp shards the policy", f"{_ACTOR}.megatron.*", f"{_MODEL}.lora.*"),
    *without(
        "the record in events/ has what each part did when; a profiler is not there",
        f"{_ACTOR}.profiler.*",
        f"{_ROLLOUT}.profiler.*",
        "actor_rollout_ref.ref.profiler.*",
        "critic.profiler.*",
        "global_profiler.*",
    ),
    *without("the model is taken as it is in its folder", f"{_MODEL}.hf_config_path", f"{_MODEL}.override_config.*"),
    *without("the tokenizer is in the model's folder", f"{_MODEL}.tokenizer_path", "data.tokenizer"),
    *without("files are read where they are", f"{_MODEL}.use_shm", "data.use_shm"),
    *without(
        "models are those that transformers itself knows",
        f"{_MODEL}.trust_remote_code",
        f"{_MODEL}.external_lib",
        "data.trust_remote_code",
    ),
    *without("generator.chat_template names a file", f"{_MODEL}.custom_chat_template"),
    *without("a new adapter is trained", f"{_MODEL}.lora_adapter_path"),
    *without(
        "layers that predict several tokens are not trained", f"{_MODEL}.mtp.*", f"{_ROLLOUT}.mtp", f"{_ROLLOUT}.mtp.*"
    ),
    *without(
        "the reference is the policy that the run starts from, in rollout.stages.reference",
        "actor_rollout_ref.ref.*",
    ),
    *without("each group is generated by itself", f"{_ROLLOUT}.mode", f"{_ROLLOUT}.over_sample_rate"),
    *without(
        "generator.inference_engine.num_engines and tensor_parallel_size count GPUs",
        f"{_ROLLOUT}.nnodes",
        f"{_ROLLOUT}.n_gpus_per_node",
        f"{_ROLLOUT}.data_parallel_size",
        f"{_ROLLOUT}.expert_parallel_size",
        "rollout.nnodes",
        "rollout.n_gpus_per_node",
    ),
    *without("actor_rollout_ref.rollout.n is it", "rollout.n"),
    *without("trainer.max_steps counts optimizer steps", "rollout.total_rollout_steps"),
    *without("generator.inference_engine.engine_args takes arguments of vLLM", f"{_ROLLOUT}.cudagraph_capture_sizes"),
    *without(
        "colocated engines always sleep while the policy trains",
        f"{_ROLLOUT}.free_cache_engine",
        f"{_ROLLOUT}.multi_stage_wake_up",
    ),
    *without("engines get their weights from the trainer", f"{_ROLLOUT}.load_format", f"{_ROLLOUT}.layered_summon"),
    *without(
        "the log-probs of sampled tokens are always there",
        f"{_ROLLOUT}.logprobs_mode",
        f"{_ROLLOUT}.calculate_log_probs",
        f"{_ACTOR}.use_rollout_log_probs",
    ),
    *without(
        "requests are routed and ordered by the library",
        f"{_ROLLOUT}.scheduling_policy",
        f"{_ROLLOUT}.router_config_path",
    ),
    *without("training samples with generator.sampling_params.temperature", f"{_ROLLOUT}.do_sample"),
    *without(
        "engines are vLLM or embedded", f"{_ROLLOUT}.engine_kwargs.sglang.*", f"{_ROLLOUT}.engine_kwargs.trtllm.*"
    ),
    *without(
        "an environment, or an agent over HTTP, calls tools and answers; see your_own_task.md and agent_harness.md",
        f"{_ROLLOUT}.multi_turn.*",
        f"{_ROLLOUT}.agent.*",
        "data.tool_config_path",
        "data.function_tool_path",
    ),
    *without("generator.weight_transport and weight_transport_kwargs", f"{_ROLLOUT}.checkpoint_engine.*"),
    *without("samples/ and events/ of the run folder have the conversations", f"{_ROLLOUT}.trace.*"),
    *without("`skyrl-train page` serves /metrics", f"{_ROLLOUT}.prometheus.*"),
    *without("engines get and give tokens", f"{_ROLLOUT}.skip_tokenizer_init"),
    *without(
        "the trainer routes experts itself",
        f"{_ROLLOUT}.enable_rollout_routing_replay",
        f"{_ROLLOUT}.moe_load_balance_metrics_interval",
    ),
    *without("each engine prefills and decodes", f"{_ROLLOUT}.disaggregation.*"),
    *without("trainer.fsdp.start_timeout_s and trainer.failures limit waiting", "actor_rollout_ref.nccl_timeout"),
    *without("an evaluation has all prompts", "data.validation_shuffle"),
    *without("shorten the file instead", "data.train_max_samples", "data.val_max_samples"),
    *without(
        "groups are generated one by one; the evaluation's limit is trainer.eval.max_parallel",
        "data.gen_batch_size",
        "data.val_batch_size",
    ),
    *without(
        "a row is a prompt and its other columns",
        "data.return_raw_input_ids",
        "data.return_raw_chat",
        "data.return_full_prompt",
        "data.custom_cls.*",
    ),
    *without(
        "data is read in the trainer's process", "data.dataloader_num_workers", "data.filter_overlong_prompts_workers"
    ),
    *without(
        "models have text alone",
        "data.image_patch_size",
        "data.image_key",
        "data.video_key",
        "data.audio_key",
        "data.return_multi_modal_inputs",
        "data.mm_processor_kwargs.*",
    ),
    *without("the critic trains on the minibatches of the policy, with trainer.critic", "critic.*"),
    *without(
        "trainer.algorithm.max_filtered_share limits the share of filtered groups",
        "algorithm.filter_groups.metric",
        "algorithm.filter_groups.max_num_gen_batches",
        "algorithm.filter_groups.max_inflight_gen_batches",
    ),
    *without(
        "trainer.algorithm.proximal_policy names the policy that a loss clips around",
        f"{_THEIR_CORRECTION}.bypass_mode",
    ),
    *without("trainer.algorithm.policy_loss_type is the loss", f"{_THEIR_CORRECTION}.loss_type"),
    *without("weights are not normalised", f"{_THEIR_CORRECTION}.rollout_is_batch_normalize"),
    *without("prompts are not weighted by their rewards", "algorithm.use_pf_ppo", "algorithm.pf_ppo.*"),
    *without("distillation is not there", "distillation.*"),
    *without("rollout.buffer_memory_bytes limits the finished groups in memory", "transfer_queue.*"),
    *without("rollout.replay keeps the tokens of unfinished rollouts", "skip.*"),
    *without(
        "Ray is configured by its own environment variables", "ray_kwargs.*", "trainer.ray_wait_register_center_timeout"
    ),
    *without(
        "samples/ of the run folder has samples of each step and evaluation",
        "trainer.log_val_generations",
        "trainer.rollout_data_dir",
        "trainer.validation_data_dir",
    ),
    *without("`skyrl-train eval RUN` evaluates alone", "trainer.val_only"),
    *without("policy and critic train from the first step", "trainer.critic_warmup"),
    *without("trainer.ckpt_path takes a URL", "trainer.default_hdfs_dir"),
    *without(
        "checkpoints are of policy and critic together; trainer.max_ckpts_to_keep",
        "trainer.max_critic_ckpt_to_keep",
        "trainer.del_local_ckpt_after_load",
        "trainer.checkpoint_callback_class",
    ),
    *without("SIGTERM writes a checkpoint and ends the run", "trainer.esi_redundant_time"),
    *without("trainer.mode is one of four", "trainer.use_v1", "trainer.v1.*"),
    *without("`trainer.eval.num_engines` has the evaluation's engines", "async_training.use_trainer_do_validate"),
    *without(
        "GPUs of the trainer do not help the engines",
        "async_training.use_dynamic_resource_scheduling",
        "async_training.dynamic_schedule_policy",
        "async_training.dynamic_schedule_deactivate_ratio",
        "async_training.dynamic_schedule_enable_rebalance",
        f"{_ROLLOUT}.standalone_gpu_memory_utilization",
    ),
    *without(
        "generator.inference_engine.max_num_seqs limits an engine", "async_training.concurrent_samples_per_replica"
    ),
]

VERL = Library("verl", "0.9.1", _SETTINGS)

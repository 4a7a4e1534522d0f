"""SkyRL's settings: every one of the version below, with its default. The oracle tests compare them with the package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from skyrl_train.config.migration.table import (
    UNSET,
    Library,
    Setting,
    Theirs,
    Without,
    as_list,
    data_files,
    resumed,
    trackers,
    without,
)


def _same(section: str, here: str | None = None, **defaults: Any) -> list[Setting]:
    """Return settings with the same name in a section of theirs and of ours."""
    return [Setting(f"{section}.{name}", f"{here or section}.{name}", "", value) for name, value in defaults.items()]


def _steps(value: Any, theirs: Theirs) -> Any:
    """Steps there are batches, here minibatches."""
    if _mode(theirs) != "fully_async" and value is not None:
        return int(value) * max(
            theirs["trainer.train_batch_size"] // max(theirs["trainer.policy_mini_batch_size"], 1), 1
        )
    return value


def _interval(value: Any, theirs: Theirs) -> int:
    return max(int(_steps(value, theirs)), 0)


def _mode(theirs: Theirs) -> str:
    return str(theirs.get("trainer.mode") or ("fully_async" if theirs["trainer.fully_async.enabled"] else "sync"))


def _asynchronous(value: Any, theirs: Theirs) -> Any:
    return value if _mode(theirs) == "fully_async" else UNSET


def _gae(value: Any, theirs: Theirs) -> Any:
    return value if theirs["trainer.algorithm.advantage_estimator"] == "gae" else UNSET


def _evaluated(value: Any, theirs: Theirs) -> Any:
    return value if theirs["trainer.eval_interval"] > 0 else UNSET


def _vllm(value: Any, theirs: Theirs) -> Any:
    return value if theirs[f"{_ENGINE}.backend"] == "vllm" else UNSET


def _ranks(model: str) -> Callable[[Any, Theirs], int]:
    names = (f"trainer.placement.{model}_num_nodes", f"trainer.placement.{model}_num_gpus_per_node")
    return lambda value, theirs: theirs[names[0]] * theirs[names[1]]


def _is_local(theirs: Theirs) -> bool:
    """Return whether the run is ``trainer.strategy=local`` here: given as such, or one GPU that engines and trainer share."""
    shared = theirs["trainer.placement.colocate_all"] and _ranks("policy")(None, theirs) == 1
    return bool(shared) or theirs["trainer.strategy"] == "local"


def _policy_ranks(value: Any, theirs: Theirs) -> Any:
    return UNSET if _is_local(theirs) else _ranks("policy")(value, theirs)


def _strategy(value: Any, theirs: Theirs) -> Any:
    return ("local" if _is_local(theirs) else "fsdp2") if value in ("fsdp", "fsdp2") else value


def _reference(value: Any, theirs: Theirs) -> Any:
    algorithm = "trainer.algorithm"
    if not (theirs[f"{algorithm}.use_kl_loss"] or theirs[f"{algorithm}.use_kl_in_reward"]) or _is_local(theirs):
        return UNSET
    return "colocated" if theirs["trainer.placement.colocate_policy_ref"] else "workers"


def _of_reference_workers(value: Any, theirs: Theirs) -> Any:
    return _ranks("ref")(None, theirs) if _reference(None, theirs) == "workers" else UNSET


def _micro_batch(value: Any, theirs: Theirs) -> int:
    if theirs["trainer.max_tokens_per_microbatch"] > 0:
        return int(theirs["trainer.max_tokens_per_microbatch"])
    longest = _input(None, theirs) + theirs["generator.sampling_params.max_generate_length"]
    return int(theirs["trainer.micro_train_batch_size_per_gpu"] * longest)


def _input(value: Any, theirs: Theirs) -> int:
    return int(theirs["generator.max_input_length"] or theirs["trainer.max_prompt_length"])


def _coefficient(use: str, name: str) -> Callable[[Any, Theirs], float]:
    return lambda value, theirs: theirs[f"trainer.algorithm.{name}"] if theirs[f"trainer.algorithm.{use}"] else 0.0


def _loss(value: Any, theirs: Theirs) -> Any:
    if value in ("dppo", "cross_entropy"):
        return Without(
            f"there is no loss {value} here; algorithms.md says which losses there are, and how to write DPPO"
        )
    return {"regular": "ppo_clip", "rollout_is": "importance_sampling"}.get(value, value)


def _for_loss(name: str) -> Callable[[Any, Theirs], Any]:
    return lambda value, theirs: value if theirs["trainer.algorithm.policy_loss_type"] == name else UNSET


def _clip(value: Any, theirs: Theirs) -> Any:
    return UNSET if value == 0.2 and theirs["trainer.algorithm.policy_loss_type"] != "gspo" else value


def _is_rollout_is(theirs: Theirs) -> bool:
    return bool(theirs["trainer.algorithm.policy_loss_type"] == "rollout_is")


def _proximal(value: Any, theirs: Theirs) -> Any:
    """SkyRL's old log-probs are of the policy at the beginning of a batch, also in its later minibatches."""
    minibatches = theirs["trainer.train_batch_size"] > theirs["trainer.policy_mini_batch_size"]
    in_turns = _is_local(theirs) or theirs["trainer.placement.colocate_all"]
    return "arrival" if _mode(theirs) == "sync" and minibatches and not in_turns else UNSET


def _weights(value: Any, theirs: Theirs) -> Any:
    if _is_rollout_is(theirs):
        return "icepop" if value is None else Without("rollout_is has weights already; they would be multiplied")
    # In a synchronous run, our weights stand in for SkyRL's ratio to the policy at the beginning of the batch.
    ratio_is_there = _mode(theirs) != "sync" or _proximal(None, theirs) == "arrival"
    return value if value is not None or ratio_is_there else UNSET


def _uncorrected(value: Any, theirs: Theirs) -> Any:
    return True if _weights(value, theirs) is None and not _rejections(None, theirs) else UNSET


def _icepop(name: str, sign: int) -> Callable[[Any, Theirs], Any]:
    return lambda value, theirs: 1 + sign * value if _is_rollout_is(theirs) else UNSET


def _rejections(value: Any, theirs: Theirs) -> list[dict[str, Any]]:
    prefix = "trainer.algorithm.off_policy_correction."
    bounds = {"token": "token_mask_is_threshold", "sequence_max": "outlier_token_is_threshold"}
    metric = theirs[f"{prefix}sequence_mask_metric"]
    if metric == "geometric":
        bounds["sequence_mean"] = "geo_mask"
    elif metric == "product":
        bounds["sequence_sum"] = "product_mask"
    rules = [
        {"level": level, "low": theirs[f"{prefix}{name}_low"], "high": theirs[f"{prefix}{name}_high"]}
        for level, name in bounds.items()
    ]
    return [{"statistic": "ratio", **rule} for rule in rules if rule["low"] is not None or rule["high"] is not None]


def _sampling_of_evaluation(name: str, here: str) -> Setting:
    def convert(value: Any, theirs: Theirs) -> Any:
        return UNSET if value == theirs[f"generator.sampling_params.{name}"] else _evaluated(value, theirs)

    default = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "top_k": -1}.get(name, UNSET)
    return Setting(
        f"generator.eval_sampling_params.{name}", f"trainer.eval.sampling_params.{here}", "", default, convert
    )


_ENGINE = "generator.inference_engine"
_CORRECTION = "trainer.algorithm.off_policy_correction"
_MEGATRON = "Megatron is not there; trainer.strategy=fsdp2 shards"
_VISION = "images are not supported"
_DEBUG = "the run folder, its report and its page show it"

_SETTINGS: list[Setting] = [
    # The mode is the first line: SkyRL chooses it by the module that a script starts.
    Setting("trainer.mode", "trainer.mode", "there: the module that a script starts; of `main_async`: one_step_off"),
    Setting(
        "trainer.fully_async.enabled",
        "trainer.mode",
        "true: fully_async; false: sync",
        False,
        lambda value, theirs: _mode(theirs),
    ),
    # Data
    Setting("data.train_data", "data.train_data", "", ["~/data/gsm8k/train.parquet"], data_files),
    Setting(
        "data.val_data",
        "trainer.eval.eval_data",
        "",
        ["~/data/gsm8k/validation.parquet"],
        lambda value, theirs: _evaluated(data_files(value, theirs), theirs),
    ),
    *without("data is read in the trainer's process, or with data.streaming when it is needed", "data.dataloader.*"),
    Setting("trainer.max_prompt_length", "generator.max_input_length", "", 512, _input),
    Setting("trainer.max_prompt_length", "data.on_long_prompt", "there: filter", UNSET, lambda value, theirs: "filter"),
    Setting("generator.max_input_length", "generator.max_input_length", "", None, _input),
    # Length of the run, batches
    *_same("trainer", epochs=1, update_epochs_per_batch=1, seed=42, policy_mini_batch_size=256),
    Setting("trainer.max_training_steps", "trainer.max_steps", "there batches, here minibatches", None, _steps),
    Setting(
        "trainer.train_batch_size",
        "trainer.train_batch_size",
        "sync only; the other modes train each minibatch when it is complete",
        1024,
        lambda value, theirs: value if _mode(theirs) == "sync" else UNSET,
    ),
    Setting(
        "trainer.train_batch_size",
        "trainer.algorithm.proximal_policy",
        "sync, several minibatches in a batch, engines on their own GPUs: arrival",
        UNSET,
        _proximal,
    ),
    Setting(
        "trainer.micro_train_batch_size_per_gpu",
        "trainer.micro_batch_tokens",
        "times the longest input and response",
        1,
        _micro_batch,
    ),
    Setting("trainer.max_tokens_per_microbatch", "trainer.micro_batch_tokens", "", -1, _micro_batch),
    *without("passes without gradients use trainer.micro_batch_tokens too", "trainer.micro_forward_batch_size_per_gpu"),
    *without("the critic trains on the minibatches of the policy", "trainer.critic_mini_batch_size"),
    Setting(
        "trainer.remove_microbatch_padding",
        "trainer.packing",
        "",
        True,
        lambda value, theirs: UNSET if value else False,
    ),
    *without("each minibatch is scored before it trains", "trainer.recompute_old_logprobs_per_minibatch"),
    # Placement
    Setting("trainer.strategy", "trainer.strategy", "local on one shared GPU, else fsdp2", "fsdp", _strategy),
    Setting("trainer.strategy", "trainer.device", "there: always cuda", UNSET, lambda value, theirs: "cuda"),
    Setting(
        "trainer.strategy",
        "generator.inference_engine.device",
        "there: always cuda",
        UNSET,
        lambda value, theirs: "cuda",
    ),
    Setting(
        "trainer.placement.colocate_all",
        "trainer.placement.colocate_all",
        "in the modes that take turns",
        True,
        lambda value, theirs: value,
    ),
    Setting(
        "trainer.placement.colocate_all",
        "generator.inference_engine.executor",
        "on a shared GPU process, else ray",
        UNSET,
        lambda value, theirs: "process" if _is_local(theirs) else "ray",
    ),
    Setting("trainer.placement.policy_num_nodes", "trainer.fsdp.num_workers", "nodes x GPUs", 1, _policy_ranks),
    Setting("trainer.placement.policy_num_gpus_per_node", "trainer.fsdp.num_workers", "", 1, _policy_ranks),
    *[
        Setting(
            f"trainer.placement.critic_{name}",
            "trainer.critic.fsdp.num_workers",
            "with advantage_estimator=gae",
            1,
            lambda value, theirs: _gae(_ranks("critic")(None, theirs), theirs),
        )
        for name in ("num_nodes", "num_gpus_per_node")
    ],
    Setting(
        "trainer.placement.colocate_policy_ref",
        "rollout.stages.reference.executor",
        "true: colocated; false: workers",
        True,
        _reference,
    ),
    *[
        Setting(
            f"trainer.placement.ref_{name}",
            "rollout.stages.reference.num_workers",
            "a colocated reference is in the policy's workers",
            1,
            _of_reference_workers,
        )
        for name in ("num_nodes", "num_gpus_per_node")
    ],
    # Policy
    Setting("trainer.policy.model.path", "trainer.policy.model.path", "", "Qwen/Qwen2.5-1.5B-Instruct"),
    *_same("trainer.policy.model.lora", rank=0, alpha=16, dropout=0.0, init_method="kaiming"),
    Setting(
        "trainer.policy.model.lora.target_modules",
        "trainer.policy.model.lora.target_modules",
        "a list here",
        "all-linear",
        as_list,
    ),
    Setting(
        "trainer.policy.model.lora.exclude_modules",
        "trainer.policy.model.lora.exclude_modules",
        "a list here",
        None,
        as_list,
    ),
    *without(
        "the transport sends the adapter",
        "trainer.policy.model.lora.lora_sync_path",
        "trainer.policy.model.lora.max_loras",
        "trainer.policy.model.lora.max_cpu_loras",
    ),
    *without("quantized training is not there", "trainer.policy.model.fake_int4_qat.*"),
    *_same(
        "trainer.policy.optimizer_config",
        lr=1e-6,
        adam_betas=[0.9, 0.999],
        weight_decay=0.01,
        max_grad_norm=1.0,
        num_warmup_steps=0,
    ),
    Setting(
        "trainer.policy.optimizer_config.scheduler",
        "trainer.policy.optimizer_config.scheduler",
        "",
        "constant_with_warmup",
        lambda value, theirs: "constant" if value == "constant_with_warmup" else value,
    ),
    *without("colocate_all moves it, nothing else does", "trainer.policy.optimizer_config.offload_after_step"),
    Setting("trainer.policy.fsdp_config.cpu_offload", "trainer.fsdp.cpu_offload", "", False),
    Setting("trainer.policy.fsdp_config.reshard_after_forward", "trainer.fsdp.reshard_after_forward", "", True),
    Setting(
        "trainer.policy.fsdp_config.fsdp_size",
        "trainer.fsdp.shard_size",
        "-1: null",
        -1,
        lambda value, theirs: None if value < 0 else value,
    ),
    Setting("trainer.policy.sequence_parallel_size", "trainer.fsdp.sequence_parallel_size", "", 1),
    *without(
        "each layer is wrapped; gradients are reduced in float32",
        "trainer.policy.fsdp_config.mixed_precision.*",
        "trainer.policy.fsdp_config.mixed_precision",
        "trainer.policy.fsdp_config.wrap_policy.*",
    ),
    Setting(
        "trainer.bf16",
        "trainer.policy.dtype",
        "true: bfloat16, with float32 copies in the optimizer",
        True,
        lambda value, theirs: "bfloat16" if value else "float32",
    ),
    Setting(
        "trainer.bf16",
        "trainer.critic.dtype",
        "the same, with advantage_estimator=gae",
        UNSET,
        lambda value, theirs: _gae("bfloat16" if value else "float32", theirs),
    ),
    Setting("trainer.gradient_checkpointing", "trainer.policy.gradient_checkpointing", "", True),
    Setting("trainer.gradient_checkpointing", "trainer.critic.gradient_checkpointing", "with gae", UNSET, _gae),
    *without("it compiles the logits; trainer.policy.compile compiles the layers", "trainer.policy.use_torch_compile"),
    *without("change the model folder's config.json", "trainer.policy.model_config_kwargs.*"),
    *without(_VISION, "trainer.policy.language_model_only", "trainer.ref.language_model_only"),
    *without(_MEGATRON, "trainer.policy.megatron_config.*", "trainer.ref.megatron_config.*", "trainer.mtp.*"),
    *without(
        "the workers have no profiler",
        "trainer.policy.record_memory",
        "trainer.policy.torch_profiler_config.*",
    ),
    *without("skyrl-train eval runs a policy without a trainer", "trainer.policy.inference_only_init"),
    # Critic and reference
    Setting("trainer.critic.model.path", "trainer.critic.model.path", "", None, _gae),
    *[
        Setting(f"trainer.critic.optimizer_config.{name}", f"trainer.critic.optimizer_config.{name}", "", default, _gae)
        for name, default in {
            "lr": 5e-6,
            "adam_betas": [0.9, 0.999],
            "weight_decay": 0.01,
            "max_grad_norm": 1.0,
            "num_warmup_steps": 0,
        }.items()
    ],
    Setting(
        "trainer.critic.optimizer_config.scheduler",
        "trainer.critic.optimizer_config.scheduler",
        "",
        "constant_with_warmup",
        lambda value, theirs: _gae("constant" if value == "constant_with_warmup" else value, theirs),
    ),
    Setting("trainer.critic.fsdp_config.cpu_offload", "trainer.critic.fsdp.cpu_offload", "", False, _gae),
    Setting("trainer.critic.sequence_parallel_size", "trainer.critic.fsdp.sequence_parallel_size", "", 1, _gae),
    *without(
        "the critic is trained as a whole, sharded like the policy",
        "trainer.critic.model.*",
        "trainer.critic.fsdp_config.*",
        "trainer.critic.optimizer_config.offload_after_step",
        "trainer.critic.model_config_kwargs.*",
    ),
    *without("the reference is the policy that the run starts from", "trainer.ref.*", "trainer.update_ref_every_epoch"),
    Setting(
        "trainer.ref.fsdp_config.cpu_offload",
        "rollout.stages.reference.cpu_offload",
        "",
        UNSET,
        lambda value, theirs: UNSET if _reference(None, theirs) is UNSET else value,
    ),
    # Algorithm
    *_same(
        "trainer.algorithm",
        advantage_estimator="grpo",
        grpo_norm_by_std=True,
        gamma=1.0,
        lambd=1.0,
        value_clip=0.2,
        clip_ratio_c=3.0,
        loss_reduction="token_mean",
        max_seq_len=None,
        zero_variance_filter=False,
        kl_estimator_type="k3",
    ),
    *_same("trainer.algorithm.kl_ctrl", type="fixed", kl_target=0.1, horizon=10000),
    Setting(
        "trainer.algorithm.use_kl_loss",
        "trainer.algorithm.kl_loss_coef",
        "false: 0",
        True,
        _coefficient("use_kl_loss", "kl_loss_coef"),
    ),
    Setting(
        "trainer.algorithm.kl_loss_coef",
        "trainer.algorithm.kl_loss_coef",
        "",
        0.001,
        _coefficient("use_kl_loss", "kl_loss_coef"),
    ),
    Setting(
        "trainer.algorithm.use_kl_in_reward",
        "trainer.algorithm.kl_reward_coef",
        "there: kl_loss_coef",
        False,
        _coefficient("use_kl_in_reward", "kl_loss_coef"),
    ),
    Setting(
        "trainer.algorithm.use_entropy_loss",
        "trainer.algorithm.entropy_coef",
        "false: 0",
        False,
        _coefficient("use_entropy_loss", "entropy_loss_coef"),
    ),
    Setting(
        "trainer.algorithm.entropy_loss_coef",
        "trainer.algorithm.entropy_coef",
        "",
        0.01,
        _coefficient("use_entropy_loss", "entropy_loss_coef"),
    ),
    Setting(
        "trainer.algorithm.advantage_batch_normalize",
        "trainer.algorithm.advantage_batch_normalize",
        "null here: with reinforce++ and gae",
        False,
        lambda value, theirs: (
            value
            if value or theirs["trainer.algorithm.advantage_estimator"] not in ("grpo", "rloo", "maxrl")
            else UNSET
        ),
    ),
    Setting(
        "trainer.algorithm.policy_loss_type",
        "trainer.algorithm.policy_loss_type",
        "regular: ppo_clip; rollout_is: importance_sampling with tis_ratio_type=icepop",
        "regular",
        _loss,
    ),
    Setting("trainer.algorithm.eps_clip_low", "trainer.algorithm.eps_clip_low", "", 0.2, _clip),
    Setting("trainer.algorithm.eps_clip_high", "trainer.algorithm.eps_clip_high", "", 0.2, _clip),
    Setting(
        "trainer.algorithm.eps_clip_low", f"{_CORRECTION}.icepop_ratio_low", "rollout_is", UNSET, _icepop("low", -1)
    ),
    Setting(
        "trainer.algorithm.eps_clip_high", f"{_CORRECTION}.icepop_ratio_high", "rollout_is", UNSET, _icepop("high", 1)
    ),
    *[
        Setting(f"trainer.algorithm.{loss}.{name}", f"trainer.algorithm.{loss}.{name}", "", default, _for_loss(loss))
        for loss, defaults in {
            "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
            "cispo": {"cispo_eps_clip_low": 0.0, "cispo_eps_clip_high": 5.0},
            "clip_cov": {"clip_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0},
            "kl_cov": {"kl_cov_frac": 0.2, "ppo_kl_coef": 1.0},
        }.items()
        for name, default in defaults.items()
    ],
    *without("the ratio is to the proximal policy, and tis_ratio_type corrects the rest", "trainer.algorithm.cispo.*"),
    *without("write it as importance_sampling with rejections; see algorithms.md", "trainer.algorithm.dppo.*"),
    Setting(
        f"{_CORRECTION}.tis_ratio_type", f"{_CORRECTION}.tis_ratio_type", "the default here: token", None, _weights
    ),
    Setting(f"{_CORRECTION}.tis_ratio_type", f"{_CORRECTION}.allow_uncorrected", "null: true", UNSET, _uncorrected),
    *_same(_CORRECTION, token_tis_ratio_clip_high=2.0, sequence_tis_ratio_clip_high=5.0),
    *[
        Setting(
            f"{_CORRECTION}.{name}", f"{_CORRECTION}.rejections", "a rule with statistic=ratio", default, _rejections
        )
        for name, default in {
            "sequence_mask_metric": None,
            "geo_mask_low": 0.99,
            "geo_mask_high": 1.01,
            "product_mask_low": 0.5,
            "product_mask_high": 2.0,
            "outlier_token_is_threshold_low": None,
            "outlier_token_is_threshold_high": None,
            "token_mask_is_threshold_low": None,
            "token_mask_is_threshold_high": None,
        }.items()
    ],
    *without(
        "SkyRL replaced it by off_policy_correction", "trainer.algorithm.use_tis", "trainer.algorithm.tis_imp_ratio_cap"
    ),
    Setting(
        "trainer.algorithm.dynamic_sampling.type",
        "trainer.algorithm.dynamic_sampling",
        "null: none",
        None,
        lambda value, theirs: (
            "filter" if theirs["trainer.fully_async.sample_full_batch"] else "none" if value is None else value
        ),
    ),
    Setting(
        "trainer.fully_async.sample_full_batch",
        "trainer.algorithm.dynamic_sampling",
        "true: filter",
        False,
        lambda value, theirs: "filter" if value else theirs["trainer.algorithm.dynamic_sampling.type"] or "none",
    ),
    *without("max_filtered_share stops a run that filters too much", "trainer.algorithm.dynamic_sampling.*"),
    *without("rewards are compared exactly", "trainer.algorithm.zero_variance_filter_tol"),
    *without("log-probs are taken at the sampling temperature", "trainer.algorithm.temperature"),
    *without("the critic's head has no name", "trainer.algorithm.value_head_prefix"),
    # Asynchronous training
    Setting(
        "trainer.fully_async.max_staleness_steps",
        "trainer.fully_async.max_staleness_steps",
        "here it bounds the age of trained groups",
        4,
        _asynchronous,
    ),
    Setting(
        "trainer.fully_async.max_staleness_steps",
        "trainer.fully_async.generate_ahead_steps",
        "there it bounds the groups that are admitted",
        UNSET,
        _asynchronous,
    ),
    Setting(
        "trainer.fully_async.max_staleness_steps",
        "trainer.fully_async.staleness_policy",
        "there older groups are trained: accept",
        UNSET,
        lambda value, theirs: _asynchronous("accept", theirs),
    ),
    Setting(
        "trainer.fully_async.num_parallel_generation_workers",
        "trainer.fully_async.num_parallel_generation_workers",
        "",
        768,
        _asynchronous,
    ),
    Setting(
        "trainer.fully_async.clear_kv_cache_on_weight_sync",
        "generator.pause_mode",
        "true: recompute; false: keep",
        False,
        lambda value, theirs: "recompute" if value else "keep",
    ),
    *without(
        "skyrl-train simulate runs a configuration in virtual time",
        "trainer.fully_async.simulate_training",
        "trainer.fully_async.simulate_training_step_seconds",
        "trainer.fully_async.simulate_weight_sync_seconds",
    ),
    # Generator
    Setting("generator.n_samples_per_prompt", "generator.n_samples_per_prompt", "", 5),
    Setting("generator.max_turns", "generator.max_turns", "", 1),
    Setting("generator.sampling_params.max_generate_length", "generator.sampling_params.max_tokens", "", 1024),
    *_same("generator.sampling_params", temperature=1.0, top_p=1.0, min_p=0.0, top_k=-1),
    Setting("generator.sampling_params.stop", "generator.sampling_params.stop", "", None, as_list),
    *without(
        "log-probs are always recorded", "generator.sampling_params.logprobs", "generator.eval_sampling_params.logprobs"
    ),
    *without(
        "the sampled distribution must be the one that trains",
        "generator.sampling_params.repetition_penalty",
        "generator.sampling_params.additional_kwargs",
        "generator.sampling_params.additional_kwargs.*",
        "generator.eval_sampling_params.repetition_penalty",
        "generator.eval_sampling_params.additional_kwargs",
        "generator.eval_sampling_params.additional_kwargs.*",
    ),
    *[_sampling_of_evaluation(name, name) for name in ("temperature", "top_p", "min_p", "top_k")],
    _sampling_of_evaluation("max_generate_length", "max_tokens"),
    Setting(
        "generator.eval_sampling_params.stop",
        "trainer.eval.sampling_params.stop",
        "",
        UNSET,
        lambda value, theirs: _evaluated(as_list(value, theirs), theirs),
    ),
    Setting("generator.eval_n_samples_per_prompt", "trainer.eval.n_samples_per_prompt", "", 1, _evaluated),
    Setting("generator.chat_template_kwargs.*", "generator.chat_template_kwargs.*"),
    Setting(
        "generator.chat_template.name_or_path",
        "generator.chat_template",
        "a file here",
        None,
        lambda value, theirs: (
            value
            if value is None or theirs.get("generator.chat_template.source") == "file"
            else Without("there are no templates by name; write it into a file: generator.chat_template=FILE")
        ),
    ),
    *without("a template is always a file", "generator.chat_template.source"),
    Setting("generator.apply_overlong_filtering", "trainer.algorithm.overlong.filter", "", False),
    *without("engines batch all requests that run", "generator.batched"),
    *without("each turn is a message of its own", "generator.use_conversation_multi_turn"),
    *without("the template ends a turn", "generator.append_eos_token_after_stop_str_in_multi_turn"),
    *without("a reward function sees the stop reason of each sample", "generator.zero_reward_on_non_stop"),
    *without("cached prefixes serve their own policy version only", "generator.use_cache_salt"),
    *without(
        "the tokens of a trajectory are one sequence; your own generator may return several rows (is_last_step)",
        "generator.step_wise_trajectories",
        "generator.merge_stepwise_output",
    ),
    *without(_VISION, "generator.vision_language_generator", f"{_ENGINE}.language_model_only"),
    # Engines
    Setting(
        f"{_ENGINE}.backend",
        f"{_ENGINE}.backend",
        "",
        "vllm",
        lambda value, theirs: value if theirs[f"{_ENGINE}.run_engines_locally"] else "vllm_remote",
    ),
    Setting(
        f"{_ENGINE}.run_engines_locally",
        f"{_ENGINE}.backend",
        "false: vllm_remote",
        True,
        lambda value, theirs: theirs[f"{_ENGINE}.backend"] if value else "vllm_remote",
    ),
    Setting(f"{_ENGINE}.external_server_urls", f"{_ENGINE}.remote_urls", "", None, as_list),
    *_same(_ENGINE, num_engines=1, tensor_parallel_size=1, pipeline_parallel_size=1, max_num_seqs=1024),
    Setting(f"{_ENGINE}.model_dtype", f"{_ENGINE}.dtype", "", "bfloat16"),
    Setting(
        f"{_ENGINE}.weight_sync_backend",
        "generator.weight_transport",
        "nccl: null, which is cuda_ipc on a shared GPU, gloo to engines in Ray actors, else shared_memory",
        "nccl",
        lambda value, theirs: UNSET if value == "nccl" else value,
    ),
    Setting(f"{_ENGINE}.delta_weight_sync.sync_dir", "generator.weight_folder"),
    *without(
        "generator.weight_transport_kwargs has the transport's own",
        f"{_ENGINE}.delta_weight_sync",
        f"{_ENGINE}.delta_weight_sync.*",
    ),
    Setting(f"{_ENGINE}.gpu_memory_utilization", f"{_ENGINE}.engine_args.gpu_memory_utilization", "", 0.8, _vllm),
    Setting(
        f"{_ENGINE}.max_num_batched_tokens",
        f"{_ENGINE}.engine_args.max_num_batched_tokens",
        "",
        8192,
        _vllm,
    ),
    *[
        Setting(f"{_ENGINE}.{name}", f"{_ENGINE}.engine_args.{name}", "", UNSET, _vllm)
        for name in ("enforce_eager", "enable_prefix_caching", "enable_chunked_prefill", "fully_sharded_loras")
    ],
    Setting(f"{_ENGINE}.engine_init_kwargs.*", f"{_ENGINE}.engine_args.*"),
    Setting(f"{_ENGINE}.speculative_config.*", f"{_ENGINE}.engine_args.speculative_config.*"),
    *without("start several engines instead", f"{_ENGINE}.data_parallel_size", f"{_ENGINE}.expert_parallel_size"),
    *without(
        "the client routes requests itself",
        f"{_ENGINE}.external_proxy_url",
        f"{_ENGINE}.router_init_kwargs.*",
    ),
    *without("prefill and decoding share an engine", f"{_ENGINE}.enable_pd", f"{_ENGINE}.num_prefill"),
    *without("routing of experts is not replayed", f"{_ENGINE}.enable_return_routed_experts"),
    *without("requests name the model `policy`", f"{_ENGINE}.served_model_name"),
    *without("every engine is asynchronous", f"{_ENGINE}.async_engine"),
    *without(
        "it has no counterpart",
        f"{_ENGINE}.weight_transfer_threshold_cuda_ipc_GB",
        f"{_ENGINE}.vllm_v1_disable_multiproc",
        f"{_ENGINE}.enable_ray_prometheus_stats",
        f"{_ENGINE}.distributed_executor_backend",
        f"{_ENGINE}.offload_kv_for_weight_sync",
        f"{_ENGINE}.speculative_config",
    ),
    *without(
        "set PYTORCH_CUDA_ALLOC_CONF in trainer.fsdp.environment and generator.inference_engine.environment",
        "trainer.use_expandable_segments",
        f"{_ENGINE}.use_expandable_segments",
    ),
    # Environment
    Setting("environment.env_class", "environment.env_class", "a name of skyrl-gym, or an import path", "gsm8k"),
    *[
        Setting(
            f"environment.skyrl_gym.{name}.*",
            "environment.kwargs.*",
            f"with env_class={name}",
            UNSET,
            lambda value, theirs, name=name: value if theirs["environment.env_class"] == name else UNSET,  # type: ignore[misc]
        )
        for name in ("text2sql", "llm_as_a_judge", "search")
    ],
    *without("environments that block run in threads", "environment.skyrl_gym.max_env_workers"),
    # Evaluation
    Setting("trainer.eval_interval", "trainer.eval.interval", "there batches, here minibatches", 5, _interval),
    Setting("trainer.eval_before_train", "trainer.eval.before_train", "", True, _evaluated),
    Setting("trainer.eval_batch_size", "trainer.eval.max_parallel", "prompts at once", 1024, _evaluated),
    # Outputs
    Setting("trainer.run_name", "trainer.run_name"),
    Setting(
        "trainer.ckpt_path",
        "trainer.run_dir",
        "a folder: the run folder, which holds the checkpoints",
        UNSET,
        lambda value, theirs: UNSET if value is None or "://" in value else str(Path(value).expanduser()),
    ),
    Setting(
        "trainer.ckpt_path",
        "trainer.ckpt_path",
        "a URL",
        UNSET,
        lambda value, theirs: value if value is not None and "://" in value else UNSET,
    ),
    Setting("trainer.ckpt_interval", "trainer.ckpt_interval", "there batches, here minibatches", 10, _interval),
    Setting(
        "trainer.max_ckpts_to_keep",
        "trainer.max_ckpts_to_keep",
        "-1: a million",
        -1,
        lambda value, theirs: 1_000_000 if value < 0 else value,
    ),
    Setting("trainer.hf_save_interval", "trainer.hf_save_interval", "there batches, here minibatches", -1, _interval),
    Setting(
        "trainer.resume_mode",
        "trainer.resume",
        "null: never; from_path: latest",
        "latest",
        lambda value, theirs: "latest" if value == "from_path" else "never" if value in (None, "none") else value,
    ),
    *resumed("trainer.resume_path", "trainer.resume_mode", "from_path"),
    Setting(
        "trainer.logger",
        "trainer.trackers",
        "console: none; the default here is tensorboard",
        UNSET,
        trackers,
    ),
    *without("trackers take it from the environment: WANDB_PROJECT, ...", "trainer.project_name", "trainer.tags"),
    *without("the run folder holds it", "trainer.export_path", "trainer.log_path"),
    *without(
        _DEBUG,
        "trainer.dump_data_batch",
        "trainer.dump_eval_results",
        "trainer.print_example_interval",
        "trainer.log_example_interval",
        "trainer.num_logger_eval_samples",
        "trainer.num_logger_train_samples",
        "trainer.enable_ray_gpu_monitor",
    ),
    *without(
        "it is chosen by the model and the device",
        "trainer.flash_attn",
        "trainer.sequence_parallel_backend",
        "trainer.gradient_checkpointing_use_reentrant",
        "trainer.disable_fast_tokenizer",
        "trainer.logprobs_chunk_size",
        "trainer.vocab_entropy_chunk_size",
        "trainer.vocab_entropy_chunk_memory_mb",
        "trainer.fused_lm_head_logprob",
        "trainer.fused_lm_head_logprob_backend",
    ),
]

_RENAMED = {
    "generator.num_inference_engines": f"{_ENGINE}.num_engines",
    "generator.inference_engine_tensor_parallel_size": f"{_ENGINE}.tensor_parallel_size",
    "generator.inference_engine_pipeline_parallel_size": f"{_ENGINE}.pipeline_parallel_size",
    **{
        f"generator.{name}": f"{_ENGINE}.{name}"
        for name in (
            "async_engine",
            "backend",
            "enforce_eager",
            "gpu_memory_utilization",
            "max_num_batched_tokens",
            "max_num_seqs",
            "model_dtype",
            "run_engines_locally",
            "weight_sync_backend",
        )
    },
    "trainer.use_sample_packing": "trainer.remove_microbatch_padding",
}

SKYRL = Library("SkyRL", "0.3.0", _SETTINGS, _RENAMED, whole=True)

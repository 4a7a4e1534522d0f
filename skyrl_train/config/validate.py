"""Validation of a configuration before anything starts: what would crash, hang or train something wrong is an error.

limits of single settings     ``Annotated`` types in schema.py, checked by keys.limit_errors
combinations of settings      the rules below: one generator per topic, one sentence per error, with the remedy
settings without effect       no_effect.py: warnings
names in registries           ``known_names``, from build/checks.py (only importing the implementations tells)
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from skyrl_train.config import derive
from skyrl_train.config.import_path import is_import_path
from skyrl_train.config.keys import OR_IMPORT_PATH, did_you_mean, known_keys, limit_errors, setting
from skyrl_train.config.model_shape import model_shape
from skyrl_train.config.no_effect import ALGORITHM, CORRECTION, ENGINE, EVAL, FULLY_ASYNC, LORA, REFERENCE
from skyrl_train.config.no_effect import RULES as NO_EFFECT_RULES
from skyrl_train.config.schema import (
    ALL_LINEAR,
    DynamicSampling,
    FailurePolicy,
    ModelConfig,
    ProximalPolicy,
    RejectionLevel,
    ResumeMode,
    RunConfig,
    SamplingConfig,
    TrainerConfig,
    TrainerMode,
    TrainingStrategy,
)
from skyrl_train.errors import ConfigError

LORA_INIT_METHODS = ("kaiming", "gaussian")
VLLM_MAX_LORA_RANK = 512

Errors = Iterator[str]  # one sentence or two per error, with the remedy


@dataclass(frozen=True)
class Validation:
    """The result of :func:`validate`. Errors stop a run; a warning names a setting that has no effect."""

    errors: list[str]
    warnings: list[str]


def validate(config: RunConfig, known_names: Mapping[str, Collection[str]] | None = None) -> Validation:
    """Check all settings and their combinations.

    Args:
        known_names: for each setting that names an entry of a registry, the names that exist
            (``{"trainer.trackers": tracker_names(), ...}``). An import path (``a.b.C``) is always allowed.
    """
    broken_limits = limit_errors(config)
    errors, wrong_keys = [error for _, error in broken_limits], [key for key, _ in broken_limits]
    try:
        derive.trainer_mode(config.trainer.mode)
    except ConfigError as error:
        errors.append(str(error))
        wrong_keys.append("trainer.mode")
    # The rules see the default of each setting that was found wrong: one mistake gives one error, and no rule has to
    # guard against values outside of their limits.
    default, checked = RunConfig(), copy.deepcopy(config)
    for key in wrong_keys:
        section, _, name = key.rpartition(".")
        setattr(setting(checked, section), name, setting(default, key))
    errors += [error for rule in _RULES for error in rule(checked)]
    for key, names in (known_names or {}).items():
        value = setting(config, key)
        for name in value if isinstance(value, list) else [value]:
            if name is not None and name not in names and not is_import_path(name):
                errors.append(f"{key}={name} is unknown.{did_you_mean(name, names)}{OR_IMPORT_PATH}")
    return Validation(errors, [warning for rule in NO_EFFECT_RULES for warning in rule(checked)])


def raise_errors(errors: Sequence[str]) -> None:
    """Raise a ConfigError that lists ``errors``, if there are any."""
    if len(errors) == 1:
        raise ConfigError(errors[0])
    if errors:
        raise ConfigError(f"{len(errors)} settings cannot work:\n" + "\n".join(f"  - {error}" for error in errors))


# ---- batches and staleness


def _batches(config: RunConfig) -> Errors:
    minibatch, batch = config.trainer.policy_mini_batch_size, derive.train_batch_size(config)
    if batch % minibatch:
        yield (
            f"trainer.train_batch_size={batch}, trainer.policy_mini_batch_size={minibatch}: the batch must be a multiple of "
            f"the minibatch. Set trainer.train_batch_size={max(batch // minibatch, 1) * minibatch}."
        )


def _staleness(config: RunConfig) -> Errors:
    """Sizes that would block a run, or exceed its staleness bound (``docs/design/staleness.md``)."""
    mode, bound = derive.trainer_mode(config.trainer.mode), config.trainer.fully_async.max_staleness_steps
    if mode is TrainerMode.fully_async:
        yield from _fully_async_sizes(config)
    if mode is TrainerMode.partial_rollout:
        if config.trainer.failures.rollout_timeout_s is not None:
            yield (
                "trainer.failures.rollout_timeout_s with trainer.mode=partial_rollout: the time of a rollout continues while "
                "engines are interrupted for training, so the limit would hit waiting rollouts. Leave it out, or limit the "
                "environment."
            )
        factor = config.trainer.partial_rollout.oversubmit_factor
        if factor - 1 > bound:
            yield (
                f"trainer.partial_rollout.oversubmit_factor={factor:g} begins groups up to {factor - 1:g} steps ahead, more "
                f"than {FULLY_ASYNC}.max_staleness_steps={bound}. Set max_staleness_steps={math.ceil(factor - 1)}, or "
                f"oversubmit_factor={bound + 1}."
            )


def _fully_async_sizes(config: RunConfig) -> Errors:
    asynchronous, minibatch = config.trainer.fully_async, config.trainer.policy_mini_batch_size
    bound, k, depth = (
        asynchronous.max_staleness_steps,
        asynchronous.weight_sync_interval,
        derive.largest_depth(config),
    )
    workers, streaming = derive.num_workers(config), asynchronous.streaming_min_groups
    if bound < depth + k - 1:
        less = (
            f" or generate_ahead_steps={bound - k + 1}"
            if bound >= k - 1
            else f" or weight_sync_interval={bound + 1} at most"
        )
        yield (
            f"{FULLY_ASYNC}.generate_ahead_steps={depth:g} with weight_sync_interval={k}: groups would be up to "
            f"{depth + k - 1:g} steps old when they are trained, more than max_staleness_steps={bound}. Set "
            f"max_staleness_steps={math.ceil(depth) + k - 1}{less}."
        )
    elif workers < minibatch:
        yield (
            f"{FULLY_ASYNC}.num_parallel_generation_workers={workers} is less than "
            f"trainer.policy_mini_batch_size={minibatch}: no step would ever see all its groups in flight. Set it to "
            f"{derive.capacity(config)}, or to null, which means that."
        )
    if streaming is None:
        return
    if streaming > minibatch:
        yield (
            f"{FULLY_ASYNC}.streaming_min_groups={streaming}: must be between 1 and trainer.policy_mini_batch_size={minibatch}, "
            "or null to train on whole minibatches."
        )
    if config.trainer.update_epochs_per_batch > 1:
        yield (
            f"{FULLY_ASYNC}.streaming_min_groups={streaming} with trainer.update_epochs_per_batch="
            f"{config.trainer.update_epochs_per_batch}: a second pass needs the whole minibatch. Set streaming_min_groups=null "
            "or update_epochs_per_batch=1."
        )


# ---- lengths, sampling, data


def _lengths(config: RunConfig) -> Errors:
    model, generator = config.trainer.policy.model, config.generator
    if model.path is None and model.build.hidden_size % model.build.num_heads:
        heads = model.build.num_heads
        yield (
            f"trainer.policy.model.build.hidden_size={model.build.hidden_size} is not a multiple of num_heads={heads}. Set it "
            f"to {-(-model.build.hidden_size // heads) * heads}."
        )
    shape, explicit = model_shape(model), generator.inference_engine.max_model_len
    length, response = derive.max_model_len(config, shape), generator.sampling_params.max_tokens
    positions = None if shape is None else shape.max_position_embeddings
    if explicit is not None and positions is not None and explicit > positions:
        yield f"{ENGINE}.max_model_len={explicit} exceeds the model's {positions} positions. Set it to null or to {positions}."
    # Responses are limited by max_tokens, so the prompt gets what is left of the request.
    if length <= response:
        yield (
            f"generator.sampling_params.max_tokens={response} leaves no room for a prompt in the {length} tokens that "
            f"a request may have. Lower max_tokens, or raise "
            f"{'the positions of the model' if explicit is None else f'{ENGINE}.max_model_len'}."
        )
    if config.trainer.micro_batch_tokens < length:
        yield (
            f"trainer.micro_batch_tokens={config.trainer.micro_batch_tokens} is less than the {length} tokens that one "
            f"sequence may have. Set it to {length} or more, or lower generator.max_input_length."
        )


def _sampling(config: RunConfig) -> Errors:
    samples, sampling, algorithm = (
        config.generator.n_samples_per_prompt,
        config.generator.sampling_params,
        config.trainer.algorithm,
    )
    yield from _token_limits(sampling, "generator.sampling_params")
    if algorithm.advantage_estimator in ("grpo", "rloo", "maxrl") and samples == 1:
        yield (
            f"generator.n_samples_per_prompt=1 with the {algorithm.advantage_estimator} estimator: a group of one has nothing "
            "to be compared with, so every advantage is 0. Set n_samples_per_prompt=8, or advantage_estimator=reinforce++."
        )
    if algorithm.zero_variance_filter and samples == 1:
        yield (
            f"{ALGORITHM}.zero_variance_filter=true with generator.n_samples_per_prompt=1: a group of one has no variance, so "
            "all groups would train with loss mask 0. Set n_samples_per_prompt=8 or zero_variance_filter=false."
        )
    if sampling.temperature == 0 and samples > 1:
        yield (
            f"generator.sampling_params.temperature=0 with n_samples_per_prompt={samples}: all samples of a prompt "
            "are the same, so nothing is learned. Set temperature=1.0."
        )


def _token_limits(sampling: SamplingConfig, key: str) -> Errors:
    if sampling.min_tokens > sampling.max_tokens:
        yield f"{key}.min_tokens={sampling.min_tokens}: must be between 0 and max_tokens={sampling.max_tokens}."


def _data(config: RunConfig) -> Errors:
    data, environment = config.data, config.environment.env_class
    if environment.startswith("verifiers:") and config.generator.name == "gym":
        yield (
            f"environment.env_class={environment} with generator.name=gym: the environment runs its own conversations. Set "
            "generator.name=harness and generator.kwargs.agent=skyrl_train.environments.verifiers_adapter:run."
        )
    for key, argument in (("data.train_data", "dataset"), ("trainer.eval.eval_data", "eval_dataset")):
        if any(isinstance(name, Mapping) for name in setting(config, key)):
            yield (
                f"{key} holds rows, and takes names of files, folders or data sets. In Python, train({argument}=...) takes rows."
            )
    if not data.train_data and data.generate < 1:
        yield f"data.generate={data.generate}: must be at least 1, because data.train_data names no files."
    if data.sampler in (None, "shuffle", "sequential") and data.sampler_kwargs:
        remove = " ".join(f"~data.sampler_kwargs.{key}" for key in data.sampler_kwargs)
        yield (
            f"data.sampler_kwargs={dict(data.sampler_kwargs)} with data.sampler={data.sampler}: this order has no settings. "
            f'Remove them ({remove}), or set data.sampler=weighted, which takes {{"weights": {{data_source: weight}}}}.'
        )
    if data.sampler == "weighted" and not data.sampler_kwargs.get("weights"):
        yield "data.sampler=weighted needs weights. Set data.sampler_kwargs.weights={data_source: weight, ...}."
    if not data.streaming:
        return
    if not data.train_data:
        yield "data.streaming=true without files: name them in data.train_data, or set data.streaming=false."
    if data.sampler not in (None, "sequential"):
        yield (
            f"data.sampler={data.sampler} with data.streaming=true: a stream comes in the order of its files. Shuffle the "
            "files and set data.sampler=null, or data.streaming=false to have all prompts in memory."
        )
    if config.trainer.max_steps is None:
        yield (
            "trainer.max_steps=null with data.streaming=true: the number of prompts in a stream is not known before it ends, "
            "and the learning-rate schedule needs the number of steps. Set trainer.max_steps; the run ends earlier if the "
            "files have been read trainer.epochs times by then."
        )


# ---- algorithm


def _losses_and_advantages(config: RunConfig) -> Errors:
    algorithm = config.trainer.algorithm
    optimizers = {"policy": config.trainer.policy.optimizer_config, "critic": config.trainer.critic.optimizer_config}
    for model, optimizer in optimizers.items():
        betas = optimizer.adam_betas
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            yield f"trainer.{model}.optimizer_config.adam_betas={betas}: must be two numbers in [0, 1), such as [0.9, 0.999]."
    if algorithm.policy_loss_type == "dual_clip" and not algorithm.clip_ratio_c > 1:
        yield f"{ALGORITHM}.clip_ratio_c={algorithm.clip_ratio_c}: a bound on ratios must be more than 1. Set it to 3."
    if algorithm.clip_cov.clip_cov_lb > algorithm.clip_cov.clip_cov_ub:
        yield f"{ALGORITHM}.clip_cov.clip_cov_lb={algorithm.clip_cov.clip_cov_lb}: must be at most clip_cov_ub."
    # The longest response of this run, for the remedies of settings that need a fixed length.
    longest = config.generator.sampling_params.max_tokens * config.generator.max_turns
    if algorithm.loss_reduction == "seq_mean_token_sum_norm" and algorithm.max_seq_len is None:
        yield (
            f"{ALGORITHM}.loss_reduction=seq_mean_token_sum_norm divides by a fixed length, which is not given. Set "
            f"{ALGORITHM}.max_seq_len={longest}, the most tokens that a response of this run samples."
        )
    overlong = algorithm.overlong
    if overlong.buffer_len > 0 and (overlong.max_response_len or 0) < overlong.buffer_len:
        yield (
            f"{ALGORITHM}.overlong.buffer_len={overlong.buffer_len} with max_response_len={overlong.max_response_len}: the "
            f"penalty grows over the last {overlong.buffer_len} tokens of that length. Set "
            f"{ALGORITHM}.overlong.max_response_len={longest}, the most tokens that a response of this run samples, and a "
            "buffer_len below it."
        )
    if algorithm.advantage_estimator == "maxrl" and (overlong.buffer_len or algorithm.kl_reward_coef):
        yield (
            f"{ALGORITHM}.advantage_estimator=maxrl divides by the mean return, which penalties may bring to 0 and below. Set "
            "overlong.buffer_len=0 and kl_reward_coef=0, or another estimator."
        )
    if algorithm.kl_loss_coef > 0 and algorithm.kl_estimator_type == "k1":
        yield (
            f"{ALGORITHM}.kl_estimator_type=k1 with kl_loss_coef={algorithm.kl_loss_coef}: the gradient of k1 is 0 on average "
            "for every policy, so the term would only add noise. Set kl_estimator_type=k3 or k2, or take it from the reward: "
            "kl_reward_coef."
        )


def _whole_minibatch(config: RunConfig) -> Errors:
    """Settings that need all groups of a step before it trains on the first one."""
    algorithm, streaming = config.trainer.algorithm, derive.streaming_min_groups(config)
    if streaming is None:
        return
    asked: dict[str, str] = {}  # setting -> another remedy
    if derive.normalizes_over_minibatch(algorithm):
        by_default = algorithm.advantage_batch_normalize is None
        value = f" (with advantage_estimator={algorithm.advantage_estimator})" if by_default else "=true"
        # The normalization belongs to the definition of reinforce++; the others work without it.
        optional = algorithm.advantage_estimator != "reinforce++"
        asked[f"advantage_batch_normalize{value}"] = (
            f", or {ALGORITHM}.advantage_batch_normalize=false" if optional else ""
        )
    if algorithm.policy_loss_type in derive.WHOLE_MINIBATCH_LOSSES:
        asked[f"policy_loss_type={algorithm.policy_loss_type}"] = ""
    if algorithm.off_policy_correction.m2po_threshold is not None:
        asked[f"off_policy_correction.m2po_threshold={algorithm.off_policy_correction.m2po_threshold}"] = ""
    for name, instead in asked.items():
        yield (
            f"{ALGORITHM}.{name} looks at all groups of a step before it trains on any, and "
            f"{FULLY_ASYNC}.streaming_min_groups={streaming} does not wait for them. Set streaming_min_groups=null{instead}."
        )


def _dynamic_sampling(config: RunConfig) -> Errors:
    key, mode = f"{ALGORITHM}.dynamic_sampling", config.trainer.algorithm.dynamic_sampling
    if mode is not DynamicSampling.none and config.generator.n_samples_per_prompt == 1:
        yield (
            f"{key}={mode} with generator.n_samples_per_prompt=1: a group of one has no variance, so none has signal. Set "
            "n_samples_per_prompt=8 or dynamic_sampling=none."
        )
    if mode is DynamicSampling.filter and config.trainer.failures.on_rollout_failure is FailurePolicy["mask"]:
        yield (
            f"{key}=filter with trainer.failures.on_rollout_failure=mask: the stand-ins for failed rollouts have no signal, so "
            "a filtered step would hold less than was asked for. Set on_rollout_failure=replace or dynamic_sampling=replace."
        )
    if mode is DynamicSampling.replace and derive.streaming_min_groups(config) is not None:
        yield (
            f"{key}=replace chooses among the groups of a whole batch, and {FULLY_ASYNC}.streaming_min_groups does not wait "
            "for them. Set dynamic_sampling=filter or streaming_min_groups=null."
        )


def _uncorrected(config: RunConfig) -> Errors:
    """A difference between the sampled and the trained distribution must be corrected, or explicitly allowed.

    One source is lag (``docs/design/semantics.md``, section 7.1). The others are the filters top-p, top-k and min-p: tokens
    are drawn from the renormalized rest, the trainer evaluates the whole distribution, and only the importance weight makes
    up for the difference.
    """
    correction, sampling = config.trainer.algorithm.off_policy_correction, config.generator.sampling_params
    corrected = correction.tis_ratio_type is not None or correction.rejections or correction.m2po_threshold is not None
    if corrected or correction.allow_uncorrected:
        return
    remedy = f"Set {CORRECTION}.tis_ratio_type=token, or say that you want it uncorrected: {CORRECTION}.allow_uncorrected=true."
    if derive.max_staleness_steps(config) > 0:
        source = "fully_async.max_staleness_steps" if derive.is_async(config) else "train_batch_size"
        value = setting(config, f"trainer.{source}")
        yield f"trainer.{source}={value} trains on tokens of older policies uncorrected. {remedy}"
    if sampling.top_p != 1 or sampling.top_k > 0 or sampling.min_p > 0:
        yield (
            f"generator.sampling_params filters tokens (top_p={sampling.top_p}, top_k={sampling.top_k}, "
            f"min_p={sampling.min_p}), so samples come from another distribution than the one that is trained. {remedy}"
        )


def _rejections(config: RunConfig) -> Errors:
    algorithm, correction = config.trainer.algorithm, config.trainer.algorithm.off_policy_correction
    if not correction.icepop_ratio_low <= correction.icepop_ratio_high:
        yield (
            f"{CORRECTION}.icepop_ratio_low={correction.icepop_ratio_low}: must be between 0 and "
            f"icepop_ratio_high={correction.icepop_ratio_high}."
        )
    seen: set[tuple[str, str]] = set()
    for index, rule in enumerate(correction.rejections):
        key = f"{CORRECTION}.rejections[{index}]"
        if rule.low is not None and rule.high is not None and not rule.low <= rule.high:
            yield f"{key}: low={rule.low} is above high={rule.high}, so everything would be rejected. Exchange them."
        if rule.away_only and rule.level is not RejectionLevel.token:
            yield f"{key}: away_only is about single tokens, whose update leads further away or back. Set level=token."
        if rule.statistic in ("ratio", "k2", "k3") and rule.high is not None and not rule.high > 0:
            yield (
                f"{key}: high={rule.high} with statistic={rule.statistic}, which is above 0, rejects every token. Raise it."
            )
        if (rule.statistic, rule.level) in seen:
            yield (
                f"{CORRECTION}.rejections has two rules about {rule.statistic} by {rule.level}, which have the same name in the "
                "metrics. Make one of them, with the tighter bounds."
            )
        seen.add((rule.statistic, rule.level))
    # Baselines are computed before a step trains; rejections are known by then only if the proximal policy is.
    whole = [rule for rule in correction.rejections if rule.level is not RejectionLevel.token]
    if not correction.baseline_without_rejected or not whole:
        return
    key = f"{CORRECTION}.baseline_without_rejected=true"
    if algorithm.proximal_policy is not ProximalPolicy.arrival:
        yield (
            f"{key} with proximal_policy={algorithm.proximal_policy}: the rejected samples are known only when the step trains, "
            "after its baselines. Set proximal_policy=arrival."
        )
    if any(rule.statistic == "probability_difference" for rule in whole):
        yield (
            f"{key} with a rule about sequences by probability_difference, which compares with the policy while it trains. Use "
            "statistic=ratio, k1, k2 or k3."
        )


# ---- engines, weight transport, adapter


def _engines(config: RunConfig) -> Errors:
    engine, of_evaluation = config.generator.inference_engine, derive.num_evaluation_engines(config)
    if engine.backend == "vllm_remote" and len(engine.remote_urls) != engine.num_engines + of_evaluation:
        beside = f" and {EVAL}.num_engines={of_evaluation}" if of_evaluation else ""
        yield (
            f"{ENGINE}.remote_urls names {len(engine.remote_urls)} servers for {ENGINE}.num_engines={engine.num_engines}"
            f"{beside}: give one URL per engine{', the last ones for the evaluation' if of_evaluation else ''}."
        )
    on_gpus = (
        engine.backend in ("embedded", "vllm") and engine.device == "cuda" and not derive.engines_share_ranks(config)
    )
    if on_gpus and engine.executor == "ray" and not derive.engine_ray_num_gpus(engine):
        yield (
            f"{ENGINE}.ray_num_gpus=0 with {ENGINE}.executor=ray and {ENGINE}.device=cuda: Ray would give no engine a GPU of its "
            "own. Leave it out; a number below 1 is for engines that share one."
        )
    if engine.backend == "vllm":
        yield from _engine_gpus(config)
        # The engine refuses them too, but only after the job has waited for its machines. The plan counts GPUs by the settings.
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "max_num_seqs", "max_model_len", "dtype"):
            if name in engine.engine_args:
                yield f"{ENGINE}.engine_args.{name}: set {ENGINE}.{name}={engine.engine_args[name]} instead."
        if "data_parallel_size" in engine.engine_args:
            yield f"{ENGINE}.engine_args.data_parallel_size: start more engines instead ({ENGINE}.num_engines)."
        if engine.engine_args.get("speculative_config") and config.generator.sampling_params.min_p > 0:
            yield (
                f"generator.sampling_params.min_p={config.generator.sampling_params.min_p} with {ENGINE}.engine_args."
                "speculative_config: vLLM has no min_p with speculative decoding. Set min_p=0, or leave speculative_config out."
            )
    endpoint = config.generator.kwargs.get("endpoint")
    port = endpoint.get("port") if isinstance(endpoint, Mapping) else None  # of the harness; 0 or None: a free one
    if config.generator.name == "harness" and not isinstance(port, int | None):
        yield f"generator.kwargs.endpoint.port={port}: it must be an integer; 0 takes a free port."
    if config.generator.name == "harness" and config.rollout.num_actors > 1 and port:
        yield (
            f"generator.kwargs.endpoint.port={port} with rollout.num_actors={config.rollout.num_actors}: each actor has its own "
            "endpoint, and actors may share a machine. Leave the port out (each takes a free one), or set rollout.num_actors=0 "
            "if other programs need to know it."
        )
    if of_evaluation and port:
        yield (
            f"generator.kwargs.endpoint.port={port} with {EVAL}.num_engines={of_evaluation}: the evaluation has its own "
            f"endpoint, which cannot have the same port. Leave the port out, or set {EVAL}.num_engines=0."
        )


def _engine_gpus(config: RunConfig) -> Errors:
    """Which GPUs vLLM's engines compute on. Two engines share one only if the configuration says so."""
    engine = config.generator.inference_engine
    if "CUDA_VISIBLE_DEVICES" in engine.environment:
        yield (
            f"{ENGINE}.environment.CUDA_VISIBLE_DEVICES: engines count GPUs from 0 of the whole machine. Name the GPUs in "
            f"{ENGINE}.devices; with executor=ray, Ray chooses them."
        )
    if engine.device not in ("cpu", "cuda"):
        yield f"{ENGINE}.device={engine.device} with {ENGINE}.backend=vllm: set device=cuda, and name GPUs in {ENGINE}.devices."
        return
    each = derive.engine_num_gpus(engine)
    if each == 0:
        return
    if engine.executor == "ray":
        gpus = derive.engine_ray_num_gpus(engine)
        if gpus and gpus != each and (gpus >= 1 or each > 1):
            yield (
                f"{ENGINE}.ray_num_gpus={gpus:g}, and the ranks of an engine (tensor_parallel_size x pipeline_parallel_size) "
                f"need {_gpus(each)}. Leave it out; a part of one GPU is for engines that share it."
            )
        return
    number, devices, trainer = (
        engine.num_engines + derive.num_evaluation_engines(config),
        engine.devices,
        config.trainer,
    )
    if devices is None:
        if trainer.strategy is TrainingStrategy.fsdp2 and trainer.device == "cuda":
            yield (
                f"{ENGINE}.executor={engine.executor} with trainer.strategy=fsdp2 on cuda: Ray gives GPUs to the workers and "
                f"does not know of the engines'. Set {ENGINE}.executor=ray, or name the engines' GPUs in {ENGINE}.devices, "
                "from 0 on: Ray gives the workers those behind them."
            )
    elif len(devices) != number * each:
        beside = " with the evaluation's" if number > engine.num_engines else ""
        yield (
            f"{ENGINE}.devices={devices} with {number} engines{beside}: each needs {_gpus(each)}. Name {_gpus(number * each)}; "
            "one that is named twice is shared."
        )
        return
    elif min(devices) < 0:
        yield f"{ENGINE}.devices={devices}: GPUs are numbered from 0."
    of_engines = [derive.engine_devices(engine, index) for index in range(number)]
    if any(len(set(mine)) < each for mine in of_engines):
        yield f"{ENGINE}.devices={devices}: the ranks of an engine need different GPUs; each engine takes the next {each}."
    of_trainer = derive.full_device_name(trainer.device)
    shared = {f"cuda:{gpu}" for mine in of_engines for gpu in mine} == {of_trainer}
    if derive.weight_transport(config) == "cuda_ipc" and of_trainer != "cpu" and not shared:
        yield (
            f"{ENGINE}: {number} engines of {_gpus(each)} on {', '.join(str(mine) for mine in of_engines)} and "
            f"trainer.device={trainer.device}: generator.weight_transport=cuda_ipc needs one GPU. Name it for all in "
            f"{ENGINE}.devices, or set generator.weight_transport=shared_memory."
        )


def _gpus(number: int) -> str:
    return f"{number} GPU{'s' * (number > 1)}"


def _weight_transport(config: RunConfig) -> Errors:
    engine, key, name = config.generator.inference_engine, "generator.weight_transport", derive.weight_transport(config)
    transport = derive.TRANSPORTS.get(name)
    if transport is None:
        return  # the user's own
    if engine.backend in derive.BACKENDS and engine.backend not in transport.backends:
        reachable = [known for known, other in derive.TRANSPORTS.items() if engine.backend in other.backends]
        yield f"{key}={name} does not reach engines of backend {engine.backend}. Set it to {' or '.join(reachable)}."
    if transport.folder and config.generator.weight_folder is None:
        yield (
            f"{key}={name} needs a folder that trainer and engines see under the same path: set "
            "generator.weight_folder=/path/to/it."
        )
    if not transport.gpu:
        return
    devices = {"trainer.device": config.trainer.device}
    if engine.backend == "embedded":  # a GPU transport reaches vLLM only on a GPU
        devices[f"{ENGINE}.device"] = engine.device
    on_cpu = [f"{key}={device}" for key, device in devices.items() if not device.startswith("cuda")]
    if on_cpu:
        yield f"{key}={name} is for GPUs, and {' and '.join(on_cpu)}. Set {key}=shared_memory."
    if name == "nccl":
        yield from _nccl_gpus(config)
    if name != "cuda_ipc" or derive.engines_share_ranks(config):
        return
    if config.trainer.strategy is TrainingStrategy.fsdp2:
        yield (
            f"{key}=cuda_ipc with trainer.strategy=fsdp2: the weights are staged on the GPUs that Ray gave to the ranks, and the "
            f"engines are on others. Set {key}=shared_memory, or trainer.placement.colocate_all=true."
        )
    elif engine.executor != "process":
        yield (
            f"{key}=cuda_ipc with {ENGINE}.executor={engine.executor}: the memory must be opened by another process on the same "
            f"GPU. Set executor=process, or {key}=shared_memory."
        )


def _nccl_gpus(config: RunConfig) -> Errors:
    """Whether trainer and engines have different GPUs. Those of Ray's workers and actors, Ray chooses."""
    trainer, engine = config.trainer, config.generator.inference_engine
    if trainer.placement.colocate_all:
        return  # _colocation says it
    used = [derive.full_device_name(trainer.device)] if trainer.strategy is TrainingStrategy.local else []
    if engine.backend == "embedded" and engine.executor != "ray":
        used += [derive.full_device_name(engine.device)] * engine.num_engines
    elif engine.executor != "ray":
        number = engine.num_engines * derive.engine_num_gpus(engine)
        used += [f"cuda:{gpu}" for gpu in (range(number) if engine.devices is None else engine.devices[:number])]
    shared = sorted({device for device in used if device != "cpu" and used.count(device) > 1})
    if shared:
        others = f"{ENGINE}.devices" if engine.backend == "vllm" else "trainer.device"
        yield (
            f"generator.weight_transport=nccl with trainer and engines on {', '.join(shared)}: NCCL needs a GPU "
            f"per process. Name others in {others}, or set generator.weight_transport=shared_memory."
        )


def _colocation(config: RunConfig) -> Errors:
    """Whatever computes on the shared devices in the turn of the other one would find its memory gone."""
    if not config.trainer.placement.colocate_all:
        return
    trainer, engine, key = config.trainer, config.generator.inference_engine, "trainer.placement.colocate_all=true"
    if derive.trainer_mode(trainer.mode) not in (TrainerMode.sync, TrainerMode.partial_rollout):
        yield (
            f"{key} with trainer.mode={trainer.mode}: the engines generate while the policy trains, so the two cannot take "
            "turns. Set trainer.mode=sync or partial_rollout, or colocate_all=false."
        )
    sharded_on_gpus = trainer.strategy is TrainingStrategy.fsdp2 and trainer.device == "cuda"
    if engine.backend == "vllm_remote":
        yield f"{key} with {ENGINE}.backend=vllm_remote: a server does not sleep. Set backend=vllm or embedded."
    elif sharded_on_gpus and engine.executor != "ray":
        yield (
            f"{key} with trainer.strategy=fsdp2 on GPUs and {ENGINE}.executor={engine.executor}: Ray chooses the GPUs of the "
            f"ranks, so it has to place the engines on them. Set {ENGINE}.executor=ray."
        )
    elif sharded_on_gpus:
        each = derive.engine_num_gpus(engine)
        if engine.num_engines * each != trainer.fsdp.num_workers:
            yield (
                f"{key}: {engine.num_engines} engines of {_gpus(each)} and trainer.fsdp.num_workers={trainer.fsdp.num_workers} "
                f"ranks of one GPU do not share the same GPUs. Set {ENGINE}.num_engines so that {ENGINE}.num_engines x "
                "tensor_parallel_size x pipeline_parallel_size is trainer.fsdp.num_workers."
            )
        if derive.fsdp_num_gpus(trainer) != 1:
            yield f"{key} with trainer.fsdp.ray_num_gpus={trainer.fsdp.ray_num_gpus:g}: each rank needs one GPU. Leave it out."
    elif engine.executor == "ray" and trainer.strategy is TrainingStrategy.local:
        yield (
            f"{key} with {ENGINE}.executor=ray: Ray chooses the GPU of an engine and does not know of the trainer's. Set "
            f"{ENGINE}.executor=process."
        )
    if engine.backend == "vllm" and not engine.engine_args.get("enable_sleep_mode", True):
        yield f"{key} with {ENGINE}.engine_args.enable_sleep_mode=false: the engines must sleep. Leave it out."
    shared = derive.full_device_name(trainer.device)
    devices = derive.engine_device_names(engine)
    if engine.backend == "vllm" and shared == "cpu":
        yield f"{key} with {ENGINE}.backend=vllm and trainer.device=cpu: vLLM sleeps on a GPU only. Set trainer.device=cuda."
    elif engine.backend in ("embedded", "vllm") and not sharded_on_gpus and shared not in devices:
        yield (
            f"{key} with engines on {', '.join(sorted(devices))} and trainer.device={trainer.device}: nothing is shared. Set "
            f"{ENGINE}.device (vllm: also {ENGINE}.devices) to the trainer's, or colocate_all=false."
        )
    if config.generator.weight_transport == "nccl":
        yield f"{key} with generator.weight_transport=nccl: NCCL needs a GPU per process. Set it to cuda_ipc."
    if derive.needs_critic(trainer.algorithm):
        yield (
            f"{key} with {ALGORITHM}.advantage_estimator=gae: the critic computes values while the engines generate. Set "
            "another estimator, or colocate_all=false."
        )
    if trainer.algorithm.proximal_policy is ProximalPolicy.arrival:
        yield (
            f"{key} with {ALGORITHM}.proximal_policy=arrival: log-probs would be computed while the engines generate. Set "
            "proximal_policy=step."
        )
    reference = derive.full_device_name(derive.reference_device(config))
    if derive.needs_reference(trainer.algorithm) and derive.reference_is_colocated(config) and sharded_on_gpus:
        yield (
            f"{key} with {REFERENCE}.executor=colocated: it would score on the GPUs on which the engines generate. Set "
            f"{REFERENCE}.executor=workers with GPUs of its own, or train without a KL term."
        )
    elif derive.needs_reference(trainer.algorithm) and not sharded_on_gpus and reference == shared != "cpu":
        yield (
            f"{key} with a reference policy on {shared}: it keeps memory that engines and trainer need in turns. Set "
            f"{REFERENCE}.device to another GPU, or to cpu (slow for a large model), or train without a KL term."
        )
    if derive.num_evaluation_engines(config):
        yield (
            f"{key} with {EVAL}.num_engines={trainer.eval.num_engines}: the evaluation's engines would not sleep. Set "
            f"{EVAL}.num_engines=0."
        )


def _lora(config: RunConfig) -> Errors:
    lora, engine = config.trainer.policy.model.lora, config.generator.inference_engine
    if lora.rank < 1:
        return
    if lora.dropout != 0:
        yield (
            f"{LORA}.dropout={lora.dropout:g}: engines sample without dropout, so the proximal ratio of a step's first pass "
            "would not be 1, and the correction would see a mismatch that does not exist. Set it to 0."
        )
    if lora.init_method not in LORA_INIT_METHODS:
        yield (
            f"{LORA}.init_method={lora.init_method} is unknown or changes the base model, which engines and the reference "
            f"policy read from its folder.{did_you_mean(lora.init_method, LORA_INIT_METHODS)} Set it to "
            f"{' or '.join(LORA_INIT_METHODS)}."
        )
    if not lora.target_modules or (ALL_LINEAR in lora.target_modules and len(lora.target_modules) > 1):
        yield f"{LORA}.target_modules={lora.target_modules}: set it to [{ALL_LINEAR}], or to names such as [q_proj, v_proj]."
    if config.trainer.policy.compile:
        yield f"{LORA}.rank={lora.rank} and trainer.policy.compile=true: layers with adapters are not compiled. Set it to false."
    if find_spec("peft") is None:
        yield f"{LORA}.rank={lora.rank} needs peft: install the extra `lora` (./uvw run --extra lora ...), or set it to 0."
    if engine.backend == "vllm_remote":
        yield (
            f"{LORA}.rank={lora.rank} with {ENGINE}.backend=vllm_remote: requests to a server name no adapter. Set backend to "
            f"vllm or embedded, or {LORA}.rank=0."
        )
    if engine.backend != "vllm":
        return
    if lora.rank > VLLM_MAX_LORA_RANK:
        yield f"{LORA}.rank={lora.rank}: vLLM serves ranks up to {VLLM_MAX_LORA_RANK}. Lower it, or set backend=embedded."
    for name in ("max_lora_rank", "max_loras"):
        if name in engine.engine_args:
            yield f"{ENGINE}.engine_args.{name}: follows from {LORA}.rank={lora.rank}. Leave it out."
    if engine.engine_args.get("load_format") == "dummy":
        yield (
            f"{ENGINE}.engine_args.load_format=dummy: weight syncs send only the adapter, so the engine must read the base model "
            "from its folder. Leave it out."
        )


# ---- ranks, reference policy, reward function


def _training_workers(config: RunConfig) -> Errors:
    trainer = config.trainer
    if trainer.strategy is TrainingStrategy.local:
        return
    yield from _ranks(trainer, trainer.policy.model, "trainer.fsdp", "trainer.device", "policy")
    if not derive.needs_critic(trainer.algorithm):
        return
    if not derive.critic_is_colocated(trainer):
        critic = derive.critic_trainer(trainer)
        yield from _ranks(
            critic, derive.critic_model(trainer), "trainer.critic.fsdp", "trainer.critic.device", "critic"
        )
    elif trainer.critic.model.path is not None:
        yield from _shared_heads(
            derive.critic_model(trainer), trainer.fsdp.sequence_parallel_size, "trainer.fsdp", "critic"
        )


def _ranks(trainer: TrainerConfig, model: ModelConfig, key: str, device_key: str, whose: str) -> Errors:
    """Check a group of workers.

    Args:
        trainer: holds the settings of the workers in ``device`` and ``fsdp``.
        model: the model that they share.
        key: where ``fsdp`` is set.
        device_key: where ``device`` is set.
        whose: policy or critic.
    """
    fsdp, gpus = trainer.fsdp, derive.fsdp_num_gpus(trainer)
    workers, slices = fsdp.num_workers, fsdp.sequence_parallel_size
    if trainer.device not in ("cpu", "cuda"):
        yield (
            f"{device_key}={trainer.device} with trainer.strategy=fsdp2: each worker sees only the GPU that Ray gives it. Set "
            f"{device_key}=cuda."
        )
    if workers % slices:
        yield (
            f"{key}.sequence_parallel_size={slices} does not divide {key}.num_workers={workers}. Set "
            f"{key}.num_workers={-(-workers // slices) * slices}, or {key}.sequence_parallel_size to a divisor."
        )
    if fsdp.shard_size is not None and (fsdp.shard_size < 1 or workers % fsdp.shard_size):
        yield (
            f"{key}.shard_size={fsdp.shard_size} does not divide {key}.num_workers={workers} into copies of the {whose}. Set "
            f"{key}.shard_size to a divisor, or to null for one copy."
        )
    if slices > 1 and trainer.packing is False:
        yield (
            f"{key}.sequence_parallel_size={slices} with trainer.packing=false: padded rows are not cut into slices. Set "
            "trainer.packing=null."
        )
    yield from _shared_heads(model, slices, key, whose)
    if trainer.device == "cuda" and gpus < 1 and workers > 1:
        yield _shared_gpu(key, gpus)


def _shared_heads(model: ModelConfig, slices: int, key: str, whose: str) -> Errors:
    shape = model_shape(model) if slices > 1 else None
    if shape is not None and shape.num_heads % slices:
        yield (
            f"{key}.sequence_parallel_size={slices} does not divide the {whose}'s {shape.num_heads} attention heads, which "
            "the ranks share out. Set it to a divisor."
        )


def _shared_gpu(key: str, gpus: float) -> str:
    return (
        f"{key}.ray_num_gpus={gpus:g}: two workers could share a GPU, which NCCL does not allow. Set {key}.ray_num_gpus=1, or "
        f"{key}.num_workers=1."
    )


def _stages(config: RunConfig) -> Errors:
    function, reference = config.rollout.stages.reward.function, config.rollout.stages.reference
    if function is not None and not is_import_path(function):
        yield (
            f"rollout.stages.reward.function={function}: is no import path. Name it as package.module:function or "
            "file.py:function."
        )
    yield from _replica(config)
    if not derive.needs_reference(config.trainer.algorithm):
        return
    device, gpus = derive.reference_device(config), derive.reference_num_gpus(config)
    if reference.executor == "colocated":
        if config.trainer.strategy is TrainingStrategy.local:
            yield (
                f"{REFERENCE}.executor=colocated with trainer.strategy=local: there are no ranks that could hold it. Set "
                f"{REFERENCE}.executor=process, or trainer.strategy=fsdp2."
            )
    elif reference.executor in ("ray", "workers"):
        if device not in ("cpu", "cuda"):
            yield (
                f"{REFERENCE}.executor={reference.executor} on {device}: each actor sees only the GPU that Ray gives it. Set "
                f"{REFERENCE}.device=cuda, or {REFERENCE}.device=cpu."
            )
        elif device == "cuda" and not gpus > 0:
            yield (
                f"{REFERENCE}.executor={reference.executor} on cuda with {REFERENCE}.ray_num_gpus=0: its actor would see no "
                f"GPU. Set {REFERENCE}.ray_num_gpus=1, or {REFERENCE}.device=cpu."
            )
        elif device == "cuda" and gpus < 1 and reference.executor == "workers" and reference.num_workers > 1:
            yield _shared_gpu(REFERENCE, gpus)
    elif device.startswith("cuda") and reference.device is None and config.trainer.strategy is TrainingStrategy.fsdp2:
        yield (
            f"{REFERENCE}.executor={reference.executor} with trainer.strategy=fsdp2 on cuda: Ray gave the GPUs to the workers. "
            f"Set {REFERENCE}.executor=workers or colocated, or name a separate GPU in {REFERENCE}.device."
        )


def _replica(config: RunConfig) -> Errors:
    if not derive.has_replica(config):
        return
    executor, transport = config.rollout.stages.proximal.executor, derive.weight_transport(config)
    device, key, of_transport = derive.replica_device(config), "rollout.stages.proximal", "generator.weight_transport"
    if executor == "ray":
        if device not in ("cpu", "cuda"):
            yield f"{key}.executor=ray on {device}: the actor sees only the GPU that Ray gives it. Set {key}.device=cuda or cpu."
        elif device == "cuda" and not derive.replica_num_gpus(config) > 0:
            yield f"{key}.executor=ray on cuda with {key}.ray_num_gpus=0: the actor would see no GPU. Set {key}.ray_num_gpus=1."
    elif device == "cuda" and config.trainer.strategy is TrainingStrategy.fsdp2:
        yield (
            f"{key}.executor={executor} with trainer.strategy=fsdp2 on cuda: Ray gave the GPUs to the workers. Set "
            f"{key}.executor=ray, or name a separate GPU in {key}.device."
        )
    if transport == "cuda_ipc":
        yield f"{key}.executor={executor} with {of_transport}=cuda_ipc, which reaches engines alone. Set {of_transport}=gloo."
    elif transport == "nccl" and device == "cpu":
        yield f"{key}.device=cpu with {of_transport}=nccl, which reaches GPUs. Set {key}.device=cuda, or {of_transport}=gloo."
    elif transport == "shared_memory" and executor == "ray":
        yield f"{key}.executor=ray with {of_transport}=shared_memory: the actor may be elsewhere. Set {of_transport}=gloo."


# ---- checkpoints, evaluation


def _checkpoints(config: RunConfig) -> Errors:
    url, key = config.trainer.ckpt_path, "trainer.ckpt_path"
    for of_folder in ("trainer.run_dir", "trainer.runs_dir"):
        # It would be a folder here, with a colon in its name.
        if "://" in (folder := setting(config, of_folder) or ""):
            yield (
                f"{of_folder}={folder} is a URL, and the folder of a run is on a disk. Set {key}={folder} to have checkpoints "
                f"there, and {of_folder} to a folder."
            )
    if "://" in (config.trainer.init_from or ""):
        yield (
            f"trainer.init_from={config.trainer.init_from} is a URL, and a run is read from a disk. Copy its folder to this "
            "machine, and name that."
        )
    if (step := config.trainer.resume_step) is not None:
        name = f"trainer.resume_step={step}"
        if config.trainer.run_dir is None:
            yield f"{name}: of which run? Name its folder in trainer.run_dir."
        if config.trainer.resume is ResumeMode.never:
            yield f"{name} with trainer.resume=never, which always starts a new run. Drop one of the two."
        if url is not None:
            yield f"{name} with {key}: write global_step_{step} into {url}/latest instead."
    if url is None:
        return
    if "://" not in url:
        yield (
            f"{key}={url} is no URL. On a disk, checkpoints are in the run folder: set trainer.run_dir or trainer.runs_dir, and "
            f"leave {key} out."
        )
        return
    protocol, _, folder = url.partition("://")
    if not protocol or not folder.strip("/"):
        yield f"{key}={url} names no folder. Set it to one for this run alone, such as s3://bucket/folder."
        return
    if protocol == "memory":
        yield (
            f"{key}={url} is gone when this process ends, and a run could not be resumed from it. Name an object store, or "
            f"leave {key} out."
        )
    from fsspec import get_filesystem_class  # takes a tenth of a second to import

    try:
        get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        yield f"{key}={url} cannot be opened: {error}. Name a protocol that fsspec knows, and install its package."


def _evaluation(config: RunConfig) -> Errors:
    evaluation, k = config.trainer.eval, derive.weight_sync_interval(config)
    if evaluation.interval == 0:
        return
    if not evaluation.eval_data and not config.data.train_data and evaluation.seed == config.data.seed:
        yield (
            f"{EVAL}.seed={evaluation.seed} is data.seed: the evaluation would use prompts that are trained. Set "
            f"{EVAL}.seed={evaluation.seed + 1}."
        )
    # The run's engines have the policy of a step only after a weight sync.
    if evaluation.num_engines == 0 and k >= 1 and evaluation.interval % k:
        yield (
            f"{EVAL}.interval={evaluation.interval} is no multiple of the {k} steps between two weight syncs: the run's engines "
            f"would not hold the policy that is due. Set {EVAL}.interval={-(-evaluation.interval // k) * k}, or give the "
            f"evaluation its own engines: {EVAL}.num_engines=1."
        )
    yield from _evaluation_sampling(config)


def _evaluation_sampling(config: RunConfig) -> Errors:
    key, ours = f"{EVAL}.sampling_params", config.generator.sampling_params
    overrides, known, errors = config.trainer.eval.sampling_params, dataclasses.asdict(ours), []
    for name, value in overrides.items():
        if name not in known:
            errors.append(f"{key}.{name} is unknown.{did_you_mean(name, known)}")
            continue
        kind: Any = type(known[name])
        # A bool is an int in Python, but no number of a setting; a number may be written without a decimal point.
        fits = isinstance(value, int | float if kind is float else kind)
        if not fits or (isinstance(value, bool) and kind is not bool):
            errors.append(f"{key}.{name}={value}: must be {known_keys()[f'generator.sampling_params.{name}']}.")
    if errors:
        yield from errors
        return
    # The limits in the schema are checked as if these were the run's own sampling parameters.
    sampling = dataclasses.replace(ours, **overrides)
    as_ours = dataclasses.replace(config, generator=dataclasses.replace(config.generator, sampling_params=sampling))
    errors = [error.replace("generator.sampling_params", key, 1) for _, error in limit_errors(as_ours)]
    errors += _token_limits(sampling, key)
    yield from errors
    length = derive.max_model_len(config, model_shape(config.trainer.policy.model))
    needed = config.generator.max_input_length + sampling.max_tokens
    if not errors and sampling.max_tokens > ours.max_tokens and needed > length:
        yield (
            f"{key}.max_tokens={sampling.max_tokens} does not fit beside generator.max_input_length="
            f"{config.generator.max_input_length} into the {length} tokens that a request may have. Lower it, or set "
            f"{ENGINE}.max_model_len={needed}, if the model has as many positions."
        )


_RULES: tuple[Callable[[RunConfig], Errors], ...] = (
    _batches,
    _staleness,
    _lengths,
    _sampling,
    _data,
    _losses_and_advantages,
    _whole_minibatch,
    _dynamic_sampling,
    _uncorrected,
    _rejections,
    _engines,
    _weight_transport,
    _colocation,
    _lora,
    _training_workers,
    _stages,
    _checkpoints,
    _evaluation,
)

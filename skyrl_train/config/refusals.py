"""Combinations of settings that cannot work. All are found before anything starts, each with its remedy.

A rule is a function that yields one sentence per problem: what was set, why it cannot work, what to set instead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from skyrl_train.config import algorithm_refusals, derive, transports
from skyrl_train.config.keys import did_you_mean, known_keys
from skyrl_train.config.limits import Problems, at_least, more_than_zero, setting
from skyrl_train.config.model_shape import BYTES_PER_ELEMENT, model_shape
from skyrl_train.config.schema import (
    DynamicSampling,
    FailurePolicy,
    RunConfig,
    SamplingConfig,
    TrainerMode,
    TrainingStrategy,
)
from skyrl_train.errors import ConfigError

# Settings with a closed list of values. What users may register (losses, estimators, schedules, trackers) is passed in.
CLOSED_NAMES: Mapping[str, tuple[str, ...]] = {
    "data.sampler": ("shuffle", "sequential", "weighted"),
    "generator.pause_mode": ("keep", "recompute", "abort", "wait"),
    "generator.inference_engine.placement": ("process", "thread", "ray"),
    "generator.inference_engine.dtype": tuple(BYTES_PER_ELEMENT),
    "rollout.stages.reference.placement": ("process", "thread", "ray"),
    "rollout.stages.reward.placement": ("loop", "thread", "process", "ray"),
    "trainer.policy.dtype": tuple(BYTES_PER_ELEMENT),
}


def refuse(config: RunConfig, known_names: Mapping[str, Collection[str]] | None = None) -> None:
    """Raises if ``config`` asks for something impossible.

    Args:
        known_names: for settings whose value names a registry's entry, the names that exist
            (``{"trainer.trackers": tracker_names(), ...}``); an import path (``a.b.C``) always passes.

    Raises:
        ConfigError: one message that lists every problem with its remedy.
    """
    raise_problems(problems(config, known_names))


def problems(config: RunConfig, known_names: Mapping[str, Collection[str]] | None = None) -> list[str]:
    """What ``refuse`` would raise, one sentence per problem."""
    found = [problem for rule in _RULES for problem in rule(config)]
    return found + list(_names(config, {**CLOSED_NAMES, **(known_names or {})}))


def raise_problems(found: list[str]) -> None:
    """Raises a ConfigError that lists ``found``; does nothing if there is nothing."""
    if len(found) == 1:
        raise ConfigError(found[0])
    if found:
        raise ConfigError(f"{len(found)} settings cannot work:\n" + "\n".join(f"  - {problem}" for problem in found))


def _counts(config: RunConfig) -> Problems:
    yield from at_least(
        config,
        1,
        "trainer.epochs",
        "trainer.max_steps",
        "trainer.policy_mini_batch_size",
        "trainer.train_batch_size",
        "trainer.update_epochs_per_batch",
        "trainer.micro_batch_tokens",
        "trainer.max_ckpts_to_keep",
        "trainer.failures.max_failed_rollouts",
        "generator.n_samples_per_prompt",
        "generator.max_turns",
        "generator.max_input_length",
        "generator.sampling_params.max_tokens",
        "generator.inference_engine.num_engines",
        "generator.inference_engine.max_num_seqs",
        "generator.inference_engine.tensor_parallel_size",
        "generator.inference_engine.pipeline_parallel_size",
        "generator.inference_engine.data_parallel_size",
        "generator.inference_engine.fleet.max_failed_probes",
    )
    yield from at_least(
        config,
        0,
        "trainer.ckpt_interval",
        "trainer.samples_per_step",
        "trainer.failures.max_rollout_retries",
        "trainer.failures.max_engine_failures",
        "generator.inference_engine.fleet.max_restarts",
        "generator.inference_engine.fleet.wait_timeout_s",
    )
    yield from more_than_zero(
        config,
        "trainer.failures.rollout_timeout_s",
        "trainer.failures.stuck_after_s",
        "generator.pause_timeout_s",
        "generator.inference_engine.fleet.probe_interval_s",
    )
    if not config.data.train_data:
        yield from at_least(config, 1, "data.generate")


def _batches(config: RunConfig) -> Problems:
    minibatch, batch = config.trainer.policy_mini_batch_size, derive.train_batch_size(config)
    if minibatch < 1 or batch < 1 or batch == minibatch:
        return
    named = f"trainer.train_batch_size={batch}, trainer.policy_mini_batch_size={minibatch}"
    if derive.is_async(config):
        yield (
            f"{named}: fully_async trains each minibatch as it comes and has no larger batch. Set both to the same "
            "number, or trainer.train_batch_size=null."
        )
    elif batch % minibatch:
        below = max(batch // minibatch, 1) * minibatch
        yield f"{named}: the batch must be a multiple of the minibatch. Set trainer.train_batch_size={below}."


def _staleness(config: RunConfig) -> Problems:
    """Sizes under which a run would be stuck, or could not keep its bound (``docs/design/staleness.md``)."""
    if config.trainer.policy_mini_batch_size < 1:
        return  # another rule says so
    if config.trainer.mode is TrainerMode.partial_rollout:
        yield from _oversubmission(config)
    if not derive.is_fully_async(config):
        return
    wrong = [
        *at_least(config, 1, "trainer.fully_async.sync_every_steps"),
        *at_least(config, 0, "trainer.fully_async.pipeline_depth"),
        *_bound_below_zero(config),
    ]
    yield from wrong or _sizes_together(config)
    yield from _streaming(config)


def _bound_below_zero(config: RunConfig) -> Problems:
    bound = config.trainer.fully_async.max_staleness_steps
    if bound < 0:
        yield f"trainer.fully_async.max_staleness_steps={bound}: must be at least 0 (0 is the synchronous order)."


def _oversubmission(config: RunConfig) -> Problems:
    if config.trainer.failures.rollout_timeout_s is not None:
        yield (
            "trainer.failures.rollout_timeout_s with trainer.mode=partial_rollout: a rollout's time goes on while engines are "
            "interrupted for training, so the limit would hit those that wait. Leave it out, or limit the environment."
        )
    factor, bound = config.trainer.partial_rollout.oversubmit_factor, config.trainer.fully_async.max_staleness_steps
    if factor < 1:
        yield f"trainer.partial_rollout.oversubmit_factor={factor:g}: must be at least 1, or no step would be full."
    elif bound < 0:
        yield from _bound_below_zero(config)
    elif factor - 1 > bound:
        yield (
            f"trainer.partial_rollout.oversubmit_factor={factor:g} begins groups up to {factor - 1:g} steps ahead, more than "
            f"trainer.fully_async.max_staleness_steps={bound}. Set max_staleness_steps={math.ceil(factor - 1)}, or "
            f"oversubmit_factor={bound + 1}."
        )


def _sizes_together(config: RunConfig) -> Problems:
    """``S >= D + k - 1``; a minibatch in flight at once; something that a publication can overlap with."""
    asynchronous, minibatch = config.trainer.fully_async, config.trainer.policy_mini_batch_size
    bound, k, depth = asynchronous.max_staleness_steps, asynchronous.sync_every_steps, derive.pipeline_depth(config)
    if bound < depth + k - 1:
        needed = math.ceil(depth) + k - 1
        less = f" or pipeline_depth={bound - k + 1}" if bound >= k - 1 else f" or sync_every_steps={bound + 1} at most"
        yield (
            f"trainer.fully_async.pipeline_depth={depth:g} with sync_every_steps={k}: groups would be up to {depth + k - 1:g} "
            f"steps old when their turn comes, more than max_staleness_steps={bound}. Set max_staleness_steps={needed}{less}."
        )
        return
    begins_with = asynchronous.streaming_min_groups or minibatch
    if asynchronous.overlap_publication and round(depth * minibatch, 6) < begins_with:
        yield (
            f"trainer.fully_async.overlap_publication=true with pipeline_depth={depth:g}: the next step has nothing to train "
            f"on before the publication is over. Set pipeline_depth=1 and max_staleness_steps={max(bound, k)}, or "
            "overlap_publication=false."
        )
    workers = derive.num_workers(config)
    if workers < minibatch:
        yield (
            f"trainer.fully_async.num_parallel_generation_workers={workers} is less than "
            f"trainer.policy_mini_batch_size={minibatch}: no step would ever see all its groups in flight. Set it to "
            f"{derive.capacity(config)}, or to null, which means that."
        )


def _streaming(config: RunConfig) -> Problems:
    groups, minibatch = config.trainer.fully_async.streaming_min_groups, config.trainer.policy_mini_batch_size
    if groups is None:
        return
    if not 1 <= groups <= minibatch:
        yield (
            f"trainer.fully_async.streaming_min_groups={groups}: must be between 1 and "
            f"trainer.policy_mini_batch_size={minibatch}, or null to train on whole minibatches."
        )
    passes = config.trainer.update_epochs_per_batch
    if passes > 1:
        yield (
            f"trainer.fully_async.streaming_min_groups={groups} with trainer.update_epochs_per_batch={passes}: a second pass "
            "needs the whole minibatch. Set streaming_min_groups=null or update_epochs_per_batch=1."
        )


def _signal(config: RunConfig) -> Problems:
    samples, temperature = config.generator.n_samples_per_prompt, config.generator.sampling_params.temperature
    estimator = config.trainer.algorithm.advantage_estimator
    if estimator in ("grpo", "rloo", "maxrl") and samples == 1:
        yield (
            f"generator.n_samples_per_prompt=1 with the {estimator} estimator: a group of one has nothing to be compared "
            "with, so every advantage is 0. Set n_samples_per_prompt=8, or advantage_estimator=reinforce++."
        )
    if temperature < 0:
        yield f"generator.sampling_params.temperature={temperature}: must be at least 0."
    elif temperature == 0 and samples > 1:
        yield (
            f"generator.sampling_params.temperature=0 with n_samples_per_prompt={samples}: all samples of a prompt "
            "are the same, so nothing is learned. Set temperature=1.0."
        )


def _dynamic_sampling(config: RunConfig) -> Problems:
    algorithm, key = config.trainer.algorithm, "trainer.algorithm.dynamic_sampling"
    mode = algorithm.dynamic_sampling
    if not 0 < algorithm.max_filtered_share < 1:
        yield (
            f"trainer.algorithm.max_filtered_share={algorithm.max_filtered_share}: must be between 0 and 1; at 1, a run in "
            "which nothing has signal would generate for ever. Set it to 0.95."
        )
    if mode is DynamicSampling.none:
        return
    if config.generator.n_samples_per_prompt == 1:
        yield (
            f"{key}={mode} with generator.n_samples_per_prompt=1: a group of one is never worth different things, so none has "
            "signal. Set n_samples_per_prompt=8 or dynamic_sampling=none."
        )
    if mode is DynamicSampling.filter and config.trainer.failures.on_rollout_failure is FailurePolicy["mask"]:
        yield (
            f"{key}=filter with trainer.failures.on_rollout_failure=mask: what stands for a failed rollout has no signal, so a "
            "filtered step would not hold what was asked of it. Set on_rollout_failure=replace or dynamic_sampling=replace."
        )
    if mode is DynamicSampling.replace and derive.streaming_min_groups(config) is not None:
        yield (
            f"{key}=replace chooses among the groups of a whole batch, which trainer.fully_async.streaming_min_groups does "
            "not wait for. Set dynamic_sampling=filter or streaming_min_groups=null."
        )


def _sampling(config: RunConfig) -> Problems:
    yield from _impossible_sampling(config.generator.sampling_params, "generator.sampling_params")


def _impossible_sampling(sampling: SamplingConfig, key: str) -> Problems:
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        yield f"{key}.min_tokens={sampling.min_tokens}: must be between 0 and max_tokens={sampling.max_tokens}."
    if not 0 < sampling.top_p <= 1:
        yield f"{key}.top_p={sampling.top_p}: must be above 0 and at most 1 (1 is off)."
    if not 0 <= sampling.min_p <= 1:
        yield f"{key}.min_p={sampling.min_p}: must be between 0 (off) and 1."


def _correction(config: RunConfig) -> Problems:
    """A difference between the sampled and the trained distribution is corrected, or allowed in so many words.

    Lag is one source (SEMANTICS 7.1). The other are the filters top-p, top-k and min-p: tokens are drawn from the
    renormalised rest, the trainer evaluates the whole distribution, and only the importance weight knows the two apart.
    """
    correction, sampling = config.trainer.algorithm.off_policy_correction, config.generator.sampling_params
    if correction.tis_ratio_type is not None or correction.rejections or correction.m2po_threshold is not None:
        return
    if correction.allow_uncorrected:
        return
    remedy = (
        "Set trainer.algorithm.off_policy_correction.tis_ratio_type=token, or say that you want it uncorrected: "
        "trainer.algorithm.off_policy_correction.allow_uncorrected=true."
    )
    bound = derive.max_staleness_steps(config) if config.trainer.policy_mini_batch_size >= 1 else 0
    if bound > 0:
        source = "fully_async.max_staleness_steps" if derive.is_async(config) else "train_batch_size"
        value = setting(config, f"trainer.{source}")
        yield f"trainer.{source}={value} trains on tokens of older policies uncorrected. {remedy}"
    if sampling.top_p != 1 or sampling.top_k > 0 or sampling.min_p > 0:
        yield (
            f"generator.sampling_params filters tokens (top_p={sampling.top_p}, top_k={sampling.top_k}, "
            f"min_p={sampling.min_p}), so samples come from another distribution than the one that is trained. {remedy}"
        )


def _optimizer(config: RunConfig) -> Problems:
    prefix, optimizer = "trainer.policy.optimizer_config", config.trainer.policy.optimizer_config
    yield from more_than_zero(config, f"{prefix}.lr", f"{prefix}.adam_eps", f"{prefix}.max_grad_norm")
    yield from at_least(config, 0, f"{prefix}.weight_decay", f"{prefix}.num_warmup_steps")
    betas = optimizer.adam_betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield f"{prefix}.adam_betas={betas}: must be two numbers in [0, 1), such as [0.9, 0.999]."


def _lengths(config: RunConfig) -> Problems:
    if config.trainer.policy.model.path is None:
        sizes = ("hidden_size", "num_layers", "num_heads", "intermediate_size", "max_position_embeddings")
        wrong = list(at_least(config, 1, *(f"trainer.policy.model.build.{size}" for size in sizes)))
        yield from wrong
        build = config.trainer.policy.model.build
        if not wrong and build.hidden_size % build.num_heads:
            yield (
                f"trainer.policy.model.build.hidden_size={build.hidden_size} is not a multiple of "
                f"num_heads={build.num_heads}. Set it to {-(-build.hidden_size // build.num_heads) * build.num_heads}."
            )
        if wrong:
            return
    shape = model_shape(config.trainer.policy.model)
    explicit, response = config.generator.inference_engine.max_model_len, config.generator.sampling_params.max_tokens
    length = derive.max_model_len(config, shape)
    if explicit is not None and shape is not None and explicit > shape.max_position_embeddings:
        yield (
            f"generator.inference_engine.max_model_len={explicit} exceeds the model's {shape.max_position_embeddings} "
            f"positions. Set it to null or to {shape.max_position_embeddings}."
        )
    if length <= response:
        yield (
            f"generator.sampling_params.max_tokens={response} leaves no room for a prompt in the {length} tokens that "
            f"a request may have. Lower max_tokens, or raise "
            f"{'the positions of the model' if explicit is None else 'generator.inference_engine.max_model_len'}."
        )
    if config.trainer.micro_batch_tokens < length:
        yield (
            f"trainer.micro_batch_tokens={config.trainer.micro_batch_tokens} is less than the {length} tokens that one "
            f"sequence may have. Set it to {length} or more, or lower generator.max_input_length."
        )


def _names(config: RunConfig, known_names: Mapping[str, Collection[str]]) -> Problems:
    for key, names in known_names.items():
        value = setting(config, key)
        for name in value if isinstance(value, list) else [value]:
            if name is not None and name not in names and "." not in name:
                yield f"{key}={name} is unknown.{did_you_mean(name, names)}"


def _engines(config: RunConfig) -> Problems:
    key, engine = "generator.inference_engine", config.generator.inference_engine
    of_evaluation = config.trainer.eval.num_engines
    if engine.backend == "vllm_remote" and len(engine.remote_urls) != engine.num_engines + of_evaluation:
        beside = f" and trainer.eval.num_engines={of_evaluation}" if of_evaluation else ""
        yield (
            f"{key}.remote_urls names {len(engine.remote_urls)} servers for {key}.num_engines={engine.num_engines}"
            f"{beside}: give one URL per engine{', those of the evaluation last' if of_evaluation else ''}."
        )
    if engine.backend != "vllm_remote" and engine.remote_urls:
        yield f"{key}.remote_urls belongs to {key}.backend=vllm_remote, not to {engine.backend!r}."
    if engine.backend == "vllm_remote" and engine.placement == "ray":
        yield f"{key}.placement=ray: a remote server runs where it was started; leave the placement out."
    if engine.backend == "vllm" and engine.placement == "thread":
        yield f"{key}.placement=thread is for the embedded engine; vLLM has processes of its own: use process or ray."
    parallel = engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size
    if engine.backend == "embedded" and parallel != 1:
        yield f"{key}: the embedded engine is not parallel; set its *_parallel_size to 1, or use backend=vllm."
    if engine.backend != "vllm" and engine.engine_args:
        yield f"{key}.engine_args belongs to {key}.backend=vllm, not to {engine.backend!r}."


def _training_workers(config: RunConfig) -> Problems:
    trainer, key = config.trainer, "trainer.fsdp"
    yield from at_least(config, 0, "trainer.max_restarts", f"{key}.ray_num_cpus", f"{key}.ray_num_gpus")
    yield from at_least(config, 1, f"{key}.num_workers")
    yield from more_than_zero(config, f"{key}.start_timeout_s")
    if trainer.strategy is TrainingStrategy.local:
        if trainer.max_restarts > 0:
            yield (
                f"trainer.max_restarts={trainer.max_restarts} with trainer.strategy=local: there is no training worker "
                "that could die. Set trainer.max_restarts=0, or trainer.strategy=fsdp2."
            )
        return
    if trainer.device not in ("cpu", "cuda"):
        yield (
            f"trainer.device={trainer.device} with trainer.strategy=fsdp2: each worker sees the GPU that Ray gives it and "
            "no other. Set trainer.device=cuda."
        )
    if trainer.policy.fp32_head:
        yield (
            "trainer.policy.fp32_head=true with trainer.strategy=fsdp2: a sharded head is whole within the model's own forward "
            "pass only, in trainer.policy.dtype. Set trainer.policy.fp32_head=false, or trainer.strategy=local."
        )
    gpus = derive.fsdp_num_gpus(trainer)
    if trainer.device == "cuda" and 0 <= gpus < 1 and trainer.fsdp.num_workers > 1:
        yield (
            f"{key}.ray_num_gpus={gpus:g}: two workers could share a GPU, which NCCL refuses. Set {key}.ray_num_gpus=1, or "
            f"{key}.num_workers=1."
        )
    if trainer.device == "cpu" and gpus > 0:
        yield f"{key}.ray_num_gpus={gpus:g} with trainer.device=cpu: nothing would use them. Set trainer.device=cuda."


def _evaluation(config: RunConfig) -> Problems:
    settings, key = config.trainer.eval, "trainer.eval"
    yield from at_least(config, 0, f"{key}.interval", f"{key}.num_engines")
    yield from at_least(config, 1, f"{key}.n_samples_per_prompt", f"{key}.max_parallel")
    if settings.interval <= 0:
        if settings.before_train or settings.num_engines > 0:
            asked = "before_train=true" if settings.before_train else f"num_engines={settings.num_engines}"
            yield f"{key}.{asked} without {key}.interval: nothing is ever evaluated. Set the interval, in steps."
        return
    if not math.isfinite(settings.pass_threshold):
        yield f"{key}.pass_threshold={settings.pass_threshold}: must be a finite number."
    if not settings.eval_data:
        yield from at_least(config, 1, f"{key}.generate")
        if not config.data.train_data and settings.seed == config.data.seed:
            yield (
                f"{key}.seed={settings.seed} is data.seed: the evaluation would be of prompts that are trained. "
                f"Set {key}.seed={settings.seed + 1}."
            )
    yield from _evaluated_versions(config)
    yield from _evaluation_sampling(config)
    if settings.num_engines > 0 and _endpoint_port(config):
        yield (
            f"generator.kwargs.endpoint.port={_endpoint_port(config)} with {key}.num_engines={settings.num_engines}: the "
            "evaluation has an endpoint of its own, which cannot have the same port. Leave the port out, or set "
            f"{key}.num_engines=0."
        )


def _evaluated_versions(config: RunConfig) -> Problems:
    """The run's engines hold a step's policy only if it was published."""
    key, interval = "trainer.eval", config.trainer.eval.interval
    if config.trainer.eval.num_engines > 0 or config.trainer.policy_mini_batch_size < 1:
        return
    k = derive.steps_per_publication(config)
    if k >= 1 and interval % k:
        yield (
            f"{key}.interval={interval} is no multiple of the {k} steps from one publication to the next: the run's engines "
            f"would not hold the policy that is due. Set {key}.interval={-(-interval // k) * k}, or give the evaluation "
            f"engines of its own: {key}.num_engines=1."
        )


def _evaluation_sampling(config: RunConfig) -> Problems:
    key, ours = "trainer.eval.sampling_params", config.trainer.eval.sampling_params
    known = dataclasses.asdict(config.generator.sampling_params)
    wrong = []
    for name, value in ours.items():
        if name not in known:
            wrong.append(f"{key}.{name} is unknown.{did_you_mean(name, known)}")
        elif not _of_type(value, known[name]):
            wrong.append(f"{key}.{name}={value}: must be {known_keys()[f'generator.sampling_params.{name}']}.")
    yield from wrong
    if wrong:
        return
    sampling = dataclasses.replace(config.generator.sampling_params, **ours)
    yield from _impossible_sampling(sampling, key)
    if sampling.temperature < 0:
        yield f"{key}.temperature={sampling.temperature}: must be at least 0."
    if sampling.max_tokens < 1:
        yield f"{key}.max_tokens={sampling.max_tokens}: must be at least 1."
    if sampling.max_tokens > config.generator.sampling_params.max_tokens:
        yield from _evaluation_length(config, sampling.max_tokens)


def _evaluation_length(config: RunConfig, max_tokens: int) -> Problems:
    if config.trainer.policy.model.path is None and config.trainer.policy.model.build.num_heads < 1:
        return  # refused already, and no shape follows from it
    needed = config.generator.max_input_length + max_tokens
    length = derive.max_model_len(config, model_shape(config.trainer.policy.model))
    if needed > length:
        yield (
            f"trainer.eval.sampling_params.max_tokens={max_tokens} does not fit beside generator.max_input_length="
            f"{config.generator.max_input_length} into the {length} tokens that a request may have. Lower it, or set "
            f"generator.inference_engine.max_model_len={needed}, if the model has as many positions."
        )


def _of_type(value: Any, example: Any) -> bool:
    if isinstance(example, bool) or isinstance(value, bool):
        return isinstance(example, bool) and isinstance(value, bool)
    return isinstance(value, int | float if isinstance(example, float) else type(example))


def _endpoint_port(config: RunConfig) -> Any:
    """The port that the harness was told to take; 0 or None where it takes a free one."""
    endpoint = config.generator.kwargs.get("endpoint")
    return endpoint.get("port") if isinstance(endpoint, Mapping) else None


def _data(config: RunConfig) -> Problems:
    yield from at_least(config, 0, "rollout.buffer_memory_bytes")
    data = config.data
    if data.sampler in (None, "shuffle", "sequential") and data.sampler_kwargs:
        yield (
            f"data.sampler_kwargs={dict(data.sampler_kwargs)} with data.sampler={data.sampler}: this order has no settings. "
            'Remove them, or set data.sampler=weighted, which takes {"weights": {data_source: weight}}.'
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
            "trainer.max_steps=null with data.streaming=true: how many prompts a stream has is not known before it ends, and "
            "the learning-rate schedule needs the number of steps. Set trainer.max_steps; the run ends earlier if the files "
            "have been read trainer.epochs times by then."
        )


def _stages(config: RunConfig) -> Problems:
    key, reward = "rollout.stages", config.rollout.stages.reward
    yield from at_least(config, 1, f"{key}.reward.max_parallel", f"{key}.reference.max_parallel")
    yield from at_least(
        config,
        0,
        *(
            f"{key}.{stage}.ray_{resource}"
            for stage in ("reward", "reference")
            for resource in ("num_cpus", "num_gpus")
        ),
    )
    yield from more_than_zero(config, f"{key}.reward.timeout_s")
    if reward.function is None and reward.kwargs:
        yield (
            f"{key}.reward.kwargs={dict(reward.kwargs)} without {key}.reward.function: nothing takes them. Name the function, "
            "as package.module:function or file.py:function, or remove them."
        )
    if reward.function is not None and "." not in reward.function:
        yield (
            f"{key}.reward.function={reward.function}: is no import path. Name it as package.module:function or "
            "file.py:function."
        )


def _actors(config: RunConfig) -> Problems:
    yield from at_least(config, 0, "rollout.num_actors", "rollout.ray_num_cpus")
    port, actors = _endpoint_port(config), config.rollout.num_actors
    if config.generator.name == "harness" and actors > 1 and port:
        yield (
            f"generator.kwargs.endpoint.port={port} with rollout.num_actors={actors}: each actor has an endpoint of its own, "
            "and actors may share a machine. Leave the port out (each takes a free one), or set rollout.num_actors=0 where "
            "other programs need to know it."
        )


_RULES: tuple[Callable[[RunConfig], Problems], ...] = (
    _counts,
    _batches,
    _staleness,
    _signal,
    _dynamic_sampling,
    _sampling,
    _correction,
    _optimizer,
    _lengths,
    _engines,
    _training_workers,
    _evaluation,
    _data,
    _stages,
    _actors,
    *algorithm_refusals.RULES,
    transports.problems,
)

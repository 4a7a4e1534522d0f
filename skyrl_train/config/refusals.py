"""Combinations of settings that cannot work. All are found before anything starts, each with its remedy.

A rule is a function that yields one sentence per problem: what was set, why it cannot work, what to set instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from skyrl_train.config import (
    algorithm_refusals,
    critic_refusals,
    derive,
    evaluation_refusals,
    lora_refusals,
    placement_refusals,
    schedule_refusals,
    transports,
)
from skyrl_train.config.import_path import is_import_path
from skyrl_train.config.keys import did_you_mean
from skyrl_train.config.limits import Problems, at_least, impossible_sampling, more_than_zero, setting
from skyrl_train.config.model_shape import BYTES_PER_ELEMENT, model_shape
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.config.schema.training import OptimizerConfig
from skyrl_train.errors import ConfigError

# Settings with a closed list of values. What users may register (losses, estimators, schedules, trackers) is passed in.
CLOSED_NAMES: Mapping[str, tuple[str, ...]] = {
    "generator.pause_mode": ("keep", "recompute", "abort", "wait"),
    "generator.inference_engine.placement": ("process", "thread", "ray"),
    "generator.inference_engine.dtype": tuple(BYTES_PER_ELEMENT),
    "rollout.stages.reference.placement": ("process", "thread", "ray", "workers", "colocated"),
    "rollout.stages.reward.placement": ("loop", "thread", "process", "ray"),
    "trainer.critic.dtype": tuple(BYTES_PER_ELEMENT),
    "trainer.critic.placement": ("workers", "colocated"),
    "trainer.policy.dtype": tuple(BYTES_PER_ELEMENT),
}
_OPEN_NAMES = {  # or an import path
    "data.sampler": ("shuffle", "sequential", "weighted"),
    "generator.inference_engine.backend": ("embedded", "vllm", "vllm_remote"),
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
    return [
        *found,
        *_names(config, CLOSED_NAMES, closed=True),
        *_names(config, {**_OPEN_NAMES, **(known_names or {})}),
    ]


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
        "trainer.failures.max_nonfinite_steps",
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


def _sampling(config: RunConfig) -> Problems:
    yield from impossible_sampling(config.generator.sampling_params, "generator.sampling_params")


def _optimizers(config: RunConfig) -> Problems:
    yield from _optimizer(config, "trainer.policy.optimizer_config", config.trainer.policy.optimizer_config)
    yield from _optimizer(config, "trainer.critic.optimizer_config", config.trainer.critic.optimizer_config)


def _optimizer(config: RunConfig, prefix: str, optimizer: OptimizerConfig) -> Problems:
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


def _names(config: RunConfig, known_names: Mapping[str, Collection[str]], *, closed: bool = False) -> Problems:
    """Names that are none of those known, and unless the lists are closed no import path either."""
    for key, names in known_names.items():
        value = setting(config, key)
        for name in value if isinstance(value, list) else [value]:
            if name is not None and name not in names and (closed or not is_import_path(name)):
                yield f"{key}={name} is unknown.{did_you_mean(name, names)}"


def _data(config: RunConfig) -> Problems:
    yield from at_least(config, 0, "rollout.buffer_memory_bytes")
    data = config.data
    if data.sampler in (None, "shuffle", "sequential") and data.sampler_kwargs:
        away = " ".join(f"~data.sampler_kwargs.{key}" for key in data.sampler_kwargs)
        yield (
            f"data.sampler_kwargs={dict(data.sampler_kwargs)} with data.sampler={data.sampler}: this order has no settings. "
            f'Remove them ({away}), or set data.sampler=weighted, which takes {{"weights": {{data_source: weight}}}}.'
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


_RULES: tuple[Callable[[RunConfig], Problems], ...] = (
    _counts,
    *schedule_refusals.RULES,
    _sampling,
    _optimizers,
    _lengths,
    *placement_refusals.RULES,
    *lora_refusals.RULES,
    *evaluation_refusals.RULES,
    _data,
    *algorithm_refusals.RULES,
    *critic_refusals.RULES,
    transports.problems,
)

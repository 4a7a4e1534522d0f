"""Evaluation while training: what cannot work, with its remedy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from skyrl_train.config import derive
from skyrl_train.config.keys import did_you_mean, known_keys
from skyrl_train.config.limits import Problems, at_least, impossible_sampling
from skyrl_train.config.model_shape import model_shape
from skyrl_train.config.placement_refusals import endpoint_port
from skyrl_train.config.schema.run import RunConfig


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
    if settings.num_engines > 0 and endpoint_port(config):
        yield (
            f"generator.kwargs.endpoint.port={endpoint_port(config)} with {key}.num_engines={settings.num_engines}: the "
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
    yield from impossible_sampling(sampling, key)
    if not 0 <= sampling.temperature < math.inf:
        yield f"{key}.temperature={sampling.temperature}: must be at least 0 and finite."
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


RULES: tuple[Callable[[RunConfig], Problems], ...] = (_evaluation,)

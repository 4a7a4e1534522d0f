"""Combinations of settings that cannot work. All are found before anything starts, each with its remedy.

A rule is a function that yields one sentence per problem: what was set, why it cannot work, what to set instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from skyrl_train.config import derive
from skyrl_train.config.keys import did_you_mean
from skyrl_train.config.model_shape import BYTES_PER_ELEMENT, model_shape
from skyrl_train.config.schema import RunConfig
from skyrl_train.errors import ConfigError

# Settings with a closed list of values. What users may register (losses, estimators, schedules, trackers) is passed in.
CLOSED_NAMES: Mapping[str, tuple[str, ...]] = {
    "generator.pause_mode": ("keep", "recompute", "abort", "wait"),
    "generator.inference_engine.placement": ("process", "thread", "ray"),
    "generator.inference_engine.dtype": tuple(BYTES_PER_ELEMENT),
    "trainer.policy.dtype": tuple(BYTES_PER_ELEMENT),
}

Problems = Iterator[str]


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


def setting(config: RunConfig, key: str) -> Any:
    """The value of a dotted key of the schema."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _at_least(config: RunConfig, minimum: float, *keys: str) -> Problems:
    for key in keys:
        value = setting(config, key)
        if value is not None and value < minimum:
            yield f"{key}={value}: must be at least {minimum}."


def _more_than_zero(config: RunConfig, *keys: str) -> Problems:
    for key in keys:
        value = setting(config, key)
        if value is not None and not value > 0:
            yield f"{key}={value}: must be more than 0."


def _counts(config: RunConfig) -> Problems:
    yield from _at_least(
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
    yield from _at_least(
        config,
        0,
        "trainer.ckpt_interval",
        "trainer.samples_per_step",
        "trainer.failures.max_rollout_retries",
        "generator.inference_engine.fleet.max_restarts",
        "generator.inference_engine.fleet.wait_timeout_s",
    )
    yield from _more_than_zero(
        config,
        "trainer.failures.rollout_timeout_s",
        "generator.pause_timeout_s",
        "generator.inference_engine.fleet.probe_interval_s",
    )
    if not config.data.train_data:
        yield from _at_least(config, 1, "data.generate")


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
    if not derive.is_async(config):
        return
    bound, depth = config.trainer.fully_async.max_staleness_steps, config.trainer.fully_async.pipeline_depth
    minibatch, workers = config.trainer.policy_mini_batch_size, derive.num_workers(config)
    if bound < 0:
        yield f"trainer.fully_async.max_staleness_steps={bound}: must be at least 0 (0 is the synchronous order)."
        return
    if depth is not None and depth < 0:
        yield f"trainer.fully_async.pipeline_depth={depth}: must be at least 0, or null for {min(1, bound)}."
        return
    if depth is not None and depth > bound:
        yield (
            f"trainer.fully_async.pipeline_depth={depth} exceeds max_staleness_steps={bound}: groups would be too old "
            f"when their turn comes. Set pipeline_depth={bound} or max_staleness_steps={depth}."
        )
        return
    if workers < minibatch:
        yield (
            f"trainer.fully_async.num_parallel_generation_workers={workers} is less than "
            f"trainer.policy_mini_batch_size={minibatch}: no step would ever see all its groups in flight. Set it to "
            f"{(derive.pipeline_depth(config) + 1) * minibatch}, or to null, which means that."
        )


def _signal(config: RunConfig) -> Problems:
    samples, temperature = config.generator.n_samples_per_prompt, config.generator.sampling_params.temperature
    if config.trainer.algorithm.advantage_estimator == "grpo" and samples == 1:
        yield (
            "generator.n_samples_per_prompt=1 with the grpo estimator: a group of one is its own mean, so every "
            "advantage is 0. Set n_samples_per_prompt=8."
        )
    if temperature < 0:
        yield f"generator.sampling_params.temperature={temperature}: must be at least 0."
    elif temperature == 0 and samples > 1:
        yield (
            f"generator.sampling_params.temperature=0 with n_samples_per_prompt={samples}: all samples of a prompt "
            "are the same, so nothing is learned. Set temperature=1.0."
        )


def _sampling(config: RunConfig) -> Problems:
    sampling = config.generator.sampling_params
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        yield (
            f"generator.sampling_params.min_tokens={sampling.min_tokens}: must be between 0 and "
            f"max_tokens={sampling.max_tokens}."
        )
    if not 0 < sampling.top_p <= 1:
        yield f"generator.sampling_params.top_p={sampling.top_p}: must be above 0 and at most 1 (1 is off)."
    if not 0 <= sampling.min_p <= 1:
        yield f"generator.sampling_params.min_p={sampling.min_p}: must be between 0 (off) and 1."


def _correction(config: RunConfig) -> Problems:
    """A difference between the sampled and the trained distribution is corrected, or allowed in so many words.

    Lag is one source (SEMANTICS 7.1). The other are the filters top-p, top-k and min-p: tokens are drawn from the
    renormalised rest, the trainer evaluates the whole distribution, and only the importance weight knows the two apart.
    """
    correction, sampling = config.trainer.algorithm.off_policy_correction, config.generator.sampling_params
    if correction.tis_ratio_type is not None:
        yield from _more_than_zero(config, "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high")
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
    yield from _more_than_zero(config, f"{prefix}.lr", f"{prefix}.adam_eps", f"{prefix}.max_grad_norm")
    yield from _at_least(config, 0, f"{prefix}.weight_decay", f"{prefix}.num_warmup_steps")
    betas = optimizer.adam_betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield f"{prefix}.adam_betas={betas}: must be two numbers in [0, 1), such as [0.9, 0.999]."


def _losses(config: RunConfig) -> Problems:
    yield from _at_least(
        config, 0, *(f"trainer.algorithm.{name}" for name in ("eps_clip_low", "eps_clip_high", "entropy_coef"))
    )
    if config.trainer.algorithm.eps_clip_low >= 1:
        yield f"trainer.algorithm.eps_clip_low={config.trainer.algorithm.eps_clip_low}: must be less than 1."


def _lengths(config: RunConfig) -> Problems:
    if config.trainer.policy.model.path is None:
        sizes = ("hidden_size", "num_layers", "num_heads", "intermediate_size", "max_position_embeddings")
        wrong = list(_at_least(config, 1, *(f"trainer.policy.model.build.{size}" for size in sizes)))
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
    if engine.backend == "vllm_remote" and len(engine.remote_urls) != engine.num_engines:
        yield (
            f"{key}.remote_urls names {len(engine.remote_urls)} servers for {key}.num_engines={engine.num_engines}: "
            "give one URL per engine."
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


_RULES: tuple[Callable[[RunConfig], Problems], ...] = (
    _counts,
    _batches,
    _staleness,
    _signal,
    _sampling,
    _correction,
    _optimizer,
    _losses,
    _lengths,
    _engines,
)

"""How generation and training are scheduled: what cannot work, with its remedy."""

from __future__ import annotations

import math
from collections.abc import Callable

from skyrl_train.config import derive
from skyrl_train.config.limits import Problems, at_least, finite, setting
from skyrl_train.config.schema.algorithm import DynamicSampling
from skyrl_train.config.schema.failures import FailurePolicy
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.config.schema.trainer import TrainerMode


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
        *finite(config, "trainer.fully_async.pipeline_depth"),
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
    if not 1 <= factor < math.inf:
        yield f"trainer.partial_rollout.oversubmit_factor={factor:g}: must be at least 1 and finite, or no step would be full."
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
    if asynchronous.straggler_policy == "burst" and depth == 0:
        yield (
            "trainer.fully_async.straggler_policy=burst with pipeline_depth=0: nothing begins ahead that could be held back, so "
            f"it is as wait. Set pipeline_depth={max(1, bound - k + 1)} and max_staleness_steps={max(bound, k)}, or "
            "straggler_policy=wait."
        )
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
    if config.trainer.algorithm.zero_variance_filter and samples == 1:
        yield (
            "trainer.algorithm.zero_variance_filter=true with generator.n_samples_per_prompt=1: a group of one is never worth "
            "different things, so all would train with loss mask 0. Set n_samples_per_prompt=8 or zero_variance_filter=false."
        )
    if not 0 <= temperature < math.inf:
        yield f"generator.sampling_params.temperature={temperature}: must be at least 0 and finite."
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


RULES: tuple[Callable[[RunConfig], Problems], ...] = (
    _batches,
    _staleness,
    _signal,
    _dynamic_sampling,
    _correction,
)

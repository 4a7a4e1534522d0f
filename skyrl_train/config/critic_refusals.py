"""Refusals about ``trainer.critic`` and generalized advantages."""

from __future__ import annotations

from collections.abc import Callable

from skyrl_train.config import derive
from skyrl_train.config.limits import Problems, at_least, changed, more_than_zero
from skyrl_train.config.placement_refusals import ranks, shared_heads
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.config.schema.training import TrainingStrategy

KEY = "trainer.critic"
ALGORITHM = "trainer.algorithm"


def _without_critic(config: RunConfig) -> Problems:
    algorithm = config.trainer.algorithm
    if derive.needs_critic(algorithm):
        return
    unused = [f"{ALGORITHM}.{name}" for name in changed(algorithm) if name in ("lambd", "value_clip")]
    unused += [f"{KEY}.{name}" for name in changed(config.trainer.critic)]
    if unused:
        yield (
            f"{', '.join(unused)} with {ALGORITHM}.advantage_estimator={algorithm.advantage_estimator}: nothing predicts values "
            "there, so nothing takes it. Set advantage_estimator=gae, or leave it out."
        )


def _generalized_advantages(config: RunConfig) -> Problems:
    algorithm = config.trainer.algorithm
    if not 0 <= algorithm.lambd <= 1:
        yield f"{ALGORITHM}.lambd={algorithm.lambd}: must be between 0 and 1 (1 takes the whole return)."
    yield from more_than_zero(config, f"{ALGORITHM}.value_clip")
    if derive.needs_critic(algorithm) and algorithm.off_policy_correction.baseline_without_rejected:
        yield (
            f"{ALGORITHM}.off_policy_correction.baseline_without_rejected=true with advantage_estimator=gae: samples are "
            "compared with the critic's values, not with each other. Set it to false."
        )


def _workers(config: RunConfig) -> Problems:
    trainer, key = config.trainer, f"{KEY}.fsdp"
    if not derive.needs_critic(trainer.algorithm):
        return
    if derive.critic_is_colocated(trainer):
        yield from _colocated(config)
    elif trainer.strategy is TrainingStrategy.fsdp2:
        yield from at_least(config, 0, f"{key}.ray_num_cpus", f"{key}.ray_num_gpus")
        yield from at_least(config, 1, f"{key}.num_workers", f"{key}.sequence_parallel_size")
        yield from more_than_zero(config, f"{key}.start_timeout_s")
        yield from ranks(derive.critic_trainer(trainer), derive.critic_model(trainer), key, f"{KEY}.device", "critic")


def _colocated(config: RunConfig) -> Problems:
    trainer, critic = config.trainer, config.trainer.critic
    if trainer.strategy is TrainingStrategy.local:
        yield (
            f"{KEY}.placement=colocated with trainer.strategy=local: there are no ranks that could hold it. Leave it out, or set "
            "trainer.strategy=fsdp2."
        )
        return
    if critic.device is not None:
        yield (
            f"{KEY}.device={critic.device} with {KEY}.placement=colocated: it computes where the policy does. Set "
            f"{KEY}.device=null."
        )
    for name in changed(critic.fsdp):
        if name not in derive.OF_COLOCATED_CRITIC:
            yield (
                f"{KEY}.fsdp.{name} with {KEY}.placement=colocated: its ranks are the policy's. Set trainer.fsdp.{name}, and "
                "leave it out."
            )
    if critic.model.path is not None:
        yield from shared_heads(
            derive.critic_model(trainer), trainer.fsdp.sequence_parallel_size, "trainer.fsdp", "critic"
        )


RULES: tuple[Callable[[RunConfig], Problems], ...] = (_without_critic, _generalized_advantages, _workers)

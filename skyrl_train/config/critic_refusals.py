"""Refusals about ``trainer.critic`` and generalized advantages."""

from __future__ import annotations

from collections.abc import Callable

from skyrl_train.config import derive
from skyrl_train.config.limits import Problems, at_least, more_than_zero
from skyrl_train.config.schema.algorithm import AlgorithmConfig
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.config.schema.training import CriticConfig, TrainingStrategy

KEY = "trainer.critic"
ALGORITHM = "trainer.algorithm"


def _without_critic(config: RunConfig) -> Problems:
    algorithm, default = config.trainer.algorithm, AlgorithmConfig()
    if derive.needs_critic(algorithm):
        return
    unused = [f"{ALGORITHM}.{name}" for name in ("lambd", "value_clip") if _differs(algorithm, default, name)]
    unused += [
        f"{KEY}.{name}" for name in vars(CriticConfig()) if _differs(config.trainer.critic, CriticConfig(), name)
    ]
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
    trainer = config.trainer
    if not derive.needs_critic(trainer.algorithm) or trainer.strategy is TrainingStrategy.local:
        return
    key = f"{KEY}.fsdp"
    yield from at_least(config, 0, f"{key}.ray_num_cpus", f"{key}.ray_num_gpus")
    yield from at_least(config, 1, f"{key}.num_workers")
    yield from more_than_zero(config, f"{key}.start_timeout_s")
    critic = derive.critic_trainer(trainer)
    workers, split = critic.fsdp.num_workers, critic.fsdp.shard_size
    if critic.fsdp.sequence_parallel_size != 1:
        yield (
            f"{key}.sequence_parallel_size={critic.fsdp.sequence_parallel_size}: one rank computes the values of a sequence. "
            f"Set it to 1, and {KEY}.gradient_checkpointing=true if memory is short."
        )
    if split is not None and (split < 1 or workers % split):
        yield (
            f"{key}.shard_size={split} does not divide {key}.num_workers={workers} into copies of the critic. Set it to a "
            "divisor, or to null for one copy."
        )
    if critic.device not in ("cpu", "cuda"):
        yield (
            f"{KEY}.device={critic.device} with trainer.strategy=fsdp2: each worker sees the GPU that Ray gives it and no "
            f"other. Set {KEY}.device=cuda."
        )
    gpus = derive.fsdp_num_gpus(critic)
    if critic.device == "cuda" and gpus < 1 and critic.fsdp.num_workers > 1:
        yield (
            f"{key}.ray_num_gpus={gpus:g}: two workers could share a GPU, which NCCL refuses. Set {key}.ray_num_gpus=1, or "
            f"{key}.num_workers=1."
        )
    if critic.device == "cpu" and gpus > 0:
        yield f"{key}.ray_num_gpus={gpus:g} with {KEY}.device=cpu: nothing would use them. Set {KEY}.device=cuda."


def _differs(settings: object, default: object, name: str) -> bool:
    return bool(getattr(settings, name) != getattr(default, name))


RULES: tuple[Callable[[RunConfig], Problems], ...] = (_without_critic, _generalized_advantages, _workers)

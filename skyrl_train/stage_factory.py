"""Builds the configured stages between generation and the buffer, where they are to compute."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from skyrl_train.config import derive
from skyrl_train.config.schema.algorithm import AlgorithmConfig
from skyrl_train.config.schema.rollout import ReferenceStageConfig, RewardStageConfig
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.errors import ConfigError
from skyrl_train.rollout.logprob_stages import ReferenceStage, ValueStage, worth_scoring
from skyrl_train.rollout.placement.base import Place, Work
from skyrl_train.rollout.placement.local import LoopPlace, ThreadWorker
from skyrl_train.rollout.placement.process import ProcessWorker
from skyrl_train.rollout.placement.workers import Worker, WorkerPlace
from skyrl_train.rollout.reward_function import SETTING, is_async, reward_work
from skyrl_train.rollout.reward_stage import RewardStage
from skyrl_train.rollout.stages import Stage
from skyrl_train.training.actor_critic import ActorCritic
from skyrl_train.training.backend import TrainingBackend, TrainingSequence

FROZEN_POLICY = "skyrl_train.training.frozen_policy:FrozenPolicy"
SHARDED_REFERENCE = "skyrl_train.training.distributed.reference:ShardedReference"


def build_stages(
    config: RunConfig,
    model_path: str,
    decode: Callable[[Sequence[int]], str],
    on_failure: Callable[[str, str], None],
) -> list[Stage]:
    """The stages with resources of their own, in their order, none of them started.

    Rewards come first: they decide which groups are worth anything to the stages behind them.

    Args:
        decode: the text of some tokens, special ones left out.
        on_failure: is told the group's name and the reason of each attempt at a reward that fails.

    Raises:
        ConfigError: the reward function cannot be found or does not fit its placement; Ray is asked for and not installed.
    """
    stages: list[Stage] = []
    reward, reference = config.rollout.stages.reward, config.rollout.stages.reference
    if reward.function is not None:
        stages.append(
            RewardStage(
                _reward_place(reward, reward.function),
                decode,
                max_parallel=reward.max_parallel,
                attempts=1 + config.trainer.failures.max_rollout_retries,
                timeout_s=reward.timeout_s,
                on_failure=on_failure,
            )
        )
    if derive.needs_reference(config.trainer.algorithm) and not derive.reference_is_colocated(config):
        stages.append(
            ReferenceStage(
                _reference_place(config, model_path),
                max_parallel=reference.max_parallel,
                needed=worth_scoring(config.trainer.algorithm),
            )
        )
    return stages


def _reference_place(config: RunConfig, model_path: str) -> Place:
    reference = config.rollout.stages.reference
    if reference.placement != "workers":
        return _place(_frozen_policy(config, model_path), reference.placement, reference)
    workers = replace(
        config.trainer.fsdp,
        num_workers=reference.num_workers,
        sequence_parallel_size=1,
        shard_size=None,
        cpu_offload=derive.reference_offload(config),
        ray_num_cpus=reference.ray_num_cpus,
        ray_num_gpus=derive.reference_num_gpus(config),
    )
    trainer = replace(config.trainer, device=derive.reference_device(config), fsdp=workers)
    arguments = {
        "model_path": model_path,
        "trainer": trainer,
        "temperature": config.generator.sampling_params.temperature,
    }
    return WorkerPlace([ThreadWorker(Work(SHARDED_REFERENCE, arguments))])


def value_stages(algorithm: AlgorithmConfig, backend: TrainingBackend) -> list[Stage]:
    """The stage that asks the critic for values, where ``backend`` has one; else none. It needs nothing to be started."""
    if not isinstance(backend, ActorCritic):
        return []

    async def forward(sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        return await asyncio.wrap_future(backend.submit_values(sequences))

    return [ValueStage(forward, needed=worth_scoring(algorithm))]


def _frozen_policy(config: RunConfig, model_path: str) -> Work:
    trainer = config.trainer
    return Work(
        FROZEN_POLICY,
        {
            "model_path": model_path,
            "dtype": trainer.policy.dtype,
            "device": derive.reference_device(config),
            "temperature": config.generator.sampling_params.temperature,
            "micro_batch_tokens": trainer.micro_batch_tokens,
            "packing": trainer.packing,
            "fp32_head": trainer.policy.fp32_head,
        },
    )


def _reward_place(reward: RewardStageConfig, function: str) -> Place:
    asynchronous = is_async(function)
    placement = reward.placement or ("loop" if asynchronous else "thread")
    work = reward_work(function, reward.kwargs)
    if placement != "loop":
        return _place(work, placement, reward)
    if not asynchronous:
        raise ConfigError(
            f"rollout.stages.reward.placement=loop, but {SETTING}={function!r} is not async: it would hold up everything else "
            "while it computes. Set placement=thread or process, or write it as async def."
        )
    return LoopPlace(work)


def _place(work: Work, placement: str, stage: RewardStageConfig | ReferenceStageConfig) -> Place:
    makers: dict[str, Callable[[], Worker]] = {
        "thread": lambda: ThreadWorker(work),
        "process": lambda: ProcessWorker(work),
        "ray": lambda: _ray_worker(work, stage),
    }
    return WorkerPlace([makers[placement]() for _ in range(stage.max_parallel)])


def _ray_worker(work: Work, stage: RewardStageConfig | ReferenceStageConfig) -> Worker:
    try:
        from skyrl_train.inference.engines.ray_actor import RayPlacement
        from skyrl_train.rollout.placement.ray_actor import RayWorker
    except ModuleNotFoundError as error:
        raise ConfigError("A stage with placement=ray needs Ray: install skyrl-train[ray].") from error
    return RayWorker(work, RayPlacement(num_cpus=stage.ray_num_cpus, num_gpus=stage.ray_num_gpus))

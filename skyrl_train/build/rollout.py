"""Builds the configured generator, and the stages between generation and the buffer."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from skyrl_train.config import derive
from skyrl_train.config.cluster import REFERENCE_ACTORS, REPLICA
from skyrl_train.config.plan import Plan
from skyrl_train.config.schema import AlgorithmConfig, RewardStageConfig, RunConfig
from skyrl_train.errors import ConfigError
from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.generators.construction import GeneratorSpec
from skyrl_train.generators.remote.generator import RemoteGenerator
from skyrl_train.generators.remote.host import ActorSetup, GeneratorHost
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.observability.failures import OnFailure
from skyrl_train.rollout.stages.logprobs import ReferenceStage, ReplicaStage, ValueStage, worth_scoring
from skyrl_train.rollout.stages.pipeline import Stage
from skyrl_train.rollout.stages.reward import SETTING, RewardStage, is_async, reward_work
from skyrl_train.training.actor_critic import ActorCritic
from skyrl_train.training.backend import TrainingBackend, TrainingSequence
from skyrl_train.workers.executors import (
    Executor,
    LoopExecutor,
    RemoteWorker,
    ThreadWorker,
    Work,
    Worker,
    WorkerPool,
    WorkHost,
    process_worker,
)

if TYPE_CHECKING:  # Ray need not be installed
    from skyrl_train.workers.ray import RayPlacement
    from skyrl_train.workers.reservation import Reservation

POLICY_REPLICA = "skyrl_train.training.reference:PolicyReplica"
FROZEN_POLICY = "skyrl_train.training.reference:FrozenPolicy"
SHARDED_REFERENCE = "skyrl_train.training.reference:ShardedReference"


def build_generator(
    config: RunConfig,
    plan: Plan,
    client: InferenceEngineClient,
    tokenizer: PreTrainedTokenizerBase,
    model_path: str,
    logs: Path | None = None,
) -> GeneratorInterface:
    """Build the configured generator: in this process, or with ``rollout.num_actors`` in Ray actors.

    Args:
        logs: folder for the actors' logs, on nodes that have it.

    Raises:
        ConfigError: the generator cannot be imported or constructed, or Ray is asked for and not installed.
    """
    # Actors have no plan: they get the resolved length in the settings.
    engine = replace(config.generator.inference_engine, max_model_len=plan.max_model_len)
    spec = GeneratorSpec(replace(config.generator, inference_engine=engine), config.environment, model_path)
    if not config.rollout.num_actors:
        return spec.build(client, tokenizer)
    spec.import_class()  # its declarations (metrics, for example) are needed in this process as well
    try:
        from skyrl_train.workers.ray import RayLink, RayPlacement
    except ImportError as error:
        raise ConfigError(
            "rollout.num_actors needs Ray: install the extra `ray` (./uvw run --extra ray ...)."
        ) from error
    # Actors run with this process's folder and search path, so that they find the user's files.
    setup = ActorSetup(
        spec=spec,
        tokenizer=tokenizer,
        folder=str(Path.cwd()),
        search_path=tuple(path for path in sys.path if path),
    )
    links = []
    for number in range(config.rollout.num_actors):
        log_file = None if logs is None else str(logs.absolute() / f"actor-{number}.log")
        placement = RayPlacement(num_cpus=config.rollout.ray_num_cpus, log_file=log_file)
        links.append(functools.partial(RayLink, GeneratorHost, placement))
    return RemoteGenerator(links, setup, client)


def build_stages(
    config: RunConfig,
    model_path: str,
    decode: Callable[[Sequence[int]], str],
    on_failure: OnFailure,
    reservation: Reservation | None = None,
) -> list[Stage]:
    """Build the stages that have their own resources, in their order. Nothing is started.

    Rewards come first: they decide which groups the later stages need to score.

    Args:
        decode: returns the text of tokens, without special tokens.
        on_failure: called with the group's name, the reason and the error for each failed attempt at a reward.
        reservation: of the run, with the GPUs of a reference policy's actors.

    Raises:
        ConfigError: the reward function cannot be found or does not fit its executor; Ray is asked for and not installed.
    """
    stages: list[Stage] = []
    reward, reference = config.rollout.stages.reward, config.rollout.stages.reference
    if reward.function is not None:
        stages.append(
            RewardStage(
                _reward_executor(reward, reward.function),
                decode,
                max_parallel=reward.max_parallel,
                attempts=1 + config.trainer.failures.max_rollout_retries,
                timeout_s=reward.timeout_s,
                on_failure=on_failure,
                path=reward.function,
            )
        )
    if derive.needs_reference(config.trainer.algorithm) and not derive.reference_is_colocated(config):
        stages.append(
            ReferenceStage(
                _reference_executor(config, model_path, reservation),
                max_parallel=reference.max_parallel,
                needed=worth_scoring(config.trainer.algorithm),
            )
        )
    if derive.has_replica(config):
        stages.append(
            ReplicaStage(
                _replica_executor(config, model_path, reservation),
                max_parallel=1,
                needed=worth_scoring(config.trainer.algorithm),
            )
        )
    return stages


def value_stages(algorithm: AlgorithmConfig, backend: TrainingBackend) -> list[Stage]:
    """Return the stage that asks the critic for values if ``backend`` has one, else no stage. It needs no start."""
    if not isinstance(backend, ActorCritic):
        return []

    async def forward(sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        return await asyncio.wrap_future(backend.submit_values(sequences))

    return [ValueStage(forward, needed=worth_scoring(algorithm))]


def _replica_executor(config: RunConfig, model_path: str, reservation: Reservation | None) -> Executor:
    placements = [] if reservation is None else reservation.placements(REPLICA)  # none on the CPU
    trainer, proximal = config.trainer, config.rollout.stages.proximal
    arguments = {
        "model_path": model_path,
        "lora": trainer.policy.model.lora if trainer.policy.model.lora.rank else None,
        "dtype": config.generator.inference_engine.dtype,  # of the weights that a sync brings
        "device": derive.replica_device(config),
        "temperature": config.generator.sampling_params.temperature,
        "micro_batch_tokens": trainer.micro_batch_tokens,
        "packing": trainer.packing,
        "fp32_head": trainer.policy.fp32_head,
    }
    resources = proximal.ray_num_cpus, derive.replica_num_gpus(config)
    return _executor(Work(POLICY_REPLICA, arguments), proximal.executor, 1, *resources, placements)


def _reference_executor(config: RunConfig, model_path: str, reservation: Reservation | None) -> Executor:
    placements = [] if reservation is None else reservation.placements(REFERENCE_ACTORS)  # none on the CPU
    trainer, reference = config.trainer, config.rollout.stages.reference
    device, temperature = derive.reference_device(config), config.generator.sampling_params.temperature
    if reference.executor != "workers":
        arguments = {
            "model_path": model_path,
            "dtype": trainer.policy.dtype,
            "device": device,
            "temperature": temperature,
            "micro_batch_tokens": trainer.micro_batch_tokens,
            "packing": trainer.packing,
            "fp32_head": trainer.policy.fp32_head,
        }
        # Each worker has a copy of the whole model, so groups are scored independently.
        resources = reference.ray_num_cpus, derive.reference_num_gpus(config)
        work = Work(FROZEN_POLICY, arguments)
        return _executor(work, reference.executor, reference.max_parallel, *resources, placements)
    # One thread of this process leads the workers, which share one model; it scores one group at a time.
    workers = replace(
        trainer.fsdp,
        num_workers=reference.num_workers,
        sequence_parallel_size=1,
        shard_size=None,
        cpu_offload=derive.reference_offload(config),
        ray_num_cpus=reference.ray_num_cpus,
        ray_num_gpus=derive.reference_num_gpus(config),
    )
    sharded = replace(trainer, device=device, fsdp=workers)
    arguments = {
        "model_path": model_path,
        "trainer": sharded,
        "temperature": temperature,
        "placements": placements or None,
    }
    return WorkerPool([ThreadWorker(Work(SHARDED_REFERENCE, arguments))])


def _reward_executor(reward: RewardStageConfig, function: str) -> Executor:
    asynchronous = is_async(function, reward.kwargs)
    executor = reward.executor or ("loop" if asynchronous else "thread")
    work = reward_work(function, reward.kwargs)
    if executor != "loop":
        return _executor(work, executor, reward.max_parallel, reward.ray_num_cpus, reward.ray_num_gpus)
    if not asynchronous:
        raise ConfigError(
            f"rollout.stages.reward.executor=loop, but {SETTING}={function!r} is not async: it would block everything else "
            "while it computes. Set executor=thread or process, or write it as async def."
        )
    return LoopExecutor(work)


def _executor(
    work: Work,
    executor: str,
    number: int,
    num_cpus: float,
    num_gpus: float,
    placements: Sequence[RayPlacement] = (),
) -> Executor:
    """Return a pool of ``number`` threads, processes or Ray actors, each with its own copy of the work.

    Args:
        placements: of the actors; empty: Ray places them by ``num_cpus`` and ``num_gpus``.
    """
    if executor == "thread":
        return WorkerPool([ThreadWorker(work) for _ in range(number)])
    if executor == "process":
        return WorkerPool([process_worker(work) for _ in range(number)])
    try:
        from skyrl_train.workers.ray import RayPlacement
    except ModuleNotFoundError as error:
        raise ConfigError(
            "A stage with executor=ray needs Ray: install the extra `ray` (./uvw run --extra ray ...)."
        ) from error
    placements = placements or [RayPlacement(num_cpus=num_cpus, num_gpus=num_gpus)] * number
    return WorkerPool([_ray_worker(work, placement) for placement in placements])


def _ray_worker(work: Work, placement: RayPlacement) -> Worker:
    from skyrl_train.workers.ray import START_LIMIT_S, RayBlockingLink

    return RemoteWorker(work, lambda: RayBlockingLink(WorkHost, placement), START_LIMIT_S)

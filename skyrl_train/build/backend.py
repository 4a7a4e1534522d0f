"""Builds the training backend: local or sharded, with a critic if the algorithm needs one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_train.build.processes import StartedProcesses
from skyrl_train.config import derive
from skyrl_train.config.cluster import CRITIC_RANKS, POLICY_RANKS
from skyrl_train.config.plan import Plan
from skyrl_train.config.schema import RunConfig, TrainingStrategy
from skyrl_train.errors import ConfigError
from skyrl_train.training.actor_critic import CRITIC_FOLDER, ActorCritic
from skyrl_train.training.backend import CriticBackend, TrainingBackend
from skyrl_train.training.local_backend import LocalBackend, LocalCritic, limit_memory
from skyrl_train.training.objective import Objective
from skyrl_train.training.process import TrainingProcess
from skyrl_train.training.process_backend import ProcessBackend, ProcessCritic

if TYPE_CHECKING:  # Ray need not be installed
    from skyrl_train.workers.reservation import Reservation


def build_backend(
    config: RunConfig,
    plan: Plan,
    model_path: str,
    logs: Path,
    started: StartedProcesses,
    reservation: Reservation | None = None,
) -> TrainingBackend:
    """Build the backend of the policy, and of the critic if there is one. Blocks while it loads their models.

    Args:
        logs: folder for the output of training processes.
        started: processes that were started earlier.
        reservation: of the run, with the resources of the ranks; None: each group of ranks reserves its own.

    Raises: like :func:`build_policy_backend`.
    """
    policy = build_policy_backend(config, plan, model_path, logs, started.policy, reservation)
    if not derive.needs_critic(config.trainer.algorithm):
        return policy
    try:
        trained = Path(model_path).with_name(CRITIC_FOLDER)  # of the run that this one starts from
        own = config.trainer.init_from is not None and trained.is_dir()
        path = str(trained) if own else config.trainer.critic.model.path or model_path
        whole = Objective(config.trainer.algorithm).needs_minibatch_statistics
        critic = build_critic(config, plan, path, policy, logs, started.critic, reservation)
        return ActorCritic(policy, critic, in_parts=config.trainer.update_epochs_per_batch == 1 and not whole)
    except BaseException:  # the policy's workers must not outlive a critic that could not be built
        policy.close()
        raise


def build_critic(
    config: RunConfig,
    plan: Plan,
    model_path: str,
    policy: TrainingBackend,
    logs: Path,
    process: TrainingProcess | None,
    reservation: Reservation | None = None,
) -> CriticBackend:
    """Build the backend of the critic from the model in ``model_path``; colocated, in the workers of ``policy``.

    Raises: like :func:`build_policy_backend`.
    """
    trainer = derive.critic_trainer(config.trainer)
    if trainer.strategy is TrainingStrategy.local:
        if process is not None or trainer.executor == "process":
            return ProcessCritic(model_path, trainer, plan.total_steps, process, logs / "critic.log")
        return LocalCritic(model_path, trainer, plan.total_steps)
    from skyrl_train.training.distributed.ray_backend import (  # Ray is installed: the policy has it
        RayBackend,
        RayCritic,
    )

    # None: the critic starts workers for itself.
    workers = None
    if derive.critic_is_colocated(config.trainer):
        assert isinstance(policy, RayBackend), "the same strategy"
        workers = policy.group
    placements = None if reservation is None else reservation.placements(CRITIC_RANKS)
    return RayCritic(model_path, trainer, plan.total_steps, trainer.seed, workers, logs / "critic", placements)


def build_policy_backend(
    config: RunConfig,
    plan: Plan,
    model_path: str,
    logs: Path,
    process: TrainingProcess | None,
    reservation: Reservation | None = None,
) -> TrainingBackend:
    """Build the backend of the policy. Blocks while it loads the model.

    Raises:
        ConfigError: a package that ``trainer.strategy`` needs is not installed, or Ray cannot be reached.
        ModelError: the model folder cannot be used.
        TrainingWorkerError: the cluster has no room for the workers.
    """
    trainer, temperature = config.trainer, config.generator.sampling_params.temperature
    if trainer.strategy is TrainingStrategy.local:
        arguments = (model_path, trainer, plan.total_steps, temperature, trainer.seed)
        fraction = derive.trainer_memory_fraction(config)
        if process is not None or trainer.executor == "process":
            return ProcessBackend(*arguments, process, logs / "training.log", fraction)
        if fraction is not None:
            limit_memory(trainer.device, fraction)
        return LocalBackend(*arguments)
    try:
        from skyrl_train.training.distributed.ray_backend import RayBackend
    except ImportError as error:
        raise ConfigError(
            "trainer.strategy=fsdp2 needs Ray: install the extra `ray` (./uvw run --extra ray ...)."
        ) from error
    # Settings of a reference policy in the same ranks: the policy's, except for its own offloading.
    reference = None
    if derive.reference_is_colocated(config):
        fsdp = dataclasses.replace(trainer.fsdp, cpu_offload=derive.reference_offload(config))
        reference = dataclasses.replace(trainer, fsdp=fsdp)
    placements = None if reservation is None else reservation.placements(POLICY_RANKS)
    log = logs / "training"
    return RayBackend(model_path, trainer, plan.total_steps, temperature, trainer.seed, reference, log, placements)

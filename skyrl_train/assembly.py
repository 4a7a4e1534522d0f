"""Puts a trainer together from a configuration: the one place that knows every implementation.

config ──> model folder ──> engines ──> client ──> generator ─┐
                        └─> backend ──> publisher ────────────┴──> trainer
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from skyrl_train.algorithms.advantages import ADVANTAGE_ESTIMATORS
from skyrl_train.algorithms.kl import KL_ESTIMATORS
from skyrl_train.algorithms.losses import POLICY_LOSSES
from skyrl_train.algorithms.off_policy.rejections import REJECTION_STATISTICS
from skyrl_train.algorithms.off_policy.weights import CORRECTIONS
from skyrl_train.algorithms.reductions import REDUCTIONS
from skyrl_train.concurrency import gather_or_cancel
from skyrl_train.config import derive
from skyrl_train.config.plan import Plan
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.config.schema.trainer import TrainerMode
from skyrl_train.config.schema.training import TrainingStrategy
from skyrl_train.config.transports import TRANSPORTS
from skyrl_train.engine_factory import build_engine, fleet_limits
from skyrl_train.environments.base import PromptRecord
from skyrl_train.errors import ConfigError
from skyrl_train.evaluation.engines import OwnEngines
from skyrl_train.fully_async_trainer import FullyAsyncTrainer
from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.generators.construction import GeneratorSpec
from skyrl_train.generators.remote.generator import RemoteGenerator
from skyrl_train.generators.remote.messages import Setup
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.engines.embedded.hosts import WorkerProcess
from skyrl_train.inference.interface import PauseMode
from skyrl_train.models.folder import check_place, load_tokenizer
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.observability.reporter import Reporter
from skyrl_train.observability.run_folder import RunFolder
from skyrl_train.observability.tracking import tracker_names
from skyrl_train.one_step_off_trainer import OneStepOffTrainer
from skyrl_train.partial_rollout_trainer import PartialRolloutTrainer
from skyrl_train.publication.factory import build_transport
from skyrl_train.publication.publisher import WeightPublisher
from skyrl_train.rollout.dataset import PromptDataset
from skyrl_train.rollout.stragglers import STRAGGLER_POLICIES
from skyrl_train.stage_factory import build_stages, value_stages
from skyrl_train.trainer import PPOTrainer
from skyrl_train.trainer_parts import TrainerParts
from skyrl_train.training.actor_critic import ActorCritic
from skyrl_train.training.backend import CriticBackend, TrainingBackend
from skyrl_train.training.checkpoint import Checkpoints, CheckpointStore
from skyrl_train.training.local_backend import LocalBackend, LocalCritic
from skyrl_train.training.objective import Objective
from skyrl_train.training.remote_checkpoint import RemoteCheckpointStore
from skyrl_train.training.schedule import SCHEDULES

if TYPE_CHECKING:  # it imports torchdata, which only a streaming run needs
    from skyrl_train.rollout.streaming import StreamingPrompts


async def build_trainer(
    config: RunConfig,
    plan: Plan,
    dataset: PromptDataset | StreamingPrompts,
    run_folder: RunFolder,
    reporter: Reporter,
    workers: Sequence[WorkerProcess] = (),
    evaluation_prompts: Sequence[PromptRecord] = (),
) -> PPOTrainer:
    """Builds everything and starts the engines; the trainer's ``train`` tears it down again.

    Args:
        workers: processes for embedded engines that were started earlier.

    Raises:
        ConfigError, ModelError, EngineError, CheckpointError: a part cannot be built; those already started are stopped.
    """
    checkpoints = await asyncio.to_thread(open_checkpoints, config, run_folder.checkpoints)
    model_path = await asyncio.to_thread(prepare_model, config, run_folder.model)
    tokenizer = load_tokenizer(model_path)
    number, own = config.generator.inference_engine.num_engines, config.trainer.eval.num_engines
    client = build_client(config, plan, tokenizer, model_path, range(number), workers)
    clients = [client]
    if own:
        clients.append(build_client(config, plan, tokenizer, model_path, range(number, number + own), workers))
    generators = [build_generator(config, plan, each, tokenizer, model_path) for each in clients]
    stages = build_stages(config, model_path, client.decode, reporter.attempt_failed)
    # Engines and stages import and load while the backend does.
    starting = asyncio.ensure_future(
        gather_or_cancel([*(each.start() for each in clients), *(stage.start() for stage in stages)])
    )
    backend: TrainingBackend | None = None
    try:
        backend = await asyncio.to_thread(build_backend, config, plan, model_path)
        await starting
        stages += value_stages(config.trainer.algorithm, backend)
    except BaseException:
        if backend is not None:
            await asyncio.to_thread(backend.close)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await asyncio.gather(*(each.teardown() for each in clients), *(stage.aclose() for stage in stages))
        raise
    publishers = [
        WeightPublisher(each, build_transport(config), PauseMode(config.generator.pause_mode)) for each in clients
    ]
    parts = TrainerParts(
        client=client,
        generator=generators[0],
        backend=backend,
        publisher=publishers[0],
        dataset=dataset,
        checkpoints=checkpoints,
        reporter=reporter,
        stages=stages,
        evaluation_engines=OwnEngines(generators[1], clients[1], publishers[1], backend.stage) if own else None,
        evaluation_prompts=evaluation_prompts,
        spill_folder=run_folder.path / "spill" if config.rollout.buffer_memory_bytes is not None else None,
        export_folder=run_folder.path / "policy",
    )
    return trainer_class(config.trainer.mode)(config, plan, parts)


def known_names() -> dict[str, list[str]]:
    """By setting, the names that its registry knows."""
    return {
        "trainer.algorithm.advantage_estimator": ADVANTAGE_ESTIMATORS.names(),
        "trainer.algorithm.kl_estimator_type": KL_ESTIMATORS.names(),
        "trainer.algorithm.off_policy_correction.tis_ratio_type": CORRECTIONS.names(),
        "trainer.algorithm.off_policy_correction.rejections.statistic": REJECTION_STATISTICS.names(),
        "trainer.algorithm.policy_loss_type": POLICY_LOSSES.names(),
        "trainer.algorithm.loss_reduction": REDUCTIONS.names(),
        "trainer.policy.optimizer_config.scheduler": SCHEDULES.names(),
        "trainer.critic.optimizer_config.scheduler": SCHEDULES.names(),
        "trainer.fully_async.straggler_policy": STRAGGLER_POLICIES.names(),
        "trainer.trackers": tracker_names(),
        "generator.weight_transport": list(TRANSPORTS),
    }


def check_objective(config: RunConfig) -> None:
    """Raises:
    ConfigError: the loss cannot be built, or looks at whole minibatches, which ``streaming_min_groups`` does not wait for.
    """
    groups = derive.streaming_min_groups(config)
    if Objective(config.trainer.algorithm).needs_minibatch_facts and groups is not None:
        raise ConfigError(
            f"trainer.fully_async.streaming_min_groups={groups}: the configured loss or correction looks at all groups of a "
            "step before it trains on any. Set streaming_min_groups=null."
        )


def check_model_path(config: RunConfig) -> None:
    """Raises:
    ModelError: the path of the policy's or the critic's model looks like a folder, and there is none. (A hub name is asked
        for later.)
    """
    for path in (config.trainer.policy.model.path, config.trainer.critic.model.path):
        if path is not None:
            check_place(path)


def trainer_class(mode: TrainerMode) -> type[PPOTrainer]:
    """The trainer behind ``trainer.mode``."""
    return {
        TrainerMode.sync: PPOTrainer,
        TrainerMode.one_step_off: OneStepOffTrainer,
        TrainerMode.fully_async: FullyAsyncTrainer,
        TrainerMode.partial_rollout: PartialRolloutTrainer,
    }[mode]


def prepare_model(config: RunConfig, folder: Path) -> str:
    """The model folder to start from: the configured one, or one built in ``folder``."""
    if config.trainer.policy.model.path is not None:
        return config.trainer.policy.model.path
    build_model_folder(config.trainer.policy.model.build, folder, config.trainer.seed)
    return str(folder)


def open_checkpoints(config: RunConfig, folder: Path) -> Checkpoints:
    """The run's checkpoints: in ``folder``, or behind ``trainer.ckpt_path``, with a copy of the newest in ``folder``.

    Raises:
        ConfigError: the URL cannot be opened, or holds checkpoints of another run.
        CheckpointError: it cannot be reached.
    """
    if config.trainer.ckpt_path is None:
        return CheckpointStore(folder, config.trainer.max_ckpts_to_keep)
    remote = RemoteCheckpointStore(config.trainer.ckpt_path, config, CheckpointStore(folder, max_to_keep=1))
    remote.check()
    return remote


def build_client(
    config: RunConfig,
    plan: Plan,
    tokenizer: PreTrainedTokenizerBase,
    model_path: str,
    numbers: Sequence[int],
    workers: Sequence[WorkerProcess] = (),
) -> InferenceEngineClient:
    """A client with the engines of these numbers, none of them started."""
    engine, chat = config.generator.inference_engine, config.generator.chat
    return InferenceEngineClient(
        [
            build_engine(config, plan, model_path, index, workers[index] if index < len(workers) else None)
            for index in numbers
        ],
        tokenizer,
        model_path,
        pause_timeout_s=config.generator.pause_timeout_s,
        engine_wait_timeout_s=engine.fleet.wait_timeout_s,
        limits=fleet_limits(engine),
        probe_interval_s=engine.fleet.probe_interval_s,
        tool_parser=chat.tool_parser,
        reasoning_parser=chat.reasoning_parser,
        replay=config.rollout.replay,
    )


def build_generator(
    config: RunConfig, plan: Plan, client: InferenceEngineClient, tokenizer: PreTrainedTokenizerBase, model_path: str
) -> GeneratorInterface:
    """The configured generator: here, or with ``rollout.num_actors`` in actors."""
    generator = dataclasses.replace(
        config.generator,
        inference_engine=dataclasses.replace(config.generator.inference_engine, max_model_len=plan.max_model_len),
    )
    spec = GeneratorSpec(generator, config.environment, model_path)
    return _in_actors(config, spec, client, tokenizer) if config.rollout.num_actors else spec.build(client, tokenizer)


def _in_actors(
    config: RunConfig, spec: GeneratorSpec, client: InferenceEngineClient, tokenizer: PreTrainedTokenizerBase
) -> GeneratorInterface:
    spec.import_class()  # what it declares, its metrics for one, is needed here as well
    try:
        from skyrl_train.generators.remote.ray_link import RayLink
        from skyrl_train.inference.engines.ray_actor import RayPlacement
    except ImportError as error:
        raise ConfigError("rollout.num_actors needs Ray: install skyrl-train[ray].") from error
    setup = Setup(
        spec=spec,
        tokenizer=tokenizer,
        tool_parser=config.generator.chat.tool_parser,
        reasoning_parser=config.generator.chat.reasoning_parser,
        folder=str(Path.cwd()),
        search_path=tuple(path for path in sys.path if path),
    )
    placement = RayPlacement(num_cpus=config.rollout.ray_num_cpus)
    return RemoteGenerator([lambda: RayLink(placement)] * config.rollout.num_actors, setup, client)


def build_backend(config: RunConfig, plan: Plan, model_path: str) -> TrainingBackend:
    """What trains the policy, and the critic where there is one. Blocks while it loads their models.

    Raises: as of :func:`build_policy_backend`.
    """
    policy = build_policy_backend(config, plan, model_path)
    if not derive.needs_critic(config.trainer.algorithm):
        return policy
    try:
        return ActorCritic(policy, build_critic(config, plan, config.trainer.critic.model.path or model_path, policy))
    except BaseException:
        policy.close()
        raise


def build_critic(config: RunConfig, plan: Plan, model_path: str, policy: TrainingBackend) -> CriticBackend:
    """What trains the critic, from the model in ``model_path``, in the workers of ``policy`` if they are to hold it; errors as
    of :func:`build_policy_backend`."""
    trainer = derive.critic_trainer(config.trainer)
    if trainer.strategy is TrainingStrategy.local:
        return LocalCritic(model_path, trainer, plan.total_steps)
    from skyrl_train.training.distributed.ray_backend import RayBackend, RayCritic  # the policy's backend has found it

    workers = None
    if derive.critic_is_colocated(config.trainer):
        assert isinstance(policy, RayBackend), "the same strategy"
        workers = policy.group
    return RayCritic(model_path, trainer, plan.total_steps, trainer.seed, workers)


def build_policy_backend(config: RunConfig, plan: Plan, model_path: str) -> TrainingBackend:
    """What trains the policy. Blocks while it loads the model.

    Raises:
        ConfigError: what ``trainer.strategy`` needs is not installed, or Ray cannot be reached.
        ModelError: the model folder cannot be used.
        TrainingWorkerError: the cluster has no room for the workers.
    """
    trainer, temperature = config.trainer, config.generator.sampling_params.temperature
    if trainer.strategy is TrainingStrategy.local:
        return LocalBackend(model_path, trainer, plan.total_steps, temperature, trainer.seed)
    try:
        from skyrl_train.training.distributed.ray_backend import RayBackend
    except ImportError as error:
        raise ConfigError(
            "trainer.strategy=fsdp2 needs Ray: install the extra `ray` (./uvw run --extra ray ...)."
        ) from error
    reference = None
    if derive.reference_is_colocated(config):
        fsdp = dataclasses.replace(trainer.fsdp, cpu_offload=derive.reference_offload(config))
        reference = dataclasses.replace(trainer, fsdp=fsdp)
    return RayBackend(model_path, trainer, plan.total_steps, temperature, trainer.seed, reference)

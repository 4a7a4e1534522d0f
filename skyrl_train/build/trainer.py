"""Builds a trainer with all its components from a configuration, and starts the engines.

config ──> model folder ──> engines ──> client ──> generator, stages ─┐
                        └─> backend ──> weight syncer ────────────────┴──> trainer
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from skyrl_train.build.backend import build_backend
from skyrl_train.build.engines import build_client, build_transport
from skyrl_train.build.export import export_in_process, start_from_run
from skyrl_train.build.processes import StartedProcesses
from skyrl_train.build.rollout import build_generator, build_stages, value_stages
from skyrl_train.colocation import interrupt
from skyrl_train.config import derive
from skyrl_train.config.cluster import (
    CRITIC_RANKS,
    ENGINES,
    POLICY_RANKS,
    REFERENCE_ACTORS,
    REPLICA,
    ClusterNeeds,
    cluster_needs,
)
from skyrl_train.config.import_path import import_name
from skyrl_train.config.plan import Plan
from skyrl_train.config.schema import RunConfig
from skyrl_train.environments.base import PromptRecord
from skyrl_train.errors import ConfigError
from skyrl_train.evaluation.engines import OwnEngines
from skyrl_train.events.log import NO_EVENTS, EventLog
from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.engines.embedded.engine import EngineProcess
from skyrl_train.models.folder import load_tokenizer
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.observability.gpus import training_flops
from skyrl_train.observability.reporter import Reporter
from skyrl_train.observability.run_folder import ORIGIN, RunFolder
from skyrl_train.rollout.data.dataset import PromptDataset, check_template
from skyrl_train.rollout.stages.logprobs import ReplicaStage
from skyrl_train.rollout.stages.pipeline import Stage
from skyrl_train.runtime.concurrency import close_all, gather_or_cancel
from skyrl_train.trainer import PPOTrainer, TrainerComponents
from skyrl_train.training.backend import TrainingBackend
from skyrl_train.training.checkpoint import Checkpoints, CheckpointStore
from skyrl_train.training.remote_checkpoint import RemoteCheckpointStore
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.syncer import WeightSyncer
from skyrl_train.weight_sync.update import WeightTransport

if TYPE_CHECKING:  # it imports torchdata, which only a streaming run needs
    from skyrl_train.rollout.data.streaming import StreamingPrompts
    from skyrl_train.workers.ray import RayPlacement  # Ray need not be installed
    from skyrl_train.workers.reservation import Reservation


async def build_trainer(
    config: RunConfig,
    plan: Plan,
    dataset: PromptDataset | StreamingPrompts,
    run_folder: RunFolder,
    reporter: Reporter,
    started: StartedProcesses | None = None,
    evaluation_prompts: Sequence[PromptRecord] = (),
) -> PPOTrainer:
    """Build everything and start the engines; the trainer's ``train`` tears it down again.

    Args:
        started: processes for embedded engines and for training that were started earlier.

    Raises:
        ConfigError, ModelError, EngineError, CheckpointError: a component cannot be built; the started ones are stopped.
    """
    checkpoints = await asyncio.to_thread(open_checkpoints, config, run_folder.checkpoints)
    with reporter.start_up("model and tokenizer"):
        model_path = await asyncio.to_thread(prepare_model, config, run_folder.model, checkpoints)
        tokenizer = load_tokenizer(model_path, config.generator.chat_template)
        check_template(dataset, tokenizer)
        check_template(evaluation_prompts, tokenizer)
    started = started or StartedProcesses()
    workers = started.engines
    with ExitStack() as undo:
        reservation: Reservation | None = None
        placements: list[RayPlacement] = []
        if (actors := _reserved_actors(config)) is not None:
            with reporter.start_up("resources of the Ray cluster"):
                reservation = await asyncio.to_thread(_reserve, config, actors)
                undo.callback(reservation.release)
                placements = await asyncio.to_thread(_engine_placements, config, reservation)
        number, of_evaluation = config.generator.inference_engine.num_engines, derive.num_evaluation_engines(config)
        logs, events = run_folder.logs, run_folder.events
        run = _engine_group(config, plan, tokenizer, model_path, range(number), workers, logs, events, placements)
        evaluation = None
        if of_evaluation:
            # Numbers continue after the run's engines, so that seeds, remote URLs and started processes are not shared.
            numbers = range(number, number + of_evaluation)
            # Its requests and pauses would look like the run's, so they are not recorded.
            evaluation = _engine_group(
                config, plan, tokenizer, model_path, numbers, workers, logs, NO_EVENTS, placements
            )
        stages = build_stages(config, model_path, run.client.decode, reporter.attempt_failed, reservation)
        replica = next((stage.load for stage in stages if isinstance(stage, ReplicaStage)), None)
        pause_mode = PauseMode(config.generator.pause_mode)
        clients = [group.client for group in (run, evaluation) if group is not None]
        # Slow to load: the engines in their processes, the backend in a thread. They load at the same time where they may.
        with reporter.start_up("engines and training backend"):
            build = functools.partial(build_backend, config, plan, model_path, logs, started, reservation)
            backend = await _start(config, clients, stages, build)
        try:
            # The evaluation's engines get weights by their own syncer, so that they need not pause with the run's engines.
            evaluation_engines = None
            if evaluation is not None:
                syncer = WeightSyncer(evaluation.client, evaluation.transport, backend.stage, pause_mode)
                evaluation_engines = OwnEngines(evaluation.generator, evaluation.client, syncer)
            parts = TrainerComponents(
                client=run.client,
                generator=run.generator,
                backend=backend,
                syncer=WeightSyncer(
                    run.client, run.transport, backend.stage, pause_mode, events=events, replica=replica
                ),
                dataset=dataset,
                checkpoints=checkpoints,
                reporter=reporter,
                stages=[*stages, *value_stages(config.trainer.algorithm, backend)],
                evaluation_engines=evaluation_engines,
                evaluation_prompts=evaluation_prompts,
                spill_folder=run_folder.path / "spill" if config.rollout.buffer_memory_bytes is not None else None,
                export_folder=run_folder.path / "policy",
                export_checkpoint=functools.partial(export_in_process, run_folder),
                events=events,
                training_flops=await asyncio.to_thread(training_flops, config),
                release_resources=lambda: None if reservation is None else reservation.release(),
            )
            trainer = trainer_class(config.trainer.mode)(config, plan, parts)
            undo.pop_all()
            return trainer
        except BaseException:
            await _stop(clients, stages, backend)
            raise


def _reserved_actors(config: RunConfig) -> ClusterNeeds | None:
    """Return the training ranks of a run and its actors with GPUs in Ray; None if it has none of them."""
    needs, ranks = cluster_needs(config), (POLICY_RANKS, CRITIC_RANKS)
    actors = [each for each in needs.actors if each.role in (*ranks, REFERENCE_ACTORS, REPLICA, ENGINES)]
    wanted = any(each.gpus or each.role in ranks for each in actors)
    return replace(needs, actors=tuple(actors)) if wanted else None


def _reserve(config: RunConfig, needs: ClusterNeeds) -> Reservation:
    try:
        from skyrl_train.workers.reservation import Reservation
    except ImportError as error:
        raise ConfigError(
            f"{' and '.join(each.role for each in needs.actors)} need Ray: install the extra `ray` (./uvw run --extra ray ...)."
        ) from error
    keys = "trainer.fsdp.num_workers, generator.inference_engine.num_engines or the CPUs of each (ray_num_cpus)"
    return Reservation(needs, config.trainer.fsdp.start_timeout_s, keys)


def _engine_placements(config: RunConfig, reservation: Reservation) -> list[RayPlacement]:
    """Return where the engines' actors are, by their numbers; empty where they have no GPUs. Blocks."""
    if not derive.engines_share_ranks(config):
        return reservation.placements(ENGINES)
    engine = config.generator.inference_engine
    return reservation.beside_ranks(engine.num_engines, derive.engine_num_gpus(engine))


@dataclass(frozen=True)
class _EngineGroup:
    """Some engines with their client, generator and weight transport. A run has one group; its evaluation may have another."""

    client: InferenceEngineClient
    generator: GeneratorInterface
    transport: WeightTransport


def _engine_group(
    config: RunConfig,
    plan: Plan,
    tokenizer: PreTrainedTokenizerBase,
    model_path: str,
    numbers: Sequence[int],
    workers: Sequence[EngineProcess],
    logs: Path,
    events: EventLog,
    placements: Sequence[RayPlacement],
) -> _EngineGroup:
    """Build the group of the engines with these numbers. Nothing is started."""
    client = build_client(config, plan, tokenizer, model_path, numbers, workers, logs, events, placements)
    generator = build_generator(config, plan, client, tokenizer, model_path, logs)
    return _EngineGroup(client, generator, build_transport(config))


async def _start(
    config: RunConfig,
    clients: Sequence[InferenceEngineClient],
    stages: Sequence[Stage],
    build: Callable[[], TrainingBackend],
) -> TrainingBackend:
    """Start engines and stages while a thread builds the backend. On an error, stop everything that was started.

    Where engines must start first, stages and backend load when all of them run, and asleep if they share its devices.
    """
    # Separate tasks, because the backend may fail first; then these are cancelled.
    starting = [asyncio.ensure_future(gather_or_cancel(client.start() for client in clients))]
    backend: TrainingBackend | None = None
    try:
        if derive.engines_start_first(config):
            await starting[0]
            if config.trainer.placement.colocate_all:
                await gather_or_cancel(interrupt(client, config) for client in clients)
        starting.append(asyncio.ensure_future(gather_or_cancel(stage.start() for stage in stages)))
        backend = await asyncio.to_thread(build)
        for task in starting:
            await task
        return backend
    except BaseException:
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        await _stop(clients, stages, backend)
        raise


async def _stop(
    clients: Sequence[InferenceEngineClient], stages: Sequence[Stage], backend: TrainingBackend | None
) -> None:
    """Stop all of them, even if one raises. The caller reports the error that ended the building, not these."""
    closings: list[Callable[[], Awaitable[None]]]
    closings = [*(client.teardown for client in clients), *(stage.aclose for stage in stages)]
    if backend is not None:
        closings.append(lambda: asyncio.to_thread(backend.close))
    await close_all(closings)


def trainer_class(mode: str) -> type[PPOTrainer]:
    """Return the trainer that ``trainer.mode`` names: a built-in mode, or the import path of a subclass of PPOTrainer.

    Raises:
        ConfigError: there is no such mode or class, or the class is no subclass of PPOTrainer.
    """
    built_in = derive.trainer_mode(mode)
    cls: type[PPOTrainer] = import_name(derive.TRAINER_CLASSES[built_in] if mode == built_in else mode, "trainer.mode")
    return cls


def prepare_model(config: RunConfig, folder: Path, checkpoints: Checkpoints | None = None) -> str:
    """Return the model folder to start from: the configured one, or a new one in ``folder``.

    Args:
        checkpoints: of the run, which may have begun on another machine.

    Raises:
        ConfigError, CheckpointError, ModelError: the model cannot be built, or ``trainer.init_from`` cannot be read.
    """
    if config.trainer.init_from is not None:
        # A run that began on another machine starts from the same policy here, which is also the reference of KL terms.
        began = checkpoints.origin_step() if isinstance(checkpoints, RemoteCheckpointStore) else None
        start_from_run(config.trainer.init_from, config, folder, began)
        return str(folder)
    if config.trainer.policy.model.path is not None:
        return config.trainer.policy.model.path
    build_model_folder(config.trainer.policy.model.build, folder, config.trainer.seed)
    return str(folder)


def open_checkpoints(config: RunConfig, folder: Path) -> Checkpoints:
    """Open the run's checkpoints: in ``folder``, or at the URL of ``trainer.ckpt_path`` with a copy of the newest in ``folder``.

    Raises:
        ConfigError: the URL cannot be opened, or holds checkpoints of another run.
        CheckpointError: the URL cannot be reached.
    """
    if config.trainer.ckpt_path is None:
        return CheckpointStore(folder, config.trainer.max_ckpts_to_keep)
    local = CheckpointStore(folder, max_to_keep=1)
    remote = RemoteCheckpointStore(config.trainer.ckpt_path, config, local, folder.with_name(ORIGIN))
    remote.check()
    return remote

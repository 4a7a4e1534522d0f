"""Puts a trainer together from a configuration; the parts come from their factories.

config ──> model folder ──> engines ──> client ──> generator ─┐
                        └─> backend ──> publisher ────────────┴──> trainer
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from skyrl_train.backend_factory import build_backend
from skyrl_train.concurrency import close_all, gather_or_cancel
from skyrl_train.config.plan import Plan
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.config.schema.trainer import TrainerMode
from skyrl_train.engine_factory import build_client
from skyrl_train.environments.base import PromptRecord
from skyrl_train.evaluation.engines import OwnEngines
from skyrl_train.fully_async_trainer import FullyAsyncTrainer
from skyrl_train.generator_factory import build_generator
from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.engines.embedded.hosts import WorkerProcess
from skyrl_train.inference.interface import PauseMode
from skyrl_train.models.folder import load_tokenizer
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.observability.reporter import Reporter
from skyrl_train.observability.run_folder import RunFolder
from skyrl_train.one_step_off_trainer import OneStepOffTrainer
from skyrl_train.partial_rollout_trainer import PartialRolloutTrainer
from skyrl_train.publication.factory import build_transport
from skyrl_train.publication.publisher import WeightPublisher
from skyrl_train.rollout.dataset import PromptDataset
from skyrl_train.rollout.stages import Stage
from skyrl_train.stage_factory import build_stages, value_stages
from skyrl_train.trainer import PPOTrainer
from skyrl_train.trainer_parts import TrainerParts
from skyrl_train.training.backend import TrainingBackend
from skyrl_train.training.checkpoint import Checkpoints, CheckpointStore
from skyrl_train.training.remote_checkpoint import RemoteCheckpointStore

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
    number, of_evaluation = config.generator.inference_engine.num_engines, config.trainer.eval.num_engines
    run = _side(config, plan, tokenizer, model_path, range(number), workers)
    evaluation = None
    if of_evaluation:
        evaluation = _side(config, plan, tokenizer, model_path, range(number, number + of_evaluation), workers)
    stages = build_stages(config, model_path, run.client.decode, reporter.attempt_failed)
    clients = [side.client for side in (run, evaluation) if side is not None]
    backend = await _start(clients, stages, lambda: build_backend(config, plan, model_path))
    try:
        parts = TrainerParts(
            client=run.client,
            generator=run.generator,
            backend=backend,
            publisher=run.publisher,
            dataset=dataset,
            checkpoints=checkpoints,
            reporter=reporter,
            stages=[*stages, *value_stages(config.trainer.algorithm, backend)],
            evaluation_engines=None if evaluation is None else evaluation.own_engines(backend),
            evaluation_prompts=evaluation_prompts,
            spill_folder=run_folder.path / "spill" if config.rollout.buffer_memory_bytes is not None else None,
            export_folder=run_folder.path / "policy",
        )
        return trainer_class(config.trainer.mode)(config, plan, parts)
    except BaseException:
        await _stop(clients, stages, backend)
        raise


@dataclass(frozen=True)
class _Side:
    """Some engines, what prompts them and what brings them weights. A run has one; its evaluation may have another."""

    client: InferenceEngineClient
    generator: GeneratorInterface
    publisher: WeightPublisher

    def own_engines(self, backend: TrainingBackend) -> OwnEngines:
        return OwnEngines(self.generator, self.client, self.publisher, backend.stage)


def _side(
    config: RunConfig,
    plan: Plan,
    tokenizer: PreTrainedTokenizerBase,
    model_path: str,
    numbers: Sequence[int],
    workers: Sequence[WorkerProcess],
) -> _Side:
    """Of the engines with these numbers; nothing is started."""
    client = build_client(config, plan, tokenizer, model_path, numbers, workers)
    generator = build_generator(config, plan, client, tokenizer, model_path)
    publisher = WeightPublisher(client, build_transport(config), PauseMode(config.generator.pause_mode))
    return _Side(client, generator, publisher)


async def _start(
    clients: Sequence[InferenceEngineClient], stages: Sequence[Stage], build: Callable[[], TrainingBackend]
) -> TrainingBackend:
    """Engines and stages import and load while the backend does, in a thread. All of them are up, or none is."""
    starting = asyncio.ensure_future(
        gather_or_cancel([*(client.start() for client in clients), *(stage.start() for stage in stages)])
    )
    backend: TrainingBackend | None = None
    try:
        backend = await asyncio.to_thread(build)
        await starting
        return backend
    except BaseException:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await _stop(clients, stages, backend)
        raise


async def _stop(
    clients: Sequence[InferenceEngineClient], stages: Sequence[Stage], backend: TrainingBackend | None
) -> None:
    """Ends all of them, whatever one of them raises: what ended the building is why there is no run."""
    closings: list[Callable[[], Awaitable[None]]]
    closings = [*(client.teardown for client in clients), *(stage.aclose for stage in stages)]
    if backend is not None:
        closings.append(lambda: asyncio.to_thread(backend.close))
    await close_all(closings)


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

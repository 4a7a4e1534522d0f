"""Trains a real policy in virtual time: a run is a function of its seed, and as stale as its workload makes it.

    real trainer, client, generator and environment ── TimedEngine (real tokens, versions, log-probs, swaps)
                                                    └─ TimedBackend (real updates)

On a machine where generation and training are quick and alike, no group is ever late, and which one is depends on the load.
Here the seconds are modelled and the tokens are real, so that learning under staleness can be compared between settings.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from skyrl_train.assembly import prepare_model, trainer_class
from skyrl_train.config.compose import compose
from skyrl_train.config.plan import Plan, resolve
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.generator_factory import build_generator
from skyrl_train.inference.interface import PauseMode
from skyrl_train.models.folder import load_tokenizer
from skyrl_train.observability.run_folder import RunFolder
from skyrl_train.publication.factory import build_transport
from skyrl_train.publication.publisher import WeightPublisher
from skyrl_train.rollout.dataset import PromptDataset, load_dataset
from skyrl_train.simulation.clock import VirtualTimeLoop, run_in_virtual_time
from skyrl_train.simulation.engine import EngineSpeed
from skyrl_train.simulation.learning_parts import SlowToolsClient, TimedBackend, TimedEngine
from skyrl_train.simulation.lengths import Lengths
from skyrl_train.simulation.outcome import Steps
from skyrl_train.simulation.run import PROBE_INTERVAL_S, StepLog
from skyrl_train.simulation.training import TrainingSpeed
from skyrl_train.trainer_parts import TrainerParts
from skyrl_train.training.checkpoint import CheckpointStore


@dataclass(frozen=True)
class LearningTask:
    """A recipe with ``settings`` over it, and how long its work takes. ``tools_s``: seconds of the calls between turns."""

    recipe: str
    settings: tuple[str, ...]
    engine: EngineSpeed
    training: TrainingSpeed
    tools_s: Lengths | None = None


@dataclass(frozen=True)
class LearningOutcome(Steps):
    """What a run did, and what it learned."""

    plan: Plan

    @property
    def rewards(self) -> list[float]:
        """The mean reward of the groups of each step."""
        return [record.metrics["reward/mean"] for record in self.records]

    def last_reward(self, share: float = 0.1) -> float:
        """The mean of the last steps' rewards."""
        return fmean(self.rewards[-max(1, round(share * len(self.rewards))) :])

    @property
    def dropped_share(self) -> float:
        """Groups that were given up, of all that were trained or given up."""
        dropped, trained = (self.records[-1].metrics[f"async/{name}"] for name in ("dropped", "trained"))
        return dropped / (dropped + trained)


def learn(task: LearningTask, *overrides: str, edge: int = 0) -> LearningOutcome:
    """Trains ``task`` with the trainer and the settings that ``overrides`` name.

    Raises:
        ConfigError: the settings cannot work.
        SimulationError: a deadlock.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = compose(task.recipe, [*_settings(task, Path(folder)), *task.settings, *overrides])
        dataset = load_dataset(config.data, config.environment)
        plan = resolve(config, dataset.num_prompts)
        return run_in_virtual_time(lambda loop: _learn(task, config, plan, dataset, Path(folder), loop, edge))


def _settings(task: LearningTask, folder: Path) -> list[str]:
    return [
        f"trainer.run_dir={folder}",
        "trainer.ckpt_interval=0",
        "trainer.trackers=[]",
        "trainer.failures.stuck_after_s=1e9",  # the loop finds deadlocks at once; virtual hours are no sign of one
        f"generator.inference_engine.max_num_seqs={task.engine.slots}",
        "rollout.replay=false",
    ]


async def _learn(
    task: LearningTask,
    config: RunConfig,
    plan: Plan,
    dataset: PromptDataset,
    path: Path,
    loop: VirtualTimeLoop,
    edge: int,
) -> LearningOutcome:
    folder = RunFolder(path, config)
    model_path = prepare_model(config, folder.model)
    tokenizer = load_tokenizer(model_path)
    client = SlowToolsClient(
        [TimedEngine(config, plan, model_path, task.engine)],
        tokenizer,
        model_path,
        pause_timeout_s=float("inf"),
        engine_wait_timeout_s=float("inf"),
        probe_interval_s=PROBE_INTERVAL_S,
        replay=config.rollout.replay,
        clock=loop.time,
    )
    client.tools_s = task.tools_s
    backend = TimedBackend(model_path, config, plan, task.training, loop.spend)
    log = StepLog(config, folder, plan.total_steps, loop.time)
    parts = TrainerParts(
        client=client,
        generator=build_generator(config, plan, client, tokenizer, model_path),
        backend=backend,
        publisher=WeightPublisher(
            client, build_transport(config), PauseMode(config.generator.pause_mode), clock=loop.time
        ),
        dataset=dataset,
        checkpoints=CheckpointStore(folder.checkpoints, max_to_keep=1),
        reporter=log,
        clock=loop.time,
    )
    try:
        await client.start()
        await trainer_class(config.trainer.mode)(config, plan, parts).train()
    finally:
        folder.close()
    return LearningOutcome(log.records, backend.steps, log.began_s, edge, plan)

"""Runs a real trainer on modelled parts, in virtual time, and says what it did."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich.console import Console

from skyrl_train.assembly import trainer_class
from skyrl_train.config.compose import compose
from skyrl_train.config.plan import Plan, resolve
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.interface import PauseMode
from skyrl_train.models.tiny import character_tokenizer
from skyrl_train.observability.reporter import Reporter
from skyrl_train.observability.run_folder import RunFolder
from skyrl_train.publication.publisher import WeightPublisher
from skyrl_train.rollout.dataset import PromptDataset, PromptRecord
from skyrl_train.rollout.group import RolloutGroup
from skyrl_train.simulation.clock import VirtualTimeLoop, run_in_virtual_time
from skyrl_train.simulation.engine import ModelledEngine
from skyrl_train.simulation.generator import ModelledGenerator
from skyrl_train.simulation.outcome import Outcome, StepRecord, Workload
from skyrl_train.simulation.training import ESTIMATOR, ModelledBackend, ModelledTransport
from skyrl_train.trainer import PPOTrainer
from skyrl_train.trainer_parts import TrainerParts
from skyrl_train.training.checkpoint import CheckpointStore

_PROMPTS = 4096
PROBE_INTERVAL_S = 1e6  # engines do not die here


class _Client(InferenceEngineClient):
    """Modelled tokens mean nothing: no text is made of them."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""


class StepLog(Reporter):
    """Keeps what a run reports, in memory."""

    def __init__(self, config: RunConfig, folder: RunFolder, total_steps: int, clock: Callable[[], float]) -> None:
        super().__init__(config, folder, Console(quiet=True), total_steps)
        self._clock = clock
        self.began_s = 0.0
        self.records: list[StepRecord] = []

    def begin(self, step: int) -> None:
        self.began_s = self._clock()

    def step(self, step: int, batch: Sequence[RolloutGroup], metrics: Mapping[str, float], **_: Any) -> None:
        lags = tuple(group.lag(step) for group in batch)
        self.records.append(StepRecord(step, self._clock(), time.process_time(), lags, dict(metrics)))


def simulate(workload: Workload, *overrides: str, edge: int = 0) -> Outcome:
    """Trains ``workload.steps`` steps with the trainer and the settings that ``overrides`` name.

    Raises:
        ConfigError: the settings cannot work.
        SimulationError: a deadlock.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = compose("quickstart", [*_settings(workload, Path(folder)), *overrides])
        plan = resolve(config, _PROMPTS)
        return run_in_virtual_time(lambda loop: _Simulation(workload, config, plan, Path(folder), loop).run(edge))


def _settings(workload: Workload, folder: Path) -> list[str]:
    return [
        f"trainer.policy_mini_batch_size={workload.batch_groups}",
        f"trainer.max_steps={workload.steps}",
        f"trainer.run_dir={folder}",
        "trainer.ckpt_interval=0",
        "trainer.trackers=[]",
        "trainer.failures.stuck_after_s=1e9",  # the loop finds deadlocks at once; virtual hours are no sign of one
        f"trainer.algorithm.advantage_estimator={ESTIMATOR}",
        f"generator.n_samples_per_prompt={workload.samples}",
        f"data.generate={_PROMPTS}",
    ]


class _Simulation:
    """One run: the parts, and what to read from them afterwards."""

    def __init__(self, workload: Workload, config: RunConfig, plan: Plan, folder: Path, loop: VirtualTimeLoop) -> None:
        self.workload = workload
        self.plan = plan
        self.folder = RunFolder(folder, config)
        self.engines = [ModelledEngine(workload.engine) for _ in range(workload.engines)]
        client = _Client(
            self.engines,
            character_tokenizer("0123456789"),
            pause_timeout_s=float("inf"),
            engine_wait_timeout_s=float("inf"),
            probe_interval_s=PROBE_INTERVAL_S,
            clock=loop.time,
        )
        self.backend = ModelledBackend(workload.training, loop.spend)
        self.log = StepLog(config, self.folder, plan.total_steps, loop.time)
        transport = ModelledTransport(workload.training.gather_s, loop.spend)
        parts = TrainerParts(
            client=client,
            generator=ModelledGenerator(client, workload.lengths),
            backend=self.backend,
            publisher=WeightPublisher(client, transport, PauseMode(config.generator.pause_mode), clock=loop.time),
            dataset=PromptDataset(_records()),
            checkpoints=CheckpointStore(self.folder.checkpoints, max_to_keep=1),
            reporter=self.log,
            clock=loop.time,
        )
        self.trainer: PPOTrainer = trainer_class(config.trainer.mode)(config, plan, parts)

    async def run(self, edge: int) -> Outcome:
        try:
            await self.trainer.parts.client.start()
            await self.trainer.train()
        finally:
            self.folder.close()
        return Outcome(
            workload=self.workload,
            plan=self.plan,
            records=self.log.records,
            trained=self.backend.steps,
            began_s=self.log.began_s,
            busy_slot_s=sum(engine.busy_slot_s for engine in self.engines),
            edge=edge,
        )


@lru_cache
def _records() -> tuple[PromptRecord, ...]:
    return tuple(
        PromptRecord(
            uid=f"p{i}", prompt=[{"role": "user", "content": "0"}], env_class=None, env_extras={}, data_source="m"
        )
        for i in range(_PROMPTS)
    )

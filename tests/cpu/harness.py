"""A whole trainer on a scripted engine and a scripted backend: real loops, rules and files, no model."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from scripted import ScriptedEngine, scripted_update

from skyrl_train.build.rollout import build_stages, value_stages
from skyrl_train.build.trainer import trainer_class
from skyrl_train.config.compose import compose
from skyrl_train.config.plan import resolve
from skyrl_train.config.schema import RunConfig
from skyrl_train.evaluation.data import load_evaluation_prompts
from skyrl_train.evaluation.engines import OwnEngines
from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.interface import InferenceEngineInput
from skyrl_train.models.tiny import character_tokenizer
from skyrl_train.observability.reporter import Reporter
from skyrl_train.observability.run_folder import RunFolder, read_jsonl
from skyrl_train.rollout.data.dataset import load_dataset
from skyrl_train.trainer import PPOTrainer, TrainerComponents
from skyrl_train.training.actor_critic import ActorCritic
from skyrl_train.training.backend import CriticBackend, Minibatch, TrainingBackend, TrainingSequence
from skyrl_train.training.checkpoint import CheckpointStore
from skyrl_train.types import GeneratorInput, GeneratorOutput, PauseMode
from skyrl_train.weight_sync.syncer import WeightSyncer
from skyrl_train.weight_sync.update import WeightTransport, WeightUpdate

TOKENIZER = character_tokenizer("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJK=")


class ScriptedBackend(TrainingBackend):
    """Its only weight is the number of updates."""

    def __init__(self) -> None:
        self.weight = torch.zeros(1)
        self.minibatches: list[Minibatch] = []
        self.parts: list[Minibatch] = []  # accumulated for the step under way
        self.before_update: Callable[[Minibatch], None] = lambda minibatch: None  # called with each part of a step

    def forward_logprobs(self, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        return [torch.zeros(len(sequence)) for sequence in sequences]

    def accumulate(self, part: Minibatch) -> None:
        self.before_update(part)
        self.parts.append(part)

    def finish(self, step: int) -> dict[str, float]:
        sequences = [sequence for part in self.parts for sequence in part.sequences]
        self.minibatches.append(Minibatch(sequences, sum(part.num_groups for part in self.parts), step))
        self.parts = []
        self.weight += 1
        return {"loss/policy": 0.0, "policy/tokens": 1.0}

    def discard(self) -> None:
        self.parts = []

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", self.weight

    def snapshot(self) -> dict[str, object]:
        return {"w": float(self.weight)}

    def save(self, snapshot: dict[str, object], folder: Path) -> dict[str, str]:
        (folder / "w.json").write_text(json.dumps(snapshot))
        return {}

    def load(self, folder: Path) -> None:
        self.weight.fill_(json.loads((folder / "w.json").read_text())["w"])

    def export_hf(self, folder: Path) -> None:
        raise NotImplementedError


class ScriptedTransport(WeightTransport):
    name = "scripted"

    def gather(self, weights: Any, version: int) -> WeightUpdate:
        return scripted_update(version)

    def close(self) -> None:
        return None


class EchoGenerator(GeneratorInterface):
    """One turn; the reward is the share of even tokens. ``before`` may wait or raise, by prompt and attempt."""

    def __init__(self, client: InferenceEngineClient) -> None:
        self.client = client
        self.before: Callable[[GeneratorInput], Any] | None = None
        self.after: Callable[[GeneratorOutput], None] | None = None
        self.calls: list[str] = []
        self.may_begin: Callable[[], bool] = lambda: True
        self.could_begin: list[bool] = []

    def pace(self, may_begin: Callable[[], bool]) -> None:
        self.may_begin = may_begin

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        self.calls.append(input_batch["trajectory_ids"][0].instance_id)
        self.could_begin.append(self.may_begin())
        if self.before is not None:
            waiting = self.before(input_batch)
            if waiting is not None:
                await waiting
        outputs = [
            await self.client.generate(
                InferenceEngineInput(
                    prompt_token_ids=[[5, 6, 7]],
                    sampling_params={"max_tokens": 6, "seed": seed},
                    session_ids=[trajectory.to_string()],
                )
            )
            for trajectory, seed in zip(input_batch["trajectory_ids"], input_batch["batch_metadata"].seeds, strict=True)
        ]
        ids = [output["response_ids"][0] for output in outputs]
        result = GeneratorOutput(
            prompt_token_ids=[[5, 6, 7]] * len(ids),
            response_ids=ids,
            rewards=[sum(token % 2 == 0 for token in response) / len(response) for response in ids],
            loss_masks=[[1] * len(response) for response in ids],
            stop_reasons=[output["stop_reasons"][0] for output in outputs],
            rollout_metrics=None,
            rollout_logprobs=[output["response_logprobs"][0] for output in outputs],
            rollout_versions=[output["response_versions"][0] for output in outputs],
            trajectory_ids=input_batch["trajectory_ids"],
            is_last_step=None,
        )
        if self.after is not None:
            self.after(result)
        return result


@functools.cache
def composed(overrides: tuple[str, ...]) -> RunConfig:
    """Eight steps of four groups. To compose takes longer than to train them."""
    steps = [
        "trainer.policy_mini_batch_size=4",
        "trainer.max_steps=8",
        "trainer.ckpt_interval=0",
        "trainer.trackers=[]",
    ]
    return compose("quickstart", [*steps, "generator.n_samples_per_prompt=2", "data.generate=10", *overrides])


class Harness:
    """Builds a trainer in ``folder``; build another one in the same folder to resume."""

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        engine: ScriptedEngine | None = None,
        critic: CriticBackend | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = copy.deepcopy(composed(overrides))
        self.config.trainer.run_dir = str(folder)
        dataset = load_dataset(self.config.data, self.config.environment)
        self.plan = resolve(self.config, len(dataset))
        self.engine = engine or ScriptedEngine(free_running=True)
        self.run_folder = RunFolder(folder, self.config)
        events = self.run_folder.events
        self.client = InferenceEngineClient([self.engine], TOKENIZER, replay=self.config.rollout.replay, events=events)
        self.generator = EchoGenerator(self.client)
        self.backend = ScriptedBackend()
        self.evaluation_engines = self._own_engines() if self.config.trainer.eval.num_engines else None
        self.screen = StringIO()
        self.exported: list[int] = []  # steps
        self.on_export: Callable[[int], None] = self.exported.append
        reporter = Reporter(self.config, self.run_folder, Console(file=self.screen), self.plan.total_steps)
        backend = self.backend if critic is None else ActorCritic(self.backend, critic)
        rewarded = self.config.rollout.stages.reward.function is not None
        self.stages = build_stages(self.config, "", self.client.decode, reporter.attempt_failed) if rewarded else []
        self.stages += value_stages(self.config.trainer.algorithm, backend)
        parts = TrainerComponents(
            client=self.client,
            generator=self.generator,
            backend=backend,
            syncer=WeightSyncer(
                self.client,
                ScriptedTransport(),
                backend.stage,
                PauseMode(self.config.generator.pause_mode),
                events=events,
            ),
            events=events,
            dataset=dataset,
            checkpoints=CheckpointStore(self.run_folder.checkpoints, self.config.trainer.max_ckpts_to_keep),
            reporter=reporter,
            stages=self.stages,
            evaluation_engines=self.evaluation_engines,
            evaluation_prompts=load_evaluation_prompts(self.config),
            clock=clock,
            spill_folder=folder / "spill" if self.config.rollout.buffer_memory_bytes is not None else None,
            export_checkpoint=lambda step: self.on_export(step),
        )
        self.trainer: PPOTrainer = trainer_class(self.config.trainer.mode)(self.config, self.plan, parts)

    def _own_engines(self) -> OwnEngines:
        client = InferenceEngineClient([ScriptedEngine(free_running=True)], TOKENIZER)
        syncer = WeightSyncer(client, ScriptedTransport(), self.backend.stage, PauseMode.KEEP)
        return OwnEngines(EchoGenerator(client), client, syncer)

    async def train(self) -> None:
        for stage in self.stages:
            await stage.start()
        try:
            await asyncio.wait_for(self.trainer.train(), 300)
        finally:
            self.run_folder.close()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return list(read_jsonl(self.run_folder.metrics.path))

    @property
    def trained(self) -> list[int]:
        """Every trained group index in the surviving history, in order."""
        return [group_index for row in self.rows for group_index in row["group_indices"]]

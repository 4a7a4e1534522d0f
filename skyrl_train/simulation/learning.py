"""Trains a real policy in virtual time: a run is a function of its seed, with the staleness that its workload causes.

    real trainer, client, generator and environment ── TimedEngine (real tokens, versions, log-probs, swaps)
                                                    └─ TimedBackend (real updates)

EmbeddedEngine ──commands──> its host: real core, a step takes EngineSpeed's seconds ──events──> EmbeddedEngine
trainer ──minibatch──> TimedBackend: real update, takes TrainingSpeed's seconds

On a machine where generation and training are fast and alike, no group is ever late, and the machine's load decides which one is.
Here the seconds are modelled and the tokens are real, so that learning under staleness can be compared between settings.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from skyrl_train.build.engines import build_transport
from skyrl_train.build.rollout import build_generator
from skyrl_train.build.trainer import prepare_model
from skyrl_train.config.compose import compose
from skyrl_train.config.plan import Plan, resolve
from skyrl_train.config.schema import RunConfig
from skyrl_train.errors import EngineError
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.engines.embedded import EmbeddedEngine
from skyrl_train.inference.engines.embedded.core import EmbeddedEngineCore, build_core
from skyrl_train.inference.engines.embedded.engine import EngineSettings
from skyrl_train.inference.engines.embedded.engine_loop import EngineService
from skyrl_train.inference.interface import InferenceEngineInput, InferenceEngineOutput, SamplingParams
from skyrl_train.models.folder import load_tokenizer
from skyrl_train.observability.run_folder import RunFolder
from skyrl_train.rollout.data.dataset import PromptDataset, load_dataset
from skyrl_train.runtime.seeds import derive_seed
from skyrl_train.simulation.clock import VirtualTimeLoop, run_in_virtual_time
from skyrl_train.simulation.engine import EngineSpeed
from skyrl_train.simulation.lengths import Lengths
from skyrl_train.simulation.run import CLIENT_SETTINGS, Steps, settings_of_virtual_time, train_in_virtual_time
from skyrl_train.simulation.training import ModelledBackend, Spend, TrainingSpeed
from skyrl_train.training.backend import Minibatch
from skyrl_train.training.local_backend import LocalBackend
from skyrl_train.weight_sync.update import WeightTransport, WeightUpdate
from skyrl_train.workers.connection import OnGone, OnMessages, WorkerLink
from skyrl_train.workers.messages import Call, Message, Result


@dataclass(frozen=True)
class LearningTask:
    """A recipe with ``settings`` applied, and the durations of its work. ``tools_s``: seconds of the calls between turns."""

    recipe: str
    settings: tuple[str, ...]
    engine: EngineSpeed
    training: TrainingSpeed
    tools_s: Lengths | None = None


@dataclass(frozen=True)
class LearningOutcome(Steps):
    """The steps of a run, and what it learned."""

    plan: Plan

    @property
    def rewards(self) -> list[float]:
        """Mean reward of the groups of each step."""
        return [record.metrics["reward/mean"] for record in self.records]

    def last_reward(self, share: float = 0.1) -> float:
        """Mean of the last steps' rewards."""
        return fmean(self.rewards[-max(1, round(share * len(self.rewards))) :])

    @property
    def dropped_share(self) -> float:
        """Share of dropped groups among all that were trained or dropped."""
        dropped, trained = (self.records[-1].metrics[f"async/{name}"] for name in ("dropped", "trained"))
        return dropped / (dropped + trained)


def learn(task: LearningTask, *overrides: str, edge: int = 0) -> LearningOutcome:
    """Train ``task`` with the trainer and settings given by ``overrides``.

    Raises:
        ConfigError: the settings cannot work.
        SimulationError: a deadlock.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            *settings_of_virtual_time(folder),
            f"generator.inference_engine.max_num_seqs={task.engine.slots}",
            "rollout.replay=false",
        ]
        config = compose(task.recipe, [*settings, *task.settings, *overrides])
        dataset = load_dataset(config.data, config.environment)
        plan = resolve(config, len(dataset))
        return run_in_virtual_time(lambda loop: _learn(task, config, plan, dataset, Path(folder), loop, edge))


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
        **CLIENT_SETTINGS,
        replay=config.rollout.replay,
        clock=loop.time,
    )
    client.tools_s = task.tools_s
    backend = TimedBackend(model_path, config, plan, task.training, loop.spend)
    generator = build_generator(config, plan, client, tokenizer, model_path)
    transport = build_transport(config)
    log = await train_in_virtual_time(config, plan, folder, dataset, client, generator, backend, transport, loop)
    return LearningOutcome(log.records, backend.steps, log.began_s, edge, plan)


class VirtualTimeLink(WorkerLink):
    """The core on the event loop itself, which has to be one of virtual time.

    A decode step is computed at the instant at which it begins; its tokens are there when its seconds have passed.
    Calls that come meanwhile are answered then, as in an engine loop: between two steps.
    """

    def __init__(self, speed: EngineSpeed) -> None:
        self._speed = speed
        self._inbox: list[Message] = []
        self._next: asyncio.Handle | None = None  # the end of the step that runs, or a turn on its way
        self._core: EmbeddedEngineCore | None = None

    async def start(self, on_messages: OnMessages, on_gone: OnGone) -> None:
        self._on_messages = on_messages

    def send(self, messages: list[Message]) -> None:
        self._inbox += messages
        if self._core is None:
            start = self._inbox.pop(0)
            assert isinstance(start, Call), "the driver starts the engine first"
            settings: EngineSettings = start.arguments[0]
            self._core = build_core(settings)
            self._service = EngineService(self._core)
            self._on_messages([Result(start.id)])
        elif self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._turn, [])

    async def stop(self, graceful: bool) -> None:
        if self._next is not None:
            self._next.cancel()
        if self._core is not None:
            self._core.close()
            self._core = None

    def _turn(self, sampled: list[Message]) -> None:
        """Consumes ``sampled``, the answers of the step that has ended, and calls / waits for nothing / unblocked by a call or
        the end of a step / produces answers and the next step."""
        assert self._core is not None, "a link that was stopped takes no turns"
        self._next = None
        answers, messages = sampled, self._inbox
        self._inbox = []
        for message in messages:
            answers += self._service.handle(message)
        batch = min(self._core.running + self._core.waiting, self._speed.slots)
        if self._core.runnable:
            step_s = 1.0 / self._speed.steps_per_s(batch)
            self._next = asyncio.get_running_loop().call_later(step_s, self._turn, self._service.step())
        else:
            answers += self._service.step()  # answers pauses
        if answers:
            self._on_messages(answers)


class TimedEngine(EmbeddedEngine):
    """The embedded engine in virtual time. Prefill takes no time."""

    def __init__(self, config: RunConfig, plan: Plan, model_path: str, speed: EngineSpeed) -> None:
        """Raises:
        EngineError: ``speed`` has times that are not modelled here, or not the configured number of slots.
        """
        engine = config.generator.inference_engine
        if speed.prefill_steps_per_token or speed.sleep_s or speed.slots != engine.max_num_seqs:
            raise EngineError(
                "An engine that really samples has slots = generator.inference_engine.max_num_seqs, and neither prefill nor "
                f"sleep take time; got {speed}."
            )
        super().__init__(
            model_path,
            max_num_seqs=speed.slots,
            max_model_len=plan.max_model_len,
            seed=derive_seed(config.trainer.seed, 0),
        )
        self._speed = speed

    def _new_link(self) -> WorkerLink:
        return VirtualTimeLink(self._speed)

    async def receive_weights(self, update: WeightUpdate) -> None:
        """Take the modelled time while the engine serves."""
        await asyncio.sleep(self._speed.transfer_s)
        await super().receive_weights(update)

    async def load_weights(self, update: WeightUpdate) -> None:
        await asyncio.sleep(self._speed.load_s)
        await super().load_weights(update)


class TimedBackend(LocalBackend):
    """The local backend, with a modelled one that takes the time and counts trained tokens."""

    def __init__(self, model_path: str, config: RunConfig, plan: Plan, speed: TrainingSpeed, spend: Spend) -> None:
        self._speed = speed
        self._spend = spend
        self._modelled = ModelledBackend(speed, spend)
        self.steps = self._modelled.steps  # the trained tokens of each step
        super().__init__(
            model_path,
            config.trainer,
            plan.total_steps,
            config.generator.sampling_params.temperature,
            config.trainer.seed,
        )

    def update(self, minibatch: Minibatch) -> dict[str, float]:
        self._modelled.accumulate(minibatch)
        return super().update(minibatch)  # calls finish(), once per pass

    def accumulate(self, part: Minibatch) -> None:
        self._modelled.accumulate(part)
        super().accumulate(part)

    def finish(self, step: int) -> dict[str, float]:
        if self._modelled.step is not None:  # the time of a step does not depend on its number of passes
            self._modelled.finish(step)
        return super().finish(step)

    def discard(self) -> None:
        self._modelled.discard()
        super().discard()

    def stage(self, transport: WeightTransport, version: int) -> WeightUpdate:
        self._spend(self._speed.gather_s)
        return super().stage(transport, version)


class SlowToolsClient(InferenceEngineClient):
    """Models tool calls between the turns of a trajectory: later turns' requests wait a drawn number of seconds.

    The draw is a function of the request's seed. Without ``tools_s`` tools take no time.
    """

    tools_s: Lengths | None = None

    async def generate(self, engine_input: InferenceEngineInput) -> InferenceEngineOutput:
        if self.tools_s is not None and engine_input.get("priority") is not None:  # the version of its first tokens
            seed = SamplingParams.parse(engine_input.get("sampling_params")).seed
            assert seed is not None, "the trainer's rollouts have seeds"
            await asyncio.sleep(self.tools_s[derive_seed(seed)])
        return await super().generate(engine_input)

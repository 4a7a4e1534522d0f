"""An evaluation on scripted engines, and the events that a trainer tells it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scripted import ScriptedEngine, scripted_update

from skyrl_train.config.schema import RunConfig
from skyrl_train.environments.base import PromptRecord
from skyrl_train.errors import WeightSyncError
from skyrl_train.evaluation.engines import EvaluationEngines, OwnEngines, SharedEngines
from skyrl_train.evaluation.rollouts import Score
from skyrl_train.evaluation.runner import Evaluation
from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.interface import InferenceEngineInput
from skyrl_train.models.tiny import character_tokenizer
from skyrl_train.runtime.concurrency import Signal
from skyrl_train.types import GeneratorInput, GeneratorOutput, PauseMode
from skyrl_train.weight_sync.syncer import WeightSyncer, weights_of
from skyrl_train.weight_sync.update import WeightTransport, WeightUpdate

TOKENIZER = character_tokenizer("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJK=")


def prompts_of(*sources: str) -> tuple[PromptRecord, ...]:
    return tuple(
        PromptRecord(f"p{index}", [{"role": "user", "content": "?"}], data_source=source)
        for index, source in enumerate(sources)
    )


class Transport(WeightTransport):
    """Remembers which versions were copied."""

    name = "scripted"

    def __init__(self) -> None:
        self.gathered: list[int] = []
        self.fails = False
        self.closed = False

    def gather(self, weights: Any, version: int) -> WeightUpdate:
        if self.fails:
            raise WeightSyncError("scripted: no memory")
        self.gathered.append(version)
        return scripted_update(version)

    def close(self) -> None:
        self.closed = True


class OneTurn(GeneratorInterface):
    """Samples one response per trajectory. ``before`` may wait or raise; ``after`` may spoil what is returned."""

    def __init__(self, client: InferenceEngineClient) -> None:
        self.client = client
        self.inputs: list[GeneratorInput] = []
        self.before: Callable[[GeneratorInput], Any] = lambda batch: None
        self.after: Callable[[GeneratorOutput], None] = lambda output: None
        self.reward: Callable[[GeneratorInput], float] = lambda batch: 1.0
        self.at_once = self.most_at_once = 0
        self.may_begin: Callable[[], bool] | None = None
        self.started = self.closed = False

    async def start(self) -> None:
        self.started = True

    def pace(self, may_begin: Callable[[], bool]) -> None:
        self.may_begin = may_begin

    async def aclose(self) -> None:
        self.closed = True

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        self.inputs.append(input_batch)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            waiting = self.before(input_batch)
            if waiting is not None:
                await waiting
            return await self._sample(input_batch)
        finally:
            self.at_once -= 1

    async def _sample(self, batch: GeneratorInput) -> GeneratorOutput:
        (seed,) = batch["batch_metadata"].seeds
        params = {"seed": seed, "max_tokens": (batch["sampling_params"] or {}).get("max_tokens", 4)}
        result = await self.client.generate(
            InferenceEngineInput(
                prompt_token_ids=[[5, 6, 7]],
                sampling_params=params,
                session_ids=[batch["trajectory_ids"][0].to_string()],
            )
        )
        output = GeneratorOutput(
            prompt_token_ids=[[5, 6, 7]],
            response_ids=result["response_ids"],
            rewards=[self.reward(batch)],
            loss_masks=[[1] * len(result["response_ids"][0])],
            stop_reasons=result["stop_reasons"],
            rollout_metrics=None,
            rollout_logprobs=result["response_logprobs"],
            rollout_versions=result["response_versions"],
            trajectory_ids=batch["trajectory_ids"],
            is_last_step=None,
        )
        self.after(output)
        return output


class World:
    """``train_step`` does what a trainer does around an evaluation, in its order.

    Args:
        own: the evaluation has an engine of its own.
        timeout_s: of a rollout.
        engine_wait_timeout_s: how long requests wait for an engine.
        **settings: of ``trainer.eval``; the interval is 1 if not given.
    """

    def __init__(
        self,
        prompts: Sequence[PromptRecord] = prompts_of("a", "a"),
        *,
        own: bool = False,
        timeout_s: float | None = None,
        engine_wait_timeout_s: float = 0.01,
        score: Score | None = None,
        **settings: Any,
    ) -> None:
        self.config = RunConfig()
        for name, value in {"interval": 1, **settings}.items():
            assert hasattr(self.config.trainer.eval, name)
            setattr(self.config.trainer.eval, name, value)
        self.config.trainer.failures.rollout_timeout_s = timeout_s
        self.engine = ScriptedEngine(free_running=True)
        self.client = InferenceEngineClient([self.engine], TOKENIZER, engine_wait_timeout_s=engine_wait_timeout_s)
        self.syncer = WeightSyncer(self.client, Transport(), weights_of(lambda: ()), PauseMode.KEEP)
        self.transport = Transport()
        self.eval_engine = ScriptedEngine(free_running=True) if own else self.engine
        client = self.client
        if own:
            client = InferenceEngineClient([self.eval_engine], TOKENIZER, engine_wait_timeout_s=engine_wait_timeout_s)
        self.generator = OneTurn(client)
        engines: EvaluationEngines = (
            OwnEngines(
                self.generator, client, WeightSyncer(client, self.transport, weights_of(lambda: ()), PauseMode.KEEP)
            )
            if own
            else SharedEngines(self.generator, client)
        )
        self.changed = Signal()
        self.results: list[tuple[int, Mapping[str, Any]]] = []  # versions and rows
        self.notes: list[str] = []
        self.moved = 0
        self.now = 0.0
        self.evaluation = Evaluation(
            self.config,
            engines,
            prompts,
            reporter=self,  # type: ignore[arg-type]
            changed=self.changed,
            score=score,
            on_progress=self._progress,
            clock=lambda: self.now,
        )

    def evaluated(
        self, step: int, row: Mapping[str, Any], metrics: Mapping[str, float], headline: str, **recorded: object
    ) -> None:
        self.results.append((step, row))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def _progress(self) -> None:
        self.moved += 1
        self.changed.notify()

    async def begin(self, step: int = 0, reported: Sequence[int] = ()) -> None:
        """A run starts, or resumes after ``step``."""
        await self.syncer.sync(step)
        await self.evaluation.start(step, reported)

    async def train_step(self, step: int) -> dict[str, float]:
        """The policy moves, and its weights are published."""
        await self.evaluation.trained(step)
        metrics = await self.evaluation.hold()
        await self.syncer.sync(step)
        await self.evaluation.served(step)
        return metrics

    @property
    def versions(self) -> list[int]:
        """Evaluated versions, in the order in which they were reported."""
        return [version for version, _ in self.results]


async def forever() -> None:
    await asyncio.get_running_loop().create_future()

"""A harness generator with the real endpoint and sessions on a scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from harness import TOKENIZER
from scripted import ScriptedEngine, scripted_update
from transformers import PreTrainedTokenizerBase

from skyrl_train.config.schema import GeneratorConfig, SamplingConfig
from skyrl_train.events.log import NO_EVENTS, EventLog
from skyrl_train.generators.harness.generator import HarnessGenerator
from skyrl_train.generators.validation import to_samples
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.interface import SamplingParams
from skyrl_train.types import BatchMetadata, GeneratorInput, GeneratorOutput, PauseMode, Sample, TrajectoryID

CURRENT = f"{__name__}:current"
_agents: dict[str, Callable[..., Any]] = {}


async def current(**task: Any) -> Any:
    """The agent of the running test."""
    return await _agents["current"](**task)


def batch(samples: int, seed: int = 7, prompt: str = "go") -> GeneratorInput:
    return GeneratorInput(
        prompts=[[{"role": "user", "content": prompt}]] * samples,
        env_classes=["none"] * samples,
        env_extras=[{"number": index} for index in range(samples)],
        sampling_params=None,
        trajectory_ids=[TrajectoryID("p", index) for index in range(samples)],
        batch_metadata=BatchMetadata(1, "train", tuple(range(seed, seed + samples))),
    )


class HarnessWorld:
    def __init__(self, engine: ScriptedEngine, client: InferenceEngineClient, generator: HarnessGenerator) -> None:
        self.engine, self.client, self.generator = engine, client, generator

    async def play(self, agent: Callable[..., Any], samples: int = 1, seed: int = 7) -> GeneratorOutput:
        _agents["current"] = agent
        output = await self.generator.generate(batch(samples, seed))
        to_samples(output, samples)
        return output

    async def samples(self, agent: Callable[..., Any], samples: int = 1, seed: int = 7) -> tuple[Sample, ...]:
        return to_samples(await self.play(agent, samples, seed), samples)

    @property
    def sampled_with(self) -> list[SamplingParams]:
        return [SamplingParams.parse(request["sampling_params"]) for request in self.engine.requests]


@asynccontextmanager
async def harness(
    *,
    engine: ScriptedEngine | None = None,
    tokenizer: PreTrainedTokenizerBase = TOKENIZER,
    free_running: bool = True,
    max_tokens: int = 6,
    events: EventLog = NO_EVENTS,
    **kwargs: Any,
) -> AsyncIterator[HarnessWorld]:
    engine = engine or ScriptedEngine(free_running=free_running)
    client = InferenceEngineClient([engine], tokenizer, engine_wait_timeout_s=0.01, events=events)
    config = GeneratorConfig(sampling_params=SamplingConfig(max_tokens=max_tokens, temperature=0.7))
    generator = HarnessGenerator(client, config, **{"agent": CURRENT, "timeout_s": 600.0, **kwargs})
    await client.start()
    await client.load_weights(scripted_update(0), PauseMode.KEEP)
    await generator.start()
    try:
        yield HarnessWorld(engine, client, generator)
    finally:
        await generator.aclose()
        await client.teardown()

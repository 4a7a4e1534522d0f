"""A generator with started engines that serve one policy, without a trainer: for one group on trial, and for an evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from skyrl_train.config import derive
from skyrl_train.config.plan import Plan
from skyrl_train.config.schema import LoraConfig, RunConfig
from skyrl_train.errors import EngineError
from skyrl_train.events.log import NO_EVENTS, EventLog
from skyrl_train.runtime.concurrency import close_all
from skyrl_train.runtime.process import DaemonThreadPool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from skyrl_train.generators.base import GeneratorInterface
    from skyrl_train.inference.client import InferenceEngineClient
    from skyrl_train.rollout.stages.reward import RewardStage


@dataclass(frozen=True)
class StartedGenerator:
    """A started generator with its client and its reward stage."""

    client: InferenceEngineClient
    generator: GeneratorInterface
    rewards: Sequence[RewardStage]  # at most one
    tokenizer: PreTrainedTokenizerBase


def without_trainer(config: RunConfig) -> RunConfig:
    """Return ``config`` for generation alone: in this process, by whole weights that are loaded from a folder to the CPU."""
    generator, model = config.generator, config.trainer.policy.model
    name = derive.weight_transport(config)
    if name in derive.TRANSPORTS and derive.TRANSPORTS[name].gpu:
        # Engines in Ray actors may be on other machines. The arguments of nccl are those of gloo.
        name = "gloo" if name == "nccl" or generator.inference_engine.executor == "ray" else "shared_memory"
    return replace(
        config,
        generator=replace(generator, weight_transport=name),
        rollout=replace(config.rollout, num_actors=0, replay=False),
        # A fresh adapter computes what the base model does, and an exported one is merged.
        trainer=replace(config.trainer, policy=replace(config.trainer.policy, model=replace(model, lora=LoraConfig()))),
    )


@contextmanager
def engine_logs(folder: Path, console: Console) -> Iterator[Path]:
    """Make a folder in the temporary ``folder`` for the output of the engines' processes, and print it if an engine fails.

    vLLM writes dozens of lines even where nothing is wrong.
    """
    logs = folder / "logs"
    logs.mkdir()
    try:
        yield logs
    except EngineError as error:
        for log in sorted(logs.glob("*.log")):
            console.print(log.read_text(errors="replace"), markup=False, highlight=False, soft_wrap=True)
            error.args = (str(error).replace(f"in {log}", "above"), *error.args[1:])  # the file is about to go
        raise


@asynccontextmanager
async def started_generation(
    config: RunConfig, plan: Plan, model_path: str, logs: Path, events: EventLog = NO_EVENTS
) -> AsyncIterator[StartedGenerator]:
    """Start engines with the weights of ``model_path`` as policy version 0; stop everything on leaving.

    Args:
        config: from :func:`without_trainer`.
        logs: see :func:`engine_logs`.
        events: takes what happens to requests, environments and agents.

    Raises:
        ConfigError: this machine lacks vLLM, or a GPU of the engines.
        SkyRLError: the model cannot be used, or an engine or a stage failed.
    """
    # They import torch and the engine.
    from skyrl_train.build.checks import check_engine_devices
    from skyrl_train.build.engines import build_client, build_transport
    from skyrl_train.build.rollout import build_generator, build_stages
    from skyrl_train.models.folder import load_model, load_tokenizer
    from skyrl_train.models.lora import served_weights
    from skyrl_train.rollout.stages.reward import RewardStage
    from skyrl_train.types import PauseMode
    from skyrl_train.weight_sync.syncer import WeightSyncer, weights_of

    asyncio.get_running_loop().set_default_executor(DaemonThreadPool())  # Ctrl-C does not wait for a model that loads
    engine = config.generator.inference_engine
    check_engine_devices(engine, engine.num_engines)
    tokenizer = load_tokenizer(model_path, config.generator.chat_template)
    numbers = range(engine.num_engines)
    client = build_client(config, plan, tokenizer, model_path, numbers, logs=logs, events=events)
    generator = build_generator(config, plan, client, tokenizer, model_path)
    transport = build_transport(config)
    # A failed attempt at a reward is the failure of its group here, so it is not reported apart.
    stages = build_stages(config, model_path, client.decode, lambda name, reason, error: None)
    rewards = [stage for stage in stages if isinstance(stage, RewardStage)]
    try:
        await client.start()
        model = await asyncio.to_thread(load_model, model_path, config.trainer.policy.dtype, "cpu")
        await WeightSyncer(client, transport, weights_of(partial(served_weights, model)), PauseMode.ABORT).sync(
            version=0
        )
        del model  # the engines have their own copies
        for stage in rewards:
            await stage.start()
        await generator.start()
        yield StartedGenerator(client, generator, rewards, tokenizer)
    finally:
        await close_all([generator.aclose, *(stage.aclose for stage in rewards), client.teardown])
        transport.close()

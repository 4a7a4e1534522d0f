"""Asynchronous reinforcement learning of language models.

    import skyrl_train

    run = skyrl_train.train("quickstart", overrides={"trainer.max_steps": 100})
    print(run.metrics["reward/mean"])

Each public name is imported when it is first used, so that ``import skyrl_train`` is quick and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from skyrl_train.version import __version__ as __version__

if TYPE_CHECKING:
    from skyrl_train.algorithms.advantages import register_advantage_estimator
    from skyrl_train.algorithms.kl import register_kl_estimator
    from skyrl_train.algorithms.losses import register_policy_loss
    from skyrl_train.algorithms.off_policy import register_off_policy_correction
    from skyrl_train.algorithms.reductions import register_loss_reduction
    from skyrl_train.config.compose import compose
    from skyrl_train.config.schema import RunConfig
    from skyrl_train.entrypoints.api import train
    from skyrl_train.environments.base import Environment, EnvironmentStep
    from skyrl_train.environments.registry import register_environment
    from skyrl_train.errors import SkyRLError
    from skyrl_train.fully_async_trainer import FullyAsyncTrainer
    from skyrl_train.generators.base import GeneratorInterface
    from skyrl_train.generators.gym import GymGenerator
    from skyrl_train.inference.client import InferenceEngineClient
    from skyrl_train.inference.engines.embedded import EmbeddedEngine
    from skyrl_train.inference.engines.vllm.engine import VLLMEngine
    from skyrl_train.inference.engines.vllm.remote import RemoteVLLMEngine
    from skyrl_train.inference.interface import (
        InferenceEngineInput,
        InferenceEngineInterface,
        InferenceEngineOutput,
        SamplingParams,
    )
    from skyrl_train.observability.run import Run, load_run
    from skyrl_train.one_step_off_trainer import OneStepOffTrainer
    from skyrl_train.partial_rollout_trainer import PartialRolloutTrainer
    from skyrl_train.rollout.staleness.policies import StalenessPolicy, register_staleness_policy
    from skyrl_train.trainer import PPOTrainer
    from skyrl_train.types import BatchMetadata, ConversationType, GeneratorInput, GeneratorOutput, TrajectoryID

__all__ = [
    "BatchMetadata",
    "ConversationType",
    "EmbeddedEngine",
    "Environment",
    "EnvironmentStep",
    "FullyAsyncTrainer",
    "GeneratorInput",
    "GeneratorInterface",
    "GeneratorOutput",
    "GymGenerator",
    "InferenceEngineClient",
    "InferenceEngineInput",
    "InferenceEngineInterface",
    "InferenceEngineOutput",
    "OneStepOffTrainer",
    "PPOTrainer",
    "PartialRolloutTrainer",
    "RemoteVLLMEngine",
    "Run",
    "RunConfig",
    "SamplingParams",
    "SkyRLError",
    "StalenessPolicy",
    "TrajectoryID",
    "VLLMEngine",
    "compose",
    "load_run",
    "register_advantage_estimator",
    "register_environment",
    "register_kl_estimator",
    "register_loss_reduction",
    "register_off_policy_correction",
    "register_policy_loss",
    "register_staleness_policy",
    "train",
]

# Public name -> the module that has it.
_MODULES = {
    "BatchMetadata": "types",
    "ConversationType": "types",
    "EmbeddedEngine": "inference.engines.embedded",
    "Environment": "environments.base",
    "EnvironmentStep": "environments.base",
    "FullyAsyncTrainer": "fully_async_trainer",
    "GeneratorInput": "types",
    "GeneratorInterface": "generators.base",
    "GeneratorOutput": "types",
    "GymGenerator": "generators.gym",
    "InferenceEngineClient": "inference.client",
    "InferenceEngineInput": "inference.interface",
    "InferenceEngineInterface": "inference.interface",
    "InferenceEngineOutput": "inference.interface",
    "OneStepOffTrainer": "one_step_off_trainer",
    "PPOTrainer": "trainer",
    "PartialRolloutTrainer": "partial_rollout_trainer",
    "RemoteVLLMEngine": "inference.engines.vllm.remote",
    "Run": "observability.run",
    "RunConfig": "config.schema",
    "SamplingParams": "inference.interface",
    "SkyRLError": "errors",
    "StalenessPolicy": "rollout.staleness.policies",
    "TrajectoryID": "types",
    "VLLMEngine": "inference.engines.vllm.engine",
    "compose": "config.compose",
    "load_run": "observability.run",
    "register_advantage_estimator": "algorithms.advantages",
    "register_environment": "environments.registry",
    "register_kl_estimator": "algorithms.kl",
    "register_loss_reduction": "algorithms.reductions",
    "register_off_policy_correction": "algorithms.off_policy",
    "register_policy_loss": "algorithms.losses",
    "register_staleness_policy": "rollout.staleness.policies",
    "train": "entrypoints.api",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

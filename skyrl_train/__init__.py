"""Asynchronous reinforcement learning of language models.

The public names. Each is imported when it is first used, so that ``import skyrl_train`` is quick and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyrl_train.config.compose import compose
    from skyrl_train.config.schema.run import RunConfig
    from skyrl_train.errors import SkyRLError
    from skyrl_train.fully_async_trainer import FullyAsyncTrainer
    from skyrl_train.generators.base import (
        BatchMetadata,
        ConversationType,
        GeneratorInput,
        GeneratorInterface,
        GeneratorOutput,
        TrajectoryID,
    )
    from skyrl_train.inference.client import InferenceEngineClient
    from skyrl_train.inference.interface import (
        InferenceEngineInput,
        InferenceEngineInterface,
        InferenceEngineOutput,
        SamplingParams,
    )
    from skyrl_train.trainer import PPOTrainer

__version__ = "0.1.0"

__all__ = [
    "BatchMetadata",
    "ConversationType",
    "FullyAsyncTrainer",
    "GeneratorInput",
    "GeneratorInterface",
    "GeneratorOutput",
    "InferenceEngineClient",
    "InferenceEngineInput",
    "InferenceEngineInterface",
    "InferenceEngineOutput",
    "PPOTrainer",
    "RunConfig",
    "SamplingParams",
    "SkyRLError",
    "TrajectoryID",
    "compose",
]

_HOME = {
    "BatchMetadata": "generators.base",
    "ConversationType": "generators.base",
    "FullyAsyncTrainer": "fully_async_trainer",
    "GeneratorInput": "generators.base",
    "GeneratorInterface": "generators.base",
    "GeneratorOutput": "generators.base",
    "InferenceEngineClient": "inference.client",
    "InferenceEngineInput": "inference.interface",
    "InferenceEngineInterface": "inference.interface",
    "InferenceEngineOutput": "inference.interface",
    "PPOTrainer": "trainer",
    "RunConfig": "config.schema.run",
    "SamplingParams": "inference.interface",
    "SkyRLError": "errors",
    "TrajectoryID": "generators.base",
    "compose": "config.compose",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

"""What a trainer is made of."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_train.environments.base import PromptRecord
from skyrl_train.evaluation.engines import EvaluationEngines
from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.observability.reporter import Reporter
from skyrl_train.publication.publisher import WeightPublisher
from skyrl_train.rollout.dataset import PromptDataset
from skyrl_train.rollout.stages import Stage
from skyrl_train.training.backend import TrainingBackend
from skyrl_train.training.checkpoint import Checkpoints

if TYPE_CHECKING:  # it imports torchdata, which only a streaming run needs
    from skyrl_train.rollout.streaming import StreamingPrompts


@dataclass(frozen=True)
class TrainerParts:
    """What a trainer is made of; each can be replaced by another implementation of its interface."""

    client: InferenceEngineClient
    generator: GeneratorInterface
    backend: TrainingBackend
    publisher: WeightPublisher
    dataset: PromptDataset | StreamingPrompts
    checkpoints: Checkpoints
    reporter: Reporter
    stages: Sequence[Stage] = ()  # what a group goes through between its generation and the buffer; started
    evaluation_engines: EvaluationEngines | None = None  # of its own; None: the run's
    evaluation_prompts: Sequence[PromptRecord] = ()
    spill_folder: Path | None = None  # of finished groups beyond rollout.buffer_memory_bytes
    export_folder: Path | None = None  # where a finished run leaves its policy as a folder that transformers opens
    clock: Callable[[], float] = field(default=time.perf_counter)

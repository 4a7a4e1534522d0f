"""Evaluation while training goes on: ``trainer.eval``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class EvalConfig:
    """Evaluation of one policy version while training goes on. Off without an interval."""

    interval: int = 0  # steps; the policy after the last step is evaluated too; 0: never
    before_train: bool = False  # also the policy that the run starts from
    eval_data: list[str] = field(default_factory=list)  # as data.train_data; empty: ``generate`` prompts
    generate: int = 64  # prompts that the environment generates where there are no files
    seed: int = 1  # of the generated prompts
    n_samples_per_prompt: int = 1  # pass@k and avg@k for k = 1, 2, 4, ... up to it
    pass_threshold: float = 1.0  # a sample has passed when its reward is at least this
    sampling_params: dict[str, Any] = field(default_factory=dict)  # over generator.sampling_params
    max_parallel: int = 16  # evaluation prompts generated at once
    num_engines: int = 0  # of its own; 0: the run's engines, and the next publication waits until it has ended

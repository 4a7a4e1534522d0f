"""Every setting, its type, its default and its meaning: the root, whose sections have a module each. Imports no torch.

    run ──> trainer ──> training (policy, critic) ──> model
     │          └─────> algorithm, failures, evaluation
     ├────> rollout
     ├────> generator ──> inference_engine
     └────> data (and environment)

SkyRL's key names where they mean the same. ``None`` means "derived": :mod:`skyrl_train.config.derive` says how, and
:mod:`skyrl_train.config.refusals` what cannot work.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from skyrl_train.config.schema.data import DataConfig, EnvironmentConfig
from skyrl_train.config.schema.generator import GeneratorConfig
from skyrl_train.config.schema.rollout import RolloutConfig
from skyrl_train.config.schema.trainer import TrainerConfig


@dataclass
class RunConfig:
    """The root."""

    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    data: DataConfig = field(default_factory=DataConfig)

"""The prompts and the environment that they belong to: ``data`` and ``environment``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class EnvironmentConfig:
    """What answers the policy and rewards it."""

    env_class: str = "run_length"  # registered name, path.to.Class, skyrl_gym:<id> or reasoning_gym:<task>
    kwargs: dict[str, Any] = field(default_factory=dict)  # for the environment's constructor and its generated prompts


@dataclass
class DataConfig:
    """``train_data`` names files or folders; without any, ``generate`` asks the environment for prompts."""

    train_data: list[str] = field(default_factory=list)  # .jsonl | .parquet | a folder of datasets.save_to_disk
    prompt_key: str = "prompt"  # a string or a conversation
    generate: int = 512  # prompts that the environment generates where there are no files
    seed: int = 0  # of the generated prompts
    # shuffle | sequential | weighted | path.to.Sampler; None: shuffle, or a stream's own order
    sampler: str | None = None
    sampler_kwargs: dict[str, Any] = field(default_factory=dict)  # weighted: {"weights": {data_source: weight}}
    streaming: bool = False  # files are read as they are needed, in their order, instead of at once

"""Runs skyrl-gym's environments, and text environments of other packages with the same shape, unchanged.

They are constructed as SkyRL does it: ``env_config`` has the run's ``environment.kwargs`` (attributes and keys),
``extras`` the columns of the data row. Prompts come from data files.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from skyrl_train.environments.base import PromptRecord, TextEnvironment
from skyrl_train.environments.registry import did_you_mean
from skyrl_train.errors import ConfigError


def installed_ids() -> list[str]:
    """The ids that skyrl-gym has registered; none where it is not installed."""
    if importlib.util.find_spec("skyrl_gym") is None:
        return []
    import skyrl_gym

    return sorted(skyrl_gym.registry)


@dataclass(frozen=True)
class SkyRLGymFactory:
    """``skyrl_gym:<id>``.

    Raises:
        ConfigError: skyrl-gym is not installed, or has no such id.
    """

    env_id: str
    kwargs: Mapping[str, Any]

    def __post_init__(self) -> None:
        ids = installed_ids()
        if not ids:
            raise ConfigError(
                f"environment.env_class='skyrl_gym:{self.env_id}' needs the package skyrl-gym: "
                "pip install 'skyrl-train[envs]'."
            )
        if self.env_id not in ids:
            raise ConfigError(
                f"skyrl-gym has no environment {self.env_id!r}.{did_you_mean(self.env_id, ids)} "
                f"It has: {', '.join(ids)}."
            )

    @property
    def name(self) -> str:
        return f"skyrl_gym:{self.env_id}"

    @property
    def is_blocking(self) -> bool:
        return True

    def make(self, extras: Mapping[str, Any]) -> TextEnvironment:
        import skyrl_gym

        made: TextEnvironment = skyrl_gym.make(self.env_id, env_config=_env_config(self.kwargs), extras=dict(extras))
        return made

    def generate_prompts(self, count: int, seed: int) -> list[PromptRecord] | None:
        return None


@dataclass(frozen=True)
class GymClassFactory:
    """A class with skyrl-gym's shape, found by its import path."""

    name: str
    cls: type[Any]
    kwargs: Mapping[str, Any]

    @property
    def is_blocking(self) -> bool:
        return True

    def make(self, extras: Mapping[str, Any]) -> TextEnvironment:
        made: TextEnvironment = self.cls(env_config=_env_config(self.kwargs), extras=dict(extras))
        return made

    def generate_prompts(self, count: int, seed: int) -> list[PromptRecord] | None:
        return None


def _env_config(kwargs: Mapping[str, Any]) -> DictConfig:
    return OmegaConf.create(dict(kwargs))

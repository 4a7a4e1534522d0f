"""Runs skyrl-gym's environments, and text environments of other packages with the same shape, unchanged.

They are constructed as in SkyRL: ``env_config`` holds the run's ``environment.kwargs`` (as attributes and keys),
``extras`` the columns of the data row and, as ``max_turns``, the run's ``generator.max_turns``. Prompts come from data files.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from skyrl_train.config.keys import did_you_mean
from skyrl_train.environments.base import EnvironmentFactory
from skyrl_train.errors import ConfigError


def installed_ids() -> list[str]:
    """Return the ids that skyrl-gym has registered; none where it is not installed."""
    if importlib.util.find_spec("skyrl_gym") is None:
        return []
    import skyrl_gym

    return sorted(skyrl_gym.registry)


def skyrl_gym_environment(env_id: str, kwargs: Mapping[str, Any]) -> EnvironmentFactory:
    """Return the factory of ``skyrl_gym:<env_id>``.

    Raises:
        ConfigError: skyrl-gym is not installed, or has no such id.
    """
    ids = installed_ids()
    if not ids:
        raise ConfigError(
            f"environment.env_class='skyrl_gym:{env_id}' needs a package that is not installed. Install it: pip install "
            "skyrl-gym (in a clone: ./uvw run --extra envs ...)"
        )
    if env_id not in ids:
        raise ConfigError(
            f"skyrl-gym has no environment {env_id!r}.{did_you_mean(env_id, ids)} {len(ids)} are registered."
        )

    import skyrl_gym

    return EnvironmentFactory(
        f"skyrl_gym:{env_id}",
        lambda extras: skyrl_gym.make(env_id, env_config=OmegaConf.create(dict(kwargs)), extras=dict(extras)),
        takes_max_turns=True,
    )


def gym_class(name: str, cls: type[Any], kwargs: Mapping[str, Any]) -> EnvironmentFactory:
    """Return the factory of a class with skyrl-gym's shape, which was found by its import path ``name``."""
    return EnvironmentFactory(
        name,
        lambda extras: cls(env_config=OmegaConf.create(dict(kwargs)), extras=dict(extras)),
        takes_max_turns=True,
    )

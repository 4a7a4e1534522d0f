"""Runs skyrl-gym's environments, and text environments of other packages with the same shape, unchanged.

They are constructed as in SkyRL: ``env_config`` holds the run's ``environment.kwargs`` over the environment's own defaults (as
attributes and keys), ``extras`` the columns of the data row and, as ``max_turns``, the run's ``generator.max_turns``. Prompts
come from data files.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_args, get_type_hints

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
    from skyrl_gym.envs.registration import load_env_creator

    def make(extras: Mapping[str, Any]) -> Any:
        entry = skyrl_gym.registry[env_id].entry_point
        config = _env_config(entry if callable(entry) else load_env_creator(entry), kwargs)
        return skyrl_gym.make(env_id, env_config=config, extras=dict(extras))

    return EnvironmentFactory(f"skyrl_gym:{env_id}", make, takes_max_turns=True)


def gym_class(name: str, cls: type[Any], kwargs: Mapping[str, Any]) -> EnvironmentFactory:
    """Return the factory of a class with skyrl-gym's shape, which was found by its import path ``name``."""
    return EnvironmentFactory(
        name,
        lambda extras: cls(env_config=_env_config(cls, kwargs), extras=dict(extras)),
        takes_max_turns=True,
    )


def _env_config(creator: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    """Return ``kwargs`` over the defaults of the class of settings that annotates the parameter ``env_config``, if one does."""
    function: Any = creator.__init__ if isinstance(creator, type) else creator  # type: ignore[misc]
    try:
        annotated = get_type_hints(function).get("env_config")
    except Exception:  # an annotation may be any text
        annotated = None
    defaults: dict[str, Any] = {}
    for settings in filter(is_dataclass, (annotated, *get_args(annotated))):
        for each in fields(settings):
            if each.default is not MISSING:
                defaults[each.name] = each.default
            elif each.default_factory is not MISSING:
                defaults[each.name] = each.default_factory()
    return OmegaConf.create({**defaults, **kwargs})

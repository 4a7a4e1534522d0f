"""From a name in the configuration to environments: registered names, import paths and the adapters' prefixes."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from skyrl_train.config.import_path import import_name, is_import_path
from skyrl_train.config.schema.data import EnvironmentConfig
from skyrl_train.environments.base import Environment, PromptRecord, TextEnvironment
from skyrl_train.errors import ConfigError

EnvironmentType = TypeVar("EnvironmentType", bound=type[Environment])

_BUILT_IN_MODULES = (
    "copy_digits",
    "final_answer",
    "guess_number",
    "python_tests",
    "run_length",
    "search_answer",
    "sort_digits",
)
_EPISODE_METHODS = ("init", "step", "close", "get_metrics")
_registry: dict[str, type[Environment]] = {}


class EnvironmentFactory(Protocol):
    """Makes the environments of one ``env_class``. ``name`` is the one in the configuration."""

    @property
    def name(self) -> str: ...

    @property
    def is_blocking(self) -> bool: ...

    def make(self, extras: Mapping[str, Any]) -> TextEnvironment:
        """Returns a fresh environment for one episode; ``extras`` are the data row's other columns."""

    def generate_prompts(self, count: int, seed: int) -> list[PromptRecord] | None:
        """Returns prompts as a function of ``seed``, or None where the environment needs data files."""


def register_environment(name: str) -> Callable[[EnvironmentType], EnvironmentType]:
    """Class decorator: makes an :class:`Environment` known as ``environment.env_class=<name>``.

    Raises:
        ConfigError: another class has the name already.
    """

    def register(cls: EnvironmentType) -> EnvironmentType:
        known = _registry.get(name)
        if known is not None and known is not cls:
            raise ConfigError(f"Two environments are called {name!r}: {_path(known)} and {_path(cls)}. Rename one.")
        _registry[name] = cls
        return cls

    return register


def registered_environments() -> dict[str, type[Environment]]:
    """Name to class, this library's own environments included."""
    for module in _BUILT_IN_MODULES:
        importlib.import_module(f"skyrl_train.environments.{module}")
    return dict(sorted(_registry.items()))


def resolve_environment(config: EnvironmentConfig) -> EnvironmentFactory:
    """Finds what ``config.env_class`` names.

    In this order: ``skyrl_gym:<id>`` and ``reasoning_gym:<task>``; a registered name; an import path
    (``package.module:Class`` or ``package.module.Class``); a plain skyrl-gym id, as SkyRL's data files have it.

    Raises:
        ConfigError: nothing has this name (the nearest one is offered), the import fails, the class is no environment,
            a keyword argument is unknown, or an adapter's package is not installed.
    """
    name, kwargs = config.env_class, dict(config.kwargs)
    prefix, _, rest = name.partition(":")
    if prefix == "skyrl_gym":
        from skyrl_train.environments.skyrl_gym_adapter import SkyRLGymFactory

        return SkyRLGymFactory(rest, kwargs)
    if prefix == "reasoning_gym":
        from skyrl_train.environments.reasoning_gym_adapter import ReasoningGymFactory

        return ReasoningGymFactory(rest, kwargs)
    known = registered_environments()
    if name in known:
        return ClassFactory(name, known[name], kwargs)
    if is_import_path(name):
        return _factory_of_import(name, kwargs)
    from skyrl_train.environments.skyrl_gym_adapter import SkyRLGymFactory, installed_ids

    if name in installed_ids():
        return SkyRLGymFactory(name, kwargs)
    raise ConfigError(
        f"environment.env_class={name!r} is unknown.{did_you_mean(name, known)} Known: {', '.join(known)}, "
        "an import path (package.module:Class), skyrl_gym:<id>, reasoning_gym:<task>."
    )


@dataclass(frozen=True)
class ClassFactory:
    """Makes environments of an :class:`Environment` subclass.

    Each of ``kwargs`` goes to the constructor, to ``generate_prompts``, or to both: wherever it is a parameter.
    """

    name: str
    cls: type[Environment]
    kwargs: Mapping[str, Any]
    _constructor_kwargs: dict[str, Any] = field(init=False, repr=False)
    _prompt_kwargs: dict[str, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        constructor = _keywords(self.cls.__init__, skip=("self", "extras"))
        prompts = _keywords(self.cls.generate_prompts, skip=("count", "seed"))
        for key in self.kwargs:
            if key not in constructor and key not in prompts:
                names = sorted({*constructor, *prompts})
                raise ConfigError(
                    f"environment.kwargs.{key} is unknown to {self.name!r}.{did_you_mean(key, names)} "
                    f"Known: {', '.join(names) or 'none'}."
                )
        object.__setattr__(self, "_constructor_kwargs", {k: v for k, v in self.kwargs.items() if k in constructor})
        object.__setattr__(self, "_prompt_kwargs", {k: v for k, v in self.kwargs.items() if k in prompts})

    @property
    def is_blocking(self) -> bool:
        return self.cls.is_blocking

    def make(self, extras: Mapping[str, Any]) -> TextEnvironment:
        return self.cls(extras=extras, **self._constructor_kwargs)

    def generate_prompts(self, count: int, seed: int) -> list[PromptRecord] | None:
        return self.cls.generate_prompts(count, seed, **self._prompt_kwargs)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that offers the nearest known name, with a space before it; empty where none is near."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def _factory_of_import(name: str, kwargs: Mapping[str, Any]) -> EnvironmentFactory:
    cls = import_name(name, "environment.env_class")
    if isinstance(cls, type) and issubclass(cls, Environment):
        return ClassFactory(name, cls, kwargs)
    missing = [method for method in _EPISODE_METHODS if not callable(getattr(cls, method, None))]
    if not isinstance(cls, type) or missing:
        raise ConfigError(
            f"environment.env_class={name!r} is no environment: it lacks {', '.join(missing) or 'a class'}. "
            "Derive it from skyrl_train.environments.base.Environment or from skyrl_gym's BaseTextEnv."
        )
    from skyrl_train.environments.skyrl_gym_adapter import GymClassFactory

    return GymClassFactory(name, cls, kwargs)


def _keywords(function: Callable[..., Any], skip: tuple[str, ...]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.name not in skip and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"

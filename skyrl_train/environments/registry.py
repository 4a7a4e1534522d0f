"""Environments by name: ``register_environment``, import paths, and the names of other packages' environments."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from skyrl_train.config.import_path import import_module, import_name, is_import_path
from skyrl_train.config.keys import did_you_mean
from skyrl_train.config.schema import EnvironmentConfig
from skyrl_train.environments.base import Environment, EnvironmentFactory
from skyrl_train.errors import ConfigError, GeneratorOutputError

EnvironmentType = TypeVar("EnvironmentType", bound=type[Environment])

_BUILT_IN_MODULES = ("final_answer", "python_tests", "search_answer", "single_turn", "task_folders", "toy_tasks")
_EPISODE_METHODS = ("init", "step", "close", "get_metrics")
_registry: dict[str, type[Environment]] = {}


def register_environment(name: str) -> Callable[[EnvironmentType], EnvironmentType]:
    """Class decorator that makes an :class:`Environment` available as ``environment.env_class=<name>``.

    Raises:
        ConfigError: another class has the name already.
    """

    def register(cls: EnvironmentType) -> EnvironmentType:
        known, path = _registry.get(name), f"{cls.__module__}.{cls.__qualname__}"
        # The next run in this process executes a user's file again, which registers the same class again.
        if known is not None and path != f"{known.__module__}.{known.__qualname__}":
            raise ConfigError(
                f"Two environments are called {name!r}: {known.__module__}.{known.__qualname__} and {path}. Rename one."
            )
        _registry[name] = cls
        return cls

    return register


def registered_environments() -> dict[str, type[Environment]]:
    """Return the registered classes by name, including this library's."""
    for module in _BUILT_IN_MODULES:
        importlib.import_module(f"skyrl_train.environments.{module}")
    return dict(sorted(_registry.items()))


def resolve_environment(config: EnvironmentConfig) -> EnvironmentFactory:
    """Find the environment that ``config.env_class`` names.

    In this order: ``skyrl_gym:<id>``, ``reasoning_gym:<task>`` and ``verifiers:<name>``; a registered name; an import path
    (``package.module:Class`` or ``package.module.Class``) of a class, or of a function that returns a new environment for the
    extras of a data row; a plain skyrl-gym id, as in SkyRL's data files.

    Raises:
        ConfigError: the name is unknown (the nearest one is offered), an import fails, the class is no environment,
            a keyword argument is unknown, or an adapter's package is not installed.
    """
    for module in config.modules:
        import_module(module, "environment.modules")
    # The adapters are imported here because they look for their packages, which most runs do not need.
    name, kwargs = config.env_class, dict(config.kwargs)
    prefix, _, rest = name.partition(":")
    if prefix == "skyrl_gym":
        from skyrl_train.environments.skyrl_gym_adapter import skyrl_gym_environment

        return skyrl_gym_environment(rest, kwargs)
    if prefix == "reasoning_gym":
        from skyrl_train.environments.reasoning_gym_adapter import reasoning_gym_environment

        return reasoning_gym_environment(rest, kwargs)
    if prefix == "verifiers":
        from skyrl_train.environments.verifiers_adapter import verifiers_environment

        return verifiers_environment(rest, kwargs)
    known = registered_environments()
    if name in known:
        return environment_factory(name, known[name], kwargs)
    from skyrl_train.environments.skyrl_gym_adapter import gym_class, installed_ids, skyrl_gym_environment

    # After the registered names, so that a plain name never imports a module by accident.
    if is_import_path(name):
        cls = import_name(name, "environment.env_class")
        if isinstance(cls, type) and issubclass(cls, Environment):
            return environment_factory(name, cls, kwargs)
        if inspect.isfunction(cls):
            return _factory_of_function(name, cls, kwargs)
        missing = [method for method in _EPISODE_METHODS if not callable(getattr(cls, method, None))]
        if not isinstance(cls, type) or missing:
            raise ConfigError(
                f"environment.env_class={name!r} is no environment: it lacks {', '.join(missing) or 'a class'}. "
                "Derive it from skyrl_train.Environment or from skyrl_gym's BaseTextEnv."
            )
        return gym_class(name, cls, kwargs)
    if name in installed_ids():
        return skyrl_gym_environment(name, kwargs)
    # The data files and scripts of SkyRL name environments of skyrl-gym, such as gsm8k.
    gym = (
        ""
        if installed_ids()
        else " Environments of skyrl-gym are known once it is installed: pip install skyrl-gym (in a clone: ./uvw run --extra "
        "envs ...)."
    )
    raise ConfigError(
        f"environment.env_class={name!r} is unknown.{did_you_mean(name, known)} Give a registered name, an import path "
        f"(package.module:Class, or file.py:Class), skyrl_gym:<id>, reasoning_gym:<task> or verifiers:<name>.{gym}"
    )


def environment_factory(name: str, cls: type[Environment], kwargs: Mapping[str, Any]) -> EnvironmentFactory:
    """Return the factory of an :class:`Environment` subclass.

    Each of ``kwargs`` goes to the constructor, to ``generate_prompts``, or to both, where it is a parameter.

    Raises:
        ConfigError: a keyword argument is a parameter of neither.
    """
    # Check the names now: an unknown one would fail only in the first rollout.
    constructor, takes_any = _constructor_keywords(cls)
    prompts = _keywords(cls.generate_prompts, skip=("count", "seed"))
    for key in kwargs:
        if key not in constructor and key not in prompts and not takes_any:
            names = sorted({*constructor, *prompts})
            raise ConfigError(f"environment.kwargs.{key} is unknown to {name!r}.{did_you_mean(key, names)}")
    further = {*kwargs} - {*prompts} if takes_any else set[str]()
    of_constructor = {key: value for key, value in kwargs.items() if key in constructor or key in further}
    of_prompts = {key: value for key, value in kwargs.items() if key in prompts}
    # And the signatures: every rollout would fail.
    for function, arguments, keywords, right in (
        (cls, (), {"extras": {}, **of_constructor}, "def __init__(self, extras): super().__init__(extras)"),
        (cls.step, (None, ""), {}, "def step(self, action)"),
    ):
        try:
            inspect.signature(function).bind(*arguments, **keywords)
        except TypeError as error:
            raise ConfigError(f"environment.env_class={name!r} cannot be called: {error}. Write {right}.") from error
    if inspect.iscoroutinefunction(cls.step):
        raise ConfigError(
            f"environment.env_class={name!r}: step() must not be async. Write def step(self, action): it may block, because "
            "each episode has a thread (is_blocking)."
        )
    return EnvironmentFactory(
        name=name,
        make=lambda extras: cls(extras=extras, **of_constructor),
        generate_prompts=functools.partial(cls.generate_prompts, **of_prompts),
        is_blocking=cls.is_blocking,
        takes_max_turns=cls.takes_max_turns,
    )


def _factory_of_function(name: str, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> EnvironmentFactory:
    """Return the factory of a function ``(extras, **kwargs) -> environment``. Its environments may block.

    Raises:
        ConfigError: it takes other arguments.
    """
    try:
        inspect.signature(function).bind({}, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"environment.env_class={name!r} is called with the extras of a data row and environment.kwargs: {error}. Write "
            "def make(extras), which returns a new environment."
        ) from error

    def make(extras: Mapping[str, Any]) -> Any:
        environment = function(extras, **kwargs)
        missing = [method for method in _EPISODE_METHODS if not callable(getattr(environment, method, None))]
        if missing:
            raise GeneratorOutputError(
                f"environment.env_class={name!r} returned {environment!r:.200}, which is no environment: it lacks "
                f"{', '.join(missing)}. Return an instance of a subclass of skyrl_train.Environment."
            )
        return environment

    return EnvironmentFactory(name, make)


def _constructor_keywords(cls: type[Environment]) -> tuple[list[str], bool]:
    """Return the parameters of the constructor, and whether it takes any others.

    With ``**kwargs``, those of the next class are among them: constructors pass these on.
    """
    names, open_ended = list[str](), list[bool]()
    for function in (vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base)):
        names += _keywords(function, skip=("self", "extras"))
        open_ended.append(any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values()))
        if not open_ended[-1]:
            break
    return names, open_ended[0]


def _keywords(function: Callable[..., Any], skip: tuple[str, ...]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.name not in skip and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]

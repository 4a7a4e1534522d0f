"""What a reward function sees, and how one is found. Imports little: it is what a reward process starts with.

def reward(group: GroupToReward) -> list[float]: ...            # one number per sample
async def reward(group: GroupToReward) -> list[float]: ...
class Reward:                                                   # built once per worker: a reward model, say
    def __init__(self, **kwargs): ...
    def __call__(self, group: GroupToReward) -> list[float]: ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_train.config.import_path import import_name
from skyrl_train.errors import ConfigError
from skyrl_train.rollout.placement.base import Function, Work

SETTING = "rollout.stages.reward.function"


@dataclass(frozen=True, slots=True)
class SampleToReward:
    """A finished trajectory; of one that branched, its last sequence.

    ``text`` is all of the response, special tokens left out; where the episode had several turns, what tools or the
    environment answered is part of it. ``loss_mask`` is 1 on the tokens that the policy sampled.
    """

    text: str
    prompt_token_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    stop_reason: str
    reward: float  # what the generator gave to the whole trajectory


@dataclass(frozen=True, slots=True)
class GroupToReward:
    """All samples of a prompt, and its row of the data set."""

    uid: str
    data_source: str
    prompt: Sequence[Mapping[str, Any]]
    env_extras: Mapping[str, Any]  # the row's other columns, such as the right answer
    samples: tuple[SampleToReward, ...]


def load_reward_function(path: str, kwargs: Mapping[str, Any]) -> Function:
    """The function at ``path`` with ``kwargs`` given, or an instance of the class there, constructed with them.

    Raises:
        ConfigError: there is no such thing, or it does not take ``kwargs``.
    """
    target = import_name(path, SETTING, "function")
    if not inspect.isclass(target):
        return functools.partial(target, **kwargs)
    try:
        function: Any = target(**kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{SETTING}={path!r} cannot be constructed with rollout.stages.reward.kwargs: {error}"
        ) from error
    return function  # type: ignore[no-any-return]


def is_async(path: str) -> bool:
    """Whether what is at ``path`` is an ``async def``, or a class whose ``__call__`` is one.

    Raises:
        ConfigError: there is no such thing, or nothing that can be called.
    """
    target = import_name(path, SETTING, "function")
    if not callable(target) or (inspect.isclass(target) and "__call__" not in dir(target)):
        raise ConfigError(f"{SETTING}={path!r} cannot be called. Name a function, or a class with a __call__ method.")
    return inspect.iscoroutinefunction(target.__call__ if inspect.isclass(target) else target)


def reward_work(path: str, kwargs: Mapping[str, Any]) -> Work:
    """The reward function as the work of a stage."""
    return Work(f"{__name__}:{load_reward_function.__name__}", {"path": path, "kwargs": dict(kwargs)})

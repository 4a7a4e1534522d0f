"""Runs reasoning-gym's procedural tasks: prompts are its questions, rewards are its own ``score_answer``.

``environment.kwargs`` are the task's configuration (``min_terms=2`` ...). A data file works as well, with the column
``entry`` as reasoning-gym makes it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

from skyrl_train.environments.base import Environment, EnvironmentStep, PromptRecord, TextEnvironment
from skyrl_train.environments.registry import did_you_mean
from skyrl_train.errors import ConfigError, DataError


class ReasoningGymEnvironment(Environment):
    """One question, one answer. Scoring may be slow (some tasks run a solver), so it stays off the event loop."""

    is_blocking: ClassVar[bool] = True

    def __init__(self, extras: Mapping[str, Any], *, dataset: Any) -> None:
        """Raises:
        DataError: the row has no ``entry``.
        """
        super().__init__(extras)
        if not isinstance(extras.get("entry"), Mapping) or "answer" not in extras["entry"]:
            raise DataError("A reasoning-gym row needs a column 'entry' with at least 'question' and 'answer'.")
        self._dataset = dataset
        self._entry = dict(extras["entry"])

    def step(self, action: str) -> EnvironmentStep:
        reward = float(self._dataset.score_answer(action.strip(), self._entry))
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}


class ReasoningGymFactory:
    """``reasoning_gym:<task>``."""

    is_blocking = True

    def __init__(self, task: str, kwargs: Mapping[str, Any]) -> None:
        """Raises:
        ConfigError: reasoning-gym is not installed, has no such task, or the task refuses ``kwargs``.
        """
        self.name = f"reasoning_gym:{task}"
        self._task = task
        self._kwargs = dict(kwargs)
        self._factory = _import_factory(self.name)
        tasks = self._factory.DATASETS
        if task not in tasks:
            raise ConfigError(
                f"reasoning-gym has no task {task!r}.{did_you_mean(task, tasks)} It has {len(tasks)} tasks."
            )
        known = sorted({f.name for f in dataclasses.fields(tasks[task][1])} - {"seed", "size"})
        for key in self._kwargs:
            if key not in known:
                raise ConfigError(
                    f"environment.kwargs.{key} is unknown to {self.name!r}.{did_you_mean(key, known)} "
                    f"Known: {', '.join(known)} (seed and size are data.seed and data.generate)."
                )
        self._scorer = self._dataset(seed=0, size=1)

    def make(self, extras: Mapping[str, Any]) -> TextEnvironment:
        return ReasoningGymEnvironment(extras, dataset=self._scorer)

    def generate_prompts(self, count: int, seed: int) -> list[PromptRecord]:
        dataset = self._dataset(seed=seed, size=count)
        entries = [dataset[index] for index in range(count)]
        return [
            PromptRecord(
                uid=f"{self._task}-{seed}-{index}",
                prompt=[{"role": "user", "content": entry["question"]}],
                env_extras={"entry": entry},
                data_source=self._task,
            )
            for index, entry in enumerate(entries)
        ]

    def _dataset(self, seed: int, size: int) -> Any:
        try:
            return self._factory.create_dataset(self._task, seed=seed, size=size, **self._kwargs)
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(f"environment.kwargs: {self.name!r} refuses {self._kwargs}: {error}") from error


def _import_factory(name: str) -> Any:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError(
            f"environment.env_class={name!r} needs the package reasoning-gym: pip install 'skyrl-train[envs]'."
        )
    with warnings.catch_warnings():
        # A package below reasoning-gym has invalid comparisons that only matter to its authors.
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym
    return reasoning_gym.factory

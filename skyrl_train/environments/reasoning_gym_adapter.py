"""Runs reasoning-gym's procedural tasks: prompts are its questions, rewards come from its ``score_answer``.

``environment.kwargs`` are the task's configuration (``min_terms=2`` ...). Data files work too, with the column ``entry``
as reasoning-gym makes it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from skyrl_train.config.keys import did_you_mean, nearest
from skyrl_train.environments.base import Environment, EnvironmentFactory, EnvironmentStep, PromptRecord
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.runtime.seeds import derive_seed


class ReasoningGymEnvironment(Environment):
    """One question, one answer. Scoring can be slow (some tasks run a solver), so it stays off the event loop.

    Raises:
        DataError: the row has no ``entry``.
    """

    is_blocking: ClassVar[bool] = True

    def __init__(self, extras: Mapping[str, Any], *, dataset: Any) -> None:
        super().__init__(extras)
        if not isinstance(extras.get("entry"), Mapping) or "answer" not in extras["entry"]:
            raise DataError("A reasoning-gym row needs a column 'entry' with at least 'question' and 'answer'.")
        self._dataset = dataset
        self._entry = dict(extras["entry"])

    def step(self, action: str) -> EnvironmentStep:
        reward = float(self._dataset.score_answer(action.strip(), self._entry))
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}


@contextmanager
def _global_generators_seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of ``random`` and numpy inside the context, and restore them after it.

    Some tasks draw from these although they have a seed. Prompts are generated before the run starts any thread.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def reasoning_gym_environment(task: str, kwargs: Mapping[str, Any]) -> EnvironmentFactory:
    """Return the factory of ``reasoning_gym:<task>``.

    Raises:
        ConfigError: reasoning-gym is not installed, has no such task, or the task rejects ``kwargs``.
    """
    name = f"reasoning_gym:{task}"
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError(
            f"environment.env_class={name!r} needs a package that is not installed. Install it: pip install reasoning-gym "
            "(in a clone: ./uvw run --extra envs ...)"
        )
    with warnings.catch_warnings():
        # A dependency of reasoning-gym contains invalid comparisons, which a user can do nothing about.
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym
    tasks = reasoning_gym.factory.DATASETS
    if task not in tasks:
        raise ConfigError(f"reasoning-gym has no task {task!r}.{did_you_mean(task, tasks)} It has {len(tasks)} tasks.")
    known = sorted({f.name for f in dataclasses.fields(tasks[task][1])} - {"seed", "size"})
    for key in kwargs:
        if key not in known:
            close = nearest(key, known)
            raise ConfigError(
                f"environment.kwargs.{key} is unknown to {name!r}.{f' Did you mean {close}?' if close else ''} It takes "
                f"{', '.join(known)} (seed and size are data.seed and data.generate)."
            )

    def create_dataset(seed: int, size: int) -> Any:
        try:
            return reasoning_gym.factory.create_dataset(task, seed=seed, size=size, **kwargs)
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(f"environment.kwargs: {name!r} rejects {dict(kwargs)}: {error}") from error

    scorer = create_dataset(seed=0, size=1)  # also checks the values of kwargs

    def generate_prompts(count: int, seed: int) -> list[PromptRecord]:
        # Entries travel in the prompt records, so scoring needs no copy of this data set.
        # Its tasks draw entry i from ``seed + i``: the entries of two neighbouring seeds would be nearly the same. 31 bits,
        # because some of them seed numpy's global generator, too.
        dataset = create_dataset(seed=derive_seed(seed) >> 31, size=count)
        entries = []
        for index in range(count):
            with _global_generators_seeded(derive_seed(seed, index)):
                entries.append(dataset[index])
        return [
            PromptRecord(
                uid=f"{task}-{seed}-{index}",
                prompt=[{"role": "user", "content": entry["question"]}],
                env_extras={"entry": entry},
                data_source=task,
            )
            for index, entry in enumerate(entries)
        ]

    return EnvironmentFactory(
        name, lambda extras: ReasoningGymEnvironment(extras, dataset=scorer), generate_prompts=generate_prompts
    )

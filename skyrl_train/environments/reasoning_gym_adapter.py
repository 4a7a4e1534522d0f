"""Runs reasoning-gym's procedural tasks: prompts are its questions, rewards come from its ``score_answer``.

``environment.kwargs`` are the task's configuration (``min_terms=2`` ...). Data files work too, with the column ``entry``
as reasoning-gym makes it.

    environment's thread ──answer, entry──> child process: score_answer ──score──> reward

Some tasks evaluate the answer as an expression. Python computes ``9**9**9`` without letting another thread run, so that one
such answer would stop the whole trainer for hours.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import math
import os
import pickle
import queue
import random
import resource
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from skyrl_train.config.keys import did_you_mean, nearest
from skyrl_train.environments.base import Environment, EnvironmentFactory, EnvironmentStep, PromptRecord
from skyrl_train.errors import ConfigError, DataError, RolloutError
from skyrl_train.runtime.seeds import derive_seed
from skyrl_train.workers.process import ChildProcess, SocketChannel

logger = logging.getLogger(__name__)

MAX_SCORERS = 4  # child processes of one task
START_S = 300.0  # for their imports, on a busy machine
SCORE_CPU_S = 10  # processor time of one answer
SCORE_WALL_S = 300.0
SCORER_BYTES = 8 << 30  # address space of a child process


class ReasoningGymEnvironment(Environment):
    """One question, one answer. Scoring can be slow (some tasks run a solver), so it stays off the event loop.

    Args:
        score: returns the reward of an answer to an entry.

    Raises:
        DataError: the row has no ``entry``.
    """

    is_blocking: ClassVar[bool] = True

    def __init__(self, extras: Mapping[str, Any], *, score: Callable[[str, dict[str, Any]], float]) -> None:
        super().__init__(extras)
        if not isinstance(extras.get("entry"), Mapping) or "answer" not in extras["entry"]:
            raise DataError("A reasoning-gym row needs a column 'entry' with at least 'question' and 'answer'.")
        self._score = score
        self._entry = dict(extras["entry"])

    def step(self, action: str) -> EnvironmentStep:
        reward = self._score(action.strip(), self._entry)
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}


class AnswerScorer:
    """Scores the answers to one task in child processes, each with one answer at a time. They end with this process.

    An answer that ends its process or exceeds its limits is worth 0, and the next one gets another process.
    """

    def __init__(self, task: str, kwargs: Mapping[str, Any]) -> None:
        self._dataset = task, dict(kwargs)
        # The process that was used last is taken first; None: one that is not started.
        self._idle: queue.LifoQueue[ChildProcess | None] = queue.LifoQueue()
        for _ in range(min(MAX_SCORERS, os.cpu_count() or 1)):
            self._idle.put(None)

    def score(self, answer: str, entry: dict[str, Any]) -> float:
        """Return the score. Blocks.

        Raises:
            RolloutError: no process can be started, or ``score_answer`` raised.
        """
        child = self._idle.get()
        try:
            child = child or self._start()
            try:
                result = _ask(child, (answer, entry), SCORE_WALL_S)
            except (EOFError, OSError) as error:  # a TimeoutError is one
                child.stop()
                child = None
                logger.warning("An answer of %d characters could not be scored: %r: %.200r", len(answer), error, answer)
                return 0.0
        finally:
            self._idle.put(child)
        if "error" in result:
            raise RolloutError(f"score_answer() of {self._dataset[0]!r} raised {result['error']}")
        return float(result["score"])

    def _start(self) -> ChildProcess:
        child = ChildProcess(f"{__name__}:{serve_scores.__name__}")
        try:
            _ask(child, (*self._dataset, SCORE_CPU_S), START_S)
        except (EOFError, OSError) as error:
            child.stop()
            raise RolloutError(
                f"A process for the scores of {self._dataset[0]!r} cannot be started: {error!r}"
            ) from error
        return child


def _ask(child: ChildProcess, question: Any, limit_s: float) -> dict[str, Any]:
    """Send a pickled value to the child, and return the JSON object that it answers: nothing that it writes is executed here.

    Raises:
        EOFError, OSError: it has ended, or does not answer in time.
    """
    child.connection.settimeout(limit_s)
    child.connection.sendall(pickle.dumps(question))
    with child.connection.makefile("rb") as answers:
        line = answers.readline()
    if not line.endswith(b"\n"):
        raise EOFError("its process has ended")
    result: dict[str, Any] = json.loads(line)
    return result


def serve_scores(channel: SocketChannel) -> None:
    """In a child process: build the task's data set, then score answers until the parent is gone."""
    import reasoning_gym

    with channel.connection.makefile("rwb") as stream:

        def answer(result: dict[str, Any]) -> None:
            stream.write(json.dumps(result).encode() + b"\n")
            stream.flush()

        task, kwargs, cpu_s = pickle.load(stream)
        dataset = reasoning_gym.factory.create_dataset(task, seed=0, size=1, **kwargs)
        resource.setrlimit(resource.RLIMIT_AS, (SCORER_BYTES, SCORER_BYTES))
        answer({})
        while True:
            said, entry = pickle.load(stream)
            # The kernel ends a process beyond it, also in the middle of one operation of Python.
            limit = math.ceil(time.process_time()) + cpu_s
            resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
            try:
                answer({"score": float(dataset.score_answer(said, entry))})
            except MemoryError:
                return
            except Exception as error:  # of the package's code, with what a policy wrote
                answer({"error": repr(error)})


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

    create_dataset(seed=0, size=1)  # checks the values of kwargs
    score = AnswerScorer(task, kwargs).score

    def generate_prompts(count: int, seed: int) -> list[PromptRecord]:
        # Entries travel in the prompt records, so scoring needs no copy of all prompts.
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
        name, lambda extras: ReasoningGymEnvironment(extras, score=score), generate_prompts=generate_prompts
    )

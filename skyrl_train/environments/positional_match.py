"""Single-turn tasks whose answer is a text: the reward is how much of it stands in its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from skyrl_train.environments.base import Environment, EnvironmentStep
from skyrl_train.errors import DataError


def positional_match(answer: str, target: str) -> float:
    """Share of the longer text's positions that hold the same character in both; 1.0 only when they are equal."""
    longest = max(len(answer), len(target))
    if longest == 0:
        return 1.0
    return sum(a == t for a, t in zip(answer, target, strict=False)) / longest


class PositionalMatchEnvironment(Environment):
    """Scores one answer against ``extras["answer"]``.

    A graded reward lets random weights start to learn, where an exact match would never be seen; an answer that did not
    end by itself gets half, so that ending is learned too.
    """

    is_blocking: ClassVar[bool] = False

    def __init__(self, extras: Mapping[str, Any]) -> None:
        """Raises:
        DataError: the row has no ``answer``.
        """
        super().__init__(extras)
        if not isinstance(extras.get("answer"), str):
            raise DataError(
                f"{type(self).__name__} needs a column 'answer' with a string; the row has {sorted(extras)}."
            )
        self._target: str = extras["answer"]
        self._ended = True
        self._exact = False

    def observe_stop(self, stop_reason: str) -> None:
        self._ended = stop_reason != "length"

    def step(self, action: str) -> EnvironmentStep:
        match = positional_match(action, self._target)
        self._exact = self._ended and match == 1.0
        return {"observations": [], "reward": match if self._ended else match / 2, "done": True, "metadata": {}}

    def get_metrics(self) -> dict[str, Any]:
        return {"exact": float(self._exact)}

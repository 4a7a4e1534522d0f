"""Single-turn tasks with one right answer at the end of a worked solution: school arithmetic, competition mathematics."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from skyrl_train.environments.answers import last_number, marked_answer, same_math, to_number
from skyrl_train.environments.base import Environment, EnvironmentStep
from skyrl_train.environments.registry import register_environment
from skyrl_train.errors import DataError


class FinalAnswerEnvironment(Environment):
    """Reward 1 for the right answer, else 0; the data row's ``answer`` has it as text."""

    is_blocking: ClassVar[bool] = False

    def __init__(self, extras: Mapping[str, Any], *, marked_only: bool = False) -> None:
        """Args:
            marked_only: an answer counts only in ``\\boxed{}``, after ``####`` or after ``Answer:``.

        Raises:
            DataError: the row has no ``answer``, or one that this environment cannot compare with.
        """
        super().__init__(extras)
        answer = extras.get("answer")
        if not isinstance(answer, str) or not self.can_compare(answer):
            raise DataError(f"{type(self).__name__} needs a column 'answer' with {self.wanted}, got {answer!r}.")
        self._answer = answer
        self._marked_only = marked_only
        self._metrics: dict[str, Any] = {}

    wanted: ClassVar[str]  # what the column has to hold, for the message

    @abstractmethod
    def can_compare(self, answer: str) -> bool: ...

    @abstractmethod
    def is_right(self, found: str) -> bool: ...

    def unmarked(self, text: str) -> str | None:
        """The answer of a text that marks none; None where that cannot be told."""
        return None

    def step(self, action: str) -> EnvironmentStep:
        marked = marked_answer(action)
        found = marked if marked is not None or self._marked_only else self.unmarked(action)
        right = found is not None and self.is_right(found)
        self._metrics = {"right": float(right), "marked": float(marked is not None)}
        return {"observations": [], "reward": float(right), "done": True, "metadata": {}}

    def get_metrics(self) -> dict[str, Any]:
        return self._metrics


@register_environment("numeric_answer")
class NumericAnswer(FinalAnswerEnvironment):
    """A number, compared exactly by value (``1,000.0`` is ``1000``). Unmarked, the last number of the text counts.

    A marked text may hold more than the number (``72 clips``): then its last number counts.
    """

    wanted: ClassVar[str] = "a number such as '1,234' or '-0.5'"

    def can_compare(self, answer: str) -> bool:
        return to_number(answer) is not None

    def unmarked(self, text: str) -> str | None:
        return last_number(text)

    def is_right(self, found: str) -> bool:
        value = to_number(found)
        if value is None:
            value = to_number(last_number(found) or "")
        return value is not None and value == to_number(self._answer)


@register_environment("math_answer")
class MathAnswer(FinalAnswerEnvironment):
    """A number or a LaTeX expression; :mod:`skyrl_train.environments.answers` says what is not recognised as equal.

    An unmarked answer never counts, whatever ``marked_only`` says: where it begins and ends cannot be told.
    """

    wanted: ClassVar[str] = "a number or a LaTeX expression"

    def can_compare(self, answer: str) -> bool:
        return bool(answer.strip())

    def is_right(self, found: str) -> bool:
        return same_math(found, self._answer)

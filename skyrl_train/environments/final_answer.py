"""Single-turn tasks with one right answer at the end of a worked solution: school arithmetic, competition mathematics.

Answers are compared by form: equal texts after normalisation, or equal rational numbers. That is enough for integer and
decimal answers. It does no algebra: ``2\\sqrt{2}`` and ``\\sqrt{8}``, ``x+1`` and ``1+x``, or two orders of a set, count as
different.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, ClassVar

from skyrl_train.environments.base import Environment, EnvironmentStep
from skyrl_train.environments.registry import register_environment
from skyrl_train.errors import DataError

_LAST_NUMBER = re.compile(r"(?<![\w.])[-+]?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+)?", re.ASCII)
_PLAIN_NUMBER = re.compile(r"([-+]?)\$?(\d+(?:\.\d*)?|\.\d+)(?:/(\d+))?", re.ASCII)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_MARKED = re.compile(r"####[ \t]*([^\n]+)")
_ANSWER_LINE = re.compile(r"(?i)answer[ \t]*:[ \t]*([^\n]+)")
_BRACE = re.compile(r"(?<!\\)[{}]")  # an escaped one does not count
_MAX_DIGITS = 100  # of a number that is compared by value; longer ones cost time and are no answers


class FinalAnswerEnvironment(Environment):
    """Reward 1 for the right answer, else 0. The data row's ``answer`` has it as text.

    Args:
        marked_only: an answer counts only in ``\\boxed{}``, after ``####`` or after ``Answer:``.

    Raises:
        DataError: the row has no ``answer``, or one that this environment cannot compare with.
    """

    is_blocking: ClassVar[bool] = False
    wanted: ClassVar[str]  # describes a usable answer, for the message

    def __init__(self, extras: Mapping[str, Any], *, marked_only: bool = False) -> None:
        super().__init__(extras)
        answer = extras.get("answer")
        if not isinstance(answer, str) or not self.can_compare(answer):
            raise DataError(f"{type(self).__name__} needs a column 'answer' with {self.wanted}, got {answer!r}.")
        self._answer = answer
        self._marked_only = marked_only
        self._metrics: dict[str, Any] = {}

    @abstractmethod
    def can_compare(self, answer: str) -> bool:
        """Return whether ``answer`` is a usable right answer."""

    @abstractmethod
    def is_right(self, found: str) -> bool:
        """Compare the policy's answer with the right one."""

    def unmarked(self, text: str) -> str | None:
        """Return the answer of a text that marks none, or None where it cannot be told."""
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

    A marked text may hold more than the number (``72 clips``). Then its last number counts.
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
    """A number or a LaTeX expression, compared as the module describes.

    An unmarked answer never counts, also without ``marked_only``: its beginning and end cannot be told.
    """

    wanted: ClassVar[str] = "a number or a LaTeX expression"

    def can_compare(self, answer: str) -> bool:
        return bool(answer.strip())

    def is_right(self, found: str) -> bool:
        return same_math(found, self._answer)


# Reading and comparing answers -----------------------------------------------------------------------------------------


def last_boxed(text: str) -> str | None:
    """Return the contents of the last ``\\boxed{...}`` with balanced braces, or None."""
    # One pass: a policy may repeat the beginning of a box to the end of its response.
    opened: list[int] = []
    found = -1, -1  # the braces around the contents
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened:
            start = opened.pop()
            if start > found[0] and text.endswith("\\boxed", 0, start):
                found = start, brace.start()
    return None if found[0] < 0 else text[found[0] + 1 : found[1]]


def marked_answer(text: str) -> str | None:
    """Return the last boxed expression, else the text after the last ``####`` (GSM8K) or ``Answer:`` (DAPO), else None."""
    # The last mark counts: a reasoning text may box intermediate results.
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    for pattern in (_MARKED, _ANSWER_LINE):
        found = pattern.findall(text)
        if found:
            return str(found[-1]).strip()
    return None


def last_number(text: str) -> str | None:
    """Return the last number of a text as it is written, including ``1,234`` and ``$5``, or None."""
    found = _LAST_NUMBER.findall(text)
    return found[-1] if found else None


def to_number(text: str) -> Fraction | None:
    """Return the exact value of ``-1,234.50``, ``$7``, ``3/4``, ``50%`` (read as 50) or ``\\frac{3}{4}``; else None."""
    plain = _THOUSANDS.sub("", normalize_math(text))
    fraction = re.fullmatch(r"(-?)\\frac\{([0-9]+)\}\{([0-9]+)\}", plain)
    if fraction:
        plain = f"{fraction[1]}{fraction[2]}/{fraction[3]}"
    found = _PLAIN_NUMBER.fullmatch(plain)
    # Bounded, because arithmetic with very long numbers would stall the event loop.
    if found is None or len(plain) > _MAX_DIGITS:
        return None
    sign, numerator, denominator = found.groups()
    if denominator is not None and int(denominator) == 0:
        return None
    return (-1 if sign == "-" else 1) * Fraction(numerator) / int(denominator or 1)


def normalize_math(text: str) -> str:
    """Remove from a LaTeX answer what does not change it: spaces, ``$``, ``\\left``, ``\\text``, percent and degree signs."""
    plain = text.strip().rstrip(".").strip()
    plain = re.sub(r"\\(?:text|mathrm|textbf|mbox)\{([^{}]*)\}", r"\1", plain)
    plain = plain.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    plain = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", plain)
    plain = re.sub(r"\\left|\\right|\\[!,;: ]|\^\{?\\circ\}?|\\?%|\\?\$|\s", "", plain)
    plain = re.sub(r"^[A-Za-z]=(?=.)", "", plain)  # x = 5
    return plain.rstrip(".").removeprefix("+")


def same_math(answer: str, target: str) -> bool:
    """Return whether two answers are equal numbers, or equal texts after :func:`normalize_math`."""
    left, right = to_number(answer), to_number(target)
    if left is not None and right is not None:
        return left == right
    return normalize_math(answer) == normalize_math(target) != ""

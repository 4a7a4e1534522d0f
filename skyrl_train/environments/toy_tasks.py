"""Toy text tasks that a model of random weights can learn: copy, sort, expand a run length, guess a number.

| ``env_class`` | prompt | right answer |
|---|---|---|
| ``copy_digits`` | ``417>`` | ``417``: attention to one earlier position |
| ``sort_digits`` | ``4102^`` | ``0124`` |
| ``run_length`` | ``07c=`` | ``ccccccc``: lengths have a long tail, as in reasoning |
| ``guess_number`` | ``?``, then ``+`` (higher) or ``-`` (lower) after each guess | the hidden number; several turns |
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from skyrl_train.environments.base import Environment, EnvironmentStep, PromptRecord
from skyrl_train.environments.registry import register_environment
from skyrl_train.errors import ConfigError, DataError

HIGHER, LOWER, INVALID = "+", "-", "!"


def positional_match(answer: str, target: str) -> float:
    """Return the fraction of the longer text's positions with the same character in both; 1.0 only for equal texts."""
    longest = max(len(answer), len(target))
    if longest == 0:
        return 1.0
    return sum(a == t for a, t in zip(answer, target, strict=False)) / longest


class TextMatch(Environment):
    """Base of single-turn tasks that score one answer against ``extras["answer"]`` by :func:`positional_match`.

    The graded reward lets random weights begin to learn, where they would never meet an exact match. An answer that was
    cut off earns half, so that the policy learns to end it.

    Raises:
        DataError: the row has no ``answer``.
    """

    is_blocking: ClassVar[bool] = False

    def __init__(self, extras: Mapping[str, Any]) -> None:
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
        # A cut answer is never exact, even if its text happens to match.
        self._exact = self._ended and match == 1.0
        return {"observations": [], "reward": match if self._ended else match / 2, "done": True, "metadata": {}}

    def get_metrics(self) -> dict[str, Any]:
        return {"exact": float(self._exact)}


@register_environment("copy_digits")
class CopyDigits(TextMatch):
    """``<digits>>`` asks for the digits; the data row's ``answer`` has them."""

    alphabet: ClassVar[str] = "0123456789>"

    @classmethod
    def generate_prompts(cls, count: int, seed: int, *, min_digits: int = 3, max_digits: int = 3) -> list[PromptRecord]:
        """Draw lengths uniformly from ``min_digits..max_digits``, and digits uniformly.

        Raises:
            ConfigError: impossible lengths.
        """
        return _digit_prompts("copy_digits", ">", str, count, seed, min_digits, max_digits)


@register_environment("sort_digits")
class SortDigits(TextMatch):
    """``<digits>^`` asks for the digits in ascending order; the data row's ``answer`` has them."""

    alphabet: ClassVar[str] = "0123456789^"

    @classmethod
    def generate_prompts(cls, count: int, seed: int, *, min_digits: int = 2, max_digits: int = 5) -> list[PromptRecord]:
        """Draw lengths uniformly from ``min_digits..max_digits``, and digits uniformly.

        Raises:
            ConfigError: impossible lengths.
        """
        return _digit_prompts("sort_digits", "^", lambda d: "".join(sorted(d)), count, seed, min_digits, max_digits)


def _digit_prompts(
    task: str, mark: str, solve: Callable[[str], str], count: int, seed: int, min_digits: int, max_digits: int
) -> list[PromptRecord]:
    if not 1 <= min_digits <= max_digits:
        raise ConfigError(
            f"environment.kwargs: {task} needs 1 <= min_digits <= max_digits, got min_digits={min_digits}, "
            f"max_digits={max_digits}."
        )
    rng = random.Random(f"{task}/{seed}")
    records = []
    for index in range(count):
        digits = "".join(rng.choices("0123456789", k=rng.randint(min_digits, max_digits)))
        records.append(_record(task, seed, index, f"{digits}{mark}", {"answer": solve(digits)}))
    return records


@register_environment("run_length")
class RunLength(TextMatch):
    """``<count, two digits><letter>=`` asks for the letter ``count`` times; the data row's ``answer`` has it."""

    alphabet: ClassVar[str] = "0123456789=abcdef"

    @classmethod
    def generate_prompts(
        cls, count: int, seed: int, *, mean_count: float = 8.0, max_count: int = 30, letters: str = "abcdef"
    ) -> list[PromptRecord]:
        """Draw counts exponentially with ``mean_count``, rounded up and capped at ``max_count``; letters uniformly.

        Raises:
            ConfigError: an impossible parameter.
        """
        if mean_count <= 0 or not 1 <= max_count <= 99 or not letters:
            raise ConfigError(
                "environment.kwargs: run_length needs mean_count > 0, max_count in 1..99 and letters, got "
                f"mean_count={mean_count}, max_count={max_count}, letters={letters!r}."
            )
        rng = random.Random(f"run_length/{seed}")
        records = []
        for index in range(count):
            repeats = min(max_count, 1 + int(rng.expovariate(1 / mean_count)))
            letter = rng.choice(letters)
            records.append(_record("run_length", seed, index, f"{repeats:02d}{letter}=", {"answer": letter * repeats}))
        return records


@register_environment("guess_number")
class GuessNumber(Environment):
    """The hidden number is the data row's ``number``, in ``0 .. numbers - 1``. Each turn is one guess.

    A hit earns 1 and ends the episode. The last of ``max_turns`` guesses ends it too and earns at most 0.5, more the closer
    it is: a reward that ignores the distance teaches too slowly. A text that is no number in the range uses up a guess, is
    answered with ``!`` and earns nothing. Binary search needs at most ``log2(numbers) + 1`` guesses.

    Raises:
        ConfigError: ``max_turns`` < 1 or ``numbers`` < 2.
        DataError: the row has no ``number`` in the range.
    """

    is_blocking: ClassVar[bool] = False
    alphabet: ClassVar[str] = "0123456789?+-!"

    def __init__(self, extras: Mapping[str, Any], *, numbers: int = 10, max_turns: int = 4) -> None:
        super().__init__(extras)
        number = extras.get("number")
        for name, value, least in (("numbers", numbers, 2), ("max_turns", max_turns, 1)):
            if value < least:
                raise ConfigError(f"environment.kwargs.{name} must be at least {least}, got {value}.")
        if not isinstance(number, int) or not 0 <= number < numbers:
            raise DataError(f"GuessNumber needs a column 'number' with an integer in 0..{numbers - 1}, got {number!r}.")
        self._number = number
        self._numbers = numbers
        self._turns_left = max_turns
        self._turns = 0
        self._hit = False

    @classmethod
    def generate_prompts(cls, count: int, seed: int, *, numbers: int = 10) -> list[PromptRecord]:
        """Draw numbers uniformly; the prompt is always ``?``.

        Raises:
            ConfigError: ``numbers`` < 2.
        """
        if numbers < 2:
            raise ConfigError(f"environment.kwargs.numbers must be at least 2, got {numbers}.")
        rng = random.Random(f"guess_number/{seed}")
        return [_record("guess_number", seed, index, "?", {"number": rng.randrange(numbers)}) for index in range(count)]

    def step(self, action: str) -> EnvironmentStep:
        self._turns += 1
        self._turns_left -= 1
        # isdigit() alone accepts digits of other scripts.
        guess = int(action) if action.isascii() and action.isdigit() and int(action) < self._numbers else None
        self._hit = guess == self._number
        if self._hit or self._turns_left == 0:
            reward = 0.0
            if guess is not None:
                # Linear in the distance: 1 at the number, 0 at the largest possible distance.
                closeness = 1.0 - abs(guess - self._number) / (self._numbers - 1)
                reward = 1.0 if self._hit else closeness / 2
            return {"observations": [], "reward": reward, "done": True, "metadata": {}}
        hint = INVALID if guess is None else HIGHER if guess < self._number else LOWER
        return {"observations": [{"role": "user", "content": hint}], "reward": 0.0, "done": False, "metadata": {}}

    def get_metrics(self) -> dict[str, Any]:
        return {"hit": float(self._hit), "guesses": float(self._turns)}


def _record(task: str, seed: int, index: int, prompt: str, extras: dict[str, Any]) -> PromptRecord:
    return PromptRecord(
        uid=f"{task}-{seed}-{index}",
        prompt=[{"role": "user", "content": prompt}],
        env_extras=extras,
        data_source=task,
    )

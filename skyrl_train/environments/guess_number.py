"""Guess a number: each turn is one guess, the answer is ``+`` (higher) or ``-`` (lower). Multi-turn."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, ClassVar

from skyrl_train.environments.base import Environment, EnvironmentStep, PromptRecord
from skyrl_train.environments.registry import register_environment
from skyrl_train.errors import ConfigError, DataError

HIGHER, LOWER, INVALID = "+", "-", "!"


@register_environment("guess_number")
class GuessNumber(Environment):
    """The hidden number is the data row's ``number``, in ``0 .. numbers - 1``.

    A hit gives reward 1 and ends the episode. So does the last of ``max_turns`` guesses, with at most 0.5: the closer
    it is, the more, because a miss that says nothing about how near it was teaches too slowly. A text that is not a
    number in the range uses up a guess, is answered by ``!`` and is worth nothing. Binary search needs at most
    ``log2(numbers) + 1`` guesses.
    """

    is_blocking: ClassVar[bool] = False
    alphabet: ClassVar[str] = "0123456789?+-!"

    def __init__(self, extras: Mapping[str, Any], *, numbers: int = 10, max_turns: int = 4) -> None:
        """Raises:
        ConfigError: ``max_turns`` < 1 or ``numbers`` < 2.
        DataError: the row has no ``number`` in the range.
        """
        super().__init__(extras)
        number = extras.get("number")
        _check_numbers(numbers)
        if max_turns < 1:
            raise ConfigError(f"environment.kwargs.max_turns must be at least 1, got {max_turns}.")
        if not isinstance(number, int) or not 0 <= number < numbers:
            raise DataError(f"GuessNumber needs a column 'number' with an integer in 0..{numbers - 1}, got {number!r}.")
        self._number = number
        self._numbers = numbers
        self._turns_left = max_turns
        self._turns = 0
        self._hit = False

    @classmethod
    def generate_prompts(cls, count: int, seed: int, *, numbers: int = 10) -> list[PromptRecord]:
        """The numbers are uniform; the prompt is always ``?``.

        Raises:
            ConfigError: ``numbers`` < 2.
        """
        _check_numbers(numbers)
        rng = random.Random(f"guess_number/{seed}")
        return [
            PromptRecord(
                uid=f"guess_number-{seed}-{index}",
                prompt=[{"role": "user", "content": "?"}],
                env_extras={"number": rng.randrange(numbers)},
                data_source="guess_number",
            )
            for index in range(count)
        ]

    def step(self, action: str) -> EnvironmentStep:
        self._turns += 1
        self._turns_left -= 1
        guess = int(action) if action.isascii() and action.isdigit() else None
        if guess is not None and guess >= self._numbers:
            guess = None
        self._hit = guess == self._number
        done = self._hit or self._turns_left == 0
        return {
            "observations": [] if done else [{"role": "user", "content": self._answer(guess)}],
            "reward": self._reward(guess) if done else 0.0,
            "done": done,
            "metadata": {},
        }

    def get_metrics(self) -> dict[str, Any]:
        return {"hit": float(self._hit), "guesses": float(self._turns)}

    def _answer(self, guess: int | None) -> str:
        if guess is None:
            return INVALID
        return HIGHER if guess < self._number else LOWER

    def _reward(self, last_guess: int | None) -> float:
        if last_guess is None:
            return 0.0
        closeness = 1.0 - abs(last_guess - self._number) / (self._numbers - 1)
        return 1.0 if self._hit else closeness / 2


def _check_numbers(numbers: int) -> None:
    if numbers < 2:
        raise ConfigError(f"environment.kwargs.numbers must be at least 2, got {numbers}.")

"""Run-length expansion: ``07c=`` asks for ``ccccccc``. Lengths have a long tail, as in reasoning."""

from __future__ import annotations

import random
from typing import ClassVar

from skyrl_train.environments.base import PromptRecord
from skyrl_train.environments.positional_match import PositionalMatchEnvironment
from skyrl_train.environments.registry import register_environment
from skyrl_train.errors import ConfigError


@register_environment("run_length")
class RunLength(PositionalMatchEnvironment):
    """``<count, two digits><letter>=`` asks for the letter ``count`` times; the data row's ``answer`` has it."""

    alphabet: ClassVar[str] = "0123456789=abcdef"

    @classmethod
    def generate_prompts(
        cls, count: int, seed: int, *, mean_count: float = 8.0, max_count: int = 30, letters: str = "abcdef"
    ) -> list[PromptRecord]:
        """Counts are exponential with ``mean_count``, rounded up and capped at ``max_count``; letters are uniform.

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
            records.append(
                PromptRecord(
                    uid=f"run_length-{seed}-{index}",
                    prompt=[{"role": "user", "content": f"{repeats:02d}{letter}="}],
                    env_extras={"answer": letter * repeats},
                    data_source="run_length",
                )
            )
        return records

"""Sorting: ``4102^`` asks for ``0124``."""

from __future__ import annotations

import random
from typing import ClassVar

from skyrl_train.environments.base import PromptRecord
from skyrl_train.environments.positional_match import PositionalMatchEnvironment
from skyrl_train.environments.registry import register_environment
from skyrl_train.errors import ConfigError


@register_environment("sort_digits")
class SortDigits(PositionalMatchEnvironment):
    """``<digits>^`` asks for the digits in ascending order; the data row's ``answer`` has them."""

    alphabet: ClassVar[str] = "0123456789^"

    @classmethod
    def generate_prompts(cls, count: int, seed: int, *, min_digits: int = 2, max_digits: int = 5) -> list[PromptRecord]:
        """Lengths are uniform in ``min_digits..max_digits``, digits are uniform.

        Raises:
            ConfigError: an impossible parameter.
        """
        if not 1 <= min_digits <= max_digits:
            raise ConfigError(
                "environment.kwargs: sort_digits needs 1 <= min_digits <= max_digits, got "
                f"min_digits={min_digits}, max_digits={max_digits}."
            )
        rng = random.Random(f"sort_digits/{seed}")
        records = []
        for index in range(count):
            digits = "".join(rng.choices("0123456789", k=rng.randint(min_digits, max_digits)))
            records.append(
                PromptRecord(
                    uid=f"sort_digits-{seed}-{index}",
                    prompt=[{"role": "user", "content": f"{digits}^"}],
                    env_extras={"answer": "".join(sorted(digits))},
                    data_source="sort_digits",
                )
            )
        return records

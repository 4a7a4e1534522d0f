"""Copying: ``417>`` asks for ``417``. The easiest task: attention to one earlier position."""

from __future__ import annotations

import random
from typing import ClassVar

from skyrl_train.environments.base import PromptRecord
from skyrl_train.environments.positional_match import PositionalMatchEnvironment
from skyrl_train.environments.registry import register_environment
from skyrl_train.errors import ConfigError


@register_environment("copy_digits")
class CopyDigits(PositionalMatchEnvironment):
    """``<digits>>`` asks for the digits; the data row's ``answer`` has them."""

    alphabet: ClassVar[str] = "0123456789>"

    @classmethod
    def generate_prompts(cls, count: int, seed: int, *, min_digits: int = 3, max_digits: int = 3) -> list[PromptRecord]:
        """Lengths are uniform in ``min_digits..max_digits``, digits are uniform.

        Raises:
            ConfigError: an impossible parameter.
        """
        if not 1 <= min_digits <= max_digits:
            raise ConfigError(
                "environment.kwargs: copy_digits needs 1 <= min_digits <= max_digits, got "
                f"min_digits={min_digits}, max_digits={max_digits}."
            )
        rng = random.Random(f"copy_digits/{seed}")
        records = []
        for index in range(count):
            digits = "".join(rng.choices("0123456789", k=rng.randint(min_digits, max_digits)))
            records.append(
                PromptRecord(
                    uid=f"copy_digits-{seed}-{index}",
                    prompt=[{"role": "user", "content": f"{digits}>"}],
                    env_extras={"answer": digits},
                    data_source="copy_digits",
                )
            )
        return records

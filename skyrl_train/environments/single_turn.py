"""The environment for tasks whose reward comes from elsewhere: ``rollout.stages.reward.function``."""

from __future__ import annotations

from typing import ClassVar

from skyrl_train.environments.base import Environment, EnvironmentStep
from skyrl_train.environments.registry import register_environment


@register_environment("single_turn")
class SingleTurn(Environment):
    """Ends each episode after one answer, with reward 0."""

    is_blocking: ClassVar[bool] = False

    def step(self, action: str) -> EnvironmentStep:
        return {"observations": [], "reward": 0.0, "done": True}

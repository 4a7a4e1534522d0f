"""Whether a plan fits the memory of the machine that it is made on, as far as the model's shape tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_train.config.machine import Machine
from skyrl_train.config.needs import needs
from skyrl_train.config.plan import Plan
from skyrl_train.config.schema.trainer import TrainerConfig

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Fit:
    """What does not fit. An impossible plan is refused; a tight one fits if it is lucky, and is only told."""

    impossible: list[str]
    tight: list[str]


def fit(plan: Plan, machine: Machine) -> Fit:
    """Compares what training holds with what is there. Engines are left out: they may be anywhere, and come and go."""
    impossible, tight = [], []
    for need in needs(plan.config, plan.memory, machine):
        state, there = need.state_bytes, need.there_bytes
        if state > there:
            impossible.append(
                f"{need.what}: {need.kept} take {_gib(state)}, and there are {_gib(there)}. {need.remedy}"
            )
        elif state + need.activation_bytes > there:
            tight.append(
                f"{need.what}: {_gib(state)} of {need.kept}, and up to "
                f"{_gib(need.activation_bytes)} of activations, but there are {_gib(there)}. "
                f"{_fewer_activations(plan.config.trainer, need.models)} trainer.micro_batch_tokens, or: {need.remedy}"
            )
    return Fit(impossible, tight)


def _fewer_activations(trainer: TrainerConfig, models: Sequence[str]) -> str:
    """What to set, ending in what to do with the tokens of a micro-batch."""
    again = {
        "policy": trainer.policy.gradient_checkpointing,
        "critic": trainer.critic.gradient_checkpointing,
    }
    keep = [f"trainer.{model}.gradient_checkpointing=true" for model in models if not again[model]]
    return f"Set {' and '.join(keep)}, lower" if keep else "Lower"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:,.1f} GiB"

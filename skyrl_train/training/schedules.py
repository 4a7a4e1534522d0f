"""Learning-rate schedules: pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

from skyrl_train.algorithms.registry import Registry, called_by_setting
from skyrl_train.errors import ConfigError

ROUNDING = 1e-6  # by which the factor of a schedule may be below 0

# Maps the progress of the decay, in [0, 1), to the factor of the peak learning rate.
SCHEDULES: Registry[Callable[[float], float]] = Registry("trainer.policy.optimizer_config.scheduler")
register_scheduler = SCHEDULES.register


@register_scheduler("constant")
def constant(progress: float) -> float:
    """Always 1."""
    return 1.0


@register_scheduler("linear")
def linear(progress: float) -> float:
    """From 1 at progress 0 down to 0 at progress 1."""
    return 1.0 - progress


@register_scheduler("cosine")
def cosine(progress: float) -> float:
    """Half a cosine from 1 at progress 0 down to 0 at progress 1 (SGDR, arXiv 1608.03983)."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def learning_rate(step: int, *, peak: float, schedule: str, num_warmup_steps: int, total_steps: int) -> float:
    """Return the learning rate of step ``t = 1, 2, ..., total_steps``: a pure function, so resuming needs no scheduler state.

    Warm-up rises linearly, ``peak * t / num_warmup_steps``: step 1 already learns. The decay starts at ``peak`` in the step
    after warm-up and would reach 0 in the step after the last, so every step of the run learns.

    Raises:
        ConfigError: the schedule is unknown, raised, or its factor is no finite number of at least 0.
    """
    if step <= num_warmup_steps:
        return peak * step / num_warmup_steps
    decay_steps = max(total_steps - num_warmup_steps, 1)
    progress = min((step - 1 - num_warmup_steps) / decay_steps, 1.0)
    function = SCHEDULES.get(schedule)
    with called_by_setting("optimizer_config.scheduler", schedule):
        factor = float(function(progress))
    if not -ROUNDING <= factor < math.inf:  # so that NaN, which would reach every weight, is refused
        raise ConfigError(
            f"The learning-rate schedule {schedule!r} returned {factor} at the progress {progress:g}. Return a finite factor of "
            "the peak rate, at least 0."
        )
    return peak * max(factor, 0.0)

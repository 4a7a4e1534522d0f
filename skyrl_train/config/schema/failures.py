"""What a run endures before it stops: ``trainer.failures``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

# What happens to a prompt whose rollout failed after all retries: the next prompt takes its seat, its seat is filled by
# samples without signal, or the run stops with a checkpoint. (The functional form, because "raise" is a keyword.)
FailurePolicy = StrEnum("FailurePolicy", {"replace": "replace", "mask": "mask", "raise": "raise"})


@dataclass
class FailureConfig:
    """What is tried again, and what stops the run."""

    rollout_timeout_s: float | None = None  # wall-clock limit of one group's generation; None: no limit
    max_rollout_retries: int = 1
    on_rollout_failure: FailurePolicy = FailurePolicy["replace"]
    max_failed_rollouts: int = 16  # groups that may fail for good before the run stops with a checkpoint
    # In a row: optimizer steps skipped because loss or gradient is not finite; then it stops
    max_nonfinite_steps: int = 4
    max_engine_failures: int = 0  # times that a group may find no engine for fleet.wait_timeout_s and still go on
    # Neither a group nor a step ends for so long: the log says what is stuck, and since when
    stuck_after_s: float = 900.0

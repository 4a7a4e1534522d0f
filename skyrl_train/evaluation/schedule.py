"""Which policy versions are evaluated. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EvaluationSchedule:
    """Every ``interval`` steps; before the first one if asked. Never with ``interval`` 0.

    The policy of a run's last step is evaluated as well; which one that is shows only when the run ends.
    """

    interval: int
    before_train: bool

    def due(self, step: int) -> bool:
        """Whether the policy after ``step`` is evaluated (0: the one that the run starts from)."""
        if not self.interval:
            return False
        if step == 0:
            return self.before_train
        return step % self.interval == 0

    def missed(self, step: int, reported: Collection[int]) -> bool:
        """Whether a run that starts or resumes at ``step`` owes an evaluation.

        It does where the newest one that was due by then has left no row. The weights that it was due for may be gone;
        then those of ``step`` are measured, and labelled as such.

        Args:
            reported: the steps whose evaluations have a row.
        """
        newest = next((earlier for earlier in range(step, -1, -1) if self.due(earlier)), None)
        return newest is not None and not any(newest <= other <= step for other in reported)

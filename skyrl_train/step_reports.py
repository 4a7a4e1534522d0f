"""What a finished step says of itself: its metrics and samples, and what became of the prompts since the step before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_train.observability.step_metrics import step_metrics
from skyrl_train.rollout.group import RolloutGroup
from skyrl_train.rollout_plane import RolloutPlane
from skyrl_train.trainer_parts import TrainerParts


@dataclass(frozen=True)
class TrainedStep:
    """A finished optimizer step: its groups in the order in which they were trained, and what its phases measured."""

    batch: Sequence[RolloutGroup]
    metrics: dict[str, float]


class StepReports:
    """Writes steps to ``parts.reporter``. What counts up over a run is reported as the difference to the step before."""

    def __init__(self, parts: TrainerParts, rollout: RolloutPlane) -> None:
        self._parts = parts
        self._rollout = rollout
        self._step_ended_s = parts.clock()
        self._tokens_reported = 0
        self._untrained_reported: dict[str, int] = {}  # prompts by what became of them

    def begin(self) -> None:
        """The first step begins now: what start-up took is neither its time nor idleness."""
        self._step_ended_s = self._parts.clock()
        self._rollout.workers.slots.take_idle_fraction()

    def write(self, step: int, trained: TrainedStep, *, checkpoint_step: int | None) -> None:
        """Writes the step's metrics and samples, and refreshes the screen.

        Args:
            checkpoint_step: of the newest checkpoint on disk.
        """
        trained.metrics.update(self._rollout.stages.take_metrics())
        self._parts.reporter.step(
            step,
            trained.batch,
            self._metrics(step, trained),
            decode=self._parts.client.decode,
            untrained=self._newly_untrained(),
            checkpoint_step=checkpoint_step,
        )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of it. JSON-able."""
        return {"reported": self._untrained_reported}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint."""
        self._untrained_reported = dict(state.get("reported", {}))  # checkpoints of earlier versions do not have it

    def _metrics(self, step: int, trained: TrainedStep) -> dict[str, float]:
        now, tokens = self._parts.clock(), self._parts.client.generated_tokens
        step_s, self._step_ended_s = now - self._step_ended_s, now
        new_tokens, self._tokens_reported = tokens - self._tokens_reported, tokens
        rollout = self._rollout
        return step_metrics(
            step,
            trained.batch,
            trained.metrics,
            counts=rollout.staleness.counts,
            totals={
                "async/failed_and_masked": rollout.workers.failed_and_masked,
                "async/engine_failures": rollout.runner.engine_failures,
                "async/retries": rollout.runner.retries,
                **self._parts.client.recordings.metrics(),
            },
            max_staleness_steps=rollout.staleness.max_staleness_steps,
            step_s=step_s,
            idle_fraction=rollout.workers.slots.take_idle_fraction(),
            generated_tokens=new_tokens,
        )

    def _newly_untrained(self) -> dict[str, list[int]]:
        """The ordinals that failed, were filtered or dropped since the last call."""
        prompts, reported = self._rollout.prompts, self._untrained_reported
        lists = {"failed": prompts.failed, "filtered": prompts.filtered, "dropped": prompts.dropped}
        self._untrained_reported = {outcome: len(ordinals) for outcome, ordinals in lists.items()}
        return {outcome: ordinals[reported.get(outcome, 0) :] for outcome, ordinals in lists.items()}

"""Where a finished step goes: the run folder, the trackers and the screen."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console

from skyrl_train.config.schema.run import RunConfig
from skyrl_train.evaluation.metrics import EvaluationResult
from skyrl_train.observability.live import Failures, StepReport, View, make_view, shortened
from skyrl_train.observability.run_folder import RunFolder
from skyrl_train.observability.tracking import Tracker, make_trackers
from skyrl_train.rollout.group import RolloutGroup


class Reporter:
    """Writes a run's steps. ``begin`` comes first, ``close`` last.

    Args:
        decode: tokens to text, for the samples.
    """

    def __init__(self, config: RunConfig, run_folder: RunFolder, console: Console, total_steps: int) -> None:
        self._config = config
        self._folder = run_folder
        self._console = console
        self._total_steps = total_steps
        self.start_step = 0  # the step that this process goes on from
        self._last_reason = ""  # of an attempt at a group that failed
        self._view: View | None = None
        self._tracker: Tracker | None = None

    def begin(self, step: int) -> None:
        """Opens everything for the steps after ``step``; what was written about later ones is forgotten."""
        self.start_step = step
        self._folder.truncate_after(step)
        self._tracker = make_trackers(self._folder.logs, self._config, step)
        title = f"{self._folder.path} ({self._config.trainer.mode.value})"
        self._view = make_view(self._console, self._total_steps, title, start_step=step)
        if step:
            self._view.note(f"resuming after step {step}")

    def step(
        self,
        step: int,
        batch: Sequence[RolloutGroup],
        metrics: Mapping[str, float],
        *,
        decode: Callable[[Sequence[int]], str],
        untrained: Mapping[str, Sequence[int]],
        checkpoint_step: int | None,
    ) -> None:
        """Writes one step's metrics and samples (a line per sequence), and refreshes the screen.

        Args:
            untrained: the ordinals of the prompts that "failed" for good, were "filtered" or "dropped" since the previous
                step.
        """
        # The ordinals make "every prompt is trained or reported, once" checkable from the outside.
        ordinals = {"ordinals": [group.ordinal for group in batch]}
        ordinals |= {f"{outcome}_ordinals": list(some) for outcome, some in untrained.items()}
        self._folder.append_metrics(step, {**metrics, **ordinals})
        self._folder.append_samples(
            step,
            (
                {
                    "ordinal": group.ordinal,
                    "uid": group.uid,
                    "sample": index,
                    "prompt": decode(sequence.prompt_token_ids),
                    "response": decode(sequence.response_ids),
                    "reward": sample.reward,
                    "stop_reason": sequence.stop_reason,
                    "oldest_version": group.oldest_version,
                }
                for group in batch[: self._config.trainer.samples_per_step]
                for index, sample in enumerate(group.samples)
                for sequence in sample.sequences
            ),
        )
        if self._tracker is not None:
            self._tracker.log(step, metrics)
        if self._view is not None:
            failures = self._failures(int(metrics["async/failed"]), int(metrics["async/retries"]))
            self._view.update(step_report(step, metrics, checkpoint_step, failures))

    def evaluated(self, result: EvaluationResult) -> None:
        """Writes what an evaluation found, under the step whose policy it measured, and says it on the screen."""
        self._folder.append_evaluation(result.version, result.row)
        if self._tracker is not None:
            self._tracker.log(result.version, result.metrics)
        self.note(result.headline)

    @property
    def evaluated_steps(self) -> set[int]:
        """The steps whose policies have been evaluated."""
        return {row["step"] for row in self._folder.read_evaluations()}

    def attempt_failed(self, name: str, reason: str) -> None:
        """An attempt at what messages call ``name`` has failed. The first goes to the screen at once, the others as a count."""
        if not self._last_reason:
            log = self._folder.logs / "train.log"
            self.note(f"{name}: an attempt failed: {shortened(reason)} (more are counted; all are in {log})")
        self._last_reason = reason

    def waiting(self, in_flight: int, failed: int, retries: int) -> None:
        """What the run is busy with, for the screen; called every second or so.

        Args:
            in_flight: groups that are being generated.
            failed: groups that have failed for good.
            retries: attempts at a group beyond the first.
        """
        if self._view is not None:
            self._view.waiting(in_flight, self._failures(failed, retries))

    def _failures(self, groups: int, retries: int) -> Failures:
        allowed = self._config.trainer.failures.max_failed_rollouts
        return Failures(groups, allowed, retries, self._last_reason)

    def note(self, text: str) -> None:
        """A line for the screen."""
        if self._view is not None:
            self._view.note(text)
        else:
            self._console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leaves the last state on the screen and flushes the trackers. Idempotent."""
        if self._tracker is not None:
            self._tracker.close()
            self._tracker = None
        if self._view is not None:
            self._view.close()
            self._view = None


def step_report(step: int, metrics: Mapping[str, float], checkpoint_step: int | None, failures: Failures) -> StepReport:
    """What the screen shows of a step's metrics."""
    step_s = metrics["time/step"] or 1.0
    return StepReport(
        step=step,
        reward=metrics.get("reward/mean", math.nan),  # a step may have no sample
        lag_mean=metrics["async/lag_mean"],
        lag_max=int(metrics["async/lag_max"]),
        in_flight=int(metrics["async/in_flight"]),
        buffered=int(metrics["async/buffered"]),
        generated_tokens_per_s=metrics["inference/tokens_per_second"],
        trained_tokens_per_s=metrics["policy/tokens_per_second"],
        wait_for_batch=min(1.0, metrics["time/wait_for_batch"] / step_s),
        wait_for_policy=metrics["async/idle_fraction"],
        checkpoint_step=checkpoint_step,
        failures=failures,
    )

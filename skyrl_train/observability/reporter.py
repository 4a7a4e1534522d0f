"""The outputs of a finished step: the run folder, the trackers and the screen."""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from skyrl_train.config.schema import RunConfig
from skyrl_train.observability.advice import Advice, AdviceHistory, Row, advise, edge_rows
from skyrl_train.observability.failures import FailureLog, shortened
from skyrl_train.observability.run_folder import TRAINER_LOG, RunFolder, read_jsonl, read_scores
from skyrl_train.observability.samples import RecordedGroup, rows_of
from skyrl_train.observability.screen import (
    Failures,
    PlainView,
    StepReport,
    TerminalView,
    make_view,
    spinner,
    start_up_line,
    visible,
)
from skyrl_train.observability.trackers.feed import NO_TRACKERS, TrackerFeed
from skyrl_train.types import RolloutGroup

logger = logging.getLogger(__name__)

SAMPLE_CHARACTERS = 40  # of a prompt and of a response on the screen
LAGS = "staleness/histogram/"
ALIVE_S = 20.0  # between two events of a part of the start; a third of the time after which a run counts as silent
KEPT_FAILURES = 1000  # for advice
FAILURE_WIDTH = 600  # characters; the end of a message has the remedy


class Reporter:
    """Writes the steps of a run. Call ``begin`` first and ``close`` last.

    Args:
        page_url: of the page that shows the run, for the screen.

    Attributes:
        start_step: the step from which this process continues.
    """

    def __init__(
        self,
        config: RunConfig,
        run_folder: RunFolder,
        console: Console,
        total_steps: int,
        trackers: TrackerFeed = NO_TRACKERS,
        page_url: str | None = None,
    ) -> None:
        self._config = config
        self._folder = run_folder
        self._console = console
        self._total_steps = total_steps
        self._trackers = trackers
        self._page_url = page_url
        self.start_step = 0
        self._failure_log = FailureLog(run_folder.logs)
        self._last_reason = ""  # of a failed attempt at a group
        self._evaluation = self._sample = ""  # the newest ones, for the screen
        # The inputs of advice, as a reader of the run folder has them.
        self._metric_rows: list[Row] = []
        self._failed_attempts: deque[dict[str, Any]] = deque(maxlen=KEPT_FAILURES)
        self._settings = asdict(config)
        self._history = AdviceHistory()
        self._view: TerminalView | PlainView | None = None

    @contextmanager
    def start_up(self, part: str) -> Iterator[None]:
        """Show that ``part`` of the start-up runs, and how long it took."""
        events = self._folder.events
        began, over = events.now(), threading.Event()

        def record() -> None:
            # A reader takes a run that records nothing for a killed one, and a large model loads for minutes.
            while not over.wait(ALIVE_S):
                events.record("start_up", name=part, t0=began, t1=None)

        events.record("start_up", name=part, t0=began, t1=None)
        alive = threading.Thread(target=record, name="start-up", daemon=True)
        alive.start()
        try:
            with spinner(self._console, part):
                yield
        finally:
            over.set()
            alive.join()
        ended = events.now()
        events.record("start_up", name=part, t0=began, t1=ended)
        seconds = ended - began
        logger.info("start-up: %s took %.1f s", part, seconds)
        self.note(start_up_line(part, seconds))

    def begin(self, step: int) -> None:
        """Open all outputs for the steps after ``step``, and remove data about later steps."""
        self.start_step = step
        # The steps after the checkpoint run again and write their lines again.
        for file in (self._folder.metrics, self._folder.evaluations):
            file.truncate_after(step)
        self._folder.samples.discard_after(step)
        self._metric_rows = edge_rows(read_jsonl(self._folder.metrics.path))
        title = f"{self._folder.path} ({self._config.trainer.mode})" + (f" {self._page_url}" if self._page_url else "")
        self._view = make_view(self._console, self._total_steps, title, start_step=step)
        if step:
            self._view.note(f"resuming after step {step}")
        self._trackers.begin(step, self.note)

    def step(
        self,
        step: int,
        batch: Sequence[RolloutGroup],
        metrics: Mapping[str, float],
        *,
        elapsed_s: float,
        samples: Sequence[RecordedGroup],
        decode: Callable[[Sequence[int]], str],
        untrained: Mapping[str, Sequence[int]],
        checkpoint_step: int | None,
    ) -> None:
        """Write one step's metrics and samples, and refresh the screen.

        Args:
            elapsed_s: seconds of training up to the end of this step, over all commands of the run.
            samples: the groups to record.
            decode: converts tokens to text, special ones included; called in another thread.
            untrained: group indices that "failed", were "filtered" or "dropped" since the previous step.
        """
        # The group indices allow an external check that every prompt is trained or reported exactly once.
        group_indices = {"group_indices": [group.group_index for group in batch]}
        group_indices |= {f"{outcome}_group_indices": list(some) for outcome, some in untrained.items()}
        times = {"time": round(time.time(), 3), "elapsed_s": round(elapsed_s, 3)}
        self._folder.metrics.append({"step": step, **times, **metrics, **group_indices})
        self._metric_rows = edge_rows([*self._metric_rows, {**times, **metrics}])
        advice = self._advise(step)
        if samples:
            self._folder.samples.write("train", step, functools.partial(self._rows, "train", step, samples, decode))
        self._trackers.log(step, metrics)
        if self._view is not None:
            failures = self._failures(int(metrics["async/failed"]), int(metrics["async/retries"]))
            report = step_report(step, metrics, checkpoint_step, failures)
            self._view.update(replace(report, evaluation=self._evaluation, sample=self._sample, advice=advice))

    def _rows(
        self, phase: str, step: int, samples: Sequence[RecordedGroup], decode: Callable[[Sequence[int]], str]
    ) -> list[dict[str, Any]]:
        """Return the rows of samples, and show them in the trackers and on the screen. Runs in the thread of the samples."""
        rows = rows_of(phase, step, samples, decode)
        if rows:
            self._trackers.log_samples(phase, step, rows)
        if rows and phase == "train":
            row = rows[0]
            # The ends of a long prompt and of a long response say most.
            prompt, response = row["prompt"][-SAMPLE_CHARACTERS:], row["response"][-SAMPLE_CHARACTERS:]
            self._sample = f"{row['reward']:.2f}  lag {row['lag']}  {prompt!r} -> {response!r}"
        return rows

    def evaluated(
        self,
        step: int,
        row: Mapping[str, Any],
        metrics: Mapping[str, float],
        headline: str,
        *,
        samples: Sequence[RecordedGroup] = (),
        decode: Callable[[Sequence[int]], str] = str,
    ) -> None:
        """Write the result of an evaluation under the step whose policy it measured.

        Args:
            row: the line of ``eval.jsonl``, without the step.
            headline: one line for the screen.
            samples, decode: see :meth:`step`.
        """
        self._folder.evaluations.append({"step": step, **row})
        if samples:
            self._folder.samples.write("eval", step, functools.partial(self._rows, "eval", step, samples, decode))
        self._trackers.log(step, metrics)
        self._evaluation = visible(headline.removeprefix("evaluation of "))
        self.note(headline)

    def sync(self) -> None:
        """Put the rows so far on the disk. Blocks; called in another thread.

        Raises:
            SkyRLError: the disk is full or gone.
        """
        self._folder.metrics.sync()
        self._folder.evaluations.sync()

    @property
    def evaluated_steps(self) -> set[int]:
        """Steps whose policies have been evaluated."""
        return {row["step"] for row in read_jsonl(self._folder.evaluations.path)}

    def scores(self, metric: str) -> dict[int, float]:
        """Return the value of a metric of each evaluated step that has one."""
        return read_scores(self._folder.evaluations.path, metric)

    def attempt_failed(self, name: str, reason: str, error: BaseException | None = None) -> None:
        """Report a failed attempt at the group ``name``. The first one of each kind is shown at once, the others as a count."""
        place = self._failure_log.record(name, reason, error)
        if place is not None:
            where = f" at {place}" if place else ""
            self.note(
                f"{name}: an attempt failed{where}: {shortened(reason, FAILURE_WIDTH)} (further failures are counted; "
                f"{self._folder.logs / TRAINER_LOG} has the traceback)"
            )
        self._last_reason = reason
        self._failed_attempts.append({"t": time.time(), "reason": reason})

    def _advise(self, step: int) -> list[Advice]:
        """Return the advice after ``step``. Record when each begins and ends; show alarms when they do."""
        advice = advise(self._metric_rows, self._failed_attempts, self._settings)
        begun, ended = self._history.update(step, advice)
        for state, some in (("begins", begun), ("ends", ended)):
            for each in some:
                self._folder.events.record("alarm", state=state, step=step, **asdict(each))
                logger.info("step %d: %s %s", step, state, each)
                if each.level == "alarm" and self._view is not None:
                    self._view.note(str(each) if state == "begins" else f"alarm over: {each.id}")
        return advice

    def waiting(self, in_flight: int, failed: int, retries: int, oldest_s: float) -> None:
        """Show that the run is alive. Called about every second.

        Args:
            in_flight: groups in generation.
            failed: groups that failed for good.
            retries: attempts at a group beyond the first.
            oldest_s: age of the oldest group in generation; NaN: there is none.
        """
        if self._view is not None:
            self._view.waiting(in_flight, self._failures(failed, retries), oldest_s)

    def _failures(self, groups: int, retries: int) -> Failures:
        allowed = self._config.trainer.failures.max_failed_rollouts
        return Failures(groups, allowed, retries, self._last_reason)

    def note(self, text: str) -> None:
        """Show a line on the screen."""
        self._folder.events.record("note", text=text)
        text = visible(text)  # it may have the name of a user's prompt
        view = self._view  # another thread may close it meanwhile
        if view is not None:
            view.note(text)
        else:
            self._console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the last state on the screen. Idempotent."""
        self._failure_log.close()
        if self._view is not None:
            self._view.close()
            self._view = None


def step_report(step: int, metrics: Mapping[str, float], checkpoint_step: int | None, failures: Failures) -> StepReport:
    """Convert a step's metrics to the figures on the screen."""
    step_s = metrics["time/step"] or 1.0
    sync_s = metrics.get("time/gather", 0.0)
    if "time/wait_for_weight_sync" in metrics:  # transfer and pause then lie beside training, and behind an evaluation
        sync_s += max(0.0, metrics["time/wait_for_weight_sync"] - metrics.get("time/wait_for_evaluation", 0.0))
    else:
        sync_s += metrics.get("time/transfer", 0.0) + metrics.get("time/pause", 0.0)
    return StepReport(
        step=step,
        reward=metrics.get("reward/mean", math.nan),  # a step may have no sample
        lag_mean=metrics["staleness/mean"],
        lag_max=int(metrics["staleness/max"]),
        in_flight=int(metrics["async/in_flight"]),
        buffered=int(metrics["async/buffered"]),
        ahead=metrics.get("async/generate_ahead_steps", math.nan),
        generated_tokens_per_s=metrics["inference/tokens_per_second"],
        trained_tokens_per_s=metrics["policy/tokens_per_second"],
        wait_for_batch=min(1.0, metrics["time/wait_for_batch"] / step_s),
        wait_for_policy=metrics["async/idle_fraction"],
        train=min(1.0, metrics.get("time/train", 0.0) / step_s),
        weight_sync=min(1.0, sync_s / step_s),
        checkpoint_step=checkpoint_step,
        failures=failures,
        running=metrics.get("inference/running_requests", math.nan),
        waiting=metrics.get("inference/waiting_requests", math.nan),
        kv_cache_usage=metrics.get("inference/kv_cache_usage", math.nan),
        oldest_s=metrics.get("generate/latency_s_oldest", math.nan),
        oldest_lag=int(metrics.get("staleness/oldest_in_flight", 0)),
        reward_std=metrics.get("reward/std", math.nan),
        entropy=metrics.get("loss/entropy", math.nan),
        grad_norm=metrics.get("policy/grad_norm", math.nan),
        ess=metrics.get("off_policy/ess", math.nan),
        no_signal=metrics.get("reward/zero_variance_groups", math.nan),
        truncated=metrics.get("generate/truncated", math.nan),
        groups_by_lag={
            int(name.removeprefix(LAGS)): int(number) for name, number in metrics.items() if name.startswith(LAGS)
        },
    )

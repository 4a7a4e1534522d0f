"""Evaluates policy versions while training continues.

    trainer ──trained(t)──> separate engines: copy the weights ─┐
            ──served(v)───> the run's engines ──────────────────┴──> one version after the other ──> row of eval.jsonl
            <──hold()────── the run's engines: until the evaluation has ended

| loop | consumes | waits for | is unblocked by | produces |
|---|---|---|---|---|
| ``trained``, ``served`` (the trainer) | a step that is due | no pending version | a loaded version | a pending version |
| an evaluation (a task) | a pending version | its turn; tokens | the end of the previous one; engines | a result |
| ``hold`` (the trainer) | | free engines of the run | the end of the evaluation on them | |

No version is skipped: at most one evaluation runs and one is pending with its copy of the weights. When a third is due (only
with separate engines that are slower than the interval), ``trained`` waits, and training with it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from skyrl_train.config.schema import RunConfig
from skyrl_train.environments.base import PromptRecord
from skyrl_train.errors import EngineError, WeightSyncError
from skyrl_train.evaluation.engines import EvaluationEngines
from skyrl_train.evaluation.metrics import EvaluatedPrompt, EvaluationResult
from skyrl_train.evaluation.rollouts import PromptRunner, Score
from skyrl_train.events.log import NO_EVENTS, EventLog
from skyrl_train.observability.reporter import Reporter
from skyrl_train.runtime.concurrency import Signal, gather_or_cancel
from skyrl_train.weight_sync.syncer import StagedWeights

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EvaluationSchedule:
    """Which policy versions are evaluated: every ``interval`` steps, and before the first step if asked. 0: none. Pure.

    The policy after the last step of a run is evaluated too; which one that is becomes known only when the run ends.
    """

    interval: int
    before_train: bool

    def due(self, step: int) -> bool:
        """Return whether the policy after ``step`` is evaluated (0: the initial policy)."""
        if not self.interval:
            return False
        if step == 0:
            return self.before_train
        return step % self.interval == 0

    def missed(self, step: int, reported: Collection[int]) -> bool:
        """Return whether a run that starts or resumes at ``step`` lacks an evaluation.

        It does if the newest one that was due has no row. The weights for which it was due may be lost; then the weights of
        ``step`` are evaluated, under their own version.

        Args:
            reported: steps whose evaluations have a row.
        """
        newest = next((earlier for earlier in range(step, -1, -1) if self.due(earlier)), None)
        return newest is not None and not any(newest <= other <= step for other in reported)


@dataclass
class _EvaluationProgress:
    """Progress of the running evaluation. Times are in seconds of the clock."""

    version: int
    since: float
    ended: int = 0  # prompts
    under_way: dict[str, float] = field(default_factory=dict)  # uid of a prompt -> start time


class Evaluation:
    """All evaluations of a run. With ``trainer.eval.interval=0`` there are none, and every call returns at once.

    A sample that fails twice counts as not passed. If engines fail, the evaluation ends without a row, because its figures
    would not describe the policy; training continues. Any other error (a token of another version, a full disk) is stored in
    ``error`` and ends the run.

    Args:
        prompts: prompts of the evaluation; may be empty with ``interval=0``.
        reporter: receives each result.
        changed: notified when an evaluation begins, has its weights, or ends.
        score: the run's reward function, if it has one apart from its generator.
        on_progress: called when all samples of a prompt have ended.
        events: the record of the run.

    Attributes:
        error: the first error that ends the run.
        cancelled: whether an evaluation was cancelled; the resumed run makes up for it.
    """

    def __init__(
        self,
        config: RunConfig,
        engines: EvaluationEngines,
        prompts: Sequence[PromptRecord],
        *,
        reporter: Reporter,
        changed: Signal,
        score: Score | None = None,
        on_progress: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
        events: EventLog = NO_EVENTS,
    ) -> None:
        settings = config.trainer.eval
        self._schedule = EvaluationSchedule(settings.interval, settings.before_train)
        self._engines = engines
        self._prompts = prompts
        self._rollouts = PromptRunner(config, engines, score)
        self._max_parallel = settings.max_parallel
        self._reporter = reporter
        self._changed = changed
        self._on_progress = on_progress
        self._clock = clock
        self._events = events
        self.error: BaseException | None = None
        self.cancelled = False
        self._tasks: set[asyncio.Task[None]] = set()  # the running and the pending evaluation
        self._running: _EvaluationProgress | None = None
        self._pending: int | None = None  # a version whose weights are in a staging area, not yet loaded
        self._newest = -1  # the newest version whose evaluation has begun, before a resume or since
        self._stopped = False

    # Calls of the trainer -----------------------------------------------------------------------------------------

    async def start(self, step: int, reported: Collection[int]) -> None:
        """Begin the evaluation that is due or was interrupted when the run starts or resumes after ``step``.

        The engines serve that version, and its weights do not change before this returns.

        Args:
            reported: steps whose evaluations have a row.
        """
        await self._engines.start()
        # The newest version with a row: conclude() must not evaluate it again.
        self._newest = max(reported, default=-1)
        if self._schedule.missed(step, reported):
            await self._begin(step)

    async def trained(self, step: int) -> None:
        """Begin an evaluation on separate engines if one is due. The weights after ``step`` do not change before this returns."""
        if not self._engines.shared and self._schedule.due(step):
            await self._begin(step)

    async def served(self, version: int) -> None:
        """Begin an evaluation on the run's engines if one is due. They serve ``version`` until :meth:`hold` has returned."""
        if self._engines.shared and self._schedule.due(version):
            await self._begin(version)

    async def hold(self) -> dict[str, float]:
        """Wait until the run's engines may get other weights. Return the waiting time as a metric.

        Raises:
            Exception: ``error``, if there is one.
        """
        waits, started = self._engines.shared and bool(self._tasks), self._clock()
        if waits:
            with self._events.span("wait_for_evaluation"):
                await self._changed.wait_until(lambda: not self._tasks)
        if self.error is not None:
            raise self.error
        return {"time/wait_for_evaluation": self._clock() - started} if waits else {}

    async def conclude(self, step: int) -> None:
        """Evaluate the policy after the last ``step``, unless that is done, and wait for all evaluations.

        The weights do not change, and the run's engines serve that version if it needs them.

        Raises:
            Exception: ``error``, if there is one.
        """
        if self._lacks(step):
            await self._begin(step)
        await self.finish()

    def needs_engines(self, step: int) -> bool:
        """Return whether :meth:`conclude` evaluates the policy after ``step`` on the run's engines."""
        return self._engines.shared and self._lacks(step)

    def _lacks(self, step: int) -> bool:
        return self._schedule.interval > 0 and self._newest < step

    async def finish(self) -> None:
        """Wait until all evaluations have ended.

        Raises:
            Exception: ``error``, if there is one.
        """
        await self._changed.wait_until(lambda: not self._tasks)
        if self.error is not None:
            raise self.error

    def due(self, step: int) -> bool:
        """Return whether the policy after ``step`` is evaluated; see :class:`EvaluationSchedule`."""
        return self._schedule.due(step)

    @property
    def unfinished(self) -> set[int]:
        """Versions whose evaluation has begun and not ended."""
        running = None if self._running is None else self._running.version
        return {version for version in (running, self._pending) if version is not None}

    def stop(self) -> None:
        """Cancel all evaluations and begin no more. A cancelled one leaves no row."""
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        self._changed.notify()

    async def aclose(self) -> None:
        """Stop, wait until all evaluations have ended, and close separate engines."""
        self.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._engines.aclose()

    def describe(self) -> list[str]:
        """Return one line for each activity."""
        lines: list[str] = []
        if self._running is not None:
            now, running = self._clock(), self._running
            lines.append(
                f"evaluation of version {running.version}: {running.ended} of {len(self._prompts)} prompts have ended, "
                f"since {now - running.since:.0f} s"
            )
            lines += [
                f"evaluation prompt {uid!r}: since {now - since:.0f} s" for uid, since in running.under_way.items()
            ]
        if self._pending is not None and len(self._tasks) > 1:
            lines.append(f"evaluation of version {self._pending}: waits for its turn")
        return lines

    # Evaluations --------------------------------------------------------------------------------------------------

    async def _begin(self, version: int) -> None:
        """Start an evaluation. First wait until no other one is pending."""
        await self._changed.wait_until(lambda: self._pending is None or self._stopped)
        if self.error is not None:
            raise self.error
        # Pending from here on, before the copy: the next version that is due has to wait for this one.
        self._pending = self._newest = version
        staged = None
        if not self._stopped:
            try:
                staged = await self._engines.stage(version)
            except WeightSyncError as error:
                self._pending = None
                self._give_up(version, error)
                return
        if self._stopped:  # before or while the weights were copied
            self.cancelled = True
            return
        # The weights are copied: training may continue while the task waits for its turn.
        task = asyncio.create_task(self._run(version, staged), name=f"evaluation-{version}")
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    async def _run(self, version: int, staged: StagedWeights | None) -> None:
        await self._changed.wait_until(lambda: self._running is None)
        self._running = progress = _EvaluationProgress(version, self._clock())
        began = self._events.now()
        try:
            await self._engines.load(version, staged)
            self._pending = None
            self._changed.notify()
            # The weights are loaded, so the staging area is free for the next evaluation that is due.
            slots = asyncio.Semaphore(self._max_parallel)
            prompts = await gather_or_cancel(
                self._run_prompt(index, progress, slots) for index in range(len(self._prompts))
            )
        except (EngineError, WeightSyncError) as error:
            self._give_up(version, error)
        else:
            # A row is written only when all prompts have ended: part of them would be another benchmark.
            result = EvaluationResult(version, tuple(prompts), self._clock() - progress.since)
            self._reporter.evaluated(
                version,
                result.row,
                result.metrics,
                result.headline,
                samples=result.recorded,
                decode=functools.partial(self._engines.client.decode, special_tokens=True),
            )
            self._events.record("evaluation", version=version, t0=began, t1=self._events.now(), metrics=result.metrics)
        finally:
            self._running = None
            if self._pending == version:
                self._pending = None

    async def _run_prompt(self, index: int, progress: _EvaluationProgress, slots: asyncio.Semaphore) -> EvaluatedPrompt:
        record = self._prompts[index]
        async with slots:
            progress.under_way[record.uid] = self._clock()
            prompt = await self._rollouts.run(record, index, progress.version)
            # Removed after a success only: an error or a stop ends the whole evaluation.
            del progress.under_way[record.uid]
        progress.ended += 1
        self._on_progress()
        return prompt

    def _give_up(self, version: int, error: Exception) -> None:
        logger.error("the evaluation of version %d cannot be finished", version, exc_info=error)
        self._reporter.note(f"the evaluation of version {version} leaves no row, because engines failed: {error}")

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            self.cancelled = True
        elif task.exception() is not None and self.error is None:
            self.error = task.exception()
        self._changed.notify()

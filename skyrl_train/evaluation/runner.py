"""Evaluates policy versions while training goes on.

    trainer ──trained(t)──> own engines: copy the weights ─┐
            ──served(v)───> the run's engines ─────────────┴──> one version after the other ──> row of eval.jsonl
            <──hold()────── the run's engines: until it has ended

| loop | consumes | waits for | is unblocked by | produces |
|---|---|---|---|---|
| ``trained``, ``served`` (the trainer) | a step that is due | the pending place | a version being loaded | a pending one |
| an evaluation (a task) | a pending version | its turn; tokens | the end of the one before; engines | a result |
| ``hold`` (the trainer) | | the run's engines to be free | the end of the evaluation on them | |

Nothing is skipped: at most one evaluation runs and one is pending with its copy of the weights. Where a third falls due
(only with engines of its own that are slower than the interval), ``trained`` waits, and training with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from skyrl_train.concurrency import Signal, gather_or_cancel
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.environments.base import PromptRecord
from skyrl_train.errors import EngineError, PublicationError
from skyrl_train.evaluation.engines import EvaluationEngines
from skyrl_train.evaluation.metrics import EvaluatedPrompt, EvaluationResult
from skyrl_train.evaluation.rollouts import PromptRunner, Score
from skyrl_train.evaluation.schedule import EvaluationSchedule
from skyrl_train.publication.publisher import Staged

logger = logging.getLogger(__name__)


class ResultSink(Protocol):
    """Where results go; the reporter is one."""

    def evaluated(self, result: EvaluationResult) -> None: ...

    def note(self, text: str) -> None: ...


@dataclass
class _Progress:
    """How far the running evaluation is; times are the clock's."""

    version: int
    since: float
    ended: int = 0  # prompts
    under_way: dict[str, float] = field(default_factory=dict)  # prompts, and since when


class Evaluation:
    """All evaluations of a run; with ``trainer.eval.interval=0`` there are none, and every call returns at once.

    A sample that fails twice has not passed. Engines that fail end the evaluation without a row, because its figures would
    not be the policy's; training goes on. Anything else that goes wrong (a token of another version, a disk that is full)
    is ``error``, and ends the run.

    Args:
        prompts: of the evaluation; none are needed where there is none.
        sink: is told each result as it comes.
        changed: notified when an evaluation begins, serves or ends.
        score: the run's reward function, where it has one apart from its generator.
        on_progress: called whenever all samples of a prompt have ended.
    """

    def __init__(
        self,
        config: RunConfig,
        engines: EvaluationEngines,
        prompts: Sequence[PromptRecord],
        *,
        sink: ResultSink,
        changed: Signal,
        score: Score | None = None,
        on_progress: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        settings = config.trainer.eval
        self._schedule = EvaluationSchedule(settings.interval, settings.before_train)
        self._engines = engines
        self._prompts = prompts
        self._rollouts = PromptRunner(config, engines, score)
        self._max_parallel = settings.max_parallel
        self._sink = sink
        self._changed = changed
        self._on_progress = on_progress
        self._clock = clock
        self.error: BaseException | None = None
        self.cancelled = False  # whether one that was due did not come to its end: the run owes it
        self._tasks: set[asyncio.Task[None]] = set()  # the running and the pending one
        self._running: _Progress | None = None
        self._pending: int | None = None  # a version that is not loaded yet: its weights lie in a staging area
        self._newest = -1  # the newest version that was begun, now or before a resume
        self._stopped = False

    # What the trainer tells it ------------------------------------------------------------------------------------

    async def start(self, step: int, reported: Collection[int]) -> None:
        """The run starts or resumes after ``step``; its engines serve that version, and its weights stand still.

        Begins the evaluation that is due, or was interrupted.

        Args:
            reported: the steps whose evaluations have a row.
        """
        await self._engines.start()
        self._newest = max(reported, default=-1)
        if self._schedule.missed(step, reported):
            await self._begin(step)

    async def trained(self, step: int) -> None:
        """``step`` is trained, and the weights stand still until this returns."""
        if not self._engines.shared and self._schedule.due(step):
            await self._begin(step)

    async def served(self, version: int) -> None:
        """The run's engines serve ``version`` until :meth:`hold` has returned."""
        if self._engines.shared and self._schedule.due(version):
            await self._begin(version)

    async def hold(self) -> dict[str, float]:
        """Returns when the run's engines may get other weights, with the seconds that it took as a metric.

        Raises:
            Exception: ``error``, if there is one.
        """
        if not self._engines.shared or not self._tasks:
            self._raise_if_failed()
            return {}
        started = self._clock()
        await self.finish()
        return {"time/wait_for_evaluation": self._clock() - started}

    async def conclude(self, step: int) -> None:
        """``step`` was the run's last. Evaluates its policy, unless it has been, and returns when everything has ended.

        The weights stand still, and the run's engines serve that version.

        Raises:
            Exception: ``error``, if there is one.
        """
        if self._schedule.interval and self._newest < step:
            await self._begin(step)
        await self.finish()

    async def finish(self) -> None:
        """Returns when every evaluation that was begun has ended.

        Raises:
            Exception: ``error``, if there is one.
        """
        await self._changed.wait_until(lambda: not self._tasks)
        self._raise_if_failed()

    def stop(self) -> None:
        """Cancels what runs and begins nothing more; what is cancelled leaves no row."""
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        self._changed.notify()

    async def aclose(self) -> None:
        """Stops, waits until everything has ended, and closes the engines that are its own."""
        self.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._engines.aclose()

    # What it says of itself ---------------------------------------------------------------------------------------

    def describe(self) -> list[str]:
        """What is under way, one line each, for whoever wonders why nothing moves."""
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

    def _raise_if_failed(self) -> None:
        if self.error is not None:
            raise self.error

    # Evaluations --------------------------------------------------------------------------------------------------

    async def _begin(self, version: int) -> None:
        """Starts an evaluation that waits for its turn. Before that, one that is pending already has to be under way."""
        await self._changed.wait_until(lambda: self._pending is None or self._stopped)
        self._raise_if_failed()
        self._pending = self._newest = version
        staged = None
        if not self._stopped:
            try:
                staged = await self._engines.stage(version)
            except PublicationError as error:
                self._pending = None
                self._given_up(version, error)
                return
        if self._stopped:  # before or meanwhile
            self.cancelled = True
            return
        task = asyncio.create_task(self._run(version, staged), name=f"evaluation-{version}")
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    async def _run(self, version: int, staged: Staged | None) -> None:
        await self._changed.wait_until(lambda: self._running is None)
        self._running = progress = _Progress(version, self._clock())
        try:
            await self._engines.load(version, staged)
            self._pending = None
            self._changed.notify()
            prompts = await self._play(progress)
        except (EngineError, PublicationError) as error:
            self._given_up(version, error)
        else:
            self._sink.evaluated(EvaluationResult(version, tuple(prompts), self._clock() - progress.since))
        finally:
            self._running = None
            if self._pending == version:
                self._pending = None

    def _given_up(self, version: int, error: Exception) -> None:
        logger.error("the evaluation of version %d cannot be finished", version, exc_info=error)
        self._sink.note(f"the evaluation of version {version} leaves no row, because engines failed: {error}")

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            self.cancelled = True
        elif task.exception() is not None and self.error is None:
            self.error = task.exception()
        self._changed.notify()

    async def _play(self, progress: _Progress) -> list[EvaluatedPrompt]:
        """All prompts, ``max_parallel`` of them at once."""
        slots = asyncio.Semaphore(self._max_parallel)
        return await gather_or_cancel(self._play_prompt(index, progress, slots) for index in range(len(self._prompts)))

    async def _play_prompt(self, index: int, progress: _Progress, slots: asyncio.Semaphore) -> EvaluatedPrompt:
        record = self._prompts[index]
        async with slots:
            progress.under_way[record.uid] = self._clock()
            prompt = await self._rollouts.run(record, index, progress.version)
            del progress.under_way[record.uid]
        progress.ended += 1
        self._on_progress()
        return prompt

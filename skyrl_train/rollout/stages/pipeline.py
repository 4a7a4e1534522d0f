"""Stages: processing of a finished group between its generation and the buffer.

    generator ──> group ──> reward ──> reference log-probs ──> proximal log-probs ──> filter ──> buffer

Each group passes the stages as soon as it is generated, while others are generated and trained. A stage works on a bounded
number of groups at once; the others wait, earliest deadline first. The queue needs no separate bound: a group in a stage
still counts as running, so a slow stage delays admission. At most ``W`` groups (``num_parallel_generation_workers``) are in
generation and in all stages together.

| loop | consumes | waits for | is unblocked by | produces |
|---|---|---|---|---|
| the group's task (``run``) | a generated group | a slot in each stage | a group that leaves it | a complete group |
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from skyrl_train.environments.base import PromptRecord
from skyrl_train.errors import RolloutError, StageError, TrainingWorkerError
from skyrl_train.events.log import NO_EVENTS, EventLog
from skyrl_train.observability.metrics import SlotTimeIntegral
from skyrl_train.types import RolloutGroup
from skyrl_train.workers.executors import Executor


class Stage(ABC):
    """One processing step for every group. ``start`` is called before the first group.

    Attributes:
        name: in messages and metrics.
        max_parallel: number of groups processed at once.
        executor: runs the work of the stage, and lives as long as the stage; None: it needs no resources.
    """

    name: str
    max_parallel: int = 1
    executor: Executor | None = None

    async def start(self) -> None:
        """Start the resources of the stage; raises SkyRLError if it cannot."""
        if self.executor is not None:
            await self.executor.start()

    @abstractmethod
    async def run(self, group: RolloutGroup, record: PromptRecord) -> RolloutGroup:
        """Return the group with the additions of this stage. Must end soon after it is cancelled.

        Raises:
            RolloutError: this group cannot be used; the run continues.
            Exception: any other error stops the run.
        """

    async def aclose(self) -> None:
        """Free the resources. Idempotent; may be called without ``start``."""
        if self.executor is not None:
            await self.executor.aclose()


class PrioritySemaphore:
    """A semaphore whose waiters get their turn in the order of their priority, smallest first."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._number = itertools.count()
        self._queue: list[tuple[tuple[int, int], int, asyncio.Future[None]]] = []

    @property
    def waiting(self) -> int:
        """Number of waiters."""
        return sum(not waiter.done() for _, _, waiter in self._queue)

    async def acquire(self, priority: tuple[int, int]) -> None:
        """Wait for a turn."""
        if self._free:  # then there are no waiters
            self._free -= 1
            return
        waiter = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (priority, next(self._number), waiter))
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():  # the turn had been given to us: pass it on
                self.release()
            raise

    def release(self) -> None:
        """Give the turn to the next waiter."""
        while self._queue:
            _, _, waiter = heapq.heappop(self._queue)
            # A waiter that was cancelled stays in the queue until its turn.
            if not waiter.done():
                waiter.set_result(None)
                return
        self._free += 1


class _Lane:
    """A stage with its queue and statistics."""

    def __init__(self, stage: Stage, clock: Callable[[], float]) -> None:
        self.stage = stage
        self.semaphore = PrioritySemaphore(stage.max_parallel)
        self.slots = SlotTimeIntegral(stage.max_parallel, clock)
        self.inside: dict[int, float] = {}  # group index -> start time
        self.seconds: list[float] = []  # of each group that has left since the metrics were taken


class StagePipeline:
    """All stages of a run, in their order.

    Args:
        clock: for metrics and descriptions, in seconds.
        events: the record of the run.
    """

    def __init__(
        self,
        stages: Sequence[Stage] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
        events: EventLog = NO_EVENTS,
    ) -> None:
        self.count = len(stages)
        self._clock = clock
        self._events = events
        self._lanes = [_Lane(stage, clock) for stage in stages]

    async def run(self, group: RolloutGroup, record: PromptRecord) -> RolloutGroup:
        """Pass a group through all stages. A cancelled call releases its slot.

        Raises:
            RolloutError: a stage cannot use this group.
            StageError: a stage failed.
            TrainingWorkerError: a worker process of a sharded policy or reference, in which a stage computes, is gone.
        """
        for lane in self._lanes:
            group_index, asked = group.group_index, self._events.now()
            # By deadline: the trainer needs the oldest groups first.
            await lane.semaphore.acquire((group.oldest_version, group_index))
            began = lane.inside[group_index] = self._clock()
            lane.slots.set_busy(len(lane.inside))
            try:
                with self._events.timed("stage", group=group_index, name=lane.stage.name, t_queue=asked):
                    group = await lane.stage.run(group, record)
                lane.seconds.append(self._clock() - began)
            except (RolloutError, StageError, TrainingWorkerError):  # a TrainingWorkerError may restart the run
                raise
            except Exception as error:
                raise StageError(f"stage {lane.stage.name!r} failed on group {group_index}: {error!r}") from error
            finally:
                del lane.inside[group_index]
                lane.slots.set_busy(len(lane.inside))
                lane.semaphore.release()
        return group

    def take_metrics(self) -> dict[str, float]:
        """Return the load of each stage since the last call."""
        metrics: dict[str, float] = {}
        for lane in self._lanes:
            seconds, lane.seconds = lane.seconds, []
            prefix = f"stages/{lane.stage.name}"
            metrics[f"{prefix}/queue_length"] = float(lane.semaphore.waiting)
            metrics[f"{prefix}/busy_share"] = 1.0 - lane.slots.take_idle_fraction()
            metrics[f"{prefix}/groups"] = float(len(seconds))
            if seconds:
                metrics[f"{prefix}/seconds_per_group"] = sum(seconds) / len(seconds)
        return metrics

    def describe(self) -> list[str]:
        """Return a line for each busy stage."""
        lines: list[str] = []
        for lane in self._lanes:
            if lane.inside:
                group_index, since = next(iter(lane.inside.items()))
                lines.append(
                    f"stage {lane.stage.name!r}: works on {len(lane.inside)} groups (at most {lane.stage.max_parallel} at "
                    f"once), on group {group_index} for {self._clock() - since:.0f} s; {lane.semaphore.waiting} wait for it"
                )
        return lines

    async def aclose(self) -> None:
        """Close all stages, after the last group has left them."""
        await asyncio.gather(*(lane.stage.aclose() for lane in self._lanes))

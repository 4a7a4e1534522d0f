"""Stages: what happens to a finished group between its generation and the buffer.

    generator ──> group ──> reward ──> reference log-probs ──> proximal log-probs ──> filter ──> buffer

Each group goes its way as soon as it is there, while others are generated and trained. A stage works on a bounded number
of groups at once; the others wait for it, those with the earliest deadlines in front. Nothing else bounds that queue, and
nothing else has to: a group in a stage still counts as running, so a stage that falls behind holds up admission. At most
``W`` groups (``num_parallel_generation_workers``) are generated and in all stages together.

| loop | consumes | waits for | is unblocked by | produces |
|---|---|---|---|---|
| the group's task (``run``) | a generated group | a seat in each stage | a group that leaves it | a complete group |
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from skyrl_train.environments.base import PromptRecord
from skyrl_train.errors import RolloutError, StageError, TrainingWorkerError
from skyrl_train.observability.slot_time import SlotTimeIntegral
from skyrl_train.rollout.group import RolloutGroup


class Stage(Protocol):
    """One thing that is done to every group. Its ``start`` is called before its first group."""

    @property
    def name(self) -> str:
        """A word for messages and metrics."""

    @property
    def max_parallel(self) -> int:
        """How many groups it works on at once."""

    async def start(self) -> None:
        """Brings up what it computes with; raises SkyRLError if it cannot."""

    async def run(self, group: RolloutGroup, record: PromptRecord) -> RolloutGroup:
        """The group with what this stage adds. Must end soon after it is cancelled.

        Raises:
            RolloutError: this group cannot be used, which the run survives.
            Exception: anything else stops the run.
        """

    async def aclose(self) -> None:
        """Ends what ``start`` began. Idempotent, and fine without it."""


class StagePipeline:
    """All stages of a run, in their order.

    Args:
        clock: of metrics and descriptions, in seconds.
    """

    def __init__(self, stages: Sequence[Stage] = (), *, clock: Callable[[], float] = time.monotonic) -> None:
        self._lanes = [_Lane(stage, clock) for stage in stages]

    async def run(self, group: RolloutGroup, record: PromptRecord) -> RolloutGroup:
        """The group after all stages. Cancelled, it gives its place up.

        Raises:
            RolloutError: a stage found that this group cannot be used.
            StageError: a stage failed.
            TrainingWorkerError: a process that a stage computes in, of a sharded policy or reference, is gone.
        """
        for lane in self._lanes:
            group = await lane.run(group, record)
        return group

    def take_metrics(self) -> dict[str, float]:
        """How busy each stage was since the last call."""
        return {name: value for lane in self._lanes for name, value in lane.take_metrics().items()}

    def describe(self) -> list[str]:
        """A line for each stage that is busy, for whoever wonders why nothing happens."""
        return [line for lane in self._lanes for line in lane.describe()]

    async def aclose(self) -> None:
        """Closes all stages, once no group is in them any more."""
        await asyncio.gather(*(lane.stage.aclose() for lane in self._lanes))


class _Lane:
    """A stage, who waits for it, and what it has done."""

    def __init__(self, stage: Stage, clock: Callable[[], float]) -> None:
        self.stage = stage
        self._clock = clock
        self._seats = Seats(stage.max_parallel)
        self._slots = SlotTimeIntegral(stage.max_parallel, clock)
        self._inside: dict[int, float] = {}  # ordinals, and since when
        self._seconds: list[float] = []  # of each group that has left since the metrics were taken

    async def run(self, group: RolloutGroup, record: PromptRecord) -> RolloutGroup:
        await self._seats.take((group.oldest_version, group.ordinal))
        with self._occupied(group.ordinal):
            try:
                return await self.stage.run(group, record)
            except (RolloutError, StageError, TrainingWorkerError):  # who restarts a run goes by the last one
                raise
            except Exception as error:
                raise StageError(f"stage {self.stage.name!r} failed on group {group.ordinal}: {error!r}") from error

    @contextmanager
    def _occupied(self, ordinal: int) -> Iterator[None]:
        began = self._inside[ordinal] = self._clock()
        self._slots.set_busy(len(self._inside))
        try:
            yield
            self._seconds.append(self._clock() - began)
        finally:
            del self._inside[ordinal]
            self._slots.set_busy(len(self._inside))
            self._seats.give_back()

    def take_metrics(self) -> dict[str, float]:
        seconds, self._seconds = self._seconds, []
        metrics = {
            "queue_length": float(self._seats.waiting),
            "busy_share": 1.0 - self._slots.take_idle_fraction(),
            "groups": float(len(seconds)),
        }
        if seconds:
            metrics["seconds_per_group"] = sum(seconds) / len(seconds)
        return {f"stages/{self.stage.name}/{name}": value for name, value in metrics.items()}

    def describe(self) -> list[str]:
        if not self._inside:
            return []
        ordinal, since = next(iter(self._inside.items()))
        return [
            f"stage {self.stage.name!r}: works on {len(self._inside)} groups (at most {self.stage.max_parallel} at once), on "
            f"group {ordinal} for {self._clock() - since:.0f} s; {self._seats.waiting} wait for it"
        ]


class Seats:
    """A number of seats. Those who wait get one in the order of their priority, the smallest first."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._number = itertools.count()
        self._queue: list[tuple[tuple[int, int], int, asyncio.Future[None]]] = []

    @property
    def waiting(self) -> int:
        """How many wait."""
        return sum(not seat.done() for _, _, seat in self._queue)

    async def take(self, priority: tuple[int, int]) -> None:
        """Returns with a seat."""
        if self._free:  # then nobody waits
            self._free -= 1
            return
        seat = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (priority, next(self._number), seat))
        try:
            await seat
        except asyncio.CancelledError:
            if seat.done() and not seat.cancelled():  # it was ours already
                self.give_back()
            raise

    def give_back(self) -> None:
        """The seat goes to whoever is next."""
        while self._queue:
            _, _, seat = heapq.heappop(self._queue)
            if not seat.done():
                seat.set_result(None)
                return
        self._free += 1

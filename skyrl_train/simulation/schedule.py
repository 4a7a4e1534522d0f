"""A schedule that drops nothing and keeps the bound, step by step: what an oracle or a planner decides about.

The world: group ``i`` takes ``durations[i]`` seconds in one of ``slots`` slots; a step takes ``B`` finished groups and
``step_s`` seconds, and publishes at its end. A schedule begins the groups in the order of their ordinals (the data's order is a
promise too). It keeps the bound ``S``: a group begun while version ``v`` is served trains in step ``v + S + 1`` or earlier.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Pipeline:
    """What a schedule has to respect. ``durations`` are those of whole steps: a multiple of ``batch_groups``."""

    durations: Sequence[float]
    batch_groups: int
    max_staleness_steps: int
    step_s: float
    slots: int

    @property
    def steps(self) -> int:
        """How many steps the groups make."""
        return len(self.durations) // self.batch_groups


@dataclass
class Schedule:
    """A schedule up to the publication of ``version``."""

    now: float = 0.0
    version: int = 0
    begun: int = 0  # groups that have a slot or had one
    allowed: int = 0  # groups that may begin
    # A heap: (end, version under which it began, begin).
    running: list[tuple[float, int, float]] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)  # versions

    def copy(self) -> Schedule:
        """One that goes its own way from here."""
        return Schedule(self.now, self.version, self.begun, self.allowed, list(self.running), list(self.finished))


def allowed_groups(schedule: Schedule, ahead: int, pipeline: Pipeline) -> int:
    """Groups that may have begun before the next publication, if ``ahead`` steps beyond the next may."""
    most = (schedule.version + 1 + ahead) * pipeline.batch_groups
    return max(schedule.allowed, min(len(pipeline.durations), most))


def one_step(schedule: Schedule, allowed: int, pipeline: Pipeline) -> Schedule:
    """Goes on to the next publication."""
    schedule.allowed = allowed
    batch, step = pipeline.batch_groups, schedule.version + 1
    ends_at: float | None = None
    _fill_slots(schedule, pipeline)
    while True:
        if ends_at is None and _may_train(schedule, step, pipeline):
            schedule.finished.sort()
            del schedule.finished[:batch]
            ends_at = schedule.now + pipeline.step_s
        if ends_at is not None and (not schedule.running or schedule.running[0][0] > ends_at):
            schedule.now, schedule.version = ends_at, step
            return schedule
        schedule.now, version, _ = heapq.heappop(schedule.running)
        schedule.finished.append(version)
        _fill_slots(schedule, pipeline)


def _fill_slots(schedule: Schedule, pipeline: Pipeline) -> None:
    while len(schedule.running) < pipeline.slots and schedule.begun < schedule.allowed:
        end = schedule.now + pipeline.durations[schedule.begun]
        heapq.heappush(schedule.running, (end, schedule.version, schedule.now))
        schedule.begun += 1


def _may_train(schedule: Schedule, step: int, pipeline: Pipeline) -> bool:
    """Whether what the step leaves behind can still meet its deadlines."""
    batch = pipeline.batch_groups
    if len(schedule.finished) < batch:
        return False
    running = [version for _, version, _ in schedule.running]
    if running and min(running) + pipeline.max_staleness_steps < step:
        return False
    waiting = sorted(schedule.finished)[batch:] + running
    waiting += [schedule.version] * (schedule.allowed - schedule.begun)
    return all(
        place <= (version + pipeline.max_staleness_steps + 1 - step) * batch
        for place, version in enumerate(sorted(waiting), start=1)
    )

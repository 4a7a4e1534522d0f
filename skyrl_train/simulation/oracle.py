"""How fast a schedule that drops nothing and keeps the bound could be, if it knew every length in advance.

The world: group ``i`` takes ``durations[i]`` seconds in one of ``slots`` slots; a step takes ``B`` finished groups and
``step_s`` seconds, and publishes at its end. Step ``t`` trains from ``a[t]`` to ``e[t]``; ``e[0] = 0``. A schedule
begins the groups in the order of their ordinals (the data's order is a promise too), whenever it likes; it picks any finished
groups for a step, and waits as it likes. It keeps the bound ``S``: a group begun while version ``v`` is served trains in step
``v + S + 1`` or earlier.

:func:`least_time` is a bound, not an optimum: no such schedule takes less. :func:`best_found` is a schedule, found by search
with all lengths known: an optimum lies between the two.

Why the bound holds. Let group ``i`` begin under version ``v``, and let ``b = i // B`` be its block.

1. ``b - S <= v <= b``. All of ``0..i`` have begun by then and train in the first ``v + S + 1`` steps, so
   ``i + 1 <= (v + S + 1) * B``. The ``v * B`` groups that are trained by then began before ``i``, so ``v * B <= i``.
2. *Windows.* It ends before step ``v + S + 1`` trains: ``e[v + S + 1] - e[v] >= duration + step_s``. Whatever ``v`` is, these
   steps are among those from ``b - S + 1`` to ``b + S + 1``, and each of the others takes ``step_s`` at least. So
   ``e[b + S + 1] - e[b - S] >= duration + (S + 1) * step_s``.
3. *Work.* By 1, what begins before ``e[s]`` has an ordinal below ``(s + S) * B``, and all ordinals below ``(t - S) * B`` have
   ended when step ``t`` trains. The slots do the work between in ``a[t] - e[s]``.
4. ``e[t] - e[t - 1] >= step_s``.

These are differences of the ``e``, so the least ``e`` that satisfies them is a longest path.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


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


def least_time(pipeline: Pipeline) -> float:
    """No schedule ends its last step before this many seconds; see the module for why."""
    batch, bound, steps = pipeline.batch_groups, pipeline.max_staleness_steps, pipeline.steps
    durations = np.asarray(pipeline.durations, dtype=float)
    longest = durations.reshape(steps, batch).max(axis=1)
    work = np.concatenate([[0.0], np.cumsum(durations)]) / pipeline.slots
    windows: dict[int, list[tuple[int, float]]] = {}
    for block in range(steps):
        begin, end = max(0, block - bound), min(steps, block + bound + 1)
        others = max(0, end - begin - (bound + 1))
        windows.setdefault(end, []).append((begin, longest[block] + (1 + others) * pipeline.step_s))
    ends = np.zeros(steps + 1)
    begun = np.minimum((np.arange(steps) + bound) * batch, len(durations))  # before e[s], at most
    begun[0] = 0
    for t in range(1, steps + 1):
        finished = len(durations) if t == steps else max(0, t - bound) * batch
        least = ends[:t] + np.maximum(0.0, work[finished] - work[begun[:t]]) + pipeline.step_s
        ends[t] = max(least.max(), *(ends[begin] + time for begin, time in windows.get(t, ())), 0.0)
    return float(ends[steps])


@dataclass
class _Schedule:
    """A schedule up to the publication of ``version``."""

    now: float = 0.0
    version: int = 0
    begun: int = 0  # groups that have a slot or had one
    allowed: int = 0  # groups that may begin
    running: list[tuple[float, int]] = field(default_factory=list)  # heap: (end, version under which it began)
    finished: list[int] = field(default_factory=list)  # versions

    def copy(self) -> _Schedule:
        return _Schedule(self.now, self.version, self.begun, self.allowed, list(self.running), list(self.finished))


def best_found(pipeline: Pipeline, width: int = 64) -> float:
    """The seconds of the fastest schedule that a beam search finds.

    It decides after each publication how many blocks may begin ahead (0 to S); the rest follows: slots take groups as they
    become free, and each step begins as soon as its groups allow, earliest deadline first.
    """
    front = [_Schedule()]
    for _ in range(pipeline.steps):
        reached: dict[tuple[int, ...], list[_Schedule]] = {}
        for schedule in front:
            for allowed in sorted(
                {_allowed(schedule, ahead, pipeline) for ahead in range(pipeline.max_staleness_steps + 1)}
            ):
                following = _one_step(schedule.copy(), allowed, pipeline)
                reached.setdefault(_kind(following, pipeline), []).append(following)
        # Schedules that differ in kind promise different futures, so each kind keeps its fastest.
        kept = [each for alike in reached.values() for each in heapq.nsmallest(2, alike, key=lambda s: s.now)]
        front = heapq.nsmallest(width, kept, key=lambda s: s.now)
    return min(schedule.now for schedule in front)


def _allowed(schedule: _Schedule, ahead: int, pipeline: Pipeline) -> int:
    most = (schedule.version + 1 + ahead) * pipeline.batch_groups
    return max(schedule.allowed, min(len(pipeline.durations), most))


def _kind(schedule: _Schedule, pipeline: Pipeline) -> tuple[int, ...]:
    batch = pipeline.batch_groups
    oldest = min((version for _, version in schedule.running), default=schedule.version)
    remaining = max((end - schedule.now for end, _ in schedule.running), default=0.0)
    return (
        schedule.allowed // batch - schedule.version,
        2 * len(schedule.finished) // batch,
        schedule.version - oldest,
        round(remaining / (pipeline.step_s or 1.0)),
    )


def _one_step(schedule: _Schedule, allowed: int, pipeline: Pipeline) -> _Schedule:
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
        schedule.now, version = heapq.heappop(schedule.running)
        schedule.finished.append(version)
        _fill_slots(schedule, pipeline)


def _fill_slots(schedule: _Schedule, pipeline: Pipeline) -> None:
    while len(schedule.running) < pipeline.slots and schedule.begun < schedule.allowed:
        end = schedule.now + pipeline.durations[schedule.begun]
        heapq.heappush(schedule.running, (end, schedule.version))
        schedule.begun += 1


def _may_train(schedule: _Schedule, step: int, pipeline: Pipeline) -> bool:
    """Whether what the step leaves behind can still meet its deadlines."""
    batch = pipeline.batch_groups
    if len(schedule.finished) < batch:
        return False
    waiting = sorted(schedule.finished)[batch:] + [version for _, version in schedule.running]
    waiting += [schedule.version] * (schedule.allowed - schedule.begun)
    return all(
        place <= (version + pipeline.max_staleness_steps + 1 - step) * batch
        for place, version in enumerate(sorted(waiting), start=1)
    )

"""Schedules that drop nothing and keep the staleness bound: how fast could one be, with and without knowledge of lengths?

The model: group ``i`` takes ``durations[i]`` seconds in one of ``slots`` slots; a step takes ``B`` finished groups and ``step_s``
seconds, and syncs the weights at its end. A schedule begins the groups in the order of their indices (the order of the data is
guaranteed too). It keeps the bound ``S``: a group begun under version ``v`` trains in step ``v + S + 1`` or earlier. Only
:func:`least_time` also takes groups of several responses: ``durations[i]`` is the longest one, ``work[i]`` their sum.

- :func:`least_time`: a lower bound for schedules that know every length in advance. No such schedule takes less time.
- :func:`best_found`: a schedule found by search with all lengths known. An optimum lies between the two.
- :func:`planned_time`: a schedule that knows the distribution of lengths and no length in advance.

Why the lower bound holds. Step ``t`` trains from ``a[t]`` to ``e[t]``; ``e[0] = 0``. Let group ``i`` begin under version ``v``,
and let ``b = i // B`` be its block.

1. ``b - S <= v <= b``. All of ``0..i`` have begun by then and train in the first ``v + S + 1`` steps, so
   ``i + 1 <= (v + S + 1) * B``. The ``v * B`` groups that are trained by then began before ``i``, so ``v * B <= i``.
2. *Windows.* It ends before step ``v + S + 1`` trains: ``e[v + S + 1] - e[v] >= duration + step_s``. For every ``v``, these
   steps are among ``b - S + 1`` to ``b + S + 1``, and each of the others takes ``step_s`` at least. So
   ``e[b + S + 1] - e[b - S] >= duration + (S + 1) * step_s``.
3. *Work.* By 1, a group that begins before ``e[s]`` has an index below ``(s + S) * B``, and all groups below ``(t - S) * B`` have
   ended when step ``t`` trains. The slots do the work between in ``a[t] - e[s]``.
4. ``e[t] - e[t - 1] >= step_s``.

These are differences of the ``e``, so the least ``e`` that satisfies them is a longest path.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np


@dataclass(frozen=True)
class Pipeline:
    """The constraints of a schedule. ``len(durations)`` is a multiple of ``batch_groups``.

    ``work``: the slot seconds of each group; None: its duration, for groups of one response.
    """

    durations: Sequence[float]
    batch_groups: int
    max_staleness_steps: int
    step_s: float
    slots: int
    work: Sequence[float] | None = None

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.durations) // self.batch_groups


@dataclass
class Schedule:
    """A schedule up to the weight sync of ``version``."""

    now: float = 0.0
    version: int = 0
    begun: int = 0  # groups that have or had a slot
    allowed: int = 0  # groups that may begin
    # A heap: (end, version under which it began, begin).
    running: list[tuple[float, int, float]] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)  # versions

    def copy(self) -> Schedule:
        """Return an independent copy."""
        return Schedule(self.now, self.version, self.begun, self.allowed, list(self.running), list(self.finished))


def allowed_groups(schedule: Schedule, ahead: int, pipeline: Pipeline) -> int:
    """Return how many groups may have begun before the next weight sync, if ``ahead`` steps beyond the next one may begin."""
    most = (schedule.version + 1 + ahead) * pipeline.batch_groups
    return max(schedule.allowed, min(len(pipeline.durations), most))


def one_step(schedule: Schedule, allowed: int, pipeline: Pipeline) -> Schedule:
    """Advance to the next weight sync, in place."""
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
    """Return whether the groups that the step leaves behind can still meet their deadlines."""
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


# With all lengths known ----------------------------------------------------------------------------------------------


def least_time(pipeline: Pipeline) -> float:
    """Return a lower bound of the end of the last step in seconds; the module's docstring has the proof."""
    batch, bound, steps = pipeline.batch_groups, pipeline.max_staleness_steps, pipeline.steps
    durations = np.asarray(pipeline.durations, dtype=float)
    longest = durations.reshape(steps, batch).max(axis=1)
    of_groups = pipeline.durations if pipeline.work is None else pipeline.work
    work = np.concatenate([[0.0], np.cumsum(of_groups)]) / pipeline.slots
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


def best_found(pipeline: Pipeline, width: int = 64) -> float:
    """Return the seconds of the fastest schedule that a beam search finds.

    The search decides after each weight sync how many blocks may begin ahead (0 to S). The rest follows: slots take groups as
    they become free, and each step begins as soon as its groups allow, earliest deadline first.
    """
    front = [Schedule()]
    for _ in range(pipeline.steps):
        reached: dict[tuple[int, ...], list[Schedule]] = {}
        for schedule in front:
            for allowed in sorted(
                {allowed_groups(schedule, ahead, pipeline) for ahead in range(pipeline.max_staleness_steps + 1)}
            ):
                following = one_step(schedule.copy(), allowed, pipeline)
                reached.setdefault(_kind(following, pipeline), []).append(following)
        # Schedules of different kinds have different futures, so each kind keeps its fastest.
        kept = [each for alike in reached.values() for each in heapq.nsmallest(2, alike, key=lambda s: s.now)]
        front = heapq.nsmallest(width, kept, key=lambda s: s.now)
    return min(schedule.now for schedule in front)


def _kind(schedule: Schedule, pipeline: Pipeline) -> tuple[int, ...]:
    batch = pipeline.batch_groups
    oldest = min((version for _, version, _ in schedule.running), default=schedule.version)
    remaining = max((end - schedule.now for end, _, _ in schedule.running), default=0.0)
    return (
        schedule.allowed // batch - schedule.version,
        2 * len(schedule.finished) // batch,
        schedule.version - oldest,
        round(remaining / (pipeline.step_s or 1.0)),
    )


# With the distribution of lengths known -------------------------------------------------------------------------------


def planned_time(pipeline: Pipeline, futures: int, horizon: int, seed: int = 0) -> float:
    """Return the seconds of a schedule that is planned by rollouts (Bertsekas, Tsitsiklis and Wu, 1997).

    After each weight sync it tries every choice (how many steps may begin ahead) in the same sampled futures. The remaining time
    of a running group is drawn from the durations longer than its age; later groups draw from all durations. From then on, each
    future follows ``wait`` with D = S; the planner takes the choice that is fastest on the mean. With enough futures, long
    enough, it is no worse than that on the mean.

    Args:
        futures: number of sampled futures after each weight sync.
        horizon: steps of a future.
    """
    known, random = sorted(pipeline.durations), Random(seed)
    schedule = Schedule()
    for _ in range(pipeline.steps):
        allowed = _plan(schedule, pipeline, known, random, futures, horizon)
        one_step(schedule, allowed, pipeline)
    return schedule.now


def _plan(
    schedule: Schedule, pipeline: Pipeline, known: list[float], random: Random, futures: int, horizon: int
) -> int:
    """Return how many groups may have begun before the next weight sync."""
    ahead = range(pipeline.max_staleness_steps + 1)
    choices = sorted({allowed_groups(schedule, steps, pipeline) for steps in ahead})
    if len(choices) == 1:
        return choices[0]
    totals = dict.fromkeys(choices, 0.0)
    begin_later = (horizon + pipeline.max_staleness_steps + 1) * pipeline.batch_groups
    for _ in range(futures):
        begun = _other_ends(schedule, known, random)
        durations = [0.0] * begun.begun + random.choices(known, k=begin_later)
        future = replace(pipeline, durations=durations)
        for choice in choices:
            end = one_step(begun.copy(), choice, future)
            for _ in range(horizon - 1):
                one_step(end, allowed_groups(end, pipeline.max_staleness_steps, future), future)
            totals[choice] += end.now
    return min(totals, key=totals.__getitem__)


def _other_ends(schedule: Schedule, known: list[float], random: Random) -> Schedule:
    """Draw another end of each running group, among the durations that are longer than its age."""
    other = schedule.copy()
    other.running = []
    for _, version, begin in schedule.running:
        longer = bisect_right(known, schedule.now - begin)
        duration = known[random.randrange(longer, len(known))]
        other.running.append((begin + duration, version, begin))
    heapq.heapify(other.running)
    return other

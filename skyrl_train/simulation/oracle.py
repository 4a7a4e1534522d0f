"""How fast a schedule that drops nothing and keeps the bound could be, if it knew every length in advance.

The world is that of ``simulation/schedule``. Step ``t`` trains from ``a[t]`` to ``e[t]``; ``e[0] = 0``. A schedule begins groups
whenever it likes, picks any finished groups for a step, and waits as it likes.

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

import numpy as np

from skyrl_train.simulation.schedule import Pipeline, Schedule, allowed_groups, one_step


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


def best_found(pipeline: Pipeline, width: int = 64) -> float:
    """The seconds of the fastest schedule that a beam search finds.

    It decides after each publication how many blocks may begin ahead (0 to S); the rest follows: slots take groups as they
    become free, and each step begins as soon as its groups allow, earliest deadline first.
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
        # Schedules that differ in kind promise different futures, so each kind keeps its fastest.
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

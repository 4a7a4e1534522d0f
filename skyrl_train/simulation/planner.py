"""How fast a schedule could be that knows how lengths are distributed, and no length in advance.

After each publication it tries every choice (how many steps may begin ahead) in the same sampled futures: the rest of what runs
is drawn from the durations that are longer than it has taken already, and what begins later from all durations. From then on,
each future follows ``wait`` or ``burst``; the choice whose better policy is fastest on the mean is taken. (A rollout algorithm:
Bertsekas, Tsitsiklis and Wu, 1997. With enough futures, long enough, it is no worse than either of them on the mean.)
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter
from dataclasses import replace
from random import Random

from skyrl_train.rollout.stragglers import BurstPolicy, Outlook, StragglerPolicy, WaitPolicy
from skyrl_train.simulation.schedule import Pipeline, Schedule, allowed_groups, one_step

_POLICIES: tuple[StragglerPolicy, ...] = (WaitPolicy(), BurstPolicy())  # of what comes after the choice


def planned_time(pipeline: Pipeline, futures: int, horizon: int, seed: int = 0) -> float:
    """The seconds of the planned schedule.

    Args:
        futures: sampled after each publication.
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
    """Groups that may have begun before the next publication."""
    ahead = range(pipeline.max_staleness_steps + 1)
    choices = sorted({allowed_groups(schedule, steps, pipeline) for steps in ahead})
    if len(choices) == 1:
        return choices[0]
    totals = {(choice, policy): 0.0 for choice in choices for policy in _POLICIES}
    begin_later = (horizon + pipeline.max_staleness_steps + 1) * pipeline.batch_groups
    for _ in range(futures):
        begun = _other_ends(schedule, known, random)
        durations = [0.0] * begun.begun + random.choices(known, k=begin_later)
        future = replace(pipeline, durations=durations)
        for choice, policy in totals:
            totals[choice, policy] += _time(begun.copy(), choice, policy, future, horizon)
    return min(totals, key=lambda pair: totals[pair])[0]


def _time(schedule: Schedule, allowed: int, policy: StragglerPolicy, future: Pipeline, horizon: int) -> float:
    one_step(schedule, allowed, future)
    for _ in range(horizon - 1):
        one_step(schedule, allowed_groups(schedule, _ahead(policy, schedule, future), future), future)
    return schedule.now


def _other_ends(schedule: Schedule, known: list[float], random: Random) -> Schedule:
    """What runs may end at any time that its age allows."""
    other = schedule.copy()
    other.running = []
    for _, version, begin in schedule.running:
        longer = bisect_right(known, schedule.now - begin)
        duration = known[random.randrange(longer, len(known))]
        other.running.append((begin + duration, version, begin))
    heapq.heapify(other.running)
    return other


def _ahead(policy: StragglerPolicy, schedule: Schedule, pipeline: Pipeline) -> int:
    """How many steps beyond the next may begin under a policy, with D = S and a publication after each step."""
    outlook = Outlook(
        step=schedule.version + 1,
        batch_groups=pipeline.batch_groups,
        seats=pipeline.batch_groups,
        max_staleness_steps=pipeline.max_staleness_steps,
        running=Counter(version for _, version, _ in schedule.running),
        finished=Counter(schedule.finished),
    )
    return int(policy.depth(outlook, pipeline.max_staleness_steps, 1))

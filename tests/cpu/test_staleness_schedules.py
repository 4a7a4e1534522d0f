"""Random runs of the rules, many more with -m slow, and some that shrink when they fail.

Heavy tails, failures, filters, engine losses, failing updates, kills and resumes (with recordings), changes of S, D and W,
several steps per weight sync, fractional and adapting depths, streaming minibatches and overlapping weight syncs: see
``schedules``, which asserts the promises of SEMANTICS 4.2, 4.3 and 5.1 after every event.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules import Run, World

POLICIES = ["wait", "mask", "accept", "drop"]


@pytest.mark.parametrize("seeds", [range(200), pytest.param(range(200, 2500), marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_keeps_its_promise_in_random_runs(policy: str, seeds: range) -> None:
    foreseen = waits = dropped = partly_masked = wholly_masked = late = resumes = 0
    runs = len(seeds)
    for seed in seeds:
        run = Run(World.drawn(seed, policy))
        try:
            run.play()
        except Exception as error:
            error.add_note(f"in {run.world}")
            raise
        foreseen += run.foreseen
        waits += run.waits > 0
        dropped += run.m.counts.dropped
        partly_masked += run.partly_masked
        wholly_masked += run.wholly_masked
        late += max(run.lags) > run.largest_bound
        resumes += run.resumes
    # The runs were hard enough to make each policy do what it is for.
    assert resumes > runs / 2 and foreseen > runs / 10
    assert (waits > runs / 25) == (policy == "wait")
    assert (dropped > runs / 25) == (policy == "drop")
    assert (min(partly_masked, wholly_masked) > runs / 50) == (policy == "mask")
    assert (late > runs / 25) == (policy in ("mask", "accept"))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    b, k, room = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(0, 4))
    chance = st.sampled_from((0.0, 0.2))
    return World(
        seed=draw(st.integers(0, 1000)),
        policy=draw(st.sampled_from(POLICIES)),
        b=b,
        s=room + k - 1,
        d=draw(st.none() | st.integers(0, 4 * room).map(lambda quarters: quarters / 4)),
        w=draw(st.integers(1, 12)),
        k=k,
        steps=draw(st.integers(1, 8)),
        overlap=draw(st.booleans()),
        streaming=draw(st.none() | st.integers(1, b)),
        mean_ticks=draw(st.sampled_from((1.0, 4.0))),
        tail=draw(st.sampled_from((0.0, 2.0))),
        step_ticks=draw(st.sampled_from((0.0, 1.0))),
        weight_sync_ticks=draw(st.sampled_from((0.0, 3.0))),
        queued=draw(chance),
        fails=draw(chance),
        filtered=draw(chance),
        engine_loss=draw(chance),
        update_fails=draw(chance),
        checkpoint=draw(st.sampled_from((0.0, 1.0))),
        resize=draw(chance),
        kills=draw(st.integers(0, 2)),
    )


@given(worlds())
def test_every_policy_keeps_its_promise_in_runs_that_can_be_shrunk(world: World) -> None:
    Run(world).play()


def test_one_slow_group_exceeds_the_bound_under_accept_and_stops_the_others_under_wait() -> None:
    world = World(b=2, s=2, d=1, w=8, steps=20, mean_ticks=1.0, tail=0.0, step_ticks=3.0, checkpoint=0.0)

    class OneSlowGroup(Run):
        def _length(self) -> float:
            return 200.0 if self.next_group_index == 1 else 1.0

    runs = {policy: OneSlowGroup(replace(world, policy=policy)).play() for policy in POLICIES}
    assert {policy: max(run.lags) > 2 for policy, run in runs.items()} == {
        "wait": False,
        "mask": True,
        "accept": True,
        "drop": False,
    }
    assert (runs["drop"].m.counts.dropped, runs["mask"].partly_masked) == (1, 1)
    assert runs["drop"].now < 100 < runs["wait"].now

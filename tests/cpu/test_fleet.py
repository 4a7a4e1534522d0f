"""The state machine of the fleet (SEMANTICS 2.7), with an injected clock and no engines."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_train.inference.pool.fleet import EngineState, Fleet, FleetLimits
from skyrl_train.inference.pool.router import Router

LIMITS = FleetLimits(max_failed_probes=3, max_restarts=2, backoff_s=1.0, max_backoff_s=8.0, stable_s=100.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def serving(clock: Clock, limits: FleetLimits = LIMITS) -> Fleet:
    fleet = Fleet(clock, limits)
    fleet.add(0)
    fleet.started(0)
    fleet.catching_up(0)
    fleet.caught_up(0)
    return fleet


def revive(fleet: Fleet) -> None:
    fleet.restarting(0)
    fleet.started(0)
    fleet.catching_up(0)
    fleet.caught_up(0)


def test_an_engine_that_started_is_stale_and_due_at_once_until_it_caught_up() -> None:
    fleet = Fleet(Clock(), LIMITS)
    fleet.add(0)
    assert fleet.records[0].state is EngineState.STARTING
    fleet.started(0)
    assert fleet.records[0].state is EngineState.STALE
    assert fleet.due() == [0]
    fleet.catching_up(0)
    assert fleet.due() == []
    fleet.caught_up(0)
    assert fleet.records[0].state is EngineState.HEALTHY


def test_an_engine_that_misses_probes_is_suspect_then_dead_and_an_answer_clears_it() -> None:
    fleet = serving(Clock())
    assert not fleet.silent(0, "no answer")
    assert fleet.records[0].state is EngineState.SUSPECT
    fleet.answered(0)
    assert fleet.records[0].state is EngineState.HEALTHY
    assert [fleet.silent(0, "no answer") for _ in range(3)] == [False, False, True]
    assert fleet.records[0].state is EngineState.DEAD
    assert fleet.records[0].reason == "no answer"


def test_restarts_wait_longer_each_time_and_end() -> None:
    clock = Clock()
    fleet = serving(clock)
    waits = []
    for _ in range(LIMITS.max_restarts):
        fleet.died(0, "killed")
        assert fleet.due() == []
        due_at = fleet.next_due_at()
        assert due_at is not None
        waits.append(due_at - clock.now)
        clock.now = due_at
        assert fleet.due() == [0]
        revive(fleet)
    assert waits == [1.0, 2.0]
    fleet.died(0, "killed")
    assert fleet.next_due_at() is None
    assert not fleet.may_serve


def test_a_long_healthy_period_resets_the_number_of_restarts() -> None:
    clock = Clock()
    fleet = serving(clock)
    for _ in range(5):
        clock.now += LIMITS.stable_s
        fleet.died(0, "killed")
        due_at = fleet.next_due_at()
        assert due_at == clock.now + LIMITS.backoff_s
        clock.now = due_at
        revive(fleet)


@pytest.mark.parametrize("stale", [False, True])
def test_an_engine_that_hangs_now_and_then_is_restarted_each_time(stale: bool) -> None:
    clock = Clock()
    fleet = serving(clock)
    for _ in range(5):
        clock.now += LIMITS.stable_s
        if stale:
            fleet.missed_update(0, "it did not load in time")
        while not fleet.silent(0, "no answer"):
            clock.now += 10.0
        due_at = fleet.next_due_at()
        assert due_at is not None
        clock.now = due_at
        revive(fleet)


def test_a_retired_engine_never_comes_back() -> None:
    fleet = serving(Clock())
    fleet.retire(0)
    fleet.died(0, "torn down")
    assert fleet.records[0].state is EngineState.RETIRED
    assert fleet.next_due_at() is None
    with pytest.raises(ValueError, match="cannot become"):
        fleet.restarting(0)


@settings(max_examples=300)
@given(st.lists(st.sampled_from(["silent", "answered", "died", "missed", "recover", "fail", "tick"]), max_size=60))
def test_in_every_schedule_only_a_caught_up_engine_is_healthy_and_restarts_stay_within_the_limit(
    events: list[str],
) -> None:
    clock = Clock()
    fleet = serving(clock)
    current, restarts = True, 0
    for event in events:
        state = fleet.records[0].state
        serves = state in (EngineState.HEALTHY, EngineState.SUSPECT)
        if event == "tick":
            clock.now += 3.0
        elif event == "silent" and serves:
            current = current and not fleet.silent(0, "silent")
        elif event == "answered" and serves:
            fleet.answered(0)
        elif event == "died":
            fleet.died(0, "killed")
            current = False
        elif event == "missed" and serves:
            fleet.missed_update(0, "missed")
            current = False
        elif event in ("recover", "fail") and fleet.due():
            if state is EngineState.DEAD:
                fleet.restarting(0)
                restarts += 1
                fleet.started(0)
            fleet.catching_up(0)
            if event == "recover":
                fleet.caught_up(0)
                current = True
            else:
                fleet.missed_update(0, "again")
        if fleet.records[0].state is EngineState.HEALTHY:
            assert current
        assert fleet.records[0].recent_restarts <= LIMITS.max_restarts
        # A recovery is planned for an engine that is down, or its restarts are used up.
        if fleet.records[0].state in (EngineState.DEAD, EngineState.STALE):
            planned = fleet.next_due_at() is not None
            assert planned or fleet.records[0].recent_restarts == LIMITS.max_restarts


@settings(max_examples=200)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("acquire"), st.sampled_from(["a", "b", "c", "d", None])),
            st.tuples(st.just("release"), st.integers(0, 30)),
            st.tuples(st.sampled_from(["add", "remove"]), st.integers(0, 3)),
        ),
        max_size=80,
    )
)
def test_routing_is_sticky_counts_exactly_and_survives_engines_that_leave_and_return(
    events: list[tuple[str, object]],
) -> None:
    router = Router()
    slots: list[tuple[object, object]] = []
    outstanding: dict[int, int] = {}
    home: dict[object, int] = {}
    for kind, value in events:
        if kind == "add" and value not in router.routed:
            assert isinstance(value, int)
            router.add(value)
            outstanding[value] = 0
        elif kind == "remove":
            assert isinstance(value, int)
            router.remove(value)
            outstanding.pop(value, None)
            slots = [(s, slot) for s, slot in slots if slot.engine != value]  # type: ignore[attr-defined]
        elif kind == "acquire":
            slot = router.acquire(value)  # type: ignore[arg-type]
            if not outstanding:
                assert slot is None
                continue
            assert slot is not None
            if value is not None and home.get(value) in outstanding:
                assert slot.engine == home[value]
            else:
                assert outstanding[slot.engine] == min(outstanding.values())
            if value is not None:
                home[value] = slot.engine
            outstanding[slot.engine] += 1
            slots.append((value, slot))
        elif kind == "release" and slots:
            assert isinstance(value, int)
            _, slot = slots.pop(value % len(slots))
            router.release(slot)  # type: ignore[arg-type]
            outstanding[slot.engine] -= 1  # type: ignore[union-attr]
    assert router.routed == tuple(sorted(outstanding))


def test_a_slot_from_before_an_engine_left_does_not_count_after_its_return() -> None:
    router = Router()
    router.add(0)
    old = router.acquire(None)
    assert old is not None
    router.remove(0)
    router.add(0)
    router.release(old)
    new = router.acquire(None)
    assert new is not None
    router.release(new)
    with pytest.raises(ValueError, match="more requests than"):
        router.release(new)

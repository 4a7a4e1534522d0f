"""The rules of admission and freshness, over random schedules."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_train.config.schema import StragglerPolicyName
from skyrl_train.errors import StalenessError
from skyrl_train.rollout.group import RolloutGroup, RolloutSequence, Sample
from skyrl_train.rollout.staleness import STRAGGLER_POLICIES, RolloutCounts, StalenessManager


def group(ordinal: int, version: int) -> RolloutGroup:
    sample = Sample((RolloutSequence([5], [6], [1], [-0.5], [version], [1.0], "stop"),))
    return RolloutGroup(ordinal, str(ordinal), "test", (sample,), version)


def manager(b: int, s: int, d: int, w: int, steps: int, policy: str = "wait", k: int = 1) -> StalenessManager:
    return StalenessManager(
        batch_groups=b,
        max_staleness_steps=s,
        pipeline_depth=d,
        max_running=w,
        total_steps=steps,
        policy=STRAGGLER_POLICIES[StragglerPolicyName(policy)](),
        steps_per_publication=k,
    )


class Schedule:
    """A run in virtual time: groups take random numbers of ticks, steps take a fixed one. Returns the lags trained."""

    def __init__(self, m: StalenessManager, durations: list[int], step_ticks: int, fails: set[int]) -> None:
        self.m = m
        self.durations, self.step_ticks, self.fails = durations, step_ticks, fails
        self.now = self.version = 0
        self.next_ordinal = 0
        self.running: dict[int, tuple[int, int]] = {}  # ordinal -> (version, end)
        self.buffer: list[RolloutGroup] = []
        self.trained: list[int] = []
        self.lags: list[int] = []
        self.most_running = 0

    def admit(self) -> None:
        while self.m.capacity() > 0:
            ordinal, version = self.next_ordinal, self.version
            self.next_ordinal += 1
            self.m.admit(ordinal, version)
            self.running[ordinal] = (version, self.now + self.durations[ordinal % len(self.durations)])
        self.most_running = max(self.most_running, len(self.running))

    def tick(self) -> None:
        self.now += 1
        for ordinal, (version, end) in list(self.running.items()):
            if end <= self.now:
                del self.running[ordinal]
                if ordinal in self.fails:
                    self.m.fail(ordinal)
                else:
                    self.m.finish(ordinal)
                    self.buffer.append(group(ordinal, version))
        self.admit()

    def run(self, steps: int) -> None:
        self.admit()
        for _ in range(steps):
            while (batch := self.m.select(self.buffer)) is None:
                assert self.running, "deadlock: nothing runs and the trainer waits"
                self.tick()
            self.m.assert_bound(batch)
            self.m.train(batch)
            self.lags += [g.lag(self.m.step) for g in batch]
            self.trained += [g.ordinal for g in batch]
            self.buffer = [g for g in self.buffer if g not in batch]
            for _ in range(self.step_ticks):
                self.tick()
            if self.m.publication_due:
                self.version = self.m.step
            self.m.advance(published=self.m.publication_due)
            self.admit()


schedules = st.fixed_dictionaries(
    {
        "b": st.integers(1, 5),
        "s": st.integers(0, 5),
        "slack": st.integers(0, 5),
        "durations": st.lists(st.one_of(st.integers(1, 4), st.integers(1, 60)), min_size=1, max_size=30),
        "step_ticks": st.integers(0, 6),
        "extra_workers": st.integers(0, 10),
        "fails": st.sets(st.integers(0, 60), max_size=8),
        "steps": st.integers(1, 15),
        "k": st.integers(1, 3),
    }
)


@settings(max_examples=1000, deadline=None)
@given(schedules)
def test_wait_keeps_the_bound_drops_nothing_and_never_deadlocks(p: dict) -> None:
    s = p["s"] + p["k"] - 1
    d = max(0, p["s"] - p["slack"])
    m = manager(p["b"], s, d, p["b"] + p["extra_workers"], p["steps"], k=p["k"])
    run = Schedule(m, p["durations"], p["step_ticks"], p["fails"])
    run.run(p["steps"])
    assert max(run.lags) <= s
    # Nothing dropped, nothing twice, nothing generated that will not train.
    assert sorted(run.trained) == [o for o in range(run.next_ordinal) if o not in p["fails"]]
    assert run.most_running <= m.max_running
    c = m.counts
    assert c.submitted == c.running + c.buffered + c.trained + c.failed == run.next_ordinal


@settings(max_examples=300, deadline=None)
@given(schedules)
def test_accept_trains_every_group_exactly_once(p: dict) -> None:
    d = max(0, p["s"] - p["slack"])
    m = manager(p["b"], p["s"], d, p["b"] + p["extra_workers"], p["steps"], "accept")
    run = Schedule(m, p["durations"], p["step_ticks"], p["fails"])
    run.run(p["steps"])
    assert sorted(run.trained) == [o for o in range(run.next_ordinal) if o not in p["fails"]]


def test_accept_lets_a_straggler_exceed_the_bound_where_wait_stops_for_it() -> None:
    durations = [200, *[1] * 40]
    lags = {}
    for policy in ("accept", "wait"):
        run = Schedule(manager(2, 2, 1, 8, 20, policy), durations, 3, set())
        run.run(20)
        lags[policy] = max(run.lags)
    assert lags["accept"] > 2 >= lags["wait"]


@given(st.integers(1, 6), st.integers(0, 4), st.integers(1, 40))
def test_admission_is_the_formula_of_semantics_4_1(b: int, d: int, w: int) -> None:
    m = manager(b, d, d, w, 1000)
    assert m.capacity() == min(w, (d + 1) * b)
    admitted = m.capacity()
    for ordinal in range(admitted):
        m.admit(ordinal, 0)
    assert m.capacity() == 0
    with pytest.raises(StalenessError, match="without capacity"):
        m.admit(admitted, 0)


def test_with_depth_zero_nothing_is_admitted_before_the_step_is_published() -> None:
    m = manager(2, 0, 0, 8, 10)
    for ordinal in range(2):
        m.admit(ordinal, 0)
        m.finish(ordinal)
    batch = m.select([group(0, 0), group(1, 0)])
    assert batch is not None
    m.train(batch)
    assert m.capacity() == 0
    m.advance(published=True)
    assert m.capacity() == 2


def test_a_batch_is_the_oldest_groups_in_ordinal_order() -> None:
    m = manager(2, 4, 1, 8, 10, "accept")
    for ordinal in range(4):
        m.admit(ordinal, 0)
        m.finish(ordinal)
    batch = m.select([group(0, 3), group(3, 1), group(1, 1), group(2, 2)])
    assert [g.ordinal for g in batch or []] == [1, 3]


def test_a_broken_bound_is_raised_at_consume_time() -> None:
    m = manager(1, 1, 1, 8, 10)
    m.admit(0, 0)
    m.finish(0)
    for _ in range(3):
        m.advance(published=True)
    with pytest.raises(StalenessError, match="lag 3 > S = 1"):
        m.assert_bound([group(0, 0)])


@pytest.mark.parametrize("action", ["finish", "fail"])
def test_a_slot_is_released_exactly_once(action: str) -> None:
    m = manager(2, 1, 1, 8, 10)
    m.admit(0, 0)
    getattr(m, action)(0)
    with pytest.raises(StalenessError, match="not running"):
        getattr(m, action)(0)


def test_a_counter_never_goes_negative() -> None:
    with pytest.raises(StalenessError, match="none was buffered"):
        RolloutCounts().move("buffered", "trained")


def test_the_last_step_bounds_admission() -> None:
    m = manager(3, 4, 4, 100, 2)
    assert m.capacity() == 6


def test_resuming_forgets_what_was_in_flight_and_keeps_what_was_finished() -> None:
    m = manager(2, 2, 1, 8, 10)
    for ordinal in range(4):
        m.admit(ordinal, 0)
    m.finish(0)
    restored = manager(2, 2, 1, 8, 10)
    restored.load_state_dict(m.state_dict(), 1, [group(0, 0)])
    assert restored.counts == RolloutCounts(submitted=1, running=0, buffered=1)
    assert restored.capacity() == 3


def test_a_bound_too_small_for_the_checkpoint_is_refused() -> None:
    m = manager(1, 1, 0, 8, 10)
    with pytest.raises(StalenessError, match="resume with the bound"):
        m.load_state_dict(
            {"submitted": 2, "running": 0, "buffered": 2, "trained": 0, "failed": 0, "published": 4},
            5,
            [group(0, 1), group(1, 1)],
        )


def test_between_publications_nothing_is_admitted() -> None:
    m = manager(2, 2, 0, 100, 10, k=3)
    assert m.capacity() == 6
    for ordinal in range(6):
        m.admit(ordinal, 0)
        m.finish(ordinal)
    due = []
    for _ in range(3):
        batch = m.select([group(o, 0) for o in range(m.counts.trained, 6)])
        assert batch is not None
        m.train(batch)
        due.append(m.publication_due)
        assert m.capacity() == 0
        m.advance(published=m.publication_due)
    assert due == [False, False, True]
    assert m.capacity() == 6


def test_the_budget_is_spent_when_all_that_may_be_accepted_has_finished_and_open_again_after_a_step() -> None:
    m = manager(2, 1, 0, 8, 10)
    for ordinal in range(2):
        m.admit(ordinal, 0)
    assert m.capacity() == 0 and not m.budget_spent, "what runs has not finished"
    for ordinal in range(2):
        m.finish(ordinal)
    assert m.budget_spent
    batch = m.select([group(o, 0) for o in range(2)])
    assert batch is not None
    m.train(batch)
    m.advance(published=True)
    assert not m.budget_spent

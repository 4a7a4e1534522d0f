"""Admission, selection and accounting on their smallest examples. Random runs: ``test_staleness_schedules``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.errors import StalenessError
from skyrl_train.rollout.staleness.manager import GroupsByVersion, Overdue, RolloutCounts, StalenessManager
from skyrl_train.rollout.staleness.policies import StalenessPolicy, StalenessView, resolve_staleness_policy


@dataclass(frozen=True)
class Finished:
    """All that the manager sees of a finished group."""

    group_index: int
    oldest_version: int


def manager(
    b: int,
    s: int,
    d: float | None,
    *,
    w: int = 100,
    steps: int = 1000,
    policy: str = "wait",
    k: int = 1,
    overlap: bool = False,
) -> StalenessManager:
    return StalenessManager(
        batch_groups=b,
        max_staleness_steps=s,
        generate_ahead_steps=d,
        max_running=w,
        total_steps=steps,
        policy=resolve_staleness_policy(policy),
        weight_sync_interval=k,
        overlap=overlap,
    )


def finish(m: StalenessManager, group_indices: Collection[int], version: int = 0) -> list[Finished]:
    """Admits groups and finishes them at once."""
    for group_index in group_indices:
        m.admit(group_index, version)
        m.finish(group_index)
    return [Finished(group_index, version) for group_index in group_indices]


def train(m: StalenessManager, buffer: list[Finished], *, publish: bool = True) -> list[Finished]:
    """Trains one step on the groups that the manager selects; returns the rest of the buffer."""
    batch = m.select(buffer)
    assert batch is not None
    m.assert_bound(batch)
    m.train(batch)
    m.advance()
    if publish:
        m.served(m.step - 1)
    return [group for group in buffer if group not in batch]


# Admission


@given(st.integers(1, 6), st.integers(0, 40).map(lambda tenths: tenths / 10), st.integers(1, 40), st.integers(1, 4))
def test_admission_is_the_formula_of_semantics_4_1_with_the_depth_rounded_down_to_groups(
    b: int, d: float, w: int, k: int
) -> None:
    m = manager(b, 4 + k, d, w=w, k=k)
    assert m.capacity() == min(w, round(10 * d) * b // 10 + k * b)
    admitted = m.capacity()
    for group_index in range(admitted):
        m.admit(group_index, 0)
    assert m.capacity() == 0
    with pytest.raises(StalenessError, match="without capacity"):
        m.admit(admitted, 0)


def test_a_depth_of_29_hundredths_of_100_groups_is_29_groups() -> None:
    assert manager(100, 1, 0.29, w=1000).capacity() == 129  # 0.29 * 100 is a little less in floating point


def test_with_depth_zero_nothing_is_admitted_before_the_step_is_published() -> None:
    m = manager(2, 0, 0)
    batch = m.select(finish(m, [0, 1]))
    assert batch is not None
    m.train(batch)
    assert m.capacity() == 0
    m.advance()
    assert m.capacity() == 0
    m.served(1)
    assert m.capacity() == 2


def test_between_weight_sync_nothing_is_admitted() -> None:
    m = manager(2, 2, 0, k=3)
    assert m.capacity() == 6
    buffer = finish(m, range(6))
    due = []
    for _ in range(3):
        due.append(m.weight_sync_due)
        buffer = train(m, buffer, publish=m.weight_sync_due)
        assert m.capacity() == (6 if due[-1] else 0)
    assert due == [False, False, True]


def test_the_last_step_bounds_admission_and_the_budget() -> None:
    m = manager(3, 4, 4, steps=2)
    assert m.capacity() == 6
    finish(m, range(6))
    assert m.budget_spent, "no step is left for another group"


def test_the_budget_is_spent_when_all_that_may_be_accepted_has_finished_and_open_again_after_a_step() -> None:
    m = manager(2, 1, 0)
    for group_index in range(2):
        m.admit(group_index, 0)
    assert m.capacity() == 0 and not m.budget_spent, "running groups have not finished"
    for group_index in range(2):
        m.finish(group_index)
    assert m.budget_spent
    train(m, [Finished(0, 0), Finished(1, 0)])
    assert not m.budget_spent


@pytest.mark.parametrize("policy", ["accept", "mask"])
def test_a_late_group_leaves_its_place_in_the_pipeline_to_another_and_takes_one_when_it_ends(policy: str) -> None:
    m = manager(2, 1, 1, policy=policy)
    m.admit(0, 0)  # its deadline is step 2, and it will run until step 3
    buffer = train(m, finish(m, [1, 2, 3]))
    assert m.capacity() == 2, "it may still come in time, so it counts"
    buffer = train(m, [*buffer, *finish(m, [4, 5], 1)])
    assert m.capacity() == 3, "step 3 is too late for it"
    buffer += finish(m, [6, 7, 8], 2)
    assert m.capacity() == 0
    assert m.budget_spent
    m.finish(0)
    buffer = train(m, [*buffer, Finished(0, 0)])
    assert [group.group_index for group in buffer] == [6, 7, 8], "it had the earliest deadline"
    assert m.capacity() == 1, "one more than the depth allowed was running"


@pytest.mark.parametrize(("w", "steps", "capacity"), [(100, 100, 2), (2, 100, 1), (100, 3, 0)])
def test_a_late_group_still_is_one_that_runs_and_one_that_the_run_trains(w: int, steps: int, capacity: int) -> None:
    m = manager(1, 1, 1, w=w, steps=steps, policy="mask")
    m.admit(0, 0)
    train(m, finish(m, [1]))
    train(m, finish(m, [2], 1))
    assert m.capacity() == capacity


@pytest.mark.parametrize(("s", "d", "k"), [(0, 0.5, 1), (1, 2, 1), (2, 1, 3), (1, 0, 3), (1, -0.5, 1), (-1, 0, 1)])
def test_sizes_under_which_the_bound_could_not_hold_are_refused(s: int, d: float, k: int) -> None:
    with pytest.raises(ValueError, match="need 0 <= D and S >= D"):
        manager(2, s, d, k=k)


@pytest.mark.parametrize(("b", "k"), [(0, 1), (1, 0)])
def test_a_step_has_a_group_and_a_weight_sync_at_most(b: int, k: int) -> None:
    with pytest.raises(ValueError, match="need B >= 1 and k >= 1"):
        manager(b, 3, 0, k=k)


class Scripted(StalenessPolicy):
    """Answers what a test sets."""

    allows = True
    most = 100

    def admit(self, view: StalenessView, version: int) -> bool:
        return self.allows

    def must_wait(self, view: StalenessView, slots: int) -> bool:
        return slots > self.most

    def sustains(self, view: StalenessView) -> bool:
        return self.allows

    def depth(self, view: StalenessView, generate_ahead_steps: float, weight_sync_interval: int) -> float:
        return generate_ahead_steps if self.allows else 0


def scripted(b: int, s: int, d: float) -> tuple[StalenessManager, Scripted]:
    m = manager(b, s, d)
    m.policy = policy = Scripted()
    return m, policy


def test_only_recorded_tokens_need_the_policys_permission() -> None:
    m, policy = scripted(1, 1, 1)
    train(m, finish(m, [0, 1]))
    policy.allows = False
    with pytest.raises(StalenessError, match="which is too old"):
        m.admit(2, 0)
    m.admit(2, 1)


# Slots


def end(m: StalenessManager, group_index: int, outcome: Any) -> None:
    if outcome == "finished":
        m.finish(group_index)
    else:
        m.release(group_index, outcome)


@pytest.mark.parametrize("first", ["finished", "failed", "filtered", "dropped"])
@pytest.mark.parametrize("second", ["finished", "failed", "filtered", "dropped"])
def test_a_slot_is_released_exactly_once(first: str, second: str) -> None:
    m = manager(2, 1, 1)
    m.admit(0, 0)
    m.admit(1, 0)
    end(m, 0, first)
    before = asdict(m.counts)
    if (first, second) == ("finished", "dropped"):
        m.release(0, "dropped")  # a buffered group may still be dropped, once
        assert m.counts.dropped == 1
        before = asdict(m.counts)
    with pytest.raises(StalenessError, match=r"group 0 is not (running|buffered)"):
        end(m, 0, second)
    assert asdict(m.counts) == before


def test_a_group_trains_once() -> None:
    m = manager(1, 1, 1)
    batch = finish(m, [0, 1])[:1]
    m.train(batch)
    with pytest.raises(StalenessError, match="group 0 is not buffered"):
        m.train(batch)
    assert m.counts == RolloutCounts(submitted=2, trained=1, buffered=1)


def test_a_group_is_not_admitted_again_while_it_waits() -> None:
    m = manager(2, 1, 1)
    finish(m, [0])
    with pytest.raises(StalenessError, match="admitted twice"):
        m.admit(0, 0)


def test_a_counter_never_goes_negative() -> None:
    with pytest.raises(StalenessError, match="none was buffered"):
        RolloutCounts().move("buffered", "trained")


@pytest.mark.parametrize("outcome", ["failed", "filtered", "dropped"])
def test_the_slot_of_a_group_that_will_not_train_is_free_for_the_next_prompt(outcome: Any) -> None:
    m = manager(2, 0, 0)
    m.admit(0, 0)
    m.admit(1, 0)
    assert m.capacity() == 0
    m.release(1, outcome)
    assert m.capacity() == 1


# Selection


def test_a_batch_is_the_oldest_groups_in_group_index_order() -> None:
    m = manager(2, 4, 1, policy="accept")
    for group_index in range(4):
        m.admit(group_index, 0)
        m.finish(group_index)
    batch = m.select([Finished(0, 3), Finished(3, 1), Finished(1, 1), Finished(2, 2)])
    assert [group.group_index for group in batch or []] == [1, 3]


def with_slow_group(policy: str, *, s: int = 1, b: int = 2) -> tuple[StalenessManager, list[Finished]]:
    """Before step 2 with D = 1 and full batches waiting; group 0 still runs, since version 0."""
    m = manager(b, s, 1, policy=policy)
    m.admit(0, 0)
    buffer = finish(m, range(1, 2 * b))
    buffer = train(m, buffer)
    buffer += finish(m, range(2 * b, 3 * b), version=1)
    return m, buffer


def test_wait_leaves_a_slot_for_the_slow_group_whose_last_step_this_is() -> None:
    m, buffer = with_slow_group("wait")
    assert m.view().deadline(0) == m.step == 2
    assert m.select(buffer) is None
    m.finish(0)
    batch = m.select([*buffer, Finished(0, 0)])
    assert batch is not None and batch[0].group_index == 0


def test_wait_continues_while_a_later_step_has_a_slot_for_the_slow_group() -> None:
    m, buffer = with_slow_group("wait", s=2)
    assert m.select(buffer) is not None


@pytest.mark.parametrize("policy", ["accept", "mask", "drop"])
def test_only_wait_waits_for_a_slow_group(policy: str) -> None:
    m, buffer = with_slow_group(policy)
    assert m.select(buffer) is not None


def test_a_slow_group_that_fails_is_not_waited_for() -> None:
    m, buffer = with_slow_group("wait")
    m.release(0, "failed")
    assert m.select(buffer) is not None


def test_parts_of_a_step_are_committed_except_the_slot_of_the_slow_group() -> None:
    m, buffer = with_slow_group("wait", b=3)
    part = m.select(buffer, at_least=1)
    assert part is not None and len(part) == 2, "the third slot is the slow group's"
    rest = [group for group in buffer if group not in part]
    assert m.select(rest, committed=2, at_least=1) is None
    m.finish(0)
    last = m.select([*rest, Finished(0, 0)], committed=2, at_least=1)
    assert last == [Finished(0, 0)]
    m.train([*part, *last])


def test_at_bound_zero_a_step_is_committed_group_by_group_as_they_finish() -> None:
    m = manager(3, 0, 0)
    for group_index in range(3):
        m.admit(group_index, 0)
    for committed, group_index in enumerate([2, 0, 1]):
        m.finish(group_index)
        assert m.select([Finished(group_index, 0)], committed=committed, at_least=1) == [Finished(group_index, 0)]


def test_a_part_has_at_least_the_requested_groups_and_as_many_as_fit_into_the_step() -> None:
    m = manager(4, 2, 2, policy="accept")
    groups = finish(m, range(6))
    assert m.select(groups[:1], at_least=2) is None
    assert m.select(groups[:3], at_least=2) == groups[:3]
    assert m.select(groups[3:], committed=3, at_least=2) == groups[3:4], "no more than the step lacks"


def test_as_many_slots_are_filled_as_the_policy_allows() -> None:
    for most in range(7):
        for fewest in range(1, 7):
            m, policy = scripted(6, 0, 0)
            groups = finish(m, range(6))
            policy.most = most
            assert m.select(groups, at_least=fewest) == (groups[:most] if most >= fewest else None)


def test_a_finished_group_is_as_old_as_its_oldest_token() -> None:
    m = manager(2, 1, 1)
    for group_index in range(2):
        m.admit(group_index, 0)
    m.finish(0, oldest_version=1)
    m.finish(1)
    assert m.view().finished == {1: 1, 0: 1}


def test_an_abandoned_selection_leaves_its_groups_free() -> None:
    m = manager(2, 1, 1)
    groups = finish(m, range(3))
    assert m.select(groups, at_least=1) is not None
    assert m.select(groups) == groups[:2]
    m.train(groups[:2])


def test_the_trainer_and_the_manager_agree_on_how_many_slots_are_taken() -> None:
    m = manager(3, 1, 1)
    groups = finish(m, range(3))
    assert m.select(groups[:1], at_least=1) is not None
    with pytest.raises(StalenessError, match="2 groups are said to have slots"):
        m.select(groups[1:], committed=2)


def test_only_buffered_groups_can_be_selected_each_once() -> None:
    m = manager(2, 1, 1)
    (group,) = finish(m, [0])
    for wrong in ([group, group], [group, Finished(7, 0)]):
        with pytest.raises(StalenessError, match="is not buffered, or was selected twice"):
            m.select(wrong)


@pytest.mark.parametrize(("policy", "lag"), [("wait", 3), ("drop", 3)])
def test_a_broken_bound_is_raised_at_consume_time(policy: str, lag: int) -> None:
    m = manager(1, 1, 1, policy=policy)
    finish(m, [0])
    for _ in range(lag):
        m.advance()
    with pytest.raises(StalenessError, match=f"lag {lag} > S = 1"):
        m.assert_bound([Finished(0, 0)])


def test_mask_keeps_its_promise_by_not_training_old_tokens() -> None:
    m = manager(1, 1, 1, policy="mask")
    finish(m, [0])
    assert m.oldest_trained_version == -1, "nothing is too old yet"
    for _ in range(3):
        m.advance()
    assert m.oldest_trained_version == 2  # step 4 stands on version 3, S = 1
    m.assert_bound([Finished(0, 0)])


def test_a_policy_that_trains_older_tokens_than_it_promises_is_found_out_by_the_groups_that_have_such_tokens() -> None:
    class MasksTooLate(StalenessPolicy):
        bounded = True

        def oldest_trained_version(self, step: int, max_staleness_steps: int) -> int:
            return step - 3 - max_staleness_steps

    m = manager(1, 1, 1)
    m.policy = MasksTooLate()
    for _ in range(4):
        m.advance()
    m.assert_bound([Finished(0, 3), Finished(1, 4)])
    with pytest.raises(StalenessError, match="lag 2 > S = 1"):
        m.assert_bound([Finished(2, 2)])


def test_accept_promises_nothing() -> None:
    m = manager(1, 1, 1, policy="accept")
    for _ in range(9):
        m.advance()
    assert m.oldest_trained_version is None
    m.assert_bound([Finished(0, 0)])


# Dropping


def test_drop_gives_up_running_and_buffered_groups_that_miss_their_deadline() -> None:
    m = manager(2, 1, 1, policy="drop")
    for group_index in (0, 1):
        m.admit(group_index, 0)
    train(m, finish(m, [2, 3]))
    assert m.overdue([]) == Overdue([], []), "step 2 is still their turn"
    train(m, finish(m, [4, 5], version=1))
    m.finish(1)
    late = Finished(1, 0)
    assert m.overdue([late]) == Overdue(running=[0], buffered=[late])
    m.release(0, "dropped")
    m.release(1, "dropped")
    assert m.counts == RolloutCounts(submitted=6, trained=4, dropped=2)
    assert m.capacity() == 4, "the next prompts take their slots"


@pytest.mark.parametrize("policy", ["accept", "wait", "mask"])
def test_the_other_policies_give_nothing_up(policy: str) -> None:
    m = manager(1, 1, 1, policy=policy)
    m.admit(0, 0)
    for _ in range(5):
        m.advance()
    assert m.overdue([Finished(1, 0)]) == Overdue([], [])


def test_overdue_groups_are_never_selected() -> None:
    m = manager(1, 1, 1, policy="drop")
    finish(m, [0])
    for version in (1, 2, 3):
        m.advance()
        m.served(version)
    assert m.select([Finished(0, 0)]) is None
    assert m.select([Finished(0, 0), *finish(m, [1], version=3)]) == [Finished(1, 3)]


# Publication


def test_a_step_may_begin_before_the_weight_sync_only_where_they_overlap() -> None:
    for overlap in (False, True):
        m = manager(1, 2, 1, overlap=overlap)
        buffer = train(m, finish(m, [0, 1]), publish=False)
        if overlap:
            assert m.capacity() == 0, "admission waits for the engines"
            buffer = train(m, buffer, publish=False)
        with pytest.raises(StalenessError, match="not served yet"):
            m.select(buffer)
        m.served(1)
        assert m.capacity() == 1


def test_a_version_is_not_served_before_its_step_is_over() -> None:
    with pytest.raises(StalenessError, match="before step 1 has ended"):
        manager(1, 1, 1).served(1)


def test_the_weight_sync_with_which_a_run_resumes_opens_nothing_that_was_not_due() -> None:
    m = manager(1, 3, 1, k=3)
    buffer = train(m, finish(m, range(4)), publish=False)
    resumed = manager(1, 3, 1, k=3)
    resumed.load_state_dict(m.state_dict(), m.step, buffer)
    before = resumed.capacity()
    resumed.served(1)
    assert resumed.capacity() == before == 0


def test_a_version_that_is_served_already_opens_nothing() -> None:
    m, policy = scripted(2, 2, 2)
    policy.allows = False
    m.served(0)
    assert m.capacity() == 6, "the policy was not asked for another depth"


# Resizing


def test_a_larger_bound_holds_for_groups_that_are_selected_already() -> None:
    m = manager(1, 1, 0)
    for version in (1, 2):
        m.advance()
        m.served(version)
    m.resize(max_staleness_steps=2)
    m.assert_bound([Finished(0, 0)])
    with pytest.raises(StalenessError, match="lag 3 > S = 2"):
        m.assert_bound([Finished(0, -1)])


def test_the_policy_is_asked_only_if_the_bound_shrinks() -> None:
    m, policy = scripted(1, 2, 0)
    policy.allows = False
    m.resize(max_staleness_steps=2, max_running=7)
    m.resize(max_staleness_steps=3)
    with pytest.raises(StalenessError, match="lower generate_ahead_steps first"):
        m.resize(max_staleness_steps=2)


def test_a_larger_bound_and_depth_open_admission_at_once() -> None:
    m = manager(2, 0, 0, w=3)
    m.resize(max_staleness_steps=2, generate_ahead_steps=1.5, max_running=10)
    assert m.capacity() == 5
    assert m.view().deadline(0) == 3


def test_a_smaller_depth_admits_nothing_until_training_has_caught_up() -> None:
    m = manager(2, 2, 2)
    buffer = finish(m, range(6))
    m.resize(generate_ahead_steps=0)
    for _ in range(2):
        buffer = train(m, buffer)
        assert m.capacity() == 0
    train(m, buffer)
    assert m.capacity() == 2


def test_a_bound_that_outstanding_groups_could_not_keep_is_refused_under_wait_and_changes_nothing() -> None:
    m = manager(2, 2, 2)
    buffer = finish(m, range(4))
    m.admit(4, 0)  # still running: five groups, and S = 1 would leave them two steps
    with pytest.raises(StalenessError, match="lower generate_ahead_steps first"):
        m.resize(max_staleness_steps=1, generate_ahead_steps=1)
    assert (m.max_staleness_steps, m.generate_ahead_steps) == (2, 2)
    m.resize(generate_ahead_steps=0)
    train(m, train(m, buffer))
    m.resize(max_staleness_steps=2)


def test_groups_that_have_a_slot_are_not_counted_again_when_the_bound_shrinks() -> None:
    m = manager(2, 2, 1)
    groups = finish(m, range(2))
    for group_index in (2, 3):
        m.admit(group_index, 0)
    assert m.select(groups) == groups
    m.resize(max_staleness_steps=1)  # the two running groups have step 2, and no other group does
    with pytest.raises(StalenessError, match="within 0"):
        m.resize(max_staleness_steps=0, generate_ahead_steps=0)


def test_a_group_that_had_a_slot_before_the_bound_shrank_still_trains() -> None:
    m = manager(1, 1, 0)
    (late,) = finish(m, [0])
    m.advance()
    m.served(1)
    assert m.select([late]) == [late]
    m.resize(max_staleness_steps=0)
    m.assert_bound([late])
    m.train([late])
    m.advance()
    with pytest.raises(StalenessError, match="lag 2 > S = 0"):
        m.assert_bound([late])


@pytest.mark.parametrize("policy", ["accept", "mask", "drop"])
def test_where_nothing_waits_the_bound_may_always_shrink(policy: str) -> None:
    m = manager(2, 3, 3, policy=policy)
    finish(m, range(8))
    m.resize(max_staleness_steps=0, generate_ahead_steps=0)
    assert m.max_staleness_steps == 0


@pytest.mark.parametrize("sizes", [{"generate_ahead_steps": 3}, {"max_staleness_steps": 0}, {"max_running": 0}])
def test_impossible_sizes_are_refused_while_running_too(sizes: dict[str, int]) -> None:
    m = manager(2, 2, 1)
    with pytest.raises(ValueError, match="need"):
        m.resize(**sizes)
    assert (m.max_staleness_steps, m.generate_ahead_steps, m.max_running) == (2, 1, 100)


# A depth that adapts


def depths(m: StalenessManager, running: Iterable[int], first: int = 0) -> list[float]:
    """Trains a step for each number of ``running``: so many of the newest groups still run when it ends, or fewer if the step
    would lack groups. Returns the depth after each step."""
    found: list[float] = []
    runs: list[Finished] = []
    buffer: list[Finished] = []
    for number in running:
        while m.capacity():
            runs.append(Finished(first, m.step - 1))
            m.admit(first, m.step - 1)
            first += 1
        number = min(number, len(runs) + len(buffer) - m.batch_groups)
        ended, runs = runs[: len(runs) - number], runs[len(runs) - number :]
        for group in ended:
            m.finish(group.group_index)
        buffer = train(m, buffer + ended)
        found.append(m.ahead)
    return found


def test_the_depth_is_one_step_and_the_groups_that_still_run_when_a_step_begins() -> None:
    m = manager(4, 6, None, policy="mask")
    assert m.ahead == 2, "before anything is measured"
    assert depths(m, [5, 6, 2]) == [2.25, 2.5, 2.5], "the largest of the last 16 steps"
    assert depths(manager(4, 6, None, policy="mask"), [6, *[2] * 16])[-2:] == [2.5, 1.5], "which does not count longer"


@pytest.mark.parametrize(("s", "k", "most"), [(0, 1, 0), (1, 1, 1), (3, 2, 2), (4, 1, 4)])
def test_the_depth_is_at_most_what_the_bound_leaves(s: int, k: int, most: int) -> None:
    m = manager(4, s, None, policy="mask", k=k)
    assert m.ahead == min(2, most)
    assert max(depths(m, [100] * 8)) == m.ahead == most


def test_a_group_that_is_late_does_not_deepen_the_pipeline() -> None:
    m = manager(2, 3, None, policy="accept")
    m.admit(0, 0)  # it never ends
    assert depths(m, [0] * 20, first=1)[-1] == 1, "1.5 with it"


def test_steps_without_a_weight_sync_are_measured_too() -> None:
    # 8 groups run as step 2 begins, for which version 0 admits 3 + D steps of groups: 2 - 3 + 8 / 2 = 3.
    assert depths(manager(2, 5, None, policy="mask", k=3), [8, 3, 0]) == [2, 2, 3]


@pytest.mark.parametrize(("overlap", "depth"), [(True, 3), (False, 2)])
def test_the_groups_that_run_are_counted_when_the_next_step_may_begin(overlap: bool, depth: float) -> None:
    m = manager(2, 4, None, policy="mask", overlap=overlap)
    for group_index in range(6):
        m.admit(group_index, 0)
    for group_index in range(2):
        m.finish(group_index)
    train(m, [Finished(0, 0), Finished(1, 0)], publish=False)
    for group_index in range(2, 6):  # during the weight sync
        m.finish(group_index)
    m.served(1)
    assert m.ahead == depth


def test_generation_has_as_many_slots_as_the_depth_admits_groups_and_workers_run_them() -> None:
    m = manager(4, 6, None, policy="mask", w=13)
    assert m.generation_slots == (2 + 1) * 4
    depths(m, [6])
    assert m.generation_slots == 13, "(2.5 + 1) * 4 = 14 would be more"
    m.resize(generate_ahead_steps=0.5)
    assert m.generation_slots == 6


def test_a_smaller_bound_limits_the_adapting_depth_and_a_given_depth_ends_it() -> None:
    m = manager(4, 4, None, policy="mask")
    m.resize(max_staleness_steps=1)
    assert (m.ahead, m.generate_ahead_steps) == (1, None)
    m.resize(max_staleness_steps=4)
    assert m.ahead == 2
    m.resize(generate_ahead_steps=0.5)
    assert (m.ahead, m.generate_ahead_steps) == (0.5, 0.5)


def test_a_resumed_run_keeps_its_depth() -> None:
    m = manager(4, 6, None, policy="mask")
    assert depths(m, [1] * 16)[-1] == 1.25
    restored = manager(4, 6, None, policy="mask")
    restored.load_state_dict({**m.state_dict(), "buffered": 0}, m.step, [])
    assert restored.ahead == 1.25


def test_a_resumed_run_admits_all_groups_that_ran_although_the_depth_had_shrunk() -> None:
    m = manager(4, 6, None, policy="wait")
    assert depths(m, [8, *[2] * 16])[-2:] == [3, 1.5]
    unfinished = m.counts.running + m.counts.buffered  # for a resume that finds none of them finished
    restored = manager(4, 6, None, policy="wait")
    restored.load_state_dict({**m.state_dict(), "buffered": 0}, m.step, [])
    assert restored.capacity() == unfinished == 3 * 4, "admitted with D = 3, one version earlier"


# Checkpoints


def test_resuming_forgets_groups_in_flight_and_keeps_finished_ones() -> None:
    m = manager(2, 2, 1)
    for group_index in range(4):
        m.admit(group_index, 0)
    m.finish(0)
    restored = manager(2, 2, 1)
    restored.load_state_dict(m.state_dict(), 1, [Finished(0, 0)])
    assert restored.counts == RolloutCounts(submitted=1, running=0, buffered=1)
    assert restored.capacity() == 3
    m.load_state_dict(m.state_dict(), 1, [Finished(0, 0)])
    m.admit(1, 0)  # it does not run any more


def test_a_checkpoint_in_the_middle_of_a_step_has_nothing_committed() -> None:
    m = manager(2, 2, 1)
    groups = finish(m, range(2))
    assert m.select(groups[:1], at_least=1) is not None
    restored = manager(2, 2, 1)
    restored.load_state_dict(m.state_dict(), 1, groups)
    assert restored.select(groups) == groups


def test_filtered_and_dropped_groups_are_remembered_and_older_checkpoints_have_none() -> None:
    m = manager(2, 2, 1)
    for group_index in range(2):
        m.admit(group_index, 0)
    m.release(0, "filtered")
    m.release(1, "dropped")
    restored = manager(2, 2, 1)
    restored.load_state_dict(m.state_dict(), 1, [])
    assert restored.counts == RolloutCounts(submitted=2, filtered=1, dropped=1)
    restored.load_state_dict(
        {"submitted": 1, "running": 0, "buffered": 0, "trained": 0, "failed": 1, "published": 0}, 1, []
    )
    assert restored.counts == RolloutCounts(submitted=1, failed=1)


def test_a_weight_sync_that_was_under_way_is_made_up_for_by_the_one_with_which_a_run_resumes() -> None:
    m = manager(1, 2, 1, overlap=True)
    buffer = train(m, finish(m, [0, 1]), publish=False)
    restored = manager(1, 2, 1, overlap=True)
    restored.load_state_dict(m.state_dict(), m.step, buffer)
    assert restored.capacity() == 1


def test_a_weight_sync_that_was_due_and_failed_is_made_up_for_too() -> None:
    restored = manager(1, 2, 1)
    counts = RolloutCounts(submitted=2, trained=2)
    restored.load_state_dict({**asdict(counts), "published": 0}, 3, [])
    assert restored.capacity() == 2, "as if version 2 were served: D + v + k = 4"
    restored.load_state_dict({**asdict(counts), "published": 2}, 3, [])
    assert restored.capacity() == 2
    not_due = manager(1, 3, 1, k=3)
    not_due.load_state_dict({**asdict(counts), "published": 0}, 3, [])
    assert not_due.capacity() == 2, "version 0 is served, and D + v + k = 4"
    assert not_due.weight_sync_due, "after step 3"


def test_changed_sizes_outlive_any_number_of_resumes() -> None:
    m = manager(2, 1, 1)
    m.resize(max_staleness_steps=3, generate_ahead_steps=2.5, max_running=50)
    for _ in range(2):
        restored = manager(2, 1, 1)
        restored.load_state_dict(m.state_dict(), 1, [])
        assert (restored.max_staleness_steps, restored.generate_ahead_steps, restored.max_running) == (3, 2.5, 50)
        assert restored.capacity() == 7
        restored.assert_bound([Finished(0, -3)])
        m = restored
    assert "resized" not in manager(2, 1, 1).state_dict(), "the sizes of the settings are not kept: they may change"


def test_a_bound_too_small_for_the_checkpoint_is_refused() -> None:
    state = {"submitted": 2, "running": 0, "buffered": 2, "trained": 0, "failed": 0, "published": 4}
    with pytest.raises(StalenessError, match="resume with the bound"):
        manager(1, 1, 0).load_state_dict(state, 5, [Finished(0, 3), Finished(1, 3)])
    manager(1, 1, 0, policy="mask").load_state_dict(state, 5, [Finished(0, 3), Finished(1, 3)])


def test_a_checkpoint_that_lacks_finished_groups_is_refused() -> None:
    state = {"submitted": 2, "running": 0, "buffered": 2, "trained": 0, "failed": 0, "published": 0}
    with pytest.raises(StalenessError, match="counts 2 finished groups and contains 1"):
        manager(1, 1, 0).load_state_dict(state, 1, [Finished(0, 0)])


def resumed_in_step_3(policy: str, in_buffer: Callable[[int], bool] = lambda group_index: True) -> StalenessManager:
    """Before step 3 with S = 2 and B = 2: groups 4 and 5 of version 0 are finished; step 3 is their last."""
    m = manager(2, 2, 2, policy=policy)
    kept = [group for group in (Finished(4, 0), Finished(5, 0)) if in_buffer(group.group_index)]
    counts = RolloutCounts(submitted=4 + len(kept), trained=4, buffered=len(kept))
    m.load_state_dict({**asdict(counts), "published": 2}, 3, kept)
    return m


def test_a_recording_continues_under_its_old_version_while_a_slot_is_left_before_its_deadline() -> None:
    m = resumed_in_step_3("wait", in_buffer=lambda group_index: group_index == 4)
    assert m.may_admit(0)
    m.admit(5, 0)
    assert not m.may_admit(0), "step 3 has two slots"
    assert m.may_admit(1)
    with pytest.raises(StalenessError, match="which is too old"):
        m.admit(6, 0)


@pytest.mark.parametrize(("policy", "version", "fits"), [("drop", 0, True), ("drop", -1, False), ("accept", -1, True)])
def test_a_recording_that_would_be_dropped_at_once_does_not_go_on(policy: str, version: int, fits: bool) -> None:
    assert resumed_in_step_3(policy).may_admit(version) is fits


def test_a_version_without_groups_is_not_counted() -> None:
    groups = GroupsByVersion()
    for group_index, version in ((0, 5), (1, 5), (2, 6)):
        groups.add(group_index, version)
    assert [groups.pop(0), dict(groups.counts)] == [5, {5: 1, 6: 1}]
    assert [groups.pop(1), dict(groups.counts)] == [5, {6: 1}]

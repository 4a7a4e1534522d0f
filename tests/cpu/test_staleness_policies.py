"""The staleness policies by themselves: their answers for a view, and how users bring their own."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_staleness import Finished, finish, manager, train

from skyrl_train.errors import ConfigError, StalenessError
from skyrl_train.rollout.buffer import BufferedGroup
from skyrl_train.rollout.staleness.policies import (
    STALENESS_POLICIES,
    StalenessPolicy,
    StalenessView,
    WaitPolicy,
    resolve_staleness_policy,
)

versions = st.lists(st.integers(0, 4), max_size=6)


@st.composite
def views(draw: st.DrawFn) -> StalenessView:
    batch_groups = draw(st.integers(1, 4))
    return StalenessView(
        step=draw(st.integers(3, 6)),
        batch_groups=batch_groups,
        slots=draw(st.integers(0, batch_groups)),
        max_staleness_steps=draw(st.integers(0, 5)),
        running=Counter(draw(versions)),
        finished=Counter(draw(versions)),
    )


def fits_one_by_one(view: StalenessView) -> bool:
    """Fills the steps from ``t`` on, earliest deadline first, and checks whether a group is late."""
    deadlines = sorted(view.deadline(version) for version in [*expanded(view.running), *expanded(view.finished)])
    step, slots = view.step, view.slots
    for deadline in deadlines:
        if slots == 0:
            step, slots = step + 1, view.batch_groups
        if deadline < step:
            return False
        slots -= 1
    return True


def expanded(groups: Mapping[int, int]) -> list[int]:
    return [version for version, number in groups.items() for _ in range(number)]


@given(views())
def test_a_view_is_feasible_if_filling_the_steps_one_by_one_makes_every_deadline(view: StalenessView) -> None:
    assert view.feasible == fits_one_by_one(view)


def chosen_by_wait(view: StalenessView, number: int) -> list[Finished]:
    groups = [Finished(group_index, version) for group_index, version in enumerate(expanded(view.finished))]
    return list(WaitPolicy().select(view, groups)[:number])


def after(view: StalenessView, chosen: Collection[Finished]) -> StalenessView:
    """The view after these groups have slots."""
    taken = Counter(group.oldest_version for group in chosen)
    return replace(view, slots=view.slots - len(chosen), finished=Counter(view.finished) - taken)


@given(views())
def test_wait_waits_exactly_if_no_choice_of_groups_would_leave_the_rest_feasible(view: StalenessView) -> None:
    if not view.feasible:
        return  # never under this policy
    groups = [Finished(group_index, version) for group_index, version in enumerate(expanded(view.finished))]
    for number in range(min(view.slots, len(groups)) + 1):
        possible = any(after(view, choice).feasible for choice in combinations(groups, number))
        assert WaitPolicy().must_wait(view, number) == (not possible)
        assert after(view, chosen_by_wait(view, number)).feasible == possible, "so the earliest deadlines are best"


@given(views())
def test_must_wait_is_monotonic_in_the_number_of_slots(view: StalenessView) -> None:
    waits = [WaitPolicy().must_wait(view, number) for number in range(view.slots + 1)]
    assert waits == sorted(waits)


@given(views())
def test_once_everything_has_finished_a_feasible_view_never_waits(view: StalenessView) -> None:
    ended = replace(view, running={})
    if ended.feasible:
        assert not WaitPolicy().must_wait(ended, min(ended.slots, sum(ended.finished.values())))


def test_the_built_in_policies_are_the_four_of_semantics_4_2() -> None:
    assert STALENESS_POLICIES.names() == ["accept", "drop", "mask", "wait"]
    bounded = {name for name in STALENESS_POLICIES.names() if resolve_staleness_policy(name).bounded}
    assert bounded == {"wait", "mask", "drop"}


class FreshestFirst(StalenessPolicy):
    """Takes the newest groups, and promises what it does not keep."""

    bounded = True

    def select(self, view: StalenessView, finished: Sequence[BufferedGroup]) -> Sequence[BufferedGroup]:  # type: ignore[override]
        return sorted(finished, key=lambda group: -group.oldest_version)


class Patient(StalenessPolicy):
    """Waits for everything that runs."""

    def must_wait(self, view: StalenessView, slots: int) -> bool:
        return sum(view.running.values()) > 0


class Picky(StalenessPolicy):
    """Leaves groups out, which are not lost by that."""

    def select(self, view: StalenessView, finished: Sequence[BufferedGroup]) -> Sequence[BufferedGroup]:  # type: ignore[override]
        return finished[:1]


class AnyDepth(StalenessPolicy):
    """Answers what it is told to."""

    answer = 0.0

    def depth(self, view: StalenessView, generate_ahead_steps: float, weight_sync_interval: int) -> float:
        return self.answer


class NeedsArguments(StalenessPolicy):
    def __init__(self, patience: int) -> None:
        self.patience = patience


def test_a_policy_of_ones_own_is_named_by_its_import_path() -> None:
    m = manager(1, 3, 3, policy=f"{__name__}:FreshestFirst")
    for group_index in range(2):
        m.admit(group_index, 0)
        m.finish(group_index)
    assert m.select([Finished(0, 0), Finished(1, 1)]) == [Finished(1, 1)]


def test_a_policy_of_ones_own_can_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from skyrl_train.rollout.staleness.policies import AcceptPolicy\nclass Mine(AcceptPolicy):\n    pass\n"
    )
    assert type(resolve_staleness_policy(f"{file}:Mine")).__name__ == "Mine"


def test_a_policy_of_ones_own_decides_when_to_wait() -> None:
    m = manager(1, 1, 1, policy=f"{__name__}:Patient")
    for group_index in range(2):
        m.admit(group_index, 0)
    m.finish(0)
    assert m.select([Finished(0, 0)]) is None
    m.release(1, "failed")
    assert m.select([Finished(0, 0)]) == [Finished(0, 0)]


def test_a_policy_of_ones_own_cannot_make_a_step_smaller() -> None:
    m = manager(2, 1, 1, policy=f"{__name__}:Picky")
    groups = [Finished(group_index, 0) for group_index in range(2)]
    for group in groups:
        m.admit(group.group_index, 0)
        m.finish(group.group_index)
    with pytest.raises(StalenessError, match=r"Picky\.select returned 1 of 2 groups, and the step needs 2"):
        m.select(groups)
    assert m.select(groups, at_least=1) == groups[:1]


def test_the_promise_of_a_policy_of_ones_own_is_asserted_too() -> None:
    m = manager(1, 0, 0, policy=f"{__name__}:FreshestFirst")
    m.admit(0, 0)
    m.finish(0)
    m.advance()
    with pytest.raises(StalenessError, match="lag 1 > S = 0"):
        m.assert_bound([Finished(0, 0)])


@pytest.mark.parametrize("depth", [-0.5, math.nan])
def test_a_depth_under_which_no_step_would_ever_be_full_is_refused(depth: float) -> None:
    m = manager(2, 1, 1, policy=f"{__name__}:AnyDepth")
    m.policy.answer = depth  # type: ignore[attr-defined]
    with pytest.raises(StalenessError, match="AnyDepth"):
        train(m, finish(m, range(2)))


def test_a_depth_beyond_that_of_the_settings_is_that_of_the_settings() -> None:
    m = manager(2, 1, 1, policy=f"{__name__}:AnyDepth")
    m.policy.answer = math.inf  # type: ignore[attr-defined]
    train(m, finish(m, range(2)))
    assert m.capacity() == 4


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("wiat", "Did you mean 'wait'"),
        ("no.such:Policy", "cannot be imported"),
        (f"{__name__}:fits_one_by_one", "is not a subclass of"),
        ("collections:Counter", "is not a subclass of"),
        (f"{__name__}:NeedsArguments", "must be constructible without arguments"),
    ],
)
def test_a_policy_that_is_none_is_refused(name: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        resolve_staleness_policy(name)

"""The straggler policies by themselves: what they ask of an outlook, and how users bring their own."""

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
from skyrl_train.rollout.stragglers import (
    STRAGGLER_POLICIES,
    FinishedGroup,
    Outlook,
    StragglerPolicy,
    WaitPolicy,
    resolve_straggler_policy,
)

versions = st.lists(st.integers(0, 4), max_size=6)


@st.composite
def outlooks(draw: st.DrawFn) -> Outlook:
    batch_groups = draw(st.integers(1, 4))
    return Outlook(
        step=draw(st.integers(3, 6)),
        batch_groups=batch_groups,
        seats=draw(st.integers(0, batch_groups)),
        max_staleness_steps=draw(st.integers(0, 5)),
        running=Counter(draw(versions)),
        finished=Counter(draw(versions)),
    )


def fits_one_by_one(outlook: Outlook) -> bool:
    """Fills the steps from ``t`` on, earliest deadline first, and looks whether anyone comes too late."""
    deadlines = sorted(
        outlook.deadline(version) for version in [*expanded(outlook.running), *expanded(outlook.finished)]
    )
    step, seats = outlook.step, outlook.seats
    for deadline in deadlines:
        if seats == 0:
            step, seats = step + 1, outlook.batch_groups
        if deadline < step:
            return False
        seats -= 1
    return True


def expanded(groups: Mapping[int, int]) -> list[int]:
    return [version for version, number in groups.items() for _ in range(number)]


@given(outlooks())
def test_an_outlook_is_feasible_if_filling_the_steps_one_by_one_makes_every_deadline(outlook: Outlook) -> None:
    assert outlook.feasible == fits_one_by_one(outlook)


def chosen_by_wait(outlook: Outlook, number: int) -> list[Finished]:
    groups = [Finished(ordinal, version) for ordinal, version in enumerate(expanded(outlook.finished))]
    return list(WaitPolicy().select(outlook, groups)[:number])


def after(outlook: Outlook, chosen: Collection[Finished]) -> Outlook:
    """What is left behind when these groups have seats."""
    taken = Counter(group.oldest_version for group in chosen)
    return replace(outlook, seats=outlook.seats - len(chosen), finished=Counter(outlook.finished) - taken)


@given(outlooks())
def test_wait_waits_exactly_if_no_choice_of_groups_would_leave_the_rest_feasible(outlook: Outlook) -> None:
    if not outlook.feasible:
        return  # never under this policy
    groups = [Finished(ordinal, version) for ordinal, version in enumerate(expanded(outlook.finished))]
    for number in range(min(outlook.seats, len(groups)) + 1):
        possible = any(after(outlook, choice).feasible for choice in combinations(groups, number))
        assert WaitPolicy().must_wait(outlook, number) == (not possible)
        assert after(outlook, chosen_by_wait(outlook, number)).feasible == possible, (
            "so the earliest deadlines are best"
        )


@given(outlooks())
def test_whoever_need_not_wait_with_a_number_of_groups_need_not_wait_with_fewer(outlook: Outlook) -> None:
    waits = [WaitPolicy().must_wait(outlook, number) for number in range(outlook.seats + 1)]
    assert waits == sorted(waits)


@given(outlooks())
def test_once_everything_has_finished_a_feasible_outlook_never_waits(outlook: Outlook) -> None:
    ended = replace(outlook, running={})
    if ended.feasible:
        assert not WaitPolicy().must_wait(ended, min(ended.seats, sum(ended.finished.values())))


@given(outlooks(), st.integers(0, 16).map(lambda quarters: quarters / 4), st.integers(1, 3))
def test_burst_holds_groups_back_only_where_the_trainer_needs_nobody_before_the_next_publication(
    outlook: Outlook, d: float, k: int
) -> None:
    if not outlook.feasible:
        return
    depth = resolve_straggler_policy("burst").depth(outlook, d, k)
    assert depth in (0, d)
    ready = sum(outlook.finished.values()) + outlook.batch_groups - outlook.seats
    steps_are_ready = (
        ready >= k * outlook.batch_groups and 2 * ready >= outlook.max_staleness_steps * outlook.batch_groups
    )
    nobody_is_due = all(
        replace(outlook, step=outlook.step + ahead, finished={}, seats=0).feasible for ahead in range(k)
    )
    assert depth == (0 if steps_are_ready and nobody_is_due else d)


def test_what_burst_holds_back_begins_at_once_when_the_trainer_needs_it() -> None:
    m = manager(2, 2, 2, policy="burst")
    buffer = finish(m, range(6))
    admitted = []
    for version in (1, 2, 3):
        buffer = train(m, buffer)
        admitted.append(m.capacity())
        buffer += finish(m, range(10 * version, 10 * version + m.capacity()), version)
    assert admitted == [0, 0, 6], "two steps were ready, one was, none was"


def test_the_built_in_policies_are_the_four_of_semantics_4_2_and_one_more_that_waits() -> None:
    assert STRAGGLER_POLICIES.names() == ["accept", "burst", "drop", "mask", "wait"]
    bounded = {name for name in STRAGGLER_POLICIES.names() if resolve_straggler_policy(name).bounded}
    assert bounded == {"wait", "burst", "mask", "drop"}


class FreshestFirst(StragglerPolicy):
    """Takes the newest groups, and promises what it does not keep."""

    bounded = True

    def select(self, outlook: Outlook, finished: Sequence[FinishedGroup]) -> Sequence[FinishedGroup]:  # type: ignore[override]
        return sorted(finished, key=lambda group: -group.oldest_version)


class Patient(StragglerPolicy):
    """Waits for everything that runs."""

    def must_wait(self, outlook: Outlook, seats: int) -> bool:
        return sum(outlook.running.values()) > 0


class AnyDepth(StragglerPolicy):
    """Answers what it is told to."""

    answer = 0.0

    def depth(self, outlook: Outlook, pipeline_depth: float, steps_per_publication: int) -> float:
        return self.answer


class NeedsArguments(StragglerPolicy):
    def __init__(self, patience: int) -> None:
        self.patience = patience


def test_a_policy_of_ones_own_is_named_by_its_import_path() -> None:
    m = manager(1, 3, 3, policy=f"{__name__}:FreshestFirst")
    for ordinal in range(2):
        m.admit(ordinal, 0)
        m.finish(ordinal)
    assert m.select([Finished(0, 0), Finished(1, 1)]) == [Finished(1, 1)]


def test_a_policy_of_ones_own_can_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from skyrl_train.rollout.stragglers import AcceptPolicy\nclass Mine(AcceptPolicy):\n    pass\n")
    assert type(resolve_straggler_policy(f"{file}:Mine")).__name__ == "Mine"


def test_a_policy_of_ones_own_decides_when_to_wait() -> None:
    m = manager(1, 1, 1, policy=f"{__name__}:Patient")
    for ordinal in range(2):
        m.admit(ordinal, 0)
    m.finish(0)
    assert m.select([Finished(0, 0)]) is None
    m.fail(1)
    assert m.select([Finished(0, 0)]) == [Finished(0, 0)]


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
        (f"{__name__}:fits_one_by_one", "is no subclass of"),
        (f"{__name__}:NeedsArguments", "is made without arguments"),
    ],
)
def test_a_policy_that_is_none_is_refused(name: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        resolve_straggler_policy(name)

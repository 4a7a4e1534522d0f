"""The ledger of group indices (SEMANTICS 5), over random histories."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_train.rollout.data.ledger import OUTCOMES, GroupLedger


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from(["issue", "finish", *OUTCOMES, "checkpoint", "crash"]), max_size=80),
    st.randoms(use_true_random=False),
)
def test_in_the_surviving_history_every_group_index_has_one_outcome(events: list[str], rng: random.Random) -> None:
    ledger = GroupLedger()
    flying: list[int] = []
    buffered: list[int] = []
    settled: dict[int, str] = {}
    saved = (json.dumps(ledger.state_dict()), [], {})
    for event in events:
        if event == "issue":
            expected = ledger.next
            flying.append(ledger.issue())
            assert flying[-1] == expected
        elif event == "finish" and flying:
            buffered.append(flying.pop(rng.randrange(len(flying))))
        elif event in OUTCOMES and flying + buffered:
            pool = rng.choice([p for p in (flying, buffered) if p])
            group_index = pool.pop(rng.randrange(len(pool)))
            ledger.settle([group_index], event)
            assert group_index not in settled
            settled[group_index] = event
        elif event == "checkpoint":
            saved = (json.dumps(ledger.state_dict()), list(buffered), dict(settled))
        elif event == "crash":
            flying, buffered, settled = [], list(saved[1]), dict(saved[2])
            ledger = GroupLedger()
            ledger.load_state_dict(json.loads(saved[0]), buffered)
        assert all(ledger.is_open(group_index) for group_index in flying + buffered)
        assert not any(ledger.is_open(group_index) for group_index in settled)
    while ledger.next < ledger.issued:  # what the last crash has left behind
        flying.append(ledger.issue())
    for group_index in flying + buffered:
        ledger.settle([group_index], "trained")
        settled[group_index] = "trained"
    assert sorted(settled) == list(range(ledger.issued))
    assert ledger.frontier == ledger.issued
    for outcome in ("failed", "filtered", "dropped"):
        assert sorted(getattr(ledger, outcome)) == sorted(o for o, became in settled.items() if became == outcome)


def test_group_indices_in_flight_come_first_after_a_resume_in_their_order() -> None:
    ledger = GroupLedger()
    for _ in range(6):
        ledger.issue()
    ledger.settle([0], "trained")
    ledger.settle([3], "filtered")
    restored = GroupLedger()
    restored.load_state_dict(ledger.state_dict(), buffered=[2])
    assert [restored.issue() for _ in range(5)] == [1, 4, 5, 6, 7]


@pytest.mark.parametrize("group_index", [0, 1, 5])  # settled already; the next one; far from being issued
def test_only_group_indices_in_flight_can_be_settled(group_index: int) -> None:
    ledger = GroupLedger()
    ledger.issue()
    ledger.settle([0], "trained")
    with pytest.raises(ValueError, match="not in flight"):
        ledger.settle([group_index], "trained")


def test_an_unknown_outcome_is_rejected() -> None:
    ledger = GroupLedger()
    with pytest.raises(ValueError, match="unknown outcome"):
        ledger.settle([ledger.issue()], "lost")

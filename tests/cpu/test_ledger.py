"""Data order and losslessness (SEMANTICS 5), over random histories."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_train.errors import CheckpointError
from skyrl_train.rollout.ledger import PromptLedger


def test_every_epoch_is_another_permutation_of_all_rows() -> None:
    ledger = PromptLedger(7, seed=3, fingerprint="f")
    epochs = [[ledger.row(epoch * 7 + position) for position in range(7)] for epoch in range(5)]
    assert all(sorted(rows) == list(range(7)) for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) == 5


def test_an_ordinal_names_the_same_row_whenever_it_is_asked_for() -> None:
    ledger = PromptLedger(11, seed=1, fingerprint="f")
    ordinals = list(range(110))
    expected = {o: ledger.row(o) for o in ordinals}
    random.Random(0).shuffle(ordinals)
    assert {o: ledger.row(o) for o in ordinals} == expected


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 9),
    st.lists(st.sampled_from(["issue", "finish", "train", "fail", "checkpoint", "crash"]), max_size=80),
    st.randoms(),
)
def test_in_the_surviving_history_every_ordinal_is_settled_once(n: int, events: list[str], rng: random.Random) -> None:
    ledger = PromptLedger(n, 0, "f")
    flying: list[int] = []
    buffered: list[int] = []
    settled: list[int] = []
    saved = (ledger.state_dict(), [], [])
    for event in events:
        if event == "issue":
            flying.append(ledger.issue())
        elif event == "finish" and flying:
            buffered.append(flying.pop(rng.randrange(len(flying))))
        elif event == "train" and buffered:
            settled.append(buffered.pop(rng.randrange(len(buffered))))
            ledger.settle([settled[-1]], "trained")
        elif event == "fail" and flying:
            settled.append(flying.pop(rng.randrange(len(flying))))
            ledger.settle([settled[-1]], "failed")
        elif event == "checkpoint":
            saved = (ledger.state_dict(), list(buffered), list(settled))
        elif event == "crash":
            state, buffered, settled = saved[0], list(saved[1]), list(saved[2])
            ledger = PromptLedger(n, 0, "f")
            ledger.load_state_dict(state, buffered)
            flying = []
    while flying or buffered or len(settled) < 3 * n:  # to the end, without crashes
        flying.append(ledger.issue()) if len(settled) < 3 * n else None
        for ordinal in [*flying, *buffered]:
            ledger.settle([ordinal], "trained")
            settled.append(ordinal)
        flying, buffered = [], []
    assert sorted(settled) == list(range(len(settled)))
    assert ledger.frontier == len(settled)


def test_what_was_in_flight_comes_first_after_resuming_in_its_order() -> None:
    ledger = PromptLedger(10, 0, "f")
    for _ in range(6):
        ledger.issue()
    ledger.settle([0, 3], "trained")
    restored = PromptLedger(10, 0, "f")
    restored.load_state_dict(ledger.state_dict(), buffered=[2])
    assert [restored.issue() for _ in range(5)] == [1, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("n", "seed", "fingerprint", "key"), [(9, 0, "f", "dataset_len"), (10, 1, "f", "seed"), (10, 0, "g", "fingerprint")]
)
def test_a_checkpoint_of_other_data_is_refused(n: int, seed: int, fingerprint: str, key: str) -> None:
    with pytest.raises(CheckpointError, match=key):
        PromptLedger(n, seed, fingerprint).load_state_dict(PromptLedger(10, 0, "f").state_dict(), [])


@pytest.mark.parametrize("ordinal", [0, 5])
def test_only_what_is_in_flight_can_be_settled(ordinal: int) -> None:
    ledger = PromptLedger(10, 0, "f")
    ledger.issue()
    ledger.settle([0], "trained")
    with pytest.raises(ValueError, match="not in flight"):
        ledger.settle([ordinal], "trained")

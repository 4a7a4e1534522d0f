"""Packing into micro-batches: within the budget, nothing lost, as little padding as possible."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.errors import ConfigError
from skyrl_train.training.backend import TrainingSequence
from skyrl_train.training.batch import MICRO_BATCH_COST_TOKENS, collate, flat_tokens, pack_by_tokens

lengths_and_budget = st.lists(st.integers(1, 50), max_size=30).flatmap(
    lambda lengths: st.tuples(st.just(lengths), st.integers(max(lengths, default=1), 400))
)


@given(lengths_and_budget)
def test_every_sequence_is_in_one_micro_batch_within_the_budget(case: tuple[list[int], int]) -> None:
    lengths, budget = case
    packed = pack_by_tokens(lengths, budget)
    assert sorted(index for batch in packed for index in batch) == list(range(len(lengths)))
    assert all(batch and max(lengths[i] for i in batch) * len(batch) <= budget for batch in packed)


@given(lengths_and_budget)
def test_longest_first_and_ties_in_the_given_order(case: tuple[list[int], int]) -> None:
    lengths, budget = case
    order = [index for batch in pack_by_tokens(lengths, budget) for index in batch]
    assert order == sorted(order, key=lambda index: (-lengths[index], index))


@given(st.lists(st.integers(1, 400), min_size=1, max_size=9))
def test_the_cuts_cost_least_of_all_cuts_of_the_sorted_order(lengths: list[int]) -> None:
    def cost(batches: list[list[int]]) -> int:
        return sum(max(lengths[i] for i in b) * len(b) + MICRO_BATCH_COST_TOKENS for b in batches)

    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    inner = range(1, len(order))
    all_cuts = [(0, *cuts, len(order)) for n in range(len(order)) for cuts in combinations(inner, n)]
    best = min(cost([order[a:b] for a, b in pairwise(cuts)]) for cuts in all_cuts)
    assert cost(pack_by_tokens(lengths, budget=10_000)) == best


def test_a_sequence_longer_than_the_budget_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        ConfigError, match=r"2 sequences do not fit trainer.micro_batch_tokens=10; the longest has 12"
    ) as e:
        pack_by_tokens([3, 12, 11, 10], budget=10)
    assert "Set trainer.micro_batch_tokens to 12 or more" in str(e.value)


def test_collating_pads_on_the_right_and_scores_from_one_position_to_the_left() -> None:
    def sequence(ids: list[int], trained: list[int]) -> TrainingSequence:
        mask = torch.tensor(trained, dtype=torch.bool)
        floats = torch.tensor([float(i) for i in ids])
        return TrainingSequence(torch.tensor(ids), mask, floats, -floats, torch.where(mask, 0, -1), 0)

    sequences = [sequence([5, 6], [0, 1]), sequence([1, 2, 3, 4], [0, 1, 0, 1]), sequence([9], [0])]
    micro_batch = collate(sequences, [1, 0], [s.loss_mask for s in sequences])

    assert micro_batch.input_ids.tolist() == [[1, 2, 3], [5, 6, 0]]
    assert micro_batch.position_ids.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert micro_batch.attention_mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert micro_batch.scored.tolist() == [[True, False, True], [True, False, False]]
    assert micro_batch.targets.tolist() == [2, 4, 6]
    assert flat_tokens([s.advantages for s in sequences], micro_batch).tolist() == [2.0, 4.0, 6.0]

"""From lengths to micro-batches: within the budget, nothing lost, as little padding as possible."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.errors import ConfigError
from skyrl_train.training.attention import Segments
from skyrl_train.training.backend import TrainingSequence
from skyrl_train.training.batch import (
    MICRO_BATCH_COST_TOKENS,
    collate_packed,
    collate_padded,
    flat_tokens,
    pack_rows,
    pad_rows,
)

lengths_and_budget = st.lists(st.integers(1, 50), max_size=30).flatmap(
    lambda lengths: st.tuples(st.just(lengths), st.integers(max(lengths, default=1), 400))
)


class TestPackedRows:
    @given(lengths_and_budget)
    def test_every_sequence_is_in_one_row_within_the_budget(self, case: tuple[list[int], int]) -> None:
        lengths, budget = case
        rows = pack_rows(lengths, budget)
        assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
        assert all(row and sum(lengths[i] for i in row) <= budget for row in rows)

    @given(lengths_and_budget)
    def test_longest_first_and_ties_in_the_given_order(self, case: tuple[list[int], int]) -> None:
        lengths, budget = case
        for row in pack_rows(lengths, budget):
            assert row == sorted(row, key=lambda index: (-lengths[index], index))

    @given(lengths_and_budget)
    def test_nothing_fits_into_an_earlier_row(self, case: tuple[list[int], int]) -> None:
        lengths, budget = case
        rows = pack_rows(lengths, budget)
        for earlier, later in combinations(rows, 2):
            assert all(sum(lengths[j] for j in earlier) + lengths[i] > budget for i in later)


class TestPaddedRows:
    @given(lengths_and_budget)
    def test_every_sequence_is_in_one_micro_batch_within_the_budget(self, case: tuple[list[int], int]) -> None:
        lengths, budget = case
        rows = pad_rows(lengths, budget)
        assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
        assert all(row and max(lengths[i] for i in row) * len(row) <= budget for row in rows)

    @given(lengths_and_budget)
    def test_longest_first_and_ties_in_the_given_order(self, case: tuple[list[int], int]) -> None:
        lengths, budget = case
        order = [index for row in pad_rows(lengths, budget) for index in row]
        assert order == sorted(order, key=lambda index: (-lengths[index], index))

    @given(st.lists(st.integers(1, 400), min_size=1, max_size=9))
    def test_the_cuts_cost_least_of_all_cuts_of_the_sorted_order(self, lengths: list[int]) -> None:
        def cost(rows: list[list[int]]) -> int:
            return sum(max(lengths[i] for i in row) * len(row) + MICRO_BATCH_COST_TOKENS for row in rows)

        order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        inner = range(1, len(order))
        all_cuts = [(0, *cuts, len(order)) for n in range(len(order)) for cuts in combinations(inner, n)]
        best = min(cost([order[a:b] for a, b in pairwise(cuts)]) for cuts in all_cuts)
        assert cost(pad_rows(lengths, budget=10_000)) == best


@pytest.mark.parametrize("split", [pack_rows, pad_rows])
def test_a_sequence_longer_than_the_budget_is_rejected_with_the_remedy(
    split: Callable[[list[int], int], list[list[int]]],
) -> None:
    with pytest.raises(
        ConfigError, match=r"2 sequences do not fit trainer.micro_batch_tokens=10; the longest has 12"
    ) as e:
        split([3, 12, 11, 10], 10)
    assert "Set trainer.micro_batch_tokens to 12 or more" in str(e.value)


def sequence(ids: list[int], trained: list[int]) -> TrainingSequence:
    mask = torch.tensor(trained, dtype=torch.bool)
    floats = torch.tensor([float(i) for i in ids])
    return TrainingSequence(torch.tensor(ids), mask, floats, -floats, torch.where(mask, 0, -1), 0)


class TestCollating:
    SEQUENCES = (sequence([5, 6], [0, 1]), sequence([1, 2, 3, 4], [0, 1, 0, 1]), sequence([9], [0]))
    MASKS = tuple(s.loss_mask for s in SEQUENCES)

    def test_packed_rows_hold_no_last_token_and_positions_begin_again(self) -> None:
        micro_batch = collate_packed(self.SEQUENCES, [1, 0], self.MASKS)
        assert micro_batch.input_ids.tolist() == [[1, 2, 3, 5]]
        assert micro_batch.position_ids.tolist() == [[0, 1, 2, 0]]
        assert micro_batch.outputs.tolist() == [0, 2, 3]
        assert micro_batch.targets.tolist() == [2, 4, 6]
        assert micro_batch.counts.tolist() == [2, 1]

    def test_padded_rows_are_filled_on_the_right(self) -> None:
        micro_batch = collate_padded(self.SEQUENCES, [1, 0], self.MASKS)
        assert micro_batch.input_ids.tolist() == [[1, 2, 3], [5, 6, 0]]
        assert micro_batch.position_ids.tolist() == [[0, 1, 2], [0, 1, 2]]
        assert micro_batch.attention_mask is not None
        assert micro_batch.attention_mask.tolist() == [[1, 1, 1], [1, 1, 0]]
        assert micro_batch.outputs.tolist() == [0, 2, 3]
        assert micro_batch.targets.tolist() == [2, 4, 6]
        assert micro_batch.counts.tolist() == [2, 1]

    @pytest.mark.parametrize("collate", [collate_packed, collate_padded])
    def test_other_fields_follow_the_scored_tokens(self, collate: Callable[..., object]) -> None:
        micro_batch = collate(self.SEQUENCES, [1, 0], self.MASKS)
        assert flat_tokens([s.advantages for s in self.SEQUENCES], micro_batch).tolist() == [2.0, 4.0, 6.0]  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 600), min_size=1, max_size=20))
def test_buckets_hold_every_token_of_their_segments_in_its_place(lengths: list[int]) -> None:
    lengths = sorted(lengths, reverse=True)
    buckets = Segments.of(lengths).buckets
    assert [(a.end, a.width >= b.width) for a, b in pairwise(buckets)] == [(b.start, True) for b in buckets[1:]]
    columns = []
    for bucket in buckets:
        inside = bucket.places if bucket.places is not None else torch.arange(bucket.rows * bucket.width)
        assert len(inside) == bucket.end - bucket.start
        columns.append(inside % bucket.width)
    assert torch.equal(torch.cat(columns), torch.cat([torch.arange(length) for length in lengths]))

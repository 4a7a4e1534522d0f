"""Tokens that are masked for their age, or with their whole group: what leaves the loss, and what stays."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.config.schema import AlgorithmConfig
from skyrl_train.errors import GeneratorOutputError
from skyrl_train.rollout.staleness.manager import StalenessManager
from skyrl_train.rollout.staleness.policies import resolve_staleness_policy
from skyrl_train.training.backend import TrainingSequence
from skyrl_train.training.minibatch import build_minibatch
from skyrl_train.types import RolloutGroup, RolloutSequence, Sample


def sequence(versions: list[int], reward: float = 0.0) -> RolloutSequence:
    """Version -1: a token that was not sampled (a tool's result)."""
    sampled = [version >= 0 for version in versions]
    return RolloutSequence.of_lists(
        prompt_token_ids=[1, 2],
        response_ids=[3] * len(versions),
        loss_mask=[int(is_sampled) for is_sampled in sampled],
        logprobs=[-0.5 if is_sampled else 0.0 for is_sampled in sampled],
        versions=versions,
        rewards=[0.0] * (len(versions) - 1) + [reward] if versions else [],
        stop_reason="stop",
    )


def group(*samples: list[int], masked: bool = False) -> RolloutGroup:
    """Sample ``i`` has the reward ``i``."""
    made = tuple(Sample((sequence(versions, float(i)),)) for i, versions in enumerate(samples))
    return RolloutGroup(0, "0", "test", made, 0, masked=masked)


def built(a_group: RolloutGroup, oldest_trained_version: int | None = None) -> list[TrainingSequence]:
    return list(
        build_minibatch([a_group], 9, AlgorithmConfig(), oldest_trained_version=oldest_trained_version).sequences
    )


def trained(of: TrainingSequence) -> list[bool]:
    """The loss mask after the prompt."""
    return of.loss_mask[2:].tolist()


def test_tokens_older_than_the_oldest_trained_version_leave_the_numerator_and_stay_in_the_denominator() -> None:
    old, new = built(group([3, 3, -1, 4, 5], [5, 5]), oldest_trained_version=4)
    assert trained(old) == [False, False, False, True, True]
    assert trained(new) == [True, True]
    assert (old.counts.tokens, new.counts.tokens) == (4, 2)


def test_without_an_oldest_version_everything_sampled_is_trained() -> None:
    (only,) = built(group([0, -1, 5]))
    assert trained(only) == [True, False, True]
    assert only.counts.tokens == 2


def test_masking_changes_neither_baseline_nor_advantages() -> None:
    plain = built(group([3, 3], [5]))
    masked = built(group([3, 3], [5]), oldest_trained_version=4)
    assert [a.advantages.tolist() for a in plain] == [a.advantages.tolist() for a in masked]
    assert masked[1].advantages[2] > 0, "the masked sample is still what the other one is compared with"


def test_a_group_of_nothing_but_old_tokens_trains_nothing_and_counts() -> None:
    sequences = built(group([0, 0], [1]), oldest_trained_version=2)
    assert not any(bool(s.loss_mask.any()) for s in sequences)
    assert [s.counts.tokens for s in sequences] == [2, 1]


def test_a_masked_group_trains_nothing_and_counts() -> None:
    sequences = built(group([7, 7], [8], masked=True))
    assert not any(bool(s.loss_mask.any()) for s in sequences)
    assert [s.counts.tokens for s in sequences] == [2, 1]


def test_a_masked_group_without_a_single_token_counts_nothing() -> None:
    (empty,) = built(group([], masked=True), oldest_trained_version=3)
    assert empty.counts.tokens == 0


def test_all_sequences_of_a_sample_are_masked_alike() -> None:
    branched = Sample((sequence([1, 2]), sequence([2, 3])))
    sequences = built(RolloutGroup(0, "0", "test", (branched,), 0), oldest_trained_version=2)
    assert [trained(s) for s in sequences] == [[False, True], [True, True]]


@given(
    st.lists(st.lists(st.integers(-1, 6), min_size=1, max_size=5), min_size=1, max_size=4),
    st.integers(1, 8),
    st.integers(0, 4),
)
def test_under_the_mask_policy_a_token_is_trained_exactly_if_its_lag_is_within_the_bound(
    samples: list[list[int]], step: int, bound: int
) -> None:
    manager = StalenessManager(
        batch_groups=1,
        max_staleness_steps=bound,
        generate_ahead_steps=0,
        max_running=1,
        total_steps=99,
        policy=resolve_staleness_policy("mask"),
    )
    for _ in range(step - 1):
        manager.advance()
    sequences = built(group(*samples), manager.oldest_trained_version)
    for versions, made in zip(samples, sequences, strict=True):
        assert trained(made) == [version >= 0 and (step - 1) - version <= bound for version in versions]
        assert made.counts.tokens == sum(version >= 0 for version in versions)


@given(st.lists(st.lists(st.integers(-1, 6), max_size=5), min_size=1, max_size=4), st.data())
def test_each_sequence_has_its_stretch_of_what_is_laid_out_for_all_of_a_minibatch(
    samples: list[list[int]], data: st.DataObject
) -> None:
    some = [data.draw(st.booleans()) for _ in samples]
    made = [
        dataclasses.replace(sequence(versions), reference_logprobs=[-0.25] * len(versions) if has else None)
        for versions, has in zip(samples, some, strict=True)
    ]
    for versions, has, got in zip(samples, some, built(of_sequences(made)), strict=True):
        assert got.token_ids.tolist() == [1, 2] + [3] * len(versions)
        assert got.versions.tolist() == [-1, -1, *versions]
        assert got.behaviour_logprobs.tolist() == [0.0, 0.0] + [-0.5 if version >= 0 else 0.0 for version in versions]
        assert trained(got) == [version >= 0 for version in versions]
        assert (got.reference_logprobs is not None) == has
        if got.reference_logprobs is not None:
            assert got.reference_logprobs.tolist() == [0.0, 0.0] + [-0.25] * len(versions)


@pytest.mark.parametrize("numbers", [1, 4])
def test_numbers_of_a_stage_that_are_not_one_for_each_token_are_rejected(numbers: int) -> None:
    made = dataclasses.replace(sequence([0, 0, 0]), proximal_logprobs=[-1.0] * numbers)
    with pytest.raises(GeneratorOutputError, match=f"{numbers} numbers to a response of 3 tokens"):
        built(of_sequences([made]))


def of_sequences(sequences: list[RolloutSequence]) -> RolloutGroup:
    return RolloutGroup(0, "0", "test", tuple(Sample((each,)) for each in sequences), 0)


def test_groups_of_older_checkpoints_are_not_masked() -> None:
    fields = {field.name: getattr(group([1]), field.name) for field in dataclasses.fields(RolloutGroup)}
    del fields["masked"]
    assert RolloutGroup(**fields).masked is False
    assert torch.equal(built(RolloutGroup(**fields))[0].loss_mask, torch.tensor([False, False, True]))

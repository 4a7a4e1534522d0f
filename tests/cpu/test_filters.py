"""Groups without signal: filtered as they arrive, replaced, or masked (SEMANTICS 4.5)."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.algorithms.advantages import ADVANTAGE_ESTIMATORS, GroupRewards
from skyrl_train.config.compose import compose
from skyrl_train.config.plan import resolve
from skyrl_train.config.schema import AlgorithmConfig, DynamicSampling
from skyrl_train.errors import ConfigError, RolloutError
from skyrl_train.rollout.filters import (
    SignalFilter,
    groups_to_train,
    has_signal,
    make_filter,
    replace_without_signal,
)
from skyrl_train.training.minibatch import build_minibatch
from skyrl_train.types import RolloutGroup, RolloutSequence, Sample


def sample(reward: float, tokens: int = 1) -> Sample:
    rewards = [0.0] * (tokens - 1) + [reward] if tokens else []
    return Sample(
        (RolloutSequence.of_lists([5], [6] * tokens, [1] * tokens, [-0.5] * tokens, [0] * tokens, rewards, "stop"),)
    )


def group(group_index: int, *rewards: float, masked: bool = False) -> RolloutGroup:
    return RolloutGroup(group_index, str(group_index), "test", tuple(map(sample, rewards)), 0, masked=masked)


LOUD, QUIET = (0.0, 1.0), (1.0, 1.0)
rewards = st.floats(-10, 10, width=64)
batches = st.lists(st.booleans(), min_size=1, max_size=12).map(
    lambda kinds: [group(group_index, *(LOUD if loud else QUIET)) for group_index, loud in enumerate(kinds)]
)


# What signal is -----------------------------------------------------------------------------------------------------


@given(st.lists(st.one_of(st.sampled_from([0.0, 1.0, 1.0 + 1e-12]), rewards), min_size=1, max_size=6))
def test_a_group_has_signal_exactly_when_an_advantage_is_not_zero(values: list[float]) -> None:
    g = group(0, *values)
    masks = [torch.ones(1, dtype=torch.bool) for _ in values]
    rewards = GroupRewards([s.rewards for s in g.samples], masks, [True] * len(values))
    advantages = ADVANTAGE_ESTIMATORS.get("grpo")(rewards, AlgorithmConfig(grpo_norm_by_std=False))
    different = any(bool(value != rewards.returns[0]) for value in rewards.returns)
    assert has_signal(g) == different
    if not different:
        assert all(bool((advantage == 0).all()) for advantage in advantages)


def test_a_masked_group_and_one_without_a_sampled_token_have_no_signal() -> None:
    assert has_signal(group(0, *LOUD))
    assert not has_signal(group(0, *LOUD, masked=True))
    assert not has_signal(RolloutGroup(0, "0", "test", (Sample(()), Sample(())), 0))
    nothing_sampled = tuple(
        Sample((RolloutSequence.of_lists([5], [6], [0], [0.0], [-1], [reward], "stop"),)) for reward in LOUD
    )
    assert not has_signal(RolloutGroup(0, "0", "test", nothing_sampled, 0))


# Filtering as groups arrive -------------------------------------------------------------------------------------------


def test_a_filter_is_made_only_where_it_is_asked_for() -> None:
    assert make_filter(AlgorithmConfig(), 4) is None
    assert make_filter(AlgorithmConfig(dynamic_sampling=DynamicSampling.replace), 4) is None
    made = make_filter(AlgorithmConfig(dynamic_sampling=DynamicSampling.filter), 4)
    assert made is not None and made.keeps(group(0, *LOUD)) and not made.keeps(group(1, *QUIET))


@pytest.mark.parametrize(("batch_groups", "window"), [(1, 64), (4, 256), (16, 1024), (512, 1024)])
def test_the_share_is_judged_over_64_steps_or_1024_groups(batch_groups: int, window: int) -> None:
    assert SignalFilter(batch_groups, 0.5).window == window


@given(st.lists(st.booleans(), max_size=200), st.sampled_from([0.1, 0.5, 0.9, 0.95]))
def test_the_run_stops_at_the_first_group_with_which_the_window_holds_too_many(loud: list[bool], limit: float) -> None:
    signal_filter = SignalFilter(1, limit)
    for index, is_loud in enumerate(loud):
        assert signal_filter.keeps(group(index, *(LOUD if is_loud else QUIET))) == is_loud
        filtered = sum(not verdict for verdict in loud[max(0, index - 63) : index + 1])
        if filtered > limit * 64:
            with pytest.raises(RolloutError, match="max_filtered_share"):
                signal_filter.check()
            return
        signal_filter.check()


def test_the_error_names_the_filtered_share_and_a_remedy() -> None:
    signal_filter = SignalFilter(1, 0.5)
    for group_index in range(33):
        signal_filter.keeps(group(group_index, *QUIET))
    with pytest.raises(RolloutError, match=r"33 of the last 64 groups .*n_samples_per_prompt.*dynamic_sampling=none"):
        signal_filter.check()


# Replacing when a batch trains ----------------------------------------------------------------------------------------


@given(batches, st.integers(0, 2**62 - 1))
def test_groups_without_signal_give_their_place_to_copies_of_those_with(batch: list[RolloutGroup], seed: int) -> None:
    result = replace_without_signal(batch, seed)
    assert len(result) == len(batch)
    if not any(map(has_signal, batch)):
        assert result == batch, "nothing to copy: the batch trains as it is"
        return
    assert all(map(has_signal, result))
    assert all(after is before for before, after in zip(batch, result, strict=True) if has_signal(before))
    copies = Counter(after.group_index for after in result)
    counts = [copies[before.group_index] for before in batch if has_signal(before)]
    assert max(counts) - min(counts) <= 1, "no group weighs more than another by more than one copy"


def test_which_groups_are_copied_is_decided_by_the_seed_alone() -> None:
    batch = [group(group_index, *(LOUD if group_index % 2 else QUIET)) for group_index in range(12)]
    drawn = {tuple(g.group_index for g in replace_without_signal(batch, seed)) for seed in range(20)}
    assert len(drawn) > 10
    assert replace_without_signal(batch, 7) == replace_without_signal(batch, 7)


def test_each_step_draws_anew_and_a_repeated_step_draws_the_same() -> None:
    algorithm = AlgorithmConfig(dynamic_sampling=DynamicSampling.replace)
    batch = [group(group_index, *(LOUD if group_index % 2 else QUIET)) for group_index in range(12)]
    steps = [groups_to_train(batch, algorithm, seed=3, step=step) for step in (1, 1, 2)]
    assert steps[0] == steps[1] != steps[2]


def test_copies_are_groups_of_their_own_in_the_minibatch() -> None:
    algorithm = AlgorithmConfig(dynamic_sampling=DynamicSampling.replace)
    groups = groups_to_train([group(0, *QUIET), group(1, *LOUD)], algorithm, seed=0, step=1)
    minibatch = build_minibatch(groups, 1, algorithm)
    assert minibatch.num_groups == 2
    assert [s.group_index for s in minibatch.sequences] == [0, 0, 1, 1]
    assert all(bool(s.advantages[s.loss_mask].abs().min() > 0) for s in minibatch.sequences)


# Masking when a batch trains ------------------------------------------------------------------------------------------


def test_a_masked_group_trains_no_token_and_still_counts_in_the_denominator() -> None:
    algorithm = AlgorithmConfig(zero_variance_filter=True)
    groups = groups_to_train([group(0, *QUIET), group(1, *LOUD)], algorithm, seed=0, step=1)
    assert [g.masked for g in groups] == [True, False]
    minibatch = build_minibatch(groups, 1, algorithm)
    assert [int(s.loss_mask.sum()) for s in minibatch.sequences] == [0, 0, 1, 1]
    assert [s.counts.tokens for s in minibatch.sequences] == [1, 1, 1, 1]


@given(batches)
def test_masking_changes_nothing_but_the_groups_without_signal(batch: list[RolloutGroup]) -> None:
    result = groups_to_train(batch, AlgorithmConfig(zero_variance_filter=True), seed=0, step=1)
    assert [g.group_index for g in result] == [g.group_index for g in batch]
    assert [g.masked for g in result] == [not has_signal(g) for g in batch]
    assert [g.samples for g in result] == [g.samples for g in batch]


def test_without_a_setting_everything_trains_as_it_is() -> None:
    batch = [group(0, *QUIET), group(1, *LOUD)]
    assert groups_to_train(batch, AlgorithmConfig(), seed=0, step=1) == batch


# Settings that cannot work --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["trainer.algorithm.max_filtered_share=1.0"], "must be more than 0 and less than 1"),
        (["trainer.algorithm.max_filtered_share=0"], "max_filtered_share"),
        (
            ["trainer.algorithm.dynamic_sampling=filter", "trainer.failures.on_rollout_failure=mask"],
            "on_rollout_failure=replace",
        ),
        (
            [
                "trainer.mode=fully_async",
                "trainer.algorithm.dynamic_sampling=replace",
                "trainer.fully_async.streaming_min_groups=1",
            ],
            "streaming_min_groups=null",
        ),
        (["trainer.algorithm.dynamic_sampling=filter", "generator.n_samples_per_prompt=1"], "a group of one"),
        (
            [
                "trainer.algorithm.advantage_estimator=gae",
                "trainer.algorithm.zero_variance_filter=true",
                "generator.n_samples_per_prompt=1",
            ],
            "zero_variance_filter=true with generator.n_samples_per_prompt=1",
        ),
        (["trainer.failures.max_engine_failures=-1"], "max_engine_failures"),
        (["trainer.failures.stuck_after_s=0"], "stuck_after_s"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_remedy(overrides: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        resolve(compose("quickstart", overrides), 100)


@pytest.mark.parametrize("mode", ["none", "filter", "replace"])
def test_each_kind_of_dynamic_sampling_is_a_setting(mode: str) -> None:
    config = compose("quickstart", [f"trainer.algorithm.dynamic_sampling={mode}"])
    assert config.trainer.algorithm.dynamic_sampling is DynamicSampling(mode)
    resolve(config, 100)

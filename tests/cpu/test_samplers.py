"""The order of a data set in memory: permutations, sources by weight, and samplers of somebody else's."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_train.config.compose import compose
from skyrl_train.config.schema import DataConfig
from skyrl_train.config.validate import validate
from skyrl_train.environments.base import PromptRecord
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.rollout.data.dataset import PromptDataset
from skyrl_train.rollout.data.samplers import Sampler, SequentialSampler, ShuffleSampler, WeightedSampler, build_sampler
from skyrl_train.types import RolloutGroup, RolloutSequence, Sample


def dataset(**sizes: int) -> PromptDataset:
    """``sizes[source]`` prompts of each source, the sources one after the other."""
    names = [f"{source}{number}" for source, size in sizes.items() for number in range(size)]
    return PromptDataset(tuple(PromptRecord(name, [], data_source=name.rstrip("0123456789")) for name in names))


def rows(sampler: Sampler, count: int) -> list[int]:
    return [sampler.row(group_index) for group_index in range(count)]


def test_every_epoch_is_another_permutation_of_all_rows() -> None:
    sampler = ShuffleSampler(dataset(a=7), seed=3)
    epochs = [rows(sampler, 35)[start : start + 7] for start in range(0, 35, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5


@given(st.integers(1, 50), st.integers(0, 5), st.integers(0, 300))
def test_the_permutation_of_an_epoch_is_the_one_that_earlier_versions_drew(n: int, seed: int, group_index: int) -> None:
    epoch, position = divmod(group_index, n)
    expected = np.random.default_rng((seed, epoch)).permutation(n)[position]
    assert ShuffleSampler(dataset(a=n), seed).row(group_index) == expected


def test_sequential_is_the_order_of_the_files() -> None:
    assert rows(SequentialSampler(dataset(a=3), seed=1), 7) == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("name", ["shuffle", "sequential", "weighted"])
def test_a_group_index_names_the_same_row_whenever_it_is_asked_for(name: str) -> None:
    kwargs: dict[str, Any] = {"weights": {"a": 3, "b": 0.5}} if name == "weighted" else {}
    data = DataConfig(sampler=name, sampler_kwargs=kwargs)
    expected = dict(enumerate(rows(build_sampler(data, dataset(a=4, b=7), 1), 200)))
    order = list(expected)
    random.Random(0).shuffle(order)
    again = build_sampler(data, dataset(a=4, b=7), 1)
    assert {index: again.row(index) for index in order} == {index: expected[index] for index in order}


@settings(max_examples=60)
@given(
    st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(1, 6), st.integers(0, 5)), min_size=1),
    st.integers(0, 3),
)
def test_each_source_has_its_share_of_every_cycle_and_its_rows_come_in_passes(
    sources: dict[str, tuple[int, int]], seed: int
) -> None:
    sizes, weights = ({s: pair[i] for s, pair in sources.items()} for i in (0, 1))
    if not any(weights.values()):
        return
    data = dataset(**sizes)
    sampler = WeightedSampler(data, seed, weights)
    divisor = np.gcd.reduce(list(weights.values()))
    shares = {source: int(weight // divisor) for source, weight in weights.items()}
    cycle = sum(shares.values())
    drawn = [data[row] for row in rows(sampler, 12 * cycle)]
    for start in range(0, len(drawn), cycle):
        counted = Counter(record.data_source for record in drawn[start : start + cycle])
        assert counted == Counter({source: share for source, share in shares.items() if share})
    for source, size in sizes.items():
        own = [record.uid for record in drawn if record.data_source == source]
        passes = [own[start : start + size] for start in range(0, len(own), size)]
        assert all(len(set(uids)) == len(uids) for uids in passes), "a row came again before all others of its source"


def test_weights_are_taken_as_they_are_written() -> None:
    sampler = WeightedSampler(dataset(a=5, b=5, c=5), 0, {"a": 0.1, "b": 0.2, "c": 0.7})
    drawn = Counter(row // 5 for row in rows(sampler, 10))
    assert drawn == {0: 1, 1: 2, 2: 7}


def test_sources_and_cycles_are_permuted_independently() -> None:
    drawn = rows(WeightedSampler(dataset(a=6, b=6), 0, {"a": 1, "b": 1}), 48)
    a, b = ([row % 6 for row in drawn if row // 6 == source] for source in (0, 1))
    assert a[:6] != b[:6] and a[:6] != a[6:12]
    assert len({(drawn[place] // 6, drawn[place + 1] // 6) for place in range(0, 48, 2)}) == 2


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 1}, "lacks b"),
        ({"a": 1, "b": 1, "bb": 1}, "names 'bb'.*Known: a, b"),
        ({"a": 1, "b": -1}, "at least 0"),
        ({"a": 0, "b": 0}, "not all of them 0"),
        ({"a": 1, "b": "much"}, "must be numbers"),
        ({"a": 1, "b": float("nan")}, "must be numbers"),
        ({"a": 0.123456789, "b": 1}, "cycles of 1123456789 prompts.*Round the weights"),
        ([1, 2], "must map"),
    ],
)
def test_weights_that_cannot_work_are_refused(weights: Any, message: str) -> None:
    data = DataConfig(sampler="weighted", sampler_kwargs={"weights": weights})
    with pytest.raises(ConfigError, match=message):
        build_sampler(data, dataset(a=2, b=2), 0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.sampler=shufle"], "Did you mean shuffle"),
        (["data.sampler=weighted"], "data.sampler_kwargs.weights"),
        (["+data.sampler_kwargs.weights.a=1"], "~data.sampler_kwargs.weights"),
        (["data.streaming=true", "trainer.max_steps=8"], "name them in data.train_data"),
        (["data.streaming=true", "data.train_data=[a.jsonl]", "trainer.max_steps=null"], "Set trainer.max_steps"),
        (
            ["data.streaming=true", "data.train_data=[a.jsonl]", "trainer.max_steps=8", "data.sampler=shuffle"],
            "set data.sampler=null",
        ),
        (["rollout.buffer_memory_bytes=-1"], "must be at least 0"),
    ],
)
def test_settings_of_the_data_that_cannot_work_are_refused_before_anything_starts(
    overrides: list[str], message: str
) -> None:
    (problem,) = validate(compose("quickstart", overrides)).errors
    assert message in problem


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("shufle", {}, "is unknown.*Did you mean shuffle"),
        ("nowhere.at:all", {}, "cannot be imported"),
        ("shuffle", {"speed": 3}, "cannot be constructed"),
        ("builtins:dict", {}, "cannot be constructed"),
    ],
)
def test_a_sampler_that_does_not_exist_or_takes_other_settings_is_refused(
    name: str, kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_sampler(DataConfig(sampler=name, sampler_kwargs=kwargs), dataset(a=2), 0)


class WithAnArray(Sampler):
    def __init__(self, dataset: PromptDataset, seed: int) -> None:
        super().__init__(dataset, seed)
        self.scores = np.zeros(len(dataset))

    def row(self, group_index: int) -> int:
        return 0

    def state_dict(self) -> dict[str, Any]:
        return {"scores": self.scores}


def test_a_state_that_no_checkpoint_can_hold_is_refused_before_the_run_has_one() -> None:
    with pytest.raises(DataError, match=r"WithAnArray has a state .* tolist\(\)"):
        build_sampler(DataConfig(sampler=f"{__name__}:WithAnArray"), dataset(a=2), 0)
    with pytest.raises(ConfigError, match="not a subclass of"):
        build_sampler(DataConfig(sampler="builtins:slice"), dataset(a=2), 0)


def test_the_curriculum_of_the_tutorial_prefers_half_solved_prompts() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tutorials" / "data.md").read_text()
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    sampler: Sampler = names["HalfSolved"](dataset(a=3), 0, memory=0.5)
    for _ in range(4):
        for row, reward in enumerate((0.0, 0.5, 1.0)):
            sampler.observe(row, rewarded(reward))
    resumed: Sampler = names["HalfSolved"](dataset(a=3), 0)
    resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    drawn = rows(resumed, 30)
    assert Counter(drawn).most_common(1)[0][0] == 1
    assert drawn == rows(sampler, 30)


def rewarded(reward: float) -> RolloutGroup:
    sequence = RolloutSequence.of_lists([1], [2], [1], [-0.5], [0], [reward], "stop")
    return RolloutGroup(0, "u", "s", (Sample((sequence,)),), submitted_version=0)

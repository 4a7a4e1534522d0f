"""The boundary: a valid output passes, and every single corruption of one is refused with field and sample named."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.errors import GeneratorOutputError, NonFiniteRewardError
from skyrl_train.generators import validation
from skyrl_train.generators.validation import to_samples
from skyrl_train.types import TrajectoryID

ALIGNED = ("loss_masks", "rollout_logprobs", "rollout_versions")
LISTS = ("prompt_token_ids", "response_ids", "rewards", *ALIGNED)


@st.composite
def outputs(draw: st.DrawFn) -> dict[str, Any]:
    """A valid output; every prompt and response has at least one token, the first of each response is trained."""
    count = draw(st.integers(1, 4))
    masks = [[1, *draw(st.lists(st.integers(0, 1), max_size=5))] for _ in range(count)]
    per_token = draw(st.booleans())
    number = st.floats(-10, 10)
    return {
        "prompt_token_ids": [draw(st.lists(st.integers(0, 99), min_size=1, max_size=3)) for _ in range(count)],
        "response_ids": [[draw(st.integers(0, 99)) for _ in mask] for mask in masks],
        "rewards": [[draw(number) for _ in mask] if per_token else draw(number) for mask in masks],
        "loss_masks": masks,
        "stop_reasons": draw(st.none() | st.just(["stop"] * count)),
        "rollout_metrics": None,
        "rollout_logprobs": [[draw(st.floats(-20, 0)) if m else 0.0 for m in mask] for mask in masks],
        "rollout_versions": [[draw(st.integers(0, 9)) if m else -1 for m in mask] for mask in masks],
        "trajectory_ids": draw(st.none() | st.just([TrajectoryID("p", i) for i in range(count)])),
        "is_last_step": draw(st.none() | st.just([True] * count)),
    }


def set_first(name: str, value: Any) -> Callable[[dict[str, Any], int], None]:
    """Puts ``value`` in the place of the first number of a sample's list (of ``rewards``: or of its one number)."""

    def corrupt(output: dict[str, Any], sample: int) -> None:
        if isinstance(output[name][sample], list):
            output[name][sample][0] = value
        else:
            output[name][sample] = value

    return corrupt


def set_sample(name: str, value: Any) -> Callable[[dict[str, Any], int], None]:
    def corrupt(output: dict[str, Any], sample: int) -> None:
        output[name][sample] = value

    return corrupt


def lengthen(name: str) -> Callable[[dict[str, Any], int], None]:
    def corrupt(output: dict[str, Any], sample: int) -> None:
        output[name][sample] = [*output[name][sample], 0]

    return corrupt


NO_FLOAT = -(10**309)  # an integer beyond all floats

SAMPLE_CORRUPTIONS = {
    **{f"{name}: ragged": (name, lengthen(name)) for name in ALIGNED},
    **{f"{name}: no list": (name, set_sample(name, None)) for name in LISTS},
    **{
        f"{name}: {value!r}": (name, set_first(name, value))
        for name, values in {
            "prompt_token_ids": (-1, 1.5, "a", None, True, 2**31, 2**70),
            "response_ids": (-1, 1.5, "a", None, True, 2**31, 2**70),
            "loss_masks": (2, -1, 0.5, math.nan, None, "1"),
            "rollout_logprobs": (math.nan, math.inf, -math.inf, 0.1, None, "x", NO_FLOAT),
            "rollout_versions": (-1, -2, 0.5, None, True, 2**70),
            "rewards": (math.nan, math.inf, -math.inf, 1e39, None, "good", NO_FLOAT),
        }.items()
        for value in values
    },
    "prompt_token_ids: empty": ("prompt_token_ids", set_sample("prompt_token_ids", [])),
}


@given(outputs())
def test_a_valid_output_passes_and_is_converted_without_loss(output: dict[str, Any]) -> None:
    count = len(output["response_ids"])
    before = copy.deepcopy(output)
    samples = [sequence for sample in to_samples(output, count) for sequence in sample.sequences]  # type: ignore[arg-type]
    assert output == before
    assert len(samples) == count
    assert [s.prompt_token_ids for s in samples] == output["prompt_token_ids"]
    assert [s.response_ids for s in samples] == output["response_ids"]
    assert [s.loss_mask for s in samples] == output["loss_masks"]
    assert [s.logprobs for s in samples] == output["rollout_logprobs"]
    assert [s.versions for s in samples] == output["rollout_versions"]
    assert [s.stop_reason for s in samples] == (output["stop_reasons"] or ["stop"] * count)
    for sample, reward in zip(samples, output["rewards"], strict=True):
        assert sample.rewards == (reward if isinstance(reward, list) else [0.0] * (len(sample.rewards) - 1) + [reward])
        assert len(sample.rewards) == len(sample.response_ids)


@given(outputs(), st.sampled_from(sorted(SAMPLE_CORRUPTIONS)), st.data())
def test_every_corruption_of_a_sample_is_refused_and_named(
    output: dict[str, Any], corruption: str, data: st.DataObject
) -> None:
    count = len(output["response_ids"])
    sample = data.draw(st.integers(0, count - 1))
    name, corrupt = SAMPLE_CORRUPTIONS[corruption]
    corrupt(output, sample)
    with pytest.raises((GeneratorOutputError, NonFiniteRewardError)) as info:
        to_samples(output, count)  # type: ignore[arg-type]
    # "rewards" of one kind in a list of the other may be reported at whichever sample is the odd one out.
    assert name in str(info.value)
    assert name == "rewards" or f"{name} of sample {sample} " in str(info.value)


@given(outputs(), st.sampled_from(LISTS), st.sampled_from(["missing", "none", "short", "long", "no list"]))
def test_every_required_field_has_one_entry_per_trajectory(output: dict[str, Any], name: str, how: str) -> None:
    count = len(output["response_ids"])
    value = output.pop(name)
    damaged = {"none": None, "short": value[:-1], "long": [*value, value[0]], "no list": "abc"}
    if how != "missing":
        output[name] = damaged[how]
    with pytest.raises(GeneratorOutputError, match=name):
        to_samples(output, count)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("stop_reasons", ["stop"], "stop_reasons has 1 entries for 2"),
        ("stop_reasons", ["stop", "abort"], "stop_reasons of sample 1"),
        ("stop_reasons", [None, "stop"], "stop_reasons of sample 0"),
        ("trajectory_ids", [TrajectoryID("p", 0)] * 2, "trajectory_ids of sample 1 repeats"),
        ("is_last_step", [True, False], "is_last_step of row 1 is False, but trajectory_ids does not say"),
        ("rewards", [1.0, [1.0]], "rewards of sample 1 mixes"),
        ("rewards", [[1.0], [1.0, 0.0]], "rewards of sample 1 has 2 entries for 1"),
        ("rollout_logprobs", None, "rollout_logprobs is missing. Pass the client's response_logprobs"),
        ("rollout_versions", None, "rollout_versions is missing. Pass the client's response_versions"),
    ],
)
def test_the_message_says_which_and_why(name: str, value: Any, message: str) -> None:
    output = valid(2)
    output[name] = value
    with pytest.raises(GeneratorOutputError, match=message):
        to_samples(output, 2)  # type: ignore[arg-type]


def test_anything_but_an_output_is_rejected() -> None:
    with pytest.raises(GeneratorOutputError, match="returned a NoneType"):
        to_samples(None, 2)  # type: ignore[arg-type]


def test_an_empty_response_passes_and_loses_its_reward() -> None:
    output = {**valid(1), "response_ids": [[]], "rewards": [1.0]}
    output.update({name: [[]] for name in ALIGNED})
    assert to_samples(output, 1)[0].rewards == []  # type: ignore[arg-type]


def test_a_sampled_token_that_is_masked_out_neither_trains_nor_ages_its_group() -> None:
    output = {**valid(1), "loss_masks": [[0]]}
    ((sample,),) = (sample.sequences for sample in to_samples(output, 1))  # type: ignore[arg-type]
    assert (sample.logprobs, sample.versions) == ([0.0], [-1])


def test_numpy_numbers_pass_and_become_plain_ones() -> None:
    output = {**valid(1), "response_ids": [[np.int64(5)]], "rewards": [np.float32(0.5)]}
    output["rollout_logprobs"] = [[np.float32(-0.25)]]
    ((sample,),) = (sample.sequences for sample in to_samples(output, 1))  # type: ignore[arg-type]
    assert [type(v) for v in (*sample.response_ids, *sample.rewards, *sample.logprobs)] == [int, float, float]


def valid(count: int) -> dict[str, Any]:
    return {
        "prompt_token_ids": [[1]] * count,
        "response_ids": [[2]] * count,
        "rewards": [1.0] * count,
        "loss_masks": [[1]] * count,
        "stop_reasons": ["stop"] * count,
        "rollout_metrics": None,
        "rollout_logprobs": [[-0.5]] * count,
        "rollout_versions": [[0]] * count,
        "trajectory_ids": None,
        "is_last_step": None,
    }


ODD = st.sampled_from(
    [
        True,
        False,
        0,
        1,
        2,
        -1,
        -2,
        0.0,
        1.0,
        -0.5,
        1e-4,
        0.5,
        math.nan,
        math.inf,
        NO_FLOAT,
        2**70,
        np.int64(3),
        np.float32(-1.5),
        "7",
        None,
    ]
)


@given(output=outputs(), data=st.data())
def test_lists_of_plain_numbers_get_the_verdict_that_looking_at_each_number_gives(
    output: dict[str, Any], data: st.DataObject
) -> None:
    for name in data.draw(st.lists(st.sampled_from(LISTS), max_size=2)):
        values = output[name][0]
        place = data.draw(st.integers(0, len(values) - 1)) if isinstance(values, list) else 0
        odd = data.draw(ODD)
        if isinstance(values, list):
            values[place] = odd
        else:
            output[name][0] = odd

    def verdict() -> str:
        try:
            return repr(to_samples(output, len(output["response_ids"])))  # type: ignore[arg-type]
        except (GeneratorOutputError, NonFiniteRewardError) as error:
            return str(error)

    at_once = verdict()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation, "_convert_arrays", lambda fields, row, stop_reason: None)
        assert verdict() == at_once


def test_rewards_that_no_float32_holds_together_are_the_rollouts_fault() -> None:
    output = {
        "prompt_token_ids": [[1]],
        "response_ids": [[2, 3]],
        "rewards": [[3e38, 3e38]],
        "loss_masks": [[1, 1]],
        "rollout_logprobs": [[-1.0, -1.0]],
        "rollout_versions": [[0, 0]],
    }
    with pytest.raises(NonFiniteRewardError, match="add up"):
        to_samples(output, 1)  # type: ignore[arg-type]

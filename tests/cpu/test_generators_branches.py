"""Trajectories of several sequences: checks, rewards, training, counts and checkpoints."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.algorithms.advantages import STD_EPSILON
from skyrl_train.config.schema import AlgorithmConfig
from skyrl_train.errors import GeneratorOutputError
from skyrl_train.generators.validation import to_samples
from skyrl_train.rollout.checkpoint import read_rollout_state, write_rollout_state
from skyrl_train.rollout.staleness.manager import RolloutCounts
from skyrl_train.step_metrics import step_metrics
from skyrl_train.training.minibatch import build_minibatch
from skyrl_train.types import RolloutGroup, TrajectoryID


@st.composite
def groups(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """A valid output of 1 to 4 trajectories of 1 to 3 rows each; some responses are empty or have nothing to train."""
    count = draw(st.integers(1, 4))
    output: dict[str, Any] = {name: [] for name in rows_of(1)}
    output.update(stop_reasons=None, rollout_metrics=None)
    for trajectory in range(count):
        rows = draw(st.integers(1, 3))
        for row in range(rows):
            mask = draw(st.lists(st.integers(0, 1), max_size=4))
            output["prompt_token_ids"].append([9] * draw(st.integers(1, 3)))
            output["response_ids"].append([draw(st.integers(0, 9)) for _ in mask])
            output["rewards"].append([draw(st.integers(-16, 16)) / 4 for _ in mask])
            output["loss_masks"].append(mask)
            output["rollout_logprobs"].append([-0.5 if m else 0.0 for m in mask])
            output["rollout_versions"].append([draw(st.integers(0, 9)) if m else -1 for m in mask])
            output["trajectory_ids"].append(TrajectoryID("p", trajectory))
            output["is_last_step"].append(row == rows - 1)
    return output, count


def rows_of(*trajectories: int) -> dict[str, Any]:
    """An output whose trajectories have that many rows, each of one token and one reward."""
    total = sum(trajectories)
    return {
        "prompt_token_ids": [[1]] * total,
        "response_ids": [[2]] * total,
        "rewards": [[1.0]] * total,
        "loss_masks": [[1]] * total,
        "stop_reasons": ["stop"] * total,
        "rollout_metrics": None,
        "rollout_logprobs": [[-0.5]] * total,
        "rollout_versions": [[0]] * total,
        "trajectory_ids": [TrajectoryID("p", index) for index, rows in enumerate(trajectories) for _ in range(rows)],
        "is_last_step": [row == rows - 1 for rows in trajectories for row in range(rows)],
    }


def group_of(output: dict[str, Any]) -> RolloutGroup:
    samples = to_samples(output, sum(output["is_last_step"]))  # type: ignore[arg-type]
    return RolloutGroup(0, "p", "test", samples, submitted_version=0)


@given(groups(), st.booleans())
def test_baseline_and_advantage_are_over_trajectories_and_reach_all_their_rows(
    case: tuple[dict[str, Any], int], norm_by_std: bool
) -> None:
    output, _ = case
    sequences = build_minibatch([group_of(output)], 1, AlgorithmConfig(grpo_norm_by_std=norm_by_std)).sequences

    returns: dict[TrajectoryID, float] = {}
    for trajectory, rewards in zip(output["trajectory_ids"], output["rewards"], strict=True):
        returns[trajectory] = returns.get(trajectory, 0.0) + sum(rewards)
    assert [sample.reward for sample in group_of(output).samples] == pytest.approx(list(returns.values()))
    mean = sum(returns.values()) / len(returns)
    std = statistics.stdev(returns.values()) if len(returns) > 1 else 0.0
    for row, sequence in enumerate(sequences):
        advantage = returns[output["trajectory_ids"][row]] - mean
        if norm_by_std:
            advantage /= std + STD_EPSILON
        prompt, mask = output["prompt_token_ids"][row], output["loss_masks"][row]
        expected = [0.0] * len(prompt) + [advantage if m else 0.0 for m in mask]
        assert sequence.advantages.tolist() == pytest.approx(expected, abs=1e-5)
        assert sequence.token_ids.tolist() == prompt + output["response_ids"][row]
        assert sequence.versions.tolist() == [-1] * len(prompt) + output["rollout_versions"][row]


@given(groups())
def test_a_group_survives_the_checkpoint_row_by_row(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[dict[str, Any], int]
) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    group = group_of(case[0])
    write_rollout_state({}, [group], folder)
    assert list(read_rollout_state(folder)[1]) == [group]


def test_a_checkpoint_from_before_samples_had_sequences_is_read(tmp_path: Path) -> None:
    group = group_of(rows_of(1, 1))
    write_rollout_state({}, [group], tmp_path)
    row = json.loads((tmp_path / "groups.jsonl").read_text())
    row["samples"] = [sample["sequences"][0] for sample in row["samples"]]
    (tmp_path / "groups.jsonl").write_text(json.dumps(row) + "\n")
    ledger = {"dataset_len": 9, "seed": 0, "fingerprint": "f", "next": 4, "frontier": 0, "settled": [], "failed": []}
    (tmp_path / "rollout_state.json").write_text(json.dumps({"format_version": 1, "ledger": ledger}))
    assert list(read_rollout_state(tmp_path)[1]) == [group]


def test_metrics_count_trajectories_not_rows() -> None:
    output = rows_of(3, 1)  # returns 3 and 1
    metrics = step_metrics(
        1,
        [group_of(output)],
        {},
        counts=RolloutCounts(),
        max_staleness_steps=1,
        step_s=1.0,
        idle_fraction=0.0,
        generated_tokens=0,
        totals={},
    )
    assert (metrics["reward/mean"], metrics["reward/max"], metrics["reward/min"]) == (2.0, 3.0, 1.0)
    assert metrics["reward/zero_variance_groups"] == 0.0


def test_the_oldest_token_of_any_row_ages_the_group() -> None:
    output = {**rows_of(2, 1), "rollout_versions": [[4], [1], [3]]}
    group = group_of(output)
    assert (group.oldest_version, group.newest_version) == (1, 4)


def changed(field: str, row: int, value: Any) -> dict[str, Any]:
    output = rows_of(2, 1)
    output[field] = [*output[field][:row], value, *output[field][row + 1 :]]
    return output


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            changed("is_last_step", 1, False),
            r"is_last_step of row 1 \(trajectory .*repetition_id=0\)\) is False, but the next",
        ),
        (
            changed("is_last_step", 2, False),
            r"is_last_step of row 2 \(trajectory .*repetition_id=1\)\) is False, but the next",
        ),
        (changed("is_last_step", 1, 1), r"is_last_step of row 1 \(trajectory .*\) is 1; it must be True"),
        (
            changed("trajectory_ids", 2, TrajectoryID("p", 0)),
            r"trajectory_ids of row 2 \(.*repetition_id=0\)\) repeats",
        ),
        (changed("loss_masks", 1, [2]), r"loss_masks of row 1 \(trajectory .*repetition_id=0\)\) has 2 at position 0"),
        ({**rows_of(2, 1), "trajectory_ids": None}, "is_last_step of row 0 is False, but trajectory_ids does not say"),
        ({**rows_of(2, 1), "rewards": [[1.0]] * 2}, "rewards has 2 entries for the 3 rows of is_last_step"),
        (rows_of(2, 1, 1), "is_last_step is True on 3 rows for 2 trajectories; a group must stay whole"),
        (rows_of(3), "is_last_step is True on 1 rows for 2 trajectories"),
    ],
)
def test_every_broken_trajectory_is_refused_and_named(output: dict[str, Any], message: str) -> None:
    with pytest.raises(GeneratorOutputError, match=message):
        to_samples(output, 2)  # type: ignore[arg-type]

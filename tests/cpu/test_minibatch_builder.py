"""The minibatch of a step is built while the step before it trains, and is the same as if it were built when its step begins."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import Harness

from skyrl_train import minibatch_builder
from skyrl_train.config.schema import AlgorithmConfig
from skyrl_train.errors import GeneratorOutputError
from skyrl_train.minibatch_builder import MinibatchBuilder, MinibatchInputs
from skyrl_train.training.backend import Minibatch
from skyrl_train.training.messages import PackedSequences
from skyrl_train.types import RolloutGroup, RolloutSequence, Sample


def group(group_index: int, reward: float = 1.0) -> RolloutGroup:
    samples = tuple(
        Sample((RolloutSequence.of_lists([3, 4], [5, 6], [1, 1], [-0.5, -0.25], [1, 2], [0.0, value], "stop"),))
        for value in (0.0, reward)
    )
    return RolloutGroup(group_index, f"row {group_index}", "", samples, submitted_version=1)


INPUTS = MinibatchInputs([group(4), group(7)], step=3, oldest_trained_version=None, kl_factor=1.0)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps whose minibatches have been built, in this order."""
    steps: list[int] = []
    build = minibatch_builder.build_minibatch

    def recorded(groups: Any, step: int, *arguments: Any, **options: Any) -> Minibatch:
        steps.append(step)
        return build(groups, step, *arguments, **options)

    monkeypatch.setattr(minibatch_builder, "build_minibatch", recorded)
    return steps


def numbers(minibatch: Minibatch) -> dict[str, list[float]]:
    return {name: values.tolist() for name, values in PackedSequences.of(minibatch.sequences).values.items()}


def test_a_prepared_minibatch_is_not_built_again(built: list[int]) -> None:
    builder = MinibatchBuilder(AlgorithmConfig(), seed=0)
    builder.prepare(INPUTS)
    trained, minibatch = builder.build(replace(INPUTS, groups=[group(4), group(7)]))
    assert built == [3]
    assert [each.group_index for each in trained] == [4, 7] and minibatch.step == 3
    builder.build(INPUTS)
    assert built == [3, 3], "a prepared minibatch serves once"
    builder.close()


def test_the_next_step_may_be_prepared_before_this_one_begins(built: list[int]) -> None:
    builder, following = MinibatchBuilder(AlgorithmConfig(), seed=0), replace(INPUTS, groups=[group(8)], step=4)
    builder.prepare(INPUTS)
    builder.prepare(following)
    assert [builder.build(inputs)[1].step for inputs in (INPUTS, following)] == built == [3, 4]
    builder.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"groups": [group(4), group(8)]},
        {"groups": [group(4)]},
        {"groups": [group(4), group(7, reward=-1.0)]},  # a trainer of the user's has changed it
        {"oldest_trained_version": 2},
        {"kl_factor": 0.5},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_minibatch_of_other_inputs_is_built_anew(changes: dict[str, Any]) -> None:
    inputs = replace(INPUTS, **changes)
    builder, fresh = (MinibatchBuilder(AlgorithmConfig(), seed=0) for _ in range(2))
    builder.prepare(INPUTS)
    (trained, minibatch), (_, expected) = builder.build(inputs), fresh.build(inputs)
    assert [each.group_index for each in trained] == [each.group_index for each in inputs.groups]
    assert minibatch.kl_factor == inputs.kl_factor
    assert numbers(minibatch) == numbers(expected)
    builder.close()
    fresh.close()


def test_an_error_belongs_to_the_step_that_trains_the_groups() -> None:
    builder = MinibatchBuilder(AlgorithmConfig(), seed=0)
    broken = replace(INPUTS, groups=[group(4), group(7, reward=float("inf"))])
    builder.prepare(broken)
    with pytest.raises(GeneratorOutputError, match="must be finite"):
        builder.build(broken)
    builder.prepare(broken)
    builder.build(replace(INPUTS, groups=[group(4)]))
    builder.close()


@pytest.mark.parametrize("mode", ["fully_async", "one_step_off"])
async def test_each_step_finds_its_minibatch_prepared(tmp_path: Path, mode: str, built: list[int]) -> None:
    h = Harness(tmp_path, f"trainer.mode={mode}", "trainer.fully_async.generate_ahead_steps=1")
    loop, prepared = asyncio.get_running_loop(), asyncio.Event()
    prepare = h.trainer.minibatches.prepare

    def preparing(inputs: MinibatchInputs) -> None:
        prepare(inputs)
        prepared.set()

    h.trainer.minibatches.prepare = preparing  # type: ignore[method-assign]

    def update_ends(minibatch: Minibatch) -> None:
        async def next_is_prepared() -> None:
            await prepared.wait()
            prepared.clear()

        if minibatch.step < 8:  # the last step: there is no other
            asyncio.run_coroutine_threadsafe(next_is_prepared(), loop).result(timeout=300)

    h.backend.before_update = update_ends
    await h.train()
    assert built == list(range(1, 9)), "each was built once"
    assert [minibatch.step for minibatch in h.backend.minibatches] == built
    assert sorted(h.trained) == list(range(32))


async def test_nothing_is_prepared_before_it_is_settled_which_groups_train(tmp_path: Path) -> None:
    """Group 4, of the second batch, has not ended: groups after it have, but it would train before them."""
    h = Harness(tmp_path, "trainer.mode=fully_async", "trainer.fully_async.generate_ahead_steps=2")
    loop, slow, expected = asyncio.get_running_loop(), asyncio.Event(), []
    h.generator.before = lambda batch: slow.wait() if batch["trajectory_ids"][0].instance_id.endswith("@4") else None

    def update_begins(minibatch: Minibatch) -> None:
        async def others_have_ended() -> None:
            await h.trainer.changed.wait_until(lambda: h.trainer.rollout.staleness.counts.accepted >= 11)
            expected.append(h.trainer.rollout.expected_batch())
            slow.set()
            await h.trainer.changed.wait_until(lambda: h.trainer.rollout.staleness.counts.accepted >= 12)
            expected.append(h.trainer.rollout.expected_batch())

        if minibatch.step == 1:
            asyncio.run_coroutine_threadsafe(others_have_ended(), loop).result(timeout=300)

    h.backend.before_update = update_begins
    await h.train()
    assert expected[0] is None
    assert expected[1] is not None and [each.group_index for each in expected[1]] == [4, 5, 6, 7]

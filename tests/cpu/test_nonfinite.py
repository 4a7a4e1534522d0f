"""Numbers that are not finite: skipped, counted, and the run stops after a limit, with a checkpoint from before."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from harness import Harness
from hypothesis import given
from hypothesis import strategies as st
from rollout_worlds import group_index_of
from stage_worlds import group

from skyrl_train.errors import NonFiniteRewardError, NonFiniteStepsError, RolloutError
from skyrl_train.rollout.stages.reward import with_rewards
from skyrl_train.training.optimizer import NonFiniteSteps
from skyrl_train.types import GeneratorInput, GeneratorOutput


@given(st.lists(st.booleans(), max_size=20), st.integers(0, 4), st.sampled_from(["policy", "critic"]))
def test_the_first_row_that_is_longer_than_the_limit_stops(skipped: list[bool], limit: int, whose: str) -> None:
    text = "".join("x" if each else "." for each in skipped)
    expected = text.find("x" * (limit + 1)) + limit + 1 if "x" * (limit + 1) in text else None
    rule, stopped = NonFiniteSteps(limit), None
    for step, each in enumerate(skipped, start=1):
        try:
            rule.observe(step, {"policy/skipped_nonfinite": 0.0, f"{whose}/skipped_nonfinite": float(each)})
        except NonFiniteStepsError:
            stopped = step
            break
    assert stopped == expected


@pytest.mark.parametrize(("whose", "other"), [("policy", "critic"), ("critic", "policy")])
def test_the_settings_of_the_model_that_was_skipped_are_named(whose: str, other: str) -> None:
    with pytest.raises(NonFiniteStepsError, match=rf"trainer\.{whose}\.optimizer_config\.lr") as caught:
        NonFiniteSteps(0).observe(3, {f"{whose}/skipped_nonfinite": 1.0, f"{other}/skipped_nonfinite": 0.0})
    assert f"trainer.{other}" not in str(caught.value)


def breaks(h: Harness, first: int, last: int) -> None:
    """The steps from ``first`` to ``last`` are skipped, as a real backend skips them."""
    finish = h.backend.finish

    def broken(step: int) -> dict[str, float]:
        metrics = finish(step)
        if first <= step <= last:
            h.backend.weight -= 1
            metrics |= {"policy/skipped_nonfinite": 1.0, "policy/grad_norm": math.nan}
        return metrics

    h.backend.finish = broken  # type: ignore[method-assign]


@pytest.mark.parametrize("mode", ["sync", "fully_async"])
async def test_a_run_stops_and_keeps_the_checkpoint_from_before(tmp_path: Path, mode: str) -> None:
    h = Harness(
        tmp_path,
        f"trainer.mode={mode}",
        "trainer.ckpt_interval=1",
        "trainer.max_ckpts_to_keep=1",
        "trainer.failures.max_nonfinite_steps=2",
    )
    breaks(h, 4, 8)
    with pytest.raises(NonFiniteStepsError, match=r"Steps 4 to 6 .*max_nonfinite_steps=2.*grad_norm=nan.*lr"):
        await h.train()
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "global_step_3"
    assert [row["policy/skipped_nonfinite"] for row in h.rows if "policy/skipped_nonfinite" in row] == [1.0] * 3
    again = Harness(tmp_path, f"trainer.mode={mode}", "trainer.ckpt_interval=1")
    await again.train()
    assert sorted(again.trained) == list(range(32))  # the prompts of the skipped steps came again


@pytest.mark.parametrize("mode", ["sync", "one_step_off"])
async def test_a_resumed_run_continues_the_count_of_steps_in_a_row(tmp_path: Path, mode: str) -> None:
    settings = [f"trainer.mode={mode}", "trainer.failures.max_nonfinite_steps=2"]
    first = Harness(tmp_path, *settings)
    breaks(first, 4, 8)
    finish = first.backend.finish

    def stopping(step: int) -> dict[str, float]:
        if step == 5:
            first.trainer.request_stop()
        return finish(step)

    first.backend.finish = stopping  # type: ignore[method-assign]
    await first.train()
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "global_step_5"
    again = Harness(tmp_path, *settings)
    breaks(again, 4, 8)
    with pytest.raises(NonFiniteStepsError, match=r"Steps 4 to 6 .*before step 4"):
        await again.train()
    assert float(again.backend.weight) == 3.0, (
        "what the stop has saved are the weights of step 3, which is all that a skipped step leaves"
    )


async def test_a_run_outlives_a_few_steps_that_are_skipped(tmp_path: Path) -> None:
    h = Harness(tmp_path, "trainer.failures.max_nonfinite_steps=2")
    breaks(h, 4, 5)
    await h.train()
    assert h.trainer.global_step == 8 and float(h.backend.weight) == 6.0


class TestRewards:
    """They are rollouts that failed."""

    @staticmethod
    def spoil(h: Harness, group_indices: set[int], attempts: int) -> None:
        asked: dict[int, int] = {}
        generate = h.generator.generate

        async def spoilt(batch: GeneratorInput) -> GeneratorOutput:
            group_index, output = group_index_of(batch), await generate(batch)
            asked[group_index] = asked.get(group_index, 0) + 1
            if group_index in group_indices and asked[group_index] <= attempts:
                output["rewards"] = [0.5, math.nan]
            return output

        h.generator.generate = spoilt  # type: ignore[method-assign]

    async def test_another_attempt_may_mend_it(self, tmp_path: Path) -> None:
        h = Harness(tmp_path, "trainer.mode=sync")
        self.spoil(h, {3, 7}, attempts=1)
        await h.train()
        assert h.trained == list(range(32)) and h.trainer.rollout.group_generator.retries == 2

    async def test_a_resumed_run_continues_counting_attempts(self, tmp_path: Path) -> None:
        first = Harness(tmp_path, "trainer.mode=sync")
        self.spoil(first, {3}, attempts=1)
        finish = first.backend.finish

        def stopping(step: int) -> dict[str, float]:
            if step == 4:
                first.trainer.request_stop()
            return finish(step)

        first.backend.finish = stopping  # type: ignore[method-assign]
        await first.train()
        again = Harness(tmp_path, "trainer.mode=sync")
        self.spoil(again, {20}, attempts=1)
        await again.train()
        assert again.rows[-1]["async/retries"] == 2

    async def test_else_the_next_prompt_takes_the_slot(self, tmp_path: Path) -> None:
        h = Harness(tmp_path, "trainer.mode=sync", "trainer.max_steps=4")
        self.spoil(h, {3, 7}, attempts=99)
        await h.train()
        assert sorted(h.trained) == [group_index for group_index in range(18) if group_index not in (3, 7)]
        assert h.rows[-1]["async/failed"] == 2

    async def test_and_a_limit_stops_the_run(self, tmp_path: Path) -> None:
        h = Harness(tmp_path, "trainer.mode=sync", "trainer.failures.max_failed_rollouts=1")
        self.spoil(h, {9, 10}, attempts=99)
        with pytest.raises(RolloutError, match=r"max_failed_rollouts = 1.*rewards of sample 1 contains nan"):
            await h.train()
        assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "global_step_2"

    def test_of_a_reward_function_count_too(self) -> None:
        with pytest.raises(NonFiniteRewardError, match=r"returned .*nan"):
            with_rewards(group().samples, [1.0, math.nan])

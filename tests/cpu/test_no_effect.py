"""Settings that get a warning because they have no effect: a run with them trains what it trains without them."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Harness

from skyrl_train.config.compose import compose
from skyrl_train.config.plan import resolve

FULLY_ASYNC = "trainer.fully_async"
ALGORITHM = "trainer.algorithm"


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{ALGORITHM}.gamma=0.9"],
        [f"{ALGORITHM}.kl_ctrl.type=adaptive"],
        [f"{ALGORITHM}.proximal_policy=arrival"],
        [f"{ALGORITHM}.off_policy_correction.baseline_without_rejected=true"],
        [f"{ALGORITHM}.off_policy_correction.rejections=[{{statistic: k3}}]"],
        [f"{ALGORITHM}.overlong.max_response_len=8"],
        [f"{ALGORITHM}.overlong.penalty_factor=2"],
        [f"{ALGORITHM}.kl_estimator_type=k2"],
        [f"{ALGORITHM}.kl_ctrl.kl_target=1"],
        [f"{ALGORITHM}.max_filtered_share=0.01"],
        [f"{ALGORITHM}.max_seq_len=8"],
        ["trainer.eval.before_train=true"],
        ["trainer.eval.num_engines=1"],
        ["trainer.max_restarts=2", "trainer.executor=thread"],
        ["trainer.tf32=true"],
        ["generator.inference_engine.tensor_parallel_size=2"],
        ["generator.inference_engine.environment={OMP_NUM_THREADS: 3}"],
        ["trainer.partial_rollout.oversubmit_factor=3"],
    ],
    ids=str,
)
async def test_a_run_trains_the_same_with_and_without(tmp_path: Path, overrides: list[str]) -> None:
    plain = Harness(tmp_path / "plain", "trainer.mode=sync")
    warned = Harness(tmp_path / "warned", "trainer.mode=sync", *overrides)
    assert plain.plan.warnings == () and len(warned.plan.warnings) == 1
    for h in (plain, warned):
        await h.train()
    assert warned.trained == plain.trained == list(range(32))
    for a, b in zip(warned.backend.minibatches, plain.backend.minibatches, strict=True):
        for x, y in zip(a.sequences, b.sequences, strict=True):
            assert x.token_ids.equal(y.token_ids) and x.advantages.equal(y.advantages)


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{FULLY_ASYNC}.overlap_weight_sync=true", f"{FULLY_ASYNC}.generate_ahead_steps=0"],
        [f"{FULLY_ASYNC}.overlap_weight_sync=true", f"{FULLY_ASYNC}.generate_ahead_steps=0.5"],
        [
            f"{FULLY_ASYNC}.overlap_weight_sync=true",
            f"{FULLY_ASYNC}.generate_ahead_steps=0",
            f"{FULLY_ASYNC}.weight_sync_interval=2",
        ],
        ["trainer.train_batch_size=8"],
    ],
    ids=str,
)
async def test_an_asynchronous_run_with_a_setting_without_effect_trains_every_prompt_once(
    tmp_path: Path, overrides: list[str]
) -> None:
    h = Harness(tmp_path, "trainer.mode=fully_async", *overrides)
    assert len(h.plan.warnings) == 1
    await h.train()
    assert sorted(h.trained) == list(range(32))


def test_prompts_of_an_evaluation_that_never_comes_are_named() -> None:
    held_out = "trainer.eval.eval_data=[held_out.jsonl]"
    (warning,) = resolve(compose("quickstart", [held_out]), 100).warnings
    assert warning.startswith(
        "trainer.eval.eval_data=['held_out.jsonl'] without trainer.eval.interval: nothing is ever"
    )
    assert not resolve(compose("quickstart", [held_out, "trainer.eval.interval=5"]), 100).warnings


def test_settings_of_other_engines_are_named() -> None:
    settings = "generator.inference_engine={backend: vllm, device: cuda, batch_invariant: true}"
    plan = resolve(compose("quickstart", [settings]), 100)
    assert "batch_invariant belongs to" in plan.warnings[0] and len(plan.warnings) == 1
    assert "batch-invariant" not in plan.describe()

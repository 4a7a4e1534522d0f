"""Combinations that cannot work are refused with their remedy, and what the tutorial adds works as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from test_tutorials import blocks

from skyrl_train.algorithms.advantages import ADVANTAGE_ESTIMATORS, GroupRewards
from skyrl_train.algorithms.losses import POLICY_LOSSES
from skyrl_train.algorithms.tokens import MINIBATCH_STATISTICS
from skyrl_train.build.checks import check_import_paths, check_model_path, check_objective, known_names
from skyrl_train.config.compose import compose
from skyrl_train.config.schema import AlgorithmConfig
from skyrl_train.config.validate import raise_errors, validate
from skyrl_train.errors import ConfigError, ModelError

STREAMING = ("trainer.mode=fully_async", "trainer.fully_async.streaming_min_groups=1")
RULES = "off_policy_correction.rejections"


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        (["advantage_estimator=reinforce++", *STREAMING], "streaming_min_groups=null"),
        (["advantage_batch_normalize=true", *STREAMING], "streaming_min_groups=null"),
        (["policy_loss_type=clip_cov", *STREAMING], "streaming_min_groups=null"),
        (["off_policy_correction.m2po_threshold=0.04", *STREAMING], "streaming_min_groups=null"),
        (["policy_loss_type=dual_clip", "clip_ratio_c=0.9"], "must be more than 1"),
        (["loss_reduction=seq_mean_token_sum_norm"], r"max_seq_len=\d+"),
        (["advantage_estimator=rloo", "generator.n_samples_per_prompt=1"], "n_samples_per_prompt=8"),
        (["advantage_estimator=maxrl", "kl_reward_coef=0.1"], "another estimator"),
        (["overlong.buffer_len=8"], r"max_response_len=\d+"),
        ([f"{RULES}=[{{statistic:k1,low:2,high:1}}]"], "Exchange them"),
        ([f"{RULES}=[{{statistic:ratio,high:0}}]"], "rejects every token"),
        ([f"{RULES}=[{{statistic:k3,level:sequence_mean,high:1,away_only:true}}]"], "Set level=token"),
        ([f"{RULES}=[{{statistic:k3,high:1}},{{statistic:k3,high:2}}]"], "same name"),
        (
            [
                "off_policy_correction.baseline_without_rejected=true",
                f"{RULES}=[{{statistic:k3,level:sequence_mean,high:1}}]",
            ],
            "proximal_policy=arrival",
        ),
        (["off_policy_correction.icepop_ratio_low=9"], "icepop_ratio_high"),
        (["kl_reward_coef=-1"], "must be at least 0"),
    ],
)
def test_settings_that_cannot_work_are_errors(settings: list[str], remedy: str) -> None:
    keys = [s if s.startswith(("trainer.", "generator.", "rollout.")) else f"trainer.algorithm.{s}" for s in settings]
    with pytest.raises(ConfigError, match=remedy):
        raise_errors(validate(compose("quickstart", keys)).errors)


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        (["policy_loss_type=kl_cov"], "update_epochs_per_batch=2"),
        (
            ["eps_clip_high=0.28"],
            "eps_clip_high with one pass .*update_epochs_per_batch=2 or proximal_policy=arrival, or",
        ),
        (
            ["eps_clip_high=0.28", "trainer.mode=sync"],
            "eps_clip_high with one pass .*update_epochs_per_batch=2, or leave",
        ),
        (
            ["eps_clip_high=0.28", "trainer.mode=partial_rollout", "trainer.placement.colocate_all=true"],
            "update_epochs_per_batch=2, or leave",
        ),
        (
            ["policy_loss_type=dual_clip", "clip_ratio_c=5", "eps_clip_low=0.1"],
            "eps_clip_low, .*clip_ratio_c with one pass",
        ),
        (["policy_loss_type=cispo", "cispo.cispo_eps_clip_high=3"], "cispo with one pass"),
        (["policy_loss_type=sapo", "sapo.tau_neg=2"], "sapo with one pass"),
        (["gamma=0.9"], "advantage_estimator=reinforce"),
        (["overlong.max_response_len=8"], "overlong.buffer_len"),
        (["overlong.buffer_len=8", "overlong.max_response_len=9", "overlong.penalty_factor=0"], "above 0"),
        (
            ["overlong.buffer_len=100", "overlong.max_response_len=500"],
            "begins after 400 tokens.*max_response_len=\\d+",
        ),
        (["rollout.stages.proximal.device=cuda:1"], "proximal.device with executor=trainer.*process or thread or ray"),
        (["max_seq_len=8"], "max_seq_len=null"),
        (["advantage_estimator=rloo", "grpo_norm_by_std=false"], "advantage_estimator=grpo"),
        (["advantage_estimator=gae", "grpo_norm_by_std=false"], "advantage_estimator=grpo"),
        ([f"{RULES}=[{{statistic:k3}}]"], "Set low, high, or both"),
        (["off_policy_correction.baseline_without_rejected=true"], "overlong.filter=true"),
        (["kl_ctrl.type=adaptive"], "kl_ctrl.type=fixed"),
        (["kl_ctrl.horizon=5"], "kl_ctrl.type=adaptive"),
        (["kl_estimator_type=k2"], "kl_reward_coef above 0"),
        (["max_filtered_share=0.5", "dynamic_sampling=replace"], "dynamic_sampling=filter"),
        (["zero_variance_filter=true", "dynamic_sampling=filter"], "Leave one of them out"),
        (["overlong.penalty_factor=2"], "Set overlong.buffer_len"),
        (["clip_ratio_c=5"], "clip_ratio_c with policy_loss_type=ppo_clip.*policy_loss_type=dual_clip"),
        (["cispo.cispo_eps_clip_high=3"], "cispo with .*policy_loss_type=cispo"),
        (["policy_loss_type=sapo", "eps_clip_low=0.1"], "eps_clip_low .*policy_loss_type=ppo_clip or dual_clip"),
        (["off_policy_correction.icepop_ratio_low=0.1"], "tis_ratio_type=token.*tis_ratio_type=icepop"),
        (
            ["off_policy_correction.tis_ratio_type=icepop", "off_policy_correction.sequence_tis_ratio_clip_high=2"],
            "tis_ratio_type=sequence or geometric",
        ),
    ],
)
def test_a_setting_without_effect_is_a_warning(settings: list[str], remedy: str) -> None:
    keys = [s if s.startswith(("trainer.", "generator.", "rollout.")) else f"trainer.algorithm.{s}" for s in settings]
    found = validate(compose("quickstart", keys))
    assert found.errors == [] and any(re.search(remedy, warning) for warning in found.warnings), found


@pytest.mark.parametrize(
    "settings",
    [
        ["policy_loss_type=clip_cov", "clip_cov.clip_ratio=0.1"],
        ["policy_loss_type=clip_cov", "eps_clip_low=0.1", "proximal_policy=interpolated"],
        ["eps_clip_high=0.28", "proximal_policy=interpolated"],
        ["policy_loss_type=own.py:loss", "clip_ratio_c=5", "sapo.tau_neg=2", "kl_estimator_type=k2"],
        ["off_policy_correction.tis_ratio_type=geometric", "off_policy_correction.sequence_tis_ratio_clip_high=2"],
        ["off_policy_correction.tis_ratio_type=own.py:weights", "off_policy_correction.icepop_ratio_low=0.1"],
    ],
)
def test_what_a_loss_or_a_weight_reads_or_may_read_has_an_effect(settings: list[str]) -> None:
    assert validate(compose("quickstart", [f"trainer.algorithm.{each}" for each in settings])).warnings == []


def test_an_unknown_statistic_is_refused_by_its_name() -> None:
    rules = f"trainer.algorithm.{RULES}=[{{statistic:k3,high:1}},{{statistic:ration,high:2}}]"
    with pytest.raises(ConfigError, match=r"rejections\.statistic=ration is unknown\. Did you mean ratio"):
        raise_errors(validate(compose("quickstart", [rules]), known_names()).errors)


def test_rejections_alone_correct_a_run_with_older_tokens() -> None:
    rule = f"trainer.algorithm.{RULES}=[{{statistic:ratio,low:0.5,high:3}}]"
    uncorrected = "trainer.algorithm.off_policy_correction.tis_ratio_type=null"
    raise_errors(validate(compose("quickstart", ["trainer.mode=fully_async", uncorrected, rule])).errors)


def test_a_loss_of_ones_own_that_needs_the_whole_minibatch_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(POLICY_LOSSES, "_entries", {**POLICY_LOSSES._entries, "own": POLICY_LOSSES.get("kl_cov")})
    monkeypatch.setattr(
        MINIBATCH_STATISTICS, "_entries", {**MINIBATCH_STATISTICS._entries, "own": MINIBATCH_STATISTICS.get("kl_cov")}
    )
    own = "trainer.algorithm.policy_loss_type=own"
    check_objective(compose("quickstart", ["trainer.mode=fully_async", own]))
    with pytest.raises(ConfigError, match="Set streaming_min_groups=null"):
        check_objective(compose("quickstart", [own, *STREAMING]))


@pytest.mark.parametrize(
    "key",
    [
        "trainer.algorithm.advantage_estimator",
        "trainer.policy.optimizer_config.scheduler",
        "trainer.critic.optimizer_config.scheduler",
        "trainer.fully_async.staleness_policy",
    ],
)
def test_a_path_that_leads_nowhere_is_refused_before_a_model_is_loaded(key: str) -> None:
    check_import_paths(compose("quickstart", []))
    with pytest.raises(ConfigError, match=rf"{key}='json.nothing' cannot be imported"):
        check_import_paths(compose("quickstart", [f"{key}=json.nothing"]))


@pytest.mark.parametrize("key", ["trainer.policy.model.path", "trainer.critic.model.path"])
@pytest.mark.parametrize("folder", ["empty", "absent"])
def test_a_folder_without_a_model_is_refused_by_its_setting_before_anything_starts(
    tmp_path: Path, key: str, folder: str
) -> None:
    (tmp_path / "empty").mkdir()
    check_model_path(
        compose("quickstart", ["trainer.algorithm.advantage_estimator=gae", f"{key}=some/model-of-the-hub"])
    )
    with pytest.raises(ModelError, match=f"Point {key} at a folder with a config.json"):
        check_model_path(
            compose("quickstart", ["trainer.algorithm.advantage_estimator=gae", f"{key}={tmp_path / folder}"])
        )


def test_an_estimator_of_the_tutorial_is_found_by_its_path_and_reads_its_own_parameter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ADVANTAGE_ESTIMATORS, "_entries", dict(ADVANTAGE_ESTIMATORS._entries))
    (script,) = (block for block in blocks("algorithms.md", "python") if block.startswith("# leave_max.py"))
    path = tmp_path / "leave_max.py"
    path.write_text(script)
    name = f"{path}:leave_max"
    assert ADVANTAGE_ESTIMATORS.get(name) is ADVANTAGE_ESTIMATORS.get(name), "the file is executed once"
    group = GroupRewards([[1.0], [3.0]], [torch.ones(1)] * 2, [True, True])
    found = ADVANTAGE_ESTIMATORS.get(name)(group, AlgorithmConfig(kwargs={"scale": 0.5}))
    assert [values.tolist() for values in found] == [[-1.0], [0.0]]
    assert ADVANTAGE_ESTIMATORS.get("leave_max")(group, AlgorithmConfig())[0].tolist() == [-2.0]

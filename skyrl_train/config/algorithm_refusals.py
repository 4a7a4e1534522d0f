"""Refusals about ``trainer.algorithm``: losses, advantages, corrections, and what they cannot be combined with."""

from __future__ import annotations

import math
from collections.abc import Callable

from skyrl_train.config import derive
from skyrl_train.config.limits import Problems, at_least, more_than_zero
from skyrl_train.config.schema.algorithm import KlControlType, ProximalPolicy, RejectionConfig, RejectionLevel
from skyrl_train.config.schema.run import RunConfig

KEY = "trainer.algorithm"
CORRECTION = f"{KEY}.off_policy_correction"


def _losses(config: RunConfig) -> Problems:
    algorithm = config.trainer.algorithm
    yield from at_least(
        config,
        0,
        *(f"{KEY}.{name}" for name in ("eps_clip_low", "eps_clip_high", "entropy_coef", "cispo.cispo_eps_clip_high")),
        *(f"{KEY}.{name}" for name in ("cispo.cispo_eps_clip_low", "kl_cov.ppo_kl_coef")),
    )
    yield from more_than_zero(config, f"{KEY}.sapo.tau_pos", f"{KEY}.sapo.tau_neg", f"{KEY}.max_seq_len")
    if algorithm.eps_clip_low is not None and algorithm.eps_clip_low >= 1:
        yield f"{KEY}.eps_clip_low={algorithm.eps_clip_low}: must be less than 1."
    if algorithm.policy_loss_type == "dual_clip" and not algorithm.clip_ratio_c > 1:
        yield f"{KEY}.clip_ratio_c={algorithm.clip_ratio_c}: a bound on ratios must be more than 1. Set it to 3."
    for name, share in (
        ("clip_cov.clip_ratio", algorithm.clip_cov.clip_ratio),
        ("kl_cov.kl_cov_frac", algorithm.kl_cov.kl_cov_frac),
    ):
        if not 0 <= share <= 1:
            yield f"{KEY}.{name}={share}: is a share of tokens, between 0 and 1."
    if algorithm.clip_cov.clip_cov_lb > algorithm.clip_cov.clip_cov_ub:
        yield f"{KEY}.clip_cov.clip_cov_lb={algorithm.clip_cov.clip_cov_lb}: must be at most clip_cov_ub."
    one_pass = config.trainer.update_epochs_per_batch == 1 and algorithm.proximal_policy is ProximalPolicy.step
    if algorithm.policy_loss_type == "kl_cov" and one_pass:
        yield (
            f"{KEY}.policy_loss_type=kl_cov with one pass around the policy of the step: its penalty has no gradient there, so "
            "it would do nothing. Set trainer.update_epochs_per_batch=2, or proximal_policy=arrival."
        )
    if algorithm.max_seq_len is not None and algorithm.loss_reduction in ("token_mean", "sequence_mean", "prompt_mean"):
        yield (
            f"{KEY}.max_seq_len={algorithm.max_seq_len} with loss_reduction={algorithm.loss_reduction}, which divides by no "
            "fixed length. Set max_seq_len=null, or loss_reduction=seq_mean_token_sum_norm."
        )
    if algorithm.loss_reduction == "seq_mean_token_sum_norm" and algorithm.max_seq_len is None:
        length = config.generator.sampling_params.max_tokens * config.generator.max_turns
        yield (
            f"{KEY}.loss_reduction=seq_mean_token_sum_norm divides by a fixed length, which is not given. Set "
            f"{KEY}.max_seq_len={length}, the most tokens that a response of this run samples."
        )


def _advantages(config: RunConfig) -> Problems:
    algorithm = config.trainer.algorithm
    if not 0 <= algorithm.gamma <= 1:
        yield f"{KEY}.gamma={algorithm.gamma}: must be between 0 and 1 (1 is no discount)."
    elif algorithm.gamma != 1 and algorithm.advantage_estimator in ("grpo", "rloo", "maxrl"):
        yield (
            f"{KEY}.gamma={algorithm.gamma} with advantage_estimator={algorithm.advantage_estimator}, which gives all tokens of "
            "a response the same advantage and discounts nothing. Set gamma=1, or advantage_estimator=reinforce++ or gae."
        )
    if algorithm.advantage_estimator == "maxrl" and (algorithm.overlong.buffer_len or algorithm.kl_reward_coef):
        yield (
            f"{KEY}.advantage_estimator=maxrl divides by the mean return, which penalties may bring to 0 and below. Set "
            "overlong.buffer_len=0 and kl_reward_coef=0, or another estimator."
        )
    if not algorithm.grpo_norm_by_std and algorithm.advantage_estimator in ("rloo", "maxrl", "reinforce++", "gae"):
        yield (
            f"{KEY}.grpo_norm_by_std=false with advantage_estimator={algorithm.advantage_estimator}, which has no such division "
            "in it. Leave it out, or set advantage_estimator=grpo."
        )
    overlong = algorithm.overlong
    if overlong.buffer_len == 0 and overlong.max_response_len is not None:
        yield (
            f"{KEY}.overlong.max_response_len={overlong.max_response_len} without a penalty, which alone looks at it. Set "
            f"{KEY}.overlong.buffer_len, the last tokens over which the penalty grows, or leave max_response_len out."
        )
    if overlong.buffer_len > 0 and overlong.penalty_factor == 0:
        yield (
            f"{KEY}.overlong.penalty_factor=0 makes a penalty of 0 over the last {overlong.buffer_len} tokens. Set it above 0, "
            "or overlong.buffer_len=0 for no penalty."
        )
    yield from at_least(config, 0, f"{KEY}.overlong.buffer_len", f"{KEY}.overlong.penalty_factor")
    if overlong.buffer_len > 0 and (overlong.max_response_len or 0) < overlong.buffer_len:
        length = config.generator.sampling_params.max_tokens * config.generator.max_turns
        yield (
            f"{KEY}.overlong.buffer_len={overlong.buffer_len} with max_response_len={overlong.max_response_len}: the penalty "
            f"grows over the last {overlong.buffer_len} tokens of that length. Set {KEY}.overlong.max_response_len={length}, "
            "the most tokens that a response of this run samples, and a buffer_len below it."
        )


def _whole_minibatch(config: RunConfig) -> Problems:
    """What looks at all groups of a step before it trains on the first one."""
    algorithm, groups = config.trainer.algorithm, derive.streaming_min_groups(config)
    if groups is None:
        return
    asked = []
    if derive.normalizes_over_minibatch(algorithm):
        asked.append(
            f"advantage_batch_normalize (with advantage_estimator={algorithm.advantage_estimator})"
            if algorithm.advantage_batch_normalize is None
            else "advantage_batch_normalize=true"
        )
    if algorithm.policy_loss_type in derive.WHOLE_MINIBATCH_LOSSES:
        asked.append(f"policy_loss_type={algorithm.policy_loss_type}")
    if algorithm.off_policy_correction.m2po_threshold is not None:
        asked.append(f"off_policy_correction.m2po_threshold={algorithm.off_policy_correction.m2po_threshold}")
    for setting in asked:
        may_do_without = (
            setting.startswith("advantage_batch_normalize") and algorithm.advantage_estimator != "reinforce++"
        )
        instead = f", or {KEY}.advantage_batch_normalize=false" if may_do_without else ""
        yield (
            f"{KEY}.{setting} looks at all groups of a step before it trains on any, which "
            f"trainer.fully_async.streaming_min_groups={groups} does not wait for. Set streaming_min_groups=null{instead}."
        )


def _rejections(config: RunConfig) -> Problems:
    correction = config.trainer.algorithm.off_policy_correction
    yield from more_than_zero(
        config,
        *(f"{CORRECTION}.{name}" for name in ("token_tis_ratio_clip_high", "sequence_tis_ratio_clip_high")),
        *(f"{CORRECTION}.{name}" for name in ("icepop_ratio_high", "m2po_threshold")),
    )
    if not 0 <= correction.icepop_ratio_low <= correction.icepop_ratio_high:
        yield (
            f"{CORRECTION}.icepop_ratio_low={correction.icepop_ratio_low}: must be between 0 and "
            f"icepop_ratio_high={correction.icepop_ratio_high}."
        )
    named: set[tuple[str, str]] = set()
    for index, rule in enumerate(correction.rejections):
        yield from _bounds(rule, f"{CORRECTION}.rejections[{index}]")
        if (rule.statistic, rule.level) in named:
            yield (
                f"{CORRECTION}.rejections has two rules about {rule.statistic} by {rule.level}, which have the same name in the "
                "metrics. Make one of them, with the tighter bounds."
            )
        named.add((rule.statistic, rule.level))
    yield from _baseline(config)


def _bounds(rule: RejectionConfig, key: str) -> Problems:
    if rule.low is None and rule.high is None:
        yield f"{key} ({rule.statistic} by {rule.level}) has no bounds, so it rejects nothing. Set low, high, or both."
    if rule.low is not None and rule.high is not None and not rule.low <= rule.high:
        yield f"{key}: low={rule.low} is above high={rule.high}, so everything would be rejected. Exchange them."
    if rule.away_only and rule.level is not RejectionLevel.token:
        yield f"{key}: away_only is about single tokens, whose update leads further away or back. Set level=token."
    lowest = {"ratio": 0.0, "k2": 0.0, "k3": 0.0}.get(rule.statistic)
    if lowest is not None and rule.high is not None and not rule.high > lowest:
        yield f"{key}: high={rule.high} with statistic={rule.statistic}, which is above 0, rejects every token. Raise it."
    if rule.statistic == "ratio" and rule.low is not None and rule.low < 0:
        yield f"{key}: low={rule.low} with statistic=ratio, which is above 0. Set it to 0.5, say, or to null."


def _baseline(config: RunConfig) -> Problems:
    """Rejections are known before advantages only where the proximal policy is."""
    algorithm = config.trainer.algorithm
    correction, key = algorithm.off_policy_correction, f"{CORRECTION}.baseline_without_rejected=true"
    if not correction.baseline_without_rejected:
        return
    whole = [rule for rule in correction.rejections if rule.level is not RejectionLevel.token]
    if not whole and not algorithm.overlong.filter:
        yield (
            f"{key}, but nothing rejects whole samples. Add a rule with level=sequence_mean, sequence_sum or sequence_max, set "
            f"{KEY}.overlong.filter=true, or leave it out."
        )
    if whole and algorithm.proximal_policy is not ProximalPolicy.arrival:
        yield (
            f"{key} with proximal_policy={algorithm.proximal_policy}: what is rejected is known only when the step trains, after "
            "its baselines. Set proximal_policy=arrival."
        )
    if any(rule.statistic == "probability_difference" for rule in whole):
        yield (
            f"{key} with a rule about sequences by probability_difference, which is about the policy while it trains. Use "
            "statistic=ratio, k1, k2 or k3."
        )


def _kl(config: RunConfig) -> Problems:
    algorithm = config.trainer.algorithm
    wrong = False
    for name in ("kl_loss_coef", "kl_reward_coef"):
        value = getattr(algorithm, name)
        if not 0 <= value < math.inf:
            wrong = True
            yield f"{KEY}.{name}={value}: must be at least 0 (0 is off) and finite."
    if not wrong and algorithm.kl_loss_coef > 0 and algorithm.kl_estimator_type == "k1":
        yield (
            f"{KEY}.kl_estimator_type=k1 with kl_loss_coef={algorithm.kl_loss_coef}: the gradient of k1 is 0 on average, "
            "whatever the policy is, so the term would add noise alone. Set kl_estimator_type=k3 or k2, or take it from the "
            "reward: kl_reward_coef."
        )
    yield from more_than_zero(config, f"{KEY}.kl_ctrl.kl_target", f"{KEY}.kl_ctrl.horizon")
    if algorithm.kl_ctrl.type is KlControlType.adaptive and not wrong and not derive.needs_reference(algorithm):
        yield (
            f"{KEY}.kl_ctrl.type=adaptive without a KL term: there is no coefficient to adapt. Set kl_loss_coef or "
            "kl_reward_coef to what it starts from, or kl_ctrl.type=fixed."
        )


def _proximal(config: RunConfig) -> Problems:
    algorithm = config.trainer.algorithm
    if algorithm.proximal_policy is ProximalPolicy.step or config.trainer.policy_mini_batch_size < 1:
        return
    if algorithm.proximal_policy is ProximalPolicy.arrival and derive.max_staleness_steps(config) == 0:
        yield (
            f"{KEY}.proximal_policy=arrival with a bound of 0: the policy does not change between a group's end and its "
            "step, so both are the same. Set proximal_policy=step."
        )


RULES: tuple[Callable[[RunConfig], Problems], ...] = (
    _losses,
    _advantages,
    _whole_minibatch,
    _rejections,
    _kl,
    _proximal,
)

"""Advantages, losses, KL divergence and the correction of off-policy data: ``trainer.algorithm``."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

# What happens to groups whose samples all have the same reward, and so no signal (DAPO, arXiv 2503.14476). none: they are
# trained like all others. filter: they leave as they arrive; the next prompts take their seats. replace: copies of a
# batch's other groups take their place when it trains. (The functional form, because "replace" is a method of str.)
DynamicSampling = StrEnum("DynamicSampling", {"none": "none", "filter": "filter", "replace": "replace"})


class ProximalPolicy(StrEnum):
    """Around which policy the loss clips, and which one stands between behaviour and current policy in the correction."""

    step = "step"  # the policy as the step begins
    arrival = "arrival"  # the policy that was trained when the group was finished
    interpolated = "interpolated"  # between the behaviour policy and the step's, by the token's lag (A-3PO)


class RejectionLevel(StrEnum):
    """What is compared with the bounds, and what is rejected: each token, or a sequence by the mean, the sum or any of its
    tokens."""

    token = "token"
    sequence_mean = "sequence_mean"
    sequence_sum = "sequence_sum"
    sequence_max = "sequence_max"


class KlControlType(StrEnum):
    """Whether the coefficients of the KL divergence change."""

    fixed = "fixed"
    adaptive = "adaptive"


@dataclass
class RejectionConfig:
    """Tokens that do not train, because they are out of bounds; :mod:`skyrl_train.algorithms.off_policy.rejections`."""

    statistic: str = "ratio"  # ratio | k1 | k2 | k3 | probability_difference
    level: RejectionLevel = RejectionLevel.token
    low: float | None = None  # values below are rejected; None: none is
    high: float | None = None  # values above
    away_only: bool = False  # only tokens whose update leads further away (level=token)


@dataclass
class OffPolicyCorrectionConfig:
    """What makes up for tokens that another policy has sampled: weights, and tokens that do not train."""

    # Weights, proximal over behaviour: token | sequence | geometric | icepop | None
    tis_ratio_type: str | None = "token"
    token_tis_ratio_clip_high: float = 2.0
    sequence_tis_ratio_clip_high: float = 5.0  # sequence, geometric
    icepop_ratio_low: float = 0.5  # icepop rejects tokens outside of the two
    icepop_ratio_high: float = 5.0
    rejections: list[RejectionConfig] = field(default_factory=list)
    m2po_threshold: float | None = None  # bound on the minibatch's mean squared log-ratio (0.04); None: no bound
    baseline_without_rejected: bool = False  # samples that are rejected or filtered as a whole are not compared with
    allow_uncorrected: bool = False  # the explicit opt-in that S > 0 without a correction needs


@dataclass
class CispoConfig:
    """Bounds on the ratio, as distances from 1; see ``policy_loss_type=cispo``."""

    cispo_eps_clip_low: float = 1.0  # 1: no lower bound
    cispo_eps_clip_high: float = 5.0


@dataclass
class SapoConfig:
    """Temperatures for positive and for other advantages; see ``policy_loss_type=sapo``."""

    tau_pos: float = 1.0
    tau_neg: float = 1.05


@dataclass
class ClipCovConfig:
    """Tokens of covariances within the bounds are drawn, and do not train; see ``policy_loss_type=clip_cov``."""

    clip_ratio: float = 0.0002  # share of a minibatch's tokens
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0


@dataclass
class KlCovConfig:
    """The tokens of the largest covariances get a KL penalty; see ``policy_loss_type=kl_cov``."""

    kl_cov_frac: float = 0.0002  # share of a minibatch's tokens
    ppo_kl_coef: float = 1.0


@dataclass
class KlControlConfig:
    """How the coefficients of the KL divergence follow the divergence that is measured."""

    type: KlControlType = KlControlType.fixed
    kl_target: float = 0.1  # nats per token
    horizon: float = 10000.0  # samples


@dataclass
class OverlongConfig:
    """Responses by their number of sampled tokens, over all turns."""

    buffer_len: int = 0  # the penalty grows over the last so many tokens (DAPO); 0: no penalty
    penalty_factor: float = 1.0  # the penalty at max_response_len
    max_response_len: int | None = None  # tokens; needed by the penalty
    filter: bool = False  # samples that were cut off (stop reason length) train with loss mask 0


@dataclass
class AlgorithmConfig:
    """Whatever names a function (estimator, loss, reduction, ...) takes a registered name or an import path."""

    advantage_estimator: str = "grpo"  # grpo | rloo | reinforce++ | maxrl | gae (trains trainer.critic)
    grpo_norm_by_std: bool = True
    advantage_batch_normalize: bool | None = None  # over all tokens of a minibatch; None: with reinforce++ and gae
    gamma: float = 1.0  # discount per trained token: reinforce++, gae
    lambd: float = 1.0  # gae: 1 takes the whole return, 0 the next value alone
    value_clip: float | None = 0.2  # gae: how far a value may profit from moving in one step; None: without bound
    policy_loss_type: str = "ppo_clip"  # | dual_clip | gspo | cispo | sapo | clip_cov | kl_cov | importance_sampling
    eps_clip_low: float | None = None  # ppo_clip, dual_clip, gspo, clip_cov; None: 0.2, for gspo 3e-4
    eps_clip_high: float | None = None  # None: 0.2, for gspo 4e-4
    clip_ratio_c: float = 3.0  # dual_clip
    cispo: CispoConfig = field(default_factory=CispoConfig)
    sapo: SapoConfig = field(default_factory=SapoConfig)
    clip_cov: ClipCovConfig = field(default_factory=ClipCovConfig)
    kl_cov: KlCovConfig = field(default_factory=KlCovConfig)
    loss_reduction: str = "token_mean"  # token_mean | sequence_mean | prompt_mean | seq_mean_token_sum_norm
    max_seq_len: int | None = None  # tokens; what seq_mean_token_sum_norm divides by
    entropy_coef: float = 0.0
    kl_loss_coef: float = 0.0  # of the KL divergence from the policy that the run starts from; 0: there is no such term
    kl_reward_coef: float = 0.0  # the same, taken from the reward of each token
    kl_estimator_type: str = "k3"  # k1 (reward only) | k2 | k3 (Schulman 2020)
    kl_ctrl: KlControlConfig = field(default_factory=KlControlConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    proximal_policy: ProximalPolicy = ProximalPolicy.step
    dynamic_sampling: DynamicSampling = DynamicSampling.none
    max_filtered_share: float = 0.95  # filter: of the last 64 * B groups, at most 1,024; beyond it the run stops
    zero_variance_filter: bool = False  # groups whose samples all have the same reward train with loss mask 0
    off_policy_correction: OffPolicyCorrectionConfig = field(default_factory=OffPolicyCorrectionConfig)
    kwargs: dict[str, Any] = field(default_factory=dict)  # for estimators, losses, ... of your own

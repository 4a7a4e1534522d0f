"""Rejections: tokens that are too far off-policy to train. They leave the numerator of the loss, never its denominator.

A rule is a statistic, a level and bounds, and everything within ``low <= value <= high`` is kept (a bound of None is no
bound). Bounds are those of the statistic as it stands in the table, so no rule has them upside down: to keep ratios in
[0.5, 3], say ``statistic=ratio, low=0.5, high=3``, whichever level.

| statistic | of a token | sequence_mean | sequence_sum | sequence_max |
|---|---|---|---|---|
| ratio | ``r`` | geometric mean of r | product of r | each token's r |
| k1 | ``-log r`` | mean | sum | each token's |
| k2 | ``(log r)^2 / 2`` | mean | sum | each token's |
| k3 | ``r - 1 - log r`` | mean | sum | each token's |
| probability_difference | ``pi_theta - pi_behave`` | mean | sum | each token's |

``sequence_max`` rejects a sequence of which any token is out of bounds. k1, k2 and k3 estimate ``KL(behave || prox)``
(:mod:`skyrl_train.algorithms.kl`); k1 may be below 0.

With ``away_only``, a token that is out of bounds still trains if its update leads back: only ``A log(pi_theta / pi_behave)
> 0`` is rejected. With ``probability_difference``, ``low=-d`` and ``high=d`` that is the mask of DPPO (divergence PPO, the
variant with the binary total variation; arXiv 2602.04879, compared with verl's ``dppo_tv``): a trust region in
probabilities, which unlike a bound on ratios does not reject rare tokens for changes that do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from skyrl_train.algorithms import kl
from skyrl_train.algorithms.registry import Registry
from skyrl_train.algorithms.tokens import PolicyTokens
from skyrl_train.config.schema.algorithm import RejectionConfig, RejectionLevel


class RejectionStatistic(Protocol):
    """Trained tokens to a number for each of them."""

    def __call__(self, tokens: PolicyTokens) -> torch.Tensor:
        """``[N]``, float64, without gradient. (``ratio`` returns its logarithm, and is compared with those of its bounds.)"""
        ...


REJECTION_STATISTICS: Registry[RejectionStatistic] = Registry(
    "trainer.algorithm.off_policy_correction.rejections.statistic"
)
LOGARITHMIC = "ratio"  # aggregated over a sequence as logarithms


@REJECTION_STATISTICS.register(LOGARITHMIC)
def log_ratio(tokens: PolicyTokens) -> torch.Tensor:
    """``log r``."""
    return tokens.proximal_logprobs.double() - tokens.behaviour_logprobs.double()


@REJECTION_STATISTICS.register("k1")
def k1(tokens: PolicyTokens) -> torch.Tensor:
    """``-log r``."""
    return kl.k1(tokens.behaviour_logprobs.double(), tokens.proximal_logprobs.double())


@REJECTION_STATISTICS.register("k2")
def k2(tokens: PolicyTokens) -> torch.Tensor:
    """``(log r)^2 / 2``."""
    return kl.k2(tokens.behaviour_logprobs.double(), tokens.proximal_logprobs.double())


@REJECTION_STATISTICS.register("k3")
def k3(tokens: PolicyTokens) -> torch.Tensor:
    """``r - 1 - log r``."""
    return kl.k3(tokens.behaviour_logprobs.double(), tokens.proximal_logprobs.double())


@REJECTION_STATISTICS.register("probability_difference")
def probability_difference(tokens: PolicyTokens) -> torch.Tensor:
    """``pi_theta - pi_behave`` of the sampled token: of the current policy, as it is a trust region for the update itself."""
    return tokens.logprobs.detach().double().exp() - tokens.behaviour_logprobs.double().exp()


def label(rule: RejectionConfig) -> str:
    """The name of a rule in metrics and messages."""
    return f"{rule.statistic}_{rule.level}"


def rejected_tokens(tokens: PolicyTokens, rule: RejectionConfig) -> torch.Tensor:
    """Which tokens the rule rejects, bool ``[N]``. A value that is no number is out of bounds."""
    values = REJECTION_STATISTICS.get(rule.statistic)(tokens)
    low, high = _bounds(rule)
    if rule.level is RejectionLevel.sequence_mean:
        values = tokens.per_token(tokens.sequence_mean(values))
    elif rule.level is RejectionLevel.sequence_sum:
        values = tokens.per_token(tokens.sequence_sum(values))
    outside = ~((values >= low) & (values <= high))
    if rule.level is RejectionLevel.sequence_max:
        outside = tokens.per_token(tokens.sequence_max(outside.double())) > 0
    if rule.away_only:
        moved = tokens.logprobs.detach().double() - tokens.behaviour_logprobs.double()
        outside = outside & (moved * tokens.advantages.double() > 0)
    return outside


def keeps_sequence(
    behaviour_logprobs: torch.Tensor, proximal_logprobs: torch.Tensor, rules: Sequence[RejectionConfig]
) -> bool:
    """Whether no rule about sequences rejects one of T >= 1 trained tokens, before its advantage is known.

    Args:
        behaviour_logprobs: ``[T]``.
        proximal_logprobs: ``[T]``, which stand for the current policy too.
    """
    index, zeros = torch.zeros(len(behaviour_logprobs), dtype=torch.int64), torch.zeros(len(behaviour_logprobs))
    tokens = PolicyTokens(proximal_logprobs, proximal_logprobs, behaviour_logprobs, zeros, index, 1)
    about_sequences = [rule for rule in rules if rule.level is not RejectionLevel.token]
    return not any(bool(rejected_tokens(tokens, rule).any()) for rule in about_sequences)


def _bounds(rule: RejectionConfig) -> tuple[float, float]:
    low = -math.inf if rule.low is None else rule.low
    high = math.inf if rule.high is None else rule.high
    if rule.statistic != LOGARITHMIC:
        return low, high
    return (math.log(low) if low > 0 else -math.inf), (math.log(high) if high > 0 else -math.inf)

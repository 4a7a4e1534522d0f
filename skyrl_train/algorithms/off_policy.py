"""Off-policy corrections: weights and rejections for tokens that another policy sampled, and metrics of the mismatch.

    proximal (step, arrival, interpolated) ──┬──weights: one for each token──────────┐
    behaviour ───────────────────────────────┼──rejections: which tokens may train───┼──> the loss
                                             └──metrics: off_policy/*                ┘

``r = pi_prox / pi_behave`` per token: the policy at the beginning of the step over the engine's distribution at sampling time.
It covers staleness and the numerical mismatch between engine and trainer.

Rejected tokens leave the numerator of the loss, never its denominator. A rejection rule is a statistic, a level and bounds; it
keeps everything within ``low <= value <= high`` (a bound of None is no bound). Bounds apply to the statistic as the table defines
it: to keep ratios in [0.5, 3], set ``statistic=ratio, low=0.5, high=3`` at any level.

| statistic | of a token | sequence_mean | sequence_sum | sequence_max |
|---|---|---|---|---|
| ratio | ``r`` | geometric mean of r | product of r | each token's r |
| k1 | ``-log r`` | mean | sum | each token's |
| k2 | ``(log r)^2 / 2`` | mean | sum | each token's |
| k3 | ``r - 1 - log r`` | mean | sum | each token's |
| probability_difference | ``pi_theta - pi_behave`` | mean | sum | each token's |

``sequence_max`` rejects a sequence if any of its tokens is out of bounds. k1, k2 and k3 estimate ``KL(behave || prox)``
(:mod:`skyrl_train.algorithms.kl`); k1 may be below 0.

With ``away_only``, a token that is out of bounds still trains if its update leads back: only tokens with
``A log(pi_theta / pi_behave) > 0`` are rejected. With ``probability_difference``, ``low=-d`` and ``high=d`` this is the mask of
DPPO (divergence PPO, the variant with the binary total variation; arXiv 2602.04879, compared with verl's ``dppo_tv``): a trust
region in probabilities, which unlike a bound on ratios does not reject rare tokens for negligible changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from skyrl_train.algorithms import kl
from skyrl_train.algorithms.registry import Registry
from skyrl_train.algorithms.tokens import (
    MinibatchTokens,
    PolicyTokens,
    bounded_exp,
    bounded_ratio,
    require_per_token,
)
from skyrl_train.config.schema import AlgorithmConfig, RejectionConfig, RejectionLevel
from skyrl_train.runtime.lazy_torch import torch

_SETTING = "trainer.algorithm.off_policy_correction"
REJECTED_TOKENS, REJECTED_SEQUENCES = "off_policy/rejected_tokens/", "off_policy/rejected_sequences/"
M2PO_THRESHOLD = "m2po_threshold"


class TokenWeights(NamedTuple):
    """The result of an off-policy correction; all ``[N]``, without gradient.

    Attributes:
        weights: of each token's loss.
        truncated: bool, whether the weight is smaller than the ratio, but not 0.
        rejected: bool, whether the token leaves the numerator of the loss; None: the correction rejects nothing.
    """

    weights: torch.Tensor
    truncated: torch.Tensor
    rejected: torch.Tensor | None = None


Correction: TypeAlias = Callable[[PolicyTokens, AlgorithmConfig], TokenWeights]
CORRECTIONS: Registry[Correction] = Registry(f"{_SETTING}.tis_ratio_type")
register_off_policy_correction = CORRECTIONS.register
"""Decorator ``@register_off_policy_correction("name")`` of a function of ``(tokens: PolicyTokens, config: AlgorithmConfig)``.

It returns :class:`TokenWeights`, the weight of each token's loss. It must depend on each sequence alone. ``config.kwargs`` has
your parameters.
"""

# Maps trained tokens to one number for each: ``[N]``, float64, without gradient.
RejectionStatistic: TypeAlias = Callable[[PolicyTokens], "torch.Tensor"]
REJECTION_STATISTICS: Registry[RejectionStatistic] = Registry(f"{_SETTING}.rejections.statistic")
register_rejection_statistic = REJECTION_STATISTICS.register
LOGARITHMIC = "ratio"  # returned and aggregated as logarithms, and compared with the logarithms of its bounds


class Corrected(NamedTuple):
    """Weights and rejections for the loss (``[N]`` each), and named sums and maxima for the metrics."""

    weights: torch.Tensor
    kept: torch.Tensor  # bool: the other tokens leave the numerator
    sums: dict[str, torch.Tensor]  # [N], or [R] for sequences
    maxima: dict[str, torch.Tensor]  # [N]


class OffPolicyCorrection:
    """Applies ``trainer.algorithm.off_policy_correction``: one kind of weight and any number of rejections.

    Raises:
        ConfigError: (constructor) an unknown name.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config
        self._settings = settings = config.off_policy_correction
        self._weight = CORRECTIONS.get(settings.tis_ratio_type) if settings.tis_ratio_type is not None else None
        for rule in settings.rejections:
            REJECTION_STATISTICS.get(rule.statistic)

    def __call__(self, tokens: PolicyTokens) -> Corrected:
        """Return the tokens' weights (1 without a correction), which of them train, and the inputs of
        :func:`mismatch_metrics`."""
        if self._weight is not None:
            weights, truncated, rejected_by_weight = self._weight(tokens, self._config)
            returned = {"weight": weights, "truncated": truncated, "rejected": rejected_by_weight}
            given = {name: values for name, values in returned.items() if values is not None}
            name = f"{_SETTING}.tis_ratio_type={self._settings.tis_ratio_type}"
            require_per_token(name, len(tokens.proximal_logprobs), given)
        else:
            weights, rejected_by_weight = torch.ones_like(tokens.proximal_logprobs), None
            truncated = torch.zeros_like(tokens.sequence_index, dtype=torch.bool)
        rejections = {
            f"{rule.statistic}_{rule.level}": rejected_tokens(tokens, rule) for rule in self._settings.rejections
        }
        if self._settings.m2po_threshold is not None:
            rejections["m2po"] = m2po_rejected(tokens)
        if rejected_by_weight is not None:
            rejections[str(self._settings.tis_ratio_type)] = rejected_by_weight
        # Rejections are joined here only, so that each rule's count is its own.
        kept = torch.ones_like(truncated)
        for rejected in rejections.values():
            kept = kept & ~rejected
        # float64: squares of large ratios are added up, and chi2 is a small difference of such sums.
        proximal, behaviour = tokens.proximal_logprobs.double(), tokens.behaviour_logprobs.double()
        ratio = bounded_ratio(proximal, behaviour)
        sums = {
            "ratio_to_behaviour": ratio,
            "squared_ratio_to_behaviour": ratio.square(),
            "truncated": truncated,
            "kl_k1": kl.k1(behaviour, proximal),
            "kl_k3": kl.k3(behaviour, proximal),
        }
        for name, rejected in {**rejections, "any": ~kept}.items():
            sums[REJECTED_TOKENS + name] = rejected
            # A sequence counts as rejected where none of its tokens is left.
            sums[REJECTED_SEQUENCES + name] = (tokens.sequence_mean(rejected.double()) == 1.0).double()
        return Corrected(weights, kept, sums, {"ratio_to_behaviour_max": ratio})


def mismatch_metrics(tokens: int, values: Mapping[str, float]) -> dict[str, float]:
    """Measure the distance between the trained and the sampling policy, over the ``tokens`` >= 1 trained tokens of a
    minibatch, rejected ones included.

    ``ratio_mean`` / ``ratio_max`` of ``r``; ``clipped_fraction``: share of tokens with a truncated weight; ``ess``: normalised
    effective sample size ``(sum r)^2 / (N sum r^2)`` in (0, 1] (Kong 1992), before truncation; ``chi2``: ``mean r^2 - 1``, an
    estimate of the chi-square divergence; ``kl_k1`` / ``kl_k3``: estimates of ``KL(behave || prox)``, the means of :func:`kl.k1`
    and :func:`kl.k3`; ``rejected_tokens/*`` and ``rejected_sequences/*``: counts by rule, and ``any`` of them.
    """
    total, squares = values["ratio_to_behaviour"], values["squared_ratio_to_behaviour"]
    return {
        "off_policy/ratio_mean": total / tokens,
        "off_policy/ratio_max": values["ratio_to_behaviour_max"],
        "off_policy/clipped_fraction": values["truncated"] / tokens,
        "off_policy/ess": total * total / (tokens * squares),
        "off_policy/chi2": squares / tokens - 1.0,
        "off_policy/kl_k1": values["kl_k1"] / tokens,
        "off_policy/kl_k3": values["kl_k3"] / tokens,
        **{name: value for name, value in values.items() if name.startswith((REJECTED_TOKENS, REJECTED_SEQUENCES))},
    }


# Weights --------------------------------------------------------------------------------------------------------------


@register_off_policy_correction("token")
def truncated_token_weights(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenWeights:
    """Token-level truncated importance sampling, ``w = min(r, C)`` with ``C = token_tis_ratio_clip_high`` (Ionides 2008;
    AReaL, arXiv 2505.24298)."""
    ratio = bounded_ratio(tokens.proximal_logprobs, tokens.behaviour_logprobs)
    cap = config.off_policy_correction.token_tis_ratio_clip_high
    return TokenWeights(ratio.clamp(max=cap), ratio > cap)


@register_off_policy_correction("sequence")
def truncated_sequence_weights(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenWeights:
    """Sequence-level truncated importance sampling, ``w = min(product of r over the sequence, C)`` with
    ``C = sequence_tis_ratio_clip_high``.

    The unbiased weight for an outcome reward; its spread grows with the length (1.1^100 = 13,780).
    """
    return _truncated_sequences(tokens, tokens.sequence_sum(log_ratio(tokens)), config)


@register_off_policy_correction("geometric")
def truncated_geometric_weights(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenWeights:
    """``w = min(geometric mean of r over the sequence, C)`` with ``C = sequence_tis_ratio_clip_high``: the sequence's weight
    normalised by length, as in GSPO (arXiv 2507.18071)."""
    return _truncated_sequences(tokens, tokens.sequence_mean(log_ratio(tokens)), config)


@register_off_policy_correction("icepop")
def icepop_weights(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenWeights:
    """``w = r`` where ``icepop_ratio_low <= r <= icepop_ratio_high``; elsewhere the token is rejected (IcePop, arXiv
    2510.18855)."""
    bounds = config.off_policy_correction
    ratio = bounded_ratio(tokens.proximal_logprobs, tokens.behaviour_logprobs)
    inside = (ratio >= bounds.icepop_ratio_low) & (ratio <= bounds.icepop_ratio_high)
    return TokenWeights(torch.where(inside, ratio, 0.0), torch.zeros_like(inside), ~inside)


def _truncated_sequences(tokens: PolicyTokens, log_weights: torch.Tensor, config: AlgorithmConfig) -> TokenWeights:
    ratio = tokens.per_token(bounded_exp(log_weights)).to(tokens.proximal_logprobs.dtype)
    cap = config.off_policy_correction.sequence_tis_ratio_clip_high
    return TokenWeights(ratio.clamp(max=cap), ratio > cap)


# Rejections -----------------------------------------------------------------------------------------------------------


@register_rejection_statistic(LOGARITHMIC)
def log_ratio(tokens: PolicyTokens) -> torch.Tensor:
    """``log r``."""
    return tokens.proximal_logprobs.double() - tokens.behaviour_logprobs.double()


@register_rejection_statistic("k1")
def k1(tokens: PolicyTokens) -> torch.Tensor:
    """``-log r``."""
    return kl.k1(tokens.behaviour_logprobs.double(), tokens.proximal_logprobs.double())


@register_rejection_statistic("k2")
def k2(tokens: PolicyTokens) -> torch.Tensor:
    """``(log r)^2 / 2``."""
    return kl.k2(tokens.behaviour_logprobs.double(), tokens.proximal_logprobs.double())


@register_rejection_statistic("k3")
def k3(tokens: PolicyTokens) -> torch.Tensor:
    """``r - 1 - log r``."""
    return kl.k3(tokens.behaviour_logprobs.double(), tokens.proximal_logprobs.double())


@register_rejection_statistic("probability_difference")
def probability_difference(tokens: PolicyTokens) -> torch.Tensor:
    """``pi_theta - pi_behave`` of the sampled token. ``pi_theta`` is the current policy: this is a trust region for the update
    itself."""
    return tokens.logprobs.detach().double().exp() - tokens.behaviour_logprobs.double().exp()


def rejected_tokens(tokens: PolicyTokens, rule: RejectionConfig) -> torch.Tensor:
    """Return which tokens the rule rejects, bool ``[N]``. NaN is out of bounds."""
    values = REJECTION_STATISTICS.get(rule.statistic)(tokens)
    require_per_token(f"{_SETTING}.rejections.statistic={rule.statistic}", len(tokens.logprobs), {"statistic": values})
    low = -math.inf if rule.low is None else rule.low
    high = math.inf if rule.high is None else rule.high
    if rule.statistic == LOGARITHMIC:
        low = math.log(low) if low > 0 else -math.inf
        high = math.log(high) if high > 0 else -math.inf
    if rule.level is RejectionLevel.sequence_mean:
        values = tokens.per_token(tokens.sequence_mean(values))
    elif rule.level is RejectionLevel.sequence_sum:
        values = tokens.per_token(tokens.sequence_sum(values))
    outside = ~((values >= low) & (values <= high))  # so that a comparison with NaN rejects
    if rule.level is RejectionLevel.sequence_max:
        outside = tokens.per_token(tokens.sequence_max(outside.double())) > 0
    if rule.away_only:
        moved = tokens.logprobs.detach().double() - tokens.behaviour_logprobs.double()
        outside = outside & (moved * tokens.advantages.double() > 0)
    return outside


def keeps_sequence(
    behaviour_logprobs: torch.Tensor, proximal_logprobs: torch.Tensor, rules: Sequence[RejectionConfig]
) -> bool:
    """Return whether the sequence-level rules keep a sequence of T >= 1 trained tokens whose advantage is not known yet.

    Args:
        behaviour_logprobs: ``[T]``.
        proximal_logprobs: ``[T]``, used for the current policy too.
    """
    # With advantages of 0, a rule with away_only would reject nothing: whether an update leads away is not known yet.
    index, zeros = torch.zeros(len(behaviour_logprobs), dtype=torch.int64), torch.zeros(len(behaviour_logprobs))
    tokens = PolicyTokens(proximal_logprobs, proximal_logprobs, behaviour_logprobs, zeros, index, 1)
    about_sequences = [rule for rule in rules if rule.level is not RejectionLevel.token]
    return not any(bool(rejected_tokens(tokens, rule).any()) for rule in about_sequences)


# M2PO -----------------------------------------------------------------------------------------------------------------


def m2po_statistics(tokens: MinibatchTokens, limit: float) -> dict[str, float]:
    """Return the largest second moment ``m = (log r)^2`` that M2PO keeps (arXiv 2510.01161); -1 where it keeps none.

    M2PO rejects as few tokens as needed to bound the mean second moment of a minibatch: the threshold is the largest one at
    which the tokens with ``m`` at or below it have a mean ``m`` of at most ``limit`` (the paper's tau, 0.04). Tokens with equal
    ``m`` stay or go together. All trained tokens take part, whichever sign their advantage has, as AReaL's description of M2PO
    says; the authors' released code counts and masks only tokens whose update leads further away (``A log r > 0``), and never
    within ratios of 0.7 to 1.5. ``r`` uses the policy at the beginning of the step, so that the selection is the same in all
    passes; the paper uses the current policy.
    """
    ordered = _second_moment(tokens).sort().values
    # The running mean of ascending numbers never falls, so the thresholds within the limit are the first ones.
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    last_of_equals = torch.ones_like(means, dtype=torch.bool)
    last_of_equals[:-1] = ordered[1:] > ordered[:-1]
    allowed = ordered[last_of_equals & (means <= limit)]
    return {M2PO_THRESHOLD: float(allowed[-1]) if len(allowed) else -1.0}


def m2po_rejected(tokens: PolicyTokens) -> torch.Tensor:
    """Return which tokens are above the minibatch's threshold, bool ``[N]``."""
    # NaN: without statistics of the minibatch, every token is rejected instead of trained without a bound.
    threshold = tokens.minibatch.get(M2PO_THRESHOLD, math.nan)
    return ~(_second_moment(tokens) <= threshold)


def _second_moment(tokens: PolicyTokens | MinibatchTokens) -> torch.Tensor:
    return (tokens.proximal_logprobs.double() - tokens.behaviour_logprobs.double()).square()


# Proximal policy ------------------------------------------------------------------------------------------------------


def interpolated_logprobs(
    behaviour_logprobs: torch.Tensor, step_logprobs: torch.Tensor, lags: torch.Tensor
) -> torch.Tensor:
    """A-3PO (arXiv 2512.06547): ``log pi_prox = log pi_b + a (log pi_theta - log pi_b)``, without an extra forward pass.

    ``a = clamp((v_prox - v_b) / (v_theta - v_b), 0, 1)``, where ``v_b`` is the version that sampled the token, ``v_theta`` the
    version at the beginning of the step, and ``v_prox = v_theta - 1``. So ``a = (lag - 1) / lag``: 0 (the behaviour policy) up
    to a lag of 1, then closer and closer to the current policy. The paper weights the behaviour policy with the same
    ``1 / lag``, and with 1 at a lag of 0. The result carries no gradient.

    Args:
        behaviour_logprobs: ``[N]``.
        step_logprobs: ``[N]``, under the policy at the beginning of the step.
        lags: int64 ``[N]``, ``v_theta - v_b``.
    """
    behaviour, of_step = behaviour_logprobs, step_logprobs.detach()
    share = ((lags - 1) / lags.clamp(min=1)).clamp(0, 1).to(of_step.dtype)
    return behaviour + share * (of_step - behaviour)

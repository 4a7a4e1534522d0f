"""The configured correction: one kind of weight, any number of rejections, and what both did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from skyrl_train.algorithms import kl
from skyrl_train.algorithms.off_policy import m2po
from skyrl_train.algorithms.off_policy.rejections import REJECTION_STATISTICS, label, rejected_tokens
from skyrl_train.algorithms.off_policy.weights import CORRECTIONS, TokenWeights
from skyrl_train.algorithms.statistics import TokenStatistics
from skyrl_train.algorithms.tokens import PolicyTokens, bounded_ratio
from skyrl_train.config.schema.algorithm import AlgorithmConfig

TOKENS, SEQUENCES = "off_policy/rejected_tokens/", "off_policy/rejected_sequences/"
ANY = "any"  # in place of a rule's name: by one rule or more


class Corrected(NamedTuple):
    """What the loss needs, ``[N]`` each, and what the metrics need."""

    weights: torch.Tensor
    kept: torch.Tensor  # bool: the other tokens leave the numerator
    statistics: TokenStatistics


class OffPolicyCorrection:
    """Weights and rejections as ``trainer.algorithm.off_policy_correction`` has them.

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
        """The tokens' weights, 1 without a correction, and which of them train."""
        weighted = self._weights(tokens)
        rejections = {label(rule): rejected_tokens(tokens, rule) for rule in self._settings.rejections}
        if self._settings.m2po_threshold is not None:
            rejections["m2po"] = m2po.m2po_rejected(tokens)
        if weighted.rejected is not None:
            rejections[str(self._settings.tis_ratio_type)] = weighted.rejected
        kept = torch.ones_like(weighted.truncated)
        for rejected in rejections.values():
            kept = kept & ~rejected
        statistics = mismatch_statistics(tokens, weighted.truncated)
        return Corrected(weighted.weights, kept, _counted(statistics, tokens, {**rejections, ANY: ~kept}))

    def _weights(self, tokens: PolicyTokens) -> TokenWeights:
        if self._weight is not None:
            return self._weight(tokens, self._config)
        none = torch.zeros_like(tokens.sequence_index, dtype=torch.bool)
        return TokenWeights(torch.ones_like(tokens.proximal_logprobs), none)


def _counted(
    statistics: TokenStatistics, tokens: PolicyTokens, rejections: Mapping[str, torch.Tensor]
) -> TokenStatistics:
    """With, by rule, the tokens that it rejects and the sequences of which it leaves nothing."""
    sums: dict[str, torch.Tensor] = {}
    for name, rejected in rejections.items():
        sums[TOKENS + name] = rejected
        sums[SEQUENCES + name] = (tokens.sequence_mean(rejected.double()) == 1.0).double()
    return statistics.with_sums(sums)


def mismatch_statistics(tokens: PolicyTokens, truncated: torch.Tensor) -> TokenStatistics:
    """What :func:`mismatch_metrics` needs.

    Args:
        truncated: bool ``[N]``, the tokens whose weight was cut.
    """
    proximal, behaviour = tokens.proximal_logprobs.double(), tokens.behaviour_logprobs.double()
    ratio = bounded_ratio(proximal, behaviour)
    return TokenStatistics.of(
        sums={
            "ratio_to_behaviour": ratio,
            "squared_ratio_to_behaviour": ratio.square(),
            "truncated": truncated,
            "kl_k1": kl.k1(behaviour, proximal),
            "kl_k3": kl.k3(behaviour, proximal),
        },
        maxima={"ratio_to_behaviour_max": ratio},
    )


def mismatch_metrics(tokens: int, values: Mapping[str, float]) -> dict[str, float]:
    """How far the policy that trains is from the one that sampled, over the ``tokens`` >= 1 trained tokens of a minibatch,
    rejected ones included.

    ``ratio_mean`` / ``ratio_max`` of ``r``; ``clipped_fraction``: share whose weight was cut; ``ess``: normalised effective
    sample size ``(sum r)^2 / (N sum r^2)`` in (0, 1] (Kong 1992), before truncation; ``chi2``: ``mean r^2 - 1``, an estimate
    of the chi-square divergence; ``kl_k1`` / ``kl_k3``: estimates of ``KL(behave || prox)``, the means of :func:`kl.k1` and
    :func:`kl.k3`; ``rejected_tokens/*`` and ``rejected_sequences/*``: how many each rule rejected, and ``any`` of them.
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
        **{name: value for name, value in values.items() if name.startswith((TOKENS, SEQUENCES))},
    }

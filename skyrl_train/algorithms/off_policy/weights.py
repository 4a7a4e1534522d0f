"""The weight of each token's loss: importance ratios, bounded in one way or another. Register your own in ``CORRECTIONS``."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from skyrl_train.algorithms.registry import Registry
from skyrl_train.algorithms.tokens import PolicyTokens, bounded_exp, bounded_ratio
from skyrl_train.config.schema.algorithm import AlgorithmConfig


class TokenWeights(NamedTuple):
    """All ``[N]``; nothing carries a gradient."""

    weights: torch.Tensor
    truncated: torch.Tensor  # bool: the weight is smaller than the ratio, but not 0
    rejected: torch.Tensor | None = None  # bool: the token leaves the numerator of the loss; None: no token ever does


class Correction(Protocol):
    """Trained tokens to the weight of each token's loss; a function of each sequence alone."""

    def __call__(self, tokens: PolicyTokens, config: AlgorithmConfig) -> TokenWeights:
        """``config.kwargs`` holds the parameters of a correction of one's own."""
        ...


CORRECTIONS: Registry[Correction] = Registry("trainer.algorithm.off_policy_correction.tis_ratio_type")


@CORRECTIONS.register("token")
def truncated_token_weights(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenWeights:
    """Token-level truncated importance sampling, ``w = min(r, C)`` with ``C = token_tis_ratio_clip_high`` (Ionides 2008;
    AReaL, arXiv 2505.24298)."""
    ratio = bounded_ratio(tokens.proximal_logprobs, tokens.behaviour_logprobs)
    return _truncated(ratio, config.off_policy_correction.token_tis_ratio_clip_high)


@CORRECTIONS.register("sequence")
def truncated_sequence_weights(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenWeights:
    """Sequence-level truncated importance sampling, ``w = min(product of r over the sequence, C)`` with
    ``C = sequence_tis_ratio_clip_high``.

    The weight without bias for an outcome reward; its spread grows with the length (1.1^100 = 13,780).
    """
    product = tokens.sequence_sum(tokens.proximal_logprobs.double() - tokens.behaviour_logprobs.double())
    return _of_sequences(tokens, product, config)


@CORRECTIONS.register("geometric")
def truncated_geometric_weights(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenWeights:
    """``w = min(geometric mean of r over the sequence, C)`` with ``C = sequence_tis_ratio_clip_high``: the sequence's weight
    with the length taken out, as in GSPO (arXiv 2507.18071)."""
    mean = tokens.sequence_mean(tokens.proximal_logprobs.double() - tokens.behaviour_logprobs.double())
    return _of_sequences(tokens, mean, config)


@CORRECTIONS.register("icepop")
def icepop_weights(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenWeights:
    """``w = r`` where ``icepop_ratio_low <= r <= icepop_ratio_high``; elsewhere the token is rejected (IcePop, arXiv
    2510.18855)."""
    bounds = config.off_policy_correction
    ratio = bounded_ratio(tokens.proximal_logprobs, tokens.behaviour_logprobs)
    inside = (ratio >= bounds.icepop_ratio_low) & (ratio <= bounds.icepop_ratio_high)
    return TokenWeights(torch.where(inside, ratio, 0.0), torch.zeros_like(inside), ~inside)


def _of_sequences(tokens: PolicyTokens, log_ratio: torch.Tensor, config: AlgorithmConfig) -> TokenWeights:
    ratio = tokens.per_token(bounded_exp(log_ratio)).to(tokens.proximal_logprobs.dtype)
    return _truncated(ratio, config.off_policy_correction.sequence_tis_ratio_clip_high)


def _truncated(ratio: torch.Tensor, cap: float) -> TokenWeights:
    return TokenWeights(ratio.clamp(max=cap), ratio > cap)

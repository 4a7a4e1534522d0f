"""Policy losses: one value per token, before any reduction or off-policy weight."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from skyrl_train.algorithms.registry import Registry

MAX_LOG_RATIO = 20.0  # exp stays finite in float32; a ratio this far from 1 carries no usable gradient


class TokenLosses(NamedTuple):
    """All ``[N]``: the loss of each token, the ratio that entered it, and whether clipping decided its value."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor


class PolicyLoss(Protocol):
    """Log-probs and advantages of N trained tokens to a loss for each of them."""

    def __call__(
        self,
        logprobs: torch.Tensor,
        proximal_logprobs: torch.Tensor,
        advantages: torch.Tensor,
        *,
        eps_clip_low: float,
        eps_clip_high: float,
    ) -> TokenLosses:
        """All tensors are ``[N]``; gradients flow through ``logprobs`` alone."""
        ...


POLICY_LOSSES: Registry[PolicyLoss] = Registry("trainer.algorithm.policy_loss_type")


def bounded_ratio(log_numerator: torch.Tensor, log_denominator: torch.Tensor) -> torch.Tensor:
    """``exp(log_numerator - log_denominator)``, the exponent clamped to ``±MAX_LOG_RATIO``."""
    return (log_numerator - log_denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@POLICY_LOSSES.register("ppo_clip")
def ppo_clip(
    logprobs: torch.Tensor,
    proximal_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    eps_clip_low: float,
    eps_clip_high: float,
) -> TokenLosses:
    """``-min(u A, clip(u, 1 - eps_low, 1 + eps_high) A)`` with ``u = pi_theta / pi_prox``.

    PPO (arXiv 1707.06347) with the two bounds apart (DAPO, arXiv 2503.14476), around the proximal policy rather than
    the behaviour policy (decoupled PPO, arXiv 2110.00641; AReaL, arXiv 2505.24298).
    """
    ratio = bounded_ratio(logprobs, proximal_logprobs.detach())
    unclipped = ratio * advantages
    bounded = ratio.clamp(1.0 - eps_clip_low, 1.0 + eps_clip_high) * advantages
    return TokenLosses(-torch.minimum(unclipped, bounded), ratio.detach(), (bounded < unclipped).detach())

"""Policy losses: one value per token, before any reduction or off-policy weight.

``u = pi_theta / pi_prox`` throughout, ``A`` the advantage. Around the proximal policy rather than the behaviour policy,
as decoupled PPO does (arXiv 2110.00641; AReaL, arXiv 2505.24298). While a step trains in one pass and the proximal
policy is the one that the step begins with, ``u`` is 1 and no bound is ever met.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from skyrl_train.algorithms.registry import Registry
from skyrl_train.algorithms.tokens import PolicyTokens, bounded_exp, bounded_ratio
from skyrl_train.config.derive import clip_bounds
from skyrl_train.config.schema.algorithm import AlgorithmConfig


class TokenLosses(NamedTuple):
    """All ``[N]``: the loss of each token, the ratio that entered it, and whether a bound decided its gradient."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor


class PolicyLoss(Protocol):
    """Trained tokens to a loss for each of them; a function of each sequence alone, and of ``tokens.minibatch``."""

    def __call__(self, tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
        """``config.kwargs`` holds the parameters of a loss of one's own."""
        ...


POLICY_LOSSES: Registry[PolicyLoss] = Registry("trainer.algorithm.policy_loss_type")


@POLICY_LOSSES.register("ppo_clip")
def ppo_clip(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """``-min(u A, clip(u, 1 - eps_low, 1 + eps_high) A)``.

    PPO (arXiv 1707.06347); with ``eps_high > eps_low`` it is clip-higher (DAPO, arXiv 2503.14476).
    """
    return _clipped_surrogate(bounded_ratio(tokens.logprobs, tokens.proximal_logprobs), tokens.advantages, config)


@POLICY_LOSSES.register("dual_clip")
def dual_clip(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """PPO clip, and where ``A < 0`` at most ``-c A`` with ``c = clip_ratio_c > 1`` (arXiv 1912.09729).

    Keeps a token with a negative advantage and a huge ratio from ruling the step.
    """
    once = ppo_clip(tokens, config)
    most = -config.clip_ratio_c * tokens.advantages
    bounded = (tokens.advantages < 0) & (once.loss > most)
    return TokenLosses(torch.where(bounded, most, once.loss), once.ratio, once.clipped | bounded.detach())


@POLICY_LOSSES.register("gspo")
def gspo(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """PPO clip on the length-normalised ratio of the sequence, ``s = exp(mean over its tokens of log u)``.

    GSPO in its token form (arXiv 2507.18071, section 4.3): ``s_t = sg(s) pi_theta / sg(pi_theta)``, whose values and, where
    all tokens of a sequence have the same advantage and weight, gradients are those of the sequence form. Bounds are of
    the order of 1e-4 (by default the paper's, 3e-4 and 4e-4); the reduction that belongs to it is ``sequence_mean``.
    """
    log_ratio = tokens.logprobs.detach() - tokens.proximal_logprobs
    of_sequence = tokens.per_token(tokens.sequence_mean(log_ratio))
    ratio = bounded_exp(of_sequence + tokens.logprobs - tokens.logprobs.detach())
    return _clipped_surrogate(ratio, tokens.advantages, config)


@POLICY_LOSSES.register("cispo")
def cispo(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """``-sg(clip(u, 1 - eps_low, 1 + eps_high)) A log pi_theta`` with bounds of its own (MiniMax-M1, arXiv 2506.13585).

    The weight is clipped and every token keeps its gradient.
    """
    ratio = bounded_ratio(tokens.logprobs, tokens.proximal_logprobs).detach()
    bounds = config.cispo
    weight = ratio.clamp(1.0 - bounds.cispo_eps_clip_low, 1.0 + bounds.cispo_eps_clip_high)
    return TokenLosses(-weight * tokens.advantages * tokens.logprobs, ratio, weight != ratio)


@POLICY_LOSSES.register("sapo")
def sapo(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """``-(4 / tau) sigmoid(tau (u - 1)) A`` with ``tau_pos`` where ``A > 0``, else ``tau_neg`` (SAPO, arXiv 2511.20347;
    formula and defaults compared with TRL's). The reduction that belongs to it is ``sequence_mean``.

    A smooth gate in place of a bound: the gradient at ``u = 1`` is that of PPO and fades away from it. Nothing is clipped.
    """
    ratio = bounded_ratio(tokens.logprobs, tokens.proximal_logprobs)
    positive = tokens.advantages > 0
    tau = torch.where(positive, ratio.new_tensor(config.sapo.tau_pos), ratio.new_tensor(config.sapo.tau_neg))
    gate = torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)
    return TokenLosses(-gate * tokens.advantages, ratio.detach(), torch.zeros_like(positive))


@POLICY_LOSSES.register("importance_sampling")
def importance_sampling(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """``-u A``: the policy gradient without a bound, for corrections that set the bounds themselves (DPPO, M2PO)."""
    ratio = bounded_ratio(tokens.logprobs, tokens.proximal_logprobs)
    return TokenLosses(-ratio * tokens.advantages, ratio.detach(), torch.zeros_like(ratio, dtype=torch.bool))


def _clipped_surrogate(ratio: torch.Tensor, advantages: torch.Tensor, config: AlgorithmConfig) -> TokenLosses:
    unclipped, (low, high) = ratio * advantages, clip_bounds(config)
    bounded = ratio.clamp(1.0 - low, 1.0 + high) * advantages
    return TokenLosses(-torch.minimum(unclipped, bounded), ratio.detach(), (bounded < unclipped).detach())

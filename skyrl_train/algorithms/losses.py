"""Losses: one value per token, before any reduction or off-policy weight.

Policy losses use ``u = pi_theta / pi_prox`` and the advantage ``A``. The ratio is taken to the proximal policy instead of the
behaviour policy, as in decoupled PPO (arXiv 2110.00641; AReaL, arXiv 2505.24298). While a step trains in one pass and the
proximal policy is the policy at the beginning of the step, ``u`` is 1 and no bound is ever reached.

clip-cov and kl-cov (arXiv 2505.22617) counter the collapse of entropy. Both select tokens whose log-prob and advantage vary
together the most over the minibatch: ``cov = (log pi_prox - mean) (A - mean)``, with means over all its trained tokens. The paper
uses the current policy; we use the proximal one. Both agree in the first pass, and the proximal policy keeps the selection the
same in all passes, micro-batches and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from skyrl_train.algorithms.registry import Registry
from skyrl_train.algorithms.tokens import (
    MinibatchTokens,
    PolicyTokens,
    TokenStatistics,
    bounded_exp,
    bounded_ratio,
    register_minibatch_statistics,
)
from skyrl_train.config.derive import clip_bounds
from skyrl_train.config.schema import AlgorithmConfig, ClipCovConfig
from skyrl_train.runtime.lazy_torch import torch

COVARIANCE_MEANS = ("mean_logprob", "mean_advantage")


class TokenLosses(NamedTuple):
    """The result of a policy loss; all ``[N]``.

    Attributes:
        loss: of each token, with gradient.
        ratio: the ratio in it, without gradient.
        clipped: bool, whether a bound decided the gradient.
    """

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor


PolicyLoss: TypeAlias = Callable[[PolicyTokens, AlgorithmConfig], TokenLosses]
POLICY_LOSSES: Registry[PolicyLoss] = Registry("trainer.algorithm.policy_loss_type")
register_policy_loss = POLICY_LOSSES.register
"""Decorator ``@register_policy_loss("name")`` of a function of ``(tokens: PolicyTokens, config: AlgorithmConfig)``.

It returns :class:`TokenLosses`, one value per token. It must depend on each sequence alone, and on ``tokens.minibatch``.
``config.kwargs`` has your parameters.
"""


@register_policy_loss("ppo_clip")
def ppo_clip(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """``-min(u A, clip(u, 1 - eps_low, 1 + eps_high) A)``.

    PPO (arXiv 1707.06347); with ``eps_high > eps_low`` it is clip-higher (DAPO, arXiv 2503.14476).
    """
    return _clipped_surrogate(bounded_ratio(tokens.logprobs, tokens.proximal_logprobs), tokens.advantages, config)


@register_policy_loss("dual_clip")
def dual_clip(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """PPO clip, and where ``A < 0`` at most ``-c A`` with ``c = clip_ratio_c > 1`` (arXiv 1912.09729).

    Prevents a token with a negative advantage and a huge ratio from dominating the step.
    """
    once = ppo_clip(tokens, config)
    most = -config.clip_ratio_c * tokens.advantages
    bounded = (tokens.advantages < 0) & (once.loss > most)
    return TokenLosses(torch.where(bounded, most, once.loss), once.ratio, once.clipped | bounded.detach())


@register_policy_loss("gspo")
def gspo(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """PPO clip on the length-normalised ratio of the sequence, ``s = exp(mean over its tokens of log u)``.

    GSPO in its token form (arXiv 2507.18071, section 4.3): ``s_t = sg(s) pi_theta / sg(pi_theta)``. It has the values of the
    sequence form, and also its gradients where all tokens of a sequence have the same advantage and weight. Bounds are of the
    order of 1e-4 (by default the paper's, 3e-4 and 4e-4). Use it with the reduction ``sequence_mean``.
    """
    log_ratio = tokens.logprobs.detach() - tokens.proximal_logprobs
    of_sequence = tokens.per_token(tokens.sequence_mean(log_ratio))
    # The last two terms add 0 to the value, and give the token the gradient of its own log-prob.
    ratio = bounded_exp(of_sequence + tokens.logprobs - tokens.logprobs.detach())
    return _clipped_surrogate(ratio, tokens.advantages, config)


@register_policy_loss("cispo")
def cispo(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """``-sg(clip(u, 1 - eps_low, 1 + eps_high)) A log pi_theta``, with separate bounds (MiniMax-M1, arXiv 2506.13585).

    The weight is clipped and every token keeps its gradient.
    """
    ratio = bounded_ratio(tokens.logprobs, tokens.proximal_logprobs).detach()
    bounds = config.cispo
    # The gradient flows through log pi_theta alone, so a clipped token still learns.
    weight = ratio.clamp(1.0 - bounds.cispo_eps_clip_low, 1.0 + bounds.cispo_eps_clip_high)
    return TokenLosses(-weight * tokens.advantages * tokens.logprobs, ratio, weight != ratio)


@register_policy_loss("sapo")
def sapo(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """``-(4 / tau) sigmoid(tau (u - 1)) A`` with ``tau_pos`` where ``A > 0``, else ``tau_neg`` (SAPO, arXiv 2511.20347;
    formula and defaults compared with TRL's). Use it with the reduction ``sequence_mean``.

    A smooth gate replaces the bound: the gradient at ``u = 1`` equals PPO's and fades away from it. Nothing is clipped.
    """
    ratio = bounded_ratio(tokens.logprobs, tokens.proximal_logprobs)
    positive = tokens.advantages > 0
    # 4 / tau cancels the slope of the sigmoid at u = 1, which is tau / 4.
    tau = torch.where(positive, ratio.new_tensor(config.sapo.tau_pos), ratio.new_tensor(config.sapo.tau_neg))
    gate = torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)
    return TokenLosses(-gate * tokens.advantages, ratio.detach(), torch.zeros_like(positive))


@register_policy_loss("importance_sampling")
def importance_sampling(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """``-u A``: the policy gradient without a bound, for corrections that set the bounds themselves (DPPO, M2PO)."""
    ratio = bounded_ratio(tokens.logprobs, tokens.proximal_logprobs)
    return TokenLosses(-ratio * tokens.advantages, ratio.detach(), torch.zeros_like(ratio, dtype=torch.bool))


@register_policy_loss("clip_cov")
def clip_cov(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """PPO clip without some tokens of high covariance: a share ``clip_ratio`` of all tokens, drawn among the tokens with
    ``clip_cov_lb <= cov <= clip_cov_ub``. They count as clipped. Scope: minibatch.

    The draw is a hash of the token's data, so it is the same wherever the token is trained.
    """
    covariance = _covariance(tokens, *(tokens.minibatch[name] for name in COVARIANCE_MEANS))
    chosen = _within(covariance, config.clip_cov) & (token_draws(tokens) < tokens.minibatch["clip_cov_chance"])
    rest = ppo_clip(tokens, config)
    return TokenLosses(torch.where(chosen, 0.0, rest.loss), rest.ratio, rest.clipped | chosen)


@register_minibatch_statistics("clip_cov")
def clip_cov_statistics(tokens: MinibatchTokens, config: AlgorithmConfig) -> dict[str, float]:
    """The two means, and the probability of choosing a token whose covariance is within the bounds: on average
    ``clip_ratio`` of all tokens are chosen, or all candidates where there are fewer."""
    means = _covariance_means(tokens)
    covariance = _covariance(tokens, *means.values())
    candidates = int(_within(covariance, config.clip_cov).sum())
    chance = min(1.0, config.clip_cov.clip_ratio * len(covariance) / candidates) if candidates else 0.0
    return {**means, "clip_cov_chance": chance}


@register_policy_loss("kl_cov")
def kl_cov(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """``-u A``, and ``+ ppo_kl_coef |log u|`` for the share ``kl_cov_frac`` of all tokens with the highest covariance (ties
    with the last of them included). Scope: minibatch.

    ``|log u|`` has no gradient at ``u = 1``: without a second pass or an older proximal policy it has no effect.
    """
    covariance = _covariance(tokens, *(tokens.minibatch[name] for name in COVARIANCE_MEANS))
    chosen = covariance >= tokens.minibatch["kl_cov_threshold"]
    rest = importance_sampling(tokens, config)
    penalty = config.kl_cov.ppo_kl_coef * (tokens.logprobs - tokens.proximal_logprobs).abs()
    return TokenLosses(torch.where(chosen, rest.loss + penalty, rest.loss), rest.ratio, chosen)


@register_minibatch_statistics("kl_cov")
def kl_cov_statistics(tokens: MinibatchTokens, config: AlgorithmConfig) -> dict[str, float]:
    """The two means, and the ``ceil(kl_cov_frac N)``-th largest covariance."""
    means = _covariance_means(tokens)
    covariance = _covariance(tokens, *means.values())
    count = math.ceil(config.kl_cov.kl_cov_frac * len(covariance))
    # An infinite threshold is above every covariance: with kl_cov_frac=0, no token is chosen.
    threshold = float(covariance.topk(count).values[-1]) if count else math.inf
    return {**means, "kl_cov_threshold": threshold}


def token_draws(tokens: PolicyTokens) -> torch.Tensor:
    """Return an evenly spread number in [0, 1) for each token, float64 ``[N]``: a hash of the token's behaviour log-prob, its
    advantage and its position among the trained tokens of its sequence."""
    count = len(tokens.sequence_index)
    place = torch.arange(count, device=tokens.sequence_index.device)
    first = torch.full((tokens.num_sequences,), count, device=place.device)
    first = first.scatter_reduce(0, tokens.sequence_index, place, "amin")
    state = place - tokens.per_token(first)
    for values in (tokens.behaviour_logprobs, tokens.advantages):
        state = state ^ values.float().contiguous().view(torch.int32).long()
        # The finalizer of SplitMix64, with logical shifts: a bijection of 64-bit integers that spreads every bit.
        for shift, multiplier in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
            state = (state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))) * multiplier
        state = state ^ ((state >> 31) & ((1 << 33) - 1))
    return (state & ((1 << 53) - 1)).double() / (1 << 53)


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Critic loss ``max((V - R)^2, (clamp(V, V_old - clip, V_old + clip) - R)^2) / 2`` of each token, as PPO is implemented
    (arXiv 2005.12729, section 3): moving a value by more than ``clip`` gains nothing.

    Args:
        values: ``[N]``, with gradient; all others without.
        old_values: ``[N]``, the values that the advantages were computed with.
        clip: None for the plain squared error.

    Returns:
        The losses ``[N]``, and which of them have no gradient because of the bound (bool ``[N]``).
    """
    plain = (values - returns).square()
    if clip is None:
        return plain / 2, torch.zeros_like(plain, dtype=torch.bool)
    bounded = (torch.clamp(values, old_values - clip, old_values + clip) - returns).square()
    return torch.maximum(plain, bounded) / 2, bounded.detach() > plain.detach()


def value_statistics(
    losses: torch.Tensor, clipped: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor
) -> TokenStatistics:
    """Return the statistics of N tokens that :func:`value_metrics` needs; arguments as for :func:`value_loss`."""
    wide, error = returns.double(), returns.double() - old_values.double()
    return TokenStatistics.of(
        len(losses),
        {
            "value_loss": losses,
            "clipped": clipped,
            "value": old_values,
            "return": wide,
            "return_squared": wide.square(),
            "error": error,
            "error_squared": error.square(),
        },
    )


def value_metrics(statistics: TokenStatistics, scale: float) -> dict[str, float]:
    """Return scalars over all tokens of one step; without tokens only a loss of 0.

    ``critic/explained_variance`` is ``1 - Var(R - V_old) / Var(R)``: 1 where the values that the advantages were computed
    with equal the returns, 0 where a constant would be as good, and 0 where all returns are equal.

    Args:
        scale: of the loss, from all sequences of the step.
    """
    tokens, sums = statistics.tokens, statistics.values()
    if not tokens:
        return {"loss/value": 0.0}
    of_returns = _variance(sums["return"], sums["return_squared"], tokens)
    of_errors = _variance(sums["error"], sums["error_squared"], tokens)
    return {
        "loss/value": scale * sums["value_loss"],
        "critic/clip_fraction": sums["clipped"] / tokens,
        "critic/explained_variance": 1.0 - of_errors / of_returns if of_returns > 0 else 0.0,
        "critic/value_mean": sums["value"] / tokens,
        "critic/return_mean": sums["return"] / tokens,
    }


def _clipped_surrogate(ratio: torch.Tensor, advantages: torch.Tensor, config: AlgorithmConfig) -> TokenLosses:
    unclipped, (low, high) = ratio * advantages, clip_bounds(config)
    bounded = ratio.clamp(1.0 - low, 1.0 + high) * advantages
    return TokenLosses(-torch.minimum(unclipped, bounded), ratio.detach(), (bounded < unclipped).detach())


def _covariance(tokens: PolicyTokens | MinibatchTokens, mean_logprob: float, mean_advantage: float) -> torch.Tensor:
    """Return ``(log pi_prox - mean_logprob) (A - mean_advantage)``, float64 ``[N]``."""
    # Products and differences only: every micro-batch computes the same bits.
    return (tokens.proximal_logprobs.double() - mean_logprob) * (tokens.advantages.double() - mean_advantage)


def _covariance_means(tokens: MinibatchTokens) -> dict[str, float]:
    # Correctly rounded sums do not depend on the order of the tokens.
    values = (tokens.proximal_logprobs, tokens.advantages)
    return {name: math.fsum(of.double().tolist()) / len(of) for name, of in zip(COVARIANCE_MEANS, values, strict=True)}


def _within(covariance: torch.Tensor, bounds: ClipCovConfig) -> torch.Tensor:
    return (covariance >= bounds.clip_cov_lb) & (covariance <= bounds.clip_cov_ub)


def _variance(total: float, squares: float, count: int) -> float:
    mean = total / count
    variance = squares / count - mean * mean
    rounding = 1e-12 * squares / count  # of float64 sums: the remainder of equal numbers is no variance
    return variance if variance > rounding else 0.0

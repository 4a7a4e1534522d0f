"""Losses against the collapse of entropy: clip-cov and kl-cov (arXiv 2505.22617).

Both single out tokens whose log-prob and advantage vary together the most over the minibatch:
``cov = (log pi_prox - mean) (A - mean)``, the means over all its trained tokens. Under the proximal policy, as the step
begins, where the paper has the current one: both are the same in the first pass, and it keeps the choice one and the same
in all passes, micro-batches and ranks.
"""

from __future__ import annotations

import math

import torch

from skyrl_train.algorithms.losses import POLICY_LOSSES, TokenLosses, importance_sampling, ppo_clip
from skyrl_train.algorithms.minibatch import MINIBATCH_FACTS, MinibatchTokens, centred_covariance
from skyrl_train.algorithms.tokens import PolicyTokens
from skyrl_train.config.schema.algorithm import AlgorithmConfig

MEANS = ("mean_logprob", "mean_advantage")


@MINIBATCH_FACTS.register("clip_cov")
def clip_cov_facts(tokens: MinibatchTokens, config: AlgorithmConfig) -> dict[str, float]:
    """The two means, and the chance with which a token whose covariance is within the bounds is chosen: so that
    ``clip_ratio`` of all tokens are chosen on average, or all candidates where there are fewer."""
    means = _means(tokens)
    covariance = centred_covariance(tokens, *means.values())
    candidates = int(_within(covariance, config).sum())
    chance = min(1.0, config.clip_cov.clip_ratio * len(covariance) / candidates) if candidates else 0.0
    return {**means, "clip_cov_chance": chance}


@POLICY_LOSSES.register("clip_cov")
def clip_cov(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """PPO clip, from which some tokens of high covariance are left out: a share ``clip_ratio`` of all, drawn among those
    with ``clip_cov_lb <= cov <= clip_cov_ub``. They count as clipped. Scope: minibatch.

    The draw is a hash of the token's own data, the same wherever it is trained.
    """
    covariance = centred_covariance(tokens, *(tokens.minibatch[name] for name in MEANS))
    chosen = _within(covariance, config) & (token_draws(tokens) < tokens.minibatch["clip_cov_chance"])
    rest = ppo_clip(tokens, config)
    return TokenLosses(torch.where(chosen, 0.0, rest.loss), rest.ratio, rest.clipped | chosen)


@MINIBATCH_FACTS.register("kl_cov")
def kl_cov_facts(tokens: MinibatchTokens, config: AlgorithmConfig) -> dict[str, float]:
    """The two means, and the ``ceil(kl_cov_frac N)``-th largest covariance."""
    means = _means(tokens)
    covariance = centred_covariance(tokens, *means.values())
    count = math.ceil(config.kl_cov.kl_cov_frac * len(covariance))
    threshold = float(covariance.topk(count).values[-1]) if count else math.inf
    return {**means, "kl_cov_threshold": threshold}


@POLICY_LOSSES.register("kl_cov")
def kl_cov(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """``-u A``, and ``+ ppo_kl_coef |log u|`` for the share ``kl_cov_frac`` of all tokens with the highest covariance (with
    those that have the same one as the last of them). Scope: minibatch.

    ``|log u|`` has no gradient at ``u = 1``: without a second pass or an older proximal policy it does nothing.
    """
    covariance = centred_covariance(tokens, *(tokens.minibatch[name] for name in MEANS))
    chosen = covariance >= tokens.minibatch["kl_cov_threshold"]
    rest = importance_sampling(tokens, config)
    penalty = config.kl_cov.ppo_kl_coef * (tokens.logprobs - tokens.proximal_logprobs).abs()
    return TokenLosses(torch.where(chosen, rest.loss + penalty, rest.loss), rest.ratio, chosen)


def token_draws(tokens: PolicyTokens) -> torch.Tensor:
    """A number in [0, 1) for each token, float64 ``[N]``, spread evenly: a hash of the token's behaviour log-prob, its
    advantage and its place among the trained tokens of its sequence."""
    count = len(tokens.sequence_index)
    place = torch.arange(count, device=tokens.sequence_index.device)
    first = torch.full((tokens.num_sequences,), count, device=place.device)
    first = first.scatter_reduce(0, tokens.sequence_index, place, "amin")
    state = place - tokens.per_token(first)
    for values in (tokens.behaviour_logprobs, tokens.advantages):
        state = _mixed(state ^ values.float().contiguous().view(torch.int32).long())
    return (state & ((1 << 53) - 1)).double() / (1 << 53)


def _mixed(state: torch.Tensor) -> torch.Tensor:
    """A bijection of 64-bit integers that spreads every bit (the finalizer of SplitMix64, with logical shifts)."""
    for shift, multiplier in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        state = (state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))) * multiplier
    return state ^ ((state >> 31) & ((1 << 33) - 1))


def _means(tokens: MinibatchTokens) -> dict[str, float]:
    """Correctly rounded, so that they do not depend on the order of the tokens."""
    values = (tokens.proximal_logprobs, tokens.advantages)
    return {name: math.fsum(of.double().tolist()) / len(of) for name, of in zip(MEANS, values, strict=True)}


def _within(covariance: torch.Tensor, config: AlgorithmConfig) -> torch.Tensor:
    return (covariance >= config.clip_cov.clip_cov_lb) & (covariance <= config.clip_cov.clip_cov_ub)

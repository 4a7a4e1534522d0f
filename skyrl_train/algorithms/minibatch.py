"""Facts about all trained tokens of a minibatch, for the few rules that look further than one sequence.

    proximal log-probs of the whole minibatch ──MINIBATCH_FACTS──> numbers ──> PolicyTokens.minibatch of every micro-batch

A rule of this scope is a function of its own token and of these numbers. They are functions of all trained tokens of the
step in any order, taken before the policy moves, so that no micro-batch and no rank changes what they say. They need the
whole minibatch at once, which a step that trains part by part does not have.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from skyrl_train.algorithms.registry import Registry
from skyrl_train.algorithms.tokens import PolicyTokens
from skyrl_train.config.schema.algorithm import AlgorithmConfig


class MinibatchTokens(NamedTuple):
    """All trained tokens of a minibatch, in any order; each ``[N]``."""

    proximal_logprobs: torch.Tensor
    behaviour_logprobs: torch.Tensor
    advantages: torch.Tensor


class MinibatchFacts(Protocol):
    """All trained tokens of a minibatch, N of them, to a few numbers; independent of their order."""

    def __call__(self, tokens: MinibatchTokens, config: AlgorithmConfig) -> dict[str, float]:
        """N is at least 1."""
        ...


# By the name of the policy loss that needs them.
MINIBATCH_FACTS: Registry[MinibatchFacts] = Registry("trainer.algorithm.policy_loss_type")


def centred_covariance(
    tokens: PolicyTokens | MinibatchTokens, mean_logprob: float, mean_advantage: float
) -> torch.Tensor:
    """``(log pi_prox - its mean) (A - its mean)``, float64 ``[N]``: each token's part of their covariance.

    Products and differences only, which are the same in every micro-batch to the last bit.
    """
    return (tokens.proximal_logprobs.double() - mean_logprob) * (tokens.advantages.double() - mean_advantage)

"""M2PO: rejects as few tokens as bound the second moment of the log-ratios over a minibatch (arXiv 2510.01161)."""

from __future__ import annotations

import math

import torch

from skyrl_train.algorithms.minibatch import MinibatchTokens
from skyrl_train.algorithms.tokens import PolicyTokens

FACT = "m2po_threshold"


def m2po_facts(tokens: MinibatchTokens, limit: float) -> dict[str, float]:
    """The largest ``m = (log r)^2`` that is kept; -1 where none is.

    Of all thresholds, it is the largest at which the tokens with ``m`` at most that have a mean ``m`` of at most ``limit``
    (the paper's tau, 0.04). Tokens with the same ``m`` stay or go together. All trained tokens take part, whatever the sign
    of their advantage.
    """
    ordered = _second_moment(tokens).sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    last_of_equals = torch.ones_like(means, dtype=torch.bool)
    last_of_equals[:-1] = ordered[1:] > ordered[:-1]
    allowed = ordered[last_of_equals & (means <= limit)]
    return {FACT: float(allowed[-1]) if len(allowed) else -1.0}


def m2po_rejected(tokens: PolicyTokens) -> torch.Tensor:
    """Which tokens are above the minibatch's threshold, bool ``[N]``."""
    threshold = tokens.minibatch.get(FACT, math.nan)
    return ~(_second_moment(tokens) <= threshold)


def _second_moment(tokens: PolicyTokens | MinibatchTokens) -> torch.Tensor:
    return (tokens.proximal_logprobs.double() - tokens.behaviour_logprobs.double()).square()

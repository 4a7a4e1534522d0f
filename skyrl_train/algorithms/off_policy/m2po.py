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
    of their advantage, as AReaL's description of M2PO has it; the authors' released code counts and masks only tokens whose
    update leads further away (``A log r > 0``), and never within ratios of 0.7 to 1.5. ``r`` is that of the policy as the
    step begins, so that the choice is the same in all passes; the paper's is that of the current one.
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

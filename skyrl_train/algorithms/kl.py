"""Estimators of ``KL(p || q)`` from tokens that were sampled from ``p``: one value per token, before any reduction.

With ``r = q(x) / p(x)`` (Schulman, "Approximating KL Divergence", 2020, http://joschu.net/blog/kl-approx.html):

| name | value | unbiased | gradient in expectation, where ``p`` is the policy and ``q`` is fixed |
|---|---|---|---|
| k1 | ``-log r`` | yes | 0: as a loss it teaches nothing |
| k2 | ``(log r)^2 / 2`` | no | that of ``KL(p || q)`` |
| k3 | ``(r - 1) - log r`` | yes, and never below 0 | that of ``KL(q || p)`` |

The last column follows from ``E[f(x) grad log p(x)]`` with ``f = 1``, ``-log r`` and ``1 - r``.
"""

from __future__ import annotations

from typing import Protocol

import torch

from skyrl_train.algorithms.registry import Registry
from skyrl_train.algorithms.tokens import MAX_LOG_RATIO


class KlEstimator(Protocol):
    """Log-probs of N tokens under two policies to an estimate for each of them."""

    def __call__(self, logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
        """
        Args:
            logprobs: ``[N]`` under ``p``, which the tokens were sampled from; gradients flow through it.
            reference_logprobs: ``[N]`` under ``q``.

        Returns:
            ``[N]``, in nats.
        """
        ...


KL_ESTIMATORS: Registry[KlEstimator] = Registry("trainer.algorithm.kl_estimator_type")


@KL_ESTIMATORS.register("k1")
def k1(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """``log p - log q``."""
    return logprobs - reference_logprobs


@KL_ESTIMATORS.register("k2")
def k2(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """``(log p - log q)^2 / 2``."""
    return (logprobs - reference_logprobs).square() / 2


@KL_ESTIMATORS.register("k3")
def k3(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """``r - 1 - log r``; beyond ``log r = MAX_LOG_RATIO`` it stays as it is there, finite in float32.

    In both terms: if the exponent alone stayed, what is left of the gradient there would lead away from the reference.
    """
    log_ratio = (reference_logprobs - logprobs).clamp(max=MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio

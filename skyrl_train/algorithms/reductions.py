"""Loss reductions: the weight of each token in the minibatch's loss.

A reduction is linear: ``loss = sum over tokens of weight * token loss``. The weights depend on the loss masks of the
whole minibatch alone, so splitting it into micro-batches cannot change the loss, and a token that a correction rejects
(its off-policy weight is 0) leaves the numerator but not the denominator (SEMANTICS 7.3).
"""

from __future__ import annotations

from typing import Protocol

import torch

from skyrl_train.algorithms.registry import Registry


class Reduction(Protocol):
    """Trained tokens per sequence to the weight of each sequence's tokens."""

    def __call__(self, trained_tokens: torch.Tensor) -> torch.Tensor:
        """
        Args:
            trained_tokens: int64 ``[n]``, the number of loss-mask tokens of every sequence of the minibatch.

        Returns:
            float64 ``[n]``: the weight of one token of each sequence; finite where there are none.
        """
        ...


REDUCTIONS: Registry[Reduction] = Registry("trainer.algorithm.loss_reduction")


@REDUCTIONS.register("token_mean")
def token_mean(trained_tokens: torch.Tensor) -> torch.Tensor:
    """Every token weighs the same: ``1 / all trained tokens of the minibatch`` (DAPO, arXiv 2503.14476)."""
    total = trained_tokens.sum().clamp(min=1).double()
    return (1.0 / total).expand(trained_tokens.shape)


@REDUCTIONS.register("sequence_mean")
def sequence_mean(trained_tokens: torch.Tensor) -> torch.Tensor:
    """Every sequence weighs the same: mean over all sequences of the mean over their tokens (GRPO, arXiv 2402.03300).

    A sequence without trained tokens adds 0 to the numerator and counts in the denominator. A sequence is what one
    forward pass sees: a sample that branched into k sequences weighs k times as much as one that did not, which
    ``token_mean`` does not care about.
    """
    return 1.0 / (trained_tokens.clamp(min=1).double() * max(trained_tokens.shape[0], 1))

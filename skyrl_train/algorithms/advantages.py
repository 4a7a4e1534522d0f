"""Advantage estimators: from the returns of one rollout group to an advantage per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from skyrl_train.algorithms.registry import Registry

STD_EPSILON = 1e-6  # added to the standard deviation: bounds the advantage of a group whose returns hardly differ


class AdvantageEstimator(Protocol):
    """Rewards of one group to per-token advantages."""

    def __call__(
        self, returns: torch.Tensor, loss_masks: Sequence[torch.Tensor], *, norm_by_std: bool
    ) -> list[torch.Tensor]:
        """
        Args:
            returns: float32 ``[n]``, the return of each sample of the group (:func:`group_returns`).
            loss_masks: per sample bool (or 0/1) ``[T_i]``, True on trained tokens; a sample of several sequences has
                those of all of them in a row.
            norm_by_std: divide by the group's standard deviation.

        Returns:
            Per sample float32 ``[T_i]``; 0 where the mask is False.
        """
        ...


ADVANTAGE_ESTIMATORS: Registry[AdvantageEstimator] = Registry("trainer.algorithm.advantage_estimator")


def group_returns(token_rewards: Sequence[Sequence[float]]) -> torch.Tensor:
    """The return of each sample, float32 ``[n]``: the undiscounted sum of its per-token rewards."""
    return torch.tensor([sum(rewards) for rewards in token_rewards], dtype=torch.float32)


@ADVANTAGE_ESTIMATORS.register("grpo")
def grpo(returns: torch.Tensor, loss_masks: Sequence[torch.Tensor], *, norm_by_std: bool) -> list[torch.Tensor]:
    """Group relative advantages (DeepSeekMath, arXiv 2402.03300, outcome supervision).

    ``A_i = (R_i - mean(R)) / (std(R) + STD_EPSILON)``, the same for every trained token of sample ``i``; without
    ``norm_by_std`` the division is left out (Dr. GRPO, arXiv 2503.20783). ``std`` has Bessel's correction. Equal
    returns, and a group of one, give exactly 0: rounding in the mean must not become a signal.
    """
    values = returns.double()
    if len(loss_masks) != values.shape[0]:
        raise ValueError(f"{values.shape[0]} returns but {len(loss_masks)} loss masks")
    if bool((values == values[0]).all()):
        outcome = torch.zeros_like(values)
    else:
        outcome = values - values.mean()
        if norm_by_std:
            outcome = outcome / (values.std() + STD_EPSILON)
    return [advantage * mask.bool().float() for advantage, mask in zip(outcome.float(), loss_masks, strict=True)]

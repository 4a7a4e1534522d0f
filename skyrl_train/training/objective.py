"""The loss of a minibatch: policy loss, off-policy weight, reduction and entropy bonus put together.

loss = sum over trained tokens of  reduction weight * (off-policy weight * policy loss - entropy_coef * entropy)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from skyrl_train.algorithms.losses import POLICY_LOSSES
from skyrl_train.algorithms.off_policy import CORRECTIONS, mismatch_metrics
from skyrl_train.algorithms.reductions import REDUCTIONS
from skyrl_train.config.schema import AlgorithmConfig
from skyrl_train.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TokenFields:
    """What is known about N trained tokens before the forward pass; all ``[N]``.

    ``proximal_logprobs`` None: the policy has not moved since the step began, so the current ones are the proximal
    ones.
    """

    advantages: torch.Tensor
    behaviour_logprobs: torch.Tensor
    reduction_weights: torch.Tensor
    proximal_logprobs: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """What one pass over N tokens leaves for the metrics; all detached, ``[N]``."""

    policy_loss: torch.Tensor  # after the off-policy weight
    entropy: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor
    proximal_logprobs: torch.Tensor
    behaviour_logprobs: torch.Tensor
    reduction_weights: torch.Tensor


class Objective:
    """The configured loss.

    Raises:
        ConfigError: (constructor) an unknown name or an impossible number.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        _check(config)
        correction = config.off_policy_correction
        self._config = config
        self._policy_loss = POLICY_LOSSES.get(config.policy_loss_type)
        self._reduction = REDUCTIONS.get(config.loss_reduction)
        self._correction = CORRECTIONS.get(correction.tis_ratio_type) if correction.tis_ratio_type is not None else None
        self._clip_high = correction.token_tis_ratio_clip_high

    @property
    def differentiates_entropy(self) -> bool:
        """Whether ``loss`` needs entropies that carry a gradient."""
        return self._config.entropy_coef != 0.0

    def reduction_weights(self, trained_tokens: torch.Tensor) -> torch.Tensor:
        """The weight of a token of each sequence (float64 ``[n]``), from all the minibatch's token counts ``[n]``."""
        return self._reduction(trained_tokens)

    def loss(
        self, logprobs: torch.Tensor, entropy: torch.Tensor, fields: TokenFields
    ) -> tuple[torch.Tensor, TokenRecord]:
        """This micro-batch's share of the minibatch's loss (a scalar; the shares add up) and the record of its tokens.

        Args:
            logprobs: ``[N]`` under the current policy, with gradient.
            entropy: ``[N]`` in nats.
        """
        proximal = logprobs.detach() if fields.proximal_logprobs is None else fields.proximal_logprobs
        losses = self._policy_loss(
            logprobs,
            proximal,
            fields.advantages,
            eps_clip_low=self._config.eps_clip_low,
            eps_clip_high=self._config.eps_clip_high,
        )
        token_loss = losses.loss
        if self._correction is not None:
            token_loss = token_loss * self._correction(proximal, fields.behaviour_logprobs, clip_high=self._clip_high)
        objective = token_loss
        if self.differentiates_entropy:
            objective = token_loss - self._config.entropy_coef * entropy
        record = TokenRecord(
            policy_loss=token_loss.detach(),
            entropy=entropy.detach(),
            ratio=losses.ratio,
            clipped=losses.clipped,
            proximal_logprobs=proximal,
            behaviour_logprobs=fields.behaviour_logprobs,
            reduction_weights=fields.reduction_weights,
        )
        return (objective * fields.reduction_weights).sum(), record

    def metrics(self, records: Sequence[TokenRecord]) -> dict[str, float]:
        """Scalars over all tokens of one pass over a minibatch, the micro-batches' records together.

        ``loss/*`` are reduced as the loss is; ``policy/*`` and ``off_policy/*`` are statistics over tokens. A pass
        without trained tokens has losses of 0 and no statistics.
        """
        if not records:
            return {"loss/policy": 0.0, "loss/entropy": 0.0}

        def joined(name: str) -> torch.Tensor:
            return torch.cat([getattr(record, name) for record in records]).double()

        weights = joined("reduction_weights")
        values = {
            "loss/policy": (weights * joined("policy_loss")).sum(),
            "loss/entropy": (weights * joined("entropy")).sum(),
            "policy/ratio_mean": joined("ratio").mean(),
            "policy/clip_fraction": joined("clipped").mean(),
        }
        return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True)) | mismatch_metrics(
            joined("proximal_logprobs"), joined("behaviour_logprobs"), clip_high=self._clip_high
        )


def _check(config: AlgorithmConfig) -> None:
    where = "trainer.algorithm"
    if not 0 <= config.eps_clip_low < 1:
        raise ConfigError(f"{where}.eps_clip_low must be in [0, 1), got {config.eps_clip_low}.")
    if not config.eps_clip_high >= 0:
        raise ConfigError(f"{where}.eps_clip_high must be >= 0, got {config.eps_clip_high}.")
    clip_high = config.off_policy_correction.token_tis_ratio_clip_high
    if not clip_high > 0:
        raise ConfigError(f"{where}.off_policy_correction.token_tis_ratio_clip_high must be positive, got {clip_high}.")

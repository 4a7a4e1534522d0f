"""The loss of a step: policy loss, off-policy weight, KL term, reduction and entropy bonus put together.

loss = scale * sum over trained tokens of  token weight *
           (off-policy weight * (policy loss + kl_loss_coef * KL estimate) - entropy_coef * entropy)

The off-policy weight is on the KL estimate too, because its tokens are the behaviour policy's as well.
The scale is known once all sequences of the step are counted; until then everything here is without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from skyrl_train.algorithms.kl import KL_ESTIMATORS
from skyrl_train.algorithms.losses import POLICY_LOSSES
from skyrl_train.algorithms.off_policy import CORRECTIONS, mismatch_metrics, mismatch_statistics
from skyrl_train.algorithms.reductions import REDUCTIONS, Share
from skyrl_train.algorithms.statistics import TokenStatistics
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
    token_weights: torch.Tensor  # of the reduction, before its scale
    proximal_logprobs: torch.Tensor | None
    reference_logprobs: torch.Tensor | None = None  # needed where the loss has a KL term


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
        self._kl = KL_ESTIMATORS.get(config.kl_estimator_type) if config.kl_loss_coef != 0.0 else None

    @property
    def differentiates_entropy(self) -> bool:
        """Whether ``loss`` needs entropies that carry a gradient."""
        return self._config.entropy_coef != 0.0

    @property
    def needs_reference(self) -> bool:
        """Whether ``loss`` needs log-probs of the reference policy."""
        return self._kl is not None

    def share(self, counted_tokens: int) -> Share:
        """What a sequence with so many trained tokens (before masking) adds to the sums of the reduction.

        Raises:
            ConfigError: the registered reduction breaks its contract.
        """
        share = self._reduction(counted_tokens)
        if all(map(math.isfinite, share)) and (share.denominator > 0 or counted_tokens == share.denominator == 0):
            return share
        raise ConfigError(
            f"trainer.algorithm.loss_reduction={self._config.loss_reduction!r} returned {share} for a sequence of "
            f"{counted_tokens} tokens; both numbers must be finite, and the denominator above 0 where there are tokens."
        )

    def loss(
        self, logprobs: torch.Tensor, entropy: torch.Tensor, fields: TokenFields
    ) -> tuple[torch.Tensor, TokenStatistics]:
        """This micro-batch's part of the step's loss before the scale (a scalar; the parts add up), and the
        statistics of its tokens.

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
        token_loss, kl, weight = losses.loss, self._kl_to_reference(logprobs, fields), None
        if self._correction is not None:
            weight = self._correction(proximal, fields.behaviour_logprobs, clip_high=self._clip_high)
            token_loss = token_loss * weight
        objective = token_loss
        if kl is not None:
            objective = objective + self._config.kl_loss_coef * (kl if weight is None else kl * weight)
        if self.differentiates_entropy:
            objective = objective - self._config.entropy_coef * entropy
        weights = fields.token_weights.double()
        sums = {
            "policy_loss": weights * token_loss.detach(),
            "entropy": weights * entropy.detach(),
            "ratio": losses.ratio,
            "clipped": losses.clipped,
        }
        if kl is not None:
            sums["kl_to_reference"] = kl
        statistics = TokenStatistics.of(sums).join(
            mismatch_statistics(proximal, fields.behaviour_logprobs, clip_high=self._clip_high)
        )
        return (objective * fields.token_weights).sum(), statistics

    def _kl_to_reference(self, logprobs: torch.Tensor, fields: TokenFields) -> torch.Tensor | None:
        if self._kl is None:
            return None
        if fields.reference_logprobs is None:
            raise ValueError("a loss with a KL term needs reference_logprobs")
        return self._kl(logprobs, fields.reference_logprobs)

    def metrics(self, statistics: TokenStatistics, scale: float) -> dict[str, float]:
        """Scalars over all tokens of one optimizer step, from the statistics of all its micro-batches together.

        ``loss/*`` are reduced as the loss is; ``policy/*`` and ``off_policy/*`` are statistics over tokens. A step
        without trained tokens has losses of 0 and no statistics.

        Args:
            scale: of the reduction, from all sequences of the step.
        """
        tokens, values = statistics.tokens, statistics.values()
        if not tokens:
            return {"loss/policy": 0.0, "loss/entropy": 0.0}
        metrics = {
            "loss/policy": scale * values["policy_loss"],
            "loss/entropy": scale * values["entropy"],
            "policy/ratio_mean": values["ratio"] / tokens,
            "policy/clip_fraction": values["clipped"] / tokens,
        }
        if self.needs_reference:
            metrics["policy/kl_to_reference"] = values["kl_to_reference"] / tokens
        return metrics | mismatch_metrics(tokens, values)


def _check(config: AlgorithmConfig) -> None:
    where = "trainer.algorithm"
    if not 0 <= config.eps_clip_low < 1:
        raise ConfigError(f"{where}.eps_clip_low must be in [0, 1), got {config.eps_clip_low}.")
    if not 0 <= config.kl_loss_coef < math.inf:
        raise ConfigError(f"{where}.kl_loss_coef must be >= 0, got {config.kl_loss_coef}.")
    if not config.eps_clip_high >= 0:
        raise ConfigError(f"{where}.eps_clip_high must be >= 0, got {config.eps_clip_high}.")
    clip_high = config.off_policy_correction.token_tis_ratio_clip_high
    if not clip_high > 0:
        raise ConfigError(f"{where}.off_policy_correction.token_tis_ratio_clip_high must be positive, got {clip_high}.")

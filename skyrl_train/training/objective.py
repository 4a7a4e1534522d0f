"""The loss of a step: policy loss, off-policy correction, KL term, reduction and entropy bonus combined.

loss = scale * sum over trained tokens that no rule rejects of  token weight *
           (off-policy weight * (policy loss + kl_factor * kl_loss_coef * KL estimate) - entropy_coef * entropy)

The off-policy weight also applies to the KL estimate, because its tokens come from the behaviour policy too.
The scale is known once all sequences of the step are counted; until then all sums are unscaled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from skyrl_train.algorithms.kl import KL_ESTIMATORS
from skyrl_train.algorithms.losses import POLICY_LOSSES
from skyrl_train.algorithms.off_policy import (
    OffPolicyCorrection,
    interpolated_logprobs,
    m2po_statistics,
    mismatch_metrics,
)
from skyrl_train.algorithms.reductions import REDUCTIONS, SequenceCounts, Share
from skyrl_train.algorithms.registry import called_by_setting
from skyrl_train.algorithms.tokens import (
    MINIBATCH_STATISTICS,
    MinibatchTokens,
    PolicyTokens,
    TokenStatistics,
    require_per_token,
)
from skyrl_train.config.schema import AlgorithmConfig, ProximalPolicy
from skyrl_train.errors import ConfigError
from skyrl_train.runtime.lazy_torch import torch


@dataclass(frozen=True, slots=True)
class TokenFields:
    """The inputs of the loss that are known before the forward pass, for N trained tokens of R whole sequences; tensors are
    ``[N]``.

    ``proximal_logprobs`` None: the policy has not moved since the step began, so the current log-probs are the proximal ones.
    (Under ``proximal_policy=interpolated`` the field holds the log-probs of the policy at the beginning of the step.)
    """

    advantages: torch.Tensor
    behaviour_logprobs: torch.Tensor
    token_weights: torch.Tensor  # of the reduction, before its scale
    proximal_logprobs: torch.Tensor | None
    sequence_index: torch.Tensor  # int64, in [0, R), ascending
    num_sequences: int  # R
    lags: torch.Tensor  # int64: versions from the one that sampled the token to the one at the beginning of the step
    reference_logprobs: torch.Tensor | None = None  # needed where the loss has a KL term
    kl_factor: float = 1.0  # of the KL coefficient in this step
    # From Objective.minibatch_statistics, where it is needed.
    minibatch: Mapping[str, float] = field(default_factory=dict)


class Objective:
    """The configured loss.

    Attributes:
        differentiates_entropy: ``loss`` needs entropies that carry a gradient.
        needs_reference: ``loss`` needs log-probs of the reference policy.
        needs_minibatch_statistics: ``loss`` needs ``TokenFields.minibatch``, and so the whole minibatch before its first
            backward pass.

    Raises:
        ConfigError: (constructor) an unknown name.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config
        self._policy_loss = POLICY_LOSSES.get(config.policy_loss_type)
        self._reduction = REDUCTIONS.get(config.loss_reduction)
        self._correct = OffPolicyCorrection(config)
        self._kl = KL_ESTIMATORS.get(config.kl_estimator_type) if config.kl_loss_coef != 0.0 else None
        by_loss = config.policy_loss_type in MINIBATCH_STATISTICS.names()
        self._statistics_of_loss = MINIBATCH_STATISTICS.get(config.policy_loss_type) if by_loss else None
        self.differentiates_entropy = config.entropy_coef != 0.0
        self.needs_reference = self._kl is not None
        self.needs_minibatch_statistics = by_loss or config.off_policy_correction.m2po_threshold is not None

    def minibatch_tokens(self, fields: Sequence[TokenFields]) -> MinibatchTokens:
        """Return the input of ``minibatch_statistics`` for some micro-batches; concatenate the results of several ranks.

        Raises:
            ValueError: a micro-batch lacks its proximal log-probs.
        """
        proximal = [self._proximal(of) for of in fields if of.proximal_logprobs is not None]
        if len(proximal) < len(fields):
            raise ValueError("statistics of a minibatch need the proximal log-probs of all its micro-batches")
        return MinibatchTokens(
            torch.cat(proximal),
            torch.cat([of.behaviour_logprobs for of in fields]),
            torch.cat([of.advantages for of in fields]),
        )

    def minibatch_statistics(self, tokens: MinibatchTokens) -> dict[str, float]:
        """Return the numbers that ``loss`` needs, from all trained tokens (at least 1) of a minibatch, in any order.

        Raises:
            ConfigError: the registered statistics raised.
        """
        numbers: dict[str, float] = {}
        if self._statistics_of_loss is not None:
            with called_by_setting("trainer.algorithm.policy_loss_type", self._config.policy_loss_type):
                numbers = self._statistics_of_loss(tokens, self._config)
        limit = self._config.off_policy_correction.m2po_threshold
        return numbers if limit is None else numbers | m2po_statistics(tokens, limit)

    def share(self, counts: SequenceCounts) -> Share:
        """Return the contribution of a sequence to the sums of the reduction, from its counts before masking.

        Raises:
            ConfigError: the registered reduction raised, or breaks its contract.
        """
        key, name = "trainer.algorithm.loss_reduction", self._config.loss_reduction
        with called_by_setting(key, name):
            share = Share(*self._reduction(counts, self._config))
            finite = all(map(math.isfinite, share))
        if finite and (share.denominator > 0 or counts.tokens == share.denominator == 0):
            return share
        raise ConfigError(
            f"{key}={name} returned {share} for a sequence of {counts.tokens} tokens; both numbers must be finite, and the "
            "denominator above 0 where there are tokens."
        )

    def loss(
        self, logprobs: torch.Tensor, entropy: torch.Tensor, fields: TokenFields
    ) -> tuple[torch.Tensor, TokenStatistics]:
        """Return this micro-batch's part of the step's loss before the scale (a scalar; the parts add up), and the
        statistics of its tokens.

        Args:
            logprobs: ``[N]`` under the current policy, with gradient.
            entropy: ``[N]`` in nats.

        Raises:
            ValueError: ``fields`` lack something that this loss needs, or a registered function breaks its contract.
        """
        if self.needs_minibatch_statistics and not fields.minibatch:
            raise ValueError("this loss needs statistics of its whole minibatch, which a step in parts does not have")
        if self._kl is not None and fields.reference_logprobs is None:
            raise ValueError("a loss with a KL term needs reference_logprobs")
        tokens = self._tokens(logprobs, fields)
        losses, corrected = self._policy_loss(tokens, self._config), self._correct(tokens)
        name = f"trainer.algorithm.policy_loss_type={self._config.policy_loss_type}"
        require_per_token(name, len(logprobs), {"loss": losses.loss, "ratio": losses.ratio, "clipped": losses.clipped})
        # torch.where instead of a product with the mask: a rejected token may have an infinite loss.
        nothing = torch.zeros_like(logprobs)
        policy_loss = torch.where(corrected.kept, losses.loss * corrected.weights, nothing)
        # The reported losses are weighted like the gradient; both are scaled once the step is complete.
        weights = fields.token_weights.double()
        sums = {
            "policy_loss": weights * policy_loss.detach(),
            "entropy": weights * entropy.detach(),
            "ratio": losses.ratio,
            "clipped": losses.clipped,
        }
        objective = policy_loss
        if self._kl is not None and fields.reference_logprobs is not None:
            kl = self._kl(logprobs, fields.reference_logprobs)
            name = f"trainer.algorithm.kl_estimator_type={self._config.kl_estimator_type}"
            require_per_token(name, len(logprobs), {"divergence": kl})
            coefficient = fields.kl_factor * self._config.kl_loss_coef
            objective = objective + torch.where(corrected.kept, coefficient * kl * corrected.weights, nothing)
            sums["kl_to_reference"] = kl
        # The entropy is exact over the vocabulary, not an estimate from the sampled token, so it has no off-policy weight.
        if self.differentiates_entropy:
            objective = objective - torch.where(corrected.kept, self._config.entropy_coef * entropy, nothing)
        statistics = TokenStatistics.of(len(logprobs), {**sums, **corrected.sums}, corrected.maxima)
        return (objective * fields.token_weights).sum(), statistics

    def weights(self, logprobs: torch.Tensor, fields: TokenFields) -> torch.Tensor:
        """Return the importance weight ``[N]`` of each token in :meth:`loss`: 0 for rejected tokens; without gradient."""
        corrected = self._correct(self._tokens(logprobs.detach(), fields))
        return torch.where(corrected.kept, corrected.weights, 0.0)

    def _tokens(self, logprobs: torch.Tensor, fields: TokenFields) -> PolicyTokens:
        return PolicyTokens(
            logprobs,
            self._proximal(fields, logprobs),
            fields.behaviour_logprobs,
            fields.advantages,
            fields.sequence_index,
            fields.num_sequences,
            fields.minibatch,
        )

    def _proximal(self, fields: TokenFields, current: torch.Tensor | None = None) -> torch.Tensor:
        """Return the proximal log-probs ``[N]``, without gradient; ``current`` takes the place of unknown ones."""
        known = current if fields.proximal_logprobs is None else fields.proximal_logprobs
        assert known is not None, "callers check that one of the two is known"
        if self._config.proximal_policy is ProximalPolicy.interpolated:
            # known: the log-probs at the beginning of the step, between which and the behaviour policy it interpolates.
            return interpolated_logprobs(fields.behaviour_logprobs, known.detach(), fields.lags)
        return known.detach()

    def metrics(self, statistics: TokenStatistics, scale: float) -> dict[str, float]:
        """Return scalars over all tokens of one optimizer step, from the statistics of all its micro-batches together.

        ``loss/*`` are reduced as the loss is; ``policy/*`` and ``off_policy/*`` are statistics over tokens. A step without
        trained tokens has losses of 0 and no statistics.

        Args:
            scale: of the reduction, from all sequences of the step.
        """
        tokens, values = statistics.tokens, statistics.values()
        if not tokens:
            return {"loss/policy": 0.0, "loss/entropy": 0.0}
        of_policy = {
            "loss/policy": scale * values["policy_loss"],
            "loss/entropy": scale * values["entropy"],
            "policy/ratio_mean": values["ratio"] / tokens,
            "policy/clip_fraction": values["clipped"] / tokens,
        }
        if self.needs_reference:
            of_policy["policy/kl_to_reference"] = values["kl_to_reference"] / tokens
        return of_policy | mismatch_metrics(tokens, values)

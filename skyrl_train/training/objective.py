"""The loss of a step: policy loss, off-policy correction, KL term, reduction and entropy bonus put together.

loss = scale * sum over trained tokens that no rule rejects of  token weight *
           (off-policy weight * (policy loss + kl_factor * kl_loss_coef * KL estimate) - entropy_coef * entropy)

The off-policy weight is on the KL estimate too, because its tokens are the behaviour policy's as well.
The scale is known once all sequences of the step are counted; until then everything here is without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from skyrl_train.algorithms import covariance  # noqa: F401 - registers its losses
from skyrl_train.algorithms.kl import KL_ESTIMATORS
from skyrl_train.algorithms.losses import POLICY_LOSSES
from skyrl_train.algorithms.minibatch import MINIBATCH_FACTS, MinibatchTokens
from skyrl_train.algorithms.off_policy.correction import OffPolicyCorrection, mismatch_metrics
from skyrl_train.algorithms.off_policy.m2po import m2po_facts
from skyrl_train.algorithms.off_policy.proximal import interpolated_logprobs
from skyrl_train.algorithms.reductions import REDUCTIONS, SequenceCounts, Share
from skyrl_train.algorithms.statistics import TokenStatistics
from skyrl_train.algorithms.tokens import PolicyTokens
from skyrl_train.config.derive import clip_bounds
from skyrl_train.config.schema.algorithm import AlgorithmConfig, ProximalPolicy
from skyrl_train.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TokenFields:
    """What is known about N trained tokens of R whole sequences before the forward pass; tensors are ``[N]``.

    ``proximal_logprobs`` None: the policy has not moved since the step began, so the current ones are the proximal
    ones. (Under ``proximal_policy=interpolated`` they are those of the policy as the step begins.)
    """

    advantages: torch.Tensor
    behaviour_logprobs: torch.Tensor
    token_weights: torch.Tensor  # of the reduction, before its scale
    proximal_logprobs: torch.Tensor | None
    sequence_index: torch.Tensor  # int64, in [0, R), ascending
    num_sequences: int  # R
    lags: torch.Tensor  # int64: versions from the one that sampled the token to the one that the step begins with
    reference_logprobs: torch.Tensor | None = None  # needed where the loss has a KL term
    kl_factor: float = 1.0  # of the KL coefficient in this step
    minibatch: Mapping[str, float] = field(default_factory=dict)  # of Objective.minibatch_facts, where it needs them


class Objective:
    """The configured loss.

    Raises:
        ConfigError: (constructor) an unknown name or an impossible number.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        _check(config)
        self._config = config
        self._policy_loss = POLICY_LOSSES.get(config.policy_loss_type)
        self._reduction = REDUCTIONS.get(config.loss_reduction)
        self._correct = OffPolicyCorrection(config)
        self._kl = KL_ESTIMATORS.get(config.kl_estimator_type) if config.kl_loss_coef != 0.0 else None
        by_loss = config.policy_loss_type in MINIBATCH_FACTS.names()
        self._facts_of_loss = MINIBATCH_FACTS.get(config.policy_loss_type) if by_loss else None

    @property
    def differentiates_entropy(self) -> bool:
        """Whether ``loss`` needs entropies that carry a gradient."""
        return self._config.entropy_coef != 0.0

    @property
    def needs_reference(self) -> bool:
        """Whether ``loss`` needs log-probs of the reference policy."""
        return self._kl is not None

    @property
    def needs_minibatch_facts(self) -> bool:
        """Whether ``loss`` needs ``TokenFields.minibatch``, and so the whole minibatch before its first backward pass."""
        return self._facts_of_loss is not None or self._config.off_policy_correction.m2po_threshold is not None

    def minibatch_tokens(self, fields: Sequence[TokenFields]) -> MinibatchTokens:
        """What ``minibatch_facts`` needs of some micro-batches. Those of several ranks are put together by concatenation.

        Raises:
            ValueError: one lacks its proximal log-probs.
        """
        proximal = [self._proximal(of) for of in fields]
        if not all(values is not None for values in proximal):
            raise ValueError("facts about a minibatch need the proximal log-probs of all its micro-batches")
        return MinibatchTokens(
            torch.cat([values for values in proximal if values is not None]),
            torch.cat([of.behaviour_logprobs for of in fields]),
            torch.cat([of.advantages for of in fields]),
        )

    def minibatch_facts(self, tokens: MinibatchTokens) -> dict[str, float]:
        """The numbers about all trained tokens of a minibatch (1 at least), in any order, which ``loss`` needs."""
        facts = self._facts_of_loss(tokens, self._config) if self._facts_of_loss is not None else {}
        limit = self._config.off_policy_correction.m2po_threshold
        return facts if limit is None else facts | m2po_facts(tokens, limit)

    def share(self, counts: SequenceCounts) -> Share:
        """What a sequence with so many trained tokens (before masking) adds to the sums of the reduction.

        Raises:
            ConfigError: the registered reduction breaks its contract.
        """
        share = self._reduction(counts, self._config)
        if all(map(math.isfinite, share)) and (share.denominator > 0 or counts.tokens == share.denominator == 0):
            return share
        raise ConfigError(
            f"trainer.algorithm.loss_reduction={self._config.loss_reduction!r} returned {share} for a sequence of "
            f"{counts.tokens} tokens; both numbers must be finite, and the denominator above 0 where there are tokens."
        )

    def loss(
        self, logprobs: torch.Tensor, entropy: torch.Tensor, fields: TokenFields
    ) -> tuple[torch.Tensor, TokenStatistics]:
        """This micro-batch's part of the step's loss before the scale (a scalar; the parts add up), and the
        statistics of its tokens.

        Args:
            logprobs: ``[N]`` under the current policy, with gradient.
            entropy: ``[N]`` in nats.

        Raises:
            ValueError: ``fields`` lack something that this loss needs.
        """
        tokens = self._tokens(logprobs, fields)
        losses, corrected = self._policy_loss(tokens, self._config), self._correct(tokens)
        kl, nothing = self._kl_to_reference(logprobs, fields), torch.zeros_like(logprobs)
        policy_loss = torch.where(corrected.kept, losses.loss * corrected.weights, nothing)
        objective = policy_loss
        if kl is not None:
            coefficient = fields.kl_factor * self._config.kl_loss_coef
            objective = objective + torch.where(corrected.kept, coefficient * kl * corrected.weights, nothing)
        if self.differentiates_entropy:
            objective = objective - torch.where(corrected.kept, self._config.entropy_coef * entropy, nothing)
        weights = fields.token_weights.double()
        sums = {
            "policy_loss": weights * policy_loss.detach(),
            "entropy": weights * entropy.detach(),
            "ratio": losses.ratio,
            "clipped": losses.clipped,
        }
        if kl is not None:
            sums["kl_to_reference"] = kl
        return (objective * fields.token_weights).sum(), TokenStatistics.of(sums).join(corrected.statistics)

    def _tokens(self, logprobs: torch.Tensor, fields: TokenFields) -> PolicyTokens:
        if self.needs_minibatch_facts and not fields.minibatch:
            raise ValueError("this loss needs facts about its whole minibatch, which a step in parts does not have")
        if fields.proximal_logprobs is None:
            fields = replace(fields, proximal_logprobs=logprobs.detach())
        proximal = self._proximal(fields)
        assert proximal is not None
        return PolicyTokens(
            logprobs,
            proximal,
            fields.behaviour_logprobs,
            fields.advantages,
            fields.sequence_index,
            fields.num_sequences,
            fields.minibatch,
        )

    def _proximal(self, fields: TokenFields) -> torch.Tensor | None:
        if self._config.proximal_policy is not ProximalPolicy.interpolated or fields.proximal_logprobs is None:
            return None if fields.proximal_logprobs is None else fields.proximal_logprobs.detach()
        return interpolated_logprobs(fields.behaviour_logprobs, fields.proximal_logprobs, fields.lags)

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
        of_policy = {
            "loss/policy": scale * values["policy_loss"],
            "loss/entropy": scale * values["entropy"],
            "policy/ratio_mean": values["ratio"] / tokens,
            "policy/clip_fraction": values["clipped"] / tokens,
        }
        if self.needs_reference:
            of_policy["policy/kl_to_reference"] = values["kl_to_reference"] / tokens
        return of_policy | mismatch_metrics(tokens, values)


def _check(config: AlgorithmConfig) -> None:
    where = "trainer.algorithm"
    low, high = clip_bounds(config)
    if not 0 <= low < 1:
        raise ConfigError(f"{where}.eps_clip_low must be in [0, 1), got {low}.")
    if not 0 <= config.kl_loss_coef < math.inf:
        raise ConfigError(f"{where}.kl_loss_coef must be >= 0, got {config.kl_loss_coef}.")
    if not high >= 0:
        raise ConfigError(f"{where}.eps_clip_high must be >= 0, got {high}.")
    for name in ("token_tis_ratio_clip_high", "sequence_tis_ratio_clip_high"):
        clip_high = getattr(config.off_policy_correction, name)
        if not clip_high > 0:
            raise ConfigError(f"{where}.off_policy_correction.{name} must be positive, got {clip_high}.")

"""KL divergence: estimators, the penalty on rewards, and the adaptive coefficient.

Estimators of ``KL(p || q)`` from tokens sampled from ``p``, one value per token, before any reduction. With
``r = q(x) / p(x)`` (Schulman, "Approximating KL Divergence", 2020, http://joschu.net/blog/kl-approx.html):

| name | value | unbiased | gradient in expectation, where ``p`` is the policy and ``q`` is fixed |
|---|---|---|---|
| k1 | ``-log r`` | yes | 0: as a loss it teaches nothing |
| k2 | ``(log r)^2 / 2`` | no | the gradient of ``KL(p || q)`` |
| k3 | ``(r - 1) - log r`` | yes, and never below 0 | the gradient of ``KL(q || p)`` |

The last column follows from ``E[f(x) grad log p(x)]`` with ``f = 1``, ``-log r`` and ``1 - r``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from skyrl_train.algorithms.registry import Registry, called_by_setting
from skyrl_train.algorithms.tokens import MAX_LOG_RATIO, require_per_token
from skyrl_train.config.schema import AlgorithmConfig, KlControlType
from skyrl_train.errors import ConfigError
from skyrl_train.runtime.lazy_torch import torch

MAX_ERROR = 0.2  # bound on the relative error that one step reacts to

KlEstimator: TypeAlias = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]
KL_ESTIMATORS: Registry[KlEstimator] = Registry("trainer.algorithm.kl_estimator_type")
register_kl_estimator = KL_ESTIMATORS.register
"""Decorator ``@register_kl_estimator("name")`` of a function of ``(logprobs: Tensor, reference_logprobs: Tensor)``.

Its arguments are the log-probs ``[N]`` of N tokens under the policy that sampled them, through which gradients flow, and under
the reference. It returns one estimate per token: ``[N]``, in nats.
"""


@register_kl_estimator("k1")
def k1(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """``log p - log q``."""
    return logprobs - reference_logprobs


@register_kl_estimator("k2")
def k2(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """``(log p - log q)^2 / 2``."""
    return (logprobs - reference_logprobs).square() / 2


@register_kl_estimator("k3")
def k3(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """``r - 1 - log r``; constant beyond ``log r = MAX_LOG_RATIO``, so that it stays finite in float32."""
    # Both terms are clamped: with the exponent alone clamped, the remaining gradient would lead away from the reference.
    log_ratio = (reference_logprobs - logprobs).clamp(max=MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio


def kl_penalties(
    behaviour_logprobs: Sequence[float],
    reference_logprobs: Sequence[float],
    mask: Sequence[int],
    config: AlgorithmConfig,
) -> list[float]:
    """Estimate ``KL(behaviour || reference)`` of each token with ``kl_estimator_type``; 0 where the mask is 0.

    The first policy is the one that sampled the token, whichever version it was: nothing else is unbiased in an asynchronous
    run.

    Raises:
        ConfigError: the estimator, which may be the user's, raised or did not return one number per token.
    """
    key, name = "trainer.algorithm.kl_estimator_type", config.kl_estimator_type
    estimate = KL_ESTIMATORS.get(name)
    with called_by_setting(key, name):
        values = estimate(
            torch.tensor(behaviour_logprobs, dtype=torch.float64), torch.tensor(reference_logprobs, dtype=torch.float64)
        )
    require_per_token(f"{key}={name}", len(mask), {"divergence": values}, ConfigError)
    return [value if trained else 0.0 for value, trained in zip(values.tolist(), mask, strict=True)]


class KlControl:
    """Factor of ``kl_loss_coef`` and ``kl_reward_coef``: constant 1, or adapted so that the divergence stays near a target.

    Adaptive (Ziegler et al. 2019, arXiv 1909.08593, section 2.2): after a step of ``n`` samples with the divergence ``KL``
    (mean over tokens of the estimate of ``KL(behaviour || reference)``),
    ``factor *= 1 + clip(KL / kl_target - 1, -0.2, 0.2) n / horizon``. The factor changes between steps only; it is the whole
    state, and a checkpoint holds it.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self._control = config.kl_ctrl
        has_term = config.kl_loss_coef > 0 or config.kl_reward_coef > 0  # without one there are no reference log-probs
        self._adaptive = has_term and config.kl_ctrl.type is KlControlType.adaptive
        self.observes = self._adaptive or config.kl_reward_coef > 0  # whether the trainer calls observe()
        self.factor = 1.0
        self._observed = (0.0, 0, 0)

    def observe(self, kl_sum: float, tokens: int, samples: int) -> None:
        """Record some trained groups of the step; ``kl_sum`` is over their tokens, in nats."""
        total, all_tokens, all_samples = self._observed
        self._observed = (total + kl_sum, all_tokens + tokens, all_samples + samples)

    def step_ended(self) -> dict[str, float]:
        """Adapt the factor for the next step; return the metrics of this one, empty if no token was trained."""
        (total, tokens, samples), self._observed = self._observed, (0.0, 0, 0)
        if not tokens:
            return {}
        kl, factor = total / tokens, self.factor
        if self._adaptive:
            error = min(max(kl / self._control.kl_target - 1.0, -MAX_ERROR), MAX_ERROR)
            self.factor *= 1.0 + error * samples / self._control.horizon
        return {"policy/behaviour_kl_to_reference": kl, "policy/kl_factor": factor}

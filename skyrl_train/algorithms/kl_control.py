"""The coefficient of the KL penalty: fixed, or adapted so that the divergence stays near a target."""

from __future__ import annotations

from skyrl_train.config.schema.algorithm import AlgorithmConfig, KlControlType

MAX_ERROR = 0.2  # the relative error that one step reacts to


class KlControl:
    """A factor of ``kl_loss_coef`` and ``kl_reward_coef``, 1 at first; it changes between steps only.

    Adaptive (Ziegler et al. 2019, arXiv 1909.08593, section 2.2): after a step of ``n`` samples with the divergence ``KL``
    (mean over tokens of the estimate of ``KL(behaviour || reference)``),
    ``factor *= 1 + clip(KL / kl_target - 1, -0.2, 0.2) n / horizon``. One number of state, which a checkpoint holds.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self._control = config.kl_ctrl
        self._adaptive = config.kl_ctrl.type is KlControlType.adaptive
        self.observes = self._adaptive or config.kl_reward_coef > 0  # whether it is told what steps train on
        self.factor = 1.0
        self._observed = (0.0, 0, 0)

    def observe(self, kl_sum: float, tokens: int, samples: int) -> None:
        """Some groups of the step are trained.

        Args:
            kl_sum: over their tokens, in nats.
        """
        total, all_tokens, all_samples = self._observed
        self._observed = (total + kl_sum, all_tokens + tokens, all_samples + samples)

    def step_ended(self) -> dict[str, float]:
        """Adapts the factor for the next step; the metrics of this one. Nothing where no token was trained."""
        (total, tokens, samples), self._observed = self._observed, (0.0, 0, 0)
        if not tokens:
            return {}
        kl, factor = total / tokens, self.factor
        if self._adaptive:
            error = min(max(kl / self._control.kl_target - 1.0, -MAX_ERROR), MAX_ERROR)
            self.factor *= 1.0 + error * samples / self._control.horizon
        return {"policy/behaviour_kl_to_reference": kl, "policy/kl_factor": factor}

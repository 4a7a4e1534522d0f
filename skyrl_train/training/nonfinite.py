"""How many optimizer steps in a row may be skipped because their loss or gradient is not finite. A pure rule."""

from __future__ import annotations

from collections.abc import Mapping

from skyrl_train.errors import NonFiniteStepsError

# By the count of a model's skipped steps: what has probably led to them.
CAUSES = {
    "policy/skipped_nonfinite": (
        "a learning rate too high (trainer.policy.optimizer_config.lr, num_warmup_steps), gradients that are not clipped "
        "(max_grad_norm), weights too narrow (trainer.policy.dtype=bfloat16), huge advantages (rewards, grpo_norm_by_std), or "
        "unbounded ratios (off_policy_correction)"
    ),
    "critic/skipped_nonfinite": (
        "of the critic, a learning rate too high (trainer.critic.optimizer_config.lr, num_warmup_steps), gradients that are not "
        "clipped (max_grad_norm), weights too narrow (trainer.critic.dtype=bfloat16), or huge returns (rewards)"
    ),
}


class NonFiniteSteps:
    """A step that is skipped moves nothing, so one now and then costs its groups and no more. A row of them means that the
    policy itself has diverged, or its critic: more steps would only use up prompts.
    """

    def __init__(self, limit: int) -> None:
        """
        Args:
            limit: steps in a row that may be skipped; one more is an error.
        """
        self._limit = limit
        self.in_a_row = 0  # part of a checkpoint: a run that is stopped within a row goes on counting

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes note of a step. One of several passes counts as skipped if any of them was.

        Raises:
            NonFiniteStepsError: too many in a row.
        """
        skipped = [key for key in CAUSES if metrics.get(key, 0.0) > 0]
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if self.in_a_row <= self._limit:
            return
        known = (
            "loss/policy",
            "policy/grad_norm",
            "policy/lr",
            "off_policy/ratio_max",
            "loss/value",
            "critic/grad_norm",
        )
        numbers = ", ".join(f"{name}={metrics[name]:g}" for name in known if name in metrics)
        first = step - self.in_a_row + 1
        raise NonFiniteStepsError(
            f"Steps {first} to {step} were skipped, because their loss or gradient is not finite: more than "
            f"trainer.failures.max_nonfinite_steps={self._limit} in a row. The last one: {numbers}. Likely causes: "
            f"{'; '.join(CAUSES[key] for key in skipped)}. Start from the policy of a checkpoint from before step {first}, with "
            "another setting under another trainer.run_dir."
        )

"""The optimizer: AdamW with float32 master weights, and the limit on skipped steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from skyrl_train.config.schema import OptimizerConfig
from skyrl_train.errors import ConfigError, NonFiniteStepsError
from skyrl_train.training.schedules import SCHEDULES

_NORM_EPSILON = 1e-6  # added to the norm when clipping, as in torch.nn.utils.clip_grad_norm_
# Likely causes of skipped steps, by the metric that counts them.
_NONFINITE_CAUSES = {
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


class PolicyOptimizer:
    """AdamW (arXiv 1711.05101), global-norm clipping, and a guard against gradients that are not finite.

    A bfloat16 weight has 8 bits of mantissa: an update below 1/256 of it would vanish. Such weights get float32
    masters; gradients of all micro-batches add up in float32 there, AdamW moves the masters, and the weights are their
    rounding. Float32 weights are their own masters.

    Args:
        section: the section of the configuration with ``config``, for messages.

    Attributes:
        adamw: moves the masters; their accumulated gradients are in ``grad``.

    Raises:
        ConfigError: the scheduler is unknown in this process, or a pattern of ``lr_multipliers`` matches nothing.
    """

    def __init__(self, model: torch.nn.Module, config: OptimizerConfig, section: str = "trainer.policy") -> None:
        # The driver may know a scheduler that a rank does not. It must fail here, before the first rollout.
        SCHEDULES.get(config.scheduler, f"{section}.optimizer_config.scheduler")
        self._section = section
        self._max_grad_norm = config.max_grad_norm
        self._weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters = {name: _master_of(p) for name, p in self._weights.items()}
        beta1, beta2 = config.adam_betas
        self.adamw = torch.optim.AdamW(
            _groups(self._masters, config, f"{section}.optimizer_config"),
            lr=config.lr,
            betas=(beta1, beta2),
            eps=config.adam_eps,
            fused=True,
        )

    def step(self, learning_rate: float, gradient_scale: float) -> float:
        """Scale the accumulated gradients, clip them by their global norm, and move the weights.

        Returns:
            Global L2 norm of the gradients after scaling and before clipping. If it is not finite, weights and moments have not
            changed.
        """
        gradients = [p.grad for p in self._masters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):  # summed on the mesh's device, also for offloaded gradients
            norm = norm.to(norm.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
        grad_norm = float(norm) * gradient_scale
        if not math.isfinite(grad_norm):
            return grad_norm
        # One factor for scale and clipping: each gradient is passed over once.
        clip = min(1.0, self._max_grad_norm / (grad_norm + _NORM_EPSILON))
        for gradient in gradients:
            gradient.mul_(gradient_scale * clip)
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate * group["lr_multiplier"]
        self.adamw.step()
        with torch.no_grad():  # the weights are the rounding of their masters
            for name, weight in self._weights.items():
                if self._masters[name] is not weight:
                    weight.copy_(self._masters[name])
        return grad_norm

    def state_dict(self) -> dict[str, Any]:
        """Return moments, and masters where they are not the weights themselves. References, not copies."""
        separate = {name: m.detach() for name, m in self._masters.items() if m is not self._weights[name]}
        return {"adamw": self.adamw.state_dict(), "masters": separate}

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return AdamW's state by parameter name: ``exp_avg`` and ``exp_avg_sq`` shaped like the parameter, and ``step``, a
        scalar. References, not copies; empty for a parameter that was never trained.
        """
        return {name: dict(self.adamw.state.get(master, {})) for name, master in self._masters.items()}

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield masters and moments; float32 masters are the weights themselves."""
        yield from self._masters.values()
        for state in self.adamw.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    @torch.no_grad()
    def make_moments(self) -> None:
        """Create zero moments for parameters that were never trained, as their first step would."""
        for master in self._masters.values():
            if not self.adamw.state.get(master):
                self.adamw.state[master] = {
                    "step": torch.zeros((), dtype=torch.float32, device=master.device),
                    "exp_avg": torch.zeros_like(master),
                    "exp_avg_sq": torch.zeros_like(master),
                }

    def check_state_dict(self, state: dict[str, Any]) -> str | None:
        """Return why ``state`` does not fit this optimizer, or None if it fits."""
        mine = self.state_dict()
        if {n: m.shape for n, m in state["masters"].items()} != {n: m.shape for n, m in mine["masters"].items()}:
            return f"other master weights ({self._section}.dtype differs)"
        sizes = [[len(g["params"]) for g in s["adamw"]["param_groups"]] for s in (state, mine)]
        if sizes[0] != sizes[1]:
            return "other parameter groups"
        shapes = [p.shape for group in self.adamw.param_groups for p in group["params"]]
        moments = state["adamw"]["state"]
        if any(m[key].shape != shapes[i] for i, m in moments.items() for key in ("exp_avg", "exp_avg_sq")):
            return "moments of other shapes"
        return None

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state_dict``; betas, eps and decay keep the values of the configuration."""
        # A resumed run may have other settings; AdamW's own load would bring back the old ones.
        settings = [{k: v for k, v in g.items() if k != "params"} for g in self.adamw.param_groups]
        self.adamw.load_state_dict(state["adamw"])
        for group, own in zip(self.adamw.param_groups, settings, strict=True):
            group.update(own)
        for name, master in state["masters"].items():
            self._masters[name].copy_(master)


def _groups(parameters: Mapping[str, torch.nn.Parameter], config: OptimizerConfig, where: str) -> list[dict[str, Any]]:
    """Group the parameters by learning rate and weight decay.

    Norms and biases are not decayed: pulling them to 0 shrinks activations instead of bounding the weights.

    Raises:
        ConfigError: a pattern of ``lr_multipliers`` matches no parameter first.
    """
    groups: dict[tuple[str | None, bool], dict[str, Any]] = {}
    patterns = [*config.lr_multipliers, None]
    for pattern in patterns:
        multiplier = 1.0 if pattern is None else config.lr_multipliers[pattern]
        for decayed in (True, False):
            decay = config.weight_decay if decayed else 0.0
            groups[pattern, decayed] = {"params": [], "weight_decay": decay, "lr_multiplier": multiplier}
    for name, parameter in parameters.items():
        pattern = next((each for each in config.lr_multipliers if fnmatchcase(name, each)), None)
        # Norms and biases are the parameters with one axis.
        groups[pattern, parameter.ndim >= 2]["params"].append(parameter)
    for pattern in config.lr_multipliers:
        if not groups[pattern, True]["params"] and not groups[pattern, False]["params"]:
            raise ConfigError(
                f"{where}.lr_multipliers: no trained parameter is the first that {pattern!r} matches; "
                f"names look like {next(iter(parameters), '(there is none)')!r}. Change the pattern or remove it."
            )
    return [group for group in groups.values() if group["params"]]


def _master_of(weight: torch.nn.Parameter) -> torch.nn.Parameter:
    if weight.dtype in (torch.float32, torch.float64):
        return weight
    master = torch.nn.Parameter(weight.detach().float())

    # Runs after each backward pass of a micro-batch, so the float32 master adds up what bfloat16 could not.
    def add_to_master(parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        # Freed here, so that only the float32 gradient of the master stays in memory.
        parameter.grad = None
        if gradient is not None:
            master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)

    weight.register_post_accumulate_grad_hook(add_to_master)
    return master


class NonFiniteSteps:
    """Counts optimizer steps in a row that were skipped because their loss or gradient is not finite. A pure rule.

    A skipped step moves nothing, so a single one costs no more than its groups. Many in a row mean that the policy or the
    critic has diverged: more steps would only use up prompts.

    Args:
        limit: steps in a row that may be skipped; one more is an error.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.in_a_row = 0  # part of a checkpoint: a resumed run continues to count

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step. A step of several passes counts as skipped if any pass was skipped.

        Raises:
            NonFiniteStepsError: too many in a row.
        """
        skipped = [key for key in _NONFINITE_CAUSES if metrics.get(key, 0.0) > 0]
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
            f"{'; '.join(_NONFINITE_CAUSES[key] for key in skipped)}. Start from the policy of a checkpoint from before step "
            f"{first}, with another setting under another trainer.run_dir."
        )

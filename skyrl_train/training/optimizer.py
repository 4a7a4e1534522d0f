"""AdamW over the policy's parameters, with float32 master weights where the policy itself is narrower."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from skyrl_train.config.schema.training import OptimizerConfig
from skyrl_train.errors import ConfigError
from skyrl_train.training.schedule import SCHEDULES

_NORM_EPSILON = 1e-6  # beside the norm that gradients are clipped by, as in torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """``grad_norm`` is the global L2 norm of the gradients after scaling and before clipping; ``applied`` is False where it
    was not finite.
    """

    grad_norm: float
    applied: bool


class PolicyOptimizer:
    """AdamW (arXiv 1711.05101), global-norm clipping, and a guard against gradients that are not finite.

    A bfloat16 weight has 8 bits of mantissa: an update below 1/256 of it would vanish. Such weights get float32
    masters; gradients of all micro-batches add up in float32 there, AdamW moves the masters, and the weights are their
    rounding. Float32 weights are their own masters.
    """

    def __init__(self, model: torch.nn.Module, config: OptimizerConfig, whose: str = "trainer.policy") -> None:
        """
        Args:
            whose: the section of the configuration that ``config`` is in, for messages.

        Raises:
            ConfigError: an unknown schedule, an impossible number, or a pattern of ``lr_multipliers`` that matches nothing.
        """
        self._whose = whose
        where = f"{whose}.optimizer_config"
        _check(config, where)
        self._max_grad_norm = config.max_grad_norm
        self._weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters = {name: _master_of(p) for name, p in self._weights.items()}
        beta1, beta2 = config.adam_betas
        self._adamw = torch.optim.AdamW(
            _groups(self._masters, config, where),
            lr=config.lr,
            betas=(beta1, beta2),
            eps=config.adam_eps,
            fused=True,
        )

    def zero_grad(self) -> None:
        """Forgets the gradients that have added up."""
        self._adamw.zero_grad(set_to_none=True)

    def step(self, learning_rate: float, gradient_scale: float) -> StepOutcome:
        """Scales the gradients that have added up, clips them to their global norm, and moves the weights.

        Weights and moments stay as they are if a gradient is not finite.
        """
        gradients = [p.grad for p in self._masters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):  # added up where the ranks talk, wherever the gradients lie
            norm = norm.to(norm.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
        grad_norm = float(norm) * gradient_scale
        if not math.isfinite(grad_norm):
            return StepOutcome(grad_norm, applied=False)
        clip = min(1.0, self._max_grad_norm / (grad_norm + _NORM_EPSILON))
        for gradient in gradients:
            gradient.mul_(gradient_scale * clip)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate * group["lr_multiplier"]
        self._adamw.step()
        self.round_masters_to_weights()
        return StepOutcome(grad_norm, applied=True)

    @torch.no_grad()
    def round_masters_to_weights(self) -> None:
        """Makes the weights the rounding of their masters."""
        for name, weight in self._weights.items():
            if self._masters[name] is not weight:
                weight.copy_(self._masters[name])

    def state_dict(self) -> dict[str, Any]:
        """Moments, and the masters where they are not the weights themselves. References, not copies."""
        separate = {name: m.detach() for name, m in self._masters.items() if m is not self._weights[name]}
        return {"adamw": self._adamw.state_dict(), "masters": separate}

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """By parameter name what AdamW knows of it: ``exp_avg`` and ``exp_avg_sq`` like the parameter, and ``step``, a
        scalar. References, not copies; nothing for a parameter that was never trained.
        """
        return {name: dict(self._adamw.state.get(master, {})) for name, master in self._masters.items()}

    @torch.no_grad()
    def make_moments(self) -> None:
        """Makes the moments of parameters that were never trained: zeros, as their first step would."""
        for master in self._masters.values():
            if not self._adamw.state.get(master):
                self._adamw.state[master] = {
                    "step": torch.zeros((), dtype=torch.float32, device=master.device),
                    "exp_avg": torch.zeros_like(master),
                    "exp_avg_sq": torch.zeros_like(master),
                }

    def check_state_dict(self, state: dict[str, Any]) -> str | None:
        """Returns why ``state`` does not fit this optimizer, or None where it does."""
        mine = self.state_dict()
        if {n: m.shape for n, m in state["masters"].items()} != {n: m.shape for n, m in mine["masters"].items()}:
            return f"other master weights ({self._whose}.dtype differs)"
        sizes = [[len(g["params"]) for g in s["adamw"]["param_groups"]] for s in (state, mine)]
        if sizes[0] != sizes[1]:
            return "other parameter groups"
        shapes = [p.shape for group in self._adamw.param_groups for p in group["params"]]
        moments = state["adamw"]["state"]
        if any(m[key].shape != shapes[i] for i, m in moments.items() for key in ("exp_avg", "exp_avg_sq")):
            return "moments of other shapes"
        return None

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned; betas, eps and decay stay those of the configuration."""
        settings = [{k: v for k, v in g.items() if k != "params"} for g in self._adamw.param_groups]
        self._adamw.load_state_dict(state["adamw"])
        for group, own in zip(self._adamw.param_groups, settings, strict=True):
            group.update(own)
        for name, master in state["masters"].items():
            self._masters[name].copy_(master)


def _groups(parameters: Mapping[str, torch.nn.Parameter], config: OptimizerConfig, where: str) -> list[dict[str, Any]]:
    """AdamW's groups: the parameters of one rate and one decay.

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

    def add_to_master(parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        parameter.grad = None
        if gradient is not None:
            master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)

    weight.register_post_accumulate_grad_hook(add_to_master)
    return master


def _check(config: OptimizerConfig, where: str) -> None:
    SCHEDULES.get(config.scheduler, f"{where}.scheduler")
    if not (math.isfinite(config.lr) and config.lr >= 0):
        raise ConfigError(f"{where}.lr must be finite and >= 0, got {config.lr}.")
    if len(config.adam_betas) != 2 or not all(0 <= beta < 1 for beta in config.adam_betas):
        raise ConfigError(f"{where}.adam_betas must be two numbers in [0, 1), got {list(config.adam_betas)}.")
    if not config.adam_eps > 0:
        raise ConfigError(f"{where}.adam_eps must be positive, got {config.adam_eps}.")
    if not config.weight_decay >= 0:
        raise ConfigError(f"{where}.weight_decay must be >= 0, got {config.weight_decay}.")
    if not config.max_grad_norm > 0:
        raise ConfigError(
            f"{where}.max_grad_norm must be positive (.inf switches clipping off), got {config.max_grad_norm}."
        )
    for pattern, factor in config.lr_multipliers.items():
        if not (math.isfinite(factor) and factor >= 0):
            raise ConfigError(f"{where}.lr_multipliers[{pattern!r}] must be finite and >= 0, got {factor}.")
    if config.num_warmup_steps < 0:
        raise ConfigError(f"{where}.num_warmup_steps must be >= 0, got {config.num_warmup_steps}.")

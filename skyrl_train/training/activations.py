"""Activation checkpointing: layers keep their inputs only, and run again in the backward pass (Chen et al. 2016)."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from skyrl_train.errors import ConfigError


def checkpoint_activations(model: PreTrainedModel, whose: str = "trainer.policy") -> None:
    """Makes each layer of the model keep nothing but its inputs for the backward pass.

    That of transformers works in training mode only, and policies are trained in evaluation mode. Only ``forward`` is
    run again, within the hooks of the layer: a sharded layer (FSDP2) has its weights gathered by then.

    Args:
        whose: the section of the configuration with the model's settings, for messages.

    Raises:
        ConfigError: the model has no layers that can run again.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"{whose}.gradient_checkpointing=true: {type(model).__name__} has no layers that can be checkpointed. "
            "Set it to false, and lower trainer.micro_batch_tokens if memory is short."
        )
    for layer in layers:
        layer.forward = _checkpointed(layer.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run

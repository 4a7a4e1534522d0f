"""Changes to the layers of a model before training: activation checkpointing and compilation.

Activation checkpointing (Chen et al. 2016, arXiv 1604.06174): layers keep their inputs only, and run again in the backward pass.

Compilation (``torch.compile``) covers each layer around its attention, for any number of tokens:

    layer.forward   [norm, projections] compiled ── attention as it is ── [projection, feed-forward] compiled

The segments of a packed row differ in every micro-batch. Attention within them is not compiled, so the compiled code depends on
the number of tokens alone, which dynamic shapes cover.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from skyrl_train.errors import ConfigError


def checkpoint_activations(model: PreTrainedModel, section: str = "trainer.policy") -> None:
    """Make each layer of the model keep nothing but its inputs for the backward pass.

    transformers' own checkpointing works in training mode only, and policies are trained in evaluation mode. Only ``forward``
    runs again, within the hooks of the layer: a sharded layer (FSDP2) has its weights gathered by then.

    Args:
        section: the section of the configuration with the model's settings, for messages.

    Raises:
        ConfigError: the model has no layers that can run again.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"{section}.gradient_checkpointing: {type(model).__name__} has no layers that can be checkpointed. "
            "Set it to false, and lower trainer.micro_batch_tokens if memory is short."
        )
    for layer in layers:
        layer.forward = _checkpointed(layer.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        # Without gradients there is no backward pass that would need the inputs.
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def compile_layers(model: PreTrainedModel) -> None:
    """Compile the ``forward`` of each layer at its first call, within the hooks of a sharded layer (FSDP2).

    Raises:
        ConfigError: the model has no layers that are known to be alike.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"trainer.policy.compile=true: {type(model).__name__} has no layers of the kind that transformers repeats. Set it to "
            "false."
        )
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)

"""Layers compiled by ``torch.compile``, each around its attention, with the number of tokens left open.

    layer.forward   [norm, projections] compiled ── attention as it is ── [projection, feed-forward] compiled

The segments of a packed row are others in every micro-batch: attention within them is not compiled, so that what is compiled
depends on the number of tokens alone, and dynamic shapes cover all of those.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from skyrl_train.errors import ConfigError


def compile_layers(model: PreTrainedModel) -> None:
    """Compiles the ``forward`` of each layer as it is called first, within the hooks of a sharded layer (FSDP2).

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

"""What a rank keeps of a forward pass for its backward pass, from the model's shape: no torch, no weights."""

from __future__ import annotations

from skyrl_train.config.model_shape import BYTES_PER_ELEMENT, ModelShape
from skyrl_train.config.schema.trainer import TrainerConfig
from skyrl_train.config.schema.training import TrainingStrategy

_FLOAT32_BYTES = 4
_TOKEN_BYTES = 64  # ids, log-probs and what the loss keeps of them


def activation_bytes(trainer: TrainerConfig, shape: ModelShape, tokens: int) -> int:
    """At most, for a micro-batch of ``tokens`` tokens, of which each rank has its slice.

    Per token and layer: two norms, which compute in float32, and what they give (8 bytes and 4 elements, times the hidden
    size); queries, keys, values, what attention gives and its copy, and the norms of queries and keys where the architecture has
    them (8 bytes and 7 elements, times all heads' size); gate, activated gate, up and their product (4 elements, times the size
    in between). Layers that run again in the backward pass keep their input, and one of them everything. Logits are computed in
    tiles, and again for the backward pass.
    """
    element = BYTES_PER_ELEMENT[trainer.policy.dtype]
    sharded = trainer.strategy is TrainingStrategy.fsdp2
    on_rank = -(-tokens // trainer.fsdp.sequence_parallel_size) if sharded else tokens
    hidden = shape.hidden_size
    norms = 2 * _FLOAT32_BYTES * hidden + 4 * element * hidden
    attention = (2 * _FLOAT32_BYTES + 7 * element) * shape.num_heads * shape.head_dim
    numbers = _FLOAT32_BYTES * (3 * shape.num_heads + 2)  # one per norm, and one per head of attention
    layer = norms + attention + numbers + 4 * element * shape.intermediate_size
    kept = (
        shape.num_layers * (element * hidden) + layer
        if trainer.policy.gradient_checkpointing
        else shape.num_layers * layer
    )
    top = (_FLOAT32_BYTES + 2 * element) * hidden + 2 * element * shape.head_dim + _TOKEN_BYTES
    return on_rank * (kept + top)

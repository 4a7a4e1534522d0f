"""Scores tokens under a causal LM: log-probs and entropies at the scored tokens only.

The model's output layer runs on the hidden states of scored tokens alone: a hook on it selects them, so that ``[R, L,
vocab]`` logits never exist and whatever the architecture does after that layer (scaling, soft-capping) still applies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from skyrl_train.errors import ModelError
from skyrl_train.training.batch import MicroBatch

ENTROPY_CHUNK_TOKENS = 1024  # rows of [*, vocab] that the entropy's temporaries hold at once


def scored_logits(model: PreTrainedModel, micro_batch: MicroBatch, temperature: float) -> torch.Tensor:
    """Logits over the vocabulary that predict the N scored tokens, divided by the sampling temperature.

    Returns:
        ``[N, V]`` in float32 (float64 under a float64 model).
    """
    device = model.device
    with _only_rows(model, micro_batch.scored.to(device)):
        logits: torch.Tensor = model(
            input_ids=micro_batch.input_ids.to(device),
            attention_mask=micro_batch.attention_mask.to(device),
            position_ids=micro_batch.position_ids.to(device),
            use_cache=False,
        ).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature == 1.0 else logits / temperature


def token_logprobs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Natural log-probs ``[N]`` of ``targets`` (int64 ``[N]``) under logits ``[N, V]``."""
    return logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(dim=1)


def token_entropies(logits: torch.Tensor) -> torch.Tensor:
    """Entropies ``[N]`` in nats of the distributions with logits ``[N, V]``; differentiable."""
    return torch.cat([_entropy(chunk) for chunk in logits.split(ENTROPY_CHUNK_TOKENS)])


def _entropy(logits: torch.Tensor) -> torch.Tensor:
    log_partition = logits.logsumexp(dim=1)
    return log_partition - (logits.softmax(dim=1) * logits).sum(dim=1)


@contextmanager
def _only_rows(model: PreTrainedModel, rows: torch.Tensor) -> Iterator[None]:
    """While open, the output layer sees only the hidden states where ``rows`` (bool ``[R, L]``) is True."""
    output_layer = model.get_output_embeddings()
    if output_layer is None:
        raise ModelError(f"{type(model).__name__} has no output embeddings; train a causal language model.")
    handle = output_layer.register_forward_pre_hook(_row_selector(rows))
    try:
        yield
    finally:
        handle.remove()


def _row_selector(rows: torch.Tensor) -> Callable[[torch.nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    index = rows.flatten().nonzero().squeeze(1)

    def select(_module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *rest = args
        return (hidden.flatten(0, 1).index_select(0, index), *rest)

    return select

"""A micro-batch through the model: log-probs and entropies at the scored tokens only, in one of two ways; or hidden states.

chunked        the model's body, then the head a chunk of tokens at a time (:mod:`skyrl_train.training.head`)
full logits    the model's own forward pass, whatever it does after its head; a hook gives the head scored tokens only
hidden states  the model's body alone, and what the caller does with its outputs (a critic)

All go through ``model(...)``, and reach the head's weight only inside ``head(...)``: the hooks of a sharded model
(FSDP2), which gather weights around the ``forward`` of a module, see calls and outputs as in any other pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from skyrl_train.errors import ModelError
from skyrl_train.training.attention import packed_mask
from skyrl_train.training.batch import MicroBatch
from skyrl_train.training.head import LogitRule, token_scores

ENTROPY_CHUNK_TOKENS = 1024  # rows of [*, vocab] that the entropy's temporaries hold at once


def compute_device(model: PreTrainedModel) -> torch.device:
    """Where the model computes: its parameters may wait in main memory (``trainer.fsdp.cpu_offload``)."""
    weight = next(model.parameters())
    if isinstance(weight, DTensor) and weight.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return model.device


def share_weights_again(model: PreTrainedModel) -> None:
    """Frees the layers of a sharded model that a forward pass has left whole, for a backward pass that does not follow.

    Whoever asked for the parameters would be given the whole ones, which no optimizer moves.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def can_chunk(model: PreTrainedModel) -> bool:
    """Whether the model is a body that ends in hidden states and a linear head on top of it."""
    return isinstance(model.get_output_embeddings(), torch.nn.Linear) and model.base_model is not model


def chunked_scores(
    model: PreTrainedModel, micro_batch: MicroBatch, rule: LogitRule, *, fp32: bool, differentiate_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies ``[N]``; nothing of size N times the vocabulary exists at any time.

    Args:
        rule: all that the model does after its head, and the temperature.
        fp32: see :func:`skyrl_train.training.head.token_scores`.
    """
    head, body = _head(model), model.base_model
    device = compute_device(model)
    outputs, targets = micro_batch.outputs.to(device), micro_batch.targets.to(device)

    def of_head(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_scores(hidden, head, targets, rule, fp32=fp32, differentiate_entropy=differentiate_entropy)  # type: ignore[arg-type]

    def of_model(**inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = body(**inputs).last_hidden_state.flatten(0, 1).index_select(0, outputs)
        scores: tuple[torch.Tensor, torch.Tensor] = head(hidden)
        return scores

    with _as_forward(head, of_head), _as_forward(model, of_model):
        scores: tuple[torch.Tensor, torch.Tensor] = model(**_inputs(model, micro_batch))
    return scores


def full_scores(
    model: PreTrainedModel, micro_batch: MicroBatch, temperature: float, *, differentiate_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies ``[N]`` from the model's own logits ``[N, V]``."""
    logits = scored_logits(model, micro_batch, temperature)
    logprobs = token_logprobs(logits, micro_batch.targets.to(logits.device))
    with torch.set_grad_enabled(differentiate_entropy and torch.is_grad_enabled()):
        return logprobs, token_entropies(logits)


def scored_hidden(
    model: PreTrainedModel, micro_batch: MicroBatch, then: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """``then`` of the hidden states ``[N, d]`` that the scored tokens were sampled from; what the model does after its head
    (scales, caps) is left out.

    Raises:
        ModelError: the model has no body apart from its head.
    """
    body = model.base_model
    if body is model:
        raise ModelError(f"{type(model).__name__} has no body apart from its head; name another model.")
    outputs = micro_batch.outputs.to(compute_device(model))

    def of_model(**inputs: Any) -> torch.Tensor:
        return then(body(**inputs).last_hidden_state.flatten(0, 1).index_select(0, outputs))

    with _as_forward(model, of_model):
        result: torch.Tensor = model(**_inputs(model, micro_batch))
    return result


def scored_logits(model: PreTrainedModel, micro_batch: MicroBatch, temperature: float) -> torch.Tensor:
    """Logits over the vocabulary that predict the N scored tokens, divided by the sampling temperature.

    Returns:
        ``[N, V]`` in float32 (float64 under a float64 model).
    """
    with _only_outputs(model, micro_batch.outputs.to(compute_device(model))):
        logits: torch.Tensor = model(**_inputs(model, micro_batch)).logits
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


def _inputs(model: PreTrainedModel, micro_batch: MicroBatch) -> dict[str, Any]:
    device, segments, mask = compute_device(model), micro_batch.segments, micro_batch.attention_mask
    inputs: dict[str, Any] = {
        "input_ids": micro_batch.input_ids.to(device),
        "attention_mask": packed_mask(device) if mask is None else mask.to(device),
        "position_ids": micro_batch.position_ids.to(device),
        "use_cache": False,
    }
    return inputs if segments is None else inputs | {"segments": segments.to(device)}


def _head(model: PreTrainedModel) -> torch.nn.Module:
    head: torch.nn.Module | None = model.get_output_embeddings()
    if head is None:
        raise ModelError(f"{type(model).__name__} has no output embeddings; train a causal language model.")
    return head


@contextmanager
def _as_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """While open, a call of the module runs ``forward`` between the module's hooks."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


@contextmanager
def _only_outputs(model: PreTrainedModel, outputs: torch.Tensor) -> Iterator[None]:
    """While open, the head sees only the hidden states at ``outputs`` (places in the flattened rows)."""

    def select(_module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *rest = args
        return (hidden.flatten(0, 1).index_select(0, outputs), *rest)

    handle = _head(model).register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()

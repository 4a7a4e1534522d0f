"""Log-probs and entropies from hidden states, a chunk of tokens at a time: ``[N, vocab]`` logits never exist.

hidden [N, d] ──chunk──> logits [n, V] ──> log-prob, entropy (forward); gradients of hidden and weight (backward, again)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from transformers import PreTrainedModel

# Bytes of a chunk's logits; a few buffers of that size exist at once. Large enough that each chunk's product with the
# head is worth reading the head's weight for.
_CHUNK_BYTES = {"cpu": 2**24}
_CHUNK_BYTES_ELSEWHERE = 2**28


@dataclass(frozen=True, slots=True)
class LogitRule:
    """What a model and the sampling do to the head's outputs: scale, cap (``cap * tanh(logits / cap)``), temperature."""

    scale: float = 1.0
    cap: float | None = None
    temperature: float = 1.0

    @classmethod
    def of(cls, model: PreTrainedModel, temperature: float) -> LogitRule:
        """As the model's configuration declares it: Cohere multiplies, Granite divides, Gemma caps."""
        config = model.config.get_text_config()
        scale = float(getattr(config, "logit_scale", None) or 1.0)
        divisor = float(getattr(config, "logits_scaling", None) or 1.0)
        cap = getattr(config, "final_logit_softcapping", None)
        return cls(scale / divisor, None if cap is None else float(cap), temperature)

    def apply_(self, logits: torch.Tensor) -> torch.Tensor:
        """In place."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.cap is not None:
            logits.div_(self.cap).tanh_().mul_(self.cap)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def backward_(self, gradient: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Turns the gradient of the results ``logits`` into that of the head's outputs, in place; uses up ``logits``."""
        if self.cap is not None:
            gradient.mul_(logits.mul_(self.temperature / self.cap).square_().neg_().add_(1.0))
        factor = self.scale / self.temperature
        return gradient if factor == 1.0 else gradient.mul_(factor)


def token_scores(
    hidden: torch.Tensor,
    head: torch.nn.Linear,
    targets: torch.Tensor,
    rule: LogitRule,
    *,
    fp32: bool,
    differentiate_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs ``[N]`` of ``targets`` (int64 ``[N]``) and the entropies ``[N]`` in nats, float32 or wider.

    Peak memory beside inputs and gradients does not depend on N times the vocabulary.

    Args:
        hidden: ``[N, d]``, what the head gets.
        fp32: products in float32 of a narrower head, as inference engines with a float32 head do. Takes a float32 copy
            of the head's weight while it runs.
    """
    scores: tuple[torch.Tensor, torch.Tensor] = _TokenScores.apply(
        hidden, head.weight, head.bias, targets, rule, fp32, differentiate_entropy
    )
    return scores


@dataclass(frozen=True, slots=True)
class _Head:
    """The head in the dtype of its products, and how its inputs are cut."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    rule: LogitRule

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None, rule: LogitRule, fp32: bool) -> _Head:
        dtype = torch.promote_types(weight.dtype, torch.float32) if fp32 else weight.dtype
        return cls(weight.to(dtype), None if bias is None else bias.to(dtype), rule)

    def chunks(self, hidden: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Which tokens, what the head gets for them, and their logits after the rule (float32 or wider)."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        budget = _CHUNK_BYTES.get(hidden.device.type, _CHUNK_BYTES_ELSEWHERE)
        rows = max(1, budget // (self.weight.shape[0] * wide.itemsize))
        for start in range(0, hidden.shape[0], rows):
            tokens = slice(start, start + rows)
            inputs = hidden[tokens].to(self.weight.dtype)
            yield tokens, inputs, self.rule.apply_(linear(inputs, self.weight, self.bias).to(wide))


class _TokenScores(torch.autograd.Function):
    """Backward computes each chunk's logits again, so that forward keeps two numbers per token."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        rule: LogitRule,
        fp32: bool,
        differentiate_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        head = _Head.of(weight, bias, rule, fp32)
        wide = torch.promote_types(head.weight.dtype, torch.float32)
        logprobs, entropies, partition = (hidden.new_empty(hidden.shape[0], dtype=wide) for _ in range(3))
        for tokens, _, logits in head.chunks(hidden):
            partition[tokens] = logits.logsumexp(dim=1)
            logprobs[tokens] = logits.gather(1, targets[tokens, None]).squeeze(1) - partition[tokens]
            expected = (logits - partition[tokens, None]).exp_().mul_(logits).sum(dim=1)
            entropies[tokens] = partition[tokens] - expected
        ctx.save_for_backward(hidden, weight, bias, targets, partition, entropies)
        ctx.rule, ctx.fp32 = rule, fp32
        if not differentiate_entropy:
            ctx.mark_non_differentiable(entropies)
        ctx.differentiate_entropy = differentiate_entropy
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprobs: torch.Tensor, of_entropies: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, partition, entropies = ctx.saved_tensors
        head = _Head.of(weight, bias, ctx.rule, ctx.fp32)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        to_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Sums over chunks are kept in float32 or wider.
        to_weight = torch.zeros_like(weight, dtype=partition.dtype) if needs_weight else None
        to_bias = torch.zeros_like(bias, dtype=partition.dtype) if needs_bias else None
        for tokens, inputs, logits in head.chunks(hidden):
            logprobs = logits - partition[tokens, None]
            gradient = logprobs.exp()
            if ctx.differentiate_entropy:
                of_each = of_logprobs[tokens, None] + of_entropies[tokens, None] * (
                    logprobs.add_(entropies[tokens, None])
                )
                gradient.mul_(of_each).neg_()
            else:
                gradient.mul_(of_logprobs[tokens, None]).neg_()
            gradient.scatter_add_(1, targets[tokens, None], of_logprobs[tokens, None])
            gradient = ctx.rule.backward_(gradient, logits)
            if to_bias is not None:
                to_bias += gradient.sum(dim=0)
            gradient = gradient.to(inputs.dtype)
            if to_hidden is not None:
                to_hidden[tokens] = gradient @ head.weight
            if to_weight is not None:
                _add_product(to_weight, gradient.T, inputs)
        return (
            to_hidden,
            None if to_weight is None else to_weight.to(weight.dtype),
            None if to_bias is None else to_bias.to(bias.dtype),
            *[None] * 4,
        )


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right

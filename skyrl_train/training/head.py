"""Log-probs and entropies from hidden states, a tile of tokens and vocabulary at a time: ``[N, vocab]`` logits never exist.

hidden [N, d] ──tiles──> logits [n, v] ──> log-prob, entropy (forward); gradients of hidden and weight (backward, again)

The size of a tile, and of everything held beside inputs, results and gradients, depends neither on N nor on the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from transformers import PreTrainedModel

from skyrl_train.training.upload import upload

if TYPE_CHECKING:
    from skyrl_train.training.head_kernels import Sums

# The logit of a token that a grammar forbids: its probability is 0. Finite, because 0 times infinity is no number; and its
# square is finite in float32, too.
FORBIDDEN = -1e15
# Bytes of a tile's logits, of which two or three exist at once, and its largest number of columns (vocabulary). Large enough that
# the product with a block of the head outweighs reading the block. A power of two: on an H100, products of 16 bit with an odd
# number of columns took five times as long, because their kernels read element by element.
_BLOCK_COLUMNS = 8192
_TILE_BYTES = {"cpu": 2**24}
_TILE_BYTES_ELSEWHERE = 2**28


@dataclass(frozen=True, slots=True)
class LogitRule:
    """Operations on the head's outputs by the model and the sampling: scale, cap (``cap * tanh(logits / cap)``), temperature."""

    scale: float = 1.0
    cap: float | None = None
    temperature: float = 1.0

    @classmethod
    def of(cls, model: PreTrainedModel, temperature: float) -> LogitRule:
        """Read the rule from the model's configuration: Cohere multiplies, Granite divides, Gemma caps."""
        config = model.config.get_text_config()
        scale = float(getattr(config, "logit_scale", None) or 1.0)
        divisor = float(getattr(config, "logits_scaling", None) or 1.0)
        cap = getattr(config, "final_logit_softcapping", None)
        return cls(scale / divisor, None if cap is None else float(cap), temperature)

    def apply_(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply the rule to logits, in place."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.cap is not None:
            logits.div_(self.cap).tanh_().mul_(self.cap)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def backward_(self, gradient: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Turn the gradient of ``logits`` into the gradient of the head's outputs, in place; overwrites ``logits``."""
        if self.cap is not None:
            gradient.mul_(logits.mul_(self.temperature / self.cap).square_().neg_().add_(1.0))
        factor = self.scale / self.temperature
        return gradient if factor == 1.0 else gradient.mul_(factor)


NO_RULE = LogitRule()


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """The tokens that could be sampled at N places, as a table of the U distinct masks.

    ``masks``: packed bits of the vocabulary, the first token in the lowest bit, uint8 ``[U, at least V / 8]``; ``rows``: the mask
    of each place, int64 ``[N]``.
    """

    masks: torch.Tensor
    rows: torch.Tensor

    def to(self, device: torch.device) -> AllowedTokens:
        """Return the same on ``device``."""
        return AllowedTokens(upload(self.masks, device), upload(self.rows, device))

    def forbid_(self, logits: torch.Tensor, tokens: slice, first: int) -> None:
        """Set logits ``[n, v]`` of forbidden tokens, in place.

        Args:
            tokens: the n places.
            first: the token of the first column, a multiple of 8.
        """
        width = logits.shape[1]
        packed = self.masks[self.rows[tokens], first // 8 : -(-(first + width) // 8)]
        shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
        bits = (packed[:, :, None] >> shifts) & 1
        logits.masked_fill_(bits.flatten(1)[:, :width] == 0, FORBIDDEN)


def token_scores(
    hidden: torch.Tensor,
    head: torch.nn.Linear,
    targets: torch.Tensor,
    rule: LogitRule,
    *,
    fp32: bool,
    differentiate_entropy: bool,
    allowed: AllowedTokens | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs ``[N]`` of ``targets`` (int64 ``[N]``) and entropies ``[N]`` in nats, float32 or wider.

    Peak memory beside inputs, results and gradients depends neither on N nor on the vocabulary.

    Args:
        hidden: ``[N, d]``, the input of the head.
        fp32: compute the products of a narrower head in float32, as inference engines with a float32 head do.
        allowed: on the same device; None: all tokens.
    """
    scores: tuple[torch.Tensor, torch.Tensor] = _TokenScores.apply(
        hidden, head.weight, head.bias, targets, rule, fp32, differentiate_entropy, allowed
    )
    return scores


class _Head:
    """The head, the dtype of its products, and the tiles into which they are split."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, fp32: bool) -> None:
        self._weight, self._bias = weight, bias
        self._dtype = torch.promote_types(weight.dtype, torch.float32) if fp32 else weight.dtype
        self.wide = torch.promote_types(self._dtype, torch.float32)  # of logits and of sums
        self._columns = min(weight.shape[0], _BLOCK_COLUMNS)

    def rows(self, hidden: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield slices of the tokens, with the input of the head for each."""
        budget = _TILE_BYTES.get(hidden.device.type, _TILE_BYTES_ELSEWHERE)
        rows = max(1, budget // (self._columns * self.wide.itemsize))
        for start in range(0, hidden.shape[0], rows):
            tokens = slice(start, start + rows)
            yield tokens, hidden[tokens].to(self._dtype)

    def tiles(self, inputs: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield slices of the vocabulary, with the head's weight and its outputs for ``inputs``, before the rule, for each."""
        for start in range(0, self._weight.shape[0], self._columns):
            block = slice(start, start + self._columns)
            weight = self._weight[block].to(self._dtype)
            bias = None if self._bias is None else self._bias[block].to(self._dtype)
            yield block, weight, linear(inputs, weight, bias)


class _TokenScores(torch.autograd.Function):
    """Forward keeps two numbers per token; backward computes each tile's logits again."""

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
        allowed: AllowedTokens | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        head = _Head(weight, bias, fp32)
        sums_of_rows, _ = _operations(hidden.device, head.wide)
        logprobs, entropies, partition = (hidden.new_empty(hidden.shape[0], dtype=head.wide) for _ in range(3))
        for tokens, inputs in head.rows(hidden):
            sums = sums_of_rows(len(inputs), partition)
            for block, _, outputs in head.tiles(inputs):
                if allowed is None:
                    sums.add(outputs, targets[tokens], block.start, rule)
                else:
                    logits = rule.apply_(outputs.to(head.wide))
                    allowed.forbid_(logits, tokens, block.start)
                    sums.add(logits, targets[tokens], block.start, NO_RULE)
            partition[tokens], logprobs[tokens], entropies[tokens] = sums.scores()
        ctx.save_for_backward(hidden, weight, bias, targets, partition, entropies)
        ctx.rule, ctx.fp32, ctx.allowed = rule, fp32, allowed
        if not differentiate_entropy:
            ctx.mark_non_differentiable(entropies)
        ctx.differentiate_entropy = differentiate_entropy
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprobs: torch.Tensor, of_entropies: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, partition, entropies = ctx.saved_tensors
        head = _Head(weight, bias, ctx.fp32)
        _, gradient_ = _operations(hidden.device, head.wide)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        to_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Sums over tiles are kept in float32 or wider.
        to_weight = torch.zeros_like(weight, dtype=head.wide) if needs_weight else None
        to_bias = torch.zeros_like(bias, dtype=head.wide) if needs_bias else None
        for tokens, inputs in head.rows(hidden):
            to_rows = torch.zeros_like(inputs, dtype=head.wide)
            of_rows = (partition[tokens], entropies[tokens], of_logprobs[tokens])
            of_each = of_entropies[tokens] if ctx.differentiate_entropy else None
            for block, of_block, outputs in head.tiles(inputs):
                if ctx.allowed is None:
                    gradient = gradient_(outputs, targets[tokens], block.start, ctx.rule, *of_rows, of_each)
                else:
                    logits = ctx.rule.apply_(outputs.to(head.wide))
                    masked = logits.clone()
                    ctx.allowed.forbid_(masked, tokens, block.start)
                    gradient = gradient_(masked, targets[tokens], block.start, NO_RULE, *of_rows, of_each)
                    gradient = ctx.rule.backward_(gradient, logits)
                if to_bias is not None:
                    to_bias[block] += gradient.sum(dim=0, dtype=head.wide)
                gradient = gradient.to(inputs.dtype)
                if to_hidden is not None:
                    _add_product(to_rows, gradient, of_block)
                if to_weight is not None:
                    _add_product(to_weight[block], gradient.T, inputs)
            if to_hidden is not None:
                to_hidden[tokens] = to_rows.to(hidden.dtype)
        return (
            to_hidden,
            None if to_weight is None else to_weight.to(weight.dtype),
            None if to_bias is None else to_bias.to(bias.dtype),
            *[None] * 5,
        )


class PlainSums:
    """Sums over the blocks of the vocabulary so far, from which log-probs and entropies follow, in the dtype of ``like``."""

    def __init__(self, rows: int, like: torch.Tensor) -> None:
        self._partition = like.new_full((rows,), -math.inf)  # log of the sum of exponentials
        self._mean, self._chosen = like.new_zeros(rows), like.new_zeros(rows)  # mean logit; the target's logit

    def add(self, outputs: torch.Tensor, targets: torch.Tensor, first: int, rule: LogitRule) -> None:
        """Add the head's outputs ``[n, v]`` for the block of the vocabulary that begins with token ``first``."""
        logits = rule.apply_(outputs.to(self._mean.dtype))
        inside, place = _places(targets, first, logits)
        self._chosen += torch.where(inside, logits.gather(1, place[:, None]).squeeze(1), 0.0)
        largest = logits.amax(dim=1)
        exponentials = (logits - largest[:, None]).exp_()
        sums = exponentials.sum(dim=1)
        of_block = largest + sums.log()
        both = torch.logaddexp(self._partition, of_block)
        mean_of_block = exponentials.mul_(logits).sum(dim=1) / sums
        self._mean = self._mean * (self._partition - both).exp() + mean_of_block * (of_block - both).exp()
        self._partition = both

    def scores(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the log of the sum of exponentials, the target's log-prob and the entropy, ``[rows]`` each."""
        return self._partition, self._chosen - self._partition, self._partition - self._mean


def plain_gradient_(
    outputs: torch.Tensor,
    targets: torch.Tensor,
    first: int,
    rule: LogitRule,
    partition: torch.Tensor,
    entropies: torch.Tensor,
    of_logprobs: torch.Tensor,
    of_entropies: torch.Tensor | None,
) -> torch.Tensor:
    """Return the gradient of the head's outputs ``[n, v]``; may overwrite ``outputs``.

    Args:
        partition: ``[n]``, log of the sum of exponentials over the whole vocabulary, from the forward pass, as ``entropies``.
        of_logprobs: ``[n]``, the gradient of the log-probs.
        of_entropies: ``[n]``, the gradient of the entropies; None: they are not differentiated.
    """
    logits = rule.apply_(outputs.to(partition.dtype))
    gradient = logits - partition[:, None]
    if of_entropies is not None:
        of_each = of_logprobs[:, None] + of_entropies[:, None] * (gradient + entropies[:, None])
        gradient.exp_().mul_(of_each).neg_()
    else:
        gradient.exp_().mul_(of_logprobs[:, None]).neg_()
    inside, place = _places(targets, first, logits)
    gradient.scatter_add_(1, place[:, None], torch.where(inside, of_logprobs, 0.0)[:, None])
    return rule.backward_(gradient, logits)


def _operations(device: torch.device, dtype: torch.dtype) -> tuple[type[PlainSums] | type[Sums], Any]:
    """Return the class that sums and the function that differentiates: kernels on a GPU with Triton, else plain operations."""
    if device.type == "cuda" and dtype == torch.float32 and find_spec("triton") is not None:
        from skyrl_train.training import head_kernels

        return head_kernels.Sums, head_kernels.gradient_
    return PlainSums, plain_gradient_


def _places(targets: torch.Tensor, first: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which targets are in a block of the vocabulary, and their positions in it; 0 or the last position for the others."""
    place = targets - first
    last = logits.shape[1] - 1
    return (place >= 0) & (place <= last), place.clamp(0, last)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right

"""Triton kernels of the head on GPUs: each reads a tile of logits once, where plain operations read and write it ten times.

One program has one row (a token) of a tile ``[n, v]`` and walks over its columns. What the numbers mean is in ``head.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from skyrl_train.training.head import LogitRule

_COLUMNS = 2048  # of a row, loaded at once


@triton.jit
def _ruled(logits, scale, cap, temperature, HAS_CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Apply ``LogitRule`` to the head's outputs."""
    logits = logits * scale
    if HAS_CAP:
        logits = cap * (2.0 * tl.sigmoid(2.0 * logits / cap) - 1.0)  # cap * tanh(logits / cap)
    return logits / temperature


@triton.jit
def _accumulate(  # type: ignore[no-untyped-def]
    logits,
    row_stride,
    targets,
    first,
    width,
    sums,
    rows,
    scale,
    cap,
    temperature,
    HAS_CAP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.load(sums + row)
    total = tl.load(sums + rows + row)
    weighted = tl.load(sums + 2 * rows + row)
    target = tl.load(targets + row) - first
    for start in range(0, width, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        here = tl.load(logits + row * row_stride + columns, mask=columns < width, other=0.0).to(tl.float32)
        here = tl.where(columns < width, _ruled(here, scale, cap, temperature, HAS_CAP), -float("inf"))
        before = largest
        largest = tl.maximum(largest, tl.max(here, 0))
        below = here - largest
        exponentials = tl.exp(below)
        shrink = tl.exp(before - largest)
        weighted = shrink * (weighted + (before - largest) * total)
        weighted += tl.sum(tl.where(columns < width, exponentials * below, 0.0), 0)
        total = total * shrink + tl.sum(exponentials, 0)
    tl.store(sums + row, largest)
    tl.store(sums + rows + row, total)
    tl.store(sums + 2 * rows + row, weighted)
    if (target >= 0) & (target < width):
        chosen = tl.load(logits + row * row_stride + target).to(tl.float32)
        tl.store(sums + 3 * rows + row, _ruled(chosen, scale, cap, temperature, HAS_CAP))


@triton.jit
def _differentiate(  # type: ignore[no-untyped-def]
    logits,
    row_stride,
    targets,
    first,
    width,
    partition,
    entropies,
    of_logprobs,
    of_entropies,
    scale,
    cap,
    temperature,
    HAS_CAP: tl.constexpr,
    OF_ENTROPY: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row) - first
    log_total = tl.load(partition + row)
    of_logprob = tl.load(of_logprobs + row)
    for start in range(0, width, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        place = logits + row * row_stride + columns
        outputs = tl.load(place, mask=columns < width, other=0.0)
        here = _ruled(outputs.to(tl.float32), scale, cap, temperature, HAS_CAP)
        logprobs = here - log_total
        of_each = of_logprob
        if OF_ENTROPY:
            of_each += tl.load(of_entropies + row) * (logprobs + tl.load(entropies + row))
        gradient = tl.where(columns == target, of_logprob, 0.0) - tl.exp(logprobs) * of_each
        if HAS_CAP:
            capped = here * temperature / cap
            gradient *= 1.0 - capped * capped
        tl.store(place, (gradient * (scale / temperature)).to(outputs.dtype), mask=columns < width)


class Sums:
    """The same as ``head.PlainSums``, as float32 ``[4, rows]``: the largest logit so far m; the sums of exp(l - m) and of
    (l - m) exp(l - m) over the logits l; the target's logit.
    """

    def __init__(self, rows: int, like: torch.Tensor) -> None:
        self._sums = torch.zeros(4, rows, device=like.device)
        self._sums[0] = torch.finfo(torch.float32).min  # not -inf: the first rescaling would be exp(-inf + inf)

    def add(self, outputs: torch.Tensor, targets: torch.Tensor, first: int, rule: LogitRule) -> None:
        """Add a tile of the head's outputs ``[n, v]`` in 16 or 32 bit, whose first column is token ``first``."""
        rows, width = outputs.shape
        with torch.cuda.device_of(outputs):  # Triton starts kernels on the current GPU, wherever their tensors are
            _accumulate[(rows,)](
                outputs,
                outputs.stride(0),
                targets.contiguous(),
                first,
                width,
                self._sums,
                rows,
                rule.scale,
                rule.cap or 1.0,
                rule.temperature,
                HAS_CAP=rule.cap is not None,
                COLUMNS=_COLUMNS,
            )

    def scores(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the log of the sum of exponentials, the target's log-prob and the entropy, float32 ``[rows]`` each."""
        largest, total, weighted, chosen = self._sums
        partition = largest + total.log()
        return partition, chosen - partition, total.log() - weighted / total


def gradient_(
    outputs: torch.Tensor,
    targets: torch.Tensor,
    first: int,
    rule: LogitRule,
    partition: torch.Tensor,
    entropies: torch.Tensor,
    of_logprobs: torch.Tensor,
    of_entropies: torch.Tensor | None,
) -> torch.Tensor:
    """The same as ``head.plain_gradient_``; overwrites ``outputs``."""
    rows, width = outputs.shape
    # The gradient of a sum has one element for all rows; the kernel reads one per row.
    of_logprobs = of_logprobs.contiguous()
    with torch.cuda.device_of(outputs):  # see above
        _differentiate[(rows,)](
            outputs,
            outputs.stride(0),
            targets.contiguous(),
            first,
            width,
            partition,
            entropies,
            of_logprobs,
            of_logprobs if of_entropies is None else of_entropies.contiguous(),
            rule.scale,
            rule.cap or 1.0,
            rule.temperature,
            HAS_CAP=rule.cap is not None,
            OF_ENTROPY=of_entropies is not None,
            COLUMNS=_COLUMNS,
        )
    return outputs

"""Sequence parallelism: ranks share a micro-batch, each with a slice of its tokens (Ulysses, arXiv 2309.14509).

              every layer but its attention       attention                            scores
    rank 0    tokens of slice 0, all heads ──┐ ┌──> all tokens, heads of rank 0 ──┐ ┌──> of slice 0, all heads ──┐
    rank 1    tokens of slice 1, all heads ──┴─┴──> all tokens, heads of rank 1 ──┴─┴──> of slice 1, all heads ──┴──> all tokens
                                          exchange                             exchange                          join

So the longest sequence has to fit on the group, not on one rank. The exchange only permutes numbers: every sum has the same
terms as on a single rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from skyrl_train.errors import ConfigError
from skyrl_train.training.batch import MicroBatch


@dataclass(frozen=True, slots=True)
class SequenceRanks:
    """The ranks that share a micro-batch. Every method is called by all of them, in the same order."""

    group: dist.ProcessGroup
    rank: int  # within the group
    size: int
    setting: str  # name of the setting that gives ``size``, for messages

    def slice_of(self, micro_batch: MicroBatch) -> tuple[MicroBatch, slice]:
        """Return this rank's slice of a packed micro-batch, and the slice of its scored tokens that these tokens predict.

        The row is padded to a multiple of the ranks; attention ignores the padding, and no token is scored from it.
        """
        assert micro_batch.segments is not None, "rows of padded sequences are not shared"
        tokens = micro_batch.input_ids.shape[1]
        width = -(-tokens // self.size)
        start, filling = self.rank * width, width * self.size - tokens
        # The places of scored tokens ascend in a packed row.
        first, last = torch.searchsorted(micro_batch.outputs, torch.tensor([start, start + width])).tolist()
        part = replace(
            micro_batch,
            input_ids=pad(micro_batch.input_ids, (0, filling))[:, start : start + width],
            position_ids=pad(micro_batch.position_ids, (0, filling))[:, start : start + width],
            segments=replace(micro_batch.segments, ranks=self),
            outputs=micro_batch.outputs[first:last] - start,
            targets=micro_batch.targets[first:last],
        )
        return part, slice(first, last)

    def join(self, scores: torch.Tensor, own: slice, number: int) -> torch.Tensor:
        """Return the scores ``[number, ...]`` of all ranks, given this rank's scores, which belong at ``own``.

        All ranks compute the same loss from the result; its gradient reaches each score once, on the rank that has it.
        """
        joined: torch.Tensor = _Join.apply(scores, own, number, self.group)
        return joined

    def all_tokens(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Exchange each ``[1, heads, slice, D]`` for ``[1, heads / ranks, slice * ranks, D]``.

        If the ranks do not divide the heads of keys and values, these are repeated until they do, so that each rank has the
        keys and values of its queries.

        Raises:
            ConfigError: the ranks do not divide the heads of the queries.
        """
        heads, shared_heads = query.shape[1], key.shape[1]
        if heads % self.size:
            raise ConfigError(
                f"{self.setting}={self.size} does not divide the model's {heads} attention heads, which the ranks share out. Set "
                f"it to a divisor of {heads}."
            )
        repeats = self.size // math.gcd(self.size, shared_heads)
        if repeats > 1:
            key, value = (states.repeat_interleave(repeats, dim=1) for states in (key, value))
        return self._all_tokens(query), self._all_tokens(key), self._all_tokens(value)

    def _all_tokens(self, states: torch.Tensor) -> torch.Tensor:
        received = self._exchange(states[0].unflatten(0, (self.size, -1)))
        return received.transpose(0, 1).flatten(1, 2)[None]

    def all_heads(self, states: torch.Tensor) -> torch.Tensor:
        """Exchange ``[1, slice * ranks, heads / ranks, D]`` for ``[1, slice, heads, D]``."""
        received = self._exchange(states[0].unflatten(0, (self.size, -1)))
        return received.transpose(0, 1).flatten(1, 2)[None]

    def _exchange(self, states: torch.Tensor) -> torch.Tensor:
        """Send entry j of ``[ranks, ...]`` to rank j; return the entries received, in the order of the ranks."""
        received: torch.Tensor = _Exchange.apply(states, self.group)
        return received


class _Exchange(torch.autograd.Function):
    """All-to-all, whose gradient is the same exchange: rank i sends back what it got from rank j."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _exchanged(states, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchanged(gradient, ctx.group), None


def _exchanged(states: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    received = torch.empty_like(states, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, states.contiguous(), group=group)
    return received


class _Join(torch.autograd.Function):
    """Gather the ranks' slices; each rank's gradient is the slice of its own scores."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, own: slice, number: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.own = own
        joined = scores.new_zeros(number, *scores.shape[1:])
        joined[own] = scores
        dist.all_reduce(joined, group=group)  # one rank has each number, the others add 0: no rounding
        return joined

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return gradient[ctx.own], None, None, None

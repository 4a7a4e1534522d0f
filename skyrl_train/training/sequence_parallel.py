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
        allowed = micro_batch.allowed
        part = replace(
            micro_batch,
            input_ids=pad(micro_batch.input_ids, (0, filling))[:, start : start + width],
            position_ids=pad(micro_batch.position_ids, (0, filling))[:, start : start + width],
            segments=replace(micro_batch.segments, ranks=self),
            outputs=micro_batch.outputs[first:last] - start,
            targets=micro_batch.targets[first:last],
            allowed=None if allowed is None else replace(allowed, rows=allowed.rows[first:last]),
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
        return self.exchange(query), self.exchange(key), self.exchange(value)

    def exchange(self, states: torch.Tensor) -> torch.Tensor:
        """Cut ``[1, a * ranks, b, D]`` along axis 1, send part j to rank j, and join the received parts along axis 2, in the
        order of the ranks: ``[1, a, b * ranks, D]``.

        From heads and slices of tokens it makes shares of the heads and all tokens; with the axes swapped, the reverse.
        """
        received: torch.Tensor = _Exchange.apply(states[0].unflatten(0, (self.size, -1)), self.group)
        return received.transpose(0, 1).flatten(1, 2)[None]


class _Exchange(torch.autograd.Function):
    """All-to-all over the first axis. Its gradient is the same exchange: rank i sends back the part that it got from rank j."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        received = torch.empty_like(states, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, states.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Exchange.forward(ctx, gradient, ctx.group), None


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

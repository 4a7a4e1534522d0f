"""Ranks that share a micro-batch, each with a slice of its tokens (Ulysses, arXiv 2309.14509).

              every layer but its attention       attention                            scores
    rank 0    tokens of slice 0, all heads ──┐ ┌──> all tokens, heads of rank 0 ──┐ ┌──> of slice 0, all heads ──┐
    rank 1    tokens of slice 1, all heads ──┴─┴──> all tokens, heads of rank 1 ──┴─┴──> of slice 1, all heads ──┴──> all tokens
                                          exchange                             exchange                          join

So the longest sequence has to fit on the group, not on a rank. What is exchanged is a permutation: nothing is added up
that one rank alone would not add up.
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
    setting: str  # that says how many they are, for messages

    def slice_of(self, micro_batch: MicroBatch) -> tuple[MicroBatch, slice]:
        """This rank's tokens of a packed micro-batch, and which of its scored tokens they predict.

        The row is filled up to a multiple of the ranks with tokens that no attention sees and nothing is scored from.
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
        """The scores ``[number, ...]`` of all ranks, from those of this one's tokens (at ``own``).

        All ranks compute the same loss from the result; its gradient reaches each score once, on the rank that has it.
        """
        joined: torch.Tensor = _Join.apply(scores, own, number, self.group)
        return joined

    def all_tokens(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Each ``[1, heads, slice, D]`` to ``[1, heads / ranks, slice * ranks, D]``.

        Heads of keys and values that the ranks do not divide are repeated until they do, so that each rank has those that its
        queries need.

        Raises:
            ConfigError: the ranks do not divide the heads of the queries.
        """
        heads, shared_heads = query.shape[1], key.shape[1]
        if heads % self.size:
            raise ConfigError(
                f"{self.setting}={self.size} does not divide the model's {heads} attention heads, which the ranks share out. Set "
                "it to a divisor."
            )
        repeats = self.size // math.gcd(self.size, shared_heads)
        if repeats > 1:
            key, value = (states.repeat_interleave(repeats, dim=1) for states in (key, value))
        return self._all_tokens(query), self._all_tokens(key), self._all_tokens(value)

    def _all_tokens(self, states: torch.Tensor) -> torch.Tensor:
        received = self._exchange(states[0].unflatten(0, (self.size, -1)))
        return received.transpose(0, 1).flatten(1, 2)[None]

    def all_heads(self, states: torch.Tensor) -> torch.Tensor:
        """``[1, slice * ranks, heads / ranks, D]`` to ``[1, slice, heads, D]``."""
        received = self._exchange(states[0].unflatten(0, (self.size, -1)))
        return received.transpose(0, 1).flatten(1, 2)[None]

    def _exchange(self, states: torch.Tensor) -> torch.Tensor:
        """``[ranks, ...]``: entry j goes to rank j; returns what each sent to this one."""
        received: torch.Tensor = _Exchange.apply(states, self.group)
        return received


class _Exchange(torch.autograd.Function):
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
    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, own: slice, number: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.own = own
        joined = scores.new_zeros(number, *scores.shape[1:])
        joined[own] = scores
        dist.all_reduce(joined, group=group)  # each number and zeros
        return joined

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return gradient[ctx.own], None, None, None

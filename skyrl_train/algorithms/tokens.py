"""What losses and off-policy corrections see: trained tokens, and which of them belong together.

A micro-batch holds whole sequences. So whatever is a function of one token or of one sequence is the same however a step
is split; what is a function of more than that takes it from ``minibatch`` (:mod:`skyrl_train.algorithms.minibatch`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

MAX_LOG_RATIO = 20.0  # exp stays finite in float32; a ratio this far from 1 carries no usable gradient


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """N trained tokens of R sequences, sequence after sequence; all tensors ``[N]``, log-probs in nats.

    Gradients flow through ``logprobs`` alone.
    """

    logprobs: torch.Tensor  # of the policy that is being optimized
    proximal_logprobs: torch.Tensor
    behaviour_logprobs: torch.Tensor
    advantages: torch.Tensor
    sequence_index: torch.Tensor  # int64, in [0, R), ascending
    num_sequences: int  # R
    minibatch: Mapping[str, float] = field(default_factory=dict)  # facts about the whole minibatch, by name

    def per_token(self, of_sequences: torch.Tensor) -> torch.Tensor:
        """``[R]`` to ``[N]``: each token gets the value of its sequence."""
        return of_sequences[self.sequence_index]

    def sequence_sum(self, values: torch.Tensor) -> torch.Tensor:
        """``[N]`` to ``[R]``."""
        return values.new_zeros(self.num_sequences).index_add(0, self.sequence_index, values)

    def sequence_mean(self, values: torch.Tensor) -> torch.Tensor:
        """``[N]`` to ``[R]``; 0 for a sequence without tokens."""
        return self.sequence_sum(values) / self.sequence_sum(torch.ones_like(values)).clamp(min=1)

    def sequence_max(self, values: torch.Tensor) -> torch.Tensor:
        """``[N]`` to ``[R]``; minus infinity for a sequence without tokens."""
        lowest = values.new_full((self.num_sequences,), -torch.inf)
        return lowest.scatter_reduce(0, self.sequence_index, values, "amax")


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """``exp``, the exponent clamped to ``±MAX_LOG_RATIO``."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def bounded_ratio(log_numerator: torch.Tensor, log_denominator: torch.Tensor) -> torch.Tensor:
    """``exp(log_numerator - log_denominator)``, the exponent clamped to ``±MAX_LOG_RATIO``."""
    return bounded_exp(log_numerator - log_denominator)

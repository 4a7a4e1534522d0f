"""The data that losses and off-policy corrections work on: trained tokens, and statistics over them.

A micro-batch holds whole sequences. A rule that looks at one token or one sequence therefore gives the same result however a
step is split into micro-batches. A rule that looks further (clip-cov, M2PO) gets its numbers from ``PolicyTokens.minibatch``:

    proximal log-probs of the whole minibatch ──MINIBATCH_STATISTICS──> numbers ──> PolicyTokens.minibatch of every micro-batch

These numbers depend on all trained tokens of the step in any order and are computed before the policy moves, so no micro-batch
and no rank changes them. They need the whole minibatch at once, which a step that trains part by part does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from skyrl_train.algorithms.registry import Registry
from skyrl_train.config.schema import AlgorithmConfig
from skyrl_train.runtime.lazy_torch import torch

MAX_LOG_RATIO = 20.0  # exp stays finite in float32; a ratio this far from 1 carries no usable gradient


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """N trained tokens of R sequences, sequence after sequence; all tensors ``[N]``, log-probs in nats.

    Attributes:
        logprobs: of the policy that is being optimized. Gradients flow through them alone.
        proximal_logprobs: of the policy that losses bound the ratio to.
        behaviour_logprobs: of the engine that sampled the token.
        advantages: of each token.
        sequence_index: int64, in [0, R), ascending.
        num_sequences: R.
        minibatch: numbers about the whole minibatch, by name.
    """

    logprobs: torch.Tensor
    proximal_logprobs: torch.Tensor
    behaviour_logprobs: torch.Tensor
    advantages: torch.Tensor
    sequence_index: torch.Tensor
    num_sequences: int
    minibatch: Mapping[str, float] = field(default_factory=dict)

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


def require_per_token(
    setting: str, tokens: int, returned: Mapping[str, torch.Tensor], error: type[Exception] = ValueError
) -> None:
    """Check that a function of a registry has returned one value per token. Others, such as a mean, would be broadcast and train
    something else.

    Args:
        setting: names the function, for the message.
        returned: its results, by name.
        error: raised if a result is not ``[N]``. ConfigError only before a step moves anything, because the weights are saved
            after it.
    """
    for name, values in returned.items():
        if tuple(values.shape) != (tokens,):
            raise error(
                f"{setting} returned a {name} of shape {list(values.shape)} for {tokens} tokens; return one value per token."
            )


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """``exp``, with the exponent clamped to ``±MAX_LOG_RATIO``."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def bounded_ratio(log_numerator: torch.Tensor, log_denominator: torch.Tensor) -> torch.Tensor:
    """``exp(log_numerator - log_denominator)``, with the exponent clamped to ``±MAX_LOG_RATIO``."""
    return bounded_exp(log_numerator - log_denominator)


class MinibatchTokens(NamedTuple):
    """All trained tokens of a minibatch, in any order; each ``[N]``."""

    proximal_logprobs: torch.Tensor
    behaviour_logprobs: torch.Tensor
    advantages: torch.Tensor


# Maps all trained tokens of a minibatch (at least one) to a few named numbers, independent of the order of the tokens.
MinibatchStatistics: TypeAlias = Callable[[MinibatchTokens, AlgorithmConfig], dict[str, float]]
# Keyed by the name of the policy loss that needs the numbers.
MINIBATCH_STATISTICS: Registry[MinibatchStatistics] = Registry("trainer.algorithm.policy_loss_type")
register_minibatch_statistics = MINIBATCH_STATISTICS.register


@dataclass(slots=True)
class TokenStatistics:
    """Named sums and maxima over ``tokens`` tokens; float64 scalars on the device of the tokens.

    Statistics of micro-batches, parts of a step and ranks can be added in any order.
    """

    tokens: int = 0
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls, tokens: int, sums: Mapping[str, torch.Tensor], maxima: Mapping[str, torch.Tensor] | None = None
    ) -> TokenStatistics:
        """Reduce one-dimensional tensors; the result carries no gradient.

        Args:
            tokens: N.
            sums: ``[N]`` each, or ``[R]`` for values of sequences.
            maxima: ``[N]`` each; ignored where there are no tokens.
        """
        # float64: sums of many micro-batches in another order differ by less than any metric shows.
        return cls(
            tokens,
            {name: values.detach().double().sum() for name, values in sums.items()},
            {name: values.detach().double().max() for name, values in (maxima or {}).items()} if tokens else {},
        )

    def add(self, other: TokenStatistics) -> None:
        """Include the tokens of ``other``, in place."""
        self.tokens += other.tokens
        for name, value in other.sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        for name, value in other.maxima.items():
            self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value

    def values(self) -> dict[str, float]:
        """Return sums and maxima as numbers, in one transfer from the device."""
        named = {**self.sums, **self.maxima}
        return dict(zip(named, torch.stack(list(named.values())).tolist(), strict=True)) if named else {}

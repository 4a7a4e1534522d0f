"""Loss reductions: how the losses of single tokens become the loss of a step.

Each is a weighted mean whose weight and denominator are known of a sequence alone, once its group is:

    loss = sum over sequences of (token weight * sum of its token losses)  /  sum over sequences of its denominator

So a step can be trained piece by piece while its groups arrive: gradients add up unscaled, and once all sequences are
counted, the sum is multiplied by 1 / denominator. No split into parts or micro-batches, and no order, changes the loss.
A token that a correction rejects or that is masked for its age leaves the numerator but not the denominator
(SEMANTICS 7.3): what counts is the number of trained tokens before that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from skyrl_train.algorithms.registry import Registry
from skyrl_train.config.schema.algorithm import AlgorithmConfig
from skyrl_train.errors import ConfigError


class SequenceCounts(NamedTuple):
    """Trained tokens before any was rejected or masked (SEMANTICS 7.3), and how many sequences share the prompt."""

    tokens: int  # of the sequence; may be 0
    group_tokens: int  # of all sequences of its group together
    group_sequences: int  # in its group, itself included


class Share(NamedTuple):
    """What one sequence adds to the two sums of a reduction."""

    token_weight: float  # of the loss of each of its tokens; of the order of 1, as it scales what float32 adds up
    denominator: float


class Reduction(Protocol):
    """The share of one sequence in a step. A function of its own counts and its group's, so that no split can change it."""

    def __call__(self, counts: SequenceCounts, config: AlgorithmConfig) -> Share:
        """
        Returns:
            Finite numbers; a denominator above 0 unless there are no tokens, and never below.
        """
        ...


REDUCTIONS: Registry[Reduction] = Registry("trainer.algorithm.loss_reduction")


def reduction_scale(denominators: Iterable[float]) -> float:
    """``1 / sum``, with which the sum over all tokens of a step is multiplied; 0 where nothing counts.

    The sum is exact, so it does not depend on the order.
    """
    total = math.fsum(denominators)
    return 1 / total if total > 0 else 0.0


@REDUCTIONS.register("token_mean")
def token_mean(counts: SequenceCounts, config: AlgorithmConfig) -> Share:
    """Every token weighs the same: the mean over all trained tokens of the step (DAPO, arXiv 2503.14476)."""
    return Share(token_weight=1.0, denominator=counts.tokens)


@REDUCTIONS.register("sequence_mean")
def sequence_mean(counts: SequenceCounts, config: AlgorithmConfig) -> Share:
    """Every sequence weighs the same: mean over all sequences of the mean over their tokens (GRPO, arXiv 2402.03300).

    A sequence without trained tokens adds 0 to the numerator and counts in the denominator. A sequence is what one
    forward pass sees: a sample that branched into k sequences weighs k times as much as one that did not, which
    ``token_mean`` does not care about.
    """
    return Share(token_weight=1 / max(counts.tokens, 1), denominator=1.0)


@REDUCTIONS.register("prompt_mean")
def prompt_mean(counts: SequenceCounts, config: AlgorithmConfig) -> Share:
    """Every prompt weighs the same: mean over all groups of the mean over all tokens of a group's sequences.

    A group without trained tokens adds 0 to the numerator and counts in the denominator.
    """
    return Share(token_weight=1 / max(counts.group_tokens, 1), denominator=1 / counts.group_sequences)


@REDUCTIONS.register("seq_mean_token_sum_norm")
def seq_mean_token_sum_norm(counts: SequenceCounts, config: AlgorithmConfig) -> Share:
    """Every token weighs the same, and the same in every step: mean over all sequences of the sum over their tokens divided
    by the fixed length ``max_seq_len`` (Dr. GRPO, arXiv 2503.20783)."""
    if config.max_seq_len is None:
        raise ConfigError(
            "trainer.algorithm.loss_reduction=seq_mean_token_sum_norm needs trainer.algorithm.max_seq_len, the length that "
            "sums of token losses are divided by."
        )
    return Share(token_weight=1 / config.max_seq_len, denominator=1.0)

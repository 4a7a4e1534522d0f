"""Loss reductions: from the losses of single tokens to the loss of a step.

Each is a weighted mean. The weight and the denominator of a sequence depend on the sequence and its group alone:

    loss = sum over sequences of (token weight * sum of its token losses)  /  sum over sequences of its denominator

A step can therefore train piece by piece while its groups arrive: gradients add up unscaled, and once all sequences are
counted, the sum is multiplied by 1 / denominator. No split into parts or micro-batches, and no order, changes the loss.
A token that a correction rejects, or that is masked for its age, leaves the numerator but not the denominator: the counts are
taken before rejection and masking.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from skyrl_train.algorithms.registry import Registry
from skyrl_train.config.schema import AlgorithmConfig
from skyrl_train.errors import ConfigError


class SequenceCounts(NamedTuple):
    """Trained tokens before any was rejected or masked, and the number of sequences that share the prompt.

    Attributes:
        tokens: of the sequence; may be 0.
        group_tokens: of all sequences of its group together.
        group_sequences: in its group, itself included.
    """

    tokens: int
    group_tokens: int
    group_sequences: int


class Share(NamedTuple):
    """The contribution of one sequence to the two sums of a reduction.

    Attributes:
        token_weight: of the loss of each of its tokens; of the order of 1, because it scales float32 sums.
        denominator: what it adds to the denominator.
    """

    token_weight: float
    denominator: float


Reduction: TypeAlias = Callable[[SequenceCounts, AlgorithmConfig], Share]
REDUCTIONS: Registry[Reduction] = Registry("trainer.algorithm.loss_reduction")
register_loss_reduction = REDUCTIONS.register
"""Decorator ``@register_loss_reduction("name")`` of a function of ``(counts: SequenceCounts, config: AlgorithmConfig)``.

It returns the :class:`Share` of a sequence: finite numbers, with a denominator above 0 unless the sequence has no tokens, and
never below 0. It must depend on its arguments alone, so that no split of the step can change it.
"""


def reduction_scale(denominators: Iterable[float]) -> float:
    """Return ``1 / sum``, the factor of the sum over all tokens of a step; 0 where nothing counts."""
    total = math.fsum(denominators)  # exact, so it does not depend on the order
    return 1 / total if total > 0 else 0.0


@register_loss_reduction("token_mean")
def token_mean(counts: SequenceCounts, config: AlgorithmConfig) -> Share:
    """Equal weight per token: mean over all trained tokens of the step (DAPO, arXiv 2503.14476)."""
    return Share(token_weight=1.0, denominator=counts.tokens)


@register_loss_reduction("sequence_mean")
def sequence_mean(counts: SequenceCounts, config: AlgorithmConfig) -> Share:
    """Equal weight per sequence: mean over all sequences of the mean over their tokens (GRPO, arXiv 2402.03300).

    A sequence without trained tokens adds 0 to the numerator and counts in the denominator. A sequence is the input of one
    forward pass: a sample that branched into k sequences weighs k times as much as one that did not. ``token_mean`` does not
    make this difference.
    """
    return Share(token_weight=1 / max(counts.tokens, 1), denominator=1.0)


@register_loss_reduction("prompt_mean")
def prompt_mean(counts: SequenceCounts, config: AlgorithmConfig) -> Share:
    """Equal weight per prompt: mean over all groups of the mean over all tokens of a group's sequences.

    A group without trained tokens adds 0 to the numerator and counts in the denominator.
    """
    return Share(token_weight=1 / max(counts.group_tokens, 1), denominator=1 / counts.group_sequences)


@register_loss_reduction("seq_mean_token_sum_norm")
def seq_mean_token_sum_norm(counts: SequenceCounts, config: AlgorithmConfig) -> Share:
    """Equal weight per token, constant over all steps: mean over all sequences of the sum over their tokens divided by the
    fixed length ``max_seq_len`` (Dr. GRPO, arXiv 2503.20783).

    Raises:
        ConfigError: ``max_seq_len`` is not set.
    """
    if config.max_seq_len is None:
        raise ConfigError(
            "trainer.algorithm.loss_reduction=seq_mean_token_sum_norm needs trainer.algorithm.max_seq_len, the length by "
            "which sums of token losses are divided."
        )
    return Share(token_weight=1 / config.max_seq_len, denominator=1.0)

"""From finished groups to what one optimizer step trains on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from skyrl_train.algorithms.advantages import ADVANTAGE_ESTIMATORS, group_returns
from skyrl_train.config.schema import AlgorithmConfig
from skyrl_train.rollout.group import RolloutGroup, RolloutSequence, Sample
from skyrl_train.training.backend import Minibatch, TrainingSequence


def build_minibatch(
    groups: Sequence[RolloutGroup], step: int, algorithm: AlgorithmConfig, *, oldest_trained_version: int | None = None
) -> Minibatch:
    """Computes advantages within each group and lays out every sequence of every sample, in the order given.

    A group's returns and its baseline are over samples, however many sequences each has; a sample's advantage goes to
    the trained tokens of all its sequences. Tokens that are masked (older than ``oldest_trained_version``, or of a masked
    group) change none of that: they leave the numerator of the loss and stay in its denominator (SEMANTICS 7.3).

    Args:
        oldest_trained_version: sampled tokens of older policy versions get loss mask 0; None: all are trained.
    """
    sequences = [
        sequence
        for index, group in enumerate(groups)
        for sequence in _group_sequences(group, index, algorithm, oldest_trained_version)
    ]
    return Minibatch(sequences=sequences, num_groups=len(groups), step=step)


def _group_sequences(
    group: RolloutGroup, index: int, algorithm: AlgorithmConfig, oldest_trained_version: int | None
) -> Iterator[TrainingSequence]:
    estimate = ADVANTAGE_ESTIMATORS.get(algorithm.advantage_estimator)
    sampled = [_loss_mask(sample) for sample in group.samples]
    returns = group_returns([sample.rewards for sample in group.samples])
    advantages = estimate(returns, sampled, norm_by_std=algorithm.grpo_norm_by_std)
    for sample, mask, advantage in zip(group.samples, sampled, advantages, strict=True):
        lengths = [len(sequence.response_ids) for sequence in sample.sequences]
        of_sequences = zip(sample.sequences, mask.split(lengths), advantage.split(lengths), strict=True)
        for sequence, sequence_mask, sequence_advantage in of_sequences:
            trained = torch.zeros_like(sequence_mask) if group.masked else sequence_mask
            if oldest_trained_version is not None:
                trained = trained & (torch.tensor(sequence.versions, dtype=torch.int64) >= oldest_trained_version)
            yield _training_sequence(sequence, trained, sequence_advantage, index, counted=int(sequence_mask.sum()))


def _loss_mask(sample: Sample) -> torch.Tensor:
    """Bool ``[T]`` over the response tokens of all its sequences in a row."""
    return torch.tensor([value for sequence in sample.sequences for value in sequence.loss_mask], dtype=torch.bool)


def _training_sequence(
    sequence: RolloutSequence, mask: torch.Tensor, advantages: torch.Tensor, index: int, *, counted: int
) -> TrainingSequence:
    prompt_len = len(sequence.prompt_token_ids)

    def after_prompt(response_part: torch.Tensor, fill: float) -> torch.Tensor:
        return torch.cat([response_part.new_full((prompt_len,), fill), response_part])

    def added_by_a_stage(logprobs: list[float] | None) -> torch.Tensor | None:
        return None if logprobs is None else after_prompt(torch.tensor(logprobs, dtype=torch.float32), 0.0)

    return TrainingSequence(
        token_ids=torch.tensor(sequence.prompt_token_ids + sequence.response_ids, dtype=torch.int64),
        loss_mask=after_prompt(mask, False),
        advantages=after_prompt(advantages, 0.0),
        behaviour_logprobs=after_prompt(torch.tensor(sequence.logprobs, dtype=torch.float32), 0.0),
        versions=after_prompt(torch.tensor(sequence.versions, dtype=torch.int64), -1),
        group_index=index,
        proximal_logprobs=added_by_a_stage(sequence.proximal_logprobs),
        counted_tokens=counted,
        reference_logprobs=added_by_a_stage(sequence.reference_logprobs),
    )

"""From finished groups to what one optimizer step trains on.

groups ──shape rewards──> advantages of each group ──(normalise over all)──> sequences
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from skyrl_train.algorithms.advantages import ADVANTAGE_ESTIMATORS, GroupRewards, normalized_over_minibatch
from skyrl_train.algorithms.off_policy.rejections import keeps_sequence
from skyrl_train.algorithms.rewards import kl_penalties, overlong_penalty
from skyrl_train.config import derive
from skyrl_train.config.schema.algorithm import AlgorithmConfig
from skyrl_train.errors import GeneratorOutputError
from skyrl_train.inference.interface import StopReason
from skyrl_train.rollout.group import RolloutGroup, RolloutSequence, Sample
from skyrl_train.training.backend import Minibatch, TrainingSequence


def build_minibatch(
    groups: Sequence[RolloutGroup],
    step: int,
    algorithm: AlgorithmConfig,
    *,
    oldest_trained_version: int | None = None,
    kl_factor: float = 1.0,
) -> Minibatch:
    """Computes advantages within each group and lays out every sequence of every sample, in the order given.

    A group's returns and its baseline are over samples, however many sequences each has; a sample's advantage goes to
    the trained tokens of all its sequences. Tokens that are masked (older than ``oldest_trained_version``, of a masked
    group, or of a response that was cut off under ``overlong.filter``) change none of that: they leave the numerator of
    the loss and stay in its denominator (SEMANTICS 7.3).

    Where advantages are normalised over the minibatch, ``groups`` are all groups of the step; masked groups have no part
    in the mean and the deviation.

    Args:
        oldest_trained_version: sampled tokens of older policy versions get loss mask 0; None: all are trained.
        kl_factor: of both KL coefficients in this step.

    Raises:
        GeneratorOutputError: a reward is not finite, or the reference log-probs that it needs are missing.
    """
    rows = [
        row
        for index, group in enumerate(groups)
        for row in _rows(group, index, algorithm, oldest_trained_version, kl_factor)
    ]
    if derive.normalizes_over_minibatch(algorithm):
        masks = [row.sampled & (not groups[row.group_index].masked) for row in rows]
        normalized = normalized_over_minibatch([row.advantages for row in rows], masks)
        rows = [replace(row, advantages=values) for row, values in zip(rows, normalized, strict=True)]
    return Minibatch([_training_sequence(row) for row in rows], num_groups=len(groups), step=step, kl_factor=kl_factor)


@dataclass(frozen=True, slots=True)
class _Row:
    """A sequence and what is computed for it; tensors are over its response, ``[T]``."""

    sequence: RolloutSequence
    sampled: torch.Tensor  # bool
    trained: torch.Tensor  # bool
    advantages: torch.Tensor  # float32
    group_index: int
    group_tokens: int
    group_sequences: int
    values: torch.Tensor | None  # float32; None: there is no critic
    returns: torch.Tensor | None  # float32, before advantages are normalised


def _rows(
    group: RolloutGroup, index: int, algorithm: AlgorithmConfig, oldest_trained_version: int | None, kl_factor: float
) -> list[_Row]:
    sampled = [_loss_mask(sample) for sample in group.samples]
    values = [_values(sample, group) for sample in group.samples] if derive.needs_critic(algorithm) else None
    advantages = ADVANTAGE_ESTIMATORS.get(algorithm.advantage_estimator)(
        GroupRewards(
            token_rewards=[_shaped_rewards(sample, group, algorithm, kl_factor) for sample in group.samples],
            loss_masks=sampled,
            in_baseline=[_in_baseline(sample, algorithm) for sample in group.samples],
            values=values,
        ),
        algorithm,
    )
    group_tokens = int(torch.cat(sampled).sum()) if sampled else 0
    group_sequences = sum(len(sample.sequences) for sample in group.samples)
    rows = []
    for number, (sample, mask, advantage) in enumerate(zip(group.samples, sampled, advantages, strict=True)):
        untrained = group.masked or (algorithm.overlong.filter and was_cut_off(sample))
        lengths = [len(sequence.response_ids) for sequence in sample.sequences]
        nothing = [None] * len(lengths)
        value = nothing if values is None else values[number].split(lengths)
        of_sequences = zip(sample.sequences, mask.split(lengths), advantage.split(lengths), value, strict=True)
        for sequence, sequence_mask, sequence_advantage, sequence_value in of_sequences:
            trained = torch.zeros_like(sequence_mask) if untrained else sequence_mask
            if oldest_trained_version is not None:
                trained = trained & torch.from_numpy(sequence.version_array >= oldest_trained_version)
            rows.append(
                _Row(
                    sequence,
                    sequence_mask,
                    trained,
                    sequence_advantage,
                    group_index=index,
                    group_tokens=group_tokens,
                    group_sequences=group_sequences,
                    values=sequence_value,
                    returns=None if sequence_value is None else sequence_advantage + sequence_value,
                )
            )
    return rows


def was_cut_off(sample: Sample) -> bool:
    """Whether the response ended because its length was spent."""
    return bool(sample.sequences) and sample.sequences[-1].stop_reason == StopReason.LENGTH.value


def _loss_mask(sample: Sample) -> torch.Tensor:
    """Bool ``[T]`` over the response tokens of all its sequences in a row."""
    nothing = np.empty(0, np.bool_)
    return torch.from_numpy(np.concatenate([nothing, *(sequence.sampled for sequence in sample.sequences)]))


def _values(sample: Sample, group: RolloutGroup) -> torch.Tensor:
    """Float32 ``[T]``: the critic's values of the sampled tokens of all its sequences in a row, 0 elsewhere."""
    values: list[float] = []
    for sequence in sample.sequences:
        if sequence.values is None and any(sequence.loss_mask) and not group.masked:
            raise GeneratorOutputError(
                f"group {group.ordinal} has no values, which trainer.algorithm.advantage_estimator=gae needs: the stage that "
                "adds them did not see it."
            )
        values += sequence.values or [0.0] * len(sequence.response_ids)
    return _float32(values)


def _shaped_rewards(sample: Sample, group: RolloutGroup, algorithm: AlgorithmConfig, kl_factor: float) -> list[float]:
    """The sample's rewards with the penalties for its length, on its last token, and for its divergence."""
    rewards = list(sample.rewards)  # estimators may be anybody's, and the group goes on
    penalty = overlong_penalty(sum(int(s.sampled.sum()) for s in sample.sequences), algorithm.overlong)
    if rewards and penalty:
        rewards[-1] += penalty
    if algorithm.kl_reward_coef == 0 or group.masked:
        return rewards
    coefficient = kl_factor * algorithm.kl_reward_coef
    return [
        reward - coefficient * kl for reward, kl in zip(rewards, _kl_of_sample(sample, group, algorithm), strict=True)
    ]


def _kl_of_sample(sample: Sample, group: RolloutGroup, algorithm: AlgorithmConfig) -> list[float]:
    penalties: list[float] = []
    for sequence in sample.sequences:
        if sequence.reference_logprobs is None:
            raise GeneratorOutputError(
                f"group {group.ordinal} has no reference log-probs, which trainer.algorithm.kl_reward_coef and kl_ctrl need: "
                "the stage that adds them did not see it."
            )
        penalties += kl_penalties(sequence.logprobs, sequence.reference_logprobs, sequence.loss_mask, algorithm)
    return penalties


def kl_to_reference(groups: Sequence[RolloutGroup], algorithm: AlgorithmConfig) -> tuple[float, int, int]:
    """Sum over the sampled tokens of ``groups`` of the estimate of ``KL(behaviour || reference)``, in nats, and how many
    tokens and samples that are; masked groups are left out."""
    samples = [(sample, group) for group in groups if not group.masked for sample in group.samples]
    total = sum(sum(_kl_of_sample(sample, group, algorithm)) for sample, group in samples)
    return total, sum(len(sample.sampled_versions) for sample, _ in samples), len(samples)


def _in_baseline(sample: Sample, algorithm: AlgorithmConfig) -> bool:
    """Whether others are compared with it: unless all of it is filtered or rejected, where that was asked for."""
    correction = algorithm.off_policy_correction
    if not correction.baseline_without_rejected:
        return True
    if algorithm.overlong.filter and was_cut_off(sample):
        return False
    with_tokens = [sequence for sequence in sample.sequences if any(sequence.loss_mask)]
    return not with_tokens or any(_kept(sequence, algorithm) for sequence in with_tokens)


def _kept(sequence: RolloutSequence, algorithm: AlgorithmConfig) -> bool:
    if sequence.proximal_logprobs is None:
        return True
    mask = torch.from_numpy(sequence.sampled)
    return keeps_sequence(
        _float32(sequence.logprob_array)[mask],
        _float32(sequence.proximal_logprobs)[mask],
        algorithm.off_policy_correction.rejections,
    )


def _training_sequence(row: _Row) -> TrainingSequence:
    sequence = row.sequence
    prompt_len = len(sequence.prompt_token_ids)

    def after_prompt(response_part: torch.Tensor, fill: float) -> torch.Tensor:
        return torch.cat([response_part.new_full((prompt_len,), fill), response_part])

    def added_by_a_stage(logprobs: list[float] | None) -> torch.Tensor | None:
        return None if logprobs is None else after_prompt(_float32(logprobs), 0.0)

    return TrainingSequence(
        token_ids=torch.from_numpy(sequence.token_array),
        loss_mask=after_prompt(row.trained, False),
        advantages=after_prompt(row.advantages, 0.0),
        behaviour_logprobs=after_prompt(_float32(sequence.logprob_array), 0.0),
        versions=after_prompt(torch.from_numpy(sequence.version_array), -1),
        group_index=row.group_index,
        proximal_logprobs=added_by_a_stage(sequence.proximal_logprobs),
        counted_tokens=int(row.sampled.sum()),
        reference_logprobs=added_by_a_stage(sequence.reference_logprobs),
        group_tokens=row.group_tokens,
        group_sequences=row.group_sequences,
        values=None if row.values is None else after_prompt(row.values, 0.0),
        returns=None if row.returns is None else after_prompt(row.returns, 0.0),
    )


def _float32(values: list[float] | np.ndarray) -> torch.Tensor:
    """What ``torch.tensor`` makes of them, in a fraction of its time where they are in a list."""
    numbers = values if isinstance(values, np.ndarray) else np.asarray(array("d", values))
    return torch.from_numpy(numbers.astype(np.float32))

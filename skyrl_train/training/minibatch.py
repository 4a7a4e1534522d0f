"""From finished groups to the minibatch of one optimizer step.

groups ──shape rewards──> advantages of each group ──(normalise over all)──> sequences
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from skyrl_train.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    GroupRewards,
    normalized_over_minibatch,
    overlong_penalty,
)
from skyrl_train.algorithms.kl import kl_penalties
from skyrl_train.algorithms.off_policy import keeps_sequence
from skyrl_train.algorithms.registry import called_by_setting
from skyrl_train.config import derive
from skyrl_train.config.schema import AlgorithmConfig
from skyrl_train.errors import ConfigError, GeneratorOutputError
from skyrl_train.inference.interface import StopReason
from skyrl_train.training.backend import Minibatch, TrainingSequence
from skyrl_train.types import RolloutGroup, RolloutSequence, Sample, packed


def build_minibatch(
    groups: Sequence[RolloutGroup],
    step: int,
    algorithm: AlgorithmConfig,
    *,
    oldest_trained_version: int | None = None,
    kl_factor: float = 1.0,
) -> Minibatch:
    """Compute advantages within each group and lay out every sequence of every sample, in the given order.

    A group's returns and its baseline are over samples, however many sequences each sample has; a sample's advantage goes to
    the trained tokens of all its sequences. Masked tokens (older than ``oldest_trained_version``, of a masked group, or of a
    response that was cut off under ``overlong.filter``) do not change this: they leave the numerator of the loss and stay in
    its denominator (docs/design/semantics.md, section 7.3).

    Where advantages are normalised over the minibatch, ``groups`` must be all groups of the step; masked groups do not count
    in the mean and the deviation.

    Args:
        oldest_trained_version: sampled tokens of older policy versions get loss mask 0; None: all are trained.
        kl_factor: of both KL coefficients in this step.

    Raises:
        ConfigError: the estimator raised, or did not return a number for each token, finite on those that train. Or the
            estimator of KL divergence raised, or did not return a number for each token.
        GeneratorOutputError: a reward is not finite, or the reference log-probs that it needs are missing.
    """
    rows = [
        row
        for index, group in enumerate(groups)
        for row in _rows(group, index, algorithm, oldest_trained_version, kl_factor)
    ]
    if derive.normalizes_over_minibatch(algorithm):
        masks = [torch.from_numpy(row.sequence.sampled & (not groups[row.group_index].masked)) for row in rows]
        normalized = normalized_over_minibatch([row.advantages for row in rows], masks)
        rows = [replace(row, advantages=values) for row, values in zip(rows, normalized, strict=True)]
    return Minibatch(_training_sequences(rows), num_groups=len(groups), step=step, kl_factor=kl_factor)


@dataclass(frozen=True, slots=True)
class _SequenceRow:
    """A sequence and the numbers computed for it; arrays and tensors are over its response, ``[T]``."""

    sequence: RolloutSequence
    trained: npt.NDArray[np.bool_]
    advantages: torch.Tensor  # float32
    group_index: int
    group_tokens: int
    group_sequences: int
    values: torch.Tensor | None  # float32; None: there is no critic
    returns: torch.Tensor | None  # float32, before advantages are normalised


def _rows(
    group: RolloutGroup, index: int, algorithm: AlgorithmConfig, oldest_trained_version: int | None, kl_factor: float
) -> list[_SequenceRow]:
    nothing = np.empty(0, np.bool_)
    # Bool [T] per sample, over the response tokens of all its sequences in a row.
    sampled = [
        torch.from_numpy(np.concatenate([nothing, *(sequence.sampled for sequence in sample.sequences)]))
        for sample in group.samples
    ]
    values = [_values(sample, group) for sample in group.samples] if derive.needs_critic(algorithm) else None
    rewards = GroupRewards(
        token_rewards=[_shaped_rewards(sample, group, algorithm, kl_factor) for sample in group.samples],
        loss_masks=sampled,
        in_baseline=[_in_baseline(sample, algorithm) for sample in group.samples],
        values=values,
    )
    advantages = _advantages(rewards, algorithm, masked=group.masked)
    sequences = [sequence for sample in group.samples for sequence in sample.sequences]
    # Counted before masking: masked tokens stay in the denominator of the loss.
    group_tokens = sum(sequence.num_sampled for sequence in sequences)
    rows = []
    for number, (sample, advantage) in enumerate(zip(group.samples, advantages, strict=True)):
        untrained = group.masked or (algorithm.overlong.filter and was_cut_off(sample))
        lengths = [sequence.num_response_tokens for sequence in sample.sequences]
        of_advantages = _split(advantage, lengths)
        of_values = [None] * len(lengths) if values is None else _split(values[number], lengths)
        for sequence, of_advantage, of_value in zip(sample.sequences, of_advantages, of_values, strict=True):
            trained = np.zeros_like(sequence.sampled) if untrained else sequence.sampled
            if oldest_trained_version is not None:
                trained = trained & (sequence.version_array >= oldest_trained_version)
            rows.append(
                _SequenceRow(
                    sequence,
                    trained,
                    of_advantage,
                    group_index=index,
                    group_tokens=group_tokens,
                    group_sequences=len(sequences),
                    values=of_value,
                    # The critic's target, from advantages that are not normalised yet.
                    returns=None if of_value is None else of_advantage + of_value,
                )
            )
    return rows


def _advantages(rewards: GroupRewards, algorithm: AlgorithmConfig, *, masked: bool) -> list[torch.Tensor]:
    """Call the configured estimator, which may be the user's; return float32 ``[T]`` per sample, on the CPU.

    Args:
        masked: no token of the group trains.

    Raises:
        ConfigError: it raised, or did not return a number for each token, finite on those that train.
    """
    key, name = "trainer.algorithm.advantage_estimator", algorithm.advantage_estimator
    setting, estimator = f"{key}={name}", ADVANTAGE_ESTIMATORS.get(name)
    with called_by_setting(key, name):
        returned = [
            torch.as_tensor(values, dtype=torch.float32, device="cpu").detach()
            for values in estimator(rewards, algorithm)
        ]
    shapes, lengths = [list(values.shape) for values in returned], [len(mask) for mask in rewards.loss_masks]
    if shapes != [[length] for length in lengths]:
        raise ConfigError(
            f"{setting} returned tensors of shapes {shapes} for samples of {lengths} tokens. Return one number for each token of "
            "each sample; group.on_trained_tokens spreads one number per sample over its tokens."
        )
    for number, (values, mask) in enumerate(zip(returned, rewards.loss_masks, strict=True)):
        broken = np.flatnonzero(~np.isfinite(values.numpy()) & mask.numpy())
        if len(broken) and not masked:
            raise ConfigError(
                f"{setting} returned {values[broken[0]]} for token {broken[0]} of sample {number}, in a group with the returns "
                f"{rewards.returns.tolist()}; advantages must be finite. Mind divisions by 0."
            )
    return returned


def _split(values: torch.Tensor, lengths: Sequence[int]) -> Sequence[torch.Tensor]:
    # Most samples have one sequence, and each torch operation may wait for the control loop.
    return values.split(lengths) if len(lengths) != 1 else [values]


def was_cut_off(sample: Sample) -> bool:
    """Return whether the response reached its length limit."""
    return bool(sample.sequences) and sample.sequences[-1].stop_reason == StopReason.LENGTH.value


def _values(sample: Sample, group: RolloutGroup) -> torch.Tensor:
    """Return the critic's values, float32 ``[T]`` over all sequences of the sample in a row; 0 on unsampled tokens."""
    values: list[float] = []
    for sequence in sample.sequences:
        if sequence.values is None and sequence.num_sampled and not group.masked:
            raise GeneratorOutputError(
                f"group {group.group_index} has no values, which trainer.algorithm.advantage_estimator=gae needs: the stage that "
                "adds them did not see it."
            )
        values += sequence.values or [0.0] * sequence.num_response_tokens
    return _float32(values)


def _shaped_rewards(sample: Sample, group: RolloutGroup, algorithm: AlgorithmConfig, kl_factor: float) -> list[float]:
    """Return the sample's rewards minus the penalties for length (on the last token) and for KL divergence (on each token)."""
    rewards = sample.rewards
    penalty = overlong_penalty(sum(sequence.num_sampled for sequence in sample.sequences), algorithm.overlong)
    # A failed sample has no token that could carry the penalty.
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
                f"group {group.group_index} has no reference log-probs, which trainer.algorithm.kl_reward_coef and kl_ctrl need: "
                "the stage that adds them did not see it."
            )
        penalties += kl_penalties(sequence.logprobs, sequence.reference_logprobs, sequence.loss_mask, algorithm)
    return penalties


def kl_to_reference(groups: Sequence[RolloutGroup], algorithm: AlgorithmConfig) -> tuple[float, int, int]:
    """Return the sum of the estimates of ``KL(behaviour || reference)`` in nats over the sampled tokens of ``groups``, the
    number of these tokens, and the number of samples; masked groups are left out."""
    samples = [(sample, group) for group in groups if not group.masked for sample in group.samples]
    total = sum(sum(_kl_of_sample(sample, group, algorithm)) for sample, group in samples)
    return total, sum(len(sample.sampled_versions) for sample, _ in samples), len(samples)


def _in_baseline(sample: Sample, algorithm: AlgorithmConfig) -> bool:
    """Return whether the sample is part of the group's baseline: all are, unless ``baseline_without_rejected`` excludes samples
    that are filtered or rejected completely."""
    correction = algorithm.off_policy_correction
    if not correction.baseline_without_rejected:
        return True
    if algorithm.overlong.filter and was_cut_off(sample):
        return False
    # One kept sequence is enough: the sample then says something about the policy.
    with_tokens = [sequence for sequence in sample.sequences if sequence.num_sampled]
    for sequence in with_tokens:
        if sequence.proximal_logprobs is None:
            return True
        mask = torch.from_numpy(sequence.sampled)
        behaviour, proximal = _float32(sequence.logprob_array)[mask], _float32(sequence.proximal_logprobs)[mask]
        if keeps_sequence(behaviour, proximal, correction.rejections):
            return True
    return not with_tokens


def _training_sequences(rows: Sequence[_SequenceRow]) -> list[TrainingSequence]:
    """Lay all sequences of a minibatch out end to end: each field is one tensor, split into one part per sequence.

    numpy and torch are called a few times per field, for any number of sequences, because a call costs as much as hundreds of
    tokens.

    Raises:
        GeneratorOutputError: a stage added a field of another length than its response.
    """
    sequences = [row.sequence for row in rows]
    lengths = [len(sequence.token_array) for sequence in sequences]
    ends = accumulate(lengths)
    responses = [slice(end - s.num_response_tokens, end) for s, end in zip(sequences, ends, strict=True)]

    def column(
        parts: Sequence[list[float] | np.ndarray | torch.Tensor | None], dtype: npt.DTypeLike, fill: float = 0.0
    ) -> Sequence[torch.Tensor | None]:
        """Field over responses; ``fill`` on prompts. None for sequences without the field."""
        if all(part is None for part in parts):
            return [None] * len(parts)
        together = np.full(sum(lengths), fill, dtype)
        for response, part in zip(responses, parts, strict=True):
            if part is None:
                continue
            if len(part) != response.stop - response.start:
                raise GeneratorOutputError(
                    f"a stage added {len(part)} numbers to a response of {response.stop - response.start} tokens"
                )
            together[response] = _numbers(part)
        split = torch.from_numpy(together).split(lengths)
        return [None if part is None else values for part, values in zip(parts, split, strict=True)]

    token_ids = np.concatenate([sequence.token_array for sequence in sequences]) if sequences else np.empty(0, np.int64)
    columns: dict[str, Sequence[torch.Tensor | None]] = {
        "token_ids": torch.from_numpy(token_ids).split(lengths),
        "loss_mask": column([row.trained for row in rows], np.bool_),
        "advantages": column([row.advantages for row in rows], np.float32),
        "behaviour_logprobs": column([sequence.logprob_array for sequence in sequences], np.float32),
        "versions": column([sequence.version_array for sequence in sequences], np.int64, fill=-1),
        "proximal_logprobs": column([sequence.proximal_logprobs for sequence in sequences], np.float32),
        "reference_logprobs": column([sequence.reference_logprobs for sequence in sequences], np.float32),
        "values": column([row.values for row in rows], np.float32),
        "returns": column([row.returns for row in rows], np.float32),
    }
    return [
        TrainingSequence(
            group_index=row.group_index,
            counted_tokens=row.sequence.num_sampled,
            group_tokens=row.group_tokens,
            group_sequences=row.group_sequences,
            grammars=tuple(span.moved(row.sequence.num_prompt_tokens) for span in row.sequence.grammars),
            **{name: parts[number] for name, parts in columns.items()},  # type: ignore[arg-type]  # None where it may be
        )
        for number, row in enumerate(rows)
    ]


def _numbers(values: list[float] | np.ndarray | torch.Tensor) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        return values.numpy()
    return values if isinstance(values, np.ndarray) else packed("d", values)


def _float32(values: list[float] | np.ndarray) -> torch.Tensor:
    # As torch.tensor(values), in a fraction of its time for lists.
    return torch.from_numpy(_numbers(values).astype(np.float32))

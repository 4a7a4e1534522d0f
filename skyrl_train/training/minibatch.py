"""From finished groups to what one optimizer step trains on.

groups ──shape rewards──> advantages of each group ──(normalise over all)──> sequences
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from skyrl_train.algorithms.advantages import ADVANTAGE_ESTIMATORS, GroupRewards, normalized_over_minibatch
from skyrl_train.algorithms.off_policy.rejections import keeps_sequence
from skyrl_train.algorithms.rewards import kl_penalties, overlong_penalty
from skyrl_train.config import derive
from skyrl_train.config.schema.algorithm import AlgorithmConfig
from skyrl_train.errors import GeneratorOutputError
from skyrl_train.inference.interface import StopReason
from skyrl_train.rollout.group import RolloutGroup, RolloutSequence, Sample, packed
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
        masks = [torch.from_numpy(row.sequence.sampled & (not groups[row.group_index].masked)) for row in rows]
        normalized = normalized_over_minibatch([row.advantages for row in rows], masks)
        rows = [replace(row, advantages=values) for row, values in zip(rows, normalized, strict=True)]
    return Minibatch(_training_sequences(rows), num_groups=len(groups), step=step, kl_factor=kl_factor)


@dataclass(frozen=True, slots=True)
class _Row:
    """A sequence and what is computed for it; arrays and tensors are over its response, ``[T]``."""

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
    sequences = [sequence for sample in group.samples for sequence in sample.sequences]
    group_tokens = sum(sequence.num_sampled for sequence in sequences)
    rows = []
    for number, (sample, advantage) in enumerate(zip(group.samples, advantages, strict=True)):
        untrained = group.masked or (algorithm.overlong.filter and was_cut_off(sample))
        lengths = [sequence.num_response_tokens for sequence in sample.sequences]
        nothing = [None] * len(lengths)
        value = nothing if values is None else values[number].split(lengths)
        for sequence, of_advantage, of_value in zip(sample.sequences, advantage.split(lengths), value, strict=True):
            trained = np.zeros_like(sequence.sampled) if untrained else sequence.sampled
            if oldest_trained_version is not None:
                trained = trained & (sequence.version_array >= oldest_trained_version)
            rows.append(
                _Row(
                    sequence,
                    trained,
                    of_advantage,
                    group_index=index,
                    group_tokens=group_tokens,
                    group_sequences=len(sequences),
                    values=of_value,
                    returns=None if of_value is None else of_advantage + of_value,
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
        if sequence.values is None and sequence.num_sampled and not group.masked:
            raise GeneratorOutputError(
                f"group {group.ordinal} has no values, which trainer.algorithm.advantage_estimator=gae needs: the stage that "
                "adds them did not see it."
            )
        values += sequence.values or [0.0] * sequence.num_response_tokens
    return _float32(values)


def _shaped_rewards(sample: Sample, group: RolloutGroup, algorithm: AlgorithmConfig, kl_factor: float) -> list[float]:
    """The sample's rewards with the penalties for its length, on its last token, and for its divergence."""
    rewards = sample.rewards
    penalty = overlong_penalty(sum(sequence.num_sampled for sequence in sample.sequences), algorithm.overlong)
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
    with_tokens = [sequence for sequence in sample.sequences if sequence.num_sampled]
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


def _training_sequences(rows: Sequence[_Row]) -> list[TrainingSequence]:
    sequences = [row.sequence for row in rows]
    layout = _Layout(sequences)
    columns = {
        "token_ids": layout.whole([sequence.token_array for sequence in sequences]),
        "loss_mask": layout.after_prompts([row.trained for row in rows], np.bool_, fill=False),
        "advantages": layout.after_prompts([row.advantages.numpy() for row in rows], np.float32),
        "behaviour_logprobs": layout.after_prompts([sequence.logprob_array for sequence in sequences], np.float32),
        "versions": layout.after_prompts([sequence.version_array for sequence in sequences], np.int64, fill=-1),
        "proximal_logprobs": layout.where_added([sequence.proximal_logprobs for sequence in sequences]),
        "reference_logprobs": layout.where_added([sequence.reference_logprobs for sequence in sequences]),
        "values": layout.where_added([row.values for row in rows]),
        "returns": layout.where_added([row.returns for row in rows]),
    }
    return [
        TrainingSequence(
            group_index=row.group_index,
            counted_tokens=row.sequence.num_sampled,
            group_tokens=row.group_tokens,
            group_sequences=row.group_sequences,
            **{name: column[number] for name, column in columns.items()},  # type: ignore[arg-type]  # None where it may be
        )
        for number, row in enumerate(rows)
    ]


class _Layout:
    """All sequences of a minibatch end to end: a field is one tensor, of which each sequence has its stretch.

    So numpy and torch are called a few times per field, whatever the number of sequences: a call costs as much as
    hundreds of tokens.
    """

    def __init__(self, sequences: Sequence[RolloutSequence]) -> None:
        self._lengths = [len(sequence.token_array) for sequence in sequences]
        ends = accumulate(self._lengths)
        self._responses = [slice(end - s.num_response_tokens, end) for s, end in zip(sequences, ends, strict=True)]

    def whole(self, parts: Sequence[np.ndarray]) -> Sequence[torch.Tensor]:
        """Of prompts and responses."""
        return self._stretches(np.concatenate(parts)) if parts else []

    def after_prompts(
        self, parts: Sequence[np.ndarray | None], dtype: npt.DTypeLike, fill: float = 0.0
    ) -> Sequence[torch.Tensor]:
        """Of responses, ``fill`` on prompts and where there is None.

        Raises:
            GeneratorOutputError: a part is not as long as its response.
        """
        together = np.full(sum(self._lengths), fill, dtype)
        for response, part in zip(self._responses, parts, strict=True):
            if part is None:
                continue
            if len(part) != response.stop - response.start:
                raise GeneratorOutputError(
                    f"a stage added {len(part)} numbers to a response of {response.stop - response.start} tokens"
                )
            together[response] = part
        return self._stretches(together)

    def where_added(self, parts: Sequence[list[float] | torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Float32, of responses, 0 on prompts; None where nothing was added."""
        if all(part is None for part in parts):
            return [None] * len(parts)
        stretches = self.after_prompts([None if part is None else _numbers(part) for part in parts], np.float32)
        return [None if part is None else stretch for part, stretch in zip(parts, stretches, strict=True)]

    def _stretches(self, together: np.ndarray) -> Sequence[torch.Tensor]:
        stretches: Sequence[torch.Tensor] = torch.from_numpy(together).split(self._lengths)
        return stretches


def _numbers(values: list[float] | np.ndarray | torch.Tensor) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        return values.numpy()
    return values if isinstance(values, np.ndarray) else packed("d", values)


def _float32(values: list[float] | np.ndarray) -> torch.Tensor:
    """What ``torch.tensor`` makes of them, in a fraction of its time where they are in a list."""
    return torch.from_numpy(_numbers(values).astype(np.float32))

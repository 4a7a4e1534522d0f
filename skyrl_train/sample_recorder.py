"""Chooses the groups of each step whose samples are recorded, and collects what training computed for them.

groups, minibatch ──choose──> minibatch with keys ──backend──> collect ──> take: RecordedGroup (observability/samples.py)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from skyrl_train.observability.samples import RecordedGroup, TrainedSequence
from skyrl_train.training.backend import Minibatch, TokenRecord, TrainingBackend
from skyrl_train.types import RolloutGroup

EXTREMES_INTERVAL = 10  # steps
# The group with the largest number is chosen.
EXTREMES: dict[str, Callable[[RolloutGroup], float]] = {
    "best": lambda group: group.mean_reward or 0.0,
    "worst": lambda group: -(group.mean_reward or 0.0),
    "stalest": lambda group: -group.oldest_version,
}


@dataclass(frozen=True)
class _Choice:
    group: RolloutGroup
    reasons: list[str]
    # Of each sequence: its key, which tokens of its response train, and their advantages.
    sequences: list[tuple[int, np.ndarray, np.ndarray]]


class SampleRecorder:
    """Chooses the first groups of each step, and in every tenth step also the best, the worst and the stalest group.

    ``choose`` and ``collect`` are called in the training thread, ``take`` between two steps.

    Args:
        per_step: number of first groups; 0: nothing is recorded.
    """

    def __init__(self, per_step: int) -> None:
        self._per_step = per_step
        self._choices: list[_Choice] = []
        self._records: dict[int, TokenRecord] = {}
        self._next_key = 0

    def choose(self, groups: Sequence[RolloutGroup], minibatch: Minibatch) -> Minibatch:
        """Return ``minibatch`` with keys on the sequences of the chosen ones of ``groups``, which it was built from.

        A step in parts calls it for each of them.
        """
        if not self._per_step:
            return minibatch
        reasons: dict[int, list[str]] = {}
        firsts = self._per_step - sum("first" in choice.reasons for choice in self._choices)
        for place in range(min(firsts, len(groups))):
            reasons[place] = ["first"]
        sampled = [place for place, group in enumerate(groups) if any(sample.sequences for sample in group.samples)]
        if minibatch.step % EXTREMES_INTERVAL == 0 and sampled:
            for reason, measure in EXTREMES.items():
                place = max(sampled, key=lambda place: measure(groups[place]))
                reasons.setdefault(place, []).append(reason)
        if not reasons:
            return minibatch
        choices = {place: _Choice(groups[place], why, []) for place, why in reasons.items()}
        lengths = {
            place: iter([s.num_response_tokens for sample in choice.group.samples for s in sample.sequences])
            for place, choice in choices.items()
        }
        sequences = list(minibatch.sequences)
        for index, sequence in enumerate(sequences):
            choice = choices.get(sequence.group_index)
            if choice is not None:
                response = slice(len(sequence) - next(lengths[sequence.group_index]), None)
                # Copies: a part would keep the arrays of the whole minibatch.
                mask = sequence.loss_mask[response].numpy().copy()
                choice.sequences.append((self._next_key, mask, sequence.advantages[response].numpy().copy()))
                sequences[index] = replace(sequence, record=self._next_key)
                self._next_key += 1
        self._choices += choices.values()
        return replace(minibatch, sequences=sequences)

    def collect(self, backend: TrainingBackend) -> None:
        """Take the records of the finished step from ``backend``."""
        if self._choices:
            self._records = backend.take_records()

    def discard(self) -> None:
        """Forget the choices of a step that will not be finished."""
        self._choices = []

    def take(self) -> tuple[RecordedGroup, ...]:
        """Return the recorded groups of the finished step, and forget them."""
        choices, self._choices = self._choices, []
        records, self._records = self._records, {}
        # Each part of a step has chosen its extremes: keep the extremes of the whole step.
        for reason, measure in EXTREMES.items():
            candidates = [choice for choice in choices if reason in choice.reasons]
            for choice in sorted(candidates, key=lambda choice: measure(choice.group))[:-1]:
                choice.reasons.remove(reason)
        return tuple(
            RecordedGroup(
                choice.group,
                ",".join(choice.reasons),
                tuple(_trained(records.get(key), mask, advantages) for key, mask, advantages in choice.sequences),
            )
            for choice in choices
            if choice.reasons
        )


def engine_gap(step: int, recorded: Sequence[RecordedGroup]) -> dict[str, float]:
    """Return the metric ``off_policy/engine_gap`` of a step: how far the log-probs of trainer and engines are apart where both
    had the same weights. Empty if no recorded group is that fresh, or the backend does not tell its log-probs."""
    gaps = [np.empty(0)]
    for entry in recorded:
        # Fresh tokens of an older group do not count: its earlier tokens may be in the KV cache under older weights.
        if min(entry.group.submitted_version, entry.group.oldest_version) < step - 1:
            continue
        sequences = [sequence for sample in entry.group.samples for sequence in sample.sequences]
        for sequence, trained in zip(sequences, entry.trained, strict=False):
            if trained.logprobs is not None:
                gaps.append(np.abs(trained.logprobs - sequence.logprob_array)[trained.loss_mask])
    differences = np.concatenate(gaps)
    return {"off_policy/engine_gap": float(differences.mean())} if len(differences) else {}


def _trained(record: TokenRecord | None, mask: np.ndarray, advantages: np.ndarray) -> TrainedSequence:
    if record is None and mask.any():
        return TrainedSequence(mask, advantages, None, None)
    logprobs, weights = np.zeros(len(mask), np.float32), np.zeros(len(mask), np.float32)
    if record is not None:
        logprobs[mask], weights[mask] = record.logprobs, record.weights
    return TrainedSequence(mask, advantages, logprobs, weights)

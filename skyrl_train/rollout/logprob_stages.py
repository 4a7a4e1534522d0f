"""Numbers per token of finished groups: log-probs under other policies than the one that sampled them (the reference, the
proximal one), and the critic's values."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from skyrl_train.config import derive
from skyrl_train.config.schema.algorithm import AlgorithmConfig, DynamicSampling, ProximalPolicy
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.environments.base import PromptRecord
from skyrl_train.errors import StageError, TrainingWorkerError
from skyrl_train.rollout.filters import has_signal
from skyrl_train.rollout.group import RolloutGroup, RolloutSequence, Sample
from skyrl_train.rollout.placement.base import CallFailed, Place
from skyrl_train.rollout.stages import Stage
from skyrl_train.training.backend import TrainingSequence
from skyrl_train.training.frozen_policy import TokensToScore

Forward = Callable[[Sequence[TrainingSequence]], Awaitable[list[torch.Tensor]]]
Scores = Sequence[Sequence[float]]  # per sequence, per token of its response; 0.0 where the loss mask is 0


class _ScoringStage(ABC):
    """Scores all sequences of a group together.

    Args:
        needed: whether a group is going to be trained; the others pass unscored.
    """

    name: str
    adds: str  # the field of the sequences in which the scores are put

    def __init__(self, max_parallel: int, needed: Callable[[RolloutGroup], bool]) -> None:
        self.max_parallel = max_parallel
        self._needed = needed

    async def run(self, group: RolloutGroup, record: PromptRecord) -> RolloutGroup:
        """See :class:`Stage`."""
        if not self._needed(group):
            return group
        return with_scores(group, self.adds, await self._score(tokens_to_score(group)))

    @abstractmethod
    async def _score(self, sequences: list[TokensToScore]) -> Scores:
        """The score of each token with loss mask 1."""


class ReferenceStage(_ScoringStage):
    """Log-probs of the policy that the run started from, by frozen copies of it in ``place``.

    Args:
        max_parallel: groups that are scored at once.
        needed: whether a group is going to be trained; the others pass unscored.
    """

    name = "reference"
    adds = "reference_logprobs"

    def __init__(
        self, place: Place, *, max_parallel: int, needed: Callable[[RolloutGroup], bool] = lambda group: True
    ) -> None:
        super().__init__(max_parallel, needed)
        self._place = place

    async def start(self) -> None:
        """See :class:`Stage`."""
        await self._place.start()

    async def aclose(self) -> None:
        """See :class:`Stage`."""
        await self._place.aclose()

    async def _score(self, sequences: list[TokensToScore]) -> Scores:
        try:
            scores: Scores = await self._place.call(sequences)
        except CallFailed as failure:
            if isinstance(failure.error, TrainingWorkerError):  # as of a sharded policy: a run may be started again
                raise TrainingWorkerError(f"The reference log-probs cannot be computed: {failure.error}") from failure
            raise StageError(f"The reference log-probs cannot be computed: {failure.reason}") from failure
        return scores


class _BackendStage(_ScoringStage):
    """Scores of a model that the training backend holds.

    It computes where that model is, between two calls of the trainer's, so that it needs no resources of its own.

    Args:
        forward: what the backend computes of each token ``[T]``.
        needed: whether a group is going to be trained; the others pass unscored.
    """

    def __init__(self, forward: Forward, *, needed: Callable[[RolloutGroup], bool] = lambda group: True) -> None:
        super().__init__(1, needed)
        self._forward = forward

    async def start(self) -> None:
        """Nothing to bring up."""

    async def aclose(self) -> None:
        """Nothing to end."""

    async def _score(self, sequences: list[TokensToScore]) -> Scores:
        laid_out = [sequence.training_sequence() for sequence in sequences]
        scored = await self._forward(laid_out)
        return [
            (values * sequence.loss_mask)[len(tokens.prompt_token_ids) :].tolist()
            for tokens, sequence, values in zip(sequences, laid_out, scored, strict=True)
        ]


class ValueStage(_BackendStage):
    """Values of the states that tokens were sampled in, by the critic that is being trained: advantages and the bound on
    the critic's next move are taken from them, however many steps it makes until the group trains.

    ``forward`` is the critic's ``forward_values`` in its thread.
    """

    name = "values"
    adds = "values"


class ColocatedReferenceStage(_BackendStage):
    """What :class:`ReferenceStage` adds, by the ranks that train the policy.

    ``forward`` is the backend's ``reference_logprobs`` in its thread.
    """

    name = "reference"
    adds = "reference_logprobs"


class ProximalStage(_BackendStage):
    """Log-probs of the policy that is being trained, as it is when the group is finished.

    ``forward`` is the backend's ``forward_logprobs`` in its thread.
    """

    name = "proximal"
    adds = "proximal_logprobs"


def backend_stages(config: RunConfig, reference: Forward, current: Forward) -> list[Stage]:
    """The stages that compute in the training backend, in their order: the reference where it is colocated, and the proximal
    log-probs where ``trainer.algorithm.proximal_policy=arrival`` asks for them.

    Args:
        reference: see :class:`ColocatedReferenceStage`.
        current: see :class:`ProximalStage`.
    """
    algorithm, stages = config.trainer.algorithm, list[Stage]()
    needed = worth_scoring(algorithm)
    if derive.reference_is_colocated(config):
        stages.append(ColocatedReferenceStage(reference, needed=needed))
    if algorithm.proximal_policy is ProximalPolicy.arrival:
        stages.append(ProximalStage(current, needed=needed))
    return stages


def worth_scoring(algorithm: AlgorithmConfig) -> Callable[[RolloutGroup], bool]:
    """Whether a group with its rewards is going to be trained, as far as that is known before the filter."""
    return has_signal if algorithm.dynamic_sampling is DynamicSampling.filter else lambda group: True


def tokens_to_score(group: RolloutGroup) -> list[TokensToScore]:
    """All sequences of the group, sample by sample. Pure."""
    return [
        TokensToScore(sequence.prompt_token_ids, sequence.response_ids, sequence.loss_mask)
        for sample in group.samples
        for sequence in sample.sequences
    ]


def with_scores(group: RolloutGroup, field: str, scores: Scores) -> RolloutGroup:
    """The group with the scores of all its sequences, sample by sample, in ``field``. Pure."""
    remaining = iter(scores)
    samples = tuple(
        Sample(tuple(_with(sequence, field, next(remaining)) for sequence in sample.sequences))
        for sample in group.samples
    )
    return replace(group, samples=samples)


def _with(sequence: RolloutSequence, field: str, scores: Sequence[float]) -> RolloutSequence:
    if not all(map(math.isfinite, scores)):
        raise StageError(
            f"The {field} of a group are not all finite numbers: the model that computes them has diverged."
        )
    added: dict[str, Any] = {field: list(scores)}
    return replace(sequence, **added)

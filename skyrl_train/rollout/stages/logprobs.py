"""Stages that add numbers per token to finished groups: log-probs of the reference or the proximal policy, or values."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from skyrl_train.config import derive
from skyrl_train.config.schema import AlgorithmConfig, DynamicSampling, ProximalPolicy, RunConfig
from skyrl_train.environments.base import PromptRecord
from skyrl_train.errors import StageError, TrainingWorkerError
from skyrl_train.rollout.filters import has_signal
from skyrl_train.rollout.stages.pipeline import Stage
from skyrl_train.training.backend import TrainingSequence
from skyrl_train.training.reference import TokensToScore
from skyrl_train.types import RolloutGroup
from skyrl_train.weight_sync.update import WeightUpdate
from skyrl_train.workers.executors import CallFailed, Executor

# For each sequence of P + T tokens, a float tensor [P + T].
Forward = Callable[[Sequence[TrainingSequence]], Awaitable[list[torch.Tensor]]]
Scores = Sequence[Sequence[float]]  # per sequence [T]; 0.0 where the loss mask is 0


class ReferenceStage(Stage):
    """Adds log-probs of the initial policy, computed by frozen copies of it in ``executor``.

    Args:
        max_parallel: groups that are scored at once.
        needed: returns whether a group will be trained; other groups pass without scores.
    """

    name = "reference"
    scores_of = "reference"  # in messages, and the field of a RolloutSequence that ends in "_logprobs"

    def __init__(
        self, executor: Executor, *, max_parallel: int, needed: Callable[[RolloutGroup], bool] = lambda group: True
    ) -> None:
        self.executor: Executor = executor
        self.max_parallel = max_parallel
        self._needed = needed

    async def run(self, group: RolloutGroup, record: PromptRecord) -> RolloutGroup:
        if not self._needed(group):
            return group
        try:
            scores: Scores = await self.executor.call(tokens_to_score(group))
        except CallFailed as failure:
            if isinstance(failure.error, TrainingWorkerError):  # keep the type: the run may restart after it
                raise TrainingWorkerError(
                    f"The {self.scores_of} log-probs cannot be computed: {failure.error}"
                ) from failure
            raise StageError(f"The {self.scores_of} log-probs cannot be computed: {failure.reason}") from failure
        return with_scores(group, f"{self.scores_of}_logprobs", scores)


class ReplicaStage(ReferenceStage):
    """Adds proximal log-probs, computed by a replica of the policy (``PolicyReplica``) in ``executor``.

    A weight sync waits for the group that is being scored, and later groups are scored under the new version.
    """

    name = "proximal"
    scores_of = "proximal"

    async def load(self, update: WeightUpdate) -> None:
        """Load a policy version, whose staging copy must stay valid meanwhile.

        Raises:
            StageError: the replica cannot load it.
        """
        try:
            await self.executor.call(update)
        except CallFailed as failure:
            raise StageError(
                f"The replica of the policy, which computes proximal log-probs, cannot load version {update.version}: "
                f"{failure.reason}"
            ) from failure


class _BackendStage(Stage):
    """Adds scores of a model in the training backend, computed between two calls of the trainer.

    Args:
        forward: computes a score for each token; see :data:`Forward`.
        needed: returns whether a group will be trained; other groups pass without scores.
    """

    field: str  # of a RolloutSequence

    def __init__(self, forward: Forward, *, needed: Callable[[RolloutGroup], bool] = lambda group: True) -> None:
        self._forward = forward
        self._needed = needed

    async def run(self, group: RolloutGroup, record: PromptRecord) -> RolloutGroup:
        if not self._needed(group):
            return group
        tokens = tokens_to_score(group)
        sequences = [each.training_sequence() for each in tokens]
        scored = await self._forward(sequences)
        # Without the prompt, and 0.0 where the loss mask is 0: the form in which a sequence stores them.
        scores = [
            (values * sequence.loss_mask)[len(each.prompt_token_ids) :].tolist()
            for each, sequence, values in zip(tokens, sequences, scored, strict=True)
        ]
        return with_scores(group, self.field, scores)


class ValueStage(_BackendStage):
    """Adds the critic's values of the states in which tokens were sampled.

    Advantages and the clipping range of the critic's loss use these values, even if the critic is updated before the group
    trains. ``forward`` is the critic's ``forward_values`` in its thread.
    """

    name = "values"
    field = "values"


class ColocatedReferenceStage(_BackendStage):
    """Adds the same as :class:`ReferenceStage`, computed by the ranks that train the policy.

    ``forward`` is the backend's ``reference_logprobs`` in its thread.
    """

    name = "reference"
    field = "reference_logprobs"


class ProximalStage(_BackendStage):
    """Adds log-probs of the trained policy at the time when the group is finished.

    ``forward`` is the backend's ``forward_logprobs`` in its thread.
    """

    name = "proximal"
    field = "proximal_logprobs"


def backend_stages(config: RunConfig, reference: Forward, current: Forward) -> list[Stage]:
    """Return the stages that compute in the training backend, in their order.

    These are the reference if it is colocated, and the proximal log-probs with ``trainer.algorithm.proximal_policy=arrival``
    unless a replica computes them.

    Args:
        reference: see :class:`ColocatedReferenceStage`.
        current: see :class:`ProximalStage`.
    """
    algorithm, stages = config.trainer.algorithm, list[Stage]()
    needed = worth_scoring(algorithm)
    if derive.reference_is_colocated(config):
        stages.append(ColocatedReferenceStage(reference, needed=needed))
    if algorithm.proximal_policy is ProximalPolicy.arrival and not derive.has_replica(config):
        stages.append(ProximalStage(current, needed=needed))
    return stages


def worth_scoring(algorithm: AlgorithmConfig) -> Callable[[RolloutGroup], bool]:
    """Return a function that tells whether a rewarded group will be trained, as far as this is known before the filter."""
    return has_signal if algorithm.dynamic_sampling is DynamicSampling.filter else lambda group: True


def tokens_to_score(group: RolloutGroup) -> list[TokensToScore]:
    """Return all sequences of the group, sample by sample. Pure."""
    return [
        TokensToScore(sequence.prompt_token_ids, sequence.response_ids, sequence.loss_mask, sequence.grammars)
        for sample in group.samples
        for sequence in sample.sequences
    ]


def with_scores(group: RolloutGroup, field: str, scores: Scores) -> RolloutGroup:
    """Return the group with ``scores`` in ``field`` of its sequences, sample by sample. Pure.

    Raises:
        StageError: a score is not finite.
    """
    if not all(math.isfinite(score) for of_sequence in scores for score in of_sequence):
        raise StageError(
            f"The {field} of a group are not all finite numbers: the model that computes them has diverged."
        )
    added: Iterator[dict[str, Any]] = ({field: list(of_sequence)} for of_sequence in scores)
    samples = tuple(
        # The innermost loop takes the next scores, so they stay in the order of tokens_to_score().
        replace(sample, sequences=tuple(replace(sequence, **next(added)) for sequence in sample.sequences))
        for sample in group.samples
    )
    return replace(group, samples=samples)

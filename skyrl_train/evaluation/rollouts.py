"""Generates the samples of an evaluation: each bounded in time, tried twice, and of one policy version or an error."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_train.concurrency import cancel_within, gather_or_cancel
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.environments.base import PromptRecord
from skyrl_train.errors import EngineError, EvaluationError, NoEngineError, RolloutError
from skyrl_train.evaluation.data import sampling_params
from skyrl_train.evaluation.engines import EvaluationEngines
from skyrl_train.evaluation.metrics import EvaluatedPrompt, EvaluatedSample, passed
from skyrl_train.generators.base import BatchMetadata, GeneratorInput, TrajectoryID, play
from skyrl_train.generators.validation import to_samples
from skyrl_train.inference.interface import StopReason
from skyrl_train.inference.randomness import mix
from skyrl_train.rollout.group import RolloutGroup, Sample
from skyrl_train.rollout.runner import CANCEL_GRACE_S

logger = logging.getLogger(__name__)

ATTEMPTS = 2
STREAM = 0x6576616C  # keeps the seeds of evaluations apart from those of training


# Puts rewards that are computed apart from the rollout in the place of the generator's; raises RolloutError if it cannot.
Score = Callable[[RolloutGroup, PromptRecord], Awaitable[RolloutGroup]]


@dataclass(frozen=True, slots=True)
class _Failed:
    """A sample that failed twice."""

    reason: str


class PromptRunner:
    """Turns a prompt of the evaluation into judged samples, each generated in a ``generate`` call of its own.

    So one that fails takes no other with it. Seeds are a function of ``(trainer.seed, prompt, sample, attempt)``, the
    policy version is no part of it: two versions are measured with the same random numbers.

    Args:
        score: the run's reward function, where it has one apart from its generator.
    """

    def __init__(self, config: RunConfig, engines: EvaluationEngines, score: Score | None) -> None:
        self._generator = engines.generator
        self._client = engines.client
        self._score = score
        self._sampling_params = sampling_params(config)
        self._env_class = config.environment.env_class
        self._seed = config.trainer.seed
        self._n = config.trainer.eval.n_samples_per_prompt
        self._pass_threshold = config.trainer.eval.pass_threshold
        self._timeout_s = config.trainer.failures.rollout_timeout_s

    async def run(self, record: PromptRecord, index: int, version: int) -> EvaluatedPrompt:
        """Generates and judges all samples of prompt ``index``.

        What fails twice has not passed: it is part of the result, and no reason to stop.

        Raises:
            EvaluationError: a token was sampled by another policy version than ``version``.
            EngineError: the engines failed twice; that says nothing about the policy.
        """
        outcomes = await gather_or_cancel(self._sample(record, index, number, version) for number in range(self._n))
        if self._score is not None:
            outcomes = await self._scored(self._score, record, index, version, outcomes)
        return EvaluatedPrompt(record.uid, record.data_source, tuple(self._judged(outcome) for outcome in outcomes))

    async def _scored(
        self, score: Score, record: PromptRecord, index: int, version: int, outcomes: Sequence[Sample | _Failed]
    ) -> list[Sample | _Failed]:
        samples = tuple(outcome for outcome in outcomes if isinstance(outcome, Sample))
        if not samples:
            return list(outcomes)
        group = RolloutGroup(-1 - index, record.uid, record.data_source, samples, submitted_version=version)
        try:
            scored = iter((await score(group, record)).samples)
        except RolloutError as error:
            return [_Failed(str(error)) if isinstance(outcome, Sample) else outcome for outcome in outcomes]
        return [next(scored) if isinstance(outcome, Sample) else outcome for outcome in outcomes]

    def _judged(self, outcome: Sample | _Failed) -> EvaluatedSample:
        if isinstance(outcome, _Failed):
            return EvaluatedSample(reward=None, passed=False, failure=outcome.reason)
        reward = math.fsum(outcome.rewards)
        return EvaluatedSample(
            reward=reward,
            passed=passed(reward, self._pass_threshold),
            response_tokens=len(outcome.sampled_versions),
            truncated=outcome.sequences[-1].stop_reason == StopReason.LENGTH,
        )

    async def _sample(self, record: PromptRecord, index: int, number: int, version: int) -> Sample | _Failed:
        reason = ""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._bounded(self._generate(record, index, number, attempt, version))
            except EvaluationError:
                raise
            except Exception as error:
                reason = str(error) if isinstance(error, RolloutError) else f"it raised {error!r}"
                logger.warning(
                    "evaluation of version %d, prompt %r, sample %d: attempt %d failed: %s",
                    *(version, record.uid, number, attempt, reason),
                    exc_info=error,
                )
                if attempt == ATTEMPTS and isinstance(error, EngineError):
                    raise
        return _Failed(reason)

    async def _bounded(self, attempt: Coroutine[Any, Any, Sample]) -> Sample:
        """Runs an attempt in a task of its own: whatever it does to itself, ours goes on.

        Raises:
            RolloutError: it took too long, or cancelled itself.
            NoEngineError: it took too long because no engine serves.
        """
        task = asyncio.create_task(attempt, name="evaluation-sample")
        try:
            await asyncio.wait([task], timeout=self._timeout_s)
        finally:
            in_time = task.done()
            await cancel_within([task], CANCEL_GRACE_S)
        if not in_time:
            limit = f"trainer.failures.rollout_timeout_s = {self._timeout_s} s"
            if not self._client.serving:
                raise NoEngineError(f"a sample passed {limit} while no engine served")
            raise RolloutError(f"it took longer than {limit}")
        if task.cancelled():
            raise RolloutError("its generator cancelled itself")
        return task.result()

    async def _generate(self, record: PromptRecord, index: int, number: int, attempt: int, version: int) -> Sample:
        copy = record.own_copy()
        request = GeneratorInput(
            prompts=[copy.prompt],
            env_classes=[record.env_class or self._env_class],
            env_extras=[copy.env_extras],
            sampling_params=self._sampling_params,
            trajectory_ids=[TrajectoryID(f"{record.uid}@eval-{version}.{attempt}", number)],
            batch_metadata=BatchMetadata(
                global_step=version,
                training_phase="eval",
                seeds=(mix(self._seed, STREAM, index, number, attempt),),
            ),
        )
        output = await play(self._generator, request)
        (sample,) = to_samples(output, expected=1)
        _check_versions(sample, record.uid, version)
        return sample


def _check_versions(sample: Sample, uid: str, version: int) -> None:
    """Every sampled token is of ``version``."""
    met = set(sample.sampled_versions.tolist()) - {version}
    if met:
        others = ", ".join(str(other) for other in sorted(met))
        raise EvaluationError(
            f"The evaluation of policy version {version} met tokens of version {others} (prompt {uid!r}). Its generator must "
            "pass the client's response_versions through; if it does, weights were published while the evaluation ran, "
            "which is a bug."
        )

"""Generates the samples of an evaluation: each with a time limit, two attempts, and tokens of one policy version."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import asdict

from skyrl_train.config.schema import RunConfig
from skyrl_train.environments.base import PromptRecord
from skyrl_train.errors import EngineError, EvaluationError, NoEngineError, RolloutError
from skyrl_train.evaluation.engines import EvaluationEngines
from skyrl_train.evaluation.metrics import EvaluatedPrompt, EvaluatedSample, passed
from skyrl_train.generators.base import run_generator
from skyrl_train.generators.validation import to_samples
from skyrl_train.inference.interface import StopReason
from skyrl_train.rollout.group_generator import CANCEL_GRACE_S, describe_calls
from skyrl_train.runtime.concurrency import cancel_within, gather_or_cancel
from skyrl_train.runtime.seeds import derive_seed
from skyrl_train.types import BatchMetadata, GeneratorInput, RolloutGroup, Sample, TrajectoryID

logger = logging.getLogger(__name__)

ATTEMPTS = 2
STREAM = 0x6576616C  # separates the seeds of evaluations from the seeds of training


# Replaces the generator's rewards by the results of the run's reward function; raises RolloutError if it cannot.
Score = Callable[[RolloutGroup, PromptRecord], Awaitable[RolloutGroup]]


class PromptRunner:
    """Generates and judges the samples of a prompt, each in a separate ``generate`` call, so that they fail independently.

    Seeds are a function of ``(trainer.seed, prompt, sample, attempt)`` without the policy version: two versions are measured
    with the same random numbers.

    Args:
        score: the run's reward function, if it has one apart from its generator.
    """

    def __init__(self, config: RunConfig, engines: EvaluationEngines, score: Score | None) -> None:
        self._generator = engines.generator
        self._client = engines.client
        self._score = score
        self._sampling_params = {**asdict(config.generator.sampling_params), **config.trainer.eval.sampling_params}
        self._env_class = config.environment.env_class
        self._seed = config.trainer.seed
        self._n = config.trainer.eval.n_samples_per_prompt
        self._pass_threshold = config.trainer.eval.pass_threshold
        self._timeout_s = config.trainer.failures.rollout_timeout_s
        self._recorded = config.trainer.samples_per_step

    async def run(self, record: PromptRecord, index: int, version: int) -> EvaluatedPrompt:
        """Generate and judge all samples of prompt ``index``. A sample that fails twice counts as not passed.

        Raises:
            EvaluationError: a token was sampled by another policy version than ``version``.
            EngineError: the engines failed twice, which says nothing about the policy.
        """
        outcomes = await gather_or_cancel(self._sample(record, index, number, version) for number in range(self._n))
        samples = tuple(outcome for outcome in outcomes if isinstance(outcome, Sample))
        # One call for all samples of the prompt, in the form of a training group, as the reward function expects.
        if self._score is not None and samples:
            group = RolloutGroup(-1 - index, record.uid, record.data_source, samples, submitted_version=version)
            try:
                scored = iter((await self._score(group, record)).samples)
            except RolloutError as error:
                outcomes = [str(error) if isinstance(outcome, Sample) else outcome for outcome in outcomes]
            else:
                # Failed samples keep their places, so that each score belongs to its sample.
                outcomes = [next(scored) if isinstance(outcome, Sample) else outcome for outcome in outcomes]
        judged = []
        for outcome in outcomes:
            if isinstance(outcome, str):
                judged.append(EvaluatedSample(reward=None, passed=False, failure=outcome))
                continue
            reward = math.fsum(outcome.rewards)
            judged.append(
                EvaluatedSample(
                    reward=reward,
                    passed=passed(reward, self._pass_threshold),
                    response_tokens=len(outcome.sampled_versions),
                    truncated=outcome.sequences[-1].stop_reason == StopReason.LENGTH,
                )
            )
        recorded: RolloutGroup | None = None
        if index < self._recorded:
            # A failed sample keeps its place, without sequences.
            kept = tuple(outcome if isinstance(outcome, Sample) else Sample(()) for outcome in outcomes)
            recorded = RolloutGroup(-1 - index, record.uid, record.data_source, kept, submitted_version=version)
        return EvaluatedPrompt(record.uid, record.data_source, tuple(judged), recorded)

    async def _sample(self, record: PromptRecord, index: int, number: int, version: int) -> Sample | str:
        """Return the sample, or the reason of its last failure."""
        reason = ""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._run_attempt(record, index, number, attempt, version)
            except EvaluationError:  # a bug, which another attempt would hide
                raise
            except Exception as error:
                reason = str(error) if isinstance(error, RolloutError) else f"it raised {error!r}"
                logger.warning(
                    "evaluation of version %d, prompt %r, sample %d: attempt %d failed: %s",
                    *(version, record.uid, number, attempt, reason),
                    exc_info=error,
                )
                # Without an answer of the engines, "not passed" would describe the engines and not the policy.
                if attempt == ATTEMPTS and isinstance(error, EngineError):
                    raise
        return reason

    async def _run_attempt(self, record: PromptRecord, index: int, number: int, attempt: int, version: int) -> Sample:
        """Run one attempt in a task: an attempt that cancels itself must not cancel the evaluation.

        Raises:
            RolloutError: it exceeded the time limit, or cancelled itself.
            NoEngineError: it exceeded the time limit because no engine serves.
        """
        generation = self._generate(record, index, number, attempt, version)
        task = asyncio.create_task(generation, name="evaluation-sample")
        try:
            await asyncio.wait([task], timeout=self._timeout_s)
        finally:
            # Read before the cancellation, after which every task has ended.
            in_time, where = task.done(), describe_calls([_name(record, number, attempt, version).to_string()])
            await cancel_within([task], CANCEL_GRACE_S)
        if not in_time:
            limit = f"trainer.failures.rollout_timeout_s = {self._timeout_s} s"
            if not self._client.serving:
                raise NoEngineError(f"a sample exceeded {limit} while no engine served")
            raise RolloutError(f"it exceeded {limit}{where}")
        if task.cancelled():
            raise RolloutError("its generator cancelled itself")
        return task.result()

    async def _generate(self, record: PromptRecord, index: int, number: int, attempt: int, version: int) -> Sample:
        copy = record.own_copy()
        output = await run_generator(
            self._generator,
            GeneratorInput(
                prompts=[copy.prompt],
                env_classes=[record.env_class or self._env_class],
                env_extras=[copy.env_extras],
                sampling_params=self._sampling_params,
                trajectory_ids=[_name(record, number, attempt, version)],
                batch_metadata=BatchMetadata(
                    global_step=version,
                    training_phase="eval",
                    seeds=(derive_seed(self._seed, STREAM, index, number, attempt),),
                ),
            ),
        )
        (sample,) = to_samples(output, expected=1)
        # A figure over several versions would describe no policy.
        other_versions = set(sample.sampled_versions.tolist()) - {version}
        if other_versions:
            others = ", ".join(map(str, sorted(other_versions)))
            raise EvaluationError(
                f"The evaluation of policy version {version} got tokens of version {others} (prompt {record.uid!r}). Its "
                "generator must pass the client's response_versions through; if it does, weights were synced during the "
                "evaluation, which is a bug."
            )
        return sample


def _name(record: PromptRecord, number: int, attempt: int, version: int) -> TrajectoryID:
    return TrajectoryID(f"{record.uid}@eval-{version}.{attempt}", number)

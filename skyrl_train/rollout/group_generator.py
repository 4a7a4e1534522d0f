"""Generates one rollout group: calls the generator, checks its output, and retries when an attempt fails.

| event | consequence |
|---|---|
| it raises, cancels itself, or exceeds ``rollout_timeout_s`` | another attempt (``max_rollout_retries``), then RolloutError |
| the actor in which it runs is lost, for the first time | the same attempt again: the node may have failed |
| all engines are lost (NoEngineError) | the same attempt again once an engine serves (``max_engine_failures``) |
| the output breaks the contract, or the engines fail otherwise | the error is raised; another attempt would not help |
| the attempt ignores its cancellation | it is abandoned after ``cancel_grace_s``, and named when the run is stuck |
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from skyrl_train.config.schema import FailureConfig
from skyrl_train.environments.base import PromptRecord
from skyrl_train.environments.episode import environment_call
from skyrl_train.errors import (
    ConfigError,
    EngineError,
    GeneratorOutputError,
    NoEngineError,
    RolloutActorError,
    RolloutError,
    StageError,
    TrainingWorkerError,
)
from skyrl_train.events.log import NO_EVENTS, EventLog
from skyrl_train.generators.base import GeneratorInterface, run_generator
from skyrl_train.generators.validation import is_finite, to_samples
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.replay import ReplayCache
from skyrl_train.observability.failures import OnFailure, place_of, user_frame
from skyrl_train.observability.metrics import quantiles, spec_of
from skyrl_train.rollout.data.samplers import PromptSource
from skyrl_train.rollout.stages.pipeline import StagePipeline
from skyrl_train.runtime.concurrency import cancel_within
from skyrl_train.runtime.seeds import derive_seed
from skyrl_train.types import BatchMetadata, GeneratorInput, RolloutGroup, Sample, TrajectoryID

logger = logging.getLogger(__name__)

CANCEL_GRACE_S = 10.0  # time for a cancelled generator to clean up
MAX_DESCRIBED = 16  # groups named when the run is stuck: those that have run longest


@dataclass(slots=True)
class _Attempt:
    """A group in generation."""

    group_index: int
    record: PromptRecord  # kept here: the data loader forgets the row of a dropped group
    number: int  # counted from 1
    since: float
    waits_for_engine: bool = False
    generated: bool = False
    lost_actor: bool = False  # and the same attempt runs again, from its recorded tokens

    def trajectory(self, repetition: int) -> TrajectoryID:
        """Name a sample. Contains the group index, because a prompt comes again in the next epoch."""
        return TrajectoryID(f"{self.record.uid}@{self.group_index}", repetition)


class _AttemptFailed(Exception):
    """An attempt failed, and another one may succeed. The message is the reason; its cause is the attempt's own error."""


class GroupGenerator:
    """Turns a group index into a finished group.

    Seeds are a function of ``(seed, group_index, sample, attempt)``, so a group does not depend on where and when it runs.

    Args:
        sampling_params: of each request, in the format of the client.
        env_class: for rows that name none.
        replay_cache: recorded tokens of groups in flight.
        stages: pipeline that each generated group passes.
        on_failure: called for each attempt that fails and may be retried, with the group's name, a reason, and the error if
            one was raised.
        clock: for latencies and :meth:`describe`, in seconds.
        cancel_grace_s: time limit for a cancelled attempt to end.
        events: the record of the run.

    Attributes:
        retries: attempts beyond the first.
        engine_failures: groups that lost all their engines.
    """

    def __init__(
        self,
        generator: GeneratorInterface,
        prompts: PromptSource,
        client: InferenceEngineClient,
        failures: FailureConfig,
        *,
        n_samples_per_prompt: int,
        sampling_params: Mapping[str, Any],
        env_class: str,
        seed: int,
        replay_cache: ReplayCache | None = None,
        stages: StagePipeline | None = None,
        on_failure: OnFailure = lambda name, reason, error: None,
        clock: Callable[[], float] = time.monotonic,
        cancel_grace_s: float = CANCEL_GRACE_S,
        events: EventLog = NO_EVENTS,
    ) -> None:
        self._generator = generator
        self._prompts = prompts
        self._client = client
        self._failures = failures
        self._n = n_samples_per_prompt
        self._sampling_params = sampling_params
        self._env_class = env_class
        self._seed = seed
        self._replay_cache = ReplayCache(enabled=False) if replay_cache is None else replay_cache
        self.stages = StagePipeline() if stages is None else stages
        self._on_failure = on_failure
        self._clock = clock
        self._cancel_grace_s = cancel_grace_s
        self._events = events
        self._running: dict[int, _Attempt] = {}
        self._abandoned: dict[asyncio.Task[RolloutGroup], _Attempt] = {}
        self._latencies_s: list[float] = []  # of the groups that finished since the metrics were taken
        self.retries = 0
        self.engine_failures = 0

    async def run(self, group_index: int) -> RolloutGroup:
        """Generate the group and pass it through the stages. A cancelled call ends within ``cancel_grace_s``.

        Raises:
            RolloutError: every attempt raised or timed out (the last failure is the cause), or a stage cannot use the group.
            StageError, TrainingWorkerError: a stage failed.
            GeneratorOutputError: the generator broke its contract; another attempt would not help.
            NoEngineError: all engines were lost more often than ``max_engine_failures`` allows.
            EngineError: the engines failed otherwise; the prompt is not the reason.
        """
        # A group that an earlier process started continues with the attempt that its recorded tokens belong to.
        number = 1 + self._replay_cache.attempt(group_index)
        began = self._clock()
        attempt = _Attempt(group_index, self._prompts.record(group_index), number, began)
        sessions = [attempt.trajectory(repetition).to_string() for repetition in range(self._n)]
        self._running[group_index] = attempt
        try:
            group = None
            # Each turn is an attempt, or the continuation of one whose engines were lost.
            while group is None:
                self._replay_cache.begin(group_index, sessions, attempt.number - 1)
                try:
                    group = await self._run_attempt(attempt)
                except NoEngineError as error:  # the recorded tokens stay: the attempt continues from there
                    await self._wait_for_engine(attempt, error)
                except _AttemptFailed as failure:
                    self._prepare_retry(attempt, failure)
            # A group that a stage rejects has failed for good: it is not generated again.
            attempt.generated = True
            self._events.put(
                "finished",
                {
                    "group": group_index,
                    "uid": group.uid,
                    "attempt": attempt.number,
                    "oldest": group.oldest_version,
                    "newest": group.newest_version,
                    "tokens": sum(sequence.num_sampled for sample in group.samples for sequence in sample.sequences),
                    "stages": self.stages.count,
                    "reward": None if self.stages.count else group.mean_reward,
                },
            )
            group = await self.stages.run(group, attempt.record)
        except (EngineError, GeneratorOutputError, StageError, TrainingWorkerError):
            # These stop the run and are no outcome of the group. Its recorded tokens stay for the last checkpoint.
            raise
        except BaseException:
            self._replay_cache.end(group_index)
            raise
        finally:
            del self._running[group_index]
        self._replay_cache.end(group_index)
        self._latencies_s.append(self._clock() - began)
        return group

    def take_metrics(self) -> dict[str, float]:
        """Return the latency of the groups that finished since the last call, and of the oldest one that runs, if any."""
        latencies_s, self._latencies_s = self._latencies_s, []
        metrics = quantiles("generate/latency_s_p", latencies_s, 50, 99) if latencies_s else {}
        return metrics if math.isnan(self.oldest_s) else metrics | {"generate/latency_s_oldest": self.oldest_s}

    @property
    def oldest_s(self) -> float:
        """Age of the oldest attempt that runs; NaN: there is none."""
        return self._clock() - min((attempt.since for attempt in self._running.values()), default=math.nan)

    async def _run_attempt(self, attempt: _Attempt) -> RolloutGroup:
        """Run one attempt in a task: an attempt that cancels itself must not cancel the group's task.

        Raises:
            _AttemptFailed: the prompt or the generator is the reason, and another attempt may succeed.
            NoEngineError, GeneratorOutputError, EngineError: see :meth:`run`.
        """
        task = asyncio.create_task(self._generate(attempt), name=f"group-{attempt.group_index}-{attempt.number}")
        try:
            # wait() instead of wait_for(): it does not wait for an attempt that ignores its cancellation.
            await asyncio.wait([task], timeout=self._failures.rollout_timeout_s)
        except asyncio.CancelledError:
            await self._cancel(task, attempt)
            raise
        if not task.done():
            where = describe_calls([attempt.trajectory(repetition).to_string() for repetition in range(self._n)])
            await self._cancel(task, attempt)
            limit = f"trainer.failures.rollout_timeout_s = {self._failures.rollout_timeout_s} s"
            # Without a serving engine no attempt can succeed, so the prompt is not the reason.
            if not self._client.serving:
                raise NoEngineError(f"a rollout exceeded {limit} while no engine served")
            raise _AttemptFailed(f"it exceeded {limit}{where}")
        try:
            return task.result()
        except (GeneratorOutputError, EngineError):
            raise
        except RolloutError as error:
            raise _AttemptFailed(str(error)) from error
        # This CancelledError is the attempt's own: a cancelled group has left through the handler above.
        except (Exception, asyncio.CancelledError) as error:
            raise _AttemptFailed(f"it raised {error!r}") from error

    async def _generate(self, attempt: _Attempt) -> RolloutGroup:
        """Call the generator once and check its output."""
        group_index, record, number = attempt.group_index, attempt.record, attempt.number - 1
        # Read before the first token: no new token of this attempt is older.
        version = self._client.policy_version
        copies = [record.own_copy() for _ in range(self._n)]  # user code may write into prompts and extras
        output = await run_generator(
            self._generator,
            GeneratorInput(
                prompts=[copy.prompt for copy in copies],
                env_classes=[record.env_class or self._env_class] * self._n,
                env_extras=[copy.env_extras for copy in copies],
                sampling_params=self._sampling_params,
                trajectory_ids=[attempt.trajectory(repetition) for repetition in range(self._n)],
                batch_metadata=BatchMetadata(
                    global_step=version + 1,
                    training_phase="train",
                    seeds=tuple(derive_seed(self._seed, group_index, sample, number) for sample in range(self._n)),
                ),
            ),
        )
        group = RolloutGroup(
            group_index=group_index,
            uid=record.uid,
            data_source=record.data_source,
            samples=to_samples(output, expected=self._n),
            submitted_version=version,
            metrics=_checked_metrics(output.get("rollout_metrics") or {}),
            generation_s=self._clock() - attempt.since,
        )
        # A version from the future would make the group look fresher than it is, and break the staleness bound.
        if group.newest_version > self._client.policy_version:
            raise GeneratorOutputError(
                f"rollout_versions contains version {group.newest_version}, but the engines serve "
                f"{self._client.policy_version}. Give each token the version that the client returned with it; "
                "batch_metadata.global_step is one more."
            )
        return group

    def _prepare_retry(self, attempt: _Attempt, failure: _AttemptFailed) -> None:
        """Count a failed attempt.

        Raises:
            RolloutError: no attempts are left.
        """
        reason, cause = str(failure), failure.__cause__
        self._on_failure(f"group {attempt.group_index}", reason, cause)
        # The same attempt runs again after it lost its actor once. A second loss may be caused by the attempt itself.
        same = isinstance(cause, RolloutActorError) and not attempt.lost_actor
        if attempt.number >= 1 + self._failures.max_rollout_retries and not same:
            failed = "failed" if attempt.number == 1 else f"failed {attempt.number} times; the last time"
            raise RolloutError(f"the rollout of prompt {attempt.record.uid!r} {failed}: {reason}") from cause
        logger.warning("group %d: attempt %d failed (%s), retrying", attempt.group_index, attempt.number, reason)
        self._events.record(
            "retried", group=attempt.group_index, attempt=attempt.number, reason=reason, place=place_of(cause)
        )
        self.retries += 1
        if same:
            attempt.lost_actor = True
        else:
            attempt.number += 1
        attempt.since = self._clock()

    async def _cancel(self, task: asyncio.Task[RolloutGroup], attempt: _Attempt) -> None:
        """Cancel the task and ignore its result. Abandon it if it does not end in time."""
        if await cancel_within([task], self._cancel_grace_s):
            logger.error(
                "group %d: attempt %d did not end within %g s of its cancellation; abandoned. A generator must let "
                "asyncio.CancelledError through.",
                attempt.group_index,
                attempt.number,
                self._cancel_grace_s,
            )
            # A copy, because the group's own object changes with its next attempt.
            self._abandoned[task] = _Attempt(attempt.group_index, attempt.record, attempt.number, attempt.since)
            task.add_done_callback(self._abandoned.pop)

    async def _wait_for_engine(self, attempt: _Attempt, error: NoEngineError) -> None:
        """Wait until an engine serves.

        Raises:
            NoEngineError: ``max_engine_failures`` is exceeded.
        """
        attempt.waits_for_engine = True
        while True:
            # Counted in each turn, so that engines which come back and fail again cannot hold the run forever.
            self.engine_failures += 1
            allowed = self._failures.max_engine_failures
            if self.engine_failures > allowed:
                raise NoEngineError(
                    f"{error}. (Group {attempt.group_index} lost its engines; trainer.failures.max_engine_failures = {allowed} "
                    "such losses are allowed. Check the engines and run the same command again.)"
                ) from error
            logger.warning("group %d lost its engines (%s); it waits for one to come back", attempt.group_index, error)
            try:
                await self._client.wait_for_engine()
            except NoEngineError as again:
                error = again
            else:
                attempt.waits_for_engine = False
                return

    def failed_group(self, group_index: int) -> RolloutGroup:
        """Make the group that fills the slot of a failed one (``on_rollout_failure=mask``).

        Its samples have no tokens: nothing was sampled that could train, and a prompt without a response would only cost a
        forward pass. No token can be stale, so the group is as old as the current policy.
        """
        record = self._prompts.record(group_index)
        return RolloutGroup(
            group_index=group_index,
            uid=record.uid,
            data_source=record.data_source,
            samples=(Sample(()),) * self._n,
            submitted_version=self._client.policy_version,
            masked=True,
        )

    def describe(self) -> list[str]:
        """Return a line for each group that has run longest, and for each attempt that ignores its cancellation."""
        now = self._clock()
        # The longest attempts first: one of them is the likely reason why a run is stuck.
        running = sorted(self._running.values(), key=lambda attempt: (attempt.since, attempt.group_index))
        lines = [
            f"group {attempt.group_index} (prompt {attempt.record.uid!r}): attempt {attempt.number} of "
            f"{1 + self._failures.max_rollout_retries} began {now - attempt.since:.0f} s ago, {self._n} sessions from "
            f"{attempt.trajectory(0).to_string()} on"
            + ("; waits for an engine" if attempt.waits_for_engine else "")
            + ("; generated, and in its stages" if attempt.generated else "")
            for attempt in running[:MAX_DESCRIBED]
        ]
        if len(running) > MAX_DESCRIBED:
            lines.append(f"and {len(running) - MAX_DESCRIBED} groups that began later")
        lines += [
            f"group {attempt.group_index}: attempt {attempt.number}, begun {now - attempt.since:.0f} s ago, was cancelled "
            "and still runs; its generator ignores cancellation"
            for attempt in self._abandoned.values()
        ]
        return lines + self.stages.describe()


def describe_calls(sessions: Sequence[str]) -> str:
    """Return the end of a message: how many of these samples wait for their environment, and where the first of these is.

    Empty if none waits. For those who give a rollout up, before they cancel it.
    """
    calls = [call for call in map(environment_call, sessions) if call is not None and call.thread]
    if not calls:
        return ""
    first = calls[0]
    return (
        f"; samples that wait for environment {first.environment!r}: {len(calls)} of {len(sessions)}, in {first.call}(): "
        f"{user_frame(first.stack())}"
    )


def _checked_metrics(metrics: Any) -> dict[str, float]:
    """Convert ``rollout_metrics`` to Python floats, which a checkpoint can store.

    Raises:
        GeneratorOutputError: it is no dict of numbers, or a number is not finite or not declared.
    """
    if not isinstance(metrics, Mapping):
        raise GeneratorOutputError(f"rollout_metrics is a {type(metrics).__name__}, not a dict of numbers.")
    for name, value in metrics.items():
        if not isinstance(value, Real) or not is_finite(value):
            raise GeneratorOutputError(f"rollout_metrics[{name!r}] must be a finite number, got {value!r}")
        try:
            spec_of(name)
        except ConfigError as error:
            raise GeneratorOutputError(
                f"rollout_metrics[{name!r}] is not declared. Call it 'environment/{name}', which is averaged, or declare it "
                "with skyrl_train.observability.metrics.declare()"
            ) from error
    return {name: float(value) for name, value in metrics.items()}

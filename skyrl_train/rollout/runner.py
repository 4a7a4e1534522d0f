"""Generates one rollout group: asks the generator, checks what comes back, tries again when it fails.

| what happens to an attempt | what follows |
|---|---|
| raises, cancels itself, passes ``rollout_timeout_s`` | another attempt (``max_rollout_retries``), then RolloutError |
| loses the actor that it runs in, for the first time | the same attempt again: it may have been the node |
| loses all engines under it (NoEngineError) | the same attempt again once an engine serves (``max_engine_failures``) |
| returns what breaks the contract, or the engines fail otherwise | raised as it is: another attempt would not mend it |
| ignores its cancellation | it is left behind after ``cancel_grace_s``, and named when the run is stuck |
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

from skyrl_train.concurrency import cancel_within
from skyrl_train.config.schema.failures import FailureConfig
from skyrl_train.environments.base import PromptRecord
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
from skyrl_train.generators.base import BatchMetadata, GeneratorInput, GeneratorInterface, TrajectoryID, play
from skyrl_train.generators.validation import is_finite, to_samples
from skyrl_train.inference.randomness import mix
from skyrl_train.inference.recordings import Recordings
from skyrl_train.observability.metrics import spec_of
from skyrl_train.rollout.group import RolloutGroup, Sample
from skyrl_train.rollout.stages import StagePipeline

logger = logging.getLogger(__name__)

CANCEL_GRACE_S = 10.0  # what a cancelled generator may take to clean up behind itself
MOST_DESCRIBED = 16  # groups named when the run is stuck: those that have run longest


class Prompts(Protocol):
    """What the runner needs of the data loader."""

    def record(self, ordinal: int) -> PromptRecord:
        """The prompt of an ordinal that is in flight."""


class Engines(Protocol):
    """What the runner needs of the inference client."""

    @property
    def policy_version(self) -> int:
        """The version that the engines serve."""

    @property
    def serving(self) -> bool:
        """Whether an engine takes requests now."""

    async def wait_for_engine(self) -> None:
        """Returns when an engine takes requests; raises NoEngineError when none does in time, or ever."""


@dataclass(slots=True)
class _Attempt:
    """A group that is being generated, for whoever asks what the run is busy with."""

    ordinal: int
    record: PromptRecord  # of a group that was dropped, the prompts know it no more
    number: int  # 1 is the first
    since: float
    waits_for_engine: bool = False
    generated: bool = False
    lost_actor: bool = False  # and is played again, from what is recorded of it

    @property
    def uid(self) -> str:
        return self.record.uid

    def trajectory(self, repetition: int) -> TrajectoryID:
        """The name of a sample. The ordinal is part of it: a prompt comes again in the next epoch."""
        return TrajectoryID(f"{self.uid}@{self.ordinal}", repetition)


class GroupRunner:
    """Turns an ordinal into a finished group.

    Seeds are a function of ``(seed, ordinal, sample, attempt)``, so a group is the same wherever and whenever it runs.

    Args:
        sampling_params: of each request, as the client takes them.
        env_class: of rows that name none.
        recordings: of the sessions of groups in flight, where there are any.
        stages: what every group goes through once it is generated.
        on_failure: is told the group's name and the reason of each attempt that fails and could be tried again.
        clock: of what :meth:`describe` tells, in seconds.
        cancel_grace_s: how long a cancelled attempt may take to end.

    Attributes:
        retries: attempts beyond the first.
        engine_failures: groups that lost all engines under them.
    """

    def __init__(
        self,
        generator: GeneratorInterface,
        prompts: Prompts,
        engines: Engines,
        failures: FailureConfig,
        *,
        n_samples_per_prompt: int,
        sampling_params: Mapping[str, Any],
        env_class: str,
        seed: int,
        recordings: Recordings | None = None,
        stages: StagePipeline | None = None,
        on_failure: Callable[[str, str], None] = lambda name, reason: None,
        clock: Callable[[], float] = time.monotonic,
        cancel_grace_s: float = CANCEL_GRACE_S,
    ) -> None:
        self._generator = generator
        self._prompts = prompts
        self._engines = engines
        self._failures = failures
        self._n = n_samples_per_prompt
        self._sampling_params = sampling_params
        self._env_class = env_class
        self._seed = seed
        self._recordings = Recordings(enabled=False) if recordings is None else recordings
        self.stages = StagePipeline() if stages is None else stages
        self._on_failure = on_failure
        self._clock = clock
        self._cancel_grace_s = cancel_grace_s
        self._running: dict[int, _Attempt] = {}
        self._left_behind: dict[asyncio.Task[RolloutGroup], _Attempt] = {}
        self.retries = 0
        self.engine_failures = 0

    # What a group is to others --------------------------------------------------------------------------------------

    def failed_group(self, ordinal: int) -> RolloutGroup:
        """What takes the seat of a group that failed for good (``on_rollout_failure=mask``).

        Its samples have no token at all: nothing was sampled that could be trained, and a prompt without a response would
        only be a forward pass for nothing. Nothing in it can be stale, so it is as old as the policy is now.
        """
        record = self._prompts.record(ordinal)
        return RolloutGroup(
            ordinal=ordinal,
            uid=record.uid,
            data_source=record.data_source,
            samples=(Sample(()),) * self._n,
            submitted_version=self._engines.policy_version,
            masked=True,
        )

    def describe(self) -> list[str]:
        """A line for each of the groups that have run longest, and for each attempt that ignores its cancellation."""
        now = self._clock()
        running = sorted(self._running.values(), key=lambda attempt: (attempt.since, attempt.ordinal))
        lines = [self._line(attempt, now) for attempt in running[:MOST_DESCRIBED]]
        if len(running) > MOST_DESCRIBED:
            lines.append(f"and {len(running) - MOST_DESCRIBED} groups that began later")
        lines += [
            f"group {attempt.ordinal}: attempt {attempt.number}, begun {now - attempt.since:.0f} s ago, was cancelled and goes "
            "on; its generator ignores cancellation"
            for attempt in self._left_behind.values()
        ]
        return lines + self.stages.describe()

    def _line(self, attempt: _Attempt, now: float) -> str:
        session = attempt.trajectory(0).to_string()
        return (
            f"group {attempt.ordinal} (prompt {attempt.uid!r}): attempt {attempt.number} of "
            f"{1 + self._failures.max_rollout_retries} began {now - attempt.since:.0f} s ago, {self._n} sessions from "
            f"{session} on"
            + ("; it waits for an engine" if attempt.waits_for_engine else "")
            + ("; it is generated, and in its stages" if attempt.generated else "")
        )

    # Running --------------------------------------------------------------------------------------------------------

    async def run(self, ordinal: int) -> RolloutGroup:
        """Generates the group and takes it through the stages. Cancelled, it ends within ``cancel_grace_s``, whatever the
        generator does.

        Raises:
            RolloutError: every attempt raised or timed out, the last failure is the cause; or a stage cannot use the group.
            StageError, TrainingWorkerError: a stage failed.
            GeneratorOutputError: the generator broke its contract, which another attempt would not mend.
            NoEngineError: no engine is left, more often than ``max_engine_failures`` allows.
            EngineError: the engines failed otherwise, which is not the prompt's fault.
        """
        # A group that an earlier process began goes on with the attempt that its recorded tokens are of.
        number = 1 + self._recordings.attempt(ordinal)
        attempt = _Attempt(ordinal, self._prompts.record(ordinal), number, self._clock())
        self._running[ordinal] = attempt
        try:
            group = await self._run(attempt)
            attempt.generated = True
            group = await self.stages.run(group, attempt.record)
        except (EngineError, GeneratorOutputError, StageError, TrainingWorkerError):
            raise  # it stops the run and is no outcome: the last checkpoint keeps what was sampled for the group
        except BaseException:
            self._recordings.end(ordinal)
            raise
        finally:
            del self._running[ordinal]
        self._recordings.end(ordinal)
        return group

    async def _run(self, attempt: _Attempt) -> RolloutGroup:
        attempts = 1 + self._failures.max_rollout_retries
        sessions = [attempt.trajectory(repetition).to_string() for repetition in range(self._n)]
        while True:
            self._recordings.begin(attempt.ordinal, sessions, attempt.number - 1)
            try:
                return await self._try(attempt)
            except NoEngineError as error:  # what was sampled stays recorded: the attempt goes on from there
                await self._wait_for_engine(attempt, error)
            except _AttemptFailed as failure:
                self._on_failure(f"group {attempt.ordinal}", failure.reason)
                same = isinstance(failure.cause, RolloutActorError) and not attempt.lost_actor
                if attempt.number >= attempts and not same:
                    raise RolloutError(
                        f"the rollout of prompt {attempt.uid!r} failed {attempt.number} times; the last time: {failure.reason}"
                    ) from failure.cause
                logger.warning(
                    "group %d: attempt %d failed (%s), trying again", attempt.ordinal, attempt.number, failure.reason
                )
                self.retries += 1
                if same:  # a second time, it may be what this very attempt does that ends actors
                    attempt.lost_actor = True
                else:
                    attempt.number += 1
                attempt.since = self._clock()

    async def _try(self, attempt: _Attempt) -> RolloutGroup:
        """One attempt, in a task of its own: whatever it does to itself, ours goes on.

        Raises:
            _AttemptFailed: it is the prompt's or the generator's fault, and worth another attempt.
            NoEngineError, GeneratorOutputError, EngineError: see :meth:`run`.
        """
        task = asyncio.create_task(self._generate(attempt), name=f"group-{attempt.ordinal}-{attempt.number}")
        try:
            await asyncio.wait([task], timeout=self._failures.rollout_timeout_s)
        except asyncio.CancelledError:
            await self._cancel(task, attempt)
            raise
        if not task.done():
            await self._cancel(task, attempt)
            limit = f"trainer.failures.rollout_timeout_s = {self._failures.rollout_timeout_s} s"
            if not self._engines.serving:
                raise NoEngineError(f"a rollout passed {limit} while no engine served")
            raise _AttemptFailed(f"it took longer than {limit}", None)
        try:
            return task.result()
        except (GeneratorOutputError, EngineError):
            raise
        except RolloutError as error:
            raise _AttemptFailed(str(error), error) from None
        except (Exception, asyncio.CancelledError) as error:
            raise _AttemptFailed(f"it raised {error!r}", error) from None

    async def _cancel(self, task: asyncio.Task[RolloutGroup], attempt: _Attempt) -> None:
        """What it returns or raises from now on is too late."""
        if await cancel_within([task], self._cancel_grace_s):
            logger.error(
                "group %d: attempt %d was cancelled and has not ended after %g s; it is left behind. A generator must let "
                "asyncio.CancelledError through.",
                attempt.ordinal,
                attempt.number,
                self._cancel_grace_s,
            )
            self._left_behind[task] = _Attempt(attempt.ordinal, attempt.record, attempt.number, attempt.since)
            task.add_done_callback(self._left_behind.pop)

    async def _wait_for_engine(self, attempt: _Attempt, error: NoEngineError) -> None:
        """Returns when the group may be generated again.

        Raises:
            NoEngineError: the budget for that is spent.
        """
        attempt.waits_for_engine = True
        while True:
            self.engine_failures += 1
            allowed = self._failures.max_engine_failures
            if self.engine_failures > allowed:
                raise NoEngineError(
                    f"{error}. (Group {attempt.ordinal} lost its engines; trainer.failures.max_engine_failures = {allowed} such "
                    "losses are made up for. See to the engines and run the same command again.)"
                ) from error
            logger.warning("group %d lost its engines (%s); it waits for one to come back", attempt.ordinal, error)
            try:
                await self._engines.wait_for_engine()
            except NoEngineError as again:
                error = again
            else:
                attempt.waits_for_engine = False
                return

    async def _generate(self, attempt: _Attempt) -> RolloutGroup:
        ordinal, record, number = attempt.ordinal, attempt.record, attempt.number - 1
        version = self._engines.policy_version
        copies = [record.own_copy() for _ in range(self._n)]
        request = GeneratorInput(
            prompts=[copy.prompt for copy in copies],
            env_classes=[record.env_class or self._env_class] * self._n,
            env_extras=[copy.env_extras for copy in copies],
            sampling_params=self._sampling_params,
            trajectory_ids=[attempt.trajectory(repetition) for repetition in range(self._n)],
            batch_metadata=BatchMetadata(
                global_step=version + 1,
                training_phase="train",
                seeds=tuple(mix(self._seed, ordinal, repetition, number) for repetition in range(self._n)),
            ),
        )
        output = await play(self._generator, request)
        samples = to_samples(output, expected=self._n)
        metrics = _checked_metrics(output.get("rollout_metrics") or {})
        group = RolloutGroup(
            ordinal=ordinal,
            uid=record.uid,
            data_source=record.data_source,
            samples=samples,
            submitted_version=version,
            metrics=metrics,
        )
        if group.newest_version > self._engines.policy_version:
            raise GeneratorOutputError(
                f"rollout_versions names version {group.newest_version}, but the engines serve {self._engines.policy_version}. "
                "Give each token the version that the client returned with it; batch_metadata.global_step is one more."
            )
        return group


class _AttemptFailed(Exception):
    """An attempt that may be worth another one."""

    def __init__(self, reason: str, cause: BaseException | None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.cause = cause


def _checked_metrics(metrics: Any) -> dict[str, float]:
    """``rollout_metrics`` as Python's own numbers, which a checkpoint can hold.

    Raises:
        GeneratorOutputError: they are no numbers by name, or one is not finite or not declared.
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

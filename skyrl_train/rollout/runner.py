"""Generates one rollout group: asks the generator, checks what comes back, tries again when it fails."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from skyrl_train.config.schema import FailureConfig
from skyrl_train.errors import ConfigError, EngineError, GeneratorOutputError, RolloutError
from skyrl_train.generators.base import BatchMetadata, GeneratorInput, GeneratorInterface, TrajectoryID
from skyrl_train.generators.validation import to_samples, validate_generator_output
from skyrl_train.inference.randomness import mix
from skyrl_train.observability.metrics import spec_of
from skyrl_train.rollout.dataset import PromptDataset
from skyrl_train.rollout.group import RolloutGroup
from skyrl_train.rollout.ledger import PromptLedger

logger = logging.getLogger(__name__)


class GroupRunner:
    """Turns an ordinal into a finished group.

    Seeds are a function of ``(seed, ordinal, sample, attempt)``, so a group is the same wherever and whenever it runs.

    Args:
        sampling_params: of each request, as the client takes them.
        env_class: of rows that name none.
        policy_version: tells the version that the engines hold now.
        on_failure: is told the ordinal and the reason of each attempt that fails and could be tried again.
    """

    def __init__(
        self,
        generator: GeneratorInterface,
        dataset: PromptDataset,
        ledger: PromptLedger,
        failures: FailureConfig,
        *,
        n_samples_per_prompt: int,
        sampling_params: Mapping[str, Any],
        env_class: str,
        seed: int,
        policy_version: Callable[[], int],
        on_failure: Callable[[int, str], None] = lambda ordinal, reason: None,
    ) -> None:
        self._generator = generator
        self._dataset = dataset
        self._ledger = ledger
        self._failures = failures
        self._n = n_samples_per_prompt
        self._sampling_params = sampling_params
        self._env_class = env_class
        self._seed = seed
        self._policy_version = policy_version
        self._on_failure = on_failure
        self.retries = 0

    async def run(self, ordinal: int) -> RolloutGroup:
        """Generates the group.

        Raises:
            RolloutError: every attempt raised or timed out; the last failure is the cause.
            GeneratorOutputError: the generator broke its contract, which another attempt would not mend.
            EngineError: the engines failed, which is not the prompt's fault.
        """
        attempts = 1 + self._failures.max_rollout_retries
        failure: BaseException | None = None
        what = ""
        for attempt in range(attempts):
            if attempt:
                self.retries += 1
                logger.warning("group %d: attempt %d failed (%s), trying again", ordinal, attempt, what)
            limit = asyncio.timeout(self._failures.rollout_timeout_s)
            try:
                async with limit:
                    return await self._attempt(ordinal, attempt)
            except (GeneratorOutputError, EngineError):
                raise
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise  # we are being stopped; otherwise the generator has cancelled itself, which is a failure
                failure = error
            except Exception as error:
                failure = error
            what = self._took_too_long() if limit.expired() else _why(failure)
            self._on_failure(ordinal, what)
        uid = self._dataset[self._ledger.row(ordinal)].uid
        raise RolloutError(f"the rollout of prompt {uid!r} failed {attempts} times; the last time: {what}") from failure

    def _took_too_long(self) -> str:
        return f"it took longer than trainer.failures.rollout_timeout_s = {self._failures.rollout_timeout_s} s"

    async def _attempt(self, ordinal: int, attempt: int) -> RolloutGroup:
        row = self._ledger.row(ordinal)
        record = self._dataset[row]
        version = self._policy_version()
        request = GeneratorInput(
            prompts=[record.prompt] * self._n,
            env_classes=[record.env_class or self._env_class] * self._n,
            env_extras=[dict(record.env_extras) for _ in range(self._n)],
            sampling_params=self._sampling_params,
            trajectory_ids=[TrajectoryID(f"{record.uid}@{ordinal}", repetition) for repetition in range(self._n)],
            batch_metadata=BatchMetadata(
                global_step=version + 1,
                training_phase="train",
                seeds=tuple(mix(self._seed, ordinal, repetition, attempt) for repetition in range(self._n)),
            ),
        )
        output = await self._generator.generate(request)
        validate_generator_output(output, expected=self._n)
        metrics = dict(output.get("rollout_metrics") or {})
        _check_metrics(metrics)
        return RolloutGroup(
            ordinal=ordinal,
            uid=record.uid,
            data_source=record.data_source,
            samples=to_samples(output),
            submitted_version=version,
            metrics=metrics,
        )


def _why(failure: BaseException | None) -> str:
    return str(failure) if isinstance(failure, RolloutError) else f"it raised {failure!r}"


def _check_metrics(metrics: Mapping[str, Any]) -> None:
    for name, value in metrics.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise GeneratorOutputError(f"rollout_metrics[{name!r}] must be a finite number, got {value!r}")
        try:
            spec_of(name)
        except ConfigError as error:
            raise GeneratorOutputError(
                f"rollout_metrics[{name!r}] is not declared. Call it 'environment/{name}', which is averaged, or declare it "
                "with skyrl_train.observability.metrics.declare()"
            ) from error

"""The generation side of a trainer: one task per group, admitted by the staleness manager.

| loop | consumes | waits for | is unblocked by | produces |
|---|---|---|---|---|
| admission | ordinals of the ledger | capacity | a step's publication, a failed group's free seat | group tasks |
| group task | one ordinal | the generator | engines | a finished group in the buffer |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from skyrl_train.concurrency import Signal
from skyrl_train.config.schema import FailureConfig, FailurePolicy
from skyrl_train.errors import RolloutError
from skyrl_train.observability.slot_time import SlotTimeIntegral
from skyrl_train.rollout.buffer import RolloutBuffer
from skyrl_train.rollout.group import RolloutGroup
from skyrl_train.rollout.ledger import PromptLedger
from skyrl_train.rollout.staleness import StalenessManager

logger = logging.getLogger(__name__)


class GenerationWorkers:
    """Runs groups while there is capacity.

    ``changed`` is notified after every event that a waiting trainer could care about: a group finished or failed, or the
    workers stopped with ``error``.
    """

    def __init__(
        self,
        run_group: Callable[[int], Awaitable[RolloutGroup]],
        ledger: PromptLedger,
        staleness: StalenessManager,
        buffer: RolloutBuffer,
        failures: FailureConfig,
        *,
        policy_version: Callable[[], int],
        changed: Signal,
    ) -> None:
        self._run_group = run_group
        self._ledger = ledger
        self._staleness = staleness
        self._buffer = buffer
        self._failures = failures
        self._policy_version = policy_version
        self.changed = changed
        self.error: BaseException | None = None
        self._groups: set[asyncio.Task[None]] = set()
        self._admission: asyncio.Task[None] | None = None
        self._closed = False
        self.slots = SlotTimeIntegral(staleness.max_running)

    def start(self) -> None:
        """Admits groups in the background from now on, whenever there is capacity."""
        self._admission = asyncio.create_task(self._admit_forever(), name="admission")
        self._admission.add_done_callback(self._look_at)

    async def fill(self) -> None:
        """Admits what there is capacity for and returns when none of it runs any more."""
        while self._staleness.capacity() > 0 and self.error is None and not self._closed:
            self._admit_all()
            # A failed group frees its seat, so look for capacity again once all have ended.
            await self.changed.wait_until(lambda: not self._groups or self.error is not None or self._closed)

    def stop_admitting(self) -> None:
        """Admits nothing more; what runs goes on until :meth:`close`."""
        self._closed = True
        self.changed.notify()

    async def close(self) -> None:
        """Stops admitting, then cancels what runs, and returns when it has ended. Idempotent."""
        self.stop_admitting()
        tasks = [*([self._admission] if self._admission else []), *self._groups]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def raise_if_failed(self) -> None:
        """Raises what stopped the workers, if anything did."""
        if self.error is not None:
            raise self.error

    async def _admit_forever(self) -> None:
        while True:
            await self.changed.wait_until(lambda: self._staleness.capacity() > 0 and not self._closed)
            self._admit_all()

    def _admit_all(self) -> None:
        for _ in range(self._staleness.capacity()):
            ordinal = self._ledger.issue()
            self._staleness.admit(ordinal, self._policy_version())
            task = asyncio.create_task(self._run(ordinal), name=f"group-{ordinal}")
            self._groups.add(task)
            task.add_done_callback(self._group_ended)
        self.slots.set_busy(len(self._groups))

    async def _run(self, ordinal: int) -> None:
        try:
            group = await self._run_group(ordinal)
        except RolloutError as error:
            self._failed(ordinal, error)
        else:
            self._buffer.put(group)
            self._staleness.finish(ordinal)

    def _failed(self, ordinal: int, error: RolloutError) -> None:
        if self._failures.on_rollout_failure is FailurePolicy["raise"]:
            raise error
        self._ledger.settle([ordinal], "failed")
        self._staleness.fail(ordinal)
        failed = self._staleness.counts.failed
        logger.error("%s; the next prompt takes its seat (%d of %d)", error, failed, self._failures.max_failed_rollouts)
        if failed > self._failures.max_failed_rollouts:
            raise RolloutError(
                f"{failed} rollouts have failed for good, more than trainer.failures.max_failed_rollouts = "
                f"{self._failures.max_failed_rollouts}. Mend the cause, or raise that limit, and run the same command again. The "
                f"last one: {error}"
            ) from error

    def _group_ended(self, task: asyncio.Task[None]) -> None:
        self._groups.discard(task)
        self.slots.set_busy(len(self._groups))
        self._look_at(task)

    def _look_at(self, task: asyncio.Task[None]) -> None:
        """A task that ends by an error stops the workers, and whoever waits for groups sees it."""
        if not task.cancelled() and task.exception() is not None and self.error is None:
            self.error = task.exception()
            self.stop_admitting()  # what is admitted now would fail the same way, again and again
        self.changed.notify()

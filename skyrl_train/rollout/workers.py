"""The generation side of a trainer: one task per group, admitted by the staleness manager.

| loop | consumes | waits for | is unblocked by | produces |
|---|---|---|---|---|
| admission | ordinals of the data loader | capacity, a row that is read | a publication, a seat that is freed | group tasks |
| group task | one ordinal | the generator | engines | a finished group in the buffer, or an outcome in the ledger |

A seat is given up at one instant of the event loop together with the outcome that is booked for it, so counts, ledger and
buffer agree whenever somebody else looks at them. A task that ends by an error, or is ended by somebody else, stops
the workers, and whoever waits for groups sees why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from skyrl_train.concurrency import Signal, cancel_within
from skyrl_train.config.schema.failures import FailureConfig, FailurePolicy
from skyrl_train.errors import RolloutError
from skyrl_train.observability.slot_time import SlotTimeIntegral
from skyrl_train.rollout.buffer import RolloutBuffer
from skyrl_train.rollout.filters import SignalFilter
from skyrl_train.rollout.group import RolloutGroup
from skyrl_train.rollout.staleness import StalenessManager

logger = logging.getLogger(__name__)

# What group tasks may take to end once they are cancelled. A generator that ignores it is left behind earlier (by its
# runner); this is for the rest, so that a run that stops does stop.
CLOSE_LIMIT_S = 30.0


class PromptStream(Protocol):
    """What the workers need of the data loader."""

    @property
    def ready(self) -> bool:
        """Whether ``issue`` has an answer now."""

    def issue(self) -> int | None:
        """The next ordinal to generate; None: there will never be another one."""

    def settle(self, ordinals: Iterable[int], outcome: str, groups: Iterable[RolloutGroup] = ()) -> None:
        """Records what became of issued ordinals, with the groups of those that finished."""


class Runner(Protocol):
    """What generates groups."""

    async def run(self, ordinal: int) -> RolloutGroup:
        """The finished group; raises RolloutError when it failed for good. Ends soon after it is cancelled."""

    def failed_group(self, ordinal: int) -> RolloutGroup:
        """What takes the seat of a group that failed for good, where nothing else shall."""

    def describe(self) -> list[str]:
        """What runs, and since when."""


class GenerationWorkers:
    """Runs groups while there is capacity.

    Args:
        signal_filter: decides which finished groups keep their seat; None: all do.
        policy_version: the one that a new group is admitted under.
        admission_version: of an ordinal that goes on from recorded tokens, the oldest of theirs; by default the policy's.
        changed: notified after every event that a waiting trainer could care about: a group ended, however it did, the
            prompts are exhausted, or the workers stopped with ``error``.
        on_group_end: called when a group has ended, whatever became of it.

    Attributes:
        error: what stopped the workers.
        exhausted: the prompts have ended for good, and all of them were admitted.
        failed_and_masked: groups that failed and train as samples without tokens (``on_rollout_failure=mask``).
    """

    def __init__(
        self,
        runner: Runner,
        prompts: PromptStream,
        staleness: StalenessManager,
        buffer: RolloutBuffer,
        failures: FailureConfig,
        *,
        policy_version: Callable[[], int],
        changed: Signal,
        admission_version: Callable[[int], int] | None = None,
        signal_filter: SignalFilter | None = None,
        on_group_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._runner = runner
        self._prompts = prompts
        self._staleness = staleness
        self._buffer = buffer
        self._failures = failures
        self._admission_version = admission_version or (lambda ordinal: policy_version())
        self._filter = signal_filter
        self._on_group_end = on_group_end
        self.changed = changed
        self.error: BaseException | None = None
        self.exhausted = False
        self.failed_and_masked = 0
        self._tasks: dict[asyncio.Task[None], int] = {}  # all that have not ended, those of dropped groups included
        self._seated: dict[int, asyncio.Task[None]] = {}  # those whose ordinal has a seat and no outcome yet
        self._admission: asyncio.Task[None] | None = None
        self._closed = False
        self._closing = False
        self.slots = SlotTimeIntegral(staleness.max_running)

    # Beginning and ending ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Admits what there is capacity for, and more in the background whenever there is some.

        The first ones at once: what a checkpoint had in flight is back in the counts before anything is selected.
        """
        try:
            self._admit_all()
        except Exception as error:
            self._stop_with(error)
            return
        self._admission = asyncio.create_task(self._admit_forever(), name="admission")
        self._admission.add_done_callback(self._admission_ended)

    async def fill(self) -> None:
        """Admits what there is capacity for, also what becomes free meanwhile, and returns when none of it runs any more."""
        while not self._stopped:
            self._admit_all()
            if not self._tasks and not self._awaits_row:
                return
            await self.changed.wait_until(
                lambda: self._stopped or self._may_admit or not (self._tasks or self._awaits_row)
            )

    async def idle(self) -> None:
        """Returns when no group runs and none is about to, or the workers have stopped."""
        await self.changed.wait_until(lambda: self._stopped or not (self._tasks or self._may_admit or self._awaits_row))

    def stop_admitting(self) -> None:
        """Admits nothing more; what runs goes on until :meth:`close`."""
        self._closed = True
        self.changed.notify()

    async def close(self) -> None:
        """Stops admitting, then cancels what runs, and returns when it has ended, at the latest after a while. Idempotent."""
        self.stop_admitting()
        self._closing = True
        tasks = [*([self._admission] if self._admission else []), *self._tasks]
        for task in await cancel_within(tasks, CLOSE_LIMIT_S):
            logger.error(
                "%s did not end %g s after it was cancelled; it is left behind", task.get_name(), CLOSE_LIMIT_S
            )

    def raise_if_failed(self) -> None:
        """Raises what stopped the workers, if anything did."""
        if self.error is not None:
            raise self.error

    @property
    def _stopped(self) -> bool:
        return self._closed or self.error is not None

    # Admission --------------------------------------------------------------------------------------------------------

    @property
    def _has_capacity(self) -> bool:
        return not self._stopped and not self.exhausted and self._staleness.capacity() > 0

    @property
    def _may_admit(self) -> bool:
        return self._has_capacity and self._prompts.ready

    @property
    def _awaits_row(self) -> bool:
        return self._has_capacity and not self._prompts.ready

    async def _admit_forever(self) -> None:
        while not self.exhausted:
            await self.changed.wait_until(lambda: self._may_admit)
            self._admit_all()

    def _admit_all(self) -> None:
        while self._may_admit:
            ordinal = self._prompts.issue()
            if ordinal is None:
                self.exhausted = True
                self.changed.notify()
                return
            self._staleness.admit(ordinal, self._admission_version(ordinal))
            task = asyncio.create_task(self._run(ordinal), name=f"group-{ordinal}")
            self._tasks[task] = ordinal
            self._seated[ordinal] = task
            task.add_done_callback(self._group_ended)
        self.slots.set_busy(len(self._seated))

    # Groups -----------------------------------------------------------------------------------------------------------

    async def _run(self, ordinal: int) -> None:
        try:
            group = await self._runner.run(ordinal)
        except RolloutError as error:
            self._failed(ordinal, error)
        else:
            self._finished(group)
        self._on_group_end()

    def _finished(self, group: RolloutGroup) -> None:
        if self._filter is None or self._filter.keeps(group):
            self._buffered(group)
            return
        del self._seated[group.ordinal]
        self._prompts.settle([group.ordinal], "filtered", [group])
        self._staleness.filter(group.ordinal)
        self._filter.check()

    def _buffered(self, group: RolloutGroup) -> None:
        del self._seated[group.ordinal]
        self._buffer.put(group)
        self._staleness.finish(group.ordinal, group.oldest_version)

    def _failed(self, ordinal: int, error: RolloutError) -> None:
        policy = self._failures.on_rollout_failure
        if policy is FailurePolicy["raise"]:
            raise error
        if policy is FailurePolicy["mask"]:
            self.failed_and_masked += 1
            self._buffered(self._runner.failed_group(ordinal))
        else:
            del self._seated[ordinal]
            self._prompts.settle([ordinal], "failed")
            self._staleness.fail(ordinal)
        failed, allowed = self._staleness.counts.failed + self.failed_and_masked, self._failures.max_failed_rollouts
        seat = "stays without samples" if policy is FailurePolicy["mask"] else "goes to the next prompt"
        logger.error("%s; its seat %s (%d of %d)", error, seat, failed, allowed)
        if failed > allowed:
            raise RolloutError(
                f"{failed} rollouts have failed for good, more than trainer.failures.max_failed_rollouts = {allowed}. Mend the "
                f"cause, or raise that limit, and run the same command again. The last one: {error}"
            ) from error

    def drop_overdue(self) -> list[int]:
        """Gives up what the straggler policy does not wait for any longer; the next prompts take those seats.

        To be called between two steps: a group that is being trained is still in the buffer.

        Returns:
            The ordinals, ascending.
        """
        overdue = self._staleness.overdue(self._buffer)
        self._buffer.take(overdue.buffered)
        dropped = sorted([*overdue.running, *(group.ordinal for group in overdue.buffered)])
        for ordinal in dropped:
            if ordinal in self._seated:
                self._seated.pop(ordinal).cancel()
            self._prompts.settle([ordinal], "dropped")
            self._staleness.drop(ordinal)
        if dropped:
            logger.info("dropped groups %s: they would be older than the bound allows", dropped)
            self.slots.set_busy(len(self._seated))
            self.changed.notify()
        return dropped

    # Supervision ------------------------------------------------------------------------------------------------------

    def describe(self) -> list[str]:
        """What generation is busy with and what it waits for, a line each; for whoever wonders why nothing happens."""
        counts, capacity = self._staleness.counts, self._staleness.capacity()
        if self._closed:
            state = "nothing more is admitted"
        elif self.exhausted:
            state = "the prompts have ended"
        elif self._awaits_row:
            state = f"room for {capacity} more, which wait for the data set's next rows"
        else:
            state = f"room for {capacity} more"
        return [
            f"generation: {counts.running} of {self._staleness.max_running} groups run, {counts.buffered} wait to be trained; "
            f"{state}",
            *self._runner.describe(),
        ]

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps: the part of the failure budget that no other count knows."""
        return {"failed_and_masked": self.failed_and_masked}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restores :meth:`state_dict`."""
        self.failed_and_masked = state["failed_and_masked"]

    def _group_ended(self, task: asyncio.Task[None]) -> None:
        ordinal = self._tasks.pop(task)
        self.slots.set_busy(len(self._seated))
        if not task.cancelled():
            self._look_at(task)
        elif ordinal in self._seated and not self._closing:
            self._stop_with(RolloutError(f"the task of group {ordinal} was cancelled from outside of the trainer"))
        self.changed.notify()

    def _admission_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._look_at(task)
        elif not self._closing:
            self._stop_with(RolloutError("the task that admits groups was cancelled from outside of the trainer"))
        self.changed.notify()

    def _look_at(self, task: asyncio.Task[None]) -> None:
        error = task.exception()
        if error is not None:
            self._stop_with(error)

    def _stop_with(self, error: BaseException) -> None:
        """The first error is the one that is raised: what follows is mostly its consequence."""
        if self.error is None:
            self.error = error
        self.stop_admitting()  # what is admitted now would fail the same way, again and again

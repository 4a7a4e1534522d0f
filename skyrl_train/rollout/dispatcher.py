"""The generation loops of a trainer: one task per group, admitted by the staleness manager.

| loop | consumes | waits for | is unblocked by | produces |
|---|---|---|---|---|
| admission | group indices | capacity, a row from the data loader | a weight sync, a released slot | group tasks |
| group task | one group index | the generator | engines | a finished group in the buffer, or an outcome in the ledger |

A batch slot is released and the outcome recorded without an intervening ``await``, so counts, ledger and buffer stay
consistent. A task that ends with an error, or is cancelled from outside, stops the dispatcher; :attr:`Dispatcher.error` tells
waiting trainers why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from skyrl_train.config.schema import FailureConfig, FailurePolicy
from skyrl_train.errors import RolloutError
from skyrl_train.events.log import NO_EVENTS, EventLog
from skyrl_train.observability.failures import place_of
from skyrl_train.observability.metrics import SlotTimeIntegral
from skyrl_train.rollout.buffer import RolloutBuffer
from skyrl_train.rollout.data.loader import PromptLoader
from skyrl_train.rollout.filters import SignalFilter
from skyrl_train.rollout.group_generator import GroupGenerator
from skyrl_train.rollout.staleness.manager import StalenessManager
from skyrl_train.runtime.concurrency import Signal, cancel_within
from skyrl_train.types import RolloutGroup

logger = logging.getLogger(__name__)

# Time for cancelled group tasks to end. The group generator abandons a generator that ignores cancellation earlier; this limit
# covers everything else, so that close() always returns.
CLOSE_LIMIT_S = 30.0

# If the first groups all fail at one line of the user's code, the others would too. The first by admission, not by end: a group
# that fails often ends sooner than one that succeeds. Three, because a single row of a data set may be broken.
FIRST_GROUPS = 3


class Dispatcher:
    """Runs groups while there is capacity.

    Args:
        admission_version: version that a group index is admitted under: the policy's, or, for a group that continues from
            recorded tokens, the oldest of theirs.
        changed: notified when a group has ended, when the prompts are exhausted, and when ``error`` is set.
        signal_filter: decides which finished groups keep their slot; None: all do.
        on_group_end: called when a group has ended with any outcome.
        events: the record of the run.

    Attributes:
        error: the error that stopped the dispatcher.
        exhausted: whether the prompts have ended and all of them were admitted.
        failed_and_masked: groups that failed and train as samples without tokens (``on_rollout_failure=mask``): the part of
            the failure budget that no other count contains. Checkpoints store it.
        slots: busy and available generation slots over time.
    """

    def __init__(
        self,
        group_generator: GroupGenerator,
        prompts: PromptLoader,
        staleness: StalenessManager,
        buffer: RolloutBuffer,
        failures: FailureConfig,
        *,
        admission_version: Callable[[int], int],
        changed: Signal,
        signal_filter: SignalFilter | None = None,
        on_group_end: Callable[[], None] = lambda: None,
        events: EventLog = NO_EVENTS,
    ) -> None:
        self._group_generator = group_generator
        self._prompts = prompts
        self._staleness = staleness
        self._buffer = buffer
        self._failures = failures
        self._admission_version = admission_version
        self._filter = signal_filter
        self._on_group_end = on_group_end
        self._events = events
        self.changed = changed
        self.error: BaseException | None = None
        self.exhausted = False
        self.failed_and_masked = 0
        self._tasks: dict[asyncio.Task[None], int] = {}  # all unfinished tasks, including tasks of dropped groups
        self._running: dict[int, asyncio.Task[None]] = {}  # by group index, groups without an outcome
        self._admission: asyncio.Task[None] | None = None
        self._first_groups: list[int] = []  # the first FIRST_GROUPS that this process admitted
        self._first_failures: list[str] = []  # of those that failed for good: the line of the user's code; "": none
        self._stopped = False  # no more admission
        self._discards = False  # groups that finish stay in flight for the ledger
        self._closing = False  # cancellations are ours
        self.slots = SlotTimeIntegral(staleness.generation_slots)

    # Start and stop ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Admit groups now, and more in the background whenever there is capacity.

        The first groups are admitted before this returns: groups that a checkpoint had in flight are counted again before
        anything is selected.
        """
        try:
            self._admit_all()
        except Exception as error:
            self._stop_with(error)
            return
        self._admission = asyncio.create_task(self._admit_forever(), name="admission")
        self._admission.add_done_callback(self._admission_ended)

    async def fill(self) -> None:
        """Admit groups until there is no capacity and none runs. Slots that are released meanwhile are used too."""
        while not self._stopped:
            self._admit_all()
            # A released slot (failed or filtered group) is refilled before the last group ends.
            if not self._tasks and not self._has_capacity:
                return
            # With capacity and no row, the next row comes or the prompts end.
            await self.changed.wait_until(
                lambda: self._stopped or self._can_admit or not (self._tasks or self._has_capacity)
            )

    async def idle(self) -> None:
        """Wait until no group runs and none is about to start, or the dispatcher has stopped."""
        await self.changed.wait_until(lambda: self._stopped or not (self._tasks or self._has_capacity))

    def stop_admitting(self) -> None:
        """Admit no more groups. Running groups continue until :meth:`close`."""
        self._stopped = True
        self.changed.notify()

    def discard_finished(self) -> None:
        """Stop admission, and forget all groups that have finished and are not trained or finish from now on."""
        self.stop_admitting()
        self._discards = True
        self._buffer.take(list(self._buffer))
        self._staleness.discard_finished()

    async def close(self) -> None:
        """Stop admission, cancel all tasks and wait for their end, at most ``CLOSE_LIMIT_S``. Idempotent."""
        self.stop_admitting()
        # Set before the cancellations, so that they do not count as errors from outside.
        self._closing = True
        tasks = [*([self._admission] if self._admission else []), *self._tasks]
        for task in await cancel_within(tasks, CLOSE_LIMIT_S):
            logger.error("%s did not end within %g s of its cancellation; abandoned", task.get_name(), CLOSE_LIMIT_S)

    def _stop_with(self, error: BaseException) -> None:
        """Stop admission; new groups would fail the same way. Keep the first error: later ones mostly follow from it."""
        if self.error is None:
            self.error = error
        self.stop_admitting()

    # Admission --------------------------------------------------------------------------------------------------------

    @property
    def _has_capacity(self) -> bool:
        """True if another group may start as soon as its row is there."""
        return not (self._stopped or self.exhausted) and self._staleness.capacity() > 0

    @property
    def _can_admit(self) -> bool:
        return self._prompts.ready and self._has_capacity

    async def _admit_forever(self) -> None:
        while not self.exhausted:
            # Unblocked by a weight sync, a released slot, or a row that was read.
            await self.changed.wait_until(lambda: self._can_admit)
            self._admit_all()

    def _admit_all(self) -> None:
        admitted: dict[int, int] = {}  # group index -> version
        try:
            while self._can_admit:
                # An error (a broken row, a failed sampler) ends the admission task and stops the run.
                group_index = self._prompts.issue()
                if group_index is None:
                    self.exhausted = True
                    self.changed.notify()
                    return
                # From here to the end of the loop body there is no await: the counts include the group before its task runs.
                version = self._admission_version(group_index)
                self._staleness.admit(group_index, version)
                admitted[group_index] = version
                if len(self._first_groups) < FIRST_GROUPS:
                    self._first_groups.append(group_index)
                task = asyncio.create_task(self._run_group(group_index), name=f"group-{group_index}")
                self._tasks[task] = group_index
                self._running[group_index] = task
                task.add_done_callback(self._group_ended)
            self.slots.set_busy(len(self._running))
        finally:
            if admitted:
                self._events.record("admitted", groups=list(admitted), versions=list(admitted.values()))

    # Groups -----------------------------------------------------------------------------------------------------------

    async def _run_group(self, group_index: int) -> None:
        try:
            group = await self._group_generator.run(group_index)
        except RolloutError as error:
            self._record_failure(group_index, error)
        else:
            if self._discards:
                return
            if self._filter is None or self._filter.keeps(group):
                self._put_in_buffer(group)
            else:  # no signal: release the slot to the next prompt
                del self._running[group_index]
                self._prompts.settle([group_index], "filtered", [group])
                self._staleness.release(group_index, "filtered")
                self._events.record("filtered", group=group_index)
                self._filter.check()
        # Every outcome is progress for the watchdog, a failure too.
        self._on_group_end()

    def _put_in_buffer(self, group: RolloutGroup) -> None:
        # No await between these lines, so tasks, buffer and counts agree at any time.
        del self._running[group.group_index]
        self._buffer.put(group)
        self._staleness.finish(group.group_index, group.oldest_version)
        if self._group_generator.stages.count:
            self._events.put("buffered", {"group": group.group_index, "reward": group.mean_reward})

    def _record_failure(self, group_index: int, error: RolloutError) -> None:
        policy = self._failures.on_rollout_failure
        masked = policy is FailurePolicy["mask"]
        place = place_of(error)
        self._events.record("failed", group=group_index, reason=str(error), place=place, masked=masked)
        if policy is FailurePolicy["raise"]:
            raise error
        if masked:
            # The slot stays taken, so the minibatch keeps its size; the group trains nothing.
            self.failed_and_masked += 1
            self._put_in_buffer(self._group_generator.failed_group(group_index))
            consequence = "it trains without samples"
        else:
            del self._running[group_index]
            self._prompts.settle([group_index], "failed")
            self._staleness.release(group_index, "failed")
            consequence = "the next prompt takes its slot"
        # Masked groups count too: the limit is on failed rollouts, whether or not they keep their slots.
        failed, allowed = self._staleness.counts.failed + self.failed_and_masked, self._failures.max_failed_rollouts
        logger.error("%s; %s (%d of %d)", error, consequence, failed, allowed)
        if failed > allowed:
            raise RolloutError(
                f"{failed} rollouts have failed for good, more than trainer.failures.max_failed_rollouts = {allowed}. Fix the "
                f"cause, or raise that limit, and run the same command again. The last failure: {error}"
            ) from error
        if group_index in self._first_groups:
            self._first_failures.append(place)
            if place and self._first_failures == [place] * FIRST_GROUPS:
                raise RolloutError(
                    f"The first {FIRST_GROUPS} groups all failed at {place}, so the others would too. Fix that line and run the "
                    "same command again. If it only fails at the start, because it waits for a service, raise "
                    f"trainer.failures.max_rollout_retries. The last failure: {error}"
                ) from error

    def _group_ended(self, task: asyncio.Task[None]) -> None:
        group_index = self._tasks.pop(task)
        self.slots.set_busy(len(self._running))
        if task.cancelled():
            # A dropped group has left _running before its task was cancelled.
            if group_index in self._running and not self._closing:
                self._stop_with(RolloutError(f"the task of group {group_index} was cancelled from outside the trainer"))
        elif (error := task.exception()) is not None:
            self._stop_with(error)
        self.changed.notify()

    def _admission_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            if not self._closing:
                self._stop_with(RolloutError("the task that admits groups was cancelled from outside the trainer"))
        elif (error := task.exception()) is not None:
            self._stop_with(error)
        self.changed.notify()

    def drop_overdue(self) -> list[int]:
        """Drop the groups that the staleness policy gives up; the next prompts take their slots.

        Call it between two steps: a group that is being trained is still in the buffer.

        Returns:
            The group indices, ascending.
        """
        overdue = self._staleness.overdue(self._buffer)
        # Removed at once: selection must not choose a group that is about to lose its slot.
        self._buffer.take(overdue.buffered)
        dropped = sorted([*overdue.running, *(group.group_index for group in overdue.buffered)])
        for group_index in dropped:
            if group_index in self._running:
                # Removed first, so that _group_ended does not take the cancellation for one from outside.
                self._running.pop(group_index).cancel()
            self._prompts.settle([group_index], "dropped")
            self._staleness.release(group_index, "dropped")
        if dropped:
            self._events.record("dropped", groups=dropped)
            logger.info("dropped groups %s: they would exceed max_staleness_steps", dropped)
            self.slots.set_busy(len(self._running))
            self.changed.notify()
        return dropped

    # Supervision ------------------------------------------------------------------------------------------------------

    def describe(self) -> list[str]:
        """Return what generation is busy with and what it waits for, one line each."""
        counts, capacity = self._staleness.counts, self._staleness.capacity()
        if self._stopped:
            state = "no more groups are admitted"
        elif self.exhausted:
            state = "the prompts have ended"
        elif capacity and not self._prompts.ready:
            state = f"capacity for {capacity} more, which wait for the next rows of the data set"
        else:
            state = f"capacity for {capacity} more"
        return [
            f"generation: {counts.running} of {self._staleness.max_running} groups run, {counts.buffered} wait to be trained; "
            f"{state}",
            *self._group_generator.describe(),
        ]

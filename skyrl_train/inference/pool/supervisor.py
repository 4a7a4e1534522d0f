"""The supervisor of the fleet: probes engines, restarts dead ones, and brings stale ones up to date.

consumes        health snapshots of the engines; the recoveries that the fleet has scheduled
waits for       the next probe or recovery that is due
unblocked by    time, or a change of the fleet
produces        events for the fleet (answered, silent, died); engines that return to the routing
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

from skyrl_train.errors import EngineDeadError
from skyrl_train.inference.interface import EngineHealth
from skyrl_train.inference.pool.engine_pool import EnginePool
from skyrl_train.inference.pool.fleet import EngineState
from skyrl_train.inference.pool.updates import FleetUpdates

logger = logging.getLogger(__name__)


class FleetSupervisor:
    """Runs recoveries and probes; the fleet decides when they are due.

    Args:
        updates: starts and ends the engines, and brings stale ones up to date.
        probe_interval_s: seconds between two probes of an engine that serves, and the limit of one.
    """

    def __init__(
        self,
        pool: EnginePool,
        updates: FleetUpdates,
        *,
        probe_interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._updates = updates
        self._interval_s = probe_interval_s
        self._clock = clock
        self._next_probe_at = clock() + probe_interval_s
        self._loop: asyncio.Task[None] | None = None
        self._working: dict[int, asyncio.Task[None]] = {}  # the recovery or probe of each engine; never two at once

    def start(self) -> None:
        """Start the supervision, which runs until :meth:`stop`."""
        self._loop = asyncio.create_task(self._run(), name="fleet-supervisor")
        self._loop.add_done_callback(_log_failure)

    async def stop(self) -> None:
        """Stop the supervision and its running recoveries and probes. Idempotent."""
        tasks = [*self._working.values(), *([self._loop] if self._loop is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            # Start due work first, then compute the next time, which that work changes.
            self.step()
            planned = self._due_at()
            # Sleep until something is due; a change of the fleet may move that time.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, planned - self._clock())):
                    await self._pool.changed.wait_until(lambda planned=planned: self._due_at() != planned)  # type: ignore[misc]

    def _due_at(self) -> float:
        recovery = self._pool.fleet.next_due_at(except_for=self._working)
        return self._next_probe_at if recovery is None else min(recovery, self._next_probe_at)

    def step(self) -> None:
        """Begin every recovery and probe that is due now."""
        fleet = self._pool.fleet
        for number in fleet.due():
            # A probe or an earlier recovery of this engine still runs; its end wakes the loop.
            if number in self._working:
                continue
            state = fleet.records[number].state
            if state is EngineState.DEAD:
                fleet.restarting(number)
                self._begin(number, self._restart(number))
            elif state is EngineState.STALE:
                self._begin(number, self._return(number))
        if self._clock() >= self._next_probe_at:
            # From now and not from the last due time: after a long block, probes do not come in a burst.
            self._next_probe_at = self._clock() + self._interval_s
            for number, record in fleet.records.items():
                if (
                    not self._pool.frozen()
                    and record.state in (EngineState.HEALTHY, EngineState.SUSPECT)
                    and number not in self._working
                ):
                    self._begin(number, self._probe(number))

    def _begin(self, number: int, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._working[number] = task

        def ended(task: asyncio.Task[None]) -> None:
            del self._working[number]
            _log_failure(task)
            self._pool.changed.notify()

        task.add_done_callback(ended)

    async def _restart(self, number: int) -> None:
        logger.info("restarting inference engine %d", number)
        try:
            await self._updates.end_engine(number)  # frees what the dead process left behind
            await self._updates.start_engine(number)
        except Exception as error:  # an engine may raise anything; the fleet retries or gives up
            self._pool.died(number, f"it could not be restarted: {str(error) or repr(error)}")
            return
        state = self._pool.fleet.records[number].state
        if state is not EngineState.STARTING:  # it was removed, or died again meanwhile
            # Removed while it started: its teardown ran before the new process existed, so end that process here.
            if state is EngineState.RETIRED:
                await self._updates.end_engine(number)
            return
        self._pool.fleet.started(number)
        await self._update(number)

    async def _return(self, number: int) -> None:
        """Let a stale engine catch up if it answers: one that hangs would hold up weight syncs as long as a phase may take."""
        restart_count = self._pool.fleet.records[number].restart_count
        answer = await self._ask(number)
        if self._pool.fleet.records[number].state is not EngineState.STALE:
            return  # it joined, died or was removed meanwhile
        if isinstance(answer, str):
            self._pool.suspect(number, answer)
            self._pool.missed_update(number, answer, restart_count)  # another attempt, unless it counts as dead now
        elif answer.alive:
            self._pool.fleet.answered(number)
            await self._update(number)
        else:
            self._pool.died(number, "its process ended", restart_count)

    async def _update(self, number: int) -> None:
        restart_count = self._pool.fleet.records[number].restart_count
        try:
            await self._updates.catch_up(number)
        except EngineDeadError as error:
            self._pool.died(number, str(error), restart_count)
        except Exception as error:  # an engine may raise anything; the fleet plans another attempt
            self._pool.missed_update(number, str(error) or repr(error), restart_count)
        else:
            logger.info("inference engine %d serves again", number)

    async def _probe(self, number: int) -> None:
        restart_count = self._pool.fleet.records[number].restart_count
        answer = await self._ask(number)
        if isinstance(answer, str):
            self._pool.suspect(number, answer)
        elif answer.alive:
            self._pool.answered(number, answer.policy_version)
        else:
            self._pool.died(number, "its process ended", restart_count)

    async def _ask(self, number: int) -> EngineHealth | str:
        """Return a snapshot of an engine, or why there is none."""
        try:
            async with asyncio.timeout(self._interval_s):
                return await self._pool.engines[number].health()
        except TimeoutError:
            return f"it did not answer a health probe within {self._interval_s:g} s"
        except Exception as error:  # any failure counts as no answer
            return str(error) or repr(error)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("the fleet's supervisor failed", exc_info=task.exception())

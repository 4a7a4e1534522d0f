"""The engines behind the client: which ones are routed, which requests they run, and what happens when one leaves.

request ──acquire──> slot ──run(segment)──┬── the segment ends
                      ^                   └── its engine leaves: the segment is abandoned, the request acquires again
fleet events (died, missed an update, retired) ──leave──┘        supervisor ──join──> routing
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_train.errors import EngineDeadError, EngineError, NoEngineError
from skyrl_train.inference.interface import EngineCapabilities, InferenceEngineInterface
from skyrl_train.inference.pool.fleet import ALIVE, EngineState, Fleet, FleetLimits
from skyrl_train.inference.pool.router import RequestSlot, Router
from skyrl_train.runtime.concurrency import Signal

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _SegmentRun:
    """A segment that runs on an engine. ``finished`` is True when it has ended, False when its engine has left."""

    since: float
    finished: asyncio.Future[bool]
    task: asyncio.Task[None]


class EnginePool:
    """Engines by number; numbers are never reused.

    Args:
        wait_timeout_s: how long requests wait while no engine is routed.
        handover_timeout_s: how long an engine that is removed may take to return its requests.

    While ``frozen()`` is true (an update is under way, or generation is paused), probes change nothing: the engines that
    take part in an update are fixed when it begins. An engine that is ``receiving`` weights may be too busy for an answer.

    Attributes:
        fleet: the state of each engine.
        router: the engines that take requests.
        policy_version: the version that every serving engine holds; -1 before the first weight sync.
        changed: notified when the fleet or the routing changes.
        retiring: engines that are being removed; their processes may still run.
        last_departure: why the last engine that left the routing did.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngineInterface],
        *,
        wait_timeout_s: float,
        handover_timeout_s: float,
        limits: FleetLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fleet = Fleet(clock, limits)
        self._clock = clock
        self.changed = Signal()
        self.frozen: Callable[[], bool] = lambda: False
        self.receiving: set[int] = set()
        self.policy_version = -1
        self.retiring: set[int] = set()
        self.engines: dict[int, InferenceEngineInterface] = {}
        self.router = Router()
        self._in_flight: dict[int, dict[_SegmentRun, None]] = {}  # in the order in which they began
        self._wait_timeout_s = wait_timeout_s
        self._handover_timeout_s = handover_timeout_s
        self._closed = False
        self.last_departure = "none was ever there"
        self._capabilities: EngineCapabilities | None = None
        for engine in engines:
            # Engines given to the constructor are routable at once and serve after the first weight sync.
            number = self.add(engine)
            self.fleet.started(number)
            self.fleet.catching_up(number)
            self.join(number)

    # Membership ---------------------------------------------------------------------------------------------------

    @property
    def active_engines(self) -> list[InferenceEngineInterface]:
        """All engines that were not retired, dead ones included."""
        records = self.fleet.records
        return [engine for number, engine in self.engines.items() if records[number].state is not EngineState.RETIRED]

    @property
    def capabilities(self) -> EngineCapabilities:
        """The features that every routed engine has; while none is routed, the last known value."""
        if self._capabilities is None:
            # A request may move to any engine, so the fleet promises only what all of them can do.
            each = [self.engines[n].capabilities for n in self.router.routed or self.engines]
            self._capabilities = EngineCapabilities(
                pause_modes=frozenset.intersection(*(c.pause_modes for c in each)),
                transports=frozenset.intersection(*(c.transports for c in each)),
                max_model_len=min(c.max_model_len for c in each),
                streaming=all(c.streaming for c in each),
                batch_invariant=all(c.batch_invariant for c in each),
                sleep=all(c.sleep for c in each),
                max_top_logprobs=min(c.max_top_logprobs for c in each),
                structured_output=all(c.structured_output for c in each),
                grammar_continuation=all(c.grammar_continuation for c in each),
                logit_adjustment=all(c.logit_adjustment for c in each),
                min_p=all(c.min_p for c in each),
                logit_bias=all(c.logit_bias for c in each),
                count_continuation=all(c.count_continuation for c in each),
                priorities=all(c.priorities for c in each),
                adapters=all(c.adapters for c in each),
            )
        return self._capabilities

    def describe(self) -> list[str]:
        """Describe each engine's state and its outstanding requests, one line each."""
        # One reading, so that all lines of the report agree.
        now = self._clock()
        lines = []
        for number, record in self.fleet.records.items():
            reason = f" ({record.reason})" if record.reason else ""
            since = [request.since for request in self._in_flight[number]]
            requests = f"{len(since)} requests" if len(since) != 1 else "1 request"
            longest = f", the longest for {now - min(since):.0f} s" if since else ""
            lines.append(
                f"engine {number}: {record.state} for {now - record.since:.0f} s{reason}, {requests} inside{longest}"
            )
        return lines

    def add(self, engine: InferenceEngineInterface) -> int:
        """Register an engine that will be started and caught up. Returns its number."""
        number = len(self.engines)
        self.engines[number] = engine
        self._in_flight[number] = {}
        self.fleet.add(number)
        return number

    def join(self, number: int) -> None:
        """Route a stale engine that holds the current weights now."""
        self.fleet.caught_up(number)
        self.router.add(number)
        self._changed()

    def suspect(self, number: int, reason: str) -> None:
        """Record an unanswered probe. The engine gets no new requests until it answers, or dies after too many probes."""
        # A stale engine takes no part in an update.
        is_busy = self.frozen() or number in self.receiving
        if is_busy and self.fleet.records[number].state is not EngineState.STALE:
            return
        # Too many unanswered probes count as a death. Before that, the engine keeps its requests and gets no new ones.
        if self.fleet.silent(number, reason):
            self._leave(number, reason)
        elif number in self.router.routed:
            logger.warning("inference engine %d is suspect: %s", number, reason)
            self.router.drain(number)
            self._changed()

    def answered(self, number: int, version: int) -> None:
        """Record an answered probe. An engine with the wrong version must catch up."""
        if self.frozen() or self.fleet.records[number].state not in (EngineState.HEALTHY, EngineState.SUSPECT):
            return
        if self.policy_version >= 0 and version != self.policy_version:
            self.missed_update(number, f"it holds version {version} instead of {self.policy_version}")
            return
        # It holds the current version, if there is one yet, and may serve again.
        self.fleet.answered(number)
        self.router.undrain(number)
        self._changed()

    def died(self, number: int, reason: str, restart_count: int | None = None) -> None:
        """Record a death. The engine's requests continue elsewhere with the tokens they have.

        A report with an old ``restart_count`` is about an earlier process of the engine and is ignored.
        """
        if restart_count in (None, self.fleet.records[number].restart_count):
            self.fleet.died(number, reason)
            self._leave(number, reason)

    def missed_update(self, number: int, reason: str, restart_count: int | None = None) -> None:
        """Take a live engine out of the routing until it has caught up. Reports with an old ``restart_count`` are ignored."""
        record = self.fleet.records[number]
        if record.state in ALIVE and restart_count in (None, record.restart_count):
            self.fleet.missed_update(number, reason)
            self._leave(number, reason)

    async def retire(self, number: int) -> None:
        """Remove an engine for good: its requests continue elsewhere, then it is torn down. Idempotent."""
        # First stop new requests, then hand over the running ones: otherwise the handover would not end.
        engine = self.engines[number]
        self.retiring.add(number)
        self.fleet.retire(number)
        self.router.drain(number)
        self.last_departure = "it was removed"
        self._changed()
        try:
            async with asyncio.timeout(self._handover_timeout_s):
                await engine.abort_generation()  # so that they keep the tokens that they have
                await asyncio.gather(*(request.task for request in self._in_flight[number]), return_exceptions=True)
        except (EngineError, TimeoutError) as error:
            logger.warning("inference engine %d could not hand over its requests: %s", number, error)
        finally:
            self.router.remove(number)
            self._abandon_requests(number)
            try:
                await engine.teardown()
            finally:
                self.retiring.discard(number)
                self._changed()

    def close(self) -> None:
        """Let no request acquire an engine any more."""
        self._closed = True
        self.last_departure = "the client was torn down"
        self._changed()

    def _leave(self, number: int, reason: str) -> None:
        if number in self.router.routed:
            logger.error("inference engine %d left the routing: %s", number, reason)
        self.router.remove(number)
        if not self._closed:
            self.last_departure = reason
        self._abandon_requests(number)
        self._changed()

    def _abandon_requests(self, number: int) -> None:
        # The requests do not wait for the engine: a hung one never returns them.
        for request in self._in_flight[number]:
            if not request.finished.done():
                request.finished.set_result(False)
            request.task.cancel()

    def _changed(self) -> None:
        if self.router.routed:  # without routed engines, callers still see the last known capabilities
            self._capabilities = None
        self.changed.notify()

    # Requests -----------------------------------------------------------------------------------------------------

    async def acquire(self, session_id: str | None) -> RequestSlot:
        """Acquire a slot on an engine. Waits while none is routed.

        Raises:
            NoEngineError: no engine came (back) in time, or none can come any more.
        """
        while True:
            slot = None if self._closed else self.router.acquire(session_id)
            if slot is not None:
                return slot
            await self.wait_for_engine()

    async def wait_for_engine(self) -> None:
        """Return when an engine is routed.

        Raises:
            NoEngineError: no engine came (back) in time, or none can come any more.
        """
        # An engine that can come back is worth waiting for; otherwise the error comes at once.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._wait_timeout_s if self.fleet.may_serve else 0):
                await self.changed.wait_until(lambda: bool(self.router.routed) or self._closed)
        if self._closed or not self.router.routed:
            raise NoEngineError(f"no inference engine is left. The last one left because: {self.last_departure}")

    async def run(self, slot: RequestSlot, segment: Coroutine[Any, Any, None]) -> bool:
        """Run a request's segment on its engine. Returns False when the engine left before the segment ended.

        The segment runs in its own task, so that the request can leave an engine that is alive but must not serve (it
        missed an update).
        """
        # A report that arrives after a restart must not kill the new process, so it carries the restart count of its
        # engine.
        number, restart_count = slot.engine, self.fleet.records[slot.engine].restart_count
        finished: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        async def sample() -> None:
            await segment
            if not finished.done():
                finished.set_result(True)  # here, one turn of the event loop before the task itself is done

        def ended(task: asyncio.Task[None]) -> None:
            segment.close()  # in case the task was cancelled before it began
            if finished.done():
                if not task.cancelled():
                    task.exception()  # the request has moved on; without this, asyncio reports the exception
            elif task.cancelled():
                finished.cancel()
            elif (error := task.exception()) is not None:
                finished.set_exception(error)

        request = _SegmentRun(self._clock(), finished, asyncio.create_task(sample()))
        request.task.add_done_callback(ended)
        self._in_flight[number][request] = None
        try:
            return await finished
        except EngineDeadError as error:
            self.died(number, str(error), restart_count)
            return False
        except asyncio.CancelledError:
            # The caller is cancelled: its tokens would be sampled in vain and would hold a slot.
            request.task.cancel()
            await asyncio.gather(request.task, return_exceptions=True)  # the engine knows before the caller continues
            raise
        finally:
            self._in_flight[number].pop(request, None)

"""The engines behind the client: who is routed, which requests run where, and what happens when one leaves.

request ──acquire──> lease ──run(segment)──┬── the segment ends
                       ^                   └── its engine leaves: the segment is given up, the request asks again
fleet events (died, missed an update, retired) ──leave──┘        supervisor ──join──> routing
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from skyrl_train.concurrency import Signal
from skyrl_train.errors import EngineDeadError, EngineError, NoEngineError
from skyrl_train.inference.fleet import EngineState, Fleet, FleetLimits
from skyrl_train.inference.interface import EngineCapabilities, InferenceEngineInterface
from skyrl_train.inference.router import Lease, Router

logger = logging.getLogger(__name__)
_ALIVE = (EngineState.HEALTHY, EngineState.SUSPECT, EngineState.STALE)


class _Flight:
    """A segment on its way, and what its request waits for: its end, or the departure of its engine."""

    def __init__(self, segment: Coroutine[Any, Any, None], since: float) -> None:
        self.since = since
        self.landed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._segment = segment
        self.task = asyncio.create_task(self._fly())
        self.task.add_done_callback(self._ended)

    async def _fly(self) -> None:
        await self._segment
        if not self.landed.done():
            self.landed.set_result(True)  # here, a turn of the event loop before the task has ended

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._segment.close()  # of a task that was cancelled before it began
        if self.landed.done():
            if not task.cancelled():
                task.exception()  # nobody waits for it any more
        elif task.cancelled():
            self.landed.cancel()
        elif (error := task.exception()) is not None:
            self.landed.set_exception(error)

    def give_up(self) -> None:
        """The request goes on elsewhere at once, however long the departed engine takes to let go."""
        if not self.landed.done():
            self.landed.set_result(False)
        self.task.cancel()


class EnginePool:
    """Engines by number; numbers are never used again.

    Args:
        wait_timeout_s: how long requests wait while no engine is routed.
        handover_timeout_s: how long an engine that is removed may take to give its requests back.

    While ``frozen`` says so (an update is under way, or generation is paused), probes change nothing: who takes part in
    the update was settled when it began.
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
        self.version: int | None = None  # what every engine that serves holds; None before the first publication
        self._engines: dict[int, InferenceEngineInterface] = {}
        self._router = Router()
        self._flights: dict[int, set[_Flight]] = {}
        self._wait_timeout_s = wait_timeout_s
        self._handover_timeout_s = handover_timeout_s
        self._closed = False
        self._last_departure = "none was ever there"
        self._capabilities: EngineCapabilities | None = None
        for engine in engines:
            self._route(self.add(engine))

    # Membership ---------------------------------------------------------------------------------------------------

    @property
    def routed(self) -> list[int]:
        """The numbers of the engines that take requests."""
        return self._router.routed

    @property
    def last_departure(self) -> str:
        """Why the last engine that left the routing did."""
        return self._last_departure

    @property
    def everyone(self) -> list[InferenceEngineInterface]:
        """All engines, dead ones included, without those that were retired."""
        return [e for number, e in self._engines.items() if self.fleet.state(number) is not EngineState.RETIRED]

    def engine(self, number: int) -> InferenceEngineInterface:
        """The engine with this number."""
        return self._engines[number]

    def life(self, number: int) -> int:
        """Which life of its the engine is in."""
        return self.fleet.record(number).lives

    @property
    def capabilities(self) -> EngineCapabilities:
        """What every routed engine can do; while none is routed, what the last ones could."""
        if self._capabilities is None:
            self._capabilities = _common([self._engines[n].capabilities for n in self.routed or self._engines])
        return self._capabilities

    def describe(self) -> list[str]:
        """Each engine's state, its outstanding requests and since when, a line each."""
        now = self._clock()
        lines = []
        for number in self._engines:
            record = self.fleet.record(number)
            reason = f" ({record.reason})" if record.reason else ""
            flights = [flight.since for flight in self._flights[number]]
            requests = f"{len(flights)} requests" if len(flights) != 1 else "1 request"
            longest = f", the longest for {now - min(flights):.0f} s" if flights else ""
            lines.append(
                f"engine {number}: {record.state} for {now - record.since:.0f} s{reason}, {requests} inside{longest}"
            )
        return lines

    def add(self, engine: InferenceEngineInterface) -> int:
        """Takes an engine in, to be started and caught up; returns its number."""
        number = len(self._engines)
        self._engines[number] = engine
        self._flights[number] = set()
        self.fleet.add(number)
        return number

    def _route(self, number: int) -> None:
        """An engine of the first hour: it is routed before it starts, and serves with the first publication."""
        self.fleet.started(number)
        self.fleet.catching_up(number)
        self.join(number)

    def join(self, number: int) -> None:
        """A stale engine has the current weights now, and serves."""
        self.fleet.caught_up(number)
        self._router.add(number)
        self._changed()

    def suspect(self, number: int, reason: str) -> None:
        """An engine did not answer a probe: no new requests until it does, or it is given up."""
        if self.frozen():
            return
        if self.fleet.silent(number, reason):
            self._leave(number, reason)
        elif number in self._router:
            logger.warning("inference engine %d is suspect: %s", number, reason)
            self._router.hold(number)
            self._changed()

    def answered(self, number: int, version: int) -> None:
        """An engine answered a probe, and says which version it holds."""
        if self.frozen() or self.fleet.state(number) not in (EngineState.HEALTHY, EngineState.SUSPECT):
            return
        if self.version is not None and version != self.version:
            self.missed_update(number, f"it holds version {version} instead of {self.version}")
            return
        self.fleet.answered(number)
        self._router.let(number)
        self._changed()

    def died(self, number: int, reason: str, life: int | None = None) -> None:
        """Its requests go on elsewhere with what they have. Said of an earlier ``life``, it changes nothing."""
        if life is None or life == self.life(number):
            self.fleet.died(number, reason)
            self._leave(number, reason)

    def missed_update(self, number: int, reason: str, life: int | None = None) -> None:
        """It is alive, and must not serve before it has caught up. Said of an earlier ``life``, it changes nothing."""
        if self.fleet.state(number) in _ALIVE and (life is None or life == self.life(number)):
            self.fleet.missed_update(number, reason)
            self._leave(number, reason)

    def failed_to_catch_up(self, number: int, error: Exception, life: int) -> None:
        """A recovery did not work: it is tried again later, on a dead engine with a restart."""
        if isinstance(error, EngineDeadError):
            self.died(number, str(error), life)
        else:
            self.missed_update(number, str(error) or repr(error), life)

    async def retire(self, number: int) -> None:
        """Takes an engine out for good: its requests go on elsewhere, then it is torn down. Idempotent."""
        engine = self._engines[number]
        self.fleet.retire(number)
        self._router.hold(number)
        self._last_departure = "it was removed"
        self._changed()
        try:
            async with asyncio.timeout(self._handover_timeout_s):
                await engine.abort_generation()  # so that they keep the tokens that they have
                await asyncio.gather(*(f.task for f in self._flights[number]), return_exceptions=True)
        except (EngineError, TimeoutError) as error:
            logger.warning("inference engine %d could not hand over its requests: %s", number, error)
        finally:
            self._router.remove(number)
            self._give_up_flights(number)
            await engine.teardown()

    def close(self) -> None:
        """No request gets an engine any more."""
        self._closed = True
        self._last_departure = "the client was torn down"
        self._changed()

    def _leave(self, number: int, reason: str) -> None:
        if number in self._router:
            logger.error("inference engine %d left the routing: %s", number, reason)
        self._router.remove(number)
        if not self._closed:
            self._last_departure = reason
        self._give_up_flights(number)
        self._changed()

    def _give_up_flights(self, number: int) -> None:
        for flight in self._flights[number]:
            flight.give_up()

    def _changed(self) -> None:
        if self.routed:
            self._capabilities = None
        self.changed.notify()

    # Requests -----------------------------------------------------------------------------------------------------

    async def acquire(self, session_id: str | None) -> Lease:
        """A place on an engine; waits while none is routed.

        Raises:
            NoEngineError: none came (back) in time, or none can come any more.
        """
        while True:
            lease = None if self._closed else self._router.acquire(session_id)
            if lease is not None:
                return lease
            await self.wait_for_engine()

    async def wait_for_engine(self) -> None:
        """Returns when an engine is routed.

        Raises:
            NoEngineError: none came (back) in time, or none can come any more.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._wait_timeout_s if self.fleet.hopeful else 0):
                await self.changed.wait_until(lambda: bool(self.routed) or self._closed)
        if self._closed or not self.routed:
            raise NoEngineError(f"no inference engine is left. The last one left because: {self._last_departure}")

    def release(self, lease: Lease) -> None:
        """The request has left its place."""
        self._router.release(lease)

    async def run(self, lease: Lease, segment: Coroutine[Any, Any, None]) -> bool:
        """Runs a request's segment on its engine; False when the engine left before the segment ended.

        A task of its own, so that requests can leave an engine that is alive but must not serve (it missed an update).
        """
        number, life = lease.engine, self.life(lease.engine)
        flight = _Flight(segment, self._clock())
        self._flights[number].add(flight)
        try:
            return await flight.landed
        except EngineDeadError as error:
            self.died(number, str(error), life)
            return False
        except asyncio.CancelledError:
            flight.task.cancel()
            await asyncio.gather(flight.task, return_exceptions=True)  # the engine knows before the caller goes on
            raise
        finally:
            self._flights[number].discard(flight)


def _common(each: Sequence[EngineCapabilities]) -> EngineCapabilities:
    return EngineCapabilities(
        pause_modes=frozenset.intersection(*(c.pause_modes for c in each)),
        transports=frozenset.intersection(*(c.transports for c in each)),
        max_model_len=min(c.max_model_len for c in each),
        streaming=all(c.streaming for c in each),
        batch_invariant=all(c.batch_invariant for c in each),
        sleep=all(c.sleep for c in each),
        max_top_logprobs=min(c.max_top_logprobs for c in each),
        structured_output=all(c.structured_output for c in each),
        priorities=all(c.priorities for c in each),
        adapters=all(c.adapters for c in each),
    )

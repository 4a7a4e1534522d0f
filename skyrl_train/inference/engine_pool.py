"""The engines behind the client: who is routed, which requests run where, and what happens when one leaves.

request ──acquire──> lease ──run(segment)──┬── the segment ends
                       ^                   └── its engine leaves: the segment is cancelled, the request asks again
fleet events (died, missed an update, retired) ──leave──┘        supervisor ──join──> routing
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from skyrl_train.concurrency import Signal
from skyrl_train.errors import EngineDeadError, EngineError, NoEngineError, PublicationError
from skyrl_train.inference.fleet import EngineState, Fleet, FleetLimits
from skyrl_train.inference.interface import EngineCapabilities, InferenceEngineInterface
from skyrl_train.inference.router import Lease, Router

logger = logging.getLogger(__name__)


class EnginePool:
    """Engines by number; numbers are never used again.

    Args:
        wait_timeout_s: how long requests wait while no engine is routed.
        phase_timeout_s: limit of one phase of an update on one engine.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngineInterface],
        *,
        wait_timeout_s: float,
        phase_timeout_s: float,
        limits: FleetLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fleet = Fleet(clock, limits)
        self.changed = Signal()
        self._clock = clock
        self._engines: dict[int, InferenceEngineInterface] = {}
        self._router = Router()
        self._segments: dict[int, set[asyncio.Task[None]]] = {}
        self._wait_timeout_s = wait_timeout_s
        self._phase_timeout_s = phase_timeout_s
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
    def everyone(self) -> list[InferenceEngineInterface]:
        """All engines, dead ones included, without those that were retired."""
        return [e for number, e in self._engines.items() if self.fleet.state(number) is not EngineState.RETIRED]

    def engine(self, number: int) -> InferenceEngineInterface:
        """The engine with this number."""
        return self._engines[number]

    @property
    def capabilities(self) -> EngineCapabilities:
        """What every routed engine can do; while none is routed, what the last ones could."""
        if self._capabilities is None:
            self._capabilities = _common([self._engines[n].capabilities for n in self.routed or self._engines])
        return self._capabilities

    def add(self, engine: InferenceEngineInterface) -> int:
        """Takes an engine in, to be started and caught up; returns its number."""
        number = len(self._engines)
        self._engines[number] = engine
        self._segments[number] = set()
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
        if self.fleet.silent(number, reason):
            self._leave(number, reason)
        elif number in self._router:
            logger.warning("inference engine %d is suspect: %s", number, reason)
            self._router.remove(number)
            self._changed()

    def answered(self, number: int) -> None:
        """An engine answered a probe."""
        self.fleet.answered(number)
        if self.fleet.state(number) is EngineState.HEALTHY and number not in self._router:
            self._router.add(number)
            self._changed()

    def died(self, number: int, reason: str) -> None:
        """Its requests go on elsewhere with what they have."""
        self.fleet.died(number, reason)
        self._leave(number, reason)

    def missed_update(self, number: int, reason: str) -> None:
        """It is alive, and must not serve before it has caught up."""
        if self.fleet.state(number) in (EngineState.HEALTHY, EngineState.SUSPECT, EngineState.STALE):
            self.fleet.missed_update(number, reason)
        self._leave(number, reason)

    def failed_to_catch_up(self, number: int, error: EngineError) -> None:
        """A recovery did not work: it is tried again later, on a dead engine with a restart."""
        if isinstance(error, EngineDeadError):
            self.died(number, str(error))
        else:
            self.missed_update(number, str(error))

    async def retire(self, number: int) -> None:
        """Takes an engine out for good: its requests go on elsewhere, then it is torn down. Idempotent."""
        engine = self._engines[number]
        self.fleet.retire(number)
        self._router.remove(number)
        self._last_departure = "it was removed"
        self._changed()
        try:
            async with asyncio.timeout(self._phase_timeout_s):
                await engine.abort_generation()  # so that they keep the tokens that they have
                await asyncio.gather(*self._segments[number], return_exceptions=True)
        except (EngineError, TimeoutError) as error:
            logger.warning("inference engine %d could not hand over its requests: %s", number, error)
        self._interrupt(number)
        await engine.teardown()

    def _leave(self, number: int, reason: str) -> None:
        if number in self._router:
            logger.error("inference engine %d left the routing: %s", number, reason)
        self._router.remove(number)
        self._last_departure = reason
        self._interrupt(number)
        self._changed()

    def _interrupt(self, number: int) -> None:
        for segment in self._segments[number]:
            segment.cancel()

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
        lease = self._router.acquire(session_id)
        if lease is None:
            lease = await self._wait_for_engine(session_id)
        return lease

    async def _wait_for_engine(self, session_id: str | None) -> Lease:
        lease = None
        try:
            async with asyncio.timeout(self._wait_timeout_s if self.fleet.hopeful else 0):
                while lease is None:
                    await self.changed.wait_until(lambda: bool(self.routed))
                    lease = self._router.acquire(session_id)
        except TimeoutError:
            raise NoEngineError(
                f"no inference engine is left. The last one left because: {self._last_departure}"
            ) from None
        return lease

    def release(self, lease: Lease) -> None:
        """The request has left its place."""
        self._router.release(lease)

    async def run(self, lease: Lease, segment: Coroutine[Any, Any, None]) -> bool:
        """Runs a request's segment on its engine; False when the engine left before the segment ended.

        A task of its own, so that requests can leave an engine that is alive but must not serve (it missed an update).
        """
        number = lease.engine
        running = asyncio.create_task(segment)
        self._segments[number].add(running)
        try:
            await running
        except EngineDeadError as error:
            self.died(number, str(error))
            return False
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if number in self._router or (caller is not None and caller.cancelling()):
                raise
            return False
        finally:
            self._segments[number].discard(running)
        return True

    # Updates ------------------------------------------------------------------------------------------------------

    async def within_time(
        self, phase: str, number: int, call: Callable[[InferenceEngineInterface], Awaitable[None]]
    ) -> None:
        """Runs one phase on one engine.

        Raises:
            EngineError: it failed, or did not end within the phase's time.
        """
        try:
            async with asyncio.timeout(self._phase_timeout_s):
                await call(self._engines[number])
        except TimeoutError:
            raise EngineError(f"engine {number} did not {phase} within {self._phase_timeout_s:g} s") from None

    async def on_each(
        self,
        phase: str,
        call: Callable[[InferenceEngineInterface], Awaitable[None]],
        numbers: Sequence[int] | None = None,
    ) -> None:
        """Runs one phase on every routed engine (or on ``numbers``) at once.

        Engines that fail leave the routing if at least one succeeded; if none did, those alive stay.

        Raises:
            PublicationError: no engine succeeded.
        """
        targets = self.routed if numbers is None else numbers
        if not targets:
            raise PublicationError(
                f"cannot {phase} weights: no inference engine is left. The last one left because: {self._last_departure}"
            )
        results = await asyncio.gather(
            *(self.within_time(phase, number, call) for number in targets), return_exceptions=True
        )
        failed = {n: r for n, r in zip(targets, results, strict=True) if isinstance(r, EngineError)}
        unexpected = [r for r in results if isinstance(r, BaseException) and not isinstance(r, EngineError)]
        if unexpected:
            raise unexpected[0]
        for number, failure in failed.items():
            if isinstance(failure, EngineDeadError):
                self.died(number, str(failure))
            elif len(failed) < len(targets):
                self.missed_update(number, str(failure))
        if len(failed) == len(targets):
            first = next(iter(failed.values()))
            raise PublicationError(f"{phase} failed on every engine: {first}") from first


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

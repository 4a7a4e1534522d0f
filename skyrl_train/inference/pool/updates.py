"""Weight updates of a fleet: which version its engines hold, and how engines that missed an update catch up.

receive ──> gate closed · pause ──> load ──┬── all engines: the new version ──> resume · gate open
                                           ├── some engines: the others are stale until they have caught up
                                           └── no engine: the old version; an engine in an unclear state is stale

However an update ends (failure, timeout, cancellation), every engine that serves afterwards holds ``policy_version``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from skyrl_train.errors import ConfigError, EngineDeadError, EngineError, WeightSyncError
from skyrl_train.events.log import EventLog
from skyrl_train.inference.interface import InferenceEngineInterface
from skyrl_train.inference.pool.engine_pool import EnginePool
from skyrl_train.inference.pool.fleet import ALIVE, EngineState
from skyrl_train.runtime.concurrency import Gate
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.update import WeightUpdate

logger = logging.getLogger(__name__)
_KEPT_PAUSES = 1024  # a request that more updates interrupt has coarse times of its earliest segments
PhaseCall = Callable[[InferenceEngineInterface], Awaitable[None]]


@dataclass
class PhaseOutcome:
    """The result of a phase on each engine. ``unclear``: it may or may not have happened (no answer in time, cancelled)."""

    succeeded: set[int] = field(default_factory=set)
    rejected: dict[int, EngineError] = field(default_factory=dict)
    unclear: dict[int, EngineError] = field(default_factory=dict)
    dead: dict[int, EngineError] = field(default_factory=dict)
    cancelled: bool = False

    @property
    def alive_but_failed(self) -> dict[int, EngineError]:
        """The failures of engines that did not die."""
        return {**self.rejected, **self.unclear}


class FleetUpdates:
    """Pauses and updates all engines of a pool; owns the gate, the current weights and the LoRA adapters.

    Args:
        phase_timeout_s: limit of each phase on each engine, in seconds.
    """

    def __init__(
        self, pool: EnginePool, *, phase_timeout_s: float, events: EventLog, clock: Callable[[], float]
    ) -> None:
        self.gate = Gate()
        self.events = events
        self._paused_at = 0.0
        self._pauses: dict[int, tuple[float, float]] = {}  # version -> when engines paused for it and when they resumed
        self._pool = pool
        self._phase_timeout_s = phase_timeout_s
        self._clock = clock
        self._lock = asyncio.Lock()  # held while an update is loaded and while an engine catches up
        self._current: WeightUpdate | None = None
        self._received: dict[int, WeightUpdate] = {}
        self._adapters: dict[str, str] = {}
        self._paused_mode: PauseMode | None = None
        self._paused: set[int] = set()
        self._awake = Gate()  # closed while the fleet sleeps
        self._processes_in_change: set[int] = set()  # engines whose processes start or end now
        # Returns the current weights for an engine that catches up; None: they still lie where the last update says.
        self.restage: Callable[[], Awaitable[WeightUpdate]] | None = None
        pool.frozen = lambda: self._lock.locked() or not self.gate.is_open

    # Pausing ------------------------------------------------------------------------------------------------------

    async def pause_generation(self, mode: PauseMode) -> None:
        """Close the gate, then pause every engine. Returns when no engine samples any more.

        Raises:
            WeightSyncError: an engine does not support ``mode`` or did not pause in time; all engines sample again.
        """
        known = self._pool.capabilities.pause_modes
        if mode not in known:
            raise WeightSyncError(
                f"an engine cannot pause with {mode.value!r}; set generator.pause_mode to one of: {', '.join(sorted(known))}"
            )

        async def pause(engine: InferenceEngineInterface) -> None:
            await engine.pause(mode)
            if mode is PauseMode.ABORT:
                # A request that has begun would continue under the new weights. One that came behind the abort (it had passed the
                # gate before) waits in the engine and begins under them.
                health = await engine.health()
                if health.alive and health.running:
                    raise EngineError(f"an engine still holds {health.running} requests after it reported them aborted")

        # New requests wait from here on; those that arrived before are paused inside the engines.
        self.gate.close()
        self._paused_at = self.events.now()
        self._paused_mode = mode
        try:
            # Recorded before the call: an engine that paused but did not answer must be resumed too.
            self._paused.update(self._pool.router.routed)
            self._settle("pause", await self._on_each("pause", pause))
        except BaseException:
            await self.resume_generation()
            raise

    async def resume_generation(self) -> None:
        """Resume every paused engine, then open the gate. An engine that cannot resume must catch up first."""
        # Taken first: an engine that joins during the await below sees that generation is not paused any more.
        paused, self._paused, self._paused_mode = self._paused, set(), None
        try:
            records = self._pool.fleet.records
            targets = [n for n in paused if records[n].state in (EngineState.HEALTHY, EngineState.SUSPECT)]
            if targets:
                outcome = await self._on_each("resume", lambda engine: engine.resume(), targets)
                # An engine that stays paused would keep its requests forever, even if no other one resumed.
                self._settle("resume", outcome, stale_if_none=outcome.alive_but_failed)
        finally:
            if not self.gate.is_open:
                version, now = self._pool.policy_version, self.events.now()
                self.events.record("span", name="pause", step=version, t0=self._paused_at, t1=now)
                self._pauses.setdefault(version, (self._paused_at, now))
                if len(self._pauses) > _KEPT_PAUSES:
                    del self._pauses[next(iter(self._pauses))]
            self.gate.open()

    async def sleep(self, level: int = 1) -> None:
        """Free the device memory of every engine: of those that serve (pause them before), and of all others that live.

        One that is suspect becomes stale, one that does not fall asleep is ended and started again later, and a start or a
        removal that is under way is waited for. Wake the engines before weights are loaded. Until then no engine starts or
        joins: it would take the freed memory.

        Args:
            level: 1: the engines keep their weights in main memory; 2: they drop them, and need a weight sync.

        Raises:
            WeightSyncError: living engines can sleep, and none did.
        """
        # Closed before the lock is taken: starts and catch-ups that begin while this call waits must wait, too.
        self._awake.close()
        await self._pool.changed.wait_until(lambda: not self._processes_in_change and not self._pool.retiring)
        async with self._lock:
            engines, records, routed = self._pool.engines, self._pool.fleet.records, self._pool.router.routed
            for number in [number for number, record in records.items() if record.state is EngineState.DEAD]:
                await self._end_in_time(number)  # it may count as dead because it hangs
            able = [n for n, record in records.items() if record.state in ALIVE and engines[n].capabilities.sleep]
            serving = [n for n in able if n in routed and n in self._paused]
            others = [n for n in able if n not in routed]
            for number in others:
                if records[number].state is EngineState.SUSPECT:
                    self._pool.missed_update(number, "it did not answer when the engines were put to sleep")
            # Also where it was paused before: a process that was started again meanwhile is not.
            to_pause = [engines[n] for n in others]

            async def fall_asleep(engine: InferenceEngineInterface) -> None:
                if engine in to_pause:
                    await engine.pause(PauseMode.ABORT)
                await engine.sleep(level)

            targets = [*serving, *others]
            outcome = await self._on_each("sleep", fall_asleep, targets) if targets else PhaseOutcome()
            if outcome.succeeded and not outcome.cancelled:
                # They would keep memory that the trainer needs.
                for number, failure in outcome.alive_but_failed.items():
                    self._pool.died(number, f"it could not be put to sleep: {failure}")
                    await self._end_in_time(number)
            elif outcome.alive_but_failed or outcome.cancelled:
                self._settle("put to sleep", outcome)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Wake the sleeping engines; they stay paused. An engine that cannot wake must catch up first.

        Engines that died in their sleep are started again from now on; :meth:`wait_for_engine` waits for them.

        Args:
            tags: ``["weights"]`` takes back the memory of the weights alone, so that an update can be loaded, and
                ``["kv_cache"]`` the rest. None: all of it.

        Raises:
            WeightSyncError: living engines sleep, and none woke up.
        """
        try:
            async with self._lock:
                able = [n for n in self._pool.router.routed if self._pool.engines[n].capabilities.sleep]
                outcome = PhaseOutcome()
                if able:
                    outcome = await self._on_each("wake", lambda engine: engine.wake_up(tags), able)
                if outcome.succeeded or outcome.alive_but_failed or outcome.cancelled:
                    self._settle("wake", outcome)
        finally:
            self._awake.open()

    # Processes ----------------------------------------------------------------------------------------------------

    async def start_engine(self, number: int) -> None:
        """Start the process of an engine as soon as the fleet is awake: until then its memory is the trainer's.

        Raises:
            EngineError: it did not start in time.
        """
        await self._awake.wait_open()
        limit_s = self._pool.fleet.limits.start_timeout_s
        async with self._process_changes(number):
            await self._in_time("start", number, self._pool.engines[number].start(), limit_s)

    async def end_engine(self, number: int) -> None:
        """End the process of an engine; it frees its memory. Idempotent."""
        async with self._process_changes(number):
            await self._pool.engines[number].teardown()

    @contextlib.asynccontextmanager
    async def _process_changes(self, number: int) -> AsyncIterator[None]:
        await self._pool.changed.wait_until(lambda: number not in self._processes_in_change)
        self._processes_in_change.add(number)
        try:
            yield
        finally:
            self._processes_in_change.discard(number)
            self._pool.changed.notify()

    async def _end_in_time(self, number: int) -> None:
        try:
            await self._in_time("end", number, self.end_engine(number))
        except Exception as error:  # an engine may raise anything; whether its memory is free is not known then
            logger.warning("inference engine %d could not be ended: %s", number, str(error) or repr(error))

    # Weights ------------------------------------------------------------------------------------------------------

    async def receive_weights(self, update: WeightUpdate) -> None:
        """*Transfer*: engines receive the bytes while they serve.

        Raises:
            WeightSyncError: no engine received them.
        """
        # Not under the lock: the engines serve meanwhile, and a catch-up may run beside the transfer.
        # A broadcast waits for so many processes. No engine leaves or joins between here and the calls.
        engines = [self._pool.engines[number].capabilities for number in self._pool.router.routed]
        receivers = sum(each.weight_receivers for each in engines if not update.is_mapped_on(each.machine))
        together = dataclasses.replace(update, receivers=receivers)
        # A worker that maps or checks a large model answers no probe meanwhile. The time limit of the phase finds one that hangs.
        self._pool.receiving.update(self._pool.router.routed)
        try:
            outcome = await self._on_each("receive", lambda engine: engine.receive_weights(together))
        finally:
            self._pool.receiving.clear()
        self._received.update(dict.fromkeys(outcome.succeeded, update))
        self._settle("receive", outcome)

    async def load_weights(self, update: WeightUpdate, mode: PauseMode) -> float:
        """*Load*: swap the received update into the model while the engines are paused with ``mode``.

        Engines that were paused before the call (:meth:`pause_generation`) stay paused. One that fails to load while another
        succeeds leaves the routing until it has caught up: no engine ever serves another version than ``policy_version``.

        Returns:
            The seconds for which sampling was paused.

        Raises:
            WeightSyncError: no engine could load; engines that serve keep the weights that they had.
        """
        async with self._lock:
            # Compare the update and not only its version: a repeated attempt at a version is another transfer.
            late = [number for number in self._pool.router.routed if self._received.get(number) != update]
            if late:  # they joined after the transfer
                outcome = await self._on_each("receive", lambda engine: engine.receive_weights(update), late)
                self._received.update(dict.fromkeys(outcome.succeeded, update))
                # Even if all of them failed, the engines that took part in the transfer can load.
                for number, failure in outcome.alive_but_failed.items():
                    self._pool.missed_update(number, str(failure))
                if outcome.cancelled:
                    raise asyncio.CancelledError
            # The pause begins after every engine has the bytes, so that only pause, load and resume cost sampling time.
            started, is_paused = self._clock(), self._paused_mode is not None
            if not is_paused:
                await self.pause_generation(mode)
            try:
                with self.events.span("load_weights", update.version):
                    outcome = await self._on_each("load", lambda engine: engine.load_weights(update))
                if outcome.succeeded:
                    # One success decides: the fleet holds the new version, and every other engine is stale.
                    self._current, self._pool.policy_version = update, update.version
                # Without a success, engines that rejected the update still hold the old version and keep serving.
                self._settle(
                    "load",
                    outcome,
                    stale_if_none=outcome.unclear,
                    suspects="it did not answer while an update was loaded",
                )
            finally:
                if not is_paused:
                    await self.resume_generation()
            return self._clock() - started

    # Adapters -----------------------------------------------------------------------------------------------------

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter into every engine, including those that join later; waits while the fleet sleeps.

        Raises:
            ConfigError: the engines do not support adapters.
            WeightSyncError: no engine could load it.
        """
        if not self._pool.capabilities.adapters:
            raise ConfigError("the engines have no LoRA adapters; start vLLM engines with enable_lora")
        await self._change_adapters("load the adapter of", lambda engine: engine.load_adapter(name, path))
        self._adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter from every engine. Unknown names are ignored."""
        if self._adapters.pop(name, None) is not None:
            await self._change_adapters("unload the adapter of", lambda engine: engine.unload_adapter(name))

    async def _change_adapters(self, phase: str, call: PhaseCall) -> None:
        await self._awake.wait_open()  # adapters lie in the engines' device memory
        async with self._lock:  # no engine joins meanwhile
            # An engine that missed the change would answer requests for this adapter with an error, so it becomes
            # stale.
            self._settle(phase, await self._on_each(phase, call), suspects="it missed an adapter")

    # Engines that join --------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def no_catch_up(self) -> AsyncIterator[None]:
        """Wait for the engine that catches up, if one does, and let none begin inside this context."""
        async with self._lock:
            yield

    async def catch_up(self, number: int) -> None:
        """Bring a stale engine to the current weights and into the routing.

        Raises:
            EngineError: it could not catch up; it stays stale.
        """
        await self._awake.wait_open()
        async with self._lock:  # no newer version is loaded meanwhile
            if self._pool.fleet.records[number].state is not EngineState.STALE:
                return  # it died, or was removed
            # No further recovery of this engine is planned while this one runs.
            self._pool.fleet.catching_up(number)
            update, engine = self._current, self._pool.engines[number]
            if update is not None and self.restage is not None:
                update = await self.restage()
            if engine.capabilities.sleep:  # it may sleep since before it became stale
                await self._in_time("wake", number, engine.wake_up())
            # A restarted engine has lost its adapters; loading one again replaces it.
            for name, path in list(self._adapters.items()):
                await self._in_time("load the adapters of", number, engine.load_adapter(name, path))
            if update is not None:
                # Its requests have left it, so that ABORT is the cheapest mode.
                modes = engine.capabilities.pause_modes
                mode = PauseMode.ABORT if PauseMode.ABORT in modes else min(modes)
                await self._in_time("receive", number, engine.receive_weights(update))
                await self._in_time("pause", number, engine.pause(mode))
                await self._in_time("load", number, engine.load_weights(update))
                # The last check before the engine takes requests: otherwise its tokens would carry a wrong version.
                if engine.policy_version != update.version:
                    raise EngineError(f"engine {number} reports version {engine.policy_version}, not {update.version}")
                self._received[number] = update
            await self._in_time("resume", number, engine.resume())
            # While generation is paused, a joining engine is paused too; the mode may change during each await.
            while (paused_mode := self._paused_mode) is not None:
                await self._in_time("pause", number, engine.pause(paused_mode))
                if self._paused_mode is paused_mode:
                    self._paused.add(number)
                    break
                await self._in_time("resume", number, engine.resume())
            if self._pool.fleet.records[number].state is EngineState.STALE:
                self._pool.join(number)

    # Phases -------------------------------------------------------------------------------------------------------

    def _settle(
        self,
        phase: str,
        outcome: PhaseOutcome,
        *,
        stale_if_none: Mapping[int, EngineError] | None = None,
        suspects: str = "",
    ) -> None:
        """Mark engines stale that failed where another one succeeded. Then raise CancelledError if the phase was
        cancelled, or WeightSyncError if no engine succeeded.

        Args:
            stale_if_none: the failures that make an engine stale even if none succeeded.
            suspects: why suspect engines become stale if another one succeeded. They are not routed, so the phase was not
                run on them.
        """
        stale = outcome.alive_but_failed if outcome.succeeded else stale_if_none or {}
        for number, failure in stale.items():
            self._pool.missed_update(number, str(failure))
        if outcome.succeeded and suspects:
            for number, record in self._pool.fleet.records.items():
                if record.state is EngineState.SUSPECT:
                    self._pool.missed_update(number, suspects)
        if outcome.cancelled:
            raise asyncio.CancelledError
        if not outcome.succeeded:
            # A living engine's error says more than a death does.
            first = next(iter({**outcome.alive_but_failed, **outcome.dead}.values()))
            raise WeightSyncError(f"{phase} failed on every engine: {first}") from first

    async def _in_time(self, phase: str, number: int, call: Awaitable[None], limit_s: float | None = None) -> None:
        setting = " (generator.pause_timeout_s)" if limit_s is None else ""
        limit_s = self._phase_timeout_s if limit_s is None else limit_s
        timeout = asyncio.timeout(limit_s)
        try:
            async with timeout:
                await call
        except TimeoutError:
            if not timeout.expired():  # an error of the engine's own
                raise
            raise EngineError(f"engine {number} did not {phase} within {limit_s:g} s{setting}") from None

    async def _on_each(self, phase: str, call: PhaseCall, targets: Sequence[int] | None = None) -> PhaseOutcome:
        """Run one phase on ``targets`` concurrently. None: on all routed engines.

        Raises:
            WeightSyncError: no engine is routed. Every other failure is part of the outcome, a cancellation too.
        """
        if targets is None:
            targets = self._pool.router.routed
            if not targets:
                raise WeightSyncError(
                    f"cannot {phase} weights: no inference engine is left. The last one left because: "
                    f"{self._pool.last_departure}"
                )
        outcome, records = PhaseOutcome(), self._pool.fleet.records

        async def one(number: int, restart_count: int) -> None:
            try:
                async with asyncio.timeout(self._phase_timeout_s):
                    await call(self._pool.engines[number])
                outcome.succeeded.add(number)
            except EngineDeadError as error:
                outcome.dead[number] = error
                self._pool.died(number, str(error), restart_count)
            except EngineError as error:
                # An error of a process that has been replaced meanwhile says nothing about the engine that serves now.
                same_process = records[number].restart_count == restart_count
                (outcome.rejected if same_process else outcome.dead)[number] = error
            except TimeoutError:
                outcome.unclear[number] = EngineError(
                    f"engine {number} did not {phase} within {self._phase_timeout_s:g} s (generator.pause_timeout_s)"
                )
            except asyncio.CancelledError:
                outcome.unclear[number] = EngineError(f"engine {number} was cancelled during {phase}")
            except Exception as error:  # one engine's unexpected failure must not leave the others undecided
                outcome.unclear[number] = EngineError(f"engine {number} failed to {phase}: {error!r}")

        # Restart counts of now: a death reported later may concern this process or a newer one.
        tasks = [asyncio.create_task(one(number, records[number].restart_count)) for number in targets]
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            # The outcome must be complete even then: engines whose phase was cut off have an unclear state and become
            # stale.
            outcome.cancelled = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return outcome

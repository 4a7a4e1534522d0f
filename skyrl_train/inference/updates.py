"""Weight updates and the fleet: which version everybody holds, and how engines that missed one catch up.

receive ──> gate closed · pause ──> load ──┬── all: the new version      ──> resume · gate open
                                           ├── some: those; the others are stale until they have caught up
                                           └── none: the old version; who cannot be known to hold it is stale

Whatever ends an update (a failure, a timeout, a cancellation), an engine that serves afterwards holds the version that
``policy_version`` says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from skyrl_train.concurrency import Gate
from skyrl_train.errors import ConfigError, EngineDeadError, EngineError, PublicationError
from skyrl_train.inference.engine_pool import EnginePool
from skyrl_train.inference.fleet import EngineState
from skyrl_train.inference.interface import InferenceEngineInterface, PauseMode
from skyrl_train.inference.weight_update import WeightUpdate

PhaseCall = Callable[[InferenceEngineInterface], Awaitable[None]]


@dataclass
class _Outcome:
    """How a phase went on each engine. ``unclear``: it may or may not have happened (no answer in time, cancelled)."""

    succeeded: set[int] = field(default_factory=set)
    refused: dict[int, EngineError] = field(default_factory=dict)
    unclear: dict[int, EngineError] = field(default_factory=dict)
    dead: dict[int, EngineError] = field(default_factory=dict)
    cancelled: bool = False

    @property
    def alive_but_failed(self) -> dict[int, EngineError]:
        return {**self.refused, **self.unclear}

    def raise_if_none_succeeded(self, phase: str) -> None:
        """Raises the cancellation, or the failure if it is everybody's."""
        if self.cancelled:
            raise asyncio.CancelledError
        if not self.succeeded:
            first = next(iter({**self.alive_but_failed, **self.dead}.values()))
            raise PublicationError(f"{phase} failed on every engine: {first}") from first


class FleetUpdates:
    """Owns the gate, the current weights and the adapters of a fleet.

    Args:
        phase_timeout_s: limit of each phase on each engine.
    """

    def __init__(self, pool: EnginePool, *, phase_timeout_s: float, clock: Callable[[], float]) -> None:
        self.gate = Gate()
        self.policy_version = -1
        self.adapters: dict[str, str] = {}
        self._pool = pool
        self._phase_timeout_s = phase_timeout_s
        self._clock = clock
        self._lock = asyncio.Lock()
        self._current: WeightUpdate | None = None
        self._received: dict[int, WeightUpdate] = {}
        self._paused_mode: PauseMode | None = None
        self._paused: set[int] = set()
        self._awake = Gate()  # closed while the fleet sleeps
        self._asleep: set[int] = set()
        pool.frozen = lambda: self._lock.locked() or not self.gate.is_open

    async def pause(self, mode: PauseMode) -> None:
        """Closes the gate, then pauses every engine; returns when no engine samples any more.

        Raises:
            PublicationError: an engine does not know ``mode`` or did not pause in time; all engines sample again.
        """
        known = self._pool.capabilities.pause_modes
        if mode not in known:
            raise PublicationError(
                f"an engine cannot pause with {mode.value!r}; set generator.pause_mode to one of: {', '.join(sorted(known))}"
            )
        self.gate.close()
        self._paused_mode = mode
        try:
            await self._pause_each(mode)
        except BaseException:
            await self.resume()
            raise

    async def _pause_each(self, mode: PauseMode) -> None:
        targets = self._targets("pause")
        self._paused |= set(targets)
        outcome = await self._run("pause", lambda engine: engine.pause(mode), targets)
        if mode is PauseMode.ABORT and outcome.succeeded and not outcome.cancelled:
            verified = await self._run("abort", _verify_aborted, sorted(outcome.succeeded))
            verified.refused.update(outcome.refused)
            verified.unclear.update(outcome.unclear)
            outcome = verified
        if outcome.succeeded:
            self._to_be_caught_up(outcome.alive_but_failed)
        outcome.raise_if_none_succeeded("pause")

    async def resume(self) -> None:
        """Lets every engine that was paused sample again, then opens the gate. One that cannot must catch up first."""
        paused, self._paused, self._paused_mode = self._paused, set(), None
        try:
            targets = [n for n in paused if self._pool.fleet.state(n) in (EngineState.HEALTHY, EngineState.SUSPECT)]
            if targets:
                outcome = await self._run("resume", lambda engine: engine.resume(), targets)
                self._to_be_caught_up(outcome.alive_but_failed)
                outcome.raise_if_none_succeeded("resume")
        finally:
            self.gate.open()

    async def sleep(self) -> None:
        """Frees the device memory of the paused engines that can sleep. Wake them before weights are loaded.

        Until then nobody joins: an engine that is started again would take the memory that others gave back.

        Raises:
            PublicationError: engines can sleep, and none did.
        """
        self._awake.close()
        async with self._lock:
            able = [n for n in self._pool.routed if n in self._paused and self._pool.engine(n).capabilities.sleep]
            self._asleep |= set(able)  # also those that fail to: nobody knows how far they came
            await self._on_sleepers("put to sleep", lambda engine: engine.sleep(), able)

    async def wake_up(self) -> None:
        """Brings the engines that :meth:`sleep` put to sleep back, still paused. One that cannot must catch up first.

        Raises:
            PublicationError: no engine came back.
        """
        try:
            async with self._lock:
                asleep = [n for n in self._pool.routed if n in self._asleep]
                await self._on_sleepers("wake", lambda engine: engine.wake_up(), asleep)
                self._asleep -= set(self._pool.routed)
        finally:
            self._awake.open()

    async def _on_sleepers(self, phase: str, call: PhaseCall, targets: Sequence[int]) -> None:
        if targets:
            outcome = await self._run(phase, call, targets)
            if outcome.succeeded:
                self._to_be_caught_up(outcome.alive_but_failed)
            outcome.raise_if_none_succeeded(phase)

    async def receive(self, update: WeightUpdate) -> None:
        """*Transfer*: engines take the bytes and go on serving.

        Raises:
            PublicationError: no engine could.
        """
        outcome = await self._receive(update, self._targets("receive"))
        if outcome.succeeded:
            self._to_be_caught_up(outcome.alive_but_failed)
        outcome.raise_if_none_succeeded("receive")

    async def _receive_late(self, update: WeightUpdate, numbers: Sequence[int]) -> None:
        outcome = await self._receive(update, numbers)
        self._to_be_caught_up(outcome.alive_but_failed)
        if outcome.cancelled:
            raise asyncio.CancelledError

    async def _receive(self, update: WeightUpdate, numbers: Sequence[int]) -> _Outcome:
        outcome = await self._run("receive", lambda engine: engine.receive_weights(update), numbers)
        for number in outcome.succeeded:
            self._received[number] = update
        return outcome

    async def load(self, update: WeightUpdate, mode: PauseMode) -> float:
        """*Load*: swaps the received update into the model while the engines are paused with ``mode``.

        Returns:
            The seconds for which sampling was paused.

        Raises:
            PublicationError: no engine could load; those that serve have the weights that they had.
        """
        async with self._lock:
            late = [number for number in self._pool.routed if self._received.get(number) != update]
            if late:  # they joined after the transfer
                await self._receive_late(update, late)
            started = self._clock()
            await self.pause(mode)
            try:
                await self._swap(update)
            finally:
                await self.resume()
            return self._clock() - started

    async def _swap(self, update: WeightUpdate) -> None:
        targets = self._targets("load")
        outcome = await self._run("load", lambda engine: engine.load_weights(update), targets)
        if outcome.succeeded:
            self._current, self.policy_version, self._pool.version = update, update.version, update.version
            self._to_be_caught_up(outcome.alive_but_failed)
            suspects = [n for n, state in self._pool.fleet.states.items() if state is EngineState.SUSPECT]
            self._to_be_caught_up({n: EngineError("it did not answer while an update was loaded") for n in suspects})
        else:
            self._to_be_caught_up(outcome.unclear)
        outcome.raise_if_none_succeeded("load")

    # Adapters -----------------------------------------------------------------------------------------------------

    async def load_adapter(self, name: str, path: str) -> None:
        """Loads a LoRA adapter into every engine, those that join later included.

        Raises:
            ConfigError: the engines have no adapters.
            PublicationError: no engine could load it.
        """
        if not self._pool.capabilities.adapters:
            raise ConfigError("the engines have no LoRA adapters; start vLLM engines with enable_lora")
        await self._on_all_adapters("load the adapter of", lambda engine: engine.load_adapter(name, path))
        self.adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        """Forgets an adapter. Unknown names are ignored."""
        if self.adapters.pop(name, None) is not None:
            await self._on_all_adapters("unload the adapter of", lambda engine: engine.unload_adapter(name))

    async def _on_all_adapters(self, phase: str, call: PhaseCall) -> None:
        async with self._lock:  # nobody joins meanwhile
            outcome = await self._run(phase, call, self._targets(phase))
            if outcome.succeeded:
                suspects = [n for n, state in self._pool.fleet.states.items() if state is EngineState.SUSPECT]
                self._to_be_caught_up({n: EngineError("it missed an adapter") for n in suspects})
                self._to_be_caught_up(outcome.alive_but_failed)
            outcome.raise_if_none_succeeded(phase)

    # Engines that join --------------------------------------------------------------------------------------------

    async def catch_up(self, number: int) -> None:
        """Brings a stale engine to the current weights and into the routing.

        Raises:
            EngineError: it could not; it stays stale.
        """
        await self._awake.passed()
        async with self._lock:  # no newer version is loaded meanwhile
            if self._pool.fleet.state(number) is not EngineState.STALE:
                return  # it died, or was removed
            self._pool.fleet.catching_up(number)
            update, engine = self._current, self._pool.engine(number)
            if number in self._asleep:
                self._asleep.discard(number)
                await self._one("wake", number, lambda e: e.wake_up())
            await self._one("load the adapters of", number, self._load_adapters)
            if update is not None:
                mode = _quietest(engine.capabilities.pause_modes)
                await self._one("receive", number, lambda e: e.receive_weights(update))
                await self._one("pause", number, lambda e: e.pause(mode))
                await self._one("load", number, lambda e: e.load_weights(update))
                if engine.policy_version != update.version:
                    raise EngineError(f"engine {number} reports version {engine.policy_version}, not {update.version}")
                self._received[number] = update
            await self._one("resume", number, lambda e: e.resume())
            while (mode_now := self._paused_mode) is not None:  # generation is paused: so is whoever joins
                await self._one("pause", number, lambda e, m=mode_now: e.pause(m))  # type: ignore[misc]
                if self._paused_mode is mode_now:
                    self._paused.add(number)
                    break
                await self._one("resume", number, lambda e: e.resume())
            if self._pool.fleet.state(number) is EngineState.STALE:
                self._pool.join(number)

    async def _load_adapters(self, engine: InferenceEngineInterface) -> None:
        for name, path in list(self.adapters.items()):
            await engine.load_adapter(name, path)

    # Phases -------------------------------------------------------------------------------------------------------

    def _targets(self, phase: str) -> list[int]:
        routed = self._pool.routed
        if not routed:
            raise PublicationError(
                f"cannot {phase} weights: no inference engine is left. The last one left because: "
                f"{self._pool.last_departure}"
            )
        return routed

    def _to_be_caught_up(self, failures: dict[int, EngineError]) -> None:
        for number, failure in failures.items():
            self._pool.missed_update(number, str(failure))

    async def _one(self, phase: str, number: int, call: PhaseCall) -> None:
        """Runs one phase on one engine within the time limit; raises ``EngineError`` however it fails."""
        try:
            async with asyncio.timeout(self._phase_timeout_s):
                await call(self._pool.engine(number))
        except TimeoutError:
            raise EngineError(f"engine {number} did not {phase} within {self._phase_timeout_s:g} s") from None

    async def _run(self, phase: str, call: PhaseCall, targets: Sequence[int]) -> _Outcome:
        """Runs one phase on all ``targets`` at once. Never raises: a cancellation is part of the outcome."""
        outcome = _Outcome()

        async def one(number: int, life: int) -> None:
            try:
                async with asyncio.timeout(self._phase_timeout_s):
                    await call(self._pool.engine(number))
                outcome.succeeded.add(number)
            except EngineDeadError as error:
                outcome.dead[number] = error
                self._pool.died(number, str(error), life)
            except EngineError as error:
                if self._pool.life(number) == life:
                    outcome.refused[number] = error
            except TimeoutError:
                outcome.unclear[number] = EngineError(
                    f"engine {number} did not {phase} within {self._phase_timeout_s:g} s"
                )
            except asyncio.CancelledError:
                outcome.unclear[number] = EngineError(f"engine {number} was cancelled during {phase}")
            except Exception as error:  # an engine's own failure must not leave the others undecided
                outcome.unclear[number] = EngineError(f"engine {number} failed to {phase}: {error!r}")

        tasks = [asyncio.create_task(one(number, self._pool.life(number))) for number in targets]
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            outcome.cancelled = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return outcome


async def _verify_aborted(engine: InferenceEngineInterface) -> None:
    health = await engine.health()
    left = health.running + health.waiting
    if health.alive and left:
        raise EngineError(f"an engine still holds {left} requests after it reported them aborted")


def _quietest(modes: frozenset[PauseMode]) -> PauseMode:
    """The mode for an engine whose requests have gone elsewhere."""
    return PauseMode.ABORT if PauseMode.ABORT in modes else next(iter(sorted(modes)))

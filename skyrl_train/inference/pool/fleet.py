"""Which engines may serve: one state machine per engine, with an injected clock. Pure: no task, no engine, no sleep.

    add ──> STARTING ──started──> STALE ──caught_up──> HEALTHY <──answered── SUSPECT
               ^                   ^  ^                 │   │ └───silent───────^ │
               │ restarting        │  └─missed_update───┘   │                    │ silent once too often
               └───────────────── DEAD <───────died─────────┴────────────────────┘         any ──retire──> RETIRED

Only a HEALTHY engine gets requests. A SUSPECT one keeps those that it has. An engine that was restarted or added is
STALE until it holds the current weights: otherwise it would serve an old policy as the current version. An engine that hangs
and so misses an update is STALE, too. It is probed before it catches up, and counts as dead after ``max_failed_probes`` probes
without an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum


class EngineState(StrEnum):
    """The state of an engine. The module's diagram shows the transitions."""

    STARTING = "starting"
    STALE = "stale"  # alive, without the current weights
    HEALTHY = "healthy"
    SUSPECT = "suspect"  # it did not answer the last health probe
    DEAD = "dead"
    RETIRED = "retired"  # removed by the user, for good


ALIVE = frozenset({EngineState.STALE, EngineState.HEALTHY, EngineState.SUSPECT})


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """Limits of recovery.

    Args:
        max_failed_probes: health probes in a row that an engine may miss before it counts as dead.
        max_restarts: restarts of a dead engine; further deaths are final. An engine that was healthy for ``stable_s`` seconds
            starts to count anew.
        start_timeout_s: seconds that a restart, or the start of an added engine, may take.
        backoff_s: seconds before the first recovery (a restart, or catching up); they double up to ``max_backoff_s``.
    """

    max_failed_probes: int = 3
    max_restarts: int = 3
    start_timeout_s: float = 1800.0  # an engine may compile for minutes
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0
    stable_s: float = 300.0


@dataclass(slots=True)
class EngineRecord:
    """The state of one engine. ``reason`` says why it is not healthy; times are seconds of the fleet's clock."""

    state: EngineState
    since: float
    reason: str = ""
    failed_probes: int = 0
    restart_count: int = 0  # in total; it tells a report about an earlier process of the engine from a current one
    recent_restarts: int = 0  # since it was healthy for stable_s
    recent_recoveries: int = 0  # restarts and catch-ups begun since it was healthy for stable_s
    recovery_at: float | None = None


class Fleet:
    """The engines by number. A transition that the diagram lacks raises ``ValueError``: it is a bug of the caller.

    Attributes:
        limits: when an engine counts as dead, and how often and how fast it recovers.
        records: the state of each engine, by number. Only this class changes them.
    """

    def __init__(self, clock: Callable[[], float], limits: FleetLimits | None = None) -> None:
        self._clock = clock
        self.limits = limits or FleetLimits()
        self.records: dict[int, EngineRecord] = {}

    def add(self, engine: int) -> None:
        """Register a new engine that is about to start."""
        if engine in self.records:
            raise ValueError(f"engine {engine} is in the fleet already")
        self.records[engine] = EngineRecord(EngineState.STARTING, self._clock())

    @property
    def may_serve(self) -> bool:
        """Whether an engine serves, or may serve again without intervention."""
        return any(
            record.state not in (EngineState.DEAD, EngineState.RETIRED) or record.recovery_at is not None
            for record in self.records.values()
        )

    # Events -------------------------------------------------------------------------------------------------------

    def started(self, engine: int) -> None:
        """Record that the engine is up. Its weights are not the current ones."""
        # Due at once: a fresh engine has no weights and waits for nothing else.
        record = self._move(engine, EngineState.STALE, {EngineState.STARTING})
        record.recovery_at = self._clock()

    def caught_up(self, engine: int) -> None:
        """Record that the engine holds the current weights."""
        record = self._move(engine, EngineState.HEALTHY, {EngineState.STALE})
        record.failed_probes = 0
        record.recovery_at = None
        record.reason = ""

    def missed_update(self, engine: int, reason: str) -> None:
        """Record that a live engine does not hold the current weights; it must catch up."""
        record = self._move(
            engine, EngineState.STALE, {EngineState.HEALTHY, EngineState.SUSPECT, EngineState.STALE}, reason
        )
        self._schedule(record)

    def answered(self, engine: int) -> None:
        """Record an answered probe."""
        record = self.records[engine]
        record.failed_probes = 0
        if record.state is EngineState.SUSPECT:
            record.reason = ""
            self._move(engine, EngineState.HEALTHY, {EngineState.SUSPECT})

    def silent(self, engine: int, reason: str) -> bool:
        """Record an unanswered probe; a stale engine is probed, too. Returns whether the engine counts as dead now."""
        record = self.records[engine]
        # Probes in a row: one answer sets the counter back.
        record.failed_probes += 1
        if record.failed_probes >= self.limits.max_failed_probes:
            self.died(engine, reason)
            return True
        if record.state is EngineState.HEALTHY:
            self._move(engine, EngineState.SUSPECT, {EngineState.HEALTHY}, reason)
        return False

    def died(self, engine: int, reason: str) -> None:
        """Record a death and schedule a restart if the limits allow one. Idempotent."""
        record = self.records[engine]
        if record.state in (EngineState.DEAD, EngineState.RETIRED):
            return
        self._move(engine, EngineState.DEAD, set(EngineState) - {EngineState.RETIRED}, reason)
        record.failed_probes = 0
        # Beyond the limit the death is final: if no other engine is left, waiting requests fail at once.
        if record.recent_restarts < self.limits.max_restarts:
            self._schedule(record)
        else:
            record.recovery_at = None

    def restarting(self, engine: int) -> None:
        """Record that a dead engine is being restarted."""
        record = self._move(engine, EngineState.STARTING, {EngineState.DEAD})
        record.recent_restarts += 1
        record.restart_count += 1
        record.recovery_at = None

    def catching_up(self, engine: int) -> None:
        """Record that the engine receives the current weights; :meth:`caught_up` or :meth:`missed_update` follows."""
        record = self.records[engine]
        if record.state is not EngineState.STALE:
            raise ValueError(f"engine {engine} is {record.state}, not stale")
        record.recovery_at = None

    def retire(self, engine: int) -> None:
        """Record that the engine was removed for good. Idempotent."""
        record = self.records[engine]
        record.state, record.since, record.recovery_at = EngineState.RETIRED, self._clock(), None

    # Recoveries ---------------------------------------------------------------------------------------------------

    def due(self) -> list[int]:
        """Return the stale and dead engines whose recovery is due."""
        now = self._clock()
        return [e for e, r in self.records.items() if r.recovery_at is not None and r.recovery_at <= now]

    def next_due_at(self, except_for: Collection[int] = ()) -> float | None:
        """Return when the next recovery is due; None when none is planned."""
        planned = (r.recovery_at for engine, r in self.records.items() if engine not in except_for)
        return min((at for at in planned if at is not None), default=None)

    def _schedule(self, record: EngineRecord) -> None:
        # Exponential backoff: an engine that cannot recover must not take the driver's time or the GPU's memory in a
        # loop.
        delay = min(self.limits.backoff_s * 2**record.recent_recoveries, self.limits.max_backoff_s)
        record.recent_recoveries += 1
        record.recovery_at = self._clock() + delay

    def _move(self, engine: int, to: EngineState, allowed: set[EngineState], reason: str = "") -> EngineRecord:
        record = self.records[engine]
        if record.state not in allowed:
            raise ValueError(f"engine {engine} is {record.state} and cannot become {to}")
        # ``since`` is the time of the transition: repeated reports of one state do not move it.
        if record.state is not to:
            now = self._clock()
            # A long healthy period ends a series of failures: the engine gets all its restarts again. An engine that hangs is
            # suspect or stale before it is dead, so this is looked at whenever it ceases to be healthy.
            if record.state is EngineState.HEALTHY and now - record.since >= self.limits.stable_s:
                record.recent_restarts = record.recent_recoveries = 0
            record.state, record.since = to, now
        if reason:
            record.reason = reason
        return record

"""Which engine may serve: a state machine per engine, with an injected clock. Pure: no task, no engine, no sleep.

    add ──> STARTING ──started──> STALE ──caught_up──> HEALTHY <──answered── SUSPECT
               ^                   ^  ^                 │   │ └───silent───────^ │
               │ restarting        │  └─missed_update───┘   │                    │ silent once too often
               └───────────────── DEAD <───────died─────────┴────────────────────┘         any ──retire──> RETIRED

Only a HEALTHY engine gets requests. A SUSPECT one keeps those that it has. An engine that came back, or was added, is
STALE until it holds the current weights: what a returned engine would otherwise serve is an old policy under a new name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum


class EngineState(StrEnum):
    """Where an engine is in its life; the module's picture has the transitions."""

    STARTING = "starting"
    STALE = "stale"  # alive, without the current weights
    HEALTHY = "healthy"
    SUSPECT = "suspect"  # it did not answer lately
    DEAD = "dead"
    RETIRED = "retired"  # taken out on purpose; for good


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """When patience ends.

    Args:
        max_failed_probes: health probes in a row that an engine may miss before it counts as dead.
        max_restarts: of a dead engine; further deaths are final until it has been healthy for ``stable_s`` seconds.
        backoff_s: wait before the first recovery (a restart, or catching up); doubles up to ``max_backoff_s``.
    """

    max_failed_probes: int = 3
    max_restarts: int = 3
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0
    stable_s: float = 300.0


@dataclass(slots=True)
class EngineRecord:
    """What the fleet knows about one engine. ``reason`` says why it is not healthy; times are the fleet's clock."""

    state: EngineState
    since: float
    reason: str = ""
    failed_probes: int = 0
    restarts: int = 0
    lives: int = 1  # how often it was started: what is reported of an earlier life must not hit the present one
    attempts: int = 0  # recoveries begun since it was healthy for stable_s
    recovery_at: float | None = None


class Fleet:
    """The engines by number. A transition that the picture does not have raises ``ValueError``: a bug of the caller."""

    def __init__(self, clock: Callable[[], float], limits: FleetLimits | None = None) -> None:
        self._clock = clock
        self._limits = limits or FleetLimits()
        self._records: dict[int, EngineRecord] = {}

    def add(self, engine: int) -> None:
        """A new engine, about to start."""
        if engine in self._records:
            raise ValueError(f"engine {engine} is in the fleet already")
        self._records[engine] = EngineRecord(EngineState.STARTING, self._clock())

    def record(self, engine: int) -> EngineRecord:
        """The engine's record; read it, do not write."""
        return self._records[engine]

    def state(self, engine: int) -> EngineState:
        """The engine's state."""
        return self._records[engine].state

    @property
    def states(self) -> dict[int, EngineState]:
        """Every engine's state, by number."""
        return {engine: record.state for engine, record in self._records.items()}

    @property
    def hopeful(self) -> bool:
        """Whether an engine serves, or may serve again without anybody's help."""
        return any(
            record.state not in (EngineState.DEAD, EngineState.RETIRED) or record.recovery_at is not None
            for record in self._records.values()
        )

    # Events -------------------------------------------------------------------------------------------------------

    def started(self, engine: int) -> None:
        """It takes requests, but its weights are not the current ones."""
        record = self._move(engine, EngineState.STALE, {EngineState.STARTING})
        record.recovery_at = self._clock()

    def caught_up(self, engine: int) -> None:
        """It holds the current weights."""
        record = self._move(engine, EngineState.HEALTHY, {EngineState.STALE})
        record.failed_probes = 0
        record.recovery_at = None
        record.reason = ""

    def missed_update(self, engine: int, reason: str) -> None:
        """It is alive but could not take the current weights (this time, or again)."""
        record = self._move(
            engine, EngineState.STALE, {EngineState.HEALTHY, EngineState.SUSPECT, EngineState.STALE}, reason
        )
        self._schedule(record)

    def answered(self, engine: int) -> None:
        """A probe came back."""
        record = self._records[engine]
        record.failed_probes = 0
        if record.state is EngineState.SUSPECT:
            record.reason = ""
            self._move(engine, EngineState.HEALTHY, {EngineState.SUSPECT})

    def silent(self, engine: int, reason: str) -> bool:
        """A probe did not come back in time. Returns whether that makes the engine dead."""
        record = self._records[engine]
        record.failed_probes += 1
        if record.failed_probes >= self._limits.max_failed_probes:
            self.died(engine, reason)
            return True
        if record.state is EngineState.HEALTHY:
            self._move(engine, EngineState.SUSPECT, {EngineState.HEALTHY}, reason)
        return False

    def died(self, engine: int, reason: str) -> None:
        """It is gone. A death that was known already changes nothing."""
        record = self._records[engine]
        if record.state in (EngineState.DEAD, EngineState.RETIRED):
            return
        lasted = self._clock() - record.since
        if record.state is EngineState.HEALTHY and lasted >= self._limits.stable_s:
            record.restarts = record.attempts = 0
        self._move(engine, EngineState.DEAD, set(EngineState) - {EngineState.RETIRED}, reason)
        record.failed_probes = 0
        if record.restarts < self._limits.max_restarts:
            self._schedule(record)
        else:
            record.recovery_at = None

    def restarting(self, engine: int) -> None:
        """It is being started again."""
        record = self._move(engine, EngineState.STARTING, {EngineState.DEAD})
        record.restarts += 1
        record.lives += 1
        record.recovery_at = None

    def catching_up(self, engine: int) -> None:
        """The current weights are on their way to it; :meth:`caught_up` or :meth:`missed_update` follows."""
        if self.state(engine) is not EngineState.STALE:
            raise ValueError(f"engine {engine} is {self.state(engine)}, not stale")
        self._records[engine].recovery_at = None

    def retire(self, engine: int) -> None:
        """It is taken out for good. Idempotent."""
        record = self._records[engine]
        record.state, record.since, record.recovery_at = EngineState.RETIRED, self._clock(), None

    # What is due --------------------------------------------------------------------------------------------------

    def due(self) -> list[int]:
        """Stale and dead engines whose next recovery is due."""
        now = self._clock()
        return [e for e, r in self._records.items() if r.recovery_at is not None and r.recovery_at <= now]

    def next_due_at(self, except_for: Collection[int] = ()) -> float | None:
        """When the next recovery is due; None when none is planned."""
        planned = (r.recovery_at for engine, r in self._records.items() if engine not in except_for)
        return min((at for at in planned if at is not None), default=None)

    def _schedule(self, record: EngineRecord) -> None:
        delay = min(self._limits.backoff_s * 2**record.attempts, self._limits.max_backoff_s)
        record.attempts += 1
        record.recovery_at = self._clock() + delay

    def _move(self, engine: int, to: EngineState, allowed: set[EngineState], reason: str = "") -> EngineRecord:
        record = self._records[engine]
        if record.state not in allowed:
            raise ValueError(f"engine {engine} is {record.state} and cannot become {to}")
        if record.state is not to:
            record.state, record.since = to, self._clock()
        if reason:
            record.reason = reason
        return record

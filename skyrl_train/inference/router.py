"""Which engine serves a request: sticky per session, least outstanding for new sessions (SEMANTICS 2.8). Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

MAX_SESSIONS = 65_536  # remembered; beyond it the longest unused ones are forgotten and routed anew


class Lease(NamedTuple):
    """One request's place on an engine. An engine that left and came back is another incarnation."""

    engine: int
    incarnation: int


class Router:
    """Routes over engine numbers. An engine that leaves moves its own sessions and no others.

    A session that was moved stays where it was moved to when its old engine returns: its cached prefix is there.
    """

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._outstanding: dict[int, int] = {}
        self._incarnations: dict[int, int] = {}
        self._held: set[int] = set()
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._max_sessions = max_sessions

    @property
    def routed(self) -> list[int]:
        """The engines that take requests."""
        return sorted(self._outstanding.keys() - self._held)

    def __contains__(self, engine: int) -> bool:
        return engine in self._outstanding and engine not in self._held

    def add(self, engine: int) -> None:
        """``engine`` takes requests from now on."""
        if engine in self._outstanding:
            raise ValueError(f"engine {engine} is in the routing already")
        self._outstanding[engine] = 0
        self._incarnations[engine] = self._incarnations.get(engine, 0) + 1

    def acquire(self, session_id: str | None) -> Lease | None:
        """Picks an engine and counts the request on it; None when no engine is left."""
        engine = None if session_id is None else self._sessions.get(session_id)
        if engine is None or engine not in self:
            engine = min(self.routed, key=lambda index: (self._outstanding[index], index), default=None)
        if engine is None:
            return None
        if session_id is not None:
            self._sessions[session_id] = engine
            self._sessions.move_to_end(session_id)
            if len(self._sessions) > self._max_sessions:
                self._sessions.popitem(last=False)
        self._outstanding[engine] += 1
        return Lease(engine, self._incarnations[engine])

    def release(self, lease: Lease) -> None:
        """The request has left the engine (which may have left the routing meanwhile, and come back)."""
        engine = lease.engine
        if engine in self._outstanding and lease.incarnation == self._incarnations[engine]:
            self._outstanding[engine] -= 1
            if self._outstanding[engine] < 0:
                raise ValueError(f"engine {engine} released more requests than it acquired")

    def hold(self, engine: int) -> None:
        """``engine`` takes no new requests for now, and keeps those that it has. Idempotent."""
        self._held.add(engine)

    def let(self, engine: int) -> None:
        """The end of :meth:`hold`: with what it still has, it is as loaded as it is."""
        self._held.discard(engine)

    def remove(self, engine: int) -> None:
        """``engine`` takes no more requests, and those that it had are elsewhere. Idempotent."""
        self._outstanding.pop(engine, None)
        self._held.discard(engine)

"""Which engine serves a request: sticky per session, least outstanding requests for new sessions. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

MAX_SESSIONS = 65_536  # remembered; beyond it the longest unused ones are forgotten and routed anew


class RequestSlot(NamedTuple):
    """One request's slot on an engine. ``joins`` counts how often the engine had joined the routing."""

    engine: int
    joins: int


class Router:
    """Routes over engine numbers. When an engine leaves, only its own sessions move.

    A session that was moved stays on its new engine when the old one returns: its cached prefix is there.

    Attributes:
        routed: the engines that take requests, in ascending order.
    """

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        # A tuple that each change replaces: callers may keep it across an await, and every request reads it.
        self.routed: tuple[int, ...] = ()
        self._outstanding: dict[int, int] = {}  # draining engines included
        self._joins: dict[int, int] = {}
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._max_sessions = max_sessions

    def add(self, engine: int) -> None:
        """Route requests to ``engine`` from now on."""
        if engine in self._outstanding:
            raise ValueError(f"engine {engine} is in the routing already")
        self._outstanding[engine] = 0
        self._joins[engine] = self._joins.get(engine, 0) + 1
        self.routed = tuple(sorted((*self.routed, engine)))

    def acquire(self, session_id: str | None) -> RequestSlot | None:
        """Pick an engine and count the request on it. Returns None when no engine is left."""
        engine = None if session_id is None else self._sessions.get(session_id)
        if engine is None or engine not in self.routed:
            # The engine number breaks ties, so that routing is deterministic.
            engine = min(self.routed, key=lambda index: (self._outstanding[index], index), default=None)
        if engine is None:
            return None
        if session_id is not None:
            self._sessions[session_id] = engine
            self._sessions.move_to_end(session_id)
            if len(self._sessions) > self._max_sessions:  # forget the session that was used longest ago
                self._sessions.popitem(last=False)
        self._outstanding[engine] += 1
        return RequestSlot(engine, self._joins[engine])

    def release(self, slot: RequestSlot) -> None:
        """Free the slot of a request that has left its engine."""
        engine = slot.engine
        # The engine may have left and joined again: then its count began anew, without this request.
        if engine in self._outstanding and slot.joins == self._joins[engine]:
            self._outstanding[engine] -= 1
            if self._outstanding[engine] < 0:
                raise ValueError(f"engine {engine} released more requests than it acquired")

    def drain(self, engine: int) -> None:
        """Send ``engine`` no new requests; it keeps those that it has. Idempotent."""
        self.routed = tuple(other for other in self.routed if other != engine)

    def undrain(self, engine: int) -> None:
        """Undo :meth:`drain`. Outstanding requests still count towards the engine's load."""
        if engine in self._outstanding and engine not in self.routed:
            self.routed = tuple(sorted((*self.routed, engine)))

    def remove(self, engine: int) -> None:
        """Take ``engine`` out; its requests are elsewhere. Idempotent."""
        self.drain(engine)
        self._outstanding.pop(engine, None)

"""Which engine serves a request: sticky per session, least outstanding for new sessions (SEMANTICS 2.8). Pure."""

from __future__ import annotations

from collections import OrderedDict

MAX_SESSIONS = 65_536  # remembered; beyond it the longest unused ones are forgotten and routed anew


class Router:
    """Routes over engine indices. An engine that leaves moves its own sessions and no others."""

    def __init__(self, num_engines: int, max_sessions: int = MAX_SESSIONS) -> None:
        self._outstanding = dict.fromkeys(range(num_engines), 0)
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._max_sessions = max_sessions

    @property
    def living(self) -> list[int]:
        """The engines that take requests."""
        return list(self._outstanding)

    def acquire(self, session_id: str | None) -> int | None:
        """Picks an engine and counts the request on it; None when no engine is left."""
        if not self._outstanding:
            return None
        engine = None if session_id is None else self._sessions.get(session_id)
        if engine is None or engine not in self._outstanding:
            engine = min(self._outstanding, key=lambda index: (self._outstanding[index], index))
        if session_id is not None:
            self._sessions[session_id] = engine
            self._sessions.move_to_end(session_id)
            if len(self._sessions) > self._max_sessions:
                self._sessions.popitem(last=False)
        self._outstanding[engine] += 1
        return engine

    def release(self, engine: int) -> None:
        """The request has left ``engine`` (which may have left the routing meanwhile)."""
        if engine in self._outstanding:
            self._outstanding[engine] -= 1
            if self._outstanding[engine] < 0:
                raise ValueError(f"engine {engine} released more requests than it acquired")

    def remove(self, engine: int) -> None:
        """``engine`` takes no more requests. Idempotent."""
        self._outstanding.pop(engine, None)

"""All sessions of an endpoint: who may open one, whose key is whose, and when one is forgotten."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from skyrl_train.errors import QuotaError, SessionError
from skyrl_train.inference.chat.renderer import ChatRenderer
from skyrl_train.inference.sessions.keys import KeyRing
from skyrl_train.inference.sessions.limits import SessionLimits
from skyrl_train.inference.sessions.session import Session
from skyrl_train.inference.sessions.single_flight import KeptFlights
from skyrl_train.inference.sessions.statistics import SessionTotals

_SESSION_ID = re.compile(r"[!-~]{1,200}")


@dataclass(frozen=True, slots=True)
class OpenedSession:
    """A new session and the key that names it; the key cannot be had again."""

    session: Session
    api_key: str = field(repr=False)


class SessionStore:
    """Keeps sessions until they are closed or idle for too long.

    Args:
        admission: asked before a session is opened, unless it is reserved; seconds to wait, or None to go ahead. This is
            where the staleness budget pushes back.
        clock: seconds, for idle sessions and late retries.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        limits: SessionLimits | None = None,
        admission: Callable[[], float | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._renderer = renderer
        self._limits = limits or SessionLimits()
        self._admission = admission
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._reserved: set[str] = set()
        self._next_sweep = clock() + self._limits.idle_expiry_s
        self._keys = KeyRing()
        self._kept = KeptFlights(self._limits.max_kept_responses, self._limits.retry_window_s, clock)
        self._totals = SessionTotals()

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def totals(self) -> SessionTotals:
        """What all sessions did so far (a copy)."""
        return replace(self._totals)

    def open(self, session_id: str | None = None, *, reserved: bool = False) -> OpenedSession:
        """Opens a session under a given or a random name.

        Args:
            reserved: its opener has admitted it already, bounds how many there are, and closes it: it asks nobody, takes
                no place, and does not expire.

        Raises:
            QuotaError: all places are taken, or admission says to wait.
            SessionError: the name is taken, or is no name.
        """
        if session_id is None:
            session_id = f"session-{secrets.token_hex(8)}"
        elif not _SESSION_ID.fullmatch(session_id):
            raise SessionError(f"{session_id!r:.80} cannot name a session; use 1 to 200 printable ASCII characters.")
        elif session_id in self._sessions:
            raise SessionError(f"Session {session_id!r} exists already. Close it, or take another name.")
        if reserved:
            self._reserved.add(session_id)
        else:
            self._admit()
        session = Session(
            session_id, self._renderer, self._limits, clock=self._clock, kept=self._kept, totals=self._totals
        )
        self._sessions[session_id] = session
        self._totals.opened += 1
        return OpenedSession(session, self._keys.issue(session_id))

    def by_key(self, api_key: str) -> Session | None:
        """The session that a key names; None for a key that is wrong or whose session is closed."""
        owner = self._keys.owner(api_key)
        return None if owner is None else self._sessions[owner]

    def get(self, session_id: str) -> Session | None:
        """The session of that name, finished or not; None when there is none (any more)."""
        return self._sessions.get(session_id)

    def finish(self, session_id: str, reward: float | None = None) -> Session:
        """Ends a session and wakes whoever waits for it. It stays until it is closed.

        Raises:
            SessionError: no such session, or it has finished with another reward.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionError(f"There is no session {session_id!r:.80}: it was never opened, was closed, or expired.")
        session.finish(reward)
        return session

    def close(self, session_id: str) -> None:
        """Forgets a session and its key; no error where there is none."""
        self._drop(session_id, "was closed")

    def expire(self) -> list[str]:
        """Drops sessions that had no request for ``idle_expiry_s``, finished ones too; returns their names.

        Reserved ones stay. Happens by itself when a session is opened: when all places are taken, and otherwise once per
        ``idle_expiry_s``.
        """
        self._kept.expire()
        now = self._clock()
        self._next_sweep = now + self._limits.idle_expiry_s
        before = now - self._limits.idle_expiry_s
        idle = [
            session.id
            for session in self._sessions.values()
            if session.last_used <= before and not session.single_flight.running and session.id not in self._reserved
        ]
        for session_id in idle:
            self._drop(session_id, f"expired after {self._limits.idle_expiry_s:g} s without a request")
        self._totals.expired += len(idle)
        return idle

    def _admit(self) -> None:
        if self._clock() >= self._next_sweep:
            self.expire()
        wait_s = None if self._admission is None else self._admission()
        if wait_s is not None:
            self._totals.refused += 1
            raise QuotaError("Training has to catch up before a new sample may begin.", retry_after_s=wait_s)
        if len(self._sessions) - len(self._reserved) >= self._limits.max_sessions and not self.expire():
            self._totals.refused += 1
            raise QuotaError(
                f"All {self._limits.max_sessions} sessions (max_sessions) are open. Close one, or come back later.",
                retry_after_s=self._limits.retry_after_s,
            )

    def _drop(self, session_id: str, why: str) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._reserved.discard(session_id)
            self._keys.revoke(session_id)
            session.close(why)

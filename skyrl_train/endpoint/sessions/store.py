"""The sessions of an endpoint: opening, API keys, expiry."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from skyrl_train.endpoint.sessions.deduplicator import CompletedRequests
from skyrl_train.endpoint.sessions.session import Session, SessionLimits
from skyrl_train.errors import QuotaError, SessionError
from skyrl_train.inference.chat.renderer import ChatRenderer

_SESSION_ID = re.compile(r"[!-~]{1,200}")
_KEY_PREFIX = "sk-"  # some SDKs reject keys that look otherwise


@dataclass(frozen=True, slots=True)
class OpenedSession:
    """A new session and its API key. The key is shown only here."""

    session: Session
    api_key: str = field(repr=False)


class SessionStore:
    """Keeps sessions until they are closed or idle for too long.

    Args:
        admission: called before a session that is not reserved is opened; returns the seconds to wait, or None to admit
            it. The staleness budget throttles outside programs here.
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
        # Keys are looked up by a digest under a secret of this store. The duration of a look-up therefore tells nothing
        # about any key: clients cannot compute digests.
        self._key_secret = secrets.token_bytes(32)
        self._session_of_digest: dict[bytes, str] = {}
        self._digest_of_session: dict[str, bytes] = {}
        self._completed = CompletedRequests(self._limits.max_kept_responses, self._limits.retry_window_s, clock)

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, session_id: str | None = None, *, reserved: bool = False) -> OpenedSession:
        """Open a session with the given or a random name.

        Args:
            reserved: the caller has admitted the session, bounds the number of such sessions and closes them. It skips
                admission, does not count towards ``max_sessions`` and does not expire.

        Raises:
            QuotaError: ``max_sessions`` are open, or admission asks to wait.
            SessionError: the name is in use or invalid.
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
        session = Session(session_id, self._renderer, self._limits, clock=self._clock, completed=self._completed)
        # Registered before the key exists, so that by_key() always finds the session.
        self._sessions[session_id] = session
        api_key = _KEY_PREFIX + secrets.token_urlsafe(32)
        digest = self._key_digest(api_key)
        self._session_of_digest[digest] = session_id
        self._digest_of_session[session_id] = digest
        return OpenedSession(session, api_key)

    def by_key(self, api_key: str) -> Session | None:
        """Return the session of a key; None if the key is wrong or its session is closed."""
        session_id = self._session_of_digest.get(self._key_digest(api_key))
        return None if session_id is None else self._sessions[session_id]

    def get(self, session_id: str) -> Session | None:
        """Return the session of that name, finished or not; None if there is none."""
        return self._sessions.get(session_id)

    def finish(self, session_id: str, reward: float | None = None) -> Session:
        """Finish a session. It stays until it is closed.

        Raises:
            SessionError: there is no such session, or it has finished with another reward.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionError(f"There is no session {session_id!r:.80}: it was never opened, was closed, or expired.")
        session.finish(reward)
        return session

    def close(self, session_id: str, why: str = "was closed") -> None:
        """Drop a session and its key. Does nothing if there is none.

        Code that still holds the session gets a SessionError with ``why``.
        """
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._reserved.discard(session_id)
            del self._session_of_digest[self._digest_of_session.pop(session_id)]
            session.close(why)

    def expire(self) -> list[str]:
        """Drop sessions without a request for ``idle_expiry_s``, finished ones too, and return their names.

        Reserved sessions stay. Opening a session calls this when all places are taken, and otherwise once per
        ``idle_expiry_s``.
        """
        self._completed.expire()
        now = self._clock()
        self._next_sweep = now + self._limits.idle_expiry_s
        before = now - self._limits.idle_expiry_s
        idle = [
            session.id
            for session in self._sessions.values()
            if session.last_used <= before and not session.deduplicator.running and session.id not in self._reserved
        ]
        for session_id in idle:
            self.close(session_id, f"expired after {self._limits.idle_expiry_s:g} s without a request")
        return idle

    def _admit(self) -> None:
        """Raise QuotaError if training has to catch up first, or if ``max_sessions`` are open."""
        # Expiry needs no timer: it runs when sessions are opened, which is when places are needed.
        if self._clock() >= self._next_sweep:
            self.expire()
        wait_s = None if self._admission is None else self._admission()
        if wait_s is not None:
            raise QuotaError("Training has to catch up before a new sample may begin.", retry_after_s=wait_s)
        if len(self._sessions) - len(self._reserved) >= self._limits.max_sessions and not self.expire():
            raise QuotaError(
                f"All {self._limits.max_sessions} sessions (max_sessions) are open. Close one, or come back later.",
                retry_after_s=self._limits.retry_after_s,
            )

    def _key_digest(self, key: str) -> bytes:
        return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), key=self._key_secret, digest_size=32).digest()

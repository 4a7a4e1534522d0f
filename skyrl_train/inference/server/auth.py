"""Who asks: the administrator, a session, or nobody. Keys are compared in constant time and kept as digests only."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from skyrl_train.inference.dialects.errors import DialectError
from skyrl_train.inference.server.settings import ServerSettings, is_loopback
from skyrl_train.inference.sessions.session import Session
from skyrl_train.inference.sessions.store import SessionStore

SESSION_HEADER = "x-session-id"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. Without a session a generation is not recorded."""

    is_admin: bool
    session: Session | None = None

    def may_see(self, session_id: str) -> bool:
        """Whether the caller may know that this session exists."""
        return self.is_admin or (self.session is not None and self.session.id == session_id)


class Authenticator:
    """Turns headers into callers."""

    def __init__(self, settings: ServerSettings, store: SessionStore) -> None:
        self._open = settings.open
        self._store = store
        self._admin_digest = None if settings.admin_key is None else _digest(settings.admin_key)

    def caller(self, headers: Mapping[str, str], *, opens_session: bool = False) -> Caller:
        """Returns who sent ``headers`` (lower-case names).

        Args:
            opens_session: whether a session that the administrator's header names is opened where there is none.

        Raises:
            DialectError: 401 without a valid key.
            QuotaError: the header names a new session, and there is no room for it.
        """
        key = _key(headers)
        if key is not None and (session := self._store.by_key(key)) is not None:
            return Caller(False, session)
        is_admin = key is not None and self._admin_digest is not None and self._matches(key, self._admin_digest)
        if not is_admin and not (self._open and _is_local(headers)):
            raise _unauthorized(key)
        session_id = headers.get(SESSION_HEADER)
        if session_id is None:
            return Caller(True)
        session = self._store.get(session_id)
        if session is None and opens_session:
            session = self._store.open(session_id).session
        return Caller(True, session)

    @staticmethod
    def _matches(key: str, digest: bytes) -> bool:
        return hmac.compare_digest(_digest(key), digest)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _key(headers: Mapping[str, str]) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key")


def _is_local(headers: Mapping[str, str]) -> bool:
    """A page in a browser reaches loopback too, under a name of its own: without keys only local names count."""
    host = headers.get("host", "")
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    return not host or is_loopback(name)


def _unauthorized(key: str | None) -> DialectError:
    if key is None:
        return DialectError(
            "No API key was sent. Send the session's key as 'Authorization: Bearer KEY'.",
            code="missing_api_key",
            status=401,
        )
    return DialectError("The API key is wrong, or its session has ended.", code="invalid_api_key", status=401)

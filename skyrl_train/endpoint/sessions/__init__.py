"""Sessions: the requests of any program and their responses, recorded as training data."""

from skyrl_train.endpoint.sessions.deduplicator import request_key
from skyrl_train.endpoint.sessions.export import SessionSequence
from skyrl_train.endpoint.sessions.session import (
    Session,
    SessionLimits,
    SessionStatistics,
    TurnPlan,
)
from skyrl_train.endpoint.sessions.store import OpenedSession, SessionStore

__all__ = [
    "OpenedSession",
    "Session",
    "SessionLimits",
    "SessionSequence",
    "SessionStatistics",
    "SessionStore",
    "TurnPlan",
    "request_key",
]

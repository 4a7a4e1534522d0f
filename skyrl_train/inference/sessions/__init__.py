"""Sessions: what any program asked of the endpoint, as training data."""

from skyrl_train.inference.sessions.export import SessionSequence
from skyrl_train.inference.sessions.limits import SessionLimits
from skyrl_train.inference.sessions.session import Session, TurnPlan
from skyrl_train.inference.sessions.single_flight import request_key
from skyrl_train.inference.sessions.statistics import SessionStatistics, SessionTotals
from skyrl_train.inference.sessions.store import OpenedSession, SessionStore

__all__ = [
    "OpenedSession",
    "Session",
    "SessionLimits",
    "SessionSequence",
    "SessionStatistics",
    "SessionStore",
    "SessionTotals",
    "TurnPlan",
    "request_key",
]

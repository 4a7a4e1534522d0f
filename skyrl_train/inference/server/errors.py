"""What callers are told when something fails, whatever it was."""

from __future__ import annotations

import logging
from contextvars import ContextVar

from skyrl_train.errors import ConfigError, EngineError, NoEngineError, QuotaError, RequestError, SessionError
from skyrl_train.inference.dialects.errors import DialectError

logger = logging.getLogger(__name__)

NO_ENGINE_RETRY_S = 5.0
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="unknown")  # of the request that this task answers
CLIENT_GONE = 499  # for the metrics: there is nobody to send it to


class ClientGoneError(Exception):
    """The caller closed the connection: its request was cancelled, and nobody reads an answer."""


def as_dialect_error(error: Exception) -> DialectError:
    """The answer to a failed request. What is not the caller's fault is logged, and told without its inside."""
    match error:
        case DialectError():
            return error
        case ClientGoneError():
            return DialectError("The caller has left.", status=CLIENT_GONE)
        case QuotaError():
            return DialectError(str(error), code="rate_limit_exceeded", status=429, retry_after_s=error.retry_after_s)
        case SessionError():
            return DialectError(str(error), code="session_error")
        case RequestError():
            return DialectError(str(error), code="context_length_exceeded")
        case ConfigError():
            return DialectError(str(error), code="unsupported_value")
        case NoEngineError():
            logger.error("request %s failed: %s", REQUEST_ID.get(), error)
            return DialectError(
                "No inference engine can take the request at the moment. Try again later.",
                code="engine_unavailable",
                status=503,
                retry_after_s=NO_ENGINE_RETRY_S,
            )
        case EngineError():
            logger.error("request %s failed in an engine: %s", REQUEST_ID.get(), error)
        case _:
            logger.error("request %s failed", REQUEST_ID.get(), exc_info=error)
    return DialectError(
        "The server failed to answer. Its log has the reason, and x-request-id names this request.",
        code="internal_error",
        status=500,
    )

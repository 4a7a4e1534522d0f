"""Convert exceptions into the error responses that clients receive."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import orjson
from starlette.responses import Response

from skyrl_train.errors import (
    ConfigError,
    EngineError,
    GrammarError,
    NoEngineError,
    QuotaError,
    RequestError,
    SessionError,
)
from skyrl_train.inference.openai.errors import DialectError

logger = logging.getLogger(__name__)

NO_ENGINE_RETRY_S = 5.0
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="unknown")  # the request that the current task serves
CLIENT_GONE = 499  # status in the metrics when the client has disconnected; it is never sent

ErrorBody = Callable[[DialectError], Mapping[str, Any]]  # formats an error in one API dialect


class ClientGoneError(Exception):
    """The client closed the connection. Its request was cancelled and no response is sent."""


def as_dialect_error(error: Exception) -> DialectError:
    """Return the error to send to the client. Server faults are logged and reported without internal details."""
    match error:
        case DialectError():
            return error
        case ClientGoneError():
            return DialectError("The client has disconnected.", status=CLIENT_GONE)
        case QuotaError():
            return DialectError(str(error), code="rate_limit_exceeded", status=429, retry_after_s=error.retry_after_s)
        case SessionError():
            return DialectError(str(error), code="session_error")
        case GrammarError():
            return DialectError(str(error), error.field, "invalid_grammar")
        case RequestError():
            return DialectError(str(error), code="context_length_exceeded")
        # Raised by the renderer and the engines for parameters and messages that they reject.
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
    # The text of an unexpected error may contain paths, prompts or keys, so the client gets a fixed message.
    return DialectError(
        "The server failed to answer. Its log has the reason, and x-request-id names this request.",
        code="internal_error",
        status=500,
    )


def error_response(error: DialectError, error_body: ErrorBody) -> Response:
    """Return the HTTP response for ``error`` in the dialect that ``error_body`` formats."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(orjson.dumps(error_body(error)), error.status, headers, "application/json")

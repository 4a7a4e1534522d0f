"""Errors that callers of the endpoint see. Each dialect formats them in its own shape."""

from __future__ import annotations

from typing import Any

from skyrl_train.errors import SkyRLError

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class DialectError(SkyRLError):
    """A request that cannot be served.

    Args:
        message: tells the caller what to do; contains no server internals.
        param: the wrong request field, as a path (``messages[0].role``).
        code: machine-readable (``invalid_api_key``, ``context_length_exceeded``).
        status: the HTTP status.
        retry_after_s: seconds after which a retry may succeed.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = None,
        *,
        status: int = 400,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        self.retry_after_s = retry_after_s


def openai_error(error: DialectError) -> dict[str, Any]:
    """Return the error in OpenAI's shape, which error events of streams share."""
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}

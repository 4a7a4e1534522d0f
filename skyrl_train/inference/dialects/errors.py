"""What a caller is told when a request cannot be served; each dialect has its own shape for it."""

from __future__ import annotations

from typing import Any

from skyrl_train.errors import SkyRLError

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class DialectError(SkyRLError):
    """A request that is answered with an error.

    Args:
        message: tells the caller what to do; it contains nothing of the server's inside.
        param: the request field that is to blame, as a path (``messages[0].role``).
        code: a word for programs (``invalid_api_key``, ``context_length_exceeded``).
        status: of HTTP.
        retry_after_s: when to try again, where that can help.
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
    """OpenAI's shape, also of an error event inside a stream."""
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}

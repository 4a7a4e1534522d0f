"""One request's connection: its body comes in within limits, and what is done for it ends when it does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.types import Receive

from skyrl_train.inference.dialects.errors import DialectError
from skyrl_train.inference.dialects.fields import MAX_DEPTH
from skyrl_train.inference.server.errors import ClientGoneError

T = TypeVar("T")

LARGE_BODY = 32 << 10  # bytes; reading the fields of so many takes some milliseconds


@dataclass(frozen=True, slots=True)
class Body:
    """A request's body as JSON, and how many bytes it was."""

    fields: dict[str, Any]
    size: int

    async def read_by(self, read: Callable[[dict[str, Any]], T]) -> T:
        """What ``read``, a pure function, makes of the fields; those of a large body do not hold the event loop up."""
        return await asyncio.to_thread(read, self.fields) if self.size > LARGE_BODY else read(self.fields)


async def read_json(request: Request, max_bytes: int, timeout_s: float) -> Body:
    """The body of a request.

    Raises:
        DialectError: as for :func:`read_body` and :func:`parse_json`.
        ClientGoneError: the caller left in the middle.
    """
    raw = await read_body(request, max_bytes, timeout_s)
    content_type = request.headers.get("content-type", "")
    if len(raw) <= LARGE_BODY:
        return Body(parse_json(raw, content_type), len(raw))
    return Body(await asyncio.to_thread(parse_json, raw, content_type), len(raw))


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """The body of a request; never more than ``max_bytes`` of it are held.

    Raises:
        DialectError: 413 too large, 408 too slow.
        ClientGoneError: the caller left in the middle.
    """
    too_large = DialectError(
        f"The body has more than {max_bytes} bytes. Send less, or raise the endpoint's limit.",
        code="request_too_large",
        status=413,
    )
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise too_large
    body = bytearray()
    more = True
    try:
        async with asyncio.timeout(timeout_s):
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        raise DialectError(
            f"The body did not arrive within {timeout_s:g} s.", code="request_timeout", status=408
        ) from None
    return bytes(body)


def parse_json(body: bytes, content_type: str) -> dict[str, Any]:
    """The object in a body.

    Raises:
        DialectError: 415 or 400; not JSON, not UTF-8, not an object.
    """
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise DialectError(
            "The body must be JSON, sent as 'Content-Type: application/json'.",
            code="unsupported_media_type",
            status=415,
        )
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise DialectError(f"The body is not valid JSON in UTF-8: {error}.", code="invalid_json") from None
    if not isinstance(parsed, dict):
        raise DialectError("The body must be a JSON object.", code="invalid_json")
    # What is deep costs brackets; most bodies have too few of them to be looked through.
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _is_deep(parsed):
        raise DialectError(f"The body is nested more than {MAX_DEPTH} levels deep.", code="invalid_json")
    return parsed


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        children = (child for entry in level for child in (entry.values() if isinstance(entry, dict) else entry))
        level = [child for child in children if isinstance(child, dict | list)]
    return bool(level)


class Watch:
    """Interrupts the task inside ``async with`` when its caller leaves, or when the server stops.

    The body must have been read. Raises what interrupted: :class:`ClientGoneError`, or what :meth:`interrupt` was given.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._task: asyncio.Task[Any] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._cancelling = 0
        self._reason: Exception | None = None

    async def __aenter__(self) -> Watch:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        self._watcher = asyncio.create_task(self._until_gone())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._task is not None and self._watcher is not None
        task, self._task = self._task, None
        self._watcher.cancel()
        # Cancelled by this watch and by nobody else: the reason takes the place of the cancellation.
        if self._reason is not None and task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._reason from None

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.interrupt(ClientGoneError())

    def interrupt(self, reason: Exception) -> None:
        """Ends what runs inside with ``reason``."""
        if self._task is not None and self._reason is None:
            self._reason = reason
            self._task.cancel()

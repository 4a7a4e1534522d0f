"""JSON request bodies, and the cancellation of work for a client that disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import orjson
from starlette.types import Receive

from skyrl_train.endpoint.server.errors import ClientGoneError
from skyrl_train.inference.openai.body import MAX_DEPTH
from skyrl_train.inference.openai.errors import DialectError

T = TypeVar("T")

LARGE_BODY = 32 << 10  # bytes; validating larger bodies takes milliseconds, so a thread does it


@dataclass(frozen=True, slots=True)
class Body:
    """A JSON request body and its size in bytes."""

    fields: dict[str, Any]
    size: int

    async def read_by(self, read: Callable[[dict[str, Any]], T]) -> T:
        """Return ``read(fields)``. Calls the pure function ``read`` in a thread when the body is large."""
        return await asyncio.to_thread(read, self.fields) if self.size > LARGE_BODY else read(self.fields)


def parse_json(body: bytes, content_type: str) -> dict[str, Any]:
    """Return the JSON object in ``body``.

    Raises:
        DialectError: 415 for another content type; 400 if it is not UTF-8, not JSON, not an object, or nested too deep.
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
    # Deep nesting needs many brackets. Most bodies have too few, so they skip the level-by-level check.
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        level: list[Any] = [parsed]
        for _ in range(MAX_DEPTH):
            children = (child for entry in level for child in (entry.values() if isinstance(entry, dict) else entry))
            level = [child for child in children if isinstance(child, dict | list)]
        if level:
            raise DialectError(f"The body is nested more than {MAX_DEPTH} levels deep.", code="invalid_json")
    return parsed


class DisconnectWatcher:
    """Cancels the task inside ``async with`` when the client disconnects or the server stops.

    The request body must have been read before. Leaving the block raises :class:`ClientGoneError`, or the error that
    :meth:`interrupt` was given, instead of the cancellation. A watcher can be entered several times, one after another.

    Args:
        receive: ASGI messages of the request.
        active: the set that contains the watcher while it is entered, so that a stopping server can interrupt it.
    """

    def __init__(self, receive: Receive, active: set[DisconnectWatcher]) -> None:
        self._receive = receive
        self._active = active
        self._task: asyncio.Task[Any] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._cancelling = 0
        self._reason: Exception | None = None

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()  # cancellations from outside that are already pending
        self._watcher = asyncio.create_task(self._wait_for_disconnect())
        self._active.add(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._task is not None and self._watcher is not None
        # First stop reacting: an interrupt from here on must not cancel the code after the block.
        self._active.discard(self)
        task, self._task = self._task, None
        self._watcher.cancel()
        # Only a cancellation by this watcher is replaced by its reason; a cancellation from outside stays one.
        if self._reason is not None and task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._reason from None

    async def _wait_for_disconnect(self) -> None:
        # The body is complete; of further ASGI messages only the disconnect matters.
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.interrupt(ClientGoneError())

    def interrupt(self, reason: Exception) -> None:
        """Cancel the watched task; ``reason`` is raised where the block is left. Only the first call has an effect."""
        if self._task is not None and self._reason is None:
            self._reason = reason
            self._task.cancel()

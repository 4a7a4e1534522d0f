"""Limits below the application: on connections, on what comes in outside of bodies, and on readers that stand still."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from skyrl_train.inference.dialects.errors import DialectError, openai_error
from skyrl_train.inference.server.settings import ServerSettings

# The least that a reader must take of what waits for it; slower ones count as standing still.
MIN_READ_BYTES_PER_S = 1024
# How long a body that nobody wants is still read, so that its sender reads the answer before the connection breaks.
LINGER_S = 2.0


@dataclass(frozen=True)
class _Refusal:
    """An answer from below the application, after which the connection is closed."""

    status: int
    reason: str
    body: bytes

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(self.body)).encode()),
            (b"connection", b"close"),
            *([(b"retry-after", b"1")] if self.status == 503 else []),
        ]

    @property
    def raw(self) -> bytes:
        lines = [b"%b: %b\r\n" % header for header in self.headers]
        return f"HTTP/1.1 {self.status} {self.reason}\r\n".encode() + b"".join(lines) + b"\r\n" + self.body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


def _refusal(status: int, reason: str, code: str, message: str) -> _Refusal:
    return _Refusal(status, reason, orjson.dumps(openai_error(DialectError(message, code=code, status=status))))


_TOO_LARGE = _refusal(
    431,
    "Request Header Fields Too Large",
    "headers_too_large",
    "The request's headers are too large. Send less.",
)
_TOO_SLOW = _refusal(
    408, "Request Timeout", "request_timeout", "The request's headers did not arrive in time. Send them at once."
)
_TOO_MANY = _refusal(
    503,
    "Service Unavailable",
    "too_many_connections",
    "As many connections are open as this endpoint takes. Close some, or come back later.",
)


class _Lingering:
    """The application for one request. An answer that comes before the end of the request's body ends the connection.

    The rest of the body is read for a moment and dropped: a connection that is closed with something unread is reset, and
    the answer would be lost on its way.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.cycle: Any = None  # uvicorn's, which knows whether the body has come

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        early = False

        async def send_closing(message: Message) -> None:
            nonlocal early
            if message["type"] == "http.response.start":
                early = bool(self.cycle.more_body) and not self.cycle.disconnected
                self.cycle.keep_alive = self.cycle.keep_alive and not early
            elif early and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await _drop_body(receive)
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        await self._app(scope, receive, send_closing)


async def _drop_body(receive: Receive) -> None:
    try:
        async with asyncio.timeout(LINGER_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


class _LimitedProtocol(HttpToolsProtocol):
    """Uvicorn's protocol with limits that it does not have itself; nothing here needs a key, or looks at one."""

    settings: ServerSettings

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._reading_head = False
        self._beside_body = 0  # bytes since the last of a body: of a head, of trailers; whole packets
        self._packet_had_body = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        if len(self.connections) > self.settings.max_connections:
            self._refuse(_TOO_MANY)
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        self._stop_watching_reader()
        super().connection_lost(exc)

    # What comes in -------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._packet_had_body = False
        super().data_received(data)
        if self.transport.is_closing():
            self._watch_reader()
            return
        if self._is_idle() and self.timeout_keep_alive_task is None:
            self._expect_head()  # a lone line end is no request, but ends uvicorn's own waiting for one
        if self._packet_had_body:
            self._beside_body = 0
            return
        self._beside_body += len(data)
        if self._beside_body > self.settings.max_header_bytes and (self._reading_head or self._reading_body()):
            self._refuse(_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reading_head, self._beside_body = True, 0
        self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading_head:  # trailers are dropped: they would come to the headers of a request that has been let in
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._reading_head = False
        self._head_arrived()
        if not self.flow.write_paused:
            self._stop_watching_reader()  # what it has left of the last answer gets company
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        app = self.app
        lingering = _Lingering(_TOO_LARGE if size > self.settings.max_header_bytes else app)
        self.app = lingering
        super().on_headers_complete()
        self.app, lingering.cycle = app, self.cycle

    def on_body(self, body: bytes) -> None:
        self._packet_had_body = True
        super().on_body(body)

    def _reading_body(self) -> bool:
        return self._cycle is not None and self._cycle.more_body

    def _is_idle(self) -> bool:
        """Whether nothing is answered, and no body comes in."""
        return self._cycle is None or (self._cycle.response_complete and not self.pipeline)

    @property
    def _cycle(self) -> RequestResponseCycle | None:
        return self.cycle  # None before the first request

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.settings.head_timeout_s, self._head_is_late)

    def _head_arrived(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if not self._is_idle():
            self._expect_head()  # half of the next request must not end the answer to this one
        elif self._reading_head:
            self._refuse(_TOO_SLOW)
        elif self.timeout_keep_alive_task is None:  # otherwise uvicorn waits already
            self.transport.close()

    def _refuse(self, refusal: _Refusal) -> None:
        if not self.transport.is_closing():
            if self._is_idle():  # an answer that has begun is cut off instead
                self.transport.write(refusal.raw)
            self.transport.close()
            self._watch_reader()

    # What goes out -------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching_reader()
        if self._is_idle() or self.transport.is_closing():
            self._watch_reader()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_reader()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_reader()

    def _watch_reader(self) -> None:
        """Watches until what waits now has been taken. Nothing may be written meanwhile, except by an answer's last send."""
        waiting = self.transport.get_write_buffer_size()
        if self._write_timer is None and waiting:
            self._write_timer = self.loop.call_later(self.settings.write_timeout_s, self._look_at_reader, waiting)

    def _stop_watching_reader(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _look_at_reader(self, before: int) -> None:
        self._write_timer = None
        waiting = self.transport.get_write_buffer_size()
        if waiting and before - waiting < self.settings.write_timeout_s * MIN_READ_BYTES_PER_S:
            self.transport.abort()  # its application is told that the caller has left
        else:
            self._watch_reader()


def limited_protocol(settings: ServerSettings) -> type[HttpToolsProtocol]:
    """The HTTP protocol with the limits of ``settings``."""
    return type("LimitedHttpProtocol", (_LimitedProtocol,), {"settings": settings})

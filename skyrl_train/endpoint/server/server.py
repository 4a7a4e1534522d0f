"""Uvicorn inside a running event loop, with limits on connections, headers and slow readers.

The server starts no thread and installs no signal handler, because both belong to the trainer.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import orjson
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from skyrl_train.endpoint.server.gateway import Gateway, stopping_error
from skyrl_train.endpoint.server.settings import ServerSettings
from skyrl_train.inference.openai.errors import DialectError, openai_error
from skyrl_train.runtime.listening import bind

BACKLOG = 4096
DATE_S = 1.0  # how often the Date header is updated
EXIT_S = 5.0  # for interrupted requests to send their error
# A reader that takes less than this of the data that waits for it counts as stalled.
MIN_READ_BYTES_PER_S = 1024
# How long an unwanted body is still read, so that its sender receives the response before the connection closes.
LINGER_S = 2.0


PORT_SETTING = "generator.kwargs.endpoint.port (skyrl-train serve: --port)"


class EndpointServer:
    """Serves an application from ``start`` to ``stop``.

    Args:
        app: from :func:`~skyrl_train.endpoint.server.app.create_app`.
    """

    def __init__(self, app: FastAPI) -> None:
        gateway = app.state.gateway
        assert isinstance(gateway, Gateway)
        self._gateway = gateway
        self._app = app
        self._listener: tuple[socket.socket, str] | None = None  # and the base URL
        self._server: _EmbeddedUvicorn | None = None
        self._serving: asyncio.Task[None] | None = None

    def bind(self) -> str:
        """Take the port, and return the base URL as :meth:`start` does. Requests wait for ``start``. Idempotent.

        Raises:
            ConfigError: the address cannot be bound.
        """
        if self._listener is None:
            settings = self._gateway.settings
            listener, url = bind(settings.host, settings.port, PORT_SETTING)
            listener.listen(BACKLOG)
            if settings.public_url is not None:
                url = settings.public_url.replace("{port}", str(listener.getsockname()[1])).rstrip("/")
            self._listener = listener, f"{url}/v1"
        return self._listener[1]

    async def start(self) -> str:
        """Listen, and return the base URL for OpenAI clients (it ends in ``/v1``): the public one, if there is one.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self.bind()
        assert self._listener is not None
        listener, url = self._listener
        settings = self._gateway.settings
        # Headers that reveal the server or trust a proxy are off; logging belongs to the trainer.
        config = uvicorn.Config(
            self._app,
            http=type("LimitedHttpProtocol", (_LimitedProtocol,), {"settings": settings}),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=settings.keep_alive_s,
        )
        self._server = _EmbeddedUvicorn(config)
        # serve() starts to listen in its task; the event tells when connections are accepted.
        self._serving = asyncio.create_task(self._server.serve([listener]), name="endpoint")
        await self._server.listening.wait()
        return url

    async def stop(self, drain_s: float = 10.0) -> None:
        """Reject new generations, wait up to ``drain_s`` seconds for running ones, then interrupt them. Idempotent."""
        listener, self._listener = self._listener, None
        if self._server is None or self._serving is None:
            if listener is not None:
                listener[0].close()
            return
        gateway = self._gateway
        gateway.stopping = True  # new generations get a 503 from here on
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await gateway.changed.wait_until(lambda: not gateway.in_flight)
        # Interrupted requests still send their error, for which shutdown() leaves EXIT_S seconds.
        for watcher in list(gateway.active_watchers):
            watcher.interrupt(stopping_error())
        self._server.exit_requested.set()
        await self._serving
        self._server = self._serving = None


class _EmbeddedUvicorn(uvicorn.Server):
    """Uvicorn that waits for events instead of polling ``should_exit``, and leaves signals alone.

    ``exit_requested`` makes ``serve`` return.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self.exit_requested = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers: signals belong to the owner of the event loop."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def main_loop(self) -> None:
        while not self.exit_requested.is_set():
            await self.on_tick(0)  # updates the Date header
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_S):
                    await self.exit_requested.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close listeners and idle connections; running requests have ``EXIT_S`` seconds to finish."""
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()  # closes idle connections, others after their response
        if self.server_state.tasks:
            _, late = await asyncio.wait(self.server_state.tasks, timeout=EXIT_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # a stalled reader would keep it open


# Limits below the application -------------------------------------------------------------------------------------


class _Rejection:
    """A response that the protocol sends itself (``raw``); the connection is closed after it. Also an ASGI application."""

    def __init__(self, status: int, reason: str, code: str, message: str) -> None:
        self.status = status
        self.body = orjson.dumps(openai_error(DialectError(message, code=code, status=status)))
        self.headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(self.body)).encode()),
            (b"connection", b"close"),
        ]
        if status == 503:
            self.headers.append((b"retry-after", b"1"))
        lines = b"".join(b"%b: %b\r\n" % header for header in self.headers)
        self.raw = f"HTTP/1.1 {status} {reason}\r\n".encode() + lines + b"\r\n" + self.body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


_HEADERS_TOO_LARGE = _Rejection(
    431,
    "Request Header Fields Too Large",
    "headers_too_large",
    "The request's headers are too large. Send less.",
)
_HEADERS_TOO_SLOW = _Rejection(
    408, "Request Timeout", "request_timeout", "The request's headers did not arrive in time. Send them at once."
)
_TOO_MANY_CONNECTIONS = _Rejection(
    503,
    "Service Unavailable",
    "too_many_connections",
    "The endpoint has as many open connections as it accepts. Close some, or try again later.",
)


class _LingeringApp:
    """Wraps the application for one request. A response sent before the end of the request's body closes the connection.

    The rest of the body is read for up to ``LINGER_S`` seconds and dropped. Closing a connection with unread data resets
    it, and the client could lose the response.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.cycle: Any = None  # uvicorn's request cycle, which knows whether the body has arrived

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        early = False

        async def send_closing(message: Message) -> None:
            nonlocal early
            if message["type"] == "http.response.start":
                early = bool(self.cycle.more_body) and not self.cycle.disconnected
                if early:  # uvicorn closes the connection because of the header; it writes none of its own before 0.54
                    message = {**message, "headers": [*message.get("headers", []), (b"connection", b"close")]}
            elif early and not message.get("more_body", False):
                await send({**message, "more_body": True})
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LINGER_S):
                        while (part := await receive())["type"] != "http.disconnect" and part.get("more_body", False):
                            pass
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        await self._app(scope, receive, send_closing)


class _LimitedProtocol(HttpToolsProtocol):
    """Uvicorn's HTTP protocol with limits that uvicorn lacks. It runs before authentication and never looks at keys."""

    settings: ServerSettings

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._reading_head = False
        self._bytes_outside_body = 0  # received since the last part of a body: headers or trailers, in whole packets
        self._packet_had_body = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        # self.connections is uvicorn's set of all open connections, this one included.
        if len(self.connections) > self.settings.max_connections:
            self._reject(_TOO_MANY_CONNECTIONS)
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        self._stop_watching_reader()
        super().connection_lost(exc)

    # Incoming data ---------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._packet_had_body = False
        super().data_received(data)
        if self.transport.is_closing():
            self._watch_reader()
            return
        if self._is_idle() and self.timeout_keep_alive_task is None:
            self._expect_head()  # a lone line end is not a request, but it stops uvicorn's keep-alive timer
        if self._packet_had_body:
            self._bytes_outside_body = 0
            return
        self._bytes_outside_body += len(data)
        # Trailers and the lines between chunks count too: they would otherwise be unlimited.
        reading_body = self._cycle is not None and self._cycle.more_body
        if self._bytes_outside_body > self.settings.max_header_bytes and (self._reading_head or reading_body):
            self._reject(_HEADERS_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reading_head, self._bytes_outside_body = True, 0
        self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading_head:  # drops trailers, which would change the headers of a request already authenticated
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._reading_head = False
        self._cancel_head_timer()
        if not self.flow.write_paused:
            self._stop_watching_reader()  # more data will join what is left of the last response
        # As on the wire: each header line has ": " and a line end.
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        app = self.app
        lingering = _LingeringApp(_HEADERS_TOO_LARGE if size > self.settings.max_header_bytes else app)
        self.app = lingering  # uvicorn hands self.app to the cycle that it creates here
        super().on_headers_complete()
        self.app, lingering.cycle = app, self.cycle

    def on_body(self, body: bytes) -> None:
        self._packet_had_body = True
        super().on_body(body)

    def _is_idle(self) -> bool:
        """Return whether no request is being received or answered."""
        return self._cycle is None or (self._cycle.response_complete and not self.pipeline)

    @property
    def _cycle(self) -> RequestResponseCycle | None:
        return self.cycle  # None before the first request, unlike its annotation

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.settings.head_timeout_s, self._on_head_timeout)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if not self._is_idle():
            self._expect_head()  # a half-sent next request must not end the response to this one
        elif self._reading_head:
            self._reject(_HEADERS_TOO_SLOW)
        elif self.timeout_keep_alive_task is None:  # otherwise uvicorn's timer closes the connection
            self.transport.close()

    def _reject(self, rejection: _Rejection) -> None:
        if not self.transport.is_closing():
            if self._is_idle():  # a response that has begun is cut off instead
                self.transport.write(rejection.raw)
            self.transport.close()
            self._watch_reader()

    # Outgoing data ---------------------------------------------------------------------------------------------------

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
        """Disconnect the client unless it takes the waiting data in time.

        Nothing else may be written meanwhile except by the last send of a response: new data would hide a stalled reader.
        """
        waiting = self.transport.get_write_buffer_size()
        if self._write_timer is None and waiting:
            self._write_timer = self.loop.call_later(self.settings.write_timeout_s, self._check_reader, waiting)

    def _stop_watching_reader(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _check_reader(self, before: int) -> None:
        self._write_timer = None
        waiting = self.transport.get_write_buffer_size()
        if waiting and before - waiting < self.settings.write_timeout_s * MIN_READ_BYTES_PER_S:
            self.transport.abort()  # the application receives http.disconnect
        else:
            self._watch_reader()

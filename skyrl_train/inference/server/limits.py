"""Limits below the application: how large a request's head may grow."""

from __future__ import annotations

import orjson
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from skyrl_train.inference.dialects.errors import DialectError, openai_error

_TOO_LARGE = orjson.dumps(
    openai_error(DialectError("The request's headers are too large. Send less.", code="headers_too_large", status=431))
)
_HEADERS = [
    (b"content-type", b"application/json"),
    (b"content-length", str(len(_TOO_LARGE)).encode()),
    (b"connection", b"close"),
]
_RAW = b"".join(
    [
        b"HTTP/1.1 431 Request Header Fields Too Large\r\n",
        *(b"%b: %b\r\n" % header for header in _HEADERS),
        b"\r\n",
        _TOO_LARGE,
    ]
)


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 431, "headers": _HEADERS})
    await send({"type": "http.response.body", "body": _TOO_LARGE, "more_body": False})


def limited_protocol(max_header_bytes: int) -> type[HttpToolsProtocol]:
    """Uvicorn's HTTP protocol, with a limit on the bytes of request line and headers (it has none itself)."""

    class LimitedHttpProtocol(HttpToolsProtocol):
        _reading_head = False
        _head_bytes = 0  # of the head being read, so far; whole packets, so that the rest of a body may count with it

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self._reading_head:
                return
            self._head_bytes += len(data)
            if self._head_bytes > max_header_bytes and not self.transport.is_closing():
                self.transport.write(_RAW)
                self.transport.close()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._reading_head, self._head_bytes = True, 0

        def on_headers_complete(self) -> None:
            self._reading_head = False
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            app = self.app
            if size > max_header_bytes:
                self.app = _refuse
            super().on_headers_complete()
            self.app = app

    return LimitedHttpProtocol

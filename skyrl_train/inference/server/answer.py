"""One request to generate, from its headers to the last byte of its answer. Every dialect's route returns an Answer.

    headers ──> caller ──> slot ──> body ──prepare──> Job ──whole / pieces──> engines
                 401        429      400 413                     │
    what fails before the first byte is an HTTP error, afterwards an error event

A caller that leaves cancels the generation; with a session, a retry of the same request joins it (SEMANTICS 2.9).
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from skyrl_train.inference.dialects.errors import DialectError
from skyrl_train.inference.server import sse
from skyrl_train.inference.server.auth import Caller
from skyrl_train.inference.server.connection import Body, Watch
from skyrl_train.inference.server.errors import ClientGoneError, as_dialect_error
from skyrl_train.inference.server.gateway import Gateway, gateway_of
from skyrl_train.inference.sessions.single_flight import request_key

ErrorShape = Callable[[DialectError], Mapping[str, Any]]
RETRY_HEADER = "x-stainless-retry-count"
_STREAM_HEADERS = [
    (b"content-type", sse.MEDIA_TYPE.encode()),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True)
class Job:
    """A parsed request.

    Args:
        streamed: whether ``pieces`` are sent, or the ``whole``.
        whole: makes the body of the answer.
        pieces: makes the answer in pieces; closing the iterator cancels it.
        failed: what a stream that has begun ends with instead.
    """

    streamed: bool
    whole: Callable[[], Awaitable[bytes]]
    pieces: Callable[[], AsyncIterator[bytes]]
    failed: Callable[[DialectError], bytes]


Prepare = Callable[[Gateway, Caller, Body], Awaitable[Job]]


def error_response(error: DialectError, shape: ErrorShape) -> Response:
    """An error as a response."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(orjson.dumps(shape(error)), error.status, headers, "application/json")


class Answer(Response):
    """Generates while it is being sent."""

    def __init__(self, request: Request, prepare: Prepare, shape: ErrorShape) -> None:
        super().__init__()
        self._request = request
        self._prepare = prepare
        self._shape = shape
        self._gateway = gateway_of(request)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            caller = self._gateway.caller(self._request, opens_session=True)
            with self._gateway.slot():
                body = await self._gateway.body(self._request)
                job = await self._prepare(self._gateway, caller, body)
                key = b"" if caller.session is None else await body.read_by(self._key)
                with self._gateway.watch(self._request.receive) as watch:
                    if job.streamed:
                        await self._send_pieces(job, self._pieces(job, caller, key), watch, send)
                        return
                    async with watch:
                        whole = await self._whole(job, caller, key)
                await _send_whole(whole, send)
            return
        except ClientGoneError:
            return
        except Exception as error:
            response = error_response(as_dialect_error(error), self._shape)
        await response(scope, receive, send)

    async def _whole(self, job: Job, caller: Caller, key: bytes) -> bytes:
        if caller.session is None:
            return await job.whole()
        return await caller.session.single_flight.run(key, job.whole, is_retry=self._is_retry)

    def _pieces(self, job: Job, caller: Caller, key: bytes) -> AsyncIterator[bytes]:
        if caller.session is None:
            return job.pieces()
        return caller.session.single_flight.stream(key, job.pieces, is_retry=self._is_retry)

    @property
    def _is_retry(self) -> bool:
        return self._request.headers.get(RETRY_HEADER, "0") != "0"

    def _key(self, fields: dict[str, Any]) -> bytes:
        return request_key(self._request.url.path, fields)

    async def _send_pieces(self, job: Job, pieces: AsyncIterator[bytes], watch: Watch, send: Send) -> None:
        """Sends pieces as fast as the reader takes them: the next one is asked for when the last one has gone.

        The response begins with the first piece, so that what fails before is an HTTP error. A reader that stands still is
        cut off by its connection (:mod:`~skyrl_train.inference.server.limits`), which the watch tells.
        """
        try:
            async with watch:
                first = await anext(pieces)
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            try:
                async with watch:
                    await send(_body(first))
                    async for piece in pieces:
                        await send(_body(piece))
            except ClientGoneError:
                raise
            except Exception as error:
                await send(_body(job.failed(as_dialect_error(error))))
            await send(_body(b"", more=False))
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]


async def _send_whole(whole: bytes, send: Send) -> None:
    """Returns when the reader has taken nearly all of it, or was cut off: until then its place is not another's."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(whole)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send(_body(whole))
    await send(_body(b"", more=False))


def _body(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}

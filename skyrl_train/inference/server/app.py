"""The application: routes, and around them what every request gets, whatever becomes of it.

request ──Envelope──> FastAPI routes ──> Answer (generations) or a plain response
           │ x-request-id, metrics
           └ errors that nothing else has shaped
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skyrl_train import __version__
from skyrl_train.errors import SkyRLError
from skyrl_train.inference.chat_service import ChatService
from skyrl_train.inference.client import RequestClient
from skyrl_train.inference.dialects.errors import DialectError, openai_error
from skyrl_train.inference.server.answer import error_response
from skyrl_train.inference.server.errors import CLIENT_GONE, REQUEST_ID, ClientGoneError, as_dialect_error
from skyrl_train.inference.server.gateway import Gateway
from skyrl_train.inference.server.openapi import with_security
from skyrl_train.inference.server.routes import ROUTERS
from skyrl_train.inference.server.settings import ServerSettings
from skyrl_train.inference.sessions.store import SessionStore

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def create_app(
    service: ChatService,
    client: RequestClient,
    store: SessionStore,
    settings: ServerSettings | None = None,
) -> FastAPI:
    """The endpoint as an ASGI application; :class:`~skyrl_train.inference.server.endpoint.EndpointServer` serves it.

    Args:
        service: samples everything, completions too.
        client: its engines' states, adapters, tokenizer and renderer are what the endpoint shows.
    """
    settings = settings or ServerSettings()
    gateway = Gateway(service, client, store, settings)
    app = FastAPI(
        title="skyrl_train inference endpoint",
        version=__version__,
        docs_url="/docs" if settings.docs else None,
        redoc_url=None,
        openapi_url="/openapi.json",
    )
    app.state.gateway = gateway
    for router in ROUTERS:
        app.include_router(router)
    with_security(app.openapi())  # FastAPI builds the schema once and keeps it
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(SkyRLError, _on_error)
    app.add_exception_handler(ClientGoneError, _on_error)
    app.add_middleware(Envelope, gateway=gateway)
    return app


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    match error.status_code:
        case 404:
            told = DialectError(f"There is no route {request.url.path!r:.200}.", code="not_found", status=404)
        case 405:
            told = DialectError(
                f"This route does not take {request.method!r:.20}.", code="method_not_allowed", status=405
            )
        case status:
            told = DialectError(str(error.detail), status=status)
    response = error_response(told, openai_error)
    response.headers.update(error.headers or {})
    return response


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(as_dialect_error(error), openai_error)


class Envelope:
    """Gives every request an id, counts it, and answers for what failed unforeseen. Looks at no body and no key."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._metrics = gateway.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the server leaves the body of its answer out
        request_id = _request_id(scope)
        REQUEST_ID.set(request_id.decode())
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        started = time.perf_counter()
        try:
            with self._metrics.answering():
                await self._app(scope, receive, send_with_id)
        except Exception as error:
            if not status:
                await error_response(as_dialect_error(error), openai_error)(scope, receive, send_with_id)
            logger.error("request %s failed", request_id.decode(), exc_info=error)
        finally:
            self._metrics.answered(_route(scope), status or CLIENT_GONE, time.perf_counter() - started)


def _route(scope: Scope) -> str:
    route: Any = scope.get("route")
    return "unknown" if route is None else str(route.path)


def _request_id(scope: Scope) -> bytes:
    """The caller's own id where it is a sane one, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value.decode("latin-1")):
            return bytes(value)
    return secrets.token_hex(16).encode()

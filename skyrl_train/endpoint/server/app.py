"""The FastAPI application of the inference endpoint.

request ──RequestMiddleware──> routes ──> GenerationResponse or a plain JSON response
           │ x-request-id, metrics
           └ error response for exceptions that no route has handled
"""

from __future__ import annotations

import functools
import logging
import re
import secrets
import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skyrl_train.endpoint.server import generation, routes
from skyrl_train.endpoint.server.errors import (
    CLIENT_GONE,
    REQUEST_ID,
    ClientGoneError,
    as_dialect_error,
    error_response,
)
from skyrl_train.endpoint.server.gateway import Gateway
from skyrl_train.endpoint.server.openapi import add_security
from skyrl_train.endpoint.server.settings import ServerSettings
from skyrl_train.endpoint.sessions.store import SessionStore
from skyrl_train.errors import SkyRLError
from skyrl_train.inference.chat.service import ChatService
from skyrl_train.inference.client import RequestClient
from skyrl_train.inference.openai.errors import DialectError, openai_error
from skyrl_train.version import __version__

logger = logging.getLogger(__name__)

TITLE = "skyrl_train inference endpoint"
ROUTERS = (generation.router, routes.router)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def create_app(
    service: ChatService,
    client: RequestClient,
    store: SessionStore,
    settings: ServerSettings | None = None,
) -> FastAPI:
    """Return the endpoint as an ASGI application; :class:`~skyrl_train.endpoint.server.server.EndpointServer` serves it.

    Args:
        service: generates all responses, also for /v1/completions.
        client: provides engine states, LoRA adapters, the tokenizer and the renderer.
    """
    settings = settings or ServerSettings()
    gateway = Gateway(service, client, store, settings)
    app = FastAPI(
        title=TITLE,
        version=__version__,
        docs_url="/docs" if settings.docs else None,
        redoc_url=None,
        openapi_url="/openapi.json",
    )
    app.state.gateway = gateway
    for router in ROUTERS:
        app.include_router(router)
    app.openapi_schema = openapi_schema()
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(SkyRLError, _on_error)
    app.add_exception_handler(ClientGoneError, _on_error)
    app.add_middleware(RequestMiddleware, gateway=gateway)
    return app


@functools.cache
def route_paths() -> frozenset[str]:
    """Return the paths of all routes, with their parameters as in ``/v1/sessions/{session_id}``."""
    return frozenset(route.path_format for router in ROUTERS for route in router.routes if isinstance(route, APIRoute))


@functools.cache  # it takes 0.1 s, and is the same for every application
def openapi_schema() -> dict[str, Any]:
    """Return the OpenAPI document of all routes."""
    document = get_openapi(title=TITLE, version=__version__, routes=[r for router in ROUTERS for r in router.routes])
    add_security(document)
    return document


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Format Starlette's own errors (unknown route, wrong method) like all other errors."""
    assert isinstance(error, HTTPException)
    match error.status_code:
        case 404:
            path = request.url.path
            message = f"There is no route {path!r:.200}."
            # The base URL lacks /v1, or has it where the client adds it.
            near = {f"/v1{path}", path.removeprefix("/v1")} & route_paths()
            if near:
                message += f" {min(near)!r} is one: the base URL ends in /v1 for OpenAI's clients, not for Anthropic's."
            shown = DialectError(message, code="not_found", status=404)
        case 405:
            shown = DialectError(
                f"This route does not take {request.method!r:.20}.", code="method_not_allowed", status=405
            )
        case status:
            shown = DialectError(str(error.detail), status=status)
    response = error_response(shown, openai_error)
    response.headers.update(error.headers or {})
    return response


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(as_dialect_error(error), openai_error)


class RequestMiddleware:
    """Adds ``x-request-id``, records metrics and answers unexpected exceptions. Reads neither bodies nor keys."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._metrics = gateway.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # uvicorn leaves out the body of the response
        # The client's own id if it is safe to log and to send back, otherwise a new one.
        request_id = secrets.token_hex(16).encode()
        for name, value in scope["headers"]:
            if name == b"x-request-id" and _REQUEST_ID.fullmatch(value.decode("latin-1")):
                request_id = bytes(value)
                break
        REQUEST_ID.set(request_id.decode())  # log messages of this task name the request
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        started = time.perf_counter()
        try:
            with self._metrics.in_flight.track_inprogress():
                await self._app(scope, receive, send_with_id)
        except Exception as error:
            if not status:  # a response that has begun cannot become an error response
                await error_response(as_dialect_error(error), openai_error)(scope, receive, send_with_id)
            logger.error("request %s failed", request_id.decode(), exc_info=error)
        finally:
            # The pattern of the route, not the path: see ServerMetrics.
            route = scope.get("route")
            pattern = "unknown" if route is None else str(route.path_format)
            self._metrics.requests.labels(pattern, str(status or CLIENT_GONE)).inc()
            self._metrics.duration.labels(pattern).observe(time.perf_counter() - started)

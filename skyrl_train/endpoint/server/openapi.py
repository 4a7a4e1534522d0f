"""OpenAPI documentation of the routes. The routes read their own bodies, so FastAPI cannot derive it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from skyrl_train.inference.openai.body import RequestBody, body_schema

_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type"],
        }
    },
    "required": ["error"],
}
_STATUSES = {
    400: "The request is invalid or asks for something unsupported; param names the field.",
    401: "The key is missing or wrong.",
    403: "Only the administrator may do this.",
    404: "The model, the session or the response does not exist.",
    405: "The route does not support this method.",
    408: "The body did not arrive in time.",
    409: "The name is in use.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many requests or sessions; Retry-After says when to try again.",
    431: "The headers are too large.",
    500: "An internal error; the server's log has the reason.",
    503: "No engine is available, or the endpoint is stopping; Retry-After says when to try again.",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": _ERROR}}}
    for status, text in _STATUSES.items()
}

# One server-sent event; ``data`` is JSON text, or OpenAI's "[DONE]".
_EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
}


def generation_docs(body: type[RequestBody], summary: str, answer: Sequence[str] = ("id",)) -> dict[str, Any]:
    """Return the decorator arguments of a route that generates: JSON, or events if the body asks for a stream."""
    docs = body_docs(body, summary, answer)
    docs["responses"][200]["content"]["text/event-stream"] = {"schema": _EVENT}
    return docs


def body_docs(body: type[RequestBody], summary: str, answer: Sequence[str], status: int = 200) -> dict[str, Any]:
    """Return the decorator arguments of a route with a JSON body. ``answer`` lists the required response fields."""
    docs = json_docs(summary, answer, status)
    content = {"application/json": {"schema": body_schema(body)}}
    docs["openapi_extra"] = {"requestBody": {"required": True, "content": content}}
    return docs


def json_docs(summary: str, answer: Sequence[str], status: int = 200) -> dict[str, Any]:
    """Return the decorator arguments of a route without a body. ``answer`` lists the required response fields."""
    schema = {"type": "object", "required": list(answer)}
    ok = {"description": "Done.", "content": {"application/json": {"schema": schema}}}
    return {
        "summary": summary,
        "status_code": status,
        "response_class": Response,
        "responses": {**ERRORS, status: ok},
    }


def add_security(schema: dict[str, Any]) -> None:
    """Declare in ``schema`` that every route except /health needs a key."""
    # Both headers carry the same keys: OpenAI's SDKs send the first, Anthropic's the second.
    schemes = {
        "key": {"type": "http", "scheme": "bearer", "description": "A session's key, or the administrator's."},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same."},
    }
    schema.setdefault("components", {})["securitySchemes"] = schemes
    schema["security"] = [{name: []} for name in schemes]
    schema["paths"]["/health"]["get"]["security"] = []

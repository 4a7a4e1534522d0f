"""What the OpenAPI schema says about routes that read their bodies themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from skyrl_train.inference.dialects.fields import Field, object_schema

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
    400: "The request is wrong, or asks for what is not supported; param names the field.",
    401: "The key is missing or wrong.",
    403: "The key is not the administrator's.",
    404: "The model, or the session, does not exist.",
    405: "The route has other methods.",
    408: "The body did not arrive in time.",
    409: "The name is taken.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too much at once; Retry-After says when to come back.",
    431: "The headers are too large.",
    500: "A mistake of the server's; its log has the reason.",
    503: "No engine serves, or the endpoint stops; Retry-After says when to come back.",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": _ERROR}}}
    for status, text in _STATUSES.items()
}


# One event of a stream; ``data`` is JSON text, or OpenAI's "[DONE]".
_EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
}


def generation_docs(fields: Sequence[Field], summary: str) -> dict[str, Any]:
    """Arguments of a route that generates: JSON, or events where the body asks for them."""
    docs = body_docs(fields, summary, ("id",))
    docs["responses"][200]["content"]["text/event-stream"] = {"schema": _EVENT}
    return docs


def body_docs(fields: Sequence[Field], summary: str, answer: Sequence[str], status: int = 200) -> dict[str, Any]:
    """Arguments of a route with a JSON body; ``answer`` names what its response always has."""
    docs = json_docs(summary, answer, status)
    content = {"application/json": {"schema": object_schema(fields)}}
    docs["openapi_extra"] = {"requestBody": {"required": True, "content": content}}
    return docs


def json_docs(summary: str, answer: Sequence[str], status: int = 200) -> dict[str, Any]:
    """Arguments of a route without a body."""
    schema = {"type": "object", "required": list(answer)}
    ok = {"description": "Done.", "content": {"application/json": {"schema": schema}}}
    return {
        "summary": summary,
        "status_code": status,
        "response_class": Response,
        "responses": {**ERRORS, status: ok},
    }


def with_security(schema: dict[str, Any]) -> dict[str, Any]:
    """Says that every route but /health takes a key."""
    schemes = {
        "key": {"type": "http", "scheme": "bearer", "description": "A session's key, or the administrator's."},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same."},
    }
    schema.setdefault("components", {})["securitySchemes"] = schemes
    schema["security"] = [{name: []} for name in schemes]
    schema["paths"]["/health"]["get"]["security"] = []
    return schema

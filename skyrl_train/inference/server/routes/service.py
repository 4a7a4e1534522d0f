"""What is served, how tokens are spelt, and how things are: models, tokenize, detokenize, health, metrics."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from skyrl_train.inference.completion_service import check_vocabulary, encode_text
from skyrl_train.inference.dialects.errors import DialectError
from skyrl_train.inference.dialects.fields import Boolean, Field, Integer, ListOf, Mappings, Support, Text, read_fields
from skyrl_train.inference.dialects.openai_fields import MODEL
from skyrl_train.inference.dialects.openai_messages import MESSAGES, TOOLS
from skyrl_train.inference.dialects.sizes import check_characters
from skyrl_train.inference.fleet import EngineState
from skyrl_train.inference.server.gateway import Gateway, gateway_of
from skyrl_train.inference.server.metrics import CONTENT_TYPE
from skyrl_train.inference.server.openapi import ERRORS, body_docs, json_docs
from skyrl_train.inference.text_length import LONG_TEXT

router = APIRouter()

_MODEL = Field("model", Support.SUPPORTED, MODEL.kind, MODEL.note)
TOKENIZE_FIELDS = (
    _MODEL,
    Field("prompt", Support.SUPPORTED, Text(), "a text"),
    Field("messages", Support.SUPPORTED, MESSAGES, "or a conversation, rendered as for an answer"),
    Field("tools", Support.SUPPORTED, TOOLS, "with messages"),
    Field("chat_template_kwargs", Support.SUPPORTED, Mappings(), "with messages"),
    Field("add_special_tokens", Support.SUPPORTED, Boolean(), "with a prompt; default true"),
)
DETOKENIZE_FIELDS = (
    _MODEL,
    Field("tokens", Support.SUPPORTED, ListOf(Integer(0, 2**31 - 1)), "special ones are written out", required=True),
)


@router.get("/v1/models", **json_docs("The names that requests may give.", ("object", "data")))
async def list_models(request: Request) -> Response:
    gateway = gateway_of(request)
    gateway.caller(request)
    return _json({"object": "list", "data": [_model(gateway, name) for name in gateway.model_names]})


@router.get("/v1/models/{model}", **json_docs("One of them.", ("id", "object")))
async def retrieve_model(request: Request, model: str) -> Response:
    gateway = gateway_of(request)
    gateway.caller(request)
    gateway.adapter(model)
    return _json(_model(gateway, model))


@router.post("/tokenize", **body_docs(TOKENIZE_FIELDS, "Text, or a conversation, as tokens.", ("tokens", "count")))
async def tokenize(request: Request) -> Response:
    gateway = gateway_of(request)
    values = await _read(gateway, request, TOKENIZE_FIELDS)
    if ("prompt" in values) == ("messages" in values):
        raise DialectError("Give exactly one of prompt and messages.", "prompt", "invalid_value")
    if "messages" in values:
        tokens = await gateway.service.render(
            values["messages"],
            tools=values.get("tools", ()),
            template_kwargs=values.get("chat_template_kwargs", {}),
        )
    else:
        check_characters(values["prompt"], gateway.client.capabilities.max_model_len, "prompt")
        special = values.get("add_special_tokens", True)
        tokens = await encode_text(gateway.client, values["prompt"], special)
    limit = gateway.client.capabilities.max_model_len
    return _json({"tokens": tokens, "count": len(tokens), "max_model_len": limit})


@router.post("/detokenize", **body_docs(DETOKENIZE_FIELDS, "Tokens as text.", ("prompt",)))
async def detokenize(request: Request) -> Response:
    gateway = gateway_of(request)
    values = await _read(gateway, request, DETOKENIZE_FIELDS)
    tokens, tokenizer = values["tokens"], gateway.client.tokenizer
    check_vocabulary(gateway.client, tokens, "tokens")

    def decode() -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=False))

    return _json({"prompt": await asyncio.to_thread(decode) if len(tokens) > LONG_TEXT else decode()})


@router.get("/health", **json_docs("Whether an engine serves; needs no key.", ("status", "policy_version", "engines")))
async def health(request: Request) -> Response:
    client = gateway_of(request).client
    states = {str(number): str(state) for number, state in client.engine_states.items()}
    serves = EngineState.HEALTHY in client.engine_states.values()
    status = "ok" if serves else "no engine"
    body = {"status": status, "policy_version": client.policy_version, "engines": states}
    return _json(body, 200 if serves else 503)


@router.get(
    "/metrics",
    summary="Counters in Prometheus' text format; for the administrator.",
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **ERRORS},
    response_class=Response,
)
async def metrics(request: Request) -> Response:
    gateway = gateway_of(request)
    if not gateway.caller(request).is_admin:
        raise DialectError("The metrics are the administrator's.", code="admin_only", status=403)
    return Response(gateway.metrics.text(gateway.client, len(gateway.store)), headers={"content-type": CONTENT_TYPE})


async def _read(gateway: Gateway, request: Request, fields: tuple[Field, ...]) -> dict[str, Any]:
    gateway.caller(request)
    values = await (await gateway.body(request)).read_by(lambda body: read_fields(fields, body))
    if "model" in values:
        gateway.adapter(values["model"])
    return values


def _model(gateway: Gateway, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": gateway.started_at,
        "owned_by": "skyrl_train",
        "max_model_len": gateway.client.capabilities.max_model_len,
    }


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")

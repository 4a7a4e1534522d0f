"""Anthropic's messages, and the counting of their tokens."""

from __future__ import annotations

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from skyrl_train.inference.dialects import anthropic_messages
from skyrl_train.inference.server.answer import error_response
from skyrl_train.inference.server.errors import as_dialect_error
from skyrl_train.inference.server.gateway import gateway_of
from skyrl_train.inference.server.openapi import body_docs, generation_docs
from skyrl_train.inference.server.routes.chat import chat_answer

router = APIRouter()


@router.post("/v1/messages", **generation_docs(anthropic_messages.FIELDS, "Answers a conversation, as Anthropic does."))
async def create_message(request: Request) -> Response:
    return chat_answer(request, anthropic_messages)


@router.post(
    "/v1/messages/count_tokens",
    **body_docs(anthropic_messages.COUNT_FIELDS, "How long a conversation's prompt is.", ("input_tokens",)),
)
async def count_tokens(request: Request) -> Response:
    try:
        return Response(orjson.dumps(await _count(request)), media_type="application/json")
    except Exception as error:
        return error_response(as_dialect_error(error), anthropic_messages.error)


async def _count(request: Request) -> dict[str, int]:
    gateway = gateway_of(request)
    caller = gateway.caller(request)
    call = await (await gateway.body(request)).read_by(anthropic_messages.parse_count)
    gateway.adapter(call.model)
    prompt, _ = await gateway.service.prompt(call.request, caller.session)
    return anthropic_messages.count_response(len(prompt))

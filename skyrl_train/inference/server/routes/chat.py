"""Chat, in whichever dialect: one job for all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from skyrl_train.inference.chat.requests import ChatResult
from skyrl_train.inference.dialects import openai_chat
from skyrl_train.inference.dialects.dialect import ChatDialect, Frame
from skyrl_train.inference.server.answer import Answer, Job, Prepare
from skyrl_train.inference.server.auth import Caller
from skyrl_train.inference.server.connection import Body
from skyrl_train.inference.server.gateway import Gateway
from skyrl_train.inference.server.openapi import generation_docs
from skyrl_train.inference.server.sse import encode

router = APIRouter()


@router.post("/v1/chat/completions", **generation_docs(openai_chat.FIELDS, "Answers a conversation."))
async def create_chat_completion(request: Request) -> Response:
    return chat_answer(request, openai_chat)


def chat_answer(request: Request, dialect: ChatDialect) -> Response:
    """What the route of a chat dialect returns."""
    return Answer(request, chat_job(dialect), dialect.error)


def chat_job(dialect: ChatDialect) -> Prepare:
    """Reads bodies of one dialect, and answers in it."""

    async def prepare(gateway: Gateway, caller: Caller, body: Body) -> Job:
        call = await body.read_by(dialect.parse)
        request = gateway.chat_request(call.model, call.request)
        context = gateway.context()
        stream = call.stream(context)

        async def whole() -> bytes:
            result = await gateway.service.complete(request, caller.session)
            _count(gateway, result)
            return orjson.dumps(call.response(result, context))

        async def pieces() -> AsyncIterator[bytes]:
            opening: list[Frame] = stream.opened()
            events = gateway.service.stream(request, caller.session)
            prompt, sampled = 0, 0
            try:
                async for event in events:
                    frames = opening + stream.event(event)
                    opening = []
                    if event.choice is not None:
                        prompt = len(event.choice.generation.prompt_token_ids)
                        sampled += len(event.choice.generation.token_ids)
                    if frames:
                        yield encode(frames)
            finally:
                await events.aclose()
            gateway.metrics.tokens(prompt, sampled)
            yield encode(stream.closed())

        return Job(call.streamed, whole, pieces, lambda error: encode(stream.failed(error)))

    return prepare


def _count(gateway: Gateway, result: ChatResult) -> None:
    gateway.metrics.tokens(len(result.prompt_token_ids), result.completion_tokens)

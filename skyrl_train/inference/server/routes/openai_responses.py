"""OpenAI's responses."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from skyrl_train.inference.dialects import openai_responses
from skyrl_train.inference.dialects.openai_responses_history import SessionResponses
from skyrl_train.inference.server.answer import Answer, Job
from skyrl_train.inference.server.auth import Caller
from skyrl_train.inference.server.connection import Body
from skyrl_train.inference.server.gateway import Gateway
from skyrl_train.inference.server.openapi import generation_docs
from skyrl_train.inference.server.routes.chat import chat_job

router = APIRouter()


@router.post("/v1/responses", **generation_docs(openai_responses.FIELDS, "Answers a conversation, item by item."))
async def create_response(request: Request) -> Response:
    return Answer(request, _prepare, openai_responses.error)


async def _prepare(gateway: Gateway, caller: Caller, body: Body) -> Job:
    history = None if caller.session is None else gateway.response_histories.of(caller.session)
    return await chat_job(SessionResponses(history))(gateway, caller, body)

"""The older endpoint: text or tokens in, text out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from skyrl_train.inference.completion_service import CompletionRun
from skyrl_train.inference.dialects import openai_completions
from skyrl_train.inference.dialects.errors import openai_error
from skyrl_train.inference.requests import Generation
from skyrl_train.inference.server.answer import Answer, Job
from skyrl_train.inference.server.auth import Caller
from skyrl_train.inference.server.connection import Body
from skyrl_train.inference.server.gateway import Gateway
from skyrl_train.inference.server.openapi import generation_docs
from skyrl_train.inference.server.sse import encode

router = APIRouter()


@router.post("/v1/completions", **generation_docs(openai_completions.FIELDS, "Continues a text, or tokens."))
async def create_completion(request: Request) -> Response:
    return Answer(request, _prepare, openai_error)


async def _prepare(gateway: Gateway, caller: Caller, body: Body) -> Job:
    call = await body.read_by(openai_completions.parse)
    adapter = gateway.adapter(call.model)
    gateway.check_top_logprobs(call.params.top_logprobs, "logprobs")
    context = gateway.context()
    stream = call.stream(context)

    def run() -> CompletionRun:
        return CompletionRun(gateway.client, gateway.service.generation, call, adapter, caller.session)

    async def whole() -> bytes:
        done = await run().complete()
        _count(gateway, done, call.params.n)
        return orjson.dumps(call.response(done, context))

    async def pieces() -> AsyncIterator[bytes]:
        chunks = run().stream()
        done: dict[int, Generation] = {}
        try:
            async for index, chunk in chunks:
                if chunk.generation is not None:
                    done[index] = chunk.generation
                frames = stream.chunk(index, chunk)
                if frames:
                    yield encode(frames)
        finally:
            await chunks.aclose()
        _count(gateway, [done[index] for index in sorted(done)], call.params.n)
        yield encode(stream.closed())

    return Job(call.streamed, whole, pieces, lambda error: encode(stream.failed(error)))


def _count(gateway: Gateway, done: Sequence[Generation], n: int) -> None:
    prompts = sum(len(generation.prompt_token_ids) for generation in done[::n])
    gateway.metrics.tokens(prompts, sum(len(generation.token_ids) for generation in done))

"""Routes that generate: chat completions, completions, responses (OpenAI), messages (Anthropic), tokens (vLLM).

    headers ──> principal ──> slot ──> JSON body ──> parse ──> ChatService, engines ──> JSON or server-sent events
                   401        429       400 413

An error before the first byte of the response becomes an HTTP error, a later one an error event of the stream.
A client that disconnects cancels its generation. Within a session, a retry of the same request joins it instead.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from skyrl_train.endpoint.dialects import anthropic, generate, responses
from skyrl_train.endpoint.dialects.responses_output import ResponsesStream
from skyrl_train.endpoint.server.connection import DisconnectWatcher
from skyrl_train.endpoint.server.errors import ClientGoneError, ErrorBody, as_dialect_error, error_response
from skyrl_train.endpoint.server.gateway import Gateway, gateway_of
from skyrl_train.endpoint.server.openapi import body_docs, generation_docs
from skyrl_train.endpoint.sessions.deduplicator import request_key
from skyrl_train.endpoint.sessions.session import Session
from skyrl_train.inference.openai import chat as openai_chat
from skyrl_train.inference.openai import completions as openai_completions
from skyrl_train.inference.openai.completions import CompletionCall, CompletionRun, CompletionStream
from skyrl_train.inference.openai.dialect import Frame, ResponseContext
from skyrl_train.inference.openai.errors import openai_error
from skyrl_train.inference.requests import Generation

ChatCall = openai_chat.ChatCompletionCall | responses.ResponsesCall | anthropic.MessagesCall
ChatStream = openai_chat.ChatCompletionStream | ResponsesStream | anthropic.MessagesStream

router = APIRouter()

RETRY_HEADER = "x-stainless-retry-count"  # OpenAI's and Anthropic's SDKs count their retries in it
RETRIED = (408, 409, 429)  # and all from 500 on: the statuses after which these SDKs send a request again
# Letters that JSON may have as they are, and at which clients that read lines with Python's splitlines() (httpx) end a line.
LINE_ENDS = [(letter.encode(), b"\\u%04x" % ord(letter)) for letter in "\x85\u2028\u2029"]
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


@router.post(
    "/v1/chat/completions", **generation_docs(openai_chat.ChatCompletionBody, "Generate the reply to a conversation.")
)
async def create_chat_completion(request: Request) -> Response:
    return GenerationResponse(request, openai_chat.parse, openai_error)


@router.post(
    "/v1/responses", **generation_docs(responses.ResponsesBody, "Generate the reply to a conversation, as items.")
)
async def create_response(request: Request) -> Response:
    return GenerationResponse(request, responses.parse_with_history, openai_error, takes_history=True)


@router.post(
    "/v1/messages", **generation_docs(anthropic.MessagesBody, "Generate the reply to a conversation (Anthropic).")
)
async def create_message(request: Request) -> Response:
    return GenerationResponse(request, anthropic.parse, anthropic.error_body)


@router.post("/v1/completions", **generation_docs(openai_completions.CompletionBody, "Continue a text or tokens."))
async def create_completion(request: Request) -> Response:
    return GenerationResponse(request, openai_completions.parse, openai_error)


@router.post(
    "/inference/v1/generate",
    **generation_docs(generate.GenerateBody, "Continue tokens, as vLLM's server does.", ("request_id", "choices")),
)
async def generate_tokens(request: Request) -> Response:
    return GenerationResponse(request, generate.parse, generate.error_body)


@router.post(
    "/v1/messages/count_tokens",
    **body_docs(anthropic.CountTokensBody, "Count the prompt tokens of a conversation (Anthropic).", ("input_tokens",)),
)
async def count_tokens(request: Request) -> Response:
    gateway = gateway_of(request)
    try:
        session = gateway.authenticate(request).session
        if session is not None:
            session.requested = True
        call = await (await gateway.read_body(request)).read_by(anthropic.parse_count)
        gateway.adapter(call.model)
        prompt, _ = await gateway.service.prompt(call.request, session)
        return Response(orjson.dumps({"input_tokens": len(prompt)}), media_type="application/json")
    except Exception as error:
        return error_response(as_dialect_error(error), anthropic.error_body)


class ChatGeneration:
    """A parsed chat request of any dialect."""

    def __init__(self, gateway: Gateway, session: Session | None, call: ChatCall, context: ResponseContext) -> None:
        self._gateway = gateway
        self._call = call
        self._request = gateway.chat_request(call.model, call.request)
        self._session = _recording_session(session, self._request.adapter)
        if session is not None and self._session is None:
            self._request = replace(self._request, session_id=session.id)
        self._context = context
        self.formatter = call.stream(context)

    async def complete(self) -> bytes:
        """Return the JSON body of the response."""
        result = await self._gateway.service.complete(self._request, self._session)
        self._gateway.metrics.count_tokens(len(result.prompt_token_ids), result.completion_tokens)
        body = self._call.response(result, self._context)
        try:
            return orjson.dumps(body)
        except orjson.JSONEncodeError:  # it has no integers beyond 64 bits, and the arguments of a call may
            return json.dumps(body, ensure_ascii=False).encode()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the response as server-sent events. Closing the iterator cancels the generation."""
        events = self._gateway.service.stream(self._request, self._session)
        prompt_tokens = sampled_tokens = 0
        has_opened = False
        try:
            async for event in events:
                # The opening frames wait for the first event, so that errors until then are HTTP errors.
                frames = [] if has_opened else self.formatter.opened(event.chunk.prompt_token_ids or [])
                has_opened = True
                frames += self.formatter.event(event)
                if event.choice is not None:
                    prompt_tokens = len(event.choice.generation.prompt_token_ids)
                    sampled_tokens += len(event.choice.generation.token_ids)
                if frames:
                    yield encode_events(frames)
        finally:
            await events.aclose()
        self._gateway.metrics.count_tokens(prompt_tokens, sampled_tokens)
        yield encode_events(self.formatter.closed())


class CompletionGeneration:
    """A parsed request to /v1/completions or /inference/v1/generate."""

    def __init__(
        self,
        gateway: Gateway,
        session: Session | None,
        call: CompletionCall | generate.GenerateCall,
        context: ResponseContext,
    ) -> None:
        self._gateway = gateway
        self._call = call
        # The same checks as Gateway.chat_request.
        adapter = None if call.model is None else gateway.adapter(call.model)
        gateway.check_params(call.params, "logprobs", call.grammar_field)
        fill = isinstance(call, generate.GenerateCall) and call.fill_context
        run = partial(CompletionRun, gateway.client, gateway.service.generation, call.prompts, call.params, adapter)
        recording, session_id = _recording_session(session, adapter), None if session is None else session.id
        self._start = partial(run, recording, session_id, fill_context=fill, grammar_field=call.grammar_field)
        self._context = context
        self.formatter = call.stream(context)

    async def complete(self) -> bytes:
        """Return the JSON body of the response."""
        done = await self._start().complete()
        self._count_tokens(done)
        return orjson.dumps(self._call.response(done, self._context))

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the response as server-sent events. Closing the iterator cancels the generation."""
        chunks = self._start().stream()
        done: dict[int, Generation] = {}
        try:
            async for index, chunk in chunks:
                if chunk.generation is not None:
                    done[index] = chunk.generation
                if frames := self.formatter.chunk(index, chunk):
                    yield encode_events(frames)
        finally:
            await chunks.aclose()
        self._count_tokens([done[index] for index in sorted(done)])
        yield encode_events(self.formatter.closed())

    def _count_tokens(self, done: list[Generation]) -> None:
        # The n responses to one prompt are adjacent; their prompt counts once.
        prompts = sum(len(generation.prompt_token_ids) for generation in done[:: self._call.params.n])
        self._gateway.metrics.count_tokens(prompts, sum(len(generation.token_ids) for generation in done))


def _recording_session(session: Session | None, adapter: str | None) -> Session | None:
    """Return the session that records a response. What a LoRA adapter samples is no data of the policy, which is trained."""
    return session if adapter is None else None


class GenerationResponse(Response):
    """Authenticates, generates and sends while Starlette sends the response.

    Args:
        parse: converts the JSON body.
        error_body: formats an error in the route's dialect.
        takes_history: ``parse`` takes the stored responses as ``history``.
    """

    def __init__(
        self,
        request: Request,
        parse: Callable[..., ChatCall | CompletionCall | generate.GenerateCall],
        error_body: ErrorBody,
        *,
        takes_history: bool = False,
    ) -> None:
        super().__init__()
        self._request = request
        self._parse = parse
        self._error_body = error_body
        self._takes_history = takes_history
        self._session: Session | None = None
        count = request.headers.get(RETRY_HEADER, "0")
        self._attempt = int(count) if re.fullmatch("[0-9]{1,9}", count) else 0
        self._deduplicated = False  # the session's deduplicator knows the request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._generate(send)
        except ClientGoneError:
            self._refuse()
            return
        except Exception as error:
            told = as_dialect_error(error)
            if told.status in RETRIED or told.status >= 500:
                self._refuse()
            if self._session is not None:
                self._session.refusal = str(told)
            await error_response(told, self._error_body)(scope, receive, send)

    def _refuse(self) -> None:
        # The retry of a request that was never begun must not join an equal one.
        if self._session is not None and not self._deduplicated:
            self._session.deduplicator.refuse(self._attempt)

    async def _generate(self, send: Send) -> None:
        request, gateway = self._request, gateway_of(self._request)
        # Authentication and the slot come before the body: rejecting a request must not cost its upload.
        session = self._session = gateway.authenticate(request, open_session=True).session
        if session is not None:
            session.requested = True
        with gateway.slot():
            body = await gateway.read_body(request)
            parse = self._parse
            if self._takes_history:
                parse = partial(parse, history=gateway.response_history(session))
            call = await body.read_by(parse)
            context = ResponseContext(secrets.token_hex(16), int(time.time()), gateway.token_texts)
            generation: ChatGeneration | CompletionGeneration
            if isinstance(call, CompletionCall | generate.GenerateCall):
                generation = CompletionGeneration(gateway, session, call, context)
            else:
                generation = ChatGeneration(gateway, session, call, context)
            complete, stream = generation.complete, generation.stream
            # Only sessions deduplicate: without one nothing is recorded, so sampling twice does no harm.
            if session is not None:
                key = await body.read_by(partial(request_key, request.url.path))
                self._deduplicated = True
                complete = partial(session.deduplicator.run, key, complete, attempt=self._attempt)
                stream = partial(session.deduplicator.stream, key, stream, attempt=self._attempt)
            # The watcher starts after the body has been read, because both read ASGI messages.
            watcher = DisconnectWatcher(request.receive, gateway.active_watchers)
            if call.streamed:
                await _send_stream(stream(), generation.formatter, watcher, send)
                return
            async with watcher:
                content = await complete()
            # The slot stays taken until the reader has taken nearly all of the response or was cut off.
            length = str(len(content)).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", length)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send(_body(content))
            await send(_body(b"", more=False))


async def _send_stream(
    pieces: AsyncGenerator[bytes, None],
    formatter: ChatStream | CompletionStream | generate.GenerateStream,
    watcher: DisconnectWatcher,
    send: Send,
) -> None:
    """Send ``pieces`` as fast as the client reads: the next piece is requested after the last one has been sent.

    The response starts with the first piece, so that earlier errors are HTTP errors. A client that stops reading is
    disconnected by :mod:`~skyrl_train.endpoint.server.server`, which the watcher notices.
    """
    try:
        async with watcher:
            first = await anext(pieces)  # errors until here become HTTP errors
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        try:
            async with watcher:
                await send(_body(first))
                async for piece in pieces:
                    await send(_body(piece))
        except ClientGoneError:
            raise
        except Exception as error:
            # The status 200 has been sent, so the error becomes the last event.
            await send(_body(encode_events(formatter.failed(as_dialect_error(error)))))
        await send(_body(b"", more=False))
    finally:
        await pieces.aclose()  # cancels the generation if it still runs


def encode_events(frames: Iterable[Frame]) -> bytes:
    """Return ``frames`` as server-sent events."""
    encoded = []
    for frame in frames:
        data = frame.data.encode() if isinstance(frame.data, str) else orjson.dumps(frame.data)
        for letter, escaped in LINE_ENDS:
            data = data.replace(letter, escaped)
        event = b"" if frame.event is None else b"event: %b\n" % frame.event.encode()
        encoded.append(b"%bdata: %b\n\n" % (event, data))
    return b"".join(encoded)


def _body(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}

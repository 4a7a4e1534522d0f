"""The one door to the engines: tokens (``generate``, ``complete``, ``stream``) or OpenAI's bodies, in this process.

chat_completion / completion ──dialect──> ChatService ──> TokenClient ──> engines
generate / complete / stream ──────────────────────────────^
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from functools import cached_property
from typing import Any

from skyrl_train.inference.chat_service import ChatService
from skyrl_train.inference.completion_service import CompletionRun
from skyrl_train.inference.dialects import openai_chat, openai_completions
from skyrl_train.inference.dialects.dialect import ResponseContext
from skyrl_train.inference.dialects.errors import DialectError
from skyrl_train.inference.dialects.tokens import TokenTexts
from skyrl_train.inference.interface import EngineCapabilities
from skyrl_train.inference.requests import Generation, GenerationChunk, GenerationRequest, GenerationService
from skyrl_train.inference.token_client import TokenClient


class InferenceEngineClient(TokenClient):
    """A client that also takes OpenAI's bodies, without HTTP between: for generators in this process.

    The payloads are SkyRL's: ``{"json": body, "headers": headers}``. Headers are not looked at. A body's ``session_id``
    keeps its requests on one engine; with a trajectory's own (``TrajectoryID.to_string()``) they are replayed after a
    resume. What was sampled is recorded by sessions, which belong to the endpoint; here
    ``"return_token_ids": True`` brings the tokens, log-probs and versions with the response.
    """

    async def chat_completion(self, request_payload: Mapping[str, Any]) -> dict[str, Any]:
        """The body of a chat completion's response; see ``docs/tutorials/http_endpoint.md`` for the fields.

        Raises:
            DialectError: the body is wrong, or asks for what is not supported (streams included).
            RequestError: the conversation does not fit the context.
        """
        body, generation = self._read(request_payload)
        call = openai_chat.parse(body)
        _refuse_stream(call.streamed)
        result = await ChatService(generation, self.renderer).complete(call.request)
        return call.response(result, self._context())

    async def completion(self, request_payload: Mapping[str, Any]) -> dict[str, Any]:
        """The body of a completion's response.

        Raises:
            DialectError: the body is wrong, or asks for what is not supported (streams included).
        """
        body, generation = self._read(request_payload)
        call = openai_completions.parse(body)
        _refuse_stream(call.streamed)
        run = CompletionRun(self, generation, call, adapter=None, session=None)
        return call.response(await run.complete(), self._context())

    def _read(self, request_payload: Mapping[str, Any]) -> tuple[dict[str, Any], GenerationService]:
        """The body without its ``session_id``, and what samples for that session."""
        body = dict(request_payload.get("json") or {})
        session_id = body.pop("session_id", None)
        return body, self if session_id is None else _OfSession(self, str(session_id))

    @cached_property
    def _texts(self) -> TokenTexts:
        return TokenTexts(self.tokenizer)

    def _context(self) -> ResponseContext:
        return ResponseContext(secrets.token_hex(16), int(time.time()), self._texts)


class _OfSession:
    """The client, for the requests of one session."""

    def __init__(self, client: TokenClient, session_id: str) -> None:
        self._client = client
        self._session_id = session_id

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._client.capabilities

    @property
    def policy_version(self) -> int:
        return self._client.policy_version

    async def complete(self, request: GenerationRequest) -> Generation:
        return await self._client.complete(dataclasses.replace(request, session_id=self._session_id))

    def stream(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        return self._client.stream(dataclasses.replace(request, session_id=self._session_id))


def _refuse_stream(streamed: bool) -> None:
    if streamed:
        raise DialectError(
            "Streams go over HTTP; in this process use client.stream().", "stream", "unsupported_parameter"
        )

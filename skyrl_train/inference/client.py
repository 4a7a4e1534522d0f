"""The one door to the engines: tokens (``generate``, ``complete``, ``stream``) or OpenAI's bodies, in this process.

chat_completion / completion ──dialect──> ChatService ──> complete ──> TokenClient ──> engines
generate ─────────────────────────────────────────────────^
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from skyrl_train.concurrency import gather_or_cancel
from skyrl_train.errors import ConfigError
from skyrl_train.inference.chat.renderer import ChatRenderer
from skyrl_train.inference.chat_service import ChatService
from skyrl_train.inference.completion_service import CompletionRun
from skyrl_train.inference.dialects import openai_chat, openai_completions
from skyrl_train.inference.dialects.dialect import ResponseContext
from skyrl_train.inference.dialects.errors import DialectError
from skyrl_train.inference.dialects.tokens import TokenTexts
from skyrl_train.inference.fleet import EngineState
from skyrl_train.inference.incremental_text import text_of
from skyrl_train.inference.interface import (
    EngineCapabilities,
    InferenceEngineInput,
    InferenceEngineOutput,
    SamplingParams,
    TokenChunk,
    output_of,
)
from skyrl_train.inference.requests import Generation, GenerationChunk, GenerationRequest, GenerationService
from skyrl_train.inference.token_client import TokenClient

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RequestClient(ABC):
    """What generators and the endpoint have of a client: everything that stands on single responses, wherever these come
    from.

    OpenAI's bodies need no HTTP between. The payloads are SkyRL's: ``{"json": body, "headers": headers}``. Headers are not
    looked at. A body's ``session_id`` keeps its requests on one engine; with a trajectory's own
    (``TrajectoryID.to_string()``) they are replayed after a resume. What was sampled is recorded by sessions, which belong
    to the endpoint; here ``"return_token_ids": True`` brings the tokens, log-probs and versions with the response.
    """

    @property
    @abstractmethod
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""

    @property
    @abstractmethod
    def renderer(self) -> ChatRenderer:
        """Renders and parses conversations for the model that the engines serve."""

    @property
    @abstractmethod
    def capabilities(self) -> EngineCapabilities:
        """What every engine in the routing can do."""

    @property
    @abstractmethod
    def policy_version(self) -> int:
        """The version that every routed engine holds; -1 before the first publication."""

    @property
    @abstractmethod
    def adapters(self) -> Mapping[str, str]:
        """The LoRA adapters that every engine has loaded, with their folders."""

    @property
    @abstractmethod
    def engine_states(self) -> dict[int, EngineState]:
        """Every engine's state, by number."""

    @abstractmethod
    async def complete(self, request: GenerationRequest) -> Generation:
        """Samples one response to its end; see :class:`~skyrl_train.inference.requests.GenerationService`."""

    @abstractmethod
    def stream(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        """Like ``complete``, in pieces. Closing the iterator cancels the request."""

    async def generate(self, input_batch: InferenceEngineInput) -> InferenceEngineOutput:
        """Samples ``n`` responses per prompt; returns when all have ended, whatever happened to the engines meanwhile.

        Prompts come as ``prompt_token_ids`` or as conversations in ``prompts``. With ``n`` > 1 the responses of one prompt
        follow each other in every list of the output. ``priority`` is the oldest policy version that the responses will
        be trained with. With ``detokenize`` False there is no text: ``responses`` are empty strings, and the control
        process saves the time that decoding takes.

        Raises:
            ConfigError: the input names both or neither kind of prompt, or a sampling parameter is impossible.
            RequestError: a prompt is empty or does not fit the context.
            NoEngineError: no engine is left.
        """
        prompts = self._prompt_token_ids(input_batch)
        params = SamplingParams.parse(input_batch.get("sampling_params"))
        session_ids: Sequence[str | None] = input_batch.get("session_ids") or [None] * len(prompts)
        if len(session_ids) != len(prompts):
            raise ConfigError(f"session_ids has {len(session_ids)} entries for {len(prompts)} prompts")
        detokenize = input_batch.get("detokenize", True)
        done = await gather_or_cancel(
            self.complete(
                GenerationRequest(
                    prompt,
                    params,
                    session_id,
                    choice,
                    input_batch.get("adapter"),
                    input_batch.get("priority"),
                    detokenize,
                )
            )
            for prompt, session_id in zip(prompts, session_ids, strict=True)
            for choice in range(params.n)
        )
        return output_of(
            [TokenChunk(g.token_ids, g.logprobs, g.versions, g.stop_reason, g.top_logprobs) for g in done],
            [g.text if detokenize else "" for g in done],
        )

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

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of some tokens, special ones left out."""
        return text_of(self.tokenizer, token_ids)

    def _prompt_token_ids(self, input_batch: InferenceEngineInput) -> list[Sequence[int]]:
        conversations, token_ids = input_batch.get("prompts"), input_batch.get("prompt_token_ids")
        if (conversations is None) == (token_ids is None):
            raise ConfigError("give exactly one of prompts and prompt_token_ids")
        if token_ids is not None:
            return list(token_ids)
        return [self.renderer.render(conversation) for conversation in conversations or ()]

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


class InferenceEngineClient(TokenClient, RequestClient):
    """The client of the engines, in the process that trains."""


class _OfSession:
    """A client, for the requests of one session."""

    def __init__(self, client: RequestClient, session_id: str) -> None:
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

"""Completions: prompts without messages, straight to the engines."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from skyrl_train.concurrency import gather_or_cancel, merged
from skyrl_train.inference.dialects.errors import DialectError
from skyrl_train.inference.dialects.openai_completions import CompletionCall, Prompt
from skyrl_train.inference.dialects.sizes import check_characters
from skyrl_train.inference.interface import SamplingParams
from skyrl_train.inference.requests import (
    Generation,
    GenerationChunk,
    GenerationRequest,
    GenerationService,
)
from skyrl_train.inference.sessions.session import Session, TurnPlan
from skyrl_train.inference.text_length import LONG_TEXT

if TYPE_CHECKING:
    from skyrl_train.inference.client import RequestClient


class CompletionRun:
    """The responses to one call, ``n`` per prompt; each is recorded in the session when it has ended.

    Args:
        generation: samples; what ``client`` is to the chat service.
    """

    def __init__(
        self,
        client: RequestClient,
        generation: GenerationService,
        call: CompletionCall,
        adapter: str | None,
        session: Session | None,
    ) -> None:
        self._client = client
        self._generation = generation
        self._call = call
        self._adapter = adapter
        self._session = session
        self._plans: list[TurnPlan] = []

    async def _begin(self) -> list[GenerationRequest]:
        """The request of every response.

        Raises:
            DialectError: a prompt and ``max_tokens`` do not fit the context.
            SessionError: the session has ended, or all responses, as long as asked for, do not fit its limits.
        """
        session = self._session
        requests = []
        for prompt in self._call.prompts:
            check_characters(prompt if isinstance(prompt, str) else "", self._context, "prompt")
            token_ids = await encode_prompt(self._client, prompt)
            params = self._params(self._call, len(token_ids))
            plan = TurnPlan(token_ids) if session is None else session.plan_completion(token_ids)
            for choice in range(self._call.params.n):
                self._plans.append(plan)
                request = GenerationRequest(plan.prompt_token_ids, params, choice=choice, adapter=self._adapter)
                if session is not None:
                    request = dataclasses.replace(request, session_id=session.id, oldest_version=session.oldest_version)
                requests.append(request)
        self._check_room(len(requests) * self._call.params.max_tokens)
        return requests

    def _check_room(self, sampled_tokens: int) -> None:
        """Checks that the session has room for all responses: for one plan exactly, for several without their prompts."""
        if self._session is not None:
            plan = self._plans[0] if len(self._call.prompts) == 1 else None
            self._session.check_room(len(self._plans), plan=plan, sampled_tokens=sampled_tokens)

    @property
    def _context(self) -> int:
        return self._client.capabilities.max_model_len

    def _params(self, call: CompletionCall, prompt_tokens: int) -> SamplingParams:
        context = self._context
        if prompt_tokens + call.params.max_tokens > context:
            raise DialectError(
                f"The prompt has {prompt_tokens} tokens; with max_tokens={call.params.max_tokens} that is beyond the "
                f"context of {context}.",
                "max_tokens",
                "context_length_exceeded",
            )
        return dataclasses.replace(call.params, n=1)

    async def complete(self) -> list[Generation]:
        """All responses, in order."""
        done = await gather_or_cancel([self._generation.complete(request) for request in await self._begin()])
        self._check_room(sum(len(generation.token_ids) for generation in done))
        for index, generation in enumerate(done):
            self._record(index, generation)
        return done

    async def stream(self) -> AsyncGenerator[tuple[int, GenerationChunk], None]:
        """The pieces of all responses as they come, with the number of the response. Closing it cancels them."""
        pieces = merged([self._generation.stream(request) for request in await self._begin()])
        try:
            async for index, chunk in pieces:
                if chunk.generation is not None:
                    self._record(index, chunk.generation)
                yield index, chunk
        finally:
            await pieces.aclose()

    def _record(self, index: int, generation: Generation) -> None:
        if self._session is not None:
            self._session.record_completion(self._plans[index], generation)


async def encode_prompt(client: RequestClient, prompt: Prompt) -> list[int]:
    """The tokens of a prompt.

    Raises:
        DialectError: a text without tokens, or a token that is not in the vocabulary.
    """
    if isinstance(prompt, str):
        token_ids = await encode_text(client, prompt)
        if len(token_ids) > 1 and token_ids[-1] == client.tokenizer.eos_token_id:
            token_ids.pop()  # a tokenizer that ends every text by itself would end the prompt before the response
        if not token_ids:
            raise DialectError("The prompt has no tokens.", "prompt", "invalid_value")
        return token_ids
    check_vocabulary(client, prompt, "prompt")
    return prompt


async def encode_text(client: RequestClient, text: str, add_special_tokens: bool = True) -> list[int]:
    """The tokens of a text; a long one does not hold the event loop up."""

    def encode() -> list[int]:
        return list(client.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    return await asyncio.to_thread(encode) if len(text) > LONG_TEXT else encode()


def check_vocabulary(client: RequestClient, token_ids: list[int], param: str) -> None:
    """Raises DialectError for tokens that the model does not have."""
    size = len(client.tokenizer)
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < size:
        unknown = next(token_id for token_id in token_ids if not 0 <= token_id < size)
        raise DialectError(f"{unknown} is no token of the model, which has {size}.", param, "invalid_value")

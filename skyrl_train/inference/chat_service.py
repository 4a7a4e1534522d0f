"""Conversations answered: messages to tokens once, n responses at once, each read as a message.

    ChatRequest ──plan──> prompt tokens ──n times──> GenerationService ──tokens──> parser ──> ChatEvent / ChatResult
                                                                                     │
                                                     session.record <── a choice ────┘ that has ended and was handed over

The prompt of a session's later turn begins with the exact tokens of the earlier ones where the messages extend them.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from skyrl_train.concurrency import gather_or_cancel, merged
from skyrl_train.errors import RequestError
from skyrl_train.inference.chat.messages import AssistantMessage, MessageDelta
from skyrl_train.inference.chat.parsing import ResponseParser
from skyrl_train.inference.chat.renderer import ChatRenderer
from skyrl_train.inference.chat.requests import ChatChoice, ChatEvent, ChatRequest, ChatResult, FinishReason
from skyrl_train.inference.interface import SamplingParams, StopReason
from skyrl_train.inference.requests import Generation, GenerationChunk, GenerationRequest, GenerationService
from skyrl_train.inference.text_length import CHARACTERS_PER_TOKEN, LONG_TEXT, characters

# A long response is read in slices of this many tokens (some milliseconds each), so that the loop turns in between.
_SLICE_TOKENS = 1024
# A long conversation is counted in slices of so many characters, until it is clear that it is too long.
_SLICE_CHARACTERS = 1 << 16
# What is a little too long is rendered, so that the error can tell by how much; what is longer than this is not.
_CONTEXTS_COUNTED = 2


Messages = Sequence[Mapping[str, Any]]


class Plan(Protocol):
    """The prompt of a turn, and how much of it was taken from earlier turns as sampled."""

    @property
    def prompt_token_ids(self) -> list[int]: ...

    @property
    def reused_tokens(self) -> int: ...


class ChatSession(Protocol):
    """What a session does for chat: it plans a turn's prompt and records what was sampled."""

    @property
    def id(self) -> str: ...

    @property
    def oldest_version(self) -> int | None: ...

    def plan(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any],
    ) -> Any: ...

    def check_room(self, responses: int, *, plan: Any, sampled_tokens: int) -> None: ...

    def record(self, plan: Any, choice: ChatChoice) -> int: ...


@dataclasses.dataclass(frozen=True)
class _RenderedPlan:
    """A turn without a session."""

    prompt_token_ids: list[int]
    reused_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class _Turn:
    """A request with its prompt: everything that its choices share."""

    request: ChatRequest
    session: ChatSession | None
    plan: Plan
    tools: tuple[Mapping[str, Any], ...]
    params: SamplingParams

    def generation_request(self, index: int) -> GenerationRequest:
        return GenerationRequest(
            prompt_token_ids=self.plan.prompt_token_ids,
            params=self.params,
            session_id=None if self.session is None else self.session.id,
            choice=index,
            adapter=self.request.adapter,
            oldest_version=None if self.session is None else self.session.oldest_version,
        )

    def record(self, choice: ChatChoice) -> None:
        if self.session is not None:
            self.session.record(self.plan, choice)


class ChatService:
    """Answers conversations with a model's own chat format.

    All methods raise, before anything is sampled:
        ConfigError: a message or a sampling parameter is malformed; the message names it.
        RequestError: the prompt, or the prompt and the tokens asked for, do not fit the context.
        SessionError: all ``n`` choices, as long as they were asked for, do not fit the session's limits.
    """

    def __init__(self, generation: GenerationService, renderer: ChatRenderer) -> None:
        self._generation = generation
        self._renderer = renderer
        renderer.load_parsers()

    @property
    def generation(self) -> GenerationService:
        """What samples."""
        return self._generation

    @property
    def renderer(self) -> ChatRenderer:
        """What renders and parses."""
        return self._renderer

    async def complete(self, request: ChatRequest, session: ChatSession | None = None) -> ChatResult:
        """Returns when all ``n`` choices have ended; then all are recorded.

        If one fails, the others are cancelled and nothing is recorded: the caller sees none of them.
        """
        turn = await self._turn(request, session)
        choices = await gather_or_cancel(self._choice(turn, index) for index in range(request.params.n))
        if session is not None:
            sampled = sum(len(choice.generation.token_ids) for choice in choices)
            session.check_room(len(choices), plan=turn.plan, sampled_tokens=sampled)
        for choice in choices:
            turn.record(choice)
        return ChatResult(turn.plan.prompt_token_ids, tuple(choices), turn.plan.reused_tokens)

    async def stream(self, request: ChatRequest, session: ChatSession | None = None) -> AsyncGenerator[ChatEvent, None]:
        """Yields pieces of all ``n`` choices as they are sampled; malformed requests raise at the first piece.

        The reader pulls: of each choice at most one piece waits here. Closing the iterator cancels every choice that has
        not ended. A choice is recorded when its last piece is handed over.
        """
        turn = await self._turn(request, session)
        events = merged([self._choice_events(turn, index) for index in range(turn.request.params.n)])
        try:
            async for _, event in events:
                if event.choice is not None:
                    turn.record(event.choice)
                yield event
        finally:
            await events.aclose()

    async def prompt(self, request: ChatRequest, session: ChatSession | None = None) -> tuple[list[int], int]:
        """The prompt's tokens, and how many of them were taken from earlier turns as sampled; samples nothing."""
        plan, _ = await self._plan(request, session)
        return plan.prompt_token_ids, plan.reused_tokens

    async def render(
        self, messages: Messages, tools: Messages = (), template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """The tokens of a conversation; a long one does not hold the event loop up."""
        arguments = template_kwargs or {}
        if self._check_characters([messages, tools]) > LONG_TEXT:
            return await asyncio.to_thread(self._renderer.render, messages, tools, arguments)
        return self._renderer.render(messages, tools, arguments)

    async def _plan(
        self, request: ChatRequest, session: ChatSession | None
    ) -> tuple[Plan, tuple[Mapping[str, Any], ...]]:
        tools = () if request.tool_choice == "none" else request.tools
        if self._check_characters([request.messages, tools]) > LONG_TEXT:
            messages = await asyncio.to_thread(self._counted, request.messages, with_answers=session is not None)
        else:
            messages = self._renderer.normalize(request.messages)
        if session is None:
            return _RenderedPlan(await self.render(messages, tools, request.template_kwargs)), tools
        return session.plan(messages, tools, request.template_kwargs), tools

    def _check_characters(self, texts: Any) -> int:
        """How many characters there are, at least up to ``LONG_TEXT``; refuses what no tokenizer fits into the context."""
        context = self._generation.capabilities.max_model_len
        count, most = characters(texts, context * CHARACTERS_PER_TOKEN), context * CHARACTERS_PER_TOKEN
        if count > most:
            raise RequestError(
                f"The conversation has more than {most} characters, which a context of {context} tokens never holds. "
                "Shorten it."
            )
        return count

    def _counted(self, messages: Messages, *, with_answers: bool) -> Messages:
        """Messages in the renderer's shape; refuses what is far beyond the context, and encodes no more than that takes.

        ``with_answers`` counts what the assistant said. Templates may leave it out; sessions keep it.
        """
        messages = self._renderer.normalize(messages)
        counted = [message for message in messages if with_answers or message["role"] != "assistant"]
        context = self._generation.capabilities.max_model_len
        texts = (message.get(key) for message in counted for key in ("content", "reasoning_content"))
        count = 0
        for text in texts:
            if not isinstance(text, str):
                continue
            for start in range(0, len(text), _SLICE_CHARACTERS):
                count += self._renderer.count(text[start : start + _SLICE_CHARACTERS])
                if count > _CONTEXTS_COUNTED * context:
                    raise RequestError(
                        f"The conversation has more than {_CONTEXTS_COUNTED * context} tokens, and the context {context}. "
                        "Shorten the conversation."
                    )
        return messages

    async def _turn(self, request: ChatRequest, session: ChatSession | None) -> _Turn:
        plan, tools = await self._plan(request, session)
        room = self._generation.capabilities.max_model_len - len(plan.prompt_token_ids)
        params = self._params(request, len(plan.prompt_token_ids), room)
        if session is not None:
            n, least = request.params.n, max(params.min_tokens, 1)
            session.check_room(n, plan=plan, sampled_tokens=n * (request.max_tokens or least))
        return _Turn(request, session, plan, tools, params)

    def _params(self, request: ChatRequest, prompt_tokens: int, room: int) -> SamplingParams:
        """One choice's parameters; ``room`` is how many tokens the context has left."""
        params, asked, context = request.params, request.max_tokens, prompt_tokens + room
        if room < 1:
            raise RequestError(
                f"The prompt has {prompt_tokens} tokens and leaves no room in a context of {context} tokens. Shorten "
                "the conversation."
            )
        wanted = max(asked or 1, params.min_tokens)
        if wanted > room:
            raise RequestError(
                f"The prompt has {prompt_tokens} tokens and {wanted} are asked for, beyond the context of {context} "
                f"tokens. Ask for at most {room} or shorten the conversation."
            )
        ends = () if params.ignore_eos else self._renderer.stop_token_ids
        return dataclasses.replace(
            params,
            n=1,
            max_tokens=room if asked is None else asked,
            stop_token_ids=tuple(dict.fromkeys([*params.stop_token_ids, *ends])),
        )

    async def _choice(self, turn: _Turn, index: int) -> ChatChoice:
        generation = await self._generation.complete(turn.generation_request(index))
        parser = self._renderer.parser(turn.plan.prompt_token_ids, turn.tools)
        visible = _visible(generation)
        for start in range(0, len(generation.token_ids), _SLICE_TOKENS):
            if start:
                await asyncio.sleep(0)
            parser.feed(generation.token_ids[start : start + _SLICE_TOKENS], visible)
        return _ended(index, parser.finish(visible)[1], generation)

    async def _choice_events(self, turn: _Turn, index: int) -> AsyncGenerator[ChatEvent, None]:
        parser = self._renderer.parser(turn.plan.prompt_token_ids, turn.tools)
        chunks = self._generation.stream(turn.generation_request(index))
        shown = 0
        try:
            async for chunk in chunks:
                shown += len(chunk.text)
                yield _event(index, parser, chunk, shown if turn.params.stop else None)
        finally:
            await _close(chunks)


def _event(index: int, parser: ResponseParser, chunk: GenerationChunk, visible: int | None) -> ChatEvent:
    if chunk.generation is None:
        return ChatEvent(index, parser.feed(chunk.token_ids, visible), chunk)
    visible = _visible(chunk.generation)
    first = parser.feed(chunk.token_ids, visible)
    last, message = parser.finish(visible)
    delta = MessageDelta(
        first.content + last.content,
        first.reasoning_content + last.reasoning_content,
        first.tool_calls + last.tool_calls,
    )
    return ChatEvent(index, delta, chunk, _ended(index, message, chunk.generation))


def _visible(generation: Generation) -> int | None:
    """Characters before the stop string; None: all of them."""
    return None if generation.stop_string is None else len(generation.text)


def _ended(index: int, message: AssistantMessage, generation: Generation) -> ChatChoice:
    reason: FinishReason = "length" if generation.stop_reason is StopReason.LENGTH else "stop"
    return ChatChoice(index, message, "tool_calls" if message.tool_calls else reason, generation)


async def _close(stream: AsyncIterator[Any]) -> None:
    if isinstance(stream, AsyncGenerator):
        await stream.aclose()

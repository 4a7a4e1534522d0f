"""Answers conversations: renders the messages once, samples n responses, parses each as a message.

    ChatRequest ──plan──> prompt tokens ──n times──> GenerationService ──tokens──> parser ──> ChatEvent / ChatResult
                                                                                     │
                                       session.record <── a finished choice ─────────┘

Where a session's messages extend an earlier turn, the prompt begins with the exact tokens of that turn.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from skyrl_train.errors import RequestError
from skyrl_train.inference.chat.renderer import ChatRenderer
from skyrl_train.inference.chat.requests import (
    AssistantMessage,
    ChatChoice,
    ChatEvent,
    ChatRequest,
    ChatResult,
    FinishReason,
    MessageDelta,
    PromptPlan,
)
from skyrl_train.inference.grammar import check_grammar
from skyrl_train.inference.interface import SamplingParams, StopReason
from skyrl_train.inference.openai.errors import DialectError
from skyrl_train.inference.requests import Generation, GenerationRequest, GenerationService
from skyrl_train.inference.text_length import CHARACTERS_PER_TOKEN, LONG_TEXT, characters, longest_context
from skyrl_train.runtime.concurrency import gather_or_cancel, merged

# A long response is parsed in slices of this many tokens (some milliseconds each), so that the event loop runs in between.
_SLICE_TOKENS = 1024
# Tokens of a long conversation are counted in slices of this many characters, until it is clear that it is too long.
_SLICE_CHARACTERS = 1 << 16
# A conversation of up to this many contexts is rendered, so that the error can tell its length; a longer one is not.
_CONTEXTS_COUNTED = 2

Messages = Sequence[Mapping[str, Any]]


class RecordingSession(Protocol):
    """The part of the endpoint's ``Session`` that chats and completions use.

    A protocol, because the endpoint imports this package and not the reverse.
    """

    @property
    def id(self) -> str: ...

    @property
    def oldest_version(self) -> int | None: ...

    def plan(
        self, messages: Messages, tools: Messages, template_kwargs: Mapping[str, Any], continue_final: bool
    ) -> Any: ...

    def plan_completion(self, prompt_token_ids: Sequence[int]) -> Any: ...

    def check_room(self, responses: int = 1, *, plan: Any = None, sampled_tokens: int = 0) -> None: ...

    def record(self, plan: Any, choice: ChatChoice) -> int: ...

    def record_completion(self, plan: Any, generation: Generation) -> int: ...


@dataclasses.dataclass(frozen=True, slots=True)
class _PlannedTurn:
    """A request with its prompt. ``requests`` has one entry per choice."""

    plan: Any  # the session's, which takes it back with each response; a PromptPlan without a session
    tools: Messages
    prefill: str
    requests: list[GenerationRequest]


class ChatService:
    """Answers conversations with a model's own chat format.

    All methods raise, before anything is sampled:
        ConfigError: a message or a sampling parameter is malformed; the error names it.
        RequestError: the prompt, or the prompt and the requested tokens, do not fit the context.
        GrammarError: the grammar cannot be compiled.
        SessionError: all ``n`` choices, at the requested length, do not fit the session's limits.
    """

    def __init__(self, generation: GenerationService, renderer: ChatRenderer) -> None:
        self.generation = generation
        self.renderer = renderer
        # Import the parsers now: it takes seconds, for which no request should wait.
        import renderers.parsing  # noqa: F401

        renderer.parser(())

    async def complete(self, request: ChatRequest, session: RecordingSession | None = None) -> ChatResult:
        """Return when all ``n`` choices have ended; then record all of them.

        If one fails, the others are cancelled and nothing is recorded, because the caller sees none of them.
        """
        turn = await self._plan_turn(request, session)
        choices = await gather_or_cancel(self._choice(turn, index) for index in range(request.params.n))
        if session is not None:
            # Check all choices before the first is recorded: they are recorded together or not at all.
            sampled = sum(len(choice.generation.token_ids) for choice in choices)
            session.check_room(len(choices), plan=turn.plan, sampled_tokens=sampled)
            for choice in choices:
                session.record(turn.plan, choice)
        return ChatResult(turn.plan.prompt_token_ids, tuple(choices), turn.plan.reused_tokens)

    async def stream(
        self, request: ChatRequest, session: RecordingSession | None = None
    ) -> AsyncGenerator[ChatEvent, None]:
        """Yield pieces of all ``n`` choices as they are sampled. Malformed requests raise at the first piece.

        The reader pulls: at most one piece of each choice is buffered. Closing the iterator cancels every unfinished
        choice. A choice is recorded when its last piece is yielded.
        """
        turn = await self._plan_turn(request, session)
        # Closed below in every case, which cancels the choices that still run.
        events = merged([self._choice_events(turn, index) for index in range(request.params.n)])
        try:
            async for _, event in events:
                if event.choice is not None and session is not None:
                    session.record(turn.plan, event.choice)
                yield event
        finally:
            await events.aclose()

    async def prompt(self, request: ChatRequest, session: RecordingSession | None = None) -> tuple[list[int], int]:
        """Return the prompt's tokens, and how many were taken from earlier turns as sampled. Samples nothing."""
        plan, _ = await self._plan_prompt(request, session)
        return plan.prompt_token_ids, plan.reused_tokens

    async def render(
        self,
        messages: Messages,
        tools: Messages = (),
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final: bool = False,
    ) -> list[int]:
        """Return the tokens of a conversation. A long one is rendered in a thread."""
        arguments = template_kwargs or {}
        if self._count_characters(messages, tools) > LONG_TEXT:
            return await asyncio.to_thread(self.renderer.render, messages, tools, arguments, continue_final)
        return self.renderer.render(messages, tools, arguments, continue_final)

    async def _plan_prompt(self, request: ChatRequest, session: RecordingSession | None) -> tuple[Any, Messages]:
        """Return the plan of the prompt, and the tools that it shows.

        Raises:
            DialectError: ``tool_choice`` asks for a tool that the request does not have.
        """
        names = [tool["function"]["name"] for tool in request.tools]
        missing = next((name for name in request.allowed_tools or () if name not in names), None)
        if missing is not None:
            message = f"tool_choice: the tool {missing!r:.100} is not among the tools."
            raise DialectError(message, "tool_choice", "invalid_value")
        if request.tool_choice == "required" and not names:
            message = "tool_choice: a call is asked for, but there are no tools."
            raise DialectError(message, "tool_choice", "invalid_value")
        # Where only calls are sampled, the grammar leaves out the other tools, and the prompt stays the same.
        tools = request.tools if request.tool_choice == "required" else request.callable_tools
        # Short conversations stay on the loop, because a thread costs more than the work.
        if self._count_characters(request.messages, tools) > LONG_TEXT:
            messages = await asyncio.to_thread(self._normalized, request.messages, with_answers=session is not None)
        else:
            messages = self.renderer.normalize(request.messages)
        arguments, continue_final = request.template_kwargs, request.continue_final
        if session is None:
            return PromptPlan(await self.render(messages, tools, arguments, continue_final)), tools
        return session.plan(messages, tools, arguments, continue_final), tools

    def _count_characters(self, messages: Messages, tools: Messages) -> int:
        """Count characters, at least up to ``LONG_TEXT``; reject text that no tokenizer fits into the context."""
        context = self.generation.capabilities.max_model_len
        most = context * CHARACTERS_PER_TOKEN
        count = characters([messages, tools], most)
        if count > most:
            raise RequestError(
                f"The conversation has more than {most} characters, and {longest_context(context)}. Shorten it."
            )
        return count

    def _normalized(self, messages: Messages, *, with_answers: bool) -> Messages:
        """Normalize long messages; reject those far beyond the context without encoding more than necessary.

        ``with_answers`` counts the assistant's messages too. Templates may leave them out; sessions keep them.
        """
        messages = self.renderer.normalize(messages)
        context = self.generation.capabilities.max_model_len
        count = 0
        for message in messages:
            if message["role"] == "assistant" and not with_answers:
                continue
            for text in (message.get("content"), message.get("reasoning_content")):
                for start in range(0, len(text) if isinstance(text, str) else 0, _SLICE_CHARACTERS):
                    count += len(self.renderer.encode(str(text)[start : start + _SLICE_CHARACTERS]))
                    if count > _CONTEXTS_COUNTED * context:
                        raise RequestError(
                            f"The conversation has more than {_CONTEXTS_COUNTED * context} tokens, and "
                            f"{longest_context(context)}. Shorten the conversation."
                        )
        return messages

    async def _plan_turn(self, request: ChatRequest, session: RecordingSession | None) -> _PlannedTurn:
        plan, tools = await self._plan_prompt(request, session)
        limit = self.generation.max_tokens_of(request.session_id if session is None else session.id)
        if limit is not None and request.adapter is None:  # what is asked for beyond it need not fit the context
            params = dataclasses.replace(request.params, min_tokens=min(request.params.min_tokens, limit))
            max_tokens = None if request.max_tokens is None else min(request.max_tokens, limit)
            request = dataclasses.replace(request, params=params, max_tokens=max_tokens)
        context, prompt_tokens = self.generation.capabilities.max_model_len, len(plan.prompt_token_ids)
        # Reject before sampling: the engines would raise later, after other choices have begun.
        params, room = request.params, context - prompt_tokens
        if room < 1:
            raise RequestError(
                f"The prompt is too long: it has {prompt_tokens} tokens, and {longest_context(context)}. Shorten the "
                "conversation, or raise the context: in a training run, generator.max_input_length."
            )
        wanted = max(request.max_tokens or 1, params.min_tokens)
        if wanted > room:
            raise RequestError(
                f"The prompt has {prompt_tokens} tokens and {wanted} are asked for, and {longest_context(context)}. Ask for at "
                f"most {room} or shorten the conversation."
            )
        params = await self._guided(request, plan.prompt_token_ids)
        if session is not None:
            # Without a requested length, the least that the request can take.
            least = request.max_tokens or max(params.min_tokens, 1)
            session.check_room(params.n, plan=plan, sampled_tokens=params.n * least)
        # A chat format may end a turn with other tokens than the model's end of sequence.
        ends = () if params.ignore_eos else self.renderer.stop_token_ids
        # A grammar allows one call at most, and would take the mark for an end of the answer.
        if request.single_call and tools and params.structured is None:
            ends = (*ends, *self.renderer.end_of_call())
        params = dataclasses.replace(
            params,
            n=1,
            max_tokens=room if request.max_tokens is None else request.max_tokens,
            stop_token_ids=tuple(dict.fromkeys([*params.stop_token_ids, *ends])),
        )
        requests = [
            GenerationRequest(
                prompt_token_ids=plan.prompt_token_ids,
                params=params,
                session_id=request.session_id if session is None else session.id,
                choice=index,
                adapter=request.adapter,
                oldest_version=None if session is None else session.oldest_version,
            )
            for index in range(request.params.n)
        ]
        return _PlannedTurn(plan, tools, request.prefill, requests)

    async def _guided(self, request: ChatRequest, prompt_token_ids: Sequence[int]) -> SamplingParams:
        """Return the sampling parameters with the grammar of the whole response.

        Raises:
            ConfigError: the format of the model's calls has no grammar.
            DialectError: the engines cannot force a call.
            GrammarError: the grammar cannot be compiled.
        """
        params, structured, tools = request.params, request.params.structured, request.callable_tools
        ours = self.generation.capabilities.grammar_continuation
        if request.tool_choice == "required":
            if not ours:
                raise DialectError(
                    "tool_choice: these engines cannot force a call. Ask for the call in a message, or use engines with "
                    "grammars.",
                    "tool_choice",
                    "unsupported_value",
                )
            structured = self.renderer.forced_call(tools)
        if structured is None or not ours:
            return params
        if tools and request.tool_choice == "auto":
            structured = self.renderer.answer_or_call(structured, tools)
        structured = self.renderer.guided(structured, prompt_token_ids, request.prefill, request.template_kwargs)
        # Rules of a call are numbered as the tools in it.
        places = {f"arguments_{n}": f"tools[{request.tools.index(tool)}]" for n, tool in enumerate(tools)}
        await check_grammar(structured, request.grammar_field or "tools", places)
        return dataclasses.replace(params, structured=structured)

    async def _choice(self, turn: _PlannedTurn, index: int) -> ChatChoice:
        generation = await self.generation.complete(turn.requests[index])
        parser = self.renderer.parser(turn.plan.prompt_token_ids, turn.tools, turn.prefill)
        # Text from the stop string on is not part of the message.
        visible = None if generation.stop_string is None else len(generation.text)
        for start in range(0, len(generation.token_ids), _SLICE_TOKENS):
            # Let other requests run between two slices of a long response.
            if start:
                await asyncio.sleep(0)
            parser.feed(generation.token_ids[start : start + _SLICE_TOKENS], visible)
        return _finished_choice(index, parser.finish(visible)[1], generation)

    async def _choice_events(self, turn: _PlannedTurn, index: int) -> AsyncGenerator[ChatEvent, None]:
        request = turn.requests[index]
        parser = self.renderer.parser(turn.plan.prompt_token_ids, turn.tools, turn.prefill)
        chunks = self.generation.stream(request)
        shown, prompt = 0, turn.plan.prompt_token_ids
        try:
            async for chunk in chunks:
                if prompt is not None:
                    chunk, prompt = dataclasses.replace(chunk, prompt_token_ids=prompt), None
                shown += len(chunk.text)
                if chunk.generation is None:
                    # Text beyond ``shown`` may turn out to be a part of a stop string: of the request, or of the run.
                    yield ChatEvent(index, parser.feed(chunk.token_ids, shown), chunk)
                    continue
                visible = None if chunk.generation.stop_string is None else len(chunk.generation.text)
                first = parser.feed(chunk.token_ids, visible)
                last, message = parser.finish(visible)
                delta = MessageDelta(
                    first.content + last.content,
                    first.reasoning_content + last.reasoning_content,
                    first.tool_calls + last.tool_calls,
                )
                yield ChatEvent(index, delta, chunk, _finished_choice(index, message, chunk.generation))
        finally:
            await chunks.aclose()


def _finished_choice(index: int, message: AssistantMessage, generation: Generation) -> ChatChoice:
    reason: FinishReason = "length" if generation.stop_reason is StopReason.LENGTH else "stop"
    return ChatChoice(index, message, "tool_calls" if message.tool_calls else reason, generation)

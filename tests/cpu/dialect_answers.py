"""Sampled messages for the tests of dialects: any message, whole or in pieces, with a token for every character."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

from skyrl_train.inference.chat.requests import (
    AssistantMessage,
    ChatChoice,
    ChatEvent,
    ChatResult,
    FinishReason,
    MessageDelta,
    ToolCall,
    ToolCallDelta,
)
from skyrl_train.inference.interface import StopReason
from skyrl_train.inference.openai.dialect import ResponseContext, TokenTexts
from skyrl_train.inference.openai.errors import DialectError
from skyrl_train.inference.requests import Generation, GenerationChunk

PROMPT = [7, 8, 9]


class Characters(TokenTexts):
    """A vocabulary of characters: a token's id is its character's code point."""

    def __init__(self) -> None:
        pass

    def entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": chr(token_id), "bytes": list(chr(token_id).encode()), "logprob": logprob}


def context(unique: str = "abc123") -> ResponseContext:
    return ResponseContext(unique=unique, created=1_700_000_000, tokens=Characters())


def choice_of(
    message: AssistantMessage, finish_reason: FinishReason | None = None, stop_string: str | None = None
) -> ChatChoice:
    """A choice with this message; its tokens spell reasoning, content and calls one after the other."""
    calls = "".join(f"<{call.name}{call.arguments}>" for call in message.tool_calls)
    spelt = f"({message.reasoning_content or ''}){message.content}{calls}{stop_string or ''}"
    token_ids = [ord(character) for character in spelt]
    generation = Generation(
        prompt_token_ids=PROMPT,
        token_ids=token_ids,
        logprobs=[-place / 8 for place in range(len(token_ids))],
        versions=[3] * len(token_ids),
        stop_reason=StopReason.LENGTH if finish_reason == "length" else StopReason.STOP,
        text=spelt,
        stop_string=stop_string,
        cached_tokens=1,
    )
    reason: FinishReason = finish_reason or ("tool_calls" if message.tool_calls else "stop")
    return ChatChoice(0, message, reason, generation)


def result_of(choice: ChatChoice) -> ChatResult:
    return ChatResult(prompt_token_ids=PROMPT, choices=(choice,), reused_tokens=2)


def deltas_of(message: AssistantMessage, size: int) -> Iterator[MessageDelta]:
    """The message in pieces of at most ``size`` characters."""
    for piece in _cut(message.reasoning_content or "", size):
        yield MessageDelta(reasoning_content=piece)
    for piece in _cut(message.content, size):
        yield MessageDelta(content=piece)
    for index, call in enumerate(message.tool_calls):
        yield MessageDelta(tool_calls=(ToolCallDelta(index, id=call.id, name=call.name),))
        for piece in _cut(call.arguments, size):
            yield MessageDelta(tool_calls=(ToolCallDelta(index, piece),))


def events_of(choice: ChatChoice, deltas: Sequence[MessageDelta]) -> list[ChatEvent]:
    """The events of a streamed answer: all tokens come with the first one, the answer as a whole with the last."""
    done = choice.generation
    first = ChatEvent(0, MessageDelta(), GenerationChunk(done.token_ids, done.logprobs, done.versions))
    last = ChatEvent(0, MessageDelta(), GenerationChunk(generation=done), choice)
    return [first, *(ChatEvent(0, delta, GenerationChunk()) for delta in deltas), last]


def _cut(text: str, size: int) -> Iterator[str]:
    return (text[start : start + size] for start in range(0, len(text), size))


_JSON_OBJECTS = st.dictionaries(
    st.text(max_size=6),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**53), 2**53)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=6),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=5,
    ),
    max_size=3,
)
ARGUMENTS = _JSON_OBJECTS.map(json.dumps) | _JSON_OBJECTS.map(
    lambda value: json.dumps(value, ensure_ascii=False, indent=1)
)
CALLS = st.lists(
    st.builds(ToolCall, st.uuids().map(lambda name: f"call_{name.hex}"), st.text(min_size=1, max_size=8), ARGUMENTS),
    max_size=3,
    unique_by=lambda call: call.id,
).map(tuple)
MESSAGES = st.builds(AssistantMessage, st.text(max_size=12), st.none() | st.text(max_size=12), CALLS)

# JSON that hypothesis makes without knowing any dialect.
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def parsed(dialect: Any, body: dict[str, Any]) -> Any:
    """The call that a dialect parses from a body, or its error."""
    try:
        return dialect.parse(body)
    except DialectError as error:
        return error


@st.composite
def damaged(draw: st.DrawFn, body: dict[str, Any]) -> dict[str, Any]:
    """``body`` with any JSON in one place of it, or in one more field of one of its objects."""
    copy: dict[str, Any] = json.loads(json.dumps(body))
    place: Any = copy
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if isinstance(place, dict):
            keys.append(draw(st.text(max_size=8)))
        if not keys:
            return copy
        key = draw(st.sampled_from(keys))
        inner = place.get(key) if isinstance(place, dict) else place[key]
        if not isinstance(inner, dict | list) or draw(st.booleans()):
            place[key] = draw(ANY_JSON)
            return copy
        place = inner

"""Parses a response into reasoning, content and tool calls while it is sampled.

    tokens ──PieceReader──> pieces ──MessageBuilder──> MessageDelta ... AssistantMessage

The same state machine parses whole responses and streams: the joined deltas are the message, and a delta is never taken
back. No text is lost: a tool call that cannot be parsed stays in the content as written. Only white space next to a mark
is dropped, at the ends of reasoning and content. Without any mark the content is exactly the decoded response.

| state | text goes to | leaves it |
|---|---|---|
| start | content | reasoning mark: reasoning; tool mark: tool; other text: content |
| reasoning | reasoning | closing mark: content; tool mark: held |
| held | undecided | closing mark: all of it was reasoning; the end: calls, if it contains any |
| content | content | tool mark: tool (reasoning comes first or not at all) |
| tool | a block of calls | closing mark: calls if they can be parsed, else content |
| body | a block of calls | the end: one call if it can be parsed, else content |
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from skyrl_train.inference.chat.formats import Block, CallText, MessageFormat, Tools, block_of
from skyrl_train.inference.chat.messages import AssistantMessage, MessageDelta, ToolCall, ToolCallDelta
from skyrl_train.inference.chat.pieces import Mark, Piece, PieceReader

if TYPE_CHECKING:
    from renderers import Renderer

NameCall = Callable[[int, CallText], str]  # position among the calls of a response, call -> its id


class ResponseParser(Protocol):
    """Parses one response. ``visible`` is the number of characters of the decoded response (without special tokens) before
    an actual or possible stop string; None: all of them may be shown."""

    def feed(self, token_ids: Sequence[int], visible: int | None = None) -> MessageDelta:
        """Return the addition of these tokens to the message."""

    def finish(self, visible: int | None = None) -> tuple[MessageDelta, AssistantMessage]:
        """Return the last addition, and the whole message."""


class StreamParser:
    """Parses a response token by token; the module docstring has the rules."""

    def __init__(self, reader: PieceReader, builder: MessageBuilder) -> None:
        self._reader = reader
        self._builder = builder
        self._waiting: deque[Piece] = deque()
        self._shown = 0

    def feed(self, token_ids: Sequence[int], visible: int | None = None) -> MessageDelta:
        for token_id in token_ids:
            self._waiting += self._reader.feed(token_id)
        self._build(visible)
        return self._builder.take()

    def finish(self, visible: int | None = None) -> tuple[MessageDelta, AssistantMessage]:
        # The end decides about held text: it is no part of a mark or a stop string any more.
        self._waiting += self._reader.flush()
        self._build(visible)
        self._waiting.clear()
        message = self._builder.finish()
        return self._builder.take(), message

    def _build(self, visible: int | None) -> None:
        """Pass waiting pieces to the builder, up to the last visible character. Only plain text can be split."""
        while self._waiting:
            piece = self._waiting.popleft()
            # Text beyond ``visible`` may belong to a stop string; it waits until that is decided.
            room = piece.shown if visible is None else visible - self._shown
            if piece.shown > room:
                if room > 0 and piece.mark is None:
                    self._builder.add(Piece(piece.text[:room], room))
                    piece = Piece(piece.text[room:], piece.shown - room)
                    self._shown += room
                self._waiting.appendleft(piece)
                return
            self._builder.add(piece)
            self._shown += piece.shown


class WholeParser:
    """Parses whole responses with the library, for families without a format here. The message comes at the end.

    Args:
        decode: returns the text of tokens without special ones.
    """

    def __init__(
        self,
        renderer: Renderer,
        prompt_token_ids: Sequence[int],
        tools: Tools,
        name_call: NameCall,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._renderer = renderer
        self._prompt = list(prompt_token_ids)
        self._tools = [dict(tool) for tool in tools]
        self._name_call = name_call
        self._decode = decode
        self._token_ids: list[int] = []

    def feed(self, token_ids: Sequence[int], visible: int | None = None) -> MessageDelta:
        self._token_ids += token_ids
        return MessageDelta()

    def finish(self, visible: int | None = None) -> tuple[MessageDelta, AssistantMessage]:
        # The library parses tokens, and a stop string may end inside one: its visible part is added as text.
        ids, rest = self._cut(visible)
        parsed = self._renderer.parse_response(ids, tools=self._tools or None, prompt_ids=self._prompt)
        block = block_of(parsed.tool_calls) if self._tools else Block((), tuple(c.raw for c in parsed.tool_calls))
        thinking = parsed.reasoning_complete is False
        content = "".join([parsed.content, *block.malformed, "" if thinking else rest])
        reasoning = (parsed.reasoning_content or "") + (rest if thinking else "")
        calls = _named(block.calls, self._name_call)
        message = AssistantMessage(content, reasoning.strip() or None, calls)
        pieces = tuple(ToolCallDelta(i, call.arguments, call.id, call.name) for i, call in enumerate(calls))
        return MessageDelta(message.content, message.reasoning_content or "", pieces), message

    def _cut(self, visible: int | None) -> tuple[list[int], str]:
        """Return the tokens before the last visible character, and the visible text of the token that contains it."""
        if visible is None or len(self._decode(self._token_ids)) <= visible:
            return self._token_ids, ""
        # Binary search: the decoded length grows with the number of tokens.
        low, high = 0, len(self._token_ids)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if len(self._decode(self._token_ids[:middle])) <= visible else (low, middle - 1)
        before = self._token_ids[:low]
        shown = len(self._decode(before))
        return before, self._decode(self._token_ids[: low + 1])[shown:visible]


class _State(Enum):
    START = auto()
    REASONING = auto()
    HELD = auto()
    CONTENT = auto()
    TOOL = auto()
    BODY = auto()


class MessageBuilder:
    """Builds a message from pieces."""

    def __init__(self, form: MessageFormat, tools: Tools, name_call: NameCall, *, reasoning_open: bool) -> None:
        self._form = form
        self._tools = tools
        self._name_call = name_call
        self._state = _State.REASONING if reasoning_open else _State.START
        self._content = _Text(trimmed=reasoning_open)
        self._reasoning = _Text(trimmed=True)
        self._block: list[Piece] = []  # the open tool call, or held text
        self._calls: list[ToolCall] = []
        self._sent_calls = 0

    def add(self, piece: Piece) -> None:
        """Add the next piece."""
        if piece.special and self._state is not _State.TOOL:
            return  # the decoded text does not show it either
        match self._state:
            case _State.START | _State.CONTENT:
                self._add_content(piece)
            case _State.REASONING:
                self._add_reasoning(piece)
            case _State.HELD:
                self._block.append(piece)
                if piece.mark is Mark.THINK_END:
                    # The closing mark itself is no text of the reasoning.
                    self._block.pop()
                    self._reasoning.add(self._take_block_text())
                    self._leave_reasoning()
            case _State.TOOL:
                self._block.append(piece)
                if piece.mark is Mark.TOOL_END:
                    self._close_block()
            case _State.BODY:
                self._block.append(piece)

    def _add_content(self, piece: Piece) -> None:
        if self._state is _State.START and piece.mark is Mark.THINK:
            self._state = _State.REASONING
            self._content.trim()
        elif piece.mark is Mark.TOOL:
            self._state = _State.TOOL
            self._block.append(piece)
        elif self._state is _State.START and self._begins_body(piece):
            self._state = _State.BODY
            self._block.append(piece)
        else:
            # White space alone does not decide: a reasoning or tool mark may still follow.
            if not piece.text.isspace():
                self._state = _State.CONTENT
            self._content.add(piece.text)

    def _begins_body(self, piece: Piece) -> bool:
        tools = self._form.tools
        return bool(self._tools) and tools is not None and tools.marks is None and piece.text.lstrip().startswith("{")

    def _add_reasoning(self, piece: Piece) -> None:
        if piece.mark is Mark.THINK_END:
            self._leave_reasoning()
        elif piece.mark is Mark.TOOL:
            self._state = _State.HELD
            self._block.append(piece)
        elif piece.mark is not Mark.THINK:  # both the prompt and the model may open it
            self._reasoning.add(piece.text)

    def _leave_reasoning(self) -> None:
        self._state = _State.CONTENT
        self._content.trim()

    def _take_block_text(self) -> str:
        text = "".join(piece.text for piece in self._block)
        self._block.clear()
        return text

    def _close_block(self) -> None:
        """Parse the block. Without calls it becomes content; text in it that is no call stays visible."""
        # Set first: text after the block is content, also when the block holds no call.
        tools, self._state = self._form.tools, _State.CONTENT
        block = tools.parse(self._block, self._tools) if tools is not None else Block((), ())
        text = self._take_block_text()
        if not block.calls:
            self._content.add(text)
            return
        self._content.trim()
        # Numbered over the whole response: a call's position is part of its id.
        self._calls += _named(block.calls, self._name_call, len(self._calls))
        for attempt in block.malformed:
            self._content.add(attempt)

    def finish(self) -> AssistantMessage:
        """Close the open block and return the message."""
        if self._state is _State.BODY:
            self._close_block()
        elif self._state is _State.HELD:
            self._settle_held()
        self._content.add(self._take_block_text())  # a call without its closing mark may be truncated
        self._content.finish(keep_space=not self._calls)
        return AssistantMessage(self._content.whole, self._reasoning.whole or None, tuple(self._calls))

    def _settle_held(self) -> None:
        """Decide on reasoning that was never closed: calls in it count; without a call it is reasoning."""
        # Parse the held pieces again, this time as content.
        inner = MessageBuilder(self._form, self._tools, self._name_call, reasoning_open=False)
        for piece in self._block:
            inner.add(piece)
        message = inner.finish()
        text = self._take_block_text()
        if message.tool_calls:
            self._leave_reasoning()
            self._content.add(message.content)
            self._calls += message.tool_calls
        else:
            self._reasoning.add(text)

    def take(self) -> MessageDelta:
        """Return the text and calls that became certain since the last call."""
        new = tuple(
            ToolCallDelta(index, call.arguments, call.id, call.name)
            for index, call in enumerate(self._calls[self._sent_calls :], self._sent_calls)
        )
        self._sent_calls = len(self._calls)
        return MessageDelta(self._content.take(), self._reasoning.take(), new)


class _Text:
    """Text that holds back trailing white space until other text follows.

    ``trimmed``: leading white space is dropped.
    """

    def __init__(self, *, trimmed: bool) -> None:
        self._trimmed = trimmed
        self._certain: list[str] = []
        self._space: list[str] = []
        self._taken = 0

    def add(self, text: str) -> None:
        # White space at the end waits: it is dropped if a mark follows, and kept if text does.
        end = len(text.rstrip())
        if end:
            if self._trimmed and not self._certain:
                self._space.clear()
                self._certain.append(text[:end].lstrip())
            else:
                self._certain += [*self._space, text[:end]]
                self._space.clear()
        if end < len(text):
            self._space.append(text[end:])

    def trim(self) -> None:
        """Record that a mark is next to the text."""
        self._trimmed = True

    def finish(self, *, keep_space: bool) -> None:
        if keep_space and (self._certain or not self._trimmed):
            self._certain += self._space
        self._space.clear()

    def take(self) -> str:
        new = "".join(self._certain[self._taken :])
        self._taken = len(self._certain)
        return new

    @property
    def whole(self) -> str:
        return "".join(self._certain)


def _named(calls: Sequence[CallText], name_call: NameCall, first: int = 0) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(call.id or name_call(index, call), call.name, call.arguments)
        for index, call in enumerate(calls, first)
    )


class CallNames:
    """Creates ids for tool calls without one, from the prompt, the call and its position.

    The same conversation gets the same ids; the next turn has another prompt and therefore other ids.
    """

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self._prompt = prompt_token_ids
        self._digest: bytes | None = None

    def __call__(self, index: int, call: CallText) -> str:
        if self._digest is None:
            self._digest = hashlib.blake2b(array("q", self._prompt).tobytes(), digest_size=16).digest()
        said = f"{index}\0{call.name}\0{call.arguments}".encode()
        return f"call_{hashlib.blake2b(said, key=self._digest, digest_size=12).hexdigest()}"

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

import functools
import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING

from skyrl_train.inference.chat.formats import Block, CallText, MessageFormat, Tools, block_of
from skyrl_train.inference.chat.pieces import Mark, Piece, PieceReader
from skyrl_train.inference.chat.requests import AssistantMessage, MessageDelta, ToolCall, ToolCallDelta
from skyrl_train.inference.response_text import text_of

if TYPE_CHECKING:
    from renderers import Renderer
    from transformers import PreTrainedTokenizerBase


class StreamParser:
    """Parses a response token by token; the module docstring has the rules.

    ``visible`` is the number of characters of the decoded response (without special tokens) before an actual or possible
    stop string; None: all of them may be shown.
    """

    def __init__(self, reader: PieceReader, builder: MessageBuilder) -> None:
        self._reader = reader
        self._builder = builder
        self._waiting: deque[Piece] = deque()
        self._shown = 0

    def feed(self, token_ids: Sequence[int], visible: int | None = None) -> MessageDelta:
        """Return the addition of these tokens to the message."""
        for token_id in token_ids:
            self._waiting += self._reader.feed(token_id)
        self._build(visible)
        return self._builder.take()

    def finish(self, visible: int | None = None) -> tuple[MessageDelta, AssistantMessage]:
        """Return the last addition, and the whole message."""
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
    """Parses whole responses with the library, for families without a format here. The message comes at the end."""

    def __init__(
        self, renderer: Renderer, tokenizer: PreTrainedTokenizerBase, prompt_token_ids: Sequence[int], tools: Tools
    ) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._prompt = list(prompt_token_ids)
        self._tools = [dict(tool) for tool in tools]
        self._token_ids: list[int] = []

    def feed(self, token_ids: Sequence[int], visible: int | None = None) -> MessageDelta:
        """Return nothing yet: the library reads whole responses."""
        self._token_ids += token_ids
        return MessageDelta()

    def finish(self, visible: int | None = None) -> tuple[MessageDelta, AssistantMessage]:
        """Return the message, as the only addition and as a whole."""
        # The library parses tokens, and a stop string may end inside one: its visible part is added as text.
        ids, rest = self._cut(visible)
        parsed = self._renderer.parse_response(ids, tools=self._tools or None, prompt_ids=self._prompt)
        block = block_of(parsed.tool_calls) if self._tools else Block((), tuple(c.raw for c in parsed.tool_calls))
        thinking = parsed.reasoning_complete is False
        content = "".join([parsed.content, *block.malformed, "" if thinking else rest])
        reasoning = (parsed.reasoning_content or "") + (rest if thinking else "")
        calls = _with_ids(block.calls, lambda: _digest_of(self._prompt))
        message = AssistantMessage(content, reasoning.strip() or None, calls)
        pieces = tuple(ToolCallDelta(i, call.arguments, call.id, call.name) for i, call in enumerate(calls))
        return MessageDelta(message.content, message.reasoning_content or "", pieces), message

    def _cut(self, visible: int | None) -> tuple[list[int], str]:
        """Return the tokens before the last visible character, and the visible text of the token that contains it."""
        ids = self._token_ids
        if visible is None or len(text_of(self._tokenizer, ids)) <= visible:
            return ids, ""
        # Binary search: the decoded length grows with the number of tokens.
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high + 1) // 2
            fits = len(text_of(self._tokenizer, ids[:middle])) <= visible
            low, high = (middle, high) if fits else (low, middle - 1)
        shown = len(text_of(self._tokenizer, ids[:low]))
        return ids[:low], text_of(self._tokenizer, ids[: low + 1])[shown:visible]


ResponseParser = StreamParser | WholeParser


class _ParserState(Enum):
    START = auto()
    REASONING = auto()
    HELD = auto()
    CONTENT = auto()
    TOOL = auto()
    BODY = auto()


class MessageBuilder:
    """Builds a message from pieces."""

    def __init__(
        self, form: MessageFormat, tools: Tools, prompt_token_ids: Sequence[int], *, reasoning_open: bool
    ) -> None:
        self._form = form
        self._tools = tools
        self._prompt = prompt_token_ids
        # Hashed once, for the first call without an id: prompts are long.
        self._prompt_digest = functools.cache(lambda: _digest_of(prompt_token_ids))
        self._state = _ParserState.REASONING if reasoning_open else _ParserState.START
        self._content = _Text(trimmed=reasoning_open)
        self._reasoning = _Text(trimmed=True)
        self._block: list[Piece] = []  # the open tool call, or held text
        self._calls: list[ToolCall] = []
        self._sent_calls = 0

    def add(self, piece: Piece) -> None:
        """Add the next piece."""
        if piece.special and self._state is not _ParserState.TOOL:
            return  # the decoded text does not show it either
        match self._state:
            case _ParserState.START | _ParserState.CONTENT:
                self._add_content(piece)
            case _ParserState.REASONING:
                if piece.mark is Mark.THINK_END:
                    self._leave_reasoning()
                elif piece.mark is Mark.TOOL:
                    # The model may have forgotten to close the reasoning, or only reason about a call.
                    self._state = _ParserState.HELD
                    self._block.append(piece)
                elif piece.mark is not Mark.THINK:  # both the prompt and the model may open it
                    self._reasoning.add(piece.text)
            case _ParserState.HELD:
                self._block.append(piece)
                if piece.mark is Mark.THINK_END:
                    # The closing mark itself is no text of the reasoning.
                    self._block.pop()
                    self._reasoning.add(self._take_block_text())
                    self._leave_reasoning()
            case _ParserState.TOOL:
                self._block.append(piece)
                if piece.mark is Mark.TOOL_END:
                    self._close_block()
            case _ParserState.BODY:
                self._block.append(piece)

    def _add_content(self, piece: Piece) -> None:
        tools, starting = self._form.tools, self._state is _ParserState.START
        if starting and piece.mark is Mark.THINK:
            self._state = _ParserState.REASONING
            self._content.trimmed = True
        elif piece.mark is Mark.TOOL:
            self._state = _ParserState.TOOL
            self._block.append(piece)
        elif starting and self._tools and tools and not tools.marks and piece.text.lstrip().startswith("{"):
            # In a format without marks, a response that begins as a JSON object may be a call.
            self._state = _ParserState.BODY
            self._block.append(piece)
        else:
            # White space alone does not decide: a reasoning or tool mark may still follow.
            if not piece.text.isspace():
                self._state = _ParserState.CONTENT
            self._content.add(piece.text)

    def _leave_reasoning(self) -> None:
        self._state = _ParserState.CONTENT
        self._content.trimmed = True

    def _take_block_text(self) -> str:
        text = "".join(piece.text for piece in self._block)
        self._block.clear()
        return text

    def _close_block(self) -> None:
        """Parse the block. Without calls it becomes content; text in it that is no call stays visible."""
        # Set first: text after the block is content, also when the block holds no call.
        tools, self._state = self._form.tools, _ParserState.CONTENT
        block = tools.parse(self._block, self._tools) if tools is not None else Block((), ())
        text = self._take_block_text()
        if not block.calls:
            self._content.add(text)
            return
        self._content.trimmed = True
        # Numbered over the whole response: a call's position is part of its id.
        self._calls += _with_ids(block.calls, self._prompt_digest, len(self._calls))
        for attempt in block.malformed:
            self._content.add(attempt)

    def finish(self) -> AssistantMessage:
        """Close the open block and return the message."""
        if self._state is _ParserState.BODY:
            self._close_block()
        elif self._state is _ParserState.HELD:
            # The reasoning was never closed. Parse what was held again, as content: if it has calls they count, and without
            # a call it was reasoning.
            inner = MessageBuilder(self._form, self._tools, self._prompt, reasoning_open=False)
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
        self._content.add(self._take_block_text())  # a call without its closing mark may be truncated
        self._content.finish(keep_space=not self._calls)
        return AssistantMessage(self._content.whole(), self._reasoning.whole() or None, tuple(self._calls))

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

    ``trimmed``: a mark is next to the text, so leading white space is dropped.
    """

    def __init__(self, *, trimmed: bool) -> None:
        self.trimmed = trimmed
        self._certain: list[str] = []
        self._space: list[str] = []
        self._taken = 0

    def add(self, text: str) -> None:
        # White space at the end waits: it is dropped if a mark follows, and kept if text does.
        end = len(text.rstrip())
        if end:
            if self.trimmed and not self._certain:
                self._space.clear()
                self._certain.append(text[:end].lstrip())
            else:
                self._certain += [*self._space, text[:end]]
                self._space.clear()
        if end < len(text):
            self._space.append(text[end:])

    def finish(self, *, keep_space: bool) -> None:
        if keep_space and (self._certain or not self.trimmed):
            self._certain += self._space
        self._space.clear()

    def take(self) -> str:
        new = "".join(self._certain[self._taken :])
        self._taken = len(self._certain)
        return new

    def whole(self) -> str:
        return "".join(self._certain)


def _digest_of(prompt_token_ids: Sequence[int]) -> bytes:
    """Return 16 bytes that stand for the prompt in the ids of calls."""
    return hashlib.blake2b(array("q", prompt_token_ids).tobytes(), digest_size=16).digest()


def _with_ids(calls: Sequence[CallText], prompt_digest: Callable[[], bytes], first: int = 0) -> tuple[ToolCall, ...]:
    """Return the calls, the first of which is number ``first`` of its response. Calls without an id get one.

    An id follows from the prompt, the call and its position: the same conversation gets the same ids, and the next turn has
    another prompt and therefore other ids.
    """
    named = []
    for index, call in enumerate(calls, first):
        name = call.id
        if not name:
            said = f"{index}\0{call.name}\0{call.arguments}".encode()
            name = f"call_{hashlib.blake2b(said, key=prompt_digest(), digest_size=12).hexdigest()}"
        named.append(ToolCall(name, call.name, call.arguments))
    return tuple(named)

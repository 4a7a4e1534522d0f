"""A response read as a message while it is sampled: reasoning, content, tool calls.

    tokens ──PieceReader──> pieces ──MessageBuilder──> MessageDelta ... AssistantMessage

A whole response is parsed by the same machine that reads a stream, so that the deltas joined are the message, and what
was sent is never taken back. Nothing that the model said is lost: a tool call that cannot be read stays in the content
as it was written. Only white space next to a mark is dropped, at the ends of reasoning and content; without any mark
the content is the decoded response, character by character.

| state | text goes to | leaves it |
|---|---|---|
| start | content | reasoning mark: reasoning; tool mark: tool; other text: content |
| reasoning | reasoning | closing mark: content; tool mark: held |
| held | nowhere yet | closing mark: it was all reasoning; the end: calls, if there are any in it |
| content | content | tool mark: tool (reasoning comes first or not at all) |
| tool | a block of calls | closing mark: calls if they can be read, else content |
| body | a block of calls | the end: one call if it can be read, else content |
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from skyrl_train.inference.chat.formats import Block, CallText, ResponseFormat, Tools, block_of
from skyrl_train.inference.chat.messages import AssistantMessage, MessageDelta, ToolCall, ToolCallDelta
from skyrl_train.inference.chat.pieces import Mark, Piece, PieceReader

if TYPE_CHECKING:
    from renderers import Renderer

NameCall = Callable[[int, CallText], str]  # position among the calls of a response, call -> its id


class ResponseParser(Protocol):
    """Reads one response. ``visible`` is how many characters of the decoded response (special tokens left out) may be
    shown: those before what is, or could become, a stop string; None: all."""

    def feed(self, token_ids: Sequence[int], visible: int | None = None) -> MessageDelta:
        """What these tokens add to the message."""

    def finish(self, visible: int | None = None) -> tuple[MessageDelta, AssistantMessage]:
        """What is left to add, and the whole message."""


class StreamParser:
    """Reads a response token by token; see the module's text for the rules."""

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
        self._waiting += self._reader.flush()
        self._build(visible)
        self._waiting.clear()
        message = self._builder.finish()
        return self._builder.take(), message

    def _build(self, visible: int | None) -> None:
        """Hands the waiting pieces on, up to the last visible character; only plain text can be cut in two."""
        while self._waiting:
            piece = self._waiting.popleft()
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
    """For families whose responses are read by the library, as a whole: the message comes with the end.

    Args:
        decode: the text of some tokens, special ones left out.
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
        """The tokens that end before the last visible character, and the visible text of the one that does not."""
        if visible is None or len(self._decode(self._token_ids)) <= visible:
            return self._token_ids, ""
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
    """Puts pieces together to a message."""

    def __init__(self, form: ResponseFormat, tools: Tools, name_call: NameCall, *, reasoning_open: bool) -> None:
        self._form = form
        self._tools = tools
        self._name_call = name_call
        self._state = _State.REASONING if reasoning_open else _State.START
        self._content = _Text(trimmed=reasoning_open)
        self._reasoning = _Text(trimmed=True)
        self._block: list[Piece] = []  # of a tool call that is not closed yet, or held
        self._calls: list[ToolCall] = []
        self._sent_calls = 0

    def add(self, piece: Piece) -> None:
        """Takes the next piece."""
        if piece.special and self._state is not _State.TOOL:
            return  # not shown, like in the decoded text
        match self._state:
            case _State.START | _State.CONTENT:
                self._add_content(piece)
            case _State.REASONING:
                self._add_reasoning(piece)
            case _State.HELD:
                self._block.append(piece)
                if piece.mark is Mark.THINK_END:
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
        elif piece.mark is not Mark.THINK:  # opened twice: by the prompt and by the model
            self._reasoning.add(piece.text)

    def _leave_reasoning(self) -> None:
        self._state = _State.CONTENT
        self._content.trim()

    def _take_block_text(self) -> str:
        text = "".join(piece.text for piece in self._block)
        self._block.clear()
        return text

    def _close_block(self) -> None:
        """Takes the block for calls if it has any, else for content. Text in it that is no call stays visible."""
        tools, self._state = self._form.tools, _State.CONTENT
        block = tools.parse(self._block, self._tools) if tools is not None else Block((), ())
        text = self._take_block_text()
        if not block.calls:
            self._content.add(text)
            return
        self._content.trim()
        self._calls += _named(block.calls, self._name_call, len(self._calls))
        for attempt in block.malformed:
            self._content.add(attempt)

    def finish(self) -> AssistantMessage:
        """Closes what is open and returns the message."""
        if self._state is _State.BODY:
            self._close_block()
        elif self._state is _State.HELD:
            self._settle_held()
        self._content.add(self._take_block_text())  # a call without its end cannot be told from one that was cut off
        self._content.finish(keep_space=not self._calls)
        return AssistantMessage(self._content.whole, self._reasoning.whole or None, tuple(self._calls))

    def _settle_held(self) -> None:
        """Reasoning that was never closed: a call in it counts, text with no call in it is reasoning."""
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
        """What has become certain since the last call."""
        new = tuple(
            ToolCallDelta(index, call.arguments, call.id, call.name)
            for index, call in enumerate(self._calls[self._sent_calls :], self._sent_calls)
        )
        self._sent_calls = len(self._calls)
        return MessageDelta(self._content.take(), self._reasoning.take(), new)


class _Text:
    """Text whose white space at the end is held back until other text follows.

    ``trimmed``: white space before the first other character is dropped.
    """

    def __init__(self, *, trimmed: bool) -> None:
        self._trimmed = trimmed
        self._certain: list[str] = []
        self._space: list[str] = []
        self._taken = 0

    def add(self, text: str) -> None:
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
        """Says that a mark was next to the text."""
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
    """Ids of tool calls whose format has none: a function of the prompt, the call and its position.

    The same conversation gets the same ids; the next turn has another prompt, and with it other ids.
    """

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self._prompt = prompt_token_ids
        self._digest: bytes | None = None

    def __call__(self, index: int, call: CallText) -> str:
        if self._digest is None:
            self._digest = hashlib.blake2b(array("q", self._prompt).tobytes(), digest_size=16).digest()
        said = f"{index}\0{call.name}\0{call.arguments}".encode()
        return f"call_{hashlib.blake2b(said, key=self._digest, digest_size=12).hexdigest()}"

"""The formats in which model families write tool calls and reasoning, by name.

Our parser finds the marks around a block of calls while tokens stream in; the ``renderers`` library's parser of the family
reads the inside of a block. Those parsers look for token ids. We pass a block's characters and marks as ids of an
artificial vocabulary, so that they also read formats whose marks have no token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from skyrl_train.errors import ConfigError
from skyrl_train.inference.chat.pieces import Mark, Piece

if TYPE_CHECKING:
    from renderers.base import ParsedResponse, ParsedToolCall

T = TypeVar("T")
Tools = Sequence[Mapping[str, Any]]

# Raised by text with numbers of thousands of digits, NaN, endless nesting, or by odd tool schemas.
_PARSE_ERRORS = (ValueError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class CallText:
    """A parsed call. ``arguments`` is the JSON text of an object; ``id`` is None if the format has none."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True)
class Block:
    """The contents of a block of tool calls. ``malformed`` is the text of attempts that could not be parsed."""

    calls: tuple[CallText, ...]
    malformed: tuple[str, ...]


class _BlockVocabulary:
    """Maps characters to their code points and marks to ids above them. It acts as a tokenizer for the library's parsers."""

    unk_token_id = None
    _FIRST = 0x110000

    def __init__(self, marks: Sequence[str]) -> None:
        self.ids = {mark: self._FIRST + index for index, mark in enumerate(marks)}
        self._texts = {index: mark for mark, index in self.ids.items()}

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(character) for character in text]

    def encode_pieces(self, pieces: Sequence[Piece]) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            ids += self.encode(piece.text) if piece.mark is None else [self.ids[piece.text]]
        return ids

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(self._texts[index] if index >= self._FIRST else chr(index) for index in ids)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self.ids.get(token)


_Reader = Callable[[_BlockVocabulary, list[int], "list[Any] | None"], "ParsedResponse"]


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls.

    ``marks`` (opening, closing) enclose a block; without them a response that is one JSON object is the block.
    """

    read: _Reader
    marks: tuple[str, str] | None
    inner: tuple[str, ...] = ()

    def all_marks(self) -> dict[str, Mark]:
        """Return the text of each mark with its meaning."""
        enclosing = {} if self.marks is None else {self.marks[0]: Mark.TOOL, self.marks[1]: Mark.TOOL_END}
        return {**enclosing, **dict.fromkeys(self.inner, Mark.INNER)}

    def parse(self, pieces: Sequence[Piece], tools: Tools) -> Block:
        """Parse a block, including its marks."""
        # The library's parsers ask for the ids of reasoning marks even where a block has none.
        vocabulary = _BlockVocabulary([*(self.marks or ()), *self.inner, "<think>", "</think>"])
        ids = vocabulary.encode_pieces(pieces)
        try:
            return block_of(self.read(vocabulary, ids, [dict(tool) for tool in tools] or None).tool_calls)
        except _PARSE_ERRORS:
            return Block((), ("".join(piece.text for piece in pieces),))


def block_of(attempts: Sequence[ParsedToolCall]) -> Block:
    """Separate calls from failed attempts. A call needs a name, and an object as arguments."""
    calls, malformed = [], []
    for attempt in attempts:
        call = _call(attempt)
        if call is None:
            malformed.append(attempt.raw)
        else:
            calls.append(call)
    return Block(tuple(calls), tuple(malformed))


def _call(attempt: ParsedToolCall) -> CallText | None:
    # The library also reports "invalid_json" for a text parameter that is not JSON; then the arguments are an object.
    if attempt.status not in ("ok", "invalid_json") or not isinstance(attempt.name, str) or not attempt.name:
        return None
    try:
        attempt.name.encode()
        arguments = json.loads(attempt.arguments) if isinstance(attempt.arguments, str) else attempt.arguments
        if not isinstance(arguments, dict):
            return None
        return CallText(attempt.name, _json_text(arguments), attempt.id)
    except _PARSE_ERRORS:
        return None


def _json_text(arguments: dict[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: JSON can express it, UTF-8 cannot
        return json.dumps(arguments)
    return text


def _read_qwen3(v: _BlockVocabulary, ids: list[int], tools: list[Any] | None) -> ParsedResponse:
    from renderers.parsing import parse_qwen3

    return parse_qwen3(
        v, ids, stop_ids=set(), tool_call_id=v.ids["<tool_call>"], tool_call_end_id=v.ids["</tool_call>"]
    )


def _read_qwen35(v: _BlockVocabulary, ids: list[int], tools: list[Any] | None) -> ParsedResponse:
    from renderers.parsing import parse_qwen35

    return parse_qwen35(v, ids, stop_ids=set(), tools=tools, **_think_and_tool_ids(v, "<tool_call>", "</tool_call>"))


def _read_glm(v: _BlockVocabulary, ids: list[int], tools: list[Any] | None) -> ParsedResponse:
    from renderers.parsing import parse_glm

    return parse_glm(
        v,
        ids,
        stop_ids=set(),
        tools=tools,
        arg_key_id=v.ids["<arg_key>"],
        arg_key_end_id=v.ids["</arg_key>"],
        arg_value_id=v.ids["<arg_value>"],
        arg_value_end_id=v.ids["</arg_value>"],
        **_think_and_tool_ids(v, "<tool_call>", "</tool_call>"),
    )


def _read_laguna(v: _BlockVocabulary, ids: list[int], tools: list[Any] | None) -> ParsedResponse:
    from renderers.parsing import parse_laguna_xs2

    marks = _think_and_tool_ids(v, "<tool_call>", "</tool_call>")
    return parse_laguna_xs2(v, ids, stop_ids=set(), tools=tools, **marks)


def _read_minimax(v: _BlockVocabulary, ids: list[int], tools: list[Any] | None) -> ParsedResponse:
    from renderers.parsing import parse_minimax

    marks = _think_and_tool_ids(v, "<minimax:tool_call>", "</minimax:tool_call>")
    return parse_minimax(v, ids, stop_ids=set(), tools=tools, **marks)


def _think_and_tool_ids(v: _BlockVocabulary, opening: str, closing: str) -> dict[str, int]:
    return {
        "think_id": v.ids["<think>"],
        "think_end_id": v.ids["</think>"],
        "tool_call_id": v.ids[opening],
        "tool_call_end_id": v.ids[closing],
    }


_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)


def _read_deepseek(v: _BlockVocabulary, ids: list[int], tools: list[Any] | None) -> ParsedResponse:
    from renderers.parsing import parse_deepseek_v3

    begin, end, call_begin, call_end, separator = (v.ids[mark] for mark in _DEEPSEEK)
    return parse_deepseek_v3(
        v,
        ids,
        stop_ids=set(),
        tool_calls_begin_id=begin,
        tool_calls_end_id=end,
        tool_call_begin_id=call_begin,
        tool_call_end_id=call_end,
        tool_sep_id=separator,
    )


_KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)


def _read_kimi(v: _BlockVocabulary, ids: list[int], tools: list[Any] | None) -> ParsedResponse:
    from renderers.parsing import parse_kimi_k2

    begin, end, call_begin, argument_begin, call_end = (v.ids[mark] for mark in _KIMI)
    return parse_kimi_k2(
        v,
        ids,
        stop_ids=set(),
        tool_calls_section_begin_id=begin,
        tool_calls_section_end_id=end,
        tool_call_begin_id=call_begin,
        tool_call_argument_begin_id=argument_begin,
        tool_call_end_id=call_end,
    )


def _read_llama3(v: _BlockVocabulary, ids: list[int], tools: list[Any] | None) -> ParsedResponse:
    from renderers.parsing import parse_llama_3

    return parse_llama_3(v, ids, stop_ids=set())


_TOOL_CALL = ("<tool_call>", "</tool_call>")
_ARGUMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
TOOL_FORMATS: dict[str, ToolFormat] = {
    "qwen3": ToolFormat(_read_qwen3, _TOOL_CALL),  # JSON, as Hermes writes it
    "qwen3.5": ToolFormat(_read_qwen35, _TOOL_CALL),  # <function=name><parameter=key>value
    "glm": ToolFormat(_read_glm, _TOOL_CALL, _ARGUMENTS),
    "laguna": ToolFormat(_read_laguna, _TOOL_CALL),
    "minimax": ToolFormat(_read_minimax, ("<minimax:tool_call>", "</minimax:tool_call>")),
    "deepseek-v3": ToolFormat(_read_deepseek, _DEEPSEEK[:2], _DEEPSEEK[2:]),
    "kimi-k2": ToolFormat(_read_kimi, _KIMI[:2], _KIMI[2:]),
    "llama-3": ToolFormat(_read_llama3, None),  # the whole response is one JSON object
}
REASONING_MARKS: dict[str, tuple[str, str]] = {"think": ("<think>", "</think>")}

# Families of the library that the formats above cover; the library parses whole responses of the others.
FAMILY_TOOL_FORMATS = {
    **dict.fromkeys(("qwen3", "qwen3-vl"), "qwen3"),
    **dict.fromkeys(("qwen3.5", "qwen3.6", "qwen3.8", "prime-qwen3"), "qwen3.5"),
    **dict.fromkeys(("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"), "qwen3.5"),
    **dict.fromkeys(("glm-4.5", "glm-5", "glm-5.1", "glm-5.3"), "glm"),
    **dict.fromkeys(("laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1"), "laguna"),
    **dict.fromkeys(("deepseek-v3", "deepseek-r1"), "deepseek-v3"),
    **dict.fromkeys(("kimi-k2", "kimi-k2.5"), "kimi-k2"),
    "minimax-m2": "minimax",
    "llama-3": "llama-3",
}
# Texts in a chat template or vocabulary that indicate a format; the first match counts.
_HINTS = (
    ("<arg_key>", "glm"),
    ("<function=", "qwen3.5"),
    ("<minimax:tool_call>", "minimax"),
    ("<tool_call>", "qwen3"),
    (_DEEPSEEK[0], "deepseek-v3"),
    (_KIMI[0], "kimi-k2"),
    ("<|python_tag|>", "llama-3"),
    ("<|start_header_id|>", "llama-3"),
)


@dataclass(frozen=True)
class MessageFormat:
    """The parts to recognise in a response; None: ignored."""

    tools: ToolFormat | None = None
    reasoning: tuple[str, str] | None = None

    def marks(self, *, with_tools: bool) -> dict[str, Mark]:
        """Return the text of each mark with its meaning."""
        thinking = {} if self.reasoning is None else {self.reasoning[0]: Mark.THINK, self.reasoning[1]: Mark.THINK_END}
        return {**thinking, **(self.tools.all_marks() if with_tools and self.tools is not None else {})}


def guess_tool_format(hints: str) -> str:
    """Return the format that template and added tokens indicate; JSON in ``<tool_call>`` without any indication."""
    return next((name for hint, name in _HINTS if hint in hints), "qwen3")


def guess_reasoning(hints: str) -> str:
    """Return ``"think"`` if template or vocabulary contain the mark, else ``"none"``: then such tags are plain content."""
    return next((name for name, (opening, _) in REASONING_MARKS.items() if opening in hints), "none")


def message_format(tool_parser: str, reasoning_parser: str) -> MessageFormat:
    """Return the formats with these names; ``"none"`` disables one.

    Raises:
        ConfigError: a name is unknown.
    """
    return MessageFormat(
        _named("generator.chat.tool_parser", tool_parser, TOOL_FORMATS),
        _named("generator.chat.reasoning_parser", reasoning_parser, REASONING_MARKS),
    )


def _named(setting: str, name: str, known: Mapping[str, T]) -> T | None:
    if name != "none" and name not in known:
        raise ConfigError(f"{setting} {name!r} is unknown; use one of: {', '.join([*known, 'none'])}.")
    return known.get(name)

"""The formats in which model families write tool calls and reasoning, by name.

Our parser finds the marks around a block of calls while tokens stream in; the ``renderers`` library's parser of the family
reads the inside of a block. Those parsers look for token ids. We pass a block's characters and marks as ids of an
artificial vocabulary, so that they also read formats whose marks have no token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyrl_train.errors import ConfigError, GrammarError
from skyrl_train.inference.chat.pieces import Mark, Piece
from skyrl_train.inference.grammar import schema_text

if TYPE_CHECKING:
    from renderers.base import ParsedToolCall

Tools = Sequence[Mapping[str, Any]]

# Raised by text with numbers of thousands of digits, NaN, endless nesting, or by odd tool schemas.
_MAX_REFERENCES = 8  # that lead from an argument's schema to a type; a schema can refer to itself
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

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(self._texts[index] if index >= self._FIRST else chr(index) for index in ids)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self.ids.get(token)


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls.

    Args:
        function: the function of ``renderers.parsing`` that reads a block.
        marks: each mark by the function's parameter for its id. The first opens a block, the second closes it, the others
            separate its parts. Without marks, a response that is one JSON object is the block.
        typed: the function takes the tools too, because their schemas tell the types of arguments that are written as text.
        call: a block of one call, with ``{name}`` and ``{arguments}``. ``{line}`` is a line break that not all models of the
            format write.
        argument: one argument, with ``{key}`` and ``{value}``, which a tag closes. Empty: the arguments are one JSON object.
        several: a block may have several calls.
    """

    function: str
    marks: Mapping[str, str]
    typed: bool = False
    call: str = ""
    argument: str = ""
    several: bool = False

    def grammar(self, tools: Tools, token_ids: Mapping[str, int]) -> str:
        """Return a grammar in llguidance's variant of Lark that allows one block with one call of one of ``tools``.

        Arguments follow the tool's schema, and others are written only if it has ``additionalProperties`` or the like. Keywords
        that the library cannot follow are an error with ``strict``, else they are skipped.

        Args:
            token_ids: tokens by their text, for marks that have one.

        Raises:
            GrammarError: the parameters of a tool are no schema of an object. Or it is strict, and an argument that is written as
                text has a keyword for texts.
        """
        rules = [f"start: {' | '.join(f'call_{number}' for number in range(len(tools)))}"]
        if self.argument:
            rules += self._text_rules(token_ids)
        for number, tool in enumerate(tools):
            function, arguments = tool["function"], f"arguments_{number}"
            # Names stand within JSON or a tag, where neither has quotes.
            name = json.dumps(function["name"], ensure_ascii=False)[1:-1]
            call = self._items(self.call, token_ids, {"{name}": name}, {"{arguments}": arguments})
            rules.append(f"call_{number}: {call}")
            schema, strict = _arguments_schema(function), bool(function.get("strict"))
            if not self.argument:
                rules.append(_json_rule(arguments, schema, strict))
                continue
            try:
                rules += self._argument_rules(arguments, schema, strict, token_ids)
            except (TypeError, AttributeError) as error:
                raise GrammarError.of_field(
                    "tools", f"the parameters of {function['name']!r} are no JSON schema: {error}"
                ) from error
        return "\n".join(rules)

    def _items(
        self, template: str, token_ids: Mapping[str, int], texts: Mapping[str, str], rules: Mapping[str, str]
    ) -> str:
        """Return the template as items of a Lark rule: ``texts`` are replaced in its text, ``rules`` are items."""
        items_of = {mark: f"<[{token_ids[mark]}]>" for mark in self.marks.values() if mark in token_ids}
        items_of = {**items_of, "{line}": '"\\n"?', **rules}
        items = []
        for piece in filter(None, re.split(f"({'|'.join(map(re.escape, items_of))})", template)):
            if piece in items_of:
                items.append(items_of[piece])
            else:
                for name, text in texts.items():
                    piece = piece.replace(name, text)
                # A call that is JSON alone is split as JSON is: beside a grammar that is JSON too, the longest item would win.
                parts = [piece] if self.marks else re.findall(r'"(?:[^"\\]|\\.)*"|.', piece)
                items += [json.dumps(part, ensure_ascii=False) for part in parts]
        return " ".join(items)

    def _closing(self) -> tuple[str, str, str]:
        """Return the white space between a value and the tag that closes it, the tag, and what follows in ``argument``."""
        found = re.fullmatch(r"(\s*)(</[^>]+>)(.*)", self.argument.partition("{value}")[2], re.DOTALL)
        assert found is not None, "a tag closes the value"
        return found[1], found[2], found[3]

    def _text_rules(self, token_ids: Mapping[str, int]) -> list[str]:
        """Return rules for a value that is written as text, including the tag that closes it.

        ``text`` is any text, ``plain`` is text that cannot be read as JSON. Neither has a tag at which the parser would stop.
        """
        space, tag, _ = self._closing()
        stops = [*self.marks.values(), *REASONING_MARKS["think"], *re.findall(r"</[^>]+>", self.call)]
        without = f"& ~{_pattern('(?s:.*)({})(?s:.*)', [stop for stop in stops if stop != tag])}"
        # JSON begins with one of these, NaN and Infinity included.
        plain = r"""& /[^\s0-9\-"{\[tfnNI](?s:.*)/"""
        if tag in token_ids:
            closing = self._items(space + tag, token_ids, {}, {})
            return [
                f"text: TEXT? {closing}",
                f"plain: PLAIN {closing}",
                f"TEXT: /(?s:.+)/ {without}",
                f"PLAIN: TEXT {plain}",
            ]
        # A lazy rule ends at the first tag. Behind a tag without its space, the text could not end.
        ends = f"{_pattern('(?s:.*)({})', [space + tag])} & ~{_pattern('(?s:.*)({})(?s:.+)', [tag])} {without}"
        return ["text[lazy]: TEXT", "plain[lazy]: PLAIN", f"TEXT: {ends}", f"PLAIN: TEXT {plain}"]

    def _argument_rules(
        self, rule: str, schema: Mapping[str, Any], strict: bool, token_ids: Mapping[str, int]
    ) -> list[str]:
        """Return the rule ``rule`` for all arguments in the order of their schema, and rules for each of them."""
        space, tag, rest = self._closing()
        closing = self._items(space + tag, token_ids, {}, {})
        before = self.argument.partition("{value}")[0]
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        items, rules = [], []
        for place, key in enumerate(dict.fromkeys([*properties, *required])):
            name, value = f"{rule}_{place}", properties.get(key)
            value = value if isinstance(value, dict) else {}
            is_text = value.get("type") in ("string", ["string"])
            texts, free, limits = [], False, set[str]()
            for branch in _branches(value, schema):
                values = branch["enum"] if "enum" in branch else [branch["const"]] if "const" in branch else None
                if values is None:
                    free |= "string" in branch.get("type", "string")
                    limits |= branch.keys() & _TEXT_KEYWORDS
                else:
                    texts += [value for value in values if isinstance(value, str) and (is_text or not _is_json(value))]
            if strict and limits and is_text:
                raise GrammarError.of_field(
                    "tools",
                    f"the model writes the argument {key!r} as text, for which {min(limits)} cannot be followed. Leave the "
                    "keyword or strict out.",
                )
            written = [f"{json.dumps(text, ensure_ascii=False)} {closing}" for text in texts]
            if not is_text:  # the parser reads JSON where it finds some
                written.append(f"{name}_json {closing}")
                rules.append(_json_rule(f"{name}_json", {**definitions, **value}, strict))
            if free and not (strict and limits):
                written = ["text"] if is_text else [f"{name}_json {closing}", "plain"]
            items.append(name if key in required else f"{name}?")
            opening = self._items(before, token_ids, {"{key}": key}, {})
            rules.append(f"{name}: {opening} ({' | '.join(written)}) {self._items(rest, token_ids, {}, {})}")
        return [f"{rule}: {' '.join(items) or json.dumps('')}", *rules]

    def parse(self, pieces: Sequence[Piece], tools: Tools) -> Block:
        """Parse a block, including its marks."""
        import renderers.parsing

        read = getattr(renderers.parsing, self.function)
        # A model may write a reasoning mark inside a block. Functions for typed formats ask for the ids of these marks, too.
        reasoning = {"think_id": "<think>", "think_end_id": "</think>"}
        vocabulary = _BlockVocabulary([*self.marks.values(), *reasoning.values()])
        parameters = {**self.marks, **reasoning} if self.typed else self.marks
        options: dict[str, Any] = {parameter: vocabulary.ids[mark] for parameter, mark in parameters.items()}
        ids: list[int] = []
        for piece in pieces:
            ids += vocabulary.encode(piece.text) if piece.mark is None else [vocabulary.ids[piece.text]]
        try:
            if self.typed:
                options["tools"] = [dict(tool) for tool in tools] or None
            return block_of(read(vocabulary, ids, stop_ids=set(), **options).tool_calls)
        except _PARSE_ERRORS:
            return Block((), ("".join(piece.text for piece in pieces),))


# Keywords of JSON schemas for strings that a value written as text does not follow.
_TEXT_KEYWORDS = frozenset(("pattern", "format", "minLength", "maxLength"))


# With one of these, a schema may have arguments that its properties do not name.
_FURTHER_ARGUMENTS = frozenset(
    (
        "additionalProperties",
        "patternProperties",
        "unevaluatedProperties",
        "minProperties",
        "$ref",
        "anyOf",
        "oneOf",
        "allOf",
    )
)


def _arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments.

    Raises:
        GrammarError: it is the schema of something else than an object.
    """
    schema = function.get("parameters") or {}
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise GrammarError.of_field(
            "tools", f"the parameters of {function['name']!r} must be of type object, got {kind!r:.100}."
        )
    schema = {**schema, "type": "object"}
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if isinstance(properties, dict) and isinstance(required, list) and not schema.keys() & _FURTHER_ARGUMENTS:
        # A function cannot take arguments that it does not have, and few schemas say so.
        schema["additionalProperties"] = not all(isinstance(key, str) and key in properties for key in required)
    return schema


def _json_rule(rule: str, schema: Mapping[str, Any], strict: bool) -> str:
    return f"{rule}: %json {schema_text(schema, strict=strict)}"


def _pattern(pattern: str, texts: Sequence[str]) -> str:
    """Return a regular expression in Lark, with the alternatives ``texts`` in the place of ``{}``."""
    escaped = pattern.replace("{}", "|".join(map(re.escape, texts))).replace("/", r"\/").replace("\n", "n")
    return f"/{escaped}/"


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _branches(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """Yield the alternatives of a schema: references resolved, unions opened."""
    if not isinstance(schema, dict) or depth > _MAX_REFERENCES:
        yield {}
    elif isinstance(reference := schema.get("$ref"), str):
        found: Any = root
        for part in reference.removeprefix("#").strip("/").split("/"):
            found = found.get(part) if isinstance(found, dict) else None
        yield from _branches(found, root, depth + 1)
    elif isinstance(union := schema.get("anyOf", schema.get("oneOf")), list):
        for branch in union:
            yield from _branches(branch, root, depth + 1)
    else:
        yield schema


def block_of(attempts: Sequence[ParsedToolCall]) -> Block:
    """Separate calls from failed attempts. A call needs a name, and an object as arguments."""
    calls, malformed = [], []
    for attempt in attempts:
        try:
            calls.append(_call(attempt))
        except _PARSE_ERRORS:
            malformed.append(attempt.raw)
    return Block(tuple(calls), tuple(malformed))


def _call(attempt: ParsedToolCall) -> CallText:
    # The library also reports "invalid_json" for a text parameter that is not JSON; then the arguments are an object.
    if attempt.status not in ("ok", "invalid_json") or not isinstance(attempt.name, str) or not attempt.name:
        raise ValueError("no call")
    attempt.name.encode()  # raises for half of a surrogate pair, which no response body can hold
    arguments = json.loads(attempt.arguments) if isinstance(attempt.arguments, str) else attempt.arguments
    if not isinstance(arguments, dict):
        raise ValueError("no object")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: JSON can express it, UTF-8 cannot
        text = json.dumps(arguments)
    return CallText(attempt.name, text, attempt.id)


_TOOL_CALL = {"tool_call_id": "<tool_call>", "tool_call_end_id": "</tool_call>"}
_TAGGED_CALL = "<tool_call>{name}{line}{arguments}</tool_call>"
_TAGGED_ARGUMENT = "<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}"
TOOL_FORMATS: dict[str, ToolFormat] = {
    "qwen3": ToolFormat(  # JSON, as Hermes writes it
        "parse_qwen3",
        _TOOL_CALL,
        call='<tool_call>\n{"name": "{name}", "arguments": {arguments}}\n</tool_call>',
    ),
    "qwen3.5": ToolFormat(
        "parse_qwen35",
        _TOOL_CALL,
        typed=True,
        call="<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>",
        argument="<parameter={key}>\n{value}\n</parameter>\n",
    ),
    "glm": ToolFormat(
        "parse_glm",
        {
            **_TOOL_CALL,
            "arg_key_id": "<arg_key>",
            "arg_key_end_id": "</arg_key>",
            "arg_value_id": "<arg_value>",
            "arg_value_end_id": "</arg_value>",
        },
        typed=True,
        call=_TAGGED_CALL,
        argument=_TAGGED_ARGUMENT,
    ),
    "laguna": ToolFormat("parse_laguna_xs2", _TOOL_CALL, typed=True, call=_TAGGED_CALL, argument=_TAGGED_ARGUMENT),
    "minimax": ToolFormat(
        "parse_minimax",
        {"tool_call_id": "<minimax:tool_call>", "tool_call_end_id": "</minimax:tool_call>"},
        typed=True,
        call='<minimax:tool_call>\n<invoke name="{name}">\n{arguments}</invoke>\n</minimax:tool_call>',
        argument='<parameter name="{key}">{value}</parameter>\n',
        several=True,
    ),
    "deepseek-v3": ToolFormat(
        "parse_deepseek_v3",
        {
            "tool_calls_begin_id": "<｜tool▁calls▁begin｜>",
            "tool_calls_end_id": "<｜tool▁calls▁end｜>",
            "tool_call_begin_id": "<｜tool▁call▁begin｜>",
            "tool_call_end_id": "<｜tool▁call▁end｜>",
            "tool_sep_id": "<｜tool▁sep｜>",
        },
        call="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        several=True,
    ),
    "kimi-k2": ToolFormat(
        "parse_kimi_k2",
        {
            "tool_calls_section_begin_id": "<|tool_calls_section_begin|>",
            "tool_calls_section_end_id": "<|tool_calls_section_end|>",
            "tool_call_begin_id": "<|tool_call_begin|>",
            "tool_call_argument_begin_id": "<|tool_call_argument_begin|>",
            "tool_call_end_id": "<|tool_call_end|>",
        },
        call="<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        several=True,
    ),
    # The whole response is one JSON object.
    "llama-3": ToolFormat("parse_llama_3", {}, call='{"name": "{name}", "parameters": {arguments}}'),
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
    ("<｜tool▁calls▁begin｜>", "deepseek-v3"),
    ("<|tool_calls_section_begin|>", "kimi-k2"),
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
        marks: dict[str, Mark] = {}
        if self.reasoning is not None:
            marks = {self.reasoning[0]: Mark.THINK, self.reasoning[1]: Mark.THINK_END}
        if with_tools and self.tools is not None:
            # The order of a format's marks tells their meaning.
            for position, mark in enumerate(self.tools.marks.values()):
                marks[mark] = (Mark.TOOL, Mark.TOOL_END, Mark.INNER)[min(position, 2)]
        return marks


def guess_formats(hints: str) -> tuple[str, str]:
    """Return the names of the tool format and the reasoning format that template and added tokens indicate.

    Without any indication: JSON in ``<tool_call>``, and no reasoning, so that such tags are plain content.
    """
    tools = next((name for hint, name in _HINTS if hint in hints), "qwen3")
    return tools, next((name for name, (opening, _) in REASONING_MARKS.items() if opening in hints), "none")


def message_format(tool_parser: str, reasoning_parser: str) -> MessageFormat:
    """Return the formats with these names; ``"none"`` disables one.

    Raises:
        ConfigError: a name is unknown.
    """
    for setting, name, known in (
        ("generator.chat.tool_parser", tool_parser, TOOL_FORMATS),
        ("generator.chat.reasoning_parser", reasoning_parser, REASONING_MARKS),
    ):
        if name != "none" and name not in known:
            raise ConfigError(f"{setting} {name!r} is unknown; use one of: {', '.join([*known, 'none'])}.")
    return MessageFormat(TOOL_FORMATS.get(tool_parser), REASONING_MARKS.get(reasoning_parser))

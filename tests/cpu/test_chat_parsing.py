"""Responses as messages: reasoning, content and tool calls, the same however the tokens arrive, and nothing lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest
from chat_models import FAMILIES, chat_renderer, chat_tokenizer, encode
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers import config_from_name, create_renderer
from renderers.base import MODEL_RENDERER_MAP
from scripted import least_cpu_s

from skyrl_train.errors import ConfigError
from skyrl_train.inference.chat import AssistantMessage, ChatRenderer, MessageDelta, ToolCall
from skyrl_train.inference.chat.parsing import ResponseParser

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]
ASK = [{"role": "user", "content": "Weather?"}]
INKLING = "thinkingmachines/Inkling"  # its responses are read by the library, as a whole
ARGUMENTS = {"city": "Zürich", "days": 3}


def hermes(name: str, arguments: dict) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) + "\n</tool_call>"


def xml(name: str, arguments: dict) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def glm(name: str, arguments: dict) -> str:
    inner = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items())
    return f"<tool_call>{name}\n{inner}</tool_call>"


def deepseek(name: str, arguments: dict) -> str:
    call = f"function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments, ensure_ascii=False)}\n```"
    return f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


def kimi(name: str, arguments: dict) -> str:
    call = f"functions.{name}:0<|tool_call_argument_begin|>{json.dumps(arguments, ensure_ascii=False)}"
    return f"<|tool_calls_section_begin|><|tool_call_begin|>{call}<|tool_call_end|><|tool_calls_section_end|>"


def minimax(name: str, arguments: dict) -> str:
    inner = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments.items())
    return f'<minimax:tool_call>\n<invoke name="{name}">\n{inner}</invoke>\n</minimax:tool_call>'


WRITERS: dict[str, Callable[[str, dict], str]] = {
    "Qwen/Qwen3-0.6B": hermes,
    "Qwen/Qwen3.5-4B": xml,
    "zai-org/GLM-4.5-Air": glm,
    "zai-org/GLM-5": glm,
    "deepseek-ai/DeepSeek-V3": deepseek,
    "deepseek-ai/DeepSeek-R1": deepseek,
    "moonshotai/Kimi-K2-Instruct": kimi,
    "MiniMaxAI/MiniMax-M2": minimax,
    "poolside/Laguna-XS.2": glm,
    "generic with mark tokens": hermes,
    "generic without mark tokens": hermes,
}
# Their prompt opens reasoning, so that a response begins inside it.
OPENED = {
    "Qwen/Qwen3.5-4B",
    "zai-org/GLM-5",
    "deepseek-ai/DeepSeek-R1",
    "MiniMaxAI/MiniMax-M2",
    "generic with mark tokens",
    "generic without mark tokens",
}


def prompt_of(family: str) -> list[int]:
    return chat_renderer(family).render(ASK, TOOLS)


def parse_tokens(
    renderer: ChatRenderer,
    response_ids: Sequence[int],
    *,
    prompt_token_ids: Sequence[int],
    tools: Sequence[dict] = (),
    visible: int | None = None,
) -> AssistantMessage:
    """A whole response as a message; ``visible`` characters of it come before its stop string."""
    parser = renderer.parser(prompt_token_ids, tools)
    parser.feed(response_ids, visible)
    return parser.finish(visible)[1]


def parse(family: str, response: str | Sequence[int], tools: Sequence[dict] = TOOLS) -> AssistantMessage:
    ids = encode(family, response) if isinstance(response, str) else list(response)
    return parse_tokens(chat_renderer(family), ids, prompt_token_ids=prompt_of(family), tools=tools)


def decoded(family: str, ids: Sequence[int]) -> str:
    return str(chat_tokenizer(family).decode(ids, skip_special_tokens=True))


def thinking(family: str, text: str) -> str:
    return text if family in OPENED else f"<think>{text}"


def join(deltas: Sequence[MessageDelta]) -> AssistantMessage:
    """The message that a reader of the deltas puts together."""
    calls: list[dict[str, str]] = []
    for piece in (piece for delta in deltas for piece in delta.tool_calls):
        if piece.index == len(calls):
            assert piece.id and piece.name
            calls.append({"id": piece.id, "name": piece.name, "arguments": ""})
        calls[piece.index]["arguments"] += piece.arguments
    reasoning = "".join(delta.reasoning_content for delta in deltas)
    content = "".join(delta.content for delta in deltas)
    return AssistantMessage(content, reasoning or None, tuple(ToolCall(**call) for call in calls))


def stream(parser: ResponseParser, chunks: Sequence[Sequence[int]]) -> tuple[AssistantMessage, AssistantMessage]:
    deltas = [parser.feed(chunk) for chunk in chunks]
    last, message = parser.finish()
    return join([*deltas, last]), message


def cut(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    chunks, start = [], 0
    for size in sizes:
        chunks.append(list(ids[start : start + size]))
        start += size
    return [*chunks, list(ids[start:])]


# Reasoning, content and calls ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", WRITERS)
def test_reasoning_content_and_a_call_are_separated(family: str) -> None:
    said = thinking(family, "\nA müsing.\n</think>\n\nI look.\n") + WRITERS[family]("look_up", ARGUMENTS)
    message = parse(family, said)
    assert (message.reasoning_content, message.content) == ("A müsing.", "I look.")
    (call,) = message.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("look_up", ARGUMENTS)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != INKLING])
def test_plain_text_is_the_content_to_the_last_character(family: str) -> None:
    said = "  Grüße, <b>5 < 6</b>, {x}\n\n"
    end = "</think>" if family in OPENED else ""
    message = parse(family, end + said)
    assert message == AssistantMessage(said.lstrip() if end else said)


@pytest.mark.parametrize("family", WRITERS)
def test_without_tools_a_call_is_content(family: str) -> None:
    call = WRITERS[family]("look_up", ARGUMENTS)
    message = parse(family, thinking(family, "hm</think>") + call, tools=())
    assert message == AssistantMessage(decoded(family, encode(family, call)), "hm")


def test_a_llama_calls_with_a_body_of_json() -> None:
    family = "meta-llama/Llama-3.2-1B-Instruct"
    body = json.dumps({"name": "look_up", "parameters": ARGUMENTS})
    message = parse(family, f"<|python_tag|>\n{body}<|eom_id|>")
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == [("look_up", ARGUMENTS)]
    assert message.content == ""
    assert parse(family, '{"a": 1} is no call').content == '{"a": 1} is no call'
    assert parse(family, body, tools=()).content == body


def test_several_calls_and_text_behind_them() -> None:
    first, second = hermes("look_up", {"city": "a"}), hermes("look_up", {"city": "b"})
    message = parse("Qwen/Qwen3-0.6B", f"One\n{first}\n{second}\nand done.\n")
    assert message.content == "One\n\n\nand done."
    assert [json.loads(call.arguments)["city"] for call in message.tool_calls] == ["a", "b"]
    assert len({call.id for call in message.tool_calls}) == 2


@pytest.mark.parametrize(
    "broken",
    [
        '<tool_call>{"name": "look_up", "arguments": {</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "look_up", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "look_up", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "look_up", "arguments": {"x": ' + "9" * 5000 + "}}</tool_call>",
        '<tool_call>{"name": "look_up", "arguments": ' + "[" * 3000 + "</tool_call>",
        '<tool_call>{"name": "look_up", "arguments": {}}',
        "<tool_call></tool_call>",
        "</tool_call>",
        "</think>",
        "text <think> text",
    ],
)
@pytest.mark.parametrize("family", ["Qwen/Qwen3-0.6B", "generic without mark tokens", "nothing known"])
def test_text_that_is_no_valid_call_stays_unchanged(family: str, broken: str) -> None:
    end = "</think>" if family in OPENED else ""
    assert parse(family, f"{end}a {broken}").content == f"a {broken}"
    assert parse(family, f"{end}a {broken}").tool_calls == ()


@pytest.mark.parametrize("family", WRITERS)
def test_a_broken_call_beside_a_good_one_is_not_lost(family: str) -> None:
    good = WRITERS[family]("look_up", ARGUMENTS)
    opening = good.split(">")[0] + ">"
    message = parse(family, thinking(family, "hm</think>") + good + " " + opening + "cut off")
    assert len(message.tool_calls) == 1
    assert "cut off" in message.content


def test_arguments_that_are_json_in_a_string_are_an_object() -> None:
    said = hermes("look_up", json.dumps({"city": "x"}))  # type: ignore[arg-type]
    (call,) = parse("Qwen/Qwen3-0.6B", said).tool_calls
    assert json.loads(call.arguments) == {"city": "x"}


def test_half_a_surrogate_in_arguments_can_still_be_sent() -> None:
    said = '<tool_call>{"name": "look_up", "arguments": {"city": "\\ud800"}}</tool_call>'
    (call,) = parse("Qwen/Qwen3-0.6B", said).tool_calls
    assert json.loads(call.arguments.encode()) == {"city": "\ud800"}


@pytest.mark.parametrize("family", ["Qwen/Qwen3-0.6B", "generic without mark tokens", "zai-org/GLM-5"])
def test_a_call_drafted_in_reasoning_is_reasoning_unless_it_is_never_closed(family: str) -> None:
    call = WRITERS[family]("look_up", ARGUMENTS)
    drafted = parse(family, thinking(family, f"try {call} no</think>Hello"))
    assert (drafted.reasoning_content, drafted.content, drafted.tool_calls) == (f"try {call} no", "Hello", ())
    meant = parse(family, thinking(family, f"try {call}"))
    assert (meant.reasoning_content, meant.content, len(meant.tool_calls)) == ("try", "", 1)
    cut_off = parse(family, thinking(family, f"try {call[:20]}"))
    assert (cut_off.reasoning_content, cut_off.content, cut_off.tool_calls) == (f"try {call[:20]}", "", ())


def test_a_response_cut_in_its_reasoning_is_reasoning() -> None:
    assert parse("Qwen/Qwen3.5-4B", "so far ") == AssistantMessage("", "so far")
    assert parse("Qwen/Qwen3-0.6B", "<think>\n") == AssistantMessage("")


def test_reasoning_opened_twice_is_opened_once() -> None:
    assert parse("Qwen/Qwen3.5-4B", "<think>\nhm\n</think>\n\nyes") == AssistantMessage("yes", "hm")


def test_letters_that_spell_a_mark_are_text_where_the_mark_has_a_token() -> None:
    family = "Qwen/Qwen3-0.6B"
    spelled = [index for letter in hermes("look_up", ARGUMENTS) for index in encode(family, letter)]
    assert parse(family, spelled) == AssistantMessage(hermes("look_up", ARGUMENTS))


def test_ids_of_calls_are_the_formats_own_or_repeat_with_the_conversation() -> None:
    family = "Qwen/Qwen3-0.6B"
    ids, renderer = encode(family, hermes("look_up", ARGUMENTS)), chat_renderer(family)

    def call_id(prompt: list[int]) -> str:
        return parse_tokens(renderer, ids, prompt_token_ids=prompt, tools=TOOLS).tool_calls[0].id

    assert call_id([5, 6]) == call_id([5, 6]) != call_id([5, 7])
    (call,) = parse("moonshotai/Kimi-K2-Instruct", kimi("look_up", ARGUMENTS)).tool_calls
    assert call.id == "functions.look_up:0"


NATURAL = st.text("ab é\n.{}", max_size=12)


@pytest.mark.parametrize("family", [family for family in WRITERS if "/" in family])
@given(data=st.data())
@settings(max_examples=25)
def test_a_natural_response_is_read_as_the_library_reads_it(family: str, data: st.DataObject) -> None:
    reasoning, content = data.draw(NATURAL), data.draw(NATURAL)
    arguments = {"city": data.draw(st.text("ab é", min_size=1, max_size=5).map(str.strip)), "days": 3}
    call = data.draw(st.sampled_from(["", WRITERS[family]("look_up", arguments)]))
    said = thinking(family, f"\n{reasoning}\n</think>\n\n{content}\n{call}")
    ids, prompt = encode(family, said), prompt_of(family)
    expected = create_renderer(chat_tokenizer(family), config_from_name(MODEL_RENDERER_MAP[family])).parse_response(
        ids, tools=TOOLS, prompt_ids=prompt
    )
    message = parse(family, ids)
    assert message.content.strip() == expected.content.strip()
    assert message.reasoning_content == ((expected.reasoning_content or "").strip() or None)
    calls = [(call.name, call.arguments) for call in expected.tool_calls]
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == calls


def test_a_family_that_the_library_parses_whole_has_its_message_at_the_end() -> None:
    call = (
        '<|message_model|>look_up<|content_invoke_tool_json|>{"name": "look_up", "args": {"city": "x"}}<|end_message|>'
    )
    ids = encode(
        INKLING, f"<|content_thinking|>hm<|end_message|><|message_model|><|content_text|>yes<|end_message|>{call}"
    )
    parser = chat_renderer(INKLING).parser([1], TOOLS)
    assert not parser.feed(ids)
    delta, message = parser.finish()
    assert join([delta]) == message
    assert (message.reasoning_content, message.content) == ("hm", "yes")
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("look_up", '{"city": "x"}')]
    without = parse_tokens(chat_renderer(INKLING), ids, prompt_token_ids=[1], tools=[])
    assert without.tool_calls == () and '"args"' in without.content
    shown = len(decoded(INKLING, encode(INKLING, "hmye")))
    assert parse_tokens(chat_renderer(INKLING), ids, prompt_token_ids=[1], visible=shown) == AssistantMessage(
        "ye", "hm"
    )


# Parsers by name --------------------------------------------------------------------------------------------------


def test_parsers_can_be_chosen_by_name() -> None:
    tokenizer = chat_tokenizer("nothing known")
    said = encode("nothing known", "<think>hm</think>" + xml("look_up", {"city": "x"}))
    plain = parse_tokens(ChatRenderer(tokenizer, ""), said, prompt_token_ids=[1], tools=TOOLS)
    assert (plain.reasoning_content, plain.tool_calls) == (None, ())
    chosen = ChatRenderer(tokenizer, "", tool_parser="qwen3.5", reasoning_parser="think")
    message = parse_tokens(chosen, said, prompt_token_ids=[1], tools=TOOLS)
    assert (message.reasoning_content, [call.name for call in message.tool_calls]) == ("hm", ["look_up"])
    none = ChatRenderer(chat_tokenizer("Qwen/Qwen3-0.6B"), "Qwen/Qwen3-0.6B", tool_parser="none")
    said = encode("Qwen/Qwen3-0.6B", hermes("look_up", {}))
    assert parse_tokens(none, said, prompt_token_ids=[1], tools=TOOLS).content == hermes("look_up", {})


@pytest.mark.parametrize("setting", ["tool_parser", "reasoning_parser"])
def test_an_unknown_parser_is_rejected_with_the_known_ones(setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"generator\.chat\.{setting} 'gpt' is unknown; use one of: .*none"):
        ChatRenderer(chat_tokenizer("nothing known"), "", **{setting: "gpt"})


# Streams ----------------------------------------------------------------------------------------------------------

WORDS = st.sampled_from(
    [
        "yes",
        " ",
        "\n",
        "é",
        "€",
        "🙂",
        "<",
        "</",
        "<tool",
        "_call>",
        "{",
        '{"a": 1}',
        "<think>",
        "</think>",
        "<|im_end|>",
    ]
)


def responses(family: str) -> st.SearchStrategy[list[int]]:
    """Tokens of anything: words, marks whole and in part, calls good and broken, stray bytes."""
    writer = WRITERS.get(family, hermes)
    call = writer("look_up", ARGUMENTS)
    fragments = st.one_of(
        WORDS.map(lambda text: encode(family, text)),
        st.sampled_from([call, call[:15], call[15:], call.replace("look_up", "")]).map(
            lambda text: encode(family, text)
        ),
        st.integers(0, len(chat_tokenizer(family)) - 1).map(lambda index: [index]),
        st.lists(st.integers(68, 161), max_size=40),  # bytes above 127
    )
    return st.lists(fragments, max_size=8).map(lambda parts: [index for part in parts for index in part])


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@settings(max_examples=40)
def test_deltas_joined_are_the_parse_of_the_whole_response(family: str, data: st.DataObject) -> None:
    ids = data.draw(responses(family))
    tools = data.draw(st.sampled_from([TOOLS, []]))
    chunks = cut(ids, data.draw(st.lists(st.integers(0, 5), max_size=40)))
    renderer, prompt = chat_renderer(family), prompt_of(family)
    joined, message = stream(renderer.parser(prompt, tools), chunks)
    assert joined == message == parse_tokens(renderer, ids, prompt_token_ids=prompt, tools=tools)


@pytest.mark.parametrize("family", ["Qwen/Qwen3-0.6B", "generic without mark tokens", "deepseek-ai/DeepSeek-V3"])
@given(data=st.data())
@settings(max_examples=40)
def test_nothing_but_marks_and_space_is_lost_without_calls(family: str, data: st.DataObject) -> None:
    text = data.draw(st.lists(st.sampled_from(["a ", "ü", "\n", "<", "</think>", "<think>"]), max_size=12).map("".join))
    message = parse(family, text)
    kept = (message.reasoning_content or "") + message.content
    for mark in ("<think>", "</think>"):
        text, kept = text.replace(mark, ""), kept.replace(mark, "")
    assert "".join(kept.split()) == "".join(text.split())


def test_text_is_sent_as_it_comes_and_a_possible_mark_is_held_back() -> None:
    family = "generic without mark tokens"
    parser = chat_renderer(family).parser([1], TOOLS)
    sent = [parser.feed([index]).content for index in encode(family, "Hé <tool_box> x")]
    assert "".join(sent) == "Hé <tool_box> x"
    assert sent[:3] == ["H", "", "é"]
    assert sent[4:10] == [""] * 6 and sent[10] == " <tool_b"


def test_a_call_is_sent_when_it_is_complete() -> None:
    family = "Qwen/Qwen3-0.6B"
    parser = chat_renderer(family).parser([1], TOOLS)
    deltas = [parser.feed([index]) for index in encode(family, hermes("look_up", ARGUMENTS) + "\n")]
    assert [bool(delta) for delta in deltas] == [False] * (len(deltas) - 2) + [True, False]
    (piece,) = deltas[-2].tool_calls
    assert (piece.index, piece.name, json.loads(piece.arguments)) == (0, "look_up", ARGUMENTS)


@pytest.mark.parametrize("family", ["Qwen/Qwen3-0.6B", "generic without mark tokens"])
@given(data=st.data())
@settings(max_examples=60)
def test_content_ends_before_the_stop_string(family: str, data: st.DataObject) -> None:
    before = data.draw(st.lists(WORDS, max_size=6).map("".join))
    renderer, ids = chat_renderer(family), encode(family, before)
    shown = len(decoded(family, ids))
    whole = parse_tokens(renderer, ids, prompt_token_ids=[1], tools=TOOLS)
    assert (
        parse_tokens(renderer, [*ids, *encode(family, "STOP!")], prompt_token_ids=[1], tools=TOOLS, visible=shown)
        == whole
    )
    parser = renderer.parser([1], TOOLS)
    certain = data.draw(st.integers(0, shown))
    deltas = [parser.feed(ids, certain), parser.feed(encode(family, "STOP!"), shown)]
    last, message = parser.finish(shown)
    assert join([*deltas, last]) == message == whole


def grows_like_the_length(work: Callable[[int], object], length: int) -> bool:
    """Whether four times the length costs about four times as much, and not sixteen times."""
    whole, quarter = least_cpu_s(lambda: work(length), lambda: work(length // 4))
    return whole < 8 * quarter


DEGENERATE = {
    "Qwen/Qwen3-0.6B": ["<", "</think>", "<tool_call>", "<tool_call></tool_call>"],
    "generic without mark tokens": ["<", "<tool_call></tool_call>", "é<"],
}


@pytest.mark.parametrize(
    ("family", "text"),
    [
        pytest.param(family, text, marks=() if text in texts else pytest.mark.slow)
        for family, texts in DEGENERATE.items()
        for text in ("<", "</think>", "<tool_call>", "\n", "{", "<tool_call></tool_call>", "é<")
    ],
)
def test_a_degenerate_response_costs_no_more_than_its_length(family: str, text: str) -> None:
    ids = (encode(family, text) * 8_000)[:8_000]

    def parse_each(length: int) -> None:
        parser = chat_renderer(family).parser([1], TOOLS)
        for index in ids[:length]:
            parser.feed([index])
        parser.finish()

    assert grows_like_the_length(parse_each, 8_000)


def test_stray_bytes_cost_no_more_than_their_number() -> None:
    family = "Qwen/Qwen3-0.6B"
    stray = encode(family, "é")[1:] * 16_000
    assert grows_like_the_length(lambda length: parse(family, stray[:length]), 16_000)
    assert parse(family, stray).content == "�" * 16_000

"""Anthropic's dialect as a pure translation: requests, responses, and that the one is inverse to the other."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dialect_answers import (
    ANY_JSON,
    MESSAGES,
    PROMPT,
    choice_of,
    context,
    damaged,
    deltas_of,
    events_of,
    parsed,
    result_of,
)
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.endpoint.dialects import anthropic as dialect
from skyrl_train.endpoint.dialects.anthropic import content_blocks
from skyrl_train.endpoint.sessions.messages import canonical_messages
from skyrl_train.inference.chat.requests import AssistantMessage, MessageDelta, ToolCall, ToolCallDelta
from skyrl_train.inference.interface import StructuredOutput
from skyrl_train.inference.openai.body import Support, body_schema, field_table
from skyrl_train.inference.openai.errors import DialectError

USER = {"role": "user", "content": "hi"}
PLAIN: dict[str, Any] = {"model": "policy", "max_tokens": 5, "messages": [USER]}
CALL = ToolCall("toolu_1", "look", '{"at": "sky"}')
RICH: dict[str, Any] = {
    "model": "policy",
    "max_tokens": 64,
    "system": [
        {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "brief."},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "What "}, {"type": "text", "text": "is up?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look.", "signature": "s"},
                {"type": "text", "text": "I look.", "citations": None},
                {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "sky"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "clouds"}]},
                {"type": "text", "text": "Well?"},
            ],
        },
    ],
    "tools": [{"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    "stop_sequences": ["END"],
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 40,
    "stream": True,
    "metadata": {"user_id": "u"},
    "return_token_ids": True,
}


def parse(**changes: Any) -> dialect.MessagesCall:
    return dialect.parse({**PLAIN, **changes})


def test_a_rich_body_becomes_a_chat_request() -> None:
    call = dialect.parse(RICH)
    assert (call.model, call.streamed, call.token_ids) == ("policy", True, True)
    assert list(call.request.messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is up?"},
        AssistantMessage("I look.", "Look.", (CALL,)).to_openai(),
        {"role": "tool", "tool_call_id": "toolu_1", "content": "clouds"},
        {"role": "user", "content": "Well?"},
    ]
    function = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    assert list(call.request.tools) == [{"type": "function", "function": function}]
    assert call.request.template_kwargs == {"reasoning_effort": "low", "enable_thinking": True}
    params = call.request.params
    assert (call.request.max_tokens, params.max_tokens, params.stop) == (64, 64, ("END",))
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 40)
    assert params.structured == StructuredOutput("json_schema", '{"type": "object"}')


def test_a_plain_body_is_sampled_from_the_whole_distribution() -> None:
    request = parse().request
    assert list(request.messages) == [USER]
    assert (request.params.temperature, request.params.top_p, request.params.top_k) == (1.0, 1.0, -1)
    assert (request.tools, request.tool_choice, request.template_kwargs) == ((), "auto", {})


@pytest.mark.parametrize(
    ("thinking", "arguments"),
    [
        ({"type": "disabled"}, {"enable_thinking": False}),
        ({"type": "adaptive", "display": "summarized"}, {}),
        ({"type": "enabled", "budget_tokens": 2048}, {"enable_thinking": True}),
    ],
)
def test_thinking_is_an_argument_of_the_template(thinking: dict[str, Any], arguments: dict[str, Any]) -> None:
    assert parse(thinking=thinking).request.template_kwargs == arguments


def test_results_and_text_of_one_message_keep_their_order() -> None:
    blocks = [
        {"type": "text", "text": "a"},
        {"type": "tool_result", "tool_use_id": "1"},
        {"type": "tool_result", "tool_use_id": "2", "content": "two", "is_error": True},
        {"type": "text", "text": "b"},
    ]
    assert list(parse(messages=[{"role": "user", "content": blocks}]).request.messages) == [
        {"role": "user", "content": "a"},
        {"role": "tool", "tool_call_id": "1", "content": ""},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
        {"role": "user", "content": "b"},
    ]


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.org/x.png"}}


@pytest.mark.parametrize(
    ("changes", "param", "says"),
    [
        ({"max_tokens": None}, "max_tokens", "required"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": "5"}, "max_tokens", "integer"),
        ({"messages": []}, "messages", "must not be empty"),
        ({"messages": "hi"}, "messages", "array"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "must be '"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type", "text only"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
            "messages[0].content[0].type",
            "no tool_use blocks",
        ),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "messages[1]", "no text to continue"),
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
                ]
            },
            "messages[1]",
            "tool calls cannot be continued",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}, USER]},
            "messages[0].content[0].type",
            "redacted_thinking",
        ),
        ({"tools": [{"type": "web_search_20260318", "name": "web_search"}]}, "tools[0].type", "caller runs"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "required"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type", "auto, any, tool or none"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "required"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display", "always shown"),
        ({"temperature": -1}, "temperature", "at least 0"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"stop_sequences": [""]}, "stop_sequences[0]", "not be empty"),
        ({"container": "c"}, "container", "not supported"),
        ({"colour": "red"}, "colour", "not a field"),
    ],
)
def test_errors_name_the_unsupported_field(changes: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(DialectError, match=says) as refused:
        parse(**changes)
    assert (refused.value.param, refused.value.status) == (param, 400)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (408, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_errors_have_anthropics_types(status: int, kind: str) -> None:
    body = dialect.error_body(DialectError("Do this instead.", status=status))
    assert body == {"type": "error", "error": {"type": kind, "message": "Do this instead."}}


@pytest.mark.parametrize(
    ("message", "finish", "stop_string", "reason"),
    [
        (AssistantMessage("done"), None, None, "end_turn"),
        (AssistantMessage("do"), "length", None, "max_tokens"),
        (AssistantMessage("done"), None, "END", "stop_sequence"),
        (AssistantMessage("", None, (CALL,)), None, None, "tool_use"),
        (AssistantMessage("", None, (CALL,)), None, "END", "tool_use"),
    ],
)
def test_a_message_says_why_it_ended(message: AssistantMessage, finish: Any, stop_string: Any, reason: str) -> None:
    body = parse().response(result_of(choice_of(message, finish, stop_string)), context())
    sequence = stop_string if reason == "stop_sequence" else None
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)


def test_a_message_has_its_blocks_in_order_and_its_usage() -> None:
    choice = choice_of(AssistantMessage("I look.", "Look.", (CALL,)))
    body = parse().response(result_of(choice), context())
    assert [block["type"] for block in body["content"]] == ["thinking", "text", "tool_use"]
    assert body["content"][2] == {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "sky"}}
    usage = {"input_tokens": 2, "cache_read_input_tokens": 1, "cache_creation_input_tokens": 0}
    assert body["usage"] == {**usage, "output_tokens": len(choice.generation.token_ids)}
    assert "skyrl" not in body


def test_requested_token_ids_are_returned_streamed_or_not() -> None:
    choice = choice_of(AssistantMessage("ok"))
    call = parse(return_token_ids=True)
    skyrl = call.response(result_of(choice), context())["skyrl"]
    assert skyrl["token_ids"] == choice.generation.token_ids
    assert set(skyrl) == {
        "prompt_token_ids",
        "token_ids",
        "logprobs",
        "versions",
        "segments",
        "restarts",
        "reused_tokens",
    }
    frames = [frame for event in events_of(choice, []) for frame in call.stream(context()).event(event)]
    streamed = next(frame.data for frame in frames if frame.event == "message_delta")
    assert streamed["skyrl"] == {name: value for name, value in skyrl.items() if name != "reused_tokens"}
    assert (streamed["usage"]["input_tokens"], streamed["usage"]["cache_read_input_tokens"]) == (2, 1)
    (start,) = call.stream(context()).opened(PROMPT)
    assert start.data["message"]["usage"]["input_tokens"] == len(PROMPT), "some clients read it here"


NO_OBJECT = [
    "[1]",
    '"text"',
    "{",
    "{'a': 1}",
    "NaN",
    '{"a": NaN}',
    '{"a": "\\ud800"}',
    "{" * 2000,
    '{"a":' * 70 + "1" + "}" * 70,
]


@pytest.mark.parametrize("arguments", NO_OBJECT)
def test_arguments_that_are_no_object_come_back_as_they_were(arguments: str) -> None:
    message = AssistantMessage("", None, (ToolCall("1", "f", arguments),))
    sent = {"role": "assistant", "content": json.loads(json.dumps(content_blocks(message)))}
    assert parse(messages=[sent, USER]).request.messages[0] == message.to_openai()


@given(MESSAGES)
def test_a_message_that_comes_back_is_the_one_that_was_sampled(message: AssistantMessage) -> None:
    body = json.loads(json.dumps(parse().response(result_of(choice_of(message)), context())))
    history = [USER, {"role": "assistant", "content": body["content"]}, USER]
    assert same(parse(messages=history).request.messages[1], message)


@given(MESSAGES, st.integers(1, 4))
def test_a_streamed_message_is_the_same_as_a_whole_one(message: AssistantMessage, size: int) -> None:
    choice, stream = choice_of(message), parse().stream(context())
    events = events_of(choice, list(deltas_of(message, size)))
    frames = [*stream.opened(PROMPT), *(frame for event in events for frame in stream.event(event)), *stream.closed()]
    assert all(frame.event == frame.data["type"] for frame in frames)
    assert accumulated([frame.data for frame in frames]) == parse().response(result_of(choice), context())


def test_text_behind_a_call_gets_a_block_of_its_own_and_comes_back_as_one_message() -> None:
    message = AssistantMessage("before behind", None, (CALL,))
    pieces = [
        MessageDelta(content="before "),
        MessageDelta(tool_calls=(ToolCallDelta(0, CALL.arguments, CALL.id, CALL.name),)),
        MessageDelta(content="behind"),
    ]
    stream = parse().stream(context())
    frames = [
        *stream.opened(PROMPT),
        *(f for event in events_of(choice_of(message), pieces) for f in stream.event(event)),
    ]
    body = accumulated([frame.data for frame in frames])
    assert [block["type"] for block in body["content"]] == ["text", "tool_use", "text"]
    history = [{"role": "assistant", "content": body["content"]}, USER]
    assert parse(messages=history).request.messages[0] == message.to_openai()


def test_a_failure_inside_a_stream_is_an_error_event() -> None:
    (frame,) = parse().stream(context()).failed(DialectError("Gone.", status=503))
    assert frame.event == "error"
    assert frame.data == {"type": "error", "error": {"type": "overloaded_error", "message": "Gone."}}


def test_counting_takes_the_prompt_alone() -> None:
    call = dialect.parse_count({key: RICH[key] for key in ("model", "messages", "system", "tools", "thinking")})
    assert call.request.messages == dialect.parse(RICH).request.messages
    with pytest.raises(DialectError, match="temperature"):
        dialect.parse_count({"model": "policy", "messages": [USER], "temperature": 1})


@given(
    damaged(RICH)
    | st.dictionaries(st.sampled_from([field.name for field in field_table(dialect.MessagesBody)]), ANY_JSON)
)
def test_any_json_is_a_request_or_a_dialect_error(body: dict[str, Any]) -> None:
    call = parsed(dialect, body)
    if isinstance(call, DialectError):
        assert call.status == 400 and call.message
        assert dialect.error_body(call)["error"]["type"] == "invalid_request_error"
    else:
        json.dumps(list(call.request.messages))


def test_null_is_the_same_as_nothing() -> None:
    optional = {field.name: None for field in field_table(dialect.MessagesBody) if not field.required}
    assert dialect.parse({**PLAIN, **optional}) == dialect.parse(PLAIN)


def test_every_field_says_why_or_how() -> None:
    assert [field.name for field in field_table(dialect.MessagesBody) if not field.note] == []


def test_every_field_is_in_the_schema_unless_it_is_rejected() -> None:
    served = {field.name for field in field_table(dialect.MessagesBody) if field.support is not Support.REJECTED}
    assert set(body_schema(dialect.MessagesBody)["properties"]) == served


def same(message: Any, sampled: AssistantMessage) -> bool:
    """Whether a session takes ``message`` for the sampled one; content, reasoning and ids are compared exactly."""
    recorded = sampled.to_openai()
    assert (message["content"] or "") == sampled.content
    assert message.get("reasoning_content") == (sampled.reasoning_content or None)
    assert [call["id"] for call in message.get("tool_calls", [])] == [call.id for call in sampled.tool_calls]
    return canonical_messages([message]) == canonical_messages([recorded])


def accumulated(events: list[Any]) -> dict[str, Any]:
    """The message that a client puts together, by Anthropic's rules."""
    body: dict[str, Any] = {}
    partial: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                body = {**event["message"], "content": [], "usage": dict(event["message"]["usage"])}
            case "content_block_start":
                assert event["index"] == len(body["content"])
                body["content"].append(dict(event["content_block"]))
            case "content_block_delta":
                assert event["index"] == len(body["content"]) - 1
                block, delta = body["content"][-1], dict(event["delta"])
                if delta.pop("type") == "input_json_delta":
                    partial[event["index"]] = partial.get(event["index"], "") + delta["partial_json"]
                elif "signature" in delta:
                    block["signature"] = delta["signature"]
                else:
                    for name, text in delta.items():
                        block[name] += text
            case "content_block_stop":
                if event["index"] in partial:
                    body["content"][-1]["input"] = json.loads(partial[event["index"]])
            case "message_delta":
                body.update(event["delta"])
                body["usage"].update(event["usage"])
    return body

"""OpenAI's responses as a pure translation: requests, responses, and that the one is inverse to the other."""

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

from skyrl_train.endpoint.dialects import responses as dialect
from skyrl_train.endpoint.dialects.responses import ResponseHistory, parse_with_history
from skyrl_train.inference.chat.requests import AssistantMessage, ChatChoice, MessageDelta, ToolCall, ToolCallDelta
from skyrl_train.inference.interface import StructuredOutput
from skyrl_train.inference.openai.body import Support, body_schema, field_table
from skyrl_train.inference.openai.errors import DialectError, openai_error

USER = {"role": "user", "content": "hi"}
PLAIN: dict[str, Any] = {"model": "policy", "input": "hi"}
CALL = ToolCall("call_1", "look", '{"at": "sky"}')
TOOL = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}, "strict": True}
RICH: dict[str, Any] = {
    "model": "policy",
    "instructions": "Be brief.",
    "input": [
        {"role": "developer", "content": "Really."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is up?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Look."}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": [], "parsed": None}],
        },
        {
            "type": "function_call",
            "call_id": "call_1",
            "name": "look",
            "arguments": '{"at": "sky"}',
            "parsed_arguments": None,
        },
        {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "clouds"}]},
        {"role": "user", "content": "Well?"},
    ],
    "tools": [TOOL],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "max_output_tokens": 64,
    "temperature": 0.5,
    "top_p": 0.9,
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
    "top_logprobs": 2,
    "metadata": {"task": "7"},
    "truncation": "disabled",
    "store": False,
    "stream": True,
    "previous_response_id": "resp_1",
    "return_token_ids": True,
}


def parse(**changes: Any) -> dialect.ResponsesCall:
    return dialect.parse({**PLAIN, **changes})


def test_a_rich_body_becomes_a_chat_request() -> None:
    call = dialect.parse(RICH)
    assert (call.model, call.streamed, call.token_ids, call.store) == ("policy", True, True, False)
    assert call.previous_response_id == "resp_1"
    assert list(call.request.messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "Really."},
        {"role": "user", "content": "What is up?"},
        AssistantMessage("I look.", "Look.", (CALL,)).to_openai(),
        {"role": "tool", "tool_call_id": "call_1", "content": "clouds"},
        {"role": "user", "content": "Well?"},
    ]
    function = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    assert list(call.request.tools) == [{"type": "function", "function": function}]
    assert call.request.template_kwargs == {"reasoning_effort": "low"}
    params = call.request.params
    assert (call.request.max_tokens, params.max_tokens, params.top_logprobs) == (64, 64, 2)
    assert (params.temperature, params.top_p, call.request.logprobs) == (0.5, 0.9, True)
    assert params.structured == StructuredOutput("json_schema", '{"type": "object"}')


def test_a_string_is_a_message_of_the_user() -> None:
    request = parse().request
    assert list(request.messages) == [USER]
    assert (request.max_tokens, request.params.temperature, request.tool_choice) == (None, 1.0, "auto")


def test_a_function_without_parameters_takes_none() -> None:
    (tool,) = parse(tools=[{"type": "function", "name": "f", "parameters": None, "strict": None}]).request.tools
    assert tool["function"] == {"name": "f", "parameters": {"type": "object", "properties": {}}}


def test_no_effort_means_no_thinking() -> None:
    assert parse(reasoning={"effort": "none"}).request.template_kwargs == {
        "reasoning_effort": "none",
        "enable_thinking": False,
    }


IMAGE = {"type": "input_image", "image_url": "https://example.org/x.png"}


@pytest.mark.parametrize(
    ("changes", "param", "says"),
    [
        ({"input": None}, "input", "required"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": 7}, "input", "string"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "must be '"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].type", "text only"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", "sent again in full"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", "required"),
        ({"input": [{"type": "web_search_call", "id": "1"}]}, "input[0].type", "items are"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "caller runs"),
        ({"tools": [{"type": "custom", "name": "f"}]}, "tools[0].type", "caller runs"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "must be 'auto', 'none' or 'required'"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice.type", "must be function or allowed"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"truncation": "auto"}, "truncation", "never rewritten"),
        ({"background": True}, "background", "awaited or streamed"),
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"prompt": {"id": "p"}}, "prompt", "no templates"),
        ({"metadata": {"n": 1}}, "metadata", "strings"),
        ({"include": ["everything"]}, "include[0]", "must be '"),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "required"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "ask for it"),
        ({"reasoning": {"context": "current_turn"}}, "reasoning.context", "as they were sampled"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "stream: true"),
        ({"colour": "red"}, "colour", "not a field"),
    ],
)
def test_errors_name_the_unsupported_field(changes: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(DialectError, match=says) as refused:
        parse(**changes)
    assert (refused.value.param, refused.value.status) == (param, 400)
    assert openai_error(refused.value)["error"]["param"] == param


def body_of(choice: ChatChoice, **changes: Any) -> dict[str, Any]:
    return json.loads(json.dumps(parse(**changes).response(result_of(choice), context())))


def test_a_response_repeats_the_request_and_counts_tokens() -> None:
    choice = choice_of(AssistantMessage("I look.", "Look.", (CALL,)))
    body = dialect.parse(RICH).response(result_of(choice), context())
    assert (body["id"], body["object"], body["status"]) == ("resp_abc123", "response", "completed")
    assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call"]
    assert body["metadata"] == {"task": "7"} and body["tools"] == [TOOL] and body["instructions"] == "Be brief."
    assert body["text"] == {"format": RICH["text"]["format"]} and body["previous_response_id"] == "resp_1"
    assert body["usage"]["input_tokens"] == 3
    assert body["usage"]["input_tokens_details"] == {"cached_tokens": 1, "cache_write_tokens": 0}
    assert body["usage"]["total_tokens"] == 3 + len(choice.generation.token_ids)
    assert body["skyrl"]["token_ids"] == choice.generation.token_ids and body["skyrl"]["reused_tokens"] == 2


def test_a_response_that_is_cut_off_is_incomplete_as_is_its_last_item() -> None:
    body = body_of(choice_of(AssistantMessage("so", "hm"), "length"))
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in body["output"]] == ["completed", "incomplete"]


def test_an_empty_answer_is_an_empty_message() -> None:
    (item,) = body_of(choice_of(AssistantMessage("")))["output"]
    assert item["content"][0]["text"] == ""


def test_the_log_probs_are_those_of_the_tokens_that_spell_the_text() -> None:
    choice = choice_of(AssistantMessage("ab", "ab", (CALL,)))
    body = body_of(choice, include=["message.output_text.logprobs"])
    entries = body["output"][1]["content"][0]["logprobs"]
    assert [entry["token"] for entry in entries] == ["a", "b"]
    assert entries[0] == {"token": "a", "bytes": [97], "logprob": -4 / 8, "top_logprobs": []}
    assert body_of(choice)["output"][1]["content"][0]["logprobs"] == []


@given(MESSAGES)
def test_items_that_come_back_are_the_message_that_was_sampled(message: AssistantMessage) -> None:
    body = body_of(choice_of(message))
    returned = parse(input=[USER, *body["output"], USER]).request.messages
    assert len(returned) == 3 and returned[1] == sampled(message)


@given(MESSAGES)
def test_items_find_together_where_a_client_drops_their_ids(message: AssistantMessage) -> None:
    items = [
        {key: value for key, value in item.items() if key != "id"} for item in body_of(choice_of(message))["output"]
    ]
    assert list(parse(input=[USER, *items, USER]).request.messages) == [USER, sampled(message), USER]


@given(MESSAGES, MESSAGES)
def test_two_answers_in_a_row_stay_two_messages(first: AssistantMessage, second: AssistantMessage) -> None:
    bodies = [
        parse().response(result_of(choice_of(message)), context(unique))
        for message, unique in ((first, "a1"), (second, "b2"))
    ]
    items = [item for body in bodies for item in body["output"]]
    assert list(parse(input=items).request.messages) == [sampled(first), sampled(second)]


@given(MESSAGES, st.integers(1, 4), st.booleans(), st.sampled_from([None, "length"]))
def test_a_streamed_response_is_the_same_as_a_whole_one(
    message: AssistantMessage, size: int, logprobs: bool, finish: Any
) -> None:
    call = parse(include=["message.output_text.logprobs"] if logprobs else [])
    choice, stream = choice_of(message, finish), call.stream(context())
    events = events_of(choice, list(deltas_of(message, size)))
    frames = [*stream.opened(PROMPT), *(frame for event in events for frame in stream.event(event)), *stream.closed()]
    whole = call.response(result_of(choice), context())
    assert all(frame.event == frame.data["type"] for frame in frames)
    assert [frame.data["sequence_number"] for frame in frames] == list(range(len(frames)))
    assert frames[-1].event == f"response.{whole['status']}"
    assert frames[-1].data["response"] == whole
    assert accumulated([frame.data for frame in frames]) == whole["output"]


def test_a_stream_tells_each_step() -> None:
    message = AssistantMessage("ab", "hm", (ToolCall("c", "f", "{}"),))
    stream = parse().stream(context())
    events = events_of(choice_of(message), list(deltas_of(message, 1)))
    names = [frame.event for frame in stream.opened(PROMPT)]
    names += [frame.event for event in events for frame in stream.event(event)]
    parts = ["response.output_item.added", "response.content_part.added"]
    ends = ["response.content_part.done", "response.output_item.done"]
    assert names == [
        "response.created",
        "response.in_progress",
        *parts,
        *["response.reasoning_text.delta"] * 2,
        "response.reasoning_text.done",
        *ends,
        *parts,
        *["response.output_text.delta"] * 2,
        "response.output_text.done",
        *ends,
        "response.output_item.added",
        *["response.function_call_arguments.delta"] * 2,
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_text_behind_a_call_gets_an_item_of_its_own_and_comes_back_as_one_message() -> None:
    message = AssistantMessage("before behind", None, (CALL,))
    pieces = [
        MessageDelta(content="before "),
        MessageDelta(tool_calls=(ToolCallDelta(0, CALL.arguments, CALL.id, CALL.name),)),
        MessageDelta(content="behind"),
    ]
    stream = parse().stream(context())
    frames = [frame for event in events_of(choice_of(message), pieces) for frame in stream.event(event)]
    output = frames[-1].data["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "message"]
    assert list(parse(input=[USER, *output]).request.messages) == [USER, message.to_openai()]


def test_a_failure_inside_a_stream_ends_it_with_the_finished_items() -> None:
    stream = parse().stream(context())
    stream.opened(PROMPT)
    message = AssistantMessage("ab", "hm")
    for event in events_of(choice_of(message), list(deltas_of(message, 2)))[:-1]:
        stream.event(event)
    (frame,) = stream.failed(DialectError("Gone.", status=500))
    assert (frame.event, frame.data["response"]["status"]) == ("response.failed", "failed")
    assert frame.data["response"]["error"] == {"code": "server_error", "message": "Gone."}
    assert [item["type"] for item in frame.data["response"]["output"]] == ["reasoning"]


def test_earlier_messages_come_between_the_instructions_and_the_input() -> None:
    history = ResponseHistory()
    history.keep({"id": "resp_1"}, (USER, AssistantMessage("yes").to_openai()))
    body = {**PLAIN, "instructions": "Be brief.", "input": "next", "previous_response_id": "resp_1"}
    call = parse_with_history(body, history)
    assert [message["content"] for message in call.request.messages] == ["Be brief.", "hi", "yes", "next"]
    call.response(result_of(choice_of(AssistantMessage("ok"))), context())
    kept = history.conversation("resp_abc123")
    assert [message["content"] for message in kept] == ["hi", "yes", "next", "ok"]


def test_a_history_holds_the_latest_responses_only() -> None:
    history = ResponseHistory(max_responses=2)
    for number in range(3):
        history.keep({"id": f"resp_{number}"}, ({"role": "user", "content": str(number)},))
    assert len(history) == 2
    assert history.conversation("resp_2") == ({"role": "user", "content": "2"},)
    with pytest.raises(DialectError, match="older than the last 2"):
        history.conversation("resp_0")


def test_a_history_holds_so_many_characters_and_so_long() -> None:
    now = 0.0
    history = ResponseHistory(max_characters=100, lifetime_s=10.0, clock=lambda: now)

    def keep(response_id: str, characters: int) -> None:
        history.keep({"id": response_id}, ({"role": "user", "content": "x" * characters},))

    for number in range(3):
        keep(f"resp_{number}", 20)
    assert len(history) == 2
    keep("resp_3", 200)
    assert len(history) == 1, "the latest stays"
    keep("resp_4", 1)
    now = 5.0
    keep("resp_5", 1)
    assert len(history) == 2
    now = 10.0
    with pytest.raises(DialectError, match=r"older than .* or than 10 s"):
        history.conversation("resp_4")
    history.conversation("resp_5")
    keep("resp_6", 1)
    assert len(history) == 2, "what is too old is dropped"
    history.delete("resp_6")
    keep("resp_7", 40)
    assert len(history) == 2, "the characters of dropped ones do not count"


def test_nothing_is_kept_before_the_end_of_a_stream() -> None:
    history = ResponseHistory()
    stream = parse_with_history({**PLAIN, "stream": True}, history).stream(context())
    *pieces, last = events_of(choice_of(AssistantMessage("ab")), list(deltas_of(AssistantMessage("ab"), 1)))
    for event in pieces:
        stream.event(event)
    assert len(history) == 0
    *_, ended = stream.event(last)
    assert history.response("resp_abc123") == ended.data["response"]
    assert [message["content"] for message in history.conversation("resp_abc123")] == ["hi", "ab"]


@given(
    damaged(RICH)
    | st.dictionaries(st.sampled_from([field.name for field in field_table(dialect.ResponsesBody)]), ANY_JSON)
)
def test_any_json_is_a_request_or_a_dialect_error(body: dict[str, Any]) -> None:
    call = parsed(dialect, body)
    if isinstance(call, DialectError):
        assert call.status == 400 and call.message
        assert openai_error(call)["error"]["type"] == "invalid_request_error"
    else:
        json.dumps([list(call.request.messages), call.stream(context()).opened(PROMPT)[0].data])


def test_null_is_the_same_as_nothing() -> None:
    optional = {field.name: None for field in field_table(dialect.ResponsesBody) if not field.required}
    assert dialect.parse({**PLAIN, **optional}) == dialect.parse(PLAIN)


def test_every_field_says_why_or_how() -> None:
    assert [field.name for field in field_table(dialect.ResponsesBody) if not field.note] == []


def test_every_field_is_in_the_schema_unless_it_is_rejected() -> None:
    served = {field.name for field in field_table(dialect.ResponsesBody) if field.support is not Support.REJECTED}
    assert set(body_schema(dialect.ResponsesBody)["properties"]) == served


def sampled(message: AssistantMessage) -> dict[str, Any]:
    """The message as a session has recorded it; no reasoning and empty reasoning are the same."""
    recorded = message.to_openai()
    if not message.reasoning_content:
        recorded.pop("reasoning_content", None)
    return recorded


def accumulated(events: list[Any]) -> list[Any]:
    """The output that a client puts together from the events of items and parts, by OpenAI's rules."""
    items: list[Any] = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append(json.loads(json.dumps(event["item"])))
        elif "output_index" not in event:
            continue
        item = items[event["output_index"]]
        if kind == "response.content_part.added":
            assert event["item_id"] == item["id"] and event["content_index"] == len(item["content"])
            item["content"].append(dict(event["part"]))
        elif kind in ("response.output_text.delta", "response.reasoning_text.delta"):
            item["content"][event["content_index"]]["text"] += event["delta"]
        elif kind in ("response.output_text.done", "response.reasoning_text.done"):
            assert item["content"][event["content_index"]]["text"] == event["text"]
        elif kind == "response.content_part.done":
            item["content"][event["content_index"]] = dict(event["part"])
        elif kind == "response.function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "response.function_call_arguments.done":
            assert item["arguments"] == event["arguments"]
        elif kind == "response.output_item.done":
            item["status"] = event["item"]["status"]
            assert item == event["item"]
    return items

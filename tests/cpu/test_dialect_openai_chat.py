"""OpenAI's chat completions: every request field is supported, rejected by name, or harmless to ignore."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any, get_type_hints

import pytest
from dialect_answers import ANY_JSON, MESSAGES, PROMPT, choice_of, context, damaged, deltas_of, events_of, result_of
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.inference.chat.requests import AssistantMessage
from skyrl_train.inference.interface import LogitAdjustment, StructuredOutput
from skyrl_train.inference.openai import chat as openai_chat
from skyrl_train.inference.openai import messages
from skyrl_train.inference.openai.body import NamedSchema, RequestBody, StreamOptions, Support, field_table
from skyrl_train.inference.openai.errors import DialectError, openai_error

ASK: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
EVERYTHING: dict[str, Any] = {
    "model": "policy",
    "messages": [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": " kind"}]},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "nothing"},
    ],
    "max_completion_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 4,
    "min_p": 0.1,
    "min_tokens": 2,
    "n": 3,
    "stop": ["a", "b"],
    "stop_token_ids": [4],
    "seed": -1,
    "logprobs": True,
    "top_logprobs": 2,
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}},
    "tools": [TOOL],
    "tool_choice": "none",
    "reasoning_effort": "none",
    "stream": True,
    "stream_options": {"include_usage": True},
    "chat_template_kwargs": {"flavour": "plain"},
    "ignore_eos": True,
    "return_token_ids": True,
}


def refusal(**fields: Any) -> DialectError:
    with pytest.raises(DialectError) as caught:
        openai_chat.parse({**ASK, **fields})
    return caught.value


def test_the_table_has_every_field_that_the_openai_client_can_send() -> None:
    params = pytest.importorskip("openai.types.chat.completion_create_params")
    sent = get_type_hints(params.CompletionCreateParamsStreaming).keys()
    assert sent <= {entry.name for entry in field_table(openai_chat.ChatCompletionBody)}


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("ChatCompletionContentPartTextParam", messages.TextPart),
        ("ChatCompletionContentPartRefusalParam", messages.RefusalPart),
        ("ChatCompletionSystemMessageParam", messages.PromptMessage),
        ("ChatCompletionDeveloperMessageParam", messages.PromptMessage),
        ("ChatCompletionUserMessageParam", messages.PromptMessage),
        ("ChatCompletionAssistantMessageParam", messages.AssistantBody),
        ("ChatCompletionToolMessageParam", messages.ToolMessage),
        ("ChatCompletionMessageFunctionToolCallParam", messages.ToolCallBody),
        ("ChatCompletionFunctionToolParam", messages.ChatTool),
        ("ChatCompletionNamedToolChoiceParam", messages.NamedTool),
        ("ChatCompletionAllowedToolChoiceParam", messages.AllowedToolsChoice),
        ("ChatCompletionAllowedToolsParam", messages.AllowedTools),
        ("ChatCompletionStreamOptionsParam", StreamOptions),
    ],
)
def test_messages_and_tools_may_have_every_field_that_the_client_can_send(name: str, body: type[RequestBody]) -> None:
    sent = get_type_hints(getattr(pytest.importorskip("openai.types.chat"), name)).keys()
    assert sent and sent - body.model_fields.keys() == set()


def test_functions_and_schemas_may_have_every_field_that_the_client_can_send() -> None:
    shared = pytest.importorskip("openai.types.shared_params")
    assert get_type_hints(shared.FunctionDefinition).keys() <= messages.ToolFunction.model_fields.keys()
    json_schema = pytest.importorskip("openai.types.shared_params.response_format_json_schema").JSONSchema
    assert get_type_hints(json_schema).keys() <= {
        field.alias or name for name, field in NamedSchema.model_fields.items()
    }


@pytest.mark.parametrize(
    ("strict", "text"),
    [(None, '{"x-guidance": {"lenient": true}}'), (False, '{"x-guidance": {"lenient": true}}'), (True, "{}")],
)
def test_only_a_strict_schema_has_to_be_followed_whole(strict: bool | None, text: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": {}, "strict": strict}}
    structured = openai_chat.parse({**ASK, "response_format": form}).request.params.structured
    assert structured is not None and json.loads(structured.value) == json.loads(text)


def test_a_schema_of_vllms_field_may_be_a_text() -> None:
    def grammar(schema: Any) -> Any:
        return openai_chat.parse({**ASK, "structured_outputs": {"json": schema}}).request.params.structured

    assert grammar('{"type": "integer"}') == grammar({"type": "integer"})
    for wrong, message in (("{", "json is not JSON"), ("[]", "must be an object"), ("[" * 100_000, "json is not JSON")):
        assert message in refusal(structured_outputs={"json": wrong}).message


def test_every_field_arrives_in_the_chat_request() -> None:
    call = openai_chat.parse(EVERYTHING)
    request = call.request
    assert (call.model, call.streamed, call.include_usage, call.token_ids) == ("policy", True, True, True)
    assert request.messages[0] == {"role": "system", "content": "be kind"}
    assert request.messages[2]["content"] is None and request.messages[3]["tool_call_id"] == "c"
    assert (request.max_tokens, request.tool_choice, request.tools) == (5, "none", (TOOL,))
    assert request.template_kwargs == {"reasoning_effort": "none", "enable_thinking": False, "flavour": "plain"}
    params = request.params
    assert (params.n, params.seed, params.stop, params.stop_token_ids) == (3, -1, ("a", "b"), (4,))
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.min_tokens) == (0.5, 0.9, 4, 0.1, 2)
    assert (request.logprobs, params.top_logprobs, params.ignore_eos) == (True, 2, True)
    assert params.structured == StructuredOutput("json_schema", '{"type": "object", "x-guidance": {"lenient": true}}')


def test_penalties_and_biases_arrive() -> None:
    fields = {
        "presence_penalty": 0.5,
        "frequency_penalty": -1,
        "repetition_penalty": 1.2,
        "logit_bias": {"7": 2, "5": 1},
    }
    adjustment = openai_chat.parse({**ASK, **fields}).request.params.adjustment
    assert adjustment == LogitAdjustment(0.5, -1.0, 1.2, ((5, 1.0), (7, 2.0)))


def test_null_is_the_same_as_nothing() -> None:
    optional = {entry.name: None for entry in field_table(openai_chat.ChatCompletionBody) if not entry.required}
    assert openai_chat.parse({**ASK, **optional}) == openai_chat.parse(ASK)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"model": None}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"seed": 2**63}, "seed"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools[0].function.name"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": 3}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice.type"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": []}}},
            "tool_choice.allowed_tools.mode",
        ),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"response_format": {"type": "object", "properties": {}}}, "response_format.type"),
        ({"continue_final_message": True}, "messages[0]"),
        ({"continue_final_message": True, "messages": [{"role": "assistant", "content": " "}]}, "messages[0]"),
        (
            {
                "continue_final_message": True,
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                    }
                ],
            },
            "messages[0]",
        ),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
        ({"logit_bias": {"5": math.nan}}, "logit_bias.5"),
        ({"frequency_penalty": math.inf}, "frequency_penalty"),
        ({"logit_bias": {"5": True}}, "logit_bias.5"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"functions": []}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"beam_width": 2}, "beam_width"),
    ],
)
def test_an_error_names_the_field(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert (error.status, error.param) == (400, param)
    assert openai_error(error)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "repetition_penalty": 1},
        {"logit_bias": {"7": 0}},
        {"parallel_tool_calls": True, "modalities": ["text"], "verbosity": "medium"},
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "prediction": 1},
    ],
)
def test_fields_that_change_nothing_are_accepted(fields: dict[str, Any]) -> None:
    assert openai_chat.parse({**ASK, **fields}) == openai_chat.parse(ASK)


def test_deep_objects_are_rejected() -> None:
    deep: Any = {}
    for _ in range(100):
        deep = {"a": deep}
    assert refusal(chat_template_kwargs=deep).param == "chat_template_kwargs"


@given(damaged(EVERYTHING) | st.dictionaries(st.text(max_size=8), ANY_JSON))
def test_no_body_raises_anything_else(body: dict[str, Any]) -> None:
    with contextlib.suppress(DialectError):
        openai_chat.parse(body)


@given(message=MESSAGES, size=st.integers(1, 5))
def test_the_pieces_of_a_stream_are_the_whole_message(message: AssistantMessage, size: int) -> None:
    choice = choice_of(message)
    stream = openai_chat.parse({**ASK, "stream": True}).stream(context())
    frames = stream.opened(PROMPT)
    for event in events_of(choice, list(deltas_of(message, size))):
        frames += stream.event(event)
    frames += stream.closed()
    assert frames[-1].data == "[DONE]"
    choices = [frame.data["choices"][0] for frame in frames[:-1]]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + [choice.finish_reason]
    assert "".join(c["delta"].get("content", "") for c in choices) == message.content
    reasoning = "".join(c["delta"].get("reasoning_content", "") for c in choices)
    assert reasoning == (message.reasoning_content or "")
    calls: dict[int, dict[str, Any]] = {}
    for piece in (call for c in choices for call in c["delta"].get("tool_calls", ())):
        call = calls.setdefault(
            piece["index"], {"id": piece.get("id"), "name": piece["function"].get("name"), "arguments": ""}
        )
        call["arguments"] += piece["function"]["arguments"]
    whole = [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in message.tool_calls]
    assert [calls[index] for index in sorted(calls)] == whole


def test_a_response_has_openais_shape_and_counts_each_token_once() -> None:
    completion = pytest.importorskip("openai.types.chat").ChatCompletion
    choice = choice_of(AssistantMessage("ok"))
    call = openai_chat.parse({**ASK, "logprobs": True, "return_token_ids": True})
    body = call.response(result_of(choice), context())
    parsed = completion.model_validate(body, strict=True)
    sampled = len(choice.generation.token_ids)
    assert body["usage"] == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": sampled,
        "total_tokens": len(PROMPT) + sampled,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert [entry.logprob for entry in parsed.choices[0].logprobs.content] == choice.generation.logprobs
    assert body["choices"][0]["skyrl"]["token_ids"] == choice.generation.token_ids
    assert (body["prompt_token_ids"], body["choices"][0]["token_ids"]) == (PROMPT, choice.generation.token_ids)
    assert body["choices"][0]["skyrl"]["versions"] == choice.generation.versions
    assert body["skyrl"] == {"prompt_token_ids": PROMPT, "reused_tokens": 2}


def test_a_stream_has_the_requested_usage_and_tokens() -> None:
    chunk_type = pytest.importorskip("openai.types.chat").ChatCompletionChunk
    choice = choice_of(AssistantMessage("ok"))
    asked = {
        **ASK,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "logprobs": True,
    }
    stream = openai_chat.parse(asked).stream(context())
    frames = stream.opened(PROMPT)
    for event in events_of(choice, list(deltas_of(choice.message, 1))):
        frames += stream.event(event)
    frames += stream.closed()
    bodies = [frame.data for frame in frames[:-1]]
    for body in bodies:
        chunk_type.model_validate(body, strict=True)
    assert bodies[-1]["choices"] == [] and bodies[-1]["usage"]["completion_tokens"] == len(choice.generation.token_ids)
    assert all(body["usage"] is None for body in bodies[:-1])
    shown = [body["choices"][0] for body in bodies[:-1]]
    ids = [token for c in shown for token in c.get("skyrl", {}).get("token_ids", ())]
    logprobs = [entry["logprob"] for c in shown if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert ids == choice.generation.token_ids and logprobs == choice.generation.logprobs
    assert bodies[-2]["skyrl"] == {"prompt_token_ids": PROMPT}
    assert [body.get("prompt_token_ids") for body in bodies] == [PROMPT, *[None] * (len(bodies) - 1)]
    assert ids == [t for c in shown for t in c.get("token_ids", ())]


def test_every_field_says_why_or_how() -> None:
    assert [entry.name for entry in field_table(openai_chat.ChatCompletionBody) if not entry.note] == []
    assert {entry.support for entry in field_table(openai_chat.ChatCompletionBody)} == set(Support)

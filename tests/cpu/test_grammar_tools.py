"""Forced tool calls: the grammar of each format, reasoning before it, and the four dialects on an embedded engine."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
from chat_models import FAMILIES, chat_renderer, chat_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.configuration_utils import PreTrainedConfig

from skyrl_train.endpoint.dialects import anthropic, responses
from skyrl_train.endpoint.server.app import create_app
from skyrl_train.endpoint.server.settings import ServerSettings
from skyrl_train.endpoint.sessions.store import SessionStore
from skyrl_train.errors import ConfigError, GrammarError
from skyrl_train.inference.chat.formats import _arguments_schema
from skyrl_train.inference.chat.renderer import ChatRenderer
from skyrl_train.inference.chat.requests import AssistantMessage
from skyrl_train.inference.chat.service import ChatService
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.engines.embedded import EmbeddedEngine
from skyrl_train.inference.grammar import Grammars
from skyrl_train.inference.interface import StructuredOutput
from skyrl_train.inference.openai import chat as openai_chat
from skyrl_train.models.folder import load_model
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_train.weight_sync.syncer import WeightSyncer, weights_of

QWEN, ADMIN_KEY = "Qwen/Qwen3-0.6B", "k" * 24
CITY = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"], "additionalProperties": False}
CITY = {**CITY, "$defs": {"n": {"type": "integer", "maximum": 99}}}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": CITY}},
    {
        "type": "function",
        "function": {"name": "stop-it", "parameters": {"type": "object", "maxProperties": 0, "not": {}}},
    },
]
AS_TEXT = ["Qwen/Qwen3.5-4B", "zai-org/GLM-4.5-Air", "zai-org/GLM-5", "MiniMaxAI/MiniMax-M2", "poolside/Laguna-XS.2"]
ANSWER = {
    "type": "object",
    "properties": {"answer": {"const": 1}},
    "required": ["answer"],
    "additionalProperties": False,
}
ANSWER["x-guidance"] = {"whitespace_flexible": False}
FORCING = [
    QWEN,
    *AS_TEXT,
    "deepseek-ai/DeepSeek-V3",
    "moonshotai/Kimi-K2-Instruct",
    "meta-llama/Llama-3.2-1B-Instruct",
    "generic without mark tokens",
]


def spoken(
    name: str, structured: StructuredOutput, seed: int, prompt: list[int], force: int | None = None
) -> AssistantMessage:
    """A response of tokens that the grammar allows, drawn evenly; after ten tokens ``force`` as soon as it is allowed."""
    tokenizer, draw = chat_tokenizer(name), random.Random(seed)
    grammars = Grammars(tokenizer, PreTrainedConfig(vocab_size=len(tokenizer)))
    matcher, tokens = grammars.matcher(structured), list[int]()
    while len(tokens) < 2000:
        allowed = np.unpackbits(matcher.mask, bitorder="little").nonzero()[0].tolist()
        if force in allowed:
            others = [token for token in allowed if token != force]
            tokens.append(force if len(tokens) >= 10 or not others else draw.choice(others))
        else:
            tokens.append(draw.choice(allowed))
        if tokens[-1] in grammars.eos_ids:
            break
        matcher.consume([tokens[-1]])
        matcher.compute_mask()
    parser = chat_renderer(name).parser(prompt, TOOLS)
    parser.feed(tokens)
    return parser.finish()[1]


@pytest.mark.parametrize("name", FORCING)
def test_a_forced_response_is_one_call_that_the_parser_reads(name: str) -> None:
    called = set()
    for seed in range(6):
        message = spoken(name, chat_renderer(name).forced_call(TOOLS), seed, [1, 2])
        (call,) = message.tool_calls
        arguments = json.loads(call.arguments)
        assert (call.name, list(arguments)) in [("look", ["n"]), ("stop-it", [])] and message.content == ""
        assert call.name == "stop-it" or isinstance(arguments["n"], int)
        called.add(call.name)
    assert called == {"look", "stop-it"}
    (call,) = spoken(name, chat_renderer(name).forced_call(TOOLS[:1]), 0, [1, 2]).tool_calls
    assert call.name == "look"


@pytest.mark.parametrize("name", FORCING)
def test_arguments_that_a_function_does_not_have_are_not_written(name: str) -> None:
    for without in ({}, {"parameters": {}}, {"parameters": {"type": "object", "properties": {}}}):
        tools = [{"type": "function", "function": {"name": "look", **without}}]
        for seed in range(3):
            (call,) = spoken(name, chat_renderer(name).forced_call(tools), seed, [1, 2]).tool_calls
            assert json.loads(call.arguments) == {}
    one = {"properties": {"n": {"const": 1}}, "required": ["n"]}
    tools = [{"type": "function", "function": {"name": "look", "parameters": one}}]
    for seed in range(3):
        (call,) = spoken(name, chat_renderer(name).forced_call(tools), seed, [1, 2]).tool_calls
        assert json.loads(call.arguments) == {"n": 1}


def test_a_schema_that_says_so_may_have_further_arguments() -> None:
    for further in ({"additionalProperties": True}, {"patternProperties": {"^x": {}}}, {"$ref": "#/$defs/x"}):
        schema = _arguments_schema({"name": "f", "parameters": {"properties": {"a": {}}, **further}})
        assert schema.get("additionalProperties", True) is True
    # A key that is required and not described would be impossible.
    assert _arguments_schema({"name": "f", "parameters": {"required": ["z"]}})["additionalProperties"] is True
    assert _arguments_schema({"name": "f", "parameters": {"required": [["z"]]}})["additionalProperties"] is True


def test_a_format_that_the_library_parses_whole_cannot_be_forced() -> None:
    for name in set(FAMILIES) - {*FORCING, "generic with mark tokens", "nothing known", "deepseek-ai/DeepSeek-R1"}:
        with pytest.raises(ConfigError, match="nothing here can force a call"):
            chat_renderer(name).forced_call(TOOLS)
        assert chat_renderer(name).answer_or_call(StructuredOutput("json_object"), TOOLS).kind == "json_object"


VALUES: dict[str, dict[str, Any]] = {
    "text": {"type": "string"},
    "unit": {"type": "string", "enum": ["C", 'it\'s "F"', "1"]},
    "count": {"type": "integer", "maximum": 99},
    "maybe": {"anyOf": [{"$ref": "#/$defs/short"}, {"type": "null"}]},
    "either": {"enum": ["a", "7", 7]},
    "pair": {"type": "array", "items": {"$ref": "#/$defs/short"}, "minItems": 2, "maxItems": 2},
}
WRITTEN = {"type": "object", "properties": VALUES, "required": list(VALUES)}
WRITTEN = {**WRITTEN, "$defs": {"short": {"type": "string", "maxLength": 3}}}


@pytest.mark.parametrize("token_marks", [True, False])
@pytest.mark.parametrize("name", AS_TEXT)
def test_arguments_that_are_written_as_text_follow_their_schema(name: str, token_marks: bool) -> None:
    """Also where a value asks for what closes it, and where the vocabulary has no token for the marks."""
    renderer, tools = chat_renderer(name), [{"type": "function", "function": {"name": "look", "parameters": WRITTEN}}]
    form = renderer._format.tools  # type: ignore[union-attr]
    assert form is not None
    of = {**renderer._token_ids} if token_marks else {}
    space, tag, _ = form._closing()
    values = {
        "text": ["Paris < 2\n </ x", "", "7", "null"],
        "unit": ["C", 'it\'s "F"', "1"],
        "count": [-4, 99],
        "maybe": ["ab", "a good deal", None],
        "either": ["a", 7, "7"],
        "pair": [["a", "b"]],
    }
    made = Grammars(chat_tokenizer(name), PreTrainedConfig(vocab_size=len(chat_tokenizer(name))))
    structured = StructuredOutput("grammar", form.grammar(tools, of))
    for index in range(4):
        arguments = {key: each[index % len(each)] for key, each in values.items()}

        def written(key: str, value: object) -> str:
            raw = isinstance(value, str) and (VALUES[key].get("type") == "string" or (key, value) != ("either", "7"))
            text = value if raw else json.dumps(value)
            return form.argument.replace("{key}", key).replace("{value}", str(text)).replace("{line}", "")

        text = form.call.replace("{name}", "look").replace("{line}", "")
        text = text.replace("{arguments}", "".join(written(*item) for item in arguments.items()))
        tokens = (
            list(chat_tokenizer(name)(text, add_special_tokens=False)["input_ids"])
            if token_marks
            else spelt(name, text)
        )
        matcher = made.matcher(structured)
        assert matcher.count_allowed(tokens) == len(tokens), text[matcher.count_allowed(tokens) :]
        matcher.consume(tokens)
        assert matcher.ended_by(made.eos_ids[0])
        if token_marks:
            parser = renderer.parser([1, 2], tools)
            parser.feed(tokens)
            (call,) = parser.finish()[1].tool_calls
            assert json.loads(call.arguments) == arguments
    refused = [
        ("text", f"a{tag}b{space}"),
        ("text", [*form.marks.values()][1]),
        ("text", "</think>"),
        ("unit", "D"),
        ("count", "100"),
        ("count", "x"),
    ]
    refused += [("either", "b"), ("pair", '["a"]'), ("pair", "ab"), ("maybe", '"long"'), ("maybe", "12 more")]
    for key, value in refused:
        parameters = {"properties": {key: VALUES[key]}, "required": [key], "$defs": WRITTEN["$defs"]}
        tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
        text = form.call.replace("{name}", "look").replace("{line}", "")
        text = text.replace("{arguments}", form.argument.replace("{key}", key).replace("{value}", value))
        tokens = spelt(name, text.replace("{line}", ""))
        matcher = made.matcher(StructuredOutput("grammar", form.grammar([tool], {})))
        assert matcher.count_allowed(tokens) < len(tokens), text
    strict = {**tools[0]["function"], "strict": True}  # type: ignore[dict-item]
    form.grammar([{"function": strict}], of)
    strict["parameters"] = {"properties": {"day": {"type": "string", "pattern": "[a-z]+"}}}
    with pytest.raises(GrammarError, match="the model writes the argument 'day' as text, for which pattern cannot"):
        form.grammar([{"function": strict}], of)
    renderer.answer_or_call(StructuredOutput("json_object"), [{"function": strict}])
    for wrong in ({"properties": ["day"]}, {"required": [1]}, {"properties": {"day": {"enum": 1}}}):
        with pytest.raises(GrammarError, match="the parameters of 'look' are no JSON schema"):
            form.grammar([{"function": {"name": "look", "parameters": wrong}}], of)


def spelt(name: str, text: str) -> list[int]:
    """The bytes of a text as tokens, marks included."""
    return [
        token for character in text for token in chat_tokenizer(name)(character, add_special_tokens=False)["input_ids"]
    ]


@pytest.mark.parametrize("name", FORCING)
def test_a_response_with_a_format_and_tools_is_an_answer_or_a_call(name: str) -> None:
    schema = StructuredOutput("json_schema", json.dumps(ANSWER))
    structured, seen = chat_renderer(name).answer_or_call(schema, TOOLS), set()
    for seed in range(12):
        message = spoken(name, structured, seed, [1, 2])
        if message.tool_calls:
            seen.add(message.tool_calls[0].name)
        else:
            assert json.loads(message.content) == {"answer": 1}
            seen.add("answer")
    assert {"answer"} < seen


@pytest.mark.parametrize(
    "structured",
    [
        StructuredOutput("json_object"),
        StructuredOutput("json_schema", '{"enum": [{"a": 1}]}'),
        StructuredOutput("regex", "[ab]/{2}"),
        None,
    ],
    ids=lambda structured: "call" if structured is None else structured.kind,
)
def test_reasoning_that_the_prompt_opens_is_free_and_the_grammar_holds_behind_it(
    structured: StructuredOutput | None,
) -> None:
    renderer, tokenizer = chat_renderer(QWEN), chat_tokenizer(QWEN)
    prompt = tokenizer("<|im_start|>assistant\n<think>\n", add_special_tokens=False)["input_ids"]
    asked = renderer.forced_call(TOOLS) if structured is None else structured
    closing = tokenizer.convert_tokens_to_ids("</think>")
    message = spoken(QWEN, renderer.guided(asked, prompt), 1, prompt, force=closing)
    assert message.reasoning_content
    if structured is None:
        assert len(message.tool_calls) == 1
    elif structured.kind == "regex":
        assert message.content in ("a//", "b//")
    else:
        assert isinstance(json.loads(message.content), dict)
    assert renderer.guided(asked, [1, 2]) == asked, "nothing was opened"


def test_a_model_that_is_asked_to_think_may_open_its_reasoning_itself() -> None:
    renderer, tokenizer = chat_renderer(QWEN), chat_tokenizer(QWEN)
    opening, closing = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    prompt = tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    asked = renderer.guided(renderer.forced_call(TOOLS), prompt, template_kwargs={"enable_thinking": True})
    thought = set()
    for seed in range(8):
        message = spoken(QWEN, asked, seed, prompt, force=closing)
        assert len(message.tool_calls) == 1 and message.content == ""
        thought.add(bool(message.reasoning_content))
    assert thought == {True, False}
    matcher = Grammars(tokenizer, PreTrainedConfig(vocab_size=len(tokenizer))).matcher(asked)
    assert np.unpackbits(matcher.mask, bitorder="little")[opening]
    for kwargs, prefill in [({}, ""), ({"enable_thinking": False}, ""), ({"enable_thinking": True}, "It")]:
        call = renderer.forced_call(TOOLS)
        assert renderer.guided(call, prompt, prefill, kwargs) == call
    always = ChatRenderer(tokenizer, "", template_kwargs={"enable_thinking": True})
    assert always.guided(always.forced_call(TOOLS), prompt) == asked


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", ("auto", None)),
        ("none", ("none", None)),
        ("required", ("required", None)),
        ("look", ("required", ("look",))),
    ],
)
def test_the_dialects_read_every_choice(choice: str, expected: tuple[str, tuple[str] | None]) -> None:
    message, named = {"role": "user", "content": "x"}, choice == "look"
    chat = {"type": "function", "function": {"name": choice}} if named else choice
    one = {"parallel_tool_calls": False}
    requests = [
        openai_chat.parse({"model": "m", **one, "messages": [message], "tools": TOOLS, "tool_choice": chat}).request
    ]
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    item = {"type": "function", "name": choice} if named else choice
    call = responses.parse({"model": "m", **one, "input": "x", "tools": tools, "tool_choice": item})
    assert call.echo["tool_choice"] == item and call.echo["parallel_tool_calls"] == one["parallel_tool_calls"]
    requests.append(call.request)
    kind = {"required": "any", "look": "tool"}.get(choice, choice)
    block = {"type": kind, **({"name": choice} if named else {})}
    if kind != "none":
        block["disable_parallel_tool_use"] = True
    schemas = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS]
    body = {"model": "m", "max_tokens": 9, "messages": [message], "tools": schemas, "tool_choice": block}
    requests.append(anthropic.parse(body).request)
    assert [(request.tool_choice, request.allowed_tools) for request in requests] == [expected] * 3
    if choice == "auto":  # a forced call is the only one
        assert all(request.single_call for request in requests)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_openais_dialects_take_a_choice_of_tools(mode: str) -> None:
    functions = [{"type": "function", "function": {"name": "look"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions}}
    message = {"role": "user", "content": "x"}
    chat = openai_chat.parse({"model": "m", "messages": [message], "tools": TOOLS, "tool_choice": choice}).request
    item = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "look"}]}
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    call = responses.parse({"model": "m", "input": "x", "tools": tools, "tool_choice": item})
    assert call.echo["tool_choice"] == item
    for request in (chat, call.request):
        assert (request.tool_choice, request.allowed_tools) == (mode, ("look",))
        assert [tool["function"]["name"] for tool in request.callable_tools] == ["look"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    """The endpoint over an embedded engine with random weights."""
    folder, tokenizer = str(tmp_path_factory.mktemp("forced") / "model"), chat_tokenizer(QWEN)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=8, intermediate_size=16, max_position_embeddings=4096, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    engine = EmbeddedEngine(folder, executor="thread", max_num_seqs=4, max_model_len=4096)
    client = InferenceEngineClient([engine], tokenizer, QWEN)
    await client.start()
    model, transport = load_model(folder, "float32", "cpu"), SharedMemoryTransport()
    await WeightSyncer(client, transport, weights_of(model.named_parameters), PauseMode.KEEP).sync(0)
    store = SessionStore(client.renderer)
    app = create_app(ChatService(client, client.renderer), client, store, ServerSettings(admin_key=ADMIN_KEY))
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://h", headers=headers) as http:
        yield http
    await client.teardown()
    transport.close()


async def posted(http: httpx.AsyncClient, route: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await http.post(route, json={"model": "policy", "seed": 3, **body})
    assert answer.status_code == 200, answer.text
    read: dict[str, Any] = answer.json()
    return read


@pytest.mark.asyncio(loop_scope="module")
async def test_every_dialect_forces_a_call(http: httpx.AsyncClient) -> None:
    message, tool = {"role": "user", "content": "x"}, TOOLS[0]["function"]
    chosen = {"type": "function", "function": {"name": "look"}}
    body = {"messages": [message], "tools": TOOLS, "tool_choice": chosen, "return_token_ids": True}
    chat = await posted(http, "/v1/chat/completions", body)
    (choice,) = chat["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], call["function"]["name"]) == ("tool_calls", "look")
    assert isinstance(json.loads(call["function"]["arguments"])["n"], int)
    assert choice["skyrl"]["logprobs"].count(0.0) > 30, "name and braces are forced"
    item = await posted(
        http, "/v1/responses", {"input": "x", "tools": [{"type": "function", **tool}], "tool_choice": "required"}
    )
    assert [(each["type"], each["name"]) for each in item["output"]] == [("function_call", "look")]
    schemas = [{"name": "look", "input_schema": tool["parameters"]}]
    body = {"max_tokens": 500, "messages": [message], "tools": schemas, "tool_choice": {"type": "any"}}
    block = await posted(http, "/v1/messages", body)
    assert [(each["type"], each["name"]) for each in block["content"]] == [("tool_use", "look")]
    assert block["stop_reason"] == "tool_use"
    text = await posted(
        http, "/v1/completions", {"prompt": "x", "max_tokens": 50, "structured_outputs": {"regex": "ab{3}"}}
    )
    assert text["choices"][0]["text"] == "abbb"
    text = await posted(http, "/v1/completions", {"prompt": "x", "structured_outputs": {"choice": ["a|b", "a|b"]}})
    assert text["choices"][0]["text"] == "a|b"
    text = await posted(
        http, "/v1/completions", {"prompt": "x", "max_tokens": 50, "response_format": {"type": "json_object"}}
    )
    assert text["choices"][0]["text"].lstrip().startswith("{")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_chat_with_tools_and_a_format_is_an_answer_or_a_call(http: httpx.AsyncClient) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": form, "tools": TOOLS[:1]}
    reasons = set()
    for seed in range(8):
        (choice,) = (await posted(http, "/v1/chat/completions", {**body, "seed": seed}))["choices"]
        reasons.add(choice["finish_reason"])
        if choice["finish_reason"] == "stop":
            assert json.loads(choice["message"]["content"]) == {"answer": 1}
    assert reasons == {"stop", "tool_calls"}
    (choice,) = (await posted(http, "/v1/chat/completions", {**body, "tool_choice": "none"}))["choices"]
    assert json.loads(choice["message"]["content"]) == {"answer": 1}


@pytest.mark.asyncio(loop_scope="module")
async def test_thinking_that_a_request_enables_may_come_before_a_forced_call(http: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "tool_choice": "required", "max_tokens": 40}
    thoughts = {}
    for enabled in (True, False):
        body["chat_template_kwargs"] = {"enable_thinking": enabled}
        answers = [await posted(http, "/v1/chat/completions", {**body, "seed": seed}) for seed in range(8)]
        thoughts[enabled] = sum(bool(answer["choices"][0]["message"].get("reasoning_content")) for answer in answers)
    assert 0 < thoughts[True] < 8 and thoughts[False] == 0


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def wrong_tool(kind: str, properties: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": "wrong", "parameters": {"type": kind, "properties": properties or {}}},
    }


@pytest.mark.asyncio(loop_scope="module")
async def test_only_allowed_tools_are_called_or_shown(http: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "return_token_ids": True}
    whole = await posted(http, "/v1/chat/completions", {**body, "max_tokens": 1})
    for seed in range(4):
        forced = await posted(
            http, "/v1/chat/completions", {**body, "tool_choice": allowed("required", "stop-it"), "seed": seed}
        )
        (call,) = forced["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "stop-it"
        assert forced["prompt_token_ids"] == whole["prompt_token_ids"]
    shown = await posted(
        http, "/v1/chat/completions", {**body, "tool_choice": allowed("auto", "look"), "max_tokens": 1}
    )
    alone = await posted(http, "/v1/chat/completions", {**body, "tools": TOOLS[:1], "max_tokens": 1})
    assert shown["prompt_token_ids"] == alone["prompt_token_ids"] != whole["prompt_token_ids"]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice: a call is asked for, but there are no tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}},
            "tool_choice: the tool 'fly'",
        ),
        ({"tools": TOOLS, "tool_choice": allowed("auto", "look", "fly")}, "tool_choice: the tool 'fly'"),
        (
            {"tools": [*TOOLS, wrong_tool("array")], "tool_choice": "required"},
            "tools: the parameters of 'wrong' must be of type object, got 'array'",
        ),
        (
            {"tools": [*TOOLS, wrong_tool("object", {"x": {"type": "nothing"}})], "tool_choice": "required"},
            "tools[2]: The grammar cannot be compiled: Invalid type: nothing",
        ),
        (
            {"tools": [wrong_tool("object", {"x": {"type": "nothing"}})], "response_format": {"type": "json_object"}},
            "tools[0]: The grammar cannot be compiled: Invalid type: nothing",
        ),
        (
            {
                "tools": TOOLS,
                "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "nothing"}}},
            },
            "response_format: The grammar cannot be compiled: Invalid type: nothing",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": {"not": {}}, "strict": True},
                }
            },
            "response_format: The grammar cannot be compiled: Unimplemented keys",
        ),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs: The grammar cannot be compiled: invalid regex"),
        (
            {"structured_outputs": {"regex": "(a", "json_object": True}},
            "exactly one of json, json_object, regex and choice",
        ),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "contradict each other"),
    ],
)
async def test_what_cannot_be_followed_is_a_clear_400(
    http: httpx.AsyncClient, fields: dict[str, Any], message: str
) -> None:
    for streamed in (False, True):
        body = {"model": "policy", "messages": [{"role": "user", "content": "x"}], "stream": streamed, **fields}
        answer = await http.post("/v1/chat/completions", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, message in error["message"]) == (400, True), answer.text
        field, colon, _ = error["message"].partition(":")
        assert not colon or error["param"] == field

"""A request that vLLM's server takes is taken here: every field is known, and the server's defaults change nothing."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.endpoint.dialects import anthropic, generate, responses
from skyrl_train.inference.openai import chat, completions
from skyrl_train.inference.openai.body import RequestBody, StreamOptions, StructuredOutputsBody

MESSAGES = [{"role": "user", "content": "hi"}]
ROUTES: list[tuple[str, str, type[RequestBody], Callable[..., Any], dict[str, Any]]] = [
    (
        "openai/chat_completion",
        "ChatCompletionRequest",
        chat.ChatCompletionBody,
        chat.parse,
        {"model": "m", "messages": MESSAGES},
    ),
    (
        "openai/completion",
        "CompletionRequest",
        completions.CompletionBody,
        completions.parse,
        {"model": "m", "prompt": "hi"},
    ),
    ("openai/responses", "ResponsesRequest", responses.ResponsesBody, responses.parse, {"model": "m", "input": "hi"}),
    (
        "anthropic",
        "AnthropicMessagesRequest",
        anthropic.MessagesBody,
        anthropic.parse,
        {"model": "m", "messages": MESSAGES, "max_tokens": 5},
    ),
]
NO_LITERAL = object()


def vllm_fields(path: str, name: str) -> dict[str, Any]:
    """The fields of a class in vLLM's source with their defaults. Importing it would take seconds."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    source = (Path(spec.submodule_search_locations[0]) / path).read_text()
    [cls] = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name]
    fields = {}
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_":
            default = node.value
            if isinstance(default, ast.Call):
                named = {keyword.arg: keyword.value for keyword in default.keywords}
                default = named.get("default", default.args[0] if default.args else None)
            try:
                fields[node.target.id] = NO_LITERAL if default is None else ast.literal_eval(default)
            except ValueError:
                fields[node.target.id] = NO_LITERAL
    return fields


@pytest.mark.parametrize(("folder", "name", "body", "parse", "least"), ROUTES, ids=[route[1] for route in ROUTES])
def test_every_field_of_vllms_server_is_known_and_its_defaults_change_nothing(
    folder: str, name: str, body: type[RequestBody], parse: Callable[..., Any], least: dict[str, Any]
) -> None:
    fields = vllm_fields(f"entrypoints/{folder}/protocol.py", name)
    assert len(fields) > 20 and fields.keys() - body.model_fields.keys() == set()
    defaults = {field: value for field, value in fields.items() if value is not NO_LITERAL and field not in least}
    defaults.pop("tool_choice", None)  # without tools "none", with tools "auto"
    for field, value in defaults.items():
        assert parse({**least, field: value}) == parse(least), field
    assert parse({**least, **defaults}) == parse(least)


def test_the_token_route_takes_what_vllms_takes() -> None:
    least: dict[str, Any] = {"token_ids": [1], "sampling_params": {}}
    fields = vllm_fields("entrypoints/scale_out/token_in_token_out/protocol.py", "GenerateRequest")
    assert fields.keys() == generate.GenerateBody.model_fields.keys()
    defaults = {name: value for name, value in fields.items() if value is not NO_LITERAL}
    assert generate.parse({**least, **defaults}) == generate.parse(least)
    sampling = vllm_fields("sampling_params.py", "SamplingParams")
    assert len(sampling) > 30 and sampling.keys() - generate.GenerateSampling.model_fields.keys() == set()
    sampled = {name: value for name, value in sampling.items() if value is not NO_LITERAL and name != "max_tokens"}
    assert generate.parse({**least, "sampling_params": sampled}) == generate.parse(least)


def test_the_nested_objects_of_vllms_server_are_known() -> None:
    options = vllm_fields("entrypoints/generate/base/protocol.py", "StreamOptions")
    assert options.keys() <= StreamOptions.model_fields.keys()
    grammars = vllm_fields("sampling_params.py", "StructuredOutputsParams")
    ours = {field.alias or name for name, field in StructuredOutputsBody.model_fields.items()}
    assert "choice" in grammars and grammars.keys() - ours == set()
    asked = {**grammars, "choice": ["yes", 'a "quoted" no']}
    params = chat.parse({"model": "m", "messages": MESSAGES, "structured_outputs": asked}).request.params
    assert params.structured is not None and params.structured.value == r'start: "yes" | "a \"quoted\" no"'

"""OpenAI's completions: prompts as text or tokens, and the older shapes."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, get_type_hints

import pytest
from chat_models import byte_tokenizer
from dialect_answers import ANY_JSON, damaged
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.inference.interface import StopReason
from skyrl_train.inference.openai import completions as openai_completions
from skyrl_train.inference.openai.body import field_table
from skyrl_train.inference.openai.dialect import ResponseContext, TokenTexts
from skyrl_train.inference.openai.errors import DialectError
from skyrl_train.inference.requests import Generation, GenerationChunk

ASK: dict[str, Any] = {"model": "policy", "prompt": "hi"}
TOKENS = TokenTexts(byte_tokenizer(["<eos>"], [], "<eos>"))
CONTEXT = ResponseContext("abc", 1_700_000_000, TOKENS)
EURO = [TOKENS._tokenizer.convert_tokens_to_ids(piece) for piece in TOKENS._tokenizer.tokenize("a€")]


def generation(text: str = "a€", token_ids: list[int] = EURO) -> Generation:
    size = len(token_ids)
    alternatives = [[(token_ids[0], -1.0)]] * size
    return Generation([1, 2], token_ids, [-0.25] * size, [4] * size, StopReason.LENGTH, text, alternatives)


def test_the_table_has_every_field_that_the_openai_client_can_send() -> None:
    params = pytest.importorskip("openai.types.completion_create_params")
    sent = get_type_hints(params.CompletionCreateParamsStreaming).keys()
    assert sent <= {entry.name for entry in field_table(openai_completions.CompletionBody)}


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("ab", ["ab"]), (["ab", "c"], ["ab", "c"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_a_prompt_is_a_text_or_tokens_or_a_list_of_either(prompt: Any, prompts: Any) -> None:
    assert openai_completions.parse({**ASK, "prompt": prompt}).prompts == prompts


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [[1], "a"]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a"] * 100, "n": 2}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "logprobs": 0}, "echo"),
        ({"echo": "yes"}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_an_error_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(DialectError) as caught:
        openai_completions.parse({**ASK, **fields})
    assert (caught.value.status, caught.value.param) == (400, param)


@given(
    damaged({**ASK, "prompt": [[1, 2], [3]], "logprobs": 1, "echo": False})
    | st.dictionaries(st.text(max_size=8), ANY_JSON)
)
def test_no_body_raises_anything_else(body: dict[str, Any]) -> None:
    with contextlib.suppress(DialectError):
        openai_completions.parse(body)


def test_a_response_has_openais_shape() -> None:
    completion = pytest.importorskip("openai.types").Completion
    call = openai_completions.parse({**ASK, "prompt": ["a", "b"], "n": 2, "logprobs": 1})
    cached = [0, 2, 1, 2]  # the second response to a prompt finds what the first one has cached
    body = call.response([dataclasses.replace(generation(), cached_tokens=tokens) for tokens in cached], CONTEXT)
    parsed = completion.model_validate(body)
    assert [choice.index for choice in parsed.choices] == [0, 1, 2, 3]
    assert body["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 16,
        "total_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 0 + 1},
    }  # two prompts, four responses
    shown = body["choices"][0]["logprobs"]
    assert shown["token_logprobs"] == [-0.25] * 4 and len(shown["tokens"]) == 4
    assert shown["text_offset"] == [0, 1, 2, 3]
    assert shown["top_logprobs"][0] == {"a": -0.25}, "the sampled token counts"


def test_the_chunks_of_a_stream_are_the_whole_response() -> None:
    call = openai_completions.parse({**ASK, "stream": True, "logprobs": 0, "stream_options": {"include_usage": True}})
    stream, done = call.stream(CONTEXT), generation()
    pieces = [
        GenerationChunk(done.token_ids[:2], done.logprobs[:2], done.versions[:2], "a"),
        GenerationChunk(done.token_ids[2:], done.logprobs[2:], done.versions[2:], "€", generation=done),
    ]
    frames = [frame for piece in pieces for frame in stream.chunk(0, piece)] + stream.closed()
    choices = [frame.data["choices"][0] for frame in frames[:-2]]
    assert "".join(choice["text"] for choice in choices) == "a€"
    assert [choice["finish_reason"] for choice in choices] == [None, "length"]
    assert [offset for choice in choices for offset in choice["logprobs"]["text_offset"]] == [0, 1, 2, 3]
    assert frames[-2].data["usage"]["total_tokens"] == 6 and frames[-1].data == "[DONE]"


def test_an_echo_begins_each_text_with_its_prompt_once() -> None:
    call = openai_completions.parse({**ASK, "prompt": [EURO, EURO[:1]], "n": 2, "echo": True})
    whole = call.response([generation()] * 4, CONTEXT)
    assert [choice["text"] for choice in whole["choices"]] == ["a€a€", "a€a€", "aa€", "aa€"]
    stream, done = call.stream(CONTEXT), generation()
    pieces = [GenerationChunk([1]), GenerationChunk([1], text="a"), GenerationChunk(text="€", generation=done)]
    frames = [frame for index in range(4) for piece in pieces for frame in stream.chunk(index, piece)]
    assert [frame.data["choices"][0]["text"] for frame in frames] == ["a€a", "€"] * 2 + ["aa", "€"] * 2
    assert openai_completions.parse({**ASK, "prompt": "hi", "echo": True}).echoed(0, TOKENS) == "hi"


def test_a_piece_of_a_character_keeps_its_exact_bytes() -> None:
    spelt = [TOKENS[token_id] for token_id in EURO]
    assert [entry.text for entry in spelt] == ["a", "�", "�", "�"]
    assert bytes(byte for entry in spelt for byte in entry.bytes) == "a€".encode()


def test_token_ids_are_also_where_vllms_server_has_them() -> None:
    call = openai_completions.parse({**ASK, "return_token_ids": True})
    (choice,) = call.response([generation()], CONTEXT)["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([1, 2], EURO)
    stream = call.stream(CONTEXT)
    pieces = [
        GenerationChunk(prompt_token_ids=[1, 2]),  # shows nothing
        GenerationChunk(EURO[:1], [-0.25], [4], "a"),
        GenerationChunk(EURO[1:], text="€", generation=generation()),
    ]
    choices = [frame.data["choices"][0] for piece in pieces for frame in stream.chunk(0, piece)]
    assert [choice["token_ids"] for choice in choices] == [EURO[:1], EURO[1:]]
    assert [choice.get("prompt_token_ids") for choice in choices] == [[1, 2], None]

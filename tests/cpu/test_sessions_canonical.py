"""Canonical messages: equality of a sampled message and the one that a client sends back."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.endpoint.sessions.messages import canonical_messages

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": [2.5, "x"]}'}}


def call(arguments: Any, name: str = "add", call_id: str = "call_1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    [a], [b] = canonical_messages([first]), canonical_messages([second])
    return a.digest == b.digest and (None in (a.reasoning, b.reasoning) or a.reasoning == b.reasoning)


def said(content: Any = None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"role": "assistant"}, said(None)),
        (said(None), said("")),
        (said([]), said("")),
        (said([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), said("ab")),
        (said("a"), said(" a\n")),
        (said("a"), said("a", reasoning_content="why")),
        (said("a", reasoning_content="why"), said("a", reasoning_content=" why\n")),
        (said("a"), said("a", reasoning_content="")),
        (said("a"), said("a", refusal=None, annotations=[], audio=None, name="agent", tool_calls=None)),
        (said(tool_calls=[CALL]), said(tool_calls=[call('{"b":[2.5,"x"],"a":1.0}')])),
        (said(tool_calls=[CALL]), said(tool_calls=[call({"b": [2.5, "x"], "a": 1})])),
        (said(tool_calls=[CALL]), said("", tool_calls=[{**CALL, "id": "renamed", "index": 0}])),
        (said(tool_calls=[call("")]), said(tool_calls=[call("{}")])),
        (said(tool_calls=[call("no json")]), said(tool_calls=[call(" no json ")])),
        # A long integer as other programs send it back: in JavaScript, and most of those with integers of 64 bits.
        (said(tool_calls=[call('{"a": 1234567890123456789}')]), said(tool_calls=[call({"a": 1234567890123456800})])),
        (said(tool_calls=[call('{"a": 20000000000000000001}')]), said(tool_calls=[call({"a": 2e19})])),
        ({"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "user", "content": "a", "extra": 1}),
    ],
)
def test_these_are_the_same(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert same(first, second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (said("a"), said("b")),
        (said("a b"), said("a  b")),
        (said("a"), {"role": "user", "content": "a"}),
        ({"role": "user", "content": "a"}, {"role": "user", "content": "a "}),
        ({"role": "user", "content": "a"}, {"role": "user", "content": "a", "name": "eve"}),
        (said("a", reasoning_content="why"), said("a", reasoning_content="because")),
        (said(tool_calls=[CALL]), said()),
        (said(tool_calls=[CALL]), said(tool_calls=[CALL, CALL])),
        (said(tool_calls=[call('{"a": 1}')]), said(tool_calls=[call('{"a": "1"}')])),
        (said(tool_calls=[call('{"a": [1, 2]}')]), said(tool_calls=[call('{"a": [2, 1]}')])),
        (said(tool_calls=[call('{"a": true}')]), said(tool_calls=[call('{"a": 1}')])),
        (said(tool_calls=[call("{}")]), said(tool_calls=[call("{}", name="sub")])),
        (said(tool_calls=[call("a")]), said(tool_calls=[call('"a"')])),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "a"}]}, {"role": "user", "content": ""}),
        (said([{"type": "refusal", "text": "a"}]), said("a")),
    ],
)
def test_these_differ(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert not same(first, second)


def conversation(ids: list[str], answers: list[str]) -> list[Any]:
    """An assistant calls two tools; then come their results, in this order."""
    calls = [call("{}", call_id=call_id) for call_id in ids]
    return [said(tool_calls=calls), *({"role": "tool", "content": "r", "tool_call_id": answer} for answer in answers)]


def test_ids_of_tool_calls_matter_only_for_which_call_a_result_answers() -> None:
    plain = canonical_messages(conversation(["x", "y"], ["x", "y"]))
    assert canonical_messages(conversation(["p", "q"], ["p", "q"])) == plain
    assert canonical_messages(conversation(["x", "y"], ["y", "x"])) != plain
    assert canonical_messages(conversation(["x", "y"], ["x", "x"])) != plain


def test_an_id_that_is_used_again_means_the_latest_call() -> None:
    again = canonical_messages([*conversation(["x", "y"], ["x", "y"]), *conversation(["x", "y"], ["x", "y"])])
    fresh = canonical_messages([*conversation(["x", "y"], ["x", "y"]), *conversation(["p", "q"], ["p", "q"])])
    assert again == fresh


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def shuffled(value: Any, order: random.Random) -> Any:
    if isinstance(value, dict):
        items = [(key, shuffled(inner, order)) for key, inner in value.items()]
        order.shuffle(items)
        return dict(items)
    return [shuffled(inner, order) for inner in value] if isinstance(value, list) else value


@given(json_values, st.randoms(use_true_random=False), st.sampled_from([None, 2]), st.booleans())
def test_arguments_are_the_same_however_they_are_written(
    value: Any, order: random.Random, indent: int | None, ascii_only: bool
) -> None:
    written = json.dumps(shuffled(value, order), indent=indent, ensure_ascii=ascii_only)
    assert same(said(tool_calls=[call(json.dumps(value))]), said(tool_calls=[call(written)]))


@given(json_values, json_values)
def test_arguments_with_other_values_differ(first: Any, second: Any) -> None:
    def plain(value: Any) -> Any:
        """Equal exactly for equal JSON values with numbers as doubles: Python's own comparison takes True for 1."""
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        if isinstance(value, int) and not isinstance(value, bool):
            return (False, float(str(value)))  # of a string, because it is infinite where the number is too large
        return [plain(inner) for inner in value] if isinstance(value, list) else (isinstance(value, bool), value)

    equal = plain(first) == plain(second)
    assert same(said(tool_calls=[call(json.dumps(first))]), said(tool_calls=[call(json.dumps(second))])) == equal


@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}", "1e999", "\ud800", '"\\ud800"'])
def test_arguments_that_no_parser_likes_are_compared_as_they_are(arguments: str) -> None:
    assert same(said(tool_calls=[call(arguments)]), said(tool_calls=[call(arguments)]))
    assert not same(said(tool_calls=[call(arguments)]), said(tool_calls=[call("{}")]))

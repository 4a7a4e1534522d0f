"""``docs/design/walks.md`` shows the real paths: each function exists, its caller calls it, and the paths stay short."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "skyrl_train"
PAGE = (ROOT / "docs" / "design" / "walks.md").read_text()

# The most calls and files that each walk may have.
LIMITS = {
    "A prompt, from admission to the engine": (13, 8),
    "A chat request, from HTTP to the engine": (14, 8),
    "A weight update, from the trainer to vLLM": (20, 9),
}


class Call(NamedTuple):
    """A row of a table."""

    number: str
    caller: str  # the number of its row, or "-"
    function: str
    file: str
    text: str


def walk(title: str) -> list[Call]:
    section = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert section, f"walks.md has no section {title!r}"
    rows = re.findall(r"^\| (\d+) \| (\d+|-) \| `([\w.]+)` \| `([\w/.]+)` \| (.*) \|$", section[1], re.MULTILINE)
    assert len(rows) == len(re.findall(r"^\| \d+ \|", section[1], re.MULTILINE)), "a row cannot be read"
    return [Call(*row) for row in rows]


def definition(call: Call) -> ast.AST:
    """The function in the source, found by its qualified name."""
    node: Any = ast.parse((PACKAGE / call.file).read_text())
    for part in call.function.split("."):
        found = [
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and child.name == part
        ]
        assert found, f"{call.file} has no {call.function}"
        node = found[0]
    return node


def names_in(node: ast.AST) -> set[str]:
    """Every name, attribute and text in a function: a remote call names its method in a text."""
    names = {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
    names |= {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return names | {str(inner.value) for inner in ast.walk(node) if isinstance(inner, ast.Constant)}


@pytest.mark.parametrize("title", LIMITS)
def test_a_walk_is_short(title: str) -> None:
    calls, (most_calls, most_files) = walk(title), LIMITS[title]
    assert len(calls) <= most_calls
    assert len({call.file for call in calls}) <= most_files


@pytest.mark.parametrize("title", LIMITS)
def test_each_function_exists_and_its_caller_names_it(title: str) -> None:
    rows = {call.number: call for call in walk(title)}
    for call in rows.values():
        definition(call)
        if call.caller == "-":
            continue
        caller = rows[call.caller]
        cls, _, method = call.function.rpartition(".")
        called = cls if method == "__call__" else method  # an object that is called is constructed by its caller
        via = re.search(r"`via (\w+)`", call.text)
        assert {called, *(via.groups() if via else ())} & names_in(definition(caller)), (
            f"{caller.function} does not call {call.function}"
        )

"""``docs/design/walks.md`` shows the real paths: each function exists, its caller calls it, and the paths stay short."""

from __future__ import annotations

import ast
import asyncio
import re
import sys
import threading
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import httpx
import pytest
from scripted import ScriptedEngine, scripted_update, settle

from skyrl_train.endpoint.server.app import create_app
from skyrl_train.endpoint.server.settings import ServerSettings
from skyrl_train.endpoint.sessions.store import SessionStore
from skyrl_train.inference.chat.service import ChatService
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.models.tiny import character_tokenizer
from skyrl_train.types import PauseMode

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


# Set in the task of the observed request. Its threads and inner tasks inherit the value; those of a weight sync do not.
OBSERVED: ContextVar[bool] = ContextVar("OBSERVED", default=False)


async def test_a_chat_request_that_a_weight_sync_interrupts_passes_few_functions() -> None:
    """A request of a session, from HTTP to the engine and back, continued after the sync."""
    passed: set[tuple[str, str]] = set()

    def observe(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        named = not code.co_name.startswith("<")  # neither a lambda nor a comprehension
        if event == "call" and named and code.co_filename.startswith(f"{PACKAGE}/") and OBSERVED.get():
            passed.add((code.co_filename, code.co_qualname))

    engine = ScriptedEngine()
    client = InferenceEngineClient([engine], character_tokenizer("0123456789"), engine_wait_timeout_s=0)
    store = SessionStore(client.renderer)
    app = create_app(ChatService(client, client.renderer), client, store, ServerSettings(admin_key="a" * 20))
    session = store.open("walk")

    async def sync_weights(version: int) -> None:
        await client.receive_weights(scripted_update(version))
        await client.load_weights(scripted_update(version), PauseMode.ABORT)

    async def ask() -> httpx.Response:
        OBSERVED.set(True)
        headers = {"authorization": f"Bearer {session.api_key}"}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            body = {"model": "policy", "messages": [{"role": "user", "content": "12"}], "max_tokens": 8}
            return await http.post("/v1/chat/completions", headers=headers, json=body)

    await sync_weights(0)
    before = sys.getprofile()
    threading.setprofile(observe)
    sys.setprofile(observe)
    try:
        request = asyncio.create_task(ask())
        await settle(60)
        engine.tick(3)
        await settle()
        await sync_weights(1)
        while not request.done():
            await settle()
            engine.tick()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
        await client.teardown()
    assert (await request).status_code == 200
    assert session.session.statistics().turns == 1 and len(engine.requests) == 2
    files = {file for file, _ in passed}
    assert len(passed) <= 180 and len(files) <= 35, f"{len(passed)} functions in {len(files)} files"

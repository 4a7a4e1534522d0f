"""An endpoint over a real socket with a scripted model: its n-th answer of a conversation is the n-th text of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from chat_models import chat_tokenizer, encode
from scripted import ScriptedEngine, scripted_update

from skyrl_train.endpoint.server.app import create_app
from skyrl_train.endpoint.server.server import EndpointServer
from skyrl_train.endpoint.server.settings import ServerSettings
from skyrl_train.endpoint.sessions.session import Session
from skyrl_train.endpoint.sessions.store import SessionStore
from skyrl_train.inference.chat.service import ChatService
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.interface import InferenceEngineInput
from skyrl_train.types import PauseMode

MODEL = "Qwen/Qwen3-0.6B"
ADMIN_KEY = "the administrator's key"

LOOK = '<tool_call>\n{"name": "look", "arguments": {"at": "Zürich", "days": 1.0}}\n</tool_call>'
# Thinks, speaks and calls twice; then answers with what came back; then says a last word.
ANSWERS = [f"<think>\nHm, hm.\n</think>\n\nI look.\n{LOOK}\n{LOOK}", "<think>\nClouds.\n</think>\n\nIt rains.", "Bye."]


class AnnouncedEngine(ScriptedEngine):
    """Sets ``submitted`` when a request comes in."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.submitted = asyncio.Event()

    def _submit(self, engine_input: InferenceEngineInput) -> Any:
        request = super()._submit(engine_input)
        self.submitted.set()
        return request


@dataclass
class World:
    """The endpoint. ``root`` is its URL without the version, ``api_key`` the key of ``session``."""

    root: str
    engine: AnnouncedEngine
    client: InferenceEngineClient
    store: SessionStore
    session: Session
    api_key: str

    @property
    def base_url(self) -> str:
        return f"{self.root}/v1"


@asynccontextmanager
async def serving(answers: Sequence[str] = ANSWERS, *, free_running: bool = True) -> AsyncIterator[World]:
    """An endpoint, stopped in the end with nothing left in its engine. It samples at ``tick`` where not free running."""
    tokenizer = chat_tokenizer(MODEL)
    script, eos = _script(answers), tokenizer.eos_token_id
    engine = AnnouncedEngine(script, free_running=free_running, structured_output=True, eos=eos)
    client = InferenceEngineClient([engine], tokenizer, MODEL, engine_wait_timeout_s=0)
    await client.start()
    await client.receive_weights(scripted_update(4))
    await client.load_weights(scripted_update(4), PauseMode.KEEP)
    store = SessionStore(client.renderer)
    app = create_app(ChatService(client, client.renderer), client, store, ServerSettings(admin_key=ADMIN_KEY))
    server = EndpointServer(app)
    url = await server.start()
    opened = store.open("sample")
    try:
        yield World(url.removesuffix("/v1"), engine, client, store, opened.session, opened.api_key)
        assert engine.running == []
    finally:
        await server.stop(drain_s=0)
        await client.teardown()


def _script(answers: Sequence[str]) -> Callable[[Sequence[int], int], int]:
    opening = encode(MODEL, "<|im_start|>assistant\n")
    spelt = [[*encode(MODEL, answer), *encode(MODEL, "<|im_end|>")] for answer in answers]

    def next_token(tokens: Sequence[int], seed: int) -> int:
        starts = [at for at in range(len(tokens)) if list(tokens[at : at + len(opening)]) == opening]
        said = len(tokens) - starts[-1] - len(opening)
        return spelt[len(starts) - 1][said]

    return next_token

"""A whole endpoint over scripted engines, on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
from scripted import ScriptedEngine, scripted_update, settle
from transformers import PreTrainedTokenizerFast

from skyrl_train.endpoint.server.app import create_app
from skyrl_train.endpoint.server.gateway import Gateway
from skyrl_train.endpoint.server.server import EndpointServer
from skyrl_train.endpoint.server.settings import ServerSettings
from skyrl_train.endpoint.sessions import SessionLimits, SessionStore
from skyrl_train.inference.chat.service import ChatService
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.interface import InferenceEngineInput
from skyrl_train.models.tiny import character_tokenizer
from skyrl_train.runtime.concurrency import Signal
from skyrl_train.types import PauseMode

LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJK"
TOKENIZER: PreTrainedTokenizerFast = character_tokenizer(LETTERS)
ADMIN_KEY = "the-administrators-own-key"
ASK: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "0123"}]}


class WatchedEngine(ScriptedEngine):
    """Tells when a request comes or goes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.changed = Signal()

    def _submit(self, engine_input: InferenceEngineInput) -> Any:
        request = super()._submit(engine_input)
        self.changed.notify()
        return request

    def _forget(self, request: Any) -> None:
        super()._forget(request)
        self.changed.notify()

    async def holds(self, requests: int) -> None:
        """Returns when it holds that many."""
        async with asyncio.timeout(60):
            await self.changed.wait_until(lambda: len(self.running) == requests)


@dataclass
class World:
    """An endpoint that listens, and everything behind it."""

    engine: WatchedEngine
    client: InferenceEngineClient
    store: SessionStore
    server: EndpointServer
    gateway: Gateway
    url: str
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI
    closing: list[Any] = field(default_factory=list)

    def sdk(self, api_key: str, **options: Any) -> openai.AsyncOpenAI:
        """An OpenAI client with a key of its own."""
        sdk = openai.AsyncOpenAI(base_url=self.url, api_key=api_key, **{"max_retries": 0, **options})
        self.closing.append(sdk)
        return sdk

    async def publish(self, version: int, mode: PauseMode = PauseMode.KEEP) -> None:
        await self.client.receive_weights(scripted_update(version))
        await self.client.load_weights(scripted_update(version), mode)

    async def tick(self, times: int) -> None:
        """Samples tokens one by one, each seen before the next."""
        for _ in range(times):
            self.engine.tick()
            await settle(4)


@asynccontextmanager
async def endpoint(
    engine: WatchedEngine | None = None,
    *,
    tokenizer: PreTrainedTokenizerFast = TOKENIZER,
    limits: SessionLimits | None = None,
    admission: Any = None,
    **settings: Any,
) -> AsyncIterator[World]:
    """A world that is gone afterwards; no request may be left in its engine."""
    engine = engine or WatchedEngine(free_running=True)
    client = InferenceEngineClient([engine], tokenizer, engine_wait_timeout_s=0)
    store = SessionStore(client.renderer, limits, admission)
    app = create_app(
        ChatService(client, client.renderer), client, store, ServerSettings(**{"admin_key": ADMIN_KEY, **settings})
    )
    server = EndpointServer(app)
    url = await server.start()
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with httpx.AsyncClient(base_url=url.removesuffix("/v1"), headers=headers) as http:
        world = World(engine, client, store, server, app.state.gateway, url, http, None)  # type: ignore[arg-type]
        world.openai = world.sdk(ADMIN_KEY)
        await world.publish(0)
        try:
            yield world
        finally:
            for sdk in world.closing:
                await sdk.close()
            await server.stop(drain_s=0)
            await settle()
            await client.teardown()
    assert engine.running == [], "a request is left in the engine"

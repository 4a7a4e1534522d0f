"""One request inside a vLLM server: its connection, and which weight version sampled each of its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from skyrl_train.errors import SkyRLError
from skyrl_train.inference.engines.vllm.remote_connection import Connection
from skyrl_train.inference.engines.vllm.remote_wire import Part, Spans, external_id, parse_part, request_body
from skyrl_train.inference.engines.vllm.requests import Asked
from skyrl_train.inference.interface import TokenChunk

# Asks the server now for the spans of a request: None when it has ended (its last part then brings them).
AskSpans = Callable[[str], Awaitable[Spans | None]]


@dataclass(eq=False)
class RemoteFlight:
    """From the moment a request is sent until it has ended, or nobody wants it.

    Attributes:
        salt: what its prompt is cached under.
        version: what the server held when it was sent.
        loads: how many updates had been loaded by then; later, how many of them its spans tell of.
        restart: the server was told to drop it before its first token; it starts over under other weights.
        suspect: it may have been prefilled from what other weights had cached.
    """

    id: str
    asked: Asked
    salt: str
    version: int
    loads: int
    restart: bool = False
    suspect: bool = False
    delivered: int = 0
    _held: list[Part] = field(default_factory=list)
    _parts: asyncio.Queue[Part | SkyRLError] = field(default_factory=asyncio.Queue)
    _reader: asyncio.Task[None] | None = None
    _spans: Spans = field(init=False)  # as far as they are known

    def __post_init__(self) -> None:
        self._spans = Spans(((self.version, 0),))

    def send(self, connection: Connection) -> asyncio.Task[None]:
        """Sends the request; the task ends when the server has said all that it will say, however slowly it is read here."""
        self._reader = asyncio.create_task(self._read(connection), name="remote-vllm-request")
        return self._reader

    def cancel(self) -> None:
        """Closes the connection, which aborts the request in the server."""
        if self._reader is not None:
            self._reader.cancel()

    def fail(self, error: SkyRLError) -> None:
        """Whoever waits for a part gets ``error``."""
        self._parts.put_nowait(error)

    async def _read(self, connection: Connection) -> None:
        asked = self.asked
        body = request_body(
            self.id, asked.prompt, asked.params, salt=self.salt, stream=asked.stream, priority=asked.priority
        )
        try:
            if not asked.stream:
                self._parts.put_nowait(parse_part(await connection.generate(body), asked.params.top_logprobs))
                return
            async for event in connection.stream(body):
                self._parts.put_nowait(parse_part(event, asked.params.top_logprobs))
        except SkyRLError as error:
            self.fail(error)

    async def next_part(self) -> Part:
        """What the server says next.

        Raises:
            SkyRLError: the request failed, or its connection.
        """
        part = await self._parts.get()
        if isinstance(part, SkyRLError):
            raise part
        return part

    async def label(self, part: Part, loads: int, version: int, ask: AskSpans) -> TokenChunk | None:
        """The next tokens with their versions; None while the server has not said which ones these are.

        Args:
            loads, version: updates loaded into the server so far, and the version of the last one.
        """
        self._held.append(part)
        if part.spans is not None or part.stop_reason is not None:
            return self._take(part.spans or Spans(()))
        if self.loads != loads:
            # An update came between: these tokens can be of either version, and the server knows.
            spans = await ask(external_id(self.id))
            if spans is None:
                return None
            self._spans = spans
            if spans.newest == version:
                self.loads = loads
        return self._take(self._spans)

    def _take(self, spans: Spans) -> TokenChunk:
        parts, self._held = self._held, []
        token_ids = [token for part in parts for token in part.token_ids]
        logprobs = [logprob for part in parts for logprob in part.logprobs]
        versions = spans.versions(self.delivered, len(token_ids))
        self.delivered += len(token_ids)
        top = None
        if self.asked.params.top_logprobs:
            top = [alternatives for part in parts for alternatives in part.top_logprobs or ()]
        return TokenChunk(token_ids, logprobs, versions, parts[-1].stop_reason, top)

"""The requests of one remote engine: from the gate to the server, and their tokens back with versions.

chunks ──gate──> take off ──POST──> server ──> part ──> chunk with ids, log-probs, versions ──> land
             ^                                   │
             └── weights changed before its first token: it starts over under the new version
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence

from skyrl_train.concurrency import Gate
from skyrl_train.errors import EngineDeadError, EngineError
from skyrl_train.inference.engines.busy_time import BusyTime
from skyrl_train.inference.engines.vllm.remote_flight import RemoteFlight
from skyrl_train.inference.engines.vllm.remote_link import ServerLink
from skyrl_train.inference.engines.vllm.remote_wire import Spans, external_id, parse_version
from skyrl_train.inference.engines.vllm.requests import Asked
from skyrl_train.inference.interface import StopReason, TokenChunk

logger = logging.getLogger(__name__)
ARRIVAL_S = 0.02  # for a request that was sent before an abort and arrives after it: then it is aborted again
ABORT_ROUNDS = 3


class RemoteTraffic:
    """All requests to a server, over all the engine's lives.

    Args:
        alive: the way to the server; raises EngineDeadError where there is none.

    Attributes:
        busy: for how long there were requests that were not paused.
        gate: where requests wait while the engine is paused.
        version: of the tokens sampled from now on; -1 for weights that this library did not publish.
        generated_tokens: tokens that have arrived.
        prefill_tokens: of the prompts sent, whatever the server had cached of them.
    """

    def __init__(self, alive: Callable[[], ServerLink]) -> None:
        self.busy = BusyTime()
        self.gate = Gate()
        self.version = -1
        self.generated_tokens = self.prefill_tokens = 0
        self._alive = alive
        self._loads = 0
        self._salts = itertools.count()
        self._salts_prefix = self._salt = ""
        self._flights: dict[RemoteFlight, asyncio.Task[None]] = {}

    def begin(self) -> None:
        """The engine is started; nothing that the server cached before is found again."""
        self._salts_prefix = uuid.uuid4().hex
        self.forget_prefixes()
        self.busy.paused(False)
        self.gate.open()

    async def chunks(self, asked: Asked) -> AsyncGenerator[TokenChunk, None]:
        """The parts of one answer; a request may be sent more than once before its first token.

        Raises:
            EngineDeadError: the server is gone.
            RequestError: the server refuses the request.
        """
        interrupted = TokenChunk([], [], [], StopReason.ABORT, [] if asked.params.top_logprobs else None)
        while True:
            if not await self.gate.passed():
                yield interrupted
                return
            flight = self._take_off(asked)
            try:
                while True:
                    try:
                        part = await flight.next_part()
                    except EngineError as error:
                        await self._judge(error)
                        yield interrupted  # only the connection was lost
                        return
                    first = not flight.delivered
                    if flight.restart and first:
                        break
                    chunk = await flight.label(part, self._loads, self.version, self._spans_of)
                    if chunk is None:
                        continue
                    await self._check_instance(chunk, flight.version)
                    if first and flight.suspect and chunk.versions and chunk.versions[0] == self.version:
                        break
                    self.generated_tokens += len(chunk.token_ids)
                    if chunk.token_ids or chunk.stop_reason is not None:
                        yield chunk
                    if chunk.stop_reason is not None:
                        return
            finally:
                self._land(flight)

    async def abort_all(self) -> None:
        """Ends every request with what it has; returns when the server has answered all of them."""
        await self._abort(list(self._flights))

    async def begun(self) -> bool:
        """Whether the server holds a request of ours with tokens."""
        seen = await self._alive().requests()
        names = {external_id(flight.id) for flight in self._flights}
        return any(state["sampled"] for name, state in seen.items() if name in names)

    async def verify_empty(self) -> None:
        """Nothing is left in the server; what a caller gave up may have arrived after the pause, and is sent away.

        Raises:
            EngineError: it still holds requests.
        """
        link, left = self._alive(), 0
        for _ in range(ABORT_ROUNDS):
            facts = await link.look()
            left = max(facts.unfinished, facts.held)
            if not left:
                return
            if names := list(await link.requests()):
                await link.post("/abort_requests", {"request_ids": names})
        raise EngineError(f"The vLLM server still holds {left} requests after it reported them aborted.")

    async def weights_changed(self, version: int, *, held: bool) -> None:
        """Tokens sampled from here on are of ``version``. Call it paused.

        Args:
            held: the server holds requests that go on. Those without a token start over: they must not be prefilled from
                what the old weights have cached.
        """
        self.version = version
        self._loads += 1
        self.forget_prefixes()
        if not held:
            return
        seen = await self._alive().requests()
        without_tokens = []
        for flight in self._flights:
            state = seen.get(external_id(flight.id))
            if state is None:
                flight.suspect = True  # on its way there, or its answer on its way here: its first token will tell
            elif state["sampled"] == 0:
                flight.restart = True
                without_tokens.append(flight)
        await self._abort(without_tokens)

    def forget_prefixes(self) -> None:
        """Requests from here on find nothing that was cached before."""
        self._salt = f"{self._salts_prefix}-{next(self._salts)}"

    def die(self, error: EngineDeadError) -> None:
        """Every request fails."""
        for flight in self._flights:
            flight.fail(error)
            flight.cancel()
        self.gate.open()  # whoever waits there finds the engine gone

    async def ended(self) -> None:
        """Returns when no connection of a request is open any more."""
        await asyncio.gather(*self._flights.values(), return_exceptions=True)

    def _take_off(self, asked: Asked) -> RemoteFlight:
        link = self._alive()
        flight = RemoteFlight(uuid.uuid4().hex, asked, self._salt, self.version, self._loads)
        self._flights[flight] = flight.send(link.connection)
        self.busy.requests(len(self._flights))
        self.prefill_tokens += len(asked.prompt)
        return flight

    def _land(self, flight: RemoteFlight) -> None:
        flight.cancel()
        self._flights.pop(flight, None)
        self.busy.requests(len(self._flights))

    async def _abort(self, flights: Sequence[RemoteFlight]) -> None:
        """Returns when the server has answered all of these; one may still be on its way there when the first abort is."""
        link = self._alive()
        waiting = {self._flights[flight] for flight in flights if flight in self._flights}
        names = [external_id(flight.id) for flight in flights]
        while waiting:
            await link.post("/abort_requests", {"request_ids": names})
            _, waiting = await asyncio.wait(waiting, timeout=ARRIVAL_S)

    async def _spans_of(self, external: str) -> Spans | None:
        """What the server knows now of a request's versions."""
        found = (await self._alive().requests()).get(external)
        return None if found is None else Spans(tuple((parse_version(v), start) for v, start in found["versions"]))

    async def _judge(self, error: EngineError) -> None:
        """Returns if a request failed with its connection only; raises what it failed of otherwise."""
        await self._alive().look()
        if not isinstance(error, EngineDeadError):
            raise error
        logger.info("a connection was lost: %s", error)

    async def _check_instance(self, chunk: TokenChunk, version: int) -> None:
        """Tokens without a version, where there was one, come from a server that was started again."""
        if version >= 0 and -1 in chunk.versions:
            self._alive().die("it was started again and holds no published weights")
            self._alive()

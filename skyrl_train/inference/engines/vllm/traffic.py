"""The requests of one engine: from the gate into vLLM, and their tokens back with versions.

chunks ──gate──> take off ──> vLLM ──> queue ──> chunk with ids, log-probs, versions ──> land
             ^                           │
             └── weights changed before its first token: it starts over under the new version
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

from skyrl_train.concurrency import Gate
from skyrl_train.errors import EngineDeadError, EngineError
from skyrl_train.inference.engines.busy_time import BusyTime
from skyrl_train.inference.engines.vllm.frontend import Frontend
from skyrl_train.inference.engines.vllm.requests import Asked, Flight
from skyrl_train.inference.interface import StopReason, TokenChunk

_ABORT_ROUNDS = 100  # between two steps each; an abort takes two


class Traffic:
    """All requests of ``vllm``. With ``salted``, prefixes that it has cached never serve another version.

    Attributes:
        busy: for how long it had requests that were not paused.
        gate: where requests wait while the engine is paused.
        version: of the tokens sampled from now on.
    """

    def __init__(self, vllm: Frontend, salted: bool) -> None:
        self.busy = BusyTime()
        self.gate = Gate()
        self.version = -1
        self._vllm = vllm
        self._salted = salted
        self._salts = itertools.count(1)
        self._salt = 0
        self._ids = itertools.count()
        self._flights: set[Flight] = set()
        self._adding: set[asyncio.Future[Any]] = set()
        self._generated_tokens = self._prefill_tokens = 0

    @property
    def generated_tokens(self) -> int:
        """Tokens sampled since the start, as far as they have arrived."""
        underway = sum(max(0, (self._vllm.sampled(flight.key) or 0) - flight.delivered) for flight in self._flights)
        return self._generated_tokens + underway

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens computed since the start, for requests that have ended."""
        return self._prefill_tokens

    @property
    def begun(self) -> bool:
        """Whether vLLM has a request with a token that has not ended."""
        return any(self._vllm.sampled(flight.key) for flight in self._flights)

    async def chunks(self, asked: Asked) -> AsyncIterator[TokenChunk]:
        """The outputs of one request, which may be handed to vLLM more than once before its first token."""
        while True:
            if not await self.gate.passed():
                yield TokenChunk([], [], [], StopReason.ABORT, [] if asked.params.top_logprobs else None)
                return
            flight = await self._take_off(asked)
            ended = False
            try:
                while not ended:
                    output = await self._next_output(flight)
                    ended = output.finished
                    chunk = flight.chunk(output.outputs[0])
                    self._count(chunk, output)
                    if flight.restart and not flight.delivered:
                        break
                    if chunk.token_ids or ended:
                        yield chunk
                else:
                    return
            finally:
                await self._land(flight, ended)

    async def all_added(self) -> None:
        """Returns when every request that has passed the gate has reached vLLM."""
        if self._adding:
            await asyncio.wait(set(self._adding))

    async def abort_all(self) -> None:
        """Ends every request with what it has; returns when vLLM has let go of them.

        Raises:
            EngineError: vLLM keeps some.
        """
        self.gate.turn_away()
        await self.all_added()
        await self._vllm.abort([flight.key for flight in self._flights])
        for _ in range(_ABORT_ROUNDS):
            if not await self.left_in_vllm():
                return
        raise EngineError("vLLM still holds requests after they were aborted.")

    async def left_in_vllm(self) -> int:
        """Requests that vLLM has, by its account in this process or in any worker's batch, whichever is more."""
        return max(self._vllm.unfinished, await self._vllm.held_requests())

    async def weights_changed(self, version: int) -> None:
        """Tokens sampled from here on are of ``version``. Call it paused, with all outputs handled."""
        self.version = version
        started_over = []
        for flight in self._flights:
            sampled = self._vllm.sampled(flight.key)
            if sampled == 0 and self._salted:
                flight.restart = True  # or it would find the old version's cached prefix
                started_over.append(flight.key)
            elif sampled is not None:
                flight.weights_changed(sampled, version)
        if self._salted:
            self.forget_prefixes()
            await self._vllm.abort(started_over)

    def forget_prefixes(self) -> None:
        """Requests from here on find nothing that was cached before."""
        self._salt = next(self._salts)

    def die(self, error: EngineDeadError) -> None:
        """Every request fails."""
        for flight in self._flights:
            flight.queue.put(error)
        self.gate.open()  # whoever waits there finds the engine gone

    async def _take_off(self, asked: Asked) -> Flight:
        """Hands a request to vLLM. Whoever gives up meanwhile leaves nothing there."""
        version = self.version
        adding = asyncio.ensure_future(self._vllm.add(str(next(self._ids)), asked, str(self._salt)))
        self._adding.add(adding)
        adding.add_done_callback(self._adding.discard)
        try:
            queue = await asyncio.shield(adding)
        except asyncio.CancelledError:
            await asyncio.wait({adding})
            if not adding.cancelled() and adding.exception() is None:
                await self._vllm.abort([adding.result().request_id])
            raise
        flight = Flight(asked, queue.request_id, queue, version)
        self._flights.add(flight)
        self.busy.requests(len(self._flights))
        return flight

    async def _next_output(self, flight: Flight) -> Any:
        try:
            return flight.queue.get_nowait() or await flight.queue.get()
        except EngineError:
            raise
        except Exception as error:  # vLLM's own tree of errors
            raise self._vllm.failure(error) from error

    async def _land(self, flight: Flight, ended: bool) -> None:
        self._flights.discard(flight)
        self.busy.requests(len(self._flights))
        if not ended:
            await self._vllm.abort([flight.key])

    def _count(self, chunk: TokenChunk, output: Any) -> None:
        self._generated_tokens += len(chunk.token_ids)
        if output.finished and output.num_cached_tokens is not None:
            self._prefill_tokens += len(output.prompt_token_ids) - output.num_cached_tokens

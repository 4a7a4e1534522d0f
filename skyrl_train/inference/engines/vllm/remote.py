"""A ``vllm serve`` that somebody started, as an inference engine: the same contract over HTTP.

    generate / stream ──gate──> POST /inference/v1/generate ──> server (its middleware: remote_server.py)
    pause:  close the gate · POST /pause · abort what was on its way · verify
    load:   POST /collective_rpc: workers swap · requests without a token start over · POST /update_weight_version
    resume: POST /resume · open the gate

The server says which weight version sampled which tokens; that is exact because versions change only while it is paused.
A prefix that it caches is found only by requests of the same version (a salt), so that none serves another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from skyrl_train.concurrency import Gate, gather_or_cancel
from skyrl_train.errors import EngineDeadError, EngineError, RequestError
from skyrl_train.inference.engines.vllm.remote_connection import Connection
from skyrl_train.inference.engines.vllm.remote_facts import Facts
from skyrl_train.inference.engines.vllm.remote_flight import RemoteFlight
from skyrl_train.inference.engines.vllm.remote_link import ServerLink, gone, wait_for_server
from skyrl_train.inference.engines.vllm.remote_weights import RemoteWeights
from skyrl_train.inference.engines.vllm.remote_wire import Spans, asked_of, external_id, parse_version
from skyrl_train.inference.engines.vllm.requests import Asked
from skyrl_train.inference.interface import (
    EngineCapabilities,
    EngineHealth,
    InferenceEngineInput,
    InferenceEngineInterface,
    InferenceEngineOutput,
    PauseMode,
    StopReason,
    TokenChunk,
    output_of,
)
from skyrl_train.inference.weight_update import WeightUpdate

logger = logging.getLogger(__name__)
ARRIVAL_S = 0.02  # for a request that was sent before an abort and arrives after it: then it is aborted again
ABORT_ROUNDS = 3
_VLLM_MODES = {
    PauseMode.KEEP: "keep",
    PauseMode.RECOMPUTE: "keep",
    PauseMode.ABORT: "abort",
    PauseMode.WAIT: "wait",
}


class RemoteVLLMEngine(InferenceEngineInterface):
    """Speaks to one server; ``docs/tutorials/engines.md`` has the command that starts it.

    Args:
        base_url: such as ``http://host:8000``.
        api_key: what the server was started with.
        start_timeout_s: how long :meth:`start` waits for a server that is not up yet.
        control_timeout_s: limit of each call but generation and pausing.

    A server that went away and came back is a dead engine until :meth:`start` is called again; it then holds no published
    version (-1). Adapters and sleep are not offered.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        start_timeout_s: float = 600.0,
        control_timeout_s: float = 60.0,
    ) -> None:
        self._url = base_url
        self._api_key = api_key
        self._start_timeout_s = start_timeout_s
        self._control_timeout_s = control_timeout_s
        self._link: ServerLink | None = None  # while the server is the one that was started with
        self._connection: Connection | None = None  # until torn down
        self._gone = "it was not started; call start() first"
        self._facts: Facts | None = None
        self._broken = ""  # the instance that an update left without a usable model
        self._version = -1
        self._loads = 0
        self._salts = itertools.count()
        self._salt = ""
        self._gate = Gate()
        self._paused: PauseMode | None = None
        self._resumed = asyncio.Event()
        self._pause_call: asyncio.Future[Any] | None = None
        self._flights: dict[RemoteFlight, asyncio.Task[None]] = {}
        self._received: tuple[WeightUpdate, str | None] | None = None
        self._loaded: WeightUpdate | None = None
        self._loading: asyncio.Future[None] | None = None
        self._generated_tokens = self._prefill_tokens = 0
        self._busy_s, self._busy_since = 0.0, 0.0

    @property
    def capabilities(self) -> EngineCapabilities:
        """What the server said when it was started last.

        Raises:
            EngineDeadError: nobody has asked it yet; call ``start`` first.
        """
        if self._facts is None:
            raise gone(self._gone)
        return self._facts.capabilities()

    @property
    def policy_version(self) -> int:
        return self._version

    async def start(self) -> None:
        """Waits for the server and looks at what it is. A version that another trainer left there does not count.

        Raises:
            ConfigError: the server lacks something, or refuses the key.
            EngineDeadError: there is no server, or its model was damaged by a failed update.
        """
        await self.teardown()
        connection = Connection(self._url, self._api_key, self._control_timeout_s)
        try:
            facts = await wait_for_server(connection, self._url, self._start_timeout_s)
            facts.check(self._url)
            if facts.instance == self._broken:
                raise EngineDeadError(
                    f"An update failed half-way in the vLLM server at {self._url}; start a new server there."
                )
            known = self._facts is not None and self._facts.instance == facts.instance
            if not (known and facts.policy_version == self._version):
                await connection.post("/update_weight_version", {"new_version": "-1"})
                self._version, self._received, self._loaded = -1, None, None
            if facts.paused:
                await connection.post("/resume")
        except BaseException:
            await connection.close()
            raise
        self._connection, self._facts = connection, facts
        self._link = ServerLink(connection, facts, self._on_death)
        self._weights = RemoteWeights(self._link)
        self._salts_prefix = uuid.uuid4().hex  # nothing that was cached before is found again
        self._new_salt()
        self._paused = self._pause_call = None
        self._gate.open()

    # Requests -----------------------------------------------------------------------------------------------------

    async def generate(self, engine_input: InferenceEngineInput) -> InferenceEngineOutput:
        """See the interface. All prompts share the sampling parameters, a given seed included."""
        asked = asked_of(engine_input, self._serving(), stream=False)
        chunks = await gather_or_cancel(self._whole(one) for one in asked)
        return output_of(chunks)

    async def stream(self, engine_input: InferenceEngineInput) -> AsyncIterator[TokenChunk]:
        asked = asked_of(engine_input, self._serving(), stream=True)
        if len(asked) != 1:
            raise EngineError(f"stream() takes exactly one prompt, got {len(asked)}.")
        async with contextlib.aclosing(self._chunks(asked[0])) as chunks:  # leaving early aborts the request
            async for chunk in chunks:
                yield chunk

    async def _whole(self, asked: Asked) -> TokenChunk:
        async with contextlib.aclosing(self._chunks(asked)) as chunks:
            return await anext(chunks)

    async def _chunks(self, asked: Asked) -> AsyncGenerator[TokenChunk, None]:
        """The parts of one answer; a request may be sent more than once before its first token."""
        interrupted = TokenChunk([], [], [], StopReason.ABORT, [] if asked.params.top_logprobs else None)
        while True:
            if not await self._gate.passed():
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
                    chunk = await flight.label(part, self._loads, self._version, self._spans_of)
                    if chunk is None:
                        continue
                    await self._check_instance(chunk, flight.version)
                    if first and flight.suspect and chunk.versions and chunk.versions[0] == self._version:
                        break
                    self._generated_tokens += len(chunk.token_ids)
                    if chunk.token_ids or chunk.stop_reason is not None:
                        yield chunk
                    if chunk.stop_reason is not None:
                        return
            finally:
                self._land(flight)

    def _take_off(self, asked: Asked) -> RemoteFlight:
        link = self._alive()
        flight = RemoteFlight(uuid.uuid4().hex, asked, self._salt, self._version, self._loads)
        if not self._flights:
            self._busy_since = time.perf_counter()
        self._flights[flight] = flight.send(link.connection)
        self._prefill_tokens += len(asked.prompt)
        return flight

    def _land(self, flight: RemoteFlight) -> None:
        flight.cancel()
        if self._flights.pop(flight, None) is not None and not self._flights:
            self._busy_s += time.perf_counter() - self._busy_since

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

    async def abort_generation(self) -> None:
        self._gate.turn_away()
        await self._abort(list(self._flights))

    async def _abort(self, flights: Sequence[RemoteFlight]) -> None:
        """Returns when the server has answered all of these; one may still be on its way there when the first abort is."""
        link = self._alive()
        waiting = {self._flights[flight] for flight in flights if flight in self._flights}
        names = [external_id(flight.id) for flight in flights]
        while waiting:
            await link.post("/abort_requests", {"request_ids": names})
            _, waiting = await asyncio.wait(waiting, timeout=ARRIVAL_S)

    # Pausing ------------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        self._alive()
        mode = PauseMode(mode)
        self._gate.close()
        self._resumed.clear()
        if mode is PauseMode.ABORT:
            self._gate.turn_away()
        pausing = asyncio.ensure_future(self._quiesce(mode))
        resumed = asyncio.ensure_future(self._resumed.wait())
        try:
            await asyncio.wait({pausing, resumed}, return_when=asyncio.FIRST_COMPLETED)
            if not pausing.done():
                raise EngineError("The engine was resumed before it was paused.")
            pausing.result()
        finally:
            pausing.cancel()
            resumed.cancel()
        self._paused = mode

    async def _quiesce(self, mode: PauseMode) -> None:
        await self._pause_server(mode)
        if not (await self._alive().look()).paused:
            raise EngineError(f"The vLLM server goes on after a pause with {mode.value!r}.")
        if mode is PauseMode.ABORT:
            await self._abort(list(self._flights))
            await self._verify_empty()
        while mode is PauseMode.WAIT and await self._begun():
            # vLLM took a request out of its batch for lack of memory, and lets nobody in while it waits.
            await self._alive().post("/resume")
            await self._pause_server(mode)

    async def _verify_empty(self) -> None:
        """Nothing is left in the server; what a caller gave up may have arrived after the pause, and is sent away."""
        link, left = self._alive(), 0
        for _ in range(ABORT_ROUNDS):
            facts = await link.look()
            left = max(facts.unfinished, facts.held)
            if not left:
                return
            if names := list(await link.requests()):
                await link.post("/abort_requests", {"request_ids": names})
        raise EngineError(f"The vLLM server still holds {left} requests after it reported them aborted.")

    async def _pause_server(self, mode: PauseMode) -> None:
        # A cache that is emptied cannot serve a request that is still on its way and carries the old salt.
        clear = "false" if mode is PauseMode.KEEP else "true"
        path = f"/pause?mode={_VLLM_MODES[mode]}&clear_cache={clear}"
        # The server does what it was told even if nobody waits for its answer, so that the call goes on.
        self._pause_call = asyncio.ensure_future(self._alive().post(path, patient=mode is PauseMode.WAIT))
        self._pause_call.add_done_callback(_seen)
        await asyncio.shield(self._pause_call)

    async def _begun(self) -> bool:
        """Whether the server holds a request of ours with tokens."""
        seen = await self._alive().requests()
        names = {external_id(flight.id) for flight in self._flights}
        return any(state["sampled"] for name, state in seen.items() if name in names)

    async def resume(self) -> None:
        link = self._alive()
        if self._loading is not None:  # given up by its caller, but not by the workers
            await asyncio.wait({self._loading})
        self._resumed.set()
        while not (self._pause_call is None or self._pause_call.done() or (await link.look()).paused):
            pass  # a pause that is on its way must not arrive after the resume; each look is a round trip
        await link.post("/resume")
        if (await link.look()).paused:
            raise EngineError("The vLLM server is still paused after resume().")
        self._paused = None
        self._gate.open()

    async def sleep(self, level: int = 1) -> None:
        raise EngineError("A remote vLLM server does not sleep for us; ask capabilities.sleep first.")

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        raise EngineError("A remote vLLM server does not sleep for us; ask capabilities.sleep first.")

    async def reset_prefix_cache(self) -> None:
        """Later requests find nothing that was cached before; vLLM frees the memory as soon as nobody uses it."""
        link = self._alive()
        self._new_salt()
        await link.post("/reset_prefix_cache")

    # Weights ------------------------------------------------------------------------------------------------------

    async def receive_weights(self, update: WeightUpdate) -> None:
        """Checks an update and maps its memory in every worker; whatever is wrong with it, ``load_weights`` raises."""
        self._alive()
        self._received = None
        if update.transport in self.capabilities.transports:
            refusal = await self._weights.receive(update)
        else:
            refusal = (
                f"Weights by {update.transport!r} do not reach the vLLM server at {self._url}; it must run on this "
                "machine as this user, or set generator.weight_folder to a folder that both machines see."
            )
        self._received = (update, refusal)

    async def load_weights(self, update: WeightUpdate) -> None:
        self._alive()
        if self._paused is None:
            raise EngineError("Weights are loaded while the engine is paused; call pause() first.")
        if self._received is None or self._received[0] != update:
            raise EngineError(f"Version {update.version} was not received; call receive_weights() first.")
        refusal = self._received[1]
        if refusal is not None:
            raise EngineError(refusal)
        self._received = None
        # A swap that has begun is finished, whoever waits for it: half of one is no model.
        self._loading = asyncio.ensure_future(self._load(update))
        self._loading.add_done_callback(self._loaded_or_not)
        await asyncio.shield(self._loading)

    async def _load(self, update: WeightUpdate) -> None:
        link = self._alive()
        try:
            await self._weights.load(update.version)
            await link.post("/update_weight_version", {"new_version": str(update.version)})
        except (EngineError, RequestError) as error:
            self._broken = link.facts.instance
            link.die(f"an update failed half-way ({error})")
            raise link.dead() from error
        self._loaded, self._version = update, update.version
        self._loads += 1
        self._new_salt()
        if self._paused is PauseMode.KEEP:
            await self._start_over_what_has_no_tokens()

    async def _start_over_what_has_no_tokens(self) -> None:
        """Requests of the old salt must not be prefilled from what the old weights have cached."""
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

    def _loaded_or_not(self, loading: asyncio.Future[None]) -> None:
        self._loading = None
        if not loading.cancelled() and (error := loading.exception()) is not None:
            logger.error("a remote vLLM engine could not load weights: %s", error)

    async def served_checksum(self) -> str:
        """See the interface. On a CPU, weights that are -0.0 read as 0.0 and make the checksums differ."""
        self._alive()
        if self._loaded is None:
            raise EngineError("The engine has no weights of an update yet; publish the policy first.")
        return await self._weights.read_back(self._loaded)

    def _new_salt(self) -> None:
        self._salt = f"{self._salts_prefix}-{next(self._salts)}"

    # Life ---------------------------------------------------------------------------------------------------------

    async def health(self) -> EngineHealth:
        """A snapshot; of a server that is gone, or was started again since ``start``, one that says so."""
        try:
            facts = await self._alive().look()
        except EngineError:
            return EngineHealth(alive=False, policy_version=self._version)
        return EngineHealth(
            alive=True,
            policy_version=facts.policy_version,
            running=facts.held,
            waiting=max(0, facts.unfinished - facts.held) + self._gate.waiting,
            paused=facts.paused,
            generated_tokens=self._generated_tokens,
            prefill_tokens=self._prefill_tokens,
            busy_s=self._busy_s + (time.perf_counter() - self._busy_since if self._flights else 0.0),
        )

    async def teardown(self) -> None:
        """Ends what is pending and closes the connections; the server is not ours to stop."""
        if self._link is not None:
            self._link.die("it was torn down")
        connection, self._connection = self._connection, None
        if connection is not None:
            await asyncio.gather(*self._flights.values(), return_exceptions=True)
            await connection.close()

    def _on_death(self, reason: str) -> None:
        """Everything pending fails, now and from now on."""
        self._link, self._gone = None, reason
        for flight in self._flights:
            flight.fail(gone(reason))
            flight.cancel()
        self._gate.open()  # whoever waits there finds the engine gone

    def _serving(self) -> EngineCapabilities:
        self._alive()
        return self.capabilities

    def _alive(self) -> ServerLink:
        if self._link is None:
            raise gone(self._gone)
        return self._link


def _seen(call: asyncio.Future[Any]) -> None:
    """Nobody may be waiting any more for what a call raised."""
    if not call.cancelled():
        call.exception()

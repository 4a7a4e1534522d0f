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
from collections.abc import AsyncIterator, Sequence
from typing import Any

from skyrl_train.concurrency import gather_or_cancel
from skyrl_train.errors import EngineError
from skyrl_train.inference.engines.vllm.pausing import VLLM_MODES, Pausing
from skyrl_train.inference.engines.vllm.remote_connection import Connection
from skyrl_train.inference.engines.vllm.remote_facts import Facts
from skyrl_train.inference.engines.vllm.remote_link import ServerLink, gone, wait_for_server
from skyrl_train.inference.engines.vllm.remote_traffic import RemoteTraffic
from skyrl_train.inference.engines.vllm.remote_updates import RemoteUpdates
from skyrl_train.inference.engines.vllm.remote_wire import asked_of
from skyrl_train.inference.engines.vllm.requests import Asked
from skyrl_train.inference.interface import (
    EngineCapabilities,
    EngineHealth,
    InferenceEngineInput,
    InferenceEngineInterface,
    InferenceEngineOutput,
    PauseMode,
    TokenChunk,
    output_of,
)
from skyrl_train.inference.weight_update import WeightUpdate


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
        self._traffic = RemoteTraffic(self._alive)
        self._updates = RemoteUpdates(base_url, self._alive, self._traffic)
        self._paused: PauseMode | None = None
        self._pausing = Pausing()
        self._pause_call: asyncio.Future[Any] | None = None

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
        return self._traffic.version

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
            self._updates.check(facts)
            known = self._facts is not None and self._facts.instance == facts.instance
            if not (known and facts.policy_version == self._traffic.version):
                await connection.post("/update_weight_version", {"new_version": "-1"})
                self._traffic.version = -1
                self._updates.forget()
            if facts.paused:
                await connection.post("/resume")
        except BaseException:
            await connection.close()
            raise
        self._connection, self._facts = connection, facts
        self._link = ServerLink(connection, facts, self._on_death)
        self._paused = self._pause_call = None
        self._traffic.begin()

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
        async with contextlib.aclosing(self._traffic.chunks(asked[0])) as chunks:  # leaving early aborts the request
            async for chunk in chunks:
                yield chunk

    async def _whole(self, asked: Asked) -> TokenChunk:
        async with contextlib.aclosing(self._traffic.chunks(asked)) as chunks:
            return await anext(chunks)

    async def abort_generation(self) -> None:
        self._traffic.gate.turn_away()
        await self._traffic.abort_all()

    # Pausing ------------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        self._alive()
        mode = PauseMode(mode)
        self._traffic.gate.close()
        self._pausing.begin()
        if mode is PauseMode.ABORT:
            self._traffic.gate.turn_away()
        await self._pausing.quiesced(self._quiesce(mode))
        self._paused = mode
        self._traffic.busy.paused(True)

    async def _quiesce(self, mode: PauseMode) -> None:
        await self._pause_server(mode)
        if not (await self._alive().look()).paused:
            raise EngineError(f"The vLLM server goes on after a pause with {mode.value!r}.")
        if mode is PauseMode.ABORT:
            await self._traffic.abort_all()
            await self._traffic.verify_empty()
        while mode is PauseMode.WAIT and await self._traffic.begun():
            # vLLM took a request out of its batch for lack of memory, and lets nobody in while it waits.
            await self._alive().post("/resume")
            await self._pause_server(mode)

    async def _pause_server(self, mode: PauseMode) -> None:
        # A cache that is emptied cannot serve a request that is still on its way and carries the old salt.
        clear = "false" if mode is PauseMode.KEEP else "true"
        path = f"/pause?mode={VLLM_MODES[mode]}&clear_cache={clear}"
        # The server does what it was told even if nobody waits for its answer, so that the call goes on.
        self._pause_call = asyncio.ensure_future(self._alive().post(path, patient=mode is PauseMode.WAIT))
        self._pause_call.add_done_callback(_seen)
        await asyncio.shield(self._pause_call)

    async def resume(self) -> None:
        link = self._alive()
        await self._updates.settled()
        await self._pausing.ended()
        while not (self._pause_call is None or self._pause_call.done() or (await link.look()).paused):
            pass  # a pause that is on its way must not arrive after the resume; each look is a round trip
        await link.post("/resume")
        if (await link.look()).paused:
            raise EngineError("The vLLM server is still paused after resume().")
        self._paused = None
        self._traffic.busy.paused(False)
        self._traffic.gate.open()

    async def sleep(self, level: int = 1) -> None:
        raise EngineError("A remote vLLM server does not sleep for us; ask capabilities.sleep first.")

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        raise EngineError("A remote vLLM server does not sleep for us; ask capabilities.sleep first.")

    async def reset_prefix_cache(self) -> None:
        """Later requests find nothing that was cached before; vLLM frees the memory as soon as nobody uses it."""
        link = self._alive()
        self._traffic.forget_prefixes()
        await link.post("/reset_prefix_cache")

    # Weights ------------------------------------------------------------------------------------------------------

    async def receive_weights(self, update: WeightUpdate) -> None:
        """Checks an update and maps its memory in every worker; whatever is wrong with it, ``load_weights`` raises."""
        self._alive()
        await self._updates.receive(update)

    async def load_weights(self, update: WeightUpdate) -> None:
        self._alive()
        if self._paused is None:
            raise EngineError("Weights are loaded while the engine is paused; call pause() first.")
        await self._updates.load(update, held=self._paused is PauseMode.KEEP)

    async def served_checksum(self) -> str:
        """See the interface. On a CPU, weights that are -0.0 read as 0.0 and make the checksums differ."""
        self._alive()
        return await self._updates.served_checksum()

    # Life ---------------------------------------------------------------------------------------------------------

    async def health(self) -> EngineHealth:
        """A snapshot; of a server that is gone, or was started again since ``start``, one that says so."""
        try:
            facts = await self._alive().look()
        except EngineError:
            return EngineHealth(alive=False, policy_version=self._traffic.version)
        return EngineHealth(
            alive=True,
            policy_version=facts.policy_version,
            running=facts.held,
            waiting=max(0, facts.unfinished - facts.held) + self._traffic.gate.waiting,
            paused=facts.paused,
            generated_tokens=self._traffic.generated_tokens,
            prefill_tokens=self._traffic.prefill_tokens,
            busy_s=self._traffic.busy.seconds,
        )

    async def teardown(self) -> None:
        """Ends what is pending and closes the connections; the server is not ours to stop."""
        if self._link is not None:
            self._link.die("it was torn down")
        connection, self._connection = self._connection, None
        if connection is not None:
            await self._traffic.ended()
            await connection.close()

    def _on_death(self, reason: str) -> None:
        """Everything pending fails, now and from now on."""
        self._link, self._gone = None, reason
        self._traffic.die(gone(reason))

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

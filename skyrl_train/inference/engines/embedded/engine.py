"""The embedded engine as the client sees it: an asyncio proxy of a worker in a thread or a process. Imports no torch.

generate / stream / pause / load_weights ──commands──> host ──> worker ──> core
                               futures  <──events──
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

from skyrl_train.config.schema.model import LoraConfig
from skyrl_train.errors import ConfigError, EngineDeadError, EngineError, RequestError, SkyRLError
from skyrl_train.inference.engines.embedded.hosts import Host, ProcessHost, ThreadHost, WorkerProcess
from skyrl_train.inference.engines.embedded.messages import (
    READY_CALL,
    Abort,
    Add,
    Call,
    Command,
    Died,
    EngineSettings,
    Event,
    Method,
    Refused,
    Reply,
    Tokens,
)
from skyrl_train.inference.engines.pending import Pending
from skyrl_train.inference.interface import (
    EngineCapabilities,
    EngineHealth,
    InferenceEngineInput,
    InferenceEngineInterface,
    InferenceEngineOutput,
    PauseMode,
    SamplingParams,
    TokenChunk,
    output_of,
)
from skyrl_train.inference.weight_update import WeightUpdate

MAX_TOP_LOGPROBS = 20  # what OpenAI's API allows


class EmbeddedEngine(InferenceEngineInterface):
    """Serves a model folder's architecture with torch; the weights come with the first publication.

    Args:
        model_path: what ``transformers`` opens; only its configuration is read, unless publications bring an adapter.
        placement: "process" (its own interpreter, and ``num_threads`` compute threads) or "thread" (of this process,
            with this process's compute threads).
        max_num_seqs: requests decoded at once; more wait.
        max_model_len: tokens of prompt and response together.
        batch_invariant: compute each request alone, so that tokens and log-probs do not depend on the others (slow).
        worker: under placement "process", a process that was started earlier; by default :meth:`start` starts one.
        seed: of the stream that requests without a seed draw from; give each engine its own.
        lora: what is published is this adapter of the folder's weights; None: the model.

    Without ``teardown`` the worker thread outlives its last user; the worker process ends with this process, however
    that ends.
    """

    def __init__(
        self,
        model_path: str,
        *,
        placement: str = "process",
        device: str = "cpu",
        dtype: str = "float32",
        max_num_seqs: int = 128,
        max_model_len: int = 512,
        batch_invariant: bool = False,
        seed: int = 0,
        num_threads: int = 1,
        worker: WorkerProcess | None = None,
        lora: LoraConfig | None = None,
    ) -> None:
        settings = EngineSettings(
            model_path=model_path,
            device=device,
            dtype=dtype,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            batch_invariant=batch_invariant,
            seed=seed,
            lora=lora,
        )
        if placement not in ("process", "thread"):
            raise ConfigError(f"generator.inference_engine.placement must be process or thread, got {placement!r}")
        self._settings = settings
        self._placement = placement
        self._num_threads = num_threads
        self._worker = worker
        self._host: Host | None = None
        self._capabilities = EngineCapabilities(
            pause_modes=frozenset(PauseMode),
            transports=_transports(device, placement),
            max_model_len=max_model_len,
            batch_invariant=batch_invariant,
            sleep=True,
            max_top_logprobs=MAX_TOP_LOGPROBS,
            chunked_streaming=True,
        )
        self._version = -1
        self._pending = Pending("The embedded engine")
        self._ids = itertools.count(READY_CALL + 1)

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._capabilities

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def pid(self) -> int | None:
        """The worker's process id under placement "process", else None."""
        return self._host.pid if isinstance(self._host, ProcessHost) else None

    def _new_host(self) -> Host:
        if self._placement == "thread":
            return ThreadHost(self._settings)
        worker, self._worker = self._worker, None  # a further start gets a process of its own
        return ProcessHost(self._settings, self._num_threads, worker)

    async def start(self) -> None:
        """Starts the worker and waits for its model; again after its death or ``teardown``, and then without weights.

        The worker's imports run beside this process's own.

        Raises:
            EngineDeadError: the model or the settings cannot be used; the message says why.
        """
        if self._host is not None:
            await self.teardown()
        self._pending.begin()
        ready = self._pending.calls[READY_CALL] = asyncio.get_running_loop().create_future()
        self._version = -1
        host = self._host = self._new_host()
        try:
            await host.start(self._on_events, functools.partial(self._on_gone, host))
            await ready
        except BaseException:
            ready.cancel()  # nobody waits for it any more
            await self.teardown()
            raise

    async def generate(self, engine_input: InferenceEngineInput) -> InferenceEngineOutput:
        """See the interface. All prompts share the sampling parameters, a given seed included."""
        prompts, params = _requests(engine_input)
        ids = [self._submit(prompt, params, stream_every=0) for prompt in prompts]
        try:
            chunks = [await self._next_chunk(request_id) for request_id in ids]
        finally:
            self._forget(ids)
        return output_of(chunks)

    async def stream(self, engine_input: InferenceEngineInput) -> AsyncIterator[TokenChunk]:
        prompts, params = _requests(engine_input)
        if len(prompts) != 1:
            raise EngineError(f"stream() takes exactly one prompt, got {len(prompts)}.")
        request_id = self._submit(prompts[0], params, stream_every=engine_input.get("chunk_tokens", 1))
        try:
            while True:
                chunk = await self._next_chunk(request_id)
                yield chunk
                if chunk.stop_reason is not None:
                    return
        finally:
            self._forget([request_id])

    async def abort_generation(self) -> None:
        await self._call(Method.ABORT_ALL)

    async def pause(self, mode: PauseMode) -> None:
        await self._call(Method.PAUSE, PauseMode(mode))

    async def resume(self) -> None:
        await self._call(Method.RESUME)

    async def sleep(self, level: int = 1) -> None:
        """Frees the KV cache and moves the weights to main memory, whatever the level; only while paused."""
        await self._call(Method.SLEEP)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Brings everything back, whatever the tags; still paused."""
        await self._call(Method.WAKE_UP)

    async def reset_prefix_cache(self) -> None:
        """Does nothing: no KV cache outlives its request here."""

    async def receive_weights(self, update: WeightUpdate) -> None:
        await self._call(Method.RECEIVE, update)

    async def load_weights(self, update: WeightUpdate) -> None:
        self._version = await self._call(Method.LOAD, update)

    async def served_checksum(self) -> str:
        """The checksum of the weights being served, laid out like the update loaded last: equal to its own."""
        return str(await self._call(Method.CHECKSUM))

    async def health(self) -> EngineHealth:
        """A snapshot; of a dead engine one that says so."""
        try:
            health: EngineHealth = await self._call(Method.HEALTH)
        except EngineDeadError:
            return EngineHealth(alive=False, policy_version=self._version)
        return health

    async def teardown(self) -> None:
        self._pending.die("it was torn down")
        if self._host is not None:
            await self._host.stop()
        elif self._worker is not None:
            await asyncio.to_thread(self._worker.stop)

    def _submit(self, prompt: list[int], params: SamplingParams, stream_every: int) -> int:
        self._pending.raise_if_dead()
        request_id = next(self._ids)
        self._pending.streams[request_id] = asyncio.Queue()
        self._send(Add(request_id, prompt, params, stream_every))
        return request_id

    async def _next_chunk(self, request_id: int) -> TokenChunk:
        item = await self._pending.streams[request_id].get()
        if isinstance(item, TokenChunk):
            if item.stop_reason is not None:
                del self._pending.streams[request_id]
            return item
        del self._pending.streams[request_id]
        raise item

    def _forget(self, request_ids: list[int]) -> None:
        """Aborts in the engine what is still unanswered here: its caller has gone."""
        abandoned = tuple(i for i in request_ids if self._pending.streams.pop(i, None) is not None)
        if abandoned and self._pending.alive:
            self._send(Abort(abandoned))

    async def _call(self, method: Method, argument: Any = None) -> Any:
        self._pending.raise_if_dead()
        call_id = next(self._ids)
        reply = self._pending.calls[call_id] = asyncio.get_running_loop().create_future()
        self._send(Call(call_id, method, argument))
        try:
            return await reply
        finally:
            self._pending.calls.pop(call_id, None)

    def _on_events(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Tokens(request_id, chunk):
                    self._put(request_id, chunk)
                case Refused(request_id, message):
                    self._put(request_id, RequestError(message))
                case Reply(call_id, value, error):
                    call = self._pending.calls.get(call_id)
                    if call is None or call.done():
                        continue
                    if error is None:
                        call.set_result(value)
                    else:
                        call.set_exception(EngineError(error))
                case Died(message):
                    self._pending.die(message)

    def _put(self, request_id: int, item: TokenChunk | SkyRLError) -> None:
        queue = self._pending.streams.get(request_id)
        if queue is not None:
            queue.put_nowait(item)

    def _send(self, command: Command) -> None:
        assert self._host is not None, "only an engine that was started is not gone"
        self._host.send(command)

    def _on_gone(self, host: Host) -> None:
        if host is self._host:  # a last word of an earlier life comes late
            self._pending.die("its worker ended; look above for its last words")


def _transports(device: str, placement: str) -> frozenset[str]:
    on_gpu = {"nccl", "cuda_ipc"} if placement == "process" else {"nccl"}
    return frozenset({"shared_memory", "disk", "delta", "gloo", *(on_gpu if device.startswith("cuda") else ())})


def _requests(engine_input: InferenceEngineInput) -> tuple[list[list[int]], SamplingParams]:
    prompts = engine_input.get("prompt_token_ids")
    if prompts is None:
        raise EngineError("An engine takes prompt_token_ids; the client renders conversations to tokens.")
    params = SamplingParams.parse(engine_input.get("sampling_params"))
    # Stop strings are the client's business and need not travel.
    return [list(map(int, prompt)) for prompt in prompts], dataclasses.replace(
        params, stop=()
    ) if params.stop else params

"""vLLM as an inference engine: what the local and the remote engine share, and the local one.

    generate / stream ──RequestTracker──> link ──> vLLM
    pause:  close the gate · vLLM pauses · the tokens that it had sampled arrive · verify
    load:   every worker swaps weights · requests without a token start over under the new version
    resume: vLLM runs again · open the gate

| pause mode | asked of vLLM | what is verified before ``pause`` returns |
|---|---|---|
| keep | keep | it reports the pause |
| recompute | keep, KV cache cleared: running requests are preempted | the same |
| abort | abort | no request is left, here and in the workers' batches |
| wait | wait | no request that has begun is left; preempted ones get another turn |

Weights change only while vLLM is paused, and then it is known how many tokens of each request were sampled before: versions
are exact per token. Cached prefixes carry a salt that changes with the weights, so that none serves another version.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
import threading
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from skyrl_train.errors import EngineDeadError, EngineError, RequestError
from skyrl_train.inference.engines.vllm.adapter import AsyncLLMAdapter, lora_request, shut_down, start_async_llm
from skyrl_train.inference.engines.vllm.arguments import POLICY_ADAPTER, VLLMSettings, capabilities
from skyrl_train.inference.engines.vllm.requests import EngineRequest, RequestTracker, VLLMLink, check_fields
from skyrl_train.inference.grammar import check_grammar
from skyrl_train.inference.interface import (
    EngineCapabilities,
    EngineHealth,
    InferenceEngineInput,
    InferenceEngineInterface,
    InferenceEngineOutput,
    SamplingParams,
    TokenChunk,
    output_of,
)
from skyrl_train.runtime.concurrency import gather_or_cancel
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.shared_area import machine
from skyrl_train.weight_sync.update import WeightUpdate

if TYPE_CHECKING:  # these import torch
    from skyrl_train.weight_sync.broadcast_receiver import BroadcastClient
    from skyrl_train.weight_sync.receiver import ReceiveBuffer, WeightReceiver

logger = logging.getLogger(__name__)
Link = TypeVar("Link", bound=VLLMLink)


class VLLMEngineBase(InferenceEngineInterface, Generic[Link]):
    """Requests, pauses and weight updates of a vLLM, over any link.

    Attributes:
        last_load_s: seconds that the slowest worker took to load the last update.
    """

    NAME = "The vLLM engine"

    def __init__(self) -> None:
        self.last_load_s = 0.0
        self._link: Link | None = None  # while vLLM is alive
        self._gone = "it was not started; call start() first"  # why there is no link
        self._requests: RequestTracker | None = None  # of the last start
        self._vocab_size: int | None = None  # None: vLLM itself checks token ids
        self._end_token_ids: Sequence[int] = ()  # of a response under a grammar
        self._paused: PauseMode | None = None
        self._asleep: set[str] = set()  # the kinds of memory that vLLM has given back
        self._resumed = asyncio.Event()  # ends a pause that is still draining
        self._quiescing: asyncio.Future[None] | None = None
        self._received: tuple[WeightUpdate, str | None] | None = None  # the update, or why it cannot be loaded
        self._loading: asyncio.Future[None] | None = None
        self._damaged = ""  # VLLMLink.instance of the vLLM that a failed update left without a usable model

    @property
    def policy_version(self) -> int:
        return -1 if self._requests is None else self._requests.version

    def _begin(self, link: Link, version: int, salted: bool = True) -> None:
        """Serve over ``link``, whose vLLM holds the weights of ``version`` and is not paused."""
        self._link = link
        self._requests = RequestTracker(link, version, salted)
        self._paused, self._asleep = None, set()

    def _alive(self) -> tuple[Link, RequestTracker]:
        if self._link is None or self._requests is None:
            raise EngineDeadError(f"{self.NAME} is gone: {self._gone.removesuffix('.')}.")
        return self._link, self._requests

    def _on_death(self, reason: str) -> None:
        """Called by the link: everything pending fails, now and from now on."""
        link, requests = self._link, self._requests
        if link is None or requests is None:
            return
        # Set before the requests fail, so that their callers already see the death.
        self._link, self._gone = None, reason
        error = EngineDeadError(f"{self.NAME} is gone: {reason.removesuffix('.')}.")
        for in_flight in requests.in_flight:
            link.fail(in_flight, error)
        requests.gate.open()  # callers that wait there find the link dead

    # Requests -----------------------------------------------------------------------------------------------------

    async def generate(self, engine_input: InferenceEngineInput) -> InferenceEngineOutput:
        """See the interface. All prompts share the sampling parameters, a given seed included."""
        parsed = await self._parse(engine_input, stream=False)
        return output_of(await gather_or_cancel(self._whole(request) for request in parsed))

    async def stream(self, engine_input: InferenceEngineInput) -> AsyncIterator[TokenChunk]:
        parsed = await self._parse(engine_input, stream=True)
        if len(parsed) != 1:
            raise EngineError(f"stream() takes exactly one prompt, got {len(parsed)}.")
        requests = self._alive()[1]
        async with contextlib.aclosing(requests.chunks(parsed[0])) as chunks:  # leaving early aborts the request
            async for chunk in chunks:
                yield chunk

    async def _whole(self, request: EngineRequest) -> TokenChunk:
        async with contextlib.aclosing(self._alive()[1].chunks(request)) as chunks:
            return await anext(chunks)

    async def _parse(self, engine_input: InferenceEngineInput, stream: bool) -> list[EngineRequest]:
        """Check the input as a whole, so that a bad prompt leaves none of its call in vLLM.

        Raises:
            RequestError: one of the requests cannot be served.
            GrammarError: the grammar cannot be compiled.
            EngineError: there are no token ids.
        """
        self._alive()
        can = self.capabilities
        prompts = engine_input.get("prompt_token_ids")
        if prompts is None:
            raise EngineError("An engine takes prompt_token_ids; the client renders conversations to tokens.")
        params = SamplingParams.parse(engine_input.get("sampling_params"))
        if params.n != 1:
            raise RequestError(f"An engine samples one response per request, got n={params.n}; the client splits them.")
        if params.top_logprobs > can.max_top_logprobs:
            raise RequestError(
                f"top_logprobs is {params.top_logprobs}, this engine gives at most {can.max_top_logprobs}; raise vLLM's "
                "max_logprobs (engine_args.max_logprobs, or --max-logprobs of a server)."
            )
        if params.structured is not None:
            await check_grammar(params.structured)  # vLLM would not say what is wrong with it
            # The grammar alone decides where the response may end.
            stop_token_ids = (*params.stop_token_ids, *self._end_token_ids)
            params = dataclasses.replace(params, min_tokens=0, ignore_eos=False, stop_token_ids=stop_token_ids)
        check_fields(params)
        # vLLM ends a response at its context in any case, and on GPUs adds this number to the prompt's in 32 bits.
        params = dataclasses.replace(
            params,
            max_tokens=min(params.max_tokens, can.max_model_len),
            min_tokens=min(params.min_tokens, can.max_model_len),
        )
        # Resolved once, so that all prompts of the call use the same adapter.
        lora = self._lora(engine_input.get("adapter"))
        priority = int(engine_input.get("priority", 0)) if can.priorities else 0
        parsed = []
        for prompt in prompts:
            tokens = list(map(int, prompt))
            if not tokens:
                raise RequestError("The prompt is empty; give at least one token.")
            if len(tokens) >= can.max_model_len:
                raise RequestError(
                    f"The prompt has {len(tokens)} tokens and leaves no room for a response within max_model_len="
                    f"{can.max_model_len}; shorten it or raise generator.inference_engine.max_model_len."
                )
            if self._vocab_size is not None and not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
                raise RequestError(
                    f"The prompt has token ids outside the model's vocabulary of {self._vocab_size}; tokenizer and model "
                    "must belong together."
                )
            parsed.append(EngineRequest(tokens, params, stream, engine_input.get("chunk_tokens", 1), priority, lora))
        return parsed

    @abstractmethod
    def _lora(self, name: str | None) -> Any:
        """Return vLLM's LoRARequest of the adapter that a request names, or of the policy's if it names none.

        Raises:
            RequestError: there is no such adapter.
        """

    async def abort_generation(self) -> None:
        await self._alive()[1].abort_all()

    # Pausing ------------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        mode = PauseMode(mode)
        link, requests = self._alive()
        # New requests wait at the gate; the modes below handle those that are inside.
        requests.gate.close()
        self._resumed.clear()
        if mode is PauseMode.ABORT:
            requests.gate.abort_waiters()
        # A request between the gate and vLLM would be sampled under weights that the version count misses.
        await requests.all_submitted()
        # Draining can take as long as a response; resume() ends it.
        quiescing = self._quiescing = asyncio.ensure_future(self._quiesce(link, requests, mode))
        resumed = asyncio.ensure_future(self._resumed.wait())
        try:
            await asyncio.wait({quiescing, resumed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            resumed.cancel()
            quiescing.cancel()
            await asyncio.wait({quiescing})
        if quiescing.cancelled():
            raise EngineError("The engine was resumed before it was paused.")
        quiescing.result()
        # Only now: a pause that failed or was cancelled does not allow a load.
        self._paused = mode
        requests.busy.paused(True)

    @staticmethod
    async def _quiesce(link: Link, requests: RequestTracker, mode: PauseMode) -> None:
        await link.pause(mode)
        if mode is PauseMode.ABORT:
            await link.verify_empty(list(requests.in_flight))
        while mode is PauseMode.WAIT and await link.any_begun(list(requests.in_flight)):
            # vLLM took a request out of its batch for lack of memory, and admits none while it waits.
            await link.resume()
            await link.pause(mode)

    async def resume(self) -> None:
        link, requests = self._alive()
        if self._asleep:
            raise EngineError("The engine sleeps; call wake_up() before resume().")
        if self._loading is not None:  # its caller may have given up, but half a load is no model
            await asyncio.wait({self._loading})
        self._resumed.set()
        if self._quiescing is not None and not self._quiescing.done():
            await asyncio.wait({self._quiescing})  # vLLM must receive the pause before its end
        await link.resume()
        self._paused = None
        requests.busy.paused(False)
        requests.gate.open()

    async def sleep(self, level: int = 1) -> None:
        raise EngineError("This engine cannot sleep; ask capabilities.sleep first.")

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        raise EngineError("This engine cannot sleep, so it cannot wake up; ask capabilities.sleep first.")

    async def reset_prefix_cache(self) -> None:
        """Let later requests find nothing that was cached before; vLLM frees the memory when no request uses it."""
        link, requests = self._alive()
        requests.forget_prefixes()
        await link.reset_prefix_cache()

    # Weights ------------------------------------------------------------------------------------------------------

    async def receive_weights(self, update: WeightUpdate) -> None:
        """Check an update and open it in every worker. ``load_weights`` raises what is wrong with it."""
        link, _ = self._alive()
        self._received = None
        error = self._reject(update)
        if error is None:
            # The engine keeps serving: an error here must not end its requests, so load_weights() reports it.
            try:
                here = await self._bring_here(link, update)
                errors = await link.on_workers("skyrl_receive", here.to_message())
                error = next((one for one in errors if one is not None), None)
            except EngineDeadError:
                raise
            except (EngineError, RequestError) as failure:
                error = str(failure)
        # Kept with its error: load_weights() of this update must fail with it.
        self._received = (update, error)

    @abstractmethod
    def _reject(self, update: WeightUpdate) -> str | None:
        """Return why an update cannot be for this engine, or None."""

    async def _bring_here(self, link: Link, update: WeightUpdate) -> WeightUpdate:
        """Bring the update's bytes to where the workers find them; returns where that is."""
        return update

    async def load_weights(self, update: WeightUpdate) -> None:
        """Swap a received update into every worker.

        Raises:
            EngineError: not paused, not received, or not this model's weights: the old ones stay.
            EngineDeadError: a worker failed half-way.
        """
        link, requests = self._alive()
        if self._paused is None:
            raise EngineError("Weights are loaded while the engine is paused; call pause() first.")
        if "weights" in self._asleep:
            raise EngineError("The engine sleeps, and its weights have no memory; call wake_up() first.")
        if self._received is None or self._received[0] != update:
            raise EngineError(f"Version {update.version} was not received; call receive_weights() first.")
        if self._received[1] is not None:
            raise EngineError(self._received[1])
        self._received = None
        # A load that has begun is finished even when its caller is cancelled: half of one is no model.
        self._loading = asyncio.ensure_future(self._load(link, requests, update.version, self._paused))
        # Read the exception even if the caller is cancelled: asyncio reports one that was never read.
        self._loading.add_done_callback(lambda load: load.cancelled() or load.exception())
        await asyncio.shield(self._loading)

    async def _load(self, link: Link, requests: RequestTracker, version: int, mode: PauseMode) -> None:
        try:
            try:
                self.last_load_s = await link.load_weights(version)
            except (EngineError, RequestError) as error:
                # Some workers may have the new weights, some half of them: no request may be sampled from that.
                self._damaged = link.instance
                link.die(f"an update failed half-way ({error})")
                link.raise_if_dead()
            await requests.weights_changed(version, mode)
        except Exception as error:  # its caller may have given up and would not see it
            logger.error("%s could not load weights: %s", self.NAME, error)
            raise
        finally:
            self._loading = None


class VLLMEngine(VLLMEngineBase[AsyncLLMAdapter]):
    """Serves a model folder with vLLM 0.26 to 0.33, on the device that the installed vLLM is built for.

    Args:
        model_path: a model folder, or a hub name.
        dtype: of the served weights: float32 | bfloat16.
        max_num_seqs: requests decoded at once; more wait.
        max_model_len: tokens of prompt and response together; None: what the model allows.
        seed: of the stream that requests without a seed draw from; give each engine its own.
        kv_cache_memory_bytes: None: on a GPU vLLM's share of its memory, on a CPU what ``max_num_seqs`` requests need.
        enable_lora: lets requests name adapters (``load_adapter``).
        lora_rank: weight syncs carry a LoRA adapter of this rank for the base model in the folder; 0: they carry the model.
            Requests wait for the first one.
        load_format: "dummy" starts with random weights and accepts requests only after the first weight sync.
        keep_prefix_cache_across_versions: cached prefixes may serve later versions. Faster, and not exact.
        num_threads: compute threads of vLLM's process on a CPU.
        engine_args: any further argument of vLLM's ``AsyncEngineArgs``.
        devices: the indices of the engine's GPUs among those that this process sees, one per rank (tensor and pipeline
            parallel); empty: a CPU; None: the first ones, or a CPU if vLLM is built for that.
        environment: variables for vLLM's processes; this process has them too while vLLM starts.

    vLLM starts its processes by importing the main module again: a script that uses this class needs
    ``if __name__ == "__main__":``. Those processes end with this one, even when it is killed.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str = "float32",
        max_num_seqs: int = 128,
        max_model_len: int | None = None,
        seed: int = 0,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        devices: Sequence[int] | None = None,
        kv_cache_memory_bytes: int | None = None,
        enable_lora: bool = False,
        lora_rank: int = 0,
        load_format: str = "auto",
        keep_prefix_cache_across_versions: bool = False,
        num_threads: int = 1,
        engine_args: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        log_file: str | None = None,
    ) -> None:
        super().__init__()
        self._settings = VLLMSettings(
            model_path=model_path,
            dtype=dtype,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            seed=seed,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            devices=None if devices is None else tuple(devices),
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            enable_lora=enable_lora,
            lora_rank=lora_rank,
            load_format=load_format,
            num_threads=num_threads,
            engine_args=dict(engine_args or {}),
            environment=dict(environment or {}),
            log_file=log_file,
        )
        self._capabilities = capabilities(
            self._settings, max_model_len=max_model_len or 0, on_cpu=False, streams_chunks=False
        )
        self._salted = not keep_prefix_cache_across_versions
        self._processes: AsyncLLMAdapter | None = None  # until they are shut down
        self._receiving = threading.Lock()  # held in the thread: a cancelled call still receives
        self._buffer: ReceiveBuffer | None = None
        self._receiver: WeightReceiver | None = None
        self._broadcast_client: BroadcastClient | None = None
        self._adapters: dict[str, Any] = {}  # vLLM's LoRARequests, by the name that requests give
        self._adapter_numbers = itertools.count(1)  # vLLM never sees a number twice
        self._policy_lora: Any = None  # the LoRARequest of the policy's adapter

    @property
    def capabilities(self) -> EngineCapabilities:
        """The capabilities of this engine; complete once it is started."""
        return self._capabilities

    async def start(self) -> None:
        """Start vLLM's processes. The event loop is not blocked.

        Raises:
            ConfigError: an engine argument is unknown, vLLM rejects the combination, or the engine's GPUs do not exist.
            EngineDeadError: vLLM did not come up.
        """
        # A restart: processes of the previous life hold device memory.
        await self.teardown()
        settings = self._settings
        # A thread cannot be cancelled: if the caller is, vLLM comes up all the same and must be shut down then.
        starting = asyncio.ensure_future(asyncio.to_thread(start_async_llm, settings))
        try:
            llm = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_shut_down_late)
            raise
        link = self._processes = AsyncLLMAdapter(llm, self._on_death)
        self._vocab_size, self._end_token_ids = link.vocab_size, link.end_token_ids
        self._received = None
        self._adapters.clear()
        if settings.lora_rank:
            self._policy_lora = lora_request("policy", POLICY_ADAPTER, settings.model_path)
        self._begin(link, version=-1, salted=self._salted)
        # The first call: from here on vLLM notices the death of its process.
        ranks = await link.on_workers("skyrl_process")
        workers_are_here = all(where == machine() for where, _ in ranks)
        if workers_are_here:
            link.watch_ranks([int(pid) for _, pid in ranks])
        self._capabilities = capabilities(
            settings,
            max_model_len=link.max_model_len,
            on_cpu=link.on_cpu,
            streams_chunks=link.streams_chunks,
            machine=machine() if workers_are_here else "",
        )

    async def teardown(self) -> None:
        if self._link is not None:
            self._link.die("it was torn down")
        # Taken out first, so that a second teardown does nothing.
        processes, self._processes = self._processes, None
        if processes is not None:  # a dead engine may have processes left
            await processes.shut_down()

    async def health(self) -> EngineHealth:
        try:
            link, requests = self._alive()
            held, kv_cache_usage = await asyncio.gather(link.held_requests(), link.kv_cache_usage())
        except EngineError:
            return EngineHealth(alive=False, policy_version=self.policy_version)
        # A request that is not streamed brings all its tokens at its end; count those that vLLM has of it by now.
        underway = sum(max(0, (link.sampled(one) or 0) - one.delivered) for one in requests.in_flight)
        return EngineHealth(
            alive=True,
            policy_version=requests.version,
            running=held,
            waiting=max(0, link.unfinished() - held) + requests.gate.waiting,
            paused=self._paused is not None,
            generated_tokens=requests.generated_tokens + underway,
            prefill_tokens=link.prefill_tokens,
            busy_s=requests.busy.seconds,
            kv_cache_usage=kv_cache_usage,
        )

    async def worker_pids(self) -> list[int]:
        """Return the process ids of vLLM's workers. With one worker, vLLM's scheduler is in the same process."""
        return [int(pid) for _, pid in await self._alive()[0].on_workers("skyrl_process")]

    async def sleep(self, level: int = 1) -> None:
        """Free device memory while paused: 1 keeps the weights on the host, 2 drops them (sync weights before resuming).

        Frozen requests keep their place; their KV caches are computed again.
        """
        link, _ = self._alive()
        if not self._capabilities.sleep:
            raise EngineError("This engine cannot sleep: it needs a GPU and engine_args.enable_sleep_mode.")
        if self._paused is None:
            raise EngineError("An engine sleeps while it is paused; call pause() first.")
        if level > 1 and (self._settings.lora_rank or self._adapters):
            raise EngineError("No weight sync carries the base model of an adapter, or users' adapters; call sleep(1).")
        kinds = {"weights", "kv_cache"}
        if self._asleep == kinds:
            return
        if self._asleep:  # vLLM would give this memory back a second time
            await self.wake_up()
        await self._change_memory(link, link.sleep(level))
        self._asleep = kinds

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory back: all of it, or "weights" first (so that an update can be loaded) and "kv_cache" later."""
        link, _ = self._alive()
        if not self._capabilities.sleep:
            raise EngineError("This engine cannot sleep, so it cannot wake up; ask capabilities.sleep first.")
        waking = self._asleep if tags is None else self._asleep & set(tags)
        if not waking:  # vLLM would map memory a second time
            return
        await self._change_memory(link, link.wake_up(sorted(waking), last=waking == self._asleep))
        self._asleep -= waking

    async def _change_memory(self, link: AsyncLLMAdapter, change: Awaitable[None]) -> None:
        """Wait for a call that may fail on some of the ranks.

        Raises:
            EngineError: it failed on the only rank.
            EngineDeadError: it failed, and vLLM would take answers of other ranks for those of its next calls.
        """
        try:
            await change
        except EngineError as error:
            if self._settings.num_ranks > 1:
                link.die(f"its memory could not be given back or taken ({error})")
                link.raise_if_dead()
            raise

    async def _parse(self, engine_input: InferenceEngineInput, stream: bool) -> list[EngineRequest]:
        if self._alive()[1].version < 0 and (self._settings.load_format == "dummy" or self._settings.lora_rank):
            raise RequestError("The engine has no weights yet; sync the policy's weights before the first generate().")
        return await super()._parse(engine_input, stream)

    # Weights and adapters -----------------------------------------------------------------------------------------

    def _reject(self, update: WeightUpdate) -> str | None:
        transports = self._capabilities.transports
        if update.transport not in transports:
            return f"This engine receives by {', '.join(sorted(transports))}, not by {update.transport!r}."
        rank = 0 if update.adapter is None else update.adapter.rank
        if rank == self._settings.lora_rank:
            return None
        served = f"an adapter of rank {self._settings.lora_rank}" if self._settings.lora_rank else "whole models"
        return (
            f"The update brings {update.adapter or 'a whole model'}, the engine serves {served}; trainer and engine must "
            "have the same trainer.policy.model.lora."
        )

    def _lora(self, name: str | None) -> Any:
        if name is None:
            return self._policy_lora
        if name not in self._adapters:
            raise RequestError(f"There is no adapter {name!r}; load_adapter() it first.")
        return self._adapters[name]

    async def receive_weights(self, update: WeightUpdate) -> None:
        """See the base class.

        Raises:
            EngineError: no broadcast came. The client then leaves this engine out, so that others are not paused for it.
        """
        if self._takes_broadcast(update):
            self._received = None
            await self._receive_broadcast(self._alive()[0], update)
        await super().receive_weights(update)

    def _takes_broadcast(self, update: WeightUpdate) -> bool:
        """Whether the update reaches the workers by a broadcast, and not by memory that they map."""
        return update.transport in ("gloo", "nccl") and not update.is_mapped_on(self.capabilities.machine)

    async def _bring_here(self, link: AsyncLLMAdapter, update: WeightUpdate) -> WeightUpdate:
        """Bring the bytes into this machine's memory and have them verified, where no request waits for it."""
        if update.transport == "cuda_ipc" or self._takes_broadcast(update):  # only the workers have them
            return update
        # A thread cannot be cancelled: it runs on when the caller is, and the next update waits for it.
        return await asyncio.shield(asyncio.to_thread(self._fetch, update))

    async def _receive_broadcast(self, link: AsyncLLMAdapter, update: WeightUpdate) -> None:
        """Let the workers join the broadcast group that the trainer names, and wait for the end of the broadcast."""
        from skyrl_train.weight_sync.broadcast_receiver import BroadcastClient

        if self._broadcast_client is None:
            self._broadcast_client = BroadcastClient()
        assignments = self._broadcast_client.assignments(update, self._settings.num_ranks)
        # In a thread, because the trainer answers when all engines have asked or have the bytes. A thread of its own: if engines
        # of this process shared a few threads, some would wait for others that have none.
        thread = ThreadPoolExecutor(1, thread_name_prefix="weight-broadcast")
        try:
            following = functools.partial(asyncio.get_running_loop().run_in_executor, thread, next, assignments, None)
            while (assignment := await following()) is not None:
                await link.on_workers("skyrl_begin_broadcast", update.to_message(), assignment)
        except BaseException:
            self._leave_trainer()
            raise
        finally:
            thread.shutdown(wait=False)

    def _leave_trainer(self) -> None:
        """Close the connection to the trainer, which then stops waiting for this engine."""
        client, self._broadcast_client = self._broadcast_client, None
        if client is not None:
            client.close()

    def _fetch(self, update: WeightUpdate) -> WeightUpdate:
        """Bring the bytes into this machine's memory and verify them. Called in a thread."""
        import torch

        from skyrl_train.weight_sync.receiver import ReceiveBuffer, WeightReceiver

        with self._receiving:
            if self._buffer is None or self._receiver is None:
                self._buffer, self._receiver = ReceiveBuffer(), WeightReceiver(torch.device("cpu"))
            here = self._buffer.fetch(update)
            self._receiver.open_update(here)  # raises where the checksum differs
        if here.transport == "shared_memory" and self.capabilities.machine:
            # The workers map the very pages that were verified here, and a second pass there would hold up decoding. Files
            # keep their checksum: the workers open them again by path.
            return dataclasses.replace(here, checksum=None)
        return here

    def _on_death(self, reason: str) -> None:
        super()._on_death(reason)
        self._leave_trainer()
        if self._buffer is not None and self._receiver is not None:
            self._receiver.close()
            self._buffer.close()

    async def load_adapter(self, name: str, path: str) -> None:
        """Load the adapter in the folder ``path`` (peft's format); it replaces one that has this name."""
        link, _ = self._alive()
        if not self._settings.enable_lora:
            raise EngineError("This engine has no adapters; set enable_lora.")
        if "weights" in self._asleep:
            raise EngineError("The engine sleeps, and adapters have no memory; call wake_up() first.")
        adapter = lora_request(name, next(self._adapter_numbers), path)
        await link.add_adapter(adapter)
        # The name means the new adapter before the old one is removed: no request finds neither.
        previous = self._adapters.get(name)
        self._adapters[name] = adapter
        if previous is not None:
            await link.remove_adapter(previous)

    async def unload_adapter(self, name: str) -> None:
        link, _ = self._alive()
        if name not in self._adapters:
            raise EngineError(f"There is no adapter {name!r}; loaded: {', '.join(sorted(self._adapters)) or 'none'}.")
        await link.remove_adapter(self._adapters.pop(name))


def _shut_down_late(starting: asyncio.Future[Any]) -> None:
    """Shut down a vLLM that came up after the caller of ``start`` was cancelled."""
    if not starting.cancelled() and starting.exception() is None:
        asyncio.get_running_loop().run_in_executor(None, shut_down, starting.result())

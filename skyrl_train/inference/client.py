"""The one door to the engines: requests that outlive weight updates.

    generate(batch) ──> one Continuation per response ──gate──> Router ──> engine
                              ^                                              │ "abort", engine died
                              └──────────────── goes on with what it has ────┘

    publisher ──> receive_weights (engines serve) ──> load_weights: close gate · pause · load · resume · open gate

| step of an update | requests inside an engine | requests that arrive |
|---|---|---|
| receive | sampled | sampled |
| gate closed, pause | frozen, finished or aborted, by the pause mode | wait at the gate |
| load | as before | wait at the gate |
| resume, gate open | go on; every further token carries the new version | enter |
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from skyrl_train.concurrency import gather_or_cancel
from skyrl_train.errors import ConfigError, EngineDeadError, EngineError, NoEngineError, PublicationError
from skyrl_train.inference.chat.renderer import ChatRenderer
from skyrl_train.inference.continuation import Continuation, Segment
from skyrl_train.inference.interface import (
    EngineHealth,
    InferenceEngineInput,
    InferenceEngineInterface,
    InferenceEngineOutput,
    PauseMode,
    SamplingParams,
    StopReason,
    TokenChunk,
)
from skyrl_train.inference.router import Router
from skyrl_train.inference.stop_strings import StopStringMatcher
from skyrl_train.inference.weight_update import WeightUpdate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class InferenceEngineClient:
    """Talks to a list of engines that serve the same policy.

    Args:
        engines: they are started by :meth:`start` and torn down by :meth:`teardown`.
        tokenizer: decodes responses, renders conversations, matches stop strings.
        model_path: tells the chat renderer which model family this is.
        pause_timeout_s: limit of each phase of an update (receive, pause, load, resume).
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngineInterface],
        tokenizer: PreTrainedTokenizerBase,
        model_path: str = "",
        *,
        pause_timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not engines:
            raise ConfigError("an InferenceEngineClient needs at least one engine")
        self._engines = list(engines)
        self._tokenizer = tokenizer
        self._renderer = ChatRenderer(tokenizer, model_path)
        self._router = Router(len(self._engines))
        self._pause_timeout_s = pause_timeout_s
        self._clock = clock
        self._gate = asyncio.Event()
        self._gate.set()
        self._segments: dict[int, set[asyncio.Task[None]]] = {index: set() for index in range(len(self._engines))}
        self._last_departure = "none was ever there"
        self._update_lock = asyncio.Lock()
        self._policy_version = -1
        self.generated_tokens = 0  # of responses that have ended

    @property
    def policy_version(self) -> int:
        """The version that every routed engine holds; -1 before the first publication."""
        return self._policy_version

    @property
    def engines(self) -> list[InferenceEngineInterface]:
        """The engines in the routing."""
        return [self._engines[index] for index in self._router.living]

    async def start(self) -> None:
        """Starts all engines at once; fails when one of them cannot start."""
        await asyncio.gather(*(engine.start() for engine in self._engines))

    async def teardown(self) -> None:
        """Stops all engines."""
        await asyncio.gather(*(engine.teardown() for engine in self._engines))

    async def health(self) -> list[EngineHealth]:
        """A snapshot per engine in the routing; an engine that died meanwhile leaves the routing and the list."""
        living = self._router.living
        healths = await gather_or_cancel(self._engines[index].health() for index in living)
        for index, health in zip(living, healths, strict=True):
            if not health.alive:
                self._engine_left(index, EngineDeadError("its process ended"))
        return [health for health in healths if health.alive]

    # Requests -----------------------------------------------------------------------------------------------------

    async def generate(self, input_batch: InferenceEngineInput) -> InferenceEngineOutput:
        """Samples ``n`` responses per prompt; returns when all have ended, whatever happened to the engines meanwhile.

        Prompts come as ``prompt_token_ids`` or as conversations in ``prompts``. With ``n`` > 1 the responses of one prompt
        follow each other in every list of the output.

        Raises:
            ConfigError: the input names both or neither kind of prompt, or a sampling parameter is impossible.
            RequestError: a prompt is empty or does not fit the context.
            NoEngineError: no engine is left.
        """
        prompts = self._prompt_token_ids(input_batch)
        params = SamplingParams.parse(input_batch.get("sampling_params"))
        session_ids: Sequence[str | None] = input_batch.get("session_ids") or [None] * len(prompts)
        if len(session_ids) != len(prompts):
            raise ConfigError(f"session_ids has {len(session_ids)} entries for {len(prompts)} prompts")
        done = await gather_or_cancel(
            self._complete(self._new_continuation(prompt, params, choice), session_id)
            for prompt, session_id in zip(prompts, session_ids, strict=True)
            for choice in range(params.n)
        )
        return InferenceEngineOutput(
            responses=[self._text(c) for c in done],
            response_ids=[c.token_ids for c in done],
            stop_reasons=[str(c.stop_reason) for c in done],
            response_logprobs=[c.logprobs for c in done],
            response_versions=[c.versions for c in done],
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of some tokens, special ones left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _prompt_token_ids(self, input_batch: InferenceEngineInput) -> list[Sequence[int]]:
        conversations, token_ids = input_batch.get("prompts"), input_batch.get("prompt_token_ids")
        if (conversations is None) == (token_ids is None):
            raise ConfigError("give exactly one of prompts and prompt_token_ids")
        if token_ids is not None:
            return list(token_ids)
        return [self._renderer.render(conversation) for conversation in conversations or ()]

    def _new_continuation(self, prompt: Sequence[int], params: SamplingParams, choice: int) -> Continuation:
        matcher = StopStringMatcher(self._tokenizer, params.stop) if params.stop else None
        return Continuation(prompt, params, choice=choice, matcher=matcher)

    def _text(self, done: Continuation) -> str:
        text = self.decode(done.token_ids)
        return text if done.text_end is None else text[: done.text_end]

    async def _complete(self, response: Continuation, session_id: str | None) -> Continuation:
        """Runs segments until the response has ended."""
        while (segment := response.next_segment()) is not None:
            index = await self._acquire(session_id)
            # A task of its own, so that an engine that leaves alive (it missed an update) can be left by its requests.
            running = asyncio.create_task(self._run_segment(self._engines[index], segment, response, session_id))
            self._segments[index].add(running)
            try:
                await running
            except EngineDeadError as error:
                self._engine_left(index, error)
            except asyncio.CancelledError:
                caller = asyncio.current_task()
                if index in self._router.living or (caller is not None and caller.cancelling()):
                    raise
            finally:
                self._segments[index].discard(running)
                self._router.release(index)
        self.generated_tokens += len(response.token_ids)
        return response

    async def _run_segment(
        self, engine: InferenceEngineInterface, segment: Segment, response: Continuation, session_id: str | None
    ) -> None:
        engine_input = segment.to_engine_input(session_id)
        if not response.needs_stream:
            output = await engine.generate(engine_input)
            response.add(
                TokenChunk(
                    output["response_ids"][0],
                    output["response_logprobs"][0],
                    output["response_versions"][0],
                    StopReason(output["stop_reasons"][0]),
                )
            )
            return
        stream = engine.stream(engine_input)
        try:
            async for chunk in stream:
                response.add(chunk)
                if response.stop_reason is not None:
                    break
        finally:
            await stream.aclose()  # type: ignore[attr-defined]  # leaving early aborts the request in the engine

    async def _acquire(self, session_id: str | None) -> int:
        while not self._gate.is_set():  # it may have closed again between opening and this task's turn
            await self._gate.wait()
        index = self._router.acquire(session_id)
        if index is None:
            raise NoEngineError(f"no inference engine is left. The last one left because: {self._last_departure}")
        return index

    def _engine_left(self, index: int, reason: BaseException) -> None:
        """Takes an engine out of the routing; its requests go on elsewhere with what they have."""
        if index in self._router.living:
            logger.error("inference engine %d left the routing: %s", index, reason)
            self._router.remove(index)
            self._last_departure = str(reason)
        for segment in self._segments[index]:
            segment.cancel()

    # Updates ------------------------------------------------------------------------------------------------------

    async def pause_generation(self, mode: PauseMode) -> None:
        """Closes the gate, then pauses every engine; returns when no engine samples any more.

        Raises:
            PublicationError: an engine does not know ``mode`` or did not pause in time; all engines sample again.
        """
        unsupported = [engine for engine in self.engines if mode not in engine.capabilities.pause_modes]
        if unsupported:
            known = ", ".join(sorted(unsupported[0].capabilities.pause_modes))
            raise PublicationError(
                f"an engine cannot pause with {mode.value!r}; set generator.pause_mode to one of: {known}"
            )
        self._gate.clear()
        try:
            await self._on_each("pause", lambda engine: engine.pause(mode))
            if mode is PauseMode.ABORT:
                await self._verify_aborted()
        except BaseException:
            await self.resume_generation()
            raise

    async def _verify_aborted(self) -> None:
        async with asyncio.timeout(self._pause_timeout_s):
            healths = await self.health()
        for health in healths:
            if health.running or health.waiting:
                raise PublicationError(
                    f"an engine still holds {health.running + health.waiting} requests after it reported them aborted"
                )

    async def resume_generation(self) -> None:
        """Lets every engine sample again, then opens the gate."""
        try:
            await self._on_each("resume", lambda engine: engine.resume())
        finally:
            self._gate.set()

    async def receive_weights(self, update: WeightUpdate) -> None:
        """*Transfer*: engines take the bytes and go on serving."""
        await self._on_each("receive", lambda engine: engine.receive_weights(update))

    async def load_weights(self, update: WeightUpdate, mode: PauseMode) -> float:
        """*Load*: swaps the received update in while the engines are paused with ``mode``.

        An engine that fails to load while another succeeds leaves the routing: no engine ever serves another version than
        the client reports.

        Returns:
            The seconds for which sampling was paused.

        Raises:
            PublicationError: no engine could load; all serve the weights that they had.
        """
        async with self._update_lock:
            started = self._clock()
            await self.pause_generation(mode)
            try:
                await self._on_each("load", lambda engine: engine.load_weights(update))
                self._policy_version = update.version
            finally:
                await self.resume_generation()
            return self._clock() - started

    async def _on_each(self, phase: str, call: Callable[[InferenceEngineInterface], Awaitable[None]]) -> None:
        """Runs one phase on every routed engine at once, within the timeout.

        Engines that fail leave the routing if at least one succeeded; if none did, they stay and the failure is raised.
        """
        living = self._router.living
        if not living:
            raise PublicationError(
                f"cannot {phase} weights: no inference engine is left. The last one left because: {self._last_departure}"
            )

        async def one(index: int) -> BaseException | None:
            try:
                async with asyncio.timeout(self._pause_timeout_s):
                    await call(self._engines[index])
            except TimeoutError:
                return EngineError(f"engine {index} did not {phase} within {self._pause_timeout_s:g} s")
            except EngineError as error:
                return error
            return None

        failures = await asyncio.gather(*(one(index) for index in living))
        failed = {index: failure for index, failure in zip(living, failures, strict=True) if failure is not None}
        for index, failure in failed.items():
            if len(failed) < len(living) or isinstance(failure, EngineDeadError):
                self._engine_left(index, failure)
        if len(failed) == len(living):
            first = next(iter(failed.values()))
            raise PublicationError(f"{phase} failed on every engine: {first}") from first

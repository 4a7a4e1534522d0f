"""Tokens in, tokens out: requests that outlive weight updates, and engines.

    complete / stream ──> one Continuation per response ──gate──> EnginePool ──> engine
                               ^                                                   │ "abort", engine left
                               └────────────────── goes on with what it has ───────┘

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
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from skyrl_train.concurrency import close_all, gather_or_cancel
from skyrl_train.errors import ConfigError, RequestError
from skyrl_train.inference.chat.renderer import ChatRenderer
from skyrl_train.inference.continuation import Continuation, Segment
from skyrl_train.inference.engine_pool import EnginePool
from skyrl_train.inference.fleet import EngineState, FleetLimits
from skyrl_train.inference.incremental_text import text_of
from skyrl_train.inference.interface import (
    EngineCapabilities,
    EngineHealth,
    InferenceEngineInput,
    InferenceEngineInterface,
    PauseMode,
    StopReason,
)
from skyrl_train.inference.recordings import Recordings
from skyrl_train.inference.requests import Generation, GenerationChunk, GenerationRequest
from skyrl_train.inference.response_text import ResponseText
from skyrl_train.inference.segments import run_segment
from skyrl_train.inference.supervisor import FleetSupervisor
from skyrl_train.inference.updates import FleetUpdates
from skyrl_train.inference.weight_update import WeightUpdate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Tokens in one piece of a stream. With 20 alternatives to each it is some 100 kB when it is sent.
_LARGEST_CHUNK = 64


class TokenClient:
    """Talks to a fleet of engines that serve the same policy.

    Args:
        engines: they are started by :meth:`start` and torn down by :meth:`teardown`.
        tokenizer: decodes responses, renders conversations, matches stop strings.
        model_path: tells the chat renderer which model family this is.
        pause_timeout_s: limit of each phase of an update (receive, pause, load, resume).
        engine_wait_timeout_s: how long requests wait for an engine while none serves.
        limits: how often a dead engine is started again, and how long a silent one is waited for.
        probe_interval_s: seconds between two health probes of an engine.
        tool_parser, reasoning_parser: see :class:`ChatRenderer`.
        replay: whether sessions can be recorded and replayed; see :attr:`recordings`.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngineInterface],
        tokenizer: PreTrainedTokenizerBase,
        model_path: str = "",
        *,
        pause_timeout_s: float = 60.0,
        engine_wait_timeout_s: float = 60.0,
        limits: FleetLimits | None = None,
        probe_interval_s: float = 10.0,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        replay: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not engines:
            raise ConfigError("a client needs at least one engine")
        self._pool = EnginePool(
            engines,
            wait_timeout_s=engine_wait_timeout_s,
            handover_timeout_s=pause_timeout_s,
            limits=limits,
            clock=clock,
        )
        self._updates = FleetUpdates(self._pool, phase_timeout_s=pause_timeout_s, clock=clock)
        self.supervisor = FleetSupervisor(
            self._pool, self._updates.catch_up, probe_interval_s=probe_interval_s, clock=clock
        )
        self._tokenizer = tokenizer
        self._renderer = ChatRenderer(tokenizer, model_path, tool_parser=tool_parser, reasoning_parser=reasoning_parser)
        self.recordings = Recordings(enabled=replay)
        self.generated_tokens = 0  # of responses that have ended; without those that were replayed

    @property
    def policy_version(self) -> int:
        """The version that every routed engine holds; -1 before the first publication."""
        return self._updates.policy_version

    @property
    def engines(self) -> list[InferenceEngineInterface]:
        """The engines in the routing."""
        return [self._pool.engine(number) for number in self._pool.routed]

    @property
    def serving(self) -> bool:
        """Whether an engine takes requests now."""
        return bool(self._pool.routed)

    async def wait_for_engine(self) -> None:
        """Returns when an engine takes requests.

        Raises:
            NoEngineError: none came (back) in time, or none can come any more.
        """
        await self._pool.wait_for_engine()

    def describe(self) -> list[str]:
        """What the engines are busy with, and whether requests wait before them, a line each."""
        gate = self._updates.gate
        if gate.is_open:
            return self._pool.describe()
        return [
            *self._pool.describe(),
            f"engines: paused for new weights; requests that wait before them: {gate.waiting}",
        ]

    @property
    def engine_states(self) -> dict[int, EngineState]:
        """Every engine's state, by number."""
        return self._pool.fleet.states

    @property
    def capabilities(self) -> EngineCapabilities:
        """What every engine in the routing can do."""
        return self._pool.capabilities

    @property
    def renderer(self) -> ChatRenderer:
        """Renders and parses conversations for the model that the engines serve."""
        return self._renderer

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def adapters(self) -> Mapping[str, str]:
        """The LoRA adapters that every engine has loaded, with their folders."""
        return self._updates.adapters

    async def start(self) -> None:
        """Starts all engines at once, and watches over them; fails when one of them cannot start."""
        await asyncio.gather(*(engine.start() for engine in self._pool.everyone))
        self.supervisor.start()

    async def teardown(self) -> None:
        """Stops all engines, whatever one of them does; requests that run or wait fail with :class:`NoEngineError`.

        Raises:
            Exception: the first failure, once nothing is left to stop.
        """
        errors = await close_all([self.supervisor.stop, self._stop_engines])
        if errors:
            raise errors[0]

    async def _stop_engines(self) -> None:
        self._pool.close()
        self._updates.gate.open()
        ends = await asyncio.gather(*(engine.teardown() for engine in self._pool.everyone), return_exceptions=True)
        for end in ends:
            if end is not None:
                raise end

    async def health(self) -> list[EngineHealth]:
        """A snapshot per engine in the routing; an engine that died meanwhile leaves the routing and the list."""
        numbers = self._pool.routed
        healths = await gather_or_cancel(self._pool.engine(number).health() for number in numbers)
        for number, health in zip(numbers, healths, strict=True):
            if not health.alive:
                self._pool.died(number, "its process ended")
        return [health for health in healths if health.alive]

    # Requests -----------------------------------------------------------------------------------------------------

    async def complete(self, request: GenerationRequest) -> Generation:
        """Samples one response to its end, whatever happens underneath. Cancelling the caller cancels it.

        Raises:
            ConfigError: a sampling parameter is not supported by the engines.
            RequestError: the prompt is empty or does not fit the context.
            NoEngineError: no engine is left, and none came back in time.
        """
        self._check_supported(request)
        text = self._new_text(request) if request.params.stop else None
        response = Continuation(request.prompt_token_ids, request.params, choice=request.choice, make_text=text)
        await self._run(response, request, None)
        return self._generation(response, request)

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        """Like ``complete``, in pieces; a slow reader gets larger ones, up to a size that a connection can be asked to
        hold. Closing the iterator cancels the request.

        A response with a grammar comes at its end: until then an interruption may have it begin again.
        """
        self._check_supported(request)
        response = Continuation(
            request.prompt_token_ids, request.params, choice=request.choice, make_text=self._new_text(request)
        )
        progress = asyncio.Event()
        running = asyncio.create_task(self._run(response, request, progress.set))
        running.add_done_callback(lambda _: progress.set())
        sent = 0
        try:
            while not running.done():
                await progress.wait()
                progress.clear()
                while not running.done() and not response.may_restart and len(response.token_ids) > sent:
                    chunk = self._chunk(response, sent, None)
                    sent += len(chunk.token_ids)  # before the reader's turn, during which more may arrive
                    yield chunk
            running.result()  # raises what it raised
            while len(response.token_ids) - sent > _LARGEST_CHUNK:
                chunk = self._chunk(response, sent, None)
                sent += len(chunk.token_ids)
                yield chunk
            yield self._chunk(response, sent, self._generation(response, request))
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def _check_supported(self, request: GenerationRequest) -> None:
        can, params = self.capabilities, request.params
        if params.structured is not None and not can.structured_output:
            raise ConfigError("the engines cannot follow a grammar (structured output); use vLLM engines")
        if params.top_logprobs > can.max_top_logprobs:
            raise ConfigError(
                f"the engines return at most {can.max_top_logprobs} top_logprobs, not {params.top_logprobs}"
            )
        if request.adapter is not None and request.adapter not in self.adapters:
            known = ", ".join(sorted(self.adapters)) or "none"
            raise ConfigError(f"the LoRA adapter {request.adapter!r} is not loaded; loaded: {known}")

    def _new_text(self, request: GenerationRequest) -> Callable[[], ResponseText]:
        return lambda: ResponseText(self._tokenizer, request.params.stop)

    def _chunk(self, response: Continuation, sent: int, generation: Generation | None) -> GenerationChunk:
        text = response.text
        assert text is not None, "a streamed response has text"
        of = slice(sent, sent + _LARGEST_CHUNK)
        return GenerationChunk(
            token_ids=response.token_ids[of],
            logprobs=response.logprobs[of],
            versions=response.versions[of],
            text=text.take() if generation is None else text.rest(generation.text),
            top_logprobs=None if response.top_logprobs is None else response.top_logprobs[of],
            generation=generation,
        )

    def _generation(self, response: Continuation, request: GenerationRequest) -> Generation:
        assert response.stop_reason is not None, "the response has ended"
        if response.text is not None:
            text = response.text.whole()
        else:
            text = text_of(self._tokenizer, response.token_ids) if request.detokenize else ""
        return Generation(  # with lists of its own, which its caller may change: the record reads those of the response later
            prompt_token_ids=response.prompt_token_ids,
            token_ids=list(response.token_ids),
            logprobs=list(response.logprobs),
            versions=list(response.versions),
            stop_reason=response.stop_reason,
            text=text,
            top_logprobs=None if response.top_logprobs is None else list(response.top_logprobs),
            stop_string=None if response.text is None else response.text.stop_string,
            segments=response.segments,
            restarts=response.restarts,
        )

    async def _run(
        self, response: Continuation, request: GenerationRequest, on_progress: Callable[[], None] | None
    ) -> None:
        """Takes what is recorded of the response, then samples the rest."""
        with self.recordings.recorded(request, response) as known:
            for chunk in known:
                response.recall(chunk)
                if on_progress is not None:
                    on_progress()
                await asyncio.sleep(0)
            replayed = len(response.token_ids)
            await self._sample(response, request, on_progress)
        self.generated_tokens += len(response.token_ids) - replayed

    async def _sample(
        self, response: Continuation, request: GenerationRequest, on_progress: Callable[[], None] | None
    ) -> None:
        """Runs segments until the response has ended."""
        while (segment := response.next_segment()) is not None:
            await self._updates.gate.passed()
            lease = await self._pool.acquire(request.session_id)
            try:
                if not self._updates.gate.is_open:  # it closed while this task waited for an engine
                    response.unsent()
                    continue
                running = run_segment(
                    self._pool.engine(lease.engine),
                    self._engine_input(segment, response, request),
                    response,
                    segment.number,
                    on_progress,
                )
                await self._pool.run(lease, running)
            except RequestError:
                if not response.token_ids:
                    raise
                response.stop_reason = StopReason.LENGTH  # this engine's context is smaller than the last one's
            finally:
                self._pool.release(lease)

    def _engine_input(
        self, segment: Segment, response: Continuation, request: GenerationRequest
    ) -> InferenceEngineInput:
        oldest = min(
            self.policy_version if request.oldest_version is None else request.oldest_version,
            response.versions[0] if response.versions else self.policy_version,
        )
        return segment.to_engine_input(request.session_id, oldest, request.adapter)

    # Updates ------------------------------------------------------------------------------------------------------

    async def pause_generation(self, mode: PauseMode) -> None:
        """Closes the gate, then pauses every engine; returns when no engine samples any more.

        Raises:
            PublicationError: an engine does not know ``mode`` or did not pause in time; all engines sample again.
        """
        await self._updates.pause(mode)

    async def resume_generation(self) -> None:
        """Lets every engine sample again, then opens the gate."""
        await self._updates.resume()

    async def sleep(self) -> None:
        """Frees the device memory of the paused engines, where they can (``capabilities.sleep``)."""
        await self._updates.sleep()

    async def wake_up(self) -> None:
        """Brings sleeping engines back, still paused; before weights are received and loaded."""
        await self._updates.wake_up()

    async def receive_weights(self, update: WeightUpdate) -> None:
        """*Transfer*: engines take the bytes and go on serving."""
        await self._updates.receive(update)

    async def load_weights(self, update: WeightUpdate, mode: PauseMode) -> float:
        """*Load*: swaps the received update into the model while the engines are paused with ``mode``.

        An engine that fails to load while another succeeds leaves the routing until it has caught up: no engine ever
        serves another version than the client reports.

        Returns:
            The seconds for which sampling was paused.

        Raises:
            PublicationError: no engine could load; those that serve have the weights that they had.
        """
        return await self._updates.load(update, mode)

    # The fleet ----------------------------------------------------------------------------------------------------

    async def add_engine(self, engine: InferenceEngineInterface) -> int:
        """Starts a further engine, brings it to the current weights, and lets it serve; returns its number.

        Raises:
            EngineError: it could not start or take the weights; it is not part of the fleet then.
        """
        number = self._pool.add(engine)
        try:
            await engine.start()
            self._pool.fleet.started(number)
            await self._updates.catch_up(number)
        except BaseException:
            await self._pool.retire(number)
            raise
        return number

    async def remove_engine(self, number: int) -> None:
        """Takes an engine out of the fleet: its requests go on elsewhere with the tokens they have. Idempotent."""
        await self._pool.retire(number)

    async def load_adapter(self, name: str, path: str) -> None:
        """Loads a LoRA adapter into every engine, those that join later included.

        Raises:
            ConfigError: the engines have no adapters.
            PublicationError: no engine could load it.
        """
        await self._updates.load_adapter(name, path)

    async def unload_adapter(self, name: str) -> None:
        """Forgets an adapter. Unknown names are ignored."""
        await self._updates.unload_adapter(name)

"""The client of the inference engines: tokens (``generate``, ``complete``, ``stream``) or OpenAI bodies in this process.

    chat_completion ──parse──> ChatService ──> complete
    completion ──────parse───> CompletionRun ──> complete
    generate ────────────────────────────────> complete / stream

    complete / stream ──> one Continuation per response ──gate──> EnginePool ──> engine
                               ^                                                   │ "abort", engine left
                               └────────── continues with the tokens it has ───────┘

A weight update (:class:`~skyrl_train.inference.pool.updates.FleetUpdates`) and the requests that run meanwhile:

| step of an update | requests inside an engine | requests that arrive |
|---|---|---|
| receive | sampled | sampled |
| gate closed, pause | frozen, finished or aborted, by the pause mode | wait at the gate |
| load | as before | wait at the gate |
| resume, gate open | continue; every further token carries the new version | enter |
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from skyrl_train.errors import ConfigError, RequestError
from skyrl_train.events.log import NO_EVENTS, EventLog
from skyrl_train.inference.chat.renderer import ChatRenderer
from skyrl_train.inference.chat.service import ChatService
from skyrl_train.inference.continuation import Continuation, Segment
from skyrl_train.inference.interface import (
    EngineCapabilities,
    EngineHealth,
    InferenceEngineInput,
    InferenceEngineInterface,
    InferenceEngineOutput,
    SamplingParams,
    StopReason,
    TokenChunk,
    only_chunk,
    output_of,
)
from skyrl_train.inference.openai import chat as openai_chat
from skyrl_train.inference.openai import completions as openai_completions
from skyrl_train.inference.openai.completions import CompletionRun
from skyrl_train.inference.openai.dialect import ResponseContext, TokenTexts
from skyrl_train.inference.openai.errors import DialectError
from skyrl_train.inference.pool.engine_pool import EnginePool
from skyrl_train.inference.pool.fleet import EngineState, FleetLimits
from skyrl_train.inference.pool.supervisor import FleetSupervisor
from skyrl_train.inference.pool.updates import FleetUpdates
from skyrl_train.inference.replay import ReplayCache
from skyrl_train.inference.request_trace import RequestTrace
from skyrl_train.inference.requests import Generation, GenerationChunk, GenerationRequest, GenerationService
from skyrl_train.inference.response_text import ResponseText, text_of
from skyrl_train.runtime.concurrency import close_all, gather_or_cancel
from skyrl_train.types import GrammarSpan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Tokens in one piece of a stream. With 20 alternatives for each it takes about 100 kB on the wire.
_LARGEST_CHUNK = 64
# When an engine dies, a response that is not read in pieces loses at most this many tokens. Each piece passes through two or
# three processes, so pieces of 64 cost the control process of a thousand agents more than the turns.
KEPT_TOKENS = 256
# Fields of an engine's event, by the attributes of its health.
_HEALTH_FIELDS = {
    "policy_version": "version",
    **{
        name: name
        for name in ("running", "waiting", "paused", "generated_tokens", "prefill_tokens", "busy_s", "kv_cache_usage")
    },
}


class RequestClient(GenerationService):
    """The part of a client that generators and the endpoint use. Every method is built on single responses.

    OpenAI bodies need no HTTP in between. Payloads have SkyRL's shape, ``{"json": body, "headers": headers}``; headers are
    not read. A body's ``model`` names a loaded LoRA adapter, or, with any other name, the policy. A body's ``session_id``
    keeps its requests on one engine. With the session id of a trajectory (``TrajectoryID.to_string()``) they are also
    replayed after a resume. Sessions, which belong to the endpoint, record what was sampled; without one,
    ``"return_token_ids": True`` adds tokens, log-probs and versions to the response.

    Attributes:
        tokenizer: the model's tokenizer.
        renderer: renders and parses conversations for the model that the engines serve.
        events: the record of the run; in a rollout actor, what the driver records.
    """

    tokenizer: PreTrainedTokenizerBase
    renderer: ChatRenderer
    events: EventLog = NO_EVENTS

    @property
    @abstractmethod
    def adapters(self) -> Mapping[str, str]:
        """The LoRA adapters that every engine has loaded, with their folders."""

    @property
    @abstractmethod
    def engine_states(self) -> dict[int, EngineState]:
        """The state of each engine, by number."""

    async def generate(self, input_batch: InferenceEngineInput) -> InferenceEngineOutput:
        """Sample ``n`` responses per prompt. Returns when all have ended, across weight updates and engine failures.

        Prompts are ``prompt_token_ids``, or conversations in ``prompts``. With ``n`` > 1 the responses of one prompt are
        adjacent in every list of the output. ``priority`` is the oldest policy version that the responses will be trained
        with. With ``detokenize=False``, ``responses`` are empty strings, and the control process saves decoding time.

        Raises:
            ConfigError: the input has both or neither kind of prompt, or a sampling parameter is impossible.
            RequestError: a prompt is empty or does not fit the context.
            NoEngineError: no engine is left.
        """
        conversations, prompts = input_batch.get("prompts"), input_batch.get("prompt_token_ids")
        if (conversations is None) == (prompts is None):
            raise ConfigError("give exactly one of prompts and prompt_token_ids")
        if prompts is None:
            # From here on tokens only: text is rendered once, so a continued response never encodes it again.
            prompts = [self.renderer.render(conversation) for conversation in conversations or ()]
        params = SamplingParams.parse(input_batch.get("sampling_params"))
        session_ids: Sequence[str | None] = input_batch.get("session_ids") or [None] * len(prompts)
        if len(session_ids) != len(prompts):
            raise ConfigError(f"session_ids has {len(session_ids)} entries for {len(prompts)} prompts")
        detokenize = input_batch.get("detokenize", True)
        adapter, oldest = input_batch.get("adapter"), input_batch.get("priority")
        # One request per response: each continues on its own across updates. One failure cancels the others, because
        # the caller gets all or none.
        done = await gather_or_cancel(
            self.complete(GenerationRequest(prompt, params, session_id, choice, adapter, oldest, detokenize))
            for prompt, session_id in zip(prompts, session_ids, strict=True)
            for choice in range(params.n)
        )
        return output_of(
            [TokenChunk(g.token_ids, g.logprobs, g.versions, g.stop_reason, g.top_logprobs) for g in done],
            [g.text if detokenize else "" for g in done],
        )

    async def chat_completion(self, request_payload: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of a chat completion's response; ``docs/tutorials/http_endpoint.md`` lists the fields.

        Raises:
            DialectError: the body is wrong, or asks for what is not supported (streams included).
            RequestError: the conversation does not fit the context.
        """
        body = dict(request_payload.get("json") or {})
        session_id = body.pop("session_id", None)
        call = openai_chat.parse(body)
        _reject_stream(call.streamed)
        # Not a field of the OpenAI protocol: it was removed above, because the parser rejects unknown fields.
        named = None if session_id is None else str(session_id)
        request = dataclasses.replace(call.request, session_id=named, adapter=self._adapter_of(call.model))
        result = await ChatService(self, self.renderer).complete(request)
        return call.response(result, ResponseContext(secrets.token_hex(16), int(time.time()), self._texts))

    async def completion(self, request_payload: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of a completion's response.

        Raises:
            DialectError: the body is wrong, or asks for what is not supported (streams included).
        """
        body = dict(request_payload.get("json") or {})
        session_id = body.pop("session_id", None)
        call = openai_completions.parse(body)
        _reject_stream(call.streamed)
        named = None if session_id is None else str(session_id)
        adapter = self._adapter_of(call.model)
        run = CompletionRun(
            self, self, call.prompts, call.params, adapter, session_id=named, grammar_field=call.grammar_field
        )
        return call.response(
            await run.complete(), ResponseContext(secrets.token_hex(16), int(time.time()), self._texts)
        )

    def decode(self, token_ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """Return the text of some tokens, with or without special ones. Usable in any thread."""
        if special_tokens:
            return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))
        return text_of(self.tokenizer, token_ids)

    def _adapter_of(self, model: str) -> str | None:
        return model if model in self.adapters else None

    @cached_property
    def _texts(self) -> TokenTexts:
        return TokenTexts(self.tokenizer)


def _reject_stream(streamed: bool) -> None:
    if streamed:
        raise DialectError(
            "Streams go over HTTP; in this process use client.stream().", "stream", "unsupported_parameter"
        )


class InferenceEngineClient(FleetUpdates, RequestClient):
    """The client of a fleet of engines that serve the same policy, in the process that trains.

    Args:
        engines: :meth:`start` starts them and :meth:`teardown` stops them.
        tokenizer: decodes responses, renders conversations, matches stop strings.
        model_path: tells the chat renderer which model family this is.
        pause_timeout_s: limit of each phase of an update (receive, pause, load, resume).
        engine_wait_timeout_s: how long requests wait while no engine serves.
        limits: how often a dead engine is restarted, and how many health probes a silent one may miss.
        probe_interval_s: seconds between two health probes of an engine.
        renderer: renders conversations and parses responses; None: as ``tokenizer`` and ``model_path`` tell.
        replay: whether sessions can be recorded and replayed; see :attr:`replay_cache`.
        events: the record of the run.
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
        renderer: ChatRenderer | None = None,
        replay: bool = True,
        events: EventLog = NO_EVENTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not engines:
            raise ConfigError("a client needs at least one engine")
        pool = EnginePool(
            engines,
            wait_timeout_s=engine_wait_timeout_s,
            handover_timeout_s=pause_timeout_s,
            limits=limits,
            clock=clock,
        )
        super().__init__(pool, phase_timeout_s=pause_timeout_s, events=events, clock=clock)
        self.supervisor = FleetSupervisor(pool, self, probe_interval_s=probe_interval_s, clock=clock)
        self.tokenizer = tokenizer
        self.renderer = ChatRenderer(tokenizer, model_path) if renderer is None else renderer
        self.replay_cache = ReplayCache(enabled=replay)
        self.generated_tokens = 0  # in responses that have ended, without replayed tokens
        # Of each engine: when it was last looked at, and its ``busy_s`` then.
        self._busy: dict[int, tuple[float, float]] = {}

    @property
    def policy_version(self) -> int:
        """The version that every routed engine holds; -1 before the first weight sync."""
        return self._pool.policy_version

    @property
    def capabilities(self) -> EngineCapabilities:
        """The features that every routed engine has."""
        return self._pool.capabilities

    @property
    def adapters(self) -> Mapping[str, str]:
        """The LoRA adapters that every engine has loaded, with their folders."""
        return self._adapters

    @property
    def engine_states(self) -> dict[int, EngineState]:
        """The state of each engine, by number."""
        return {number: record.state for number, record in self._pool.fleet.records.items()}

    @property
    def engine_restarts(self) -> int:
        """Restarts of all engines so far."""
        return sum(record.restart_count for record in self._pool.fleet.records.values())

    @property
    def engines(self) -> list[InferenceEngineInterface]:
        """The routed engines."""
        return [self._pool.engines[number] for number in self._pool.router.routed]

    @property
    def serving(self) -> bool:
        """Whether an engine takes requests now."""
        return bool(self._pool.router.routed)

    async def wait_for_engine(self) -> None:
        """Return when an engine takes requests.

        Raises:
            NoEngineError: no engine came (back) in time, or none can come any more.
        """
        await self._pool.wait_for_engine()

    def describe(self) -> list[str]:
        """Describe each engine's state and requests, and the requests at the gate, one line each."""
        lines = self._pool.describe()
        if not self.gate.is_open:
            lines.append(f"engines: paused for new weights; requests that wait before them: {self.gate.waiting}")
        return lines

    # Lifetime -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all engines concurrently, then the supervisor.

        Raises:
            Exception: of the first engine that cannot start; the other starts are cancelled.
        """
        await gather_or_cancel(engine.start() for engine in self._pool.active_engines)
        self.supervisor.start()

    async def teardown(self) -> None:
        """Stop the supervisor and all engines, even if some fail to stop. Pending requests raise ``NoEngineError``.

        Raises:
            Exception: the first failure, after everything has been stopped.
        """
        errors = await close_all([self.supervisor.stop, self._stop_engines])
        if errors:
            raise errors[0]

    async def _stop_engines(self) -> None:
        self._pool.close()
        # Requests at the gate wake up, find the pool closed, and fail instead of waiting forever.
        self.gate.open()
        ends = await asyncio.gather(
            *(engine.teardown() for engine in self._pool.active_engines), return_exceptions=True
        )
        for end in ends:
            if end is not None:
                raise end

    async def health(self) -> list[EngineHealth]:
        """Return a snapshot of each routed engine. An engine found dead leaves the routing and the list."""
        numbers = self._pool.router.routed
        healths = await gather_or_cancel(self._pool.engines[number].health() for number in numbers)
        # The pool learns of a death at once instead of at the supervisor's next probe.
        for number, health in zip(numbers, healths, strict=True):
            if not health.alive:
                self._pool.died(number, "its process ended")
        return [health for health in healths if health.alive]

    async def record_engines(self, limit_s: float) -> dict[str, float]:
        """Record the state of each engine, and return the metrics of all of them together.

        An engine that does not answer within ``limit_s`` seconds has no figures.
        """
        records = dict(self._pool.fleet.records)

        async def snapshot(number: int) -> EngineHealth | None:
            if records[number].state not in (EngineState.HEALTHY, EngineState.SUSPECT, EngineState.STALE):
                return None
            with contextlib.suppress(Exception):  # an engine may raise anything
                async with asyncio.timeout(limit_s):
                    return await self._pool.engines[number].health()
            return None

        healths = await asyncio.gather(*(snapshot(number) for number in records))
        now, seen, busy_shares = self.events.now(), self._busy, []
        self._busy = {
            number: (now, health.busy_s) for number, health in zip(records, healths, strict=True) if health is not None
        }
        for number, (_, busy_s) in self._busy.items():
            then, busy_then = seen.get(number, (now, 0.0))
            if now > then:
                # An engine that was started again counts from zero.
                busy_shares.append(min(1.0, max(0.0, busy_s - busy_then) / (now - then)))
        for (number, record), health in zip(records.items(), healths, strict=True):
            self.events.record(
                "engine",
                engine=number,
                state=str(record.state),
                **{field: None if health is None else getattr(health, of) for of, field in _HEALTH_FIELDS.items()},
            )
        known = [health for health in healths if health is not None]
        used = [health.kv_cache_usage for health in known if health.kv_cache_usage is not None]
        kept = sum(record.state is not EngineState.RETIRED for record in records.values())
        return {
            "inference/running_requests": sum(health.running for health in known),
            "inference/waiting_requests": sum(health.waiting for health in known),
            **({"inference/kv_cache_usage": max(used)} if used else {}),
            **({"inference/busy_share": sum(busy_shares) / len(busy_shares)} if busy_shares else {}),
            "inference/down_share": 1.0 - len(known) / kept if kept else 0.0,
        }

    async def add_engine(self, engine: InferenceEngineInterface) -> int:
        """Start a further engine, bring it to the current weights and route it. Returns its number.

        Raises:
            EngineError: it could not start or take the weights; it does not join the fleet.
        """
        number = self._pool.add(engine)
        try:
            await self.start_engine(number)
            # Started means stale: it gets no request until it holds the current weights.
            self._pool.fleet.started(number)
            await self.catch_up(number)
        except BaseException:
            await self._pool.retire(number)
            raise
        return number

    async def remove_engine(self, number: int) -> None:
        """Remove an engine. Its requests continue on other engines with the tokens they have. Idempotent."""
        await self._pool.retire(number)

    # Requests -----------------------------------------------------------------------------------------------------

    async def complete(self, request: GenerationRequest) -> Generation:
        """Sample one response to its end, across updates and engine failures. Cancelling the caller cancels it.

        Raises:
            ConfigError: the engines do not support a sampling parameter.
            RequestError: the prompt is empty or does not fit the context.
            GrammarError: the grammar cannot be compiled, or not be followed from some token on.
            NoEngineError: no engine is left, and none came back in time.
        """
        # Incremental decoding costs time for every token. Without stop strings, the text is decoded once at the end.
        response = self._begin(request, incremental_text=bool(request.params.stop))
        await self._sample(response, request, None)
        return self._generation(response, request)

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        """Sample one response and yield it in pieces. A slow reader gets larger pieces, up to a limit.

        Closing the iterator cancels the request. Where the engines cannot continue a response with a grammar or with penalties
        that count, it comes whole at its end, because an interruption makes it start over.
        """
        response = self._begin(request, incremental_text=True)
        # A task samples while the reader is busy with a chunk; the event wakes the reader.
        progress = asyncio.Event()
        running = asyncio.create_task(self._sample(response, request, progress.set))
        # A request that fails without a token must wake the reader too.
        running.add_done_callback(lambda _: progress.set())
        sent = 0
        try:
            while not running.done():
                await progress.wait()
                progress.clear()
                while not running.done() and not response.may_restart and len(response.token_ids) > sent:
                    chunk = self._chunk(response, sent, None)
                    sent += len(chunk.token_ids)  # before yielding: more tokens may arrive while the reader runs
                    yield chunk
            running.result()  # raises what the request raised
            # The remaining tokens, in bounded chunks; a response that may restart has all of them here.
            while len(response.token_ids) - sent > _LARGEST_CHUNK:
                chunk = self._chunk(response, sent, None)
                sent += len(chunk.token_ids)
                yield chunk
            yield self._chunk(response, sent, self._generation(response, request))
        finally:
            running.cancel()
            # Wait until the engine has dropped the request, so that a closed stream leaves no work behind.
            await asyncio.gather(running, return_exceptions=True)

    def _begin(self, request: GenerationRequest, *, incremental_text: bool) -> Continuation:
        """Check that the engines support the request, and return its empty response."""
        can, params = self._pool.capabilities, request.params
        if params.structured is not None and not can.structured_output:
            raise ConfigError(
                "the engines cannot follow a grammar; a vLLM server needs --scheduler-cls, see engines.md"
            )
        if params.adjustment is not None:
            if not can.logit_adjustment:
                raise ConfigError("the engines have no penalties and no logit_bias")
            if params.adjustment.logit_bias and not can.logit_bias:
                raise ConfigError("the engines have no logit_bias: vLLM excludes it with speculative decoding")
            unknown = [token for token, _ in params.adjustment.logit_bias if token >= len(self.tokenizer)]
            if unknown:
                raise ConfigError(
                    f"logit_bias: {unknown[0]} is not a token of the model, which has {len(self.tokenizer)}"
                )
        if params.min_p > 0 and not can.min_p:
            raise ConfigError("the engines have no min_p: vLLM excludes it with speculative decoding")
        if params.top_logprobs > can.max_top_logprobs:
            raise ConfigError(
                f"the engines return at most {can.max_top_logprobs} top_logprobs, not {params.top_logprobs}"
            )
        if request.adapter is not None and request.adapter not in self._adapters:
            known = ", ".join(sorted(self._adapters)) or "none"
            raise ConfigError(f"the LoRA adapter {request.adapter!r} is not loaded; loaded: {known}")
        make_text = partial(ResponseText, self.tokenizer, params.stop) if incremental_text else None
        if params.structured is not None:  # the grammar decides where the response may end
            params = dataclasses.replace(params, min_tokens=0, ignore_eos=False)
        return Continuation(
            request.prompt_token_ids,
            params,
            choice=request.choice,
            make_text=make_text,
            grammar_continuation=can.grammar_continuation,
            count_continuation=can.count_continuation,
        )

    def _chunk(self, response: Continuation, sent: int, generation: Generation | None) -> GenerationChunk:
        text = response.text
        assert text is not None, "a streamed response has text"
        # Bounded, because with alternatives a token takes kilobytes on the wire.
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
            text = text_of(self.tokenizer, response.token_ids) if request.detokenize else ""
        structured, grammar = response.params.structured, None
        if structured is not None and not response.loses_grammar:
            stop_ids = response.params.stop_token_ids
            grammar = GrammarSpan(0, len(response.token_ids), structured.kind, structured.value, stop_ids)
        # Copies: the caller may change its lists, and the replay cache reads the response's own lists later.
        return Generation(
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
            grammar=grammar,
            cached_tokens=response.cached_tokens,
        )

    async def _sample(
        self, response: Continuation, request: GenerationRequest, on_progress: Callable[[], None] | None
    ) -> None:
        """Take what the replay cache has of the response, then run segments until the response has ended."""
        with (
            RequestTrace(self.events, request, response, self._pauses) as trace,
            self.replay_cache.recorded(request, response) as recorded,
        ):
            for chunk in recorded:
                response.resume_from(chunk)
                if on_progress is not None:
                    on_progress()
                await asyncio.sleep(0)  # a long replay must not block the event loop
            # Replayed tokens were counted by the run that sampled them.
            trace.replayed = replayed = len(response.token_ids)
            while (segment := response.next_segment()) is not None:
                await self.gate.wait_open()
                # Waiting for an engine can take long, so the gate is checked once more below.
                slot = await self._pool.acquire(request.session_id)
                try:
                    grammars = segment.sampling_params.structured is not None
                    ready = True
                    if grammars or request.params.stop:  # seconds, once per engine, in which the gate may close
                        loading = self._pool.engines[slot.engine].load_tokenizer(grammars)
                        ready = await self._pool.run(slot, loading)
                    if ready and self.gate.is_open:
                        trace.begin(slot.engine)
                        stayed = await self._pool.run(
                            slot, self._run_segment(slot.engine, segment, response, request, on_progress, trace)
                        )
                        trace.end(None if stayed else self._pool.fleet.records[slot.engine].state)
                    else:  # the gate closed, or the engine left, before the segment began
                        response.segments -= 1
                except RequestError:
                    context = self._pool.engines[slot.engine].capabilities.max_model_len
                    if not response.token_ids or len(segment.prompt_token_ids) < context:
                        raise
                    response.stop_reason = StopReason.LENGTH  # this engine's context is smaller than the previous one's
                finally:
                    self._pool.router.release(slot)
        self.generated_tokens += len(response.token_ids) - replayed

    async def _run_segment(
        self,
        number: int,
        segment: Segment,
        response: Continuation,
        request: GenerationRequest,
        on_progress: Callable[[], None] | None,
        trace: RequestTrace,
    ) -> None:
        """Sample one segment on engine ``number``; ``on_progress`` is called after each piece.

        Raises:
            RequestError: the engine cannot serve the request.
            EngineError: the engine failed or broke the contract.
        """
        # The priority is the oldest version in the trajectory: the group that becomes stale first is served first.
        version, engine = self._pool.policy_version, self._pool.engines[number]
        params, stop, can = segment.sampling_params, request.params.stop, engine.capabilities
        if stop and can.stop_strings and on_progress is None:
            params = dataclasses.replace(params, stop=stop)
        engine_input = InferenceEngineInput(
            prompt_token_ids=[segment.prompt_token_ids],
            sampling_params=params,
            session_ids=None if request.session_id is None else [request.session_id],
            priority=min(
                version if request.oldest_version is None else request.oldest_version,
                response.versions[0] if response.versions else version,
            ),
            adapter=request.adapter,
        )
        # Stop strings are matched as tokens arrive, so they have to arrive one at a time where the engine samples on behind one.
        if on_progress is None and (not stop or can.stop_strings):
            if not can.chunked_streaming:
                response.add(only_chunk(await engine.generate(engine_input)), segment.number)
                return
            engine_input["chunk_tokens"] = KEPT_TOKENS
        stream = engine.stream(engine_input)
        try:
            async for chunk in stream:
                response.add(chunk, segment.number)
                trace.progress()
                if on_progress is not None:
                    on_progress()
                if response.stop_reason is not None:
                    break
        finally:
            await stream.aclose()  # type: ignore[attr-defined]  # leaving early aborts the request in the engine

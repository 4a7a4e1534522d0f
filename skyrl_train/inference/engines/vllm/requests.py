"""Requests of a vLLM engine: from the gate into vLLM, and their tokens back with versions.

    chunks ──gate──> submit ──link──> vLLM ──link──> chunk with ids, log-probs, versions ──> finish
                 ^                                │
                 └── no token yet when the weights changed: submitted again under the new version

:class:`VLLMLink` is the way to one running vLLM: ``AsyncLLMAdapter`` in this process, or ``ServerLink`` over HTTP. Both
engines share everything else.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from skyrl_train.errors import EngineDeadError, EngineError, RequestError
from skyrl_train.inference.engines.busy_time import BusyTime
from skyrl_train.inference.interface import LogitAdjustment, SamplingParams, StopReason, TokenChunk
from skyrl_train.runtime.concurrency import Gate
from skyrl_train.types import PauseMode

T = TypeVar("T")
Spans = list[tuple[int, int]]  # (weight version, index of the first token that it sampled), in order

VLLM_PAUSE_MODES = {
    PauseMode.KEEP: "keep",
    PauseMode.RECOMPUTE: "keep",  # with the KV cache cleared, which preempts running requests
    PauseMode.ABORT: "abort",
    PauseMode.WAIT: "wait",
}
NO_LOGPROB = -9999.0  # vLLM's server sends this in place of -inf, and of a log-prob that it does not have
MAX_BIASES = 1024  # of a request
MAX_STOP_TOKENS = 112  # of a request with min_tokens; vLLM takes 128, and adds the model's own
_GRAMMAR = "skyrl_train: "  # begins the comment in a request's JSON schema
# vLLM's finish reasons; "error" is not among them, it is raised.
STOP_REASONS = {
    "stop": StopReason.STOP,
    "repetition": StopReason.STOP,
    "length": StopReason.LENGTH,
    "abort": StopReason.ABORT,
}


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt and how to sample its response. ``chunk_tokens``: tokens per streamed chunk; ``lora``: vLLM's LoRARequest."""

    prompt: list[int]
    params: SamplingParams
    stream: bool
    chunk_tokens: int = 1
    priority: int = 0
    lora: Any = None


@dataclass(eq=False, slots=True)
class InFlightRequest:
    """A request that vLLM has, or that is on its way there.

    Attributes:
        key: vLLM's id of the request; empty until vLLM has it.
        outputs: where its outputs arrive.
        spans: which weight version sampled which tokens, as far as it is known.
        submission: until vLLM has taken or rejected it, where that takes an answer of vLLM.
        restart: vLLM had no token of it when the weights changed, so it is submitted again.
        delivered: tokens that have left :meth:`VLLMLink.next_chunk`.
    """

    request: EngineRequest
    key: str
    outputs: Any
    spans: Spans
    submission: asyncio.Future[None] | None = None
    restart: bool = False
    delivered: int = 0


def check_fields(params: SamplingParams) -> None:
    """Check what vLLM on GPUs finds out in its worker only: its engine would end, and so would the next one to get the request.

    Raises:
        RequestError: there are more biases or stop tokens than the worker takes.
    """
    biases = 0 if params.adjustment is None else len(params.adjustment.logit_bias)
    if biases > MAX_BIASES:
        raise RequestError(f"logit_bias has {biases} tokens, vLLM takes at most {MAX_BIASES}.")
    if params.min_tokens and len(params.stop_token_ids) > MAX_STOP_TOKENS:
        raise RequestError(
            f"There are {len(params.stop_token_ids)} stop_token_ids; with min_tokens, vLLM takes at most {MAX_STOP_TOKENS}."
        )


def adjustment_fields(adjustment: LogitAdjustment | None) -> dict[str, Any]:
    """Return the fields of vLLM's ``SamplingParams`` for penalties and biases."""
    if adjustment is None:
        return {}
    return {
        "presence_penalty": adjustment.presence_penalty,
        "frequency_penalty": adjustment.frequency_penalty,
        "repetition_penalty": adjustment.repetition_penalty,
        "logit_bias": dict(adjustment.logit_bias) or None,
    }


def grammar_spec(request: EngineRequest) -> str | None:
    """Return the grammar of a request as the JSON schema that ``grammars.GrammarBackend`` reads; None without one.

    The schema has all in a comment: vLLM checks it before our backend sees it, and would reject other keywords.
    """
    structured = request.params.structured
    if structured is None:
        return None
    grammar = {
        "kind": structured.kind,
        "value": structured.value,
        "token_ids": request.prompt[len(request.prompt) - structured.continued_tokens :],
        "stop_token_ids": request.params.stop_token_ids,
    }
    return json.dumps({"type": "null", "$comment": _GRAMMAR + json.dumps(grammar)})


def read_grammar_spec(spec: str) -> dict[str, Any] | None:
    """Return what :func:`grammar_spec` has packed; None for the JSON schema of another client."""
    schema = json.loads(spec)
    comment = schema.get("$comment") if isinstance(schema, dict) else None
    if not isinstance(comment, str) or not comment.startswith(_GRAMMAR):
        return None
    grammar: dict[str, Any] = json.loads(comment.removeprefix(_GRAMMAR))
    return grammar


def token_versions(spans: Spans, first: int, count: int) -> list[int]:
    """Return the weight versions of tokens ``first`` .. ``first + count - 1``.

    Raises:
        EngineError: the spans do not cover these tokens.
    """
    if count and (not spans or spans[0][1] > first):
        raise EngineError("vLLM did not say which weight version sampled the tokens.")
    if count and spans[-1][1] <= first:  # the usual case: one version for the whole chunk
        return [spans[-1][0]] * count
    return [
        next(version for version, start in reversed(spans) if start <= index) for index in range(first, first + count)
    ]


def most_likely(alternatives: Mapping[int, float], count: int) -> list[tuple[int, float]]:
    """Return at most ``count`` tokens with their log-probs, the most likely first, of those that could be drawn.

    Where a filter or a grammar leaves fewer, vLLM also gives others, whose log-prob is -inf.
    """
    possible = [entry for entry in alternatives.items() if entry[1] > NO_LOGPROB]
    return sorted(possible, key=lambda entry: -entry[1])[:count]


def interrupted(request: EngineRequest) -> TokenChunk:
    """Return the last chunk of a request that ends without further tokens and can be continued."""
    return TokenChunk([], [], [], StopReason.ABORT, [] if request.params.top_logprobs else None)


class VLLMLink(ABC):
    """The way to one running vLLM. Every call ends with vLLM's answer or with its death, whichever comes first.

    Args:
        name: names the engine in errors.
        on_death: called once with the reason, before any call raises it.

    Attributes:
        prefill_tokens: prompt tokens computed since the start.
        instance: identifies the process behind the link; empty where a new link always means a new process.
    """

    instance = ""

    def __init__(self, name: str, on_death: Callable[[str], None]) -> None:
        self.prefill_tokens = 0
        self._name = name
        self._on_death = on_death
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def die(self, reason: str) -> None:
        """Make every pending and later call raise EngineDeadError. Only the first reason counts."""
        if not self._death.done():
            self._death.set_result(reason)
            self._on_death(reason)

    def raise_if_dead(self) -> None:
        """Raises EngineDeadError after :meth:`die`."""
        if self._death.done():
            raise self._dead()

    async def answer(self, call: Awaitable[T]) -> T:
        """Wait for ``call`` or the engine's death.

        Raises:
            EngineDeadError: the engine is gone.
            EngineError: vLLM failed the call.
        """
        pending = asyncio.ensure_future(call)
        either: set[asyncio.Future[Any]] = {pending, self._death}
        try:
            # A dead process answers nothing: without the second future the caller would wait for ever.
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not pending.done():  # the engine died, or the caller was cancelled
                pending.cancel()
                await asyncio.gather(pending, return_exceptions=True)
        if pending.cancelled():
            raise self._dead()
        try:
            return pending.result()
        except Exception as error:  # vLLM's own tree of errors, different in each release
            failure = self.failure(error)
            if failure is error:
                raise
            raise failure from error

    def _dead(self) -> EngineDeadError:
        return EngineDeadError(f"{self._name} is gone: {self._death.result().removesuffix('.')}.")

    @abstractmethod
    def failure(self, error: Exception) -> Exception:
        """Return what an exception of a call means: the engine is gone, or only this call failed."""

    # Requests -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def submit(self, request: EngineRequest, salt: str, version: int) -> InFlightRequest:
        """Send a request to vLLM. ``salt`` tells its cached prefixes apart; ``version`` is what vLLM serves now.

        Does not wait for vLLM: ``submission`` of the result raises RequestError if vLLM rejects the request, where it is
        not None, and otherwise :meth:`next_chunk` does.
        """

    @abstractmethod
    async def next_chunk(self, in_flight: InFlightRequest) -> TokenChunk:
        """Wait for the next tokens of a request (possibly none), with their versions. One reader per request.

        Raises:
            EngineError: vLLM failed the request.
        """

    @abstractmethod
    async def finish(self, in_flight: InFlightRequest, ended: bool) -> None:
        """Release what a request holds here; one that has not ``ended`` is aborted in vLLM."""

    @abstractmethod
    def fail(self, in_flight: InFlightRequest, error: EngineDeadError) -> None:
        """Make the reader of a request raise ``error``."""

    @abstractmethod
    async def abort(self, requests: Sequence[InFlightRequest]) -> None:
        """End requests with the tokens that they have. Those that vLLM no longer knows are ignored."""

    @abstractmethod
    async def abort_all(self, requests: Sequence[InFlightRequest]) -> None:
        """Like :meth:`abort`, for every request of this engine; returns when vLLM has released them."""

    @abstractmethod
    async def verify_empty(self, requests: Sequence[InFlightRequest]) -> None:
        """Check, after a pause with ``abort``, that vLLM holds no request.

        Raises:
            EngineError: it holds some.
        """

    @abstractmethod
    async def any_begun(self, requests: Sequence[InFlightRequest]) -> bool:
        """Return whether vLLM has sampled a token for an unfinished request."""

    # Scheduling and weights ---------------------------------------------------------------------------------------

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None:
        """Pause vLLM's scheduler; returns when vLLM reports the pause and what it had sampled has arrived.

        Raises:
            EngineError: vLLM still runs.
        """

    @abstractmethod
    async def resume(self) -> None:
        """Let vLLM's scheduler run again."""

    @abstractmethod
    async def reset_prefix_cache(self) -> None:
        """Free the memory of cached prefixes that no request uses."""

    @abstractmethod
    async def on_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the worker extension between two steps; one result per worker."""

    @abstractmethod
    async def load_weights(self, version: int) -> float:
        """Load the received update in every worker; returns the seconds of the slowest one. Call it while paused."""

    @abstractmethod
    async def weights_changed(
        self, requests: Sequence[InFlightRequest], version: int, mode: PauseMode
    ) -> list[InFlightRequest]:
        """Note that tokens sampled from here on are of ``version``; call it while paused.

        Returns:
            The requests without a token, which a prefix cached under the old weights could still serve.
        """


class RequestTracker:
    """The requests of one engine, over one link.

    Args:
        version: of the weights that vLLM serves now.
        salted: cached prefixes never serve another weight version.

    Attributes:
        busy: how long there were requests that were not paused.
        gate: holds requests while the engine is paused.
        version: of the tokens sampled from now on; -1 before the first weight sync.
        generated_tokens: tokens that have arrived since the start.
        in_flight: requests that vLLM has.
    """

    def __init__(self, link: VLLMLink, version: int, salted: bool = True) -> None:
        self.busy = BusyTime()
        self.gate = Gate()
        self.version = version
        self.generated_tokens = 0
        self.in_flight: set[InFlightRequest] = set()
        self._link = link
        self._salted = salted
        # A server outlives this object, so the salts of another run must not match.
        salts = (f"{uuid.uuid4().hex}-{number}" for number in itertools.count())
        self._salts = salts
        self._salt = next(salts)

    async def chunks(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        """Yield the response to a request, which may be submitted more than once before its first token.

        Raises:
            EngineDeadError: the engine is gone.
            RequestError: vLLM rejects the request.
        """
        while True:
            if not await self.gate.wait_open():  # aborted while it waited; the client sends it again
                yield interrupted(request)
                return
            # From here on the request must be finished in every case: vLLM would sample it to its end otherwise.
            in_flight = self._link.submit(request, self._salt, self.version)
            self.in_flight.add(in_flight)  # no await since the link was seen alive: its death fails this request, too
            self.busy.requests(len(self.in_flight))
            ended = False
            try:
                if in_flight.submission is not None:
                    await asyncio.shield(in_flight.submission)
                while not ended:
                    chunk = await self._link.next_chunk(in_flight)
                    ended = chunk.stop_reason is not None
                    self.generated_tokens += len(chunk.token_ids)
                    if in_flight.restart and not in_flight.delivered:
                        break  # aborted by us after a weight change: the caller must not see that
                    if chunk.token_ids or ended:
                        yield chunk
                else:
                    return
            finally:
                if in_flight.submission is not None and not in_flight.submission.done():
                    # The caller is cancelled, but vLLM may still take the request; it can be aborted there after that.
                    await asyncio.wait({in_flight.submission})
                self.in_flight.discard(in_flight)
                self.busy.requests(len(self.in_flight))
                await self._link.finish(in_flight, ended)

    async def all_submitted(self) -> None:
        """Return when every request that has passed the gate has reached vLLM."""
        submissions = {one.submission for one in self.in_flight if one.submission is not None}
        if submissions:
            await asyncio.wait(submissions)

    async def abort_all(self) -> None:
        """End every request with the tokens that it has.

        Raises:
            EngineError: vLLM keeps some.
        """
        # Waiters have not reached vLLM, so its abort would miss them.
        self.gate.abort_waiters()
        await self.all_submitted()
        await self._link.abort_all(list(self.in_flight))

    async def weights_changed(self, version: int, mode: PauseMode) -> None:
        """Count tokens sampled from here on as ``version``. Call it paused with ``mode``."""
        self.version = version
        # A prefill under the old weights leaves no token and no trace in the versions, so these requests start over.
        without_tokens = await self._link.weights_changed(list(self.in_flight), version, mode)
        if not self._salted:
            return
        self.forget_prefixes()
        # vLLM would prefill these from what the old weights have cached under the old salt.
        for in_flight in without_tokens:
            in_flight.restart = True
        await self._link.abort(without_tokens)

    def forget_prefixes(self) -> None:
        """Give later requests another salt, so that they find nothing that was cached before."""
        self._salt = next(self._salts)

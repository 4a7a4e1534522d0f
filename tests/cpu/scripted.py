"""A scripted engine: the whole engine contract, with tokens that are a pure function of what is asked.

The next token after ``tokens`` is ``next_token(tokens, seed + position)``; its log-prob tells the same. A test decides when
tokens are sampled (``tick``), or lets the engine sample whenever the loop is free (``free_running``).
"""

from __future__ import annotations

import asyncio
import functools
import gc
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from skyrl_train.errors import EngineDeadError, EngineError, RequestError
from skyrl_train.inference.interface import (
    EngineCapabilities,
    EngineHealth,
    InferenceEngineInput,
    InferenceEngineInterface,
    InferenceEngineOutput,
    SamplingParams,
    StopReason,
    TokenChunk,
    TopLogprobs,
)
from skyrl_train.runtime.seeds import derive_seed
from skyrl_train.simulation.clock import run_in_virtual_time
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.update import WeightUpdate

EOS = 1


def hashed_token(tokens: Sequence[int], seed: int, vocab: int = 50) -> int:
    """The next token: any of 0..vocab-1, decided by the sequence so far and the seed of the position."""
    return derive_seed(len(tokens), tokens[-1], seed) % vocab


@dataclass(eq=False)
class _Running:
    tokens: list[int]
    params: SamplingParams
    cached_tokens: int
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop_reason: StopReason | None = None
    progress: asyncio.Event = field(default_factory=asyncio.Event)

    def output(self) -> InferenceEngineOutput:
        output = InferenceEngineOutput(
            responses=[""],
            response_ids=[self.sampled],
            stop_reasons=[str(self.stop_reason)],
            response_logprobs=[self.logprobs],
            response_versions=[self.versions],
            cached_tokens=[self.cached_tokens],
        )
        if self.params.top_logprobs:
            output["response_top_logprobs"] = [self.top_logprobs(slice(None))]
        return output

    def top_logprobs(self, tokens: slice) -> TopLogprobs:
        """The sampled token, and neighbours that are less likely."""
        return [
            [(token + i, logprob - i) for i in range(self.params.top_logprobs)]
            for token, logprob in zip(self.sampled[tokens], self.logprobs[tokens], strict=True)
        ]


class ScriptedEngine(InferenceEngineInterface):
    def __init__(
        self,
        next_token: Callable[[Sequence[int], int], int] = hashed_token,
        *,
        max_model_len: int = 4096,
        free_running: bool = False,
        structured_output: bool = False,
        eos: int = EOS,
    ) -> None:
        self._eos = eos
        self._next_token = next_token
        self._version = -1
        self._max_model_len = max_model_len
        self._free_running = free_running
        self._structured_output = structured_output
        self.running: list[_Running] = []
        self.paused: PauseMode | None = None
        self.alive = True
        self.received: WeightUpdate | None = None
        self.requests: list[InferenceEngineInput] = []
        self.calls: list[str] = []
        self.fail: dict[str, BaseException] = {}  # phase -> what it raises
        self.hang: set[str] = set()  # phases that never end
        self.ignores_abort = False
        self.cached_tokens = 0  # of the prompts of requests from now on
        self._ticker: asyncio.Task[None] | None = None

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            frozenset(PauseMode),
            frozenset({"scripted"}),
            self._max_model_len,
            batch_invariant=True,
            max_top_logprobs=20,
            structured_output=self._structured_output,
            priorities=True,
        )

    @property
    def policy_version(self) -> int:
        return self._version

    async def start(self) -> None:
        """A dead engine starts again, as a fresh process does: without weights."""
        if not self.alive:
            self.calls.append("start")
            if "start" in self.fail:
                raise self.fail["start"]
            self.alive, self.paused, self._version, self.received = True, None, -1, None
            self.running.clear()
            return
        await self._phase("start")

    def _submit(self, engine_input: InferenceEngineInput) -> _Running:
        if not self.alive:
            raise EngineDeadError("scripted death")
        self.requests.append(engine_input)
        prompts = engine_input["prompt_token_ids"] or []
        (prompt,) = prompts
        if not prompt or len(prompt) >= self._max_model_len:
            raise RequestError(f"a prompt of {len(prompt)} tokens does not fit")
        request = _Running(list(prompt), SamplingParams.parse(engine_input["sampling_params"]), self.cached_tokens)
        self.running.append(request)
        if self._free_running and (self._ticker is None or self._ticker.done()):
            self._ticker = asyncio.create_task(self._run_free())
        return request

    async def _run_free(self) -> None:
        while self.running and self.paused in (None, PauseMode.WAIT):
            self.tick()
            await asyncio.sleep(0)

    async def generate(self, engine_input: InferenceEngineInput) -> InferenceEngineOutput:
        request = self._submit(engine_input)
        try:
            while request.stop_reason is None:
                await self._progress(request)
            return request.output()
        finally:
            self._forget(request)

    async def stream(self, engine_input: InferenceEngineInput) -> AsyncIterator[TokenChunk]:
        request = self._submit(engine_input)
        sent = 0
        try:
            while True:
                new = slice(sent, len(request.sampled))
                done = request.stop_reason
                if new.start < new.stop or done is not None:
                    sent = new.stop
                    yield TokenChunk(
                        request.sampled[new],
                        request.logprobs[new],
                        request.versions[new],
                        done,
                        request.top_logprobs(new) if request.params.top_logprobs else None,
                        request.cached_tokens,
                    )
                if done is not None:
                    return
                await self._progress(request)
        finally:
            self._forget(request)

    async def _progress(self, request: _Running) -> None:
        await request.progress.wait()
        request.progress.clear()
        if not self.alive:
            raise EngineDeadError("scripted death")

    def _forget(self, request: _Running) -> None:
        if request in self.running:
            self.running.remove(request)

    def tick(self, times: int = 1) -> None:
        """Samples one token for every request, ``times`` times."""
        for _ in range(times):
            for request in list(self.running):
                self._sample(request)

    def _sample(self, request: _Running) -> None:
        if request.stop_reason is not None:
            return
        params = request.params
        token = self._next_token(request.tokens, (params.seed or 0) + len(request.sampled))
        if token == self._eos and (params.ignore_eos or len(request.sampled) < params.min_tokens):
            token = self._eos + 1
        request.tokens.append(token)
        request.sampled.append(token)
        request.logprobs.append(-math.log(2 + token))
        request.versions.append(self._version)
        if token == self._eos or token in params.stop_token_ids:
            request.stop_reason = StopReason.STOP
        elif len(request.sampled) >= params.max_tokens or len(request.tokens) >= self._max_model_len:
            request.stop_reason = StopReason.LENGTH
        request.progress.set()

    def die(self) -> None:
        self.alive = False
        for request in self.running:
            request.progress.set()

    async def abort_generation(self) -> None:
        if self.ignores_abort:
            return
        for request in self.running:
            request.stop_reason = request.stop_reason or StopReason.ABORT
            request.progress.set()
        self.running.clear()

    async def pause(self, mode: PauseMode) -> None:
        await self._phase("pause")
        self.paused = mode
        if mode is PauseMode.ABORT:
            await self.abort_generation()
        if mode is PauseMode.WAIT:
            while self.running:
                self.tick()
                await asyncio.sleep(0)

    async def resume(self) -> None:
        await self._phase("resume")
        self.paused = None
        if self._free_running and self.running and (self._ticker is None or self._ticker.done()):
            self._ticker = asyncio.create_task(self._run_free())

    async def sleep(self, level: int = 1) -> None:
        raise EngineError("the scripted engine does not sleep")

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        raise EngineError("the scripted engine does not sleep")

    async def reset_prefix_cache(self) -> None:
        return None

    async def receive_weights(self, update: WeightUpdate) -> None:
        await self._phase("receive")
        self.received = update

    async def load_weights(self, update: WeightUpdate) -> None:
        if self.paused is None:
            raise EngineError("load_weights needs a pause")
        await self._phase("load")
        self._version = update.version

    async def health(self) -> EngineHealth:
        if "health" in self.fail:
            raise self.fail["health"]
        return EngineHealth(self.alive, self._version, running=len(self.running), paused=self.paused is not None)

    async def teardown(self) -> None:
        self.die()
        if self._ticker is not None:
            self._ticker.cancel()

    async def _phase(self, name: str) -> None:
        self.calls.append(name)
        if not self.alive:
            raise EngineDeadError("scripted death")
        if name in self.hang:
            await asyncio.get_running_loop().create_future()
        if name in self.fail:
            raise self.fail[name]


def scripted_update(version: int) -> WeightUpdate:
    return WeightUpdate(version, "scripted", "", 0, ())


async def settle(rounds: int = 20) -> None:
    """Lets every task that can run do so."""
    for _ in range(rounds):
        await asyncio.sleep(0)


def least_cpu_s(*works: Callable[[], object]) -> list[float]:
    """Processor seconds of this thread for each of ``works``, the least of five times. Other programs hardly count, and neither
    does the garbage collector, whose work depends on all objects of the process."""
    least = [math.inf] * len(works)
    gc.disable()
    try:
        for _ in range(5):
            for index, work in enumerate(works):
                begun = time.thread_time()
                work()
                least[index] = min(least[index], time.thread_time() - begun)
    finally:
        gc.enable()
    return least


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an async test on a virtual clock, which advances only while all tasks wait. So a short limit ends what hangs, and a
    busy machine cannot trigger it. Nothing in the test may wait for a thread or a process."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        run_in_virtual_time(lambda loop: test(**arguments))

    return run


def pass_time(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Makes timers of the running loop due that many seconds earlier. Where sockets are waited for, time cannot be virtual."""
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "time", lambda time=loop.time: time() + seconds)

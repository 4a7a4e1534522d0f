"""A modelled engine: the engine contract in virtual time, with slots, a decode speed and truthful versions.

    request ──> queue (by priority) ──> slot ──decode steps──> all tokens: done
                                                └─ pause · load · resume: frozen, recomputed, aborted or finished first

All requests in the slots decode in lockstep, so they share one clock of decode steps: a request that enters at step ``w``
ends at ``w + its tokens``, however the speed changes in between. One timer serves the request that ends next.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from skyrl_train.errors import EngineDeadError, EngineError
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
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.update import WeightUpdate

TRANSPORT = "modelled"
_TOKEN, _LOGPROB = 3, -1.0
_SMALL = 1e-9  # of a decode step


@dataclass(frozen=True)
class EngineSpeed:
    """Durations of an engine's work, in virtual seconds."""

    slots: int  # requests decoded at once
    step_s: float  # a decode step of an empty batch: reading the weights
    step_per_request_s: float = 0.0  # added by each request
    prefill_steps_per_token: float = 0.0  # decode steps for computing the KV cache of one token
    transfer_s: float = 0.0  # receiving an update while serving
    load_s: float = 0.0  # swapping it in, paused
    sleep_s: float = 0.0  # releasing the device's memory, and the same for taking it back
    restart_s: float = 0.0  # starting again after a death

    def steps_per_s(self, running: int) -> float:
        """Return decode steps per second with ``running`` requests in the batch."""
        return 1.0 / (self.step_s + self.step_per_request_s * running)


@dataclass(eq=False)
class _ModelledRequest:
    prompt_tokens: int
    max_tokens: int
    done: asyncio.Future[StopReason]
    entered: float = 0.0  # the decode step at which its first token begins
    sampled: int = 0  # once it has left its slot
    in_slot: bool = False
    marks: list[tuple[int, int]] = field(default_factory=list)  # (tokens sampled before, version from there on)


class ModelledEngine(InferenceEngineInterface):
    """Samples ``max_tokens`` tokens per request, each labelled with the version that was loaded at that time."""

    def __init__(self, speed: EngineSpeed, max_model_len: int = 1 << 30) -> None:
        self.speed = speed
        self._capabilities = EngineCapabilities(
            frozenset(PauseMode), frozenset({TRANSPORT}), max_model_len, sleep=True, priorities=True
        )
        self.busy_slot_s = 0.0  # integral of the requests in slots over time
        self._busy_s = 0.0
        self._version = -1
        self._paused: PauseMode | None = None
        self._asleep = False
        self._alive = True
        self._steps = 0.0  # decode steps since the start, fractions included
        self._looked_at = 0.0  # the time of that count
        # In the order in which they entered: a set's order would differ between runs.
        self._running: dict[_ModelledRequest, None] = {}
        self._ends: list[tuple[float, int, _ModelledRequest]] = []  # heap; entries of requests that left are skipped
        self._waiting: list[tuple[int, int, _ModelledRequest]] = []  # heap: by priority, then arrival
        self._arrivals = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._drained: asyncio.Future[None] | None = None

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._capabilities

    @property
    def policy_version(self) -> int:
        return self._version

    async def start(self) -> None:
        if not self._alive:
            await asyncio.sleep(self.speed.restart_s)
            self._alive, self._version, self._paused, self._asleep = True, -1, None, False
        self._looked_at = asyncio.get_running_loop().time()

    async def die(self) -> None:
        """End like a process that is killed, until :meth:`start`. Requests keep their tokens, as from an engine that streams."""
        self._alive = False
        await self.abort_generation()

    def change_speed(self, speed: EngineSpeed) -> None:
        """Work at another speed from now on; running requests too."""
        self._advance()
        self.speed = speed
        self._update_slots()

    def _check_alive(self) -> None:
        if not self._alive:
            raise EngineDeadError("the modelled engine has died")

    # Requests -----------------------------------------------------------------------------------------------------

    async def generate(self, engine_input: InferenceEngineInput) -> InferenceEngineOutput:
        self._check_alive()
        (prompt,) = engine_input.get("prompt_token_ids") or ()
        params = SamplingParams.parse(engine_input.get("sampling_params"))
        request = _ModelledRequest(len(prompt), params.max_tokens, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting, (engine_input.get("priority") or 0, next(self._arrivals), request))
        self._update_slots()
        try:
            reason = await request.done
        except asyncio.CancelledError:
            if request.in_slot:
                self._advance()
                self._leave(request, StopReason.ABORT)
                self._update_slots()
            raise
        count = request.sampled
        versions: list[int] = []
        for (begin, version), following in itertools.zip_longest(request.marks, request.marks[1:]):
            end = count if following is None else following[0]
            versions += [version] * (min(end, count) - begin)
        return output_of([TokenChunk([_TOKEN] * count, [_LOGPROB] * count, versions, reason)])

    async def stream(self, engine_input: InferenceEngineInput) -> AsyncIterator[TokenChunk]:
        yield only_chunk(await self.generate(engine_input))

    async def abort_generation(self) -> None:
        self._advance()
        for request in list(self._running):
            self._leave(request, StopReason.ABORT)
        for _, _, request in self._waiting:
            if not request.done.done():
                request.done.set_result(StopReason.ABORT)
        self._waiting.clear()
        self._update_slots()

    # The clock of decode steps ------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Update the count of decode steps to the current time."""
        now = asyncio.get_running_loop().time()
        elapsed, self._looked_at = now - self._looked_at, now
        if self._sampling and self._running:
            self._steps += elapsed * self.speed.steps_per_s(len(self._running))
            self.busy_slot_s += elapsed * len(self._running)
            self._busy_s += elapsed

    def busy_s(self) -> float:
        """Return the seconds until now in which the engine sampled at least one request."""
        self._advance()
        return self._busy_s

    @property
    def _sampling(self) -> bool:
        return self._paused in (None, PauseMode.WAIT) and self._version >= 0

    def _update_slots(self) -> None:
        """Release finished requests, admit waiting ones and set the timer. Called after every change of the running requests."""
        self._advance()
        while self._ends and self._ends[0][0] <= self._steps + _SMALL:
            request = heapq.heappop(self._ends)[2]
            if request.in_slot:
                self._leave(request, StopReason.LENGTH)
        while self._waiting and self._paused is None and self._sampling and len(self._running) < self.speed.slots:
            request = heapq.heappop(self._waiting)[2]
            if request.done.done():  # cancelled while it waited
                continue
            request.in_slot = True
            request.entered = self._steps + request.prompt_tokens * self.speed.prefill_steps_per_token
            request.marks = [(0, self._version)]
            self._running[request] = None
            heapq.heappush(self._ends, (request.entered + request.max_tokens, next(self._arrivals), request))
        if self._drained is not None and not self._running and not self._drained.done():
            self._drained.set_result(None)
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._ends and not self._ends[0][2].in_slot:
            heapq.heappop(self._ends)
        if self._ends and self._sampling:
            wait_s = (self._ends[0][0] - self._steps) / self.speed.steps_per_s(len(self._running))
            self._timer = asyncio.get_running_loop().call_later(max(0.0, wait_s), self._update_slots)

    def _sampled(self, request: _ModelledRequest) -> int:
        now = int(self._steps - request.entered + _SMALL)
        return max(request.marks[-1][0], min(request.max_tokens, now))  # fewer only while its cache is recomputed

    def _leave(self, request: _ModelledRequest, reason: StopReason) -> None:
        request.sampled = self._sampled(request)
        request.in_slot = False
        self._running.pop(request, None)
        if not request.done.done():
            request.done.set_result(reason)

    # Updates ------------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        self._check_alive()
        self._advance()
        self._paused = mode
        if mode is PauseMode.ABORT:
            await self.abort_generation()
        elif mode is PauseMode.WAIT and self._running:
            self._drained = asyncio.get_running_loop().create_future()
            self._update_slots()
            await self._drained
            self._drained = None
        self._set_timer()

    async def resume(self) -> None:
        self._check_alive()
        self._advance()
        if self._paused is PauseMode.RECOMPUTE:
            # Frozen requests are delayed by the recomputation of their KV caches.
            self._ends.clear()
            for request in self._running:
                have = request.prompt_tokens + self._sampled(request)
                request.entered += have * self.speed.prefill_steps_per_token
                heapq.heappush(self._ends, (request.entered + request.max_tokens, next(self._arrivals), request))
        self._paused = None
        self._update_slots()

    async def receive_weights(self, update: WeightUpdate) -> None:
        self._check_alive()
        await asyncio.sleep(self.speed.transfer_s)
        self._check_alive()

    async def load_weights(self, update: WeightUpdate) -> None:
        self._check_alive()
        if self._paused is None:
            raise EngineError("load_weights needs a pause")
        await asyncio.sleep(self.speed.load_s)
        self._check_alive()
        self._version = update.version
        for request in self._running:
            request.marks.append((self._sampled(request), update.version))

    async def sleep(self, level: int = 1) -> None:
        self._check_alive()
        if not self._asleep:
            self._asleep = True
            await asyncio.sleep(self.speed.sleep_s)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        self._check_alive()
        if self._asleep and (tags is None or "weights" in tags):  # the KV cache comes back empty, in no time
            self._asleep = False
            await asyncio.sleep(self.speed.sleep_s)

    async def reset_prefix_cache(self) -> None:
        return None

    async def health(self) -> EngineHealth:
        return EngineHealth(
            self._alive, self._version, len(self._running), len(self._waiting), self._paused is not None
        )

    async def teardown(self) -> None:
        self._alive = False
        self._advance()
        if self._timer is not None:
            self._timer.cancel()
        for request in [*self._running, *(request for _, _, request in self._waiting)]:
            if not request.done.done():
                request.done.set_exception(EngineDeadError("the modelled engine was torn down"))
        self._running.clear()
        self._waiting.clear()

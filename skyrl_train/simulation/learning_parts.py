"""Real parts that learn, in virtual time: the embedded engine's core and the local backend, on a modelled clock.

EmbeddedEngine ──commands──> LoopHost: real core, a step takes EngineSpeed's seconds ──events──> EmbeddedEngine
trainer ──minibatch──> TimedBackend: real update, takes TrainingSpeed's seconds
"""

from __future__ import annotations

import asyncio

from skyrl_train.config.plan import Plan
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.errors import EngineError
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.engines.embedded import EmbeddedEngine
from skyrl_train.inference.engines.embedded.core import EmbeddedEngineCore, build_core
from skyrl_train.inference.engines.embedded.hosts import Host, OnEvents, OnGone
from skyrl_train.inference.engines.embedded.messages import (
    READY_CALL,
    Close,
    Command,
    EngineSettings,
    Event,
    Reply,
)
from skyrl_train.inference.engines.embedded.worker import Service
from skyrl_train.inference.interface import InferenceEngineInput, InferenceEngineOutput, SamplingParams
from skyrl_train.inference.randomness import mix
from skyrl_train.inference.weight_update import WeightUpdate
from skyrl_train.publication.base import WeightTransport
from skyrl_train.simulation.engine import EngineSpeed
from skyrl_train.simulation.lengths import Lengths
from skyrl_train.simulation.training import ModelledBackend, Spend, TrainedTokens, TrainingSpeed
from skyrl_train.training.backend import Minibatch
from skyrl_train.training.local_backend import LocalBackend


class LoopHost(Host):
    """The core on the event loop itself, which has to be one of virtual time.

    A decode step is computed at the instant at which it begins; its tokens are there when its seconds have passed.
    Commands that come meanwhile are obeyed then, as a worker does: between two steps.
    """

    def __init__(self, settings: EngineSettings, speed: EngineSpeed) -> None:
        self._settings = settings
        self._speed = speed
        self._inbox: list[Command] = []
        self._next: asyncio.Handle | None = None  # the end of the step that runs, or a turn on its way
        self._core: EmbeddedEngineCore | None = None

    async def start(self, on_events: OnEvents, on_gone: OnGone) -> None:
        self._on_events = on_events
        self._core = build_core(self._settings)
        self._service = Service(self._core)
        on_events([Reply(READY_CALL)])

    def send(self, command: Command) -> None:
        self._inbox.append(command)
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._turn, [])

    async def stop(self) -> None:
        if self._next is not None:
            self._next.cancel()
        if self._core is not None:
            self._core.close()
            self._core = None

    def _turn(self, sampled: list[Event]) -> None:
        """Consumes ``sampled``, the events of the step that has ended, and commands / waits for nothing / unblocked by a
        command or the end of a step / produces events and the next step."""
        assert self._core is not None, "a host that was stopped takes no turns"
        self._next = None
        events, commands = sampled, self._inbox
        self._inbox = []
        for command in commands:
            assert not isinstance(command, Close), "only worker threads are told to close"
            events += self._service.handle(command)
        batch = min(self._core.running + self._core.waiting, self._speed.slots)
        if self._core.runnable:
            step_s = 1.0 / self._speed.steps_per_s(batch)
            self._next = asyncio.get_running_loop().call_later(step_s, self._turn, self._service.step())
        else:
            events += self._service.step()  # answers pauses
        if events:
            self._on_events(events)


class TimedEngine(EmbeddedEngine):
    """The embedded engine in virtual time. Prefill takes no time."""

    def __init__(self, config: RunConfig, plan: Plan, model_path: str, speed: EngineSpeed) -> None:
        """Raises:
        EngineError: ``speed`` has times that are not modelled here, or not the configured number of slots.
        """
        engine = config.generator.inference_engine
        if speed.prefill_steps_per_token or speed.sleep_s or speed.slots != engine.max_num_seqs:
            raise EngineError(
                "An engine that really samples has slots = generator.inference_engine.max_num_seqs, and neither prefill nor "
                f"sleep take time; got {speed}."
            )
        super().__init__(
            model_path,
            max_num_seqs=speed.slots,
            max_model_len=plan.max_model_len,
            seed=mix(config.trainer.seed, 0),
        )
        self._speed = speed

    def _new_host(self) -> Host:
        return LoopHost(self._settings, self._speed)

    async def receive_weights(self, update: WeightUpdate) -> None:
        """Serves meanwhile."""
        await asyncio.sleep(self._speed.transfer_s)
        await super().receive_weights(update)

    async def load_weights(self, update: WeightUpdate) -> None:
        await asyncio.sleep(self._speed.load_s)
        await super().load_weights(update)


class TimedBackend(LocalBackend):
    """The local backend; a modelled one beside it takes the time and counts what was trained."""

    def __init__(self, model_path: str, config: RunConfig, plan: Plan, speed: TrainingSpeed, spend: Spend) -> None:
        self._speed = speed
        self._spend = spend
        self._modelled = ModelledBackend(speed, spend)
        super().__init__(
            model_path,
            config.trainer,
            plan.total_steps,
            config.generator.sampling_params.temperature,
            config.trainer.seed,
        )

    @property
    def steps(self) -> list[TrainedTokens]:
        """What each step trained on."""
        return self._modelled.steps

    def update(self, minibatch: Minibatch) -> dict[str, float]:
        self._modelled.update(minibatch)
        return super().update(minibatch)

    def accumulate(self, part: Minibatch) -> None:
        self._modelled.accumulate(part)
        super().accumulate(part)

    def finish(self, step: int) -> dict[str, float]:
        self._modelled.finish(step)
        return super().finish(step)

    def discard(self) -> None:
        self._modelled.discard()
        super().discard()

    def stage(self, transport: WeightTransport, version: int) -> WeightUpdate:
        self._spend(self._speed.gather_s)
        return super().stage(transport, version)


class SlowToolsClient(InferenceEngineClient):
    """Between two turns of a trajectory lies a tool call: a later turn's request comes after a drawn number of seconds.

    The draw is a function of the request's seed. Without ``tools_s`` tools take no time.
    """

    tools_s: Lengths | None = None

    async def generate(self, engine_input: InferenceEngineInput) -> InferenceEngineOutput:
        if self.tools_s is not None and engine_input.get("priority") is not None:  # the version of its first tokens
            seed = SamplingParams.parse(engine_input.get("sampling_params")).seed
            assert seed is not None, "the trainer's rollouts have seeds"
            await asyncio.sleep(self.tools_s[mix(seed)])
        return await super().generate(engine_input)

"""Turns on shared devices: the engines generate on them, or the trainer trains.

               pause ─ sleep ─ reload_states                                        (begin_training)
    generation ─────────────────────────────> training
               <─────────────────────────────
               gather ─ offload_states ─ wake "weights" ─ load ─ wake "kv_cache" ─ resume    (begin_generation)

Weights come before the KV cache: a staging copy on the device needs room for a moment, which the cache takes next.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from enum import StrEnum

import torch

from skyrl_train.config.schema import RunConfig
from skyrl_train.errors import ConfigError, EngineDeadError, WeightSyncError
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.training.backend import TrainingBackend, TrainingThread
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.syncer import WeightSyncer
from skyrl_train.weight_sync.update import WeightUpdate


class DeviceTurn(StrEnum):
    """Who uses the devices."""

    generation = "generation"
    training = "training"


class Colocation:
    """Alternates generation and training. With ``trainer.placement.colocate_all``, the trainer leaves the devices as well.

    A failed call leaves the turn undecided: the run ends, and the weights can still be saved.

    Args:
        training: the thread in which ``backend`` computes.

    Attributes:
        turn: the last turn that has begun.
    """

    def __init__(
        self,
        config: RunConfig,
        client: InferenceEngineClient,
        syncer: WeightSyncer,
        backend: TrainingBackend,
        training: TrainingThread,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._config = config
        self._client = client
        self._syncer = syncer
        self._backend = backend
        self._training = training
        self._clock = clock
        self._offloads = config.trainer.placement.colocate_all
        self._version = -1  # gathered last
        self.turn = DeviceTurn.generation

    async def begin_training(self) -> dict[str, float]:
        """Pause all requests, put the engines to sleep, and bring the training state back. Does nothing in this turn.

        Returns:
            ``time/sleep`` and, where the trainer leaves the devices, ``time/reload_states``, in seconds.

        Raises:
            ConfigError: the engines cannot sleep, and the trainer needs their memory.
            NoEngineError, WeightSyncError: no engine comes back, or none that lives paused or slept.
        """
        if self.turn is DeviceTurn.training:  # for the second minibatch of a batch
            return {}
        began = self._clock()
        with self._client.events.span("sleep"):
            while True:
                # An engine that is being restarted takes memory: it must be up and asleep first.
                if not self._client.serving:
                    await self._client.wait_for_engine()
                try:
                    await interrupt(self._client, self._config)
                    break
                except WeightSyncError as error:
                    if not isinstance(error.__cause__, EngineDeadError):
                        raise
                    # All have died: again with those that come back. The number of restarts is limited, so this ends.
        self.turn = DeviceTurn.training
        times = {"time/sleep": self._clock() - began}
        if self._offloads:
            began = self._clock()
            if self._client.restage is not None:  # a copy for engines that restarted in the other turn
                await asyncio.to_thread(self._backend.release_staging, self._syncer.transport)
            await self._training.run(self._backend.reload_states)
            times["time/reload_states"] = self._clock() - began
        return times

    async def begin_generation(self, version: int) -> dict[str, float]:
        """Send the policy as ``version`` to the engines and let them serve requests.

        Returns:
            The times of the weight sync (see :meth:`WeightSyncer.sync`), ``time/wake_up`` and ``time/offload_states``.

        Raises:
            ConfigError, NoEngineError, WeightSyncError: as :meth:`begin_training`, or no engine took the weights, or none that
                lives resumed.
        """
        if self._offloads:  # at the start of a run the engines may be awake
            await self.begin_training()
        times: dict[str, float] = {}
        staged = await self._syncer.gather(version)
        self._version = version
        if self._offloads:
            began = self._clock()
            await self._training.run(self._backend.offload_states)
            times["time/offload_states"] = self._clock() - began
        elif torch.cuda.is_initialized() and self._client.capabilities.sleep:
            torch.cuda.empty_cache()  # the engines may wake on the trainer's device: it needs less than while it trained
        began = self._clock()
        with self._client.events.span("wake_up", version):
            await self._client.wake_up(["weights"])
        woken_s = self._clock() - began
        times |= await self._syncer.send(staged)
        if self._offloads:
            # An engine that catches up meanwhile may read the copy. One that does so later asks for another.
            async with self._client.no_catch_up():
                gone = await asyncio.to_thread(self._backend.release_staging, self._syncer.transport)
                self._client.restage = self._restage if gone else None
        began = self._clock()
        with self._client.events.span("wake_up", version):
            await self._client.wake_up(["kv_cache"])
        try:
            await self._client.resume_generation()
        except WeightSyncError as error:
            if not isinstance(error.__cause__, EngineDeadError):
                raise
            # All have died, as they may a moment later: requests wait for those that come back, with this version.
        self.turn = DeviceTurn.generation
        return {**times, "time/wake_up": woken_s + self._clock() - began}

    async def _restage(self) -> WeightUpdate:
        # From main memory: no update moves the weights while engines catch up.
        return (await self._syncer.gather(self._version)).update


async def interrupt(client: InferenceEngineClient, config: RunConfig) -> None:
    """Pause all requests and put the engines to sleep, where they can. Does nothing for engines that sleep.

    Raises:
        ConfigError: the engines cannot sleep, and ``trainer.placement.colocate_all`` needs it.
        WeightSyncError: no engine paused, or none slept.
    """
    sleeps = client.capabilities.sleep
    if config.trainer.placement.colocate_all and not sleeps:
        raise ConfigError(
            "trainer.placement.colocate_all=true: the engines cannot sleep, so training would find their memory taken. "
            "vLLM sleeps on a GPU only. Set generator.inference_engine.backend=embedded, or colocate_all=false."
        )
    if client.gate.is_open:
        # A sleeping engine loses its KV cache, so its requests are aborted and resubmitted with their tokens.
        await client.pause_generation(PauseMode.ABORT if sleeps else PauseMode(config.generator.pause_mode))
    # A weight sync comes before the next request, so level 2 may drop the weights. It sends neither the base model of an
    # adapter nor the users' adapters.
    kept = config.trainer.policy.model.lora.rank > 0 or client.capabilities.adapters
    await client.sleep(1 if kept else 2)

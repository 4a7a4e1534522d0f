"""Stages that compute in Ray actors, on any node of the cluster."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.exceptions import RayError

from skyrl_train.errors import StageError
from skyrl_train.inference.engines.ray_actor import RayPlacement, connect
from skyrl_train.rollout.placement.base import Outcome, Raised, Returned, Work, outcome_of
from skyrl_train.rollout.placement.workers import Worker, WorkerGone

START_LIMIT_S = 600.0  # waiting for the cluster's resources included


class RayWorker(Worker):
    """An actor."""

    def __init__(self, work: Work, placement: RayPlacement) -> None:
        self._work = work
        self._placement = placement
        self._actor: Any = None

    async def start(self) -> None:
        await asyncio.to_thread(connect)
        try:
            async with asyncio.timeout(START_LIMIT_S):
                self._actor = await asyncio.to_thread(self._create)
                built: Outcome = await self._actor.build.remote(self._work)
        except (TimeoutError, RayError) as error:
            await self.stop()
            raise StageError(
                f"its Ray actor did not start: {type(error).__name__}: {error}. It asks for "
                f"num_cpus={self._placement.num_cpus:g} and num_gpus={self._placement.num_gpus:g}; look at `ray status`."
            ) from error
        if isinstance(built, Raised):
            await self.stop()
            raise built.start_failed()

    async def call(self, argument: Any) -> Outcome:
        if self._actor is None:
            raise WorkerGone("its actor was stopped")
        try:
            outcome: Outcome = await self._actor.call.remote(argument)
        except RayError as error:
            raise WorkerGone(f"its actor ended: {type(error).__name__}") from error
        return outcome

    async def stop(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None:
            await asyncio.to_thread(ray.kill, actor)

    def _create(self) -> Any:
        return ray.remote(_Hosted).options(**self._placement.options()).remote()


class _Hosted:
    def build(self, work: Work) -> Outcome:
        built = outcome_of(work.build)
        if isinstance(built, Raised):
            return built
        self._function = built.value
        return Returned(None)

    def call(self, argument: Any) -> Outcome:
        return outcome_of(self._function, argument)

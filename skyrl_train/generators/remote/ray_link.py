"""A generator's host in a Ray actor, on any node of the cluster.

What crosses the border is pickled by Ray, between processes of its own: keep the cluster's network private, as Ray asks.
Object references are awaited, and the few calls of Ray that block run in threads.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from skyrl_train.generators.remote.actor import LinkLost
from skyrl_train.generators.remote.host import GeneratorHost
from skyrl_train.generators.remote.messages import CentralState, Event, Failed, Message, Setup
from skyrl_train.inference.engines.ray_actor import RayPlacement, connect

START_LIMIT_S = 600.0  # waiting for the cluster's resources included
STOP_LIMIT_S = 10.0  # what the generator may take to close before its actor is killed


class RayLink:
    """The way to one actor.

    Raises (``start``):
        ConfigError: Ray cannot be reached or started.
    """

    def __init__(self, placement: RayPlacement) -> None:
        self._placement = placement
        self._actor: Any = None
        self._started = False

    async def start(self, setup: Setup, state: CentralState) -> Failed | None:
        await asyncio.to_thread(connect)
        try:
            async with asyncio.timeout(START_LIMIT_S):
                self._actor = await asyncio.to_thread(self._create)
                failed: Failed | None = await self._actor.start.remote(setup, state)
        except (TimeoutError, RayError) as error:
            raise LinkLost(
                f"{type(error).__name__}: {error}. It asks for rollout.ray_num_cpus={self._placement.num_cpus:g}; look at "
                "`ray status`."
            ) from error
        self._started = True
        return failed

    def send(self, sequence: int, message: Message) -> None:
        self._actor.send.remote(sequence, message)

    async def next_events(self) -> list[Event]:
        try:
            events: list[Event] = await self._actor.next_events.remote()
        except RayError as error:
            raise LinkLost(f"its process has ended ({type(error).__name__})") from error
        return events

    async def stop(self) -> None:
        actor, self._actor = self._actor, None
        if actor is None:
            return
        if self._started:
            with suppress(TimeoutError, RayError):  # it is killed in any case
                async with asyncio.timeout(STOP_LIMIT_S):
                    await actor.stop.remote()
        await asyncio.to_thread(ray.kill, actor)

    def _create(self) -> Any:
        return ray.remote(GeneratorHost).options(**self._placement.options()).remote()

"""Faults of modelled engines: they die and come back, and they are slow for a while, at times that a seed reproduces."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace
from random import Random

from skyrl_train.runtime.seeds import derive_seed
from skyrl_train.simulation.engine import ModelledEngine

NEVER = math.inf


@dataclass(frozen=True)
class Faults:
    """How often each engine fails. The times between two faults of an engine are exponentially distributed.

    Args:
        die_every_s: mean seconds between the deaths of an engine; ``EngineSpeed.restart_s`` is the time of its restart.
        slow_every_s: mean seconds between the end of a slow period and the beginning of the next one.
        slow_for_s: length of a slow period.
        slow_by: an engine in a slow period needs so many times the seconds for a decode step.
        seed: each engine has its own times; they depend on the seed and on its number.
    """

    die_every_s: float = NEVER
    slow_every_s: float = NEVER
    slow_for_s: float = 60.0
    slow_by: float = 3.0
    seed: int = 0

    def begin(self, number: int, engine: ModelledEngine) -> list[asyncio.Task[None]]:
        """Start the tasks that inflict the faults on an engine, until they are cancelled."""
        deaths, slow_periods = (Random(derive_seed(self.seed, number, kind)) for kind in range(2))
        tasks = []
        if math.isfinite(self.die_every_s):
            tasks.append(asyncio.create_task(self._kill(engine, deaths)))
        if math.isfinite(self.slow_every_s):
            tasks.append(asyncio.create_task(self._slow_down(engine, slow_periods)))
        return tasks

    async def _kill(self, engine: ModelledEngine, random: Random) -> None:
        while True:
            await asyncio.sleep(random.expovariate(1 / self.die_every_s))
            await engine.die()

    async def _slow_down(self, engine: ModelledEngine, random: Random) -> None:
        normal = engine.speed
        slow = replace(
            normal, step_s=self.slow_by * normal.step_s, step_per_request_s=self.slow_by * normal.step_per_request_s
        )
        while True:
            await asyncio.sleep(random.expovariate(1 / self.slow_every_s))
            engine.change_speed(slow)
            await asyncio.sleep(self.slow_for_s)
            engine.change_speed(normal)

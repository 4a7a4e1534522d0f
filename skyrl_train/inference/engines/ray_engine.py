"""Any engine in a Ray actor, on any node of the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from skyrl_train.inference.engines.proxy import STOP_LIMIT_S, EngineHost, EngineProxy
from skyrl_train.workers.ray import RayLink, RayPlacement, connect


class RayEngine(EngineProxy):
    """An engine in a Ray actor.

    Args:
        factory, arguments: see :class:`~skyrl_train.inference.engines.proxy.EngineProxy`.
        placement: resources and environment of the actor.
        start_timeout_s: limit of :meth:`start`, waiting for resources included.
        stop_timeout_s: how long :meth:`teardown` lets the hosted engine clean up before the actor is killed.

    After the actor has died, :meth:`start` makes a new one, whose engine has no weights.
    """

    def __init__(
        self,
        factory: str,
        arguments: Mapping[str, Any],
        placement: RayPlacement | None = None,
        *,
        start_timeout_s: float = 1800.0,  # as the fleet allows: it may compile for minutes
        stop_timeout_s: float = STOP_LIMIT_S,
    ) -> None:
        super().__init__(factory, arguments, "The engine in a Ray actor")
        self._placement = placement or RayPlacement()
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s

    async def start(self) -> None:
        """Create the actor, on any node of the cluster that has room, and start the engine in it.

        Raises:
            ConfigError: Ray cannot be reached or started.
            EngineDeadError: the actor did not start, or not in time; the message says what to check.
            SkyRLError: the engine could not be built or started.
        """
        await self.teardown()
        await asyncio.to_thread(connect)  # outside of the time limit: Ray itself may have to start
        link = RayLink(EngineHost, self._placement, stop_timeout_s=self._stop_timeout_s)
        await self._start(link, None, self._start_timeout_s)  # the placement has the log

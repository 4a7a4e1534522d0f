"""The generator of a run whose rollouts are played in actors (``rollout.num_actors``).

    trainer ──generate──> RemoteGenerator ──the actor with the fewest calls──> RolloutActor ──> GeneratorHost ──> generator
                               client <────────────── requests for tokens ─────────┘<──────────────────────────────┘

Admission, staleness, ledger, recordings and engines stay where they are: what moves is the Python of environments, reward
functions and agents.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from skyrl_train.concurrency import cancel_within, gather_or_cancel
from skyrl_train.errors import RolloutActorError
from skyrl_train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput
from skyrl_train.generators.remote.actor import Link, RolloutActor
from skyrl_train.generators.remote.messages import CentralState, Setup
from skyrl_train.inference.client import RequestClient

logger = logging.getLogger(__name__)

CANCEL_LIMIT_S = 5.0  # what an actor that is starting may take to notice that it is not wanted


class RemoteGenerator(GeneratorInterface):
    """Dispatches calls to actors.

    An actor that dies fails its own calls, which the runner makes again, and is started again at once.
    Where that does not succeed, it is tried again with the next call. Calls wait only while no actor at all is alive.

    Args:
        links: a way to each actor.
        client: answers the actors' requests.
    """

    def __init__(self, links: Sequence[Callable[[], Link]], setup: Setup, client: RequestClient) -> None:
        self._client = client
        self._may_begin: Callable[[], bool] = lambda: True
        self._restarts: dict[RolloutActor, asyncio.Task[None]] = {}
        self._closed = False
        self._reason = ""
        self.actors = [
            RolloutActor(f"rollout actor {number}", link, setup, client, self._state, self._restart)
            for number, link in enumerate(links)
        ]

    def pace(self, may_begin: Callable[[], bool]) -> None:
        """Actors learn the answer with every message."""
        self._may_begin = may_begin

    async def start(self) -> None:
        """Starts all actors at once.

        Raises:
            SkyRLError: one of them cannot start.
        """
        await gather_or_cancel(actor.start() for actor in self.actors)

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Has the actor with the fewest calls play ``input_batch``.

        Raises:
            RolloutActorError: the actor died meanwhile, or none is alive and none can be started.
            SkyRLError: what the generator raised, by class and message.
        """
        for actor in self.actors:
            if not actor.alive:
                self._restart(actor)
        while not any(actor.alive for actor in self.actors):
            if not self._restarts:
                raise RolloutActorError(f"no rollout actor is left: {self._reason}")
            await asyncio.wait(self._restarts.values(), return_when=asyncio.FIRST_COMPLETED)
        actor = min((actor for actor in self.actors if actor.alive), key=lambda actor: actor.outstanding)
        return await actor.generate(input_batch)

    async def aclose(self) -> None:
        """Closes the generators and ends the actors."""
        self._closed = True
        await cancel_within(self._restarts.values(), CANCEL_LIMIT_S)
        await asyncio.gather(*(actor.stop() for actor in self.actors))

    def _restart(self, actor: RolloutActor) -> None:
        if not self._closed and actor not in self._restarts:
            task = asyncio.create_task(self._start_again(actor), name=f"{actor.name}-start")
            self._restarts[actor] = task
            task.add_done_callback(lambda _: self._restarts.pop(actor))

    async def _start_again(self, actor: RolloutActor) -> None:
        try:
            await actor.start()
        except Exception as error:  # whatever it is, a call that needs the actor says it
            self._reason = str(error)
            logger.error("%s cannot be started again: %s", actor.name, error)
        else:
            logger.warning("%s was started again", actor.name)

    def _state(self) -> CentralState:
        client = self._client
        return CentralState(
            client.policy_version,
            client.capabilities,
            dict(client.adapters),
            client.engine_states,
            self._may_begin(),
        )

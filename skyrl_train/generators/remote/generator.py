"""The generator of a run whose rollouts run in actors (``rollout.num_actors``).

    trainer ──generate──> RemoteGenerator ──actor with the fewest calls──> RolloutActor ~~> GeneratorHost ──> generator
                               client <─────────────── requests for tokens ────────────────────────────────────┘

Admission, staleness, ledger, replay cache and engines stay in the driver. Only Python code moves: environments, reward
functions and agents.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Callable, Sequence

from skyrl_train.errors import GeneratorOutputError, RolloutActorError, RolloutError
from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.generators.remote.host import ActorSetup, DriverState
from skyrl_train.inference.client import RequestClient
from skyrl_train.runtime.concurrency import cancel_within, gather_or_cancel
from skyrl_train.types import GeneratorInput, GeneratorOutput
from skyrl_train.workers.connection import WorkerConnection, WorkerLink

logger = logging.getLogger(__name__)

START_LIMIT_S = 600.0  # waiting for the cluster's resources included
CANCEL_LIMIT_S = 5.0  # time for an actor that is starting to notice that it is cancelled


class RolloutActor:
    """An actor that runs a generator, and samples from the driver's ``client``.

    Args:
        name: for errors and logs.
        new_link: makes the link to a new host, which serves a ``GeneratorHost``.
        setup: the host's generator, tokenizer and paths.
        state: returns the driver's state, which every batch of messages carries.
        on_lost: called when the actor has died, after its requests were cancelled and its calls have failed.

    Attributes:
        connection: to the current host; None before the first start.
    """

    def __init__(
        self,
        name: str,
        new_link: Callable[[], WorkerLink],
        setup: ActorSetup,
        client: RequestClient,
        state: Callable[[], DriverState],
        on_lost: Callable[[RolloutActor], None],
    ) -> None:
        self.name = name
        self._new_link = new_link
        self._setup = setup
        self._client = client
        self._state = state
        self._on_lost = on_lost
        self.connection: WorkerConnection | None = None

    @property
    def alive(self) -> bool:
        """Whether it takes calls."""
        return self.connection is not None and self.connection.gone is None

    @property
    def outstanding(self) -> int:
        """Calls that have not ended."""
        return 0 if self.connection is None else len(self.connection.pending)

    async def start(self) -> None:
        """Bring a new actor up; returns when its generator takes calls.

        Raises:
            RolloutActorError: there is no room for it, or it ended while it started.
            SkyRLError: its generator could not be built or started.
        """
        connection = WorkerConnection(
            self._new_link(),
            gone_error=lambda reason: RolloutActorError(f"{self.name} is gone: {reason}"),
            call_error=lambda failure: failure.error(RolloutError, "it"),
            served=self._client,
            own_state=self._state,
            on_state=self._client.events.take_over,
            on_lost=self._lost,
        )
        await connection.start(self._setup, timeout_s=START_LIMIT_S)
        # Only a connection that has started is kept: an actor without one counts as dead and gets no calls.
        self.connection = connection

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Run ``input_batch`` in the actor. Cancelled, it waits until the actor has cleaned up.

        Raises:
            RolloutActorError: the actor died meanwhile.
            SkyRLError: the generator's error, with its class and message.
        """
        assert self.connection is not None, "started first"
        # Pickled here and in the host, so that an object that cannot be pickled fails its call and not the connection.
        try:
            pickled = pickle.dumps(input_batch)
        except Exception as error:  # user objects may raise anything when they are pickled
            raise RolloutError(
                f"the prompts cannot travel to an actor: {error}. Their fields must be plain data, or set rollout.num_actors=0."
            ) from error
        answer = await self.connection.call_to_end("generate", pickled)
        try:
            output: GeneratorOutput = pickle.loads(answer)
        except Exception as error:  # likewise
            raise GeneratorOutputError(
                f"the generator's output cannot be read outside of its actor: {error}. It must be plain data; see "
                "GeneratorOutput."
            ) from error
        return output

    async def stop(self) -> None:
        """Close the generator and end the actor; calls that run fail. Idempotent."""
        if self.connection is not None:
            await self.connection.stop()

    def _lost(self) -> None:
        assert self.connection is not None, "only a started actor can be lost"
        logger.error("%s is gone: %s", self.name, self.connection.gone)
        self._on_lost(self)


class RemoteGenerator(GeneratorInterface):
    """Dispatches calls to actors.

    An actor that dies fails its own calls, which the dispatcher makes again, and is started again at once. If that fails,
    the next call tries again. Calls wait only while no actor at all is alive.

    Args:
        links: makes the link to each actor.
        client: answers the actors' requests.
    """

    def __init__(self, links: Sequence[Callable[[], WorkerLink]], setup: ActorSetup, client: RequestClient) -> None:
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
        """Actors learn the answer with every batch of messages."""
        self._may_begin = may_begin

    async def start(self) -> None:
        """Start all actors at once.

        Raises:
            SkyRLError: one of them cannot start.
        """
        await gather_or_cancel(actor.start() for actor in self.actors)

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Run ``input_batch`` in the actor with the fewest calls.

        Raises:
            RolloutActorError: the actor died meanwhile, or none is alive and none can be started.
            SkyRLError: the generator's error, with its class and message.
        """
        for actor in self.actors:
            if not actor.alive:
                self._restart(actor)
        while not any(actor.alive for actor in self.actors):
            if not self._restarts:
                raise RolloutActorError(f"no rollout actor is left: {self._reason}")
            # The first actor that is back is enough.
            await asyncio.wait(self._restarts.values(), return_when=asyncio.FIRST_COMPLETED)
        actor = min((actor for actor in self.actors if actor.alive), key=lambda actor: actor.outstanding)
        return await actor.generate(input_batch)

    async def aclose(self) -> None:
        """Close the generators and end the actors."""
        # Set first: an actor that dies from here on is not started again.
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
        except Exception as error:  # the next call that finds no actor raises it
            self._reason = str(error)
            logger.error("%s cannot be started again: %s", actor.name, error)
        else:
            logger.warning("%s was started again", actor.name)

    def _state(self) -> DriverState:
        client = self._client
        return DriverState(
            client.policy_version,
            client.capabilities,
            dict(client.adapters),
            client.engine_states,
            self._may_begin(),
        )

"""The content of a rollout actor: the generator, and a client that has responses sampled by the driver's client.

driver ──generate(pickled input)──> GeneratorHost ──> generator ──> ForwardingClient ──complete / stream──> driver
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skyrl_train.errors import GeneratorOutputError
from skyrl_train.events.log import CollectedEvents, Detail
from skyrl_train.generators.base import GeneratorInterface, run_generator
from skyrl_train.generators.construction import GeneratorSpec
from skyrl_train.inference.chat.renderer import ChatRenderer
from skyrl_train.inference.client import RequestClient
from skyrl_train.inference.interface import EngineCapabilities
from skyrl_train.inference.pool.fleet import EngineState
from skyrl_train.inference.requests import Generation, GenerationChunk, GenerationRequest
from skyrl_train.workers.connection import Peer
from skyrl_train.workers.host import Hosted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DriverState:
    """The state of the driver that an actor knows: properties of its client, and ``may_begin``, whether the actor may start
    work that no call asked for."""

    policy_version: int
    capabilities: EngineCapabilities
    adapters: Mapping[str, str]
    engine_states: Mapping[int, EngineState]
    may_begin: bool


@dataclass(frozen=True, slots=True)
class ActorSetup:
    """The data with which an actor starts.

    Args:
        folder: the driver's working folder: relative paths in settings start there.
        search_path: the folders from which the driver imports.
    """

    spec: GeneratorSpec
    tokenizer: PreTrainedTokenizerBase
    folder: str
    search_path: tuple[str, ...]


class GeneratorHost(Hosted):
    """Builds a generator and runs it for the driver."""

    def __init__(self) -> None:
        self._events = CollectedEvents()
        self._state: DriverState
        self._generator: GeneratorInterface | None = None

    def state(self) -> list[Detail] | None:
        """Return the calls of environments, the agents and the tools that have ended since the last batch of messages."""
        return self._events.take() or None

    def take_state(self, state: DriverState) -> None:
        self._state = state

    async def start(self, setup: ActorSetup) -> None:
        """Build the generator and start it."""
        # Settings may name modules and files of the driver's folders; a node that has these folders finds them.
        with suppress(OSError):
            os.chdir(setup.folder)
        logger.info("a rollout actor starts in process %d", os.getpid())
        sys.path += [path for path in setup.search_path if path not in sys.path]
        renderer = ChatRenderer.configured(setup.spec.config, setup.tokenizer, setup.spec.model_path)
        client = ForwardingClient(setup.tokenizer, renderer, lambda: self._state, self.driver, self._events)
        generator = setup.spec.build(client, setup.tokenizer)
        # Read at each call: every batch of messages brings a new state.
        generator.pace(lambda: self._state.may_begin)
        await generator.start()
        self._generator = generator

    async def generate(self, pickled: bytes) -> bytes:
        """Run a pickled ``GeneratorInput``; return the pickled ``GeneratorOutput``."""
        assert self._generator is not None, "the driver calls start() first"
        output = await run_generator(self._generator, pickle.loads(pickled))
        try:
            return pickle.dumps(output)
        except Exception as error:  # user objects may raise anything when they are pickled
            raise GeneratorOutputError(
                f"the generator's output cannot leave its actor: {error}. It must be plain data; see GeneratorOutput."
            ) from error

    async def stop(self) -> None:
        if self._generator is not None:
            await self._generator.aclose()


class ForwardingClient(RequestClient):
    """The client of a generator in an actor. It renders, parses and decodes here; the driver's client samples.

    Versions, log-probs, continuation and replay are therefore the same as without actors. Properties such as
    ``policy_version`` are as of the driver's last message; the versions of tokens are exact.

    Args:
        state: returns the driver's last state.
        driver: calls the driver's client.
        events: collects what is recorded by the driver.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        renderer: ChatRenderer,
        state: Callable[[], DriverState],
        driver: Peer,
        events: CollectedEvents,
    ) -> None:
        self.events = events
        self.tokenizer = tokenizer
        self.renderer = renderer
        self._state = state
        self._driver = driver

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._state().capabilities

    @property
    def policy_version(self) -> int:
        return self._state().policy_version

    @property
    def adapters(self) -> Mapping[str, str]:
        return self._state().adapters

    @property
    def engine_states(self) -> dict[int, EngineState]:
        return dict(self._state().engine_states)

    async def complete(self, request: GenerationRequest) -> Generation:
        # Cancelling this call cancels the request in the driver.
        generation: Generation = await self._driver.call("complete", request)
        return generation

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        # Closed with this generator, so that the driver's request ends when its reader leaves.
        async with aclosing(self._driver.stream("stream", request)) as chunks:
            async for chunk in chunks:
                yield chunk

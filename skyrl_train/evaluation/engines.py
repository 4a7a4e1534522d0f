"""The engines that an evaluation samples from: the run's, or some of its own.

| | the run's engines | engines of its own |
|---|---|---|
| weights | those that the run has published | a copy of the trainer's, of the step that is due |
| generation of training data | goes on beside it | is not concerned |
| the run's next publication | waits until the evaluation has ended | does not wait |
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from skyrl_train.concurrency import close_within
from skyrl_train.errors import EvaluationError
from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.publication.publisher import Staged, WeightPublisher, WeightSource

CLOSE_LIMIT_S = 30.0  # what a generator may take to close


class EvaluationEngines(ABC):
    """What samples for an evaluation, and how it gets the weights."""

    shared: bool  # with the run: its publications have to wait

    def __init__(self, generator: GeneratorInterface, client: InferenceEngineClient) -> None:
        self.generator = generator
        self.client = client

    async def start(self) -> None:
        """Called once, before anything else."""
        return

    async def stage(self, version: int) -> Staged | None:
        """Keeps the trainer's weights, which do not move before this returns, as ``version`` for a later ``load``."""
        return None

    @abstractmethod
    async def load(self, version: int, staged: Staged | None) -> None:
        """Returns when the engines serve ``version``.

        Raises:
            EvaluationError: they serve another one.
            EngineError, PublicationError: the engines failed.
        """

    async def aclose(self) -> None:
        """Called once, after the last sample has ended."""
        return


class SharedEngines(EvaluationEngines):
    """The run's engines, with the run's generator. They hold the version when its evaluation begins, and until it ends."""

    shared = True

    async def load(self, version: int, staged: Staged | None) -> None:
        """Checks that the run has published ``version``."""
        if self.client.policy_version != version:
            raise EvaluationError(
                f"The engines hold policy version {self.client.policy_version}, so version {version} cannot be evaluated on "
                "them. Publish it first."
            )


class OwnEngines(EvaluationEngines):
    """Engines that nothing else uses, behind a client and a generator of their own.

    Args:
        client: started already; torn down by :meth:`aclose`.
        publisher: brings weights to ``client``; its staging areas are its own.
        weights: the trainer's weights as they are now.
    """

    shared = False

    def __init__(
        self,
        generator: GeneratorInterface,
        client: InferenceEngineClient,
        publisher: WeightPublisher,
        weights: WeightSource,
    ) -> None:
        super().__init__(generator, client)
        self._publisher = publisher
        self._weights = weights

    async def start(self) -> None:
        """Opens what the generator needs; no program from outside may begin a session here."""
        self.generator.pace(lambda: False)
        await self.generator.start()

    async def stage(self, version: int) -> Staged:
        """Copies the weights to a staging area."""
        return await self._publisher.gather(self._weights, version)

    async def load(self, version: int, staged: Staged | None) -> None:
        """Publishes the staged copy to the engines."""
        if staged is None:
            raise EvaluationError(f"There is no copy of the weights of version {version} to evaluate.")
        await self._publisher.deliver(staged)

    async def aclose(self) -> None:
        """Closes generator, engines and staging areas."""
        try:
            await close_within(self.generator.aclose(), "the closing of the evaluation's generator", CLOSE_LIMIT_S)
        finally:
            await self.client.teardown()
            self._publisher.close()

"""The engines of an evaluation: the run's, or separate ones.

| | the run's engines | separate engines |
|---|---|---|
| weights | the version that they serve | a copy of the trainer's weights after the step that is due |
| generation of training data | continues on the same engines | not affected |
| the run's next weight sync | waits until the evaluation has ended | does not wait |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from skyrl_train.errors import EvaluationError
from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.runtime.concurrency import close_within
from skyrl_train.weight_sync.syncer import StagedWeights, WeightSyncer

CLOSE_LIMIT_S = 30.0  # time limit for closing a generator


@dataclass(eq=False)
class EvaluationEngines(ABC):
    """Samples for an evaluation, and loads its weights."""

    generator: GeneratorInterface
    client: InferenceEngineClient
    shared: ClassVar[bool]  # with the run, whose weight syncs then have to wait

    async def start(self) -> None:
        """Start. Called once, before all other methods."""
        return

    async def stage(self, version: int) -> StagedWeights | None:
        """Copy the trainer's weights as ``version`` for a later ``load``. They do not change before this returns."""
        return None

    @abstractmethod
    async def load(self, version: int, staged: StagedWeights | None) -> None:
        """Load ``version`` into the engines.

        Raises:
            EvaluationError: the engines serve another version.
            EngineError, WeightSyncError: the engines failed.
        """

    async def aclose(self) -> None:
        """Close. Called once, after the last sample has ended."""
        return


class SharedEngines(EvaluationEngines):
    """The run's engines and generator. They serve the version from the beginning of its evaluation to the end."""

    shared = True

    async def load(self, version: int, staged: StagedWeights | None) -> None:
        """Check that the engines serve ``version``."""
        if self.client.policy_version != version:
            raise EvaluationError(
                f"The engines serve policy version {self.client.policy_version}, so version {version} cannot be evaluated on "
                "them. Sync its weights first."
            )


@dataclass(eq=False)
class OwnEngines(EvaluationEngines):
    """Engines for the evaluation alone, with a separate client and generator.

    Args:
        client: already started; :meth:`aclose` tears it down.
        syncer: sends the trainer's weights to ``client``, with separate staging areas.
    """

    syncer: WeightSyncer
    shared = False

    async def start(self) -> None:
        """Start the generator. External programs may not begin sessions here."""
        # A session of an external program would be sampled by the weights of some evaluation.
        self.generator.pace(lambda: False)
        await self.generator.start()

    async def stage(self, version: int) -> StagedWeights:
        """Copy the weights to a staging area."""
        return await self.syncer.gather(version)

    async def load(self, version: int, staged: StagedWeights | None) -> None:
        """Send the staged copy to the engines."""
        if staged is None:
            raise EvaluationError(f"There is no copy of the weights of version {version} to evaluate.")
        await self.syncer.send(staged)

    async def aclose(self) -> None:
        """Close generator, engines and staging areas."""
        try:
            await close_within(self.generator.aclose(), "closing the evaluation's generator", CLOSE_LIMIT_S)
        finally:
            await self.client.teardown()
            self.syncer.close()

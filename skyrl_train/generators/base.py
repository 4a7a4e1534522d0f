"""The generator interface: anything that turns prompts into rewarded, token-exact trajectories.

The fields are SkyRL's, plus ``rollout_versions``. A generator written for SkyRL runs unchanged with
``generator.name=skyrl``. As a subclass of this library's interface it has other import lines, and passes the client's versions
through.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from skyrl_train.errors import RolloutError
from skyrl_train.types import GeneratorInput, GeneratorOutput


class GeneratorInterface(ABC):
    """Generates one group per call. Many calls run at once on the control loop, so nothing in a call may block."""

    async def start(self) -> None:
        """Open what the generator needs. Called once, when the engines serve and before the first ``generate``."""
        return

    def pace(self, may_begin: Callable[[], bool]) -> None:
        """Receive the pace of unrequested rollouts. Called once, before ``start``.

        ``may_begin`` returns whether there is room for rollouts that the trainer did not request, such as sessions that
        other programs open. It is False while the staleness budget is spent.
        """
        return

    async def aclose(self) -> None:
        """Free what ``start`` opened. Called once after the last ``generate`` has ended, also after a failed ``start``."""
        return

    @abstractmethod
    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Generate a trajectory for each entry of ``input_batch``, and return them in the same order.

        Weight updates, aborts and engine deaths happen inside the client's calls and do not show here.

        Raises:
            Exception: any. The rollout has failed; the trainer retries the group, as ``trainer.failures`` says.
        """


async def run_generator(generator: GeneratorInterface, input_batch: GeneratorInput) -> GeneratorOutput:
    """Call ``generator.generate`` such that code which the generator runs cannot end the training run.

    Raises:
        RolloutError: the generator, or code that it ran, called ``exit()``.
        Exception: any other exception of the generator.
    """
    try:
        # SystemExit is no Exception: it would pass every handler and end the trainer.
        return await generator.generate(input_batch)
    except SystemExit as error:
        raise RolloutError(f"it ended itself with exit status {error.code}") from error

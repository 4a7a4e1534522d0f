"""The thread that the training backend computes in, so that the control loop goes on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from skyrl_train.errors import ConfigError, GeneratorOutputError, StalenessError

T = TypeVar("T")


class TrainingThread:
    """Runs the backend's blocking calls one at a time, in the order in which they came.

    Attributes:
        weights_in_doubt: an update began and has not ended well. Such weights are not to be saved.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="training")
        self.weights_in_doubt = False

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Runs what does not move the policy."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def update(self, function: Callable[..., T], *args: Any) -> T:
        """Runs what may move the policy; the weights are in doubt until it has ended well.

        Raises:
            ConfigError, GeneratorOutputError, StalenessError: found before anything moved; the weights are not in doubt.
        """
        self.weights_in_doubt = True
        try:
            result = await self.run(function, *args)
        except (ConfigError, GeneratorOutputError, StalenessError):
            self.weights_in_doubt = False
            raise
        self.weights_in_doubt = False
        return result

    async def aclose(self) -> None:
        """Returns when the last call has ended."""
        await asyncio.to_thread(self._thread.shutdown)

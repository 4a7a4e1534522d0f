"""One update after another: what was received, what is being swapped in, what is loaded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from skyrl_train.errors import EngineError
from skyrl_train.inference.weight_update import WeightUpdate

logger = logging.getLogger(__name__)


class Swaps:
    """Those of ``engine``, as it is called in the log.

    Attributes:
        loaded: the update loaded last; None: the engine holds none.
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._received: tuple[WeightUpdate, str | None] | None = None
        self._loading: asyncio.Future[None] | None = None
        self.loaded: WeightUpdate | None = None

    async def receive(self, update: WeightUpdate, receive: Callable[[WeightUpdate], Awaitable[str | None]]) -> None:
        """Receives an update. ``receive`` says why it cannot be loaded, or None; :meth:`load` raises that."""
        self._received = None
        self._received = (update, await receive(update))

    async def load(self, update: WeightUpdate, swap: Callable[[WeightUpdate], Awaitable[None]]) -> None:
        """Swaps in the received update.

        Raises:
            EngineError: it was not received, or was refused: the old weights stay. And what ``swap`` raises.
        """
        if self._received is None or self._received[0] != update:
            raise EngineError(f"Version {update.version} was not received; call receive_weights() first.")
        refusal = self._received[1]
        if refusal is not None:
            raise EngineError(refusal)
        self._received = None
        # A swap that has begun is finished, whoever waits for it: half of one is no model.
        self._loading = asyncio.ensure_future(self._swap(update, swap))
        self._loading.add_done_callback(self._swapped)
        await asyncio.shield(self._loading)

    async def settled(self) -> None:
        """Returns when no swap is under way, also none whose caller has given up."""
        if self._loading is not None:
            await asyncio.wait({self._loading})

    def forget(self) -> None:
        """The engine holds nothing of what was received or loaded."""
        self._received = self.loaded = None

    def require_loaded(self) -> WeightUpdate:
        """The update loaded last.

        Raises:
            EngineError: there is none.
        """
        if self.loaded is None:
            raise EngineError("The engine has no weights of an update yet; publish the policy first.")
        return self.loaded

    async def _swap(self, update: WeightUpdate, swap: Callable[[WeightUpdate], Awaitable[None]]) -> None:
        await swap(update)
        self.loaded = update

    def _swapped(self, swap: asyncio.Future[None]) -> None:
        self._loading = None
        if not swap.cancelled() and (error := swap.exception()) is not None:
            logger.error("%s could not load weights: %s", self._engine, error)

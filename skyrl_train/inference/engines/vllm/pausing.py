"""What both vLLM engines have of pausing: the modes in vLLM's words, and a pause that ends when the engine is resumed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from skyrl_train.errors import EngineError
from skyrl_train.inference.interface import PauseMode

VLLM_MODES = {PauseMode.KEEP: "keep", PauseMode.RECOMPUTE: "keep", PauseMode.ABORT: "abort", PauseMode.WAIT: "wait"}


class Pausing:
    """A pause that drains can take long; ``resume`` ends it.

    ``begin`` and ``quiesced`` belong to ``pause``, ``ended`` to ``resume``.
    """

    def __init__(self) -> None:
        self._resumed = asyncio.Event()
        self._quiescing: asyncio.Future[None] | None = None

    def begin(self) -> None:
        """A resume from now on ends this pause."""
        self._resumed.clear()

    async def quiesced(self, quiescing: Coroutine[Any, Any, None]) -> None:
        """Waits until vLLM stands still.

        Raises:
            EngineError: the engine was resumed meanwhile; or whatever ``quiescing`` raised.
        """
        task = self._quiescing = asyncio.ensure_future(quiescing)
        resumed = asyncio.ensure_future(self._resumed.wait())
        try:
            await asyncio.wait({task, resumed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            resumed.cancel()
            task.cancel()
            await asyncio.wait({task})
        if task.cancelled():
            raise EngineError("The engine was resumed before it was paused.")
        task.result()

    async def ended(self) -> None:
        """Ends a pause that is under way; returns when it asks vLLM for nothing any more."""
        self._resumed.set()
        if self._quiescing is not None and not self._quiescing.done():
            await asyncio.wait({self._quiescing})

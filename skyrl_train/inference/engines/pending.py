"""What the callers of an engine wait for, until it answers or is gone; for proxies of engines that run elsewhere."""

from __future__ import annotations

import asyncio
from typing import Any

from skyrl_train.errors import EngineDeadError


class Pending:
    """Streams (a queue each) and calls (a future each) by number. Once the engine is gone, all fail, and so do new ones.

    Args:
        what: names the engine in errors.
    """

    def __init__(self, what: str) -> None:
        self.streams: dict[int, asyncio.Queue[Any]] = {}
        self.calls: dict[int, asyncio.Future[Any]] = {}
        self._what = what
        self._gone: str | None = "it was not started; call start() first"

    @property
    def alive(self) -> bool:
        """Whether the engine may still answer."""
        return self._gone is None

    def begin(self) -> None:
        """The engine has a new life. Whoever waited for the last one has been told, and takes its entry away itself."""
        self._gone = None

    def die(self, reason: str) -> None:
        """Everything pending fails, now and from now on. The first reason stays."""
        if self._gone is None:
            self._gone = reason
        for queue in self.streams.values():
            queue.put_nowait(self.error())
        for call in self.calls.values():
            if not call.done():
                call.set_exception(self.error())

    def raise_if_dead(self) -> None:
        """Raises ``EngineDeadError`` once the engine is gone."""
        if self._gone is not None:
            raise self.error()

    def error(self) -> EngineDeadError:
        """What callers of a dead engine get."""
        return EngineDeadError(f"{self._what} is gone: {(self._gone or '').removesuffix('.')}.")

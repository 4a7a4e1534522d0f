"""The time during which an engine had work."""

from __future__ import annotations

import time
from collections.abc import Callable


class BusyTime:
    """Adds up the time during which an engine had requests and was not paused (an engine sleeps only while paused)."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._requests = False
        self._paused = False
        self._since: float | None = None  # start of the current busy period
        self._before = 0.0  # seconds of all earlier ones

    @property
    def seconds(self) -> float:
        """Busy seconds until now."""
        return self._before + (0.0 if self._since is None else self._clock() - self._since)

    def requests(self, number: int) -> None:
        """Set the number of requests in the engine."""
        self._requests = number > 0
        self._settle()

    def paused(self, paused: bool) -> None:
        """Set whether the engine is paused."""
        self._paused = paused
        self._settle()

    def _settle(self) -> None:
        busy = self._requests and not self._paused
        if busy and self._since is None:
            self._since = self._clock()
        elif not busy:
            self._before, self._since = self.seconds, None

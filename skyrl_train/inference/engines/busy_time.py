"""For how long an engine had something to do."""

from __future__ import annotations

import time
from collections.abc import Callable


class BusyTime:
    """Adds up the time during which there were requests and the engine was neither paused nor asleep (which it is only while
    paused)."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._requests = False
        self._paused = False
        self._since: float | None = None  # busy since then; None: it is not
        self._before = 0.0

    @property
    def seconds(self) -> float:
        """Up to now."""
        return self._before + (0.0 if self._since is None else self._clock() - self._since)

    def requests(self, number: int) -> None:
        """So many requests are in the engine from now on."""
        self._requests = number > 0
        self._settle()

    def paused(self, paused: bool) -> None:
        """Requests stand still from now on, or go on."""
        self._paused = paused
        self._settle()

    def _settle(self) -> None:
        busy = self._requests and not self._paused
        if busy and self._since is None:
            self._since = self._clock()
        elif not busy:
            self._before, self._since = self.seconds, None

"""How idle a set of slots was: an integral over time, not a count of moments at which somebody looked."""

from __future__ import annotations

import time
from collections.abc import Callable


class SlotTimeIntegral:
    """Integrates busy slots and available slots over time.

    ``idle fraction = 1 - busy slot-seconds / available slot-seconds``. Slots still busy after the capacity fell
    below them count as no more than the capacity, so the fraction stays in [0, 1].
    """

    def __init__(self, capacity: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._capacity = capacity
        self._busy = 0
        self._since = clock()
        self._busy_slot_s = 0.0
        self._available_slot_s = 0.0

    def set_busy(self, busy: int) -> None:
        """From now on, ``busy`` slots are in use."""
        self._advance()
        self._busy = busy

    def set_capacity(self, capacity: int) -> None:
        """From now on, there are ``capacity`` slots."""
        self._advance()
        self._capacity = capacity

    def take_idle_fraction(self) -> float:
        """The idle fraction since the last call, in [0, 1]; 0 where no slot-time has passed."""
        self._advance()
        busy, available = self._busy_slot_s, self._available_slot_s
        self._busy_slot_s = self._available_slot_s = 0.0
        return 1.0 - busy / available if available > 0 else 0.0

    def _advance(self) -> None:
        now = self._clock()
        elapsed, self._since = max(0.0, now - self._since), now
        # Both sums grow by products of the same factor, so rounding cannot carry the first past the second.
        self._busy_slot_s += elapsed * min(self._busy, self._capacity)
        self._available_slot_s += elapsed * self._capacity

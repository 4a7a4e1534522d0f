"""Chooses the groups whose requests, environments, tools and agents are recorded under load. Pure: no thread, no clock.

    event of a group ──wants──> chosen at its first event ──> all of its events, or none

A timeline has holes if single events are left out, so the choice is made once per group. Each second, the share of new groups
follows the rate of events that were offered in the second before. Groups chosen before a sudden rise may exceed the limit all
the same: then the group of the next event is given up, and named in :attr:`GroupSampler.given_up`.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from itertools import islice

WINDOW_S = 1.0
BURST_S = 4.0  # seconds' worth of events that may come at once
_TARGET = 0.8  # of the limit: rates vary, and a group that is given up late has left useless events
_MAX_GROUPS = 65_536  # whose choice is remembered


class GroupSampler:
    """Limits events to ``max_per_s`` by leaving out whole groups.

    Attributes:
        left_out: events that were left out, a total.
        given_up: groups that were chosen first and left out later; a reader takes them out.
    """

    def __init__(self, max_per_s: int) -> None:
        self._max_per_s = max_per_s
        self._chosen: dict[str, bool] = {}
        self._one_in = 1
        self._budget = BURST_S * max_per_s
        self._offered = 0  # events in this window
        self._since = -math.inf
        self.left_out = 0
        self.given_up: deque[str] = deque()

    def wants(self, group: str, now: float) -> bool:
        """Count an event of ``group`` (empty: of no group) and return whether to record it.

        Args:
            now: in seconds, never smaller than in an earlier call.
        """
        if now - self._since >= WINDOW_S:
            self._begin_window(now)
        self._offered += 1
        chosen = self._chosen.get(group)
        if chosen is None:
            chosen = self._choose(group)
        elif chosen and self._budget < 1:
            self.give_up(group)
            chosen = False
        if chosen:
            self._budget -= 1
        else:
            self.left_out += 1
        return chosen

    def give_up(self, group: str) -> None:
        """Record no further event of ``group``."""
        if self._chosen.get(group):
            self._chosen[group] = False
            self.given_up.append(group)

    def chosen(self, group: str) -> bool:
        """Return whether an event that was wanted is still wanted."""
        return self._chosen.get(group, not group)

    def _choose(self, group: str) -> bool:
        chosen = self._budget >= 1 and zlib.crc32(group.encode("utf-8", "replace")) % self._one_in == 0
        if group:
            self._chosen[group] = chosen
            if len(self._chosen) > _MAX_GROUPS:  # the oldest half has most likely ended
                for old in list(islice(self._chosen, _MAX_GROUPS // 2)):
                    del self._chosen[old]
        return chosen

    def _begin_window(self, now: float) -> None:
        elapsed_s = now - self._since
        if elapsed_s < math.inf and self._max_per_s:
            self._budget = min(BURST_S * self._max_per_s, self._budget + self._max_per_s * elapsed_s)
            self._one_in = max(1, math.ceil(self._offered / elapsed_s / (_TARGET * self._max_per_s)))
        self._since, self._offered = now, 0

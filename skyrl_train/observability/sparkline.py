"""A curve in one line of text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-=+*#"


def sparkline(values: Sequence[float], width: int, levels: str = BLOCKS) -> str:
    """Draws ``values`` from their smallest (the first of ``levels``) to their largest (the last).

    More values than ``width`` are averaged in ``width`` equal parts; fewer take one character each. Values that are not
    finite are left out. Equal values are drawn at the lowest level.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    means = _in_parts(finite, min(width, len(finite)))
    low, high = min(means), max(means)
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(levels[min(len(levels) - 1, round((value - low) * scale))] for value in means)


def _in_parts(values: Sequence[float], parts: int) -> list[float]:
    """Means over ``parts`` consecutive slices whose lengths differ by at most one."""
    edges = [len(values) * part // parts for part in range(parts + 1)]
    return [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]

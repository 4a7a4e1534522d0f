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
    # Halved, so that the range of two huge values is finite; divided, so that that of two tiny ones has no inverse.
    span = high / 2 - low / 2
    shares = [(value / 2 - low / 2) / span if span > 0 else 0.0 for value in means]
    return "".join(levels[round(share * (len(levels) - 1))] for share in shares)


def _in_parts(values: Sequence[float], parts: int) -> list[float]:
    """Means over ``parts`` consecutive slices whose lengths differ by at most one."""
    edges = [len(values) * part // parts for part in range(parts + 1)]
    return [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]

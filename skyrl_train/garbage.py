"""Python's garbage collector, told what a long-running control process is like."""

from __future__ import annotations

import gc

# Younger, middle and full collections. Groups in flight and in the buffer are live for long and have no cycles, so that a full
# collection walks all of their tokens for nothing: 0.7 s with 5,000 groups, at Python's defaults every few hundred groups.
_THRESHOLDS = (2_000, 10, 100)


def settle_collector() -> None:
    """To be called once everything is imported and built: what is there stays, and is never walked again; full collections
    become rare. Otherwise they hold the event loop up and take as much processor time as all other control work."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)

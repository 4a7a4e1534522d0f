"""Python's garbage collector, told what a long-running control process is like."""

from __future__ import annotations

import atexit
import gc

# Younger, middle and full collections. What outlives a young collection mostly belongs to a group in flight, lives as long as
# that does, has no cycles, and is freed by its reference count: a middle collection walks all of it for nothing, and a full one
# all groups (0.6 s with 5,000). Either comes once in two million objects, some 25,000 trajectories.
_THRESHOLDS = (2_000, 1_000, 1)


def settle_collector() -> None:
    """To be called once everything is imported and built: what is there stays, and is never walked again; all but young
    collections become rare. Otherwise they hold the event loop up and take as much processor time as all other control work."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    # Frozen objects outlive the interpreter: extension modules then report every type of theirs as leaked, under the result.
    atexit.register(gc.unfreeze)

"""An engine is busy while it has requests and is not paused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.inference.engines.busy_time import BusyTime

events = st.one_of(st.tuples(st.just("requests"), st.integers(0, 3)), st.tuples(st.just("paused"), st.booleans()))


@given(st.lists(st.tuples(st.integers(0, 5), events), max_size=20), st.integers(0, 5))
def test_time_counts_with_requests_inside_unless_they_stand_still(changes: list[tuple[int, tuple]], after: int) -> None:
    now = expected = 0
    requests, paused = 0, False
    busy = BusyTime(lambda: float(now))
    for passed, (what, value) in [*changes, (after, ("requests", 0))]:
        now += passed
        expected += passed * (requests > 0 and not paused)
        assert busy.seconds == expected
        requests, paused = (value, paused) if what == "requests" else (requests, value)
        getattr(busy, what)(value)

"""How close float comparisons come to their tolerances (``pytest --margins``).

A tolerance is at least ten times the largest difference that was ever seen, so that a failure means a defect. This lists the
comparisons of the tests that came closer (``pytest.approx``, ``torch.testing.assert_close`` and ``np.testing.assert_allclose``),
each with the largest difference relative to its tolerance. With ``-m slow`` property tests meet new examples.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing._comparison import get_tolerances

TESTS = Path(__file__).parent
WANTED = 10.0  # times the largest difference
APPROX = type(pytest.approx(0.0))


@dataclass
class Site:
    """One comparison in the source of the tests."""

    share: float = 0.0  # of its tolerance that a difference took at most
    difference: float = 0.0  # this one
    times: int = 0


class Margins:
    """A pytest plugin."""

    def __init__(self) -> None:
        self.sites: dict[str, Site] = {}

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"tolerances below {WANTED:g} times the largest difference")
        for place, site in sorted(self.sites.items()):
            if site.share * WANTED > 1:
                line = (
                    f"{place}: {site.difference:.2g} is {site.share:.0%} of the tolerance, in {site.times} comparisons"
                )
                terminalreporter.line(line)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Iterator[None]:
        with self.watching():
            return (yield)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notes each comparison, and leaves it as it is."""
        equal, close, allclose = APPROX.__eq__, torch.testing.assert_close, np.testing.assert_allclose

        def __eq__(approx: Any, actual: Any) -> bool:
            if isinstance(actual, Real) and math.isfinite(approx.expected):
                self._note(actual, approx.expected, approx.tolerance)
            return equal(approx, actual)

        def assert_close(actual: Any, expected: Any, **how: Any) -> None:
            close(actual, expected, **how)
            tolerances = get_tolerances(actual, expected, rtol=how.get("rtol"), atol=how.get("atol"))
            self._note_arrays(actual.detach().double(), expected.detach().double(), *tolerances)

        def assert_allclose(actual: Any, desired: Any, rtol: float = 1e-7, atol: float = 0.0, **how: Any) -> None:
            allclose(actual, desired, rtol, atol, **how)
            self._note_arrays(actual, desired, rtol, atol)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(APPROX, "__eq__", __eq__)
            patch.setattr(torch.testing, "assert_close", assert_close)
            patch.setattr(np.testing, "assert_allclose", assert_allclose)
            yield

    def _note_arrays(self, actual: Any, expected: Any, rtol: float, atol: float) -> None:
        actual, expected = (np.asarray(each, dtype=np.float64) for each in (actual, expected))
        finite = np.isfinite(actual) & np.isfinite(expected)
        for a, b in zip(actual[finite], np.broadcast_to(expected, actual.shape)[finite], strict=True):
            self._note(a, b, atol + rtol * abs(b))

    def _note(self, actual: float, expected: float, tolerance: float) -> None:
        difference = abs(actual - expected)
        if not difference <= tolerance:  # what fails is the test's matter
            return
        frame = sys._getframe(1)
        while Path(frame.f_code.co_filename).parent.parent != TESTS:
            if frame.f_back is None:
                return  # a comparison of a library
            frame = frame.f_back
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        site = self.sites.setdefault(place, Site())
        site.times += 1
        if difference > site.share * tolerance:
            site.share, site.difference = difference / tolerance, difference

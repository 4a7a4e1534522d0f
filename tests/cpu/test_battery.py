"""Client libraries with their defaults against the endpoint (``tests/battery``)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "battery"))
from battery_clients import LIBRARIES
from run_battery import endpoint, has, run_library

pytestmark = pytest.mark.slow
# Libraries exclude each other and ours, so other environments may have them: interpreters, separated by colons.
PYTHONS = [sys.executable, *filter(None, os.environ.get("SKYRL_BATTERY_PYTHONS", "").split(":"))]


@pytest.fixture(scope="module", params=["embedded", "vllm"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "vllm":
        pytest.importorskip("vllm")
    with endpoint(request.param) as url:
        yield url


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_works_with_its_defaults(library: str, url: str) -> None:
    python = next((python for python in PYTHONS if has(python, library)), None)
    if python is None:
        pytest.skip(f"{library} is not installed: see tests/battery/requirements.txt")
    failures = {result["case"]: result["error"] for result in run_library(python, library, url) if result["error"]}
    assert failures == {}

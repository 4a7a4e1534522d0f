"""The other projects' functions, imported once; float64 wherever they allow it."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import sys
from pathlib import Path
from types import SimpleNamespace

import oracles
import pytest

sys.path.append(str(Path(__file__).parents[1] / "cpu"))  # for the scripted engine


@pytest.fixture(scope="session")
def verl() -> SimpleNamespace:
    return oracles.load_verl()


@pytest.fixture(scope="session")
def trl() -> SimpleNamespace:
    return oracles.load_trl()


@pytest.fixture(scope="session")
def areal() -> SimpleNamespace:
    return oracles.load_areal()


@pytest.fixture(scope="session")
def skyrl() -> SimpleNamespace:
    return oracles.load_skyrl()

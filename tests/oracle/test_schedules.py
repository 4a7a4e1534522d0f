"""The schedules of SkyRL, AReaL and verl run in ``benchmarks/against_peers.py``."""

from __future__ import annotations

import subprocess
import sys

import oracles
import pytest

pytestmark = pytest.mark.oracle


def test_with_equal_lengths_every_schedule_reaches_the_bound() -> None:
    for package in ("skyrl", "areal", "verl"):
        if not (oracles.FOLDER / package).is_dir():
            pytest.fail(f"{package} is not in {oracles.FOLDER.name}. Run in the root: {oracles.INSTALL}", pytrace=False)
    benchmark = oracles.FOLDER.parent / "benchmarks" / "against_peers.py"
    sizes = ["--batch", "4", "--steps", "8", "--tails", "1", "--bounds", "2"]
    command = [sys.executable, str(benchmark), "--peers", str(oracles.FOLDER), *sizes]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("| 1 | training-bound | 2 |"))
    assert [cell.strip() for cell in line.split("|")[4:8]] == ["1.000 / 2.00"] * 4

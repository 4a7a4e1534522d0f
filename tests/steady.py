"""Proves that the tests are steady: runs them again and again in random orders, some of the times on a busy machine.

``python tests/steady.py`` runs the default tests five times, three of them beside four processes that keep the cores busy.
A run fails if a test fails, or if it skips another number of tests than the first run: a busy machine is no reason to skip one.
Options of pytest may follow: ``python tests/steady.py --runs 2 tests/cpu/test_ledger.py``.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Runs ``number`` processes that compute all the time."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="how often the tests are run")
    parser.add_argument("--busy-runs", type=int, default=3, help="how many of these are beside busy processes")
    parser.add_argument("--busy-processes", type=int, default=4, help="how many processes then keep the cores busy")
    parser.add_argument("--seed", type=int, default=0, help="of the first run's order; each next run has the next seed")
    options, pytest_options = parser.parse_known_args(argv)
    failed, skipped_first = 0, None
    for run in range(options.runs):
        # The first run is quiet: what fails there is not due to the load.
        busy = options.busy_processes if run >= options.runs - options.busy_runs else 0
        command = [sys.executable, "-m", "pytest", *(pytest_options or ["tests", "-n", "4"])]
        command += ["-q", "--shuffle", str(options.seed + run)]
        start = time.perf_counter()
        with busy_processes(busy):
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        took = time.perf_counter() - start
        output = done.stdout.strip() or done.stderr.strip()
        said = output.splitlines()[-1].strip("= ") if output else "no output"
        print(f"run {run + 1} of {options.runs}, {busy} busy processes, {took:.0f} s: {said}", flush=True)
        skipped = re.findall(r"\d+ skipped", said)
        skipped_first = skipped if skipped_first is None else skipped_first
        if done.returncode != 0 or skipped != skipped_first:
            failed += 1
            print(f"{done.stdout[-20_000:]}\n{done.stderr[-5_000:]}\nAgain with: {shlex.join(command)}", flush=True)
    print(f"{options.runs - failed} of {options.runs} runs passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

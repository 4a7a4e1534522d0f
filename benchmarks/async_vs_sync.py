"""Time of the asynchronous trainer for the same steps, compared with the synchronous one.

    python benchmarks/async_vs_sync.py [--steps 100] [--rounds 2] [key=value ...]

Both modes run the same recipe by the real command, alternately, so that a machine that gets slower hits both. The ratio compares
the time from the first to the last step, without the start of the processes.

The floor of a step is its processor time, of all processes together, over the number of cores: no schedule of the same work is
faster. It is the difference between the whole run and one of a few steps, so that it contains no start-up.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

SHORT = 10  # steps


class Run(NamedTuple):
    """Seconds of all steps, seconds of the processors, and the mean lag."""

    steps_s: float
    cpu_s: float
    lag: float


def run(mode: str, recipe: str, steps: int, overrides: list[str]) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "skyrl_train", "train", recipe, f"trainer.mode={mode}"]
        settings = [f"trainer.max_steps={steps}", f"trainer.run_dir={folder}/run", "trainer.trackers=[]", *overrides]
        subprocess.run([*command, *settings], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    lag = statistics.fmean(row["staleness/mean"] for row in rows)
    return Run(sum(row["time/step"] for row in rows), cpu_s, lag)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args()
    if options.steps <= SHORT:
        parser.error(f"--steps must be more than {SHORT}, the steps of the short run")
    ratios, of_floor = [], []
    print("| round | sync | fully_async | mean lag | sync / fully_async | step of fully_async | floor | step / floor |")
    print("|---" * 8 + "|", flush=True)
    for number in range(1, options.rounds + 1):
        sync = run("sync", options.recipe, options.steps, options.overrides)
        ahead = run("fully_async", options.recipe, options.steps, options.overrides)
        short = run("fully_async", options.recipe, SHORT, options.overrides)
        ratios.append(sync.steps_s / ahead.steps_s)
        step_s = (ahead.steps_s - short.steps_s) / (options.steps - SHORT)
        floor_s = (ahead.cpu_s - short.cpu_s) / (options.steps - SHORT) / (os.cpu_count() or 1)
        of_floor.append(step_s / floor_s)
        print(
            f"| {number} | {sync.steps_s:.1f} s | {ahead.steps_s:.1f} s | {ahead.lag:.2f} | {ratios[-1]:.2f} "
            f"| {step_s * 1e3:.0f} ms | {floor_s * 1e3:.0f} ms | {of_floor[-1]:.2f} |",
            flush=True,
        )
    print(f"| median | | | | **{statistics.median(ratios):.2f}** | | | **{statistics.median(of_floor):.2f}** |")


if __name__ == "__main__":
    main()

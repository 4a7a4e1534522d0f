"""Time of the asynchronous trainer for the same steps, compared with the synchronous one.

    python benchmarks/async_vs_sync.py [--steps 100] [--rounds 2] [key=value ...]

Both modes run the same recipe by the real command, alternately, so that a machine that gets slower hits both. The ratio compares
the time from the first to the last step, without the start of the processes.

A floor of a step is its processor time over the number of cores: no schedule of the same work is faster. The first floor counts
all processes, the second one those of the engine and of training alone, without the control loop. Both are the difference between
the whole run and one of a few steps, so that they contain no start-up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

SHORT = 10  # steps
# The command, and a file for the processor seconds of its process and of its children.
COMMAND = """
import resource, sys
from pathlib import Path
from skyrl_train.entrypoints.command_line import main
code = main(sys.argv[2:])
of = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
Path(sys.argv[1]).write_text(" ".join(str(one.ru_utime + one.ru_stime) for one in of))
sys.exit(code)
"""


class Run(NamedTuple):
    """Seconds of all steps, processor seconds of the control process and of the others, and the mean lag."""

    steps_s: float
    control_s: float
    others_s: float
    lag: float


def run(mode: str, recipe: str, steps: int, overrides: list[str]) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        used = Path(folder, "used")
        command = [sys.executable, "-c", COMMAND, str(used), "train", recipe, f"trainer.mode={mode}"]
        settings = [f"trainer.max_steps={steps}", f"trainer.run_dir={folder}/run", "trainer.trackers=[]", *overrides]
        subprocess.run([*command, *settings], check=True, stdout=subprocess.DEVNULL)
        control_s, others_s = map(float, used.read_text().split())
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    lag = statistics.fmean(row["staleness/mean"] for row in rows)
    return Run(sum(row["time/step"] for row in rows), control_s, others_s, lag)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args()
    if options.steps <= SHORT:
        parser.error(f"--steps must be more than {SHORT}, the steps of the short run")
    head = ["round", "sync", "fully_async", "mean lag", "sync / fully_async", "step of fully_async"]
    head += ["floor", "step / floor", "floor without control", "step / that"]
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|", flush=True)
    ratios: list[tuple[float, float, float]] = []
    for number in range(1, options.rounds + 1):
        sync = run("sync", options.recipe, options.steps, options.overrides)
        ahead = run("fully_async", options.recipe, options.steps, options.overrides)
        short = run("fully_async", options.recipe, SHORT, options.overrides)
        step_s, control_s, others_s = (
            (whole - few) / (options.steps - SHORT) for whole, few in list(zip(ahead, short, strict=True))[:3]
        )
        cores = os.cpu_count() or 1
        floor_s, work_s = (control_s + others_s) / cores, others_s / cores
        ratios.append((sync.steps_s / ahead.steps_s, step_s / floor_s, step_s / work_s))
        faster, of_floor, of_work = ratios[-1]
        print(
            f"| {number} | {sync.steps_s:.1f} s | {ahead.steps_s:.1f} s | {ahead.lag:.2f} | {faster:.2f} | {step_s * 1e3:.0f} ms "
            f"| {floor_s * 1e3:.0f} ms | {of_floor:.2f} | {work_s * 1e3:.0f} ms | {of_work:.2f} |",
            flush=True,
        )
    faster, of_floor, of_work = (statistics.median(column) for column in zip(*ratios, strict=True))
    print(f"| median | | | | **{faster:.2f}** | | | **{of_floor:.2f}** | | **{of_work:.2f}** |")


if __name__ == "__main__":
    main()

"""Time of the asynchronous trainer for the same steps, compared with the synchronous one.

    python benchmarks/async_vs_sync.py [--steps 100] [--rounds 2] [key=value ...]

Both modes run the same recipe by the real command, alternately, so that a machine that gets slower hits both. The ratio compares
the time from the first to the last step. The time with the start of the processes is printed beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def run(mode: str, recipe: str, steps: int, overrides: list[str]) -> tuple[float, float, float]:
    """Train; return the seconds of all steps, the seconds of the whole command, and the mean lag."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        command = [
            sys.executable,
            "-m",
            "skyrl_train",
            "train",
            recipe,
            f"trainer.mode={mode}",
        ]
        settings = [f"trainer.max_steps={steps}", f"trainer.run_dir={folder}/run", "trainer.trackers=[]", *overrides]
        subprocess.run([*command, *settings], check=True, stdout=subprocess.DEVNULL)
        wall_s = time.perf_counter() - started
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    return sum(row["time/step"] for row in rows), wall_s, statistics.fmean(row["staleness/mean"] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args()
    ratios = []
    for number in range(1, options.rounds + 1):
        sync_s, sync_wall_s, _ = run("sync", options.recipe, options.steps, options.overrides)
        async_s, async_wall_s, lag = run("fully_async", options.recipe, options.steps, options.overrides)
        ratios.append(sync_s / async_s)
        print(
            f"round {number}: {options.steps} steps  sync {sync_s:.1f} s ({sync_wall_s:.1f} s with start-up)  "
            f"fully_async {async_s:.1f} s ({async_wall_s:.1f} s), mean lag {lag:.2f}  ratio {ratios[-1]:.2f}"
        )
    print(f"sync / fully_async: {statistics.median(ratios):.2f} (median of {options.rounds} rounds)")


if __name__ == "__main__":
    main()

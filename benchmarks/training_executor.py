"""Seconds of the asynchronous trainer with training in a child process, over those with training in a thread.

    python benchmarks/training_executor.py [--recipes quickstart guess_number] [--steps 100] [--warmup 20] [--rounds 3]

Both run by the real command, alternately, so that a machine that gets slower hits both. The first steps are left out: their
responses are the longest, and generation alone bounds them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def seconds(recipe: str, executor: str, steps: int, warmup: int) -> float:
    """Train; return the seconds of the steps after the first ``warmup``."""
    with tempfile.TemporaryDirectory() as folder:
        settings = ["trainer.mode=fully_async", f"trainer.executor={executor}", f"trainer.max_steps={steps}"]
        outputs = [f"trainer.run_dir={folder}/run", "trainer.trackers=[]", "trainer.ckpt_interval=0"]
        command = [sys.executable, "-m", "skyrl_train", "train", recipe, *settings, *outputs]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    return sum(row["time/step"] for row in rows[warmup:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=["quickstart", "guess_number"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=20, help="steps that are not counted")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print("| recipe | round | thread | process | process / thread |\n|---|---|---|---|---|", flush=True)
    for recipe in options.recipes:
        ratios = []
        for number in range(1, options.rounds + 1):
            thread_s = seconds(recipe, "thread", options.steps, options.warmup)
            process_s = seconds(recipe, "process", options.steps, options.warmup)
            ratios.append(process_s / thread_s)
            print(f"| `{recipe}` | {number} | {thread_s:.1f} s | {process_s:.1f} s | {ratios[-1]:.2f} |", flush=True)
        print(f"| `{recipe}` | median | | | **{statistics.median(ratios):.2f}** |", flush=True)


if __name__ == "__main__":
    main()

"""Rewards, time and memory of the recipes: the table in docs/benchmarks.md.

python benchmarks/learning.py [key=value ...] [--recipes quickstart] [--seeds 0 1 2]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def run(recipe: str, seed: int, overrides: list[str]) -> None:
    """Train by the real command and print one row."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        command = [sys.executable, "-m", "skyrl_train", "train", recipe]
        settings = [f"trainer.seed={seed}", f"trainer.run_dir={folder}/run", *overrides]
        process = subprocess.Popen([*command, *settings], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)  # of the trainer; ru_maxrss includes no other process
        wall_s = time.perf_counter() - started
        if status:
            raise SystemExit(f"{recipe} failed with exit code {os.waitstatus_to_exitcode(status)}")
        summary = json.loads(Path(folder, "run", "finished.json").read_text())
    print(
        f"| `{recipe}` | {seed} | {summary['steps']} | {summary['first_reward']:.3f} -> {summary['last_reward']:.3f} | "
        f"{summary['training_s']:.0f} s | {wall_s:.0f} s | {usage.ru_maxrss / 1024:.0f} MiB |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=["quickstart"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args()
    print("| recipe | seed | steps | reward | training | command, start to end | peak memory of the trainer |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for recipe in options.recipes:
        for seed in options.seeds:
            run(recipe, seed, options.overrides)


if __name__ == "__main__":
    main()

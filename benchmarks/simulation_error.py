"""Error of `skyrl-train simulate`: real runs of the embedded engine, and the same runs simulated from their records.

    python benchmarks/simulation_error.py [--steps 48]
    python benchmarks/simulation_error.py --runs FOLDER     keep the runs; those that are there are not trained again

Three regimes of the quickstart: training is the bottleneck, generation is (16 slots), and both take turns. Each run is simulated
with the speeds that its own record has, and with the ones of the first run. The figures are of the steps between the two outer
quarters of the steps that are measured.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from skyrl_train.simulation.measured import MeasuredRun, measure_run
from skyrl_train.simulation.run import Outcome, simulate

SETTINGS = ("trainer.max_events_per_s=100000", "trainer.trackers=[]", "trainer.samples_per_step=0")
REGIMES = {
    "training-bound": (),
    "generation-bound": ("generator.inference_engine.max_num_seqs=16",),
    "in turns": ("trainer.mode=sync",),
}


def train(folder: Path, settings: tuple[str, ...], steps: int) -> None:
    command = [sys.executable, "-m", "skyrl_train", "train", "quickstart", f"trainer.run_dir={folder}"]
    done = subprocess.run(
        [*command, f"trainer.max_steps={steps}", *SETTINGS, *settings], capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 3):  # 3: nothing learned, in a run of few steps
        raise SystemExit(done.stdout + done.stderr)


def simulated(run: MeasuredRun, speeds: MeasuredRun) -> Outcome:
    engine = replace(speeds.workload.engine, slots=run.workload.engine.slots)
    workload = replace(run.workload, engine=engine, training=speeds.workload.training)
    return simulate(workload, *run.settings, "rollout.replay=false", edge=run.edge)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=48, help="of each run; the second half is measured")
    parser.add_argument("--runs", type=Path, help="folder of the runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.runs or Path(temporary)
        runs = {}
        for name, settings in REGIMES.items():
            path = folder / name.replace(" ", "-")
            if not (path / "finished.json").is_file():
                train(path, settings, options.steps)
            runs[name] = measure_run(path, options.steps // 2)
    print(
        "| run | a step, real | simulated | error | with the speeds of the first run | error | lag, real | simulated "
        "| training idle, real | simulated |"
    )
    print("|---" * 10 + "|")
    first = next(iter(runs.values()))
    for name, run in runs.items():
        own, other = simulated(run, run), simulated(run, first)
        print(
            f"| {name} | {run.step_s:.3f} s | {own.step_s:.3f} s | **{own.step_s / run.step_s - 1:+.1%}** | {other.step_s:.3f} s "
            f"| {other.step_s / run.step_s - 1:+.1%} | {run.mean_lag:.2f} | {own.mean_lag:.2f} | {run.training_idle:.1%} "
            f"| {own.training_idle:.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
